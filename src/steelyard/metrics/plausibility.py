"""Check that a rate can be true: the counted work is that of the rows drawn, no pass is faster than
the device multiplies, and no work is hidden outside the timed passes.

`validity.py` applies these rules to a record.
"""

from collections.abc import Iterator
from math import fsum

from steelyard.data.division import COUNT_NAMES
from steelyard.metrics import cpu_contention, passes, rates, request_window
from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.metrics.result import Finding, make_check, make_note
from steelyard.plan import degrees, flops
from steelyard.record.record import Record, Value
from steelyard.record.run_facts import RankFacts
from steelyard.words import Message, MessageValues

# factor over the matmul rate of the same run, which varies with temperature and neighbours
MATMUL_MARGIN = 1.1
# The same on a busy host. A neighbour on the other thread of a core, and threads that spin for one
# that waits, can each take half of a matmul's rate: 1.35e11 FLOP per CPU second were measured where
# a quiet host gave 2.16e11. Such a run is invalid as `busy` anyway, size smoke apart. Engines that
# do no work in the pass were measured at 3 times the matmul's rate, where threads spin meanwhile,
# and at 40 times (tests/hard/test_cheats.py).
BUSY_MARGIN = 2.5
FIRST_VERSION_WITH_SEVERAL_TIMINGS = (
    4  # of the formulas: with several timings, and a margin for busy hosts
)
# of the formulas: with matmuls that are timed by a process of their own, and bounded
FIRST_VERSION_WITH_BOUNDS = 5
# Factor over the datasheet's peak that a timed matmul may reach: some devices raise their clock
# above the one that the datasheet counts with.
PEAK_MARGIN = 1.1
NOT_TIMED_NOTES = {"before": "note.not_timed_before", "after": "note.not_timed_after"}  # by stage
# the largest share of a pass's wall time that may be spent outside it, on its answers and length
MAX_SHARE_OUTSIDE = 0.1
MAX_OUTSIDE_S = 0.05  # too short to hide work in


def check_drawn_counts(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield for each pass in `record.drawn` a check `drawn_PASS` (reason `tokens`)
    that samples count the work of the rows that were drawn for it; a failed one names the first
    difference.

    Counts (tokens, samples, logits, pairs, square) are compared for the whole pass, in training for
    each step's global batch. In division open with shared prefixes some may be fewer. Nothing for
    records that did not count what was drawn. `metrics` is not used.
    """
    for pass_name, drawn_counts in record.drawn.items():
        step_counts = (
            _count_by_step(record, pass_name)
            if pass_name in record.task.kind_row.stepped
            else [passes.sum_counts(record, pass_name)]
        )
        difference = next(_find_count_differences(record, drawn_counts, step_counts), None)
        message_values: MessageValues = (
            {"pass": pass_name}
            if difference is None
            else {"pass": pass_name, "difference": difference}
        )
        yield make_check(
            f"drawn_{pass_name}", difference is None, "tokens", "check.drawn", message_values
        )


def _count_by_step(record: Record, pass_name: str) -> list[dict[str, int]]:
    """Return the counts (keys of `COUNT_NAMES`) of each working step of a pass, in step order,
    summed over the first rank of each replica. There are as many as the replica with most steps
    has; a replica that lacks a step adds nothing.
    """
    placements = {
        rank: degrees.find_position(record.plan, rank)
        for rank in passes.group_working_steps(record, pass_name)
    }
    replica_steps = [
        s
        for rank, s in passes.group_working_steps(record, pass_name).items()
        if placements[rank].tp == placements[rank].pp == 0
    ]
    steps = max(map(len, replica_steps), default=0)
    return [
        {
            key: sum(s[i].counts.get(key, 0) for s in replica_steps if i < len(s))
            for key in COUNT_NAMES
        }
        for i in range(steps)
    ]


def _find_count_differences(
    record: Record, drawn_counts: list[dict[str, int]], step_counts: list[dict[str, int]]
) -> Iterator[Message]:
    """Yield a message for each count of each step that differs from what was drawn for it; both
    lists have one dict of counts for each step, or one for a whole pass. Steps beyond the shorter
    list are not compared.

    In division open, if the kind of work shares prefixes, tokens, pairs and square may be fewer but
    not more; samples and logits must be equal.
    """
    may_be_fewer = record.case.division == "open" and record.task.kind_row.shares
    for step, (drawn_in_step, counts) in enumerate(zip(drawn_counts, step_counts, strict=False)):
        for key in COUNT_NAMES:
            counted, expected = counts.get(key, 0), drawn_in_step.get(key, 0)
            least = 0 if may_be_fewer and key not in ("samples", "logits") else expected
            if not least <= counted <= expected:
                message_values: MessageValues = {"counted": counted, "what": key, "held": expected}
                yield (
                    Message("drawn.step", {**message_values, "step": step})
                    if len(drawn_counts) > 1
                    else Message("drawn.whole", message_values)
                )


def check_plausible_rates(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: return one check `plausible` (reason `implausible`) on the pass and limit for
    which the rate in FLOP/s is the largest share of the limit; it passes up to the limit itself.

    Limits are the datasheet's peak and the matmul rate measured in this run, with a margin
    (`_list_rate_limits`). Empty if no limit is known or no pass counted tokens. `metrics` is not
    used.
    """
    claims = [
        claim
        for name in dict.fromkeys(w.pass_name for w in record.passes)
        for claim in _compare_with_limits(record, name)
    ]
    if not claims:
        return []
    share, message_values = max(claims, key=lambda claim: claim[0])
    return [make_check("plausible", share <= 1, "implausible", "check.plausible", message_values)]


def _compare_with_limits(record: Record, pass_name: str) -> Iterator[tuple[float, MessageValues]]:
    """Yield, for each known limit on a pass (such as `train` or `infer`), the pass's rate as a
    share of the limit (above 1 is implausible), and the values of the check's message.

    The rate is causal model FLOPs, three forwards a step in training, over the limit's own time;
    infinite if that is 0. Limits are the datasheet peak, and the matmul rate of this run with a
    margin. Nothing for a pass without tokens, and for hardware that is only declared.
    """
    counts = _count_pass_work(record, pass_name)
    if not counts.get("tokens") or is_hardware_declared(record):
        return
    question = record.question
    model_flops = (
        flops.count_flops(
            question.model, counts, "causal", record.task.kind_row.forwards_in_pass(pass_name)
        )
        or 0
    )
    for limit_name, limit, time_s in _list_rate_limits(record, pass_name):
        if limit:
            rate = model_flops / time_s if time_s > 0 else float("inf")
            yield (
                rate / limit,
                {"pass": pass_name, "rate": rate, "limit": limit, "what": limit_name},
            )


def _count_pass_work(record: Record, pass_name: str) -> dict[str, int]:
    """Return the counts of a pass, summed over its steps, or for a pass of requests what their
    tokens need (`request_window.count_pass_work`); empty if they are unknown.
    """
    if pass_name in record.task.kind_row.request_passes:
        return request_window.count_pass_work(record, pass_name) or {}
    return passes.sum_counts(record, pass_name)


def _works_elsewhere(record: Record, pass_name: str) -> bool:
    """Return whether the engine of a pass of requests computed in another process, so that the CPU
    time of the rank is its client's alone.
    """
    samples = request_window.find_request_samples(record, pass_name)
    client = None if samples is None else samples.client
    return client is not None and client.cpu_share is not None


def _list_rate_limits(
    record: Record, pass_name: str
) -> Iterator[tuple[Message, float | None, float]]:
    """Yield (name, limit in FLOP/s of all devices, seconds that the rate is taken over) for the
    limits on a pass; a limit of None is unknown.

    First the datasheet peak; then each rank's fastest measured matmul, summed, times 1.1, or 2.5 if
    the host was busy (from formulas version 4 on). Seconds are the shorter of wall and compute
    time. If the CPU is the device, the second limit is the best rate per CPU second times the same
    margin, and the seconds are the CPU time of all ranks in the pass; it is left out if one is
    unknown, or the engine works in another process.
    """
    devices = passes.count_devices(record)
    windows = passes.select_windows(record, pass_name)
    times = [
        t
        for t in (passes.wall_s(record, pass_name), passes.compute_s(record, pass_name))
        if t is not None
    ]
    shortest_s = min(times, default=0.0)
    peak = rates.datasheet_peak(record).value
    yield Message("limit.peak"), peak and peak * devices, shortest_s
    has_several = (
        record.formulas is not None and record.formulas >= FIRST_VERSION_WITH_SEVERAL_TIMINGS
    )
    host_is_busy = has_several and cpu_contention.is_busy(record)
    margin = BUSY_MARGIN if host_is_busy else MATMUL_MARGIN
    if not _is_cpu_device(record):
        measured = [_find_fastest_matmul(record, rank) for rank in record.ranks]
        total_rate = fsum(rate for rate in measured if rate) if all(measured) else None
        yield (
            _name_limit("limit.matmul", {"margin": margin}, host_is_busy),
            total_rate and margin * total_rate,
            shortest_s,
        )
        return
    rates_by_rank = [list_cpu_rates(rank, has_several) for rank in record.ranks]
    cpu_times_s = [window.cpu_s for window in windows]
    is_known = None not in cpu_times_s and not _works_elsewhere(record, pass_name)
    if rates_by_rank and all(rates_by_rank) and is_known:
        busy_s = fsum(time_s for time_s in cpu_times_s if time_s is not None)
        known = [rate for rates in rates_by_rank for rate in rates]
        message_values: MessageValues = {"margin": margin, "count": len(known)}
        limit_name = _name_limit(
            "limit.cpu_best" if has_several else "limit.cpu", message_values, host_is_busy
        )
        bound = _find_core_bound(record)
        yield limit_name, margin * (max(known) if bound is None else min(max(known), bound)), busy_s


def _name_limit(code: str, values: MessageValues, host_is_busy: bool) -> Message:
    """Return the message `code` that names a limit on a rate; if the host was busy, wrapped in one
    that says why its margin is wide.
    """
    limit_name = Message(code, values)
    return Message("limit.busy", {"limit": limit_name}) if host_is_busy else limit_name


def list_cpu_rates(rank: RankFacts, has_several: bool) -> list[float]:
    """Return a rank's measured rates of the square matmul in FLOP per second of CPU time; empty if
    not measured.

    If `has_several` (formulas version 4 on) these are all single timings; otherwise, and if there
    are none, the one mean rate.
    """
    timings = (rank.matmul_cpu_rates or {}).values() if has_several else ()
    known = [rate for rates in timings for rate in rates if rate]
    return known or [rate for rate in (rank.matmul_flops_per_cpu_s,) if rate]


def _find_fastest_matmul(record: Record, rank: RankFacts) -> float | None:
    """Return the highest rate of any matmul measured on a rank in this run, in FLOP/s: of the
    square one and the case's own shapes; None if none was measured. From formulas version 5 on the
    square one after the passes too, and no more than the datasheet's peak with its margin.
    """
    is_bounded = record.formulas is not None and record.formulas >= FIRST_VERSION_WITH_BOUNDS
    known = _list_timed_rates(rank) if is_bounded else _list_timed_rates(rank)[:-1]
    fastest = max((rate for rate in known if rate), default=None)
    peak = rates.datasheet_peak(record).value if is_bounded else None
    return fastest if fastest is None or peak is None else min(fastest, PEAK_MARGIN * peak)


def _list_timed_rates(rank: RankFacts) -> list[float | None]:
    """Return the rates of all matmuls that were timed on a rank's device, in FLOP/s: the square
    one, the case's own shapes, and last the square one after the passes; None if not timed.
    """
    shapes = [matmul.flops_per_s for matmul in rank.matmuls or []]
    return [rank.matmul_flops_per_s, *shapes, rank.matmul_flops_per_s_after]


def _find_core_bound(record: Record, rank: RankFacts | None = None) -> float | None:
    """Return the FLOP/s that one core of a rank's host does not exceed at the case's precision, or
    for all ranks (None) the most of any host; None if unknown, and before formulas version 5.
    """
    if record.formulas is None or record.formulas < FIRST_VERSION_WITH_BOUNDS:
        return None
    hosts = [host for host in record.hosts if rank is None or rank.rank in host.ranks]
    core_bounds = [None if host.state is None else host.state.core_bound for host in hosts]
    precision = record.question.precision.matmul
    known = [core.count_flops_per_s(precision) for core in core_bounds if core is not None]
    return max(known) if known and len(known) == len(hosts) else None


def check_calibration(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule, from formulas version 5 on: yield one check `calibrated` (reason
    `implausible`) on the matmul that was timed closest to, or most above, what its device can do,
    and a note for each rank and stage of which matmuls could not be timed.

    What a device can do is 1.1 times its datasheet peak. If the CPU is the device, it is what one
    core can do at most (`CoreBound`) in a second of CPU time, and all allowed cores together in a
    second. No check if nothing was timed, or no such bound is known. `metrics` is not used.
    """
    if record.formulas is None or record.formulas < FIRST_VERSION_WITH_BOUNDS:
        return
    for rank in record.ranks:
        problems = {} if rank.calibration is None else rank.calibration.problems
        for stage, note_code in NOT_TIMED_NOTES.items():
            if stage in problems:
                yield make_note(Message(note_code, {"rank": rank.rank, "why": problems[stage]}))
    claims = [
        (rate / bound, rank.rank, rate, bound, what)
        for rank in record.ranks
        for rate, bound, what in _list_bounds(record, rank)
    ]
    if claims:
        share, number, rate, bound, what = max(claims, key=lambda claim: claim[0])
        values: MessageValues = {"rank": number, "rate": rate, "limit": bound, "what": what}
        yield make_check("calibrated", share <= 1, "implausible", "check.calibrated", values)


def _list_bounds(record: Record, rank: RankFacts) -> Iterator[tuple[float, float, Message]]:
    """Yield (rate, bound, name of the bound) of each matmul that was timed on a rank's device, in
    FLOP/s; nothing if no bound is known.
    """
    if not _is_cpu_device(record):
        peak = rates.datasheet_peak(record).value
        for rate in _list_timed_rates(rank):
            if rate and peak:
                yield (
                    rate,
                    PEAK_MARGIN * peak,
                    Message("limit.peak_margin", {"margin": PEAK_MARGIN}),
                )
        return
    bound = _find_core_bound(record, rank)
    host = next((host for host in record.hosts if rank.rank in host.ranks), None)
    if bound is None or host is None:
        return
    for rate in [*list_cpu_rates(rank, has_several=True), *list_cpu_rates(rank, False)]:
        yield rate, bound, Message("limit.core")
    cores = host.cpu_cores if host.load is None else host.load.allowed
    for rate in _list_timed_rates(rank):
        if rate and cores:
            yield rate, cores * bound, Message("limit.cores", {"cores": cores})


def _is_cpu_device(record: Record) -> bool:
    """Return whether the CPU itself is the device of a run."""
    limits = cpu_contention.find_contention_limits(record.environment.hardware.accelerator)
    return limits is cpu_contention.CPU_IS_DEVICE_LIMITS


def check_time_outside_passes(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a check `beside_PASS` (reason `hidden`), for each pass on each rank
    whose budget has such parts, that what an engine does outside the timed pass takes at most 10 %
    of its wall time plus 50 ms.

    The parts are seconds in the rank's time budget: `total_PASS` (preparing its length) and
    `outputs_PASS` (reading its answers). `metrics` is not used.
    """
    budgets = {rank.rank: rank.budget or {} for rank in record.ranks}
    for window in record.passes:
        budget = budgets.get(window.rank, {})
        parts = {
            part: budget[f"{part}_{window.pass_name}"]
            for part in OUTSIDE_PARTS
            if f"{part}_{window.pass_name}" in budget
        }
        spent_s = fsum(parts.values())
        message_values: MessageValues = {
            "pass": window.pass_name,
            "rank": window.rank,
            "spent": spent_s,
            "parts": tuple(parts),
            "wall": window.wall_s,
            "most": MAX_SHARE_OUTSIDE,
        }
        if parts:
            ok = spent_s <= MAX_OUTSIDE_S + MAX_SHARE_OUTSIDE * window.wall_s
            yield make_check(
                f"beside_{window.pass_name}", ok, "hidden", "check.beside", message_values
            )


OUTSIDE_PARTS = ("total", "outputs")  # parts of a worker's budget, as in `total_infer`
