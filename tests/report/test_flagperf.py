"""Pages in the form of FlagPerf's published ones: the same headings, labels, lists and columns,
with cells from records.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fixtures import report as made
from fixtures.cases import resolve_with_fixed_tune
from fixtures.golden import golden
from steelyard.case import resolve
from steelyard.errors import RequestError
from steelyard.record.record import Record
from steelyard.report import flagperf, flagperf_pages
from steelyard.report.flagperf.form import FormLines, LinePerValue, MetricList, ValueTable

ROOT = Path(__file__).resolve().parents[2]
# Cases of the five published pages, by the numbers that their file names begin with.
PUBLISHED_CASES = {
    "000": "aquila2-34b-lambada",
    "001": "llama2-7b-mmlu",
    "002": "aquila2-7b-alpaca",
    "003": "llama1-7b-openwebtext",
    "004": "glm-large-record",
}
SCORE_METRICS = {
    "e2e_time": (2479.9, "s"),
    "p_val_whole": (None, "tokens/s"),
    "p_val_core": (None, "tokens/s"),
    "p_infer_whole": (8711.0, "tokens/s"),
    "p_infer_core": (8724.4, "tokens/s"),
    "mfu_nominal": (0.2381, ""),
    "loss": (3.0075, "nats"),
    "loss_val": (3.01, "nats"),
    "acc": (0.458, ""),
    "acc_val": (0.4581, ""),
    "mem": (12.3, "GiB"),
    "mem_total": (40.0, "GiB"),
}
TRAIN_METRICS = {
    "e2e_time": (2763.2, "s"),
    "p_whole": (36.5, "samples/s"),
    "p_train": (42.4, "samples/s"),
    "p_core": (42.45, "samples/s"),
    "tokens_per_device_s": (4318.9, "tokens/s/device"),
    "mfu_nominal": (0.5814, ""),
    "loss": (2.9, "nats"),
    "acc": (0.808, ""),
    "mem": (75.04, "GiB"),
    "mem_total": (80.0, "GiB"),
}
DEVICES = [
    {"name": "NVIDIA A100-SXM4-80GB", "uuid": f"GPU-{n}", "memory_bytes": 80 << 30}
    for n in range(8)
]


def make_run(name: str, **changes: Any) -> Record:
    """Return a valid full run of a case on eight devices; `changes` replaces fields of the
    record.
    """
    resolved = resolve_with_fixed_tune(name)
    case = resolved.case
    kind = case.question.kind
    plan = (
        {"nodes": 1, "devices": 8, "tp": 8, "pp": 1, "dp": 1}
        if kind == "score"
        else {"nodes": 1, "devices": 8, "tp": 2}
    )
    values = SCORE_METRICS if kind == "score" else TRAIN_METRICS
    metric = case.gate.metric if case.gate else "acc"
    base = {
        "case__name": name,
        "case__question": case.question.model_dump(mode="json"),
        "case__gate": None if case.gate is None else case.gate.model_dump(mode="json"),
        "case__reference": [],
        "case__origins": resolved.origins,
        "case__precision": case.question.precision.name,
        "tune": case.tune.model_dump(mode="json"),
        "plan": {"pp": 1, "dp": 4, "launcher": "local"} | plan,
        "engine": {"name": "torch", "details": {"attention": "flash", "micro_batches": 16}},
        "environment__hardware__devices": DEVICES,
        "environment__hardware__machine": "DGX",
        "environment__software__cudnn": None,
        "samples": [],
        "telemetry": [],
        "metrics": {
            name: {
                "value": value,
                "unit": unit,
                "interval": made.make_narrow_interval(value) if "/s" in unit else None,
            }
            for name, (value, unit) in values.items()
        },
        "quality": {"metric": metric, "value": 1.0, "gate": None, "evaluated": True, "note": None},
    }
    return made.make_record(**(base | changes))


def render_page(*records: Record, lang: str = "zh") -> str:
    """Return the text of the only FlagPerf page of the records."""
    [flagperf_page] = flagperf_pages(list(records), lang)
    return flagperf_page.text


@dataclass(frozen=True)
class PageSkeleton:
    """The structure of a page without its values, equal for two pages of one form.

    `names` are the first cells of the rows of metric lists; `indices` are their second cells where
    these name a column.
    """

    headings: list[str]
    labels: list[str]
    heads: list[list[str]]
    names: list[str]  # of the rows in lists of metrics
    indices: list[str]  # beside them, where they stand for a column


def parse_skeleton(text: str, device: str, case: str) -> PageSkeleton:
    """Parse the structure of a Markdown page, with the names of device and case replaced by
    placeholders.
    """
    plain = text.replace(device, "DEVICE").replace(case, "CASE").replace("\\*", "*")
    lines = [line.rstrip() for line in plain.partition("\n> 注")[0].splitlines()]
    rows = [
        [cell.strip().strip("*").strip() for cell in line.strip().strip("|").split("|")]
        for line in lines
    ]
    is_row = [line.lstrip().startswith("|") for line in lines]
    heads = [
        n for n in range(len(lines) - 1) if is_row[n] and re.fullmatch(r"[|\s:-]+", lines[n + 1])
    ]
    lists = [n for n in heads if len(rows[n]) == 3]
    entries = []
    for start in lists:
        end = next(n for n in range(start, len(lines) + 1) if n == len(lines) or not is_row[n])
        entries += [rows[n] for n in range(start + 2, end)]
    return PageSkeleton(
        [re.sub(r"^- ", "", line) for line in lines if re.match(r"(- )?#+ ", line)],
        [label for line in lines if (label := _read_bullet_label(line))],
        [[cell.strip("*") for cell in rows[n]] for n in heads],
        [row[0] for row in entries],
        [row[1] for row in entries if "见" in row[1] or row[1].isascii()],
    )


def _read_bullet_label(line: str) -> str:
    """Return the label of a bullet: the text before its colon, or all of it at the top level.

    Return "" for a line that is no bullet or whose text is a sentence.
    """
    if match := re.match(r"\s*\d\. ((?:[a-z]+_[a-z_]+|seqlength)(?:\([a-z_]+\))?)", line):
        return match[1]
    match = re.match(r"(\s*)(?:[-*>]|\d\.) (?!#)(.*)", line)
    if match is None or re.match(r"\s*\d\. ", line):
        return ""
    label, colon, _ = re.sub(r":(?=//)", "", match[2]).replace("：", ":").partition(":")
    if "为" in label or (not colon and match[1]):
        return ""
    return "FRAMEWORK" if label in ("pytorch", "torch") else label.strip()


def read_published_page(number: str) -> str:
    """Return the text of one of FlagPerf's pages from a folder `shared` beside the checkout; skip
    the test where there is none.
    """
    paths = [path for parent in ROOT.parents for path in parent.glob(f"shared/*/{number}_*.txt")]
    if not paths:
        pytest.skip("FlagPerf's published pages are not in a folder `shared` beside the checkout")
    return paths[0].read_text()


PUBLISHED_DEVICES = {
    "000": "Nvidia A100",
    "001": "Nvidia A100",
    "002": "Nvidia GPU",
    "003": "Nvidia GPU",
    "004": "Nvidia GPU",
}
# Labels that only Steelyard's page has: the data, tokenizer and checkpoint that a run read.
OWN_LABELS = {"data", "tokenizer", "ckpts", "Llama-2-7b-hf"}
# Second cells of metric lists that are values: names of models, data sets and devices.
VALUE_CELLS = {
    "aquila2_7b",
    "llama1",
    "openwebtext",
    "amp",
    "nvidia A800",
    "GLM",
    "superglue",
    "nvidia A100",
}


@pytest.mark.parametrize("number", PUBLISHED_CASES)
def test_the_form_is_that_of_the_published_page(number: str) -> None:
    published_form = parse_skeleton(
        read_published_page(number), PUBLISHED_DEVICES[number], "Llama2_7b_MMLU"
    )
    name = PUBLISHED_CASES[number]
    rendered_form = parse_skeleton(render_page(make_run(name)), "NVIDIA A100-SXM4-80GB", name)
    assert rendered_form.headings == published_form.headings
    assert [label for label in rendered_form.labels if label not in OWN_LABELS] == [
        cell for cell in published_form.labels if "运行自动" not in cell
    ]
    assert rendered_form.heads == published_form.heads
    assert rendered_form.names == published_form.names
    model_values = {"aquila2-7b", "llama1-7b", "glm-large", "bf16", "DEVICE", "None", *VALUE_CELLS}
    assert [cell for cell in rendered_form.indices if cell not in model_values] == [
        cell
        for cell in published_form.indices
        if cell not in VALUE_CELLS and not cell.startswith("nvidia ")
    ]


HEADS = {
    "llama2-7b-mmlu": (
        "推理工具 precision e2e_time p_val_whole p_val_core p_infer_whole \\*p_infer_core \\*MFU"
        " acc mem"
    ),
    "aquila2-34b-lambada": (
        "推理工具 precision e2e_time p_val_whole \\*p_val_core p_infer_whole \\*p_infer_core "
        "\\*MFU loss mem"
    ),
    "aquila2-7b-alpaca": "配置 parallel fix_hp token/p/s loss mem MFU",
    "llama1-7b-openwebtext": "配置 config precision fix_hp parallel_strategy throughput memory",
    "llama1-13b-openwebtext": "配置 config precision fix_hp parallel_strategy throughput memory",
    "glm-large-record": "配置 precision fix_hp e2e_time p_whole p_train p_core acc mem MFU",
}
DEVICE = "NVIDIA A100-SXM4-80GB"
CELLS = {
    "llama2-7b-mmlu": "torch|bf16|2480|/|/|8711|8724|23.8%|45.8%/45.8%|12.3/40.0",
    "aquila2-34b-lambada": "torch|bf16|2480|/|/|8711|8724|23.8%|3.0075|12.3/40.0",
    "aquila2-7b-alpaca": (
        f"{DEVICE}单机8卡（1x8）|TP2PP1DP4|micro_batch=1|4319|2.900|75.0/80.0|58.1%"
    ),
    "llama1-7b-openwebtext": (
        f"{DEVICE}单机8卡（1x8\\*80G）|llama1-7b-openwebtext|bf16|per_device_bs=2, accumulate=16,"
        " (global bs = 4194304 tokens)|attention=flash, compile=true, recompute=none,"
        " tensor_parallel_degree=2, data_parallel_degree=4|4319 tokens/s|75.0 \\* 8 GiB"
    ),
    "glm-large-record": (
        f"{DEVICE}单机8卡（1x8）|bf16|batch_tokens=65536, micro_batch=8|"
        "2763|36.50|42.40|42.45|0.8080|75.0/80.0|0.5814"
    ),
}


def extract_last_table(text: str) -> list[str]:
    """Return the lines of the last table of a Markdown text."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return rows[
        max(
            n
            for n, line in enumerate(rows)
            if set(line) <= set("| -") and "---" in line and line[2] == "-"
        )
        - 1 :
    ]


@pytest.mark.parametrize("name", HEADS)
def test_column_heads(name: str) -> None:
    assert (
        extract_last_table(render_page(make_run(name)))[0]
        == f"| {' | '.join(HEADS[name].split())} |"
    )


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_a_row(name: str) -> None:
    assert (
        extract_last_table(render_page(make_run(name)))[-1]
        == f"| {' | '.join(CELLS[name].split('|'))} |"
    )


def test_rows_of_training_stand_below_their_model() -> None:
    assert (
        extract_last_table(render_page(make_run("llama1-13b-openwebtext")))[2]
        == f"| llama1-13b |{' ------- |' * 6}"
    )


def test_unknown_values_are_a_slash() -> None:
    empty = {"os": None, "kernel": None, "driver": None, "cuda": None, "packages": {}}
    lines = render_page(
        make_run("llama2-7b-mmlu", environment__software=empty, site={}, metrics={})
    ).splitlines()
    assert lines[lines.index("- ##### 软件环境") + 1 :][:8] == [
        *(
            "   - OS版本：/",
            "   - OS kernel版本: /",
            "   - 加速卡驱动版本：/",
            "   - Docker 版本：/",
            "   - 训练框架版本：/",
        ),
        *("   - 依赖软件版本：", "     - /", ""),
    ]
    assert "    - 多机网络类型、带宽: /" in lines
    assert (
        extract_last_table("\n".join(lines))[-1]
        == "| torch | bf16 | / | / | / | / | / | / | / | / |"
    )


def test_values_of_the_page() -> None:
    lines = render_page(make_run("aquila2-34b-lambada")).splitlines()
    for line in (
        "> Download website：https://github.com/cybertronai/bflm/blob/master/lambada_test.jsonl",
        "   - 张量并行，尺度为8",
        f"    - 机器、加速卡型号: DGX，{DEVICE}",
        "    - 多机网络类型、带宽: InfiniBand, 200Gb/s",
        "   - 加速卡驱动版本：570.86",
        "   - 训练框架版本：torch-2.11.0",
        "     - cuda: 12.8",
        "   - torch (torch-2.11.0)",
        "  * ckpts：source：Llama-2-7b-hf; sha256：" + "9f" * 32,
    ):
        assert line in lines, line
    trained = render_page(make_run("aquila2-7b-alpaca")).splitlines()
    for line in (
        "   - 并行技术：张量、数据并行",
        "   - 实施者：torch",
        "   - 实施细节：TP2PP1DP4",
        "   - attention=flash",
        "  1. local_batchsize(micro_batchsize)，简写为LBS：1",
        "  2. seqlength(max_position_embedding)，简写为MPE：2048",
        "  3. gradient_accumulate_steps，简写为GAS：16",
        "  4. global_batchsize，简写为GBS：128 samples",
    ):
        assert line in trained, line


def test_nodes_and_devices_are_written_as_in_flagperf() -> None:
    two_nodes = make_run(
        "glm-large-record",
        plan={"nodes": 2, "devices": 8, "tp": 1, "pp": 1, "dp": 16, "launcher": "ssh"},
    )
    assert extract_last_table(render_page(two_nodes))[-1].startswith(f"| {DEVICE}两机16卡（2x8） |")
    assert extract_last_table(render_page(two_nodes, lang="en"))[-1].startswith(
        f"| {DEVICE}, 2 nodes, 16 devices (2x8) |"
    )
    four_nodes = make_run(
        "glm-large-record",
        plan={"nodes": 4, "devices": 8, "tp": 1, "pp": 1, "dp": 32, "launcher": "ssh"},
    )
    assert extract_last_table(render_page(four_nodes))[-1].startswith(f"| {DEVICE}4机32卡（4x8） |")
    one_device = make_run(
        "glm-large-record",
        plan={"nodes": 1, "devices": 1, "tp": 1, "pp": 1, "dp": 1, "launcher": "local"},
    )
    assert extract_last_table(render_page(one_device))[-1].startswith(
        f"| {DEVICE}单机单卡（1x1） |"
    )


def test_a_window_with_random_weights_gives_no_quality() -> None:
    quality = {
        "metric": "acc",
        "value": 0.25,
        "gate": None,
        "evaluated": False,
        "note": "the weights are random",
    }
    window = make_run(
        "llama2-7b-mmlu", id="ab" * 6, scope={"kind": "window", "sample": 1404}, quality=quality
    )
    lines = render_page(make_run("llama2-7b-mmlu"), window).splitlines()
    assert [line.split(" | ")[-2] for line in lines if line.startswith("| torch")] == [
        "45.8%/45.8%",
        "/",
    ]
    assert lines[-4:] == [
        "> 注：",
        "> 1. 第2行：窗口：1404 个样本",
        "> 2. 第2行：acc 未评估",
        golden("3-0-3-9-7-5", language="zh"),
    ]


def test_a_run_that_is_not_valid_has_no_row_and_is_named() -> None:
    reasons = [{"code": "quality", "text": "too low"}, {"code": "interval", "text": "too wide"}]
    bad = make_run(
        "llama2-7b-mmlu",
        id="cd" * 6,
        status="invalid",
        reasons=reasons,
        engine={"name": "other", "details": {}},
    )
    text = render_page(make_run("llama2-7b-mmlu"), bad, lang="en")
    assert len(extract_last_table(text)) == 3
    assert golden("not-in-the-table-because-not") in text
    assert "other" not in text.split("* Metric list")[0], "the page describes the runs of its rows"
    invalid_only = render_page(bad)
    assert len(extract_last_table(invalid_only)) == 2
    assert "other" in invalid_only


def test_an_unproven_run_has_a_row_with_a_note() -> None:
    short = make_run("llama1-7b-openwebtext", id="cd" * 6, **made.WITHOUT_INTERVAL)
    text = render_page(make_run("llama1-7b-openwebtext"), short, lang="en")
    assert golden("row-2-rate-unproven") in text.splitlines()
    assert "Not in the table" not in text
    rows = extract_last_table(text)
    assert rows[-1] == rows[-2]  # both rows have their values
    assert (
        golden("row-2-rate-unproven", language="zh")
        in render_page(make_run("llama1-7b-openwebtext"), short).splitlines()
    )
    assert "unproven" not in render_page(make_run("llama1-7b-openwebtext"), lang="en")


def test_remarks_name_their_rows() -> None:
    window = {"kind": "window", "sample": 7}
    scopes = [window, {"kind": "full"}, window, window, window, {"kind": "full"}]
    records = [
        make_run("llama2-7b-mmlu", id=f"{n}" * 12, scope=scope) for n, scope in enumerate(scopes)
    ]
    assert "> 1. rows 1, 3-5: window: 7 samples" in render_page(*records, lang="en").splitlines()
    assert "> 1. 第1、3-5行：窗口：7 个样本" in render_page(*records).splitlines()


def test_memory_of_a_pipeline_stands_by_stage() -> None:
    staged = made.make_training_record(times=[(2.0, 1.0, 1.0, 1.0)] * 4, plan=(2, 2, 1))
    assert extract_last_table(render_page(staged))[-1].endswith(
        " | 25.00 tokens/s | 40.00\\*2 + 38.00\\*2 GiB |"
    )


def test_another_unit_is_written_beside_the_value() -> None:
    values = {"p_infer_core": {"value": 371.94, "unit": "questions/s"}}
    text = render_page(make_run("llama2-7b-mmlu", case__division="open", metrics=values), lang="en")
    assert "371.9 questions/s" in extract_last_table(text)[-1]
    assert golden("1-row-1-division-open-in") in text


def test_lambada_notes_the_rate_with_padding_counted() -> None:
    values = {"p_infer_core": (8700.4, "tokens/s"), "p_infer_core_padded": (427901.5, "tokens/s")}
    metrics = {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()}
    text = render_page(make_run("aquila2-34b-lambada", metrics=metrics), lang="en")
    assert " | 8700 | " in extract_last_table(text)[-1]
    assert "> 2. row 1: p_infer_core_padded = 427902 tokens/s (" in text
    assert "p_infer_whole_padded" not in text, "unknown"


def test_made_data_are_not_the_published_set() -> None:
    smoke = resolve.resolve_case("llama1-7b-openwebtext", size="smoke").case.question.model_dump(
        mode="json"
    )
    change = {"case__size": "smoke", "case__question": smoke}
    text = render_page(make_run("llama1-7b-openwebtext", **change, data__source="made"), lang="en")
    assert "wget" not in text
    assert golden("dataset-made-data-not-the-published") in text
    assert golden("size-smoke-tiny-model-which-cannot") in text
    given_text = render_page(
        make_run("llama1-7b-openwebtext", **change, data__source="owt"), lang="en"
    )
    assert "wget https://" in given_text
    assert "| Dataset | openwebtext |  |" in given_text


def test_one_page_for_each_case_and_accelerator() -> None:
    other = [{"name": "../../Chip|9000\n# x", "uuid": "u", "memory_bytes": 1 << 30}]
    changed = resolve.resolve_case("llama2-7b-mmlu").origins | {"question.seed": "command line"}
    records = [
        make_run("llama2-7b-mmlu"),
        make_run("llama2-7b-mmlu", environment__hardware__devices=other),
        make_run("llama2-7b-mmlu", case__origins=changed),
        make_run("glm-large-record"),
    ]
    pages = flagperf_pages(records, "zh")
    assert [(result.name, result.case, result.size) for result in pages] == [
        ("llama2-7b-mmlu-full-NVIDIA_A100-SXM4-80GB", "llama2-7b-mmlu", "full"),
        ("llama2-7b-mmlu-full-Chip_9000_x", "llama2-7b-mmlu", "full"),
        ("llama2-7b-mmlu-full-NVIDIA_A100-SXM4-80GB-2", "llama2-7b-mmlu", "full"),
        ("glm-large-record-full-NVIDIA_A100-SXM4-80GB", "glm-large-record", "full"),
    ]
    assert "#### 3.1 ../../Chip\\|9000 # x\n" in pages[1].text
    assert "题目有改动：question.seed=0" in pages[2].text


def test_markup_in_a_record_is_escaped() -> None:
    hostile = "# <script>|`x`\n- y"
    bad = make_run(
        "glm-large-record",
        weights={"source": hostile},
        site={"machine": hostile},
        engine={"name": "|a|", "details": {}},
    )
    lines = render_page(bad).splitlines()
    assert lines[1] == "\\# &lt;script&gt;\\|\\`x\\` - y"
    assert "<script>" not in render_page(bad)
    assert all(
        len(re.findall(r"(?<!\\)\|", line)) == 11 for line in extract_last_table(render_page(bad))
    )


def test_a_task_without_a_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(flagperf.LAYOUTS, "mmlu")
    with pytest.raises(RequestError) as caught:
        flagperf_pages([make_run("llama2-7b-mmlu")], "en")
    expected = (
        "--layout flagperf: case llama2-7b-mmlu is of task mmlu, for which FlagPerf has no page;"
        " tasks with a page: "
    )
    assert str(caught.value) == expected + "lambada, alpaca, openwebtext, superglue_record"


@pytest.mark.parametrize("name", flagperf.LAYOUTS)
def test_both_languages_have_one_structure(name: str) -> None:
    for block in flagperf.LAYOUTS[name].parts:
        match block:
            case FormLines(en, zh):
                marks = [
                    [re.match(r"[\s>*#-]*", line)[0] for line in text.strip("\n").split("\n")]
                    for text in (en, zh)
                ]
                assert marks[0] == marks[1], en
                assert re.findall(r"\{\w+\}", en) == re.findall(r"\{\w+\}", zh)
            case MetricList(heads, entries):
                assert all(en and zh for en, zh in [*heads, *(item.name for item in entries)])
            case ValueTable(columns):
                assert all(bool(item.setting) != bool(item.metrics) for item in columns)
            case LinePerValue(prefix):
                assert prefix.format(n=1).endswith((" ", "")), prefix


def test_the_english_page_has_the_same_structure() -> None:
    zh, en = (
        render_page(make_run("glm-large-record"), lang=lang).splitlines() for lang in ("zh", "en")
    )
    assert len(zh) == len(en)
    assert [line.count("|") for line in zh] == [line.count("|") for line in en]
    assert not re.search(r"[\u4e00-\u9fff]", "\n".join(en).replace("#数据集", ""))
