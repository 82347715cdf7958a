"""Metrics of training from made samples: every number worked out by hand."""

import pytest

from fixtures.golden import golden
from fixtures.report import GIB, make_rank_samples, make_training_record
from fixtures.training import ONE_RANK_TIMES, TWO_RANK_TIMES, get_metric_value
from steelyard import tasks
from steelyard.metrics import formulas_1, passes, rates, stats
from steelyard.metrics import metric_table as metrics

STEADY_NOTE = "steady window: steps 1 to 3 (fewer than 10 steps: the first counts as warm-up)"
SCORING_METRICS = (
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
    record = make_training_record(ONE_RANK_TIMES)
    assert passes.find_headline_pass(record) == "train"
    assert get_metric_value(record, "p_whole") == get_metric_value(record, "p_train") == 400 / 5.0
    assert get_metric_value(record, "p_core") == 300 / (0.75 * 3)
    assert get_metric_value(record, "tokens_per_device_s") == 300 / 3.0
    assert get_metric_value(record, "samples_per_s") == 6 / 3.0
    assert [record.metrics[n].note for n in ("p_core", "tokens_per_device_s", "flops_causal")] == [
        STEADY_NOTE
    ] * 3
    units = [
        record.metrics[name].unit
        for name in ("p_whole", "p_core", "samples_per_s", "energy_per_sample")
    ]
    assert units == ["tokens/s", "tokens/s", "rows/s", "J/row"]
    assert (record.status, record.reasons) == ("valid", [])


def test_in_division_open_rates_count_rows():
    record = make_training_record(ONE_RANK_TIMES, case__division="open")
    assert (get_metric_value(record, "p_whole"), record.metrics["p_whole"].unit) == (
        8 / 5.0,
        "rows/s",
    )
    assert get_metric_value(record, "p_core") == 6 / 2.25


def test_evaluations_and_checkpoints_count_only_in_p_whole_and_the_window():
    record = make_training_record(
        ONE_RANK_TIMES, pauses={1: ("evaluate", 2.0), 2: ("checkpoint", 4.0)}
    )
    assert get_metric_value(record, "p_whole") == 400 / 11.0
    assert get_metric_value(record, "p_train") == 400 / 5.0
    assert get_metric_value(record, "p_core") == 300 / 2.25
    assert (
        get_metric_value(record, "tokens_per_device_s") == 300 / 9.0
    )  # 3 s of steps, 2 s and 4 s aside
    assert record.status == "valid"


def test_a_checkpoint_after_the_last_step_is_outside_the_window():
    record = make_training_record(ONE_RANK_TIMES, pauses={3: ("checkpoint", 5.0)})
    assert get_metric_value(record, "p_whole") == 400 / 10.0
    assert get_metric_value(record, "tokens_per_device_s") == 100.0


def test_two_replicas_add_their_work_and_wait_for_each_other():
    record = make_training_record(TWO_RANK_TIMES)
    assert get_metric_value(record, "p_whole") == 800 / 6.5
    assert get_metric_value(record, "p_core") == 600 / (0.75 * (1.5 + 1.0 + 2.0))
    assert get_metric_value(record, "tokens_per_device_s") == 600 / 4.5 / 2
    assert get_metric_value(record, "samples_per_s") == 12 / 4.5


@pytest.mark.parametrize("plan", [(2, 1, 1), (1, 2, 1)])
def test_ranks_of_one_replica_count_their_work_once(plan):
    record = make_training_record(TWO_RANK_TIMES, plan=plan)
    assert get_metric_value(record, "p_whole") == 400 / 6.5
    assert get_metric_value(record, "p_core") == 300 / (0.75 * 4.5)
    assert get_metric_value(record, "tokens_per_device_s") == 300 / 4.5 / 2
    assert get_metric_value(record, "flops_nominal") == 6 * 1000 * 300


def test_only_one_rank_writes_the_checkpoint():
    """The other rank waits inside its next step. Steps are matched by their order, not by the
    number of samples before them.
    """
    samples = make_rank_samples(
        0, ONE_RANK_TIMES[0], [9.0] * 4, {1: ("checkpoint", 4.0)}
    ) + make_rank_samples(1, (2, 1, 5, 1), [9.0] * 4, {})
    record = make_training_record(((2.0, 1.0, 5.0, 1.0),) * 2, samples=samples)
    assert get_metric_value(record, "p_whole") == 800 / 9.0
    assert get_metric_value(record, "p_train") == 800 / 5.0
    assert get_metric_value(record, "p_core") == 600 / (0.75 * (1 + 5 + 1))


def test_flops_are_three_forwards_of_the_steady_window():
    record = make_training_record(ONE_RANK_TIMES)
    causal = 3 * (2 * 1280 * 300 + 2 * 32 * 8 * 270 + 4 * 2 * 8 * 2525 * 3)
    palm = 300 * 6 * (1280 + 40 + 256) + 12 * 2 * 8 * 5000 * 3
    assert get_metric_value(record, "flops_causal") == causal
    assert get_metric_value(record, "flops_palm") == palm
    assert get_metric_value(record, "flops_nominal") == 6 * 1000 * 300
    assert get_metric_value(record, "mfu") == causal / 3.0 / 4e6
    assert get_metric_value(record, "mfu_core") == causal / 2.25 / 4e6
    assert get_metric_value(record, "mfu_achievable") == causal / 3.0 / 2e6
    assert get_metric_value(record, "mfu_palm") == palm / 3.0 / 4e6
    assert get_metric_value(record, "mfu_nominal") == 1_800_000 / 3.0 / 4e6
    assert get_metric_value(make_training_record(TWO_RANK_TIMES), "mfu") == 2 * causal / 4.5 / (
        2 * 4e6
    )


def test_energy_is_that_of_the_steady_window():
    record = make_training_record(ONE_RANK_TIMES)  # 100 W over a window of 3 s
    assert get_metric_value(record, "energy") == pytest.approx(300.0)
    assert get_metric_value(record, "energy_per_token") == pytest.approx(1.0)
    assert get_metric_value(record, "energy_per_sample") == pytest.approx(50.0)
    assert get_metric_value(make_training_record(TWO_RANK_TIMES), "energy") == pytest.approx(
        300.0 + 450.0
    )


def test_memory_is_that_of_the_train_pass():
    record = make_training_record(TWO_RANK_TIMES, **PP2)
    assert get_metric_value(record, "mem") == 40.0
    assert (
        get_metric_value(record, "mem_allocated"),
        get_metric_value(record, "mem_reserved"),
    ) == (3.0, 4.0)
    assert (rates.rank_memory_gib(record, 0), rates.rank_memory_gib(record, 1)) == (40.0, 39.0)


def test_mem_predicted_lists_its_parts():
    predicted = make_training_record(ONE_RANK_TIMES).metrics["mem_predicted"]
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
    deep = make_training_record(((1.0,),) * 3, plan=(1, 3, 1)).metrics["mem_predicted"]
    assert (deep.value, deep.note) == (None, "the plan has 3 stages for 2 layers")


def test_warm_up_is_found_and_left_out():
    """Thirteen steps are slow, then all are equal."""
    record = make_training_record(([3.0] * 13 + [1.0] * 87,), formulas=2)
    assert record.metrics["p_core"].note == golden("steady-window-steps-13-to-99")
    assert get_metric_value(record, "tokens_per_device_s") == 100.0
    assert record.metrics["tokens_per_device_s"].interval == (100.0, 100.0)
    assert get_metric_value(record, "p_whole") == 100 * 100 / 126.0
    assert [record.metrics[n].interval for n in ("p_whole", "p_train", "p_core")] == [None] * 3
    assert get_metric_value(record, "energy") == pytest.approx(8700.0)


def test_older_records_keep_their_window_and_interval():
    """Formulas 1 give the same steps a window of whole groups of five, and an interval by batch
    means.
    """
    record = make_training_record(([3.0] * 13 + [1.0] * 87,))
    assert record.metrics["p_core"].note == "steady window: steps 15 to 99 (found by MSER-5)"
    noisy = [1.0 + 0.1 * (step % 7) for step in range(100)]
    old, new = (
        make_training_record((noisy,), formulas=number).metrics["tokens_per_device_s"].interval
        for number in (None, 2)
    )
    window = noisy[formulas_1.find_mser_cut(noisy) :]
    assert len(window) < 100
    assert old == pytest.approx(
        tuple(100 * end for end in formulas_1.batch_means_interval([1.0] * len(window), window))
    )
    assert new == pytest.approx(
        stats.estimate_rate_interval(100 * 100 / sum(noisy), [1.0] * 100, noisy)
    )


@pytest.mark.parametrize(
    ("steps", "first", "formulas"),
    [(1, 0, 2), (2, 0, 2), (3, 1, 2), (9, 1, 2), (10, 1, 2), (10, 0, None)],
)
def test_warm_up_of_short_runs(steps, first, formulas):
    record = make_training_record(([5.0] + [1.0] * (steps - 1),), formulas=formulas)
    assert get_metric_value(record, "tokens_per_device_s") == 100 * (steps - first) / (
        steps - first + 4 * (first == 0)
    )


def test_loss_metrics_average_the_first_and_last_tenth_of_steps():
    losses = [20.0 - step for step in range(20)]
    record = make_training_record(([1.0] * 20,), losses=losses)
    assert get_metric_value(record, "loss") == (2.0 + 1.0) / 2
    assert get_metric_value(record, "loss_first") == (20.0 + 19.0) / 2
    assert (get_metric_value(record, "loss_before"), get_metric_value(record, "loss_after")) == (
        9.0,
        6.0,
    )
    assert get_metric_value(record, "grad_norm") == 20.0
    assert {
        record.metrics[name].unit for name in ("loss", "loss_first", "loss_before", "loss_after")
    } == {"nats"}
    short = make_training_record(ONE_RANK_TIMES)
    assert (get_metric_value(short, "loss"), get_metric_value(short, "loss_first")) == (6.0, 9.0)


def test_training_has_metrics_of_its_own():
    names = set(make_training_record(ONE_RANK_TIMES).metrics)
    assert names.isdisjoint(SCORING_METRICS)
    assert {
        "p_whole",
        "p_train",
        "p_core",
        "loss",
        "loss_first",
        "grad_norm",
        "mem_predicted",
        "padded_share",
    } <= names
    for task in tasks.load_tasks().values():
        rows = [metric.name for metric in metrics.list_task_metrics(task)]
        assert len(rows) == len(set(rows))
