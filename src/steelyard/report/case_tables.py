"""Build the tables of a case: groups of repeated runs compared, all values of every run, and MFU by
convention.

Published rows stand below the measured ones. The report page calls these functions for each case.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from steelyard import words
from steelyard.metrics import overview, rates, shipped
from steelyard.metrics.overview import Row
from steelyard.metrics.spans import devices
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.columns import Field, layout
from steelyard.report.document import Cell, ColumnOf, Link, Table, Tone, table
from steelyard.report.numbers import UNKNOWN, counted, formed, joined, real, spelled
from steelyard.report.published import PublishedRow, published, size_note
from steelyard.report.runs import (
    STATUS_TONE,
    Run,
    accelerator,
    changed,
    codes,
    estimate,
    parallel,
    scope,
    shown,
    stages,
    tuned_text,
    unit,
)
from steelyard.words import Words

_ORDER = ("valid", "invalid", "failed")


@dataclass(frozen=True)
class Side:
    """A group of repeated runs (the same question, engine, plan and settings) with the estimates
    over them: a row of the comparison table.
    """

    row: Row
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        """Return the accelerator and the number of devices, such as `NVIDIA H200 × 8`."""
        return accelerator(self.row.first)

    @property
    def unit(self) -> str:
        """Return the unit of the group's rate, such as tokens/s."""
        return rates.work_unit(self.row.first)

    @property
    def judged(self) -> bool:
        """Return whether every run's quality was evaluated, and the quality shown is the one that
        its case gates.
        """
        row = self.row
        return (
            all(record.quality.evaluated for record in row.records)
            and row.metric == row.first.quality.metric
        )


def sides(runs: list[Run]) -> list[Side]:
    """Group repeated runs and sort the groups: division closed before open, valid before invalid
    before failed, the highest rate per device first.
    """
    found = overview.rows(run.record for run in runs)
    out = [
        Side(row, tuple(run for run in runs if any(run.record is one for one in row.records)))
        for row in found
    ]

    def place(side: Side) -> tuple[bool, str, int, float]:
        """Return the sort key: division, status, negative rate."""
        division, rate = side.row.first.case.division, side.row.rate
        return (
            division != "closed",
            division,
            _ORDER.index(side.row.status),
            -(rate.value if rate else 0.0),
        )

    return sorted(out, key=place)


def _either(
    of_side: Callable[[Side], Cell | str], of_published: Callable[[PublishedRow], Cell | str]
) -> Callable[[Side | PublishedRow], Cell | str]:
    """Return a function of a table row that calls `measured_cell` for a group of runs and
    `published_cell` for a published row.
    """
    return lambda row: of_side(row) if isinstance(row, Side) else of_published(row)


def side_by_side(runs: list[Run], say: Words) -> Table:
    """Build the comparison table of a case: a row per group of repeated runs, the best first, then
    the published rows.

    The head of the rate column has the most common unit; a cell with another unit names it. The
    first column is pinned.
    """
    found, references = sides(runs), published(runs)
    common = Counter(side.unit for side in found).most_common(1)[0][0]
    judged, metric = any(side.judged for side in found), found[0].row.metric
    formulas = max(side.row.first.formulas or 1 for side in found)
    in_samples = runs[0].record.task.rates_in_samples
    unjudged = "" if judged else say("not_evaluated")
    columns: tuple[ColumnOf[Side | PublishedRow], ...] = (
        ColumnOf(
            say("side.accelerator"), _either(_accelerator, lambda row: _published_name(row, say))
        ),
        ColumnOf(
            say("side.engine"),
            _either(
                lambda side: Cell(side.row.first.engine.name, parallel(side.row.first)),
                lambda row: row.place[2],
            ),
            say("side.plan"),
        ),
        ColumnOf(
            say("side.precision"),
            _either(
                lambda side: Cell(side.row.first.case.precision, side.row.first.case.division),
                lambda row: row.precision(say),
            ),
            say("side.division"),
            priority=2,
        ),
        ColumnOf(
            say("side.tune"),
            _either(lambda side: _tuned(side, say), lambda row: ""),
            say("side.scope"),
            priority=3,
        ),
        ColumnOf(
            say("side.rate"),
            _either(
                lambda side: _rate(side, common, say),
                lambda row: _published_rate(row, in_samples, common, say),
            ),
            words.unit(common, say.lang),
            right=True,
            strong=True,
        ),
        ColumnOf(
            say("side.mfu"),
            _either(
                lambda side: estimate(side.row.mfu, "percent").text,
                lambda row: _published_mfu(row, say),
            ),
            right=True,
        ),
        ColumnOf(
            metric_row(metric).index,
            _either(lambda side: _quality(side, judged, say), lambda row: row.number_of(metric)),
            unjudged,
            right=True,
            priority=2,
        ),
        ColumnOf(
            say("side.mem"),
            _either(lambda side: formed("gib", side.row.mem), lambda row: row.number_of("mem")),
            "GiB",
            right=True,
            priority=2,
        ),
        ColumnOf(
            say("side.energy"),
            _either(
                lambda side: estimate(side.row.energy).text,
                lambda row: row.number_of("energy_per_token"),
            ),
            words.unit("J/token", say.lang),
            right=True,
            priority=2,
        ),
        ColumnOf(
            say("side.status"), _either(lambda side: _status(side, formulas, say), lambda row: "")
        ),
    )
    notes = [say("side.note"), *size_note(runs, references, say)]
    if references:
        several = say("side.published", str(len(references)))
        notes.insert(1, say("side.published.one") if len(references) == 1 else several)
    made = table(columns, found, notes, last=references, last_kind="published")
    return replace(made, pinned=True)


def _accelerator(side: Side) -> Cell:
    """Return the accelerator of a group, with the labels of its runs below, linked to their parts
    of the page.
    """
    links = tuple(Link(run.label, run.anchor) for run in side.runs)
    return Cell(side.name, ", ".join(run.label for run in side.runs), links=links)


def _tuned(side: Side, say: Words) -> Cell:
    """Return the settings that differ from the case's own, or a word for "default", and the scope
    below.
    """
    text, extent = tuned_text(side.row.first), scope(side.row.first, say)
    return Cell(text, extent) if text else Cell(say("side.default"), extent, "muted")


def _status(side: Side, latest: int, say: Words) -> Cell:
    """Return the group's best status, and below it how many runs are valid if not all, the reason
    codes, and the version of its formulas if older than `latest`.
    """
    row, formulas = side.row, side.row.first.formulas or 1
    lacking = [record for record in row.records if record.status != "valid"]
    partly = say("side.partly", counted(row.valid), counted(len(row.records)))
    older = say("side.formulas", str(formulas)) if formulas < latest else ""
    remarks = (partly if lacking and row.valid else "", codes(lacking, say), older)
    return Cell(say(row.status), say("comma").join(filter(None, remarks)), STATUS_TONE[row.status])


def _rate(side: Side, common: str, say: Words) -> Cell:
    """Return the rate per device with its interval, muted if no run is valid; the unit is added if
    it is not `common`.
    """
    cell = estimate(side.row.rate, tone="strong" if side.row.valid else "muted")
    if cell.text == UNKNOWN or side.unit == common:
        return cell
    return replace(cell, text=f"{cell.text} {words.unit(side.unit, say.lang)}")


def _quality(side: Side, judged: bool, say: Words) -> Cell:
    """Return the quality of a group; where other groups are evaluated (`any_evaluated`) and this
    one is not, the cell says so.
    """
    row = side.row
    value = row.first.metrics.get(row.metric)
    text = formed(metric_row(row.metric, "" if value is None else value.unit).form, row.quality)
    unjudged = judged and text != UNKNOWN and not side.judged
    return Cell(text, say("not_evaluated") if unjudged else "")


def _published_name(row: PublishedRow, say: Words) -> Cell:
    """Return the accelerator of a published row with the number of devices, and below it the number
    of its footnote.
    """
    name, count, _ = row.place
    return Cell(name if count is None else f"{name} × {count}", say("published", str(row.number)))


def _published_rate(row: PublishedRow, in_samples: bool, common: str, say: Words) -> Cell:
    """Return the published rate per device; where it only counts padding too, that one, marked so.
    A unit other than `common` is written below.
    """
    found = row.rate(in_samples)
    if found is not None:
        return Cell(formed("number", found[0]), "" if found[1] == common else found[1])
    padded = "tokens_per_device_s_padded"
    beside = say(f"instead.{padded}") if padded in row.values else ""
    return Cell(row.number_of(padded), beside)


def _published_mfu(row: PublishedRow, say: Words) -> Cell:
    """Return the first published MFU that is known, with its convention below if that is not ours;
    UNKNOWN if there is none.
    """
    for name in ("mfu", "mfu_nominal", "mfu_palm", "mfu_padded", "mfu_one_sequence"):
        if real(row.values.get(name)) is not None:
            return Cell(formed("percent", row.values[name]), say.known(f"instead.{name}", ""))
    return Cell(UNKNOWN)


_SETTINGS: dict[str, Callable[[Record], str]] = {
    "precision": lambda record: record.case.precision,
    "division": lambda record: record.case.division,
    "config": lambda record: record.plan.config,
    "parallel": parallel,
    "fix_hp": changed,
    "mem_stages": stages,
}


def _fields(runs: list[Run], references: list[PublishedRow]) -> list[Field]:
    """Return the columns that the kind of work lays out; an optional one only where a run or a
    published row has something in it.
    """
    known = {
        name
        for run in runs
        for name, value in run.record.metrics.items()
        if value.value is not None
    }
    present = known | {name for row in references for name in row.values}
    if any(run.record.case.division != "closed" for run in runs):
        present.add("division")
    if any(devices(run.record) > 1 for run in runs):
        present |= {"config", "parallel", "mem_stages"}
    fields = layout(runs[0].record.task.kind_row).fields
    return [f for f in fields if not f.optional or present & {f.name, *f.metrics, *f.instead}]


def values(runs: list[Run], say: Words) -> Table:
    """Build the table of all values: one row per run, then the published rows, with footnotes for
    them and for models whose FLOPs do not follow from their shapes.
    """
    references = published(runs)
    several = len({accelerator(run.record) for run in runs}) > 1

    def column(field: Field) -> ColumnOf[Run | PublishedRow]:
        """Return the column of a field, with the unit in its head if all runs have the same one."""
        common = _common_unit(field, runs, say)
        title = say(field.title) if field.title else metric_row(field.name).index

        def cell(row: Run | PublishedRow) -> Cell:
            """Return the cell of a run or of a published row in this column."""
            if isinstance(row, PublishedRow):
                return _published_cell(field, row, common, say)
            return _cell(field, row, common, several, say)

        star = "*" if field.strong else ""
        return ColumnOf(star + title, cell, common or "", bool(field.metrics), field.strong)

    notes = [
        say("stars"),
        *(row.footnote(say) for row in references),
        *size_note(runs, references, say),
    ]
    notes += [
        words.text(one, say.lang) for one in shipped.counted_types(run.record for run in runs)
    ]
    columns = map(column, _fields(runs, references))
    return table(columns, runs, notes, last=references, last_kind="published")


def _common_unit(field: Field, runs: list[Run], say: Words) -> str | None:
    """Return the unit for the head of a column if all runs that have its first metric agree, the
    base unit if none has it; None if units differ or there is none.
    """
    name = field.metrics[0] if field.metrics else ""
    units = {
        unit(name, run.record.metrics[name], say.lang) for run in runs if name in run.record.metrics
    }
    if not units:
        return words.unit(metric_row(name).base_unit, say.lang) or None
    return units.pop() if len(units) == 1 else None


def _cell(field: Field, run: Run, common: str | None, several: bool, say: Words) -> Cell:
    """Return a run's cell in the table of all values: a setting, or metrics joined by slashes, with
    the unit below where the head has none.

    The first column (`tool`) names the run and its engine, and below status and scope, and the
    accelerator if `name_accelerator`.
    """
    record = run.record
    if field.name == "tool":
        parts = [say(record.status), scope(record, say), accelerator(record) if several else ""]
        tone: Tone = "plain" if record.status == "valid" else "bad"
        name = f"{run.label} {record.engine.name}"
        return Cell(name, say("comma").join(filter(None, parts)), tone)
    if not field.metrics:
        return Cell(_SETTINGS[field.name](record))
    text = joined([shown(name, record.metrics.get(name)) for name in field.metrics])
    unevaluated = (
        record.quality.metric in field.metrics and not record.quality.evaluated and text != UNKNOWN
    )
    first = field.metrics[0]
    own_unit = unit(first, record.metrics.get(first), say.lang)
    beside = own_unit if common is None and text != UNKNOWN else ""
    sub = say("not_evaluated") if unevaluated else beside
    return Cell(text, sub, "strong" if field.strong else "plain")


def _published_cell(field: Field, row: PublishedRow, common: str | None, say: Words) -> Cell:
    """Return a published row's cell in the table of all values; where the metric is missing, the
    one that the field lists in `instead`, with its convention below.
    """
    if field.name == "tool":
        return Cell(say("published", str(row.number)))
    if field.name == "precision":
        return row.precision(say)
    found = [row.number_of(name) for name in field.metrics]
    if found and found[0] != UNKNOWN:
        base = words.unit(metric_row(field.metrics[0]).base_unit, say.lang)
        return Cell(joined(found), "" if base == (common or "") else base)
    for name in field.instead:
        if name in row.values:
            return Cell(row.number_of(name), say(f"instead.{name}"))
    return Cell(UNKNOWN if field.metrics else spelled(row.values.get(field.name)))


_CONVENTIONS = ("mfu", "mfu_core", "mfu_achievable", "mfu_palm", "mfu_nominal")


def conventions(runs: list[Run], say: Words) -> Table | None:
    """Build a table of MFU in every convention, one row per run and then per published row; None
    where no row has any MFU.
    """
    references = [row for row in published(runs) if set(row.values) & set(_CONVENTIONS)]
    named = {name for run in runs for name in run.record.metrics}
    if not references and not named & set(_CONVENTIONS):
        return None

    def title(row: Run | PublishedRow) -> str:
        """Return the title of a run, or the footnote mark of a published row."""
        return row.title if isinstance(row, Run) else say("published", str(row.number))

    def column(name: str) -> ColumnOf[Run | PublishedRow]:
        """Return the column of one convention; that of the headline MFU is starred and bold."""
        headline = name == "mfu"

        def cell(row: Run | PublishedRow) -> Cell | str:
            """Return the MFU of a run or a published row in this convention."""
            if isinstance(row, PublishedRow):
                return row.number_of(name)
            text = shown(name, row.record.metrics.get(name))
            return Cell(text, tone="strong" if headline else "plain")

        star = "*" if headline else ""
        return ColumnOf(f"{star}{name}", cell, say(f"mfu.{name}"), True, headline)

    columns = (ColumnOf(say("mfu.run"), title), *map(column, _CONVENTIONS))
    return table(columns, runs, last=references, last_kind="published")
