"""Tests of engines that lie about their work; a rule of its own detects each."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures import report
from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.liars import install_liar_engine
from steelyard import words
from steelyard.data import counting, prompt_batches
from steelyard.data.counting import TextCounter, make_choice_counter
from steelyard.data.training_rows import TrainingRow
from steelyard.metrics import plausibility
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import MatmulRate, RankFacts

TRAIN = ("run", "llama1-7b-openwebtext", "--size", "smoke", "--accelerator", "cpu", "--steps", "4")


@pytest.fixture
def liars(tmp_path: Path) -> Shell:
    """Return a shell with the third-party engine `liar` installed."""
    return Shell(tmp_path, (install_liar_engine(tmp_path / "package"),))


def run_liar(shell: Shell, lie: str, *command: str) -> dict[str, Any]:
    """Run the engine with this lie, check that the record verifies, and return it as a JSON
    document.
    """
    shell(*command, "--engine", "liar", "--out", shell.out, LIAR=lie)
    (path,) = shell.out.iterdir()
    assert shell("verify", path).code == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def reason_codes(document: dict[str, Any]) -> set[str]:
    """Return the codes of a record's reasons."""
    return {reason["code"] for reason in document["reasons"]}


LIE_TITLES = {
    "replay": "answers the second pass from the first",
    "counts": "multiplies its counts",
    "twice": "names rows twice",
    "prepare": "works in `prepare`",
    "sleeps": "works in `prepare`, and sleeps in the pass",
    "total": "works in `total`",
    "outputs": "works in `outputs`",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("lie", "passes", "code"),
    [
        ("replay", "val,infer", "implausible"),
        ("counts", "val", "tokens"),
        pytest.param("", "val,infer", None, marks=pytest.mark.long),
        pytest.param("prepare", "val", "implausible", marks=pytest.mark.long),
        pytest.param("sleeps", "val", "implausible", marks=pytest.mark.long),
        pytest.param("total", "val", "implausible", marks=pytest.mark.long),
        pytest.param("outputs", "val", "implausible", marks=pytest.mark.long),
        pytest.param("twice", "val", "tokens", marks=pytest.mark.long),
    ],
)
def test_scoring_engine_that_lies_is_invalid(
    liars: Shell, lie: str, passes: str, code: str | None, attacks: Attacks
) -> None:
    document = run_liar(liars, lie, *SMOKE, "--passes", passes)
    assert (document["status"], code in reason_codes(document)) == (
        ("valid", False) if code is None else ("invalid", True)
    ), document["reasons"]
    if code is not None:
        attacks.add(f"engine that scores: {LIE_TITLES[lie]}", 1, "`valid`", f"`{code}`")


@pytest.mark.full
def test_training_on_half_of_each_batch_is_invalid(liars: Shell, attacks: Attacks) -> None:
    document = run_liar(liars, "half", *TRAIN)
    assert document["status"] == "invalid"
    assert reason_codes(document) >= {"tokens"}
    attacks.add("engine that trains: on half of each batch", 1, "`valid`", "`tokens`")
    step_tokens = [
        sample["counts"]["tokens"]
        for sample in document["samples"]
        if sample["pass"] == "train" and sample["counts"]
    ]
    assert [2 * tokens for tokens in step_tokens] == [
        sample["tokens"] for sample in document["drawn"]["train"]
    ]


def make_record(**changes: Any) -> Record:
    """Return a record of a scoring run with these fields changed."""
    return report.make_record().model_copy(update=changes)


def make_window(wall_s: float = 10.0, **changes: Any) -> PassFacts:
    """Return the window of pass infer on rank 0 with these fields changed."""
    fields = {
        "pass_name": "infer",
        "rank": 0,
        "start_s": 5.0,
        "wall_s": wall_s,
        "allocated_bytes": 0,
        "reserved_bytes": 0,
    }
    return PassFacts.model_validate(fields | changes)


def sole_verdict(verdicts: list[Any]) -> tuple[bool, str, str]:
    """Return whether the only check of a list passed, its reason code and its text."""
    (judgement,) = verdicts
    return judgement.check.ok, judgement.code, words.render_text(judgement.check.message)


@pytest.mark.parametrize(
    ("outputs_s", "total_s", "ok"),
    [(0.5, 0.5, True), (1.05, 0.0, True), (1.06, 0.0, False), (0.0, 3.0, False)],
)
def test_time_spent_beside_a_pass_is_hidden_work(
    outputs_s: float, total_s: float, ok: bool
) -> None:
    rank = RankFacts(
        rank=0, budget={"outputs_infer": outputs_s, "total_infer": total_s, "warmup_infer": 99.0}
    )
    assert sole_verdict(
        plausibility.check_time_outside_passes(
            make_record(ranks=[rank], passes=[make_window()]), {}
        )
    )[:2] == (ok, "hidden")


def test_reason_of_hidden_work_names_pass_and_rank() -> None:
    rank = RankFacts(rank=0, budget={"outputs_infer": 3.0, "total_infer": 1.0})
    text = sole_verdict(
        plausibility.check_time_outside_passes(
            make_record(ranks=[rank], passes=[make_window()]), {}
        )
    )[2]
    assert text == golden("infer-rank-0-spent-4-000")


def test_records_without_the_fields_are_not_judged() -> None:
    earlier_record = make_record(
        passes=[make_window()], ranks=[RankFacts(rank=0, budget={"infer": 10.0})]
    )
    assert list(plausibility.check_time_outside_passes(earlier_record, {})) == []
    assert list(plausibility.check_drawn_counts(earlier_record, {})) == []


def claimed_rate(run_record: Record) -> float:
    """Return the rate in FLOP/s that a record claims for pass infer, to four digits."""
    (_, claim), *_ = plausibility._compare_with_limits(run_record, "infer")
    return float(f"{claim['rate']:.4g}")


def test_a_rate_above_the_measured_matmul_is_implausible() -> None:
    run_record = make_record(
        passes=[make_window(40.0)], ranks=[RankFacts(rank=0, matmul_flops_per_s=1e15)]
    )
    rate = claimed_rate(run_record)
    for limit, ok in ((rate / 1.09, True), (rate / 1.11, False)):
        limited = run_record.model_copy(
            update={"ranks": [RankFacts(rank=0, matmul_flops_per_s=limit)]}
        )
        assert sole_verdict(plausibility.check_plausible_rates(limited, {}))[:2] == (
            ok,
            "implausible",
        )


def test_the_fastest_matmul_is_the_limit() -> None:
    """The square matmul is not always the fastest: a shape of the case may be faster, and is then
    what a pass can reach.
    """
    run_record = make_record(
        passes=[make_window(40.0)], ranks=[RankFacts(rank=0, matmul_flops_per_s=1e15)]
    )
    rate = claimed_rate(run_record)
    for shape_rate, ok in ((rate / 1.09, True), (rate / 1.11, False)):
        shape = MatmulRate(name="up", layout="nt", m=1, n=1, k=1, count=1, flops_per_s=shape_rate)
        ranks = [RankFacts(rank=0, matmul_flops_per_s=rate / 1.2, matmuls=[shape])]
        assert sole_verdict(
            plausibility.check_plausible_rates(run_record.model_copy(update={"ranks": ranks}), {})
        )[:2] == (ok, "implausible")


def test_a_rate_above_the_datasheet_is_implausible() -> None:
    run_record = make_record(passes=[make_window(40.0)], ranks=[RankFacts(rank=0)])
    assert sole_verdict(plausibility.check_plausible_rates(run_record, {}))[0]
    inflated_samples = [
        s.model_copy(update={"counts": {k: 10 * n for k, n in s.counts.items()}})
        for s in run_record.samples
    ]
    ok, code, text = sole_verdict(
        plausibility.check_plausible_rates(
            run_record.model_copy(update={"samples": inflated_samples}), {}
        )
    )
    assert (ok, code) == (False, "implausible")
    assert golden("above-the-limit-of-9-894") in text


def test_cpu_rates_are_judged_by_cpu_time() -> None:
    """An engine that sleeps instead of working has wall time but no CPU time; another process costs
    wall time but no CPU time.
    """
    run_record = make_record(passes=[make_window(40.0, cpu_s=40.0)], ranks=[RankFacts(rank=0)])
    hardware = run_record.environment.hardware.model_copy(
        update={"accelerator": "cpu", "peak": None}
    )
    run_record = run_record.model_copy(
        update={"environment": run_record.environment.model_copy(update={"hardware": hardware})}
    )
    assert plausibility.check_plausible_rates(run_record, {}) == []
    ranks = [RankFacts(rank=0, matmul_flops_per_s=1.0, matmul_flops_per_cpu_s=1e15)]
    for cpu_s, ok in ((40.0, True), (0.5, False), (0.0, False)):
        changed_record = run_record.model_copy(
            update={"ranks": ranks, "passes": [make_window(40.0, cpu_s=cpu_s)]}
        )
        assert sole_verdict(plausibility.check_plausible_rates(changed_record, {}))[:2] == (
            ok,
            "implausible",
        )


COUNTS = {
    "tokens": 32768 * 40,
    "samples": 42 * 40,
    "logits": 42 * 40,
    "pairs": 9 * 40,
    "square": 16 * 40,
}


@pytest.mark.parametrize("key", [None, "tokens", "samples", "logits", "pairs", "square"])
def test_sample_counts_must_equal_those_of_the_drawn_rows(key: str | None) -> None:
    drawn_counts = COUNTS if key is None else COUNTS | {key: COUNTS[key] + 1}
    ok, code, text = sole_verdict(
        plausibility.check_drawn_counts(make_record(drawn={"infer": [drawn_counts]}), {})
    )
    assert (ok, code) == (key is None, "tokens")
    if key is not None:
        assert (
            text == f"infer: the samples count {COUNTS[key]:,} {key}; the rows drawn hold"
            f" {COUNTS[key] + 1:,}"
        )


def test_counts_are_checked_for_every_training_step() -> None:
    run_record = report.make_training_record()
    step_counts = plausibility._count_by_step(run_record, "train")
    assert sole_verdict(
        plausibility.check_drawn_counts(
            run_record.model_copy(update={"drawn": {"train": step_counts}}), {}
        )
    )[0]
    shifted_counts = [
        step_counts[0] | {"tokens": step_counts[0]["tokens"] - 1},
        step_counts[1] | {"tokens": step_counts[1]["tokens"] + 1},
        *step_counts[2:],
    ]
    ok, _, text = sole_verdict(
        plausibility.check_drawn_counts(
            run_record.model_copy(update={"drawn": {"train": shifted_counts}}), {}
        )
    )
    assert not ok
    assert text.startswith("train: step 0: the samples count")


@dataclass(frozen=True)
class FakeTexts:
    """Four tokenized rows, of which the first two share a prefix of three tokens; `groups` numbers
    the rows with a common prefix.
    """

    rows: list[list[int]] = field(
        default_factory=lambda: [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8], [9] * 6]
    )
    groups: list[int] = field(default_factory=lambda: [0, 0, 1, 2])


def test_text_counts_equal_the_counts_of_batches() -> None:
    """In both divisions, the counts from the texts equal those that the batches hold."""
    texts = FakeTexts()
    closed = prompt_batches.make_closed_batch(texts.rows, [0, 1, 3])
    assert TextCounter(texts, "closed", lambda length: 1).count(closed.items) == closed.counts
    shared = prompt_batches.measure_prefixes(texts.rows, texts.groups)
    (bins,) = prompt_batches.plan_open_bins(texts.rows, texts.groups, 8, 0)
    for pieces in bins:
        batch = prompt_batches.make_open_batch(texts.rows, pieces, None, shared, 0)
        assert (
            TextCounter(texts, "open", lambda length: 1).count(batch.items, batch.prefixes)
            == batch.counts
        )


def test_attention_window_reduces_counted_pairs() -> None:
    """Rows of 4, 5, 2 and 6 tokens with at most 3 keys have 9, 12, 3 and 15 pairs. A shared prefix
    of 3 tokens has 6 pairs, and the rest 3 and 6.
    """
    texts = FakeTexts()
    whole, window = (
        make_choice_counter(texts, "closed", size).count([0, 1, 2, 3], [], held_out=True)
        for size in (None, 3)
    )
    assert (whole["pairs"], window["pairs"]) == (10 + 15 + 3 + 21, 9 + 12 + 3 + 15)
    assert {**whole, "pairs": 0} == {**window, "pairs": 0}
    shared = make_choice_counter(texts, "open", 3).count([0, 1], [0], held_out=True)
    assert shared["pairs"] == 6 + 3 + 6
    row = TrainingRow(np.arange(9), np.arange(9), (4, 5), 9, 1)
    assert counting.count_row(row, 3)["pairs"] == 9 + 12
