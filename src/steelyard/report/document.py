"""A page as data: what is said, in which order, and nothing about how it looks.

Every string in it is untrusted and unescaped. A renderer cleans and escapes all of them, so no builder has to remember.
"""

from dataclasses import dataclass
from typing import Literal

from steelyard import words

Lang = words.Lang
Align = Literal["left", "right"]
Tone = Literal["plain", "strong", "muted", "good", "bad"]
Point = tuple[float, float | None]
RowKind = Literal["measured", "published", "total"]


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


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


@dataclass(frozen=True)
class Cell:
    """`sub` is a second, quieter line."""

    text: str
    sub: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class TableRow:
    cells: tuple[Cell, ...]
    kind: RowKind = "measured"


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    footnotes: tuple[str, ...] = ()


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


Block = Heading | Paragraph | Facts | Code | Table | Figures | Lines | Stack


@dataclass(frozen=True)
class Page:
    title: str
    lang: Lang
    blocks: tuple[Block, ...]
    footer: str = ""
