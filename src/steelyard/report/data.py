"""The data of a report as pydantic models: what `report --json` prints, and its JSON Schema.

Numbers are numbers, and what is unknown is null. The version of the format is `schema`: fields may
be added to a version; one that goes or changes its meaning makes a new version.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, SerializeAsAny

from steelyard.metrics.table import in_order
from steelyard.metrics.waterfall import Row, waterfalls
from steelyard.plan.ceilings import Group, Unit
from steelyard.plan.degrees import Plan
from steelyard.record import record as stored
from steelyard.record import spec
from steelyard.record.facts import Environment, Weights
from steelyard.record.record import EngineFacts, Failure, Nothing, Published, Record, Scope
from steelyard.record.spec import SpecRecord
from steelyard.report import groups
from steelyard.report.columns import layout
from steelyard.report.groups import EnginesData, RepeatsData, ScalingData
from steelyard.report.published import published
from steelyard.report.runs import Run, by_case, identity, tuned
from steelyard.schema import Frozen
from steelyard.tasks.task import DataFacts

VERSION: Literal[1] = 1


class Reason(stored.Reason):
    """Why a run is not valid, with an English text. Codes are listed in docs/metrics.md."""

    text: str


class Check(stored.Check):
    """A check of a run, with its detail as an English text."""

    detail: str


class Quality(stored.Quality):
    """The quality of a run, with an English note; the note is null where there is none."""

    note: str | None


class Value(stored.Value):
    """A derived number. If its value is null, `note` says why in English."""

    note: str | None = None


class SummaryRow(Frozen):
    """A run in one line. `changed` lists what makes its question or its case another than the
    shipped one.
    """

    id: str
    case: str
    size: str
    changed: list[str]
    division: str
    precision: str
    scope: Scope
    engine: str
    engine_version: str | None = Field(description="of the engine's own package")
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
    metrics: dict[str, Value] = Field(description="the headline ones")


class Explained(Frozen):
    """Where the time of one rank's steps goes, as rows of a waterfall. `profiled`: whether the rows
    come from a profile; if not, from the samples alone.
    """

    rank: int
    steps: int
    measured_s: float
    whole_s: float = Field(description="what shares are of: measured_s, or slower profiled steps")
    profiled: bool
    rows: tuple[Row, ...]


class RunData(Frozen):
    """All that a page says of a run. Raw samples, telemetry and answers are only in its record."""

    number: int = Field(description="within its case, as on a page")
    id: str
    created: str
    sha256: str | None = Field(description="of the record")
    status: str
    reasons: list[Reason]
    notes: list[str]
    key: str
    division: str
    precision: str
    scope: Scope
    engine: EngineFacts
    plan: Plan
    tune: dict[str, Any]
    tuned: dict[str, Any] = Field(description="settings whose value is not the default")
    environment: Environment
    site: dict[str, str]
    weights: Weights
    data: SerializeAsAny[DataFacts | Nothing]
    budget: dict[str, float]
    checks: list[Check]
    quality: Quality
    metrics: dict[str, Value] = Field(description="all, in the order of the metric table")
    explain: list[Explained] | None = Field(description="null where nobody asked (--explain)")
    failure: Failure | None


class CaseData(Frozen):
    """The runs of one case and size, and the published rows that may stand beside them."""

    case: str
    size: str
    changed: list[str]
    task: str
    kind: str
    runs: list[RunData]
    published: list[Published]


class Ceiling(spec.Ceiling):
    """The ceiling that follows from a benchmark of `steelyard spec`. If its value is null, `note`
    says why in English; `steady` says whether its last stretches agree.
    """

    note: str | None = None


class CeilingData(Frozen):
    """A benchmark of `steelyard spec` on one rank, and the ceiling that follows from it."""

    group: Group
    name: str
    precision: str | None
    rank: int
    unit: Unit
    detail: dict[str, int | str]
    ceiling: Ceiling


class SpecData(Frozen):
    """A spec record: what a machine can do at most."""

    id: str
    created: str
    status: str
    reasons: list[Reason]
    quick: bool
    devices: int
    environment: Environment
    budget: dict[str, float]
    ceilings: list[CeilingData]


class PageFile(Frozen):
    """A page that the command has written to a file."""

    format: str
    lang: str
    path: str


class Report(Frozen):
    """The whole answer of `report --json`. A report is of runs or of spec records: the lists of the
    other kind are empty.
    """

    schema_version: Literal[1] = Field(VERSION, alias="schema")
    kind: Literal["report"] = "report"
    summary: list[SummaryRow] = Field(description="a row a run, in the order given")
    cases: list[CaseData]
    repeats: list[RepeatsData]
    engines: list[EnginesData]
    scaling: list[ScalingData]
    specs: list[SpecData] = Field(description="of records of kind spec")
    pages: list[PageFile] = Field(description="that were written (--to)")


def report(
    records: list[Record], explain: bool = False, pages: list[PageFile] | None = None
) -> Report:
    """Build the JSON report of runs: a summary row each, the runs by case, and groups of repeats,
    engines and scaling.

    `explain` adds the waterfall of each run; `pages` are the files that the command wrote.
    """
    return Report(
        summary=[_summary(record) for record in records],
        cases=[_case(name, runs, explain) for name, runs in by_case(records).items()],
        repeats=groups.repeats(records),
        engines=groups.engines(records),
        scaling=groups.scaling(records),
        specs=[],
        pages=pages or [],
    )


def report_spec(records: list[SpecRecord], pages: list[PageFile] | None = None) -> Report:
    """Build the JSON report of spec records; all lists of runs are empty. `pages` are the files
    that the command wrote.
    """
    specs = [_spec(record) for record in records]
    return Report(
        summary=[], cases=[], repeats=[], engines=[], scaling=[], specs=specs, pages=pages or []
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a report."""
    out = Report.model_json_schema(by_alias=True, mode="serialization")
    return out | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Steelyard report",
    }


def _summary(record: Record) -> SummaryRow:
    """Return the summary row of a run, with those headline metrics that its record has."""
    plan, known = layout(record.task.kind_row), identity(record)
    names = (plan.whole, plan.core, "mfu", record.quality.metric, "mem", "mem_total", "e2e_time")
    own = {
        "scope": record.scope,
        "tuned": known["tune"],
        "evaluated": record.quality.evaluated,
        "metrics": _metrics(record, [name for name in names if name in record.metrics]),
    }
    return SummaryRow(
        **{name: known[name] for name in SummaryRow.model_fields if name not in own}, **own
    )


def _metrics(record: Record, names: Iterable[str]) -> dict[str, Value]:
    """Return the named metrics of a record with their notes in English, in the order of the names;
    KeyError for one that it lacks.
    """
    every = stored.in_english(record).metrics
    return {name: Value(**every[name].model_dump()) for name in names}


def _case(name: tuple[str, ...], runs: list[Run], explain: bool) -> CaseData:
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
        runs=[_run(run, explain) for run in runs],
        published=[row.row for row in published(runs)],
    )


def _run(run: Run, explain: bool) -> RunData:
    """Return the data of a run: fields of its record by the same name, texts in English, and its
    metrics in the order of the metric table.

    The waterfall is None unless `explain`.
    """
    record = run.record
    told = {
        name: getattr(record, name)
        for name in RunData.model_fields
        if name in type(record).model_fields
    }
    told |= stored.in_english(record).model_dump(include={"reasons", "notes", "checks", "quality"})
    return RunData(
        **told
        | {
            "number": run.number,
            "sha256": record.hashes.get("record"),
            "key": record.case.key,
            "division": record.case.division,
            "precision": record.case.precision,
            "tune": record.tune.model_dump(mode="json", exclude_unset=True),
            "tuned": tuned(record),
            "metrics": _metrics(record, in_order(set(record.metrics))),
            "explain": _explained(record) if explain else None,
        }
    )


def _explained(record: Record) -> list[Explained]:
    """Return the waterfall of each profiled rank, or that of the samples if the run was not
    profiled.
    """
    return [
        Explained(
            rank=one.rank,
            steps=one.steps,
            measured_s=one.measured_s,
            whole_s=one.whole_s,
            profiled=one.profile is not None,
            rows=one.rows,
        )
        for one in waterfalls(record)
    ]


def _spec(record: SpecRecord) -> SpecData:
    """Return a spec record as data: one row for each benchmark and rank, with its ceiling and an
    English note.
    """
    told = {name: getattr(record, name) for name in SpecData.model_fields if name != "ceilings"}
    told |= record.model_dump(include={"reasons"})
    rows = []
    for bench, ceiling in zip(record.benches, spec.in_english(record).ceilings, strict=True):
        names = (name for name in CeilingData.model_fields if name != "ceiling")
        of_bench = {name: getattr(bench, name) for name in names}
        rows.append(CeilingData(**of_bench, ceiling=Ceiling(**ceiling.model_dump())))
    return SpecData(**told, ceilings=rows)
