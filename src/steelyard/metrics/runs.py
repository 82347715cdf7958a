"""Several runs as one number: which runs were asked the same, their mean, and its interval."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean
from typing import Any, Literal

from steelyard.case.case import AUTO
from steelyard.metrics import spans, stats
from steelyard.metrics.result import work_name
from steelyard.record.record import Record
from steelyard.schema import canonical

# that no machine comes near: a stranger's record makes no formula overflow
RATE_BOUNDS = (1e-30, 1e30)

Interval = tuple[float, float]
# what an interval comes from: the steps of one run, or the spread between runs
Source = Literal["steps", "runs"]


def kinds(record: Record) -> list[str]:
    """The kinds of device of a run, each once."""
    devices = [
        *record.environment.hardware.devices,
        *(device for host in record.hosts for device in host.devices),
    ]
    return sorted({device.name for device in devices})


def _weights(record: Record) -> list[Any]:
    table = record.weights.model_dump(mode="json")
    return [table.get(name) for name in ("source", "seed", "header_sha256")]


def _limits(record: Record) -> list[Any]:
    """What makes a run valid or not; `--set` may change it."""
    case = record.case
    return [None if case.gate is None else case.gate.model_dump(mode="json"), case.max_interval]


def _asked_tune(record: Record) -> dict[str, Any]:
    return {
        **record.tune.model_dump(mode="json", exclude={"parallel"}),
        **dict.fromkeys(record.auto, AUTO),
    }


# What two runs may have in common, by name. `parallel` is how a plan was asked for; the plan has
# what came of it.
PARTS: dict[str, Callable[[Record], Any]] = {
    "case": lambda record: [record.case.name, record.case.size],
    "division": lambda record: record.case.division,
    "precision": lambda record: record.case.precision,
    "limits": _limits,
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
    "asked_tune": _asked_tune,  # engines and plans may get other numbers for the same request
    "key": lambda record: record.case.key,  # of a failed run it may lack the data
    "headline": spans.headline,
    "weights": _weights,
    "devices": kinds,
    "restarts": lambda record: [one.step for one in record.restarts],
    "formulas": lambda record: record.formulas,
}


def in_common(record: Record, parts: Iterable[str]) -> str:
    """Return a text that is equal for runs that are alike in these parts."""
    return canonical([PARTS[name](record) for name in parts])


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; None where that is unknown."""

    value: float
    interval: Interval | None = None

    def scaled(self, factor: float) -> "Estimate":
        """Return the same times a positive factor."""
        ends = self.interval
        return Estimate(
            self.value * factor, None if ends is None else (ends[0] * factor, ends[1] * factor)
        )


def rate(record: Record, work: str | None = None) -> Estimate | None:
    """Work of all devices over wall time: tokens, or samples where that is what the record's rates
    count, or else what is asked for. Of training, over the steady window."""
    tokens = (work or work_name(record)) == "tokens"
    name, devices = ("tokens_per_device_s", record.plan.world) if tokens else ("samples_per_s", 1)
    found = record.metrics.get(name)
    if found is None or found.value is None or not RATE_BOUNDS[0] < found.value < RATE_BOUNDS[1]:
        return None
    ends = found.interval
    within = ends is not None and 0 <= ends[0] <= found.value <= ends[1] < RATE_BOUNDS[1]
    return Estimate(found.value, ends if within else None).scaled(devices)


def mean(found: Iterable[Estimate | None]) -> tuple[Estimate | None, Source | None]:
    """Return the mean over the runs that have a number, with what its interval comes from; None if
    none has."""
    known = [one for one in found if one is not None]
    return over_runs(known) if known else (None, None)


def over_runs(found: Sequence[Estimate]) -> tuple[Estimate, Source | None]:
    """The mean over runs. Of one run the interval is its own; of several it is that of their spread
    (Student's t): the run is what is independent, and its own steps share what made it fast or
    slow."""
    if len(found) == 1:
        return found[0], None if found[0].interval is None else "steps"
    values = [one.value for one in found]
    mean = fmean(values)
    half = stats.t_95(len(values) - 1) * deviation(values) / sqrt(len(values))
    return (
        Estimate(mean, (mean - half if min(values) < 0 else max(0.0, mean - half), mean + half)),
        "runs",
    )


def deviation(values: Sequence[float]) -> float:
    """Standard deviation between two runs or more."""
    mean = fmean(values)
    return hypot(*(value - mean for value in values)) / sqrt(len(values) - 1)


def ratio(top: Estimate, bottom: Estimate) -> Estimate:
    """A ratio of two independent rates: their relative errors add as squares, each end's with the
    other's opposite end.
    """
    value = top.value / bottom.value
    if top.interval is None or bottom.interval is None:
        return Estimate(value)
    (down, up), (bottom_down, bottom_up) = (
        _relative(top, top.interval),
        _relative(bottom, bottom.interval),
    )
    return Estimate(
        value,
        (max(0.0, value * (1 - hypot(down, bottom_up))), value * (1 + hypot(up, bottom_down))),
    )


def _relative(one: Estimate, ends: Interval) -> Interval:
    return (one.value - ends[0]) / one.value, (ends[1] - one.value) / one.value


def metric(record: Record, name: str) -> float | None:
    found = record.metrics.get(name)
    return None if found is None else found.value


def quality(group: Sequence[Record]) -> str:
    """The quality by which runs are compared: the case's, else that of the steps, where no pass
    looked at held-out data.
    """
    own = group[0].quality.metric
    if any(metric(record, own) is not None for record in group):
        return own
    return next(iter(group[0].task.kind_row.step_metrics), own)
