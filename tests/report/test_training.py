"""Training runs on the page: their columns, published rows and charts, in every format and
language.
"""

import re
from typing import Any

import pytest

from fixtures.pages import parse_html
from fixtures.report import make_record, make_train_question, make_training_record
from steelyard import report
from steelyard.metrics import metric_table as metrics
from steelyard.record.record import Record
from steelyard.report.document import LineChart, walk_elements


def test_training_has_its_own_columns() -> None:
    values = {
        "p_core": 42.4,
        "p_train": 42.4,
        "p_whole": 36.5,
        "loss": 2.9,
        "mfu": 0.035,
        "e2e_time": 2763.0,
    }
    metrics = {
        name: {"value": value, "unit": "samples/s" if name[0] == "p" else ""}
        for name, value in values.items()
    }
    origins = {
        "tune.compile": "case",
        "tune.env.NCCL_ALGO": "command line",
        "tune.warmup": "default",
    }
    tune = {"compile": True, "env": {"NCCL_ALGO": "ring"}, "warmup": 2}
    record = make_record(
        case__question=make_train_question(),
        metrics=metrics,
        case__reference=[],
        case__origins=origins,
        tune=tune,
    )
    rows = parse_html(report.render([record], "html", "en")).rows
    tuned = "compile=true, env={NCCL_ALGO=ring}"
    measured = ["2,763", "36.50", "42.40", "42.40", "3.5%", "2.900", "/"]
    assert ["#1 torch valid, whole", "bf16", "1x1", "TP1PP1DP1", tuned, *measured] in rows


PUBLISHED = {
    "source": "page",
    "config": "8x A100, TP2PP4DP1 SH1",
    "published_as": "fp16 O2",
    "ran_as": "fp16",
    "note": None,
}
STAGED = PUBLISHED | {
    "values": {"config": "1x8", "tokens_per_device_s": 3722, "mem_stages": "46.80*2 + 38.93*2"}
}
PADDED = PUBLISHED | {
    "values": {"tokens_per_device_s_padded": 4318.9, "loss": 2.9, "mem": 75.0, "mem_total": 80.0}
}


def make_pipeline_record(**changes: Any) -> Record:
    """Return a training record of two pipeline stages with one step of warm-up; the second stage is
    slower.
    """
    return make_training_record(
        ((2.0, 1.0, 1.0, 1.0), (2.0, 1.5, 1.0, 2.0)), plan=(1, 2, 1), **changes
    )


def test_rows_of_a_training_run() -> None:
    rows = parse_html(
        report.render([make_pipeline_record(case__reference=[STAGED, PADDED])], "html", "en")
    ).rows
    [head] = [row for row in rows if row[0] == "tool"]
    names = ["tool", "precision", "config", "parallel", "fix_hp", "e2e_time s"]
    names += ["p_whole tokens/s", "p_train tokens/s", "*p_core tokens/s"]
    names += [
        "token/p/s tokens/s/device",
        "*MFU",
        "loss nats",
        "held-out loss(before/after) nats",
        "mem(used/total) GiB",
    ]
    assert head == [
        *names,
        "mem_predicted GiB",
        "mem_stages",
        "energy J",
        "tokens_per_joule tokens/J",
    ]
    settings = ["#1 torch unproven, whole", "bf16", "1x2", "TP1PP2DP1 SH1", "sharding=1", "412.6"]
    rates = [
        "61.54",
        "61.54",
        "88.89",
        "33.33",
        "11.6%",
        "6.000",
        "9.000/6.000",
        "40.0/139.8",
        "0.0",
        "40.00*1 + 39.00*1",
    ]
    assert [*settings, *rates, "750.0", "0.4000"] in rows
    unknown = ["/"] * 6
    published = [
        "fp16 O2 ran fp16",
        "1x8",
        *unknown,
        "3,722",
        *unknown[1:],
        "46.80*2 + 38.93*2",
        "/",
        "/",
    ]
    assert ["published [1]", *published] in rows
    padded = ["/"] * 7 + [
        "4,319 padding counted",
        "/",
        "2.900",
        "/",
        "75.0/80.0",
        "/",
        "/",
        "/",
        "/",
    ]
    assert ["published [2]", "fp16 O2 ran fp16", *padded] in rows
    assert [
        "0",
        "cuda:0",
        "PP 1 of 2",
        "40.0",
        "3.0",
        "4.0",
        "5.00",
        "1.00",
        "1.00",
        "2.000e-6",
    ] in rows
    assert [
        "1",
        "cuda:1",
        "PP 2 of 2",
        "39.0",
        "3.0",
        "4.0",
        "6.50",
        "1.50",
        "2.00",
        "2.000e-6",
    ] in rows


@pytest.mark.parametrize("lang", report.LANGS)
@pytest.mark.parametrize("format", report.FORMATS)
def test_training_in_every_format(format: str, lang: str) -> None:
    text = report.render(
        [
            make_pipeline_record(case__reference=[STAGED, PADDED]),
            make_pipeline_record(status="invalid"),
        ],
        format,
        lang,
    )
    expected = {
        "en": (
            "Training data set",
            "Training tool",
            "Slowest step",
            "Held-out loss before",
            "Memory predicted",
            "schedule=cosine",
        ),
        "zh": (
            "训练数据集",
            "训练工具",
            "最慢步时",
            "训练前留出集损失",
            "预测显存",
            "schedule=cosine",
        ),
    }[lang]
    assert [phrase for phrase in expected if phrase not in text] == []
    assert re.search(r"40\.00\\?\*1 \+ 39\.00\\?\*1", text)
    if format == "html":
        assert parse_html(text).open == []


@pytest.mark.parametrize(
    ("lang", "titles"),
    [("en", ["Loss of each step", "Rate of each step"]), ("zh", ["每步损失", "每步速率"])],
)
def test_charts_of_training(lang: Any, titles: list[str]) -> None:
    record = make_pipeline_record(losses=[9.0, None, 7.0, 6.0], pauses={1: ("evaluate", 0.5)})
    loss, rate = [
        block
        for block in walk_elements(report.build_report_page([record], lang).elements)
        if isinstance(block, LineChart)
    ]
    assert [loss.title, rate.title] == titles
    assert [curve.points for curve in loss.series] == [
        ((0.0, 9.0), (1.0, None), (2.0, 7.0), (3.0, 6.0))
    ]
    assert [[y for _, y in curve.points] for curve in rate.series] == [
        [50.0, 100.0, 100.0, 100.0],
        [50.0, 100 / 1.5, 100.0, 50.0],
    ]
    [single_loss, single_rate] = [
        block
        for block in walk_elements(
            report.build_report_page([make_training_record()], lang).elements
        )
        if isinstance(block, LineChart)
    ]
    assert (single_loss.level, single_rate.level, single_rate.level_label) == (
        None,
        100 / 0.75,
        "p_core",
    )


def test_every_metric_of_training_has_a_name_in_both_languages() -> None:
    for name in make_training_record().metrics:
        row = metrics.find_metric(name)
        assert row.formula is not None
        assert all(all(row.meaning(lang)) for lang in report.LANGS)


def test_a_training_run_without_samples_is_shown() -> None:
    record = make_pipeline_record(passes=[], samples=[], ranks=[], telemetry=[], outputs={})
    for name in report.FORMATS:
        assert "TP1PP2DP1 SH1" in report.render([record], name, "en")
