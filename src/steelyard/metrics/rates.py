"""Formulas over a record: rates, FLOPs and their shares of a peak, memory, quality. Rows fix the
other arguments."""

from collections.abc import Callable

# sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from math import fsum
from statistics import fmean

from steelyard.metrics import formulas_1, readings, stats
from steelyard.metrics.result import GIB, Result, absent, work_name
from steelyard.metrics.spans import Span, devices, headline, samples, span, total, wall_s, windows
from steelyard.plan import flops
from steelyard.record.facts import RankFacts, Series
from steelyard.record.record import Record, Sample
from steelyard.words import Message

Formula = Callable[[Record], Result]
TimeOf = Callable[[Record, str], float | None]


def pass_rate(record: Record, name: str, seconds: TimeOf) -> Result:
    """Work of a pass of scoring over its time."""
    done, time_s = total(record, name).get(work_name(record)), seconds(record, name)
    if not done or not time_s:
        return absent(name)
    rate = done / time_s
    if seconds is not wall_s:
        return Result(rate)
    slowest = max(windows(record, name), key=lambda window: window.wall_s).rank
    return Result(
        rate,
        interval=_interval(record, [s for s in samples(record, name) if s.rank == slowest], rate),
    )


def _interval(record: Record, steps: list[Sample], rate: float) -> tuple[float, float] | None:
    """The 95 % interval of a rate over wall time, from the FLOP rate of the slowest rank's steps:
    by tokens in version 2.
    """
    working = [sample for sample in steps if sample.counts.get("tokens")]
    tokens = [float(sample.counts["tokens"]) for sample in working]
    times = [sample.end_s - sample.start_s for sample in working]
    if record.formulas is not None and record.formulas >= 3:
        flops_of = [float(flops.causal(record.question.model, sample.counts)) for sample in working]
        return stats.rate_interval(rate, flops_of, times)
    if record.formulas == 2:
        return stats.rate_interval(rate, tokens, times)
    found = formulas_1.rate_interval(tokens, times)
    if found is None or found[1] == float("inf"):
        return None
    own = fsum(tokens) / fsum(times)
    return rate * found[0] / own, rate * found[1] / own


def missing(record: Record) -> Result:
    """For what is taken from the headline pass, where there is none."""
    return absent(headline(record) or record.task.kind_row.headline[0])


def per_second(record: Record, key: str, per_device: bool = False) -> Result:
    found = span(record)
    if found is None or not found.counts.get(key) or not found.wall_s:
        return missing(record)
    rate = found.counts[key] / found.wall_s / (devices(record) if per_device else 1)
    return Result(rate, found.note, _interval(record, found.steps.get(found.slowest, []), rate))


def model_flops(record: Record, convention: str) -> Result:
    found = span(record)
    if found is None or not found.counts.get("tokens"):
        return missing(record)
    question = record.question
    value = flops.work(question.model, found.counts, convention, record.task.kind_row.forwards)
    return (
        Result(None, Message("metric.no_nominal"))
        if value is None
        else Result(float(value), found.note)
    )


def datasheet_peak(record: Record) -> Result:
    """Dense datasheet rate of one device at the precision of the matmuls."""
    row = record.environment.hardware.peak
    if row is None:
        return Result(None, Message("metric.no_peak"))
    matmul = record.question.precision.matmul
    rate = row.flops_per_s.get(matmul)
    return Result(
        rate,
        None if rate else Message("metric.no_peak_rate", {"row": row.name, "precision": matmul}),
    )


def achievable(record: Record) -> Result:
    """Matmul rate of one device, measured in this run: the mean over ranks. Of the case's own
    shapes, where they were timed; older records have one square product."""
    rates = [rate for rank in record.ranks if (rate := _own_rate(record, rank))]
    return Result(fmean(rates)) if rates else Result(None, Message("metric.no_matmul"))


def _own_rate(record: Record, rank: RankFacts) -> float | None:
    """All FLOPs of a batch's matmuls over all their time."""
    if record.formulas is None or not rank.matmuls:
        return rank.matmul_flops_per_s
    return sum(one.flops for one in rank.matmuls) / fsum(
        one.flops / one.flops_per_s for one in rank.matmuls
    )


def mfu(
    record: Record, convention: str, seconds: Callable[[Span], float | None], ceiling: Formula
) -> Result:
    done, peak, found = model_flops(record, convention), ceiling(record), span(record)
    if done.value is None or peak.value is None:
        return Result(None, done.note if done.value is None else peak.note)
    time_s = seconds(found) if found is not None else None
    if found is not None and time_s is None:
        return Result(None, Message("metric.no_compute"))
    if not time_s:
        return missing(record)
    return Result(
        done.value / time_s / (peak.value * devices(record)),
        Message("metric.convention", {"convention": convention}),
    )


def mem(record: Record) -> Result:
    """Highest memory in use over devices, inside the headline pass; around it, where a pass is over
    between two readings.
    """
    name = headline(record)
    return missing(record) if name is None else _peak_memory(record, name, record.telemetry)


def _peak_memory(record: Record, name: str, read: list[Series]) -> Result:
    spans = windows(record, name)
    start, end = min(w.start_s for w in spans), max(w.start_s + w.wall_s for w in spans)
    for margin, note in ((0.0, None), (1.0, Message("metric.memory_around"))):
        around = [
            readings.window(s, start - margin * s.period_s, end + margin * s.period_s) for s in read
        ]
        known = [peak for peak in map(readings.peak_memory, around) if peak is not None]
        if known:
            return Result(max(known) / GIB, note)
    return Result(None, Message("metric.no_memory"))


def rank_mem(record: Record, rank: int) -> float | None:
    """GiB in use on one rank in the headline pass: its device's peak, or of ranks that share a
    device its own at the end.
    """
    name = headline(record)
    if name is None:
        return None
    own = next((one.in_use_bytes or {} for one in record.ranks if one.rank == rank), {}).get(name)
    series = series_of(record, rank)
    return (
        own / GIB
        if own is not None
        else _peak_memory(record, name, [series]).value
        if series
        else None
    )


def framework(record: Record, key: str) -> Result:
    name = headline(record)
    found = [getattr(window, key) for window in windows(record, name)] if name else []
    known = [value for value in found if value is not None]
    return (
        Result(max(known) / GIB) if known else Result(None, Message("metric.no_framework_memory"))
    )


def mem_total(record: Record) -> Result:
    sizes = [
        device.memory_bytes for device in record.environment.hardware.devices if device.memory_bytes
    ]
    return Result(min(sizes) / GIB) if sizes else Result(None, Message("metric.no_device_memory"))


def host_mem(record: Record, host: str) -> float | None:
    """GiB in use on the fullest device of one host in the headline pass."""
    name = headline(record)
    return (
        None
        if name is None
        else _peak_memory(record, name, [one for one in record.telemetry if one.host == host]).value
    )


def series_of(record: Record, rank: int) -> Series | None:
    """What was read off the device of a rank."""
    at = next(((one.host, one.device) for one in record.ranks if one.rank == rank), None)
    return next((series for series in record.telemetry if (series.host, series.device) == at), None)


def e2e(record: Record) -> Result:
    return (
        Result(fsum(record.budget.values()))
        if record.budget
        else Result(None, Message("metric.not_that_far"))
    )


def overhead(record: Record) -> Result:
    measured, bare = wall_s(record, "infer"), wall_s(record, "bare")
    return (
        Result(measured / bare - 1)
        if measured and bare
        else Result(None, Message("metric.no_bare"))
    )


def padded_share(record: Record) -> Result:
    name = headline(record)
    counts = total(record, name) if name else {}
    computed = counts.get("tokens", 0) + counts.get("padded", 0)
    return Result(counts.get("padded", 0) / computed) if computed else missing(record)


def quality(record: Record, value: str, of: str | None) -> Result:
    """A value of the task's scores, of a pass or of the headline one."""
    name, answers = of or headline(record), record.answers
    found = record.task.score(answers, name).get(value) if answers is not None and name else None
    if found is None and name and record.task.kind_row.trains and windows(record, name):
        return Result(None, Message("metric.not_evaluated", {"pass": name}))
    return absent(name or "infer") if found is None else Result(found)


def agreement(record: Record) -> Result:
    task, answers = record.task, record.answers
    found = (
        task.agreement(answers, "infer", "val")
        if task.agreement is not None and answers is not None
        else None
    )
    return Result(None, Message("metric.needs_both")) if found is None else Result(found)


def padded_rate(record: Record, seconds: TimeOf) -> Result:
    """Every sample counted as long as the model has positions, as the published rows count; for
    comparison with them only.
    """
    done, time_s = total(record, "infer").get("samples"), seconds(record, "infer")
    if not done or not time_s:
        return absent("infer")
    return Result(done * record.question.model.positions / time_s, Message("metric.padding"))


def per_item(unit: str) -> Callable[[Record], str]:
    """A unit with the name of the task's items in it."""
    return lambda record: unit.format(record.task.noun)


def work_unit(record: Record) -> str:
    return "tokens/s" if work_name(record) == "tokens" else f"{record.task.noun}s/s"
