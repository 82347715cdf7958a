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
    """A heading of level 1 (the page) to 6; `anchor` is the id that links on the page point to, or
    empty.
    """

    level: int
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text; the tone is how it is emphasized or coloured."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Fact:
    """A labelled value in a list of facts."""

    label: str
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Facts:
    """A list of labelled values, one per line."""

    items: tuple[Fact, ...]


@dataclass(frozen=True)
class Code:
    """Preformatted text: the only element whose line breaks are kept."""

    text: str


@dataclass(frozen=True)
class TableColumn:
    """The head of a table column.

    `sub` is a second, quieter line such as the unit; `strong` makes the title bold. `priority` 1 is
    always shown, 2 and 3 are dropped from a narrow page, 3 first.
    """

    title: str
    sub: str = ""
    align: Align = "left"
    strong: bool = False
    priority: Priority = 1


@dataclass(frozen=True)
class Link:
    """A link to an anchor on the same page."""

    text: str
    anchor: str


@dataclass(frozen=True)
class Cell:
    """A table cell. `sub` is a second, quieter line; HTML shows `links` in its place if there are
    any.
    """

    text: str
    sub: str = ""
    tone: Tone = "plain"
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class TableRow:
    """A row of a table: one cell per column. `kind` tells measured rows from published ones and
    totals.
    """

    cells: tuple[Cell, ...]
    kind: RowKind = "measured"


@dataclass(frozen=True)
class Table:
    """A table; every row has as many cells as there are columns. `pinned`: in HTML the first column
    stays visible while the others scroll.
    """

    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    footnotes: tuple[str, ...] = ()
    pinned: bool = False


UNKNOWN_CELL = Cell(UNKNOWN)


@dataclass(frozen=True)
class ColumnSpec(Generic[Row]):
    """A column head together with the function that makes the cell of a row, to be passed to
    `build_table`.

    `make_cell` returns a `Cell`, or a string for a cell in the row's tone. `right` aligns to the
    right. An `optional` column is left out of a table in which all of its cells are UNKNOWN. `sub`
    and `priority` are those of `TableColumn`.
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
    """A headline number, formatted, with its label and unit."""

    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True)
class Figures:
    """The headline numbers of one run, under a title and its status; `tone` colours the status.
    `text` is the line that text and Markdown show instead.
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
    """A named line of a chart; a y of None is a gap in it."""

    name: str
    points: tuple[ChartPoint, ...]


@dataclass(frozen=True)
class LineChart:
    """A line chart, drawn by HTML only, with one line for each of `series`. `level` is a y value
    drawn as a horizontal line (None: no line), with `level_label` in the legend.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Curve, ...]
    level: float | None = None
    level_label: str = ""


@dataclass(frozen=True)
class BarPart:
    """A part of a stacked bar: `share` is its part of the whole (0 to 1), `text` the formatted
    number.
    """

    name: str
    share: float
    text: str


@dataclass(frozen=True)
class StackedBar:
    """A single horizontal bar that shows the parts of a whole, drawn by HTML only; a table beside
    it has the numbers.
    """

    title: str
    parts: tuple[BarPart, ...]


@dataclass(frozen=True)
class ChartBar:
    """A bar of a bar chart; a value of None is not drawn.

    `shown` is the formatted number beside it, `interval` the 95 % interval drawn as a whisker,
    `text` the tooltip with both.
    """

    value: float | None
    shown: str
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ReferenceLine:
    """A value from elsewhere, such as a published one, drawn as a line across a panel. `mark` is
    its short label, `text` its line in the legend.
    """

    value: float
    mark: str
    text: str


@dataclass(frozen=True)
class Panel:
    """One metric in a bar chart: a bar for each row of the chart, on an axis from `low` to `high`,
    with published values as lines (`references`).

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
    index of its accelerator in the chart; a row without a `valid` run is drawn hollow.
    """

    text: str
    sub: str
    colour: int = 0
    valid: bool = True


@dataclass(frozen=True)
class BarChart:
    """A bar chart with one row per group of repeated runs and one panel per metric, drawn by HTML
    only; a table beside it has the numbers.

    Each panel has as many bars as the chart has rows.
    """

    title: str
    rows: tuple[BarRow, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Contents:
    """A list of links to the headings of the page, in HTML only."""

    title: str
    items: tuple[Link, ...]


@dataclass(frozen=True)
class Fold:
    """A collapsible part of the page. HTML shows heading, `sub` and `note` until a reader opens it;
    other formats print all of it, with `sub` and `note` below the heading.
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
    | StackedBar
    | BarChart
    | Contents
    | Fold
)


@dataclass(frozen=True)
class Page:
    """A page: title (of the HTML document; the heading on the page is an element), language, its
    elements in order, and `footer`, a text at its end, or empty.
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
