"""Find the slowest rank. Ranks that wait for one another end each step together, so wall times hide
it; each rank's own time before it meets the others tells.
"""

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

WORTH_NOTING = 0.02  # share of a step that is worth a note
MORE_WORK = 1.02  # times the tokens of the others; more explains why a replica takes longer

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
    """A rank's own time in a step, or a replica's in a pass, in seconds; means over steps.

    `others_s` is the median of the other ranks' times. `spread_s` is half of the 95 % interval of
    `cost_s`; None for a single step or pass. `wait_s` is the time in phases `meet` and `exchange`;
    None if it is not marked.
    """

    ranks: tuple[int, ...]  # one, or all ranks of a replica
    host: str | None
    device: str | None
    own_s: float
    others_s: float
    spread_s: float | None
    wait_s: float | None
    tokens: int | None  # counted in its steps; None for basis data

    @property
    def cost_s(self) -> float:
        """Return how many seconds it takes longer than the median of the others; negative if it is
        faster.
        """
        return self.own_s - self.others_s

    @property
    def relative(self) -> float | None:
        """Return `cost_s` as a share of the others' time; None if that is 0."""
        return self.cost_s / self.others_s if self.others_s > 0 else None


@dataclass(frozen=True)
class Stragglers:
    """The times of all ranks (or replicas), slowest first.

    `basis` says what a rank's own time is: "compute" is phases data and compute of a step, "data"
    is phase data alone, "pass" is the whole pass of a replica.
    """

    basis: Basis
    step_s: float  # mean time of a step (its slowest rank); for basis pass, the slowest wall time
    rows: tuple[RankTime, ...]
    # tokens of the slowest over the others' median; None unless clearly more
    more_work: float | None

    @property
    def slowest(self) -> RankTime:
        """Return the slowest rank or replica."""
        return self.rows[0]

    @property
    def rank(self) -> int:
        """Return the first rank of the slowest."""
        return self.slowest.ranks[0]

    @property
    def host(self) -> str | None:
        """Return the host of the slowest; None if unknown."""
        return self.slowest.host

    @property
    def cost_s(self) -> float:
        """Return the seconds that the slowest takes longer than the median of the others; negative
        if it is faster.
        """
        return self.slowest.cost_s

    @property
    def share(self) -> float:
        """Return the share of a step, or of the pass, that would be saved if the slowest were as
        fast as the median of the others; at least 0.
        """
        return max(0.0, self.cost_s) / self.step_s

    @property
    def slow(self) -> bool:
        """Return whether the slowest costs more than 2 % of a step, and more than chance explains
        (`spread_s`).
        """
        spread_s = self.slowest.spread_s
        return self.share > WORTH_NOTING and (spread_s is None or self.cost_s > spread_s)


@dataclass(frozen=True)
class Unknown:
    """The reason why no slowest rank can be told."""

    reason: Message


def find(record: Record) -> Stragglers | Unknown:
    """Return the times of all ranks, slowest first, or why they cannot be told.

    Over the steps of the steady window if ranks meet in every step (training), else over the
    headline pass by replica. Unknown with one device, one replica, missing ranks, compute time that
    includes waiting, or no time.
    """
    if spans.devices(record) < 2:
        return Unknown(ALONE)
    found = _by_step(record) if record.task.kind_row.ranks_meet else _by_pass(record)
    return (
        found
        if isinstance(found, Unknown) or (found.step_s > 0 and isfinite(found.share))
        else Unknown(NO_TIME)
    )


def share(record: Record) -> Result:
    """Formula of metric `straggler_share`: the share of a step (or pass) lost to the slowest rank;
    None with the reason if it cannot be told.
    """
    found = find(record)
    if isinstance(found, Unknown):
        return Result(None, found.reason)
    return Result(
        found.share, Message("straggler.rank", {"rank": found.rank, "own": OWN[found.basis]})
    )


def note(record: Record) -> Message | None:
    """Return a note that names the slowest rank or replica and what it costs; None if none is slow
    or it cannot be told.
    """
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
    """Return a message that names a rank, or the first and last rank of a replica (`is_replica`),
    with its host if known.
    """
    ranks = {"first": one.ranks[0], "last": one.ranks[-1]} if many else {"rank": one.ranks[0]}
    if one.host is None:
        return Message("slow.ranks" if many else "slow.rank", ranks)
    return Message("slow.ranks_at" if many else "slow.rank_at", {**ranks, "host": one.host})


def _time(time_s: float) -> str:
    """Format seconds as "1.23 s", or below one second as milliseconds."""
    return f"{time_s:.2f} s" if time_s >= 1 else f"{1000 * time_s:.4g} ms"


def _by_step(record: Record) -> Stragglers | Unknown:
    """Compare ranks over the steps of the steady window.

    A rank's own time is data + compute if every step marks compute and exchange; data alone if
    ranks exchange inside the compute phase; otherwise, and if a rank has no steps, Unknown.
    """
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
    """Return the seconds of a step in phases meet and exchange."""
    return fsum(sample.phases.get(name, 0.0) for name in ("meet", "exchange"))


def _by_pass(record: Record) -> Stragglers | Unknown:
    """Compare replicas over the headline pass, in which they do not meet; a replica's time is that
    of its slowest rank. Unknown with fewer than two replicas or missing ranks.
    """
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
        # all ranks of a replica count the same work
        tokens = next((_tokens(steps[rank]) for rank in every if rank in steps), 0)
        rows.append(_row(told, tuple(every), own_s, others_s, None, None, tokens))
    return _ordered("pass", max(own), rows)


def _by_rank(record: Record) -> dict[int, RankFacts]:
    """Return the record's facts of each rank, by rank."""
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
    """Make the row of a rank or replica; host and device names come from the ranks' facts."""
    facts = [told[rank] for rank in ranks if rank in told]
    hosts, devices = _listed([one.host for one in facts]), _listed([one.device for one in facts])
    return RankTime(ranks, hosts, devices, own_s, others_s, spread_s, wait_s, tokens)


def _listed(names: list[str | None]) -> str | None:
    """Return the names that are not empty, each once, joined by ", "; None if there are none."""
    return ", ".join(dict.fromkeys(name for name in names if name)) or None


def _ordered(basis: Basis, step_s: float, rows: list[RankTime]) -> Stragglers:
    """Return the rows sorted from slowest to fastest, with `more_work` set if the slowest has over
    1.02 times the median tokens of the others.
    """
    slowest, *others = sorted(rows, key=lambda row: (-row.cost_s, row.ranks))
    known = [row.tokens for row in others if row.tokens is not None]
    usual = median(known) if known else None
    more = slowest.tokens / usual if slowest.tokens is not None and usual else None
    return Stragglers(
        basis, step_s, (slowest, *others), more if more is not None and more > MORE_WORK else None
    )


def _tokens(steps: list[Sample]) -> int:
    """Return the tokens counted in these steps."""
    return sum(sample.counts.get("tokens", 0) for sample in steps)


def _spread(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of the mean of these values (Student's t); None for fewer
    than two.
    """
    if len(values) < 2:
        return None
    mean = fmean(values)
    variance = fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float(stats.t_95(len(values) - 1) * (variance / len(values)) ** 0.5)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all other values; needs at least two. Sorts once, because
    a run may have thousands of ranks.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    ordered = [values[index] for index in order]
    out = [0.0] * len(values)
    # the two middle positions among the others, equal if their number is odd
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    for place, index in enumerate(order):
        out[index] = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
    return out
