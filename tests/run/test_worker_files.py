"""Tests of the files between parent and workers: the worker spec and the rank file, as JSON and as
JSON Schemas.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from fixtures.commands import CASE, Shell
from fixtures.golden import golden
from steelyard.case.resolve import resolve_case
from steelyard.plan import degrees
from steelyard.record.record import PassFacts, Sample, Scope
from steelyard.record.run_facts import WeightsFacts
from steelyard.run import messages
from steelyard.run.clock import now
from steelyard.run.messages import HostSpec
from steelyard.run.worker_files import RankFile, RunSpec, WorkerSpec
from steelyard.tasks.task import DataFacts

COUNTS = {"tokens": 3, "samples": 1, "logits": 1, "pairs": 6, "square": 9}


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    """Return the spec of one worker on the CPU for 4 questions of pass val; its folder is the
    test's own.
    """
    case = resolve_case(CASE, "smoke").case
    run = RunSpec(
        case=case,
        scope=Scope(kind="window", sample=4),
        passes=("val",),
        engine="torch",
        plan=degrees.make_plan(case, 1, 1),
        accelerator="cpu",
        weights=None,
        data=None,
        tokenizer=None,
    )
    return WorkerSpec(run=run, host=HostSpec(folder=tmp_path, origin_s=now()))


@pytest.fixture
def left(spec: WorkerSpec, shell: Shell) -> dict[str, Any]:
    """Start a real worker with the spec, as an agent would, and return the rank file that it
    writes.
    """
    path = spec.host.folder / "spec.json"
    path.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", "steelyard.run.worker", str(path)]
    # A worker ends when its stdin closes, so it stays open as it would under an agent.
    with subprocess.Popen(
        command, env=shell.env(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.wait(300) == 0, process.stderr.read() if process.stderr else ""
    rank_file: dict[str, Any] = json.loads(
        (spec.host.folder / messages.format_rank_file_name(0)).read_text()
    )
    return rank_file


def test_worker_spec_round_trips_through_json(spec: WorkerSpec) -> None:
    reread = WorkerSpec.model_validate_json(spec.model_dump_json())
    assert reread == spec
    assert reread.run.case.compute_key("f") == spec.run.case.compute_key("f")
    assert reread.run.case.question.task_row is spec.run.case.question.task_row


def test_rank_file_round_trips_through_json() -> None:
    times = {
        "start_s": 0.0,
        "end_s": 1.5,
        "host_start_s": 0.0,
        "host_end_s": 0.5,
        "phases": {"compute": 1.5},
    }
    before = RankFile(
        rank=1,
        device="cpu:1",
        status="done",
        error=None,
        ended_s=2.5,
        budget={"val": 1.5},
        windows=[
            PassFacts(
                pass_name="val",
                rank=1,
                start_s=0.5,
                wall_s=1.5,
                allocated_bytes=None,
                reserved_bytes=7,
            )
        ],
        samples=[
            Sample(pass_name="val", rank=1, step=0, counts=COUNTS, values={"loss": None}, **times)
        ],
        outputs={"val": {"items": [0]}},
        weights=WeightsFacts(source="random", seed=3),
        data=DataFacts(source="made", rows=4, fingerprint="f", published=None, shortened=2),
    )
    reread = RankFile.model_validate_json(before.model_dump_json(by_alias=True))
    assert reread == before
    assert reread.weights.model_dump() == {"source": "random", "seed": 3}
    assert reread.data is not None
    assert reread.data.model_dump()["shortened"] == 2


@pytest.mark.parametrize(
    "change", [{"hurry": True}, {"passes": "val"}, {"origin_s": None}, {"case": {"name": "x"}}]
)
def test_worker_spec_with_an_unknown_or_wrong_field_is_refused(
    spec: WorkerSpec, change: dict[str, Any]
) -> None:
    document = json.loads(spec.model_dump_json())
    section = "host" if "origin_s" in change else "run"
    with pytest.raises(ValidationError, match=next(iter(change))):
        WorkerSpec.model_validate_json(json.dumps(document | {section: document[section] | change}))


def make_schema_validator(shell: Shell, kind: str) -> Any:
    """Return a validator for the JSON Schema that `steelyard schema KIND` prints, after checking
    the schema itself.
    """
    result = shell("schema", kind)
    assert (result.code, result.err) == (0, "")
    jsonschema.Draft202012Validator.check_schema(result.json())
    return jsonschema.Draft202012Validator(result.json())


@pytest.mark.full
def test_schemas_accept_real_files_and_refuse_unknown_keys(
    spec: WorkerSpec, left: dict[str, Any], shell: Shell, smoke: dict[str, Path]
) -> None:
    worker_spec = json.loads(spec.model_dump_json())
    documents = {
        "worker": worker_spec,
        "rank": left,
        "record": json.loads(smoke["closed"].read_text()),
    }
    for name, document in documents.items():
        validator = make_schema_validator(shell, name)
        validator.validate(document)
        assert not validator.is_valid(document | {"unknown": 1}), name
        assert not validator.is_valid({}), name
    assert left["status"] == "done"
    assert RankFile.model_validate(left).samples[0].pass_name == "val"


def test_unknown_schema_name_is_refused(shell: Shell) -> None:
    result = shell("schema", "page")
    assert (result.code, result.lines) == (2, [golden("error-schema-page-allowed-record-spec")])
