"""Build the tables that a terminal shows: after runs, and for `steelyard report` without --full.

One row per run, or after `steelyard report` per group of repeats, in short columns; what all rows
have in common stands above the table instead of in columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from steelyard import words
from steelyard.case.resolve import list_changed_keys
from steelyard.metrics import shipped_cases, standing, stats
from steelyard.metrics.estimates import (
    Estimate,
    choose_quality_metric,
    estimate_rate,
    list_device_names,
)
from steelyard.metrics.passes import find_headline_pass, select_windows
from steelyard.metrics.rates import work_unit
from steelyard.metrics.result import work_name
from steelyard.metrics.shipped_cases import list_later_fields, list_modified_parts
from steelyard.record.record import Record, Value
from steelyard.report.case_tables import (
    format_shared_field,
    merge_repeats,
)
from steelyard.report.columns import TableField, load_table_layout
from steelyard.report.derived_texts import DerivedTexts
from steelyard.report.document import (
    Cell,
    ColumnSpec,
    Heading,
    Lang,
    Page,
    PageElement,
    Paragraph,
    Priority,
    TableColumn,
    TableRow,
)
from steelyard.report.document import build_table as make_table
from steelyard.report.loads import has_load, is_load_key
from steelyard.report.marks import format_engine, list_vouching_notes, mark_task, name_devices
from steelyard.report.numbered_runs import (
    STATUS_TONE,
    average_metric,
    find_status_tone,
    format_metric,
    format_metric_with_unit,
    format_reason_codes,
    format_scope,
    format_status,
    format_unevaluated,
    group_by_case,
    select_averaged,
)
from steelyard.report.numbers import UNKNOWN, format_count, format_number
from steelyard.report.unknown_times import list_unknown_time_notes
from steelyard.words import PageWords

UNEVALUATED_MARK = "*"


@dataclass(frozen=True)
class SummaryRow:
    """A row of a table for the terminal: one run, or repeats of it (`records`). Properties:
    `first_record`, which says what was asked; `averaged`, the records that means are over, and
    `rate`, their mean with its interval, of all devices together (None if unknown).
    `get_mean(name)` returns the mean of a metric.
    """

    records: tuple[Record, ...]

    @property
    def first_record(self) -> Record:
        """Return the first record of this row, which stands for all in what was asked."""
        return self.records[0]

    @property
    def averaged(self) -> Sequence[Record]:
        """Return the records of this row whose values are averaged (`select_averaged`)."""
        return select_averaged(self.records)

    @property
    def rate(self) -> Estimate | None:
        """Return the mean rate of this row's runs, work of all devices per second of wall time,
        with its interval: of several runs that prove it from the spread between them. None if it is
        unknown.
        """
        return standing.average_shown(self.averaged, estimate_rate)

    def get_mean(self, name: str) -> Value | None:
        """Return the mean of a metric over this row's runs; None if none has it."""
        return average_metric(self.averaged, name)


RowColumns = list[ColumnSpec[SummaryRow]]


def build_summary_page(
    records: list[Record], lang: Lang = "en", points: list[str] | None = None
) -> Page:
    """Build the table that the command line prints after runs, one row per record, without title
    and footer. After a sweep `points` names each record's point, the first cell of its row.

    What all records have in common stands in a paragraph above it. Runs under a load have other
    columns than the rest: of a mixture there are two tables.
    """
    say = PageWords(lang)
    names = points or [""] * len(records)
    groups = stats.group_by(
        zip(records, names, strict=True), lambda item: item[0].task.kind_row.has_load
    )
    elements = [
        element
        for items in groups.values()
        for element in _build_runs_table(
            [record for record, _ in items], [name for _, name in items] if points else None, say
        )
    ]
    return Page("", lang, tuple(elements))


def _build_runs_table(
    records: list[Record], points: list[str] | None, say: PageWords
) -> list[PageElement]:
    """Return the table of runs, one row per record, below what they have in common; `points` are
    the first cells of the rows, None without a sweep.
    """
    several_divisions = _has_several_divisions(records)
    case = _make_question_column(
        say("case"),
        lambda record: (
            _append_division(record, record.case.name) if several_divisions else record.case.name
        ),
    )
    result_columns = [
        *(_status_column(say), *_result_columns(records, say)),
        *_time_columns(records, say),
    ]
    return _summary_elements(
        [SummaryRow((record,)) for record in records],
        [case, *_question_columns(records, say)],
        result_columns,
        (say("point"), points) if points else None,
        say,
    )


def build_brief_page(records: list[Record], lang: Lang = "en") -> Page:
    """Build the short page of `steelyard report` without --full: for each case a heading and a
    table of its runs with headline numbers, repeats as one row of means, then what the interval
    means and how to see more. It has no title and footer.
    """
    say = PageWords(lang)
    device = _make_question_column(
        say("terminal.device"),
        lambda record: name_devices(record, ", ".join(list_device_names(record)) or UNKNOWN, say),
    )
    out: list[PageElement] = []
    any_repeats = False
    for case, runs in group_by_case(records).items():
        members, groups = [run.record for run in runs], merge_repeats(runs)
        with_repeats = len(groups) < len(runs)
        any_repeats |= with_repeats
        question_columns = [device, *_question_columns(members, say, brief=True)]
        result_columns = [
            *([_run_count_column(say)] if with_repeats else []),
            *(_status_column(say), *_result_columns(members, say), _energy_column(members, say)),
        ]
        row_names = (say("terminal.run"), [group.labels for group in groups])
        rows = [SummaryRow(group.row.records) for group in groups]
        out += [
            Heading(2, mark_task(" · ".join(case), members[0], say)),
            *_summary_elements(rows, question_columns, result_columns, row_names, say),
        ]
    # requests have no steps to profile
    has_loads = all(record.task.kind_row.has_load for record in records)
    notes = [say("terminal.interval"), *([say("terminal.repeats")] if any_repeats else [])]
    return Page(
        "",
        lang,
        (
            *out,
            Paragraph(say("gap").join(notes), "muted"),
            Paragraph(say("terminal.more.loads" if has_loads else "terminal.more"), "muted"),
        ),
    )


def _make_question_column(
    title: str,
    format_cell: Callable[[Record], Cell | str],
    priority: Priority = 1,
    second_title: str = "",
) -> ColumnSpec[SummaryRow]:
    """Return a column of what was asked, which the first record of a row tells."""
    return ColumnSpec(
        title, lambda row: format_cell(row.first_record), second_title, priority=priority
    )


def _status_column(say: PageWords) -> ColumnSpec[SummaryRow]:
    """Return the column of status and reason codes."""
    return ColumnSpec(say("status"), lambda row: _status_cell(row, say))


def _run_count_column(say: PageWords) -> ColumnSpec[SummaryRow]:
    """Return the column of the number of runs in each row; the rows' names show it too."""
    return ColumnSpec(
        say("repeats.runs"),
        lambda row: format_count(len(row.records)),
        right=True,
        priority=2,
    )


def _question_columns(records: list[Record], say: PageWords, brief: bool = False) -> RowColumns:
    """Return the columns of what was asked: size, division, engine, plan, precision, settings that
    the kinds of work share (the load of generation) and scope (how much of the question was run),
    without those that say nothing for these records.

    Plan is shown if a run has several devices, scope if one is a window or was resumed. Where the
    records differ in division there is no column for it: the case's name carries it, or on a brief
    page the precision. A brief page has the size in its heading, always a column of plans, and
    scopes that differ below the precision, where they fit into any width.
    """
    with_plan = brief or any(record.plan.world > 1 for record in records)
    with_scope = any(record.scope.kind == "window" or record.restarts for record in records)
    several_divisions = _has_several_divisions(records)
    mark_division = brief and several_divisions
    scope_below = brief and len({format_scope(record, say) for record in records}) > 1

    def precision_cell(record: Record) -> Cell | str:
        """Return a run's precision, with what stands behind and below it on a brief page."""
        text = record.case.precision
        text = _append_division(record, text) if mark_division else text
        return Cell(text, format_scope(record, say, brief=True)) if scope_below else text

    columns: tuple[tuple[bool, ColumnSpec[SummaryRow]], ...] = (
        (not brief, _make_question_column(say("size"), lambda item: item.case.size, 3)),
        (
            not several_divisions,
            _make_question_column(say("division"), lambda item: item.case.division),
        ),
        (True, ColumnSpec(say("engine"), lambda row: format_engine(row.records, say))),
        (with_plan, _make_question_column(say("terminal.plan"), _format_plan)),
        (
            True,
            _make_question_column(
                say("precision"),
                precision_cell,
                second_title=say("terminal.scope") if scope_below else "",
            ),
        ),
        *((True, column) for column in _shared_columns(records, False, say)),
        (
            with_scope and not scope_below,
            _make_question_column(say("terminal.scope"), lambda item: format_scope(item, say), 3),
        ),
    )
    return [column for is_shown, column in columns if is_shown]


def _shared_columns(records: list[Record], of_metrics: bool, say: PageWords) -> RowColumns:
    """Return the columns that the kinds of work of these records share with the comparison table
    (`TableLayout.shared`): settings, such as the load of generation, or (`of_metrics`) results,
    such as its times. UNKNOWN in rows of a kind of work that has no such column.
    """
    layouts = [load_table_layout(record.task.kind_row) for record in records]
    fields = dict.fromkeys(field for layout in layouts for field in layout.shared)

    def make_column(field: TableField) -> ColumnSpec[SummaryRow]:
        """Return the column of one shared field."""

        def format_cell(row: SummaryRow) -> str:
            """Return the cell of a row; UNKNOWN if its kind of work does not share the field."""
            layout = load_table_layout(row.first_record.task.kind_row)
            return format_shared_field(field, row.averaged) if field in layout.shared else UNKNOWN

        is_of_all = all(field in layout.shared for layout in layouts)
        own_priority: Priority = 2 if field.times else 1
        return ColumnSpec(
            say(f"{field.title}.short") if field.title else field.name,
            format_cell,
            say("column.percentiles") if field.times else "",
            right=bool(field.metrics),
            priority=own_priority if is_of_all else 3,
            optional=field.times,
        )

    return [make_column(field) for field in fields if bool(field.metrics) == of_metrics]


def _has_several_divisions(records: list[Record]) -> bool:
    """Return whether the records are of more than one division."""
    return len({record.case.division for record in records}) > 1


def _append_division(record: Record, text: str) -> str:
    """Return the text, followed by the run's division unless that is closed."""
    return text if record.case.division == "closed" else f"{text} {record.case.division}"


def _result_columns(records: list[Record], say: PageWords) -> RowColumns:
    """Return the columns of the results: rate of all devices, half of its interval, what the kinds
    of work share (the times of generation), MFU and quality.

    The unit of the rate and the name of the quality are in the head if all records agree, and
    otherwise in each cell.
    """
    units = {work_unit(record) for record in records}
    unit = units.pop() if len(units) == 1 else ""
    metrics = {choose_quality_metric([record]) for record in records}
    metric = metrics.pop() if len(metrics) == 1 else ""
    title = say.get_or_fallback(metric, metric) if metric else say("terminal.quality")
    return [
        ColumnSpec(
            say("terminal.rate"),
            lambda row: _format_rate(row, unit, say),
            words.translate_unit(unit, say.lang),
            right=True,
        ),
        ColumnSpec("±", _format_half_interval, right=True, priority=2, optional=True),
        *_shared_columns(records, True, say),
        ColumnSpec(
            "MFU",
            lambda row: format_metric("mfu", row.get_mean("mfu")),
            right=True,
            optional=True,
        ),
        ColumnSpec(title, lambda row: _format_quality(row, metric), right=True),
    ]


def _time_columns(records: list[Record], say: PageWords) -> RowColumns:
    """Return four columns: rate over wall time, rate over compute time, memory and end-to-end time,
    each number with its unit; all are optional and of lowest priority. The columns of rates leave
    out kinds of work with a single rate, which has a column already.
    """

    def make_column(metric_name: Callable[[Record], str]) -> ColumnSpec[SummaryRow]:
        """Return the column of the metric that `metric_name` names for each record; the title joins
        the different names by a slash. An empty name has no metric.
        """
        title = "/".join(dict.fromkeys(filter(None, map(metric_name, records))))
        return ColumnSpec(
            say.get_or_fallback(title, title),
            lambda row: format_metric_with_unit(
                metric_name(row.first_record),
                row.get_mean(metric_name(row.first_record)),
                say.lang,
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
    no such pass ran. Both are empty for a kind of work with a single rate.
    """
    table_layout = load_table_layout(record.task.kind_row)
    if len(table_layout.rates) == 1:
        return "", ""
    return table_layout.other.get(
        find_headline_pass(record) or "", (table_layout.whole, table_layout.core)
    )


def _energy_column(records: list[Record], say: PageWords) -> ColumnSpec[SummaryRow]:
    """Return the column of energy per token or per sample, whichever a record's rates count, or the
    metric that its kind of work's layout names; the unit is the title if all records share it, else
    the title is `J` and each cell has its unit.
    """

    def name_metric(record: Record) -> str:
        """Return the name of a record's metric of energy."""
        own = load_table_layout(record.task.kind_row).energy
        return (
            own or {"tokens": "energy_per_token", "samples": "energy_per_sample"}[work_name(record)]
        )

    units = {
        metric.unit
        for record in records
        if (metric := record.metrics.get(name_metric(record))) is not None
    }
    title = units.pop() if len(units) == 1 else "J"

    def format_energy(row: SummaryRow) -> str:
        """Return a row's energy per token or sample; with its unit if the title has none."""
        name = name_metric(row.first_record)
        metric = row.get_mean(name)
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
    rows: list[SummaryRow],
    question_columns: RowColumns,
    result_columns: RowColumns,
    row_names: tuple[str, list[str]] | None,
    say: PageWords,
) -> list[PageElement]:
    """Return the table of the rows, and above it a paragraph with the question columns whose cells
    are equal in all rows, which the table then does not have; with one row these are all of them.
    Result columns are always in the table, but for optional ones without a value.

    `row_names` is the title and the cells of an extra first column, or None. Footnotes explain
    qualities that were not evaluated, what size smoke leaves open, why no run has an MFU (if all
    have the same reason), FLOPs that do not follow from a model's shape, and who vouches for parts
    that are not Steelyard's.
    """
    shared_columns = [
        item for item in question_columns if len({item.make_cell(row) for row in rows}) == 1
    ]
    labelled_titles = {say("size"), say("terminal.plan")}  # their cells need the title beside them
    titles = (f"{item.title} " if item.title in labelled_titles else "" for item in shared_columns)
    shared_texts = [
        f"{title}{item.make_cell(rows[0])}"
        for title, item in zip(titles, shared_columns, strict=True)
    ]
    records = [record for row in rows for record in row.records]
    notes = [*_unevaluated_notes(rows, say), *_smoke_notes(rows, say)]
    without_mfu = all(format_metric("mfu", row.get_mean("mfu")) == UNKNOWN for row in rows)
    notes += _missing_mfu_note(records, say) if without_mfu else []
    notes += list_unknown_time_notes(records, say)
    notes += [
        words.render_text(item, say.lang)
        for item in shipped_cases.make_counted_flops_notes(records)
    ]
    notes += list_vouching_notes(records, say)
    summary_table = make_table(
        [*(item for item in question_columns if item not in shared_columns), *result_columns],
        rows,
        notes,
    )
    if row_names is not None:
        named_rows = zip(row_names[1], summary_table.rows, strict=True)
        summary_table = replace(
            summary_table,
            columns=(TableColumn(row_names[0]), *summary_table.columns),
            rows=tuple(TableRow((Cell(name), *row.cells)) for name, row in named_rows),
        )
    return [*([Paragraph(" · ".join(shared_texts))] if shared_texts else []), summary_table]


def _unevaluated_notes(rows: list[SummaryRow], say: PageWords) -> list[str]:
    """Return what the mark at qualities that were not evaluated means, in a list; empty if no row
    has it. If no case of these rows has a gate and their kinds of work check answers in passes of
    their own, it is whether such a pass ran in every run, next to that there is no gate.
    """
    marked = [row for row in rows if _format_quality(row, "any").endswith(UNEVALUATED_MARK)]
    if not marked:
        return []
    records = [record for row in marked for record in row.averaged]
    if any(format_unevaluated(record, say) != say("no_gate") for record in records):
        return [say("terminal.unchecked")]
    are_compared = all(
        any(select_windows(record, name) for name in record.task.kind_row.check_passes)
        for record in records
    )
    return [say("terminal.compared" if are_compared else "terminal.not_compared")]


def _smoke_notes(rows: list[SummaryRow], say: PageWords) -> list[str]:
    """Return, in a list, that the intervals of size smoke are not judged, if all rows generate
    under a load in that size, and one has an interval; else empty.
    """
    are_smoke = all(
        has_load(record) and record.case.size == "smoke" for row in rows for record in row.records
    )
    any_interval = any(_format_half_interval(row) != UNKNOWN for row in rows)
    return [say("terminal.smoke")] if are_smoke and any_interval else []


def _missing_mfu_note(records: list[Record], say: PageWords) -> list[str]:
    """Return a note in a list why no run has an MFU, if all records have the same reason; else
    empty, also if a kind of work among them has none. Texts of each record are derived again from
    its samples.
    """
    if not all(load_table_layout(record.task.kind_row).has_mfu for record in records):
        return []
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


def _status_cell(row: SummaryRow, say: PageWords) -> Cell:
    """Return status and reason codes of a run, and words for a question changed on the command
    line, a modified case, and a case of an earlier version; coloured by status.

    Of repeats it is the status that they have together, and below it how many of them count, if not
    all or none do, and the reason codes of the others.
    """
    record = row.first_record
    remarks = {
        "changed": [key for key in list_changed_keys(record.case.origins) if not is_load_key(key)],
        "modified": list_modified_parts(record),
        "earlier": list_later_fields(record),
    }
    words_below = [say(word) for word, differences in remarks.items() if differences]
    if len(row.records) == 1:
        status_text = say("comma").join([format_status(record, say), *words_below])
        return Cell(status_text, tone=find_status_tone(record))
    status, proven = standing.find_group_status(row.records), standing.select_proven(row.records)
    others = [item for item in row.records if not any(item is one for one in proven)]
    counts = format_count(len(proven)), format_count(len(row.records))
    below = [
        say("side.partly", *counts) if proven and others else "",
        format_reason_codes(others, say),
    ]
    return Cell(
        say("comma").join([say(status), *words_below]),
        say("comma").join(filter(None, below)),
        STATUS_TONE[status],
    )


def _format_rate(row: SummaryRow, common_unit: str, say: PageWords) -> str:
    """Format the rate of all devices together, as `compare` counts it, or UNKNOWN if there is none;
    the unit is added if `common_unit` is empty, because rows differ in it.
    """
    estimate = row.rate
    if estimate is None:
        return UNKNOWN
    value = format_number("number", estimate.value)
    unit = words.translate_unit(work_unit(row.first_record), say.lang)
    return value if common_unit else f"{value} {unit}"


def _format_half_interval(row: SummaryRow) -> str:
    """Return half the width of the rate's 95 % interval as a percentage of the rate; UNKNOWN if
    there is no interval.
    """
    estimate = row.rate
    if estimate is None or estimate.interval is None:
        return UNKNOWN
    low, high = estimate.interval
    return format_number("percent", (high - low) / 2 / estimate.value)


def _format_quality(row: SummaryRow, common_metric: str) -> str:
    """Format the metric by which a row's quality is compared (that of `choose_quality_metric`);
    UNKNOWN if it has none. If `common_metric` is empty, the metric's name up to its first `_`
    precedes it, such as `loss`.

    A `*` at the end marks a quality that was not evaluated in every run.
    """
    name = choose_quality_metric(row.averaged)
    text = format_metric(name, row.get_mean(name))
    if text == UNKNOWN:
        return text
    unevaluated = not all(record.quality.evaluated for record in row.averaged)
    labelled = text if common_metric else f"{name.partition('_')[0]} {text}"
    return labelled + UNEVALUATED_MARK if unevaluated else labelled
