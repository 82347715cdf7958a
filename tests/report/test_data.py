"""A report as JSON: valid by its schema, numbers as numbers, and the groups of runs (repeats,
engines, scaling).
"""

import json
from typing import Any

import jsonschema
import pytest

from fixtures import report as made
from fixtures.records import SPECS
from steelyard.metrics import ceiling_rates
from steelyard.record.record import Record
from steelyard.report import report_data


def told(*records: Record, **options: Any) -> dict[str, Any]:
    """Return the report of the records as its JSON reads, after checking it against the schema."""
    found: dict[str, Any] = json.loads(
        report_data.build_report(list(records), **options).model_dump_json(by_alias=True)
    )
    jsonschema.Draft202012Validator(report_data.report_schema()).validate(found)
    return found


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(report_data.report_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(report_data.report_schema()).validate(
            told(made.make()) | {"schema": 2}
        )


def test_the_summary_has_a_row_a_run() -> None:
    found = told(made.make(), made.failed())
    assert (found["schema"], found["kind"]) == (1, "report")
    first, second = found["summary"]
    assert first == {
        "id": "0f3c9a7e5b21",
        "case": "llama2-7b-mmlu",
        "size": "full",
        "changed": [],
        "division": "closed",
        "precision": "bf16",
        "scope": {"kind": "full", "sample": None, "steps": None},
        "engine": "torch",
        "engine_version": "2.11.0",
        "framework": "torch",
        "framework_version": "2.11.0",
        "accelerator": ["NVIDIA H200"],
        "accelerators": 1,
        "nodes": 1,
        "plan": "TP1PP1DP1",
        "tuned": {},
        "status": "valid",
        "reasons": [],
        "evaluated": True,
        "metrics": {
            "p_infer_whole": {
                "value": 45902.7,
                "unit": "tokens/s",
                "interval": [45810.2, 45995.1],
                "note": None,
            },
            "p_infer_core": {
                "value": 46387.2,
                "unit": "tokens/s",
                "interval": [46301.8, 46472.6],
                "note": None,
            },
            "mfu": {"value": 0.6206, "unit": "fraction", "interval": None, "note": "causal"},
            "acc": {
                "value": 0.4583,
                "unit": "fraction",
                "interval": [0.4501, 0.4665],
                "note": None,
            },
            "mem": {"value": 31.26, "unit": "GiB", "interval": None, "note": None},
            "mem_total": {"value": 139.81, "unit": "GiB", "interval": None, "note": None},
            "e2e_time": {"value": 412.6, "unit": "s", "interval": None, "note": None},
        },
    }
    assert (second["status"], second["reasons"], second["metrics"]) == ("failed", ["oom"], {})


def test_cases_have_runs_with_every_metric_and_the_published_rows() -> None:
    origins = made.make().case.origins | {"question.seed": "command line"}
    found = told(made.make(), made.open_window(), made.make(id="ee" * 6, case__origins=origins))
    same, changed = found["cases"]
    assert (same["case"], same["size"], same["task"], same["kind"], same["changed"]) == (
        *("llama2-7b-mmlu", "full", "mmlu", "score"),
        [],
    )
    assert [(run["number"], run["id"]) for run in same["runs"]] == [
        (1, "0f3c9a7e5b21"),
        (2, "1a" * 6),
    ]
    assert list(same["runs"][0]["metrics"])[:3] == ["e2e_time", "p_val_whole", "p_val_core"]
    assert set(same["runs"][0]["metrics"]) == set(made.METRICS)
    assert same["runs"][1]["metrics"]["mfu"] == {
        "value": None,
        "unit": "fraction",
        "interval": None,
        "note": "no peak",
    }
    assert same["runs"][0]["sha256"] == "ee" * 32
    assert same["runs"][0]["explain"] is None
    assert [row["values"]["p_infer_core"] for row in same["published"]] == [10052.2, 5951.8]
    assert (changed["changed"], changed["published"]) == (["question.seed=0"], [])


def test_groups_are_those_of_run() -> None:
    pair = [made.training(times=((2.0, 1.0, 1.0, 1.0),), id=name * 6) for name in ("0a", "0b")]
    two = made.training(times=((2.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0)), id="0c" * 6)
    other = made.training(
        times=((2.0, 0.5, 0.5, 0.5),), id="0d" * 6, engine={"name": "megatron", "details": {}}
    )
    found = told(*pair, two, other)
    [repeats] = found["repeats"]
    assert (repeats["records"], repeats["not_valid"], repeats["config"]) == (
        [one.id for one in pair],
        [],
        "1x1",
    )
    assert repeats["metrics"]["rate"]["mean"] == 100.0
    [engines] = found["engines"]
    assert [(row["engine"], row["base"], row["rate"], row["ratio"]) for row in engines["rows"]] == [
        ("torch", True, 100.0, 1.0),
        ("megatron", False, 200.0, 2.0),
    ]
    [scaling] = found["scaling"]
    assert [
        (row["config"], row["rate"], row["speedup"], row["efficiency"]) for row in scaling["rows"]
    ] == [("1x1", 100.0, 1.0, 1.0), ("1x2", 200.0, 2.0, 1.0)]


def test_explained_where_asked() -> None:
    [case] = told(made.training(), explain=True)["cases"]
    [explained] = case["runs"][0]["explain"]
    assert (explained["rank"], explained["profiled"]) == (0, False)
    assert sum(row["time_s"] for row in explained["rows"]) == pytest.approx(explained["measured_s"])
    assert {type(row["share"]) for row in explained["rows"]} == {float}


def test_no_number_is_text() -> None:
    """No value that a reader computes with is a formatted text."""
    [case] = told(*made.everything(), explain=True)["cases"]
    for run in case["runs"]:
        for value in run["metrics"].values():
            assert isinstance(value["value"], int | float | None)
            assert value["interval"] is None or [type(end) for end in value["interval"]] == [
                float,
                float,
            ]
        assert all(isinstance(time_s, float) for time_s in run["budget"].values())


def test_of_spec_records() -> None:
    record = ceiling_rates.read_verified_spec_record(SPECS[0])
    found = json.loads(report_data.build_ceilings_report([record]).model_dump_json(by_alias=True))
    jsonschema.Draft202012Validator(report_data.report_schema()).validate(found)
    assert (found["summary"], found["cases"]) == ([], [])
    [told] = found["specs"]
    assert (told["id"], len(told["ceilings"])) == (record.id, len(record.benches))
    first = told["ceilings"][0]
    assert (first["name"], first["ceiling"]["value"]) == (
        record.benches[0].name,
        record.ceilings[0].value,
    )
