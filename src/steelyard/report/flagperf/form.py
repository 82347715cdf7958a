"""The parts of which the form of FlagPerf's published result pages is made: fixed lines, lists of
metrics, tables of values.

Labels, headings and column names are those of FlagPerf, letter for letter, even where two of its
pages differ in a colon. What a number means is said in Steelyard's own words. A name in braces,
such as {model}, is replaced by the values of that name in flagperf/values.py.
"""

from dataclasses import dataclass

from steelyard.words import get_text_pair

TextPair = tuple[str, str]  # English, Chinese


@dataclass(frozen=True)
class FormLines:
    """Fixed lines of a page, Markdown with line breaks, in English (`en`) and Chinese (`zh`). A
    {name} in them is replaced by the page's values of that name (PAGE_VALUES and a few of the
    layout), joined by `; `; `/` if there are none.
    """

    en: str
    zh: str


@dataclass(frozen=True)
class LinePerValue:
    """One line of a page for each value of the page value named `value`, after a `prefix` in which
    {n} is the number of the line, from 1; a single line with `/` if there is no value.
    """

    prefix: str
    value: str


@dataclass(frozen=True)
class MetricListEntry:
    """A row of a list of metrics on FlagPerf's page, with three cells: `name`, `index` and a
    meaning.

    `name` and `index` (the metric's short name, or a reference made by `see_column`) are pairs of
    texts in English and Chinese, printed as they are, but for {names} of page values in `index`,
    which are filled in. `meaning_of` names the setting or metric whose meaning is the last cell,
    which is empty without it. `strong` makes name and index bold.
    """

    name: TextPair
    index: TextPair
    meaning_of: str = ""
    strong: bool = False


@dataclass(frozen=True)
class MetricList:
    """A table of a page that explains metrics: `heads`, the titles of its three columns in English
    and Chinese, and `entries`, its rows (name, index, meaning).
    """

    heads: tuple[TextPair, TextPair, TextPair]
    entries: tuple[MetricListEntry, ...]


@dataclass(frozen=True)
class ValueColumn:
    """A column of the table of values: a setting of a run (`setting`, a key of ROW_SETTINGS), or,
    if that is empty, `metrics` whose numbers are joined by a slash. `title` is a pair of texts in
    English and Chinese.

    `form` is the number format (such as "percent") if it is not that of the metric. A value in
    another unit than `unit` is printed with its unit, any other with `suffix`; an empty `unit`
    stands for any.
    """

    title: TextPair
    setting: str = ""
    metrics: tuple[str, ...] = ()
    form: str = ""
    unit: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class ValueTable:
    """The table of values of a page: `columns`, and one row per valid run. `header_value` names a
    page value (a key of PAGE_VALUES) that is printed in a row above them; empty for no such row.
    """

    columns: tuple[ValueColumn, ...]
    header_value: str = ""


FormPart = FormLines | LinePerValue | MetricList | ValueTable


@dataclass(frozen=True)
class PageLayout:
    """The form of one of FlagPerf's pages: `parts` in order (fixed lines, lines of values, lists of
    metrics, the table of values), and what differs from page to page. `dataset`, `category` and
    `addresses` (where FlagPerf gets the dataset) are texts in English and Chinese that fill {names}
    of the parts.

    `explained_columns` are (column, metric) pairs that the page's own list of metrics lacks, and
    which a note explains. With `note_data`, a note says which data was read, because the lines have
    no place for it. `noted_metrics` are counted as FlagPerf counts (with padding), and printed in a
    note on each row, not in the table.
    """

    parts: tuple[FormPart, ...]
    addresses: tuple[TextPair, ...]
    dataset: TextPair
    category: TextPair
    explained_columns: tuple[tuple[str, str], ...] = ()
    note_data: bool = False
    noted_metrics: tuple[str, ...] = ()


def same_text(text: str) -> TextPair:
    """Return a text that is equal in English and Chinese as a pair."""
    return text, text


def see_column(column: str) -> TextPair:
    """Return the text "see COLUMN" in English and in Chinese."""
    en, zh = get_text_pair("form.see")
    return en.format(column), zh.format(column)


def metric_column(title: str, metric_name: str = "", unit: str = "", form: str = "") -> ValueColumn:
    """Return a column of the table of values for one metric: `metric_name`, or the title if that is
    empty. The title is the same in both languages.
    """
    return ValueColumn(same_text(title), metrics=(metric_name or title,), unit=unit, form=form)


def setting_column(title: str, setting_name: str = "") -> ValueColumn:
    """Return a column of the table of values for one setting of a run (a key of ROW_SETTINGS):
    `setting_name`, or the title if that is empty.
    """
    return ValueColumn(same_text(title), setting_name or title)


MEM_COLUMN = ValueColumn(same_text("mem"), metrics=("mem", "mem_total"))

SOFTWARE_LINES = FormLines(*get_text_pair("form.os_version_os_kernel"))
MFU_ENTRY = MetricListEntry(
    get_text_pair("form.accelerator_utilization"), same_text("*MFU"), "mfu_nominal", strong=True
)
