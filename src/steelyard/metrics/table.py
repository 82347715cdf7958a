"""The metric table: which metrics a task has, and their values for a record.

A task's own scores come from its row. Other packages add rows through the entry-point group
`steelyard.metrics`.
"""

from dataclasses import replace
from functools import partial
from math import isfinite

from steelyard import plugins, tasks, words
from steelyard.metrics import rates
from steelyard.metrics.metric import Metric
from steelyard.metrics.result import Result
from steelyard.metrics.rows import OTHERS, RATES
from steelyard.record.record import Record, Value
from steelyard.tasks.task import Score, Task
from steelyard.words import Message

GROUP = "steelyard.metrics"
FORM_BY_UNIT = {"fraction": "percent", "share": "percent", "GiB": "gib", "s": "seconds"}


def of_task(task: Task) -> list[Metric]:
    """The metrics of a task, in the order in which a page lists them."""
    every = [*RATES, *map(_of_score, task.scores), *OTHERS, *plugins.rows(GROUP, Metric, "metric")]
    return [metric for metric in every if metric.tasks(task)]


def _of_score(score: Score) -> Metric:
    formula = partial(rates.quality, value=score.value, of=score.of)
    return Metric(score.name, score.unit, score.better, formula, score.en, score.zh, score.form)


def derive(record: Record) -> dict[str, Value]:
    """All metrics of a record: those that its task has."""
    return values(record, results(record))


def values(record: Record, found_by_name: dict[str, Result]) -> dict[str, Value]:
    """Return metrics as a record stores them, with their units and notes."""
    units = {metric.name: metric.unit_of(record) for metric in of_task(record.task)}
    every = [
        (name, found, words.stored(found.note, record.wording))
        for name, found in found_by_name.items()
    ]
    return {
        name: Value(value=found.value, unit=units[name], interval=found.interval, note=note)
        for name, found, note in every
    }


def results(record: Record) -> dict[str, Result]:
    """What the formulas find, with messages that have no language yet."""
    rows = [(metric.name, metric.formula) for metric in of_task(record.task)]
    return {name: _finite(formula(record)) for name, formula in rows if formula is not None}


def _finite(found: Result) -> Result:
    """What was found, as far as it is finite: absurd times give numbers that a record cannot hold."""
    if found.value is not None and not isfinite(found.value):
        return Result(None, Message("metric.not_finite"))
    interval = found.interval if found.interval and all(map(isfinite, found.interval)) else None
    return replace(found, interval=interval)


def row(name: str, unit: str = "", task: Task | None = None) -> Metric:
    """A metric's row, in a task's own words where it is given; one made of its bare name where
    there is none.
    """
    known = [
        *(of_task(task) if task else []),
        *RATES,
        *OTHERS,
        *(m for one in tasks.table().values() for m in of_task(one)),
    ]
    found = next((metric for metric in known if metric.name == name), None)
    return found or Metric(
        name, unit, "", None, (name, ""), (name, ""), FORM_BY_UNIT.get(unit, "number")
    )


def in_order(names: set[str]) -> list[str]:
    """Names in the order of the table; unknown ones last."""
    every = [
        *RATES,
        *(m for one in tasks.table().values() for m in map(_of_score, one.scores)),
        *OTHERS,
    ]
    order = {metric.name: place for place, metric in reversed(list(enumerate(every)))}
    return sorted(names, key=lambda name: (order.get(name, len(every)), name))
