"""Tables from columns: each column has its head and a function from a row to its cell."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from steelyard.metrics.ratio import Ratio
from steelyard.metrics.runs import Estimate, Interval
from steelyard.report.document import Align, Cell, Column, Priority, RowKind, Table, TableRow, Tone
from steelyard.report.numbers import UNKNOWN, formed

Row = TypeVar("Row")
EMPTY = Cell(UNKNOWN)


@dataclass(frozen=True)
class ColumnOf(Generic[Row]):
    """A column and what each row has in it. An optional one is left out where no row has anything in it."""

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
    """Return the table of these rows, and below them those of another kind. `tone` is that of cells that are plain text;
    in totals they are bold."""
    body, below = list(rows), list(last)
    below_tone: Tone = "strong" if last_kind == "total" else "plain"
    cells = {
        one: [_cell(one.cell(row), tone(row)) for row in body] + [_cell(one.cell(row), below_tone) for row in below]
        for one in columns
    }
    shown = [one for one in cells if not one.optional or any(cell.text != UNKNOWN for cell in cells[one])]
    made = (
        TableRow(tuple(cells[one][place] for one in shown), "measured" if place < len(body) else last_kind)
        for place in range(len(body) + len(below))
    )
    return Table(tuple(one.head for one in shown), tuple(made), tuple(footnotes))


def _cell(made: Cell | str, tone: Tone) -> Cell:
    return Cell(made, tone=tone) if isinstance(made, str) else made


def estimate(one: Estimate | Ratio | None, form: str = "number", tone: Tone = "plain") -> Cell:
    """Return a number with its interval below it; EMPTY where it is not known."""
    return EMPTY if one is None else Cell(formed(form, one.value), ends(one.interval, form), tone)


def ends(interval: Interval | None, form: str = "number") -> str:
    """Format both ends of an interval; an empty text where there is none."""
    return "" if interval is None else " – ".join(formed(form, end) for end in interval)
