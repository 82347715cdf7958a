"""The metric table: every number of a record, derived from its raw samples. docs/metrics.md says what each one means."""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum  # sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from typing import Any

from pydantic import TypeAdapter

from steelyard.case.question import AnyModel, GlmModel, Model
from steelyard.metrics import spans as passes
from steelyard.metrics import stats, training
from steelyard.metrics.result import GIB, Known, absent, work_name
from steelyard.metrics.spans import Span, devices, headline, kind, samples, span, total, wall_s, windows
from steelyard.plan import flops
from steelyard.record.record import Record, Sample, Value
from steelyard.run import telemetry
from steelyard.tasks.table import TASKS, Task

MODEL: TypeAdapter[Model | GlmModel] = TypeAdapter(AnyModel)


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str | Callable[[Record], str]
    better: str  # "higher", "lower" or "" where neither is
    formula: Callable[[Record], Known]
    tasks: tuple[str, ...] = ()  # those that have it; empty: all
    kinds: tuple[str, ...] = ()  # of cases that have it; empty: all


def derive(record: Record) -> dict[str, Value]:
    """All metrics of a record: those that its kind and its task have."""
    out = {}
    for metric in METRICS:
        if metric.kinds and kind(record) not in metric.kinds:
            continue
        if metric.tasks and record.case.question["task"] not in metric.tasks:
            continue
        known = metric.formula(record)
        unit = metric.unit if isinstance(metric.unit, str) else metric.unit(record)
        out[metric.name] = Value(value=known.value, unit=unit, interval=known.interval, note=known.note)
    return out


Seconds = Callable[[Record, str], float | None]


def _rate(name: str, seconds: Seconds) -> Callable[[Record], Known]:
    """Work of a pass of scoring over its time."""

    def formula(record: Record) -> Known:
        done, time_s = total(record, name).get(work_name(record)), seconds(record, name)
        if not done or not time_s:
            return absent(name)
        rate = done / time_s
        if seconds is not wall_s:
            return Known(rate)
        slowest = max(windows(record, name), key=lambda window: window.wall_s).rank
        return Known(rate, interval=_interval([s for s in samples(record, name) if s.rank == slowest], rate))

    return formula


def _interval(steps: list[Sample], rate: float) -> tuple[float, float] | None:
    """The 95 % interval of a rate over wall time, from the token rate of the slowest rank's steps."""
    working = [sample for sample in steps if sample.counts.get("tokens")]
    tokens = [float(sample.counts["tokens"]) for sample in working]
    times = [sample.end_s - sample.start_s for sample in working]
    found = stats.rate_interval(tokens, times)
    if found is None or found[1] == float("inf"):
        return None
    own = fsum(tokens) / fsum(times)
    return rate * found[0] / own, rate * found[1] / own


def _missing(record: Record) -> Known:
    return absent(headline(record) or passes.HEADLINES[kind(record)][0])


def _per_second(key: str, per_device: bool = False) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        found = span(record)
        if found is None or not found.counts.get(key) or not found.wall_s:
            return _missing(record)
        rate = found.counts[key] / found.wall_s / (devices(record) if per_device else 1)
        return Known(rate, found.note, _interval(found.steps.get(found.slowest, []), rate))

    return formula


def _flops(convention: str) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        found = span(record)
        if found is None or not found.counts.get("tokens"):
            return _missing(record)
        model = MODEL.validate_python(record.case.question["model"])
        value = flops.work(model, found.counts, convention, kind(record))
        return Known(None, "the case states no nominal size") if value is None else Known(float(value), found.note)

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
    convention: str, seconds: Callable[[Span], float | None], ceiling: Callable[[Record], Known]
) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        done, peak, found = _flops(convention)(record), ceiling(record), span(record)
        if done.value is None or peak.value is None:
            return Known(None, done.note if done.value is None else peak.note)
        time_s = seconds(found) if found is not None else None
        if not time_s:
            return _missing(record)
        return Known(done.value / time_s / (peak.value * devices(record)), f"convention {convention}")

    return formula


def _wall(found: Span) -> float | None:
    return found.wall_s


def _compute(found: Span) -> float | None:
    return found.compute_s


def _mem(record: Record) -> Known:
    """Highest memory in use over devices, inside the headline pass; around it, where a pass is over between two readings."""
    name = headline(record)
    return _missing(record) if name is None else _peak_memory(record, name, record.telemetry)


def _peak_memory(record: Record, name: str, read: list[dict[str, Any]]) -> Known:
    spans = windows(record, name)
    start, end = min(w.start_s for w in spans), max(w.start_s + w.wall_s for w in spans)
    for margin, note in ((0.0, None), (1.0, "read just before and after the pass, which was over between two readings")):
        around = [telemetry.window(s, start - margin * s["period_s"], end + margin * s["period_s"]) for s in read]
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
    found = span(record)
    if found is None or not found.borders:
        return _missing(record)
    used = 0.0
    for rank, (begin, end) in found.borders.items():
        series = _series_of(record, rank)
        joules = telemetry.energy_j(series, begin, end) if series else None
        if joules is None:
            return Known(None, "the device has no energy counter, or the pass was too short to read it")
        used += joules
    return Known(used, found.note)


def _series_of(record: Record, rank: int) -> dict[str, Any] | None:
    """What was read off the device of a rank."""
    device = next((one.get("device") for one in record.ranks if one.get("rank") == rank), None)
    return next((series for series in record.telemetry if series["device"] == device), None)


def _energy_per(key: str) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        used, found = _energy(record), span(record)
        if used.value is None or found is None:
            return used
        done = found.counts.get(key)
        return Known(used.value / done, found.note) if done else _missing(record)

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
    return Known(counts.get("padded", 0) / computed) if computed else _missing(record)


def _task(record: Record) -> Task:
    return TASKS[record.case.question["task"]]


def _quality(key: str, name: str | None) -> Callable[[Record], Known]:
    def formula(record: Record) -> Known:
        chosen = name or headline(record)
        value = _task(record).score(record.outputs, chosen).get(key) if chosen else None
        if value is None and chosen and kind(record) == "train" and windows(record, chosen):
            return Known(None, f"nothing was evaluated in the {chosen} pass")
        return absent(chosen or "infer") if value is None else Known(value)

    return formula


def _agreement(record: Record) -> Known:
    value = _task(record).agreement(record.outputs, "infer", "val")
    return Known(None, "needs both passes, val and infer") if value is None else Known(value)


def _padded_rate(seconds: Seconds) -> Callable[[Record], Known]:
    """Every sample counted as long as the model has positions, as the published rows count; for comparison with them only."""

    def formula(record: Record) -> Known:
        done, time_s = total(record, "infer").get("samples"), seconds(record, "infer")
        if not done or not time_s:
            return absent("infer")
        return Known(
            done * int(record.case.question["model"]["positions"]) / time_s, "padding that was not computed is counted"
        )

    return formula


def _per(unit: str) -> Callable[[Record], str]:
    """A unit with the name of the task's items in it."""
    return lambda record: unit.format(_task(record).noun)


def _work_unit(record: Record) -> str:
    return "tokens/s" if work_name(record) == "tokens" else f"{_task(record).noun}s/s"


_MMLU = ("mmlu",)
_LAMBADA = ("lambada",)
_RECORD = ("record",)
_CORPORA = ("openwebtext", "alpaca")
_SCORE = ("score",)
_TRAIN = ("train",)


METRICS = (
    Metric("e2e_time", "s", "lower", _e2e),
    Metric("p_val_whole", _work_unit, "higher", _rate("val", wall_s), kinds=_SCORE),
    Metric("p_val_core", _work_unit, "higher", _rate("val", passes.compute_s), kinds=_SCORE),
    Metric("p_infer_whole", _work_unit, "higher", _rate("infer", wall_s), kinds=_SCORE),
    Metric("p_infer_core", _work_unit, "higher", _rate("infer", passes.compute_s), kinds=_SCORE),
    Metric("p_infer_whole_padded", "tokens/s", "higher", _padded_rate(wall_s), _LAMBADA),
    Metric("p_infer_core_padded", "tokens/s", "higher", _padded_rate(passes.compute_s), _LAMBADA),
    Metric("p_whole", _work_unit, "higher", training.p_whole, kinds=_TRAIN),
    Metric("p_train", _work_unit, "higher", training.p_train, kinds=_TRAIN),
    Metric("p_core", _work_unit, "higher", training.p_core, kinds=_TRAIN),
    Metric("tokens_per_device_s", "tokens/s/device", "higher", _per_second("tokens", per_device=True)),
    Metric("samples_per_s", _per("{}s/s"), "higher", _per_second("samples")),
    Metric("mfu", "", "higher", _mfu("causal", _wall, _peak)),
    Metric("mfu_core", "", "higher", _mfu("causal", _compute, _peak)),
    Metric("mfu_achievable", "", "higher", _mfu("causal", _wall, _achievable)),
    Metric("mfu_palm", "", "higher", _mfu("palm", _wall, _peak)),
    Metric("mfu_nominal", "", "higher", _mfu("nominal", _wall, _peak)),
    Metric("flops_causal", "FLOP", "", _flops("causal")),
    Metric("flops_palm", "FLOP", "", _flops("palm")),
    Metric("flops_nominal", "FLOP", "", _flops("nominal")),
    Metric("matmul_rate", "FLOP/s", "higher", _achievable),
    Metric("mem", "GiB", "lower", _mem),
    Metric("mem_reserved", "GiB", "lower", _framework("reserved_bytes")),
    Metric("mem_allocated", "GiB", "lower", _framework("allocated_bytes")),
    Metric("mem_predicted", "GiB", "", training.mem_predicted, kinds=_TRAIN),
    Metric("mem_total", "GiB", "", _mem_total),
    Metric("energy", "J", "lower", _energy),
    Metric("energy_per_token", "J/token", "lower", _energy_per("tokens")),
    Metric("energy_per_sample", _per("J/{}"), "lower", _energy_per("samples")),
    Metric("acc", "", "higher", _quality("acc", None), kinds=_SCORE),
    Metric("acc", "", "higher", _quality("acc", None), _RECORD, _TRAIN),
    Metric("acc_before", "", "", _quality("acc", "before"), _RECORD, _TRAIN),
    Metric("acc_se", "", "", _quality("se", None), _RECORD, _TRAIN),
    Metric("em", "", "higher", _quality("em", None), _RECORD, _TRAIN),
    Metric("f1", "", "higher", _quality("f1", None), _RECORD, _TRAIN),
    Metric("acc_val", "", "higher", _quality("acc", "val"), kinds=_SCORE),
    Metric("acc_se", "", "", _quality("se", None), kinds=_SCORE),
    Metric("acc_macro", "", "higher", _quality("macro", None), _MMLU),
    Metric("acc_choice", "", "higher", _quality("choice", None), _MMLU),
    Metric("acc_choice_val", "", "higher", _quality("choice", "val"), _MMLU),
    Metric("loss", "nats", "lower", _quality("loss", None), _LAMBADA, _SCORE),
    Metric("loss_val", "nats", "lower", _quality("loss", "val"), _LAMBADA),
    Metric("loss_token", "nats", "lower", _quality("loss_token", None), _LAMBADA),
    Metric("perplexity", "", "lower", _quality("perplexity", None), _LAMBADA),
    Metric("perplexity_last", "", "lower", _quality("perplexity_last", None), _LAMBADA),
    Metric("agreement", "", "higher", _agreement, kinds=_SCORE),
    Metric("loss", "nats", "lower", training.loss, kinds=_TRAIN),
    Metric("loss_first", "nats", "", training.loss_first, kinds=_TRAIN),
    Metric("loss_before", "nats", "", training.held_out("before"), _CORPORA),
    Metric("loss_after", "nats", "lower", training.held_out("after"), _CORPORA),
    Metric("grad_norm", "", "", training.grad_norm, kinds=_TRAIN),
    Metric("padded_share", "", "lower", _padded),
    Metric("harness_overhead", "", "lower", _overhead, kinds=_SCORE),
)
