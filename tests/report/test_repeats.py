"""The section of a page on repeated runs, and what the command line prints of it."""

from typing import Any

import pytest

from fixtures.report import make_record
from steelyard import report
from steelyard.cli import execute_runs
from steelyard.record.record import Record
from steelyard.report import group_data
from steelyard.report.document import Heading, Page, Paragraph, Table, walk_elements

TOO_WIDE = {"status": "invalid", "reasons": [{"code": "interval", "text": "too wide"}]}


def make_run(number: int, rate: float, **changes: Any) -> Record:
    """Return a run with this number as id and this rate; `changes` replaces fields."""
    metrics = {
        "tokens_per_device_s": {
            "value": rate,
            "unit": "tokens/s/device",
            "interval": (rate - 5, rate + 5),
        },
        "acc": {"value": 0.5, "unit": "fraction"},
        "mem": {"value": 10.0, "unit": "GiB"},
    }
    return make_record(**({"metrics": metrics, "id": f"{number:032x}"} | changes))


RUNS = [make_run(1, 98.0), make_run(2, 100.0), make_run(3, 50.0, **TOO_WIDE), make_run(4, 102.0)]


def list_cell_texts(page: Page | None) -> list[list[tuple[str, str]]]:
    """Return the text of each cell and the text below it, by row, of the page's only table."""
    assert page is not None
    [table] = [block for block in page.elements if isinstance(block, Table)]
    return [[(cell.text, cell.sub) for cell in row.cells] for row in table.rows]


def test_each_metric_has_a_row() -> None:
    page = report.build_repeats_page(RUNS)
    assert page is not None
    title = "Repeats: llama2-7b-mmlu · full · torch · bf16 · closed · whole · NVIDIA H200"
    assert page.elements[0] == Paragraph(title, "strong")
    rate, mem, acc = list_cell_texts(page)
    source = ("spread of the runs", "")
    counts = ("3", "1 not counted, 1 for its interval alone")
    assert rate == [
        ("rate", "tokens/s"),
        counts,
        ("100.0", ""),
        ("95.03 – 105.0", ""),
        source,
        ("2.0%", ""),
        ("98.00", ""),
        ("102.0", ""),
    ]
    assert mem == [
        ("mem", "GiB"),
        ("3", ""),
        ("10.0", ""),
        ("10.0 – 10.0", ""),
        source,
        ("0.0%", ""),
        ("10.0", ""),
        ("10.0", ""),
    ]
    assert [text for text, _ in acc] == [
        "acc",
        "3",
        "50.0%",
        "50.0% – 50.0%",
        "spread of the runs",
        "0.0%",
        "50.0%",
        "50.0%",
    ]
    assert page.elements[2] == Paragraph(f"Not counted: #3 {3:032x} (interval).")


def test_one_valid_run_has_the_interval_of_its_steps() -> None:
    rate, *_ = list_cell_texts(report.build_repeats_page([RUNS[0], RUNS[2]]))
    texts = [text for text, _ in rate]
    assert texts == [
        "rate",
        "1",
        "98.00",
        "93.00 – 103.0",
        "the run's steps",
        "/",
        "98.00",
        "98.00",
    ]


def test_no_valid_run_is_named_without_a_table() -> None:
    page = report.build_repeats_page([RUNS[2], make_run(5, 1.0, **TOO_WIDE)])
    assert page is not None
    assert [block for block in page.elements if isinstance(block, Table)] == []
    assert page.elements[1] == Paragraph(
        f"Not counted: #1 {3:032x} (interval), #2 {5:032x} (interval)."
    )


def test_three_unproven_runs_have_a_table_and_two_do_not() -> None:
    short = [
        make_run(number, 98.0 + number / 2, metrics__tokens_per_device_s__interval=None)
        for number in (1, 2, 3)
    ]
    page = report.build_repeats_page(short[:2])
    assert page is not None
    assert [block for block in page.elements if isinstance(block, Table)] == []
    assert page.elements[1] == Paragraph(
        f"Not counted: #1 {1:032x} (few_steps), #2 {2:032x} (few_steps)."
    )
    rate, *_ = list_cell_texts(report.build_repeats_page(short))
    assert [f"{text} {below}".strip() for text, below in rate] == [
        "rate tokens/s",
        "3",
        "99.00",
        "97.76 – 100.2",
        "spread of the runs",
        "0.51%",
        "98.50",
        "99.50",
    ]


def test_a_page_has_the_section_where_runs_were_repeated() -> None:
    def sections(records: list[Record], lang: Any) -> list[Any]:
        blocks = walk_elements(report.build_report_page(records, lang).elements)
        return [
            block
            for block in blocks
            if isinstance(block, Heading) and block.text in ("Repeats", "重复运行")
        ]

    assert sections(RUNS, "en") == [Heading(3, "Repeats")]
    assert sections(RUNS, "zh") == [Heading(3, "重复运行")]
    assert sections(RUNS[:1], "en") == []
    blocks = list(walk_elements(report.build_report_page(RUNS, "en").elements))
    assert blocks[blocks.index(Heading(3, "Repeats")) + 1] == Paragraph(
        "Runs #1, #2, #3, #4: torch · bf16 · closed · whole · NVIDIA H200", "strong"
    )
    for format_ in report.FORMATS:
        assert "95.03" in report.render(RUNS, format_, "en")


def test_a_quality_that_was_not_evaluated_is_marked() -> None:
    unjudged = {"metric": "acc", "value": 0.5, "gate": None, "evaluated": False, "note": None}
    *_, acc = list_cell_texts(
        report.build_repeats_page([make_run(1, 98.0, quality=unjudged), make_run(2, 98.0)])
    )
    assert acc[2] == ("50.0%", "not evaluated")


def test_json_and_text_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    execute_runs.print_repeats(RUNS[:1], wide=True)
    assert capsys.readouterr().out == ""
    execute_runs.print_repeats(RUNS, wide=True)
    assert capsys.readouterr().out.startswith("\nRepeats: llama2-7b-mmlu")
    [content] = [repeated.model_dump(mode="json") for repeated in group_data.collect_repeats(RUNS)]
    assert content["records"] == [f"{n:032x}" for n in (1, 2, 4)]
    assert content["not_valid"] == [
        {"id": f"{3:032x}", "status": "invalid", "reasons": ["interval"]}
    ]
    assert (content["interval_only"], content["engine"], content["scope"]["kind"]) == (
        1,
        "torch",
        "full",
    )
    mem = {
        "unit": "GiB",
        "runs": 3,
        "mean": 10.0,
        "interval": [10.0, 10.0],
        "interval_from": "runs",
    }
    assert content["metrics"]["mem"] == mem | {"deviation": 0.0, "lowest": 10.0, "highest": 10.0}
    assert [*group_data.collect_repeats(RUNS[:1])] == []
