"""A report as JSON: valid by its schema, numbers as numbers, and the groups of runs (repeats,
engines, scaling).
"""

import json
from typing import Any

import jsonschema
import pytest

from fixtures import report as made
from fixtures.engines import make_scoring_record
from fixtures.records import SPECS
from steelyard.metrics import ceiling_rates
from steelyard.metrics.ratio import compare_values
from steelyard.record.record import Record
from steelyard.report import report_data


def read_report_data(*records: Record, **options: Any) -> dict[str, Any]:
    """Return the report of the records as its JSON reads, after checking it against the schema."""
    content: dict[str, Any] = json.loads(
        report_data.build_report(list(records), **options).model_dump_json(by_alias=True)
    )
    jsonschema.Draft202012Validator(report_data.report_schema()).validate(content)
    return content


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(report_data.report_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(report_data.report_schema()).validate(
            read_report_data(made.make_record()) | {"schema": 2}
        )


def test_the_summary_has_a_row_a_run() -> None:
    content = read_report_data(made.make_record(), made.make_failed_record())
    assert (content["schema"], content["kind"]) == (1, "report")
    first, second = content["summary"]
    assert first == {
        "id": "0f3c9a7e5b21",
        "case": "llama2-7b-mmlu",
        "size": "full",
        "changed": [],
        "division": "closed",
        "precision": "bf16",
        "scope": {"kind": "full", "sample": None, "steps": None},
        "load": None,
        "engine": "torch",
        "engine_mark": "ours",
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
    origins = made.make_record().case.origins | {"question.seed": "command line"}
    content = read_report_data(
        made.make_record(),
        made.make_open_window_record(),
        made.make_record(id="ee" * 6, case__origins=origins),
    )
    unchanged, changed = content["cases"]
    assert (
        unchanged["case"],
        unchanged["size"],
        unchanged["task"],
        unchanged["kind"],
        unchanged["changed"],
    ) == (*("llama2-7b-mmlu", "full", "mmlu", "score"), [])
    assert [(run["number"], run["id"]) for run in unchanged["runs"]] == [
        (1, "0f3c9a7e5b21"),
        (2, "1a" * 6),
    ]
    assert list(unchanged["runs"][0]["metrics"])[:3] == ["e2e_time", "p_val_whole", "p_val_core"]
    assert set(unchanged["runs"][0]["metrics"]) == set(made.METRICS)
    assert unchanged["runs"][1]["metrics"]["mfu"] == {
        "value": None,
        "unit": "fraction",
        "interval": None,
        "note": "no peak",
    }
    assert unchanged["runs"][0]["sha256"] == "ee" * 32
    assert unchanged["runs"][0]["explain"] is None
    assert [row["values"]["p_infer_core"] for row in unchanged["published"]] == [10052.2, 5951.8]
    assert (changed["changed"], changed["published"]) == (["question.seed=0"], [])


def test_repeats_engines_and_scaling() -> None:
    times, megatron = (2.0, *[1.0] * 5), {"name": "megatron", "details": {}}
    pair = [made.make_training_record((times,), id=name * 6) for name in ("0a", "0b")]
    two = made.make_training_record((times, times), id="0c" * 6)
    other = made.make_training_record(((2.0, *[0.8] * 5),), id="0d" * 6, engine=megatron)
    content = read_report_data(*pair, two, other)
    [repeats] = content["repeats"]
    assert (repeats["records"], repeats["not_valid"], repeats["config"]) == (
        [record.id for record in pair],
        [],
        "1x1",
    )
    assert repeats["metrics"]["rate"]["mean"] == 100.0
    [engines] = content["engines"]
    assert [(row["engine"], row["base"], row["rate"], row["ratio"]) for row in engines["rows"]] == [
        ("torch", True, 100.0, 1.0),
        ("megatron", False, pytest.approx(125.0), pytest.approx(1.25)),
    ]
    assert [
        (row["valid"], row["ratio_interval"], row["ratio_verdict"]) for row in engines["rows"]
    ] == [(2, None, None), (1, None, "not tested")]
    [scaling] = content["scaling"]
    assert [
        (row["config"], row["rate"], row["speedup"], row["efficiency"]) for row in scaling["rows"]
    ] == [("1x1", 100.0, 1.0, 1.0), ("1x2", 200.0, pytest.approx(2.0), pytest.approx(1.0))]
    assert [
        (row["speedup_interval"], row["efficiency_interval"], row["speedup_verdict"])
        for row in scaling["rows"]
    ] == [(None, None, None), (None, None, "not tested")]


def test_ratios_of_repeats_have_an_interval_and_a_verdict() -> None:
    plan = {"nodes": 1, "devices": 2, "tp": 1, "pp": 1, "dp": 2, "launcher": "local"}
    changes: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"engine__name": "other"},
        "c": {"plan": plan},
    }
    records = [
        make_scoring_record("torch", "A" * 8, rate, id=f"{letter}{rate:011.0f}", **change)
        for letter, change in changes.items()
        for rate in ((50.0, 51.0) if letter == "b" else (100.0, 102.0))
    ]
    content = read_report_data(*records)
    tested = compare_values([100.0, 102.0], [50.0, 51.0])
    assert tested is not None
    assert tested.interval is not None
    [engines] = content["engines"]
    assert {
        name: engines["rows"][1][name] for name in ("ratio", "ratio_interval", "ratio_verdict")
    } == {
        "ratio": tested.value,
        "ratio_interval": list(tested.interval),
        "ratio_verdict": "significant",
    }
    doubled = compare_values([100.0, 102.0], [200.0, 204.0])
    assert doubled is not None
    assert doubled.interval is not None
    [scaling] = content["scaling"]
    row = scaling["rows"][1]
    assert (row["speedup"], row["speedup_interval"]) == (doubled.value, list(doubled.interval))
    assert row["efficiency_interval"] == [end / 2 for end in doubled.interval]
    assert row["speedup_verdict"] == "significant"


def test_unproven_runs_have_that_status_and_reason() -> None:
    """Also those of an earlier version of the formulas, which store the status valid."""
    records = [
        made.make_rated_record(number, rate, **made.WITHOUT_INTERVAL)
        for number, rate in enumerate((99.5, 100.0, 100.5), 1)
    ]
    content = read_report_data(*records[:2])
    assert [(row["status"], row["reasons"]) for row in content["summary"]] == [
        ("unproven", ["few_steps"])
    ] * 2
    [repeats] = content["repeats"]
    assert (repeats["records"], repeats["metrics"]) == ([], {})
    assert repeats["not_valid"] == [
        {"id": record.id, "status": "unproven", "reasons": ["few_steps"]} for record in records[:2]
    ]
    content = read_report_data(*records)
    assert [row["status"] for row in content["summary"]] == ["unproven"] * 3
    [repeats] = content["repeats"]
    assert (repeats["records"], repeats["not_valid"]) == ([record.id for record in records], [])
    rate = repeats["metrics"]["rate"]
    assert (rate["mean"], rate["interval_from"], rate["runs"]) == (100.0, "runs", 3)


def test_explained_on_request() -> None:
    [case] = read_report_data(made.make_training_record(), explain=True)["cases"]
    [explained] = case["runs"][0]["explain"]
    assert (explained["rank"], explained["profiled"]) == (0, False)
    assert sum(row["time_s"] for row in explained["rows"]) == pytest.approx(explained["measured_s"])
    assert {type(row["share"]) for row in explained["rows"]} == {float}


def test_numbers_are_not_formatted() -> None:
    """No value that a reader computes with is a formatted text."""
    [case] = read_report_data(*made.make_records_of_all_statuses(), explain=True)["cases"]
    for run in case["runs"]:
        for value in run["metrics"].values():
            assert isinstance(value["value"], int | float | None)
            assert value["interval"] is None or [type(end) for end in value["interval"]] == [
                float,
                float,
            ]
        assert all(isinstance(time_s, float) for time_s in run["budget"].values())


def test_report_of_spec_records() -> None:
    record = ceiling_rates.read_verified_spec_record(SPECS[0])
    content = json.loads(report_data.build_ceilings_report([record]).model_dump_json(by_alias=True))
    jsonschema.Draft202012Validator(report_data.report_schema()).validate(content)
    assert (content["summary"], content["cases"]) == ([], [])
    [spec_data] = content["specs"]
    assert (spec_data["id"], len(spec_data["ceilings"])) == (record.id, len(record.benches))
    first = spec_data["ceilings"][0]
    assert (first["name"], first["ceiling"]["value"]) == (
        record.benches[0].name,
        record.ceilings[0].value,
    )
