"""A page as plain text: aligned columns, no escape sequence, nothing a terminal would obey."""

from collections.abc import Iterable

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
)
from steelyard.report.plain import clean, lines, pad, width, wrap

_LINE = 100
_MAX_CELL = 44  # left-aligned cells wrap beyond this; numbers never do
_GAP = "  "
_RULES = {1: "=", 2: "-", 3: "~"}


def text(page: Page) -> str:
    parts = _parts(page.blocks)
    if page.footer:
        parts.append("\n".join(wrap(clean(page.footer), _LINE)))
    return "\n\n".join(parts) + "\n"


def _parts(blocks: Iterable[Block]) -> list[str]:
    return [part for part in (_block(block) for block in blocks) if part]


def _block(block: Block) -> str:
    match block:
        case Heading(level, title):
            line = clean(title)
            return f"{line}\n{_RULES[level] * width(line)}" if level in _RULES else line
        case Paragraph(said, _):
            return "\n".join(wrap(clean(said), _LINE))
        case Facts():
            return _facts(block)
        case Code(said):
            return "\n".join(f"    {line}".rstrip() for line in lines(said).strip("\n").split("\n"))
        case Figures(title, status, _, items):
            listed = ", ".join(f"{f.label} {f.value} {f.unit}".rstrip() for f in items)
            return clean(f"[{status}] {title}: {listed}")
        case Table():
            return _table(block)
        case Fold(heading, note, _, blocks, sub):
            said = " · ".join(part for part in (sub, note) if part)
            return "\n\n".join(_parts((heading, *([Paragraph(said, "muted")] if said else []), *blocks)))
        case Lines() | Stack() | Bars() | Contents():
            return ""


def _facts(block: Facts) -> str:
    labels = [clean(item.label) for item in block.items]
    indent = min(_MAX_CELL, max(width(label) for label in labels) + 5)
    out = []
    for label, item in zip(labels, block.items, strict=True):
        first, *more = wrap(clean(item.text), _LINE - indent)
        out.append(f"- {pad(label + ':', indent - 3)} {first}")
        out += [" " * indent + line for line in more]
    return "\n".join(out)


def _table(table: Table) -> str:
    head = [_lines_of(Cell(c.title, c.sub), c) for c in table.columns]
    body = [[_lines_of(cell, c) for cell, c in zip(row.cells, table.columns, strict=True)] for row in table.rows]
    widths = [max(width(line) for row in (head, *body) for line in row[place]) for place in range(len(table.columns))]
    rule = _GAP.join("-" * columns for columns in widths)
    grid = [*_grid(head, widths, table.columns), rule]
    for row in body:
        grid += _grid(row, widths, table.columns)
    for note in table.footnotes:
        grid += wrap(clean(note), max(_LINE, min(width(rule), 2 * _LINE)))
    return "\n".join(grid)


def _lines_of(cell: Cell, column: Column) -> list[str]:
    limit = _MAX_CELL if column.align == "left" else 10 * _MAX_CELL
    said = wrap(clean(cell.text), limit)
    return [*said, *wrap(clean(cell.sub), limit)] if cell.sub else said


def _grid(row: list[list[str]], widths: list[int], columns: tuple[Column, ...]) -> list[str]:
    height = max(len(cell) for cell in row)
    out = []
    for line in range(height):
        texts = (cell[line] if line < len(cell) else "" for cell in row)
        out.append(_GAP.join(pad(t, w, c.align) for t, w, c in zip(texts, widths, columns, strict=True)).rstrip())
    return out
