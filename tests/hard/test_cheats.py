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
from fixtures.liars import liar_engine
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
    return Shell(tmp_path, (liar_engine(tmp_path / "package"),))


def run(shell: Shell, lie: str, *command: str) -> dict[str, Any]:
    """Run the engine with this lie, check that the record verifies, and return it as a JSON
    document.
    """
    shell(*command, "--engine", "liar", "--out", shell.out, LIAR=lie)
    (path,) = shell.out.iterdir()
    assert shell("verify", path).code == 0
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def codes(made: dict[str, Any]) -> set[str]:
    """Return the codes of a record's reasons."""
    return {reason["code"] for reason in made["reasons"]}


LIES = {
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
def test_an_engine_that_scores_and_lies(
    liars: Shell, lie: str, passes: str, code: str | None, attacks: Attacks
) -> None:
    made = run(liars, lie, *SMOKE, "--passes", passes)
    assert (made["status"], code in codes(made)) == (
        ("valid", False) if code is None else ("invalid", True)
    ), made["reasons"]
    if code is not None:
        attacks.add(f"engine that scores: {LIES[lie]}", 1, "`valid`", f"`{code}`")


@pytest.mark.full
def test_half_of_each_batch_is_not_the_batch(liars: Shell, attacks: Attacks) -> None:
    made = run(liars, "half", *TRAIN)
    assert made["status"] == "invalid"
    assert codes(made) >= {"tokens"}
    attacks.add("engine that trains: on half of each batch", 1, "`valid`", "`tokens`")
    taken = [
        one["counts"]["tokens"]
        for one in made["samples"]
        if one["pass"] == "train" and one["counts"]
    ]
    assert [2 * tokens for tokens in taken] == [one["tokens"] for one in made["drawn"]["train"]]


def record(**changes: Any) -> Record:
    """Return a record of a scoring run with these fields changed."""
    return report.make().model_copy(update=changes)


def window(wall_s: float = 10.0, **other: Any) -> PassFacts:
    """Return the window of pass infer on rank 0 with these fields changed."""
    told = {
        "pass_name": "infer",
        "rank": 0,
        "start_s": 5.0,
        "wall_s": wall_s,
        "allocated_bytes": 0,
        "reserved_bytes": 0,
    }
    return PassFacts.model_validate(told | other)


def verdict(found: list[Any]) -> tuple[bool, str, str]:
    """Return whether the only check of a list passed, its reason code and its text."""
    (one,) = found
    return one.check.ok, one.code, words.render_text(one.check.message)


@pytest.mark.parametrize(
    ("outputs_s", "total_s", "ok"),
    [(0.5, 0.5, True), (1.05, 0.0, True), (1.06, 0.0, False), (0.0, 3.0, False)],
)
def test_work_beside_a_pass_is_hidden_work(outputs_s: float, total_s: float, ok: bool) -> None:
    rank = RankFacts(
        rank=0, budget={"outputs_infer": outputs_s, "total_infer": total_s, "warmup_infer": 99.0}
    )
    assert verdict(
        plausibility.check_time_outside_passes(record(ranks=[rank], passes=[window()]), {})
    )[:2] == (
        ok,
        "hidden",
    )


def test_the_reason_says_where() -> None:
    rank = RankFacts(rank=0, budget={"outputs_infer": 3.0, "total_infer": 1.0})
    text = verdict(
        plausibility.check_time_outside_passes(record(ranks=[rank], passes=[window()]), {})
    )[2]
    assert text == golden("infer-rank-0-spent-4-000")


def test_older_records_are_not_judged() -> None:
    old = record(passes=[window()], ranks=[RankFacts(rank=0, budget={"infer": 10.0})])
    assert list(plausibility.check_time_outside_passes(old, {})) == []
    assert list(plausibility.check_drawn_counts(old, {})) == []


def flop(made: Record) -> float:
    """Return the rate in FLOP/s that a record claims for pass infer, to four digits."""
    (_, told), *_ = plausibility._compare_with_limits(made, "infer")
    return float(f"{told['rate']:.4g}")


def test_a_rate_above_the_measured_matmul_is_implausible() -> None:
    made = record(passes=[window(40.0)], ranks=[RankFacts(rank=0, matmul_flops_per_s=1e15)])
    rate = flop(made)
    for limit, ok in ((rate / 1.09, True), (rate / 1.11, False)):
        slow = made.model_copy(update={"ranks": [RankFacts(rank=0, matmul_flops_per_s=limit)]})
        assert verdict(plausibility.check_plausible_rates(slow, {}))[:2] == (ok, "implausible")


def test_the_fastest_matmul_is_the_limit() -> None:
    """The square matmul is not always the fastest: a shape of the case may be faster, and is then
    what a pass can reach.
    """
    made = record(passes=[window(40.0)], ranks=[RankFacts(rank=0, matmul_flops_per_s=1e15)])
    rate = flop(made)
    for own, ok in ((rate / 1.09, True), (rate / 1.11, False)):
        shape = MatmulRate(name="up", layout="nt", m=1, n=1, k=1, count=1, flops_per_s=own)
        ranks = [RankFacts(rank=0, matmul_flops_per_s=rate / 1.2, matmuls=[shape])]
        assert verdict(
            plausibility.check_plausible_rates(made.model_copy(update={"ranks": ranks}), {})
        )[:2] == (
            ok,
            "implausible",
        )


def test_a_rate_above_the_datasheet_is_implausible() -> None:
    made = record(passes=[window(40.0)], ranks=[RankFacts(rank=0)])
    assert verdict(plausibility.check_plausible_rates(made, {}))[0]
    fast = [
        s.model_copy(update={"counts": {k: 10 * n for k, n in s.counts.items()}})
        for s in made.samples
    ]
    ok, code, text = verdict(
        plausibility.check_plausible_rates(made.model_copy(update={"samples": fast}), {})
    )
    assert (ok, code) == (False, "implausible")
    assert golden("above-the-limit-of-9-894") in text


def test_on_a_cpu_work_is_set_against_cpu_time() -> None:
    """An engine that sleeps instead of working has wall time but no CPU time; another process costs
    wall time but no CPU time.
    """
    made = record(passes=[window(40.0, cpu_s=40.0)], ranks=[RankFacts(rank=0)])
    hardware = made.environment.hardware.model_copy(update={"accelerator": "cpu", "peak": None})
    made = made.model_copy(
        update={"environment": made.environment.model_copy(update={"hardware": hardware})}
    )
    assert plausibility.check_plausible_rates(made, {}) == []
    ranks = [RankFacts(rank=0, matmul_flops_per_s=1.0, matmul_flops_per_cpu_s=1e15)]
    for cpu_s, ok in ((40.0, True), (0.5, False), (0.0, False)):
        one = made.model_copy(update={"ranks": ranks, "passes": [window(40.0, cpu_s=cpu_s)]})
        assert verdict(plausibility.check_plausible_rates(one, {}))[:2] == (ok, "implausible")


COUNTS = {
    "tokens": 32768 * 40,
    "samples": 42 * 40,
    "logits": 42 * 40,
    "pairs": 9 * 40,
    "square": 16 * 40,
}


@pytest.mark.parametrize("key", [None, "tokens", "samples", "logits", "pairs", "square"])
def test_samples_count_what_the_rows_hold(key: str | None) -> None:
    wanted = COUNTS if key is None else COUNTS | {key: COUNTS[key] + 1}
    ok, code, text = verdict(plausibility.check_drawn_counts(record(drawn={"infer": [wanted]}), {}))
    assert (ok, code) == (key is None, "tokens")
    if key is not None:
        assert (
            text == f"infer: the samples count {COUNTS[key]:,} {key}; the rows drawn hold"
            f" {COUNTS[key] + 1:,}"
        )


def test_every_step_of_training_has_its_global_batch() -> None:
    made = report.training()
    taken = plausibility._count_by_step(made, "train")
    assert verdict(
        plausibility.check_drawn_counts(made.model_copy(update={"drawn": {"train": taken}}), {})
    )[0]
    moved = [
        taken[0] | {"tokens": taken[0]["tokens"] - 1},
        taken[1] | {"tokens": taken[1]["tokens"] + 1},
        *taken[2:],
    ]
    ok, _, text = verdict(
        plausibility.check_drawn_counts(made.model_copy(update={"drawn": {"train": moved}}), {})
    )
    assert not ok
    assert text.startswith("train: step 0: the samples count")


@dataclass(frozen=True)
class Made:
    """Four tokenized rows, of which the first two share a prefix of three tokens; `groups` numbers
    the rows with a common prefix.
    """

    rows: list[list[int]] = field(
        default_factory=lambda: [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8], [9] * 6]
    )
    groups: list[int] = field(default_factory=lambda: [0, 0, 1, 2])


def test_texts_count_as_their_batches_do() -> None:
    """In both divisions, the counts from the texts equal those that the batches hold."""
    made = Made()
    closed = prompt_batches.make_closed_batch(made.rows, [0, 1, 3])
    assert TextCounter(made, "closed", lambda length: 1).count(closed.items) == closed.counts
    shared = prompt_batches.measure_prefixes(made.rows, made.groups)
    (bins,) = prompt_batches.plan_open_bins(made.rows, made.groups, 8, 0)
    for pieces in bins:
        one = prompt_batches.make_open_batch(made.rows, pieces, None, shared, 0)
        assert (
            TextCounter(made, "open", lambda length: 1).count(one.items, one.prefixes) == one.counts
        )


def test_a_window_leaves_fewer_pairs_of_texts_and_rows() -> None:
    """Rows of 4, 5, 2 and 6 tokens with at most 3 keys have 9, 12, 3 and 15 pairs. A shared prefix
    of 3 tokens has 6 pairs, and the rest 3 and 6.
    """
    made = Made()
    whole, window = (
        make_choice_counter(made, "closed", size).count([0, 1, 2, 3], [], held_out=True)
        for size in (None, 3)
    )
    assert (whole["pairs"], window["pairs"]) == (10 + 15 + 3 + 21, 9 + 12 + 3 + 15)
    assert {**whole, "pairs": 0} == {**window, "pairs": 0}
    shared = make_choice_counter(made, "open", 3).count([0, 1], [0], held_out=True)
    assert shared["pairs"] == 6 + 3 + 6
    row = TrainingRow(np.arange(9), np.arange(9), (4, 5), 9, 1)
    assert counting.count_row(row, 3)["pairs"] == 9 + 12
