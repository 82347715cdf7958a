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
from steelyard.metrics import engine_groups, estimates, ratio, standing
from steelyard.metrics.verdict import judge_engines
from steelyard.record import ceilings_record, record
from steelyard.record.record import Record, Status, Value
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
    format_load,
    format_metric,
    format_scope,
    format_tuned_settings,
    format_unit,
)
from steelyard.report.numbers import UNKNOWN, format_count, format_number
from steelyard.words import PageWords

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE_SECTION = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
PATH_BY_ID = {path.stem[-8:]: path for path in RUNS}


@dataclass(frozen=True)
class DocsRow:
    """A row of a table: ids of the runs whose mean it shows, ids of the runs that it is compared
    with, and a remark.

    Ids are the first eight characters, separated by spaces.
    """

    ids: str
    base: str = ""
    remark: str = ""

    @property
    def records(self) -> tuple[Record, ...]:
        return load_records(self.ids)


CellMaker = Callable[[DocsRow], Cell]


@cache
def load_records(ids: str) -> tuple[Record, ...]:
    """Read the records whose ids begin like these, separated by spaces."""
    return tuple(record.read_record(PATH_BY_ID[record_id]) for record_id in ids.split())


def make_fact_column(read_fact: Callable[[Record], str]) -> CellMaker:
    """Return a column with a fact of the runs; where they differ, each value once."""
    return lambda row: Cell(", ".join(dict.fromkeys(map(read_fact, row.records))))


def read_metric_values(ids: str, name: str) -> list[float]:
    """Return the values that a metric has in these records."""
    values_or_none = (estimates.get_metric_value(run, name) for run in load_records(ids))
    return [value for value in values_or_none if value is not None]


def estimate_mean(ids: str, name: str) -> estimates.Estimate:
    """Return the mean of a metric over runs, with the interval between them if several."""
    return estimates.average_runs(
        [estimates.Estimate(value) for value in read_metric_values(ids, name)]
    )[0]


def format_interval(mean: estimates.Estimate | ratio.Ratio) -> str:
    """Return the interval of an estimate or ratio as text; empty if it has none."""
    return " – ".join(format_number("number", end) for end in mean.interval or ())


def make_metric_column(name: str) -> CellMaker:
    """Return a column with a metric: its mean over runs, and of a rate the interval too."""

    def cell(row: DocsRow) -> Cell:
        if not read_metric_values(row.ids, name):
            return Cell(UNKNOWN)
        mean, unit = estimate_mean(row.ids, name), row.records[0].metrics[name].unit
        return Cell(
            format_metric(name, Value(value=mean.value, unit=unit)),
            format_interval(mean) if "/s" in unit else "",
        )

    return cell


def make_ratio_column(name: str) -> CellMaker:
    """Return a column with a metric's ratio to that of the runs a row is compared with, and below
    it its interval or that it was not tested. A rate has none unless both sides are proven, as in
    `steelyard compare`; the worse status of the two is below it then.
    """

    def cell(row: DocsRow) -> Cell:
        statuses = [
            standing.find_group_status(runs) for runs in (row.records, load_records(row.base))
        ]
        worst = max(statuses, key=standing.STATUS_ORDER.index)
        if "/s" in row.records[0].metrics[name].unit and worst != "valid":
            return Cell(UNKNOWN, worst)
        compared = ratio.compare_values(
            read_metric_values(row.base, name), read_metric_values(row.ids, name)
        )
        assert compared is not None
        interval = format_interval(compared) or PageWords("en")("compare.change.not tested")
        return Cell(format_number("number", compared.value), interval)

    return cell


def compare_answers(row: DocsRow) -> engine_groups.AnswerDifferences:
    """Compare the answers of a run with those of another."""
    [run], [base] = row.records, load_records(row.base)
    return engine_groups.compare_answers(base, run, estimates.choose_quality_metric([base]))


def format_answer_changes(row: DocsRow) -> Cell:
    """Return how many answers differ from those of the run compared with; unknown if they cannot be
    compared.
    """
    chosen = compare_answers(row).chosen
    return Cell(
        UNKNOWN
        if chosen is None
        else f"{format_count(chosen.other)} of {format_count(chosen.items)}"
    )


def format_loss_difference(row: DocsRow) -> Cell:
    """Return the largest difference of a step's loss from the run compared with, and its step."""
    difference = compare_answers(row).loss
    text = (
        None
        if difference is None
        else f"{format_number('number', difference.value)} at step {difference.step}"
    )
    return Cell(text or UNKNOWN)


def format_quality(row: DocsRow) -> Cell:
    """Return the quality metric of a run, and that of the run compared with."""
    name = estimates.choose_quality_metric(load_records(row.base))
    quality_text, base_text = (
        format_metric(name, load_records(ids)[0].metrics[name]) for ids in (row.ids, row.base)
    )
    return Cell(f"{name} {quality_text}", f"compared with {base_text}")


def format_status(row: DocsRow) -> Cell:
    """Return status by today's rule and reason codes of the runs; if they differ, how many runs
    have each. Unproven repeats that prove their rate together are valid.
    """
    if standing.find_group_status(row.records) == "valid" and not any(
        map(standing.is_valid, row.records)
    ):
        return Cell(f"valid: {PageWords('en')('side.by_repeats', str(len(row.records)))}")
    texts = (
        ": ".join(
            filter(None, [standing.find_status(run), ", ".join(standing.list_reason_codes(run))])
        )
        for run in row.records
    )
    counts = Counter(texts)
    return Cell(", ".join(f"{n} {text}" if len(counts) > 1 else text for text, n in counts.items()))


def make_seconds_column(read_seconds: Callable[[Record], float]) -> CellMaker:
    """Return a column with a time: the median over the runs of a row."""
    return lambda row: Cell(f"{format_number('seconds', median(map(read_seconds, row.records)))} s")


def make_budget_column(*parts: str) -> CellMaker:
    """Return a column with the time of parts of a run, by how their names begin."""
    return make_seconds_column(
        lambda run: sum(run.budget[p] for p in run.budget if p.startswith(parts))
    )


def find_headline_pass(run: Record) -> record.PassFacts:
    """Return the pass that a run's headline rate is measured in."""
    return next(window for window in run.passes if window.pass_name in ("infer", "train"))


COLUMNS: dict[str, CellMaker] = {
    "case": make_fact_column(lambda one: one.case.name),
    "division": make_fact_column(lambda one: one.case.division),
    "precision": make_fact_column(lambda one: one.case.precision),
    "engine": make_fact_column(lambda one: one.engine.name),
    "load": make_fact_column(format_load),
    "settings": make_fact_column(format_tuned_settings),
    "scope": make_fact_column(lambda one: format_scope(one, PageWords("en"))),
    "GPU": make_fact_column(
        lambda one: one.environment.hardware.devices[0].uuid.removeprefix("GPU-")[:4]
    ),
    "status": format_status,
    "remark": lambda row: Cell(row.remark),
    "records": lambda row: Cell(row.ids.replace(" ", ", ")),
    "compared with": lambda row: Cell(
        row.base.replace(" ", ", "), format_status(DocsRow(row.base)).text
    ),
    "other settings": lambda row: COLUMNS["settings"](DocsRow(row.base)),
    "other answers": format_answer_changes,
    "loss of a step, largest difference": format_loss_difference,
    "quality": format_quality,
    "pass": make_seconds_column(lambda one: find_headline_pass(one).wall_s),
    "first step": make_seconds_column(lambda one: find_headline_pass(one).start_s),
    "warm-up": make_budget_column("compile_", "warmup_"),
    **{
        part: make_budget_column(part)
        for part in ("agents", "launch", "imports", "weights", "calibrate")
    },
}


def find_column(name: str) -> CellMaker:
    """Return the function that makes the cells of a column: a named column, `ratio of METRIC`, or a
    metric.
    """
    metric_name = name.removeprefix("ratio of ")
    return COLUMNS.get(name) or (
        make_metric_column(name) if metric_name == name else make_ratio_column(metric_name)
    )


def format_markdown(*blocks: PageElement) -> str:
    """Return blocks of a page as Markdown."""
    return report.render_markdown(Page("", "en", blocks))


def make_records_table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table of records as Markdown: one row per list of ids, base ids and remark."""
    table_rows = [DocsRow(*row) for row in rows]
    heads = []
    for name in columns:
        known = [
            run.metrics[name] for row in table_rows for run in row.records if name in run.metrics
        ]
        measured = bool(known) and name not in COLUMNS
        measured_in = format_unit(name, known[0]) if measured else ""
        heads.append(TableColumn(name, measured_in, "right" if measured else "left"))
    cells = [TableRow(tuple(find_column(name)(row) for name in columns)) for row in table_rows]
    return format_markdown(Table(tuple(heads), tuple(cells)))


def make_engines_table(ids: str) -> str:
    """Return the table of engines side by side, and the records that it is made from."""
    page = report.build_engines_page(list(load_records(ids)))
    assert page is not None
    tables = (block for block in walk_elements(page.elements) if isinstance(block, Table))
    record_list = textwrap.fill(f"Records: {ids.replace(' ', ', ')}.", 120)
    return f"{format_markdown(*tables)}\n{record_list}\n"


PAGE_MAKERS: dict[str, Callable[[list[Record]], Page | None]] = {
    "runs": report.build_summary_page,
    "engines": report.build_engines_page,
    "scaling": report.build_scaling_page,
    "verdict": lambda records: report.build_verdict_page(judge_engines(records)),
}


def make_terminal_page(ids: str, page: str, columns: int = 80) -> str:
    """Return what a terminal of so many columns shows of runs, without the note at its end, as a
    code block.
    """
    printed_page = PAGE_MAKERS[page](list(load_records(ids)))
    assert printed_page is not None
    blocks = (
        printed_page.elements[:-1]
        if isinstance(printed_page.elements[-1], Paragraph) and len(printed_page.elements) > 1
        else printed_page.elements
    )
    return f"```text\n{report.render_text(Page('', 'en', blocks), columns).strip()}\n```\n"


def count_statuses() -> dict[tuple[str, str, str], list[tuple[Status, Status]]]:
    """Return, for all published runs by (folder, kind of work, size), the status that each record
    stores and the one that it has today.
    """
    by_group: dict[tuple[str, str, str], list[tuple[Status, Status]]] = {}
    for record_id, path in PATH_BY_ID.items():
        [run] = load_records(record_id)
        key = (path.parent.name, run.task.kind, run.case.size)
        by_group.setdefault(key, []).append((run.status, standing.find_status(run)))
    return dict(sorted(by_group.items()))


def make_statuses_table() -> str:
    """Return how many published runs have each status today, by folder, kind of work and size; in
    parentheses those that their records store as valid.
    """
    rows = [
        (*key, len(statuses), *(_count_status(statuses, name) for name in standing.STATUS_ORDER))
        for key, statuses in count_statuses().items()
    ]
    heads = ("folder", "kind", "size", "records", *standing.STATUS_ORDER)
    cells = (TableRow(tuple(Cell(str(value)) for value in row)) for row in rows)
    return format_markdown(Table(tuple(map(TableColumn, heads)), tuple(cells)))


def _count_status(statuses: list[tuple[Status, Status]], name: Status) -> str:
    """Return how many runs have this status today, and in parentheses how many of those store the
    status valid, if they have another today; empty for none.
    """
    counted = [stored for stored, today in statuses if today == name]
    others = counted.count("valid") if name != "valid" else 0
    return f"{len(counted)} ({others})" if others else str(len(counted) or "")


def make_waterfall_table(ids: str) -> str:
    """Return the waterfall that `steelyard report --explain` prints."""
    elements = walk_elements(report.build_waterfall_page(list(load_records(ids)), "en").elements)
    return format_markdown(next(block for block in elements if isinstance(block, Table)))


def make_ceilings_table(groups: list[str], names: list[str]) -> str:
    """Return rows of the record of `steelyard spec`: whole groups, and others by their names."""
    [path] = SPECS
    spec_record = ceilings_record.read_spec_record(path)
    rows = []
    for bench, ceiling in zip(spec_record.benches, spec_record.ceilings, strict=True):
        if ceiling.value is not None and (bench.group in groups or bench.name in names):
            scale, name = SHOWN_UNITS[bench.unit]
            rate = f"{format_number('number', ceiling.value / scale)} {name}"
            texts = [
                f"{bench.group}, {bench.name}",
                bench.precision or "",
                rate,
                format_number("percent", ceiling.share),
            ]
            texts += [
                format_number("number", ceiling.sm_clock_mhz),
                format_number("number", ceiling.power_w),
            ]
            rows.append(TableRow(tuple(map(Cell, texts))))
    heads = ("what", "precision", "rate", "of the datasheet", "clock, MHz", "power, W")
    return format_markdown(Table(tuple(map(TableColumn, heads)), tuple(rows)))


def count_code_lines(pattern: str) -> int:
    """Count lines that are neither empty nor a comment; of a document, those of its Python code."""
    texts = [path.read_text() for path in ROOT.glob(pattern)]
    assert texts, pattern
    if pattern.endswith(".md"):
        texts = re.findall(r"^```python\n(.*?)^```", texts[0], re.DOTALL | re.MULTILINE)
    return sum(line.strip()[:1] not in ("", "#") for text in texts for line in text.splitlines())


def make_extension_table(rows: list[list[str]]) -> str:
    """Return what can be added, with the lines of an example of it."""
    text = "| you add | it is | entry-point group | example | lines | read |\n"
    text += "|---|---|---|---|---:|---|\n"
    for extension, noun, group, path, link in rows:
        group_code, example = group and f"`steelyard.{group}`", path and f"`{path}`"
        count = count_code_lines(path) if path else ""
        text += f"| {extension} | {noun} | {group_code} | {example} | {count} | {link} |\n"
    return text


MAKERS: dict[str, Callable[..., str]] = {
    "table": make_records_table,
    "engines": make_engines_table,
    "printed": make_terminal_page,
    "explain": make_waterfall_table,
    "ceilings": make_ceilings_table,
    "added": make_extension_table,
    "statuses": make_statuses_table,
}
TABLES = tomllib.loads((ROOT / "docs/tables.toml").read_text())


def make_table(name: str) -> str:
    """Return a table of docs/tables.toml as Markdown."""
    fields = dict(TABLES[name])
    return MAKERS[fields.pop("make", "table")](**fields)


def regenerate_tables(text: str) -> str:
    """Return a document with all its tables made again."""
    return TABLE_SECTION.sub(lambda match: f"{match[1]}{make_table(match[2])}{match[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(regenerate_tables(document.read_text()))
