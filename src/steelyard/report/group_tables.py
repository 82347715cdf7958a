"""Build tables of runs that belong together: repeats, engines compared, and scaling over devices.

Each kind of group is a `GroupKind` row: how runs are grouped, how a group is titled, and the
elements that show it. The report page shows groups as sections of a case; the command line prints
them after runs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from steelyard.metrics import engines as engine_groups
from steelyard.metrics import repeats as repeat_groups
from steelyard.metrics import scaling as scaling_groups
from steelyard.metrics.engines import Answers, Apart, EngineRuns, Engines
from steelyard.metrics.repeats import RATE, Repeats, Spread
from steelyard.metrics.runs import kinds
from steelyard.metrics.scaling import Scaling, ScalingRow
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.document import (
    EMPTY,
    Block,
    Cell,
    ColumnOf,
    Heading,
    Lang,
    Page,
    Paragraph,
    Priority,
    table,
)
from steelyard.report.numbers import UNKNOWN, counted, ends, formed, spelled
from steelyard.report.runs import Run, by_case, codes, estimate, labels, parallel, scope, unit
from steelyard.tasks.task import Differences
from steelyard.words import Words

Group = TypeVar("Group", bound=Repeats | Scaling | Engines)


@dataclass(frozen=True)
class GroupKind(Generic[Group]):
    """A kind of group of runs: REPEATS, SCALING or ENGINES.

    `name` begins the codes of its texts, such as `repeats.note`. `make_title` is called with a
    group, all groups of the case, and the words; `build_elements` with a group, its numbered runs,
    and the words.
    """

    name: str
    groups: Callable[[Iterable[Record]], list[Group]]
    title: Callable[[Group, list[Group], Words], str]
    blocks: Callable[[Group, list[Run], Words], list[Block]]

    def section(self, runs: list[Run], level: int, say: Words) -> list[Block]:
        """Return a section of a case with heading, groups and a note; empty where the runs form no
        group. `level` is that of the heading.
        """
        out: list[Block] = []
        for title, members, blocks in self._shown(runs, say):
            out += [Paragraph(f"{labels(members, say)}: {title}", "strong"), *blocks]
        return [Heading(level, say(self.name)), *out, self._note(say)] if out else []

    def page(self, records: list[Record], lang: Lang = "en") -> Page | None:
        """Build the page that the command line prints after runs: the groups of every case; None
        where the records form no group.
        """
        say = Words(lang)
        out: list[Block] = []
        for case, runs in by_case(records, lang).items():
            for title, _, blocks in self._shown(runs, say):
                out += [
                    Paragraph(f"{say(self.name)}: {' · '.join([*case, title])}", "strong"),
                    *blocks,
                ]
        return Page("", lang, (*out, self._note(say))) if out else None

    def _shown(self, runs: list[Run], say: Words) -> Iterable[tuple[str, list[Run], list[Block]]]:
        """Yield title, runs and elements of each group."""
        every = self.groups(run.record for run in runs)
        for group in every:
            members = [run for run in runs if any(run.record is record for record in group.records)]
            yield self.title(group, every, say), members, self.blocks(group, members, say)

    def _note(self, say: Words) -> Paragraph:
        """Return the explanatory note below all groups of this kind."""
        return Paragraph(say(f"{self.name}.note"), "muted")


def _common(record: Record, say: Words, engine: bool = True, plan: bool = True) -> str:
    """Return how the runs of a group ran: engine, precision, division, scope, plan (of several
    devices) and kind of device, from one of its records.

    `engine` and `plan` say whether these are included.
    """
    case = record.case
    places = [f"{record.plan.config} {parallel(record)}"] if plan and record.plan.world > 1 else []
    parts = [record.engine.name] if engine else []
    parts += [case.precision, case.division, scope(record, say), *places]
    return " · ".join([*parts, ", ".join(kinds(record)) or UNKNOWN])


def _repeat_blocks(group: Repeats, members: list[Run], say: Words) -> list[Block]:
    """Return a table of mean, interval and spread of each headline metric over the valid runs, and
    a sentence that names the runs that are not valid.

    The table is left out if no run is valid.
    """

    def form(one: Spread) -> str:
        """Return the number format of a metric."""
        return metric_row(one.name, one.unit).form

    def name(one: Spread) -> Cell:
        """Return the metric's name as in tables, with its unit below unless it is a percentage."""
        title = say("repeats.rate") if one.name == RATE else metric_row(one.name).index
        return Cell(title, "" if form(one) == "percent" else one.unit)

    def mean(one: Spread) -> Cell:
        """Return the mean over the valid runs; a quality that was not evaluated in all of them says
        so below.
        """
        quality = one.name == group.valid[0].quality.metric
        judged = not quality or all(record.quality.evaluated for record in group.valid)
        return Cell(formed(form(one), one.mean.value), "" if judged else say("not_evaluated"))

    lost = [("not_valid", len(group.not_valid)), ("interval_only", group.interval_only)]
    counts = (say(f"repeats.{key}", counted(number)) for key, number in lost if number)
    lacking = say("comma").join(counts)
    columns: tuple[ColumnOf[Spread], ...] = (
        ColumnOf(say("repeats.metric"), name),
        ColumnOf(
            say("repeats.runs"),
            lambda one: Cell(counted(one.runs), lacking if one is group.metrics[0] else ""),
            right=True,
            priority=2,
        ),
        ColumnOf(say("repeats.mean"), mean, right=True, strong=True),
        ColumnOf(
            say("repeats.interval"),
            lambda one: ends(one.mean.interval, form(one)) or UNKNOWN,
            right=True,
        ),
        ColumnOf(say("repeats.source"), lambda one: _source(one.source, say), priority=3),
        ColumnOf(
            say("repeats.deviation"),
            lambda one: formed("percent", one.deviation),
            right=True,
            priority=2,
        ),
        ColumnOf(
            say("repeats.lowest"), lambda one: formed(form(one), one.lowest), right=True, priority=3
        ),
        ColumnOf(
            say("repeats.highest"),
            lambda one: formed(form(one), one.highest),
            right=True,
            priority=3,
        ),
    )
    lines = [
        f"{run.label} {run.record.id} ({codes(run.record, say) or say(run.record.status)})"
        for run in members
        if run.record.status != "valid"
    ]
    out: list[Block] = [table(columns, group.metrics)] if group.metrics else []
    return [*out, Paragraph(say("repeats.without", say("comma").join(lines)))] if lines else out


def _source(source: str | None, say: Words) -> str:
    """Return a text that says whether an interval comes from the steps of one run or from the
    spread of several; UNKNOWN for None.
    """
    return UNKNOWN if source is None else say(f"scaling.source.{source}")


def _scaling_title(group: Scaling, every: list[Scaling], say: Words) -> str:
    """Return what the runs of a group have in common, and the settings in which any other group of
    the case differs from it.
    """
    record = group.records[0]
    tunes = [one.records[0].tune.model_dump(mode="json", exclude={"parallel"}) for one in every]
    own = record.tune.model_dump(mode="json")
    differ = [key for key in tunes[0] if any(tune[key] != own[key] for tune in tunes)]
    settings = [f"{key}={spelled(own[key], depth=1)}" for key in differ]
    return " · ".join([_common(record, say, plan=False), *settings])


def _scaling_blocks(group: Scaling, members: list[Run], say: Words) -> list[Block]:
    """Return a table with a row per plan: rate of all devices, speed-up and efficiency relative to
    the base plan.
    """

    def speedup(row: ScalingRow) -> Cell:
        """Return the speed-up with its interval; for the base, a word that it is the base."""
        found = estimate(row.speedup)
        return Cell(found.text, say("scaling.base")) if row.base else found

    columns: tuple[ColumnOf[ScalingRow], ...] = (
        ColumnOf(say("scaling.config"), lambda row: row.plan.config),
        ColumnOf(say("scaling.plan"), lambda row: parallel(row.records[0]), priority=2),
        ColumnOf(
            say("scaling.runs"), lambda row: counted(len(row.records)), right=True, priority=3
        ),
        ColumnOf(
            say("scaling.rate"), lambda row: estimate(row.rate), group.unit, right=True, strong=True
        ),
        ColumnOf(say("scaling.speedup"), speedup, right=True, priority=2),
        ColumnOf(
            say("scaling.efficiency"), lambda row: estimate(row.efficiency, "percent"), right=True
        ),
        ColumnOf(say("scaling.source"), lambda row: _source(row.source, say), priority=3),
    )
    return [table(columns, group.rows)]


# The columns for differences between answers, in order, with their priorities.
ANSWERS: dict[str, Priority] = {
    "other": 2,
    "tokens": 3,
    "largest": 3,
    "loss": 2,
    "grad_norm": 3,
    "apart": 3,
}


def answer_cells(one: Answers | None, form: str, say: Words) -> dict[str, Cell]:
    """Return cells that say how far answers are from those of the base, by the names in
    ANSWER_COLUMNS; all UNKNOWN if `answers` is None.

    `form` is the number format of the quality.
    """
    if one is None:
        return dict.fromkeys(ANSWERS, EMPTY)
    chosen = one.chosen
    return {
        "other": EMPTY if chosen is None else _items(chosen.other, chosen, say),
        "tokens": EMPTY if chosen is None else _items(chosen.tokens, chosen, say),
        "largest": Cell(formed("number", None if chosen is None else chosen.largest)),
        "loss": _apart(one.loss, say),
        "grad_norm": _apart(one.grad_norm, say),
        "apart": Cell(formed(form, one.quality)),
    }


def _items(count: int | None, found: Differences, say: Words) -> Cell:
    """Return `count` of the items that both answered, the percentage below; UNKNOWN for None."""
    if count is None:
        return EMPTY
    share = formed("percent", count / found.items) if found.items else ""
    return Cell(say("engines.other.of", counted(count), counted(found.items)), share)


def _apart(found: Apart | None, say: Words) -> Cell:
    """Return the largest difference of a value over the steps, with its step (counted from 0) below
    if the difference is not 0.
    """
    if found is None:
        return EMPTY
    step = say("engines.step", counted(found.step)) if found.value else ""
    return Cell(formed("number", found.value), step)


def _engine_blocks(group: Engines, members: list[Run], say: Words) -> list[Block]:
    """Return a table with a row per engine, differences of the answers first, then paragraphs for
    engines without a finished run and for models with dropout.
    """
    first = group.records[0]
    form = metric_row(group.metric, getattr(first.metrics.get(group.metric), "unit", "")).form
    answers = {row.name: answer_cells(row.answers, form, say) for row in group.rows}

    def quality(row: EngineRuns) -> Cell:
        """Return the mean quality of an engine's runs with its unit; below, that it was not
        evaluated, if not all were.
        """
        known = formed(form, row.quality)
        if known == UNKNOWN:
            return EMPTY
        its = unit(group.metric, row.records[0].metrics.get(group.metric), say.lang)
        judged = all(record.quality.evaluated for record in row.records)
        return Cell(f"{known} {its}".rstrip(), "" if judged else say("not_evaluated"))

    def rate(row: EngineRuns) -> Cell:
        """Return the rate of valid runs; without any, in grey that of the others with the codes of
        their reasons.
        """
        if row.rate is not None:
            return estimate(row.rate)
        why = say("colon").join(filter(None, (say("invalid"), codes(row.records, say))))
        return Cell(formed("number", row.invalid_rate), why, "muted")

    def number_of_runs(row: EngineRuns) -> Cell:
        """Return the number of finished runs, and below how many of them are not valid."""
        lacking = len(row.records) - row.valid
        beside = say("engines.runs.invalid", counted(lacking)) if lacking else ""
        return Cell(counted(len(row.records)), beside)

    def answer(name: str) -> ColumnOf[EngineRuns]:
        """Return the column of one kind of difference (a name in ANSWER_COLUMNS); all but that of
        the quality are optional.
        """
        return ColumnOf(
            say(f"engines.{name}", group.metric),
            lambda row: answers[row.name][name],
            right=True,
            priority=ANSWERS[name],
            optional=name != "apart",
        )

    columns: tuple[ColumnOf[EngineRuns], ...] = (
        ColumnOf(
            say("engines.engine"),
            lambda row: Cell(row.name, say("engines.base") if row.base else ""),
        ),
        *map(answer, ANSWERS),
        ColumnOf(say("engines.quality", group.metric), quality, right=True, priority=2),
        ColumnOf(say("engines.rate"), rate, group.unit, right=True, strong=True),
        ColumnOf(
            say("engines.ratio", group.base.name), lambda row: estimate(row.ratio), right=True
        ),
        ColumnOf(say("engines.mfu"), lambda row: formed("percent", row.mfu), right=True),
        ColumnOf(
            say("engines.mem"), lambda row: formed("gib", row.mem), "GiB", right=True, priority=3
        ),
        ColumnOf(say("engines.runs"), number_of_runs, right=True, priority=2),
    )
    out: list[Block] = [table(columns, group.rows)]
    if group.without:
        out.append(Paragraph(say("engines.without", say("comma").join(group.without))))
    if getattr(first.question.model, "dropout", 0.0):
        out.append(Paragraph(say("engines.dropout")))
    return out


REPEATS = GroupKind[Repeats](
    "repeats",
    repeat_groups.groups,
    lambda group, _, say: _common(group.records[0], say),
    _repeat_blocks,
)
SCALING = GroupKind[Scaling]("scaling", scaling_groups.groups, _scaling_title, _scaling_blocks)
ENGINES = GroupKind[Engines](
    "engines",
    engine_groups.groups,
    lambda group, _, say: _common(group.records[0], say, engine=False),
    _engine_blocks,
)
