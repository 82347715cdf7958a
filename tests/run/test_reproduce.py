"""Tests of running a record's request again: what is requested, what is refused, and which
differences are reported.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.records import changed, published
from fixtures.report import make, training
from steelyard.case import resolve
from steelyard.case.case import AccuracyGate, FallingLossGate
from steelyard.errors import RequestError
from steelyard.metrics import verify
from steelyard.metrics.record_fields import FieldDifference
from steelyard.record.record import Record
from steelyard.run import environment, rerun
from steelyard.run.checked_request import check_request

SMOKE = "llama2-7b-mmlu-smoke-closed"


@pytest.fixture
def smoke(tmp_path: Path) -> Record:
    """Return the published record of a smoke run."""
    return verify.read_verified_record(published(SMOKE, tmp_path))


def with_changes(tmp_path: Path, **changes: Any) -> Record:
    """Return the published smoke record with these values changed; a double underscore in a key
    separates the levels.
    """

    def change(table: dict[str, Any]) -> None:
        for key, value in changes.items():
            *parents, leaf = key.split("__")
            node = table
            for parent in parents:
                node = node[parent]
            node[leaf] = value

    path = changed(published(SMOKE, tmp_path), change)
    from steelyard.record import record

    return record.read_record(path)


def test_the_request_is_what_the_record_tells(smoke: Record) -> None:
    found = rerun.make_request(smoke)
    assert found.resolved.case == resolve.resolve_case("llama2-7b-mmlu", "smoke").case
    assert found.resolved.origins == smoke.case.origins
    assert (found.engine, found.accelerator, found.launcher) == ("torch", "cpu", None)
    assert (found.nodes, found.devices, found.passes) == (1, 1, ("val", "infer"))
    assert (found.sample, found.steps, found.resume, found.weights, found.data) == (
        None,
        None,
        None,
        None,
        None,
    )
    made = check_request(found)
    assert (made.plan, made.scope) == (smoke.plan, smoke.scope)


def test_tune_scope_and_passes_are_the_records(tmp_path: Path) -> None:
    found = with_changes(
        tmp_path,
        tune__batch_tokens=99,
        scope={"kind": "window", "steps": 3},
        case__max_interval=0.2,
    )
    asked = rerun.make_request(found)
    assert asked.resolved.case.tune.batch_tokens == 99
    assert (asked.steps, asked.sample, asked.resolved.case.max_interval) == (3, None, 0.2)


def test_a_case_that_does_not_ship_is_rebuilt_from_its_question() -> None:
    record = training()
    found = rerun.rebuild_case(record)
    assert (found.name, found.question, found.tune) == (
        "made-7b-openwebtext",
        record.question,
        record.tune,
    )
    assert found.gate == FallingLossGate(metric="loss_after", below="loss_before")
    assert found.divisions == ["closed"]
    assert rerun.describe_case_differences(record) == [golden("no-case-made-7-openwebtext-comes")]


def test_a_case_that_has_changed_since_is_the_records() -> None:
    record = make(case__question__seed=11, case__max_interval=0.5)
    found = rerun.rebuild_case(record)
    assert (found.question.seed, found.max_interval) == (11, 0.5)
    assert isinstance(found.gate, AccuracyGate)
    assert found.published == resolve.resolve_case("llama2-7b-mmlu").case.published
    assert rerun.describe_case_differences(record) == [
        golden("case-modified-question-max_interval-the-question")
    ]
    assert rerun.describe_case_differences(make()) == []


def test_a_case_that_cannot_be_asked_is_one_line() -> None:
    with pytest.raises(RequestError, match="its case cannot be run again: name: "):
        rerun.rebuild_case(make(case__name="../no name"))


REAL = {"weights": {"source": "huggingface", "header_sha256": "ab" * 32}}


@pytest.mark.parametrize(
    ("changes", "here", "said"),
    [
        ({}, {"weights": Path("w")}, "was made with random weights: leave --weights out"),
        ({}, {"data": Path("d")}, "was made with data that its task makes: leave --data out"),
        (REAL, {}, "was made with weights of source 'huggingface'; give them with --weights"),
        (
            {"data__source": "mmlu"},
            {},
            "was made with data of source 'mmlu'; give them with --data",
        ),
        (
            {"restarts": [{"record": None, "step": 1, "plan": "DP", "losses": []}]},
            {},
            "resumed from a checkpoint",
        ),
    ],
)
def test_what_is_refused_before_anything_starts(
    changes: dict[str, Any], here: dict[str, Path], said: str, tmp_path: Path
) -> None:
    found = with_changes(tmp_path, **changes)
    with pytest.raises(RequestError) as caught:
        rerun.check_sources(found, replace(rerun.make_request(found), **here))  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_failed_run_is_not_reproduced() -> None:
    with pytest.raises(RequestError, match="is of a failed run"):
        rerun.make_request(make(status="failed", data={}))


def test_other_weights_are_refused_with_both_hashes(tmp_path: Path) -> None:
    found = with_changes(tmp_path, **REAL)
    rerun.check_weights(found, "ab" * 32)
    with pytest.raises(RequestError) as caught:
        rerun.check_weights(found, "cd" * 32)
    assert (
        str(caught.value)
        == f"other weights: weights.header_sha256: {'ab' * 32} / {'cd' * 32}; give those of the"
        " record"
    )


def test_what_differs_here_is_known_before_the_run(
    smoke: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = check_request(rerun.make_request(smoke))
    told = smoke.environment
    software = told.software.model_copy(update={"kernel": "9.9.9", "cudnn": "1.0"})
    source = told.source.model_copy(update={"revision": "f" * 40})
    now = told.model_copy(update={"software": software, "source": source})
    monkeypatch.setattr(environment, "describe_host", lambda row, found, variables: now)
    assert rerun.find_host_differences(smoke, one) == (
        FieldDifference("environment.software.kernel", (told.software.kernel,), ("9.9.9",)),
        FieldDifference("environment.source.revision", (told.source.revision,), ("f" * 40,)),
    )
    remote = replace(one, launcher=replace(one.launcher, remote=True))
    assert rerun.find_host_differences(smoke, remote) == ()


def test_after_the_run_other_data_and_other_weights_are_told(smoke: Record, tmp_path: Path) -> None:
    assert rerun.find_rerun_differences(smoke, smoke) == ()
    other = with_changes(tmp_path, weights__seed=5)
    assert rerun.find_rerun_differences(smoke, other) == (
        FieldDifference("weights.seed", (0,), (5,)),
    )
    read = smoke.model_copy(update={"data": smoke.data.model_copy(update={"fingerprint": "beef"})})
    assert rerun.find_rerun_differences(smoke, read) == (
        FieldDifference("question.data.fingerprint", (smoke.fingerprint,), ("beef",)),
    )
