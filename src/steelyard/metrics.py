"""The metric table: every number of a record, derived from its raw samples. docs/metrics.md says what each one means."""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum  # sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from typing import Any

from steelyard import flops, plan, stats, telemetry
from steelyard.case import Model
from steelyard.record import Record, Sample, Value, Window
from steelyard.tasks import TASKS, Task

GIB = 1 << 30


@dataclass(frozen=True)
class Known:
    """A value with what belongs beside it; a value of None has its reason in `note`."""

    value: float | None
    note: str | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str | Callable[[Record], str]
    better: str  # "higher", "lower" or "" where neither is
    formula: Callable[[Record], Known]
    tasks: tuple[str, ...] = ()  # those that have it; empty: all


def derive(record: Record) -> dict[str, Value]:
    """All metrics of a record: those that its task has."""
    out = {}
    for metric in METRICS:
        if metric.tasks and record.case.question["task"] not in metric.tasks:
            continue
        known = metric.formula(record)
        unit = metric.unit if isinstance(metric.unit, str) else metric.unit(record)
        out[metric.name] = Value(value=known.value, unit=unit, interval=known.interval, note=known.note)
    return out


def headline(record: Record) -> str | None:
    """The pass that a record's rates and quality are taken from: infer, else val."""
    ran = {window.pass_name for window in record.passes}
    return next((name for name in ("infer", "val") if name in ran), None)


def work_name(record: Record) -> str:
    """What is counted as work: tokens where all are computed, samples where sharing them is allowed."""
    return "tokens" if record.case.division == "closed" else "samples"


def windows(record: Record, name: str) -> list[Window]:
    return [window for window in record.passes if window.pass_name == name]


def samples(record: Record, name: str) -> list[Sample]:
    return [sample for sample in record.samples if sample.pass_name == name]


def total(record: Record, name: str) -> dict[str, int]:
    """Counts of a pass over all its samples. Ranks that hold one model together count the same work: one of them counts."""
    out: dict[str, int] = {}
    for sample in samples(record, name):
        if plan.place(record.plan, sample.rank).tp == 0:
            for key, count in sample.counts.items():
                out[key] = out.get(key, 0) + count
    return out


def wall_s(record: Record, name: str) -> float | None:
    """Wall time of a pass: that of the slowest rank."""
    return max((window.wall_s for window in windows(record, name)), default=None)


def compute_s(record: Record, name: str) -> float | None:
    """Compute time of a pass: that of the slowest rank. None where an engine does not separate it."""
    by_rank: dict[int, float] = {}
    for sample in samples(record, name):
        if sample.counts:
            if "compute" not in sample.phases:
                return None
            by_rank[sample.rank] = by_rank.get(sample.rank, 0.0) + sample.phases["compute"]
    return max(by_rank.values(), default=None)


def _absent(name: str) -> Known:
    return Known(None, f"the {name} pass was not run or did not finish")


def _rate(name: str, seconds: Callable[[Record, str], float | None]) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        done, time_s = total(record, name).get(work_name(record)), seconds(record, name)
        if not done or not time_s:
            return _absent(name)
        rate = done / time_s
        return Known(rate, interval=_interval(record, name, rate) if seconds is wall_s else None)

    return formula


def _interval(record: Record, name: str, rate: float) -> tuple[float, float] | None:
    """The 95 % interval of a rate over wall time, from the token rate of the slowest rank's steps."""
    slowest = max(windows(record, name), key=lambda window: window.wall_s).rank
    steps = [sample for sample in samples(record, name) if sample.rank == slowest and sample.counts.get("tokens")]
    tokens = [float(sample.counts["tokens"]) for sample in steps]
    times = [sample.end_s - sample.start_s for sample in steps]
    found = stats.rate_interval(tokens, times)
    if found is None or found[1] == float("inf"):
        return None
    own = fsum(tokens) / fsum(times)
    return rate * found[0] / own, rate * found[1] / own


def _per_second(key: str, per_device: bool = False) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        name = headline(record)
        done, time_s = (total(record, name).get(key), wall_s(record, name)) if name else (None, None)
        if name is None or not done or not time_s:
            return _absent(name or "infer")
        rate = done / time_s / (devices(record) if per_device else 1)
        return Known(rate, interval=_interval(record, name, rate))

    return formula


def devices(record: Record) -> int:
    return record.plan.nodes * record.plan.devices


def _flops(convention: str) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        name = headline(record)
        if name is None or not total(record, name).get("tokens"):
            return _absent(name or "infer")
        model = Model.model_validate(record.case.question["model"])
        value = flops.CONVENTIONS[convention](model, total(record, name))
        return Known(None, "the case states no nominal size") if value is None else Known(float(value))

    return formula


def _peak(record: Record) -> Known:
    """Dense datasheet rate of one device at the precision of the matmuls."""
    row = record.environment["hardware"].get("peak")
    if row is None:
        return Known(None, "this accelerator has no datasheet row")
    matmul = record.case.question["precision"]["matmul"]
    rate = row["flops_per_s"].get(matmul)
    return Known(rate, None if rate else f"the datasheet row of {row['name']} has no {matmul} rate")


def _achievable(record: Record) -> Known:
    """Matmul rate of one device, measured in this run: the mean over ranks."""
    rates = [rank["matmul_flops_per_s"] for rank in record.ranks if rank.get("matmul_flops_per_s")]
    return Known(fsum(rates) / len(rates)) if rates else Known(None, "the matmul rate was not measured")


def _mfu(
    convention: str, seconds: Callable[[Record, str], float | None], ceiling: Callable[[Record], Known]
) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        done, peak = _flops(convention)(record), ceiling(record)
        name = headline(record)
        time_s = seconds(record, name) if name else None
        if done.value is None or peak.value is None:
            return Known(None, done.note if done.value is None else peak.note)
        return (
            Known(done.value / time_s / (peak.value * devices(record)), f"convention {convention}")
            if time_s
            else _absent(name or "infer")
        )

    return formula


def _mem(record: Record) -> Known:
    """Highest memory in use over devices, inside the headline pass; around it, where a pass is over between two readings."""
    name = headline(record)
    if name is None:
        return _absent("infer")
    return _peak_memory(record, name, record.telemetry)


def _peak_memory(record: Record, name: str, devices: list[dict[str, Any]]) -> Known:
    spans = windows(record, name)
    start, end = min(w.start_s for w in spans), max(w.start_s + w.wall_s for w in spans)
    for margin, note in ((0.0, None), (1.0, "read just before and after the pass, which was over between two readings")):
        around = [telemetry.window(s, start - margin * s["period_s"], end + margin * s["period_s"]) for s in devices]
        known = [peak for peak in map(telemetry.peak_memory, around) if peak is not None]
        if known:
            return Known(max(known) / GIB, note)
    return Known(None, "no memory reading fell into the pass")


def rank_mem(record: Record, rank: int) -> float | None:
    """GiB in use on one rank in the headline pass: its device's peak, or of ranks that share a device its own at the end."""
    name = headline(record)
    if name is None:
        return None
    own = next((one.get("in_use_bytes") or {} for one in record.ranks if one.get("rank") == rank), {}).get(name)
    series = _series_of(record, rank)
    return own / GIB if own is not None else _peak_memory(record, name, [series]).value if series else None


def _framework(key: str) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        name = headline(record)
        found = [getattr(window, key) for window in windows(record, name)] if name else []
        known = [value for value in found if value is not None]
        return Known(max(known) / GIB) if known else Known(None, "the framework keeps no count on this device")

    return formula


def _mem_total(record: Record) -> Known:
    sizes = [device["memory_bytes"] for device in record.environment["hardware"]["devices"] if device.get("memory_bytes")]
    return Known(min(sizes) / GIB) if sizes else Known(None, "the device does not tell its memory")


def _energy(record: Record) -> Known:
    name = headline(record)
    if name is None:
        return _absent("infer")
    used = 0.0
    for window in windows(record, name):
        series = _series_of(record, window.rank)
        joules = telemetry.energy_j(series, window.start_s, window.start_s + window.wall_s) if series else None
        if joules is None:
            return Known(None, "the device has no energy counter, or the pass was too short to read it")
        used += joules
    return Known(used)


def _series_of(record: Record, rank: int) -> dict[str, Any] | None:
    """What was read off the device of a rank."""
    device = next((one.get("device") for one in record.ranks if one.get("rank") == rank), None)
    return next((series for series in record.telemetry if series["device"] == device), None)


def _energy_per(key: str) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        used, name = _energy(record), headline(record)
        if used.value is None or name is None:
            return used
        return Known(used.value / total(record, name)[key])

    return formula


def _e2e(record: Record) -> Known:
    return Known(fsum(record.budget.values())) if record.budget else Known(None, "the run did not get that far")


def _overhead(record: Record) -> Known:
    measured, bare = wall_s(record, "infer"), wall_s(record, "bare")
    return (
        Known(measured / bare - 1)
        if measured and bare
        else Known(None, "the bare pass was not asked for (--passes infer,bare)")
    )


def _padded(record: Record) -> Known:
    name = headline(record)
    counts = total(record, name) if name else {}
    computed = counts.get("tokens", 0) + counts.get("padded", 0)
    return Known(counts.get("padded", 0) / computed) if computed else _absent(name or "infer")


def _task(record: Record) -> Task:
    return TASKS[record.case.question["task"]]


def _quality(key: str, name: str | None) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        chosen = name or headline(record)
        value = _task(record).score(record.outputs, chosen).get(key) if chosen else None
        return _absent(chosen or "infer") if value is None else Known(value)

    return formula


def _agreement(record: Record) -> Known:
    value = _task(record).agreement(record.outputs, "infer", "val")
    return Known(None, "needs both passes, val and infer") if value is None else Known(value)


def _padded_rate(seconds: Callable[[Record, str], float | None]) -> Callable[[Record], Known]:
    """Every sample counted as long as the model has positions, as the published rows count; for comparison with them only."""

    def formula(record: Record) -> Known:
        done, time_s = total(record, "infer").get("samples"), seconds(record, "infer")
        if not done or not time_s:
            return _absent("infer")
        return Known(
            done * int(record.case.question["model"]["positions"]) / time_s, "padding that was not computed is counted"
        )

    return formula


def _per(unit: str) -> Callable[[Record], str]:
    """A unit with the name of the task's items in it."""
    return lambda record: unit.format(_task(record).noun)


def _work_unit(record: Record) -> str:
    return "tokens/s" if record.case.division == "closed" else f"{_task(record).noun}s/s"


_MMLU = ("mmlu",)
_LAMBADA = ("lambada",)


METRICS = (
    Metric("e2e_time", "s", "lower", _e2e),
    Metric("p_val_whole", _work_unit, "higher", _rate("val", wall_s)),
    Metric("p_val_core", _work_unit, "higher", _rate("val", compute_s)),
    Metric("p_infer_whole", _work_unit, "higher", _rate("infer", wall_s)),
    Metric("p_infer_core", _work_unit, "higher", _rate("infer", compute_s)),
    Metric("p_infer_whole_padded", "tokens/s", "higher", _padded_rate(wall_s), _LAMBADA),
    Metric("p_infer_core_padded", "tokens/s", "higher", _padded_rate(compute_s), _LAMBADA),
    Metric("tokens_per_device_s", "tokens/s/device", "higher", _per_second("tokens", per_device=True)),
    Metric("samples_per_s", _per("{}s/s"), "higher", _per_second("samples")),
    Metric("mfu", "", "higher", _mfu("causal", wall_s, _peak)),
    Metric("mfu_core", "", "higher", _mfu("causal", compute_s, _peak)),
    Metric("mfu_achievable", "", "higher", _mfu("causal", wall_s, _achievable)),
    Metric("mfu_palm", "", "higher", _mfu("palm", wall_s, _peak)),
    Metric("mfu_nominal", "", "higher", _mfu("nominal", wall_s, _peak)),
    Metric("flops_causal", "FLOP", "", _flops("causal")),
    Metric("flops_palm", "FLOP", "", _flops("palm")),
    Metric("flops_nominal", "FLOP", "", _flops("nominal")),
    Metric("matmul_rate", "FLOP/s", "higher", _achievable),
    Metric("mem", "GiB", "lower", _mem),
    Metric("mem_reserved", "GiB", "lower", _framework("reserved_bytes")),
    Metric("mem_allocated", "GiB", "lower", _framework("allocated_bytes")),
    Metric("mem_total", "GiB", "", _mem_total),
    Metric("energy", "J", "lower", _energy),
    Metric("energy_per_token", "J/token", "lower", _energy_per("tokens")),
    Metric("energy_per_sample", _per("J/{}"), "lower", _energy_per("samples")),
    Metric("acc", "", "higher", _quality("acc", None)),
    Metric("acc_val", "", "higher", _quality("acc", "val")),
    Metric("acc_se", "", "", _quality("se", None)),
    Metric("acc_macro", "", "higher", _quality("macro", None), _MMLU),
    Metric("acc_choice", "", "higher", _quality("choice", None), _MMLU),
    Metric("acc_choice_val", "", "higher", _quality("choice", "val"), _MMLU),
    Metric("loss", "nats", "lower", _quality("loss", None), _LAMBADA),
    Metric("loss_val", "nats", "lower", _quality("loss", "val"), _LAMBADA),
    Metric("loss_token", "nats", "lower", _quality("loss_token", None), _LAMBADA),
    Metric("perplexity", "", "lower", _quality("perplexity", None), _LAMBADA),
    Metric("perplexity_last", "", "lower", _quality("perplexity_last", None), _LAMBADA),
    Metric("agreement", "", "higher", _agreement),
    Metric("padded_share", "", "lower", _padded),
    Metric("harness_overhead", "", "lower", _overhead),
)
