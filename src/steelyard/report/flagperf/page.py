"""Build Markdown pages in the form of FlagPerf's published ones, ready to be submitted there: one
per case, size and kind of accelerator.

Rows are those of valid runs; the others are named in a note. Rates count real tokens, never
padding, and the MFU is that of FlagPerf's pages: FLOPs from the nominal parameter count.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from steelyard.errors import RequestError
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.as_md import escape, line
from steelyard.report.document import Lang
from steelyard.report.flagperf.form import (
    Block,
    Column,
    Each,
    Entry,
    Lines,
    MetricList,
    PageLayout,
    Text,
    ValueTable,
)
from steelyard.report.flagperf.layouts import ALPACA, LAMBADA, MMLU, OPENWEBTEXT, RECORD
from steelyard.report.flagperf.values import ROW, device, is_made, page_values
from steelyard.report.numbers import UNKNOWN, bare, joined
from steelyard.report.runs import by_case, scope
from steelyard.words import LANGS, Words
from steelyard.words.english import MEANINGS

# By name of the task.
LAYOUTS: dict[str, PageLayout] = {
    "mmlu": MMLU,
    "lambada": LAMBADA,
    "alpaca": ALPACA,
    "openwebtext": OPENWEBTEXT,
    "superglue_record": RECORD,
}
DASHES = "-------"  # in a row that stands above others


@dataclass(frozen=True)
class CasePage:
    """A finished page. `name` is a safe file name without a suffix, `text` the Markdown."""

    name: str
    case: str
    size: str
    accelerator: str
    text: str


@dataclass(frozen=True)
class Source:
    """What a page is made from: its layout, the records of one case and accelerator, what differs
    from the shipped case, and the words of its language.
    """

    layout: PageLayout
    records: list[Record]
    changed: list[str]
    say: Words

    @property
    def valid(self) -> list[Record]:
        """Return the valid runs: the rows of the page."""
        return [record for record in self.records if record.status == "valid"]

    @property
    def described(self) -> list[Record]:
        """Return the runs that the page describes: the valid ones, or all if none is valid."""
        return self.valid or self.records

    def spoken(self, text: Text) -> str:
        """Return the English or the Chinese text, by the language of the page."""
        return text[LANGS.index(self.say.lang)]


def pages(records: list[Record], lang: Lang) -> list[CasePage]:
    """Return one page for each case, size and kind of accelerator, in the order of their first
    record; RequestError if FlagPerf has no page for a record's task.
    """
    out: list[CasePage] = []
    for case, members in by_case(records, lang).items():
        by_device: dict[str, list[Record]] = {}
        for run in members:
            by_device.setdefault(device(run.record), []).append(run.record)
        for kind, found in by_device.items():
            source = Source(_layout(found[0]), found, list(case[2:]), Words(lang))
            out.append(
                CasePage(_name((*case[:2], kind), out), case[0], case[1], kind, _page(source))
            )
    return out


def _layout(record: Record) -> PageLayout:
    """Return the layout for the task of a record; RequestError if FlagPerf has no page for it."""
    if record.task.name not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise RequestError(
            f"--layout flagperf: case {record.case.name} asks {record.task.name}; FlagPerf has"
            f" pages of {known}"
        )
    return LAYOUTS[record.task.name]


def _name(parts: tuple[str, ...], earlier: list[CasePage]) -> str:
    """Return a file name for a page that no earlier page has.

    Its parts come from untrusted records: characters other than letters, digits and `._-` become
    `_`, so that no name leads out of a folder.
    """
    name = "-".join(
        re.sub(r"[^A-Za-z0-9._-]+", "_", part)[:64].strip("._") or "_" for part in parts
    )
    taken = {page.name for page in earlier}
    return next(
        one
        for one in (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3)))
        if one not in taken
    )


def _page(source: Source) -> str:
    """Return the Markdown of a page: its parts, then the notes."""
    lines = [text for block in source.layout.blocks for text in _block(block, source)]
    return "\n".join([*lines, *_notes(source)]).rstrip("\n") + "\n"


def _block(block: Block, source: Source) -> list[str]:
    """Return the Markdown lines of a part of the layout."""
    match block:
        case Lines(en, zh):
            return _filled(source.spoken((en, zh)), source).split("\n")
        case Each(prefix, value):
            found = _values(value, source) or [UNKNOWN]
            return [prefix.format(n=number) + text for number, text in enumerate(found, 1)]
        case MetricList(heads, entries):
            return [
                *_heads([source.spoken(head) for head in heads]),
                *(_entry(entry, source) for entry in entries),
            ]
        case ValueTable():
            return _table(block, source)


def _filled(text: str, source: Source) -> str:
    """Replace each name in braces by the values of the page: several joined by `; `, none as
    UNKNOWN.
    """
    return re.sub(r"\{(\w+)\}", lambda name: "; ".join(_values(name[1], source)) or UNKNOWN, text)


def _values(name: str, source: Source) -> list[str]:
    """Return the values of a page by name, as Markdown: text from records is escaped, also for the
    start of a line.

    `address`, `dataset` and `category` come from the layout (generated data has no address and is
    named as such); any other name is one of PAGE_VALUES.
    """
    layout, say = source.layout, source.say
    made = all(is_made(record) for record in source.described)
    own: dict[str, list[str]] = {
        "address": [] if made else [source.spoken(one) for one in layout.addresses],
        "dataset": [say("flagperf.made") if made else source.spoken(layout.dataset)],
        "category": [source.spoken(layout.category)],
    }
    if name in own:
        return own[name]
    escaped = map(escape, page_values(source.described, name, say))
    # Escaped for the start of a line too.
    return [re.sub(r"^([#+\-=])", r"\\\1", text) for text in escaped]


def _heads(titles: list[str]) -> list[str]:
    """Return the two Markdown lines of a table's head."""
    return [line([escape(title) for title in titles]), line(["---"] * len(titles))]


def _entry(entry: Entry, source: Source) -> str:
    """Return the Markdown line of a row in a list of metrics: name, index and meaning; name and
    index in bold if it is strong.
    """
    cells = [source.spoken(entry.name), _filled(escape(source.spoken(entry.index)), source)]
    about = escape(_meaning(entry.about, source)) if entry.about else ""
    return line([*(f"**{cell}**" if entry.strong else cell for cell in cells), about])


def _meaning(name: str, source: Source) -> str:
    """Return what a setting or metric means, in Steelyard's words and the page's language."""
    if f"setting.{name}" in MEANINGS:
        return source.say.meaning(f"setting.{name}")[1]
    return metric_row(name, task=source.records[0].task).words(source.say.lang)[1]


def _table(table: ValueTable, source: Source) -> list[str]:
    """Return the Markdown lines of the table of values, one row per valid run."""
    out = _heads([source.spoken(column.title) for column in table.columns])
    if table.over:
        above = "; ".join(_values(table.over, source))
        out.append(line([above, *[DASHES] * (len(table.columns) - 1)]))
    for record in source.valid:
        out.append(line([escape(_cell(column, record, source)) for column in table.columns]))
    return out


def _cell(column: Column, record: Record, source: Source) -> str:
    """Return the text of a run's cell, not yet escaped: a setting, or metrics joined by slashes
    with the column's suffix.

    If the record has the metric in another unit than the column's, that unit follows instead.
    """
    if column.setting:
        return ROW[column.setting](record, source.say)
    text = joined([_number(name, column, record) for name in column.metrics])
    found = record.metrics.get(column.metrics[0])
    other = found is not None and column.unit and found.unit != column.unit
    unit = f" {found.unit}" if found is not None and other else column.after
    return text if text == UNKNOWN else text + unit


def _number(name: str, column: Column, record: Record) -> str:
    """Format a metric without thousands separators; UNKNOWN if the record lacks it, and in the
    column of a quality that was not evaluated, because that is no result to submit.
    """
    found = record.metrics.get(name)
    judged = record.quality.evaluated or record.quality.metric not in column.metrics
    return (
        bare(column.form or metric_row(name).form, found.value)
        if found is not None and judged
        else UNKNOWN
    )


def _notes(source: Source) -> list[str]:
    """Return the notes below a page as a numbered Markdown quote: on the page, on its rows, the
    runs that are not valid, and the ids of all records.
    """
    say, found = source.say, [*_of_page(source), *_of_rows(source)]
    lost = []
    for record in source.records:
        if record.status != "valid":
            codes = dict.fromkeys(reason.code for reason in record.reasons)
            lost.append(f"{record.id} ({', '.join(codes) or record.status})")
    found += [say("flagperf.left_out", say("comma").join(lost))] if lost else []
    found.append(say("footer", ", ".join(record.id for record in source.records)))
    return [
        "",
        f"> {say('flagperf.note')}{say('flagperf.colon').rstrip()}",
        *(f"> {n}. {escape(one)}" for n, one in enumerate(found, 1)),
    ]


def _of_page(source: Source) -> list[str]:
    """Return the notes on the whole page: columns that it does not explain, the data that was read,
    a size other than full, and how the question differs from the shipped case.
    """
    say, size = source.say, source.records[0].case.size
    out = [
        say("flagperf.explained", title, _meaning(name, source))
        for title, name in source.layout.explained
    ]
    out += page_values(source.described, "data_line", say) if source.layout.data_noted else []
    out += [say("flagperf.smoke", size)] if size != "full" else []
    return out + (
        [say("flagperf.changed", say("comma").join(source.changed))] if source.changed else []
    )


# Each returns a remark on a row, or an empty string.
REMARKS: tuple[Callable[[Record, Words], str], ...] = (
    lambda record, say: (
        scope(record, say) if record.scope.kind != "full" or record.restarts else ""
    ),
    lambda record, say: (
        "" if record.quality.evaluated else say("flagperf.unevaluated", record.quality.metric)
    ),
    lambda record, say: "" if record.case.division == "closed" else say("flagperf.open"),
)


def _of_rows(source: Source) -> list[str]:
    """Return each remark on rows once, with the numbers of the rows (from 1) it is about."""
    say = source.say
    rows: dict[str, list[int]] = {}
    for number, record in enumerate(source.valid, 1):
        for text in (*(remark(record, say) for remark in REMARKS), *_beside(record, source)):
            if text:
                rows.setdefault(text, []).append(number)
    return [say("flagperf.explained", _rows(of, say), text) for text, of in rows.items()]


def _rows(numbers: list[int], say: Words) -> str:
    """Name rows by their numbers, consecutive ones as a range, such as "rows 1 and 4-7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    named = say("flagperf.and").join("-".join(map(str, span)) for span in spans)
    return say("flagperf.row" if len(numbers) == 1 else "flagperf.rows", named)


def _beside(record: Record, source: Source) -> list[str]:
    """Return a text for each of the layout's `noted_metrics` that the run has: name, number, unit
    and meaning.
    """
    out = []
    for name in source.layout.beside:
        found = record.metrics.get(name)
        text = UNKNOWN if found is None else bare(metric_row(name).form, found.value)
        if found is not None and text != UNKNOWN:
            out.append(
                source.say("flagperf.beside", name, text, found.unit, _meaning(name, source))
            )
    return out
