"""A page as data: what is said, in which order, and nothing about how it looks. Tables are made
from columns.

Every string in it is untrusted and unescaped. A renderer cleans and escapes all of them, so no
builder has to remember.
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
Point = tuple[float, float | None]
RowKind = Literal["measured", "published", "total"]
Priority = Literal[1, 2, 3]  # of a column: 1 stays on the narrowest page, 3 goes first


@dataclass(frozen=True)
class Heading:
    """`anchor` is the id by which a link finds it."""

    level: int
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Fact:
    label: str
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Facts:
    """A bullet list of labelled values."""

    items: tuple[Fact, ...]


@dataclass(frozen=True)
class Code:
    """Preformatted text: the only kind that keeps its line breaks."""

    text: str


@dataclass(frozen=True)
class Column:
    title: str
    sub: str = ""
    align: Align = "left"
    strong: bool = False
    priority: Priority = 1


@dataclass(frozen=True)
class Link:
    """To an anchor on the same page."""

    text: str
    anchor: str


@dataclass(frozen=True)
class Cell:
    """`sub` is a second, quieter line. `links` say the same as `sub`, where a page can be clicked."""

    text: str
    sub: str = ""
    tone: Tone = "plain"
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class TableRow:
    cells: tuple[Cell, ...]
    kind: RowKind = "measured"


@dataclass(frozen=True)
class Table:
    """`pinned`: the first column stays in sight where the others are scrolled."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    footnotes: tuple[str, ...] = ()
    pinned: bool = False


EMPTY = Cell(UNKNOWN)


@dataclass(frozen=True)
class ColumnOf(Generic[Row]):
    """A column and what each row has in it. An optional one is left out where no row has anything
    in it."""

    title: str
    cell: Callable[[Row], Cell | str]
    sub: str = ""
    right: bool = False
    strong: bool = False
    priority: Priority = 1
    optional: bool = False

    @property
    def head(self) -> Column:
        align: Align = "right" if self.right else "left"
        return Column(self.title, self.sub, align, self.strong, self.priority)


def table(
    columns: Iterable[ColumnOf[Row]],
    rows: Iterable[Row],
    footnotes: Iterable[str] = (),
    last: Iterable[Row] = (),
    last_kind: RowKind = "total",
    tone: Callable[[Row], Tone] = lambda row: "plain",
) -> Table:
    """Return the table of these rows, and below them those of another kind. `tone` is that of cells
    that are plain text; in totals they are bold."""
    last_tone: Tone = "strong" if last_kind == "total" else "plain"
    every: list[tuple[Row, Tone, RowKind]] = [(row, tone(row), "measured") for row in rows]
    every += [(row, last_tone, last_kind) for row in last]
    cells = {one: [_cell(one.cell(row), its_tone) for row, its_tone, _ in every] for one in columns}
    empty = {one for one in cells if all(cell.text == UNKNOWN for cell in cells[one])}
    shown = [one for one in cells if not (one.optional and one in empty)]
    made = [
        TableRow(tuple(cells[one][place] for one in shown), kind)
        for place, (_, _, kind) in enumerate(every)
    ]
    return Table(tuple(one.head for one in shown), tuple(made), tuple(footnotes))


def _cell(made: Cell | str, tone: Tone) -> Cell:
    return Cell(made, tone=tone) if isinstance(made, str) else made


@dataclass(frozen=True)
class Figure:
    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True)
class Figures:
    """The headline numbers of one run."""

    title: str
    status: str
    tone: Tone
    items: tuple[Figure, ...]

    @property
    def text(self) -> str:
        """The title and all numbers on one line."""
        numbers = (f"{one.label} {one.value} {one.unit}".rstrip() for one in self.items)
        return f"{self.title}: {', '.join(numbers)}"


@dataclass(frozen=True)
class Curve:
    """Points of one line; a y of None is a gap."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Lines:
    """A chart over time. Only html draws it."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Curve, ...]
    level: float | None = None
    level_label: str = ""


@dataclass(frozen=True)
class Share:
    name: str
    share: float
    text: str


@dataclass(frozen=True)
class Stack:
    """Parts of a whole as one bar. Only html draws it; the numbers are in the table beside it."""

    title: str
    parts: tuple[Share, ...]


@dataclass(frozen=True)
class Bar:
    """A value in a chart of bars; None is not drawn. `interval` is that of 95 %. `text` has both
    for those who read it.
    """

    value: float | None
    shown: str
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Reference:
    """A value from elsewhere, such as a published one: a marked line."""

    value: float
    mark: str
    text: str


@dataclass(frozen=True)
class Panel:
    """One metric of every row. Its axis goes from `low` to `high`; a `note` says so where it does
    not begin at 0.
    """

    title: str
    unit: str
    bars: tuple[Bar, ...]
    references: tuple[Reference, ...]
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class BarRow:
    """Whose bars stand in a row. `colour` is the same for rows of the same kind; a row that is not
    `valid` is drawn hollow.
    """

    text: str
    sub: str
    colour: int = 0
    valid: bool = True


@dataclass(frozen=True)
class Bars:
    """Runs side by side, a row a run and a panel a metric. Only html draws it; the numbers are in
    the table beside it.
    """

    title: str
    rows: tuple[BarRow, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Contents:
    """Links to the parts of the page. Only html has them."""

    title: str
    items: tuple[Link, ...]


@dataclass(frozen=True)
class Fold:
    """A part of the page that is closed until it is asked for, on paper too. Other formats print it
    at its place.
    """

    heading: Heading
    note: str  # its state, in a tone
    tone: Tone
    blocks: tuple["Block", ...]
    sub: str = ""  # what tells it from others, quietly


Block = (
    Heading | Paragraph | Facts | Code | Table | Figures | Lines | Stack | Bars | Contents | Fold
)


@dataclass(frozen=True)
class Page:
    title: str
    lang: Lang
    blocks: tuple[Block, ...]
    footer: str = ""


def walk(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield every block in the order in which it is read. A fold is its heading, a line on it, and
    what is inside."""
    for block in blocks:
        if isinstance(block, Fold):
            line = " · ".join(part for part in (block.sub, block.note) if part)
            head = (block.heading, Paragraph(line, "muted")) if line else (block.heading,)
            yield from (*head, *walk(block.blocks))
        else:
            yield block
