"""Which runs `steelyard conform` makes, and how it prints what it found."""

from pathlib import Path
from typing import Any

import pytest

from fixtures import report
from fixtures.commands import CASE
from steelyard.case.request import EngineSettings
from steelyard.case.resolve import ResolvedCase
from steelyard.cli import conform, conform_runs
from steelyard.cli.conform_runs import ConformRunner, RunLimits
from steelyard.metrics.conform_checks import ConformCheck
from steelyard.plan import flops
from steelyard.record.record import Record


def make_scoring_record(**changes: Any) -> Record:
    """Return a record of passes val and infer over 48 questions, on a host whose matmul is so fast
    that the pass infer would take a second.
    """
    window = {"rank": 0, "start_s": 5.0, "wall_s": 1.0, "allocated_bytes": 0, "reserved_bytes": 0}
    fields: dict[str, Any] = {
        "data": {"source": "made", "rows": 48, "fingerprint": "f" * 64, "published": None},
        "passes": [window | {"pass": name} for name in ("val", "infer")],
    }
    record = report.make_record(**(fields | changes))
    work = conform_runs._count_largest_work(record, record.question.model)
    return record.model_copy(
        update={
            "ranks": report.make_record(
                ranks=[{"rank": 0, "matmul_cpu_rates": {"before": [work]}}]
            ).ranks
        }
    )


def test_passes_run_in_reverse_after_the_second_half_of_the_rows() -> None:
    """Positions in the second half are others than in the whole set."""
    limits = conform_runs.plan_other_order(make_scoring_record())
    assert limits is not None
    assert (limits.passes, limits.rehearsed_rows) == (("infer", "val"), ("24-47",))
    assert (limits.sample, limits.steps) == (None, None)


def test_passes_of_training_keep_their_order() -> None:
    assert conform_runs.plan_other_order(report.make_training_record()) is None


def list_limits(record: Record) -> list[tuple[tuple[str, ...] | None, int | None, int | None]]:
    """Return passes, rows and steps of the timed runs."""
    return [
        (limits.passes, limits.sample, limits.steps)
        for limits in conform_runs.plan_timed_runs(record)
    ]


def test_scoring_is_timed_on_a_quarter_a_half_and_all_rows() -> None:
    """Each pass alone, and both on the same half of the rows, in both orders."""
    assert list_limits(make_scoring_record()) == [
        (("infer",), 12, None),
        (("val",), 48, None),
        (("val", "infer"), 24, None),
        (("infer",), 24, None),
        (("infer",), 48, None),
        (("val",), 12, None),
        (("infer", "val"), 24, None),
    ]


def test_single_pass_is_timed_alone() -> None:
    record = make_scoring_record()
    record = record.model_copy(update={"passes": record.passes[1:]})
    assert list_limits(record) == [(("infer",), rows, None) for rows in (12, 48, 24, 48, 12)]


def test_training_is_timed_in_three_numbers_of_steps() -> None:
    assert list_limits(report.make_training_record()) == [
        (("train",), None, steps) for steps in (2, 8, 4, 8, 2)
    ]


def test_run_without_a_headline_pass_is_not_timed() -> None:
    assert conform_runs.plan_timed_runs(report.make_failed_record()) == []


def test_timed_model_is_as_wide_as_the_work_needs() -> None:
    """The pass takes a second at the matmul's rate, and 1.5 s are wanted: twice as wide."""
    record = make_scoring_record()
    model = record.question.model
    assert conform_runs.list_timed_settings(record) == [
        "tune.warmup=0",
        f"question.model.hidden={2 * model.hidden}",
        f"question.model.ffn={2 * model.ffn}",
    ]
    slow = record.model_copy(
        update={
            "ranks": [
                rank.model_copy(update={"matmul_cpu_rates": {"before": [1.0]}})
                for rank in record.ranks
            ]
        }
    )
    assert f"question.model.hidden={model.hidden}" in conform_runs.list_timed_settings(slow)
    without_rate = record.model_copy(update={"ranks": []})
    assert conform_runs.list_timed_settings(without_rate) == ["tune.warmup=0"]


def test_work_of_training_is_that_of_eight_steps() -> None:
    record = report.make_training_record(times=((1.0, 1.0),))
    counts = record.samples[0].counts
    one_step = flops.count_flops(record.question.model, counts, "causal", 3)
    assert one_step is not None
    assert conform_runs._count_largest_work(record, record.question.model) == 8 * one_step


@pytest.mark.parametrize(("name", "steps"), [("llama2-7b-mmlu", None), ("glm-large-record", 2)])
def test_compared_runs_have_all_rows_or_two_steps(name: str, steps: int | None) -> None:
    resolved = conform_runs.resolve_smoke(name)
    assert conform_runs.limit_compared(resolved) == RunLimits(steps=steps)
    assert getattr(resolved.case.question.model, "dropout", 0.0) == 0.0


def test_rows_that_were_not_tested_are_named() -> None:
    rows = [
        ConformCheck("case", "loss", 1.0, 1.00001, 1e-5, 1e-4),
        ConformCheck("case", "answers", 1.0, 0.5, 0.5, 0.02),
        ConformCheck("case", "time", None, None, None, 0.0, "the host was busy"),
    ]
    head, loss, answers, time, untested, verdict = conform._format_comparison(
        "mine", rows, conforms=False
    ).splitlines()
    assert head.split() == ["case", "quantity", "torch", "mine", "difference", "allowed"]
    assert loss.split() == ["case", "loss", "1", "1.00001", "1e-05", "0.0001", "ok"]
    assert answers.split()[-1] == "WRONG"
    assert time.split() == ["case", "time", "/", "/", "/", "0", "not", "tested"]
    assert untested == "not tested: case: time: the host was busy"
    assert verdict == "engine mine does not conform"


def test_engine_conforms_if_some_rows_were_not_tested() -> None:
    comparison = object.__new__(conform._Comparison)
    comparison.rows = [
        ConformCheck("case", "loss", 1.0, 1.0, 0.0, 1e-4),
        ConformCheck("case", "time", None, None, None, 0.0, "the host was busy"),
    ]
    assert comparison.conforms
    comparison.rows.append(ConformCheck("case", "answers", 1.0, 0.5, 0.5, 0.02))
    assert not comparison.conforms


def test_yardstick_tries_seeds_until_answers_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The runs that follow ask the question of the last seed."""
    seeds: list[int] = []

    def run(self: ConformRunner, resolved: ResolvedCase, limits: RunLimits) -> Record:
        seeds.append(resolved.case.question.seed)
        return make_scoring_record()

    monkeypatch.setattr(ConformRunner, "run", run)
    monkeypatch.setattr(conform.conform_checks, "has_variety", lambda record: len(seeds) == 3)
    runners = [ConformRunner(name, EngineSettings(), "cpu", tmp_path) for name in ("torch", "x")]
    comparison = conform._Comparison(*runners)
    comparison.compare(conform_runs.resolve_smoke(CASE))
    assert seeds == [0, 1, 2, 2, 2]
