"""Whether a rate can be true: no more work than the rows drawn hold, no faster than the device
multiplies, none of it done where no pass is timed."""

from collections.abc import Iterator
from math import fsum

from steelyard.data.division import COUNTED
from steelyard.metrics import busy, rates, spans
from steelyard.metrics.result import Finding, judged
from steelyard.plan import degrees, flops
from steelyard.record.facts import RankFacts
from steelyard.record.record import Record, Value
from steelyard.words import Message, Values

# over the matmul rate of the same run, which a device's temperature and its neighbours move
MARGIN = 1.1
# The same on a busy host. A neighbour on the other thread of a core, and threads that spin for one
# that waits, can each take half of a matmul's rate: 1.35e11 FLOP per CPU second were measured where
# a quiet host gave 2.16e11. Such a run is invalid as `busy` anyway, size smoke apart. Engines that
# do no work in the pass were measured at 3 times the matmul's rate, where threads spin meanwhile,
# and at 40 times (tests/hard/test_cheats.py).
BUSY_MARGIN = 2.5
SEVERAL = 4  # the first version of the formulas with several timings and a margin for busy hosts
# the most of a pass's wall time that may be spent beside it, on its answers and its length
ASIDE = 0.1
ASIDE_S = 0.05  # less is not worth hiding work in


def drawn(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Samples count what the task counts in the rows drawn: all of scoring together, of training
    every step's global batch.
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
    """Of each step the counts of all replicas."""
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
    """In division open what is shared is computed once: of answers there are as many, of tokens no
    more than in closed.
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
    """No pass is faster than the datasheet's peak, nor than what the same devices multiplied right
    before it.
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
    """A pass's rate as a share of each limit, and what it says."""
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
    """What a rate must not exceed, the limit, and the time that it is taken over. A CPU is shared
    with all else on its host, so its work is set against CPU time, in the pass and in the matmul.
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
    """Name a limit, with the reason for its margin where that is wide."""
    said = Message(code, values)
    return Message("limit.busy", {"limit": said}) if wide else said


def _cpu_rates(rank: RankFacts, several: bool) -> list[float]:
    """Return the rates of the square matmul over CPU time that a rank is judged by: from version 4
    on those of every timing, in older records and where a worker has none, the mean before."""
    timings = (rank.matmul_cpu_rates or {}).values() if several else ()
    known = [rate for rates in timings for rate in rates if rate]
    return known or [rate for rate in (rank.matmul_flops_per_cpu_s,) if rate]


def _fastest(rank: RankFacts) -> float | None:
    """The fastest matmul that was seen of a device: the square one, or one of the case's own
    shapes.
    """
    known = [rank.matmul_flops_per_s, *(one.flops_per_s for one in rank.matmuls or [])]
    return max((rate for rate in known if rate), default=None)


def beside(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """What an engine does for its answers and its length, with the device idle at the end of each,
    takes little time.
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


ASIDES = ("total", "outputs")  # parts of a worker's budget, each followed by the name of a pass
