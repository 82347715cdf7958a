"""Find the slowest rank. Ranks that wait for one another end each step together, so wall times hide
it; each rank's own time before it meets the others tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from math import fsum, isfinite
from statistics import fmean, median
from typing import Literal

from steelyard.metrics import passes, stats
from steelyard.metrics.result import Result
from steelyard.plan import degrees
from steelyard.record.record import Record, Sample
from steelyard.record.run_facts import RankFacts
from steelyard.words import Message, MessageValues

MIN_NOTED_SHARE = 0.02  # share of a step that is worth a note
MIN_MORE_WORK = 1.02  # times the tokens of the others; more explains why a replica takes longer

OwnTimeBasis = Literal["compute", "pass", "data"]
OWN_TIME_MESSAGES: dict[OwnTimeBasis, Message] = {
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
    """The own time of a rank in a step, or of a replica in a pass, in seconds; for steps, means
    over the steady window. A row of `Stragglers`.

    `ranks` is one rank, or all of a replica, on `host` and `device` (None: unknown). `own_s` is its
    time before it meets the others, `others_s` the median of the others' times, `cost_s` the
    difference (negative if faster), `relative` that as a share. `spread_s` is half of the 95 %
    interval of `cost_s`; None for a single step or a pass. `wait_s` is the time in phases `meet`
    and `exchange`; None if waiting is not separate. `tokens` were counted in its steps; None for
    basis "data".
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
        """Return how many seconds this rank or replica takes longer than the median of the others;
        negative if it is faster.
        """
        return self.own_s - self.others_s

    @property
    def relative(self) -> float | None:
        """Return `cost_s` of this rank or replica as a share of the others' median time; None if
        that is 0.
        """
        return self.cost_s / self.others_s if self.others_s > 0 else None


@dataclass(frozen=True)
class Stragglers:
    """The times of all ranks (or replicas) of a run (`rows` of `RankTime`, slowest first), from
    `find_stragglers`.

    `basis` says what a rank's own time is: "compute" is phases data and compute of a step, "data"
    is phase data alone, "pass" is the whole pass of a replica. `step_s` is the mean time of a step,
    or the slowest wall time of the pass. `more_work` is tokens of the slowest over the others'
    median; None unless clearly more. Properties of the slowest: `slowest` (its row), `rank`,
    `host`, `cost_s`, `share` of a step or pass lost to it, `is_slow`: whether that is worth a note.
    """

    basis: OwnTimeBasis
    step_s: float  # mean time of a step (its slowest rank); for basis pass, the slowest wall time
    rows: tuple[RankTime, ...]
    # tokens of the slowest over the others' median; None unless clearly more
    more_work: float | None

    @property
    def slowest(self) -> RankTime:
        """Return the row of the slowest rank or replica, the first."""
        return self.rows[0]

    @property
    def rank(self) -> int:
        """Return the rank that is slowest; of a replica its first rank."""
        return self.slowest.ranks[0]

    @property
    def host(self) -> str | None:
        """Return the host of the slowest rank or replica (several joined by ", "), or None."""
        return self.slowest.host

    @property
    def cost_s(self) -> float:
        """Return the seconds that the slowest rank or replica takes longer than the median of the
        others; negative if it is faster.
        """
        return self.slowest.cost_s

    @property
    def share(self) -> float:
        """Return the share of a step, or of the pass, that would be saved if the slowest were as
        fast as the median of the others; at least 0.
        """
        return max(0.0, self.cost_s) / self.step_s

    @property
    def is_slow(self) -> bool:
        """Return whether the slowest rank costs more than 2 % of a step (or pass), and more than
        chance explains: more than its `spread_s`, if that is known.
        """
        spread_s = self.slowest.spread_s
        return self.share > MIN_NOTED_SHARE and (spread_s is None or self.cost_s > spread_s)


@dataclass(frozen=True)
class UnknownStragglers:
    """Why `find_stragglers` cannot tell a slowest rank: `reason` is one of the messages `ALONE`
    (one device), `ONE_REPLICA` (of scoring), `UNFINISHED` (ranks are missing), `NOT_SEPARATE` (the
    engine does not mark phases) and `NO_TIME` (steps took no time).
    """

    reason: Message


def find_stragglers(record: Record) -> Stragglers | UnknownStragglers:
    """Return the times of all ranks, slowest first, or why they cannot be told
    (`UnknownStragglers`).

    They are compared over the steps of the steady window if ranks meet in every step (training),
    else by replica over the headline pass. Unknown with one device, with one replica in scoring, if
    ranks are missing, if an engine does not mark the phases needed, or if steps took no time.
    """
    if passes.count_devices(record) < 2:
        return UnknownStragglers(ALONE)
    result = (
        _compare_by_step(record) if record.task.kind_row.ranks_meet else _compare_by_pass(record)
    )
    return (
        result
        if isinstance(result, UnknownStragglers) or (result.step_s > 0 and isfinite(result.share))
        else UnknownStragglers(NO_TIME)
    )


def straggler_share(record: Record) -> Result:
    """Formula of metric `straggler_share`: the share (0 to 1) of a step or pass that would be saved
    if the slowest rank were as fast as the median of the others; the note names the rank. Without a
    value, with the reason, if it cannot be told.
    """
    result = find_stragglers(record)
    if isinstance(result, UnknownStragglers):
        return Result(None, result.reason)
    return Result(
        result.share,
        Message("straggler.rank", {"rank": result.rank, "own": OWN_TIME_MESSAGES[result.basis]}),
    )


def make_straggler_note(record: Record) -> Message | None:
    """Return a note that names the slowest rank or replica with its host, its share of a step or
    pass, its own and the others' time, and whether it had more work; None if it is not slow
    (`is_slow`) or cannot be told.
    """
    result = find_stragglers(record)
    if isinstance(result, UnknownStragglers) or not result.is_slow:
        return None
    slowest, is_replica = result.slowest, len(result.slowest.ranks) > 1
    message_values: MessageValues = {
        "who": _name_ranks(slowest, is_replica),
        "percent": 100 * result.share,
        "of": Message("slow.pass" if result.basis == "pass" else "slow.step"),
        "own": Message("slow.data" if result.basis == "data" else "slow.own"),
        "mine": _format_time(slowest.own_s),
        "others": _format_time(slowest.others_s),
        "work": ""
        if result.more_work is None
        else Message("slow.work", {"times": result.more_work}),
    }
    return Message("note.slow_many" if is_replica else "note.slow", message_values)


def _name_ranks(rank_time: RankTime, is_replica: bool) -> Message:
    """Return a message that names the rank of a row, or, with `is_replica`, the first and last rank
    of a replica; with its host if known.
    """
    ranks = (
        {"first": rank_time.ranks[0], "last": rank_time.ranks[-1]}
        if is_replica
        else {"rank": rank_time.ranks[0]}
    )
    if rank_time.host is None:
        return Message("slow.ranks" if is_replica else "slow.rank", ranks)
    return Message(
        "slow.ranks_at" if is_replica else "slow.rank_at", {**ranks, "host": rank_time.host}
    )


def _format_time(time_s: float) -> str:
    """Format seconds as "1.23 s", or below one second as milliseconds."""
    return f"{time_s:.2f} s" if time_s >= 1 else f"{1000 * time_s:.4g} ms"


def _compare_by_step(record: Record) -> Stragglers | UnknownStragglers:
    """Compare ranks over the steps of the steady window; each step's own time with the median of
    the other ranks in that step.

    A rank's own time is data + compute if every step marks phases compute and exchange; data alone
    if the engine exchanges inside the compute phase and marks data in every step, and then `wait_s`
    and `tokens` are None. UnknownStragglers in all other cases, and if a rank has no steps.
    """
    rate_span = passes.find_rate_span(record)
    if rate_span is None or len(rate_span.steps) < passes.count_devices(record):
        return UnknownStragglers(UNFINISHED)
    samples = [sample for steps in rate_span.steps.values() for sample in steps]
    if all("exchange" in sample.phases and "compute" in sample.phases for sample in samples):
        basis: OwnTimeBasis = "compute"
    elif record.engine.details.exchange == "inside" and all(
        "data" in sample.phases for sample in samples
    ):
        basis = "data"
    else:
        return UnknownStragglers(NOT_SEPARATE)
    steps = dict(sorted(rate_span.steps.items()))
    names = ("data",) if basis == "data" else ("data", "compute")
    times_by_rank = [
        [fsum(sample.phases.get(name, 0.0) for name in names) for sample in rank_steps]
        for rank_steps in steps.values()
    ]
    others = list(zip(*map(_medians_of_others, zip(*times_by_rank, strict=True)), strict=True))
    rows, facts_by_rank = [], _index_by_rank(record)
    for (rank, rank_steps), own_times, other_times in zip(
        steps.items(), times_by_rank, others, strict=True
    ):
        wait_s = (
            fmean([_waiting_s(sample) for sample in rank_steps]) if basis == "compute" else None
        )
        tokens = _sum_tokens(rank_steps) if basis == "compute" else None
        spread_s = _interval_half_width(
            [own_s - others_s for own_s, others_s in zip(own_times, other_times, strict=True)]
        )
        rows.append(
            _make_rank_time(
                facts_by_rank,
                (rank,),
                fmean(own_times),
                fmean(other_times),
                spread_s,
                wait_s,
                tokens,
            )
        )
    slowest = [
        max(sample.end_s - sample.start_s for sample in step)
        for step in zip(*steps.values(), strict=True)
    ]
    return _sort_ranks(basis, fmean(slowest), rows)


def _waiting_s(sample: Sample) -> float:
    """Return the seconds of a step in phases meet and exchange."""
    return fsum(sample.phases.get(name, 0.0) for name in ("meet", "exchange"))


def _compare_by_pass(record: Record) -> Stragglers | UnknownStragglers:
    """Compare replicas over the headline pass, in which they do not meet; a replica's time is the
    wall time of its slowest rank, the whole time that of the slowest replica. UnknownStragglers
    with fewer than two replicas, without a headline pass, or if a rank did not run it.
    """
    pass_name = passes.find_headline_pass(record)
    if record.plan.dp < 2:
        return UnknownStragglers(ONE_REPLICA)
    windows = (
        {window.rank: window for window in passes.select_windows(record, pass_name)}
        if pass_name
        else {}
    )
    ranks = stats.group_by(
        sorted(windows), lambda rank: degrees.find_position(record.plan, rank).dp
    )
    if pass_name is None or len(ranks) < 2 or len(windows) < passes.count_devices(record):
        return UnknownStragglers(UNFINISHED)
    facts_by_rank, steps = _index_by_rank(record), passes.group_working_steps(record, pass_name)
    replicas = [ranks[replica] for replica in sorted(ranks)]
    replica_times = [
        max(windows[rank].wall_s for rank in replica_ranks) for replica_ranks in replicas
    ]
    rows = []
    for replica_ranks, own_s, others_s in zip(
        replicas, replica_times, _medians_of_others(replica_times), strict=True
    ):
        # all ranks of a replica count the same work
        tokens = next((_sum_tokens(steps[rank]) for rank in replica_ranks if rank in steps), 0)
        rows.append(
            _make_rank_time(
                facts_by_rank, tuple(replica_ranks), own_s, others_s, None, None, tokens
            )
        )
    return _sort_ranks("pass", max(replica_times), rows)


def _index_by_rank(record: Record) -> dict[int, RankFacts]:
    """Return the record's facts of each rank, by rank."""
    return {facts.rank: facts for facts in record.ranks}


def _make_rank_time(
    facts_by_rank: dict[int, RankFacts],
    ranks: tuple[int, ...],
    own_s: float,
    others_s: float,
    spread_s: float | None,
    wait_s: float | None,
    tokens: int | None,
) -> RankTime:
    """Return the row of a rank or replica; host and device are the distinct names of its ranks,
    joined by ", ", None if unknown. Times are in seconds.
    """
    facts = [facts_by_rank[rank] for rank in ranks if rank in facts_by_rank]
    hosts, devices = (
        _join_unique([rank_facts.host for rank_facts in facts]),
        _join_unique([rank_facts.device for rank_facts in facts]),
    )
    return RankTime(ranks, hosts, devices, own_s, others_s, spread_s, wait_s, tokens)


def _join_unique(names: list[str | None]) -> str | None:
    """Return the names that are not empty, each once, joined by ", "; None if there are none."""
    return ", ".join(dict.fromkeys(name for name in names if name)) or None


def _sort_ranks(basis: OwnTimeBasis, step_s: float, rows: list[RankTime]) -> Stragglers:
    """Return the rows sorted by `cost_s` from slowest to fastest, equal ones by rank. `more_work`
    is the slowest's tokens over the median tokens of the others if that is above 1.02, else None.
    """
    slowest, *others = sorted(rows, key=lambda row: (-row.cost_s, row.ranks))
    known = [row.tokens for row in others if row.tokens is not None]
    usual_tokens = median(known) if known else None
    work_ratio = (
        slowest.tokens / usual_tokens if slowest.tokens is not None and usual_tokens else None
    )
    return Stragglers(
        basis,
        step_s,
        (slowest, *others),
        work_ratio if work_ratio is not None and work_ratio > MIN_MORE_WORK else None,
    )


def _sum_tokens(steps: list[Sample]) -> int:
    """Return the tokens counted in these steps."""
    return sum(sample.counts.get("tokens", 0) for sample in steps)


def _interval_half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of the mean of these values (Student's t, values
    taken as independent); None for fewer than two.
    """
    if len(values) < 2:
        return None
    mean = fmean(values)
    variance = fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float(stats.student_t_95(len(values) - 1) * (variance / len(values)) ** 0.5)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value, in the same order, the median of all other values; needs at least two.
    Sorts once, because a run may have thousands of ranks.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    ordered = [values[index] for index in order]
    medians = [0.0] * len(values)
    # the two middle positions among the others, equal if their number is odd
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    for position, index in enumerate(order):
        medians[index] = (ordered[low + (low >= position)] + ordered[high + (high >= position)]) / 2
    return medians
