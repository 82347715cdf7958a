"""Render a page as GitHub Markdown.

Text from records stays text: it can bring no markup, link or HTML of its own. Charts and the list
of contents are left out.
"""

import re

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
    TableRow,
    walk,
)
from steelyard.report.plain import clean, lines

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# An underscore inside a word is no markup on GitHub; escaping it would only make names hard to
# read.
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
_LEADING = re.compile(r"^([#+\-=]|\d+(?=[.)]))")
_TICKS = re.compile(r"`+")


def md(page: Page) -> str:
    """Return the page as Markdown that ends with a newline; the footer comes after a horizontal
    rule.
    """
    parts = [part for part in map(_block, walk(page.blocks)) if part]
    if page.footer:
        parts.append(f"---\n\n{escape(page.footer)}")
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Return the text on one line with Markdown's special characters and HTML escaped.

    At the start of a line it may still begin a list or a heading: `_escape_line_start` prevents
    that.
    """
    text = re.sub(r"[&<>]", lambda found: _ENTITIES[found[0]], clean(text))
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", text)


def _opening(text: str) -> str:
    """Escape a text so that it is harmless at the start of a line too, where `#`, `-`, `+`, `=` and
    `1.` begin markup.
    """
    return _LEADING.sub(
        lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", escape(text)
    )


def _block(block: Block) -> str:
    """Return an element as Markdown; an empty string for charts, contents and folds, which Markdown
    does not show.
    """
    match block:
        case Heading(level, title):
            return f"{'#' * min(level, 6)} {escape(title)}"
        case Paragraph(said, tone):
            return _strong(escape(said)) if tone == "strong" else _opening(said)
        case Facts(items):
            return "\n".join(f"- {escape(item.label)}: {escape(item.text)}" for item in items)
        case Code(said):
            return _fenced(lines(said).strip("\n"))
        case Figures():
            return f"{_strong(escape(block.status))} {escape(block.text)}"
        case Table():
            return _table(block)
        case Lines() | Stack() | Bars() | Contents() | Fold():  # walk_elements opens folds
            return ""


def _fenced(text: str) -> str:
    """Return the text as a code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _strong(escaped: str) -> str:
    """Return text that is escaped already in bold."""
    return f"**{escaped}**"


def _table(table: Table) -> str:
    """Return a table as Markdown, followed by its footnotes, each a paragraph."""
    heads = [_head(column) for column in table.columns]
    rules = ["---:" if column.align == "right" else "---" for column in table.columns]
    rows = ([_cell(cell, row) for cell in row.cells] for row in table.rows)
    out = [line(heads), line(rules), *map(line, rows)]
    notes = [_opening(note) for note in table.footnotes]
    return "\n".join(out) + "".join(f"\n\n{note}" for note in notes)


def line(texts: list[str]) -> str:
    """Return a line of a Markdown table from the texts of its cells, which must be escaped."""
    return f"| {' | '.join(texts)} |"


def _head(column: Column) -> str:
    """Return the escaped title of a column, bold if it is strong, with its second line after a
    `<br>`.
    """
    title = _strong(escape(column.title)) if column.strong else escape(column.title)
    return f"{title}<br>{escape(column.sub)}" if column.sub else title


def _cell(cell: Cell, row: TableRow) -> str:
    """Return the escaped text of a cell: bold if it is strong or bad, in italics in a published
    row, its second line after a `<br>`.
    """
    said = escape(cell.text)
    if cell.tone in ("strong", "bad") and said:
        said = _strong(said)
    if row.kind == "published" and said:
        said = f"_{said}_"
    return f"{said}<br>{escape(cell.sub)}" if cell.sub else said
