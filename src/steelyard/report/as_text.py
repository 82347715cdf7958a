"""Render a page as plain text for a terminal or a file.

Untrusted text is made harmless. Tables are fitted to the width of the terminal: text is wrapped and
columns of low priority are left out and named below.
"""

from dataclasses import dataclass

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
    StackedBar,
    Table,
    TableColumn,
    walk_elements,
)
from steelyard.report.plain_text import (
    clean_line,
    clean_lines,
    display_width,
    pad_to_width,
    wrap_text,
)
from steelyard.words import PageWords

GAP = "  "
MAX_CELL = 44  # terminal columns; longer text is wrapped, numbers never are
MAX_NUMBER_WIDTH = 10 * MAX_CELL
MIN_BROKEN = 8  # terminal columns that a text keeps at least when its words are broken


@dataclass(frozen=True)
class FittedTable:
    """The part of a table that fits the terminal, chosen by `fit_columns`: `columns` that are
    shown, `limits`, the greatest width of each in terminal columns (longer text is wrapped), `rows`
    with the cells of these columns, and `left_out`, the columns that are not shown.
    """

    columns: tuple[TableColumn, ...]
    limits: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: tuple[TableColumn, ...]


def fit_columns(table: Table, columns: int | None) -> FittedTable:
    """Choose the columns of a table that fit into `columns` terminal columns, and how wide each may
    be; None means no limit, and all columns are shown.

    Columns of priority 3 go first, from the right, until the others fit without wrapping. Then text
    is wrapped between words. If that is not enough, columns of priority 2 go, from the right, and
    at last words are broken. A column of priority 1 is always shown, so the result may still be too
    wide.
    """
    shown = list(range(len(table.columns)))
    widths = [_measure_column(table, index) for index in shown]
    if columns is not None:
        _drop_columns(
            3, shown, table, [column_widths.unwrapped for column_widths in widths], columns
        )
        _drop_columns(2, shown, table, [column_widths.wrapped for column_widths in widths], columns)
    limits = _width_limits([widths[index] for index in shown], columns)
    return FittedTable(
        tuple(table.columns[index] for index in shown),
        tuple(limits),
        tuple(tuple(row.cells[index] for index in shown) for row in table.rows),
        tuple(column for index, column in enumerate(table.columns) if index not in shown),
    )


def _drop_columns(
    priority: int, shown: list[int], table: Table, widths: list[int], columns: int
) -> None:
    """Remove indexes of columns of this priority from `shown`, in place and from the right, until
    the remaining ones fit into `columns` terminal columns or none of this priority is left.

    `widths` are those of all columns of the table, shown or not.
    """
    for index in [index for index in reversed(shown) if table.columns[index].priority == priority]:
        if _total_width([widths[shown_index] for shown_index in shown]) <= columns:
            return
        shown.remove(index)


@dataclass(frozen=True)
class _ColumnWidths:
    """How many terminal columns a table column needs at least: `unwrapped`, with its text `wrapped`
    between words, and with words `broken`; made by `_measure_column`.
    """

    unwrapped: int
    wrapped: int
    broken: int


def _measure_column(table: Table, index: int) -> _ColumnWidths:
    """Measure how wide a column of a table must be, over its head and all cells with their second
    lines.

    A text column counts at most MAX_CELL unwrapped, its longest word wrapped, and at most
    MIN_BROKEN with words broken. In a right-aligned column (numbers) cells are never wrapped, only
    the head is.
    """
    column = table.columns[index]
    texts = [
        column.title,
        column.sub,
        *(part for row in table.rows for part in (row.cells[index].text, row.cells[index].sub)),
    ]
    cleaned = [clean_line(text) for text in texts]
    whole = max(map(display_width, cleaned))
    if column.align == "right":
        # Only the head of a column of numbers may be wrapped.
        words = max(
            (display_width(word) for text in cleaned[:2] for word in text.split()), default=0
        )
        numbers = max([words, *map(display_width, cleaned[2:])])
        return _ColumnWidths(min(whole, MAX_NUMBER_WIDTH), numbers, numbers)
    unwrapped = min(whole, MAX_CELL)
    word = max((display_width(word) for text in cleaned for word in text.split()), default=0)
    return _ColumnWidths(unwrapped, min(unwrapped, word), min(unwrapped, MIN_BROKEN))


def _total_width(widths: list[int]) -> int:
    """Return the width of a table whose columns are this wide, with the gaps between them."""
    return sum(widths) + len(GAP) * max(0, len(widths) - 1)


def _width_limits(widths: list[_ColumnWidths], columns: int | None) -> list[int]:
    """Return the width limit of each column: unwrapped, and while that is too wide in total, the
    widest that can shrink loses one terminal column at a time.

    First no column shrinks below its longest word; only if that is not enough are words broken. The
    result may still be too wide.
    """
    limits = [column_widths.unwrapped for column_widths in widths]
    if columns is None:
        return limits
    for floor in (
        [column_widths.wrapped for column_widths in widths],
        [column_widths.broken for column_widths in widths],
    ):
        while _total_width(limits) > columns:
            shrinkable = [index for index, limit in enumerate(limits) if limit > floor[index]]
            if not shrinkable:
                break
            limits[max(shrinkable, key=lambda index: limits[index])] -= 1
    return limits


DEFAULT_WIDTH = 100  # terminal columns, where the width of the terminal is unknown
MIN_TEXT = 20  # terminal columns for a fact's text beside a label of any length
_RULES = {1: "=", 2: "-", 3: "~"}


def render_text(page: Page, columns: int | None = None) -> str:
    """Return the page as plain text that ends with a newline, wrapped to `columns` terminal
    columns. Charts are left out, and folds printed in full.

    Without a limit text is wrapped at 100 columns, and tables are as wide as they need. Code is not
    wrapped, and a table whose columns cannot shrink further is wider than the limit.
    """
    return _TextRenderer(columns, PageWords(page.lang)).render(page)


class _TextRenderer:
    """Renders a page as plain text for one line width (`columns`; None: tables and headings are not
    limited, other text is wrapped at 100) and language. `render(page)` returns the whole page; the
    private methods return one element each, an empty string for charts and contents.
    """

    def __init__(self, columns: int | None, say: PageWords) -> None:
        """Keep the width of the page's text: `columns` is the limit of tables and headings (None:
        no limit); other text is wrapped to it too, or to 100 where there is none.
        """
        self._columns, self._line_width, self._say = columns, columns or DEFAULT_WIDTH, say

    def render(self, page: Page) -> str:
        """Return all elements of the page, separated by empty lines, then the footer if there is
        one, and a newline at the end.
        """
        parts = [part for part in map(self._render_element, walk_elements(page.elements)) if part]
        if page.footer:
            parts.append(self._wrap(page.footer))
        return "\n\n".join(parts) + "\n"

    def _wrap(self, content: str, indent: str = "") -> str:
        """Return text of a page on one logical line, cleaned of control characters and wrapped to
        the line width; lines after the first begin with `indent`.
        """
        first, *more = wrap_text(clean_line(content), self._line_width - display_width(indent))
        return "\n".join([first, *(indent + line for line in more)])

    def _render_element(self, element: PageElement) -> str:
        """Return an element of a page as text; an empty string for charts and contents, and for
        folds, which `walk_elements` has opened before.

        Tones are not shown. Code is indented by four spaces, and the headline numbers of a run
        follow their status in brackets.
        """
        match element:
            case Heading(level, title):
                return self._render_heading(level, clean_line(title))
            case Paragraph(said, _):
                return self._wrap(said)
            case Facts():
                return self._render_facts(element)
            case Code(said):
                return "\n".join(
                    f"    {line}".rstrip() for line in clean_lines(said).strip("\n").split("\n")
                )
            case Figures():
                return self._wrap(f"[{element.status}] {element.text}", "  ")
            case Table():
                return self._render_table(element)
            case (
                LineChart() | StackedBar() | BarChart() | Contents() | Fold()
            ):  # walk_elements opens folds
                return ""

    def _render_heading(self, level: int, title: str) -> str:
        """Return a heading as text: the title, underlined for levels 1 (`=`), 2 (`-`) and 3 (`~`);
        it is wrapped only if there is a limit of columns.
        """
        title_lines = wrap_text(title, self._columns) if self._columns else [title]
        return "\n".join(
            [*title_lines, _RULES[level] * max(map(display_width, title_lines))]
            if level in _RULES
            else title_lines
        )

    def _render_facts(self, facts: Facts) -> str:
        """Return a bullet list of lines `- label: text` with the texts aligned in one column and
        wrapped; raise ValueError if there are no facts.

        The column of texts begins at most MAX_CELL terminal columns, and at most half of the line,
        from the left.
        """
        labels = [clean_line(item.label) for item in facts.items]
        indent = min(
            MAX_CELL, self._line_width // 2, max(display_width(label) for label in labels) + 5
        )
        out = []
        for label, item in zip(labels, facts.items, strict=True):
            room = max(MIN_TEXT, self._line_width - max(indent, display_width(label) + 4))
            first, *more = wrap_text(clean_line(item.text), room)
            out.append(f"- {pad_to_width(label + ':', indent - 3)} {first}")
            out += [" " * indent + line for line in more]
        return "\n".join(out)

    def _render_table(self, table: Table) -> str:
        """Return a table as text: head, a rule of dashes, rows, footnotes, and a line that names
        the columns that did not fit.

        Without a width limit footnotes are wrapped at the width of the table, but at 100 columns at
        least and 200 at most.
        """
        fitted = fit_columns(table, self._columns)
        shown, left_out = fitted.columns, [clean_line(c.title) for c in fitted.left_out]
        head = [
            _wrap_cell(Cell(c.title, c.sub), limit)
            for c, limit in zip(shown, fitted.limits, strict=True)
        ]
        body = [
            [_wrap_cell(cell, limit) for cell, limit in zip(row, fitted.limits, strict=True)]
            for row in fitted.rows
        ]
        widths = [
            max(display_width(line) for row in (head, *body) for line in row[index])
            for index in range(len(shown))
        ]
        rule = GAP.join("-" * columns for columns in widths)
        grid = [*_row_lines(head, widths, fitted), rule]
        for row in body:
            grid += _row_lines(row, widths, fitted)
        notes = (
            [self._say("terminal.left_out", self._say("comma").join(left_out))] if left_out else []
        )
        limit = self._columns or max(DEFAULT_WIDTH, min(display_width(rule), 2 * DEFAULT_WIDTH))
        return "\n".join(
            [
                *grid,
                *(
                    line
                    for note in (*table.footnotes, *notes)
                    for line in wrap_text(clean_line(note), limit)
                ),
            ]
        )


def _wrap_cell(cell: Cell, limit: int) -> list[str]:
    """Return the lines of a table cell, cleaned and wrapped to `limit` terminal columns: its text,
    then its second line if it has one.
    """
    text_lines = wrap_text(clean_line(cell.text), limit)
    return [*text_lines, *wrap_text(clean_line(cell.sub), limit)] if cell.sub else text_lines


def _row_lines(row: list[list[str]], widths: list[int], fitted: FittedTable) -> list[str]:
    """Return the text lines of one table row, padded to the widths and aligned as the columns say.

    `row` has the wrapped lines of each cell; the row is as high as its highest cell, and other
    cells are filled below.
    """
    height = max(len(cell) for cell in row)
    out = []
    for line in range(height):
        texts = (cell[line] if line < len(cell) else "" for cell in row)
        out.append(
            GAP.join(
                pad_to_width(t, w, c.align)
                for t, w, c in zip(texts, widths, fitted.columns, strict=True)
            ).rstrip()
        )
    return out
