"""Records as CSV (RFC 4180): one row a record, every metric with its unit and the ends of its interval.

The columns are the same whatever the records are, but for rates whose unit depends on the record: those have a column for each
unit that is there.
"""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

from steelyard import tasks
from steelyard.metrics import runs
from steelyard.metrics.table import in_order, of_task
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.plain import clean
from steelyard.report.runs import Version, changes, engine_version, framework_version, tuned

Field = str | int | float | None
# What a spreadsheet takes for a formula at the start of a cell, in full width too.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
ENDS = ("low", "high")


def _version(found: Version | None) -> str | None:
    return None if found is None else found.version


def _several(texts: list[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


# What a record is, in the order of the columns.
IDENTITY: dict[str, Callable[[Record], Field]] = {
    "id": lambda record: record.id,
    "created": lambda record: record.created,
    "case": lambda record: record.case.name,
    "size": lambda record: record.case.size,
    "changed": lambda record: _several(changes(record)),
    "key": lambda record: record.case.key,
    "division": lambda record: record.case.division,
    "precision": lambda record: record.case.precision,
    "scope": lambda record: record.scope.kind,
    "subjects": lambda record: _several(list(record.scope.subjects or ())),
    "rows": lambda record: _several(list(record.scope.rows or ())),
    "sample": lambda record: record.scope.sample,
    "steps": lambda record: record.scope.steps,
    "engine": lambda record: record.engine.name,
    "engine_version": lambda record: _version(engine_version(record)),
    "framework": lambda record: None if (found := framework_version(record)) is None else found.name,
    "framework_version": lambda record: _version(framework_version(record)),
    "accelerator": lambda record: _several(runs.kinds(record)),
    "accelerators": lambda record: record.plan.world,
    "nodes": lambda record: record.plan.nodes,
    "plan": lambda record: str(record.plan),
    "tune": lambda record: json.dumps(tuned(record), ensure_ascii=False, sort_keys=True),
    "weights": lambda record: record.weights.source,
    "status": lambda record: record.status,
    "reasons": lambda record: _several([reason.code for reason in record.reasons]),
    "quality": lambda record: record.quality.metric,
    "quality_evaluated": lambda record: "true" if record.quality.evaluated else "false",
}


@dataclass(frozen=True)
class MetricColumn:
    """A metric in one of its units; a record that has it in another unit has nothing here."""

    name: str
    unit: str

    @property
    def titles(self) -> list[str]:
        beside = f" ({self.unit})" if self.unit else ""
        return [f"{self.name}{end}{beside}" for end in ("", *(f"_{end}" for end in ENDS))]

    def cells(self, record: Record) -> list[Field]:
        found = record.metrics.get(self.name)
        if found is None or found.unit != self.unit:
            return [None] * (1 + len(ENDS))
        return [found.value, *(found.interval or [None] * len(ENDS))]


def columns(records: list[Record]) -> list[MetricColumn]:
    """Every metric that a record may have, and what else these records hold."""
    told = {name for record in records for name in record.metrics}
    known = {metric.name for task in tasks.table().values() for metric in of_task(task) if metric.formula is not None}
    out = []
    for name in in_order(known | told):
        units = dict.fromkeys(record.metrics[name].unit for record in records if name in record.metrics)
        out += [MetricColumn(name, unit) for unit in units or [metric_row(name).base_unit]]
    return out


def table(records: list[Record]) -> str:
    """The whole file. Lines end as RFC 4180 says."""
    metrics = columns(records)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([safe(title) for title in (*IDENTITY, *(title for column in metrics for title in column.titles))])
    for record in records:
        cells: list[Field] = [of(record) for of in IDENTITY.values()]
        cells += [cell for column in metrics for cell in column.cells(record)]
        writer.writerow([safe(cell) for cell in cells])
    return out.getvalue()


def safe(cell: Field) -> str:
    """A cell on one line. Text that a spreadsheet would run begins with an apostrophe; a number is written as it is, with all
    its digits."""
    if cell is None:
        return ""
    if not isinstance(cell, str):
        return repr(cell)
    text = clean(cell)
    return f"'{text}" if text.startswith(FORMULA) else text
