"""Records as CSV (RFC 4180): one row a record, every metric with its unit and the ends of its
interval.

The columns are the same whatever the records are, but for rates whose unit depends on the record:
those have a column for each unit that is there.
"""

import csv
import io
import json
from dataclasses import dataclass
from typing import Any

from steelyard import tasks
from steelyard.metrics.table import in_order, of_task
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Record
from steelyard.report.plain import clean
from steelyard.report.runs import identity

Field = str | int | float | list[str] | tuple[str, ...] | dict[str, Any] | None
# What a spreadsheet takes for a formula at the start of a cell, in full width too.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
ENDS = ("low", "high")


# What a record is, in the order of the columns.
IDENTITY = (
    *(
        "id",
        "created",
        "case",
        "size",
        "changed",
        "key",
        "division",
        "precision",
        "scope",
        "subjects",
        "rows",
    ),
    *(
        "sample",
        "steps",
        "engine",
        "engine_version",
        "framework",
        "framework_version",
        "accelerator",
    ),
    *(
        "accelerators",
        "nodes",
        "plan",
        "tune",
        "weights",
        "status",
        "reasons",
        "quality",
        "quality_evaluated",
    ),
)


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
    """Return every metric that a record may have, and what else these records hold."""
    told = {name for record in records for name in record.metrics}
    known = {
        metric.name
        for task in tasks.table().values()
        for metric in of_task(task)
        if metric.formula is not None
    }
    out = []
    for name in in_order(known | told):
        units = dict.fromkeys(
            record.metrics[name].unit for record in records if name in record.metrics
        )
        out += [MetricColumn(name, unit) for unit in units or [metric_row(name).base_unit]]
    return out


def table(records: list[Record]) -> str:
    """Return the whole file. Lines end as RFC 4180 says."""
    metrics = columns(records)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(
        [
            safe(title)
            for title in (*IDENTITY, *(title for column in metrics for title in column.titles))
        ]
    )
    for record in records:
        known = identity(record)
        cells: list[Field] = [known[name] for name in IDENTITY]
        cells += [cell for column in metrics for cell in column.cells(record)]
        writer.writerow([safe(cell) for cell in cells])
    return out.getvalue()


def safe(cell: Field) -> str:
    """Return a cell on one line. Text that a spreadsheet would run begins with an apostrophe; a
    number is written as it is, with all its digits; several texts stand each once, a table as
    JSON."""
    if cell is None:
        return ""
    if isinstance(cell, bool | dict):
        return safe(json.dumps(cell, ensure_ascii=False, sort_keys=True))
    if isinstance(cell, list | tuple):
        return safe("; ".join(dict.fromkeys(cell)))
    if not isinstance(cell, str):
        return repr(cell)
    text = clean(cell)
    return f"'{text}" if text.startswith(FORMULA) else text
