"""Formulas of the metric table: rates, FLOPs, MFU, memory and quality of one record.

Each takes a record and returns a `Result`: a value, or None with the reason. `metric_rows.py` binds
the other arguments. Unless said otherwise a formula covers the span of `passes.find_rate_span`: the
headline pass of scoring, the steady window of training.
"""

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
    """Return the work (tokens or samples) of a whole pass per second, over all devices.

    `seconds` is `passes.wall_s` or `passes.compute_s`. Over wall time the result has an interval,
    from the steps of the slowest rank. None if the pass did not run or its time is unknown.
    """
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
    """Return the 95 % interval of a rate over wall time, from one rank's steps; None if there are
    too few.

    Only steps with tokens count. The relative error is that of FLOPs per second from formulas
    version 3 on, of tokens per second in version 2, and of batch means in version 1.
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
    """Return a result without a value whose note names the headline pass that did not run (or
    counted nothing).
    """
    return absent(headline(record) or record.task.kind_row.headline[0])


def per_second(record: Record, key: str, per_device: bool = False) -> Result:
    """Return the count `key` of the headline span per second of wall time, of all devices together
    or of one device on average, with its interval.

    None if there is no span, or it counted none of it.
    """
    found = span(record)
    if found is None or not found.counts.get(key) or not found.wall_s:
        return missing(record)
    rate = found.counts[key] / found.wall_s / (devices(record) if per_device else 1)
    return Result(rate, found.note, _interval(record, found.steps.get(found.slowest, []), rate))


def model_flops(record: Record, convention: str) -> Result:
    """Return the model FLOPs of the headline span over all devices, by the convention "causal",
    "palm" or "nominal".

    In training a step counts three forwards; recomputation does not count. None if there are no
    tokens, or, for "nominal", if the model states no nominal number of parameters.
    """
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
    """Return the dense datasheet rate of one device in FLOP/s, at the precision of the matmuls.

    None if the device is not in the table of datasheets, or its datasheet has no rate for that
    precision.
    """
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
    """Return the matmul rate of one device in FLOP/s, measured in this run: the mean over ranks
    that have one.

    It is timed over the case's own matmul shapes; records of version 1, and ranks without these,
    have one square matmul.
    """
    rates = [rate for rank in record.ranks if (rate := _own_rate(record, rank))]
    return Result(fmean(rates)) if rates else Result(None, Message("metric.no_matmul"))


def _own_rate(record: Record, rank: RankFacts) -> float | None:
    """Return a rank's measured matmul rate in FLOP/s: all FLOPs of a batch's matmuls over all their
    time; None if not measured.
    """
    if record.formulas is None or not rank.matmuls:
        return rank.matmul_flops_per_s
    return sum(one.flops for one in rank.matmuls) / fsum(
        one.flops / one.flops_per_s for one in rank.matmuls
    )


def mfu(
    record: Record, convention: str, seconds: Callable[[Span], float | None], ceiling: Formula
) -> Result:
    """Return model FLOPs over time over peak, a share (1 is 100 %).

    `seconds` picks the span's wall or compute time, `ceiling` is the formula of one device's peak
    in FLOP/s. None with the reason if FLOPs, peak or time are unknown.
    """
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
    """Return the highest device memory in use, in GiB, over all devices during the headline pass,
    from telemetry.

    If the pass was over between two readings, the readings one period around it count, and a note
    says so. None without any.
    """
    name = headline(record)
    return missing(record) if name is None else _peak_memory(record, name, record.telemetry)


def _peak_memory(record: Record, name: str, read: list[Series]) -> Result:
    """Return the highest memory in use, in GiB, of these devices during a pass, from the first
    rank's start to the last rank's end.

    Falls back to readings one period around the pass, with a note. None if there is no reading.
    Raises ValueError if no rank ran the pass.
    """
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
    """Return the GiB in use on one rank in the headline pass: its device's peak, or, if ranks share
    a device, its own at the end of the pass.

    None if there is no headline pass or no reading.
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
    """Return the highest memory of the framework's allocator in GiB, over ranks, in the headline
    pass.

    `key` is "reserved_bytes" or "allocated_bytes". None if the framework reports none.
    """
    name = headline(record)
    found = [getattr(window, key) for window in windows(record, name)] if name else []
    known = [value for value in found if value is not None]
    return (
        Result(max(known) / GIB) if known else Result(None, Message("metric.no_framework_memory"))
    )


def mem_total(record: Record) -> Result:
    """Return the memory of the smallest device in GiB; None if no device's size is known."""
    sizes = [
        device.memory_bytes for device in record.environment.hardware.devices if device.memory_bytes
    ]
    return Result(min(sizes) / GIB) if sizes else Result(None, Message("metric.no_device_memory"))


def host_mem(record: Record, host: str) -> float | None:
    """Return the GiB in use on the fullest device of one host in the headline pass; None if there
    is no headline pass or no reading.
    """
    name = headline(record)
    return (
        None
        if name is None
        else _peak_memory(record, name, [one for one in record.telemetry if one.host == host]).value
    )


def series_of(record: Record, rank: int) -> Series | None:
    """Return the telemetry of the device that a rank ran on; None if there is none, or the rank is
    unknown. Ranks may share it.
    """
    at = next(((one.host, one.device) for one in record.ranks if one.rank == rank), None)
    return next((series for series in record.telemetry if (series.host, series.device) == at), None)


def e2e(record: Record) -> Result:
    """Return the seconds from the start of `run` to the finished record: the sum of the run's time
    budget; None if the run ended before there was one.
    """
    return (
        Result(fsum(record.budget.values()))
        if record.budget
        else Result(None, Message("metric.not_that_far"))
    )


def overhead(record: Record) -> Result:
    """Return what measuring costs: wall time of pass `infer` over that of pass `bare`, minus 1.
    None unless both ran.
    """
    measured, bare = wall_s(record, "infer"), wall_s(record, "bare")
    return (
        Result(measured / bare - 1)
        if measured and bare
        else Result(None, Message("metric.no_bare"))
    )


def padded_share(record: Record) -> Result:
    """Return the share of computed tokens that are padding, in the whole headline pass; None if it
    counted no tokens.
    """
    name = headline(record)
    counts = total(record, name) if name else {}
    computed = counts.get("tokens", 0) + counts.get("padded", 0)
    return Result(counts.get("padded", 0) / computed) if computed else missing(record)


def quality(record: Record, value: str, of: str | None) -> Result:
    """Return one score of the task, computed from the record's answers.

    `score_value` is a key of the task's scores; `pass_name` is the pass whose answers count, None
    for the headline pass. None with a note if the pass did not run, or was not evaluated.
    """
    name, answers = of or headline(record), record.answers
    found = record.task.score(answers, name).get(value) if answers is not None and name else None
    if found is None and name and record.task.kind_row.trains and windows(record, name):
        return Result(None, Message("metric.not_evaluated", {"pass": name}))
    return absent(name or "infer") if found is None else Result(found)


def agreement(record: Record) -> Result:
    """Return the share of items that passes `infer` and `val` answered equally; None if one is
    missing or the task does not define it.
    """
    task, answers = record.task, record.answers
    found = (
        task.agreement(answers, "infer", "val")
        if task.agreement is not None and answers is not None
        else None
    )
    return Result(None, Message("metric.needs_both")) if found is None else Result(found)


def padded_rate(record: Record, seconds: TimeOf) -> Result:
    """Return tokens per second of pass `infer` if every sample counts as long as the model has
    positions.

    The published rows count like that; this is for comparison with them only. `seconds` is
    `passes.wall_s` or `passes.compute_s`. None if the pass or its time is missing.
    """
    done, time_s = total(record, "infer").get("samples"), seconds(record, "infer")
    if not done or not time_s:
        return absent("infer")
    return Result(done * record.question.model.positions / time_s, Message("metric.padding"))


def per_item(unit: str) -> Callable[[Record], str]:
    """Return a function from a record to a unit: `{}` in the template becomes the task's noun, so
    "J/{}" gives "J/question".
    """
    return lambda record: unit.format(record.task.noun)


def work_unit(record: Record) -> str:
    """Return the unit of the record's rates: "tokens/s", or the task's items, such as
    "questions/s".
    """
    return "tokens/s" if work_name(record) == "tokens" else f"{record.task.noun}s/s"
