"""A comparison of two sides as a page: the verdict, answers first, then metrics, phases, and
whatever else differs.
"""

from typing import Any

from steelyard.metrics.compare import Change, Comparison, Rate, Side
from steelyard.metrics.fields import Field
from steelyard.metrics.table import row as metric_row
from steelyard.report.document import (
    EMPTY,
    Block,
    Cell,
    ColumnOf,
    Heading,
    Lang,
    Page,
    Paragraph,
    Table,
    Tone,
    table,
)
from steelyard.report.group_tables import ANSWERS, answer_cells
from steelyard.report.numbers import UNKNOWN, counted, ends, formed, spelled
from steelyard.report.runs import estimate
from steelyard.words import Words

SHOWN_RECORDS = 5  # of a side, by name; a page is for readers
_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no rate": "bad"}
_DIRECTIONS: dict[str, Tone] = {"better": "good", "worse": "bad", "": "plain"}


def page(found: Comparison, lang: Lang = "en") -> Page:
    say = Words(lang)
    case = (found.base.finished or found.base.records)[0].case
    title = f"{say('compare')}: {case.name} · {case.size} · {case.precision} · {case.division}"
    blocks: list[Block] = [
        Heading(1, title),
        Paragraph(_verdict(found, say), _TONES.get(found.outcome, "strong")),
    ]
    blocks += [_sides(found, say), *_left_out(found, say)]
    if found.across:
        blocks += [Heading(2, say("compare.across")), _fields(found.across, say)]
    blocks += [Heading(2, say("compare.answers")), *_answers(found, say)]
    blocks += [Heading(2, say("compare.metrics")), *_metrics(found, say)]
    if found.phases:
        blocks += [Heading(2, say("compare.phases")), _changes("phase", found.phases, say)]
        if not found.same_steps:  # of different sizes: their times are no better or worse
            sizes = (formed("number", one) for one in found.steps)
            blocks.append(Paragraph(say("compare.steps", *sizes)))
    blocks.append(Heading(2, say("compare.differs")))
    blocks.append(
        _fields(found.differs, say) if found.differs else Paragraph(say("compare.differs.none"))
    )
    ids = ", ".join(record.id for record in (*found.base.records, *found.new.records))
    return Page(title, lang, (*blocks, Paragraph(say("compare.note"), "muted")), say("footer", ids))


def _verdict(found: Comparison, say: Words) -> str:
    if found.ratio is None:
        why = UNKNOWN if found.why is None else say(f"compare.{found.why.code}", *found.why.values)
        return say("compare.no rate", why)
    verdict = say(f"compare.{found.outcome}", formed("percent", found.threshold))
    change, between = formed("number", found.ratio.value), ends(found.ratio.interval)
    if between:
        # Said where the interval is not that of the spread of runs.
        key = "compare.interval.steps" if found.ratio.source == "steps" else "compare.interval"
        change = say(key, change, between)
    return f"{say('compare.change')} {change}: {verdict}"


def _sides(found: Comparison, say: Words) -> Table:
    def records(side: Side) -> str:
        ids = [record.id[:8] for record in side.records]
        more = [f"+{len(ids) - SHOWN_RECORDS}"] if len(ids) > SHOWN_RECORDS else []
        return ", ".join([*ids[:SHOWN_RECORDS], *more])

    def engine(side: Side) -> Cell:
        first = (side.finished or side.records)[0]
        plan = f"{first.plan.config} {first.plan}" if first.plan.world > 1 else ""
        return Cell(first.engine.name, plan)

    def name(key: str, side: Side) -> Cell:
        # A record has its id beside it.
        return Cell(say(key), "" if side.name.endswith(".json") else side.name)

    columns: tuple[ColumnOf[tuple[str, Side, Rate | None]], ...] = (
        ColumnOf(say("compare.side"), lambda row: name(*row[:2])),
        ColumnOf(say("engine"), lambda row: engine(row[1])),
        ColumnOf(
            say("compare.runs"),
            lambda row: f"{counted(len(row[1].valid))} / {counted(len(row[1].records))}",
            right=True,
        ),
        ColumnOf(
            say("compare.rate"),
            lambda row: estimate(None if row[2] is None else row[2].estimate),
            found.unit,
            right=True,
            strong=True,
        ),
        ColumnOf(say("compare.records"), lambda row: records(row[1])),
    )
    base, new = found.rates
    return table(columns, [("compare.base", found.base, base), ("compare.new", found.new, new)])


def _left_out(found: Comparison, say: Words) -> list[Block]:
    """Name runs that are not valid, and count records that are on both sides."""
    told = [
        say(
            "compare.left_out.one",
            record.id[:8],
            side.name,
            ", ".join(one.code for one in record.reasons) or record.status,
        )
        for side in (found.base, found.new)
        for record in side.left_out
    ]
    out: list[Block] = (
        [Paragraph(say("compare.left_out", say("comma").join(told)), "bad")] if told else []
    )
    shared = {record.id for record in found.base.records} & {
        record.id for record in found.new.records
    }
    return [*out, Paragraph(say("compare.shared", counted(len(shared))), "bad")] if shared else out


def _answers(found: Comparison, say: Words) -> list[Block]:
    """Say how far answers are from those of the base's first run; of the base, those of its other
    runs."""
    form = metric_row(found.quality).form
    named = zip(("compare.base", "compare.new"), found.answers, strict=True)
    rows = [(say(key), answer_cells(one, form, say)) for key, one in named if one is not None]
    if not any(cell != EMPTY for _, cells in rows for cell in cells.values()):
        return [Paragraph(say("compare.answers.none"))]

    def answer(name: str) -> ColumnOf[tuple[str, dict[str, Cell]]]:
        title = say(f"engines.{name}", found.quality)
        return ColumnOf(title, lambda row: row[1][name], right=True, optional=True)

    return [table((ColumnOf(say("compare.side"), lambda row: row[0]), *map(answer, ANSWERS)), rows)]


def _metrics(found: Comparison, say: Words) -> list[Block]:
    out: list[Block] = (
        [_changes("metric", found.metrics, say)]
        if found.metrics
        else [Paragraph(say("compare.none"))]
    )
    return [*out, Paragraph(say("compare.equal", counted(found.equal)))] if found.equal else out


def _changes(what: str, found: tuple[Change, ...], say: Words) -> Table:
    def name(one: Change) -> Cell:
        return Cell(metric_row(one.name).index, "" if one.form == "percent" else one.unit)

    columns: tuple[ColumnOf[Change], ...] = (
        ColumnOf(say(f"compare.{what}"), name),
        ColumnOf(say("compare.base"), lambda one: formed(one.form, one.base), right=True),
        ColumnOf(say("compare.new"), lambda one: formed(one.form, one.new), right=True),
        ColumnOf(say("compare.change"), lambda one: estimate(one.ratio), right=True),
        ColumnOf(say("compare.judged"), lambda one: _judged(one, say)),
    )
    return table(columns, found)


def _judged(one: Change, say: Words) -> Cell:
    """Return the direction of a change, in colour only if the test supports it."""
    if one.base is None or one.new is None:
        return EMPTY
    sure = one.ratio is not None and one.ratio.verdict == "significant"
    told = "not tested" if one.ratio is None else one.ratio.verdict
    word = say("compare.untested") if told == "not tested" else say(f"compare.{told}")
    return Cell(
        say(f"compare.{one.direction or 'other'}"),
        word,
        _DIRECTIONS[one.direction] if sure else "plain",
    )


def _fields(found: tuple[Field, ...], say: Words) -> Table:
    """List fields with their values on both sides; several where the runs of a side differ."""

    def values(every: tuple[Any, ...]) -> str:
        return " | ".join(spelled(one, depth=1) for one in every)

    columns: tuple[ColumnOf[Field], ...] = (
        ColumnOf(say("compare.field"), lambda one: one.name),
        ColumnOf(say("compare.base"), lambda one: values(one.base)),
        ColumnOf(say("compare.new"), lambda one: values(one.new)),
    )
    return table(columns, found)
