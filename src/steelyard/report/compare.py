"""A comparison of two sides as a page: the verdict, answers first, then metrics, phases, and whatever else differs."""

from typing import Any

from steelyard.metrics.compare import Change, Comparison, Rate, Side
from steelyard.metrics.engines import Answers
from steelyard.metrics.fields import Field
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.table import row as metric_row
from steelyard.report.document import Block, Cell, Column, Heading, Lang, Page, Paragraph, Table, TableRow, Tone
from steelyard.report.engines import apart, of_items
from steelyard.report.numbers import UNKNOWN, counted, formed, spelled
from steelyard.words import Words

EMPTY = Cell(UNKNOWN)
SHOWN_RECORDS = 5  # of a side, by name; a page is for readers
_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad", "no rate": "bad"}
_DIRECTIONS: dict[str, Tone] = {"better": "good", "worse": "bad", "": "plain"}


def page(found: Comparison, lang: Lang = "en") -> Page:
    say = Words(lang)
    case = (found.base.finished or found.base.records)[0].case
    title = f"{say('compare')}: {case.name} · {case.size} · {case.precision} · {case.division}"
    blocks: list[Block] = [Heading(1, title), Paragraph(_verdict(found, say), _TONES.get(found.outcome, "strong"))]
    blocks += [_sides(found, say), *_left_out(found, say)]
    if found.across:
        blocks += [Heading(2, say("compare.across")), _fields(found.across, say)]
    blocks += [Heading(2, say("compare.answers")), *_answers(found, say)]
    blocks += [Heading(2, say("compare.metrics")), *_metrics(found, say)]
    if found.phases:
        blocks += [Heading(2, say("compare.phases")), _changes("phase", found.phases, say), *_steps(found, say)]
    blocks.append(Heading(2, say("compare.differs")))
    blocks.append(_fields(found.differs, say) if found.differs else Paragraph(say("compare.differs.none")))
    ids = ", ".join(record.id for record in (*found.base.records, *found.new.records))
    return Page(title, lang, (*blocks, Paragraph(say("compare.note"), "muted")), say("footer", ids))


def _verdict(found: Comparison, say: Words) -> str:
    if found.ratio is None:
        why = UNKNOWN if found.why is None else say(f"compare.{found.why.code}", *found.why.values)
        return say("compare.no rate", why)
    told = say(f"compare.{found.outcome}", formed("percent", found.threshold))
    return f"{say('compare.change')} {ratio_text(found.ratio, say)}: {told}"


def ratio_text(found: Ratio, say: Words) -> str:
    """A ratio with its interval, and where that comes from if not from the spread of runs."""
    value = formed("number", found.value)
    if found.interval is None:
        return value
    key = "compare.interval.steps" if found.source == "steps" else "compare.interval"
    return say(key, value, ends(found.interval))


def ends(interval: tuple[float, float], form: str = "number") -> str:
    return " – ".join(formed(form, end) for end in interval)


def _sides(found: Comparison, say: Words) -> Table:
    heads = (
        Column(say("compare.side")),
        Column(say("engine")),
        Column(say("compare.runs"), align="right"),
        Column(say("compare.rate"), found.unit, "right", True),
        Column(say("compare.records")),
    )
    named = (("compare.base", found.base, found.rates[0]), ("compare.new", found.new, found.rates[1]))
    return Table(heads, tuple(_side(say(key), side, rate) for key, side, rate in named))


def _side(name: str, side: Side, rate: Rate | None) -> TableRow:
    first = (side.finished or side.records)[0]
    ids = [record.id[:8] for record in side.records]
    more = [f"+{len(ids) - SHOWN_RECORDS}"] if len(ids) > SHOWN_RECORDS else []
    cells = (
        Cell(name, "" if side.name.endswith(".json") else side.name),  # a record has its id beside it
        Cell(first.engine.name, f"{first.plan.config} {first.plan}" if first.plan.world > 1 else ""),
        Cell(f"{counted(len(side.valid))} / {counted(len(side.records))}"),
        EMPTY if rate is None else estimate(rate.estimate.value, rate.estimate.interval),
        Cell(", ".join([*ids[:SHOWN_RECORDS], *more])),
    )
    return TableRow(cells)


def estimate(value: float, interval: tuple[float, float] | None, form: str = "number") -> Cell:
    return Cell(formed(form, value), "" if interval is None else ends(interval, form))


def _left_out(found: Comparison, say: Words) -> list[Block]:
    """Runs that are not valid, and records that are on both sides."""
    told = [
        say("compare.left_out.one", record.id[:8], side.name, ", ".join(one.code for one in record.reasons) or record.status)
        for side in (found.base, found.new)
        for record in side.left_out
    ]
    out: list[Block] = [Paragraph(say("compare.left_out", say("comma").join(told)), "bad")] if told else []
    shared = {record.id for record in found.base.records} & {record.id for record in found.new.records}
    return [*out, Paragraph(say("compare.shared", counted(len(shared))), "bad")] if shared else out


def _answers(found: Comparison, say: Words) -> list[Block]:
    known = [("compare.base", found.answers[0]), ("compare.new", found.answers[1])]
    rows = [(say(key), _answer_cells(one, found.quality, say)) for key, one in known if one is not None]
    shown = [place for place in range(len(_ANSWERS)) if any(cells[place] != EMPTY for _, cells in rows)]
    if not shown:
        return [Paragraph(say("compare.answers.none"))]
    heads = [Column(say(f"engines.{_ANSWERS[place]}", found.quality), align="right") for place in shown]
    body = (TableRow((Cell(name), *(cells[place] for place in shown))) for name, cells in rows)
    return [Table((Column(say("compare.side")), *heads), tuple(body))]


_ANSWERS = ("other", "tokens", "largest", "loss", "grad_norm", "apart")  # columns, as a table of engines has them


def _answer_cells(one: Answers, metric: str, say: Words) -> tuple[Cell, ...]:
    chosen = one.chosen
    other = EMPTY if chosen is None else of_items(chosen.other, chosen, say)
    tokens = EMPTY if chosen is None else of_items(chosen.tokens, chosen, say)
    largest = Cell(formed("number", None if chosen is None else chosen.largest))
    steps = (apart(one.loss, say), apart(one.grad_norm, say))
    return other, tokens, largest, *steps, Cell(formed(metric_row(metric).form, one.quality))


def _metrics(found: Comparison, say: Words) -> list[Block]:
    out: list[Block] = [_changes("metric", found.metrics, say)] if found.metrics else [Paragraph(say("compare.none"))]
    return [*out, Paragraph(say("compare.equal", counted(found.equal)))] if found.equal else out


def _steps(found: Comparison, say: Words) -> list[Block]:
    """Where steps are of different sizes, their times are no better or worse."""
    if found.same_steps:
        return []
    return [Paragraph(say("compare.steps", *(formed("number", one) for one in found.steps)))]


def _changes(what: str, found: tuple[Change, ...], say: Words) -> Table:
    heads = (
        Column(say(f"compare.{what}")),
        Column(say("compare.base"), align="right"),
        Column(say("compare.new"), align="right"),
        Column(say("compare.change"), align="right"),
        Column(say("compare.judged")),
    )
    return Table(heads, tuple(_change(one, say) for one in found))


def _change(one: Change, say: Words) -> TableRow:
    unit = "" if one.form == "percent" else one.unit
    values = [formed(one.form, value) for value in (one.base, one.new)]
    shown = [Cell(text) for text in values]
    ratio = EMPTY if one.ratio is None else estimate(one.ratio.value, one.ratio.interval)
    return TableRow((Cell(metric_row(one.name).index, unit), *shown, ratio, _judged(one, say)))


def _judged(one: Change, say: Words) -> Cell:
    """A direction is only claimed in colour where the test stands behind it."""
    if one.base is None or one.new is None:
        return EMPTY
    sure = one.ratio is not None and one.ratio.verdict == "significant"
    told = "not tested" if one.ratio is None else one.ratio.verdict
    word = say("compare.untested") if told == "not tested" else say(f"compare.{told}")
    return Cell(say(f"compare.{one.direction or 'other'}"), word, _DIRECTIONS[one.direction] if sure else "plain")


def _fields(found: tuple[Field, ...], say: Words) -> Table:
    heads = (Column(say("compare.field")), Column(say("compare.base")), Column(say("compare.new")))
    return Table(heads, tuple(TableRow((Cell(one.name), Cell(values(one.base)), Cell(values(one.new)))) for one in found))


def values(found: tuple[Any, ...]) -> str:
    """The values of one side; several where its runs differ."""
    return " | ".join(spelled(one, depth=1) for one in found)
