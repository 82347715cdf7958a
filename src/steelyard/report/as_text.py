"""Render a page as plain text for a terminal or a file.

Untrusted text is made harmless. Tables are fitted to the width of the terminal: text is wrapped and
columns of low priority are left out and named below.
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
MAX_CELL = 44  # terminal columns; longer text is wrapped, numbers never are
UNLIMITED = 10 * MAX_CELL
LEAST = 8  # terminal columns that a text keeps at least when its words are broken


@dataclass(frozen=True)
class Fitted:
    """The part of a table that fits the terminal: the columns that are shown, the width limit of
    each in terminal columns, the cells of each row for these columns, and the columns left out.
    """

    columns: tuple[Column, ...]
    limits: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: tuple[Column, ...]


def fit(table: Table, columns: int | None) -> Fitted:
    """Choose the columns of a table that fit into `columns` terminal columns, and how wide each may
    be; None means no limit, and all columns are shown.

    Columns of priority 3 go first, from the right, until the others fit without wrapping. Then text
    is wrapped between words. If that is not enough, columns of priority 2 go, from the right, and
    at last words are broken. A column of priority 1 is always shown.
    """
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
    """Remove indexes of columns of this priority from `shown`, in place and from the right, until
    the widths of the remaining ones fit.
    """
    for place in [place for place in reversed(places) if table.columns[place].priority == priority]:
        if _total([widths[one] for one in places]) <= columns:
            return
        places.remove(place)


@dataclass(frozen=True)
class _Needed:
    """Widths of a column in terminal columns: without wrapping, wrapped between words, and with
    words broken.
    """

    most: int
    least: int
    broken: int


def _needed(table: Table, place: int) -> _Needed:
    """Measure how wide a column must be. Numbers (right-aligned cells) are never wrapped, only
    their head is.
    """
    column = table.columns[place]
    texts = [
        column.title,
        column.sub,
        *(part for row in table.rows for part in (row.cells[place].text, row.cells[place].sub)),
    ]
    cleaned = [clean(text) for text in texts]
    whole = max(map(width, cleaned))
    if column.align == "right":
        # Only the head of a column of numbers may be wrapped.
        words = max((width(word) for text in cleaned[:2] for word in text.split()), default=0)
        numbers = max([words, *map(width, cleaned[2:])])
        return _Needed(min(whole, UNLIMITED), numbers, numbers)
    most = min(whole, MAX_CELL)
    word = max((width(word) for text in cleaned for word in text.split()), default=0)
    return _Needed(most, min(most, word), min(most, LEAST))


def _total(widths: list[int]) -> int:
    """Return the width of a table whose columns are this wide, with the gaps between them."""
    return sum(widths) + len(GAP) * max(0, len(widths) - 1)


def _limits(needed: list[_Needed], columns: int | None) -> list[int]:
    """Return the width limit of each column: unwrapped, and while that is too wide in total, the
    widest that can shrink loses one terminal column at a time.

    First no column shrinks below its longest word; only if that is not enough are words broken. The
    result may still be too wide.
    """
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


LINE = 100  # terminal columns, where the width of the terminal is unknown
MIN_TEXT = 20  # terminal columns for a fact's text beside a label of any length
_RULES = {1: "=", 2: "-", 3: "~"}


def text(page: Page, columns: int | None = None) -> str:
    """Return the page as plain text with lines of at most `columns` terminal columns, ending with a
    newline.

    Without a limit text is wrapped at 100 columns, and tables are as wide as they need. Charts are
    left out.
    """
    return _Text(columns, Words(page.lang)).page(page)


class _Text:
    """Renders the elements of a page as text for one line width and language."""

    def __init__(self, columns: int | None, say: Words) -> None:
        """Keep the width: `columns` for tables and headings (None is no limit), and 100 for other
        text where there is no limit.
        """
        self._columns, self._line, self._say = columns, columns or LINE, say

    def page(self, page: Page) -> str:
        """Return all elements, separated by empty lines, and the footer."""
        parts = [part for part in map(self._block, walk(page.blocks)) if part]
        if page.footer:
            parts.append(self._wrapped(page.footer))
        return "\n\n".join(parts) + "\n"

    def _wrapped(self, said: str, indent: str = "") -> str:
        """Return the text wrapped to the line width; lines after the first begin with `indent`."""
        first, *more = wrap(clean(said), self._line - width(indent))
        return "\n".join([first, *(indent + line for line in more)])

    def _block(self, block: Block) -> str:
        """Return an element as text; an empty string for charts, contents and folds."""
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
            case Lines() | Stack() | Bars() | Contents() | Fold():  # walk_elements opens folds
                return ""

    def _heading(self, level: int, title: str) -> str:
        """Return the title, underlined for levels 1 to 3; it is wrapped only if there is a limit of
        columns.
        """
        said = wrap(title, self._columns) if self._columns else [title]
        return "\n".join(
            [*said, _RULES[level] * max(map(width, said))] if level in _RULES else said
        )

    def _facts(self, block: Facts) -> str:
        """Return a bullet list with the values aligned in one column and wrapped; fails on an empty
        list.
        """
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
        """Return a table with its rule, rows, footnotes, and a line that names the columns that did
        not fit.
        """
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
    """Return the wrapped lines of a cell: its text, then its second line if it has one."""
    said = wrap(clean(cell.text), limit)
    return [*said, *wrap(clean(cell.sub), limit)] if cell.sub else said


def _grid(row: list[list[str]], widths: list[int], fitted: Fitted) -> list[str]:
    """Return the text lines of one table row from the wrapped lines of each cell, padded to the
    widths and aligned as the columns say.
    """
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
