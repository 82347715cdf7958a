"""Comparisons of two sides of made records: every number worked out by hand."""

from math import exp, log, sqrt
from typing import Any

import pytest

from fixtures.engines import scored
from fixtures.golden import golden
from fixtures.report import make, training
from steelyard.case.precision import load_presets
from steelyard.errors import RequestError
from steelyard.metrics import passes, record_fields, side_comparison
from steelyard.metrics.engine_groups import AnswerDifferences
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.record_fields import FieldDifference
from steelyard.metrics.side_comparison import Comparison, ComparisonSide, NoRatioReason, ValueChange
from steelyard.record.record import Record
from steelyard.tasks.task import Differences

FP16 = load_presets()["score"]["fp16"].model_dump(mode="json")


def runs(
    *rates: float | None, engine: str = "torch", letter: str = "a", **changes: Any
) -> list[Record]:
    """Return one scored record for each rate; `letter` begins their ids and `changes` replaces
    fields.
    """
    return [
        scored(engine, "ABCDABCD", rate, id=f"{letter}{i:011d}", **changes)
        for i, rate in enumerate(rates)
    ]


def between(
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
    found = between(runs(100.0, 104.0), runs(95.0, 97.0, letter="b"))
    logs = [[log(100), log(104)], [log(95), log(97)]]
    means = [sum(one) / 2 for one in logs]
    errors = [((a - b) / 2) ** 2 for a, b in logs]  # variances of the two means
    freedom = sum(errors) ** 2 / sum(one**2 for one in errors)
    assert 1 < freedom < 2
    t = 4.303 + (1 / freedom - 1 / 2) / (1 - 1 / 2) * (12.706 - 4.303)
    apart, half = means[1] - means[0], t * sqrt(sum(errors))
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(exp(apart))
    assert found.ratio.interval == pytest.approx((exp(apart - half), exp(apart + half)))
    assert (found.ratio.source, found.outcome, found.has_regressed) == (
        "runs",
        "not significant",
        False,
    )
    assert found.unit == "tokens/s"
    assert [rate.estimate.value for rate in found.rates if rate is not None] == [102.0, 96.0]


def test_a_sure_loss_beyond_the_threshold_is_a_regression() -> None:
    base, new = runs(100.0, 100.1, 99.9), runs(95.0, 95.1, 94.9, letter="b")
    assert (between(base, new).outcome, between(base, new).has_regressed) == ("slower", True)
    assert (between(new, base).outcome, between(new, base).has_regressed) == ("faster", False)
    small = between(base, new, threshold=0.06)
    assert (small.outcome, small.has_regressed) == ("below threshold", False)


def test_one_run_is_not_tested() -> None:
    found = between(runs(100.0), runs(50.0, 51.0, letter="b"))
    assert found.ratio == Ratio(pytest.approx(sqrt(50 * 51) / 100), None, None, "not tested")
    assert (found.outcome, found.has_regressed) == ("not tested", False)


def test_runs_that_are_not_valid_are_counted_and_in_no_mean() -> None:
    bad = runs(1.0, letter="c", status="invalid", reasons=[{"code": "clock", "text": ""}])
    found = between(runs(100.0, 102.0), [*runs(100.0, 102.0, letter="b"), *bad])
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(1.0)
    assert [record.id for record in found.new.not_valid] == ["c00000000000"]
    assert len(found.new.valid) == 2
    none = between(runs(100.0), bad)
    why = NoRatioReason("no_valid_run", ("new",))
    assert (none.ratio, none.outcome, none.why, none.has_regressed) == (None, "no rate", why, True)
    none = between(bad, runs(100.0))
    assert (none.why, none.has_regressed) == (NoRatioReason("no_valid_run", ("old",)), True)
    assert between(runs(100.0), runs(None, letter="b")).why == NoRatioReason("no_rate", ("new",))


def test_a_record_that_is_there_twice_counts_once() -> None:
    one = runs(100.0)
    assert side_comparison.make_side("old", [*one, *one]).records == tuple(one)


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
def test_a_side_is_one_thing(changes: dict[str, Any], said: str) -> None:
    mixed = [*runs(100.0), *runs(100.0, letter="b", **changes)]
    with pytest.raises(RequestError) as caught:
        side_comparison.make_side("old", mixed)
    assert str(caught.value) == golden("old-these-records-are-not-repeats", said)


def other(**changes: Any) -> list[Record]:
    """Return one run at 100 tokens/s for the new side; `changes` replaces fields."""
    return runs(100.0, letter="b", **changes)


def test_different_questions_are_refused_with_the_fields_named() -> None:
    new = other(case__question__precision=FP16, case__precision="fp16")
    with pytest.raises(RequestError) as caught:
        between(runs(100.0), new)
    assert "question.precision.matmul: bf16 / fp16" in str(caught.value)
    assert str(caught.value).endswith(golden("name-what-differs-such-as-across"))
    found = between(runs(100.0), new, across=("question.precision",))
    assert (
        FieldDifference("question.precision.matmul", ("bf16",), ("fp16",))
        in found.question_differences
    )
    assert {one.name.rpartition(".")[0] for one in found.question_differences} == {
        "question.precision"
    }


def test_a_named_prefix_allows_what_is_under_it_and_no_more() -> None:
    new = other(case__question__precision=FP16, case__precision="fp16", case__question__seed=3)
    with pytest.raises(RequestError) as caught:
        between(runs(100.0), new, across=("question.precision",))
    assert str(caught.value).startswith("the questions differ: question.seed: 0 / 3; ")
    assert (
        between(runs(100.0), new, across=("question.precision", "question.seed")).ratio is not None
    )
    assert between(runs(100.0), new, across=("case",)).ratio is not None
    assert between(runs(100.0), new, across=("question",)).ratio is not None


def test_a_prefix_ends_at_a_dot() -> None:
    assert record_fields.is_covered("question.data.shots", ["question.data"])
    assert not record_fields.is_covered("question.data.shots", ["question.dat"])


def test_across_what_no_question_has_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        between(runs(100.0), other(), across=("question.precison",))
    assert str(caught.value) == (golden("across-question-precison-no-such-field"))


def test_other_data_are_another_question() -> None:
    data = make().data.model_dump()
    with pytest.raises(RequestError, match=r"question\.data\.fingerprint: c0de"):
        between(runs(100.0), other(data=data | {"fingerprint": "beef" * 16}))


def test_a_field_at_the_default_that_older_questions_lack_is_no_difference() -> None:
    question = dict(make().case.question)
    assert question.pop("train", None) is None
    assert between(runs(100.0), other(case__question=question)).question_differences == ()


def test_across_divisions_samples_are_counted() -> None:
    metrics = {
        "tokens_per_device_s": {"value": 10.0, "unit": "tokens/s/device"},
        "samples_per_s": {"value": 30.0, "unit": "questions/s"},
    }
    base = runs(100.0, metrics=metrics)
    new = other(
        metrics=metrics | {"samples_per_s": {"value": 60.0, "unit": "questions/s"}},
        case__question__division="open",
        case__division="open",
    )
    found = between(base, new, across=("question.division",))
    assert found.unit == "questions/s"
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0)
    assert found.question_differences == (
        FieldDifference("question.division", ("closed",), ("open",)),
    )


def test_rates_of_different_work_have_no_ratio() -> None:
    trained = training(id="t" * 12)
    found = between(
        runs(100.0, case__question__division="open", case__division="open"),
        [trained],
        across=("case",),
    )
    assert (found.ratio, found.why) == (
        None,
        NoRatioReason("different_work", ("questions/s", "tokens/s")),
    )
    assert found.answers == (None, None)


def test_metrics_stand_in_the_order_of_the_table_and_say_better_or_worse() -> None:
    def numbers(rate: float, mem: float, acc: float) -> dict[str, Any]:
        return {
            "acc": {"value": acc, "unit": "fraction"},
            "mem": {"value": mem, "unit": "GiB"},
            "tokens_per_device_s": {"value": rate, "unit": "tokens/s/device"},
            "mfu": {"value": 0.25, "unit": "fraction"},
        }

    found = between(
        runs(0.0, metrics=numbers(100.0, 10.0, 0.5)), other(metrics=numbers(50.0, 5.0, 0.25))
    )
    half = Ratio(pytest.approx(0.5), None, None, "not tested")
    assert found.metrics == (
        ValueChange(
            "tokens_per_device_s", "tokens/s/device", "higher", "number", 100.0, 50.0, half
        ),
        ValueChange("acc", "fraction", "higher", "percent", 0.5, 0.25, half),
        ValueChange("mem", "GiB", "lower", "gib", 10.0, 5.0, half),
    )
    assert [one.direction for one in found.metrics] == ["worse", "worse", "better"]
    assert found.equal_metric_count == 1


def test_answers_are_compared_first_run_with_first_run() -> None:
    base = [scored("torch", "ABCDABCD", id="a" * 12), scored("torch", "ABCDABCA", id="b" * 12)]
    new = [scored("torch", "ABCDABAA", acc=0.25, id="c" * 12)]
    found = between(base, new)
    assert found.answers == (
        AnswerDifferences(Differences(8, 1), None, None, 0.0),
        AnswerDifferences(Differences(8, 2), None, None, 0.25),
    )


def test_phases_add_up_to_the_wall_time_of_a_step() -> None:
    """Steps of 1 s: an eighth is phase data, three quarters are compute and an eighth is in no
    phase; one of the three steps in the window is followed by a checkpoint of 3 s.
    """
    record = training(((2.0, 1.0, 1.0, 1.0),), aside={1: ("checkpoint", 3.0)})
    assert passes.phases_per_step(record) == pytest.approx(
        {"data": 0.125, "compute": 0.75, "checkpoint": 1.0, "other": 0.125}
    )
    plain = training(((2.0, 2.0, 2.0, 2.0),), id="c" * 12)
    found = between([training(((2.0, 1.0, 1.0, 1.0),))], [plain])
    assert [(one.name, one.base, one.new, one.direction) for one in found.phases] == [
        ("data", 0.125, 0.25, "worse"),
        ("compute", 0.75, 1.5, "worse"),
        ("other", 0.125, 0.25, "worse"),
    ]
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(0.5)


def test_steps_of_different_sizes_are_not_better_or_worse() -> None:
    one, other = training(), training(id="c" * 12)
    half = [
        sample.model_copy(update={"counts": {**sample.counts, "tokens": 50}})
        for sample in other.samples
    ]
    found = between([one], [other.model_copy(update={"samples": half})])
    assert found.tokens_per_step == (100.0, 50.0)
    assert {change.direction for change in found.phases} == {""}
    assert between([one], [other]).tokens_per_step == (100.0, 100.0)


def test_where_two_kinds_of_means_disagree_the_ratio_says_which_is_better() -> None:
    """The arithmetic mean of the new side is higher, its geometric mean lower."""
    base, new = runs(100.0, 100.0, 100.1), runs(40.0, 100.0, 165.0, letter="b")
    [change] = [one for one in between(base, new).metrics if one.name == "tokens_per_device_s"]
    assert change.base is not None
    assert change.new is not None
    assert change.new > change.base
    assert change.direction == "worse"


def test_what_differs_is_named_with_both_values_and_nothing_else_is() -> None:
    software = make().environment.software.model_dump()
    new = other(
        engine__name="transformers",
        environment__software=software
        | {
            "driver": "580.1",
            "packages": {"torch": "2.12.0", "triton": "3.6.0"},
        },
        tune__compile=False,
    )
    assert between(runs(100.0), new).setting_differences == (
        FieldDifference("tune.compile", (True,), (False,)),
        FieldDifference("engine.name", ("torch",), ("transformers",)),
        FieldDifference("environment.software.driver", ("570.86",), ("580.1",)),
        FieldDifference("environment.software.packages.torch", ("2.11.0",), ("2.12.0",)),
    )
    assert between(runs(100.0), other()).setting_differences == ()


def test_metrics_by_different_formulas_are_told() -> None:
    assert between(runs(100.0), other(formulas=2)).setting_differences == (
        FieldDifference("formulas", (1,), (2,)),
    )


def test_devices_are_counted_by_kind() -> None:
    devices = [{"name": "B200", "uuid": f"GPU-{i}", "memory_bytes": 1} for i in range(2)]
    found = between(runs(100.0), other(environment__hardware__devices=devices)).setting_differences
    assert found == (
        FieldDifference("environment.hardware.devices", (["1x NVIDIA H200"],), (["2x B200"],)),
        FieldDifference("environment.hardware.uuids", (["GPU-0"],), (["GPU-0", "GPU-1"],)),
    )


def test_values_of_a_side_that_differ_among_themselves_are_all_there() -> None:
    mixed = [*runs(100.0), *runs(100.0, letter="c", environment__source__revision="def")]
    assert between(mixed, other()).setting_differences == (
        FieldDifference("environment.source.revision", ("abc1234", "def"), ("abc1234",)),
    )


def test_a_threshold_is_a_share() -> None:
    for threshold in (-0.1, 1.0, float("nan")):
        with pytest.raises(RequestError, match="--threshold"):
            between(runs(100.0), other(), threshold=threshold)


def test_long_lists_of_fields_are_cut() -> None:
    many = [FieldDifference(f"question.{i}", (i,), (None,)) for i in range(10)]
    assert record_fields.format_differences(many).endswith("question.7: 7 / none; and 2 more")


def test_an_empty_side_is_refused() -> None:
    with pytest.raises(RequestError, match="no records"):
        side_comparison.make_side("old", [])
    assert ComparisonSide("x", ()).valid == ()


def test_a_rate_has_the_interval_of_its_runs() -> None:
    found = between(runs(100.0, 104.0), other())
    assert found.rates[0] is not None
    assert found.rates[0].source == "runs"
    assert found.rates[0].estimate == Estimate(
        102.0, pytest.approx((102 - 12.706 * 2, 102 + 12.706 * 2))
    )
