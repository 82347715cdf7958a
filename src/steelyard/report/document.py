"""A page as data: its elements in order, without any format. Builders make a `Page`; as_text, as_md
and as_html render it.

Every string in it is untrusted and unescaped: renderers clean and escape all of them, so that no
builder has to. Tables are made of `ColumnSpec` rows by `build_table`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from steelyard import words
from steelyard.report.numbers import UNKNOWN

Lang = words.Lang
Row = TypeVar("Row")
Align = Literal["left", "right"]
Tone = Literal["plain", "strong", "muted", "good", "bad", "lead"]
ChartPoint = tuple[float, float | None]
RowKind = Literal["measured", "published", "total"]
Priority = Literal[1, 2, 3]  # of a column: 1 is always shown, 3 is the first to be dropped


@dataclass(frozen=True)
class Heading:
    """A heading: `text`, `level` 1 (of the page) to 6, and `anchor`, the id that links on the page
    point to, or empty.
    """

    level: int
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text. `tone` is how HTML emphasizes or colours it: plain, strong (bold),
    muted, good, bad or lead; Markdown shows strong only, text none.
    """

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Fact:
    """A labelled value (`label`, `text`) in a list of `Facts`; `tone` colours the value in HTML."""

    label: str
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Facts:
    """An element of a page: a list of labelled values (`items`), one per line. The text format
    needs at least one.
    """

    items: tuple[Fact, ...]


@dataclass(frozen=True)
class Code:
    """Preformatted text: the only element whose line breaks are kept."""

    text: str


@dataclass(frozen=True)
class TableColumn:
    """The head of a table column.

    `sub` is a second, quieter line such as the unit; `align` is "left" or "right" (numbers), for
    cells too; `strong` makes the title bold. Columns of `priority` 1 are always shown; 2 and 3 are
    dropped from a narrow terminal or HTML page, 3 first.
    """

    title: str
    sub: str = ""
    align: Align = "left"
    strong: bool = False
    priority: Priority = 1


@dataclass(frozen=True)
class Link:
    """A link (`text`) to an `anchor` (the id of a heading) on the same page."""

    text: str
    anchor: str


@dataclass(frozen=True)
class Cell:
    """A table cell. `sub` is a second, quieter line below `text`; HTML shows `links` in its place
    if there are any. `tone` is its emphasis: Markdown makes strong and bad ones bold, text shows
    none.
    """

    text: str
    sub: str = ""
    tone: Tone = "plain"
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class TableRow:
    """A row of a table: one cell per column. `kind` is "measured", "published" (in italics in
    Markdown) or "total".
    """

    cells: tuple[Cell, ...]
    kind: RowKind = "measured"


@dataclass(frozen=True)
class Table:
    """A table: `columns`, `rows` with as many cells each, and `footnotes`, texts below it; mostly
    made by `build_table`. `pinned`: in HTML the first column stays visible while the others scroll.
    """

    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    footnotes: tuple[str, ...] = ()
    pinned: bool = False


UNKNOWN_CELL = Cell(UNKNOWN)


@dataclass(frozen=True)
class ColumnSpec(Generic[Row]):
    """A column head together with the function that makes the cell of a row, to be passed to
    `build_table`. `head` returns the head alone.

    `make_cell(row)` returns a `Cell`, or a string for a cell in the row's tone. `right` aligns to
    the right, `strong` makes the title bold, `sub` and `priority` are those of `TableColumn`. An
    `optional` column is left out of a table in which all of its cells are UNKNOWN.
    """

    title: str
    make_cell: Callable[[Row], Cell | str]
    sub: str = ""
    right: bool = False
    strong: bool = False
    priority: Priority = 1
    optional: bool = False

    @property
    def head(self) -> TableColumn:
        """Return the head of the column, without the function for its cells."""
        align: Align = "right" if self.right else "left"
        return TableColumn(self.title, self.sub, align, self.strong, self.priority)


def build_table(
    columns: Iterable[ColumnSpec[Row]],
    rows: Iterable[Row],
    footnotes: Iterable[str] = (),
    last_rows: Iterable[Row] = (),
    last_kind: RowKind = "total",
    row_tone: Callable[[Row], Tone] = lambda row: "plain",
) -> Table:
    """Build a table: the cells of `rows`, then those of `last_rows` as rows of kind `last_kind`,
    and the footnotes as given.

    A cell that a column gives as a string gets the tone `row_tone(row)`; in `last_rows` it is
    strong for totals and plain otherwise. An optional column is left out if all of its cells are
    UNKNOWN, and so in a table without rows.
    """
    last_tone: Tone = "strong" if last_kind == "total" else "plain"
    all_rows: list[tuple[Row, Tone, RowKind]] = [(row, row_tone(row), "measured") for row in rows]
    all_rows += [(row, last_tone, last_kind) for row in last_rows]
    cells = {
        column: [_as_cell(column.make_cell(row), cell_tone) for row, cell_tone, _ in all_rows]
        for column in columns
    }
    empty = {column for column in cells if all(cell.text == UNKNOWN for cell in cells[column])}
    shown = [column for column in cells if not (column.optional and column in empty)]
    table_rows = [
        TableRow(tuple(cells[column][row_index] for column in shown), kind)
        for row_index, (_, _, kind) in enumerate(all_rows)
    ]
    return Table(tuple(column.head for column in shown), tuple(table_rows), tuple(footnotes))


def _as_cell(value: Cell | str, tone: Tone) -> Cell:
    """Return a cell as it is, and a string as a cell in this tone."""
    return Cell(value, tone=tone) if isinstance(value, str) else value


@dataclass(frozen=True)
class Figure:
    """A headline number of a run: `label`, the formatted `value`, and its `unit` (empty if it has
    none).
    """

    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True)
class Figures:
    """The headline numbers (`items`) of one run, under a title and its status; `tone` colours the
    status. Property `text` is the title and all numbers on one line, which text and Markdown show
    instead.
    """

    title: str
    status: str
    tone: Tone
    items: tuple[Figure, ...]

    @property
    def text(self) -> str:
        """Return the title and all numbers with labels and units on one line, without the status,
        as text and Markdown show them.
        """
        numbers = (f"{figure.label} {figure.value} {figure.unit}".rstrip() for figure in self.items)
        return f"{self.title}: {', '.join(numbers)}"


@dataclass(frozen=True)
class Curve:
    """A named line of a chart: `points` are (x, y) pairs in drawing order; a y of None is a gap in
    it.
    """

    name: str
    points: tuple[ChartPoint, ...]


@dataclass(frozen=True)
class LineChart:
    """A line chart, drawn by HTML only, with one line (`Curve`) for each of `series`, and labels of
    both axes. `level` is a y value drawn as a horizontal line (None: no line), with `level_label`
    in the legend.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Curve, ...]
    level: float | None = None
    level_label: str = ""


@dataclass(frozen=True)
class PlottedPoint:
    """A point of a point chart at (x, y), both above 0: its `label` beside it, and `text`, its
    tooltip. One that is not `solid` is drawn hollow, and no line goes through it.
    """

    x: float
    y: float
    label: str
    text: str
    solid: bool = True


@dataclass(frozen=True)
class PointSeries:
    """The points of a point chart that belong together, in drawing order, with their `name` in the
    legend. `line` is how solid ones are joined: "steps" (the highest y at this x or any larger
    one, nothing in between), "straight", or "none". `colour` is the index of the colour (colours
    repeat after 8), `dashes` 0 for a solid line, 1 for dashes, 2 for dots.
    """

    name: str
    points: tuple[PlottedPoint, ...]
    line: Literal["steps", "straight", "none"] = "none"
    colour: int = 0
    dashes: Literal[0, 1, 2] = 0


@dataclass(frozen=True)
class ChartLimit:
    """A limit in a point chart, drawn as a line across it at `value` of the `axis`, with `text` as
    its line in the legend.
    """

    axis: Literal["x", "y"]
    value: float
    text: str


@dataclass(frozen=True)
class PointChart:
    """A chart of labelled points, drawn by HTML only; a table beside it has the numbers. `series`
    has at least one point. Axes begin at 0, or are logarithmic (`log_x`, `log_y`); on a logarithmic
    x axis the ticks are the values of the points.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[PointSeries, ...]
    limits: tuple[ChartLimit, ...] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class BarPart:
    """A part of a stacked bar, with its `name`: `share` is its part of the whole (0 to 1), `text`
    the formatted number.
    """

    name: str
    share: float
    text: str


@dataclass(frozen=True)
class StackedBar:
    """A single horizontal bar with a title that shows the `parts` of a whole in their order, drawn
    by HTML only; a table beside it has the numbers.
    """

    title: str
    parts: tuple[BarPart, ...]


@dataclass(frozen=True)
class ChartBar:
    """A bar of a bar chart; a `value` of None is not drawn.

    `shown` is the formatted number beside it, `interval` the (low, high) ends of the 95 % interval
    in the unit of `value`, drawn as a whisker (None: no whisker), `text` the tooltip with both.
    """

    value: float | None
    shown: str
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ReferenceLine:
    """A value from elsewhere, such as a published one, drawn as a line across a panel of a bar
    chart. `value` is in the unit of the panel, `mark` its short label, `text` its line in the
    legend.
    """

    value: float
    mark: str
    text: str


@dataclass(frozen=True)
class Panel:
    """One metric in a bar chart: `bars`, one for each row of the chart, on an axis from `low` to
    `high`, with `references`, published values, as lines.

    `unit` may be a hint instead, such as "lower is better". `note` says that the axis does not
    begin at 0, and is empty where it does.
    """

    title: str
    unit: str
    bars: tuple[ChartBar, ...]
    references: tuple[ReferenceLine, ...]
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class BarRow:
    """The label of a row of a bar chart: `text`, and `sub` as a quieter line below. `colour` is the
    index of its accelerator among those of the chart (colours repeat after 8); `valid` is whether
    it has a valid run, without which its bars are drawn hollow.
    """

    text: str
    sub: str
    colour: int = 0
    valid: bool = True


@dataclass(frozen=True)
class BarChart:
    """A bar chart with one row per group of repeated runs (`rows`, their labels) and one panel per
    metric (`panels`), drawn by HTML only; a table beside it has the numbers.

    Each panel has as many bars as the chart has rows, in the same order.
    """

    title: str
    rows: tuple[BarRow, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Contents:
    """A titled list of links (`items`) to headings of the page, in HTML only."""

    title: str
    items: tuple[Link, ...]


@dataclass(frozen=True)
class Fold:
    """A collapsible part of the page: a heading and `elements`. `sub` tells it from other folds,
    `note` is its state (coloured by `tone`); both may be empty.

    HTML shows heading, `sub` and `note` until a reader opens it; other formats print all of it,
    with `sub` and `note` below the heading (`walk_elements`).
    """

    heading: Heading
    note: str  # its state, coloured by `tone`
    tone: Tone
    elements: tuple["PageElement", ...]
    sub: str = ""  # what tells it from other folds, in a quieter style


PageElement = (
    Heading
    | Paragraph
    | Facts
    | Code
    | Table
    | Figures
    | LineChart
    | PointChart
    | StackedBar
    | BarChart
    | Contents
    | Fold
)


@dataclass(frozen=True)
class Page:
    """A page as data, made by the `build_*` functions: `title` (of the HTML document; the heading
    on the page is an element), `lang` ("en" or "zh"), its `elements` in order (headings,
    paragraphs, facts, tables, charts, folds, ...), and `footer`, a text at its end, or empty.
    """

    title: str
    lang: Lang
    elements: tuple[PageElement, ...]
    footer: str = ""


def walk_elements(elements: Iterable[PageElement]) -> Iterator[PageElement]:
    """Yield every element in reading order; a fold becomes its heading, a muted paragraph with its
    `sub` and `note` if it has any, and its elements.
    """
    for element in elements:
        if isinstance(element, Fold):
            line = " · ".join(part for part in (element.sub, element.note) if part)
            head = (element.heading, Paragraph(line, "muted")) if line else (element.heading,)
            yield from (*head, *walk_elements(element.elements))
        else:
            yield element
