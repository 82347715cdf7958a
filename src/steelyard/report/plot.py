"""Where a chart's lines, bars, ticks and labels lie. Geometry only: the template writes the svg,
and escapes.

Lines are drawn in a box of WIDTH x HEIGHT that is stretched to the width of the page; labels are
not, so they stay readable. Places along the width are shares of it, such as 12.5%.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from steelyard.report.document import Curve, Lines, Panel, Stack

WIDTH, HEIGHT = 1000, 180
_TICKS = 5
_SMALLEST_STEP = 1e-9
_LABEL = 0.09  # of a panel's width: what a mark needs
_NEAR_START = 0.1  # of the time axis: a line that begins this early is drawn from zero


@dataclass(frozen=True)
class Tick:
    at: str
    text: str


@dataclass(frozen=True)
class Plot:
    """`paths` are those of the series, in their order."""

    paths: tuple[str, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    level: str | None


def plot(chart: Lines) -> Plot:
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points if y is not None]
    last = max(xs)
    first = min(xs) if min(xs) > last * _NEAR_START else 0.0
    x_step = _step((last - first) / 2)
    # Rates, powers and clocks all start at zero: a cut axis would make noise look like a fault.
    top = max([*ys, chart.level or 0.0]) * 1.02
    y_step = _step(top)
    y_ticks = [y_step * index for index in range(math.ceil(top / y_step) + 1)]
    x_ticks = [
        x_step * index for index in range(math.ceil(first / x_step), math.floor(last / x_step) + 1)
    ]
    end, highest = last if last > first else first + 1.0, y_ticks[-1] or 1.0

    def x(value: float) -> float:
        return (value - first) / (end - first) * WIDTH

    def y(value: float) -> float:
        return HEIGHT - value / highest * HEIGHT

    return Plot(
        tuple(_path(series, x, y) for series in chart.series),
        tuple(Tick(f"{x(value) / WIDTH:.2%}", _label(value, x_step)) for value in x_ticks),
        tuple(Tick(f"{y(value):.1f}", _label(value, y_step)) for value in y_ticks),
        None if chart.level is None else f"{y(chart.level):.1f}",
    )


def _step(span: float) -> float:
    """Return a round distance between ticks."""
    rough = span / _TICKS
    if rough <= _SMALLEST_STEP:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999
    )


def _label(value: float, step: float) -> str:
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"


def _path(series: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the path of a series: it moves after a gap and draws otherwise."""
    out, pen_down = [], False
    for at, value in series.points:
        if value is None:
            pen_down = False
            continue
        # The empty stroke after a move makes a lone point a dot.
        out.append(f"L{x(at):.1f} {y(value):.1f}" if pen_down else f"M{x(at):.1f} {y(value):.1f}h0")
        pen_down = True
    return "".join(out)


def marks(panel: Panel) -> list[Tick]:
    """Return the marks of a panel's references. Those too close for a label of their own share
    one."""
    out: list[tuple[float, str]] = []
    for one in sorted(panel.references, key=lambda one: one.value):
        at = _place(one.value, panel)
        if out and at - out[-1][0] < _LABEL:
            out[-1] = out[-1][0], f"{out[-1][1]}, {one.mark}"
        else:
            out.append((at, one.mark))
    return [Tick(f"{at:.2%}", f"[{text}]") for at, text in out]


def spans(stack: Stack) -> list[tuple[str, str]]:
    """Return where each part of a bar begins and how long it is, as shares of the width."""
    out, at = [], 0.0
    total = sum(part.share for part in stack.parts) or 1.0
    for part in stack.parts:
        out.append((f"{at:.3%}", f"{part.share / total:.3%}"))
        at += part.share / total
    return out


def share(value: float, panel: Panel) -> str:
    """Return where a value lies on the axis of a panel, as a share of the width."""
    return f"{_place(value, panel):.2%}"


def _place(value: float, panel: Panel) -> float:
    return min(1.0, max(0.0, (value - panel.low) / (panel.high - panel.low)))
