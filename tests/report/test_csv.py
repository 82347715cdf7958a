"""Records as CSV: one row each, exact numbers, units in the heads, and no cell that a spreadsheet
takes for a formula.
"""

import csv
import io
import json

import pytest

from fixtures import report as made
from steelyard import tasks
from steelyard.metrics.metric_table import list_task_metrics
from steelyard.record.record import Record
from steelyard.report import as_csv

IDENTITY = (
    *(
        "id",
        "created",
        "case",
        "size",
        "changed",
        "key",
        "division",
        "precision",
        "scope",
        "subjects",
        "rows",
        "sample",
    ),
    *("steps", "load", "requests", "engine", "engine_mark"),
    *(
        "engine_version",
        "framework",
        "framework_version",
        "accelerator",
        "accelerators",
        "nodes",
        "plan",
        "tune",
        "weights",
        "providers",
    ),
    *("status", "reasons", "quality", "quality_evaluated"),
)


def read_rows(*records: Record) -> list[dict[str, str]]:
    """Return the rows of the records' CSV, by column."""
    return list(csv.DictReader(io.StringIO(as_csv.render_csv(list(records)), newline="")))


def test_a_record_is_one_row() -> None:
    [row] = read_rows(made.make_record())
    assert list(row)[: len(IDENTITY)] == list(IDENTITY)
    assert {name: row[name] for name in IDENTITY} == {
        "id": "0f3c9a7e5b21",
        "created": "2026-01-02T03:04:05.678+00:00",
        "case": "llama2-7b-mmlu",
        "size": "full",
        "changed": "",
        "key": "4be1c0ffee123456",
        "division": "closed",
        "precision": "bf16",
        "scope": "full",
        "subjects": "",
        "rows": "",
        "sample": "",
        "steps": "",
        "load": "",
        "requests": "",
        "engine": "torch",
        "engine_mark": "ours",
        "engine_version": "2.11.0",
        "framework": "torch",
        "framework_version": "2.11.0",
        "accelerator": "NVIDIA H200",
        "accelerators": "1",
        "nodes": "1",
        "plan": "TP1PP1DP1",
        "tune": "{}",
        "weights": "Llama-2-7b-hf",
        "providers": "{}",
        "status": "valid",
        "reasons": "",
        "quality": "acc",
        "quality_evaluated": "true",
    }
    metrics = {
        "p_infer_core (tokens/s)": "46387.2",
        "p_infer_core_low (tokens/s)": "46301.8",
        "p_infer_core_high (tokens/s)": "46472.6",
        "e2e_time (s)": "412.6",
        "e2e_time_low (s)": "",
        "mem (GiB)": "31.26",
        "harness_overhead (fraction)": "",  # unknown
        "p_core": "",  # a metric of training
        "novel_metric (widgets)": "12.5",  # a metric of a later version
    }
    assert {name: row[name] for name in metrics} == metrics


def test_lines_end_as_in_rfc_4180() -> None:
    text = as_csv.render_csv([made.make_record(), made.make_failed_record()])
    lines = text.split("\r\n")
    assert (len(lines), lines[-1]) == (4, "")
    assert "\n" not in text.replace("\r\n", "")
    assert '"{""batch_tokens"": 1}"' in as_csv.render_csv([made.make_record(tune__batch_tokens=1)])


def test_every_metric_has_a_column_and_the_ends_of_its_interval() -> None:
    heads = [name.partition(" (")[0] for name in read_rows(made.make_record())[0]]
    for task in tasks.load_tasks().values():
        for metric in list_task_metrics(task):
            expected = (
                [metric.name, f"{metric.name}_low", f"{metric.name}_high"] if metric.formula else []
            )
            assert [name for name in expected if name not in heads] == [], task.name
    assert len(heads) == len(set(heads))


def test_the_status_is_that_of_today() -> None:
    [short] = read_rows(made.make_record(**made.WITHOUT_INTERVAL))
    assert (short["status"], short["reasons"]) == ("unproven", "few_steps")
    assert short["tokens_per_device_s_low (tokens/s)"] == ""


def test_another_unit_has_its_own_column() -> None:
    closed, shared = read_rows(made.make_record(), made.make_open_window_record())
    assert (closed["p_infer_core (tokens/s)"], closed["p_infer_core (questions/s)"]) == (
        "46387.2",
        "",
    )
    assert (shared["p_infer_core (tokens/s)"], shared["p_infer_core (questions/s)"]) == (
        "",
        "371.94",
    )
    assert (shared["sample"], shared["scope"], shared["quality_evaluated"]) == (
        "1404",
        "window",
        "false",
    )


def test_settings_reasons_and_changes() -> None:
    origins = made.make_record().case.origins | {"question.seed": "command line"}
    plan = {"nodes": 2, "devices": 8, "tp": 2, "pp": 1, "dp": 8, "launcher": "ssh"}
    engine = {"name": "megatron", "details": {}}
    packages = {"torch": "2.11.0", "megatron-core": "0.16.1"}
    record = made.make_record(
        case__origins=origins,
        tune__pad_to=8,
        tune__env={"NCCL_ALGO": "Ring"},
        plan=plan,
        engine=engine,
        environment__software__packages=packages,
    )
    [row] = read_rows(record)
    assert json.loads(row["tune"]) == {"pad_to": 8, "env": {"NCCL_ALGO": "Ring"}}
    assert (row["accelerators"], row["nodes"], row["plan"]) == ("16", "2", "TP2PP1DP8")
    assert (row["engine"], row["engine_version"], row["framework"]) == (
        "megatron",
        "0.16.1",
        "torch",
    )
    assert row["changed"] == "question.seed"
    assert read_rows(made.make_failed_record())[0]["reasons"] == "oom"


@pytest.mark.parametrize(
    "name,cell",
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1+1", "'+1+1"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'=1"),
        ("\r=1", "'=1"),
        ("\n-1", "'-1"),
        (" =1", "'=1"),
        ("\u200b=1", "'=1"),
        ("＝1", "'＝1"),
        ('a"b,c\r\nd', 'a"b,c d'),
        ("x\x1b[31m\u202ey", "xy"),
        ("plain-name", "plain-name"),
    ],
)
def test_no_cell_is_a_formula(name: str, cell: str) -> None:
    unit = {"hostile": {"value": -1.5, "unit": name}, name: {"value": None, "unit": ""}}
    hostile = made.make_record(
        engine={"name": name, "details": {}}, weights={"source": name}, metrics=unit
    )
    text = as_csv.render_csv([hostile])
    heads, row = csv.reader(io.StringIO(text, newline=""))
    cells = dict(zip(heads, row, strict=True))
    assert (cells["engine"], cells["weights"]) == (cell, cell)
    assert cell in heads
    assert not [head for head in heads if head.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert "-1.5" in row, "a negative number is a number"


def test_numbers_keep_their_digits() -> None:
    value = 0.1 + 0.2
    [row] = read_rows(
        made.make_record(
            metrics={"mfu": {"value": value, "unit": ""}, "energy": {"value": 1e22, "unit": "J"}}
        )
    )
    assert (float(row["mfu"]), row["energy (J)"]) == (value, "1e+22")
