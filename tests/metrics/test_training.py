"""Metrics and validity of training from hand-made samples: every number worked out by hand."""

import copy
from pathlib import Path
from typing import Any

import pytest

from fixtures.report import COUNTS, GIB, question, rank_samples, training
from steelyard import tasks
from steelyard.errors import RequestError
from steelyard.metrics import formulas_1, rates, spans, stats, verify
from steelyard.metrics import table as metrics
from steelyard.record.record import Record, Scope, canonical_bytes, to_table

OTHER_DATA = {"source": "made", "rows": 1, "fingerprint": "f", "published": False}
STEADY = "steady window: steps 1 to 3 (fewer than 10 steps: the first counts as warm-up)"
SCORING = ("p_val_whole", "p_infer_core", "acc", "acc_val", "agreement", "harness_overhead", "loss_val", "perplexity")
PP2 = {"plan": (1, 2, 1)}

# Each rank has 100 tokens, 2 samples a step; steps of 2, 1, 1 and 1 s; compute is 3/4 of a step.
ONE = ((2.0, 1.0, 1.0, 1.0),)
TWO = ((2.0, 1.0, 1.0, 1.0), (2.0, 1.5, 1.0, 2.0))


def value(found: Record, name: str) -> float | None:
    return found.metrics[name].value


def codes(found: Record) -> list[str]:
    return [reason.code for reason in found.reasons]


def outputs(**tables: Any) -> dict[str, Any]:
    base = {"before": {"nll": 360.0, "targets": 40}, "after": {"nll": 240.0, "targets": 40}, "train": {"stopped": None}}
    return {"held_out": 4, "passes": base | tables}


def test_rates_of_one_rank():
    found = training(ONE)
    assert spans.headline(found) == "train"
    assert value(found, "p_whole") == value(found, "p_train") == 400 / 5.0
    assert value(found, "p_core") == 300 / (0.75 * 3)
    assert value(found, "tokens_per_device_s") == 300 / 3.0
    assert value(found, "samples_per_s") == 6 / 3.0
    assert [found.metrics[n].note for n in ("p_core", "tokens_per_device_s", "flops_causal")] == [STEADY] * 3
    units = [found.metrics[name].unit for name in ("p_whole", "p_core", "samples_per_s", "energy_per_sample")]
    assert units == ["tokens/s", "tokens/s", "rows/s", "J/row"]
    assert (found.status, found.reasons) == ("valid", [])


def test_in_division_open_work_is_samples():
    found = training(ONE, case__division="open")
    assert (value(found, "p_whole"), found.metrics["p_whole"].unit) == (8 / 5.0, "rows/s")
    assert value(found, "p_core") == 6 / 2.25


def test_evaluations_and_checkpoints_are_in_whole_and_in_the_window_only():
    found = training(ONE, aside={1: ("evaluate", 2.0), 2: ("checkpoint", 4.0)})
    assert value(found, "p_whole") == 400 / 11.0
    assert value(found, "p_train") == 400 / 5.0
    assert value(found, "p_core") == 300 / 2.25
    assert value(found, "tokens_per_device_s") == 300 / 9.0  # less nothing
    assert found.status == "valid"


def test_what_comes_after_the_last_step_is_outside_the_window():
    found = training(ONE, aside={3: ("checkpoint", 5.0)})
    assert value(found, "p_whole") == 400 / 10.0
    assert value(found, "tokens_per_device_s") == 100.0


def test_two_replicas_add_their_work_and_wait_for_each_other():
    found = training(TWO)
    assert value(found, "p_whole") == 800 / 6.5
    assert value(found, "p_core") == 600 / (0.75 * (1.5 + 1.0 + 2.0))
    assert value(found, "tokens_per_device_s") == 600 / 4.5 / 2
    assert value(found, "samples_per_s") == 12 / 4.5


@pytest.mark.parametrize("plan", [(2, 1, 1), (1, 2, 1)])
def test_ranks_that_hold_one_model_count_their_work_once(plan):
    found = training(TWO, plan=plan)
    assert value(found, "p_whole") == 400 / 6.5
    assert value(found, "p_core") == 300 / (0.75 * 4.5)
    assert value(found, "tokens_per_device_s") == 300 / 4.5 / 2
    assert value(found, "flops_nominal") == 6 * 1000 * 300


def test_only_one_rank_writes_the_checkpoint():
    """The other waits inside its next step. Steps are matched by their order, not by the number of samples before them."""
    samples = rank_samples(0, ONE[0], [9.0] * 4, {1: ("checkpoint", 4.0)}) + rank_samples(1, (2, 1, 5, 1), [9.0] * 4, {})
    found = training(((2.0, 1.0, 5.0, 1.0),) * 2, samples=samples)
    assert value(found, "p_whole") == 800 / 9.0
    assert value(found, "p_train") == 800 / 5.0
    assert value(found, "p_core") == 600 / (0.75 * (1 + 5 + 1))


def test_flops_are_three_forwards_of_the_steady_window():
    found = training(ONE)
    causal = 3 * (2 * 1280 * 300 + 2 * 32 * 8 * 270 + 4 * 2 * 8 * 2525 * 3)
    palm = 300 * 6 * (1280 + 40 + 256) + 12 * 2 * 8 * 5000 * 3
    assert value(found, "flops_causal") == causal
    assert value(found, "flops_palm") == palm
    assert value(found, "flops_nominal") == 6 * 1000 * 300
    assert value(found, "mfu") == causal / 3.0 / 4e6
    assert value(found, "mfu_core") == causal / 2.25 / 4e6
    assert value(found, "mfu_achievable") == causal / 3.0 / 2e6
    assert value(found, "mfu_palm") == palm / 3.0 / 4e6
    assert value(found, "mfu_nominal") == 1_800_000 / 3.0 / 4e6
    assert value(training(TWO), "mfu") == 2 * causal / 4.5 / (2 * 4e6)


def test_energy_is_that_of_the_steady_window():
    found = training(ONE)  # 100 W
    assert value(found, "energy") == pytest.approx(300.0)
    assert value(found, "energy_per_token") == pytest.approx(1.0)
    assert value(found, "energy_per_sample") == pytest.approx(50.0)
    assert value(training(TWO), "energy") == pytest.approx(300.0 + 450.0)


def test_memory_is_that_of_the_train_pass():
    found = training(TWO, **PP2)
    assert value(found, "mem") == 40.0
    assert (value(found, "mem_allocated"), value(found, "mem_reserved")) == (3.0, 4.0)
    assert (rates.rank_mem(found, 0), rates.rank_mem(found, 1)) == (40.0, 39.0)


def test_mem_predicted_says_what_it_holds():
    predicted = training(ONE).metrics["mem_predicted"]
    assert predicted.unit == "GiB"
    assert predicted.value is not None
    # One device: 1832 parameters of 18 bytes; two layers and the logits of a row of 50 tokens.
    state = 18 * (1280 + 40 + 2 * 256)
    layer = 2 * (4 * 8 + 24 + 16 + 8 + 3 * 16) + 4 * (1 + 2 + 1)
    assert predicted.value * GIB == pytest.approx(state + 50 * (2 * layer + 2 * 8 * 2 + 32 * (2 + 2)))
    for part in ("parameters", "copies", "gradients", "states", "activations", "logits"):
        assert f"{part} " in str(predicted.note)
    assert str(predicted.note).endswith("memory of the framework itself is unknown and not included")
    deep = training(((1.0,),) * 3, plan=(1, 3, 1)).metrics["mem_predicted"]
    assert (deep.value, deep.note) == (None, "the plan has 3 stages for 2 layers")


def test_warm_up_is_found_and_left_out():
    """Thirteen steps are slow, then all are equal."""
    found = training(([3.0] * 13 + [1.0] * 87,), formulas=2)
    assert found.metrics["p_core"].note == "steady window: steps 13 to 99 (found from the step times)"
    assert value(found, "tokens_per_device_s") == 100.0
    assert found.metrics["tokens_per_device_s"].interval == (100.0, 100.0)
    assert value(found, "p_whole") == 100 * 100 / 126.0
    assert [found.metrics[n].interval for n in ("p_whole", "p_train", "p_core")] == [None] * 3
    assert value(found, "energy") == pytest.approx(8700.0)


def test_older_records_keep_their_window_and_interval():
    """The same steps by version 1 of the formulas: a window of whole groups of five, and batch means."""
    found = training(([3.0] * 13 + [1.0] * 87,))
    assert found.metrics["p_core"].note == "steady window: steps 15 to 99 (found by MSER-5)"
    noisy = [1.0 + 0.1 * (step % 7) for step in range(100)]
    old, new = (training((noisy,), formulas=number).metrics["tokens_per_device_s"].interval for number in (None, 2))
    kept = noisy[formulas_1.steady_start(noisy) :]
    assert len(kept) < 100
    assert old == pytest.approx(tuple(100 * end for end in formulas_1.rate_interval([1.0] * len(kept), kept)))
    assert new == pytest.approx(stats.rate_interval(100 * 100 / sum(noisy), [1.0] * 100, noisy))


@pytest.mark.parametrize(
    ("steps", "first", "formulas"), [(1, 0, 2), (2, 0, 2), (3, 1, 2), (9, 1, 2), (10, 1, 2), (10, 0, None)]
)
def test_short_runs(steps, first, formulas):
    found = training(([5.0] + [1.0] * (steps - 1),), formulas=formulas)
    assert value(found, "tokens_per_device_s") == 100 * (steps - first) / (steps - first + 4 * (first == 0))


def test_losses():
    losses = [20.0 - step for step in range(20)]
    found = training(([1.0] * 20,), losses=losses)
    assert value(found, "loss") == (2.0 + 1.0) / 2
    assert value(found, "loss_first") == (20.0 + 19.0) / 2
    assert (value(found, "loss_before"), value(found, "loss_after")) == (9.0, 6.0)
    assert value(found, "grad_norm") == 20.0
    assert {found.metrics[name].unit for name in ("loss", "loss_first", "loss_before", "loss_after")} == {"nats"}
    short = training(ONE)
    assert (value(short, "loss"), value(short, "loss_first")) == (6.0, 9.0)


def test_kinds_have_their_own_metrics():
    found = set(training(ONE).metrics)
    assert found.isdisjoint(SCORING)
    assert {"p_whole", "p_train", "p_core", "loss", "loss_first", "grad_norm", "mem_predicted", "padded_share"} <= found
    for task in tasks.table().values():
        rows = [metric.name for metric in metrics.of_task(task)]
        assert len(rows) == len(set(rows))


def test_a_null_loss_is_named_by_its_step():
    found = training(ONE, losses=[9.0, 8.0, None, 6.0], aside={0: ("evaluate", 0.5)})
    assert [(r.code, r.text) for r in found.reasons] == [("nan", "step 2: the loss is not finite")]
    assert value(found, "loss") == 6.0
    last = training(ONE, losses=[9.0, 8.0, 7.0, None])
    assert (value(last, "loss"), last.metrics["loss"].note) == (None, "a loss is not finite")


def test_a_norm_may_overflow():
    samples = rank_samples(0, ONE[0], [9.0] * 4, {})
    samples[1]["values"]["grad_norm"] = None
    assert training(ONE, samples=samples).status == "valid"
    samples[3]["values"]["grad_norm"] = None
    assert training(ONE, samples=samples).metrics["grad_norm"].note == "the norm is not finite"


def test_a_run_that_was_stopped_says_why():
    asked = question(steps=6, bound=8.5)
    stopped = {"step": 3, "why": "bound", "value": 12.5}
    found = training(ONE, case__question=asked, outputs=outputs(train={"stopped": stopped}))
    assert [(r.code, r.text) for r in found.reasons] == [
        ("loss_bound", "step 3: the loss 12.5 exceeds the bound 8.5; the run was stopped"),
        ("coverage", "train: rank 0 took 4 of 6 steps"),
    ]
    late = outputs(train={"stopped": {"step": 3, "why": "nan", "value": None}})
    assert [(r.code, r.text) for r in training(ONE, outputs=late).reasons] == [("nan", "step 3: the loss is not finite")]
    both = training(ONE, losses=[9.0, 8.0, 7.0, None], outputs=late)
    assert codes(both) == ["nan"]


def test_a_held_out_loss_that_is_not_finite():
    found = training(ONE, outputs=outputs(after={"nll": None, "targets": 40}))
    assert [(r.code, r.text) for r in found.reasons] == [("nan", "after: the held-out loss is not finite")]
    assert (found.quality.evaluated, value(found, "loss_after")) == (False, None)


def test_every_rank_takes_every_step_in_scope():
    assert codes(training(TWO, case__question=question(steps=5))) == ["coverage"]
    window = training(ONE, case__question=question(steps=100), scope={"kind": "window", "steps": 4})
    assert (window.status, window.quality.evaluated) == ("valid", False)
    assert window.scope == Scope(kind="window", steps=4)
    samples = rank_samples(0, ONE[0], [9.0] * 4, {}) + rank_samples(1, (2.0, 1.0, 2.0), [9.0] * 3, {})
    short = training(((2.0, 1.0, 1.0, 1.0),) * 2, samples=samples)
    assert [(r.code, r.text) for r in short.reasons] == [("coverage", "train: rank 1 took 3 of 4 steps")]
    assert value(short, "tokens_per_device_s") == 400 / 3.0 / 2  # steps 1 and 2, which both finished


def test_a_run_without_a_token_is_not_valid():
    samples = rank_samples(0, ONE[0], [9.0] * 4, {})
    for sample in samples:
        sample["counts"] = dict.fromkeys(COUNTS, 0)
    found = training(ONE, samples=samples)
    assert codes(found) == ["tokens"]
    assert (value(found, "p_whole"), value(found, "energy_per_token")) == (None, None)


def test_time_and_device_are_judged_in_the_train_pass():
    window = {"rank": 0, "allocated_bytes": None, "reserved_bytes": None}
    timed = [
        {"pass": "before", "start_s": 1.0, "wall_s": 9.0, **window},
        {"pass": "train", "start_s": 20.0, "wall_s": 5.0, **window},
    ]
    assert training(ONE, passes=timed).status == "valid"  # nothing accounts for the time of `before`, and nothing asks
    timed[1]["wall_s"] = 6.0
    assert codes(training(ONE, passes=timed)) == ["unaccounted"]


def test_a_wide_interval_invalidates():
    times = [1.6 if step % 2 else 0.4 for step in range(20)]
    assert codes(training((times,))) == ["interval"]
    assert training(ONE).notes == ["too few batches for an interval of the rate"]


@pytest.mark.parametrize(
    ("gate", "codes_"),
    [
        ({"metric": "loss_after", "below": "loss_before", "target": None}, []),
        ({"metric": "loss_after", "below": "loss_before", "target": 6.5}, []),
        ({"metric": "loss_after", "below": "loss_before", "target": 6.0}, ["quality"]),
        ({"metric": "loss", "below": "loss_first", "target": None}, []),
    ],
)
def test_the_gate_asks_for_a_loss_that_falls(gate, codes_):
    found = training(ONE, case__gate=gate)
    assert (codes(found), found.quality.evaluated) == (codes_, True)


def test_a_loss_that_rises_misses_the_gate():
    found = training(ONE, outputs=outputs(after={"nll": 480.0, "targets": 40}))
    assert [(r.code, r.text) for r in found.reasons] == [
        ("quality", "loss_after is 12.0000; it must be below loss_before 9.0000")
    ]
    flat = training(ONE, losses=[5.0] * 4, case__gate={"metric": "loss", "below": "loss_first", "target": None})
    assert codes(flat) == ["quality"]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"case__size": "smoke", "data": OTHER_DATA}, None),
        ({"data": OTHER_DATA}, "the data are not the published set"),
        ({"case__question": question("alpaca")}, "the weights are random"),
        ({"case__question": question("alpaca"), "case__size": "smoke"}, None),
        ({"case__question": question("alpaca"), "weights": {"source": "huggingface"}}, None),
        ({"case__gate": None}, "the case has no gate"),
        ({"case__origins": {"question.train.lr": "command line"}}, "the question was changed on the command line"),
        ({"scope": {"kind": "window", "steps": 4}}, "the scope is a window"),
        ({"outputs": {"held_out": 4, "passes": {"after": {"nll": 1.0, "targets": 1}}}}, "loss_before is unknown"),
    ],
)
def test_when_quality_is_evaluated(changes, note):
    found = training(ONE, **changes)
    assert (found.quality.note, found.quality.evaluated) == (note, note is None)
    assert found.quality.metric == "loss_after"


def test_a_run_that_left_nothing_still_has_a_record():
    failure = {"rank": None, "exit_code": 1, "error": "x", "stderr_tail": ""}
    empty: dict[str, Any] = {"passes": [], "samples": [], "ranks": [], "telemetry": [], "outputs": {}}
    found = training(ONE, failure=failure, **empty)
    known = {name for name, one in found.metrics.items() if one.value is not None}
    assert known == {"e2e_time", "mem_predicted", "mem_total"}
    assert all(one.note for one in found.metrics.values() if one.value is None)
    assert found.metrics["p_whole"].note == "the train pass did not run or did not finish"
    assert (found.checks, found.reasons) == ([], [])


ODD: list[tuple[tuple[str, ...], Any]] = [
    (("outputs", "passes", "train", "stopped"), "soon"),
    (("outputs", "passes", "train"), []),
    (("outputs", "passes", "before"), {"nll": "much"}),
    (("outputs", "passes"), 3),
    (("case", "question", "train"), None),
    (("case", "question", "train", "steps"), "many"),
    (("case", "question", "model", "layers"), 0),
    (("case", "question", "kind"), ["train"]),
    (("case", "gate"), {"metric": [], "below": {}}),
    (("case", "gate"), {"below": "loss_before"}),
    (("tune", "micro_batch"), 0),
    (("tune",), {"unknown": 1}),
    (("plan", "tp"), 0),
    (("plan", "pp"), 10**12),
    (("ranks",), [{"rank": [], "device": {}}]),
    (("telemetry",), [{"device": "cuda:0"}]),
]


@pytest.mark.parametrize(("place", "odd"), ODD, ids=lambda x: str(x)[:40])
def test_odd_tables_are_refused_in_one_line(place, odd, tmp_path: Path):
    """What a stranger's record may hold: no formula sees it."""
    table = copy.deepcopy(training(ONE).model_dump(mode="json", by_alias=True))
    node = table
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = odd
    path = tmp_path / "record.json"
    path.write_bytes(canonical_bytes(table))
    with pytest.raises(RequestError, match="not a record: ") as caught:
        verify.verify(path)
    assert "\n" not in str(caught.value)


def reported(told: list[float], seen: list[float], **changes: Any) -> Record:
    """One rank, whose program told these times of its steps, and whose lines came in those."""
    rows = rank_samples(0, told, [9.0 - step for step in range(len(told))], {})
    at = 0.0
    for row, time_s in zip(rows, seen, strict=True):
        row |= {"host_start_s": at, "host_end_s": at + time_s, "phases": {}}
        at += time_s
    window = {"pass": "train", "start_s": 20.0, "rank": 0, "wall_s": at, "allocated_bytes": None, "reserved_bytes": None}
    return training([told], samples=rows, passes=[window], clock="reported", **changes)


SEEN = [2.0, *[1.0] * 40]


def test_times_that_a_program_reports_are_what_rates_are_taken_from():
    found = reported([2.0, *[0.99] * 40], SEEN)
    assert (found.status, codes(found)) == ("valid", [])
    assert value(found, "tokens_per_device_s") == pytest.approx(100 / 0.99)
    assert value(found, "p_whole") == 4100 / 42.0  # our own clock
    note = "the engine does not separate compute time"
    assert [(value(found, name), found.metrics[name].note) for name in ("p_core", "mfu_core")] == [(None, note)] * 2
    assert "times of steps are the program's own; what they count is that of the configuration" in found.notes


@pytest.mark.parametrize(
    ("told", "ok"),
    [
        ([2.0, *[0.98] * 40], True),  # 0.8 s of 40: 2 %
        ([2.0, *[0.975] * 40], False),  # 1 s, where 0.8 + 0.1 + 40 × 0.00005 is allowed
        ([2.0, *[1.025] * 40], False),
        ([9.0, *[1.0] * 40], True),  # nobody saw the first line's beginning
        ([2.0, *[1.5] * 20, *[0.5] * 20], False),  # right in all, and not where it is steady
    ],
)
def test_times_that_a_program_reports_are_compared_with_ours(told: list[float], ok: bool):
    found = reported(told, SEEN, case__max_interval=None)
    assert codes(found) == ([] if ok else ["reported"]), found.reasons


def test_what_is_compared_is_said():
    found = reported([2.0, *[0.5] * 40], SEEN)
    said = (
        "all steps: the program reports 20.000 s for 40 steps, but its output lines are 40.000 s apart; they may differ by 2%"
    )
    assert [reason.text for reason in found.reasons] == [said]


def test_a_device_that_nobody_used_shows_that_nothing_was_done():
    def device(processes: int | None) -> dict[str, Any]:
        t_s = [float(t) for t in range(70)]
        columns = {"t_s": t_s, "memory_bytes": [GIB] * 70, "processes": [processes] * 70}
        return {"device": "cuda:0", "period_s": 1.0, "baseline_processes": 0, "columns": columns}

    assert codes(reported(SEEN, SEEN, telemetry=[device(None)])) == codes(reported(SEEN, SEEN, telemetry=[device(1)])) == []
    assert codes(reported(SEEN, SEEN, telemetry=[device(0)])) == ["reported"]


def test_energy_of_a_program_is_that_of_all_its_devices():
    ranks = [{"rank": rank, "device": f"cuda:{rank}", "matmul_flops_per_s": None} for rank in (0, 1)]
    devices = training(TWO).telemetry
    told = {"ranks": ranks, "telemetry": [one.model_dump() for one in devices]}
    found = reported(SEEN, SEEN, plan=(2, 1, 1), plan__devices=2, **told)
    one, both = value(reported(SEEN, SEEN), "energy"), value(found, "energy")
    assert one is not None
    assert both == pytest.approx(2 * one)


def test_records_without_a_clock_stay_as_they_were():
    found = training(ONE)
    assert found.clock is None
    assert "clock" not in to_table(found)
    assert to_table(reported(SEEN, SEEN))["clock"] == "reported"
