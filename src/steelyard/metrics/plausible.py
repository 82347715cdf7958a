"""Check that a rate can be true: the counted work is that of the rows drawn, no pass is faster than
the device multiplies, and no work is hidden outside the timed passes.

`validity.py` applies these rules to a record.
"""

from collections.abc import Iterator
from math import fsum

from steelyard.data.division import COUNTED
from steelyard.metrics import busy, rates, spans
from steelyard.metrics.result import Finding, judged
from steelyard.plan import degrees, flops
from steelyard.record.facts import RankFacts
from steelyard.record.record import Record, Value
from steelyard.words import Message, Values

# factor over the matmul rate of the same run, which varies with temperature and neighbours
MARGIN = 1.1
# The same on a busy host. A neighbour on the other thread of a core, and threads that spin for one
# that waits, can each take half of a matmul's rate: 1.35e11 FLOP per CPU second were measured where
# a quiet host gave 2.16e11. Such a run is invalid as `busy` anyway, size smoke apart. Engines that
# do no work in the pass were measured at 3 times the matmul's rate, where threads spin meanwhile,
# and at 40 times (tests/hard/test_cheats.py).
BUSY_MARGIN = 2.5
SEVERAL = 4  # of the formulas: with several timings, and a margin for busy hosts
# the largest share of a pass's wall time that may be spent outside it, on its answers and length
ASIDE = 0.1
ASIDE_S = 0.05  # too short to hide work in


def drawn(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check for each pass that samples count exactly the work of the rows that were
    drawn for it.

    Counts are compared for the whole pass, and for each step's global batch in training. Yields
    check `drawn_PASS` with reason `tokens`; nothing for records that did not count what was drawn.
    """
    for name, wanted in record.drawn.items():
        found = (
            _by_step(record, name)
            if name in record.task.kind_row.stepped
            else [spans.total(record, name)]
        )
        wrong = next(_differences(record, wanted, found), None)
        told: Values = {"pass": name} if wrong is None else {"pass": name, "difference": wrong}
        yield judged(f"drawn_{name}", wrong is None, "tokens", "check.drawn", told)


def _by_step(record: Record, name: str) -> list[dict[str, int]]:
    """Return the counts of each step of a pass, summed over replicas (the first rank of each)."""
    places = {rank: degrees.place(record.plan, rank) for rank in spans.working(record, name)}
    every = [
        s
        for rank, s in spans.working(record, name).items()
        if places[rank].tp == places[rank].pp == 0
    ]
    steps = max(map(len, every), default=0)
    return [
        {key: sum(s[i].counts.get(key, 0) for s in every if i < len(s)) for key in COUNTED}
        for i in range(steps)
    ]


def _differences(
    record: Record, wanted: list[dict[str, int]], found: list[dict[str, int]]
) -> Iterator[Message]:
    """Yield a message for each count of each step that differs from what was drawn.

    In division open, where shared prefixes are computed once, tokens and pairs may be fewer;
    samples and logits must be equal.
    """
    fewer = record.case.division == "open" and record.task.kind_row.shares
    for step, (most, counts) in enumerate(zip(wanted, found, strict=False)):
        for key in COUNTED:
            there, held = counts.get(key, 0), most.get(key, 0)
            least = 0 if fewer and key not in ("samples", "logits") else held
            if not least <= there <= held:
                told: Values = {"counted": there, "what": key, "held": held}
                yield (
                    Message("drawn.step", {**told, "step": step})
                    if len(wanted) > 1
                    else Message("drawn.whole", told)
                )


def plausible(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Validity rule: check that no pass is faster than the datasheet's peak, nor than the matmul
    rate measured on the same devices in this run.

    Returns one check `plausible` (reason `implausible`) on the pass and limit that come closest;
    nothing if no limit is known.
    """
    claims = [
        claim
        for name in dict.fromkeys(w.pass_name for w in record.passes)
        for claim in _claims(record, name)
    ]
    if not claims:
        return []
    share, told = max(claims, key=lambda claim: claim[0])
    return [judged("plausible", share <= 1, "implausible", "check.plausible", told)]


def _claims(record: Record, name: str) -> Iterator[tuple[float, Values]]:
    """Yield for each limit on a pass the rate as a share of the limit (above 1 is implausible), and
    the values of the check's message.

    The rate is causal model FLOPs over time. Nothing for a pass without tokens.
    """
    counts = spans.total(record, name)
    if not counts.get("tokens"):
        return
    question = record.question
    done = flops.work(question.model, counts, "causal", record.task.kind_row.forwards_of(name)) or 0
    for what, limit, time_s in _limits(record, name):
        if limit:
            rate = done / time_s if time_s > 0 else float("inf")
            yield rate / limit, {"pass": name, "rate": rate, "limit": limit, "what": what}


def _limits(record: Record, name: str) -> Iterator[tuple[Message, float | None, float]]:
    """Yield the limits on a pass's FLOP/s: its name, the limit over all devices (None if unknown),
    and the seconds that the rate is taken over.

    They are the datasheet peak, and the matmul rate measured in this run times a margin, which is
    wider on a busy host from formulas version 4 on. Times are the shorter of wall and compute time.
    If the CPU is the device, it shares its cores with other processes, so the second limit is over
    CPU time, in the pass and in the matmul.
    """
    devices = spans.devices(record)
    windows = spans.windows(record, name)
    times = [
        t for t in (spans.wall_s(record, name), spans.compute_s(record, name)) if t is not None
    ]
    least_s = min(times, default=0.0)
    peak = rates.datasheet_peak(record).value
    yield Message("limit.peak"), peak and peak * devices, least_s
    several = record.formulas is not None and record.formulas >= SEVERAL
    wide = several and busy.is_busy(record)
    margin = BUSY_MARGIN if wide else MARGIN
    if busy.bounds_of(record.environment.hardware.accelerator) is not busy.CORES_ARE_THE_DEVICE:
        measured = [_fastest(rank) for rank in record.ranks]
        whole = fsum(rate for rate in measured if rate) if all(measured) else None
        yield _limit("limit.matmul", {"margin": margin}, wide), whole and margin * whole, least_s
        return
    of_cpu = [_cpu_rates(rank, several) for rank in record.ranks]
    used = [window.cpu_s for window in windows]
    if of_cpu and all(of_cpu) and None not in used:
        busy_s = fsum(time_s for time_s in used if time_s is not None)
        known = [rate for rates in of_cpu for rate in rates]
        told: Values = {"margin": margin, "count": len(known)}
        said = _limit("limit.cpu_best" if several else "limit.cpu", told, wide)
        yield said, margin * max(known), busy_s


def _limit(code: str, values: Values, wide: bool) -> Message:
    """Return the message that names a limit; on a busy host with the reason for its wide margin."""
    said = Message(code, values)
    return Message("limit.busy", {"limit": said}) if wide else said


def _cpu_rates(rank: RankFacts, several: bool) -> list[float]:
    """Return a rank's rates of the square matmul in FLOP per second of CPU time; empty if not
    measured.

    From formulas version 4 on (`has_several`) these are all timings; in older records, and if there
    are none, the one mean rate.
    """
    timings = (rank.matmul_cpu_rates or {}).values() if several else ()
    known = [rate for rates in timings for rate in rates if rate]
    return known or [rate for rate in (rank.matmul_flops_per_cpu_s,) if rate]


def _fastest(rank: RankFacts) -> float | None:
    """Return the fastest matmul measured on a rank in FLOP/s, of the square one and the case's own
    shapes; None if none was.
    """
    known = [rank.matmul_flops_per_s, *(one.flops_per_s for one in rank.matmuls or [])]
    return max((rate for rate in known if rate), default=None)


def beside(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check that what an engine does outside the timed pass, to prepare its length
    and to read its answers, takes at most 10 % of the pass plus 50 ms.

    Yields check `beside_PASS` with reason `hidden` for each rank whose budget has such parts.
    """
    budgets = {rank.rank: rank.budget or {} for rank in record.ranks}
    for window in record.passes:
        budget = budgets.get(window.rank, {})
        parts = {
            part: budget[f"{part}_{window.pass_name}"]
            for part in ASIDES
            if f"{part}_{window.pass_name}" in budget
        }
        spent_s = fsum(parts.values())
        told: Values = {
            "pass": window.pass_name,
            "rank": window.rank,
            "spent": spent_s,
            "parts": tuple(parts),
            "wall": window.wall_s,
            "most": ASIDE,
        }
        if parts:
            ok = spent_s <= ASIDE_S + ASIDE * window.wall_s
            yield judged(f"beside_{window.pass_name}", ok, "hidden", "check.beside", told)


ASIDES = ("total", "outputs")  # parts of a worker's budget, as in `total_infer`
