"""Who is slow. Ranks that wait for one another all end a step together, so their wall times hide
it: what tells them apart is each rank's own time, before it meets the others."""

from collections.abc import Sequence
from dataclasses import dataclass

# sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from math import fsum, isfinite
from statistics import fmean, median
from typing import Literal

from steelyard.metrics import spans, stats
from steelyard.metrics.result import Result
from steelyard.plan import degrees
from steelyard.record.facts import RankFacts
from steelyard.record.record import Record, Sample
from steelyard.words import Message, Values

WORTH_NOTING = 0.02  # share of a step
MORE_WORK = 1.02  # times the tokens of the others; beyond it, that is why a replica takes longer

Basis = Literal["compute", "pass", "data"]
OWN: dict[Basis, Message] = {
    "compute": Message("straggler.own.compute"),
    "pass": Message("straggler.own.pass"),
    "data": Message("straggler.own.data"),
}

ALONE = Message("straggler.alone")
ONE_REPLICA = Message("straggler.one_replica")
UNFINISHED = Message("straggler.unfinished")
NOT_SEPARATE = Message("straggler.not_separate")
NO_TIME = Message("straggler.no_time")


@dataclass(frozen=True)
class RankTime:
    """A rank's own time of a step, or a replica's of a pass: means over the steps. `others_s` is
    the median of the others', `wait_s` the time of what is exchanged, where it is marked. What it
    costs is sure within `spread_s` (95 %), where there is more than one step."""

    ranks: tuple[int, ...]  # one, or all that hold one replica
    host: str | None
    device: str | None
    own_s: float
    others_s: float
    spread_s: float | None
    wait_s: float | None
    tokens: int | None  # of its work; None where ranks share their work

    @property
    def cost_s(self) -> float:
        """What is lost to it; below zero where it is faster than the others."""
        return self.own_s - self.others_s

    @property
    def relative(self) -> float | None:
        return self.cost_s / self.others_s if self.others_s > 0 else None


@dataclass(frozen=True)
class Stragglers:
    """Ranks from the slowest to the fastest. `basis` says what a rank's own time is: its data and
    compute phases, its whole pass, or its data phase alone."""

    basis: Basis
    step_s: float  # mean over steps of the slowest rank's; of a pass, the slowest one's wall time
    rows: tuple[RankTime, ...]
    # times the tokens that the others have, where the slowest has clearly more
    more_work: float | None

    @property
    def slowest(self) -> RankTime:
        return self.rows[0]

    @property
    def rank(self) -> int:
        return self.slowest.ranks[0]

    @property
    def host(self) -> str | None:
        return self.slowest.host

    @property
    def cost_s(self) -> float:
        return self.slowest.cost_s

    @property
    def share(self) -> float:
        """Of a step, or of the pass: what would be saved if the slowest were as fast as the median
        of the others.
        """
        return max(0.0, self.cost_s) / self.step_s

    @property
    def slow(self) -> bool:
        """Whether the slowest costs enough to be named, and more than steps differ by themselves."""
        spread_s = self.slowest.spread_s
        return self.share > WORTH_NOTING and (spread_s is None or self.cost_s > spread_s)


@dataclass(frozen=True)
class Unknown:
    reason: Message


def find(record: Record) -> Stragglers | Unknown:
    if spans.devices(record) < 2:
        return Unknown(ALONE)
    found = _by_step(record) if record.task.kind_row.ranks_meet else _by_pass(record)
    return (
        found
        if isinstance(found, Unknown) or (found.step_s > 0 and isfinite(found.share))
        else Unknown(NO_TIME)
    )


def share(record: Record) -> Result:
    found = find(record)
    if isinstance(found, Unknown):
        return Result(None, found.reason)
    return Result(
        found.share, Message("straggler.rank", {"rank": found.rank, "own": OWN[found.basis]})
    )


def note(record: Record) -> Message | None:
    """One line that names the slowest rank; None where none is slow."""
    found = find(record)
    if isinstance(found, Unknown) or not found.slow:
        return None
    one, many = found.slowest, len(found.slowest.ranks) > 1
    told: Values = {
        "who": _who(one, many),
        "percent": 100 * found.share,
        "of": Message("slow.pass" if found.basis == "pass" else "slow.step"),
        "own": Message("slow.data" if found.basis == "data" else "slow.own"),
        "mine": _time(one.own_s),
        "others": _time(one.others_s),
        "work": "" if found.more_work is None else Message("slow.work", {"times": found.more_work}),
    }
    return Message("note.slow_many" if many else "note.slow", told)


def _who(one: RankTime, many: bool) -> Message:
    ranks = {"first": one.ranks[0], "last": one.ranks[-1]} if many else {"rank": one.ranks[0]}
    if one.host is None:
        return Message("slow.ranks" if many else "slow.rank", ranks)
    return Message("slow.ranks_at" if many else "slow.rank_at", {**ranks, "host": one.host})


def _time(time_s: float) -> str:
    return f"{time_s:.2f} s" if time_s >= 1 else f"{1000 * time_s:.4g} ms"


def _by_step(record: Record) -> Stragglers | Unknown:
    """Over the steady window."""
    found = spans.span(record)
    if found is None or len(found.steps) < spans.devices(record):
        return Unknown(UNFINISHED)
    every = [sample for steps in found.steps.values() for sample in steps]
    if all("exchange" in sample.phases and "compute" in sample.phases for sample in every):
        basis: Basis = "compute"
    elif record.engine.details.exchange == "inside" and all(
        "data" in sample.phases for sample in every
    ):
        basis = "data"
    else:
        return Unknown(NOT_SEPARATE)
    steps = dict(sorted(found.steps.items()))
    names = ("data",) if basis == "data" else ("data", "compute")
    owns = [
        [fsum(sample.phases.get(name, 0.0) for name in names) for sample in of_rank]
        for of_rank in steps.values()
    ]
    others = list(zip(*map(_medians_of_others, zip(*owns, strict=True)), strict=True))
    rows, told = [], _by_rank(record)
    for (rank, of_rank), own, other in zip(steps.items(), owns, others, strict=True):
        wait_s = fmean([_waiting_s(sample) for sample in of_rank]) if basis == "compute" else None
        tokens = _tokens(of_rank) if basis == "compute" else None
        spread_s = _spread([mine - theirs for mine, theirs in zip(own, other, strict=True)])
        rows.append(_row(told, (rank,), fmean(own), fmean(other), spread_s, wait_s, tokens))
    slowest = [
        max(sample.end_s - sample.start_s for sample in step)
        for step in zip(*steps.values(), strict=True)
    ]
    return _ordered(basis, fmean(slowest), rows)


def _waiting_s(sample: Sample) -> float:
    return fsum(sample.phases.get(name, 0.0) for name in ("meet", "exchange"))


def _by_pass(record: Record) -> Stragglers | Unknown:
    """Over the headline pass, in which replicas do not meet."""
    name = spans.headline(record)
    if record.plan.dp < 2:
        return Unknown(ONE_REPLICA)
    windows = {window.rank: window for window in spans.windows(record, name)} if name else {}
    ranks = stats.grouped(sorted(windows), lambda rank: degrees.place(record.plan, rank).dp)
    if name is None or len(ranks) < 2 or len(windows) < spans.devices(record):
        return Unknown(UNFINISHED)
    told, steps = _by_rank(record), spans.working(record, name)
    replicas = [ranks[one] for one in sorted(ranks)]
    own = [max(windows[rank].wall_s for rank in every) for every in replicas]
    rows = []
    for every, own_s, others_s in zip(replicas, own, _medians_of_others(own), strict=True):
        # its ranks count the same work
        tokens = next((_tokens(steps[rank]) for rank in every if rank in steps), 0)
        rows.append(_row(told, tuple(every), own_s, others_s, None, None, tokens))
    return _ordered("pass", max(own), rows)


def _by_rank(record: Record) -> dict[int, RankFacts]:
    return {one.rank: one for one in record.ranks}


def _row(
    told: dict[int, RankFacts],
    ranks: tuple[int, ...],
    own_s: float,
    others_s: float,
    spread_s: float | None,
    wait_s: float | None,
    tokens: int | None,
) -> RankTime:
    facts = [told[rank] for rank in ranks if rank in told]
    hosts, devices = _listed([one.host for one in facts]), _listed([one.device for one in facts])
    return RankTime(ranks, hosts, devices, own_s, others_s, spread_s, wait_s, tokens)


def _listed(names: list[str | None]) -> str | None:
    """Each name once."""
    return ", ".join(dict.fromkeys(name for name in names if name)) or None


def _ordered(basis: Basis, step_s: float, rows: list[RankTime]) -> Stragglers:
    slowest, *others = sorted(rows, key=lambda row: (-row.cost_s, row.ranks))
    known = [row.tokens for row in others if row.tokens is not None]
    usual = median(known) if known else None
    more = slowest.tokens / usual if slowest.tokens is not None and usual else None
    return Stragglers(
        basis, step_s, (slowest, *others), more if more is not None and more > MORE_WORK else None
    )


def _tokens(steps: list[Sample]) -> int:
    return sum(sample.counts.get("tokens", 0) for sample in steps)


def _spread(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of their mean."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    variance = fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float(stats.t_95(len(values) - 1) * (variance / len(values)) ** 0.5)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of all others. One sort for all: a world may have
    thousands of ranks.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    ordered = [values[index] for index in order]
    out = [0.0] * len(values)
    # of the others: the same where their number is odd
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    for place, index in enumerate(order):
        out[index] = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
    return out
