"""Render a page as GitHub Markdown.

Text from records stays text: it can bring no markup, link or HTML of its own. Charts and the list
of contents are left out.
"""

import re

from steelyard.report.document import (
    BarChart,
    Cell,
    Code,
    Contents,
    Facts,
    Figures,
    Fold,
    Heading,
    LineChart,
    Page,
    PageElement,
    Paragraph,
    PointChart,
    StackedBar,
    Table,
    TableColumn,
    TableRow,
    walk_elements,
)
from steelyard.report.plain_text import clean_line, clean_lines

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# An underscore inside a word is no markup on GitHub; escaping it would only make names hard to
# read.
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
_LEADING = re.compile(r"^([#+\-=]|\d+(?=[.)]))")
_TICKS = re.compile(r"`+")


def render_markdown(page: Page) -> str:
    """Return the page as GitHub Markdown that ends with a newline; the footer comes after a
    horizontal rule.

    Folds are printed in full; charts and the list of contents are left out.
    """
    parts = [part for part in map(_render_element, walk_elements(page.elements)) if part]
    if page.footer:
        parts.append(f"---\n\n{escape_markdown(page.footer)}")
    return "\n\n".join(parts) + "\n"


def escape_markdown(text: str) -> str:
    """Return the text on one line with Markdown's special characters and HTML (`&`, `<`, `>`)
    escaped and control characters removed; an underscore inside a word is not escaped.

    At the start of a line the result may still begin a list or a heading: `_escape_line_start`
    prevents that.
    """
    text = re.sub(r"[&<>]", lambda match: _ENTITIES[match[0]], clean_line(text))
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def _escape_line_start(text: str) -> str:
    """Escape a text so that it is harmless at the start of a line too, where `#`, `-`, `+`, `=` and
    `1.` begin markup.
    """
    return _LEADING.sub(
        lambda match: f"{match[0]}\\" if match[0].isdigit() else f"\\{match[0]}",
        escape_markdown(text),
    )


def _render_element(element: PageElement) -> str:
    """Return an element as Markdown; an empty string for charts and contents, which Markdown does
    not show, and for folds, which `walk_elements` has opened before.

    A paragraph of tone `strong` is bold; other tones are not shown. Headings below level 6 become
    level 6.
    """
    match element:
        case Heading(level, title):
            return f"{'#' * min(level, 6)} {escape_markdown(title)}"
        case Paragraph(said, tone):
            return (
                _make_bold(escape_markdown(said)) if tone == "strong" else _escape_line_start(said)
            )
        case Facts(items):
            return "\n".join(
                f"- {escape_markdown(item.label)}: {escape_markdown(item.text)}" for item in items
            )
        case Code(said):
            return _fence_code(clean_lines(said).strip("\n"))
        case Figures():
            return f"{_make_bold(escape_markdown(element.status))} {escape_markdown(element.text)}"
        case Table():
            return _render_table(element)
        case (
            LineChart() | PointChart() | StackedBar() | BarChart() | Contents() | Fold()
        ):  # walk_elements opens folds
            return ""


def _fence_code(text: str) -> str:
    """Return the text as a code block of language `text` whose fence is longer than any run of
    backticks in it, and at least three.
    """
    fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _make_bold(escaped: str) -> str:
    """Return text that is escaped already in bold."""
    return f"**{escaped}**"


def _render_table(table: Table) -> str:
    """Return a table as Markdown (head, rule, rows), followed by its footnotes, each a paragraph.
    All columns are shown, and priorities are ignored.
    """
    heads = [_render_head(column) for column in table.columns]
    rules = ["---:" if column.align == "right" else "---" for column in table.columns]
    rows = ([_render_cell(cell, row) for cell in row.cells] for row in table.rows)
    out = [format_table_line(heads), format_table_line(rules), *map(format_table_line, rows)]
    notes = [_escape_line_start(note) for note in table.footnotes]
    return "\n".join(out) + "".join(f"\n\n{note}" for note in notes)


def format_table_line(texts: list[str]) -> str:
    """Return a line of a Markdown table from the texts of its cells, which must be escaped."""
    return f"| {' | '.join(texts)} |"


def _render_head(column: TableColumn) -> str:
    """Return the head of a column as Markdown: its title, bold if it is strong, and its second
    line, if any, after a `<br>`; all texts are escaped.
    """
    title = (
        _make_bold(escape_markdown(column.title))
        if column.strong
        else escape_markdown(column.title)
    )
    return f"{title}<br>{escape_markdown(column.sub)}" if column.sub else title


def _render_cell(cell: Cell, row: TableRow) -> str:
    """Return a cell as Markdown: its escaped text, bold for tone `strong` or `bad`, in italics in a
    published row, and its second line, if any, after a `<br>`. Links are not shown.
    """
    content = escape_markdown(cell.text)
    if cell.tone in ("strong", "bad") and content:
        content = _make_bold(content)
    if row.kind == "published" and content:
        content = f"_{content}_"
    return f"{content}<br>{escape_markdown(cell.sub)}" if cell.sub else content
