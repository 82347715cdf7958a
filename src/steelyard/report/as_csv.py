"""Write records as CSV (RFC 4180): one row per record, every metric with the ends of its interval.

The columns do not depend on the records, except that a metric whose unit differs between records
has a column for each unit. `report --format csv` calls `render_csv`.
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
# A spreadsheet takes a cell that begins with one of these, also in full width, for a formula.
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
ENDS = ("low", "high")


# The columns that identify a record, in order; keys of `record_identity`.
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
    """The three columns (value, low and high end of the interval) of a metric in one of its units.

    They are empty for a record that has the metric in another unit or not at all.
    """

    name: str
    unit: str

    @property
    def titles(self) -> list[str]:
        """Return the titles of the three columns: name, name_low and name_high, each with the unit
        in parentheses if it has one.
        """
        beside = f" ({self.unit})" if self.unit else ""
        return [f"{self.name}{end}{beside}" for end in ("", *(f"_{end}" for end in ENDS))]

    def cells(self, record: Record) -> list[Field]:
        """Return the value and both ends of its interval; None for each that the record does not
        have in this unit.
        """
        found = record.metrics.get(self.name)
        if found is None or found.unit != self.unit:
            return [None] * (1 + len(ENDS))
        return [found.value, *(found.interval or [None] * len(ENDS))]


def columns(records: list[Record]) -> list[MetricColumn]:
    """Return a column for every metric that any task can have and any other that these records
    hold, in the order of the metric table.

    A metric that records have in several units gets one column per unit; one that no record has
    gets its base unit.
    """
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
    """Return the whole CSV file as a string: a header line, then one line per record, with CRLF
    line ends.
    """
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
    """Format a CSV cell on one line: None as an empty cell, a number with all its digits, a dict or
    bool as JSON, a list as its distinct texts joined by `; `.

    Text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
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
