"""Build the tables that a terminal shows: after runs, and for `steelyard report` without --full.

One row per run in short columns; what all rows have in common stands above the table instead of in
columns.
"""

from collections.abc import Callable
from dataclasses import replace

from steelyard import words
from steelyard.case.resolve import list_changed_keys
from steelyard.metrics import shipped_cases
from steelyard.metrics.estimates import choose_quality_metric, estimate_rate, list_device_names
from steelyard.metrics.passes import find_headline_pass
from steelyard.metrics.rates import work_unit
from steelyard.metrics.result import work_name
from steelyard.metrics.shipped_cases import list_later_fields, list_modified_parts
from steelyard.record.record import Record
from steelyard.report.columns import load_table_layout
from steelyard.report.derived_texts import DerivedTexts
from steelyard.report.document import (
    Cell,
    ColumnSpec,
    Heading,
    Lang,
    Page,
    PageElement,
    Paragraph,
    TableColumn,
    TableRow,
)
from steelyard.report.document import build_table as make_table
from steelyard.report.numbered_runs import (
    STATUS_TONE,
    format_metric,
    format_metric_with_unit,
    format_scope,
    format_status,
    group_by_case,
)
from steelyard.report.numbers import UNKNOWN, format_number
from steelyard.words import PageWords

UNEVALUATED_MARK = "*"
RecordColumns = list[ColumnSpec[Record]]


def build_summary_page(
    records: list[Record], lang: Lang = "en", points: list[str] | None = None
) -> Page:
    """Build the table that the command line prints after runs, one row per record, without title
    and footer. After a sweep `points` names each record's point, the first cell of its row.

    What all records have in common stands in a paragraph above it.
    """
    say = PageWords(lang)
    several_divisions = _has_several_divisions(records)
    case = ColumnSpec[Record](
        say("case"),
        lambda record: (
            _append_division(record, record.case.name) if several_divisions else record.case.name
        ),
    )
    result_columns = [*_result_columns(records, say), *_time_columns(records, say)]
    row_names = (say("point"), points) if points else None
    return Page(
        "",
        lang,
        tuple(
            _summary_elements(
                records, [case, *_question_columns(records, say)], result_columns, row_names, say
            )
        ),
    )


def build_brief_page(records: list[Record], lang: Lang = "en") -> Page:
    """Build the short page of `steelyard report` without --full: for each case a heading and a
    table of its runs with headline numbers, then what the interval means and how to see more. It
    has no title and footer.
    """
    say = PageWords(lang)
    device = ColumnSpec[Record](
        say("terminal.device"), lambda record: ", ".join(list_device_names(record)) or UNKNOWN
    )
    out: list[PageElement] = []
    for case, runs in group_by_case(records).items():
        members = [run.record for run in runs]
        question_columns = [device, *_question_columns(members, say, brief=True)]
        result_columns = [*_result_columns(members, say), _energy_column(members, say)]
        row_names = (say("terminal.run"), [run.label for run in runs])
        out += [
            Heading(2, " · ".join(case)),
            *_summary_elements(members, question_columns, result_columns, row_names, say),
        ]
    return Page(
        "",
        lang,
        (
            *out,
            Paragraph(say("terminal.interval"), "muted"),
            Paragraph(say("terminal.more"), "muted"),
        ),
    )


def _question_columns(records: list[Record], say: PageWords, brief: bool = False) -> RecordColumns:
    """Return the columns of what was asked: size, division, engine, plan, precision and scope (how
    much of the question was run), without those that say nothing for these records.

    Plan is shown if a run has several devices, scope if one is a window or was resumed. Where the
    records differ in division there is no column for it: the case's name carries it, or on a brief
    page the precision. A brief page has the size in its heading and always a column of plans.
    """
    with_plan = brief or any(record.plan.world > 1 for record in records)
    with_scope = any(record.scope.kind == "window" or record.restarts for record in records)
    several_divisions = _has_several_divisions(records)
    mark_division = brief and several_divisions
    columns: tuple[tuple[bool, ColumnSpec[Record]], ...] = (
        (not brief, ColumnSpec(say("size"), lambda item: item.case.size, priority=3)),
        (not several_divisions, ColumnSpec(say("division"), lambda item: item.case.division)),
        (True, ColumnSpec(say("engine"), lambda item: item.engine.name)),
        (with_plan, ColumnSpec(say("terminal.plan"), _format_plan)),
        (
            True,
            ColumnSpec(
                say("precision"),
                lambda item: (
                    _append_division(item, item.case.precision)
                    if mark_division
                    else item.case.precision
                ),
            ),
        ),
        (
            with_scope,
            ColumnSpec(say("terminal.scope"), lambda item: format_scope(item, say), priority=3),
        ),
    )
    return [column for is_shown, column in columns if is_shown]


def _has_several_divisions(records: list[Record]) -> bool:
    """Return whether the records are of more than one division."""
    return len({record.case.division for record in records}) > 1


def _append_division(record: Record, text: str) -> str:
    """Return the text, followed by the run's division unless that is closed."""
    return text if record.case.division == "closed" else f"{text} {record.case.division}"


def _result_columns(records: list[Record], say: PageWords) -> RecordColumns:
    """Return the columns of the results: status, rate of all devices, half of its interval, MFU and
    quality.

    The unit of the rate and the name of the quality are in the head if all records agree, and
    otherwise in each cell.
    """
    units = {work_unit(record) for record in records}
    unit = units.pop() if len(units) == 1 else ""
    metrics = {choose_quality_metric([record]) for record in records}
    metric = metrics.pop() if len(metrics) == 1 else ""
    title = say.get_or_fallback(metric, metric) if metric else say("terminal.quality")
    return [
        ColumnSpec(say("status"), lambda record: _status_cell(record, say)),
        ColumnSpec(
            say("terminal.rate"),
            lambda record: _format_rate(record, unit, say),
            words.translate_unit(unit, say.lang),
            right=True,
        ),
        ColumnSpec("±", _format_half_interval, right=True, priority=2, optional=True),
        ColumnSpec(
            "MFU",
            lambda record: format_metric("mfu", record.metrics.get("mfu")),
            right=True,
            optional=True,
        ),
        ColumnSpec(title, lambda record: _format_quality(record, metric), right=True),
    ]


def _time_columns(records: list[Record], say: PageWords) -> RecordColumns:
    """Return four columns: rate over wall time, rate over compute time, memory and end-to-end time,
    each number with its unit; all are optional and of lowest priority.
    """

    def make_column(metric_name: Callable[[Record], str]) -> ColumnSpec[Record]:
        """Return the column of the metric that `metric_name` names for each record; the title joins
        the different names by a slash.
        """
        title = "/".join(dict.fromkeys(map(metric_name, records)))
        return ColumnSpec(
            say.get_or_fallback(title, title),
            lambda record: format_metric_with_unit(
                metric_name(record), record.metrics.get(metric_name(record)), say.lang
            ),
            right=True,
            priority=3,
            optional=True,
        )

    rate_names = (
        (lambda record: _headline_rate_names(record)[0]),
        (lambda record: _headline_rate_names(record)[1]),
    )
    return [
        *map(make_column, rate_names),
        make_column(lambda _: "mem"),
        make_column(lambda _: "e2e_time"),
    ]


def _headline_rate_names(record: Record) -> tuple[str, str]:
    """Return the names of the two headline rate metrics of a run: over wall time and over compute
    time.

    They are those that the table layout of the kind of work has for the pass that
    `find_headline_pass` returns; the kind's usual pair (`whole`, `core`) if it has none for it, or
    no such pass ran.
    """
    table_layout = load_table_layout(record.task.kind_row)
    return table_layout.other.get(
        find_headline_pass(record) or "", (table_layout.whole, table_layout.core)
    )


def _energy_column(records: list[Record], say: PageWords) -> ColumnSpec[Record]:
    """Return the column of energy per token or per sample, whichever a record's rates count; the
    unit is the title if all records share it, else the title is `J` and each cell has its unit.
    """
    names = {"tokens": "energy_per_token", "samples": "energy_per_sample"}
    units = {
        metric.unit
        for record in records
        if (metric := record.metrics.get(names[work_name(record)])) is not None
    }
    title = units.pop() if len(units) == 1 else "J"

    def format_energy(record: Record) -> str:
        """Return a record's energy per token or sample; with its unit if the title has none."""
        name = names[work_name(record)]
        metric = record.metrics.get(name)
        return (
            format_metric(name, metric)
            if title != "J"
            else format_metric_with_unit(name, metric, say.lang)
        )

    return ColumnSpec(
        words.translate_unit(title, say.lang),
        format_energy,
        right=True,
        priority=2,
        optional=True,
    )


def _summary_elements(
    records: list[Record],
    question_columns: RecordColumns,
    result_columns: RecordColumns,
    row_names: tuple[str, list[str]] | None,
    say: PageWords,
) -> list[PageElement]:
    """Return the table of the records, and above it a paragraph with the question columns whose
    cells are equal in all rows, which the table then does not have; with one record these are all
    of them. Result columns are always in the table, but for optional ones without a value.

    `row_names` is the title and the cells of an extra first column, or None. Footnotes explain
    qualities that were not evaluated, why no run has an MFU (if all have the same reason), and
    FLOPs that do not follow from a model's shape.
    """
    shared_columns = [
        item
        for item in question_columns
        if len({item.make_cell(record) for record in records}) == 1
    ]
    labelled_titles = {say("size"), say("terminal.plan")}  # their cells need the title beside them
    titles = (f"{item.title} " if item.title in labelled_titles else "" for item in shared_columns)
    shared_texts = [
        f"{title}{item.make_cell(records[0])}"
        for title, item in zip(titles, shared_columns, strict=True)
    ]
    any_unevaluated = any(
        _format_quality(record, "any").endswith(UNEVALUATED_MARK) for record in records
    )
    notes = [say("terminal.unchecked")] if any_unevaluated else []
    without_mfu = all(
        format_metric("mfu", record.metrics.get("mfu")) == UNKNOWN for record in records
    )
    notes += _missing_mfu_note(records, say) if without_mfu else []
    notes += [
        words.render_text(item, say.lang)
        for item in shipped_cases.make_counted_flops_notes(records)
    ]
    summary_table = make_table(
        [*(item for item in question_columns if item not in shared_columns), *result_columns],
        records,
        notes,
    )
    if row_names is not None:
        named_rows = zip(row_names[1], summary_table.rows, strict=True)
        rows = [TableRow((Cell(name), *row.cells)) for name, row in named_rows]
        summary_table = replace(
            summary_table,
            columns=(TableColumn(row_names[0]), *summary_table.columns),
            rows=tuple(rows),
        )
    return [*([Paragraph(" · ".join(shared_texts))] if shared_texts else []), summary_table]


def _missing_mfu_note(records: list[Record], say: PageWords) -> list[str]:
    """Return a note in a list why no run has an MFU, if all records have the same reason; else
    empty. Texts of each record are derived again from its samples.
    """
    mfu_notes = {DerivedTexts(record, say).metric_note("mfu") for record in records}
    return (
        [say("terminal.no_mfu", note) for note in mfu_notes if note] if len(mfu_notes) == 1 else []
    )


def _format_plan(record: Record) -> str:
    """Return nodes x devices, degrees above 1, and the sharding stage of training on several
    devices if it is not 0, such as `1x8 TP2DP4 SH1`.
    """
    plan = record.plan
    sharding = record.tune.sharding if record.task.kind_row.trains and plan.world > 1 else 0
    degrees = {"TP": plan.tp, "PP": plan.pp, "DP": plan.dp}
    degrees_text = "".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return " ".join(filter(None, (plan.config, degrees_text, f"SH{sharding}" if sharding else "")))


def _status_cell(record: Record, say: PageWords) -> Cell:
    """Return status and reason codes of a run, and words for a question changed on the command
    line, a modified case, and a case of an earlier version; coloured by status.
    """
    remarks = {
        "changed": list_changed_keys(record.case.origins),
        "modified": list_modified_parts(record),
        "earlier": list_later_fields(record),
    }
    parts = [
        format_status(record, say),
        *(say(word) for word, differences in remarks.items() if differences),
    ]
    return Cell(say("comma").join(parts), tone=STATUS_TONE[record.status])


def _format_rate(record: Record, common_unit: str, say: PageWords) -> str:
    """Format the rate of all devices together, as `compare` counts it, or UNKNOWN if there is none;
    the unit is added if `common_unit` is empty, because records differ in it.
    """
    estimate = estimate_rate(record)
    if estimate is None:
        return UNKNOWN
    value = format_number("number", estimate.value)
    return value if common_unit else f"{value} {words.translate_unit(work_unit(record), say.lang)}"


def _format_half_interval(record: Record) -> str:
    """Return half the width of the rate's 95 % interval as a percentage of the rate; UNKNOWN if
    there is no interval.
    """
    estimate = estimate_rate(record)
    if estimate is None or estimate.interval is None:
        return UNKNOWN
    low, high = estimate.interval
    return format_number("percent", (high - low) / 2 / estimate.value)


def _format_quality(record: Record, common_metric: str) -> str:
    """Format the metric by which a run's quality is compared (that of `choose_quality_metric`);
    UNKNOWN if it has none. If `common_metric` is empty, the metric's name up to its first `_`
    precedes it, such as `loss`.

    A `*` at the end marks the case's quality if it was not evaluated.
    """
    name = choose_quality_metric([record])
    text = format_metric(name, record.metrics.get(name))
    if text == UNKNOWN:
        return text
    unevaluated = name == record.quality.metric and not record.quality.evaluated
    labelled = text if common_metric else f"{name.partition('_')[0]} {text}"
    return labelled + UNEVALUATED_MARK if unevaluated else labelled
