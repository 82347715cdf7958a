"""What the form of FlagPerf's published result pages is made of: lines, lists of metrics, tables of
values.

Labels, headings and column names are theirs, letter for letter, also where two pages differ in a
colon. What a number means is said in Steelyard's own words. A name in braces stands for values of
the records (flagperf/values.py).
"""

from dataclasses import dataclass

from steelyard.words import pair

Text = tuple[str, str]  # in English, in Chinese


@dataclass(frozen=True)
class Lines:
    """Lines that every such page has. Several values of one name stand on one line."""

    en: str
    zh: str


@dataclass(frozen=True)
class Each:
    """A line for each value of a name, after a prefix; {n} counts them."""

    prefix: str
    value: str


@dataclass(frozen=True)
class Entry:
    """A row of a list of metrics. `about` names the metric or setting whose meaning stands in its
    last cell.
    """

    name: Text
    index: Text
    about: str = ""
    strong: bool = False


@dataclass(frozen=True)
class MetricList:
    heads: tuple[Text, Text, Text]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Column:
    """A column of values: a setting, or metrics joined by a slash. `form` is how this page writes a
    number, where that is not the metric's own; a value in another unit than `unit` says so."""

    title: Text
    setting: str = ""
    metrics: tuple[str, ...] = ()
    form: str = ""
    unit: str = ""
    after: str = ""


@dataclass(frozen=True)
class ValueTable:
    """One row a run. `over` names the value of a row that stands above them."""

    columns: tuple[Column, ...]
    over: str = ""


Block = Lines | Each | MetricList | ValueTable


@dataclass(frozen=True)
class PageLayout:
    """`addresses` say where that page has the data set from; `explained` are columns that its lists
    leave out, with the metric of each; `data_noted`: its lines have no place for the data that were
    read, which stand in a note; `beside` are metrics that count as that page does, and stand in a
    note for each row."""

    blocks: tuple[Block, ...]
    addresses: tuple[Text, ...]
    dataset: Text
    category: Text
    explained: tuple[tuple[str, str], ...] = ()
    data_noted: bool = False
    beside: tuple[str, ...] = ()


def same(text: str) -> Text:
    return text, text


def see(index: str) -> Text:
    en, zh = pair("form.see")
    return en.format(index), zh.format(index)


def metric(title: str, metric: str = "", unit: str = "", form: str = "") -> Column:
    return Column(same(title), metrics=(metric or title,), unit=unit, form=form)


def setting(title: str, setting: str = "") -> Column:
    return Column(same(title), setting or title)


MEM = Column(same("mem"), metrics=("mem", "mem_total"))

SOFTWARE = Lines(*pair("form.os_version_os_kernel"))
MFU = Entry(pair("form.accelerator_utilization"), same("*MFU"), "mfu_nominal", strong=True)
