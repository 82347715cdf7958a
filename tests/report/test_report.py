"""The page in three formats and two languages, from made-up records."""

import base64
import hashlib
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fixtures.report import ENVIRONMENT, METRICS, everything, hostile, make, question, samples, training
from steelyard import report
from steelyard.case.resolve import resolve
from steelyard.errors import RequestError
from steelyard.metrics import table as metrics
from steelyard.record.record import Record
from steelyard.report import as_html
from steelyard.report.as_md import escape
from steelyard.report.document import Cell, Column, Curve, Lines, Page, Stack, Table, TableRow, walk
from steelyard.report.numbers import counted, formed, spelled
from steelyard.report.plain import clean, lines, width, wrap
from steelyard.report.plot import plot


def line_with(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def html_text(text: str) -> "Reader":
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


class Reader(HTMLParser):
    """Tags, attributes and table rows of a page; an unclosed or crossed tag is an error."""

    VOID = ("meta", "line", "path", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "small" and self.rows and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += " "
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def own(name: str) -> str:
    return (Path(as_html.__file__).parent / "templates" / name).read_text("utf-8")


def scripts(text: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", text, re.S)


def sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


VALUES = ["38,120", "38,645", "45,903", "46,387", "62.1%", "45.8%/45.8%", "31.3/139.8", "158,230"]


def test_rows_in_text() -> None:
    text = report.render([make()], "text", "en")
    rates = ["p_val_whole", "p_val_core", "p_infer_whole", "*p_infer_core"]
    assert line_with(text, "tool").split() == (
        ["tool", "precision", "division", "e2e_time", *rates, "*MFU", "acc(infer/val)", "mem(used/total)", "energy"]
    )
    assert line_with(text, "#1 torch").split() == ["#1", "torch", "bf16", "closed", "412.6", *VALUES]
    assert line_with(text, "valid, full") == "valid, full"
    name = ["NVIDIA", "A100-SXM4-40GB", "×", "1"]
    assert line_with(text, "NVIDIA A100-SXM4-40GB").split()[:4] == name
    published = ["fp32", "/", "4,143", "5,455", "5,469", "5,676", "5,952", "53.4%", "45.8%/45.8%", "35.0/40.0", "/"]
    assert [line.split()[2:] for line in text.splitlines() if line.startswith("published [2] ")][1] == published
    assert "[2] Published, not measured here: 1x NVIDIA A100-SXM4-40GB" in text
    assert "Published as fp32, ran as tf32." in text
    assert "- Accelerator:             NVIDIA H200 (139.8 GiB)\n" in text
    assert "- Parallel strategy:      1x1 (nodes x devices), TP1PP1DP1, launcher local\n" in text
    assert line_with(text, "infer ").split() == ["infer", "70.35", "17.1%"]
    assert line_with(text, "sum of the parts").split()[-2:] == ["412.6", "100.0%"]


def test_rows_in_markdown() -> None:
    en, zh = (report.render(everything(), "md", lang) for lang in report.LANGS)
    assert "| #1 torch<br>valid, full | bf16 | closed | 412.6 | 38,120<br>tokens/s |" in en
    assert "| #2 torch<br>valid, window: 1404 samples | bf16 | open | 412.6 |" in en
    assert "| **371.9**<br>questions/s | **/** | 45.8%/45.8%<br>not evaluated | 31.3/139.8 |" in en
    assert "| **#4 torch**<br>failed, full | fp32 | closed | / | / | / | / | **/** | **/** | / | / |" in en
    assert "| _published \\[1\\]_ | _fp16_ | _/_ | _2,558_ | _8,597_<br>tokens/s |" in en
    assert "| #2 torch<br>有效，窗口：1404 个样本 | bf16 | open |" in zh
    assert "| 推理计算吞吐量 | p_infer_core | 推理遍：不包含 IO 部分耗时 |" in zh
    assert "\n## 对比\n" in zh
    assert "- Quality: acc = 25.1%, not evaluated: the scope is a window" in en
    assert en.count("Published as fp16, ran as fp16.") == 1


def test_rows_in_html() -> None:
    rows = html_text(report.render([make()], "html", "en")).rows
    assert ["#1 torch valid, full", "bf16", "closed", "412.6", *VALUES] in rows
    assert ["#1 NVIDIA H200 × 1 · torch · bf16 · closed", "62.1%", "62.7%", "81.2%", "66.3%", "65.0%"] in rows
    assert ["Inference rate, core", "p_infer_core", "46,387", "tokens/s", "46,302 – 46,473", ""] in rows
    assert [
        "Harness overhead",
        "harness_overhead",
        "/",
        "",
        "/",
        "the bare pass was not requested (--passes infer,bare)",
    ] in rows
    assert ["novel_metric", "novel_metric", "/"] in rows


@pytest.mark.parametrize("lang", report.LANGS)
def test_html_is_whole_and_loads_nothing(lang: str) -> None:
    text = report.render(everything(), "html", lang)
    page = html_text(text)
    assert page.open == []
    assert page.tags.isdisjoint({"img", "link", "iframe", "object", "base", "form"})
    assert {name for name, _ in page.attributes}.isdisjoint({"src", "xlink:href", "srcset", "onload", "onerror", "style"})
    ids = [value for name, value in page.attributes if name == "id"]
    links = {value for name, value in page.attributes if name == "href"}
    assert len(ids) == len(set(ids))
    assert links == {f"#{one}" for one in ids if one != "open-all"}
    assert scripts(text) == [own("page.js")]
    policy = next(value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    assert policy.startswith(
        f"default-src 'none'; style-src '{sha256(own('style.css'))}'; script-src '{sha256(own('page.js'))}';"
    )
    assert "@import" not in text
    assert "url(" not in text
    assert f'<html lang="{ {"en": "en", "zh": "zh-CN"}[lang] }">' in text
    assert text.startswith("<!doctype html>")
    assert {"svg", "path"} <= page.tags


@pytest.mark.parametrize("lang", report.LANGS)
def test_hostile_text_stays_text(lang: str) -> None:
    records = [hostile(), make()]
    html = report.render(records, "html", lang)
    page = html_text(html)
    assert page.tags.isdisjoint({"img"})
    assert page.open == []
    assert scripts(html) == [own("page.js")]
    assert "<script>alert(1)</script>" in page.text
    md = report.render(records, "md", lang)
    fenced = re.compile(r"^(`{3,})text\n.*?\n\1$", re.M | re.S)
    outside = fenced.sub("", md)
    assert len(fenced.findall(md)) == 1
    assert set(re.findall(r"<[^>]*>", outside)) == {"<br>"}
    assert not re.search(r"(?<!\\)`", outside)
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in outside.splitlines() if line.startswith("| ")}
    assert columns <= {3, 4, 5, 7, 11, 12, 13}
    text = report.render(records, "text", lang) + report.text(report.table(records, "zh" if lang == "zh" else "en"))
    for out in (html, md, text):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)


def test_clean() -> None:
    assert clean("a\x1b[31mred\x1b[0m\x1b]0;t\x07 \x9b1mb\r\nc\u202ed\ue000\x00") == "ared b cd\ue000"
    assert lines("a\tb\r\nc\rd\u2028e") == "a    b\nc\nd\ne"
    assert clean("\ud800x\x1b") == "x"
    assert escape("a|b<c>`d`*e* _f_ g_h [i](j) \\") == "a\\|b&lt;c&gt;\\`d\\`\\*e\\* \\_f\\_ g_h \\[i\\](j) \\\\"


def test_wide_characters_align() -> None:
    assert width("推理a") == 5
    assert width("e\u0301") == 1
    assert wrap("推理计算，吞吐", 8) == ["推理计", "算，吞吐"]
    assert wrap("abcdefghij kl", 4) == ["abcd", "efgh", "ij", "kl"]
    rows = (TableRow((Cell("推理"), Cell("1"), Cell("x"))), TableRow((Cell("ab"), Cell("22,000"), Cell("y"))))
    columns = (Column("名"), Column("n", align="right"), Column("z"))
    assert report.text(Page("", "zh", (Table(columns, rows),))) == (
        "名         n  z\n----  ------  -\n推理       1  x\nab    22,000  y\n"
    )


def test_numbers() -> None:
    said = {0.6206: "62.1%", 0.99964: "99.96%", 0.00421: "0.42%", 0.0: "0.0%", 1.0: "100.0%", 1.0402: "104.0%", 1e-9: "0.000%"}
    assert {value: formed("percent", value) for value in said} == said
    assert [formed("number", v) for v in (46387.2, 371.94, 59.38, 0.014577, 1.4529e17, 0, None, math.nan, math.inf)] == (
        ["46,387", "371.9", "59.38", "0.01458", "1.453e17", "0", "/", "/", "/"]
    )
    assert [formed("seconds", v) for v in (2558, 412.6, 9.1, 0.0312)] == ["2,558", "412.6", "9.10", "0.031"]
    assert (counted(10854627), counted(True), spelled({"a": 1e-5, "b": None, "c": [1, 2]})) == (
        "10,854,627",
        "true",
        "a=1e-05, c=[1, 2]",
    )


def test_no_number_but_the_records() -> None:
    """With every metric, part and reference replaced by one number, only that one and those of the setting are left."""
    other = make(metrics={name: {"value": 7.0, "unit": "u"} for name in METRICS}, budget={"all": 7.0}, case__reference=[])
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
    assert decimals - setting == {"7.0", "7.00", "7.000", "7.0/7.0", "100.0%", "700.0%", "45.8%"} & decimals
    assert decimals & {"46,387", "62.1%", "412.6"} == set()


def test_failed_and_invalid_say_why() -> None:
    text = report.render(everything(), "text", "en")
    assert "quality  acc 0.4321 misses its gate 0.458 within 0.01" in text
    assert "gate   not ok  0.4321 is not within 0.01 of 0.458" in text
    assert "oom   The run failed: “rank 0 ran out of device\n      memory”" in text
    assert "    OutOfMemoryError: CUDA out of memory\n" in text
    assert "No metric could be derived from this run." in text


def test_sizes_of_a_case_have_tables_of_their_own() -> None:
    other = {**ENVIRONMENT, "software": {**ENVIRONMENT["software"], "driver": "999.1"}}
    smoke = {
        "case__size": "smoke",
        "case__question": resolve("llama2-7b-mmlu", "smoke").case.question.model_dump(mode="json"),
    }
    text = report.render([make(), make(**smoke), make(**smoke, environment=other)], "md", "en")
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
    alone = "The published rows are of size full; runs of size smoke cannot be compared with them."
    assert (first.count(alone), second.partition("## What")[0].count(alone)) == (0, 2)  # below both tables of its values
    assert "| NVIDIA H200 × 1<br>#1 |" in first
    assert "| NVIDIA H200 × 1<br>#1, #2 |" in second
    assert (
        "- NVIDIA H200 × 1: AMD EPYC 9454 48-Core Processor, 16 cores, 128.0 GiB · Ubuntu 24.04 · driver 999.1 · 1 run\n"
        in text
    )


def test_training_has_its_own_columns() -> None:
    values = {"p_core": 42.4, "p_train": 42.4, "p_whole": 36.5, "loss": 2.9, "mfu": 0.035, "e2e_time": 2763.0}
    metrics = {name: {"value": value, "unit": "samples/s" if name[0] == "p" else ""} for name, value in values.items()}
    origins = {"tune.compile": "case", "tune.env.NCCL_ALGO": "command line", "tune.warmup": "default"}
    tune = {"compile": True, "env": {"NCCL_ALGO": "ring"}, "warmup": 2}
    record = make(case__question=question(), metrics=metrics, case__reference=[], case__origins=origins, tune=tune)
    rows = html_text(report.render([record], "html", "en")).rows
    tuned = "compile=true, env={NCCL_ALGO=ring}"
    measured = ["2,763", "36.50", "42.40", "42.40", "3.5%", "2.900", "/"]
    assert ["#1 torch valid, full", "bf16", "1x1", "TP1PP1DP1", tuned, *measured] in rows


PUBLISHED = {"source": "page", "config": "8x A100, TP2PP4DP1 SH1", "published_as": "fp16 O2", "ran_as": "fp16", "note": None}
STAGED = PUBLISHED | {"values": {"config": "1x8", "tokens_per_device_s": 3722, "mem_stages": "46.80*2 + 38.93*2"}}
PADDED = PUBLISHED | {"values": {"tokens_per_device_s_padded": 4318.9, "loss": 2.9, "mem": 75.0, "mem_total": 80.0}}


def trained(**changes: Any) -> Record:
    """A pipeline of two stages that warms up for a step; the second stage is slower."""
    return training(((2.0, 1.0, 1.0, 1.0), (2.0, 1.5, 1.0, 2.0)), plan=(1, 2, 1), **changes)


def test_a_run_of_training() -> None:
    rows = html_text(report.render([trained(case__reference=[STAGED, PADDED])], "html", "en")).rows
    [head] = [row for row in rows if row[0] == "tool"]
    names = ["tool", "precision", "config", "parallel", "fix_hp", "e2e_time s"]
    names += ["p_whole tokens/s", "p_train tokens/s", "*p_core tokens/s"]
    names += ["token/p/s tokens/s/device", "*MFU", "loss nats", "held-out loss(before/after) nats", "mem(used/total) GiB"]
    assert head == [*names, "mem_predicted GiB", "mem_stages", "energy J", "tokens_per_joule tokens/J"]
    settings = ["#1 torch valid, full", "bf16", "1x2", "TP1PP2DP1 SH1", "sharding=1", "412.6"]
    rates = ["61.54", "61.54", "88.89", "33.33", "11.6%", "6.000", "9.000/6.000", "40.0/139.8", "0.0", "40.00*1 + 39.00*1"]
    assert [*settings, *rates, "750.0", "0.4000"] in rows
    unknown = ["/"] * 6
    published = ["fp16 O2 ran fp16", "1x8", *unknown, "3,722", *unknown[1:], "46.80*2 + 38.93*2", "/", "/"]
    assert ["published [1]", *published] in rows
    padded = ["/"] * 7 + ["4,319 padding counted", "/", "2.900", "/", "75.0/80.0", "/", "/", "/", "/"]
    assert ["published [2]", "fp16 O2 ran fp16", *padded] in rows
    assert ["0", "cuda:0", "PP 1 of 2", "40.0", "3.0", "4.0", "5.00", "1.00", "1.00", "2.000e-6"] in rows
    assert ["1", "cuda:1", "PP 2 of 2", "39.0", "3.0", "4.0", "6.50", "1.50", "2.00", "2.000e-6"] in rows


@pytest.mark.parametrize("lang", report.LANGS)
@pytest.mark.parametrize("format", report.FORMATS)
def test_training_in_every_format(format: str, lang: str) -> None:
    text = report.render([trained(case__reference=[STAGED, PADDED]), trained(status="invalid")], format, lang)
    said = {
        "en": (
            "Training data set",
            "Training tool",
            "Slowest step",
            "Held-out loss before",
            "Memory predicted",
            "schedule=cosine",
        ),
        "zh": ("训练数据集", "训练工具", "最慢步时", "训练前留出集损失", "预测显存", "schedule=cosine"),
    }[lang]
    assert [one for one in said if one not in text] == []
    assert re.search(r"40\.00\\?\*1 \+ 39\.00\\?\*1", text)
    if format == "html":
        assert html_text(text).open == []


@pytest.mark.parametrize(
    ("lang", "titles"), [("en", ["Loss of each step", "Rate of each step"]), ("zh", ["每步损失", "每步速率"])]
)
def test_charts_of_training(lang: Any, titles: list[str]) -> None:
    record = trained(losses=[9.0, None, 7.0, 6.0], aside={1: ("evaluate", 0.5)})
    loss, rate = [block for block in walk(report.page([record], lang).blocks) if isinstance(block, Lines)]
    assert [loss.title, rate.title] == titles
    assert [one.points for one in loss.series] == [((0.0, 9.0), (1.0, None), (2.0, 7.0), (3.0, 6.0))]
    assert [[y for _, y in one.points] for one in rate.series] == [[50.0, 100.0, 100.0, 100.0], [50.0, 100 / 1.5, 100.0, 50.0]]
    [alone, level] = [block for block in walk(report.page([training()], lang).blocks) if isinstance(block, Lines)]
    assert (alone.level, level.level, level.level_label) == (None, 100 / 0.75, "p_core")


def test_every_metric_of_training_has_a_name_in_both_languages() -> None:
    for name in training().metrics:
        row = metrics.row(name)
        assert row.formula is not None
        assert all(all(row.words(lang)) for lang in report.LANGS)


def test_a_training_run_that_left_nothing_is_shown() -> None:
    record = trained(passes=[], samples=[], ranks=[], telemetry=[], outputs={})
    for name in report.FORMATS:
        assert "TP1PP2DP1 SH1" in report.render([record], name, "en")


def test_a_bare_record_is_shown() -> None:
    nothing: dict[str, Any] = {"site": {}, "data": {}, "budget": {}, "metrics": {}, "samples": [], "telemetry": [], "tune": {}}
    published = {"source": "", "config": "", "published_as": "", "ran_as": "", "values": {}}
    environment = {"hardware": {"devices": []}, "software": {}, "source": {}}
    bare = make(environment=environment, weights={"source": None}, case__reference=[published], **nothing)
    for name in report.FORMATS:
        assert "/" in report.render([bare], name, "en")


def test_absurd_numbers_do_not_stop_a_page() -> None:
    telemetry = [
        {"device": "GPU-0", "period_s": 0.0, "columns": {"t_s": [0, 1e30, -1e30, 1], "power_w": [1e30, 1, None, -2]}},
        {"device": "GPU-1", "period_s": -1.0, "columns": {"t_s": []}},
    ]
    metrics = {
        "mfu": {"value": 1.7e308, "unit": "", "interval": [-1.7e308, 1.7e308]},
        "p_infer_core": {"value": 5e300, "unit": "tokens/s"},
    }
    budget = {"a": 1e9, "b": -1e9, "c": 1e-300}
    record = make(telemetry=telemetry, metrics=metrics, budget=budget, environment__hardware__memory_bytes=10**18)
    assert "5.000e300" in report.render([record], "html", "en")


ABSURD: list[tuple[str, Any]] = [
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [10**400]}}]),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": ["x"]}}]),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "power_w": [math.inf]}}]),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "power_w": [5e300]}}]),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "sm_clock_mhz": 3}}]),
    ("telemetry", [{"device": "a", "period_s": 1.0, "columns": {"t_s": [1.0], "power_w": [1.0, 2.0]}}]),
    ("metrics", {"mfu": {"value": math.inf, "unit": ""}}),
    ("budget", {"a": math.nan}),
    ("environment__hardware__memory_bytes", 10**400),
]


@pytest.mark.parametrize(("place", "value"), ABSURD, ids=lambda x: str(x)[:60])
def test_what_no_machine_says_is_no_record(place: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        make(**{place: value})


def test_charts() -> None:
    blocks = list(walk(report.page([make()], "en").blocks))
    charts = [block for block in blocks if isinstance(block, Lines)]
    assert [chart.title for chart in charts] == ["Rate of each batch, infer pass", "Device power", "Device clock"]
    first = make().samples[0]
    assert charts[0].series[0].points[0] == (first.end_s / 2, 32768 / first.end_s)
    assert (charts[0].level, charts[0].level_label) == (46387.2, "p_infer_core")
    assert charts[1].series[0].points[50] == (25.0, None)
    [stack] = [block for block in blocks if isinstance(block, Stack)]
    assert [part.name for part in stack.parts] == ["val", "infer", "compile", "load", "import", "harness"]
    drawn = plot(Lines("t", "x", "y", (Curve("a", ((0.0, 0.0), (10.0, 50.0), (15.0, None), (20.0, 98.0))),)))
    assert drawn.paths[0].d == "M0.0 180.0h0L500.0 90.0M1000.0 3.6h0"
    assert [tick.text for tick in drawn.y_ticks] == ["0", "20", "40", "60", "80", "100"]


def test_many_samples_are_put_together_as_totals() -> None:
    record = make(samples=samples(count=1000))
    [chart, *_] = [block for block in walk(report.page([record], "en").blocks) if isinstance(block, Lines)]
    points = chart.series[0].points
    assert len(points) == 334
    three = record.samples[:3]
    assert points[0][1] == pytest.approx(3 * 32768 / three[2].end_s)


@pytest.mark.parametrize(("format", "lang", "said"), [("pdf", "en", "text, md, html"), ("md", "fr", "en, zh")])
def test_unknown_requests(format: str, lang: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        report.render([make()], format, lang)
    with pytest.raises(RequestError, match="no record"):
        report.render([], "md", "en")


def test_steps_without_work_are_not_drawn() -> None:
    steps = [{**step, "pass": "val"} for step in samples(count=3)]
    steps.append({**steps[-1], "step": 3, "start_s": 2.2, "end_s": 2.3, "counts": {}})
    [chart, *_] = [block for block in walk(report.page([make(samples=steps)], "en").blocks) if isinstance(block, Lines)]
    assert (chart.title, len(chart.series[0].points), chart.level) == ("Rate of each batch, val pass", 3, None)


def scaled(devices: int, rate: float, ends: tuple[float, float] | None = None, **changes: Any) -> Record:
    """A run on so many devices of one node, each of which does so many tokens a second."""
    metrics = {"tokens_per_device_s": {"value": rate, "unit": "tokens/s/device", "interval": ends}}
    plan = {"nodes": 1, "devices": devices, "tp": 1, "pp": 1, "dp": devices, "launcher": "local"}
    return make(plan=plan, metrics=metrics, id=f"{devices:012}", **changes)


SCALED = [scaled(1, 1000.0, (970.0, 1040.0)), scaled(8, 800.0, (776.0, 840.0)), scaled(8, 820.0), scaled(2, 950.0)]


def test_scaling_in_html() -> None:
    rows = html_text(report.render(SCALED[:2], "html", "en")).rows
    ends = ["6.080 – 6.773", "76.0% – 84.7%"]
    assert ["config", "plan", "runs", "rate tokens/s", "speed-up", "efficiency", "interval from"] in rows
    assert ["1x1", "TP1PP1DP1", "1", "1,000 970.0 – 1,040", "1.000 base", "100.0%", "the run's steps"] in rows
    assert ["1x8", "TP1PP1DP8", "1", "6,400 6,208 – 6,720", f"6.400 {ends[0]}", f"80.0% {ends[1]}", "the run's steps"] in rows


def test_scaling_in_markdown() -> None:
    en, zh = (report.render(SCALED, "md", lang) for lang in report.LANGS)
    assert "\n### Scaling\n\n**Runs #1, #2, #3, #4: torch · bf16 · closed · full · NVIDIA H200**\n" in en
    assert "| 1x2 | TP1PP1DP2 | 1 | 1,900 | 1.900 | 95.0% | / |" in en
    half = 12.706 * 80  # of 6,400 and 6,560: t of one degree of freedom, standard error 80
    assert f"| 1x8 | TP1PP1DP8 | 2 | 6,480<br>{6480 - half:,.0f} – {6480 + half:,.0f} |" in en
    assert "| spread of the runs |" in en
    assert "\n### 扩展性\n" in zh
    assert "| 配置 | 并行策略 | 运行次数 | **吞吐量**<br>tokens/s | 加速比 | 扩展效率 | 区间来源 |" in zh


def test_scaling_is_shown_where_there_are_two_numbers_of_devices() -> None:
    for records in ([SCALED[1], SCALED[2]], [SCALED[0], scaled(8, 800.0, status="invalid")], [make()]):
        assert "Scaling" not in report.render(records, "text", "en")
        assert report.scaling(records) is None


def test_groups_of_a_sweep_say_in_what_they_differ() -> None:
    records = [scaled(n, 100.0, tune__batch_tokens=size) for n in (1, 2) for size in (64, 128)]
    page = report.scaling(records, "en")
    assert page is not None
    text = report.text(page)
    start = "Scaling: llama2-7b-mmlu · full · torch · bf16 · closed · full · NVIDIA H200 · batch_tokens="
    assert [line for line in text.splitlines() if line.startswith("Scaling")] == [f"{start}64", f"{start}128"]
    assert text.count("Config: nodes x devices.") == 1


def test_config_is_written_as_published_pages_do() -> None:
    plan = {"nodes": 2, "devices": 8, "tp": 2, "pp": 1, "dp": 8, "launcher": "local"}
    record = make(plan=plan)
    text = report.render([record], "text", "en")
    assert "#1 NVIDIA H200 × 16 · torch · bf16 · closed · 2x8 TP2PP1DP8" in text
    assert "2x8 (nodes x devices), TP2PP1DP8, launcher local" in text
    assert line_with(text, "#1 torch  ").split()[:6] == ["#1", "torch", "bf16", "closed", "2x8", "TP2PP1DP8"]
    assert "torch · plan 2x8 TP2DP8" in report.text(report.table([record]))
    assert "2x8（节点数 x 每节点卡数），TP2PP1DP8，启动器 local" in report.render([record], "text", "zh")
