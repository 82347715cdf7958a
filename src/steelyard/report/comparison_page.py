"""Build the page of `steelyard compare`: two sides (base and new) of one question.

Input is a `Comparison` of metrics/; the page has the verdict, answers, metrics, phases, and every
other field in which the sides differ.
"""

from typing import Any, Literal

from steelyard.metrics import standing
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.record_fields import FieldDifference
from steelyard.metrics.side_comparison import Comparison, ComparisonSide, SideRate, ValueChange
from steelyard.report.document import (
    UNKNOWN_CELL,
    Cell,
    ColumnSpec,
    Heading,
    Lang,
    Page,
    PageElement,
    Paragraph,
    Table,
    Tone,
    build_table,
)
from steelyard.report.group_tables import ANSWER_COLUMNS, make_answer_cells
from steelyard.report.loads import format_load, has_load, is_latency_name
from steelyard.report.marks import format_engine, list_vouching_notes, mark_task
from steelyard.report.numbered_runs import make_estimate_cell
from steelyard.report.numbers import (
    UNKNOWN,
    format_compared_number,
    format_count,
    format_interval,
    format_number,
    format_setting,
)
from steelyard.words import PageWords

SHOWN_RECORDS = 5  # ids that are listed of each side
_OUTCOME_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no rate": "bad"}
# outcomes of a change that is significant
_SIGNIFICANT_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "changed": "plain"}


def build_comparison_page(comparison: Comparison, lang: Lang = "en") -> Page:
    """Build the page of a comparison: the verdict, a table of both sides, the runs that do not
    count, who vouches for parts that are not Steelyard's, fields of the question that differ (if
    any), answers, metrics, phases (if any), and settings that differ.

    The title names the case of the base's first finished run; the footer lists all ids. Sections
    that have nothing to show and are not left out say so in a sentence.
    """
    say = PageWords(lang)
    first_record = (comparison.base.finished or comparison.base.records)[0]
    case = first_record.case
    title = f"{say('compare')}: {case.name} · {case.size} · {case.precision} · {case.division}"
    title += f" · {format_load(first_record)}" if has_load(first_record) else ""
    title = mark_task(title, first_record, say)
    elements: list[PageElement] = [
        Heading(1, title),
        Paragraph(
            _verdict_sentence(comparison, say), _OUTCOME_TONES.get(comparison.outcome, "strong")
        ),
    ]
    elements += [_sides_table(comparison, say), *_left_out_paragraphs(comparison, say)]
    sides = (*comparison.base.records, *comparison.new.records)
    elements += [Paragraph(note) for note in list_vouching_notes(sides, say)]
    if comparison.question_differences:
        elements += [
            Heading(2, say("compare.across")),
            _fields_table(comparison.question_differences, say),
        ]
    elements += [Heading(2, say("compare.answers")), *_answers_elements(comparison, say)]
    elements += [Heading(2, say("compare.metrics")), *_metrics_elements(comparison, say)]
    if comparison.phases:
        elements += [
            Heading(2, say("compare.phases")),
            _changes_table("phase", comparison.phases, say),
        ]
        if not comparison.has_equal_steps:  # steps of different sizes cannot be compared
            sizes = (format_number("number", step_size) for step_size in comparison.tokens_per_step)
            elements.append(Paragraph(say("compare.steps", *sizes)))
    elements.append(Heading(2, say("compare.differs")))
    elements.append(
        _fields_table(comparison.setting_differences, say)
        if comparison.setting_differences
        else Paragraph(say("compare.differs.none"))
    )
    ids = ", ".join(record.id for record in (*comparison.base.records, *comparison.new.records))
    return Page(
        title, lang, (*elements, Paragraph(say("compare.note"), "muted")), say("footer", ids)
    )


def _verdict_sentence(comparison: Comparison, say: PageWords) -> str:
    """Return one sentence: the ratio of the rates (new over base) with its interval, if any, and
    whether it counts as faster or slower by the threshold, or is equal in the digits shown; or why
    there is no ratio.
    """
    if comparison.ratio is None:
        reason = (
            UNKNOWN
            if comparison.why is None
            else say(f"compare.{comparison.why.code}", *comparison.why.values)
        )
        return say("compare.no rate", reason)
    verdict = say(f"compare.{comparison.outcome}", format_number("percent", comparison.threshold))
    if rates_look_equal(comparison):
        verdict = say("compare.equal", verdict)
    change, interval = (
        format_number("number", comparison.ratio.value),
        format_interval(comparison.ratio.interval),
    )
    change = say("compare.interval", change, interval) if interval else change
    return f"{say('compare.change')} {change}: {verdict}"


def _sides_table(comparison: Comparison, say: PageWords) -> Table:
    """Return a table with a row for base and one for new: engine and plan, valid of all runs, mean
    rate with its interval, and the ids of up to SHOWN_RECORDS records.
    """

    def list_ids(side: ComparisonSide) -> str:
        """Return the first eight characters of the ids, at most SHOWN_RECORDS, and `+N` for the
        others.
        """
        ids = [record.id[:8] for record in side.records]
        more = [f"+{len(ids) - SHOWN_RECORDS}"] if len(ids) > SHOWN_RECORDS else []
        return ", ".join([*ids[:SHOWN_RECORDS], *more])

    def engine_cell(side: ComparisonSide) -> Cell:
        """Return the engine of the side's first finished run (of its first run if none finished),
        and below it the plan if there are several devices.
        """
        record = (side.finished or side.records)[0]
        plan = f"{record.plan.config} {record.plan}" if record.plan.world > 1 else ""
        return Cell(format_engine(side.finished or side.records, say), plan)

    def name_cell(key: str, side: ComparisonSide) -> Cell:
        """Return the word for base or new, and below it the side's name unless that is the file
        name of a record.
        """
        # The id of a record is in another column, so its file name is left out.
        return Cell(say(key), "" if side.name.endswith(".json") else side.name)

    columns: tuple[ColumnSpec[tuple[str, ComparisonSide, SideRate | None]], ...] = (
        ColumnSpec(say("compare.side"), lambda row: name_cell(*row[:2])),
        ColumnSpec(say("engine"), lambda row: engine_cell(row[1])),
        ColumnSpec(
            say("compare.runs"),
            lambda row: (
                f"{format_count(len(row[1].counted))} / {format_count(len(row[1].records))}"
            ),
            right=True,
        ),
        ColumnSpec(
            say("compare.rate"),
            lambda row: make_estimate_cell(None if row[2] is None else row[2].estimate),
            comparison.unit,
            right=True,
            strong=True,
        ),
        ColumnSpec(say("compare.records"), lambda row: list_ids(row[1])),
    )
    base, new = comparison.rates
    return build_table(
        columns, [("compare.base", comparison.base, base), ("compare.new", comparison.new, new)]
    )


def _left_out_paragraphs(comparison: Comparison, say: PageWords) -> list[PageElement]:
    """Return a paragraph that names the runs that are not valid (id, side, and reason codes or
    status), and one that counts the records that are on both sides, in tone `bad`; each only if
    there are any.
    """
    not_valid = [
        say(
            "compare.left_out.one",
            record.id[:8],
            side.name,
            ", ".join(standing.list_reason_codes(record)) or record.status,
        )
        for side in (comparison.base, comparison.new)
        for record in side.not_counted
    ]
    out: list[PageElement] = (
        [Paragraph(say("compare.left_out", say("comma").join(not_valid)), "bad")]
        if not_valid
        else []
    )
    shared = {record.id for record in comparison.base.records} & {
        record.id for record in comparison.new.records
    }
    return (
        [*out, Paragraph(say("compare.shared", format_count(len(shared))), "bad")]
        if shared
        else out
    )


def _answers_elements(comparison: Comparison, say: PageWords) -> list[PageElement]:
    """Return a table of how far the answers of each side are from those of the base's first run, or
    a sentence if nothing is known.

    Columns are `ANSWER_COLUMNS`: items answered otherwise, items with other likeliest tokens, the
    largest difference over items, of loss and of grad_norm over steps, and the difference of the
    quality; those without any value are left out. The row of the base shows how far its own other
    runs are from its first, and is left out if it has none.
    """
    form = metric_row(comparison.quality_metric).form
    answers_by_side = zip(("compare.base", "compare.new"), comparison.answers, strict=True)
    rows = [
        (say(key), make_answer_cells(answers, form, say))
        for key, answers in answers_by_side
        if answers is not None
    ]
    if not any(cell != UNKNOWN_CELL for _, cells in rows for cell in cells.values()):
        return [Paragraph(say("compare.answers.none"))]

    def make_column(name: str) -> ColumnSpec[tuple[str, dict[str, Cell]]]:
        """Return the column of one kind of difference (a name in ANSWER_COLUMNS)."""
        title = say(f"engines.{name}", comparison.quality_metric)
        return ColumnSpec(title, lambda row: row[1][name], right=True, optional=True)

    return [
        build_table(
            (
                ColumnSpec(say("compare.side"), lambda row: row[0]),
                *map(make_column, ANSWER_COLUMNS),
            ),
            rows,
        )
    ]


def looks_equal(change: ValueChange) -> bool:
    """Return whether the means of both sides are known and the same in the digits that the page
    shows, however many more they have.
    """
    base, new = (format_compared_number(change.form, mean) for mean in (change.base, change.new))
    return change.base is not None and change.new is not None and base == new


def rates_look_equal(comparison: Comparison) -> bool:
    """Return whether the page says that the rates of both sides are equal: they are the same in the
    digits that it shows, and the comparison has no significant ratio.
    """
    base, new = comparison.rates
    return (
        base is not None
        and new is not None
        and comparison.outcome in ("not significant", "not tested")
        and make_estimate_cell(base.estimate).text == make_estimate_cell(new.estimate).text
    )


def _metrics_elements(comparison: Comparison, say: PageWords) -> list[PageElement]:
    """Return the table of metrics whose shown means differ between the sides, or a sentence if
    there are none; then a sentence with the number of metrics whose shown means are equal, if
    there are any. A single sentence if no run of a side counts.
    """
    uncounted = [side.name for side in (comparison.base, comparison.new) if not side.counted]
    if uncounted:
        return [Paragraph(say("compare.uncounted", say("summary.and").join(uncounted)))]
    changes = tuple(change for change in comparison.metrics if not looks_equal(change))
    equal_count = comparison.equal_metric_count + len(comparison.metrics) - len(changes)
    out: list[PageElement] = (
        [_changes_table("metric", changes, say)] if changes else [Paragraph(say("compare.none"))]
    )
    return (
        [*out, Paragraph(say("compare.equal.count", format_count(equal_count)))]
        if equal_count
        else out
    )


def _changes_table(
    subject: Literal["metric", "phase"], changes: tuple[ValueChange, ...], say: PageWords
) -> Table:
    """Return a table of metrics or phases with the means of both sides, their ratio with its
    interval, and what may be said of the change. `subject` is "metric" or "phase", for the title of
    the first column.
    """

    def name_cell(change: ValueChange) -> Cell:
        """Return the name of a metric or phase as in tables, and its unit below unless it is a
        percentage.
        """
        unit = "ms" if is_in_ms(change) else change.unit
        return Cell(metric_row(change.name).heading, "" if change.form == "percent" else unit)

    def is_in_ms(change: ValueChange) -> bool:
        """Return whether both sides of a latency are below a second, and shown in ms."""
        means = [mean for mean in (change.base, change.new) if mean is not None]
        return is_latency_name(change.name, change.unit) and max(means, default=1.0) < 1.0

    def format_mean(change: ValueChange, mean: float | None) -> str:
        """Return the mean of one side."""
        factor = 1000.0 if is_in_ms(change) else 1.0
        return format_compared_number(change.form, None if mean is None else mean * factor)

    columns: tuple[ColumnSpec[ValueChange], ...] = (
        ColumnSpec(say(f"compare.{subject}"), name_cell),
        ColumnSpec(
            say("compare.base"),
            lambda change: format_mean(change, change.base),
            right=True,
        ),
        ColumnSpec(
            say("compare.new"),
            lambda change: format_mean(change, change.new),
            right=True,
        ),
        ColumnSpec(
            say("compare.change"), lambda change: make_estimate_cell(change.ratio), right=True
        ),
        ColumnSpec(say("compare.judged"), lambda change: _outcome_cell(change, say)),
    )
    return build_table(columns, changes)


def _outcome_cell(change: ValueChange, say: PageWords) -> Cell:
    """Return what may be said of a change: that it is equal in the digits shown; better, worse or
    changed, with "significant" below and coloured; not significant, or not tested. UNKNOWN if a
    side has no value.
    """
    outcome = change.outcome
    if outcome is None:
        return UNKNOWN_CELL
    if looks_equal(change):
        return Cell(say("compare.change.equal"))
    below = say("compare.significant") if outcome in _SIGNIFICANT_TONES else ""
    return Cell(say(f"compare.change.{outcome}"), below, _SIGNIFICANT_TONES.get(outcome, "plain"))


def _fields_table(fields: tuple[FieldDifference, ...], say: PageWords) -> Table:
    """Return a table of the fields that differ: name, and values on both sides, separated by ` | `
    where the runs of a side differ.
    """

    def join_values(side_values: tuple[Any, ...]) -> str:
        """Return the values of one side, joined by ` | `."""
        return " | ".join(format_setting(item, depth=1) for item in side_values)

    columns: tuple[ColumnSpec[FieldDifference], ...] = (
        ColumnSpec(say("compare.field"), lambda item: item.name),
        ColumnSpec(say("compare.base"), lambda item: join_values(item.base)),
        ColumnSpec(say("compare.new"), lambda item: join_values(item.new)),
    )
    return build_table(columns, fields)
