"""The page in three formats and two languages, from made records."""

import base64
import hashlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fixtures.golden import golden
from fixtures.pages import parse_html
from fixtures.report import (
    ENVIRONMENT,
    METRICS,
    make_hostile_record,
    make_record,
    make_records_of_all_statuses,
    make_samples,
)
from steelyard import report
from steelyard.case.resolve import resolve_case
from steelyard.errors import RequestError
from steelyard.report import as_html
from steelyard.report.as_md import escape_markdown
from steelyard.report.chart_geometry import lay_out_lines
from steelyard.report.document import (
    Cell,
    Curve,
    LineChart,
    Page,
    StackedBar,
    Table,
    TableColumn,
    TableRow,
    walk_elements,
)
from steelyard.report.numbers import format_count, format_number, format_setting
from steelyard.report.plain_text import clean_line, clean_lines, display_width, wrap_text


def find_line(text: str, start: str) -> str:
    """Return the first line of the text that begins with `start`."""
    return next(line for line in text.splitlines() if line.startswith(start))


def read_template(name: str) -> str:
    """Return the text of a file in the report's folder of templates."""
    return (Path(as_html.__file__).parent / "templates" / name).read_text("utf-8")


def extract_scripts(text: str) -> list[str]:
    """Return the bodies of the script elements of an HTML text."""
    return re.findall(r"<script>(.*?)</script>", text, re.S)


def compute_csp_hash(text: str) -> str:
    """Return the hash of a text as a content security policy writes it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


VALUES = ["38,120", "38,645", "45,903", "46,387", "62.1%", "45.8%/45.8%", "31.3/139.8", "158,230"]


def test_rows_in_text() -> None:
    text = report.render([make_record()], "text", "en")
    rates = ["p_val_whole", "p_val_core", "p_infer_whole", "*p_infer_core"]
    assert find_line(text, "tool").split() == (
        [
            "tool",
            "precision",
            "division",
            "e2e_time",
            *rates,
            "*MFU",
            "acc(infer/val)",
            "mem(used/total)",
            "energy",
        ]
    )
    assert find_line(text, "#1 torch").split() == [
        "#1",
        "torch",
        "bf16",
        "closed",
        "412.6",
        *VALUES,
    ]
    assert find_line(text, "valid, whole") == "valid, whole"
    name = ["NVIDIA", "A100-SXM4-40GB", "×", "1"]
    assert find_line(text, "NVIDIA A100-SXM4-40GB").split()[:4] == name
    published = [
        "fp32",
        "/",
        "4,143",
        "5,455",
        "5,469",
        "5,676",
        "5,952",
        "53.4%",
        "45.8%/45.8%",
        "35.0/40.0",
        "/",
    ]
    assert [line.split()[2:] for line in text.splitlines() if line.startswith("published [2] ")][
        1
    ] == published
    assert golden("2-published-not-measured-here-1") in text
    assert "Published as fp32, ran as tf32." in text
    assert "- Accelerator:             NVIDIA H200 (139.8 GiB)\n" in text
    assert golden("parallel-strategy-1-1-nodes-devices") in text
    assert find_line(text, "infer ").split() == ["infer", "70.35", "17.1%"]
    assert find_line(text, "sum of the parts").split()[-2:] == ["412.6", "100.0%"]


def test_rows_in_markdown() -> None:
    en, zh = (report.render(make_records_of_all_statuses(), "md", lang) for lang in report.LANGS)
    assert "| #1 torch<br>valid, whole | bf16 | closed | 412.6 | 38,120<br>tokens/s |" in en
    assert "| #2 torch<br>valid, window: 1404 samples | bf16 | open | 412.6 |" in en
    assert "| **371.9**<br>questions/s | **/** | 45.8%/45.8%<br>not evaluated | 31.3/139.8 |" in en
    assert (
        "| **#4 torch**<br>failed, whole | fp32 | closed | / | / | / | / | **/** | **/** | / | / |"
        in en
    )
    assert "| _published \\[1\\]_ | _fp16_ | _/_ | _2,558_ | _8,597_<br>tokens/s |" in en
    assert golden("2-torch-br-1404-bf-16", language="zh") in zh
    assert golden("p_infer_core-io", language="zh") in zh
    assert "\n## 对比\n" in zh
    assert golden("quality-acc-25-1-not-evaluated") in en
    assert en.count("Published as fp16, ran as fp16.") == 1


def test_rows_in_html() -> None:
    rows = parse_html(report.render([make_record()], "html", "en")).rows
    assert ["#1 torch valid, whole", "bf16", "closed", "412.6", *VALUES] in rows
    assert [
        "#1 NVIDIA H200 × 1 · torch · bf16 · closed",
        "62.1%",
        "62.7%",
        "81.2%",
        "66.3%",
        "65.0%",
    ] in rows
    assert [
        "Inference rate, core",
        "p_infer_core",
        "46,387",
        "tokens/s",
        "46,302 – 46,473",
        "",
    ] in rows
    assert [
        "Harness overhead",
        "harness_overhead",
        "/",
        "",
        "/",
        golden("the-bare-pass-was-not-requested"),
    ] in rows
    assert ["novel_metric", "novel_metric", "/"] in rows


@pytest.mark.parametrize("lang", report.LANGS)
def test_html_is_well_formed_and_loads_nothing(lang: str) -> None:
    text = report.render(make_records_of_all_statuses(), "html", lang)
    page = parse_html(text)
    assert page.open == []
    assert page.tags.isdisjoint({"img", "link", "iframe", "object", "base", "form"})
    assert {name for name, _ in page.attributes}.isdisjoint(
        {"src", "xlink:href", "srcset", "onload", "onerror", "style"}
    )
    ids = [value for name, value in page.attributes if name == "id"]
    links = {value for name, value in page.attributes if name == "href"}
    assert len(ids) == len(set(ids))
    assert links == {f"#{anchor}" for anchor in ids if anchor != "open-all"}
    assert extract_scripts(text) == [read_template("page.js")]
    policy = next(
        value
        for name, value in page.attributes
        if name == "content" and value and "default-src" in value
    )
    assert policy.startswith(
        f"default-src 'none'; style-src '{compute_csp_hash(read_template('style.css'))}';"
        f" script-src '{compute_csp_hash(read_template('page.js'))}';"
    )
    assert "@import" not in text
    assert "url(" not in text
    assert f'<html lang="{ {"en": "en", "zh": "zh-CN"}[lang] }">' in text
    assert text.startswith("<!doctype html>")
    assert {"svg", "path"} <= page.tags


@pytest.mark.parametrize("lang", report.LANGS)
def test_hostile_text_is_escaped(lang: str) -> None:
    records = [make_hostile_record(), make_record()]
    html = report.render(records, "html", lang)
    page = parse_html(html)
    assert page.tags.isdisjoint({"img"})
    assert page.open == []
    assert extract_scripts(html) == [read_template("page.js")]
    assert "<script>alert(1)</script>" in page.text
    md = report.render(records, "md", lang)
    fenced = re.compile(r"^(`{3,})text\n.*?\n\1$", re.M | re.S)
    outside = fenced.sub("", md)
    assert len(fenced.findall(md)) == 1
    assert set(re.findall(r"<[^>]*>", outside)) == {"<br>"}
    assert not re.search(r"(?<!\\)`", outside)
    columns = {
        len(re.findall(r"(?<!\\)\|", line))
        for line in outside.splitlines()
        if line.startswith("| ")
    }
    assert columns <= {3, 4, 5, 7, 11, 12, 13}
    text = report.render(records, "text", lang) + report.render_text(
        report.build_summary_page(records, "zh" if lang == "zh" else "en")
    )
    for rendered in (html, md, text):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", rendered)


def test_clean_removes_control_sequences() -> None:
    assert (
        clean_line("a\x1b[31mred\x1b[0m\x1b]0;t\x07 \x9b1mb\r\nc\u202ed\ue000\x00")
        == "ared b cd\ue000"
    )
    assert clean_lines("a\tb\r\nc\rd\u2028e") == "a    b\nc\nd\ne"
    assert clean_line("\ud800x\x1b") == "x"
    assert (
        escape_markdown("a|b<c>`d`*e* _f_ g_h [i](j) \\")
        == "a\\|b&lt;c&gt;\\`d\\`\\*e\\* \\_f\\_ g_h \\[i\\](j) \\\\"
    )


def test_wide_characters_align() -> None:
    assert display_width("推理a") == 5
    assert display_width("e\u0301") == 1
    assert wrap_text("推理计算，吞吐", 8) == ["推理计", "算，吞吐"]
    assert wrap_text("abcdefghij kl", 4) == ["abcd", "efgh", "ij", "kl"]
    rows = (
        TableRow((Cell("推理"), Cell("1"), Cell("x"))),
        TableRow((Cell("ab"), Cell("22,000"), Cell("y"))),
    )
    columns = (TableColumn("名"), TableColumn("n", align="right"), TableColumn("z"))
    assert report.render_text(Page("", "zh", (Table(columns, rows),))) == (
        golden("1-ab-22-000", language="zh")
    )


def test_number_formats() -> None:
    expected = {
        0.6206: "62.1%",
        0.99964: "99.96%",
        0.00421: "0.42%",
        0.0: "0.0%",
        1.0: "100.0%",
        1 - 2**-53: "100.0%",
        1.0402: "104.0%",
        1e-9: "0.000%",
    }
    assert {value: format_number("percent", value) for value in expected} == expected
    assert [
        format_number("number", v)
        for v in (46387.2, 371.94, 59.38, 0.014577, 1.4529e17, 0, None, math.nan, math.inf)
    ] == (["46,387", "371.9", "59.38", "0.01458", "1.453e17", "0", "/", "/", "/"])
    assert [format_number("seconds", v) for v in (2558, 412.6, 9.1, 0.0312)] == [
        "2,558",
        "412.6",
        "9.10",
        "0.031",
    ]
    assert (
        format_count(10854627),
        format_count(True),
        format_setting({"a": 1e-5, "b": None, "c": [1, 2]}),
        format_setting(()),
    ) == ("10,854,627", "true", "a=1e-05, c=[1, 2]", "/")


def test_a_page_has_only_numbers_of_the_record() -> None:
    """With all metrics, parts of the budget and references replaced by one number, only that number
    and those of the machine and the case are on the page.
    """
    other = make_record(
        metrics={name: {"value": 7.0, "unit": "u"} for name in METRICS},
        budget={"all": 7.0},
        case__reference=[],
    )
    tokens = re.split(r"[\s,;()]+(?!\d{3})", report.render([other], "text", "en"))
    decimals = {token for token in tokens if re.fullmatch(r"[\d,]*\d[.,]\d[\d,]*%?", token)}
    setting = {
        "14,042",
        "10,854,627",
        "128.0",
        "139.8",
        "494.7",
        "989.4",
        "99.8",
        "24.04",
        "570.86",
        "12.8",
        "9.10",
        "0.458",
        "0.01",
    }
    assert (
        decimals - setting
        == {
            "7.0",
            "7.00",
            "7.000",
            "7.0/7.0",
            "100.0%",
            "700.0%",
            "45.8%",
        }
        & decimals
    )
    assert decimals & {"46,387", "62.1%", "412.6"} == set()


def test_failed_and_invalid_say_why() -> None:
    text = report.render(make_records_of_all_statuses(), "text", "en")
    assert "quality  acc 0.4321 misses its gate 0.458 within 0.01" in text
    assert "gate   not ok  0.4321 is not within 0.01 of 0.458" in text
    assert golden("oom-the-run-failed-rank-0") in text
    assert "    OutOfMemoryError: CUDA out of memory\n" in text
    assert golden("no-metric-could-be-derived-from") in text


def test_sizes_of_a_case_have_tables_of_their_own() -> None:
    other = {**ENVIRONMENT, "software": {**ENVIRONMENT["software"], "driver": "999.1"}}
    smoke = {
        "case__size": "smoke",
        "case__question": (
            resolve_case("llama2-7b-mmlu", "smoke").case.question.model_dump(mode="json")
        ),
    }
    text = report.render(
        [make_record(), make_record(**smoke), make_record(**smoke, environment=other)], "md", "en"
    )
    assert text.startswith("# Steelyard report\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## llama2-7b-mmlu · full",
        "## llama2-7b-mmlu · smoke",
        "## What the metrics mean",
        "## Runs",
    ]
    assert text.count("- Driver: 570.86") == 2
    assert text.count("- Driver: 999.1") == 1
    first, second = text.partition("## llama2-7b-mmlu · smoke")[::2]
    notice = "The published rows are of size full; runs of size smoke cannot be compared with them."
    # it stands below both tables of the smoke runs
    assert (first.count(notice), second.partition("## What")[0].count(notice)) == (0, 2)
    assert "| NVIDIA H200 × 1<br>#1 |" in first
    assert "| NVIDIA H200 × 1<br>#1, #2 |" in second
    assert golden("nvidia-200-1-amd-epyc-9454") in text


def test_a_bare_record_is_shown() -> None:
    nothing: dict[str, Any] = {
        "site": {},
        "data": {},
        "budget": {},
        "metrics": {},
        "samples": [],
        "telemetry": [],
        "tune": {},
    }
    published = {"source": "", "config": "", "published_as": "", "ran_as": "", "values": {}}
    environment = {"hardware": {"devices": []}, "software": {}, "source": {}}
    bare = make_record(
        environment=environment, weights={"source": None}, case__reference=[published], **nothing
    )
    for name in report.FORMATS:
        assert "/" in report.render([bare], name, "en")


def test_extreme_numbers_are_rendered() -> None:
    telemetry = [
        {
            "device": "GPU-0",
            "period_s": 0.0,
            "columns": {"t_s": [0, 1e30, -1e30, 1], "power_w": [1e30, 1, None, -2]},
        },
        {"device": "GPU-1", "period_s": -1.0, "columns": {"t_s": []}},
    ]
    metrics = {
        "mfu": {"value": 1.7e308, "unit": "", "interval": [-1.7e308, 1.7e308]},
        "p_infer_core": {"value": 5e300, "unit": "tokens/s"},
    }
    budget = {"a": 1e9, "b": -1e9, "c": 1e-300}
    record = make_record(
        telemetry=telemetry,
        metrics=metrics,
        budget=budget,
        environment__hardware__memory_bytes=10**18,
    )
    assert "5.000e300" in report.render([record], "html", "en")


IMPOSSIBLE_VALUES: list[tuple[str, Any]] = [
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [10**400]}}]),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": ["x"]}}]),
    (
        "telemetry",
        [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "power_w": [math.inf]}}],
    ),
    (
        "telemetry",
        [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "power_w": [5e300]}}],
    ),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "sm_clock_mhz": 3}}]),
    (
        "telemetry",
        [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "power_w": [1.0, 2.0]}}],
    ),
    ("metrics", {"mfu": {"value": math.inf, "unit": ""}}),
    ("budget", {"a": math.nan}),
    ("environment__hardware__memory_bytes", 10**400),
]


@pytest.mark.parametrize(("place", "value"), IMPOSSIBLE_VALUES, ids=lambda x: str(x)[:60])
def test_impossible_values_are_refused(place: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        make_record(**{place: value})


def test_charts_of_a_scoring_run() -> None:
    blocks = list(walk_elements(report.build_report_page([make_record()], "en").elements))
    charts = [block for block in blocks if isinstance(block, LineChart)]
    assert [chart.title for chart in charts] == [
        "Rate of each batch, infer pass",
        "Device power",
        "Device clock",
    ]
    first = make_record().samples[0]
    assert charts[0].series[0].points[0] == (first.end_s / 2, 32768 / first.end_s)
    assert (charts[0].level, charts[0].level_label) == (46387.2, "p_infer_core")
    assert charts[1].series[0].points[50] == (25.0, None)
    [stack] = [block for block in blocks if isinstance(block, StackedBar)]
    assert [part.name for part in stack.parts] == [
        "val",
        "infer",
        "compile",
        "load",
        "import",
        "harness",
    ]
    drawn = lay_out_lines(
        LineChart(
            "t", "x", "y", (Curve("a", ((0.0, 0.0), (10.0, 50.0), (15.0, None), (20.0, 98.0))),)
        )
    )
    assert drawn.paths[0] == "M0.0 180.0h0L500.0 90.0M1000.0 3.6h0"
    assert [tick.text for tick in drawn.y_ticks] == ["0", "20", "40", "60", "80", "100"]


def test_many_samples_are_merged_by_their_totals() -> None:
    record = make_record(samples=make_samples(count=1000))
    [chart, *_] = [
        block
        for block in walk_elements(report.build_report_page([record], "en").elements)
        if isinstance(block, LineChart)
    ]
    points = chart.series[0].points
    assert len(points) == 334
    three = record.samples[:3]
    assert points[0][1] == pytest.approx(3 * 32768 / three[2].end_s)


@pytest.mark.parametrize(
    ("format", "lang", "said"), [("pdf", "en", "text, md, html"), ("md", "fr", "en, zh")]
)
def test_unknown_formats_and_languages_are_refused(format: str, lang: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        report.render([make_record()], format, lang)
    with pytest.raises(RequestError, match="no record"):
        report.render([], "md", "en")


def test_steps_without_work_are_not_drawn() -> None:
    steps = [{**step, "pass": "val"} for step in make_samples(count=3)]
    steps.append({**steps[-1], "step": 3, "start_s": 2.2, "end_s": 2.3, "counts": {}})
    [chart, *_] = [
        block
        for block in walk_elements(
            report.build_report_page([make_record(samples=steps)], "en").elements
        )
        if isinstance(block, LineChart)
    ]
    assert (chart.title, len(chart.series[0].points), chart.level) == (
        "Rate of each batch, val pass",
        3,
        None,
    )


def test_config_is_written_as_published_pages_do() -> None:
    plan = {"nodes": 2, "devices": 8, "tp": 2, "pp": 1, "dp": 8, "launcher": "local"}
    record = make_record(plan=plan)
    text = report.render([record], "text", "en")
    assert "#1 NVIDIA H200 × 16 · torch · bf16 · closed · 2x8 TP2PP1DP8" in text
    assert "2x8 (nodes x devices), TP2PP1DP8, launcher local" in text
    assert find_line(text, "#1 torch  ").split()[:6] == [
        "#1",
        "torch",
        "bf16",
        "closed",
        "2x8",
        "TP2PP1DP8",
    ]
    assert "torch · plan 2x8 TP2DP8" in report.render_text(report.build_summary_page([record]))
    assert "2x8（节点数 x 每节点卡数），TP2PP1DP8，启动器 local" in report.render(
        [record], "text", "zh"
    )
