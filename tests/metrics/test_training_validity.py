"""Validity of training runs: losses, coverage, the gate, and records that are malformed."""

import copy
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import COUNTS, make_rank_samples, make_train_question, make_training_record
from fixtures.training import ONE_RANK_TIMES, TWO_RANK_TIMES, get_metric_value, list_reason_codes
from steelyard.errors import RequestError
from steelyard.metrics import verify
from steelyard.record.record import Scope, to_canonical_bytes

OTHER_DATA = {"source": "made", "rows": 1, "fingerprint": "f", "published": False}


def make_outputs(**tables: Any) -> dict[str, Any]:
    """Return the outputs of a run with a held-out loss of 9 before and 6 after training; `tables`
    replaces those of passes.
    """
    base = {
        "before": {"nll": 360.0, "targets": 40},
        "after": {"nll": 240.0, "targets": 40},
        "train": {"stopped": None},
    }
    return {"held_out": 4, "passes": base | tables}


def test_a_nonfinite_loss_names_its_step():
    record = make_training_record(
        ONE_RANK_TIMES, losses=[9.0, 8.0, None, 6.0], pauses={0: ("evaluate", 0.5)}
    )
    assert [(r.code, r.text) for r in record.reasons] == [("nan", "step 2: the loss is not finite")]
    assert get_metric_value(record, "loss") == 6.0
    last = make_training_record(ONE_RANK_TIMES, losses=[9.0, 8.0, 7.0, None])
    assert (get_metric_value(last, "loss"), last.metrics["loss"].note) == (
        None,
        "a loss is not finite",
    )


def test_a_norm_may_overflow():
    samples = make_rank_samples(0, ONE_RANK_TIMES[0], [9.0] * 4, {})
    samples[1]["values"]["grad_norm"] = None
    assert make_training_record(ONE_RANK_TIMES, samples=samples).status == "valid"
    samples[3]["values"]["grad_norm"] = None
    assert (
        make_training_record(ONE_RANK_TIMES, samples=samples).metrics["grad_norm"].note
        == "the norm is not finite"
    )


def test_a_stopped_run_has_the_reason_of_its_stop():
    changed_question = make_train_question(steps=6, bound=8.5)
    stopped = {"step": 3, "why": "bound", "value": 12.5}
    record = make_training_record(
        ONE_RANK_TIMES,
        case__question=changed_question,
        outputs=make_outputs(train={"stopped": stopped}),
    )
    assert [(r.code, r.text) for r in record.reasons] == [
        ("loss_bound", golden("step-3-the-loss-12-5")),
        ("coverage", "train: rank 0 took 4 of 6 steps"),
    ]
    stopped_outputs = make_outputs(train={"stopped": {"step": 3, "why": "nan", "value": None}})
    assert [
        (r.code, r.text)
        for r in make_training_record(ONE_RANK_TIMES, outputs=stopped_outputs).reasons
    ] == [("nan", "step 3: the loss is not finite")]
    diverged = make_training_record(
        ONE_RANK_TIMES, losses=[9.0, 8.0, 7.0, None], outputs=stopped_outputs
    )
    assert list_reason_codes(diverged) == ["nan"]


def test_a_nonfinite_held_out_loss_invalidates():
    record = make_training_record(
        ONE_RANK_TIMES, outputs=make_outputs(after={"nll": None, "targets": 40})
    )
    assert [(r.code, r.text) for r in record.reasons] == [
        ("nan", "after: the held-out loss is not finite")
    ]
    assert (record.quality.evaluated, get_metric_value(record, "loss_after")) == (False, None)


def test_every_rank_takes_every_step_in_scope():
    assert list_reason_codes(
        make_training_record(TWO_RANK_TIMES, case__question=make_train_question(steps=5))
    ) == ["coverage"]
    window = make_training_record(
        ONE_RANK_TIMES,
        case__question=make_train_question(steps=100),
        scope={"kind": "window", "steps": 4},
    )
    assert (window.status, window.quality.evaluated) == ("valid", False)
    assert window.scope == Scope(kind="window", steps=4)
    samples = make_rank_samples(0, ONE_RANK_TIMES[0], [9.0] * 4, {}) + make_rank_samples(
        1, (2.0, 1.0, 2.0), [9.0] * 3, {}
    )
    short = make_training_record(((2.0, 1.0, 1.0, 1.0),) * 2, samples=samples)
    assert [(r.code, r.text) for r in short.reasons] == [
        ("coverage", "train: rank 1 took 3 of 4 steps")
    ]
    # the steady window is steps 1 and 2, which both ranks finished
    assert get_metric_value(short, "tokens_per_device_s") == 400 / 3.0 / 2


def test_a_run_without_a_token_is_not_valid():
    samples = make_rank_samples(0, ONE_RANK_TIMES[0], [9.0] * 4, {})
    for sample in samples:
        sample["counts"] = dict.fromkeys(COUNTS, 0)
    record = make_training_record(ONE_RANK_TIMES, samples=samples)
    assert list_reason_codes(record) == ["tokens"]
    assert (get_metric_value(record, "p_whole"), get_metric_value(record, "energy_per_token")) == (
        None,
        None,
    )


def test_unaccounted_time_is_judged_in_the_train_pass():
    window = {"rank": 0, "allocated_bytes": None, "reserved_bytes": None}
    timed = [
        {"pass": "before", "start_s": 1.0, "wall_s": 9.0, **window},
        {"pass": "train", "start_s": 20.0, "wall_s": 5.0, **window},
    ]
    # no samples account for the 9 s of pass `before`, which is not checked
    assert make_training_record(ONE_RANK_TIMES, passes=timed).status == "valid"
    timed[1]["wall_s"] = 6.0
    assert list_reason_codes(make_training_record(ONE_RANK_TIMES, passes=timed)) == ["unaccounted"]


def test_a_wide_interval_invalidates():
    times = [1.6 if step % 2 else 0.4 for step in range(20)]
    assert list_reason_codes(make_training_record((times,))) == ["interval"]
    assert make_training_record(ONE_RANK_TIMES).notes == [golden("too-few-batches-for-an-interval")]


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
    record = make_training_record(ONE_RANK_TIMES, case__gate=gate)
    assert (list_reason_codes(record), record.quality.evaluated) == (codes_, True)


def test_a_loss_that_rises_misses_the_gate():
    record = make_training_record(
        ONE_RANK_TIMES, outputs=make_outputs(after={"nll": 480.0, "targets": 40})
    )
    assert [(r.code, r.text) for r in record.reasons] == [
        ("quality", golden("loss_after-is-12-0000-it-must"))
    ]
    flat = make_training_record(
        ONE_RANK_TIMES,
        losses=[5.0] * 4,
        case__gate={"metric": "loss", "below": "loss_first", "target": None},
    )
    assert list_reason_codes(flat) == ["quality"]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"case__size": "smoke", "data": OTHER_DATA}, None),
        ({"data": OTHER_DATA}, "the data are not the published set"),
        ({"case__question": make_train_question("alpaca")}, "the weights are random"),
        ({"case__question": make_train_question("alpaca"), "case__size": "smoke"}, None),
        (
            {"case__question": make_train_question("alpaca"), "weights": {"source": "huggingface"}},
            None,
        ),
        ({"case__gate": None}, "the case has no gate"),
        (
            {"case__origins": {"question.train.lr": "command line"}},
            "the question was changed on the command line",
        ),
        ({"scope": {"kind": "window", "steps": 4}}, "the scope is a window"),
        (
            {"outputs": {"held_out": 4, "passes": {"after": {"nll": 1.0, "targets": 1}}}},
            "loss_before is unknown",
        ),
    ],
)
def test_when_quality_is_evaluated(changes, note):
    record = make_training_record(ONE_RANK_TIMES, **changes)
    assert (record.quality.note, record.quality.evaluated) == (note, note is None)
    assert record.quality.metric == "loss_after"


def test_a_run_without_samples_still_has_a_record():
    failure = {"rank": None, "exit_code": 1, "error": "x", "stderr_tail": ""}
    empty: dict[str, Any] = {
        "passes": [],
        "samples": [],
        "ranks": [],
        "telemetry": [],
        "outputs": {},
    }
    record = make_training_record(ONE_RANK_TIMES, failure=failure, **empty)
    known_metrics = {name for name, metric in record.metrics.items() if metric.value is not None}
    assert known_metrics == {"e2e_time", "mem_predicted", "mem_total"}
    assert all(metric.note for metric in record.metrics.values() if metric.value is None)
    assert record.metrics["p_whole"].note == golden("the-train-pass-did-not-run")
    assert (record.checks, record.reasons) == ([], [])


MALFORMED: list[tuple[tuple[str, ...], Any]] = [
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


@pytest.mark.parametrize(("place", "odd"), MALFORMED, ids=lambda x: str(x)[:40])
def test_malformed_records_are_refused_in_one_line(place, odd, tmp_path: Path):
    """Records of unknown origin may hold anything; no formula is given such values."""
    table = copy.deepcopy(
        make_training_record(ONE_RANK_TIMES).model_dump(mode="json", by_alias=True)
    )
    node = table
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = odd
    path = tmp_path / "record.json"
    path.write_bytes(to_canonical_bytes(table))
    with pytest.raises(RequestError, match="not a record: ") as caught:
        verify.verify_record(path)
    assert "\n" not in str(caught.value)
