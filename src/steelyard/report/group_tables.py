"""Build tables of runs that belong together: repeats, engines compared, and scaling over devices.

Each kind of group is a `GroupKind` row: how runs are grouped, how a group is titled, and the
elements that show it. The report page shows groups as sections of a case; the command line prints
them after runs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from steelyard.metrics import engine_groups, repeat_groups, scaling_groups, standing
from steelyard.metrics.engine_groups import (
    AnswerDifferences,
    EngineGroup,
    EngineRuns,
    StepDifference,
)
from steelyard.metrics.estimates import list_device_names
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.repeat_groups import RATE_NAME, MetricSpread, RepeatGroup
from steelyard.metrics.scaling_groups import ScalingGroup, ScalingRow
from steelyard.record.record import Record
from steelyard.report.columns import load_table_layout
from steelyard.report.document import (
    UNKNOWN_CELL,
    Cell,
    ColumnSpec,
    Heading,
    Lang,
    Page,
    PageElement,
    Paragraph,
    Priority,
    build_table,
)
from steelyard.report.loads import format_load, has_load
from steelyard.report.marks import format_engine, list_engine_notes, name_devices
from steelyard.report.numbered_runs import (
    NumberedRun,
    format_labels,
    format_parallel_plan,
    format_reason_codes,
    format_scope,
    format_unevaluated,
    format_unit,
    group_by_case,
    make_estimate_cell,
    make_ratio_cell,
)
from steelyard.report.numbers import (
    UNKNOWN,
    format_count,
    format_interval,
    format_number,
    format_setting,
)
from steelyard.tasks.task import Differences
from steelyard.words import PageWords

Group = TypeVar("Group", bound=RepeatGroup | ScalingGroup | EngineGroup)


@dataclass(frozen=True)
class GroupKind(Generic[Group]):
    """A kind of group of runs: REPEATS, SCALING or ENGINES. `build_section` returns the elements of
    a section of the report, `build_page` the page that the command line prints after runs; empty
    and None if the runs form no group.

    `name` begins the codes of its texts, such as `repeats.note`. `find_groups` is given records;
    `make_title` a group, all groups of the case, and the words; `build_elements` a group, its
    numbered runs, and the words.
    """

    name: str
    find_groups: Callable[[Iterable[Record]], list[Group]]
    make_title: Callable[[Group, list[Group], PageWords], str]
    build_elements: Callable[[Group, list[NumberedRun], PageWords], list[PageElement]]

    def build_section(
        self, runs: list[NumberedRun], level: int, say: PageWords
    ) -> list[PageElement]:
        """Return a section of a case for this kind of group: a heading of this level, for each
        group a line with its runs and title and its elements, and a note; empty where the runs form
        no group.
        """
        out: list[PageElement] = []
        for title, members, elements in self._titled_groups(runs, say):
            out += [Paragraph(f"{format_labels(members, say)}: {title}", "strong"), *elements]
        return [Heading(level, say(self.name)), *out, self._note(say)] if out else []

    def build_page(self, records: list[Record], lang: Lang = "en") -> Page | None:
        """Build the page that the command line prints after runs: the groups of this kind of every
        case, each under a line with case and title, then a note, without a page title; None where
        the records form no group.
        """
        say = PageWords(lang)
        out: list[PageElement] = []
        for case, runs in group_by_case(records, lang).items():
            for title, _, elements in self._titled_groups(runs, say):
                out += [
                    Paragraph(f"{say(self.name)}: {' · '.join([*case, title])}", "strong"),
                    *elements,
                ]
        return Page("", lang, (*out, self._note(say))) if out else None

    def _titled_groups(
        self, runs: list[NumberedRun], say: PageWords
    ) -> Iterable[tuple[str, list[NumberedRun], list[PageElement]]]:
        """Yield (title, runs, elements) of each group of this kind that the runs form, in the order
        of `find_groups`.
        """
        groups = self.find_groups(run.record for run in runs)
        for group in groups:
            members = [run for run in runs if any(run.record is record for record in group.records)]
            yield (
                self.make_title(group, groups, say),
                members,
                self.build_elements(group, members, say),
            )

    def _note(self, say: PageWords) -> Paragraph:
        """Return the explanatory note that stands once below all groups of this kind: the text
        `NAME.note` as a muted paragraph.
        """
        return Paragraph(say(f"{self.name}.note"), "muted")


def _format_common(
    records: Sequence[Record], say: PageWords, engine: bool = True, plan: bool = True
) -> str:
    """Return how the runs of a group ran, joined by ` · `: engine, with the worst mark of all,
    precision, division, load (of generation), scope (how much of the question was run), plan (of
    several devices only) and kinds of device, from the first of its records.

    `engine` and `plan` say whether these are included.
    """
    record = records[0]
    case = record.case
    plan_texts = (
        [f"{record.plan.config} {format_parallel_plan(record)}"]
        if plan and record.plan.world > 1
        else []
    )
    parts = [format_engine(records, say)] if engine else []
    load = [format_load(record)] if has_load(record) else []
    parts += [case.precision, case.division, *load, format_scope(record, say), *plan_texts]
    devices = ", ".join(list_device_names(record)) or UNKNOWN
    return " · ".join([*parts, name_devices(record, devices, say)])


def _repeats_elements(
    group: RepeatGroup, members: list[NumberedRun], say: PageWords
) -> list[PageElement]:
    """Return a table with mean, interval and spread of rate, MFU, memory, energy and quality over
    the valid runs, a row per metric, and a sentence that names the runs that are not valid, with
    reasons.

    The first row says how many runs do not count. The table is left out if no run is valid, the
    sentence if all are. `members` are the group's runs with their numbers.
    """

    def number_format(spread: MetricSpread) -> str:
        """Return the name of a metric's number format, such as `percent`."""
        return metric_row(spread.name, spread.unit).form

    def name_cell(spread: MetricSpread) -> Cell:
        """Return the metric's name as in tables, with its unit below unless it is a percentage."""
        title = say("repeats.rate") if spread.name == RATE_NAME else metric_row(spread.name).heading
        return Cell(title, "" if number_format(spread) == "percent" else spread.unit)

    def mean_cell(spread: MetricSpread) -> Cell:
        """Return the mean of a metric over the valid runs; below the case's quality it says so if
        that was not evaluated in all of them.
        """
        quality = spread.name == group.counted[0].quality.metric
        evaluated = not quality or all(record.quality.evaluated for record in group.counted)
        return Cell(
            format_number(number_format(spread), spread.mean.value),
            "" if evaluated else format_unevaluated(group.counted[0], say),
        )

    not_counted = [("not_valid", len(group.not_counted)), ("interval_only", group.interval_only)]
    counts = (say(f"repeats.{key}", format_count(number)) for key, number in not_counted if number)
    not_counted_text = say("comma").join(counts)
    columns: tuple[ColumnSpec[MetricSpread], ...] = (
        ColumnSpec(say("repeats.metric"), name_cell),
        ColumnSpec(
            say("repeats.runs"),
            lambda spread: Cell(
                format_count(spread.runs), not_counted_text if spread is group.metrics[0] else ""
            ),
            right=True,
            priority=2,
        ),
        ColumnSpec(say("repeats.mean"), mean_cell, right=True, strong=True),
        ColumnSpec(
            say("repeats.interval"),
            lambda spread: format_interval(spread.mean.interval, number_format(spread)) or UNKNOWN,
            right=True,
        ),
        ColumnSpec(
            say("repeats.source"), lambda spread: _format_source(spread.source, say), priority=3
        ),
        ColumnSpec(
            say("repeats.deviation"),
            lambda spread: format_number("percent", spread.deviation),
            right=True,
            priority=2,
        ),
        ColumnSpec(
            say("repeats.lowest"),
            lambda spread: format_number(number_format(spread), spread.lowest),
            right=True,
            priority=3,
        ),
        ColumnSpec(
            say("repeats.highest"),
            lambda spread: format_number(number_format(spread), spread.highest),
            right=True,
            priority=3,
        ),
    )
    left_out = [
        f"{run.label} {run.record.id}"
        f" ({format_reason_codes(run.record, say) or say(run.record.status)})"
        for run in members
        if any(run.record is record for record in group.not_counted)
    ]
    out: list[PageElement] = [build_table(columns, group.metrics)] if group.metrics else []
    return (
        [*out, Paragraph(say("repeats.without", say("comma").join(left_out)))] if left_out else out
    )


def _format_source(source: str | None, say: PageWords) -> str:
    """Return a text that says whether an interval comes from the steps of one run or from the
    spread of several; UNKNOWN for None.
    """
    return UNKNOWN if source is None else say(f"scaling.source.{source}")


def _format_scaling_title(group: ScalingGroup, groups: list[ScalingGroup], say: PageWords) -> str:
    """Return what the runs of a group have in common, and the settings in which any other group of
    the case differs from it.
    """
    record = group.records[0]
    tunes = [
        other.records[0].tune.model_dump(mode="json", exclude={"parallel"}) for other in groups
    ]
    settings_of_group = record.tune.model_dump(mode="json")
    differing = [
        key for key in tunes[0] if any(tune[key] != settings_of_group[key] for tune in tunes)
    ]
    settings = [f"{key}={format_setting(settings_of_group[key], depth=1)}" for key in differing]
    return " · ".join([_format_common(group.records, say, plan=False), *settings])


def _scaling_elements(
    group: ScalingGroup, members: list[NumberedRun], say: PageWords
) -> list[PageElement]:
    """Return a table, in a list, with a row per plan, fewest devices first: rate of all devices,
    speed-up and efficiency relative to the base plan, each with its interval. `members` is not
    used.
    """

    def speedup_cell(row: ScalingRow) -> Cell:
        """Return the speed-up with its interval; for the base, a word that it is the base."""
        cell = make_ratio_cell(row.speedup, say)
        return Cell(cell.text, say("scaling.base")) if row.is_base else cell

    def efficiency_cell(row: ScalingRow) -> Cell:
        """Return the efficiency with its interval; for the base alone, since it is 1."""
        cell = make_ratio_cell(row.efficiency, say, "percent")
        return Cell(cell.text) if row.is_base else cell

    columns: tuple[ColumnSpec[ScalingRow], ...] = (
        ColumnSpec(say("scaling.config"), lambda row: row.plan.config),
        ColumnSpec(
            say("scaling.plan"), lambda row: format_parallel_plan(row.records[0]), priority=2
        ),
        ColumnSpec(
            say("scaling.runs"), lambda row: format_count(len(row.records)), right=True, priority=3
        ),
        ColumnSpec(
            say("scaling.rate"),
            lambda row: make_estimate_cell(row.rate),
            group.unit,
            right=True,
            strong=True,
        ),
        ColumnSpec(say("scaling.speedup"), speedup_cell, right=True, priority=2),
        ColumnSpec(
            say("scaling.efficiency"),
            efficiency_cell,
            right=True,
        ),
        ColumnSpec(say("scaling.source"), lambda row: _format_source(row.source, say), priority=3),
    )
    return [build_table(columns, group.rows)]


# The columns for differences between answers, in order, with their priorities.
ANSWER_COLUMNS: dict[str, Priority] = {
    "other": 2,
    "tokens": 3,
    "largest": 3,
    "loss": 2,
    "grad_norm": 3,
    "apart": 3,
}


def make_answer_cells(
    answers: AnswerDifferences | None, form: str, say: PageWords
) -> dict[str, Cell]:
    """Return cells that say how far answers are from those of the base, by the names in
    ANSWER_COLUMNS; all UNKNOWN if `answers` is None.

    `other`: items answered otherwise; `tokens`: items with other likeliest tokens; `largest`:
    largest difference over items; `loss` and `grad_norm`: largest difference over steps; `apart`:
    difference of the quality, whose number format is `form`.
    """
    if answers is None:
        return dict.fromkeys(ANSWER_COLUMNS, UNKNOWN_CELL)
    chosen = answers.chosen
    return {
        "other": UNKNOWN_CELL if chosen is None else _count_cell(chosen.other, chosen, say),
        "tokens": UNKNOWN_CELL if chosen is None else _count_cell(chosen.tokens, chosen, say),
        "largest": Cell(format_number("number", None if chosen is None else chosen.largest)),
        "loss": _difference_cell(answers.loss, say),
        "grad_norm": _difference_cell(answers.grad_norm, say),
        "apart": Cell(format_number(form, answers.quality)),
    }


def _count_cell(count: int | None, differences: Differences, say: PageWords) -> Cell:
    """Return `count` "of" the number of items that both answered, with the percentage below (none
    for 0 items); UNKNOWN for None.
    """
    if count is None:
        return UNKNOWN_CELL
    share = format_number("percent", count / differences.items) if differences.items else ""
    return Cell(
        say("engines.other.of", format_count(count), format_count(differences.items)), share
    )


def _difference_cell(difference: StepDifference | None, say: PageWords) -> Cell:
    """Return the largest difference of a value over the steps, with its step (counted from 0) below
    if the difference is not 0; UNKNOWN for None.
    """
    if difference is None:
        return UNKNOWN_CELL
    step = say("engines.step", format_count(difference.step)) if difference.value else ""
    return Cell(format_number("number", difference.value), step)


def _engines_elements(
    group: EngineGroup, members: list[NumberedRun], say: PageWords
) -> list[PageElement]:
    """Return a table with a row per engine (the base first): differences of the answers, quality,
    rate, ratio to the base, MFU, memory and runs; then paragraphs for engines without a finished
    run, and for models with dropout, whose answers also differ by chance. `members` is not used.
    """
    first_record = group.records[0]
    form = metric_row(
        group.metric, getattr(first_record.metrics.get(group.metric), "unit", "")
    ).form
    answers = {row.name: make_answer_cells(row.answers, form, say) for row in group.rows}

    def quality_cell(row: EngineRuns) -> Cell:
        """Return the mean quality of an engine's runs with its unit; below, that it was not
        evaluated, if not all were.
        """
        number = format_number(form, row.quality)
        if number == UNKNOWN:
            return UNKNOWN_CELL
        unit_text = format_unit(group.metric, row.records[0].metrics.get(group.metric), say.lang)
        evaluated = all(record.quality.evaluated for record in row.records)
        words_below = "" if evaluated else format_unevaluated(row.records[0], say)
        return Cell(f"{number} {unit_text}".rstrip(), words_below)

    def rate_cell(row: EngineRuns) -> Cell:
        """Return the mean rate of an engine's counted runs with its interval; without any, muted,
        that of the others with their status and reason codes (UNKNOWN if one has no rate).
        """
        if row.rate is not None:
            return make_estimate_cell(row.rate)
        reason = say("colon").join(
            filter(
                None,
                (
                    say(standing.find_group_status(row.records)),
                    format_reason_codes(row.records, say),
                ),
            )
        )
        return Cell(format_number("number", row.uncounted_rate), reason, "muted")

    def ratio_cell(row: EngineRuns) -> Cell:
        """Return the ratio of an engine's rate to the base's; for the base itself 1 alone."""
        cell = make_ratio_cell(row.ratio, say)
        return Cell(cell.text) if row.is_base else cell

    def runs_cell(row: EngineRuns) -> Cell:
        """Return the number of finished runs, and below how many of them do not count."""
        uncounted = len(row.records) - len(row.counted)
        remark = say("engines.runs.invalid", format_count(uncounted)) if uncounted else ""
        return Cell(format_count(len(row.records)), remark)

    def answer_column(name: str) -> ColumnSpec[EngineRuns]:
        """Return the column of one kind of difference (a name in ANSWER_COLUMNS); all but that of
        the quality are optional.
        """
        return ColumnSpec(
            say(f"engines.{name}", group.metric),
            lambda row: answers[row.name][name],
            right=True,
            priority=ANSWER_COLUMNS[name],
            optional=name != "apart",
        )

    columns: tuple[ColumnSpec[EngineRuns], ...] = (
        ColumnSpec(
            say("engines.engine"),
            lambda row: Cell(
                format_engine(row.records, say), say("engines.base") if row.is_base else ""
            ),
        ),
        *map(answer_column, ANSWER_COLUMNS),
        ColumnSpec(say("engines.quality", group.metric), quality_cell, right=True, priority=2),
        ColumnSpec(say("engines.rate"), rate_cell, group.unit, right=True, strong=True),
        ColumnSpec(
            say("engines.ratio", group.base.name),
            ratio_cell,
            right=True,
        ),
        ColumnSpec(
            say("engines.mfu"),
            lambda row: format_number("percent", row.mfu),
            right=True,
            optional=not load_table_layout(first_record.task.kind_row).has_mfu,
        ),
        ColumnSpec(
            say("engines.mem"),
            lambda row: format_number("gib", row.mem),
            "GiB",
            right=True,
            priority=3,
        ),
        ColumnSpec(say("engines.runs"), runs_cell, right=True, priority=2),
    )
    out: list[PageElement] = [
        build_table(columns, group.rows, list_engine_notes(group.records, say))
    ]
    if group.without:
        out.append(Paragraph(say("engines.without", say("comma").join(group.without))))
    if getattr(first_record.question.model, "dropout", 0.0):
        out.append(Paragraph(say("engines.dropout")))
    return out


REPEATS = GroupKind[RepeatGroup](
    "repeats",
    repeat_groups.find_repeat_groups,
    lambda group, _, say: _format_common(group.records, say),
    _repeats_elements,
)
SCALING = GroupKind[ScalingGroup](
    "scaling", scaling_groups.find_scaling_groups, _format_scaling_title, _scaling_elements
)
ENGINES = GroupKind[EngineGroup](
    "engines",
    engine_groups.find_engine_groups,
    lambda group, _, say: _format_common(group.records, say, engine=False),
    _engines_elements,
)
