"""Metrics of training from made samples: every number worked out by hand."""

import pytest

from fixtures.golden import golden
from fixtures.report import GIB, rank_samples, training
from fixtures.training import ONE, TWO, value
from steelyard import tasks
from steelyard.metrics import formulas_1, passes, rates, stats
from steelyard.metrics import metric_table as metrics

STEADY = "steady window: steps 1 to 3 (fewer than 10 steps: the first counts as warm-up)"
SCORING = (
    "p_val_whole",
    "p_infer_core",
    "acc",
    "acc_val",
    "agreement",
    "harness_overhead",
    "loss_val",
    "perplexity",
)
PP2 = {"plan": (1, 2, 1)}


def test_rates_of_one_rank():
    found = training(ONE)
    assert passes.find_headline_pass(found) == "train"
    assert value(found, "p_whole") == value(found, "p_train") == 400 / 5.0
    assert value(found, "p_core") == 300 / (0.75 * 3)
    assert value(found, "tokens_per_device_s") == 300 / 3.0
    assert value(found, "samples_per_s") == 6 / 3.0
    assert [found.metrics[n].note for n in ("p_core", "tokens_per_device_s", "flops_causal")] == [
        STEADY
    ] * 3
    units = [
        found.metrics[name].unit
        for name in ("p_whole", "p_core", "samples_per_s", "energy_per_sample")
    ]
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
    assert value(found, "tokens_per_device_s") == 300 / 9.0  # 3 s of steps, 2 s and 4 s aside
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
    """The other rank waits inside its next step. Steps are matched by their order, not by the
    number of samples before them.
    """
    samples = rank_samples(0, ONE[0], [9.0] * 4, {1: ("checkpoint", 4.0)}) + rank_samples(
        1, (2, 1, 5, 1), [9.0] * 4, {}
    )
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
    found = training(ONE)  # 100 W over a window of 3 s
    assert value(found, "energy") == pytest.approx(300.0)
    assert value(found, "energy_per_token") == pytest.approx(1.0)
    assert value(found, "energy_per_sample") == pytest.approx(50.0)
    assert value(training(TWO), "energy") == pytest.approx(300.0 + 450.0)


def test_memory_is_that_of_the_train_pass():
    found = training(TWO, **PP2)
    assert value(found, "mem") == 40.0
    assert (value(found, "mem_allocated"), value(found, "mem_reserved")) == (3.0, 4.0)
    assert (rates.rank_memory_gib(found, 0), rates.rank_memory_gib(found, 1)) == (40.0, 39.0)


def test_mem_predicted_says_what_it_holds():
    predicted = training(ONE).metrics["mem_predicted"]
    assert predicted.unit == "GiB"
    assert predicted.value is not None
    # One device: 1832 parameters of 18 bytes each; activations of two layers and the logits of a
    # row of 50 tokens.
    state = 18 * (1280 + 40 + 2 * 256)
    layer = 2 * (4 * 8 + 24 + 16 + 8 + 3 * 16) + 4 * (1 + 2 + 1)
    assert predicted.value * GIB == pytest.approx(
        state + 50 * (2 * layer + 2 * 8 * 2 + 32 * (2 + 2))
    )
    for part in ("parameters", "copies", "gradients", "states", "activations", "logits"):
        assert f"{part} " in str(predicted.note)
    assert str(predicted.note).endswith(golden("memory-of-the-framework-itself-is"))
    deep = training(((1.0,),) * 3, plan=(1, 3, 1)).metrics["mem_predicted"]
    assert (deep.value, deep.note) == (None, "the plan has 3 stages for 2 layers")


def test_warm_up_is_found_and_left_out():
    """Thirteen steps are slow, then all are equal."""
    found = training(([3.0] * 13 + [1.0] * 87,), formulas=2)
    assert found.metrics["p_core"].note == golden("steady-window-steps-13-to-99")
    assert value(found, "tokens_per_device_s") == 100.0
    assert found.metrics["tokens_per_device_s"].interval == (100.0, 100.0)
    assert value(found, "p_whole") == 100 * 100 / 126.0
    assert [found.metrics[n].interval for n in ("p_whole", "p_train", "p_core")] == [None] * 3
    assert value(found, "energy") == pytest.approx(8700.0)


def test_older_records_keep_their_window_and_interval():
    """Formulas 1 give the same steps a window of whole groups of five, and an interval by batch
    means.
    """
    found = training(([3.0] * 13 + [1.0] * 87,))
    assert found.metrics["p_core"].note == "steady window: steps 15 to 99 (found by MSER-5)"
    noisy = [1.0 + 0.1 * (step % 7) for step in range(100)]
    old, new = (
        training((noisy,), formulas=number).metrics["tokens_per_device_s"].interval
        for number in (None, 2)
    )
    kept = noisy[formulas_1.find_mser_cut(noisy) :]
    assert len(kept) < 100
    assert old == pytest.approx(
        tuple(100 * end for end in formulas_1.batch_means_interval([1.0] * len(kept), kept))
    )
    assert new == pytest.approx(
        stats.estimate_rate_interval(100 * 100 / sum(noisy), [1.0] * 100, noisy)
    )


@pytest.mark.parametrize(
    ("steps", "first", "formulas"),
    [(1, 0, 2), (2, 0, 2), (3, 1, 2), (9, 1, 2), (10, 1, 2), (10, 0, None)],
)
def test_short_runs(steps, first, formulas):
    found = training(([5.0] + [1.0] * (steps - 1),), formulas=formulas)
    assert value(found, "tokens_per_device_s") == 100 * (steps - first) / (
        steps - first + 4 * (first == 0)
    )


def test_losses():
    losses = [20.0 - step for step in range(20)]
    found = training(([1.0] * 20,), losses=losses)
    assert value(found, "loss") == (2.0 + 1.0) / 2
    assert value(found, "loss_first") == (20.0 + 19.0) / 2
    assert (value(found, "loss_before"), value(found, "loss_after")) == (9.0, 6.0)
    assert value(found, "grad_norm") == 20.0
    assert {
        found.metrics[name].unit for name in ("loss", "loss_first", "loss_before", "loss_after")
    } == {"nats"}
    short = training(ONE)
    assert (value(short, "loss"), value(short, "loss_first")) == (6.0, 9.0)


def test_kinds_have_their_own_metrics():
    found = set(training(ONE).metrics)
    assert found.isdisjoint(SCORING)
    assert {
        "p_whole",
        "p_train",
        "p_core",
        "loss",
        "loss_first",
        "grad_norm",
        "mem_predicted",
        "padded_share",
    } <= found
    for task in tasks.load_tasks().values():
        rows = [metric.name for metric in metrics.list_task_metrics(task)]
        assert len(rows) == len(set(rows))
