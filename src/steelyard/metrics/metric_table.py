"""The metric table: which metrics a task has, and their values for a record.

`run/assemble.py` and `verify.py` call `derive_metrics`; pages look up titles and units with
`find_metric`. A task's scores become metrics here, and other packages add rows through the
entry-point group `steelyard.metrics`.
"""

from dataclasses import replace
from functools import partial
from math import isfinite

from steelyard import plugins, tasks, words
from steelyard.metrics import rates
from steelyard.metrics.declared_hardware import HARDWARE_METRICS, is_hardware_declared
from steelyard.metrics.metric import Metric
from steelyard.metrics.metric_rows import OTHERS, RATES
from steelyard.metrics.request_rows import REQUEST_ROWS
from steelyard.metrics.result import Result
from steelyard.record.record import Record, Value
from steelyard.tasks.task import NumberForm, Score, Task
from steelyard.words import Message

GROUP = "steelyard.metrics"
FORM_BY_UNIT: dict[str, NumberForm] = {
    "fraction": "percent",
    "share": "percent",
    "GiB": "gib",
    "s": "seconds",
}


def list_task_metrics(task: Task) -> list[Metric]:
    """Return the metrics that a task has (`Metric.tasks`) in page order: shipped rates, the task's
    scores, other shipped metrics, then those of installed packages.

    Raises RequestError if an installed package's entry point cannot be imported or is not a
    `Metric`, or if two metrics of the task have one name: no package replaces another's formula.
    """
    candidates = [
        *RATES,
        *REQUEST_ROWS,
        *map(_make_score_metric, task.scores),
        *OTHERS,
        *plugins.load_rows(GROUP, Metric, "metric"),
    ]
    metrics = [metric for metric in candidates if metric.tasks(task)]
    plugins.check_unique_names((metric.name for metric in metrics), "metric")
    return metrics


def _make_score_metric(score: Score) -> Metric:
    """Return the row of the metric table for one of a task's scores: its name, unit and texts are
    the score's, its formula reads the score from the record's answers (`rates.task_score`).
    """
    formula = partial(rates.task_score, score_value=score.value, pass_name=score.of)
    return Metric(score.name, score.unit, score.better, formula, score.en, score.zh, score.form)


def derive_metrics(record: Record) -> dict[str, Value]:
    """Compute all metrics of a record and return them by name, as the record stores them.

    Metrics without a formula are left out; those that cannot be computed have the value None and a
    note.
    """
    return make_record_values(record, compute_results(record))


def make_record_values(record: Record, results_by_name: dict[str, Result]) -> dict[str, Value]:
    """Return results by metric name as the `Value`s that a record stores: value, unit, interval and
    note.

    Notes are written in the record's wording: as messages, or as English sentences in older
    records. Raises KeyError for a name that the record's task does not have.
    """
    units = {metric.name: metric.unit_of(record) for metric in list_task_metrics(record.task)}
    entries = [
        (name, result, words.to_stored_form(result.note, record.wording))
        for name, result in results_by_name.items()
    ]
    return {
        name: Value(value=result.value, unit=units[name], interval=result.interval, note=note)
        for name, result, note in entries
    }


def compute_results(record: Record) -> dict[str, Result]:
    """Evaluate every formula of the record's task and return the results by metric name, in page
    order; metrics without a formula are left out.

    Notes are messages that are not yet in a language. Values that are not finite become None with a
    note, and so do those of hardware that is only declared.
    """
    rows = [(metric.name, metric.formula) for metric in list_task_metrics(record.task)]
    unseen = HARDWARE_METRICS if is_hardware_declared(record) else frozenset()
    return {
        name: Result(None, Message("metric.not_seen"))
        if name in unseen
        else _drop_not_finite(formula(record))
        for name, formula in rows
        if formula is not None
    }


def _drop_not_finite(result: Result) -> Result:
    """Return the result with only finite numbers, because a record cannot store others.

    A value that is NaN or infinite becomes None, with a note that replaces the result's and without
    interval; an interval with such an end is dropped and the value stays.
    """
    if result.value is not None and not isfinite(result.value):
        return Result(None, Message("metric.not_finite"))
    interval = result.interval if result.interval and all(map(isfinite, result.interval)) else None
    return replace(result, interval=interval)


def find_metric(metric_name: str, unit: str = "", task: Task | None = None) -> Metric:
    """Return the metric row of a name, never None.

    It is looked for in the metrics of `task` first, if given, so that titles are the task's, then
    in the shipped rows, then in every task. For an unknown name, such as one from a package that is
    not installed, a row without formula and meaning is made of the name and `unit`, whose number
    form follows from the unit. `unit` is not used for a known name.
    """
    known = [
        *(list_task_metrics(task) if task else []),
        *RATES,
        *REQUEST_ROWS,
        *OTHERS,
        *(m for some_task in tasks.load_tasks().values() for m in list_task_metrics(some_task)),
    ]
    match = next((metric for metric in known if metric.name == metric_name), None)
    return match or Metric(
        metric_name,
        unit,
        "",
        None,
        (metric_name, ""),
        (metric_name, ""),
        FORM_BY_UNIT.get(unit, "number"),
    )


def sort_metric_names(names: set[str]) -> list[str]:
    """Return the names as a list in the order of the metric table: shipped rates, scores of all
    tasks, other shipped metrics; other names, such as those of installed packages, come last,
    alphabetically.
    """
    all_metrics = [
        *RATES,
        *REQUEST_ROWS,
        *(
            m
            for some_task in tasks.load_tasks().values()
            for m in map(_make_score_metric, some_task.scores)
        ),
        *OTHERS,
    ]
    order = {metric.name: position for position, metric in reversed(list(enumerate(all_metrics)))}
    return sorted(names, key=lambda name: (order.get(name, len(all_metrics)), name))
