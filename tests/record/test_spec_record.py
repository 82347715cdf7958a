"""Tests of hostile spec records: each gets one line and no traceback."""

import json
import os
from pathlib import Path

import pytest

from fixtures.specs import make_bench, make_spec_record, make_stretches
from steelyard.errors import RequestError
from steelyard.metrics import ceiling_rates
from steelyard.record import ceilings_record, record_file
from steelyard.record import record as runs
from steelyard.words import Message

HUGE_NUMBER = 10**400


def make_change(keys: tuple, value):
    """Return a function that sets the value at this path of keys in a record's JSON document."""

    def change(document):
        node = document
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return change


HOSTILE_CHANGES = {
    "benches are text": make_change(("benches",), "many"),
    "no benches": make_change(("benches",), []),
    "an unknown group": make_change(("benches", 0, "group"), "magic"),
    "an unknown key": make_change(("benches", 0, "run"), "rm"),
    "a negative time": make_change(("benches", 0, "stretches", 0, "time_s"), -1.0),
    "no calls": make_change(("benches", 0, "stretches", 0, "calls"), 0),
    "a number without end": make_change(("benches", 0, "stretches", 0, "calls"), HUGE_NUMBER),
    "amounts of nothing": make_change(("benches", 0, "amount"), 0.0),
    "amounts beyond all": make_change(("benches", 0, "amount"), 1e40),
    "a long reason": make_change(("benches", 0, "reason"), "x" * 2000),
    "a name that leads away": make_change(("id",), "../../etc"),
    "another kind": make_change(("kind",), "run"),
    "another schema": make_change(("schema",), 2),
    "ranks of text": make_change(("ranks",), "x"),
    "hashes of numbers": make_change(("hashes",), {"record": 1}),
    "columns of two lengths": make_change(("telemetry", 0, "columns", "power_w"), [1.0]),
    "a peak of nothing": make_change(
        ("environment", "hardware", "peak", "flops_per_s", "bf16"), 0.0
    ),
}


@pytest.mark.parametrize("name", HOSTILE_CHANGES)
def test_hostile_spec_record_gets_one_line(name: str, tmp_path: Path):
    document = json.loads(
        ceilings_record.write_spec_record(make_spec_record(), tmp_path).read_bytes()
    )
    HOSTILE_CHANGES[name](document)
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RequestError) as refused:
        ceiling_rates.verify_spec_record(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema":1,"kind":"spec"}', "[" * 100_000]
)
def test_malformed_spec_record_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "none.json"
    path.write_text(text)
    with pytest.raises(RequestError):
        ceilings_record.read_spec_record(path)


@pytest.mark.parametrize("time_s", [1e-300, 5e-324, 1e9])
@pytest.mark.parametrize("peak", [1e-300, 1e30])
def test_extreme_numbers_do_not_overflow(time_s: float, peak: float):
    """A hostile record may claim any number that the schema allows."""
    spec_record = make_spec_record(
        make_bench(amount=1e30, stretches=make_stretches(*[time_s] * 5, calls=10**12))
    )
    hardware = spec_record.environment.hardware
    hardware = hardware.model_copy(
        update={"peak": hardware.peak.model_copy(update={"flops_per_s": {"bf16": peak}})}
    )
    extreme_record = spec_record.model_copy(
        update={"environment": spec_record.environment.model_copy(update={"hardware": hardware})}
    )
    assert len(ceiling_rates.derive_ceilings(extreme_record)) == 1


def test_record_kind_is_read_from_the_first_bytes(tmp_path: Path):
    path = ceilings_record.write_spec_record(make_spec_record(), tmp_path)
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


def test_schema_of_spec_records():
    schema = ceilings_record.make_spec_record_schema()
    assert schema["title"] == "Steelyard spec record"
    assert schema["properties"]["kind"]["const"] == "spec"


def test_reasons_are_stored_as_messages_and_printed_in_english(tmp_path: Path):
    """A record without an exception has no key for one, so that older records keep their bytes."""
    lacking = make_bench(reason=Message("ceiling.memory"), error_text="E: x", stretches=[])
    record = make_spec_record(make_bench(), lacking)
    path = ceilings_record.write_spec_record(record, tmp_path)
    assert ceiling_rates.verify_spec_record(path) == []
    first, second = json.loads(path.read_bytes())["benches"]
    assert (first["reason"], "error_text" in first) == (None, False)
    assert second["reason"] == {"code": "ceiling.memory", "values": {}}
    printed = ceilings_record.spec_record_to_english_json(record)["benches"][1]
    assert (printed["reason"], printed["error_text"]) == ("not enough memory", "E: x")
