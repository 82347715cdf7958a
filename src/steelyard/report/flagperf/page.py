"""Build Markdown pages in the form of FlagPerf's published ones, ready to be submitted there: one
per case, size and kind of accelerator.

Rows are those of valid runs; the others are named in a note. Rates count real tokens, never
padding, and the MFU is that of FlagPerf's pages: FLOPs from the nominal parameter count.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from steelyard.errors import RequestError
from steelyard.metrics import standing
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.record.record import Record
from steelyard.report.as_md import escape_markdown, format_table_line
from steelyard.report.document import Lang
from steelyard.report.flagperf.form import (
    FormLines,
    FormPart,
    LinePerValue,
    MetricList,
    MetricListEntry,
    PageLayout,
    TextPair,
    ValueColumn,
    ValueTable,
)
from steelyard.report.flagperf.layouts import ALPACA, LAMBADA, MMLU, OPENWEBTEXT, RECORD
from steelyard.report.flagperf.values import (
    ROW_SETTINGS,
    format_device_kinds,
    has_generated_data,
    list_page_values,
)
from steelyard.report.marks import list_vouching_notes
from steelyard.report.numbered_runs import format_scope, group_by_case
from steelyard.report.numbers import UNKNOWN, format_without_separators, join_by_slash
from steelyard.words import LANGS, PageWords
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
    """A finished page of one case, size and accelerator, made by `build_flagperf_pages`: `name` is
    a safe file name without a suffix, unique among the pages made together, `text` the whole
    Markdown, `accelerator` the kinds of device. The command line writes or prints it.
    """

    name: str
    case: str
    size: str
    accelerator: str
    text: str


@dataclass(frozen=True)
class PageSource:
    """What a page is made from: its `layout`, the `records` of one case and accelerator, `changed`
    (texts on what differs from the shipped case; empty if nothing), and `say`, the words of its
    language.

    Properties `right_records` (valid or unproven: the rows of its table) and `described_records`
    (these, or all if there are none); `translate(pair)` returns the text of the page's language.
    """

    layout: PageLayout
    records: list[Record]
    changed: list[str]
    say: PageWords

    @property
    def right_records(self) -> list[Record]:
        """Return the valid and unproven runs of the page: its rows in the table of values."""
        return [record for record in self.records if standing.is_answer_right(record)]

    @property
    def described_records(self) -> list[Record]:
        """Return the runs that the page describes: those in its table, or all if there are none."""
        return self.right_records or self.records

    def translate(self, text: TextPair) -> str:
        """Return the text of a pair (English, Chinese) that is in the language of the page."""
        return text[LANGS.index(self.say.lang)]


def build_flagperf_pages(records: list[Record], lang: Lang) -> list[CasePage]:
    """Return one page for each case (name, size, and what differs from the shipped case) and kind
    of accelerator, in the order of their first record. File names are unique within the list.

    Raises RequestError if FlagPerf has no page for a record's task. A page is made even if no run
    is valid; its table then has no rows.
    """
    out: list[CasePage] = []
    for case, members in group_by_case(records, lang).items():
        by_device: dict[str, list[Record]] = {}
        for run in members:
            by_device.setdefault(format_device_kinds(run.record), []).append(run.record)
        for kind, device_records in by_device.items():
            source = PageSource(
                _find_layout(device_records[0]), device_records, list(case[2:]), PageWords(lang)
            )
            out.append(
                CasePage(
                    _unique_file_name((*case[:2], kind), out),
                    case[0],
                    case[1],
                    kind,
                    _render_page(source),
                )
            )
    return out


def _find_layout(record: Record) -> PageLayout:
    """Return the layout for the task of a record; RequestError if FlagPerf has no page for it."""
    if record.task.name not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise RequestError(
            f"--layout flagperf: case {record.case.name} is of task {record.task.name}, for which"
            f" FlagPerf has no page; tasks with a page: {known}"
        )
    return LAYOUTS[record.task.name]


def _unique_file_name(parts: tuple[str, ...], earlier: list[CasePage]) -> str:
    """Return a file name without a suffix for a page: its parts joined by `-`, and `-2`, `-3`, … if
    an earlier page has that name.

    Parts come from untrusted records: characters other than ASCII letters, digits and `._-` become
    `_`, and a part has at most 64 characters and no `.` or `_` at its ends, so that no name leads
    out of a folder.
    """
    name = "-".join(
        re.sub(r"[^A-Za-z0-9._-]+", "_", part)[:64].strip("._") or "_" for part in parts
    )
    taken = {page.name for page in earlier}
    return next(
        candidate
        for candidate in (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3)))
        if candidate not in taken
    )


def _render_page(source: PageSource) -> str:
    """Return the Markdown of a page: its parts, then the notes, with one newline at the end."""
    lines = [text for part in source.layout.parts for text in _render_part(part, source)]
    return "\n".join([*lines, *_render_notes(source)]).rstrip("\n") + "\n"


def _render_part(part: FormPart, source: PageSource) -> list[str]:
    """Return the Markdown lines of a part of the layout, in the language of the page: fixed lines
    with their names filled in, one line per value (one with UNKNOWN if there is none), a list of
    metrics, or the table of values.
    """
    match part:
        case FormLines(en, zh):
            return _fill_names(source.translate((en, zh)), source).split("\n")
        case LinePerValue(prefix, value):
            values = _markdown_values(value, source) or [UNKNOWN]
            return [prefix.format(n=number) + text for number, text in enumerate(values, 1)]
        case MetricList(heads, entries):
            return [
                *_render_heads([source.translate(head) for head in heads]),
                *(_render_entry(entry, source) for entry in entries),
            ]
        case ValueTable():
            return _render_value_table(part, source)


def _fill_names(text: str, source: PageSource) -> str:
    """Return the text with each name in braces replaced by the escaped values of the page: several
    joined by `; `, none as UNKNOWN. Raises KeyError for a name that is not known.
    """
    return re.sub(
        r"\{(\w+)\}", lambda match: "; ".join(_markdown_values(match[1], source)) or UNKNOWN, text
    )


def _markdown_values(name: str, source: PageSource) -> list[str]:
    """Return the values of a page by name, as Markdown: text from records is escaped, also for the
    start of a line. Raises KeyError for a name that is not known.

    `address`, `dataset` and `category` come from the layout (generated data has no address and is
    named as such); any other name is one of PAGE_VALUES, read from the valid runs, or from all if
    none is valid.
    """
    layout, say = source.layout, source.say
    generated = all(has_generated_data(record) for record in source.described_records)
    layout_values: dict[str, list[str]] = {
        "address": [] if generated else [source.translate(address) for address in layout.addresses],
        "dataset": [say("flagperf.made") if generated else source.translate(layout.dataset)],
        "category": [source.translate(layout.category)],
    }
    if name in layout_values:
        return layout_values[name]
    escaped = map(escape_markdown, list_page_values(source.described_records, name, say))
    # Escaped for the start of a line too.
    return [re.sub(r"^([#+\-=])", r"\\\1", text) for text in escaped]


def _render_heads(titles: list[str]) -> list[str]:
    """Return the two Markdown lines of a table's head."""
    return [
        format_table_line([escape_markdown(title) for title in titles]),
        format_table_line(["---"] * len(titles)),
    ]


def _render_entry(entry: MetricListEntry, source: PageSource) -> str:
    """Return the Markdown line of a row in a list of metrics: name, index with its {names} filled
    in, and meaning (empty without `meaning_of`); name and index are bold if the entry is strong.
    """
    cells = [
        source.translate(entry.name),
        _fill_names(escape_markdown(source.translate(entry.index)), source),
    ]
    about = escape_markdown(_find_meaning(entry.meaning_of, source)) if entry.meaning_of else ""
    return format_table_line([*(f"**{cell}**" if entry.strong else cell for cell in cells), about])


def _find_meaning(name: str, source: PageSource) -> str:
    """Return what a setting or metric means, in Steelyard's words and the page's language; a
    setting is preferred to a metric of that name. Empty for a metric without a text.
    """
    if f"setting.{name}" in MEANINGS:
        return source.say.get_meaning(f"setting.{name}")[1]
    return metric_row(name, task=source.records[0].task).meaning(source.say.lang)[1]


def _render_value_table(table: ValueTable, source: PageSource) -> list[str]:
    """Return the Markdown lines of the table of values: head, a line with the page value
    `header_value` if the table has one, and one row per valid run.
    """
    out = _render_heads([source.translate(column.title) for column in table.columns])
    if table.header_value:
        header = "; ".join(_markdown_values(table.header_value, source))
        out.append(format_table_line([header, *[DASHES] * (len(table.columns) - 1)]))
    for record in source.right_records:
        out.append(
            format_table_line(
                [escape_markdown(_format_cell(column, record, source)) for column in table.columns]
            )
        )
    return out


def _format_cell(column: ValueColumn, record: Record, source: PageSource) -> str:
    """Return the text of a run's cell, not yet escaped: a setting, or metrics joined by slashes
    with the column's suffix; UNKNOWN alone if none is known.

    If the record has the first metric in another unit than the column's, that unit follows instead
    of the suffix.
    """
    if column.setting:
        return ROW_SETTINGS[column.setting](record, source.say)
    text = join_by_slash([_format_metric(name, column, record) for name in column.metrics])
    first_metric = record.metrics.get(column.metrics[0])
    other_unit = first_metric is not None and column.unit and first_metric.unit != column.unit
    unit = f" {first_metric.unit}" if first_metric is not None and other_unit else column.suffix
    return text if text == UNKNOWN else text + unit


def _format_metric(name: str, column: ValueColumn, record: Record) -> str:
    """Format a metric of a run without thousands separators and unit; UNKNOWN if the record lacks
    it, and in the column of a quality that was not evaluated, because that is no result to submit.
    """
    metric = record.metrics.get(name)
    is_result = record.quality.evaluated or record.quality.metric not in column.metrics
    return (
        format_without_separators(column.form or metric_row(name).form, metric.value)
        if metric is not None and is_result
        else UNKNOWN
    )


def _render_notes(source: PageSource) -> list[str]:
    """Return the notes below a page as the lines of a numbered Markdown quote: on the page, on its
    rows, the runs that are not valid with their reason codes (if any), and the ids of all records.
    """
    say, notes = source.say, [*_page_notes(source), *_row_notes(source)]
    not_valid = []
    for record in source.records:
        if not standing.is_answer_right(record):
            codes = dict.fromkeys(reason.code for reason in record.reasons)
            not_valid.append(f"{record.id} ({', '.join(codes) or record.status})")
    notes += [say("flagperf.left_out", say("comma").join(not_valid))] if not_valid else []
    notes.append(say("footer", ", ".join(record.id for record in source.records)))
    return [
        "",
        f"> {say('flagperf.note')}{say('flagperf.colon').rstrip()}",
        *(f"> {n}. {escape_markdown(note)}" for n, note in enumerate(notes, 1)),
    ]


def _page_notes(source: PageSource) -> list[str]:
    """Return the notes on the whole page: the layout's `explained_columns`, the data that was read
    (with `note_data`), a size other than full, who vouches for parts that are not Steelyard's, and
    how the question differs from the shipped case; each only where it applies.
    """
    say, size = source.say, source.records[0].case.size
    out = [
        say("flagperf.explained", title, _find_meaning(name, source))
        for title, name in source.layout.explained_columns
    ]
    out += (
        list_page_values(source.described_records, "data_line", say)
        if source.layout.note_data
        else []
    )
    out += [say("flagperf.smoke", size)] if size != "full" else []
    out += list_vouching_notes(source.described_records, say)
    return out + (
        [say("flagperf.changed", say("comma").join(source.changed))] if source.changed else []
    )


# Each returns a remark on a row, or an empty string.
ROW_REMARKS: tuple[Callable[[Record, PageWords], str], ...] = (
    lambda record, say: (
        format_scope(record, say) if record.scope.kind != "full" or record.restarts else ""
    ),
    lambda record, say: (
        "" if record.quality.evaluated else say("flagperf.unevaluated", record.quality.metric)
    ),
    lambda record, say: "" if record.case.division == "closed" else say("flagperf.open"),
    lambda record, say: (
        say("flagperf.unproven") if standing.find_status(record) == "unproven" else ""
    ),
)


def _row_notes(source: PageSource) -> list[str]:
    """Return each remark on rows (scope, quality not evaluated, division open, noted metrics) once,
    preceded by the numbers of the rows (from 1) that it is about.
    """
    say = source.say
    rows: dict[str, list[int]] = {}
    for number, record in enumerate(source.right_records, 1):
        for text in (
            *(remark(record, say) for remark in ROW_REMARKS),
            *_noted_metric_texts(record, source),
        ):
            if text:
                rows.setdefault(text, []).append(number)
    return [
        say("flagperf.explained", _name_rows(numbers, say), text) for text, numbers in rows.items()
    ]


def _name_rows(numbers: list[int], say: PageWords) -> str:
    """Return the words that name rows by their ascending numbers, consecutive ones as a range, such
    as "rows 1 and 4-7".
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    ranges = say("flagperf.and").join("-".join(map(str, span)) for span in spans)
    return say("flagperf.row" if len(numbers) == 1 else "flagperf.rows", ranges)


def _noted_metric_texts(record: Record, source: PageSource) -> list[str]:
    """Return a text for each of the layout's `noted_metrics` that the run has a value of: name,
    number, unit and meaning.
    """
    out = []
    for name in source.layout.noted_metrics:
        metric = record.metrics.get(name)
        text = (
            UNKNOWN
            if metric is None
            else format_without_separators(metric_row(name).form, metric.value)
        )
        if metric is not None and text != UNKNOWN:
            out.append(
                source.say("flagperf.beside", name, text, metric.unit, _find_meaning(name, source))
            )
    return out
