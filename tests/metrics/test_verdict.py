"""Which engine or point of a sweep is the fastest, and whether that was tested."""

from math import exp, log, sqrt
from typing import Any

import pytest

from fixtures.engines import make_scoring_record, make_trained_record
from fixtures.report import WITHOUT_INTERVAL
from steelyard.metrics import verdict
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.verdict import Contender
from steelyard.record.record import Record

ANSWERS = "ABCDABCD"


def make_run(engine: str, rate: float, number: int = 0, **changes: Any) -> Record:
    """Return a scoring record of an engine whose rate has an interval of ± 1."""
    record = make_scoring_record(engine, ANSWERS, rate, id=f"{engine}{number}", **changes)
    stored = record.metrics["tokens_per_device_s"]
    proven = stored.model_copy(update={"interval": (rate - 1, rate + 1)})
    return record.model_copy(update={"metrics": {**record.metrics, "tokens_per_device_s": proven}})


def make_runs(engine: str, *rates: float, **changes: Any) -> list[Record]:
    """Return a record of an engine for each rate."""
    return [make_run(engine, rate, number, **changes) for number, rate in enumerate(rates)]


def test_repeats_are_tested_against_the_second() -> None:
    slow, first, second = (
        make_runs("reference", 10.0, 11.0),
        make_runs("torch", 100.0, 101.0),
        make_runs("transformers", 110.0, 111.1),
    )
    [found] = verdict.judge_engines([*slow, *first, *second])
    assert found.code == "significant"
    assert [one.name for one in found.ranked] == ["transformers", "torch", "reference"]
    # both sides have the same spread of logarithms, so there are 2 degrees of freedom
    half = 4.303 * sqrt(2) * log(1.01) / 2
    assert found.ratio == Ratio(
        pytest.approx(1.1),
        (pytest.approx(1.1 * exp(-half)), pytest.approx(1.1 * exp(half))),
        "significant",
    )
    assert (found.others, found.deviations, found.unit) == ((), (), "tokens/s")


@pytest.mark.parametrize(
    ("torch_rates", "other_rates", "code", "best"),
    [
        ((100.0, 110.0), (101.0, 111.0), "not significant", "transformers"),
        ((100.0,), (90.0,), "not tested", "torch"),
        ((100.0, 110.0), (90.0,), "not tested", "torch"),
        ((100.0, 100.0), (90.0, 90.0), "not tested", "torch"),  # as copies of one run
    ],
)
def test_what_is_not_significant_or_not_tested_says_so(
    torch_rates: tuple[float, ...], other_rates: tuple[float, ...], code: str, best: str
) -> None:
    [found] = verdict.judge_engines(
        [*make_runs("torch", *torch_rates), *make_runs("transformers", *other_rates)]
    )
    assert (found.code, found.ranked[0].name) == (code, best)


def test_engines_are_ranked_by_geometric_means() -> None:
    """The ratio between them is one of geometric means, and so never below 1."""
    [found] = verdict.judge_engines(
        [*make_runs("torch", 10.0, 200.0), *make_runs("transformers", 90.0, 100.0)]
    )
    assert found.ranked[0].name == "transformers"
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(sqrt(9000 / 2000))


def test_only_proven_rates_count() -> None:
    bad = make_runs(
        *("transformers", 500.0, 501.0),
        status="invalid",
        reasons=[{"code": "clock", "text": ""}],
    )
    [one] = verdict.judge_engines([*make_runs("torch", 100.0, 101.0), *bad])
    assert (one.code, one.ratio, [item.name for item in one.ranked]) == ("one", None, ["torch"])
    [left] = one.others
    assert (left.name, left.status, left.reason_codes, left.rates) == (
        *("transformers", "invalid"),
        ("clock",),
        [],
    )
    [none] = verdict.judge_engines([*bad, *(make_runs("torch", 9.0, status="failed"))])
    assert (none.code, none.ranked) == ("none", ())
    # without an interval a run proves nothing; three together do
    short = [
        make_scoring_record("torch", ANSWERS, rate, id=f"s{rate}", **WITHOUT_INTERVAL)
        for rate in (90.5, 91.0, 91.5)
    ]
    [unproven] = verdict.judge_engines([*short[:2], *make_runs("transformers", 100.0, 101.0)])
    assert (unproven.code, unproven.others[0].status) == ("one", "unproven")
    [proven] = verdict.judge_engines([*short, *make_runs("transformers", 100.0, 101.0)])
    assert (proven.code, [len(item.rates) for item in proven.ranked]) == ("significant", [2, 3])


def test_size_smoke_has_no_winner() -> None:
    [found] = verdict.judge_engines(
        [
            *make_runs("torch", 100.0, 101.0, case__size="smoke"),
            *make_runs("transformers", 90.0, 91.0, case__size="smoke"),
        ]
    )
    assert (found.code, found.ratio) == ("smoke", None)


def test_runs_that_differ_in_more_than_the_engine_are_not_judged() -> None:
    other = make_run("transformers", 90.0, weights={"source": "random", "seed": 7})
    [found] = verdict.judge_engines([make_run("torch", 100.0), other])
    assert (found.code, [item.name for item in found.others]) == (
        "different",
        ["torch", "transformers"],
    )
    [alone] = verdict.judge_engines(make_runs("torch", 100.0, 101.0))
    assert alone.code == "alone"
    divisions = [make_run("torch", 100.0), make_run("torch", 90.0, case__division="open")]
    assert [one.code for one in verdict.judge_engines(divisions)] == ["alone", "alone"]


def test_answers_beyond_the_tolerance_are_named() -> None:
    """One of eight answers is 12.5 %, where bf16 allows 5 %."""
    near = make_scoring_record("transformers", ANSWERS, 90.0, id="n")
    far = make_scoring_record("transformers", "ABCDABCA", 90.0, id="f")
    farther = make_scoring_record("transformers", "ABCDABAA", 90.0, id="g")
    [found] = verdict.judge_engines([make_run("torch", 100.0), near, farther, far])
    [deviation] = found.deviations
    assert (deviation.name, deviation.base_name) == ("transformers", "torch")
    check = deviation.check
    assert (check.what, check.apart, check.allowed) == ("infer answers", 0.25, 0.05)
    [equal] = verdict.judge_engines([make_run("torch", 100.0), near])
    assert equal.deviations == ()


def test_training_is_judged_by_its_first_step() -> None:
    """Later steps depend on chance too; bf16 allows 1 % of the loss."""
    losses: list[float | None] = [2.0, 1.9, 1.8, 1.7]
    base = make_trained_record("torch", losses, id="t")

    def judge(other_losses: list[float | None]) -> list[tuple[str, float | None]]:
        other = make_trained_record("transformers", other_losses, id="o")
        [found] = verdict.judge_engines([base, other])
        return [(one.check.what, one.check.apart) for one in found.deviations]

    assert judge([2.01, 1.5, 1.0, 0.5]) == []
    assert judge([2.1, 1.9, 1.8, 1.7]) == [("step 1 loss", pytest.approx(0.05))]


def test_points_of_a_sweep_are_judged_by_question() -> None:
    def point(name: str, question: str, *rates: float, **changes: Any) -> tuple[str, Contender]:
        return question, Contender(name, tuple(make_runs("torch", *rates, **changes)))

    mixed = [
        point("precision=bf16 batch=1", "bf16", 100.0),
        point("precision=bf16 batch=2", "bf16", 120.0),
        point("precision=fp16 batch=1", "fp16", 500.0),
    ]
    [found] = verdict.judge_points(mixed)
    assert [one.name for one in found.ranked] == [
        "precision=bf16 batch=2",
        "precision=bf16 batch=1",
    ]
    assert (found.code, found.ratio and found.ratio.value) == ("not tested", pytest.approx(1.2))
    [different] = verdict.judge_points([mixed[0], mixed[2]])
    assert (different.code, len(different.others)) == ("different", 2)
    assert [one.code for one in verdict.judge_points(mixed[:1])] == ["alone"]
    cases = [*mixed[:2], point("batch=1", "other", 1.0, case__name="other")]
    assert [one.code for one in verdict.judge_points(cases)] == ["not tested", "alone"]
