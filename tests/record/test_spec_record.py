"""Tests of hostile spec records: each gets one line and no traceback."""

import json
import os
from pathlib import Path

import pytest

from fixtures.specs import bench, record, stretches
from steelyard.errors import RequestError
from steelyard.metrics import ceiling_rates
from steelyard.record import ceilings_record, record_file
from steelyard.record import record as runs

HUGE = 10**400


def changed(path: tuple, value):
    """Return a function that sets the value at this path of keys in a record's JSON document."""

    def change(table):
        at = table
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


HOSTILE = {
    "benches are text": changed(("benches",), "many"),
    "no benches": changed(("benches",), []),
    "an unknown group": changed(("benches", 0, "group"), "magic"),
    "an unknown key": changed(("benches", 0, "run"), "rm"),
    "a negative time": changed(("benches", 0, "stretches", 0, "time_s"), -1.0),
    "no calls": changed(("benches", 0, "stretches", 0, "calls"), 0),
    "a number without end": changed(("benches", 0, "stretches", 0, "calls"), HUGE),
    "amounts of nothing": changed(("benches", 0, "amount"), 0.0),
    "amounts beyond all": changed(("benches", 0, "amount"), 1e40),
    "a long reason": changed(("benches", 0, "reason"), "x" * 2000),
    "a name that leads away": changed(("id",), "../../etc"),
    "another kind": changed(("kind",), "run"),
    "another schema": changed(("schema",), 2),
    "ranks of text": changed(("ranks",), "x"),
    "hashes of numbers": changed(("hashes",), {"record": 1}),
    "columns of two lengths": changed(("telemetry", 0, "columns", "power_w"), [1.0]),
    "a peak of nothing": changed(("environment", "hardware", "peak", "flops_per_s", "bf16"), 0.0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_gets_one_line(name: str, tmp_path: Path):
    table = json.loads(ceilings_record.write_spec_record(record(), tmp_path).read_bytes())
    HOSTILE[name](table)
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(table))
    with pytest.raises(RequestError) as refused:
        ceiling_rates.verify_spec_record(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema":1,"kind":"spec"}', "[" * 100_000]
)
def test_what_is_no_record_gets_one_line(text: str, tmp_path: Path):
    path = tmp_path / "none.json"
    path.write_text(text)
    with pytest.raises(RequestError):
        ceilings_record.read_spec_record(path)


@pytest.mark.parametrize("time_s", [1e-300, 5e-324, 1e9])
@pytest.mark.parametrize("peak", [1e-300, 1e30])
def test_no_number_overflows(time_s: float, peak: float):
    """A hostile record may claim any number that the schema allows."""
    made = record(bench(amount=1e30, stretches=stretches(*[time_s] * 5, calls=10**12)))
    hardware = made.environment.hardware
    hardware = hardware.model_copy(
        update={"peak": hardware.peak.model_copy(update={"flops_per_s": {"bf16": peak}})}
    )
    odd = made.model_copy(
        update={"environment": made.environment.model_copy(update={"hardware": hardware})}
    )
    assert len(ceiling_rates.derive_ceilings(odd)) == 1


def test_kinds_are_told_apart_by_their_first_bytes(tmp_path: Path):
    path = ceilings_record.write_spec_record(record(), tmp_path)
    assert record_file.read_record_kind(path) == "spec"
    with pytest.raises(RequestError, match="not a record: kind: Input should be 'run'"):
        runs.read_record(path)
    path.write_text("{}")
    assert record_file.read_record_kind(path) == "run"
    assert record_file.read_record_kind(tmp_path / "absent.json") == "run"
    os.mkfifo(tmp_path / "pipe.json")
    assert record_file.read_record_kind(tmp_path / "pipe.json") == "run"  # without waiting


def test_every_field_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
    for model in (
        ceilings_record.SpecRecord,
        ceilings_record.BenchTimings,
        ceilings_record.TimedCalls,
        ceilings_record.Ceiling,
        ceilings_record.BenchLimits,
        ceilings_record.ErrorCheck,
    ):
        for name, field in model.model_fields.items():
            assert f"`{field.alias or name}`" in text, (model, name)


def test_schema_is_of_this_kind():
    found = ceilings_record.make_spec_record_schema()
    assert found["title"] == "Steelyard spec record"
    assert found["properties"]["kind"]["const"] == "spec"
