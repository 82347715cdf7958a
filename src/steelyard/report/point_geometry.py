"""Compute where the points, steps, limits, ticks and labels of a point chart lie. The HTML template
writes the SVG and escapes the texts.

All positions are percentages of the drawing, so that circles and texts are not stretched with it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from steelyard.report.chart_geometry import Tick, format_tick, tick_distance
from steelyard.report.document import PlottedPoint, PointChart, PointSeries

HEIGHT = 280  # CSS pixels of the drawing
_HEADROOM = 1.12  # a linear axis ends this much above the highest value
_LOG_MARGIN = 1.35  # a logarithmic axis goes beyond its values by this factor
_LABEL_ROOM = (0.075, 0.065)  # shares of width and height that a label of a few characters needs
_TICK_ROOM = 0.06  # share of the width between the labels of ticks on a logarithmic x axis
# Where a label may stand beside its point, best first: its offset in pixels, how it is anchored,
# and where its middle is, as signs of _LABEL_ROOM.
_LABEL_PLACES = (
    (7, -6, "start", 1, -1),
    (-7, 15, "end", -1, 1),
    (-7, -6, "end", -1, -1),
    (7, 15, "start", 1, 1),
)


@dataclass(frozen=True)
class Dot:
    """A point as it is drawn: its position (`x`, `y`) as percentages, and where its label begins
    (`dx`, `dy` in pixels, `anchor` start or end).
    """

    point: PlottedPoint
    x: str
    y: str
    dx: int
    dy: int
    anchor: str


@dataclass(frozen=True)
class Segment:
    """A straight line from (x1, y1) to (x2, y2), in percentages."""

    x1: str
    y1: str
    x2: str
    y2: str


@dataclass(frozen=True)
class SeriesGeometry:
    """Where a series is drawn: its `dots`, in the order of its points, and the `segments` of its
    line.
    """

    dots: tuple[Dot, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class PointChartGeometry:
    """The geometry of a point chart, made by `lay_out_points`: `series` in their order, ticks of
    both axes, and the `limits` as segments, in their order.
    """

    series: tuple[SeriesGeometry, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limits: tuple[Segment, ...]


@dataclass(frozen=True)
class _Axis:
    """An axis from `low` to `high`; `is_log` whether it is logarithmic."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 (the beginning of the axis) to 1."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def lay_out_points(chart: PointChart) -> PointChartGeometry:
    """Compute where everything of a point chart lies; raises ValueError for a chart without points.

    A linear axis begins at 0; both kinds end beyond the highest value and limit.
    """
    points = [point for series in chart.series for point in series.points]
    limits = {axis: [line.value for line in chart.limits if line.axis == axis] for axis in "xy"}
    x_axis = _make_axis([*(point.x for point in points), *limits["x"]], chart.log_x)
    y_axis = _make_axis([*(point.y for point in points), *limits["y"]], chart.log_y)

    def x(value: float) -> float:
        """Return the horizontal position of a value, from 0 to 1."""
        return x_axis.place(value)

    def y(value: float) -> float:
        """Return the vertical position of a value: 0 is the top, 1 the beginning of the axis."""
        return 1.0 - y_axis.place(value)

    placed: list[tuple[float, float]] = []
    x_values = sorted({point.x for point in points})
    x_ticks = _space_out(x_values, x) if chart.log_x else _list_ticks(x_axis)
    return PointChartGeometry(
        tuple(
            SeriesGeometry(_place_dots(series.points, x, y, placed), _join_points(series, x, y))
            for series in chart.series
        ),
        tuple(Tick(f"{x(value):.2%}", text) for value, text in x_ticks),
        tuple(Tick(f"{y(value):.2%}", text) for value, text in _list_ticks(y_axis)),
        tuple(
            _make_segment((x(line.value), 0.0), (x(line.value), 1.0))
            if line.axis == "x"
            else _make_segment((0.0, y(line.value)), (1.0, y(line.value)))
            for line in chart.limits
        ),
    )


def _make_axis(values: Sequence[float], is_log: bool) -> _Axis:
    """Return the axis on which all values, which must be above 0, can be seen."""
    if is_log:
        return _Axis(min(values) / _LOG_MARGIN, max(values) * _LOG_MARGIN, True)
    return _Axis(0.0, max(values) * _HEADROOM, False)


def _list_ticks(axis: _Axis) -> list[tuple[float, str]]:
    """Return the ticks of an axis with their texts: about five round values, of a logarithmic one
    1, 2 and 5 times the powers of ten, or the powers alone where these are many.
    """
    if not axis.is_log:
        step = tick_distance(axis.high)
        return [
            (step * index, format_tick(step * index, step))
            for index in range(math.floor(axis.high / step * 1.000001) + 1)
        ]
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [(value, f"{value:,.10g}") for value in values if axis.low <= value <= axis.high]


def _space_out(values: Iterable[float], place: Callable[[float], float]) -> list[tuple[float, str]]:
    """Return the values with their texts as ticks, without those that would stand too near the one
    before.
    """
    out: list[tuple[float, str]] = []
    for value in values:
        if not out or place(value) - place(out[-1][0]) >= _TICK_ROOM:
            out.append((value, f"{value:,.10g}"))
    return out


def _place_dots(
    points: Sequence[PlottedPoint],
    x: Callable[[float], float],
    y: Callable[[float], float],
    placed: list[tuple[float, float]],
) -> tuple[Dot, ...]:
    """Return the points as they are drawn, each with its label at the first of `_LABEL_PLACES` that
    is inside the drawing and free of earlier labels, or at the first of all. `placed` are the
    middles of the labels so far, to which those of these points are added.
    """
    width, height = _LABEL_ROOM

    def is_free(middle: tuple[float, float]) -> bool:
        """Return whether a label may stand here."""
        inside = width / 2 <= middle[0] <= 1 - width / 2 and height / 2 <= middle[1] <= 1
        return inside and all(
            abs(middle[0] - other[0]) >= width or abs(middle[1] - other[1]) >= height
            for other in placed
        )

    out = []
    for point in points:
        at = (x(point.x), y(point.y))
        middles = [
            (at[0] + right * width * 0.7, at[1] + down * height * 0.7)
            for *_, right, down in _LABEL_PLACES
        ]
        chosen = next((index for index, middle in enumerate(middles) if is_free(middle)), 0)
        if point.label:
            placed.append(middles[chosen])
        dx, dy, anchor, _, _ = _LABEL_PLACES[chosen]
        out.append(Dot(point, f"{at[0]:.2%}", f"{at[1]:.2%}", dx, dy, anchor))
    return tuple(out)


def find_frontier(points: Iterable[PlottedPoint]) -> list[PlottedPoint]:
    """Return the solid points that no other solid one surpasses in both x and y, by growing x."""
    out: list[PlottedPoint] = []
    for point in sorted(
        (point for point in points if point.solid), key=lambda point: (-point.x, -point.y)
    ):
        if not out or point.y > out[-1].y:
            out.append(point)
    return out[::-1]


def _join_points(
    series: PointSeries, x: Callable[[float], float], y: Callable[[float], float]
) -> tuple[Segment, ...]:
    """Return the segments of a series' line. That of "steps" begins at the left edge, keeps each
    y up to its point and falls there to the next, at last to 0; that of "straight" joins
    neighbours that are both solid.
    """
    if series.line == "none":
        return ()
    if series.line == "straight":
        return tuple(
            _make_segment((x(one.x), y(one.y)), (x(other.x), y(other.y)))
            for one, other in pairwise(series.points)
            if one.solid and other.solid
        )
    corners: list[tuple[float, float]] = []
    for point in find_frontier(series.points):
        start = corners[-1][0] if corners else 0.0
        corners += [(start, y(point.y)), (x(point.x), y(point.y))]
    corners += [(corners[-1][0], 1.0)] if corners else []
    return tuple(_make_segment(one, other) for one, other in pairwise(corners))


def _make_segment(one: tuple[float, float], other: tuple[float, float]) -> Segment:
    """Return the segment between two positions, each (x, y) from 0 to 1."""
    return Segment(f"{one[0]:.2%}", f"{one[1]:.2%}", f"{other[0]:.2%}", f"{other[1]:.2%}")
