"""Write the tables of the documentation: `make docs` runs this file.

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. docs/tables.toml defines
each: the records it is made from and its columns. tests/test_docs.py makes every table again and
compares it with the document.
"""

import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from fixtures.records import RUNS, SPECS
from steelyard import report
from steelyard.metrics import engine_groups, estimates
from steelyard.record import ceilings_record, record
from steelyard.record.record import Record, Value
from steelyard.report.ceilings_page import SHOWN_UNITS
from steelyard.report.document import (
    Cell,
    Page,
    PageElement,
    Paragraph,
    Table,
    TableColumn,
    TableRow,
    walk_elements,
)
from steelyard.report.numbered_runs import (
    format_metric,
    format_scope,
    format_tuned_settings,
    format_unit,
)
from steelyard.report.numbers import UNKNOWN, format_count, format_number
from steelyard.words import PageWords

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PART = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
BY_ID = {path.stem[-8:]: path for path in RUNS}


@dataclass(frozen=True)
class Row:
    """A row of a table: ids of the runs whose mean it shows, ids of the runs that it is compared
    with, and a remark.

    Ids are the first eight characters, separated by spaces.
    """

    ids: str
    base: str = ""
    remark: str = ""

    @property
    def records(self) -> tuple[Record, ...]:
        return load(self.ids)


Show = Callable[[Row], Cell]


@cache
def load(ids: str) -> tuple[Record, ...]:
    """Read the records whose ids begin like these, separated by spaces."""
    return tuple(record.read_record(BY_ID[one]) for one in ids.split())


def fact(of: Callable[[Record], str]) -> Show:
    """Return a column with a fact of the runs; where they differ, each value once."""
    return lambda row: Cell(", ".join(dict.fromkeys(map(of, row.records))))


def values(ids: str, name: str) -> list[float]:
    """Return the values that a metric has in these records."""
    found = (estimates.get_metric_value(one, name) for one in load(ids))
    return [value for value in found if value is not None]


def estimate(ids: str, name: str) -> estimates.Estimate:
    """Return the mean of a metric over runs, with the interval between them if several."""
    return estimates.average_runs([estimates.Estimate(value) for value in values(ids, name)])[0]


def ends(one: estimates.Estimate) -> str:
    """Return the interval of an estimate as text; empty if it has none."""
    return " – ".join(format_number("number", end) for end in one.interval or ())


def metric(name: str) -> Show:
    """Return a column with a metric: its mean over runs, and of a rate the interval too."""

    def cell(row: Row) -> Cell:
        if not values(row.ids, name):
            return Cell(UNKNOWN)
        mean, of = estimate(row.ids, name), row.records[0].metrics[name].unit
        return Cell(
            format_metric(name, Value(value=mean.value, unit=of)), ends(mean) if "/s" in of else ""
        )

    return cell


def ratio(name: str) -> Show:
    """Return a column with a metric's ratio to that of the runs a row is compared with."""

    def cell(row: Row) -> Cell:
        one = estimates.divide_estimates(estimate(row.ids, name), estimate(row.base, name))
        return Cell(format_number("number", one.value), ends(one))

    return cell


def answers(row: Row) -> engine_groups.AnswerDifferences:
    """Compare the answers of a run with those of another."""
    [one], [base] = row.records, load(row.base)
    return engine_groups.compare_answers(base, one, estimates.choose_quality_metric([base]))


def other_answers(row: Row) -> Cell:
    """Return how many answers differ from those of the run compared with; unknown if they cannot be
    compared.
    """
    found = answers(row).chosen
    return Cell(
        UNKNOWN if found is None else f"{format_count(found.other)} of {format_count(found.items)}"
    )


def losses(row: Row) -> Cell:
    """Return the largest difference of a step's loss from the run compared with, and its step."""
    found = answers(row).loss
    text = None if found is None else f"{format_number('number', found.value)} at step {found.step}"
    return Cell(text or UNKNOWN)


def quality(row: Row) -> Cell:
    """Return the quality metric of a run, and that of the run compared with."""
    name = estimates.choose_quality_metric(load(row.base))
    own, base = (format_metric(name, load(ids)[0].metrics[name]) for ids in (row.ids, row.base))
    return Cell(f"{name} {own}", f"compared with {base}")


def status(row: Row) -> Cell:
    """Return the status and reason codes of the runs; if they differ, how many runs have each."""
    texts = (": ".join([one.status, *(why.code for why in one.reasons)]) for one in row.records)
    every = Counter(texts)
    return Cell(", ".join(f"{n} {text}" if len(every) > 1 else text for text, n in every.items()))


def seconds(of: Callable[[Record], float]) -> Show:
    """Return a column with a time: the median over the runs of a row."""
    return lambda row: Cell(f"{format_number('seconds', median(map(of, row.records)))} s")


def budget(*parts: str) -> Show:
    """Return a column with the time of parts of a run, by how their names begin."""
    return seconds(lambda one: sum(one.budget[p] for p in one.budget if p.startswith(parts)))


def headline(one: Record) -> record.PassFacts:
    """Return the pass that a run's headline rate is measured in."""
    return next(window for window in one.passes if window.pass_name in ("infer", "train"))


COLUMNS: dict[str, Show] = {
    "case": fact(lambda one: one.case.name),
    "division": fact(lambda one: one.case.division),
    "precision": fact(lambda one: one.case.precision),
    "engine": fact(lambda one: one.engine.name),
    "settings": fact(format_tuned_settings),
    "scope": fact(lambda one: format_scope(one, PageWords("en"))),
    "GPU": fact(lambda one: one.environment.hardware.devices[0].uuid.removeprefix("GPU-")[:4]),
    "status": status,
    "remark": lambda row: Cell(row.remark),
    "records": lambda row: Cell(row.ids.replace(" ", ", ")),
    "compared with": lambda row: Cell(row.base.replace(" ", ", "), status(Row(row.base)).text),
    "other settings": lambda row: COLUMNS["settings"](Row(row.base)),
    "other answers": other_answers,
    "loss of a step, largest difference": losses,
    "quality": quality,
    "pass": seconds(lambda one: headline(one).wall_s),
    "first step": seconds(lambda one: headline(one).start_s),
    "warm-up": budget("compile_", "warmup_"),
    **{part: budget(part) for part in ("agents", "launch", "imports", "weights", "calibrate")},
}


def column(name: str) -> Show:
    """Return the function that makes the cells of a column: a named column, `ratio of METRIC`, or a
    metric.
    """
    of = name.removeprefix("ratio of ")
    return COLUMNS.get(name) or (metric(name) if of == name else ratio(of))


def markdown(*blocks: PageElement) -> str:
    """Return blocks of a page as Markdown."""
    return report.render_markdown(Page("", "en", blocks))


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table of records as Markdown: one row per list of ids, base ids and remark."""
    every = [Row(*row) for row in rows]
    heads = []
    for name in columns:
        known = [one.metrics[name] for row in every for one in row.records if name in one.metrics]
        measured = bool(known) and name not in COLUMNS
        measured_in = format_unit(name, known[0]) if measured else ""
        heads.append(TableColumn(name, measured_in, "right" if measured else "left"))
    cells = [TableRow(tuple(column(name)(row) for name in columns)) for row in every]
    return markdown(Table(tuple(heads), tuple(cells)))


def engines_table(ids: str) -> str:
    """Return the table of engines side by side, and the records that it is made from."""
    made = report.build_engines_page(list(load(ids)))
    assert made is not None
    tables = (block for block in walk_elements(made.elements) if isinstance(block, Table))
    named = textwrap.fill(f"Records: {ids.replace(' ', ', ')}.", 120)
    return f"{markdown(*tables)}\n{named}\n"


PRINTED: dict[str, Callable[[list[Record]], Page | None]] = {
    "runs": report.build_summary_page,
    "engines": report.build_engines_page,
    "scaling": report.build_scaling_page,
}


def printed(ids: str, page: str, columns: int = 80) -> str:
    """Return what a terminal of so many columns shows of runs, without the note at its end, as a
    code block.
    """
    made = PRINTED[page](list(load(ids)))
    assert made is not None
    blocks = made.elements[:-1] if isinstance(made.elements[-1], Paragraph) else made.elements
    return f"```text\n{report.render_text(Page('', 'en', blocks), columns).strip()}\n```\n"


def explain(ids: str) -> str:
    """Return the waterfall that `steelyard report --explain` prints."""
    found = walk_elements(report.build_waterfall_page(list(load(ids)), "en").elements)
    return markdown(next(block for block in found if isinstance(block, Table)))


def ceilings(groups: list[str], names: list[str]) -> str:
    """Return rows of the record of `steelyard spec`: whole groups, and others by their names."""
    [path] = SPECS
    made = ceilings_record.read_spec_record(path)
    rows = []
    for bench, one in zip(made.benches, made.ceilings, strict=True):
        if one.value is not None and (bench.group in groups or bench.name in names):
            scale, name = SHOWN_UNITS[bench.unit]
            rate = f"{format_number('number', one.value / scale)} {name}"
            texts = [
                f"{bench.group}, {bench.name}",
                bench.precision or "",
                rate,
                format_number("percent", one.share),
            ]
            texts += [
                format_number("number", one.sm_clock_mhz),
                format_number("number", one.power_w),
            ]
            rows.append(TableRow(tuple(map(Cell, texts))))
    heads = ("what", "precision", "rate", "of the datasheet", "clock, MHz", "power, W")
    return markdown(Table(tuple(map(TableColumn, heads)), tuple(rows)))


def lines(pattern: str) -> int:
    """Count lines that are neither empty nor a comment; of a document, those of its Python code."""
    texts = [path.read_text() for path in ROOT.glob(pattern)]
    assert texts, pattern
    if pattern.endswith(".md"):
        texts = re.findall(r"^```python\n(.*?)^```", texts[0], re.DOTALL | re.MULTILINE)
    return sum(line.strip()[:1] not in ("", "#") for text in texts for line in text.splitlines())


def added(rows: list[list[str]]) -> str:
    """Return what can be added, with the lines of an example of it."""
    text = "| you add | it is | entry-point group | example | lines | read |\n"
    text += "|---|---|---|---|---:|---|\n"
    for what, noun, group, path, link in rows:
        named, example = group and f"`steelyard.{group}`", path and f"`{path}`"
        count = lines(path) if path else ""
        text += f"| {what} | {noun} | {named} | {example} | {count} | {link} |\n"
    return text


MAKERS: dict[str, Callable[..., str]] = {
    "table": table,
    "engines": engines_table,
    "printed": printed,
    "explain": explain,
    "ceilings": ceilings,
    "added": added,
}
TABLES = tomllib.loads((ROOT / "docs/tables.toml").read_text())


def make(name: str) -> str:
    """Return a table of docs/tables.toml as Markdown."""
    fields = dict(TABLES[name])
    return MAKERS[fields.pop("make", "table")](**fields)


def generated(text: str) -> str:
    """Return a document with all its tables made again."""
    return PART.sub(lambda found: f"{found[1]}{make(found[2])}{found[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(generated(document.read_text()))
