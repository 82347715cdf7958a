"""Build the page of `steelyard compare`: two sides (base and new) of one question.

Input is a `Comparison` of metrics/; the page has the verdict, answers, metrics, phases, and every
other field in which the sides differ.
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

SHOWN_RECORDS = 5  # ids that are listed of each side
_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no rate": "bad"}
_DIRECTIONS: dict[str, Tone] = {"better": "good", "worse": "bad", "": "plain"}


def page(found: Comparison, lang: Lang = "en") -> Page:
    """Build the page of a comparison: the verdict first, then both sides, answers, metrics, phases,
    and other fields that differ.

    Sections for which there is nothing to show are left out or say so.
    """
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
        if not found.same_steps:  # steps of different sizes cannot be compared
            sizes = (formed("number", one) for one in found.steps)
            blocks.append(Paragraph(say("compare.steps", *sizes)))
    blocks.append(Heading(2, say("compare.differs")))
    blocks.append(
        _fields(found.differs, say) if found.differs else Paragraph(say("compare.differs.none"))
    )
    ids = ", ".join(record.id for record in (*found.base.records, *found.new.records))
    return Page(title, lang, (*blocks, Paragraph(say("compare.note"), "muted")), say("footer", ids))


def _verdict(found: Comparison, say: Words) -> str:
    """Return one sentence: the ratio of the rates with its interval and whether it counts as faster
    or slower, or why there is no ratio.
    """
    if found.ratio is None:
        why = UNKNOWN if found.why is None else say(f"compare.{found.why.code}", *found.why.values)
        return say("compare.no rate", why)
    verdict = say(f"compare.{found.outcome}", formed("percent", found.threshold))
    change, between = formed("number", found.ratio.value), ends(found.ratio.interval)
    if between:
        # An interval from the steps of single runs says less than one from the spread of runs.
        key = "compare.interval.steps" if found.ratio.source == "steps" else "compare.interval"
        change = say(key, change, between)
    return f"{say('compare.change')} {change}: {verdict}"


def _sides(found: Comparison, say: Words) -> Table:
    """Return a table of both sides: engine and plan, valid of all runs, mean rate, and the ids of
    up to SHOWN_RECORDS records.
    """

    def records(side: Side) -> str:
        """Return the first eight characters of the ids, at most SHOWN_RECORDS, and `+N` for the
        others.
        """
        ids = [record.id[:8] for record in side.records]
        more = [f"+{len(ids) - SHOWN_RECORDS}"] if len(ids) > SHOWN_RECORDS else []
        return ", ".join([*ids[:SHOWN_RECORDS], *more])

    def engine(side: Side) -> Cell:
        """Return the engine of the side's first finished run (of its first run if none finished),
        and below it the plan if there are several devices.
        """
        first = (side.finished or side.records)[0]
        plan = f"{first.plan.config} {first.plan}" if first.plan.world > 1 else ""
        return Cell(first.engine.name, plan)

    def name(key: str, side: Side) -> Cell:
        """Return the word for base or new, and below it the side's name unless that is the file
        name of a record.
        """
        # The id of a record is in another column, so its file name is left out.
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
    """Return paragraphs that name the runs that are not valid with their reasons, and that count
    the records that are on both sides; empty if there are none.
    """
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
    """Return a table of how far the answers of each side are from those of the base's first run, or
    a sentence if nothing is known.

    The row of the base shows how far its own other runs are from its first.
    """
    form = metric_row(found.quality).form
    named = zip(("compare.base", "compare.new"), found.answers, strict=True)
    rows = [(say(key), answer_cells(one, form, say)) for key, one in named if one is not None]
    if not any(cell != EMPTY for _, cells in rows for cell in cells.values()):
        return [Paragraph(say("compare.answers.none"))]

    def answer(name: str) -> ColumnOf[tuple[str, dict[str, Cell]]]:
        """Return the column of one kind of difference (a name in ANSWER_COLUMNS)."""
        title = say(f"engines.{name}", found.quality)
        return ColumnOf(title, lambda row: row[1][name], right=True, optional=True)

    return [table((ColumnOf(say("compare.side"), lambda row: row[0]), *map(answer, ANSWERS)), rows)]


def _metrics(found: Comparison, say: Words) -> list[Block]:
    """Return the table of metrics that changed, or a sentence if there are none, and how many are
    equal on both sides.
    """
    out: list[Block] = (
        [_changes("metric", found.metrics, say)]
        if found.metrics
        else [Paragraph(say("compare.none"))]
    )
    return [*out, Paragraph(say("compare.equal", counted(found.equal)))] if found.equal else out


def _changes(what: str, found: tuple[Change, ...], say: Words) -> Table:
    """Return a table of metrics or phases with both means, their ratio, and its direction.
    `subject` is "metric" or "phase".
    """

    def name(one: Change) -> Cell:
        """Return a metric's name as in tables, and its unit below unless it is a percentage."""
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
    """Return whether a change is better or worse and whether the test finds it significant;
    coloured only if significant, UNKNOWN if a side has no value.
    """
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
    """Return a table of the fields that differ with their values on both sides; values are
    separated by ` | ` where the runs of a side differ.
    """

    def values(every: tuple[Any, ...]) -> str:
        """Return the values of one side, joined by ` | `."""
        return " | ".join(spelled(one, depth=1) for one in every)

    columns: tuple[ColumnOf[Field], ...] = (
        ColumnOf(say("compare.field"), lambda one: one.name),
        ColumnOf(say("compare.base"), lambda one: values(one.base)),
        ColumnOf(say("compare.new"), lambda one: values(one.new)),
    )
    return table(columns, found)
