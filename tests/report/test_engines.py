"""The section of a page that compares engines."""

from typing import Any

import pytest

from fixtures.engines import scored, trained, with_tokens
from fixtures.report import make
from steelyard import report
from steelyard.record.record import Record
from steelyard.report.document import Heading, Page, Paragraph, Table

HEADS = [
    "engine",
    "other answers",
    "acc, difference",
    "acc",
    "rate",
    "against torch",
    "MFU",
    "mem",
    "runs",
]


def shown(records: list[Record], lang: Any = "en") -> tuple[Page, Table]:
    """Return the page of engines of the records, and its only table."""
    page = report.build_engines_page(records, lang)
    assert page is not None
    [table] = [block for block in page.elements if isinstance(block, Table)]
    return page, table


def cells(table: Table) -> list[list[tuple[str, str]]]:
    """Return the text of each cell and the text below it, by row."""
    return [[(cell.text, cell.sub) for cell in row.cells] for row in table.rows]


def test_differences_of_the_answers_come_first() -> None:
    busy = [{"code": "busy", "text": "others used 20 % of the cores"}]
    other = scored("other", "ABCDABDC", 50.0, 0.25, status="invalid", reasons=busy)
    page, table = shown([scored("torch", "ABCDABCD"), other])
    assert page.elements[0] == Paragraph(
        "Engines: llama2-7b-mmlu · full · bf16 · closed · full · NVIDIA H200", "strong"
    )
    assert [column.title for column in table.columns] == HEADS
    base, other = cells(table)
    assert [text for text, _ in base] == [
        "torch",
        "/",
        "/",
        "50.0%",
        "100.0",
        "1.000",
        "25.0%",
        "10.0",
        "1",
    ]
    assert [text for text, _ in other] == [
        "other",
        "2 of 8",
        "25.0%",
        "25.0%",
        "50.00",
        "/",
        "/",
        "10.0",
        "1",
    ]
    assert [below for _, below in base] == ["base", *[""] * 8]
    assert [below for _, below in other] == [
        "",
        "25.0%",
        "",
        "",
        "invalid: busy",
        *[""] * 3,
        "1 not valid",
    ]
    assert [row.cells[4].tone for row in table.rows] == ["plain", "muted"]


def rate_of(records: list[Record], lang: Any = "en") -> tuple[str, str, str]:
    """Return the second engine's rate, the text below it, and the tone of its cell."""
    _, table = shown(records, lang)
    place = next(number for number, column in enumerate(table.columns) if column.strong)
    cell = table.rows[1].cells[place]
    return cell.text, cell.sub, cell.tone


def test_valid_runs_have_the_rate_where_others_are_not_valid() -> None:
    base, reasons = (
        scored("torch", "A" * 8),
        [{"code": "busy", "text": ""}, {"code": "unsteady", "text": ""}],
    )
    lost = scored("other", "A" * 8, 10.0, status="invalid", reasons=reasons)
    assert rate_of([base, lost, scored("other", "A" * 8, 50.0)]) == ("50.00", "", "plain")
    assert rate_of([base, lost, lost], "zh") == ("10.00", "无效：busy，unsteady", "muted")
    unknown = scored("other", "A" * 8, None, status="invalid", reasons=reasons)
    assert rate_of([base, unknown]) == ("/", "invalid: busy, unsteady", "muted")


def test_likeliest_tokens_have_a_column_where_they_are_kept() -> None:
    records = [
        with_tokens("torch", "ABCDABCD", [90, 91]),
        with_tokens("other", "ABCDBBCD", [90, 92]),
    ]
    _, table = shown(records)
    assert [column.title for column in table.columns][:3] == [
        "engine",
        "other answers",
        "other likeliest tokens",
    ]
    assert cells(table)[1][1:3] == [("1 of 8", "12.5%"), ("2 of 8", "25.0%")]
    _, table = shown(records, "zh")
    assert table.columns[2].title == "最可能 token 不同数"


def test_training_has_losses_and_norms_with_their_steps() -> None:
    _, table = shown(
        [trained("torch", [9.0, 8.0, 7.0, 6.0]), trained("other", [9.0, 8.5, 7.0, 6.0])]
    )
    titles = [column.title for column in table.columns]
    assert titles[:5] == [
        "engine",
        "loss, largest difference",
        "grad_norm, largest difference",
        "loss_after, difference",
        "loss_after",
    ]
    assert cells(table)[1][:5] == [
        ("other", ""),
        ("0.5000", "step 1"),
        ("0", ""),
        ("0", ""),
        ("6.000 nats", ""),
    ]


def test_an_engine_without_a_finished_run_is_named() -> None:
    lost = scored("lost", "A" * 8, status="failed", passes=[], outputs={}, metrics={})
    page, _ = shown([scored("torch", "A" * 8), lost, scored("other", "A" * 8)])
    assert Paragraph("No finished run: lost.") in page.elements


def test_in_chinese() -> None:
    _, table = shown([scored("torch", "A" * 8), scored("other", "A" * 7 + "B")], "zh")
    assert [column.title for column in table.columns][:3] == ["引擎", "答案不同数", "acc 差异"]
    assert cells(table)[1][1] == ("1 / 8", "12.5%")


def test_a_page_has_the_section_where_there_are_two_engines() -> None:
    blocks = report.build_report_page(
        [scored("torch", "A" * 8), scored("other", "A" * 8)], "en"
    ).elements
    at = blocks.index(Heading(3, "Engines"))
    assert blocks[at + 1] == Paragraph("Runs #1, #2: bf16 · closed · full · NVIDIA H200", "strong")
    assert [column.title for column in blocks[at + 2].columns] == HEADS
    alone = report.build_report_page(
        [scored("torch", "A" * 8), scored("torch", "A" * 8)], "en"
    ).elements
    assert Heading(3, "Engines") not in alone


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_every_format_shows_it(format: str) -> None:
    assert "2 of 8" in report.render(
        [scored("torch", "A" * 8), scored("other", "A" * 6 + "BB")], format, "en"
    )


def test_nothing_to_compare_is_no_page() -> None:
    assert report.build_engines_page([make()]) is None
