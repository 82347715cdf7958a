"""Build the tables of a case: groups of repeated runs compared, all their values, and MFU by
convention.

Published rows stand below the measured ones. The report page calls these functions for each case.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from steelyard import words
from steelyard.metrics import overview, rates, shipped_cases, standing
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.overview import OverviewRow
from steelyard.metrics.passes import count_devices
from steelyard.record.record import Record
from steelyard.report.columns import TableField, TableLayout, load_table_layout
from steelyard.report.document import Cell, ColumnSpec, Link, Table, Tone, build_table
from steelyard.report.loads import format_load, make_load_sort_key
from steelyard.report.marks import format_engine, format_peak_mark, list_vouching_notes
from steelyard.report.numbered_runs import (
    STATUS_TONE,
    NumberedRun,
    average_metric,
    format_accelerator,
    format_changed_settings,
    format_metric,
    format_parallel_plan,
    format_reason_codes,
    format_run_numbers,
    format_scope,
    format_stage_memory,
    format_tuned_settings,
    format_unevaluated,
    format_unit,
    make_estimate_cell,
    select_averaged,
)
from steelyard.report.numbers import (
    UNKNOWN,
    finite_or_none,
    format_count,
    format_number,
    format_setting,
    format_times,
    join_by_slash,
)
from steelyard.report.published_rows import PublishedRow, find_published_rows, make_size_note
from steelyard.report.unknown_times import list_unknown_time_notes
from steelyard.words import PageWords


@dataclass(frozen=True)
class ComparedRuns:
    """A group of repeated runs (the same question, engine, plan and settings; perhaps one run
    alone): a row of the comparison table, made by `group_compared_runs`.

    `row` (`OverviewRow`) has the means over the runs that prove its rate, or over others if none
    does; `runs` are all its runs with their numbers. `format_name(say)` returns accelerator and
    number of devices, `format_title(say)` the numbers of its runs with what they have in common,
    `format_run_count(say)` their number as text. Properties: `unit` of the rate, `averaged` (the
    records that its means are over), `labels` (the numbers of its runs), `is_evaluated` (the
    quality of every run was evaluated, and is the one shown).
    """

    row: OverviewRow
    runs: tuple[NumberedRun, ...]

    def format_name(self, say: PageWords) -> str:
        """Return the accelerator and the number of devices of this group of repeats, such as
        `NVIDIA H200 × 8`.
        """
        return format_accelerator(self.row.first_record, say)

    @property
    def unit(self) -> str:
        """Return the unit of the group's rate, such as tokens/s."""
        return rates.work_unit(self.row.first_record)

    @property
    def averaged(self) -> Sequence[Record]:
        """Return the records whose values the group's means are taken over (`select_averaged`)."""
        return select_averaged(self.row.records)

    @property
    def labels(self) -> str:
        """Return the numbers of the group's runs, such as `#1, #2` or `#1–#5`."""
        return format_run_numbers(self.runs)

    def format_title(self, say: PageWords) -> str:
        """Return the title of the group's first run with the numbers of all its runs."""
        first = self.runs[0]
        title = first.format_title(say, self.row.records)
        return f"{self.labels}{title.removeprefix(first.label)}"

    def format_run_count(self, say: PageWords) -> str:
        """Return how many runs the group has, such as "3 runs", or "1 of 3 valid" if some but not
        all count; empty for a single run.
        """
        total, counted = len(self.row.records), len(self.row.counted)
        if 0 < counted < total:
            return say("side.partly", format_count(counted), format_count(total))
        return say("count.runs", format_count(total)) if total > 1 else ""

    @property
    def is_evaluated(self) -> bool:
        """Return whether the quality of every run of the group was evaluated, and the quality shown
        is the one that its case gates.
        """
        row = self.row
        return (
            all(record.quality.evaluated for record in row.records)
            and row.quality_metric == row.first_record.quality.metric
        )


def group_compared_runs(runs: list[NumberedRun]) -> list[ComparedRuns]:
    """Group the runs of a case by repeats (a run without repeats is a group too) and sort the
    groups: division closed before open, by load, by status (valid, unproven, invalid, failed), the
    whole question before windows of it, the highest rate per device first.

    Loads are different questions, so no rate is ranked against that of another. A group's status is
    that of its runs as one result; an unknown rate counts as 0.
    """
    overview_rows = overview.make_overview_rows(run.record for run in runs)
    groups = [
        ComparedRuns(
            row, tuple(run for run in runs if any(run.record is record for record in row.records))
        )
        for row in overview_rows
    ]

    def sort_key(
        group: ComparedRuns,
    ) -> tuple[bool, str, tuple[int, float, str], int, bool, float]:
        """Return the sort key of a group: whether it is not closed, division, load, position of
        its status, whether it is a window, and its negative rate per device (0 if unknown).
        """
        division, rate = group.row.first_record.case.division, group.row.rate
        return (
            division != "closed",
            division,
            make_load_sort_key(group.row.first_record),
            standing.STATUS_ORDER.index(group.row.status),
            not group.row.is_whole,
            -(rate.value if rate else 0.0),
        )

    return sorted(groups, key=sort_key)


def merge_repeats(runs: list[NumberedRun]) -> list[ComparedRuns]:
    """Group the runs of a case by repeats as `group_compared_runs` does, in the order of the first
    run of each group.
    """
    return sorted(group_compared_runs(runs), key=lambda group: group.runs[0].number)


def _choose_by_row(
    measured_cell: Callable[[ComparedRuns], Cell | str],
    published_cell: Callable[[PublishedRow], Cell | str],
) -> Callable[[ComparedRuns | PublishedRow], Cell | str]:
    """Return a function of a table row that calls `measured_cell` for a group of runs and
    `published_cell` for a published row.
    """
    return lambda row: measured_cell(row) if isinstance(row, ComparedRuns) else published_cell(row)


def build_comparison_table(runs: list[NumberedRun], say: PageWords) -> Table:
    """Build the comparison table of a case's runs (at least one): a row per group of repeated runs,
    in the order of `group_compared_runs`, then the published rows.

    Columns: accelerator (pinned), engine and plan, precision and division, settings and scope (how
    much of the question was run), rate per device, MFU and what else the kind of work's layout
    shares with shorter tables, quality, memory in GiB, energy in J per token, status. The head of
    the rate has the most common unit; a cell with another unit names it. The head of the quality
    names the first group's metric. Footnotes explain the table and its published rows, and say who
    vouches for parts of runs that are not Steelyard's.
    """
    groups, references = group_compared_runs(runs), find_published_rows(runs)
    common_unit = Counter(group.unit for group in groups).most_common(1)[0][0]
    any_evaluated, metric = (
        any(group.is_evaluated for group in groups),
        groups[0].row.quality_metric,
    )
    formulas = max(group.row.first_record.formulas or 1 for group in groups)
    in_samples = runs[0].record.task.rates_in_samples
    layout = load_table_layout(runs[0].record.task.kind_row)
    unevaluated_note = "" if any_evaluated else format_unevaluated(runs[0].record, say)
    columns: tuple[ColumnSpec[ComparedRuns | PublishedRow], ...] = (
        ColumnSpec(
            say("side.accelerator"),
            _choose_by_row(
                lambda group: _accelerator_cell(group, say),
                lambda row: _published_name_cell(row, say),
            ),
        ),
        ColumnSpec(
            say("side.engine"),
            _choose_by_row(
                lambda group: Cell(
                    format_engine(group.row.records, say),
                    format_parallel_plan(group.row.first_record),
                ),
                lambda row: row.configuration[2],
            ),
            say("side.plan"),
        ),
        ColumnSpec(
            say("side.precision"),
            _choose_by_row(
                lambda group: Cell(
                    group.row.first_record.case.precision, group.row.first_record.case.division
                ),
                lambda row: row.precision_cell(say),
            ),
            say("side.division"),
            priority=2,
        ),
        ColumnSpec(
            say("side.tune"),
            _choose_by_row(lambda group: _settings_cell(group, say), lambda row: ""),
            say("side.scope"),
            priority=3,
        ),
        *_layout_columns(layout, False, say),
        ColumnSpec(
            say("side.rate"),
            _choose_by_row(
                lambda group: _rate_cell(group, common_unit, say),
                lambda row: _published_rate_cell(row, in_samples, common_unit, say),
            ),
            words.translate_unit(common_unit, say.lang),
            right=True,
            strong=True,
        ),
        *_layout_columns(layout, True, say),
        ColumnSpec(
            metric_row(metric).heading,
            _choose_by_row(
                lambda group: _quality_cell(group, metric, any_evaluated, say),
                lambda row: row.format_metric(metric),
            ),
            unevaluated_note,
            right=True,
            priority=2,
        ),
        ColumnSpec(
            say("side.mem"),
            _choose_by_row(
                lambda group: format_number("gib", group.row.mem),
                lambda row: row.format_metric("mem"),
            ),
            "GiB",
            right=True,
            priority=2,
        ),
        _energy_column(layout, say),
        ColumnSpec(
            say("side.status"),
            _choose_by_row(lambda group: _status_cell(group, formulas, say), lambda row: ""),
        ),
    )
    notes = [say("side.note"), *make_size_note(runs, references, say)]
    notes += list_unknown_time_notes([run.record for run in runs], say)
    notes += list_vouching_notes([run.record for run in runs], say)
    if references:
        plural_note = say("side.published", str(len(references)))
        notes.insert(1, say("side.published.one") if len(references) == 1 else plural_note)
    comparison = build_table(columns, groups, notes, last_rows=references, last_kind="published")
    return replace(comparison, pinned=True)


def _layout_columns(
    layout: TableLayout, of_metrics: bool, say: PageWords
) -> list[ColumnSpec[ComparedRuns | PublishedRow]]:
    """Return the columns of the comparison table that depend on the kind of work: settings that its
    layout shares (`TableLayout.shared`), such as the load of generation, or (`of_metrics`) MFU if
    it has one, and shared metrics, such as times.
    """
    mfu = ColumnSpec[ComparedRuns | PublishedRow](
        say("side.mfu"),
        _choose_by_row(
            lambda group: Cell(
                make_estimate_cell(group.row.mfu, "percent").text,
                format_peak_mark(group.row.first_record, say),
            ),
            lambda row: _published_mfu_cell(row, say),
        ),
        right=True,
    )

    def shared_column(field: TableField) -> ColumnSpec[ComparedRuns | PublishedRow]:
        """Return the column of a shared field; published rows have nothing in it."""
        return ColumnSpec(
            say(f"{field.title}.short") if field.title else metric_row(field.name).heading,
            _choose_by_row(
                lambda group: format_shared_field(field, group.averaged),
                lambda row: UNKNOWN,
            ),
            say("column.percentiles") if field.times else "",
            right=bool(field.metrics),
            priority=2 if field.times else 1,
        )

    chosen = [field for field in layout.shared if bool(field.metrics) == of_metrics]
    return [*([mfu] if layout.has_mfu and of_metrics else []), *map(shared_column, chosen)]


def format_shared_field(field: TableField, records: Sequence[Record]) -> str:
    """Return a field of some repeats as short tables show it: a setting of the first, or the means
    of its metrics, joined by slashes; times with their unit. UNKNOWN for a kind of work that has
    no such metric.
    """
    if not field.metrics:
        return _SETTING_TEXTS[field.name](records[0])
    means = [average_metric(records, name) for name in field.metrics]
    if field.times:
        return format_times([None if mean is None else mean.value for mean in means])
    return join_by_slash([format_metric(*pair) for pair in zip(field.metrics, means, strict=True)])


def _energy_column(layout: TableLayout, say: PageWords) -> ColumnSpec[ComparedRuns | PublishedRow]:
    """Return the column of energy, in J per token, or by the metric that the layout names."""
    name = layout.energy

    def measured_cell(group: ComparedRuns) -> str:
        """Return the energy of a group of repeats without its interval."""
        if name is None:
            return make_estimate_cell(group.row.energy).text
        return format_metric(name, average_metric(group.averaged, name))

    unit = metric_row(name).base_unit if name else ""
    return ColumnSpec(
        say("side.energy"),
        _choose_by_row(measured_cell, lambda row: row.format_metric(name or "energy_per_token")),
        words.translate_unit(unit or "J/token", say.lang),
        right=True,
        priority=2,
    )


def _accelerator_cell(group: ComparedRuns, say: PageWords) -> Cell:
    """Return the cell with a group's accelerator and number of devices, and below the labels of its
    runs, which HTML links to their parts of the page.
    """
    links = tuple(Link(run.label, run.anchor) for run in group.runs)
    return Cell(group.format_name(say), ", ".join(run.label for run in group.runs), links=links)


def _settings_cell(group: ComparedRuns, say: PageWords) -> Cell:
    """Return the cell with the settings of a group that are not the case's own
    (`format_tuned_settings`), or a muted word for "default", and below it the scope (how much of
    the question was run); both are those of its first record.
    """
    text, scope_text = (
        format_tuned_settings(group.row.first_record),
        format_scope(group.row.first_record, say),
    )
    return Cell(text, scope_text) if text else Cell(say("side.default"), scope_text, "muted")


def _status_cell(group: ComparedRuns, latest: int, say: PageWords) -> Cell:
    """Return the cell with the status of the group's runs as one result, coloured, and below it how
    many runs count if some but not all do, the reason codes of those that do not, and the version
    of its formulas if older than `latest`.
    """
    row, formulas = group.row, group.row.first_record.formulas or 1
    counted = format_count(len(row.counted))
    partly_counted = say("side.partly", counted, format_count(len(row.records)))
    by_repeats = say("side.by_repeats", counted)
    is_proven_by_repeats = row.is_proven and any(
        not standing.is_valid(record) for record in row.counted
    )
    older_formulas = say("side.formulas", str(formulas)) if formulas < latest else ""
    remarks = (
        by_repeats if is_proven_by_repeats else "",
        partly_counted if row.is_proven and len(row.counted) < len(row.records) else "",
        format_reason_codes(standing.select_not_proven(row.records), say),
        older_formulas,
    )
    return Cell(say(row.status), say("comma").join(filter(None, remarks)), STATUS_TONE[row.status])


def _rate_cell(group: ComparedRuns, common_unit: str, say: PageWords) -> Cell:
    """Return the group's rate per device with its interval below, strong, or muted if it is not
    proven; UNKNOWN if there is none. The unit is added if it is not `common_unit`.
    """
    cell = make_estimate_cell(group.row.rate, tone="strong" if group.row.is_proven else "muted")
    if cell.text == UNKNOWN or group.unit == common_unit:
        return cell
    return replace(cell, text=f"{cell.text} {words.translate_unit(group.unit, say.lang)}")


def _quality_cell(
    group: ComparedRuns, common_metric: str, any_evaluated: bool, say: PageWords
) -> Cell:
    """Return the quality of a group, UNKNOWN if it has none, after the metric's name if that is not
    `common_metric`; where other groups are evaluated (`any_evaluated`) and this one is not, the
    second line says so.
    """
    row = group.row
    value = row.first_record.metrics.get(row.quality_metric)
    metric = metric_row(row.quality_metric, "" if value is None else value.unit)
    text = format_number(metric.form, row.quality)
    unevaluated = any_evaluated and text != UNKNOWN and not group.is_evaluated
    if text != UNKNOWN and row.quality_metric != common_metric:
        text = f"{metric.heading} {text}"
    return Cell(text, format_unevaluated(row.first_record, say) if unevaluated else "")


def _published_name_cell(row: PublishedRow, say: PageWords) -> Cell:
    """Return the accelerator of a published row with the number of devices, and below it the number
    of its footnote.
    """
    name, count, _ = row.configuration
    return Cell(name if count is None else f"{name} × {count}", say("published", str(row.number)))


def _published_rate_cell(
    row: PublishedRow, in_samples: bool, common_unit: str, say: PageWords
) -> Cell:
    """Return the published rate per device; if a row has only the one that counts padding too,
    that, and a remark below; UNKNOWN if it has neither.

    `in_samples` says that the task's whole-run rates count samples. A unit other than `common_unit`
    is written below.
    """
    rate = row.device_rate(in_samples)
    if rate is not None:
        return Cell(format_number("number", rate[0]), "" if rate[1] == common_unit else rate[1])
    padded = "tokens_per_device_s_padded"
    remark = say(f"instead.{padded}") if padded in row.values else ""
    return Cell(row.format_metric(padded), remark)


def _published_mfu_cell(row: PublishedRow, say: PageWords) -> Cell:
    """Return the first published MFU that is known, of `mfu`, then the nominal, PaLM, padded and
    one-sequence conventions, with its convention below if it is not `mfu`; UNKNOWN if there is
    none.
    """
    for name in ("mfu", "mfu_nominal", "mfu_palm", "mfu_padded", "mfu_one_sequence"):
        if finite_or_none(row.values.get(name)) is not None:
            return Cell(
                format_number("percent", row.values[name]),
                say.get_or_fallback(f"instead.{name}", ""),
            )
    return Cell(UNKNOWN)


_SETTING_TEXTS: dict[str, Callable[[Record], str]] = {
    "precision": lambda record: record.case.precision,
    "division": lambda record: record.case.division,
    "config": lambda record: record.plan.config,
    "parallel": format_parallel_plan,
    "load": format_load,
    "fix_hp": format_changed_settings,
    "mem_stages": format_stage_memory,
}


def _present_fields(runs: list[NumberedRun], references: list[PublishedRow]) -> list[TableField]:
    """Return, in order, the columns that the first run's kind of work lays out; an optional one
    only where a run or a published row has a known value for it.

    An optional `division` is shown if a run is not closed, `config`, `parallel` and `mem_stages` if
    a run has several devices.
    """
    measured = {
        name
        for run in runs
        for name, value in run.record.metrics.items()
        if value.value is not None
    }
    present = measured | {name for row in references for name in row.values}
    if any(run.record.case.division != "closed" for run in runs):
        present.add("division")
    if any(count_devices(run.record) > 1 for run in runs):
        present |= {"config", "parallel", "mem_stages"}
    fields = load_table_layout(runs[0].record.task.kind_row).fields
    return [
        field
        for field in fields
        if not field.optional or present & {field.name, *field.metrics, *field.instead}
    ]


def build_values_table(runs: list[NumberedRun], say: PageWords) -> Table:
    """Build the table of all values: one row per run, or of repeats with the means of their valid
    runs, in order of their first run, then the published rows; columns are those of
    `_present_fields`.

    Footnotes explain the stars (headline columns), each published row, that published rows are of
    size full if the runs are not, and models whose FLOPs do not follow from their shapes.
    """
    references = find_published_rows(runs)
    name_accelerator = len({format_accelerator(run.record, say) for run in runs}) > 1

    def column(field: TableField) -> ColumnSpec[ComparedRuns | PublishedRow]:
        """Return the column of a field, with the unit in its head if all runs have the same one,
        and a star before the title of a strong field.
        """
        common_unit = _common_unit(field, runs, say)
        title = say(field.title) if field.title else metric_row(field.name).heading

        def cell(row: ComparedRuns | PublishedRow) -> Cell:
            """Return the cell of a group of repeats or of a published row in this column."""
            if isinstance(row, PublishedRow):
                return _published_cell(field, row, common_unit, say)
            return _group_cell(field, row, common_unit, name_accelerator, say)

        star = "*" if field.strong else ""
        return ColumnSpec(star + title, cell, common_unit or "", bool(field.metrics), field.strong)

    notes = [
        say("stars"),
        *(row.format_footnote(say) for row in references),
        *make_size_note(runs, references, say),
    ]
    notes += [
        words.render_text(note, say.lang)
        for note in shipped_cases.make_counted_flops_notes(run.record for run in runs)
    ]
    notes += list_unknown_time_notes([run.record for run in runs], say)
    columns, groups = map(column, _present_fields(runs, references)), merge_repeats(runs)
    if len(groups) < len(runs):
        notes.insert(1, say("side.means"))
    return build_table(columns, groups, notes, last_rows=references, last_kind="published")


def _common_unit(field: TableField, runs: list[NumberedRun], say: PageWords) -> str | None:
    """Return the unit for the head of a column if all runs that have its first metric agree (empty
    for percentages), the base unit if none has it; None if units differ or there is none, as in a
    column of a setting.
    """
    if field.times:  # their cells have it
        return ""
    name = field.metrics[0] if field.metrics else ""
    units = {
        format_unit(name, run.record.metrics[name], say.lang)
        for run in runs
        if name in run.record.metrics
    }
    if not units:
        return words.translate_unit(metric_row(name).base_unit, say.lang) or None
    return units.pop() if len(units) == 1 else None


def _group_cell(
    field: TableField,
    group: ComparedRuns,
    common_unit: str | None,
    name_accelerator: bool,
    say: PageWords,
) -> Cell:
    """Return the cell of a run, or of repeats, in the table of all values: a setting, or metrics
    (means over `averaged` records) joined by slashes, strong in a strong column.

    Below stands that a quality was not evaluated, or else the unit where the head has none
    (`common_unit` is None). The first column (`tool`) names the runs and their engine, and below
    status, number of runs, scope (how much of the question was run), and the accelerator if
    `name_accelerator`; its tone is `bad` if no run is valid.
    """
    record = group.row.first_record
    if field.name == "tool":
        parts = [
            say(group.row.status),
            group.format_run_count(say),
            format_scope(record, say),
            format_accelerator(record, say) if name_accelerator else "",
        ]
        tone: Tone = "plain" if group.row.status in standing.RIGHT_STATUSES else "bad"
        name = f"{group.labels} {format_engine(group.row.records, say)}"
        return Cell(name, say("comma").join(filter(None, parts)), tone)
    if not field.metrics:
        return Cell(_SETTING_TEXTS[field.name](record))
    if field.times:
        return Cell(format_shared_field(field, group.averaged))
    means = [average_metric(group.averaged, name) for name in field.metrics]
    shown = zip(field.metrics, means, strict=True)
    text = join_by_slash([format_metric(name, mean) for name, mean in shown])
    unevaluated = (
        record.quality.metric in field.metrics
        and not all(averaged.quality.evaluated for averaged in group.averaged)
        and text != UNKNOWN
    )
    own_unit = format_unit(field.metrics[0], means[0], say.lang)
    unit_text = own_unit if common_unit is None and text != UNKNOWN else ""
    sub = format_unevaluated(record, say) if unevaluated else unit_text
    return Cell(text, sub, "strong" if field.strong else "plain")


def _published_cell(
    field: TableField, row: PublishedRow, common_unit: str | None, say: PageWords
) -> Cell:
    """Return a published row's cell in the table of all values: its footnote number (`tool`), its
    precision, a setting, or metrics joined by slashes with the unit below if it is not
    `common_unit`.

    Where the first metric is missing, the first that the field lists in `instead` and the row has
    is shown, with its convention below; else UNKNOWN.
    """
    if field.name == "tool":
        return Cell(say("published", str(row.number)))
    if field.name == "precision":
        return row.precision_cell(say)
    numbers = [row.format_metric(name) for name in field.metrics]
    if numbers and numbers[0] != UNKNOWN:
        base = words.translate_unit(metric_row(field.metrics[0]).base_unit, say.lang)
        return Cell(join_by_slash(numbers), "" if base == (common_unit or "") else base)
    for name in field.instead:
        if name in row.values:
            return Cell(row.format_metric(name), say(f"instead.{name}"))
    return Cell(UNKNOWN if field.metrics else format_setting(row.values.get(field.name)))


_MFU_METRICS = ("mfu", "mfu_core", "mfu_achievable", "mfu_palm", "mfu_nominal")


def build_mfu_table(runs: list[NumberedRun], say: PageWords) -> Table | None:
    """Build a table of MFU in every convention of `_MFU_METRICS`, one row per run, or of repeats
    with the means of their valid runs, and then per published row that has one.

    None where no run's record has one of these metrics, known or not, and no published row does,
    and for a kind of work without an MFU of whole runs.
    """
    if not load_table_layout(runs[0].record.task.kind_row).has_mfu:
        return None
    references = [row for row in find_published_rows(runs) if set(row.values) & set(_MFU_METRICS)]
    measured_names = {name for run in runs for name in run.record.metrics}
    if not references and not measured_names & set(_MFU_METRICS):
        return None

    def title(row: ComparedRuns | PublishedRow) -> str:
        """Return the title of a group of repeats, or the footnote mark of a published row."""
        if isinstance(row, ComparedRuns):
            return row.format_title(say)
        return say("published", str(row.number))

    def column(name: str) -> ColumnSpec[ComparedRuns | PublishedRow]:
        """Return the column of one convention of MFU: `name` is a metric of `_MFU_METRICS`, such as
        mfu_palm, and the title, with a text for the convention below. That of the headline, `mfu`,
        is starred and bold.
        """
        headline = name == "mfu"

        def cell(row: ComparedRuns | PublishedRow) -> Cell | str:
            """Return the MFU of a group of repeats or a published row in this convention."""
            if isinstance(row, PublishedRow):
                return row.format_metric(name)
            text = format_metric(name, average_metric(row.averaged, name))
            return Cell(text, tone="strong" if headline else "plain")

        star = "*" if headline else ""
        return ColumnSpec(f"{star}{name}", cell, say(f"mfu.{name}"), True, headline)

    columns = (ColumnSpec(say("mfu.run"), title), *map(column, _MFU_METRICS))
    groups = merge_repeats(runs)
    return build_table(columns, groups, last_rows=references, last_kind="published")
