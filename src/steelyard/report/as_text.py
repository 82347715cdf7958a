"""A page as plain text: aligned columns, no escape sequence, nothing a terminal would obey."""

from collections.abc import Iterable

from steelyard.report.document import (
    Bars,
    Block,
    Cell,
    Code,
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
)
from steelyard.report.fit import GAP, MAX_CELL, Fitted, fit
from steelyard.report.plain import clean, lines, pad, width, wrap
from steelyard.words import Words

LINE = 100  # where nobody says how wide the terminal is
MIN_TEXT = 20  # beside a label that takes the whole line
_RULES = {1: "=", 2: "-", 3: "~"}


def text(page: Page, columns: int | None = None) -> str:
    """The page in lines of at most so many columns: text is wrapped, and tables leave out columns, which is said below them.
    Without a limit tables are as wide as they are."""
    return _Text(columns, Words(page.lang)).page(page)


class _Text:
    def __init__(self, columns: int | None, say: Words) -> None:
        self._columns, self._line, self._say = columns, columns or LINE, say

    def page(self, page: Page) -> str:
        parts = self._parts(page.blocks)
        if page.footer:
            parts.append(self._wrapped(page.footer))
        return "\n\n".join(parts) + "\n"

    def _parts(self, blocks: Iterable[Block]) -> list[str]:
        return [part for part in (self._block(block) for block in blocks) if part]

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
                return "\n".join(f"    {line}".rstrip() for line in lines(said).strip("\n").split("\n"))
            case Figures(title, status, _, items):
                listed = ", ".join(f"{f.label} {f.value} {f.unit}".rstrip() for f in items)
                return self._wrapped(f"[{status}] {title}: {listed}", "  ")
            case Table():
                return self._table(block)
            case Fold(heading, note, _, blocks, sub):
                said = " · ".join(part for part in (sub, note) if part)
                return "\n\n".join(self._parts((heading, *([Paragraph(said, "muted")] if said else []), *blocks)))
            case Lines() | Stack() | Bars() | Contents():
                return ""

    def _heading(self, level: int, title: str) -> str:
        said = wrap(title, self._columns) if self._columns else [title]
        return "\n".join([*said, _RULES[level] * max(map(width, said))] if level in _RULES else said)

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
        head = [_lines_of(Cell(c.title, c.sub), limit) for c, limit in zip(shown, fitted.limits, strict=True)]
        body = [[_lines_of(cell, limit) for cell, limit in zip(row, fitted.limits, strict=True)] for row in fitted.rows]
        widths = [max(width(line) for row in (head, *body) for line in row[place]) for place in range(len(shown))]
        rule = GAP.join("-" * columns for columns in widths)
        grid = [*_grid(head, widths, fitted), rule]
        for row in body:
            grid += _grid(row, widths, fitted)
        notes = [self._say("terminal.left_out", self._say("comma").join(left_out))] if left_out else []
        limit = self._columns or max(LINE, min(width(rule), 2 * LINE))
        return "\n".join([*grid, *(line for note in (*table.footnotes, *notes) for line in wrap(clean(note), limit))])


def _lines_of(cell: Cell, limit: int) -> list[str]:
    said = wrap(clean(cell.text), limit)
    return [*said, *wrap(clean(cell.sub), limit)] if cell.sub else said


def _grid(row: list[list[str]], widths: list[int], fitted: Fitted) -> list[str]:
    height = max(len(cell) for cell in row)
    out = []
    for line in range(height):
        texts = (cell[line] if line < len(cell) else "" for cell in row)
        out.append(GAP.join(pad(t, w, c.align) for t, w, c in zip(texts, widths, fitted.columns, strict=True)).rstrip())
    return out
