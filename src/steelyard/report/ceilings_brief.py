"""Build the short page of `steelyard spec`: what a machine can do, on one screen.

It has a sentence to quote (matmul, memory, links), the best rate of each precision, memory
operation, copy and collective, and how many benchmarks have no number, with the reasons.
ceilings_page.py makes the page with every row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from steelyard import words
from steelyard.errors import names_exception
from steelyard.metrics import ceiling_rates
from steelyard.plan.ceiling_shapes import CeilingGroup
from steelyard.record.ceilings_record import BenchLimits, BenchTimings, SpecRecord
from steelyard.report import derived_texts
from steelyard.report.ceilings_page import (
    SHOWN_UNITS,
    CeilingLine,
    find_packages,
    format_devices,
    merge_ranks,
)
from steelyard.report.document import (
    UNKNOWN_CELL,
    Cell,
    ColumnSpec,
    Lang,
    Page,
    PageElement,
    Paragraph,
    build_table,
)
from steelyard.report.marks import append_package
from steelyard.report.numbers import UNKNOWN, format_count, format_number
from steelyard.report.plain_text import shorten_to_width
from steelyard.words import Message, PageWords

BRIEF_LINES = 29  # `steelyard spec` adds one with the status and path of the record
MAX_REASONS = 6  # that are named; the others are counted together
NAME_WIDTH = 40  # terminal columns of a name of devices or benchmarks
VARIANT_WIDTH = 30  # of the fastest shape or size
REASON_WIDTH = 70  # of a reason
QUOTE_WIDTH = 60  # of the sentence in it that a plug-in or an older record gives
FAILURE_WIDTH = 120  # of the sentence that a failed record quotes

# From the name of a benchmark to (what its row is called beside its group, which size or variant
# it is). Groups that are not here are on the page with every row only.
SPLIT_NAMES: Mapping[CeilingGroup, Callable[[BenchTimings], tuple[str, str]]] = {
    "matmul": lambda bench: (bench.precision or "", bench.name),
    "memory": lambda bench: (bench.name, ""),
    "copy": lambda bench: _split_at(bench.name, ", "),
    "collective": lambda bench: _split_at(bench.name, " "),
    "capacity": lambda bench: ("", ""),
}
# parts of the sentence to quote, and the groups whose best rate each states
LEAD_PARTS: Mapping[str, tuple[CeilingGroup, ...]] = {
    "spec.brief.lead.matmul": ("matmul",),
    "spec.brief.lead.memory": ("memory",),
    "spec.brief.lead.links": ("copy", "collective"),
}
# reasons that are counted under a shorter name
SHORT_REASONS: Mapping[str, str] = {
    "ceiling.slow": "spec.brief.slow",
    "ceiling.slow_rows": "spec.brief.slow",
    "ceiling.no_time": "spec.brief.no_time",
    "ceiling.one_device": "spec.brief.one_device",
    "ceiling.wrong": "spec.brief.wrong",
    "ceiling.not_finite": "spec.brief.wrong",
    "ceiling.wrong_elsewhere": "spec.brief.wrong",
}


@dataclass(frozen=True)
class _BestRow:
    """The best benchmark of one kind, a row of the short page: `label` tells it from the others of
    its group (the precision of matmuls), `variant` is the shape, size or kind that was fastest.
    `line` has its number.
    """

    label: str
    variant: str
    line: CeilingLine

    @property
    def group(self) -> CeilingGroup:
        """Return the group of the benchmark, such as matmul."""
        return self.line.bench.group

    @property
    def value(self) -> float:
        """Return the rate or size of the slowest rank, in the benchmark's unit."""
        return self.line.ceiling.value or 0.0

    @property
    def is_unsteady(self) -> bool:
        """Return whether this is a rate whose last stretches did not agree."""
        return self.line.ceiling.steady is False


@dataclass(frozen=True)
class _Summary:
    """A spec record in short, made by `_summarize`: `rows`, the best ones, matmul first; `reasons`
    of the benchmarks without a number, with how many have each; and `benches`, how many there are.
    """

    record: SpecRecord
    rows: tuple[_BestRow, ...]
    reasons: Counter[str]
    benches: int


def yield_brief_pages(records: list[SpecRecord], lang: Lang) -> Iterator[Page]:
    """Yield the short page of spec records (at least one) again and again, each time with one row
    less in its table, from `BRIEF_LINES` rows to one: the caller takes the first that fits.

    One record is shown by its best rates, several by one row each, of which the last are kept.
    """
    say = PageWords(lang)
    summaries = [_summarize(record, say) for record in records]
    for max_rows in range(BRIEF_LINES, 0, -1):
        elements = (
            _record_elements(summaries[0], max_rows, say)
            if len(summaries) == 1
            else _records_elements(summaries, max_rows, say)
        )
        yield Page("", lang, tuple(elements))


def _summarize(record: SpecRecord, say: PageWords) -> _Summary:
    """Return a spec record in short: for each label of each group the best benchmark that has a
    number on every rank, and the reasons of those that have none.
    """
    lines = merge_ranks(record)
    lines_by_label: dict[tuple[CeilingGroup, str], list[CeilingLine]] = {}
    reasons: Counter[str] = Counter()
    for line in lines:
        if line.ceiling.value is None:
            reasons[_format_reason(line.bench, record.limits, say)] += 1
        elif line.bench.group in SPLIT_NAMES:
            label, _ = SPLIT_NAMES[line.bench.group](line.bench)
            lines_by_label.setdefault((line.bench.group, label), []).append(line)
    rows = [
        _make_row(_choose_best(lines_by_label[group, label], record.limits))
        for shown_group in SPLIT_NAMES
        for group, label in lines_by_label
        if group == shown_group
    ]
    return _Summary(record, tuple(rows), reasons, len(lines))


def _make_row(line: CeilingLine) -> _BestRow:
    """Return the row of a line of one of the groups in SPLIT_NAMES, with its name split."""
    return _BestRow(*SPLIT_NAMES[line.bench.group](line.bench), line)


def _split_at(name: str, separator: str) -> tuple[str, str]:
    """Return what stands before and after the first separator in a name; the name and nothing if it
    has none.
    """
    before, _, after = name.partition(separator)
    return before, after


def _choose_best(lines: list[CeilingLine], limits: BenchLimits) -> CeilingLine:
    """Return the line with the highest number; but a steady one, if the highest is not steady and a
    steady one is within the share `limits.within` of it.
    """
    best = max(lines, key=_get_value)
    near = [
        line
        for line in lines
        if line.ceiling.steady is not False
        and _get_value(line) * (1 + limits.within) >= _get_value(best)
    ]
    return max(near, key=_get_value, default=best)


def _get_value(line: CeilingLine) -> float:
    """Return the number of a line, 0 if it has none."""
    return line.ceiling.value or 0.0


def _format_reason(bench: BenchTimings, limits: BenchLimits, say: PageWords) -> str:
    """Return why a benchmark has no number, in few words."""
    message = ceiling_rates.make_ceiling_note(bench, limits)
    if message is None:
        return UNKNOWN
    if message.code in SHORT_REASONS:
        return say(SHORT_REASONS[message.code])
    values = {
        name: shorten_to_width(value, QUOTE_WIDTH) if isinstance(value, str) else value
        for name, value in message.values.items()
    }
    reason = words.render_text(Message(message.code, values), say.lang)
    return shorten_to_width(reason, REASON_WIDTH)


def _record_elements(summary: _Summary, max_rows: int, say: PageWords) -> Iterator[PageElement]:
    """Yield the elements of the short page of one record: why it failed, if it did, the sentence to
    quote, the table of best rates with at most `max_rows` rows, and what has no number. A record
    without any number has no table.
    """
    yield from _failure_elements(summary.record, say)
    yield Paragraph(_format_lead(summary, say), "lead")
    footnotes = _footnotes([summary], max(0, len(summary.rows) - max_rows), say)
    if summary.rows:
        yield build_table(_best_columns(summary, say), summary.rows[:max_rows], footnotes)
    else:
        yield from (Paragraph(note) for note in footnotes)


def _failure_elements(record: SpecRecord, say: PageWords) -> Iterator[PageElement]:
    """Yield a paragraph that says why the record failed, if it did: the sentence for its first
    reason, and the stored text unless that is an exception's.
    """
    for reason in record.reasons[:1]:
        failure = derived_texts.describe_failure(reason, say)
        quoted = shorten_to_width(failure.quoted or "", FAILURE_WIDTH)
        parts = [reason.code, failure.text]
        if quoted and not names_exception(failure.quoted or ""):
            parts.append(say("quoted", quoted))
        yield Paragraph(say("colon").join(parts), "bad")


def _format_lead(summary: _Summary, say: PageWords) -> str:
    """Return the sentence to quote: devices, then the highest matmul rate with its precision, the
    highest memory bandwidth and the fastest link, each with its share of the datasheet if known. Of
    several devices it says that the rates are those of the slowest.
    """
    parts = []
    for code, groups in LEAD_PARTS.items():
        rows = [row for row in summary.rows if row.group in groups]
        if rows:
            best = max(rows, key=lambda row: row.value)
            text = say(code, _format_rate(best, say), shorten_to_width(best.label, NAME_WIDTH))
            remarks = _list_remarks(best, find_packages(summary.record)[1], say)
            parts.append(say("spec.of", text, say("comma").join(remarks)) if remarks else text)
    devices = _format_machine(summary.record, say)
    if summary.record.devices > 1:
        devices = say("spec.brief.slowest", devices)
    return say("spec.brief.lead", devices, say("comma").join(parts) or say("ceiling.nothing"))


def _list_remarks(row: _BestRow, peak_package: str | None, say: PageWords) -> list[str]:
    """Return what is said of a rate in parentheses: its share of the datasheet, if known, whose
    peak that is if it is not Steelyard's (`peak_package`), and that it was not steady.
    """
    share = row.line.ceiling.share
    shown_share = say("spec.brief.share", format_number("percent", share))
    shown_share = append_package(shown_share, peak_package, say)
    return [
        *([] if share is None else [shown_share]),
        *([say("spec.brief.unsteady")] if row.is_unsteady else []),
    ]


def _format_machine(record: SpecRecord, say: PageWords) -> str:
    """Return the devices of a record with their number, such as `8 × NVIDIA H200`, and hosts if
    there are several; that the accelerator is another package's, and that the record is a quick
    one.
    """
    name = shorten_to_width(format_devices(record), NAME_WIDTH)
    hosts = {rank.host for rank in record.ranks}
    count = format_count(record.devices)
    text = say("spec.brief.devices", count, name) if record.devices > 1 else name
    if len(hosts) > 1:
        text = say("spec.brief.hosts", text, format_count(len(hosts)))
    text = append_package(text, find_packages(record)[0], say)
    return say("spec.brief.quick", text) if record.quick else text


def _format_rate(row: _BestRow, say: PageWords) -> str:
    """Return the number of a row with its unit."""
    return f"{_format_value(row, row.value)} {_format_unit(row, say)}"


def _format_value(row: _BestRow, value: float | None) -> str:
    """Return a number of a row in the unit that is shown; UNKNOWN for None."""
    return format_number("number", value, SHOWN_UNITS[row.line.bench.unit][0])


def _format_unit(row: _BestRow, say: PageWords) -> str:
    """Return the unit of a row as it is shown, such as TFLOP/s, in the language of the page."""
    return words.translate_unit(SHOWN_UNITS[row.line.bench.unit][1], say.lang)


def _best_columns(summary: _Summary, say: PageWords) -> tuple[ColumnSpec[_BestRow], ...]:
    """Return the columns of the table of best rates: what, number, unit, share of the datasheet
    (left out if none is known), which shape or size was the fastest; and the fastest device's
    number, if there are several.
    """

    def format_name(row: _BestRow) -> str:
        """Return the name of a row, made of its group and its label."""
        return shorten_to_width(say(f"spec.brief.{row.group}", row.label), NAME_WIDTH)

    def format_variant(row: _BestRow) -> str:
        """Return the fastest shape or size of a row, and that its rate was not steady."""
        variant = shorten_to_width(row.variant, VARIANT_WIDTH)
        unsteady = say("spec.brief.unsteady") if row.is_unsteady else ""
        return say("semicolon").join(filter(None, (variant, unsteady)))

    several = any(row.line.ranks > 1 for row in summary.rows)
    number_title = say("spec.brief.slowest_device" if several else "spec.brief.best")
    fastest_column = ColumnSpec[_BestRow](
        say("spec.fastest"), lambda row: _format_value(row, row.line.fastest), right=True
    )
    return (
        ColumnSpec(say("spec.name"), format_name),
        ColumnSpec(number_title, lambda row: _format_value(row, row.value), right=True),
        *([fastest_column] if several else []),
        ColumnSpec(say("spec.brief.unit"), lambda row: _format_unit(row, say)),
        ColumnSpec(
            say("spec.share"),
            lambda row: format_number("percent", row.line.ceiling.share),
            right=True,
            optional=True,
        ),
        ColumnSpec(say("spec.brief.with"), format_variant, priority=2),
    )


def _footnotes(summaries: list[_Summary], rows_left_out: int, say: PageWords) -> list[str]:
    """Return the lines below the table of the short page: how many rows it leaves out, if any, and
    how many benchmarks have no number, with the most frequent reasons.
    """
    reasons: Counter[str] = Counter()
    for summary in summaries:
        reasons.update(summary.reasons)
    notes = [say("spec.brief.left_out", format_count(rows_left_out))] if rows_left_out else []
    if not reasons:
        return notes
    named = [
        say("spec.brief.reason", reason, format_count(count))
        for reason, count in reasons.most_common(MAX_REASONS)
    ]
    others = reasons.total() - sum(count for _, count in reasons.most_common(MAX_REASONS))
    named += [say("spec.brief.other", format_count(others))] if others else []
    absent, all_benches = reasons.total(), sum(summary.benches for summary in summaries)
    counts = (format_count(absent), format_count(all_benches))
    return [*notes, say("spec.brief.absent", *counts, say("comma").join(named))]


def _records_elements(
    summaries: list[_Summary], max_rows: int, say: PageWords
) -> Iterator[PageElement]:
    """Yield the elements of the short page of several records: a table with a row for each of the
    last `max_rows` records, and what has no number in all of them.
    """

    def make_cell(summary: _Summary, groups: tuple[CeilingGroup, ...]) -> Cell:
        """Return the highest number of these groups with its unit, and its label below; UNKNOWN if
        there is none.
        """
        rows = [row for row in summary.rows if row.group in groups]
        if not rows:
            return UNKNOWN_CELL
        best = max(rows, key=lambda row: row.value)
        return Cell(_format_rate(best, say), shorten_to_width(best.label, NAME_WIDTH))

    def group_column(code: str, groups: tuple[CeilingGroup, ...]) -> ColumnSpec[_Summary]:
        """Return the column of the highest number of these groups."""
        return ColumnSpec(say(f"{code}.title"), lambda summary: make_cell(summary, groups))

    columns: tuple[ColumnSpec[_Summary], ...] = (
        ColumnSpec(
            say("hardware.accelerator"), lambda summary: _format_machine(summary.record, say)
        ),
        ColumnSpec(
            say("spec.created"),
            lambda summary: summary.record.created[:16].replace("T", " "),
            priority=2,
        ),
        ColumnSpec(say("status"), lambda summary: say(summary.record.status)),
        *(group_column(code, groups) for code, groups in LEAD_PARTS.items()),
    )
    footnotes = _footnotes(summaries, max(0, len(summaries) - max_rows), say)
    yield build_table(columns, summaries[-max_rows:], footnotes)
