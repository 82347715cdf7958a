"""Every output says who vouches: marks beside engines, packages beside accelerators, peaks and
tasks, and sentences below the tables.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import make_scoring_record
from fixtures.report import ENVIRONMENT, make_hostile_record, make_record
from fixtures.specs import make_spec_record
from steelyard import report
from steelyard.metrics import rate_history, side_comparison
from steelyard.record.index import RecordSummary
from steelyard.record.record import Record
from steelyard.report import as_csv, group_data
from steelyard.report.report_data import build_report

ANSWERS = "ABCDABCD"
ABC = "abc-accel 0.3"
MARKS = {
    "en": {"acme": "acme (not tested)", "good": "good (tested)", "bad": "bad (does not conform)"},
    "zh": {"acme": "acme（未测试）", "good": "good（已测试）", "bad": "bad（不符合）"},
}


def make_engine_record(engine: str, conforms: bool | None = None, **changes: Any) -> Record:
    """Return a scored record of this engine, which package ENGINE-pack 1.2 brought."""
    providers = {"engine": f"{engine}-pack 1.2"}
    return make_scoring_record(
        engine, ANSWERS, engine__conforms=conforms, providers=providers, **changes
    )


def make_abc_record(**changes: Any) -> Record:
    """Return a record on an accelerator of another package, with a datasheet peak of its own."""
    peak = {"name": "ABC One", "flops_per_s": {"bf16": 1e15}, "source": "a data sheet"}
    devices = [{"name": "ABC One", "uuid": "A", "memory_bytes": 1 << 34}]
    hardware = ENVIRONMENT["hardware"] | {"accelerator": "abc", "devices": devices, "peak": peak}
    return make_scoring_record(
        "torch",
        ANSWERS,
        environment__hardware=hardware,
        providers={"accelerator": ABC, "peak": ABC},
        **changes,
    )


def make_all() -> list[Record]:
    """Return records of a shipped engine and of one with each mark."""
    return [
        make_scoring_record("torch", ANSWERS, id="a" * 12),
        make_engine_record("acme", id="b" * 12),
        make_engine_record("good", True, id="c" * 12),
        make_engine_record("bad", False, id="d" * 12),
    ]


PAGES = {
    "report": report.build_report_page,
    "brief": report.build_brief_page,
    "after a run": report.build_summary_page,
    "engines": report.build_engines_page,
}


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("format", ["text", "md", "html"])
@pytest.mark.parametrize("name", PAGES)
def test_engines_have_marks_on_every_page(name: str, format: str, lang: Any) -> None:
    page = PAGES[name](make_all(), lang)
    assert page is not None
    text = report.format_page(page, format)
    for marked in MARKS[lang].values():
        assert marked in text
    for package in ("acme-pack 1.2", "good-pack 1.2", "bad-pack 1.2"):
        assert package in text
    assert "torch (" not in text.replace("torch (attention", "")
    assert "torch（" not in text


def test_marks_stand_in_titles_tables_and_charts_of_the_report() -> None:
    text = report.render(make_all(), "html", "en")
    for place in (
        "#2 NVIDIA H200 × 1 · acme (not tested) · bf16 · closed",  # the run's heading
        ">acme (not tested)<",  # comparison and engines
        "#2 acme (not tested)",  # all values
        "NVIDIA H200 × 1 · acme (not tested), bf16 · closed",  # charts
        "part of Steelyard if it has no mark",  # the meanings
        "engine: acme-pack 1.2",  # the run's details
    ):
        assert place in text, place
    assert text.count("part of Steelyard if it has no mark") == 1


def test_a_page_of_shipped_parts_has_no_mark_and_no_sentence() -> None:
    text = report.render([make_scoring_record("torch", ANSWERS)], "text", "en")
    marks = ("(not tested)", "(tested)", "not part of Steelyard", "Packages of others", "(from ")
    assert [mark for mark in marks if mark in text] == []


def test_the_summary_in_words_has_the_mark() -> None:
    text = report.render([make_engine_record("acme")], "md", "en")
    [line] = [line for line in text.splitlines() if line.startswith("1 run of 1 case")]
    assert "(acme (not tested), bf16, closed, whole, single run, quality evaluated)" in line


def test_sentences_say_what_conform_found() -> None:
    text = report.render(make_all(), "md", "en", report.build_summary_page)
    assert [line for line in text.splitlines() if line.startswith("Engine ")] == [
        "Engine acme is from acme-pack 1.2, not part of Steelyard; it was not tested (steelyard"
        " conform tests an engine).",
        "Engine good is from good-pack 1.2, not part of Steelyard; steelyard conform found that"
        " this version computes what engine torch does.",
        "Engine bad is from bad-pack 1.2, not part of Steelyard; steelyard conform found that it"
        " does not compute what engine torch does.",
    ]


def test_a_shipped_engine_that_does_not_conform_says_so() -> None:
    record = make_scoring_record("torch", ANSWERS, engine__conforms=False)
    text = report.render([record], "text", "en", report.build_summary_page)
    assert "torch (does not conform)" in text
    assert "Engine torch: steelyard conform found that it does not compute" in text


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_accelerator_and_peak_name_their_package(format: str) -> None:
    ours = make_scoring_record("torch", ANSWERS, id="a" * 12)
    text = report.render([ours, make_abc_record(id="b" * 12)], format, "en")
    assert f"ABC One × 1 (from {ABC})" in text.replace("\n", " ")
    assert f"peak from {ABC}" in text  # beside the MFU
    assert f"ABC One: bf16 1000 TFLOP/s (a data sheet) (from {ABC})" in text.replace("\n  ", "")
    assert "The datasheet peak of ABC One, which MFU is relative to, is from abc-accel 0.3" in text
    assert "NVIDIA H200 × 1 (from" not in text


def test_the_terminal_names_the_package_of_an_accelerator() -> None:
    text = report.render([make_abc_record()], "text", "en", report.build_brief_page)
    assert f"ABC One (from {ABC})" in text
    assert "which MFU is relative to, is from abc-accel 0.3, not Steelyard's." in text


@pytest.mark.parametrize("build", [report.build_report_page, report.build_brief_page])
def test_the_heading_of_a_case_names_the_package_of_its_task(build: Any) -> None:
    record = make_record(providers={"task": "quiz-task 1.0"})
    text = report.render([record], "md", "en", build)
    assert "# llama2-7b-mmlu · full (task from quiz-task 1.0)" in text
    assert "Task mmlu, which reads the data and scores the answers, is from quiz-task 1.0" in text


def test_csv_states_mark_and_packages() -> None:
    older = make_scoring_record("older", ANSWERS)
    rows = csv.DictReader(
        io.StringIO(as_csv.render_csv([*make_all(), make_abc_record(), older]), newline="")
    )
    assert [(row["engine"], row["engine_mark"], json.loads(row["providers"])) for row in rows] == [
        ("torch", "ours", {}),
        ("acme", "untested", {"engine": "acme-pack 1.2"}),
        ("good", "tested", {"engine": "good-pack 1.2"}),
        ("bad", "nonconforming", {"engine": "bad-pack 1.2"}),
        ("torch", "ours", {"accelerator": ABC, "peak": ABC}),
        ("older", "untested", {"engine": "unknown"}),
    ]


def test_json_states_mark_and_packages() -> None:
    content = build_report(make_all())
    marks = ["ours", "untested", "tested", "nonconforming"]
    assert [row.engine_mark for row in content.summary] == marks
    assert content.cases[0].runs[1].providers == {"engine": "acme-pack 1.2"}
    assert [row.engine_mark for row in group_data.collect_engines(make_all())[0].rows] == marks


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_a_comparison_has_marks(format: str) -> None:
    base = side_comparison.make_side("old", [make_scoring_record("torch", ANSWERS, id="a" * 12)])
    runs = [
        make_engine_record("acme", value, id=f"{i}" * 12) for i, value in ((1, None), (2, True))
    ]
    comparison = side_comparison.compare_sides(
        base, side_comparison.make_side("new", runs), ["case"], 0.01
    )
    text = report.format_page(report.build_comparison_page(comparison), format)
    assert "acme (not tested)" in text  # the worst of its runs
    assert "Engine acme is from acme-pack 1.2, not part of Steelyard" in text
    assert "torch (" not in text


def test_a_history_has_marks() -> None:
    def make_entry(day: int, mark: str, package: str | None = None) -> RecordSummary:
        return RecordSummary(
            id=f"{day:012d}",
            created=f"2026-01-{day:02d}",
            status="valid",
            engine="acme",
            engine_mark=mark,
            devices=("ABC One",),
            accelerator_package=package,
            rate=1.0,
            unit="tokens/s",
        )

    entries = [make_entry(1, "tested", ABC), make_entry(2, "untested", ABC)]
    history = rate_history.build_history(
        {Path(f"{entry.id}.json"): entry for entry in entries}, 0.01
    )
    [trend] = history.trends
    assert trend.engine_mark == "untested"
    text = report.format_page(report.build_history_page(history), "text")
    assert "acme (not tested)" in text
    assert f"ABC One (from {ABC})" in text


def test_the_summary_of_a_record_has_its_mark(tmp_path: Path) -> None:
    summary = rate_history._make_entry(make_engine_record("acme"))
    assert (summary.engine_mark, summary.accelerator_package) == ("untested", None)
    assert rate_history._make_entry(make_abc_record()).accelerator_package == ABC


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_flagperf_pages_have_marks(lang: str) -> None:
    [page] = report.flagperf_pages(make_all(), lang)
    for marked in MARKS[lang].values():
        assert f"| {marked} |" in page.text
    assert "acme-pack 1.2" in page.text


def test_the_page_of_a_machine_names_another_packages_accelerator() -> None:
    ours = make_spec_record()
    hardware = ours.environment.hardware.model_copy(update={"accelerator": "abc"})
    other = ours.model_copy(
        update={"environment": ours.environment.model_copy(update={"hardware": hardware})}
    )
    assert "(from another package)" not in report.render_ceilings([ours], "text", "en")
    assert "(from another package)" in report.render_ceilings([other], "text", "en")


def test_names_of_packages_are_escaped_as_any_text() -> None:
    evil = "<script>alert(1)</script>\x1b[31m | x"
    record = make_hostile_record().model_copy(
        update={"providers": dict.fromkeys(("engine", "task", "accelerator", "peak"), evil)}
    )
    assert "<script>alert" not in report.render([record], "html", "en")
    for format in ("text", "md", "html"):
        assert "\x1b" not in report.render([record], format, "en")


@pytest.mark.parametrize("build", [report.build_brief_page, report.build_report_page])
def test_repeats_have_the_worst_mark_in_every_table(build: Any) -> None:
    """An engine that was tested, then changed, and run again: the mean is of both."""
    runs = [
        make_engine_record("acme", value, id=f"{i}" * 12)
        for i, value in ((1, True), (2, None), (3, None))
    ]
    text = report.format_page(build(runs, "en"), "text")
    tables = text.partition("Runs\n----")[0]  # behind it, one run at a time
    assert "acme (not tested)" in tables
    assert "acme (tested)" not in tables
