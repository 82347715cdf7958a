"""The charts of a case: throughput per device, MFU and energy per token of its runs, published values as marked lines."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics.overview import Row
from steelyard.metrics.runs import Estimate
from steelyard.report.document import Bar, BarRow, Bars, Block, Panel, Reference
from steelyard.report.numbers import UNKNOWN, formed, real
from steelyard.report.results import PublishedRow, published
from steelyard.report.runs import Run, scope
from steelyard.report.setting import tuned
from steelyard.report.side_by_side import MFU_CONVENTIONS, Side, place, published_rate, sides, unit
from steelyard.words import Words

MOST = 10  # rows of a chart; the table has them all
_ALIKE = 0.1  # values that differ by less of the highest could not be told apart on an axis from 0
_BEYOND_ALL = 1e15  # no rate or energy; an axis cannot hold it
_ROOM = 1.02  # above the highest end of a bar


@dataclass(frozen=True)
class _Metric:
    title: str
    form: str
    unit: str
    of: Callable[[Row], Estimate | None]
    references: tuple[Reference, ...] = ()
    hint: str = ""


def charts(runs: list[Run], name: str, say: Words) -> list[Block]:
    """A chart for each unit in which rates are counted, of runs that have one."""
    drawn = [side for side in sides(runs) if _drawable(side.row.rate) is not None]
    kinds = list(dict.fromkeys(side.row.accelerator for side in drawn))
    out: list[Block] = []
    for its in dict.fromkeys(unit(side.row) for side in drawn):
        rows = _chosen([side for side in drawn if unit(side.row) == its])
        panels = [panel for metric in _metrics(runs, its, say) if (panel := _panel(metric, rows, say)) is not None]
        scopes = len({scope(side.row.first, say) for side in rows}) > 1
        labels = tuple(_label(side, kinds, scopes, say) for side in rows)
        out.append(Bars(say("bars.title", name), labels, tuple(panels)))
    return out


def _chosen(rows: list[Side]) -> list[Side]:
    """As many as fit a chart, in their order: the first of every accelerator, engine and precision, before others like it."""
    seen = Counter[tuple[str, str, str]]()
    ranks = []
    for number, side in enumerate(rows):
        first = side.row.first
        kind = (side.row.accelerator, first.engine.name, first.case.precision)
        ranks.append((seen[kind] > 0, number))
        seen[kind] += 1
    return [rows[number] for number in sorted(number for _, number in sorted(ranks)[:MOST])]


def _label(side: Side, kinds: list[str], scopes: bool, say: Words) -> BarRow:
    """Which row it is; its scope, where rows differ in it."""
    first = side.row.first
    said = [first.case.precision, first.case.division, tuned(first), scope(first, say) if scopes else ""]
    said += [] if side.row.valid else [say(side.row.status)]
    text = f"{side.name} · {first.engine.name}"
    return BarRow(text, " · ".join(one for one in said if one), kinds.index(side.row.accelerator), bool(side.row.valid))


def _metrics(runs: list[Run], its: str, say: Words) -> tuple[_Metric, ...]:
    references = published(runs) if runs[0].record.case.size == "full" else []
    in_samples = runs[0].record.task.rates_in_samples
    stated = [(one, published_rate(one, in_samples)) for one in references]
    rate = [(one, found[0], "published") for one, found in stated if found is not None and found[1] == its]
    mfu = [
        (one, value, word)
        for one in references
        for name, word in MFU_CONVENTIONS.items()
        if (value := real(one.values.get(name))) is not None
    ]
    return (
        _Metric(say("side.throughput"), "number", words.unit(its, say.lang), lambda row: row.rate, _best(rate, "number", say)),
        _Metric(say("side.mfu"), "percent", "", lambda row: row.mfu, _best(mfu, "percent", say)),
        _Metric(say("side.joules"), "number", "", lambda row: row.energy, hint=say("bars.lower")),
    )


def _best(found: list[tuple[PublishedRow, float, str]], form: str, say: Words) -> tuple[Reference, ...]:
    """The highest published value of each accelerator: a line for every row would hide the bars."""
    by_kind: dict[tuple[str, str], tuple[PublishedRow, float]] = {}
    for row, value, word in found:
        where = place(row)[0], word
        if 0 < value < _BEYOND_ALL and (where not in by_kind or value > by_kind[where][1]):
            by_kind[where] = row, value
    out = []
    for (kind, word), (row, value) in by_kind.items():
        mark = str(row.number)
        out.append(Reference(value, mark, say(f"bars.{word}", mark, formed(form, value), kind)))
    return tuple(out)


def _panel(metric: _Metric, rows: list[Side], say: Words) -> Panel | None:
    bars = tuple(_bar(metric, side, say) for side in rows)
    values = [bar.value for bar in bars if bar.value is not None]
    if not values:
        return None
    ends = [end for bar in bars if bar.value is not None for end in (bar.interval or (bar.value,))]
    low, high = _axis(values, [*ends, *(one.value for one in metric.references)])
    apart = formed("percent", 1 - min(values) / max(values)) if low else ""
    note = say("bars.cut", formed(metric.form, low), apart) if low else ""
    return Panel(metric.title, metric.unit or metric.hint, bars, metric.references, low, high, note)


def _axis(values: list[float], ends: list[float]) -> tuple[float, float]:
    """From 0, unless no difference could be seen; then from a round number below the lowest end."""
    high = max(*values, *ends) * _ROOM or 1.0
    lowest = min(*values, *ends)
    if len(values) < 2 or lowest <= max(values) * (1 - _ALIKE):
        return 0.0, high
    step = 10.0 ** math.floor(math.log10(high - lowest))
    return max(0.0, math.floor((lowest - (high - lowest)) / step) * step), high


def _bar(metric: _Metric, side: Side, say: Words) -> Bar:
    value = _drawable(metric.of(side.row))
    if value is None:
        return Bar(None, UNKNOWN, say("bars.unknown", metric.title))
    found = metric.of(side.row)
    ends = None if found is None else found.interval
    drawn = ends if ends is not None and all(0 <= end < _BEYOND_ALL for end in ends) else None
    shown = formed(metric.form, value)
    said = say("bars.of", metric.title, shown, metric.unit).rstrip()
    beside = "" if drawn is None else say("bars.interval", " – ".join(formed(metric.form, end) for end in drawn))
    return Bar(value, shown, said + beside, drawn)


def _drawable(found: Estimate | None) -> float | None:
    return found.value if found is not None and 0 <= found.value < _BEYOND_ALL else None
