"""Tests of running a record's request again: what is requested, what is refused, and which
differences are reported.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.load_records import make_generation_record
from fixtures.records import copy_published_record, rewrite_record
from fixtures.report import make_record, make_training_record
from steelyard.case import resolve
from steelyard.case.case import AccuracyGate, FallingLossGate
from steelyard.case.request import EngineSettings, Request
from steelyard.case.resolve import ResolvedCase
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
    return verify.read_verified_record(copy_published_record(SMOKE, tmp_path))


def read_changed_record(tmp_path: Path, **changes: Any) -> Record:
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

    path = rewrite_record(copy_published_record(SMOKE, tmp_path), change)
    from steelyard.record import record

    return record.read_record(path)


def test_request_is_rebuilt_from_the_record(smoke: Record) -> None:
    request = rerun.make_request(smoke)
    assert request.resolved.case == resolve.resolve_case("llama2-7b-mmlu", "smoke").case
    assert request.resolved.origins == smoke.case.origins
    assert (request.engine, request.accelerator, request.launcher) == ("torch", "cpu", None)
    assert (request.nodes, request.devices, request.passes) == (1, 1, ("val", "infer"))
    assert (request.sample, request.steps, request.resume, request.weights, request.data) == (
        None,
        None,
        None,
        None,
        None,
    )
    checked = check_request(request)
    assert (checked.plan, checked.scope) == (smoke.plan, smoke.scope)


def test_request_keeps_the_records_tune_scope_and_interval(tmp_path: Path) -> None:
    record = read_changed_record(
        tmp_path,
        tune__batch_tokens=99,
        scope={"kind": "window", "steps": 3},
        case__max_interval=0.2,
    )
    request = rerun.make_request(record)
    assert request.resolved.case.tune.batch_tokens == 99
    assert (request.steps, request.sample, request.resolved.case.max_interval) == (3, None, 0.2)


def test_a_case_that_does_not_ship_is_rebuilt_from_its_question() -> None:
    record = make_training_record()
    rebuilt = rerun.rebuild_case(record)
    assert (rebuilt.name, rebuilt.question, rebuilt.tune) == (
        "made-7b-openwebtext",
        record.question,
        record.tune,
    )
    assert rebuilt.gate == FallingLossGate(metric="loss_after", below="loss_before")
    assert rebuilt.divisions == ["closed"]
    assert rerun.describe_case_differences(record) == [golden("no-case-made-7-openwebtext-comes")]


def test_case_that_has_changed_since_is_taken_from_the_record() -> None:
    record = make_record(case__question__seed=11, case__max_interval=0.5)
    rebuilt = rerun.rebuild_case(record)
    assert (rebuilt.question.seed, rebuilt.max_interval) == (11, 0.5)
    assert isinstance(rebuilt.gate, AccuracyGate)
    assert rebuilt.published == resolve.resolve_case("llama2-7b-mmlu").case.published
    assert rerun.describe_case_differences(record) == [
        golden("case-modified-question-max_interval-the-question")
    ]
    assert rerun.describe_case_differences(make_record()) == []


def test_a_case_of_generation_sends_the_requests_of_the_record() -> None:
    record = make_generation_record()
    scope = record.scope.model_copy(update={"requests": 7, "min_time_s": 2.5})
    rebuilt = rerun.rebuild_case(record.model_copy(update={"scope": scope}))
    assert (rebuilt.requests, rebuilt.min_time_s) == (7, 2.5)
    assert rebuilt.question == record.question
    assert rebuilt.slo == record.case.slo
    window = scope.model_copy(update={"kind": "window", "sample": 7, "min_time_s": None})
    rebuilt = rerun.rebuild_case(record.model_copy(update={"scope": window}))
    assert (rebuilt.requests, rebuilt.min_time_s) == (None, None)


@pytest.mark.parametrize(
    ("endpoint", "device", "answers"),
    [
        ("http://127.0.0.1:1/v1", "1x L40S", True),
        ("http://127.0.0.1:2/v1", "1x L40S", False),
        ("http://127.0.0.1:1/v1", None, False),
    ],
)
def test_a_run_of_another_server_does_not_answer_a_request(
    endpoint: str, device: str | None, answers: bool
) -> None:
    """A sweep goes on where it was left only with the same server."""
    details = {"endpoint": "http://127.0.0.1:1/v1", "device": "1x L40S"}
    record = make_generation_record(engine="http", details=details)
    settings = EngineSettings(endpoint=endpoint, device=device)
    request = Request(
        resolved=ResolvedCase(rerun.rebuild_case(record), {}, ""),
        engine="http",
        engine_settings=settings,
        accelerator="cpu",
    )
    checked = check_request(request)
    hardware = record.environment.hardware.model_copy(update={"accelerator": "cpu"})
    environment = record.environment.model_copy(update={"hardware": hardware})
    record = record.model_copy(update={"environment": environment, "scope": checked.scope})
    assert rerun.is_run_of(record, checked) == answers


def test_case_that_cannot_run_is_refused() -> None:
    with pytest.raises(RequestError, match="its case cannot be run again: name: "):
        rerun.rebuild_case(make_record(case__name="../no name"))


REAL_WEIGHTS = {"weights": {"source": "huggingface", "header_sha256": "ab" * 32}}


@pytest.mark.parametrize(
    ("changes", "here", "said"),
    [
        ({}, {"weights": Path("w")}, "was made with random weights: leave --weights out"),
        ({}, {"data": Path("d")}, "was made with data generated by its task: leave --data out"),
        (
            REAL_WEIGHTS,
            {},
            "was made with weights of source 'huggingface'; give them with --weights",
        ),
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
def test_other_sources_of_weights_or_data_are_refused(
    changes: dict[str, Any], here: dict[str, Path], said: str, tmp_path: Path
) -> None:
    record = read_changed_record(tmp_path, **changes)
    with pytest.raises(RequestError) as caught:
        rerun.check_sources(record, replace(rerun.make_request(record), **here))  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_failed_run_is_not_reproduced() -> None:
    with pytest.raises(RequestError, match="is of a failed run"):
        rerun.make_request(make_record(status="failed", data={}))


def test_other_weights_are_refused_with_both_hashes(tmp_path: Path) -> None:
    record = read_changed_record(tmp_path, **REAL_WEIGHTS)
    rerun.check_weights(record, "ab" * 32)
    with pytest.raises(RequestError) as caught:
        rerun.check_weights(record, "cd" * 32)
    assert (
        str(caught.value)
        == f"other weights: weights.header_sha256: {'ab' * 32} / {'cd' * 32}; use the"
        " weights of the record"
    )


def test_host_differences_are_found_before_the_run(
    smoke: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = check_request(rerun.make_request(smoke))
    recorded = smoke.environment
    software = recorded.software.model_copy(update={"kernel": "9.9.9", "cudnn": "1.0"})
    source = recorded.source.model_copy(update={"revision": "f" * 40})
    current = recorded.model_copy(update={"software": software, "source": source})
    monkeypatch.setattr(environment, "describe_host", lambda row, found, variables: current)
    assert rerun.find_host_differences(smoke, checked) == (
        FieldDifference("environment.software.kernel", (recorded.software.kernel,), ("9.9.9",)),
        FieldDifference("environment.source.revision", (recorded.source.revision,), ("f" * 40,)),
    )
    remote = replace(checked, launcher=replace(checked.launcher, remote=True))
    assert rerun.find_host_differences(smoke, remote) == ()


def test_other_data_and_weights_are_found_after_the_run(smoke: Record, tmp_path: Path) -> None:
    assert rerun.find_rerun_differences(smoke, smoke) == ()
    other = read_changed_record(tmp_path, weights__seed=5)
    assert rerun.find_rerun_differences(smoke, other) == (
        FieldDifference("weights.seed", (0,), (5,)),
    )
    with_other_data = smoke.model_copy(
        update={"data": smoke.data.model_copy(update={"fingerprint": "beef"})}
    )
    assert rerun.find_rerun_differences(smoke, with_other_data) == (
        FieldDifference("question.data.fingerprint", (smoke.fingerprint,), ("beef",)),
    )
