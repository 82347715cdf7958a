"""Compute where the lines, bars, ticks and labels of a chart lie. The HTML template writes the SVG
and escapes the texts.

Lines are drawn in a box of WIDTH x HEIGHT units that is stretched to the width of the page. Labels
are not stretched, so horizontal positions of them are percentages of the width, such as 12.5%.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from steelyard.report.document import Curve, LineChart, Panel, StackedBar

WIDTH, HEIGHT = 1000, 180
_TICKS = 5
_SMALLEST_STEP = 1e-9
_LABEL_WIDTH = 0.09  # share of a panel's width that a mark's label needs
_NEAR_START = 0.1  # share of the x axis: if a line begins before it, the axis begins at 0


@dataclass(frozen=True)
class Tick:
    """A tick or mark of an axis: its `position` as SVG writes it (a percentage such as `12.50%`
    along x; along y a number from 0, the top, to HEIGHT), and its label (`text`).
    """

    position: str
    text: str


@dataclass(frozen=True)
class LineChartGeometry:
    """The geometry of a line chart, made by `lay_out_lines`: `paths`, an SVG path for each series
    in their order (empty if all its values are gaps), `x_ticks` and `y_ticks`, and `level`, the y
    position of the horizontal line as text; None if the chart has none.
    """

    paths: tuple[str, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    level: str | None


def lay_out_lines(chart: LineChart) -> LineChartGeometry:
    """Compute the SVG paths and ticks of a line chart, about ten ticks along x and five along y;
    raises ValueError for a chart without points.

    The y axis begins at 0 and ends above the highest value and the level. The x axis begins at the
    first x, or at 0 if that is at most a tenth of the last.
    """
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points if y is not None]
    last = max(xs)
    first = min(xs) if min(xs) > last * _NEAR_START else 0.0
    x_step = tick_distance((last - first) / 2)
    # Rates, powers and clocks all start at zero: a cut axis would make noise look like a fault.
    top = max([*ys, chart.level or 0.0]) * 1.02
    y_step = tick_distance(top)
    y_ticks = [y_step * index for index in range(math.ceil(top / y_step) + 1)]
    x_ticks = [
        x_step * index for index in range(math.ceil(first / x_step), math.floor(last / x_step) + 1)
    ]
    end, highest = last if last > first else first + 1.0, y_ticks[-1] or 1.0

    def x(value: float) -> float:
        """Return the horizontal position of a value, from 0 to WIDTH."""
        return (value - first) / (end - first) * WIDTH

    def y(value: float) -> float:
        """Return the vertical position of a value: 0 is the top, HEIGHT is the value 0."""
        return HEIGHT - value / highest * HEIGHT

    return LineChartGeometry(
        tuple(_svg_path(series, x, y) for series in chart.series),
        tuple(Tick(f"{x(value) / WIDTH:.2%}", format_tick(value, x_step)) for value in x_ticks),
        tuple(Tick(f"{y(value):.1f}", format_tick(value, y_step)) for value in y_ticks),
        None if chart.level is None else f"{y(chart.level):.1f}",
    )


def tick_distance(span: float) -> float:
    """Return a round distance between ticks (1, 2 or 5 times a power of ten) that gives about five
    ticks over `span`; 1.0 for a span of almost 0.
    """
    rough = span / _TICKS
    if rough <= _SMALLEST_STEP:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(
        factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999
    )


def format_tick(value: float, step: float) -> str:
    """Format a tick's value with as many decimals as its distance to the next tick needs."""
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"


def _svg_path(series: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the SVG path of a series, an empty string if all its values are None: it moves after a
    gap, draws otherwise, and shows a lone point as a dot. `x` and `y` convert values to positions.
    """
    out, pen_down = [], False
    for x_value, value in series.points:
        if value is None:
            pen_down = False
            continue
        # The empty stroke after a move makes a lone point a dot.
        out.append(
            f"L{x(x_value):.1f} {y(value):.1f}"
            if pen_down
            else f"M{x(x_value):.1f} {y(value):.1f}h0"
        )
        pen_down = True
    return "".join(out)


def place_references(panel: Panel) -> list[Tick]:
    """Return the labelled positions of a panel's reference lines from left to right, as percentages
    of its axis with labels such as `[1, 2]`.

    Lines too close for labels of their own share one, at the position of the leftmost.
    """
    out: list[tuple[float, str]] = []
    for reference in sorted(panel.references, key=lambda reference: reference.value):
        position = _axis_position(reference.value, panel)
        if out and position - out[-1][0] < _LABEL_WIDTH:
            out[-1] = out[-1][0], f"{out[-1][1]}, {reference.mark}"
        else:
            out.append((position, reference.mark))
    return [Tick(f"{position:.2%}", f"[{text}]") for position, text in out]


def place_parts(stack: StackedBar) -> list[tuple[str, str]]:
    """Return (start, width) of each part of a stacked bar, in their order, as percentages of the
    bar, such as `12.500%`; the parts are scaled to fill it, whatever their shares add up to.
    """
    out, start = [], 0.0
    total = sum(part.share for part in stack.parts) or 1.0
    for part in stack.parts:
        out.append((f"{start:.3%}", f"{part.share / total:.3%}"))
        start += part.share / total
    return out


def axis_percentage(value: float, panel: Panel) -> str:
    """Return the position of a value on a panel's axis as a percentage of its width, at least 0 and
    at most 100.
    """
    return f"{_axis_position(value, panel):.2%}"


def _axis_position(value: float, panel: Panel) -> float:
    """Return the position of a value on a panel's axis from 0 to 1; a value beyond the axis lies at
    its end.
    """
    return min(1.0, max(0.0, (value - panel.low) / (panel.high - panel.low)))
