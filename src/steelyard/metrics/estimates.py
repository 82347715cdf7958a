"""Combine several runs into one number: which runs belong together, their mean, and its interval.

Used by everything that shows more than one record: repeats, engines, scaling, overview, comparison
and history.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean
from typing import Any, Literal

from steelyard.case.case import AUTO
from steelyard.metrics import passes, stats
from steelyard.metrics.declared_hardware import is_hardware_declared, name_declared_hardware
from steelyard.metrics.result import WorkName, work_name
from steelyard.record.record import Record
from steelyard.schema import to_canonical_json

# how a device is named that only a user states, in groups and tables
DECLARED, UNDECLARED = "declared", "unknown"
# beyond any machine, so that no formula overflows on a forged record
RATE_BOUNDS = (1e-30, 1e30)
# the metric of each rate, and whether it is that of one device
_RATE_METRICS: dict[WorkName, tuple[str, bool]] = {
    "tokens": ("tokens_per_device_s", True),
    "samples": ("samples_per_s", False),
    "output_tokens": ("output_tokens_per_s", False),
}

Interval = tuple[float, float]
# what an interval comes from: the steps of one run, or the spread between several runs
IntervalSource = Literal["steps", "runs"]


def list_device_names(record: Record) -> list[str]:
    """Return the names of the devices of a run (such as "NVIDIA H200"), on all hosts, each once and
    sorted; for a server whose hardware is only declared what is declared, never the client's
    devices.
    """
    if is_hardware_declared(record):
        return [f"{name_declared_hardware(record) or UNDECLARED} ({DECLARED})"]
    devices = [
        *record.environment.hardware.devices,
        *(device for host in record.hosts for device in host.devices),
    ]
    return sorted({device.name for device in devices})


def _identify_weights(record: Record) -> list[Any]:
    """Return [source, seed, header_sha256], which identify the weights; None for what the record
    does not have.
    """
    facts = record.weights.model_dump(mode="json")
    return [facts.get(name) for name in ("source", "seed", "header_sha256")]


def _list_definitions(record: Record) -> list[tuple[str, str]]:
    """Return the name and the id of each definition that a record's request samples have; empty if
    it has none.
    """
    return [pair for item in record.requests[:1] for pair in sorted(item.all_definitions.items())]


def _validity_limits(record: Record) -> list[Any]:
    """Return [gate as a dict or None, max_interval or None] of a record's case: what decides
    whether a run is valid, and can be changed with `--set`.
    """
    case = record.case
    return [None if case.gate is None else case.gate.model_dump(mode="json"), case.max_interval]


def _requested_tune(record: Record) -> dict[str, Any]:
    """Return the tune as it was requested, by field name: values that were chosen automatically
    (`record.auto_tunes`) are "auto" again. `parallel` is left out, since the plan says it.
    """
    return {
        **record.tune.model_dump(mode="json", exclude={"parallel"}),
        **dict.fromkeys(record.auto_tunes, AUTO),
    }


# What two runs may have in common, by name. `parallel` of a tune is left out: it is how the plan
# was requested, and the plan itself is a part.
GROUPING_PARTS: dict[str, Callable[[Record], Any]] = {
    "case": lambda record: [record.case.name, record.case.size],
    "division": lambda record: record.case.division,
    "precision": lambda record: record.case.precision,
    "limits": _validity_limits,
    "engine": lambda record: record.engine.name,
    "sample": lambda record: record.scope.model_dump(mode="json", exclude={"steps"}),
    "steps": lambda record: record.scope.steps,
    "plan": lambda record: [
        record.plan.nodes,
        record.plan.devices,
        record.plan.tp,
        record.plan.pp,
        record.plan.dp,
    ],
    "tune": lambda record: record.tune.model_dump(mode="json", exclude={"parallel"}),
    "asked_tune": _requested_tune,  # `auto` gives other numbers for other engines and plans
    "key": lambda record: record.case.key,  # a failed run's key may lack the data's fingerprint
    "headline": passes.find_headline_pass,
    "weights": _identify_weights,
    "devices": list_device_names,
    "restarts": lambda record: [one.step for one in record.restarts],
    "formulas": lambda record: [record.formulas, _list_definitions(record)],
}


def make_group_key(record: Record, parts: Iterable[str]) -> str:
    """Return a text that is equal for runs that agree in the named parts (keys of `GROUPING_PARTS`,
    such as "case", "plan" or "weights"); used as a grouping key. `sample` is the scope without its
    steps, `asked_tune` the tune with "auto" where that chose.

    Raises KeyError for an unknown part.
    """
    return to_canonical_json([GROUPING_PARTS[name](record) for name in parts])


@dataclass(frozen=True)
class Estimate:
    """A number (`value`) with its 95 % confidence interval (`interval`: low and high end in the
    unit of the value; None if unknown). `scale(factor)` returns a new one with both multiplied.
    """

    value: float
    interval: Interval | None = None

    def scale(self, factor: float) -> "Estimate":
        """Return a new estimate with value and interval of this one multiplied by `factor`, which
        must be positive.
        """
        interval = self.interval
        return Estimate(
            self.value * factor,
            None if interval is None else (interval[0] * factor, interval[1] * factor),
        )


def estimate_rate(record: Record, count_name: WorkName | None = None) -> Estimate | None:
    """Return the rate of a record, work of all devices per second of wall time, with its interval.

    `count_name` is "tokens", "samples" or "output_tokens"; None means what this record's rates
    count (`work_name`). It is the stored metric `tokens_per_device_s` times the number of devices,
    `samples_per_s`, or `output_tokens_per_s`: over the headline pass, in training over the steady
    window, in generation over the window of its requests. None if the record has no such
    value, or one outside 1e-30 to 1e30; an interval that does not contain the value is dropped. The
    record's status does not matter. Raise ValueError for another `count_name`.
    """
    if count_name is not None and count_name not in _RATE_METRICS:
        allowed = ", ".join(_RATE_METRICS)
        raise ValueError(f"count_name {count_name!r} is not known; allowed: {allowed}")
    metric_name, is_per_device = _RATE_METRICS[count_name or work_name(record)]
    devices = passes.count_devices(record) if is_per_device else 1
    stored = record.metrics.get(metric_name)
    if stored is None or stored.value is None or not RATE_BOUNDS[0] < stored.value < RATE_BOUNDS[1]:
        return None
    interval = stored.interval
    is_plausible = (
        interval is not None and 0 <= interval[0] <= stored.value <= interval[1] < RATE_BOUNDS[1]
    )
    return Estimate(stored.value, interval if is_plausible else None).scale(devices)


def average_known_runs(
    estimates: Iterable[Estimate | None],
) -> tuple[Estimate | None, IntervalSource | None]:
    """Return (mean of the estimates that are not None, what its interval comes from: "steps",
    "runs" or None), as `average_runs` does; (None, None) if there are none.
    """
    known = [estimate for estimate in estimates if estimate is not None]
    return average_runs(known) if known else (None, None)


def average_runs(estimates: Sequence[Estimate]) -> tuple[Estimate, IntervalSource | None]:
    """Return (arithmetic mean over one or more runs with its 95 % interval, what that interval
    comes from).

    One run keeps its own interval ("steps"; None if it has none). Several get the interval of their
    spread by Student's t ("runs"), because runs are independent and steps of one run are not; their
    own intervals are ignored. Its lower end is cut at 0 unless a value is negative.
    """
    if len(estimates) == 1:
        return estimates[0], None if estimates[0].interval is None else "steps"
    values = [estimate.value for estimate in estimates]
    mean = fmean(values)
    half_width = (
        stats.student_t_95(len(values) - 1) * standard_deviation(values) / sqrt(len(values))
    )
    return (
        Estimate(
            mean,
            (
                mean - half_width if min(values) < 0 else max(0.0, mean - half_width),
                mean + half_width,
            ),
        ),
        "runs",
    )


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two or more values."""
    mean = fmean(values)
    return hypot(*(value - mean for value in values)) / sqrt(len(values) - 1)


def get_metric_value(record: Record, metric_name: str) -> float | None:
    """Return the stored value of a metric; None if the record has no such metric or its value is
    None.
    """
    stored = record.metrics.get(metric_name)
    return None if stored is None else stored.value


def choose_quality_metric(group: Sequence[Record]) -> str:
    """Return the name of the quality metric by which these runs are compared.

    It is the quality metric of the first record (its gate's or its task's) if any of the runs has a
    value for it; else the first metric of training steps, `loss`, if the kind of work has one.
    `group` must not be empty.
    """
    case_metric = group[0].quality.metric
    if any(get_metric_value(record, case_metric) is not None for record in group):
        return case_metric
    return next(iter(group[0].task.kind_row.step_metrics), case_metric)
