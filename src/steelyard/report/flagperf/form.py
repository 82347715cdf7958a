"""The parts of which the form of FlagPerf's published result pages is made: fixed lines, lists of
metrics, tables of values.

Labels, headings and column names are those of FlagPerf, letter for letter, even where two of its
pages differ in a colon. What a number means is said in Steelyard's own words. A name in braces,
such as {model}, is replaced by the values of that name in flagperf/values.py.
"""

from dataclasses import dataclass

from steelyard.words import pair

Text = tuple[str, str]  # English, Chinese


@dataclass(frozen=True)
class Lines:
    """Fixed lines of a page in English and in Chinese. A {name} in them is replaced by its values,
    several on one line.
    """

    en: str
    zh: str


@dataclass(frozen=True)
class Each:
    """One line for each value of the name `value`, after a prefix in which {n} is the number of the
    line, from 1.
    """

    prefix: str
    value: str


@dataclass(frozen=True)
class Entry:
    """A row in a list of metrics. `meaning_of` names the metric or setting whose meaning is printed
    in the last cell.
    """

    name: Text
    index: Text
    about: str = ""
    strong: bool = False


@dataclass(frozen=True)
class MetricList:
    """A table that explains metrics: the titles of its three columns, and its rows."""

    heads: tuple[Text, Text, Text]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Column:
    """A column of the table of values: a setting (a name in ROW_SETTINGS), or metrics joined by a
    slash.

    `form` is the number format if it is not that of the metric. A value in another unit than `unit`
    is printed with its unit, any other with `suffix`.
    """

    title: Text
    setting: str = ""
    metrics: tuple[str, ...] = ()
    form: str = ""
    unit: str = ""
    after: str = ""


@dataclass(frozen=True)
class ValueTable:
    """The table of values, one row per valid run. `header_value` names a page value that is printed
    in a row above them.
    """

    columns: tuple[Column, ...]
    over: str = ""


Block = Lines | Each | MetricList | ValueTable


@dataclass(frozen=True)
class PageLayout:
    """The form of one of FlagPerf's pages: its parts in order, and what differs from page to page.

    `addresses` are where FlagPerf gets the dataset. `explained_columns` are (column, metric) pairs
    that its lists do not explain, and which a note does. With `note_data`, a note says which data
    was read, because the lines have no place for it. `noted_metrics` count as that page does, and
    stand in a note for each row.
    """

    blocks: tuple[Block, ...]
    addresses: tuple[Text, ...]
    dataset: Text
    category: Text
    explained: tuple[tuple[str, str], ...] = ()
    data_noted: bool = False
    beside: tuple[str, ...] = ()


def same(text: str) -> Text:
    """Return a text that is equal in English and Chinese as a pair."""
    return text, text


def see(index: str) -> Text:
    """Return the text "see COLUMN" in English and in Chinese."""
    en, zh = pair("form.see")
    return en.format(index), zh.format(index)


def metric(title: str, metric: str = "", unit: str = "", form: str = "") -> Column:
    """Return a column for one metric: `metric_name`, or the title if that is empty."""
    return Column(same(title), metrics=(metric or title,), unit=unit, form=form)


def setting(title: str, setting: str = "") -> Column:
    """Return a column for one setting: `setting_name`, or the title if that is empty."""
    return Column(same(title), setting or title)


MEM = Column(same("mem"), metrics=("mem", "mem_total"))

SOFTWARE = Lines(*pair("form.os_version_os_kernel"))
MFU = Entry(pair("form.accelerator_utilization"), same("*MFU"), "mfu_nominal", strong=True)
