"""Slow ranks, from ranks measured under a fake clock and from made samples: every number worked out
by hand.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import COUNTS, make, training
from steelyard.accelerators.events import HostEvent
from steelyard.engine.work import Phase, Work
from steelyard.metrics import metric_table, stragglers, validity
from steelyard.metrics.stragglers import RankTime, Stragglers, UnknownStragglers
from steelyard.record.record import Record, record_to_json
from steelyard.run.measure import measure
from steelyard.words import Message, render_text

INSIDE = {"name": "torch", "details": {"exchange": "inside"}}
HOSTS = ("fh1", "fh1", "fh2", "fh2")


class Host:
    """A host without a device: one fake clock, in seconds, serves as host clock and device clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def event(self) -> HostEvent:
        return HostEvent(self)

    def synchronize(self) -> None:
        """Do nothing: no work runs asynchronously."""


def replica(
    host: Host, backward_s: Sequence[float], slowest_s: Sequence[float]
) -> Iterator[Phase | Work]:
    """Yield the phases and the work of a rank's steps as the training loop marks them, advancing
    the clock.

    A step has 0.25 s of data, the rank's backward, the wait for the slowest rank, 0.125 s of
    transfer and 0.125 s of update.
    """
    for own_s, all_s in zip(backward_s, slowest_s, strict=True):
        yield Phase("data")
        host.now += 0.25
        yield Phase("meet")
        yield Phase("compute")
        host.now += own_s
        yield Phase("exchange")
        host.now += all_s - own_s + 0.125
        yield Phase("compute")
        host.now += 0.125
        yield Work(COUNTS, {"loss": 1.0})


def measured(*ranks: Sequence[float], **changes: Any) -> Record:
    """Return a record of replicas whose backward passes take these seconds in each step."""
    slowest = [max(step) for step in zip(*ranks, strict=True)]
    samples = []
    for rank, own in enumerate(ranks):
        host = Host()
        samples += measure(replica(host, own, slowest), host, clock=host).make_samples(
            "train", rank
        )
    return trained(
        [one.model_dump(mode="json", by_alias=True) for one in samples], len(ranks), **changes
    )


def step(
    rank: int,
    number: int,
    phases: dict[str, float],
    start_s: float,
    end_s: float,
    tokens: int = 100,
) -> dict[str, Any]:
    """Return one sample of pass train."""
    at = {"start_s": start_s, "end_s": end_s, "host_start_s": start_s, "host_end_s": end_s}
    return {
        "pass": "train",
        "rank": rank,
        "step": number,
        **at,
        "phases": phases,
        "counts": COUNTS | {"tokens": tokens},
    }


def trained(
    samples: list[dict[str, Any]], world: int, hosts: Sequence[str | None] = HOSTS, **changes: Any
) -> Record:
    """Return a training record of `world` ranks with these samples, two ranks a host by default."""
    ends = [max(one["end_s"] for one in samples if one["rank"] == rank) for rank in range(world)]
    ranks = [
        {"rank": rank, "host": hosts[rank % len(hosts)], "device": f"cuda:{rank % 2}"}
        for rank in range(world)
    ]
    times = [[end] * max(1, len(samples) // world) for end in ends]
    return training(times, samples=samples, ranks=ranks, **changes)


def owning(
    *ranks: Sequence[float], phase: str = "compute", step_s: float = 16.0, **changes: Any
) -> Record:
    """Return a record of ranks that spend these seconds in `phase` of each step and the other time
    of `step_s` in another phase.
    """
    samples = []
    for rank, own in enumerate(ranks):
        for number, own_s in enumerate(own):
            rest = (
                {"exchange": step_s - own_s} if phase == "compute" else {"compute": step_s - own_s}
            )
            samples.append(
                step(rank, number, {phase: own_s, **rest}, number * step_s, (number + 1) * step_s)
            )
    return trained(samples, len(ranks), **changes)


def found(record: Record) -> Stragglers:
    """Return the stragglers of the record, after checking that they are known."""
    out = stragglers.find_stragglers(record)
    assert isinstance(out, Stragglers), out
    return out


def slow_notes(record: Record) -> list[str]:
    """Return the notes of the record that call a rank slow."""
    return [note for note in record.notes if " slow: " in note]


def test_the_slow_rank_of_four_is_named_with_its_host_and_cost():
    even = (1.0,) * 4
    record = measured(even, even, even, (1.5,) * 4)
    assert {one.end_s - one.start_s for one in record.samples} == {2.0}  # equal wall times
    out = found(record)
    assert (out.rank, out.host, out.basis, out.cost_s, out.step_s, out.share) == (
        3,
        "fh2",
        "compute",
        0.5,
        2.0,
        0.25,
    )
    assert out.rows == (
        RankTime((3,), "fh2", "cuda:1", 1.875, 1.375, 0.0, 0.125, 300),
        RankTime((0,), "fh1", "cuda:0", 1.375, 1.375, 0.0, 0.625, 300),
        RankTime((1,), "fh1", "cuda:1", 1.375, 1.375, 0.0, 0.625, 300),
        RankTime((2,), "fh2", "cuda:0", 1.375, 1.375, 0.0, 0.625, 300),
    )
    assert [row.relative for row in out.rows] == [0.5 / 1.375, 0.0, 0.0, 0.0]
    said = (
        "rank 3 on host fh2 is slow: it costs 25.0 % of each step (own 1.88 s against 1.38 s of the"
        " others)"
    )
    assert slow_notes(record) == [said]
    metric = record.metrics["straggler_share"]
    assert (metric.value, metric.unit) == (0.25, "")
    assert metric.note == golden("rank-3-its-own-time-is")


def test_the_same_follows_from_the_record_as_it_is_read():
    record = measured((1.0,) * 4, (1.5,) * 4)
    again = Record.model_validate(json.loads(json.dumps(record_to_json(record))))
    assert validity.judge_record(again, metric_table.derive_metrics(again))[2] == record.notes


def test_what_is_exchanged_is_compute_time_of_a_rate():
    record = measured((1.0,) * 4, (1.5,) * 4)
    assert record.metrics["p_core"].value == 600 / (3 * 1.75)  # all but the 0.25 s of data
    samples = record_to_json(record)["samples"]
    for one in samples:
        one["phases"]["compute"] += one["phases"].pop("exchange")
    older = training(((2.0,) * 4,) * 2, samples=samples)
    assert older.metrics["p_core"].value == record.metrics["p_core"].value
    assert older.metrics["mfu_core"].value == record.metrics["mfu_core"].value


def test_a_cost_is_the_mean_over_steps_of_what_is_above_the_median_of_the_others():
    # Medians of the others: 2.5, 2, 1.5 in the first step, 2.5, 3.5, 3 in the second.
    out = found(owning((1.0, 4.0), (2.0, 2.0), (3.0, 3.0)))
    assert [(row.ranks, row.own_s, row.others_s, row.cost_s) for row in out.rows] == [
        ((2,), 3.0, 2.25, 0.75),
        ((0,), 2.5, 2.5, 0.0),
        ((1,), 2.0, 2.75, -0.75),
    ]
    assert (out.share, out.step_s) == (0.75 / 16, 16.0)
    # Costs of 1.5 s and 0 s: 0.75 s from their mean, and Student's t of one degree of freedom.
    assert out.rows[0].spread_s == pytest.approx(12.706 * 0.75)


def test_only_the_steady_window_counts():
    times = [9.0, 1.0, 1.0]
    out = found(owning(times, [1.0, 2.0, 2.0]))
    assert (out.rank, out.cost_s, out.share) == (1, 1.0, 1.0 / 16)


def test_the_step_is_the_slowest_rank_s():
    samples = [
        step(rank, n, {"compute": 2.0, "exchange": 0.0}, 4.0 * n, 4.0 * n + 2 + rank)
        for rank in (0, 1)
        for n in (0, 1)
    ]
    assert found(trained(samples, 2)).step_s == 3.0


def test_milliseconds_and_ranks_without_a_host():
    [note] = slow_notes(owning([0.12] * 3, [0.1] * 3, step_s=0.122, hosts=(None,)))
    assert note == golden("rank-0-is-slow-it-costs")


@pytest.mark.parametrize(("slow_s", "notes"), [(10.25, 0), (10.5, 1)])
def test_a_note_begins_above_two_per_cent(slow_s, notes):
    record = owning([10.0] * 3, [slow_s] * 3, step_s=12.5)
    assert found(record).share == (slow_s - 10.0) / 12.5
    assert len(slow_notes(record)) == notes


def test_steps_that_differ_by_themselves_name_nobody():
    """Rank 1 costs 4 of 16 s on average, which three steps cannot distinguish from noise."""
    record = owning([4.0] * 4, [0.0, 4.0, 4.0, 16.0])
    out = found(record)
    assert (out.rank, out.share, out.is_slow, slow_notes(record)) == (1, 0.25, False, [])
    assert record.metrics["straggler_share"].value == 0.25


def test_one_step_is_judged_by_what_it_costs():
    out = found(owning([1.0], [3.0]))
    assert (out.rank, out.slowest.spread_s, out.is_slow) == (1, None, True)


def test_nothing_is_saved_where_everyone_is_fast_in_turn():
    """In every step three ranks are equally slow: no rank is above the median of the others."""
    ranks = [[0.0 if number == rank else 10.0 for number in range(4)] for rank in range(4)]
    record = owning(*[[10.0, *own] for own in ranks])  # the first step is warm-up
    out = found(record)
    assert (out.rank, out.cost_s, out.share, out.is_slow) == (0, -2.5, 0.0, False)


def test_more_work_is_said():
    samples = [
        step(
            rank,
            n,
            {"compute": 1.0 + rank, "exchange": 1.0 - rank},
            2.0 * n,
            2.0 * n + 2,
            100 + 50 * rank,
        )
        for rank in (0, 1)
        for n in (0, 1)
    ]
    record = trained(samples, 2)
    assert found(record).more_work == 1.5
    said = "rank 1 on host fh1 is slow: it costs 50.0 % of each step"
    assert slow_notes(record) == [golden("own-2-00-against-1-00", said)]


@pytest.mark.parametrize("plan", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_where_ranks_meet_inside_a_step_only_their_data_is_their_own(plan):
    record = owning([0.5] * 3, [2.5] * 3, phase="data", plan=plan, engine=INSIDE)
    out = found(record)
    assert (out.rank, out.basis, out.cost_s, out.share) == (1, "data", 2.0, 0.125)
    assert [(row.wait_s, row.tokens) for row in out.rows] == [(None, None)] * 2
    said = (
        "rank 1 on host fh1 is slow: it costs 12.5 % of each step (waiting for data 2.50 s against"
        " 500 ms of the others)"
    )
    assert slow_notes(record) == [said]
    assert "phase data alone" in str(record.metrics["straggler_share"].note)


UNKNOWN: dict[str, tuple[Record, Message]] = {
    "one rank": (training(), stragglers.ALONE),
    "an engine that does not say": (training(((2.0, 1.0, 1.0),) * 2), stragglers.NOT_SEPARATE),
    "no data phase": (owning([1.0], [2.0], phase="score", engine=INSIDE), stragglers.NOT_SEPARATE),
    "a rank that left nothing": (owning([1.0], [2.0], plan__devices=3), stragglers.UNFINISHED),
    "no time": (owning([0.0], [0.0], step_s=0.0), stragglers.NO_TIME),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_told_has_a_reason(what):
    record, reason = UNKNOWN[what]
    assert stragglers.find_stragglers(record) == UnknownStragglers(reason)
    metric = record.metrics["straggler_share"]
    assert (metric.value, metric.note, slow_notes(record)) == (None, render_text(reason), [])


def scored(walls: Sequence[float], tp: int = 1, tokens: Sequence[int] | None = None) -> Record:
    """Return a scoring record of one rank for each wall time, in seconds, of the infer pass."""
    window = {"pass": "infer", "start_s": 1.0, "allocated_bytes": None, "reserved_bytes": None}
    world = len(walls)
    samples = [
        step(rank, 0, {"compute": 1.0}, 0.0, 1.0, (tokens or [100] * world)[rank])
        | {"pass": "infer"}
        for rank in range(world)
    ]
    return make(
        plan={
            "nodes": 1,
            "devices": world,
            "tp": tp,
            "pp": 1,
            "dp": world // tp,
            "launcher": "local",
        },
        passes=[window | {"rank": rank, "wall_s": wall_s} for rank, wall_s in enumerate(walls)],
        ranks=[
            {"rank": rank, "host": HOSTS[rank], "device": f"cuda:{rank}"} for rank in range(world)
        ],
        samples=samples,
    )


def test_replicas_that_score_are_compared_by_their_pass():
    record = scored([10.0, 12.0, 11.0, 16.0])
    out = found(record)
    assert (out.rank, out.host, out.basis, out.cost_s, out.share) == (3, "fh2", "pass", 5.0, 5 / 16)
    assert [(row.ranks, row.own_s, row.others_s) for row in out.rows] == [
        ((3,), 16.0, 11.0),
        ((1,), 12.0, 11.0),
        ((2,), 11.0, 12.0),
        ((0,), 10.0, 12.0),
    ]
    said = "rank 3 on host fh2 is slow: it costs 31.2 % of the pass"
    assert (
        render_text(stragglers.make_straggler_note(record))
        == f"{said} (own time 16.00 s, the others 11.00 s)"
    )
    assert render_text(stragglers.make_straggler_note(record), wording=1) == golden(
        "own-16-00-against-11-00", said
    )


def test_ranks_of_one_tensor_parallel_group_are_one_replica():
    record = scored([10.0, 10.5, 14.0, 13.0], tp=2, tokens=[100, 100, 110, 110])
    out = found(record)
    assert (out.rank, out.slowest.ranks, out.cost_s, out.share) == (2, (2, 3), 3.5, 0.25)
    assert (out.slowest.device, [row.tokens for row in out.rows], out.more_work) == (
        "cuda:2, cuda:3",
        [110, 100],
        1.1,
    )
    said = "ranks 2 to 3 on host fh2 are slow: they cost 25.0 % of the pass"
    own = "own time 14.00 s, the others 10.50 s, with 1.10 times their tokens"
    assert render_text(stragglers.make_straggler_note(record)) == f"{said} ({own})"
    before = "own 14.00 s against 10.50 s of the others, with 1.10 times their tokens"
    assert render_text(stragglers.make_straggler_note(record), wording=1) == f"{said} ({before})"


def test_one_replica_has_nobody_to_be_compared_with():
    assert stragglers.find_stragglers(scored([10.0, 11.0], tp=2)) == UnknownStragglers(
        stragglers.ONE_REPLICA
    )


def test_a_replica_that_did_not_finish():
    record = scored([10.0, 11.0, 12.0])
    assert stragglers.find_stragglers(
        record.model_copy(update={"passes": record.passes[:2]})
    ) == UnknownStragglers(stragglers.UNFINISHED)


@pytest.mark.parametrize("count", range(2, 8))
def test_medians_of_others_are_those_of_each_list_without_one(count):
    from statistics import median

    values = [float((7 * i) % 5) for i in range(count)]
    expected = [median(values[:i] + values[i + 1 :]) for i in range(count)]
    assert stragglers._medians_of_others(values) == expected
