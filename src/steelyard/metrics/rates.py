"""Formulas of the metric table: rates, FLOPs, MFU, memory and quality of one record.

Each takes a record and returns a `Result`: a value, or None with the reason. `metric_rows.py` binds
the other arguments. Unless said otherwise a formula covers the span of `passes.find_rate_span`: the
headline pass of scoring, the steady window of training.
"""

from collections.abc import Callable

# sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from math import fsum
from statistics import fmean
from typing import Literal

from steelyard.metrics import device_readings, formulas_1, stats
from steelyard.metrics.passes import (
    RateSpan,
    count_devices,
    find_headline_pass,
    find_rate_span,
    select_samples,
    select_windows,
    sum_counts,
    wall_s,
)
from steelyard.metrics.result import GIB, Result, make_absent_result, work_name
from steelyard.plan import flops
from steelyard.record.record import Record, Sample
from steelyard.record.run_facts import RankFacts, TelemetrySeries
from steelyard.words import Message

MetricFormula = Callable[[Record], Result]
PassTime = Callable[[Record, str], float | None]


def pass_rate(record: Record, pass_name: str, seconds: PassTime) -> Result:
    """Return the work (tokens or samples, by `work_name`) of a whole pass per second, over all
    devices.

    `seconds(record, pass_name)` is `passes.wall_s` or `passes.compute_s`. Over wall time the result
    has a 95 % interval, from the steps of the slowest rank, if these are enough. Without a value if
    the pass counted no work or its time is unknown or 0.
    """
    count, time_s = sum_counts(record, pass_name).get(work_name(record)), seconds(record, pass_name)
    if not count or not time_s:
        return make_absent_result(pass_name)
    rate = count / time_s
    if seconds is not wall_s:
        return Result(rate)
    slowest = max(select_windows(record, pass_name), key=lambda window: window.wall_s).rank
    return Result(
        rate,
        interval=_wall_rate_interval(
            record, [s for s in select_samples(record, pass_name) if s.rank == slowest], rate
        ),
    )


def _wall_rate_interval(
    record: Record, steps: list[Sample], rate: float
) -> tuple[float, float] | None:
    """Return the 95 % interval of `rate`, a rate over wall time in any unit, from the relative
    error of one rank's steps; None if there are fewer than 5 steps with tokens, or it cannot be
    bounded.

    Only steps with tokens count. The error is that of FLOPs per second from formulas version 3 on,
    of tokens per second in version 2, and of batch means in version 1 (`formulas` is None).
    """
    working = [sample for sample in steps if sample.counts.get("tokens")]
    tokens = [float(sample.counts["tokens"]) for sample in working]
    times = [sample.end_s - sample.start_s for sample in working]
    if record.formulas is not None and record.formulas >= 3:
        flops_of = [
            float(flops.count_causal_flops(record.question.model, sample.counts))
            for sample in working
        ]
        return stats.estimate_rate_interval(rate, flops_of, times)
    if record.formulas == 2:
        return stats.estimate_rate_interval(rate, tokens, times)
    interval_v1 = formulas_1.batch_means_interval(tokens, times)
    if interval_v1 is None or interval_v1[1] == float("inf"):
        return None
    rank_rate = fsum(tokens) / fsum(times)
    return rate * interval_v1[0] / rank_rate, rate * interval_v1[1] / rank_rate


def make_missing_headline_result(record: Record) -> Result:
    """Return a result without a value whose note names the headline pass that did not run (or
    counted nothing), or says that its requests are too few for a window.
    """
    pass_name = find_headline_pass(record)
    if pass_name is not None and record.task.kind_row.span:
        return Result(None, Message("metric.no_window"))
    return make_absent_result(find_headline_pass(record) or record.task.kind_row.headline[0])


def headline_rate(record: Record, key: str, per_device: bool = False) -> Result:
    """Return the count `key` (such as "tokens" or "samples") of the span that rates are taken over
    per second of its wall time, of all devices together or (`per_device`) divided by their number,
    with its 95 % interval.

    Without a value if there is no span, or it counted none of `key`.
    """
    rate_span = find_rate_span(record)
    if rate_span is None or not rate_span.counts.get(key) or not rate_span.wall_s:
        return make_missing_headline_result(record)
    rate = rate_span.counts[key] / rate_span.wall_s / (count_devices(record) if per_device else 1)
    if rate_span.slices is not None:
        return Result(rate, rate_span.note, rate_span.slices.estimate_interval(rate, key))
    return Result(
        rate,
        rate_span.note,
        _wall_rate_interval(record, rate_span.steps.get(rate_span.slowest_rank, []), rate),
    )


def model_flops(record: Record, convention: flops.Convention) -> Result:
    """Return the model FLOPs of the span that rates are taken over, of all devices together, by the
    convention "causal", "palm" or "nominal" (`plan/flops.py`).

    In training a step counts as three forwards; recomputation does not count. Without a value if
    there are no tokens, if it is unknown what was computed, or, for "nominal", if the model states
    no nominal number of parameters. Raises ValueError for another convention.
    """
    rate_span = find_rate_span(record)
    if rate_span is None or not rate_span.counts.get("tokens"):
        return make_missing_headline_result(record)
    counts = rate_span.counts if rate_span.computed is None else rate_span.computed
    if "logits" not in counts:
        return Result(None, Message("metric.not_counted"))
    value = flops.count_flops(
        record.question.model, counts, convention, record.task.kind_row.forwards
    )
    return (
        Result(None, Message("metric.no_nominal"))
        if value is None
        else Result(float(value), rate_span.note)
    )


def datasheet_peak(record: Record) -> Result:
    """Return the dense datasheet rate of one device in FLOP/s, at the precision of the case's
    matmuls.

    Without a value if the record has no datasheet row for its device, or that row has no rate for
    the precision.
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


def matmul_rate(record: Record) -> Result:
    """Return the matmul rate of one device in FLOP/s, measured in this run: the mean over the ranks
    that have one; without a value if none has.

    It is that of the case's own matmul shapes; in records of formulas version 1, and for ranks
    without these, that of one square matmul.
    """
    rates = [rate for rank in record.ranks if (rate := _rank_matmul_rate(record, rank))]
    return Result(fmean(rates)) if rates else Result(None, Message("metric.no_matmul"))


def _rank_matmul_rate(record: Record, facts: RankFacts) -> float | None:
    """Return a rank's measured matmul rate in FLOP/s: all FLOPs of the case's matmul shapes over
    all their time; in records of formulas version 1, and without such shapes, that of the square
    matmul. None if not measured.
    """
    if record.formulas is None or not facts.matmuls:
        return facts.matmul_flops_per_s
    return sum(matmul.flops for matmul in facts.matmuls) / fsum(
        matmul.flops / matmul.flops_per_s for matmul in facts.matmuls
    )


def mfu(
    record: Record,
    convention: flops.Convention,
    seconds: Callable[[RateSpan], float | None],
    ceiling: MetricFormula,
) -> Result:
    """Return model FLOPs over time over the peak of all devices, a share (1 is 100 %); the note
    names the convention.

    `seconds` picks wall or compute time of the span that rates are taken over, `ceiling` is the
    formula of one device's peak in FLOP/s (datasheet or measured). Without a value, with the
    reason, if FLOPs, peak or time are unknown.
    """
    flops_result, peak, rate_span = (
        model_flops(record, convention),
        ceiling(record),
        find_rate_span(record),
    )
    if flops_result.value is None or peak.value is None:
        return Result(None, flops_result.note if flops_result.value is None else peak.note)
    time_s = seconds(rate_span) if rate_span is not None else None
    if rate_span is not None and time_s is None:
        return Result(None, Message("metric.no_compute"))
    if not time_s:
        return make_missing_headline_result(record)
    return Result(
        flops_result.value / time_s / (peak.value * count_devices(record)),
        Message("metric.convention", {"convention": convention}),
    )


def mem(record: Record) -> Result:
    """Return the highest memory in use on any device, in GiB, during the headline pass, from
    telemetry.

    If no reading lies in the pass, those up to one sampling period before and after it count, and a
    note says so. Without a value if there are none, or no headline pass ran.
    """
    pass_name = find_headline_pass(record)
    return (
        make_missing_headline_result(record)
        if pass_name is None
        else _find_peak_memory(record, pass_name, record.telemetry)
    )


def _find_peak_memory(
    record: Record, pass_name: str, device_series: list[TelemetrySeries]
) -> Result:
    """Return the highest memory in use on any of these devices, in GiB, during a pass, from the
    first rank's start to the last rank's end.

    If no reading lies in it, those up to one sampling period around it count, with a note. Without
    a value if there are none. Raises ValueError if no rank ran the pass.
    """
    pass_windows = select_windows(record, pass_name)
    start, end = (
        min(w.start_s for w in pass_windows),
        max(w.start_s + w.wall_s for w in pass_windows),
    )
    for margin, note in ((0.0, None), (1.0, Message("metric.memory_around"))):
        around = [
            device_readings.select_readings(
                s, start - margin * s.period_s, end + margin * s.period_s
            )
            for s in device_series
        ]
        known = [
            peak for peak in map(device_readings.find_peak_memory_bytes, around) if peak is not None
        ]
        if known:
            return Result(max(known) / GIB, note)
    return Result(None, Message("metric.no_memory"))


def rank_memory_gib(record: Record, rank: int) -> float | None:
    """Return the GiB in use on one rank in the headline pass: its own at the end of the pass, if it
    reported that (`in_use_bytes`, where ranks share a device), else the peak of its device's
    telemetry.

    None if there is no headline pass or no reading.
    """
    pass_name = find_headline_pass(record)
    if pass_name is None:
        return None
    own_bytes = next(
        (facts.in_use_bytes or {} for facts in record.ranks if facts.rank == rank), {}
    ).get(pass_name)
    series = find_series(record, rank)
    return (
        own_bytes / GIB
        if own_bytes is not None
        else _find_peak_memory(record, pass_name, [series]).value
        if series
        else None
    )


def framework_memory(record: Record, key: Literal["reserved_bytes", "allocated_bytes"]) -> Result:
    """Return the peak of the framework's allocator in GiB in the headline pass, of the rank with
    most.

    `key` is "reserved_bytes" or "allocated_bytes". Without a value if no rank reports it, or no
    headline pass ran.
    """
    pass_name = find_headline_pass(record)
    sizes = (
        [getattr(window, key) for window in select_windows(record, pass_name)] if pass_name else []
    )
    known = [value for value in sizes if value is not None]
    return (
        Result(max(known) / GIB) if known else Result(None, Message("metric.no_framework_memory"))
    )


def mem_total(record: Record) -> Result:
    """Return the memory of the smallest device in GiB, as the driver shows it; without a value if
    no device's size is known.
    """
    sizes = [
        device.memory_bytes for device in record.environment.hardware.devices if device.memory_bytes
    ]
    return Result(min(sizes) / GIB) if sizes else Result(None, Message("metric.no_device_memory"))


def host_memory_gib(record: Record, host: str) -> float | None:
    """Return the GiB in use on the fullest device of the host of this name in the headline pass,
    from telemetry; None if there is no headline pass or no reading of this host.
    """
    pass_name = find_headline_pass(record)
    return (
        None
        if pass_name is None
        else _find_peak_memory(
            record, pass_name, [series for series in record.telemetry if series.host == host]
        ).value
    )


def find_series(record: Record, rank: int) -> TelemetrySeries | None:
    """Return the telemetry series of the device that a rank ran on, found by host and device name;
    None if there is none, or the record has no such rank. Ranks that share a device get the same
    one.
    """
    host_and_device = next(
        ((facts.host, facts.device) for facts in record.ranks if facts.rank == rank), None
    )
    return next(
        (series for series in record.telemetry if (series.host, series.device) == host_and_device),
        None,
    )


def e2e_time(record: Record) -> Result:
    """Return the seconds from the start of `run` to the finished record: the sum of the run's time
    budget (wall seconds by named part); without a value if the run ended before there was one.
    """
    return (
        Result(fsum(record.budget.values()))
        if record.budget
        else Result(None, Message("metric.not_that_far"))
    )


def harness_overhead(record: Record) -> Result:
    """Return what measuring costs, as a share: wall time of pass `infer` over that of pass `bare`,
    the same work without instrumentation, minus 1; may be negative. Without a value unless both
    ran.
    """
    measured, bare = wall_s(record, "infer"), wall_s(record, "bare")
    return (
        Result(measured / bare - 1)
        if measured and bare
        else Result(None, Message("metric.no_bare"))
    )


def padded_share(record: Record) -> Result:
    """Return padded over padded plus real tokens, a share (0 to 1), in the whole headline pass, all
    devices together; without a value if it computed none.
    """
    pass_name = find_headline_pass(record)
    counts = sum_counts(record, pass_name) if pass_name else {}
    computed = counts.get("tokens", 0) + counts.get("padded", 0)
    return (
        Result(counts.get("padded", 0) / computed)
        if computed
        else make_missing_headline_result(record)
    )


def task_score(record: Record, score_value: str, pass_name: str | None) -> Result:
    """Return one score of the task, computed from the record's answers.

    `score_value` is a key of the dict that `Task.score` returns; `pass_name` is the pass whose
    answers count, None for the headline pass. Without a value, with a note, if the pass did not run
    or has no such score; in training, if the pass ran, the note says that it was not evaluated.
    """
    chosen_pass, answers = pass_name or find_headline_pass(record), record.answers
    score = (
        record.task.score(answers, chosen_pass).get(score_value)
        if answers is not None and chosen_pass
        else None
    )
    if (
        score is None
        and chosen_pass
        and record.task.kind_row.trains
        and select_windows(record, chosen_pass)
    ):
        return Result(None, Message("metric.not_evaluated", {"pass": chosen_pass}))
    return make_absent_result(chosen_pass or "infer") if score is None else Result(score)


def agreement(record: Record) -> Result:
    """Return the share of items (0 to 1) that passes `infer` and `val` answered equally, as the
    task defines it; without a value if a pass or the answers are missing or the task does not
    define it.
    """
    task, answers = record.task, record.answers
    agreeing_share = (
        task.agreement(answers, "infer", "val")
        if task.agreement is not None and answers is not None
        else None
    )
    return (
        Result(None, Message("metric.needs_both"))
        if agreeing_share is None
        else Result(agreeing_share)
    )


def padded_rate(record: Record, seconds: PassTime) -> Result:
    """Return samples of pass `infer` times the model's number of positions, per second: tokens per
    second as if every sample were as long as the model allows.

    Published rows count like that; this is for comparison with them only, and a note says so.
    `seconds(record, pass_name)` is `passes.wall_s` or `passes.compute_s`. Without a value if
    samples or time are missing.
    """
    sample_count, time_s = sum_counts(record, "infer").get("samples"), seconds(record, "infer")
    if not sample_count or not time_s:
        return make_absent_result("infer")
    return Result(
        sample_count * record.question.model.positions / time_s, Message("metric.padding")
    )


def make_item_unit(template: str) -> Callable[[Record], str]:
    """Return a function from a record to a unit: `{}` in the template becomes the task's noun, so
    "J/{}" gives "J/question".
    """
    return lambda record: template.format(record.task.noun)


def work_unit(record: Record) -> str:
    """Return the unit of the record's rates: "tokens/s", "output tokens/s", or the task's items,
    such as "questions/s".
    """
    units = {"tokens": "tokens/s", "output_tokens": "output tokens/s"}
    return units.get(work_name(record), f"{record.task.noun}s/s")
