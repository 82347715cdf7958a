"""The sentence of a verdict on engines or points of a sweep."""

from collections.abc import Sequence
from typing import Any

import pytest

from fixtures import load_records as made
from fixtures.engines import make_scoring_record
from steelyard import report
from steelyard.metrics import verdict
from steelyard.record.record import Record
from steelyard.words import PageWords

ANSWERS = "ABCDABCD"
BAD = {"status": "invalid", "reasons": [{"code": "clock", "text": ""}]}


def make_runs(engine: str, rates: Sequence[float], answers: str = ANSWERS, **changes: Any) -> Any:
    """Return a scoring record of an engine for each rate, with an interval of ± 1."""
    records = []
    for number, rate in enumerate(rates):
        record = make_scoring_record(engine, answers, rate, id=f"{engine}{number}", **changes)
        stored = record.metrics["tokens_per_device_s"]
        proven = stored.model_copy(update={"interval": (rate - 1, rate + 1)})
        metrics = {**record.metrics, "tokens_per_device_s": proven}
        records.append(record.model_copy(update={"metrics": metrics}))
    return records


REPEATED = make_runs("torch", [110.0, 111.1]) + make_runs("transformers", [100.0, 101.0])
SMOKE: dict[str, Any] = {"case__size": "smoke"}


@pytest.mark.parametrize(
    ("records", "en", "zh"),
    [
        (
            REPEATED,
            "Verdict: torch is the fastest: 1.100 times the rate of transformers (significant, 95 %"
            " interval 1.067 – 1.134, 2 runs each).",
            "结论：torch 最快，为 transformers 的 1.100 倍（显著，95 % 区间 1.067 – 1.134，"
            "各 2 次运行）。",
        ),
        (
            make_runs("torch", [100.0, 110.0]) + make_runs("transformers", [90.0, 111.0, 100.0]),
            "Verdict: torch has the highest rate, 1.049 times that of transformers, which is not"
            " significant (95 % interval 0.8195 – 1.343, 2 and 3 runs).",
            "结论：torch 的吞吐量最高，为 transformers 的 1.049 倍，但不显著（95 % 区间 0.8195 –"
            " 1.343，分别为 2 次和 3 次运行）。",
        ),
        (
            make_runs("torch", [100.0]) + make_runs("transformers", [90.0]),
            "Verdict: torch has the highest rate, 1.111 times that of transformers, which was not"
            " tested (single runs; use --repeat 3).",
            "结论：torch 的吞吐量最高，为 transformers 的 1.111 倍，但未检验（各只有一次运行；请用"
            " --repeat 3）。",
        ),
        (
            make_runs("torch", [100.0, 101.0]) + make_runs("transformers", [90.0]),
            "Verdict: torch has the highest rate, 1.117 times that of transformers, which was not"
            " tested (that takes two runs of each that count; use --repeat 3).",
            "结论：torch 的吞吐量最高，为 transformers 的 1.117 倍，但未检验（双方各需至少两次"
            "计入的运行；请用 --repeat 3）。",
        ),
        (
            make_runs("torch", [100.0]) + make_runs("transformers", [100.001]),
            "Verdict: transformers and torch have the highest rate, equal in the digits shown"
            " (single runs; use --repeat 3).",
            "结论：transformers 与 torch 的吞吐量最高，在所示位数内相同（各只有一次运行；请用"
            " --repeat 3）。",
        ),
        (
            REPEATED + make_runs("megatron", [500.0], **BAD),
            "Verdict: torch is the fastest: 1.100 times the rate of transformers (significant, 95 %"
            " interval 1.067 – 1.134, 2 runs each); not counted: megatron (invalid: clock).",
            "结论：torch 最快，为 transformers 的 1.100 倍（显著，95 % 区间 1.067 – 1.134，"
            "各 2 次运行）；未计入：megatron（无效：clock）。",
        ),
        (
            make_runs("torch", [100.0]) + make_runs("transformers", [500.0], **BAD),
            "Verdict: none, because only torch has a proven rate (100.0 tokens/s), and it takes two"
            " to compare; not counted: transformers (invalid: clock).",
            "结论：无，因为只有 torch 的吞吐量得到证实（100.0 token/s），至少两项才能比较；未计入："
            "transformers（无效：clock）。",
        ),
        (
            make_runs("torch", [100.0], **BAD) + make_runs("transformers", [500.0], **BAD),
            "Verdict: none, because there is no proven rate; not counted: torch (invalid: clock),"
            " transformers (invalid: clock).",
            "结论：无，因为没有得到证实的吞吐量；未计入：torch（无效：clock），transformers（无效：clock"
            "）。",
        ),
        (
            make_runs("torch", [100.0], **SMOKE) + make_runs("transformers", [50.0], **SMOKE),
            "Verdict: none, because size smoke shows that everything runs and says nothing about"
            " speed.",
            "结论：无，因为 smoke 规模只表明一切可以运行，不说明速度。",
        ),
        (
            make_runs("torch", [100.0]),
            "Verdict: none, because only torch ran.",
            "结论：无，因为只运行了 torch。",
        ),
        (
            make_runs("torch", [100.0]) + make_runs("transformers", [90.0], "ABCDABCA"),
            "Verdict: the answers differ by more than arithmetic explains (transformers: infer"
            " answers differ from torch's by 12.5%; 5.0% is allowed), so the rates mean little:"
            " torch has the highest rate, 1.111 times that of transformers, which was not tested"
            " (single runs; use --repeat 3).",
            "结论：答案的差异超出算术误差所能解释的范围（transformers：infer answers 与 torch 相差"
            " 12.5%，允许 5.0%），吞吐量意义不大：torch 的吞吐量最高，为 transformers 的"
            " 1.111 倍，但未检验（各只有一次运行；请用 --repeat 3）。",
        ),
    ],
)
def test_the_sentence_says_what_the_evidence_carries(
    records: list[Record], en: str, zh: str
) -> None:
    [found] = verdict.judge_engines(records)
    assert report.format_verdict(found, PageWords("en")) == en
    assert report.format_verdict(found, PageWords("zh")) == zh


def test_different_questions_have_no_verdict() -> None:
    other = make_runs("transformers", [90.0], weights={"source": "random", "seed": 7})
    [found] = verdict.judge_engines(make_runs("torch", [100.0]) + other)
    assert report.format_verdict(found, PageWords("en")) == (
        "Verdict: none, because these did not answer the same question: torch, transformers."
    )


def test_several_verdicts_name_their_case() -> None:
    verdicts = verdict.judge_engines(
        make_runs("torch", [100.0]) + make_runs("torch", [100.0], case__division="open")
    )
    text = report.render_text(report.build_verdict_page(verdicts), 100)
    assert text == (
        "Verdict on llama2-7b-mmlu · closed · bf16: none, because only torch ran.\n\n"
        "Verdict on llama2-7b-mmlu · open · bf16: none, because only torch ran.\n"
    )


def test_loads_are_not_ranked() -> None:
    sweep = made.make_sweep()[:3]
    points = [
        (record.question.model_dump_json(), verdict.Contender(f"load {number}", (record,)))
        for number, record in enumerate(sweep)
    ]
    [found] = verdict.judge_points(points)
    assert found.code == "different"
    assert report.format_verdict(found, PageWords("en"), with_case=True) == (
        "No verdict: each load is a question of its own; report --format html draws the curve."
    )
    assert report.format_verdict(found, PageWords("zh")) == (
        "没有结论：每种负载各为一个题目；report --format html 可绘制曲线。"
    )


def test_other_differences_at_one_load_are_named() -> None:
    [first, second] = (
        made.make_sweep()[0],
        made.make_sweep("vllm", weights={"source": "unknown"})[0],
    )
    [found] = verdict.judge_engines([first, second])
    assert report.format_verdict(found, PageWords("en")) == (
        "Verdict: none, because these did not answer the same question: transformers, vllm."
    )


def test_verdicts_at_several_loads_name_the_load() -> None:
    points = [
        (record.question.model_dump_json(), verdict.Contender(f"point {number}", (record,)))
        for number, record in enumerate([*made.make_sweep()[:2], *made.make_sweep()[:2]])
    ]
    verdicts = verdict.judge_points(points)
    sentences = [report.format_verdict(one, PageWords("en"), with_case=True) for one in verdicts]
    assert [sentence.partition(":")[0] for sentence in sentences] == [
        "Verdict on llama3-8b-generate · closed · bf16 · C1",
        "Verdict on llama3-8b-generate · closed · bf16 · C4",
    ]
