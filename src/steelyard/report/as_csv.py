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
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.metric_table import list_task_metrics, sort_metric_names
from steelyard.record.record import Record
from steelyard.report.numbered_runs import record_identity
from steelyard.report.plain_text import clean_line

CsvValue = str | int | float | list[str] | tuple[str, ...] | dict[str, Any] | None
# A spreadsheet takes a cell that begins with one of these, also in full width, for a formula.
FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
INTERVAL_ENDS = ("low", "high")


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
        "load",
        "requests",
        "engine",
        "engine_mark",
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
        "providers",
        "status",
        "reasons",
        "quality",
        "quality_evaluated",
    ),
)


@dataclass(frozen=True)
class MetricColumn:
    """The three CSV columns (value, low and high end of its interval) of a metric (`name`) in one
    `unit`; made by `list_metric_columns`.

    `titles` returns NAME, NAME_low and NAME_high with the unit in parentheses, `cells(record)` the
    three numbers; None for a record that has the metric in another unit or not at all.
    """

    name: str
    unit: str

    @property
    def titles(self) -> list[str]:
        """Return the titles of the metric's three columns: NAME, NAME_low and NAME_high, each
        followed by the unit in parentheses if it has one.
        """
        unit_text = f" ({self.unit})" if self.unit else ""
        return [
            f"{self.name}{end}{unit_text}" for end in ("", *(f"_{end}" for end in INTERVAL_ENDS))
        ]

    def cells(self, record: Record) -> list[CsvValue]:
        """Return a record's three cells for this metric: the value and both ends of its interval;
        None for each that the record does not have, and for all three if its unit is another.
        """
        metric = record.metrics.get(self.name)
        if metric is None or metric.unit != self.unit:
            return [None] * (1 + len(INTERVAL_ENDS))
        return [metric.value, *(metric.interval or [None] * len(INTERVAL_ENDS))]


def list_metric_columns(records: list[Record]) -> list[MetricColumn]:
    """Return a column for every metric that has a formula in any installed task and for any other
    that these records hold, in the order of the metric table.

    A metric that records have in several units gets one column per unit, in the order of the
    records; one that no record has gets its base unit. Tasks of other packages are imported.
    """
    recorded = {name for record in records for name in record.metrics}
    defined = {
        metric.name
        for task in tasks.load_tasks().values()
        for metric in list_task_metrics(task)
        if metric.formula is not None
    }
    out = []
    for name in sort_metric_names(defined | recorded):
        units = dict.fromkeys(
            record.metrics[name].unit for record in records if name in record.metrics
        )
        out += [MetricColumn(name, unit) for unit in units or [metric_row(name).base_unit]]
    return out


def render_csv(records: list[Record]) -> str:
    """Return the whole CSV file as a string: a header line, then one line per record, with CRLF
    line ends.

    Columns are those of IDENTITY, then three for each metric (value, low and high end of its
    interval). Without records the header stands alone.
    """
    metrics = list_metric_columns(records)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(
        [
            format_csv_cell(title)
            for title in (*IDENTITY, *(title for column in metrics for title in column.titles))
        ]
    )
    for record in records:
        fields = record_identity(record)
        cells: list[CsvValue] = [fields[name] for name in IDENTITY]
        cells += [cell for column in metrics for cell in column.cells(record)]
        writer.writerow([format_csv_cell(cell) for cell in cells])
    return out.getvalue()


def format_csv_cell(cell: CsvValue) -> str:
    """Format a CSV cell on one line: None as an empty cell, a number with all its digits (`repr`),
    a dict or bool as JSON with sorted keys, a list or tuple as its distinct texts joined by `; `.

    Text loses control characters. Text, but never a number, that a spreadsheet would take for a
    formula gets an apostrophe in front. The csv writer adds quotes.
    """
    if cell is None:
        return ""
    if isinstance(cell, bool | dict):
        return format_csv_cell(json.dumps(cell, ensure_ascii=False, sort_keys=True))
    if isinstance(cell, list | tuple):
        return format_csv_cell("; ".join(dict.fromkeys(cell)))
    if not isinstance(cell, str):
        return repr(cell)
    text = clean_line(cell)
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
