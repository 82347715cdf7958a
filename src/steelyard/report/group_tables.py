"""Tables of runs that belong together: repeats, engines side by side, and scaling over devices.

Each kind of group is a row: how runs are grouped, what a group's runs have in common, and the
blocks that show it. The page of a case has them as sections; the command line prints them after
runs.
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
    """A kind of group. `name` begins the codes of its words, such as NAME.note; `title` also gets
    all groups of the case."""

    name: str
    groups: Callable[[Iterable[Record]], list[Group]]
    title: Callable[[Group, list[Group], Words], str]
    blocks: Callable[[Group, list[Run], Words], list[Block]]

    def section(self, runs: list[Run], level: int, say: Words) -> list[Block]:
        """Return the section of a case on a page; nothing where runs form no group."""
        out: list[Block] = []
        for title, members, blocks in self._shown(runs, say):
            out += [Paragraph(f"{labels(members, say)}: {title}", "strong"), *blocks]
        return [Heading(level, say(self.name)), *out, self._note(say)] if out else []

    def page(self, records: list[Record], lang: Lang = "en") -> Page | None:
        """Return what the command line prints after runs; None where they form no group."""
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
        every = self.groups(run.record for run in runs)
        for group in every:
            members = [run for run in runs if any(run.record is record for record in group.records)]
            yield self.title(group, every, say), members, self.blocks(group, members, say)

    def _note(self, say: Words) -> Paragraph:
        return Paragraph(say(f"{self.name}.note"), "muted")


def _common(record: Record, say: Words, engine: bool = True, plan: bool = True) -> str:
    """Return what the runs of a group have in common: how they ran, and on which devices."""
    case = record.case
    places = [f"{record.plan.config} {parallel(record)}"] if plan and record.plan.world > 1 else []
    parts = [record.engine.name] if engine else []
    parts += [case.precision, case.division, scope(record, say), *places]
    return " · ".join([*parts, ", ".join(kinds(record)) or UNKNOWN])


def _repeat_blocks(group: Repeats, members: list[Run], say: Words) -> list[Block]:
    """Show a row for each headline metric, and name the runs that are counted and not averaged."""

    def form(one: Spread) -> str:
        return metric_row(one.name, one.unit).form

    def name(one: Spread) -> Cell:
        title = say("repeats.rate") if one.name == RATE else metric_row(one.name).index
        return Cell(title, "" if form(one) == "percent" else one.unit)

    def mean(one: Spread) -> Cell:
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
    return UNKNOWN if source is None else say(f"scaling.source.{source}")


def _scaling_title(group: Scaling, every: list[Scaling], say: Words) -> str:
    """Return what the runs of a group have in common, and the settings in which it differs from the
    other groups."""
    record = group.records[0]
    tunes = [one.records[0].tune.model_dump(mode="json", exclude={"parallel"}) for one in every]
    own = record.tune.model_dump(mode="json")
    differ = [key for key in tunes[0] if any(tune[key] != own[key] for tune in tunes)]
    settings = [f"{key}={spelled(own[key], depth=1)}" for key in differ]
    return " · ".join([_common(record, say, plan=False), *settings])


def _scaling_blocks(group: Scaling, members: list[Run], say: Words) -> list[Block]:
    def speedup(row: ScalingRow) -> Cell:
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


# Columns of differences between answers with their priorities, in order.
ANSWERS: dict[str, Priority] = {
    "other": 2,
    "tokens": 3,
    "largest": 3,
    "loss": 2,
    "grad_norm": 3,
    "apart": 3,
}


def answer_cells(one: Answers | None, form: str, say: Words) -> dict[str, Cell]:
    """Return how far answers are from those of the base, by the names in ANSWERS. `form` is that of
    the quality."""
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
    """Return a count of the items that both answered."""
    if count is None:
        return EMPTY
    share = formed("percent", count / found.items) if found.items else ""
    return Cell(say("engines.other.of", counted(count), counted(found.items)), share)


def _apart(found: Apart | None, say: Words) -> Cell:
    """Return a difference with its step, which is counted from 0, as in records."""
    if found is None:
        return EMPTY
    step = say("engines.step", counted(found.step)) if found.value else ""
    return Cell(formed("number", found.value), step)


def _engine_blocks(group: Engines, members: list[Run], say: Words) -> list[Block]:
    """Show a row for each engine, differences of answers first, and name the engines without a
    finished run."""
    first = group.records[0]
    form = metric_row(group.metric, getattr(first.metrics.get(group.metric), "unit", "")).form
    answers = {row.name: answer_cells(row.answers, form, say) for row in group.rows}

    def quality(row: EngineRuns) -> Cell:
        known = formed(form, row.quality)
        if known == UNKNOWN:
            return EMPTY
        its = unit(group.metric, row.records[0].metrics.get(group.metric), say.lang)
        judged = all(record.quality.evaluated for record in row.records)
        return Cell(f"{known} {its}".rstrip(), "" if judged else say("not_evaluated"))

    def rate(row: EngineRuns) -> Cell:
        """Return the rate of valid runs, or in grey that of the others with their reasons."""
        if row.rate is not None:
            return estimate(row.rate)
        why = say("colon").join(filter(None, (say("invalid"), codes(row.records, say))))
        return Cell(formed("number", row.invalid_rate), why, "muted")

    def number_of_runs(row: EngineRuns) -> Cell:
        lacking = len(row.records) - row.valid
        beside = say("engines.runs.invalid", counted(lacking)) if lacking else ""
        return Cell(counted(len(row.records)), beside)

    def answer(name: str) -> ColumnOf[EngineRuns]:
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
