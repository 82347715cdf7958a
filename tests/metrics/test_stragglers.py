"""Slow ranks, from ranks measured under a fake clock and from made samples: every number worked out
by hand.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import COUNTS, make_record, make_training_record
from steelyard.accelerators.events import HostEvent
from steelyard.engine.work import Phase, Work
from steelyard.metrics import metric_table, stragglers, validity
from steelyard.metrics.stragglers import RankTime, Stragglers, UnknownStragglers
from steelyard.record.record import Record, record_to_json
from steelyard.run.measure import measure
from steelyard.words import Message, render_text

EXCHANGE_INSIDE = {"name": "torch", "details": {"exchange": "inside"}}
HOSTS = ("fh1", "fh1", "fh2", "fh2")


class FakeHost:
    """A host without a device: one fake clock, in seconds, serves as host clock and device
    clock.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def event(self) -> HostEvent:
        return HostEvent(self)

    def synchronize(self) -> None:
        """Do nothing: no work runs asynchronously."""


def yield_replica_steps(
    host: FakeHost, backward_s: Sequence[float], slowest_s: Sequence[float]
) -> Iterator[Phase | Work]:
    """Yield the phases and the work of a rank's steps as the training loop marks them, advancing
    the clock.

    A step has 0.25 s of data, the rank's backward, the wait for the slowest rank, 0.125 s of
    transfer and 0.125 s of update.
    """
    for rank_s, slowest_rank_s in zip(backward_s, slowest_s, strict=True):
        yield Phase("data")
        host.now += 0.25
        yield Phase("meet")
        yield Phase("compute")
        host.now += rank_s
        yield Phase("exchange")
        host.now += slowest_rank_s - rank_s + 0.125
        yield Phase("compute")
        host.now += 0.125
        yield Work(COUNTS, {"loss": 1.0})


def make_replica_record(*ranks: Sequence[float], **changes: Any) -> Record:
    """Return a record of replicas whose backward passes take these seconds in each step."""
    slowest = [max(step_times) for step_times in zip(*ranks, strict=True)]
    samples = []
    for rank, backward_s in enumerate(ranks):
        host = FakeHost()
        samples += measure(
            yield_replica_steps(host, backward_s, slowest), host, clock=host
        ).make_samples("train", rank)
    return make_record_of_samples(
        [sample.model_dump(mode="json", by_alias=True) for sample in samples], len(ranks), **changes
    )


def make_step(
    rank: int,
    number: int,
    phases: dict[str, float],
    start_s: float,
    end_s: float,
    tokens: int = 100,
) -> dict[str, Any]:
    """Return one sample of pass train."""
    times = {"start_s": start_s, "end_s": end_s, "host_start_s": start_s, "host_end_s": end_s}
    return {
        "pass": "train",
        "rank": rank,
        "step": number,
        **times,
        "phases": phases,
        "counts": COUNTS | {"tokens": tokens},
    }


def make_record_of_samples(
    samples: list[dict[str, Any]], world: int, hosts: Sequence[str | None] = HOSTS, **changes: Any
) -> Record:
    """Return a training record of `world` ranks with these samples, two ranks a host by default."""
    ends = [
        max(sample["end_s"] for sample in samples if sample["rank"] == rank)
        for rank in range(world)
    ]
    ranks = [
        {"rank": rank, "host": hosts[rank % len(hosts)], "device": f"cuda:{rank % 2}"}
        for rank in range(world)
    ]
    times = [[end] * max(1, len(samples) // world) for end in ends]
    return make_training_record(times, samples=samples, ranks=ranks, **changes)


def make_record_of_own_times(
    *ranks: Sequence[float], phase: str = "compute", step_s: float = 16.0, **changes: Any
) -> Record:
    """Return a record of ranks that spend these seconds in `phase` of each step and the other time
    of `step_s` in another phase.
    """
    samples = []
    for rank, times_s in enumerate(ranks):
        for number, time_s in enumerate(times_s):
            other_phases = (
                {"exchange": step_s - time_s}
                if phase == "compute"
                else {"compute": step_s - time_s}
            )
            samples.append(
                make_step(
                    rank,
                    number,
                    {phase: time_s, **other_phases},
                    number * step_s,
                    (number + 1) * step_s,
                )
            )
    return make_record_of_samples(samples, len(ranks), **changes)


def find_stragglers(record: Record) -> Stragglers:
    """Return the stragglers of the record, after checking that they are known."""
    result = stragglers.find_stragglers(record)
    assert isinstance(result, Stragglers), result
    return result


def list_slow_notes(record: Record) -> list[str]:
    """Return the notes of the record that call a rank slow."""
    return [note for note in record.notes if " slow: " in note]


def test_the_slow_rank_of_four_is_named_with_its_host_and_cost():
    even = (1.0,) * 4
    record = make_replica_record(even, even, even, (1.5,) * 4)
    assert {sample.end_s - sample.start_s for sample in record.samples} == {2.0}  # equal wall times
    result = find_stragglers(record)
    assert (result.rank, result.host, result.basis, result.cost_s, result.step_s, result.share) == (
        3,
        "fh2",
        "compute",
        0.5,
        2.0,
        0.25,
    )
    assert result.rows == (
        RankTime((3,), "fh2", "cuda:1", 1.875, 1.375, 0.0, 0.125, 300),
        RankTime((0,), "fh1", "cuda:0", 1.375, 1.375, 0.0, 0.625, 300),
        RankTime((1,), "fh1", "cuda:1", 1.375, 1.375, 0.0, 0.625, 300),
        RankTime((2,), "fh2", "cuda:0", 1.375, 1.375, 0.0, 0.625, 300),
    )
    assert [row.relative for row in result.rows] == [0.5 / 1.375, 0.0, 0.0, 0.0]
    sentence = (
        "rank 3 on host fh2 is slow: it costs 25.0 % of each step (own 1.88 s against 1.38 s of the"
        " others)"
    )
    assert list_slow_notes(record) == [sentence]
    metric = record.metrics["straggler_share"]
    assert (metric.value, metric.unit) == (0.25, "")
    assert metric.note == golden("rank-3-its-own-time-is")


def test_a_reread_record_has_the_same_notes():
    record = make_replica_record((1.0,) * 4, (1.5,) * 4)
    reread = Record.model_validate(json.loads(json.dumps(record_to_json(record))))
    assert validity.judge_record(reread, metric_table.derive_metrics(reread))[2] == record.notes


def test_exchange_counts_as_compute_time_in_p_core():
    record = make_replica_record((1.0,) * 4, (1.5,) * 4)
    assert record.metrics["p_core"].value == 600 / (3 * 1.75)  # all but the 0.25 s of data
    samples = record_to_json(record)["samples"]
    for sample in samples:
        sample["phases"]["compute"] += sample["phases"].pop("exchange")
    combined = make_training_record(((2.0,) * 4,) * 2, samples=samples)
    assert combined.metrics["p_core"].value == record.metrics["p_core"].value
    assert combined.metrics["mfu_core"].value == record.metrics["mfu_core"].value


def test_cost_is_the_mean_excess_over_the_median_of_the_other_ranks():
    # Medians of the others: 2.5, 2, 1.5 in the first step, 2.5, 3.5, 3 in the second.
    result = find_stragglers(make_record_of_own_times((1.0, 4.0), (2.0, 2.0), (3.0, 3.0)))
    assert [(row.ranks, row.own_s, row.others_s, row.cost_s) for row in result.rows] == [
        ((2,), 3.0, 2.25, 0.75),
        ((0,), 2.5, 2.5, 0.0),
        ((1,), 2.0, 2.75, -0.75),
    ]
    assert (result.share, result.step_s) == (0.75 / 16, 16.0)
    # Costs of 1.5 s and 0 s: 0.75 s from their mean, and Student's t of one degree of freedom.
    assert result.rows[0].spread_s == pytest.approx(12.706 * 0.75)


def test_only_the_steady_window_counts():
    times = [9.0, 1.0, 1.0]
    result = find_stragglers(make_record_of_own_times(times, [1.0, 2.0, 2.0]))
    assert (result.rank, result.cost_s, result.share) == (1, 1.0, 1.0 / 16)


def test_the_step_time_is_that_of_the_slowest_rank():
    samples = [
        make_step(rank, n, {"compute": 2.0, "exchange": 0.0}, 4.0 * n, 4.0 * n + 2 + rank)
        for rank in (0, 1)
        for n in (0, 1)
    ]
    assert find_stragglers(make_record_of_samples(samples, 2)).step_s == 3.0


def test_a_note_in_milliseconds_without_a_host():
    [note] = list_slow_notes(
        make_record_of_own_times([0.12] * 3, [0.1] * 3, step_s=0.122, hosts=(None,))
    )
    assert note == golden("rank-0-is-slow-it-costs")


@pytest.mark.parametrize(("slow_s", "notes"), [(10.25, 0), (10.5, 1)])
def test_a_note_begins_above_two_per_cent(slow_s, notes):
    record = make_record_of_own_times([10.0] * 3, [slow_s] * 3, step_s=12.5)
    assert find_stragglers(record).share == (slow_s - 10.0) / 12.5
    assert len(list_slow_notes(record)) == notes


def test_noisy_steps_name_no_straggler():
    """Rank 1 costs 4 of 16 s on average, which three steps cannot distinguish from noise."""
    record = make_record_of_own_times([4.0] * 4, [0.0, 4.0, 4.0, 16.0])
    result = find_stragglers(record)
    assert (result.rank, result.share, result.is_slow, list_slow_notes(record)) == (
        1,
        0.25,
        False,
        [],
    )
    assert record.metrics["straggler_share"].value == 0.25


def test_one_step_is_judged_by_its_cost():
    result = find_stragglers(make_record_of_own_times([1.0], [3.0]))
    assert (result.rank, result.slowest.spread_s, result.is_slow) == (1, None, True)


def test_ranks_that_are_fast_in_turn_cost_nothing():
    """In every step three ranks are equally slow: no rank is above the median of the others."""
    ranks = [[0.0 if number == rank else 10.0 for number in range(4)] for rank in range(4)]
    record = make_record_of_own_times(
        *[[10.0, *times_s] for times_s in ranks]
    )  # the first step is warm-up
    result = find_stragglers(record)
    assert (result.rank, result.cost_s, result.share, result.is_slow) == (0, -2.5, 0.0, False)


def test_more_tokens_of_the_slow_rank_are_noted():
    samples = [
        make_step(
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
    record = make_record_of_samples(samples, 2)
    assert find_stragglers(record).more_work == 1.5
    sentence = "rank 1 on host fh1 is slow: it costs 50.0 % of each step"
    assert list_slow_notes(record) == [golden("own-2-00-against-1-00", sentence)]


@pytest.mark.parametrize("plan", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_ranks_that_exchange_inside_a_step_are_compared_by_data_time(plan):
    record = make_record_of_own_times(
        [0.5] * 3, [2.5] * 3, phase="data", plan=plan, engine=EXCHANGE_INSIDE
    )
    result = find_stragglers(record)
    assert (result.rank, result.basis, result.cost_s, result.share) == (1, "data", 2.0, 0.125)
    assert [(row.wait_s, row.tokens) for row in result.rows] == [(None, None)] * 2
    sentence = (
        "rank 1 on host fh1 is slow: it costs 12.5 % of each step (waiting for data 2.50 s against"
        " 500 ms of the others)"
    )
    assert list_slow_notes(record) == [sentence]
    assert "phase data alone" in str(record.metrics["straggler_share"].note)


UNKNOWN_REASONS: dict[str, tuple[Record, Message]] = {
    "one rank": (make_training_record(), stragglers.ALONE),
    "an engine that does not say": (
        make_training_record(((2.0, 1.0, 1.0),) * 2),
        stragglers.NOT_SEPARATE,
    ),
    "no data phase": (
        make_record_of_own_times([1.0], [2.0], phase="score", engine=EXCHANGE_INSIDE),
        stragglers.NOT_SEPARATE,
    ),
    "a rank that left nothing": (
        make_record_of_own_times([1.0], [2.0], plan__devices=3),
        stragglers.UNFINISHED,
    ),
    "no time": (make_record_of_own_times([0.0], [0.0], step_s=0.0), stragglers.NO_TIME),
}


@pytest.mark.parametrize("what", UNKNOWN_REASONS)
def test_unknown_stragglers_have_a_reason(what):
    record, reason = UNKNOWN_REASONS[what]
    assert stragglers.find_stragglers(record) == UnknownStragglers(reason)
    metric = record.metrics["straggler_share"]
    assert (metric.value, metric.note, list_slow_notes(record)) == (None, render_text(reason), [])


def make_scoring_record(
    walls: Sequence[float], tp: int = 1, tokens: Sequence[int] | None = None
) -> Record:
    """Return a scoring record of one rank for each wall time, in seconds, of the infer pass."""
    window = {"pass": "infer", "start_s": 1.0, "allocated_bytes": None, "reserved_bytes": None}
    world = len(walls)
    samples = [
        make_step(rank, 0, {"compute": 1.0}, 0.0, 1.0, (tokens or [100] * world)[rank])
        | {"pass": "infer"}
        for rank in range(world)
    ]
    return make_record(
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
    record = make_scoring_record([10.0, 12.0, 11.0, 16.0])
    result = find_stragglers(record)
    assert (result.rank, result.host, result.basis, result.cost_s, result.share) == (
        3,
        "fh2",
        "pass",
        5.0,
        5 / 16,
    )
    assert [(row.ranks, row.own_s, row.others_s) for row in result.rows] == [
        ((3,), 16.0, 11.0),
        ((1,), 12.0, 11.0),
        ((2,), 11.0, 12.0),
        ((0,), 10.0, 12.0),
    ]
    sentence = "rank 3 on host fh2 is slow: it costs 31.2 % of the pass"
    assert (
        render_text(stragglers.make_straggler_note(record))
        == f"{sentence} (own time 16.00 s, the others 11.00 s)"
    )
    assert render_text(stragglers.make_straggler_note(record), wording=1) == golden(
        "own-16-00-against-11-00", sentence
    )


def test_ranks_of_one_tensor_parallel_group_are_one_replica():
    record = make_scoring_record([10.0, 10.5, 14.0, 13.0], tp=2, tokens=[100, 100, 110, 110])
    result = find_stragglers(record)
    assert (result.rank, result.slowest.ranks, result.cost_s, result.share) == (
        2,
        (2, 3),
        3.5,
        0.25,
    )
    assert (result.slowest.device, [row.tokens for row in result.rows], result.more_work) == (
        "cuda:2, cuda:3",
        [110, 100],
        1.1,
    )
    sentence = "ranks 2 to 3 on host fh2 are slow: they cost 25.0 % of the pass"
    details = "own time 14.00 s, the others 10.50 s, with 1.10 times their tokens"
    assert render_text(stragglers.make_straggler_note(record)) == f"{sentence} ({details})"
    older_details = "own 14.00 s against 10.50 s of the others, with 1.10 times their tokens"
    assert (
        render_text(stragglers.make_straggler_note(record), wording=1)
        == f"{sentence} ({older_details})"
    )


def test_one_replica_alone_is_not_compared():
    assert stragglers.find_stragglers(make_scoring_record([10.0, 11.0], tp=2)) == UnknownStragglers(
        stragglers.ONE_REPLICA
    )


def test_a_replica_without_a_pass_is_unfinished():
    record = make_scoring_record([10.0, 11.0, 12.0])
    assert stragglers.find_stragglers(
        record.model_copy(update={"passes": record.passes[:2]})
    ) == UnknownStragglers(stragglers.UNFINISHED)


@pytest.mark.parametrize("count", range(2, 8))
def test_medians_of_others_leave_out_one_value_each(count):
    from statistics import median

    values = [float((7 * i) % 5) for i in range(count)]
    expected = [median(values[:i] + values[i + 1 :]) for i in range(count)]
    assert stragglers._medians_of_others(values) == expected
