"""Comparisons of two sides of made records: every number worked out by hand."""

from math import exp, log, sqrt
from typing import Any

import pytest

from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from fixtures.report import (
    WITHOUT_INTERVAL,
    make_narrow_interval,
    make_record,
    make_training_record,
)
from steelyard.case.precision import load_presets
from steelyard.errors import RequestError
from steelyard.metrics import passes, ratio, record_fields, side_comparison, standing, stats
from steelyard.metrics.engine_groups import AnswerDifferences
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.ratio import Ratio, compare_values
from steelyard.metrics.record_fields import FieldDifference
from steelyard.metrics.side_comparison import Comparison, ComparisonSide, NoRatioReason, ValueChange
from steelyard.record.record import Record
from steelyard.tasks.task import Differences

LONG_TIMES = ((2.0, *[1.0] * 5),)  # enough steps for an interval of the rate
FP16 = load_presets()["score"]["fp16"].model_dump(mode="json")


def make_runs(
    *rates: float | None, engine: str = "torch", letter: str = "a", **changes: Any
) -> list[Record]:
    """Return one scored record for each rate; `letter` begins their ids and `changes` replaces
    fields.
    """
    return [
        make_scoring_record(engine, "ABCDABCD", rate, id=f"{letter}{i:011d}", **changes)
        for i, rate in enumerate(rates)
    ]


def compare_runs(
    base: list[Record], new: list[Record], across: tuple[str, ...] = (), threshold: float = 0.01
) -> Comparison:
    """Compare two lists of records, named old and new."""
    return side_comparison.compare_sides(
        side_comparison.make_side("old", base),
        side_comparison.make_side("new", new),
        across,
        threshold,
    )


def test_the_ratio_is_that_of_the_geometric_means_with_welchs_interval() -> None:
    comparison = compare_runs(make_runs(100.0, 104.0), make_runs(95.0, 97.0, letter="b"))
    logs = [[log(100), log(104)], [log(95), log(97)]]
    means = [sum(x) / 2 for x in logs]
    errors = [((a - b) / 2) ** 2 for a, b in logs]  # variances of the two means
    freedom = sum(errors) ** 2 / sum(x**2 for x in errors)
    assert 1 < freedom < 2
    t = 4.303 + (1 / freedom - 1 / 2) / (1 - 1 / 2) * (12.706 - 4.303)
    log_ratio, half = means[1] - means[0], t * sqrt(sum(errors))
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(exp(log_ratio))
    assert comparison.ratio.interval == pytest.approx(
        (exp(log_ratio - half), exp(log_ratio + half))
    )
    assert (comparison.outcome, comparison.has_regressed) == ("not significant", False)
    assert comparison.unit == "tokens/s"
    assert [rate.estimate.value for rate in comparison.rates if rate is not None] == [102.0, 96.0]


def test_a_significant_loss_beyond_the_threshold_is_a_regression() -> None:
    base, new = make_runs(100.0, 100.1, 99.9), make_runs(95.0, 95.1, 94.9, letter="b")
    assert (compare_runs(base, new).outcome, compare_runs(base, new).has_regressed) == (
        "slower",
        True,
    )
    assert (compare_runs(new, base).outcome, compare_runs(new, base).has_regressed) == (
        "faster",
        False,
    )
    small = compare_runs(base, new, threshold=0.06)
    assert (small.outcome, small.has_regressed) == ("below threshold", False)


def test_one_run_is_not_tested() -> None:
    comparison = compare_runs(make_runs(100.0), make_runs(50.0, 51.0, letter="b"))
    assert comparison.ratio == Ratio(pytest.approx(sqrt(50 * 51) / 100), None, "not tested")
    assert (comparison.outcome, comparison.has_regressed) == ("not tested", False)


def test_runs_that_are_not_valid_are_counted_but_not_averaged() -> None:
    bad = make_runs(1.0, letter="c", status="invalid", reasons=[{"code": "clock", "text": ""}])
    comparison = compare_runs(make_runs(100.0, 102.0), [*make_runs(100.0, 102.0, letter="b"), *bad])
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(1.0)
    assert [record.id for record in comparison.new.not_counted] == ["c00000000000"]
    assert len(comparison.new.counted) == 2
    no_ratio = compare_runs(make_runs(100.0), bad)
    reason = NoRatioReason("no_valid_run", ("new",))
    assert (no_ratio.ratio, no_ratio.outcome, no_ratio.why, no_ratio.has_regressed) == (
        None,
        "no rate",
        reason,
        True,
    )
    no_ratio = compare_runs(bad, make_runs(100.0))
    assert (no_ratio.why, no_ratio.has_regressed) == (NoRatioReason("no_valid_run", ("old",)), True)
    assert compare_runs(make_runs(100.0), make_runs(None, letter="b")).why == NoRatioReason(
        "no_rate", ("new",)
    )


def test_a_side_whose_rate_is_unproven_has_no_ratio() -> None:
    short = make_runs(100.0, 102.0, letter="c", **WITHOUT_INTERVAL)
    base = make_runs(100.0, 102.0)
    comparison = compare_runs(base, short)
    # it is not called slower, as a single run is not
    assert (comparison.ratio, comparison.outcome, comparison.has_regressed) == (
        None,
        "no rate",
        False,
    )
    assert comparison.why == NoRatioReason("unproven", ("new",))
    assert (comparison.new.counted, comparison.new.not_counted) == ((), tuple(short))
    assert comparison.rates[1] is None
    assert [change.new for change in comparison.metrics] == [None] * 4
    assert compare_runs(short[:1], base).why == NoRatioReason("unproven", ("old",))
    # an unproven run says why, even beside one that is invalid
    bad = make_runs(1.0, letter="d", status="invalid", reasons=[{"code": "clock", "text": ""}])
    assert compare_runs(base, [*short[:1], *bad]).why == NoRatioReason("unproven", ("new",))
    # beside one valid run, one that is too short does not count
    assert len(compare_runs(base, [*short[:1], *base[:1]]).new.counted) == 1


def test_three_unproven_repeats_are_compared() -> None:
    base = make_runs(100.0, 102.0)
    short = make_runs(49.75, 50.0, 50.25, letter="c", **WITHOUT_INTERVAL)
    comparison = compare_runs(base, short)
    assert comparison.ratio == compare_values([100.0, 102.0], [49.75, 50.0, 50.25])
    assert (comparison.outcome, comparison.why) == ("slower", None)
    assert (comparison.new.counted, comparison.new.not_counted) == (tuple(short), ())
    assert comparison.rates[1] is not None
    assert comparison.rates[1].source == "runs"
    assert {standing.find_status(record) for record in comparison.new.counted} == {"unproven"}


def test_a_duplicate_record_counts_once() -> None:
    records = make_runs(100.0)
    assert side_comparison.make_side("old", [*records, *records]).records == tuple(records)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine__name": "transformers"}, "engine.name: torch / transformers"),
        ({"tune__pad_to": 32}, "tune.pad_to: 16 / 32"),
        (
            {"scope": {"kind": "window", "steps": 4}},
            "scope.kind: full / window; scope.steps: none / 4",
        ),
        ({"case__question__seed": 7}, "question.seed: 0 / 7"),
    ],
)
def test_a_side_holds_only_repeats(changes: dict[str, Any], said: str) -> None:
    mixed = [*make_runs(100.0), *make_runs(100.0, letter="b", **changes)]
    with pytest.raises(RequestError) as caught:
        side_comparison.make_side("old", mixed)
    assert str(caught.value) == golden("old-these-records-are-not-repeats", said)


def make_other_run(**changes: Any) -> list[Record]:
    """Return one run at 100 tokens/s for the new side; `changes` replaces fields."""
    return make_runs(100.0, letter="b", **changes)


def test_different_questions_are_refused_with_the_fields_named() -> None:
    new = make_other_run(case__question__precision=FP16, case__precision="fp16")
    with pytest.raises(RequestError) as caught:
        compare_runs(make_runs(100.0), new)
    assert "question.precision.matmul: bf16 / fp16" in str(caught.value)
    assert str(caught.value).endswith(golden("name-what-differs-such-as-across"))
    comparison = compare_runs(make_runs(100.0), new, across=("question.precision",))
    assert (
        FieldDifference("question.precision.matmul", ("bf16",), ("fp16",))
        in comparison.question_differences
    )
    assert {field.name.rpartition(".")[0] for field in comparison.question_differences} == {
        "question.precision"
    }


def test_a_named_prefix_allows_only_the_fields_under_it() -> None:
    new = make_other_run(
        case__question__precision=FP16, case__precision="fp16", case__question__seed=3
    )
    with pytest.raises(RequestError) as caught:
        compare_runs(make_runs(100.0), new, across=("question.precision",))
    assert str(caught.value).startswith("the questions differ: question.seed: 0 / 3; ")
    assert (
        compare_runs(make_runs(100.0), new, across=("question.precision", "question.seed")).ratio
        is not None
    )
    assert compare_runs(make_runs(100.0), new, across=("case",)).ratio is not None
    assert compare_runs(make_runs(100.0), new, across=("question",)).ratio is not None


def test_a_prefix_ends_at_a_dot() -> None:
    assert record_fields.is_covered("question.data.shots", ["question.data"])
    assert not record_fields.is_covered("question.data.shots", ["question.dat"])


def test_across_an_unknown_field_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        compare_runs(make_runs(100.0), make_other_run(), across=("question.precison",))
    assert str(caught.value) == (golden("across-question-precison-no-such-field"))


def test_other_data_are_another_question() -> None:
    data = make_record().data.model_dump()
    with pytest.raises(RequestError, match=r"question\.data\.fingerprint: c0de"):
        compare_runs(make_runs(100.0), make_other_run(data=data | {"fingerprint": "beef" * 16}))


def test_a_field_at_the_default_that_older_questions_lack_is_no_difference() -> None:
    question = dict(make_record().case.question)
    assert question.pop("train", None) is None
    assert (
        compare_runs(make_runs(100.0), make_other_run(case__question=question)).question_differences
        == ()
    )


def test_across_divisions_rates_count_samples() -> None:
    metrics = {
        "tokens_per_device_s": {"value": 10.0, "unit": "tokens/s/device", "interval": (9.9, 10.1)},
        "samples_per_s": {"value": 30.0, "unit": "questions/s"},
    }
    base = make_runs(100.0, metrics=metrics)
    new = make_other_run(
        metrics=metrics | {"samples_per_s": {"value": 60.0, "unit": "questions/s"}},
        case__question__division="open",
        case__division="open",
    )
    comparison = compare_runs(base, new, across=("question.division",))
    assert comparison.unit == "questions/s"
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(2.0)
    assert comparison.question_differences == (
        FieldDifference("question.division", ("closed",), ("open",)),
    )


def test_rates_of_different_work_have_no_ratio() -> None:
    trained = make_training_record(id="t" * 12)
    comparison = compare_runs(
        make_runs(100.0, case__question__division="open", case__division="open"),
        [trained],
        across=("case",),
    )
    assert (comparison.ratio, comparison.why) == (
        None,
        NoRatioReason("different_work", ("questions/s", "tokens/s")),
    )
    assert comparison.answers == (None, None)


def test_metric_changes_are_in_table_order() -> None:
    def numbers(rate: float, mem: float, acc: float) -> dict[str, Any]:
        return {
            "acc": {"value": acc, "unit": "fraction"},
            "mem": {"value": mem, "unit": "GiB"},
            "tokens_per_device_s": {
                "value": rate,
                "unit": "tokens/s/device",
                "interval": make_narrow_interval(rate),
            },
            "mfu": {"value": 0.25, "unit": "fraction"},
        }

    comparison = compare_runs(
        make_runs(0.0, metrics=numbers(100.0, 10.0, 0.5)),
        make_other_run(metrics=numbers(50.0, 5.0, 0.25)),
    )
    half = Ratio(pytest.approx(0.5), None, "not tested")
    assert comparison.metrics == (
        ValueChange(
            "tokens_per_device_s", "tokens/s/device", "higher", "number", 100.0, 50.0, half
        ),
        ValueChange("acc", "fraction", "higher", "percent", 0.5, 0.25, half),
        ValueChange("mem", "GiB", "lower", "gib", 10.0, 5.0, half),
    )
    assert [change.outcome for change in comparison.metrics] == ["not tested"] * 3
    assert comparison.equal_metric_count == 1


@pytest.mark.parametrize(
    ("base", "new", "better", "outcome"),
    [
        ([100.0, 100.1, 99.9], [95.0, 95.1, 94.9], "higher", "worse"),
        ([100.0, 100.1, 99.9], [95.0, 95.1, 94.9], "lower", "better"),
        ([100.0, 100.1, 99.9], [95.0, 95.1, 94.9], "", "changed"),
        ([100.0, 104.0], [90.0, 103.0], "higher", "not significant"),
        ([100.0, 104.0], [104.0, 100.0], "higher", "equal"),  # the same mean of other runs
        ([100.0], [50.0], "higher", "not tested"),  # one run has no spread
        ([100.0, 100.0], [50.0, 50.0], "higher", "not tested"),  # as copies of one run
        ([0.0, 0.0], [0.5, 0.5], "higher", "not tested"),  # no ratio to 0
        ([0.0, 0.0], [0.0, 0.0], "higher", "equal"),
        ([100.0], [], "higher", None),
        # the arithmetic mean of the new side is 112, its geometric mean 94
        ([100.0, 100.1], 360 * [80.0] + 40 * [400.0], "higher", "worse"),
    ],
)
def test_a_change_is_better_or_worse_only_if_it_is_significant(
    base: list[float], new: list[float], better: str, outcome: str | None
) -> None:
    means = stats.mean_of_all([*base]), stats.mean_of_all([*new])
    change = ValueChange("mem", "GiB", better, "gib", *means, ratio.compare_values(base, new))
    assert change.outcome == outcome


def test_answers_are_compared_first_run_with_first_run() -> None:
    base = [
        make_scoring_record("torch", "ABCDABCD", id="a" * 12),
        make_scoring_record("torch", "ABCDABCA", id="b" * 12),
    ]
    new = [make_scoring_record("torch", "ABCDABAA", acc=0.25, id="c" * 12)]
    comparison = compare_runs(base, new)
    assert comparison.answers == (
        AnswerDifferences(Differences(8, 1), None, None, 0.0),
        AnswerDifferences(Differences(8, 2), None, None, 0.25),
    )


def test_phases_add_up_to_the_wall_time_of_a_step() -> None:
    """Steps of 1 s: an eighth is phase data, three quarters are compute and an eighth is in no
    phase; one of the three steps in the window is followed by a checkpoint of 3 s.
    """
    record = make_training_record(((2.0, 1.0, 1.0, 1.0),), pauses={1: ("checkpoint", 3.0)})
    assert passes.phases_per_step(record) == pytest.approx(
        {"data": 0.125, "compute": 0.75, "checkpoint": 1.0, "other": 0.125}
    )
    plain = make_training_record(((2.0,) * 6,), id="c" * 12)
    comparison = compare_runs([make_training_record(LONG_TIMES)], [plain])
    assert [
        (phase.name, phase.base, phase.new, phase.better, phase.outcome)
        for phase in comparison.phases
    ] == [
        ("data", 0.125, 0.25, "lower", "not tested"),
        ("compute", 0.75, 1.5, "lower", "not tested"),
        ("other", 0.125, 0.25, "lower", "not tested"),
    ]
    assert comparison.ratio is not None
    assert comparison.ratio.value == pytest.approx(0.5)


def test_steps_of_different_sizes_are_not_better_or_worse() -> None:
    base, new = make_training_record(LONG_TIMES), make_training_record(LONG_TIMES, id="c" * 12)
    half_samples = [
        sample.model_copy(update={"counts": {**sample.counts, "tokens": 50}})
        for sample in new.samples
    ]
    comparison = compare_runs([base], [new.model_copy(update={"samples": half_samples})])
    assert comparison.tokens_per_step == (100.0, 50.0)
    assert {change.better for change in comparison.phases} == {""}
    assert compare_runs([base], [new]).tokens_per_step == (100.0, 100.0)


def test_differences_have_the_values_of_both_sides() -> None:
    software = make_record().environment.software.model_dump()
    new = make_other_run(
        engine__name="transformers",
        environment__software=software
        | {
            "driver": "580.1",
            "packages": {"torch": "2.12.0", "triton": "3.6.0"},
        },
        tune__compile=False,
    )
    assert compare_runs(make_runs(100.0), new).setting_differences == (
        FieldDifference("tune.compile", (True,), (False,)),
        FieldDifference("engine.name", ("torch",), ("transformers",)),
        FieldDifference("environment.software.driver", ("570.86",), ("580.1",)),
        FieldDifference("environment.software.packages.torch", ("2.11.0",), ("2.12.0",)),
    )
    assert compare_runs(make_runs(100.0), make_other_run()).setting_differences == ()


def test_different_formulas_are_a_difference() -> None:
    assert compare_runs(make_runs(100.0), make_other_run(formulas=2)).setting_differences == (
        FieldDifference("formulas", (1,), (2,)),
    )


def test_devices_are_counted_by_kind() -> None:
    devices = [{"name": "B200", "uuid": f"GPU-{i}", "memory_bytes": 1} for i in range(2)]
    differences = compare_runs(
        make_runs(100.0), make_other_run(environment__hardware__devices=devices)
    ).setting_differences
    assert differences == (
        FieldDifference("environment.hardware.devices", (["1x NVIDIA H200"],), (["2x B200"],)),
        FieldDifference("environment.hardware.uuids", (["GPU-0"],), (["GPU-0", "GPU-1"],)),
    )


def test_all_values_of_a_side_are_listed() -> None:
    mixed = [*make_runs(100.0), *make_runs(100.0, letter="c", environment__source__revision="def")]
    assert compare_runs(mixed, make_other_run()).setting_differences == (
        FieldDifference("environment.source.revision", ("abc1234", "def"), ("abc1234",)),
    )


def test_a_threshold_is_a_fraction() -> None:
    for threshold in (-0.1, 1.0, float("nan")):
        with pytest.raises(RequestError, match="--threshold"):
            compare_runs(make_runs(100.0), make_other_run(), threshold=threshold)


def test_long_lists_of_fields_are_cut() -> None:
    long_list = [FieldDifference(f"question.{i}", (i,), (None,)) for i in range(10)]
    assert record_fields.format_differences(long_list).endswith("question.7: 7 / none; and 2 more")


def test_an_empty_side_is_refused() -> None:
    with pytest.raises(RequestError, match="no records"):
        side_comparison.make_side("old", [])
    assert ComparisonSide("x", ()).counted == ()


def test_a_rate_has_the_interval_of_its_runs() -> None:
    comparison = compare_runs(make_runs(100.0, 104.0), make_other_run())
    assert comparison.rates[0] is not None
    assert comparison.rates[0].source == "runs"
    assert comparison.rates[0].estimate == Estimate(
        102.0, pytest.approx((102 - 12.706 * 2, 102 + 12.706 * 2))
    )
