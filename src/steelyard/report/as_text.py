"""A page as plain text for a terminal or a file: untrusted text is made harmless, and columns fit
the width.
"""

from dataclasses import dataclass

from steelyard.report.document import (
    Bars,
    Block,
    Cell,
    Code,
    Column,
    Contents,
    Facts,
    Figures,
    Fold,
    Heading,
    Lines,
    Page,
    Paragraph,
    Stack,
    Table,
    walk,
)
from steelyard.report.plain import clean, lines, pad, width, wrap
from steelyard.words import Words

GAP = "  "
MAX_CELL = 44  # text wraps beyond this; numbers never do
UNLIMITED = 10 * MAX_CELL
LEAST = 8  # columns for text that would have to be broken inside of words


@dataclass(frozen=True)
class Fitted:
    """What is left of a table: columns, how wide the text of each may be, cells, and the columns
    that found no room.
    """

    columns: tuple[Column, ...]
    limits: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: tuple[Column, ...]


def fit(table: Table, columns: int | None) -> Fitted:
    """Return the columns that fit, and how wide each may be.

    Columns of priority 3 are shown where all fit without wrapping. Then text is wrapped between
    words; then columns of priority 2 go, the last first; then words are broken. A column of
    priority 1 never goes."""
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
    texts = [
        column.title,
        column.sub,
        *(part for row in table.rows for part in (row.cells[place].text, row.cells[place].sub)),
    ]
    cleaned = [clean(text) for text in texts]
    whole = max(map(width, cleaned))
    if column.align == "right":
        # a head may wrap
        words = max((width(word) for text in cleaned[:2] for word in text.split()), default=0)
        numbers = max([words, *map(width, cleaned[2:])])
        return _Needed(min(whole, UNLIMITED), numbers, numbers)
    most = min(whole, MAX_CELL)
    word = max((width(word) for text in cleaned for word in text.split()), default=0)
    return _Needed(most, min(most, word), min(most, LEAST))


def _total(widths: list[int]) -> int:
    return sum(widths) + len(GAP) * max(0, len(widths) - 1)


def _limits(needed: list[_Needed], columns: int | None) -> list[int]:
    """Return the widths of columns: each as wide as it needs, and where that is too much, the
    widest that can shrink gives way, a character at a time."""
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


LINE = 100  # where the width of the terminal is unknown
MIN_TEXT = 20  # beside a label that takes the whole line
_RULES = {1: "=", 2: "-", 3: "~"}


def text(page: Page, columns: int | None = None) -> str:
    """Return the page in lines of at most `columns` columns: text is wrapped, and tables leave out
    columns and name them below. Without a limit tables are as wide as they need."""
    return _Text(columns, Words(page.lang)).page(page)


class _Text:
    def __init__(self, columns: int | None, say: Words) -> None:
        self._columns, self._line, self._say = columns, columns or LINE, say

    def page(self, page: Page) -> str:
        parts = [part for part in map(self._block, walk(page.blocks)) if part]
        if page.footer:
            parts.append(self._wrapped(page.footer))
        return "\n\n".join(parts) + "\n"

    def _wrapped(self, said: str, indent: str = "") -> str:
        first, *more = wrap(clean(said), self._line - width(indent))
        return "\n".join([first, *(indent + line for line in more)])

    def _block(self, block: Block) -> str:
        match block:
            case Heading(level, title):
                return self._heading(level, clean(title))
            case Paragraph(said, _):
                return self._wrapped(said)
            case Facts():
                return self._facts(block)
            case Code(said):
                return "\n".join(
                    f"    {line}".rstrip() for line in lines(said).strip("\n").split("\n")
                )
            case Figures():
                return self._wrapped(f"[{block.status}] {block.text}", "  ")
            case Table():
                return self._table(block)
            case Lines() | Stack() | Bars() | Contents() | Fold():  # a fold is walked through
                return ""

    def _heading(self, level: int, title: str) -> str:
        said = wrap(title, self._columns) if self._columns else [title]
        return "\n".join(
            [*said, _RULES[level] * max(map(width, said))] if level in _RULES else said
        )

    def _facts(self, block: Facts) -> str:
        labels = [clean(item.label) for item in block.items]
        indent = min(MAX_CELL, self._line // 2, max(width(label) for label in labels) + 5)
        out = []
        for label, item in zip(labels, block.items, strict=True):
            room = max(MIN_TEXT, self._line - max(indent, width(label) + 4))
            first, *more = wrap(clean(item.text), room)
            out.append(f"- {pad(label + ':', indent - 3)} {first}")
            out += [" " * indent + line for line in more]
        return "\n".join(out)

    def _table(self, table: Table) -> str:
        fitted = fit(table, self._columns)
        shown, left_out = fitted.columns, [clean(c.title) for c in fitted.left_out]
        head = [
            _lines_of(Cell(c.title, c.sub), limit)
            for c, limit in zip(shown, fitted.limits, strict=True)
        ]
        body = [
            [_lines_of(cell, limit) for cell, limit in zip(row, fitted.limits, strict=True)]
            for row in fitted.rows
        ]
        widths = [
            max(width(line) for row in (head, *body) for line in row[place])
            for place in range(len(shown))
        ]
        rule = GAP.join("-" * columns for columns in widths)
        grid = [*_grid(head, widths, fitted), rule]
        for row in body:
            grid += _grid(row, widths, fitted)
        notes = (
            [self._say("terminal.left_out", self._say("comma").join(left_out))] if left_out else []
        )
        limit = self._columns or max(LINE, min(width(rule), 2 * LINE))
        return "\n".join(
            [
                *grid,
                *(line for note in (*table.footnotes, *notes) for line in wrap(clean(note), limit)),
            ]
        )


def _lines_of(cell: Cell, limit: int) -> list[str]:
    said = wrap(clean(cell.text), limit)
    return [*said, *wrap(clean(cell.sub), limit)] if cell.sub else said


def _grid(row: list[list[str]], widths: list[int], fitted: Fitted) -> list[str]:
    height = max(len(cell) for cell in row)
    out = []
    for line in range(height):
        texts = (cell[line] if line < len(cell) else "" for cell in row)
        out.append(
            GAP.join(
                pad(t, w, c.align) for t, w, c in zip(texts, widths, fitted.columns, strict=True)
            ).rstrip()
        )
    return out
