"""Render a page as plain text for a terminal or a file.

Untrusted text is made harmless. Tables are fitted to the width of the terminal: text is wrapped,
and columns of low priority are left out and named below, or the table is split if none may be.
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
    PointChart,
    StackedBar,
    Table,
    TableColumn,
    walk_elements,
)
from steelyard.report.plain_text import (
    break_line,
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
MIN_READABLE = 20  # terminal columns of a text that is wrapped where no column may be left out
MIN_BROKEN = 8  # terminal columns that a text keeps at least when its words are broken


@dataclass(frozen=True)
class FittedTable:
    """The part of a table that fits the terminal, made by `fit_table`: `columns` that are shown,
    `limits`, the greatest width of each in terminal columns (longer text is wrapped), and `rows`
    with the cells of these columns.
    """

    columns: tuple[TableColumn, ...]
    limits: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]


def fit_table(
    table: Table, columns: int | None, all_columns: bool = False
) -> tuple[list[FittedTable], list[TableColumn]]:
    """Return the parts of a table to print below each other, none wider than `columns` terminal
    columns, and the columns that are left out. Without a limit (None) it is one part with all
    columns.

    With `all_columns` no column is left out: a table that is too wide even with its text wrapped to
    a readable width is split. Each part repeats the first column, which names the rows. Otherwise
    columns of priority 3 go first, from the right, until the others fit without wrapping; then text
    is wrapped between words; then columns of priority 2 go; at last words are broken, and the table
    is split if its columns of priority 1 do not fit even so.
    """
    shown = list(range(len(table.columns)))
    widths = [_measure_column(table, index) for index in shown]
    if columns is not None and not all_columns:
        _drop_columns(
            3, shown, table, [column_widths.unwrapped for column_widths in widths], columns
        )
        _drop_columns(2, shown, table, [column_widths.wrapped for column_widths in widths], columns)
    needed = [item.readable if all_columns else item.broken for item in widths]
    return (
        [_make_part(table, part, widths, columns) for part in _split(shown, needed, columns)],
        [column for index, column in enumerate(table.columns) if index not in shown],
    )


def _split(shown: list[int], needed: list[int], columns: int | None) -> list[list[int]]:
    """Split the indexes of shown table columns into parts that fit into `columns` terminal columns
    (None: no limit) if each is as wide as `needed` says. Each part begins with the first column
    and has at least one other, if there are others, even if these do not fit.
    """
    parts = [shown[:1]]
    for index in shown[1:]:
        longer = [*parts[-1], index]
        width = _total_width([needed[part_index] for part_index in longer])
        if columns is not None and width > columns and len(longer) > 2:
            parts.append([shown[0], index])
        else:
            parts[-1] = longer
    return parts


def _make_part(
    table: Table, part: list[int], widths: list["_ColumnWidths"], columns: int | None
) -> FittedTable:
    """Return the columns of a table with the indexes in `part` as a table of at most `columns`
    terminal columns (None: no limit). `widths` are those of all columns.
    """
    return FittedTable(
        tuple(table.columns[index] for index in part),
        tuple(_width_limits([widths[index] for index in part], columns)),
        tuple(tuple(row.cells[index] for index in part) for row in table.rows),
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
    """How many terminal columns a table column needs at least: `unwrapped`, with its text wrapped
    and still `readable`, `wrapped` between words wherever possible, and with words `broken`; made
    by `_measure_column`.
    """

    unwrapped: int
    readable: int
    wrapped: int
    broken: int


def _measure_column(table: Table, index: int) -> _ColumnWidths:
    """Measure how wide a column of a table must be, over its head and all cells with their second
    lines.

    A text column counts at most MAX_CELL unwrapped, MIN_READABLE readable or its longest word if
    that is longer, its longest word wrapped, and at most MIN_BROKEN with words broken. In a
    right-aligned column (numbers) only the head is wrapped.
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
        return _ColumnWidths(min(whole, MAX_NUMBER_WIDTH), numbers, numbers, numbers)
    unwrapped = min(whole, MAX_CELL)
    word = max((display_width(word) for text in cleaned for word in text.split()), default=0)
    return _ColumnWidths(
        unwrapped,
        min(unwrapped, max(word, MIN_READABLE)),
        min(unwrapped, word),
        min(unwrapped, MIN_BROKEN),
    )


def _total_width(widths: list[int]) -> int:
    """Return the width of a table whose columns are this wide, with the gaps between them."""
    return sum(widths) + len(GAP) * max(0, len(widths) - 1)


def _width_limits(widths: list[_ColumnWidths], columns: int | None) -> list[int]:
    """Return the width limit of each column: unwrapped, and while that is too wide in total, the
    widest that can shrink loses one terminal column at a time.

    First no text shrinks below a readable width, then none below its longest word; only if that is
    not enough are words broken, and at last the texts of right-aligned columns too. The result is
    still too wide only for more columns than fit with MIN_BROKEN each.
    """
    limits = [column_widths.unwrapped for column_widths in widths]
    if columns is None:
        return limits
    for floor in (
        [column_widths.readable for column_widths in widths],
        [column_widths.wrapped for column_widths in widths],
        [column_widths.broken for column_widths in widths],
        [min(column_widths.broken, MIN_BROKEN) for column_widths in widths],
    ):
        while _total_width(limits) > columns:
            shrinkable = [index for index, limit in enumerate(limits) if limit > floor[index]]
            if not shrinkable:
                break
            limits[max(shrinkable, key=lambda index: limits[index])] -= 1
    return limits


DEFAULT_WIDTH = 100  # terminal columns, where the width of the terminal is unknown
MIN_TEXT = 20  # terminal columns that a fact's text has beside its label
CODE_INDENT = "    "
_RULES = {1: "=", 2: "-", 3: "~"}


def render_text(page: Page, columns: int | None = None, all_columns: bool = False) -> str:
    """Return the page as plain text that ends with a newline, wrapped to `columns` terminal
    columns. Charts are left out, and folds printed in full.

    Without a limit text is wrapped at 100 columns, tables are as wide as they need, and code is not
    wrapped. With a limit a table that is too wide is printed without some of its columns, or with
    `all_columns` in parts below each other.
    """
    return _TextRenderer(columns, all_columns, PageWords(page.lang)).render(page)


class _TextRenderer:
    """Renders a page as plain text for one line width (`columns`; None: tables, headings and code
    are not limited, other text is wrapped at 100) and language. `all_columns`: tables that are too
    wide are split. `render(page)` returns the whole page; the private methods return one element
    each, an empty string for charts and contents.
    """

    def __init__(self, columns: int | None, all_columns: bool, say: PageWords) -> None:
        """Keep the width of the page's text: `columns` is the limit of tables, headings and code
        (None: no limit); other text is wrapped to it too, or to 100 where there is none.
        """
        self._columns, self._line_width, self._say = columns, columns or DEFAULT_WIDTH, say
        self._all_columns = all_columns

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
                    f"{CODE_INDENT}{part}".rstrip()
                    for line in clean_lines(said).strip("\n").split("\n")
                    for part in self._break_code(line)
                )
            case Figures():
                return self._wrap(f"[{element.status}] {element.text}", "  ")
            case Table():
                return self._render_table(element)
            case (
                LineChart() | PointChart() | StackedBar() | BarChart() | Contents() | Fold()
            ):  # walk_elements opens folds
                return ""

    def _break_code(self, line: str) -> list[str]:
        """Return a line of code in pieces that fit the limit of columns behind its indent; as it is
        without a limit. Spaces are kept.
        """
        return (
            [line] if self._columns is None else break_line(line, self._columns - len(CODE_INDENT))
        )

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
        from the left. Where a label leaves a text less than MIN_TEXT columns, the text is below it.
        """
        labels = [clean_line(item.label) for item in facts.items]
        indent = min(
            MAX_CELL, self._line_width // 2, max(display_width(label) for label in labels) + 5
        )
        out = []
        for label, item in zip(labels, facts.items, strict=True):
            room = self._line_width - max(indent, display_width(label) + 4)
            if room < MIN_TEXT:
                out.append(self._wrap(f"- {label}:", "  "))
                more = wrap_text(clean_line(item.text), self._line_width - indent)
            else:
                first, *more = wrap_text(clean_line(item.text), room)
                out.append(f"- {pad_to_width(label + ':', indent - 3)} {first}")
            out += [" " * indent + line for line in more]
        return "\n".join(out)

    def _render_table(self, table: Table) -> str:
        """Return a table as text: for each of its parts, separated by empty lines, head, a rule of
        dashes and rows; then footnotes, and a line that names the columns that did not fit.

        Without a width limit footnotes are wrapped at the width of the table, but at 100 columns at
        least and 200 at most.
        """
        parts, left_out = fit_table(table, self._columns, self._all_columns)
        grids = [_grid_lines(part) for part in parts]
        lines = [line for grid in grids for line in ("", *grid)][1:]
        notes = list(table.footnotes)
        if left_out:
            titles = self._say("comma").join(clean_line(column.title) for column in left_out)
            notes.append(self._say("terminal.left_out", titles))
        table_width = max(map(display_width, lines))
        limit = self._columns or max(DEFAULT_WIDTH, min(table_width, 2 * DEFAULT_WIDTH))
        note_lines = (line for note in notes for line in wrap_text(clean_line(note), limit))
        return "\n".join([*lines, *note_lines])


def _grid_lines(part: FittedTable) -> list[str]:
    """Return the lines of a part of a table: head, a rule of dashes, and rows."""
    head = [
        _wrap_cell(Cell(column.title, column.sub), limit)
        for column, limit in zip(part.columns, part.limits, strict=True)
    ]
    body = [
        [_wrap_cell(cell, limit) for cell, limit in zip(row, part.limits, strict=True)]
        for row in part.rows
    ]
    widths = [
        max(display_width(line) for row in (head, *body) for line in row[index])
        for index in range(len(part.columns))
    ]
    lines = [*_row_lines(head, widths, part), GAP.join("-" * width for width in widths)]
    for row in body:
        lines += _row_lines(row, widths, part)
    return lines


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
