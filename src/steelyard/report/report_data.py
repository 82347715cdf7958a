"""The data of a report as pydantic models: what `report --json` prints, and its JSON Schema.

Numbers are numbers, and what is unknown is null. The version of the format is `schema`: fields may
be added to a version; one that goes or changes its meaning makes a new version.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, SerializeAsAny

from steelyard.case.load import Load
from steelyard.metrics.metric_table import sort_metric_names
from steelyard.metrics.time_waterfall import WaterfallRow, make_waterfalls
from steelyard.metrics.vouching import EngineMark
from steelyard.plan.ceiling_shapes import CeilingGroup, CeilingUnit
from steelyard.plan.degrees import Plan
from steelyard.record import ceilings_record
from steelyard.record import record as stored
from steelyard.record.ceilings_record import SpecRecord
from steelyard.record.record import (
    EngineFacts,
    FailureFacts,
    NoDataFacts,
    PublishedFacts,
    Record,
    Scope,
)
from steelyard.record.run_facts import Environment, WeightsFacts
from steelyard.report import group_data
from steelyard.report.columns import load_table_layout
from steelyard.report.group_data import EnginesData, RepeatsData, ScalingData
from steelyard.report.numbered_runs import (
    NumberedRun,
    group_by_case,
    list_non_default_settings,
    record_identity,
)
from steelyard.report.published_rows import find_published_rows
from steelyard.schema import FrozenModel
from steelyard.tasks.task import DataFacts

REPORT_VERSION: Literal[1] = 1


class ReportReason(stored.Reason):
    """Why a run is not valid: a `code`, listed in docs/metrics.md, and an English `text`."""

    text: str


class ReportCheck(stored.Check):
    """A check of a run: its `name`, whether it passed (`ok`), and its `detail` in English."""

    detail: str


class ReportQuality(stored.Quality):
    """The quality of a run: name and `value` of the `metric` (null: unknown), the case's `gate` for
    it, and whether it was compared with that (`evaluated`); if not, `note` says why in English,
    else it is null.
    """

    note: str | None


class ReportValue(stored.Value):
    """A derived number: `value` in `unit`, with a 95 % `interval` (low, high; null if there is
    none). If its value is null, `note` says why in English.
    """

    note: str | None = None


class SummaryRow(FrozenModel):
    """A run in one line: what ran (case, precision, engine, devices, plan), its `status` with the
    codes of `reasons`, and headline `metrics`, those that its record has (rates, mfu, quality, mem,
    mem_total, e2e_time).

    `changed` lists what makes its question or its case another than the shipped one; `scope` is how
    much of the question was run; `accelerators` is the number of devices on all `nodes`; `tuned`
    are the settings that are not the default. Versions are null if unknown.
    """

    id: str
    case: str
    size: str
    changed: list[str]
    division: str
    precision: str
    scope: Scope
    load: str | None = Field(None, description="of generation, such as C16; null for other work")
    engine: str
    engine_mark: EngineMark = Field(
        description=(
            "ours (part of Steelyard); or another package's: tested (steelyard conform), untested;"
            " or nonconforming"
        )
    )
    engine_version: str | None = Field(description="version of the engine's own package")
    framework: str | None
    framework_version: str | None
    accelerator: list[str] = Field(description="the kinds of device")
    accelerators: int
    nodes: int
    plan: str
    tuned: dict[str, Any] = Field(description="settings whose value is not the default")
    status: str
    reasons: list[str] = Field(description="codes")
    evaluated: bool = Field(description="whether its quality was checked")
    metrics: dict[str, ReportValue] = Field(description="the headline metrics")


class WaterfallData(FrozenModel):
    """Where the time of one rank's steps goes, as rows of a waterfall (name, seconds, share of
    `whole_s`). `steps` is their number, `measured_s` the time of that work as measured. `profiled`:
    whether the rows come from a profile; if not, from the samples alone.
    """

    rank: int
    steps: int
    measured_s: float
    whole_s: float = Field(
        description=(
            "the time that shares refer to: measured_s, or that of the profiled steps if they"
            " were slower"
        )
    )
    profiled: bool
    rows: tuple[WaterfallRow, ...]


class RunData(FrozenModel):
    """A run in full. Raw samples, telemetry, answers and what each rank and host did are only in
    its record.

    `number` is that within its case on a page; `key` is the hash of its question, `scope` how much
    of it was run, `tune` all stored settings, `tuned` those that are not the default; `budget` is
    wall seconds by part of the run. `reasons` (empty if valid), `notes`, `checks` and the notes of
    `metrics` and `quality` are in English; `explain` are waterfalls of its time; `failure` is null
    unless the run failed.
    """

    number: int = Field(description="within its case, as on a page")
    id: str
    created: str
    sha256: str | None = Field(description="SHA-256 of the record")
    status: str
    reasons: list[ReportReason]
    notes: list[str]
    key: str
    division: str
    precision: str
    scope: Scope
    load: Load | None = Field(None, description="of generation: when requests are sent")
    engine: EngineFacts
    providers: dict[str, str] = Field(
        description="packages, with versions, of the parts that are not Steelyard's own"
    )
    plan: Plan
    tune: dict[str, Any]
    tuned: dict[str, Any] = Field(description="settings whose value is not the default")
    environment: Environment
    site: dict[str, str]
    weights: WeightsFacts
    data: SerializeAsAny[DataFacts | NoDataFacts]
    budget: dict[str, float]
    checks: list[ReportCheck]
    quality: ReportQuality
    metrics: dict[str, ReportValue] = Field(
        description="all metrics, in the order of the metric table"
    )
    explain: list[WaterfallData] | None = Field(description="null without --explain")
    failure: FailureFacts | None


class CaseData(FrozenModel):
    """The runs of one case and size, and the published rows that may stand beside them
    (`published`). `task` and `kind` (of work) are the case's.

    `changed` lists how these runs' question or case differs from the shipped one (empty if not at
    all); such runs are a case of their own.
    """

    case: str
    size: str
    changed: list[str]
    task: str
    kind: str
    runs: list[RunData]
    published: list[PublishedFacts]


class ReportCeiling(ceilings_record.Ceiling):
    """The ceiling that follows from a benchmark of `steelyard spec`: `value` with its 95 %
    `interval`, mean `sm_clock_mhz` and `power_w` meanwhile, the datasheet's `peak` and the `share`
    of it; null is unknown. If its value is null, `note` says why in English; `steady` says whether
    its last stretches (calls timed together) agree.
    """

    note: str | None = None


class CeilingData(FrozenModel):
    """A benchmark of `steelyard spec` on one `rank`, and the ceiling that follows from it: the
    highest rate or size that was reached.

    `group` (matmul, memory, capacity, copy, attention or collective), `name`, `precision` and
    `detail` (sizes and the like) say what was run. `unit` (FLOP/s, B/s, or B for a memory size) is
    that of `ceiling.value`, which is null, with a note, if there is none.
    """

    group: CeilingGroup
    name: str
    precision: str | None
    rank: int
    unit: CeilingUnit
    detail: dict[str, int | str]
    ceiling: ReportCeiling


class SpecData(FrozenModel):
    """A record of `steelyard spec`: what a machine can do at most. `quick`: whether it was measured
    with the shorter limits; `devices` is their number; `budget` is wall seconds by part; `reasons`
    are empty unless it failed. `ceilings` has one item per benchmark and rank.
    """

    id: str
    created: str
    status: str
    reasons: list[ReportReason]
    quick: bool
    devices: int
    environment: Environment
    budget: dict[str, float]
    ceilings: list[CeilingData]


class PageFile(FrozenModel):
    """A page that the command has written to a file: `format` (such as html), `lang` (en or zh) and
    `path`.
    """

    format: str
    lang: str
    path: str


class Report(FrozenModel):
    """The whole answer of `report --json`. A report is of runs (`summary`, `cases`, `repeats`,
    `engines`, `scaling`), or of spec records, the measured ceilings of machines (`specs`); the
    lists of the other kind are empty. `pages` may be filled in both.
    """

    schema_version: Literal[1] = Field(REPORT_VERSION, alias="schema")
    kind: Literal["report"] = "report"
    summary: list[SummaryRow] = Field(description="one row per run, in the order of the records")
    cases: list[CaseData]
    repeats: list[RepeatsData]
    engines: list[EnginesData]
    scaling: list[ScalingData]
    specs: list[SpecData] = Field(description="one per spec record")
    pages: list[PageFile] = Field(description="files that were written (--to)")


def build_report(
    records: list[Record], explain: bool = False, pages: list[PageFile] | None = None
) -> Report:
    """Build the JSON report of runs: a summary row each in their order, the runs by case, and
    groups of repeats, engines and scaling.

    `explain` adds the waterfall of each run; `pages` are the files that the command wrote. Nothing
    is written here.
    """
    return Report(
        summary=[_summary_row(record) for record in records],
        cases=[_case_data(name, runs, explain) for name, runs in group_by_case(records).items()],
        repeats=group_data.collect_repeats(records),
        engines=group_data.collect_engines(records),
        scaling=group_data.collect_scaling(records),
        specs=[],
        pages=pages or [],
    )


def build_ceilings_report(records: list[SpecRecord], pages: list[PageFile] | None = None) -> Report:
    """Build the JSON report of spec records (from `steelyard spec`), in their order; all lists of
    runs are empty. `pages` are the files that the command wrote.
    """
    specs = [_spec_data(record) for record in records]
    return Report(
        summary=[], cases=[], repeats=[], engines=[], scaling=[], specs=specs, pages=pages or []
    )


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a report."""
    out = Report.model_json_schema(by_alias=True, mode="serialization")
    return out | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Steelyard report",
    }


def _summary_row(record: Record) -> SummaryRow:
    """Return the summary row of a run, with those headline metrics that its record has: whole and
    core rate, mfu, those of `TableLayout.headline`, quality, mem, mem_total, e2e_time.
    """
    table_layout, known_fields = load_table_layout(record.task.kind_row), record_identity(record)
    names = (
        *table_layout.rates,
        *(["mfu"] if table_layout.has_mfu else []),
        *table_layout.headline,
        record.quality.metric,
        "mem",
        "mem_total",
        "e2e_time",
    )
    own_fields = {
        "scope": record.scope,
        "tuned": known_fields["tune"],
        "evaluated": record.quality.evaluated,
        "metrics": _english_metrics(record, [name for name in names if name in record.metrics]),
    }
    return SummaryRow(
        **{name: known_fields[name] for name in SummaryRow.model_fields if name not in own_fields},
        **own_fields,
    )


def _english_metrics(record: Record, names: Iterable[str]) -> dict[str, ReportValue]:
    """Return the named metrics of a record with their notes in English, in the order of the names;
    KeyError for one that it lacks.
    """
    metrics = stored.render_record_in_english(record).metrics
    return {name: ReportValue(**metrics[name].model_dump()) for name in names}


def _case_data(name: tuple[str, ...], runs: list[NumberedRun], explain: bool) -> CaseData:
    """Return the data of one case. `name` is case, size, and then what differs from the shipped
    case.
    """
    task = runs[0].record.task
    return CaseData(
        case=name[0],
        size=name[1],
        changed=list(name[2:]),
        task=task.name,
        kind=task.kind,
        runs=[_run_data(run, explain) for run in runs],
        published=[row.row for row in find_published_rows(runs)],
    )


def _run_data(run: NumberedRun, explain: bool) -> RunData:
    """Return the data of a run: fields of its record by the same name, texts in English, all its
    metrics in the order of the metric table, and the hash of the record (None if it has none).

    `tune` has the stored settings, `tuned` those that are not the default. The waterfall
    (`explain`) is None unless `explain`.
    """
    record = run.record
    stored_fields = {
        name: getattr(record, name)
        for name in RunData.model_fields
        if name in type(record).model_fields
    }
    stored_fields |= stored.render_record_in_english(record).model_dump(
        include={"reasons", "notes", "checks", "quality"}
    )
    return RunData(
        **stored_fields
        | {
            "number": run.number,
            "sha256": record.hashes.get("record"),
            "key": record.case.key,
            "division": record.case.division,
            "precision": record.case.precision,
            "load": record.question.load,
            "tune": record.tune.model_dump(mode="json", exclude_unset=True),
            "tuned": list_non_default_settings(record),
            "metrics": _english_metrics(record, sort_metric_names(set(record.metrics))),
            "explain": _waterfall_data(record) if explain else None,
        }
    )


def _waterfall_data(record: Record) -> list[WaterfallData]:
    """Return the waterfall of each profiled rank, or in a list the one of the samples if the run
    was not profiled; empty if nothing was measured.
    """
    return [
        WaterfallData(
            rank=waterfall.rank,
            steps=waterfall.steps,
            measured_s=waterfall.measured_s,
            whole_s=waterfall.whole_s,
            profiled=waterfall.profile is not None,
            rows=waterfall.rows,
        )
        for waterfall in make_waterfalls(record)
    ]


def _spec_data(record: SpecRecord) -> SpecData:
    """Return a spec record as data: one row for each benchmark and rank, with its ceiling and an
    English note.
    """
    stored_fields = {
        name: getattr(record, name) for name in SpecData.model_fields if name != "ceilings"
    }
    stored_fields |= record.model_dump(include={"reasons"})
    rows = []
    for bench, ceiling in zip(
        record.benches, ceilings_record.render_spec_record_in_english(record).ceilings, strict=True
    ):
        names = (name for name in CeilingData.model_fields if name != "ceiling")
        bench_fields = {name: getattr(bench, name) for name in names}
        rows.append(CeilingData(**bench_fields, ceiling=ReportCeiling(**ceiling.model_dump())))
    return SpecData(**stored_fields, ceilings=rows)
