"""Which columns of a table a terminal shows, and how wide each may be."""

from dataclasses import dataclass

from steelyard.report.document import Cell, Column, Table
from steelyard.report.plain import clean, width

GAP = "  "
MAX_CELL = 44  # text wraps beyond this; numbers never do
UNLIMITED = 10 * MAX_CELL
LEAST = 8  # columns for text that would have to be broken inside of words


@dataclass(frozen=True)
class Fitted:
    """What is left of a table: columns, how wide the text of each may be, cells, and the columns that found no room."""

    columns: tuple[Column, ...]
    limits: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: tuple[Column, ...]


def fit(table: Table, columns: int | None) -> Fitted:
    """Columns of priority 3 are shown where all fit without wrapping. Then text is wrapped between words; then columns of
    priority 2 go, the last first; then words are broken. A column of priority 1 never goes."""
    places = list(range(len(table.columns)))
    needed = [_needed(table, place) for place in places]
    if columns is not None:
        _drop(3, places, table, [one.most for one in needed], columns)
        _drop(2, places, table, [one.least for one in needed], columns)
    limits = _limits([needed[place] for place in places], columns)
    return Fitted(
        tuple(table.columns[place] for place in places),
        tuple(limits),
        tuple(tuple(row.cells[place] for place in places) for row in table.rows),
        tuple(column for place, column in enumerate(table.columns) if place not in places),
    )


def _drop(priority: int, places: list[int], table: Table, widths: list[int], columns: int) -> None:
    """Take columns of this priority away, the last first, until the others have room."""
    for place in [place for place in reversed(places) if table.columns[place].priority == priority]:
        if _total([widths[one] for one in places]) <= columns:
            return
        places.remove(place)


@dataclass(frozen=True)
class _Needed:
    """How wide a column is if it may be, if it must be, and where words are broken."""

    most: int
    least: int
    broken: int


def _needed(table: Table, place: int) -> _Needed:
    column = table.columns[place]
    texts = [column.title, column.sub, *(part for row in table.rows for part in (row.cells[place].text, row.cells[place].sub))]
    cleaned = [clean(text) for text in texts]
    whole = max(map(width, cleaned))
    if column.align == "right":
        words = max((width(word) for text in cleaned[:2] for word in text.split()), default=0)  # a head may wrap
        numbers = max([words, *map(width, cleaned[2:])])
        return _Needed(min(whole, UNLIMITED), numbers, numbers)
    most = min(whole, MAX_CELL)
    word = max((width(word) for text in cleaned for word in text.split()), default=0)
    return _Needed(most, min(most, word), min(most, LEAST))


def _total(widths: list[int]) -> int:
    return sum(widths) + len(GAP) * max(0, len(widths) - 1)


def _limits(needed: list[_Needed], columns: int | None) -> list[int]:
    """As wide as they like, less what is too much, a column at a time from the widest that can give."""
    limits = [one.most for one in needed]
    if columns is None:
        return limits
    for floor in ([one.least for one in needed], [one.broken for one in needed]):
        while _total(limits) > columns:
            able = [place for place, limit in enumerate(limits) if limit > floor[place]]
            if not able:
                break
            limits[max(able, key=lambda place: limits[place])] -= 1
    return limits
