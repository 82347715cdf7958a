"""The section of a page that compares engines."""

from typing import Any

import pytest

from fixtures.engines import make_record_with_tokens, make_scoring_record, make_trained_record
from fixtures.report import WITHOUT_INTERVAL, make_record
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


def render_engines(records: list[Record], lang: Any = "en") -> tuple[Page, Table]:
    """Return the page of engines of the records, and its only table."""
    page = report.build_engines_page(records, lang)
    assert page is not None
    [table] = [block for block in page.elements if isinstance(block, Table)]
    return page, table


def list_cell_texts(table: Table) -> list[list[tuple[str, str]]]:
    """Return the text of each cell and the text below it, by row."""
    return [[(cell.text, cell.sub) for cell in row.cells] for row in table.rows]


def test_differences_of_the_answers_come_first() -> None:
    busy = [{"code": "busy", "text": "others used 20 % of the cores"}]
    other = make_scoring_record("other", "ABCDABDC", 50.0, 0.25, status="invalid", reasons=busy)
    page, table = render_engines([make_scoring_record("torch", "ABCDABCD"), other])
    assert page.elements[0] == Paragraph(
        "Engines: llama2-7b-mmlu · full · bf16 · closed · whole · NVIDIA H200", "strong"
    )
    assert [column.title for column in table.columns] == HEADS
    base, other = list_cell_texts(table)
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
        "other (not tested)",
        "2 of 8",
        "25.0%",
        "25.0%",
        "50.00",
        "/",
        "/",
        "10.0",
        "1",
    ]
    assert [below for _, below in base] == ["base", *[""] * 3, "99.00 – 101.0", *[""] * 4]
    assert [below for _, below in other] == [
        "",
        "25.0%",
        "",
        "",
        "invalid: busy",
        *[""] * 3,
        "1 not counted",
    ]
    assert [row.cells[4].tone for row in table.rows] == ["plain", "muted"]


def read_second_rate(records: list[Record], lang: Any = "en") -> tuple[str, str, str]:
    """Return the second engine's rate, the text below it, and the tone of its cell."""
    _, table = render_engines(records, lang)
    rate_column = next(number for number, column in enumerate(table.columns) if column.strong)
    cell = table.rows[1].cells[rate_column]
    return cell.text, cell.sub, cell.tone


def test_valid_runs_have_the_rate_where_others_are_not_valid() -> None:
    base, reasons = (
        make_scoring_record("torch", "A" * 8),
        [{"code": "busy", "text": ""}, {"code": "unsteady", "text": ""}],
    )
    lost = make_scoring_record("other", "A" * 8, 10.0, status="invalid", reasons=reasons)
    assert read_second_rate([base, lost, make_scoring_record("other", "A" * 8, 50.0)]) == (
        "50.00",
        "49.50 – 50.50",
        "plain",
    )
    assert read_second_rate([base, lost, lost], "zh") == ("10.00", "无效：busy，unsteady", "muted")
    unknown = make_scoring_record("other", "A" * 8, None, status="invalid", reasons=reasons)
    assert read_second_rate([base, unknown]) == ("/", "invalid: busy, unsteady", "muted")


def read_second_row(records: list[Record], lang: Any = "en") -> list[str]:
    """Return rate, ratio and number of runs of the second engine, each with the text below it."""
    _, table = render_engines(records, lang)
    cells = [table.rows[1].cells[HEADS.index(name)] for name in ("rate", "against torch", "runs")]
    return [f"{cell.text} {cell.sub}".strip() for cell in cells]


def test_a_ratio_of_single_runs_is_not_tested() -> None:
    """Neither is one of a single run and repeats: the intervals of steps inside a run say nothing
    of the spread between runs.
    """
    base = [make_scoring_record("torch", "A" * 8, rate) for rate in (100.0, 102.0)]
    other = [make_scoring_record("other", "A" * 8, rate) for rate in (50.0, 51.0)]
    assert read_second_row([base[0], other[0]]) == ["50.00 49.50 – 50.50", "0.5000 not tested", "1"]
    assert read_second_row([base[0], other[0]], "zh")[1] == "0.5000 未检验"
    assert read_second_row([*base, other[0]])[1:] == ["0.4951 not tested", "1"]
    assert read_second_row([*base, *other]) == [
        "50.50 44.15 – 56.85",
        "0.5000 0.4708 – 0.5311",
        "2",
    ]


def test_unproven_rates_of_an_engine_are_shown_and_not_compared() -> None:
    base = [make_scoring_record("torch", "A" * 8, rate) for rate in (100.0, 102.0)]
    short = [
        make_scoring_record("other", "A" * 8, rate, **WITHOUT_INTERVAL)
        for rate in (50.8, 51.2, 51.0)
    ]
    assert read_second_row([*base, *short[:2]]) == [
        "51.00 unproven: few_steps",
        "/",
        "2 2 not counted",
    ]
    assert read_second_rate([*base, *short[:2]]) == ("51.00", "unproven: few_steps", "muted")
    assert read_second_rate([*base, short[0]], "zh") == ("50.80", "未证实：few_steps", "muted")
    assert read_second_row([*base, *short]) == [
        "51.00 50.50 – 51.50",
        "0.5050 0.4511 – 0.5652",
        "3",
    ]


def test_likeliest_tokens_have_a_column_where_records_hold_them() -> None:
    records = [
        make_record_with_tokens("torch", "ABCDABCD", [90, 91]),
        make_record_with_tokens("other", "ABCDBBCD", [90, 92]),
    ]
    _, table = render_engines(records)
    assert [column.title for column in table.columns][:3] == [
        "engine",
        "other answers",
        "other likeliest tokens",
    ]
    assert list_cell_texts(table)[1][1:3] == [("1 of 8", "12.5%"), ("2 of 8", "25.0%")]
    _, table = render_engines(records, "zh")
    assert table.columns[2].title == "最可能 token 不同数"


def test_training_has_losses_and_norms_with_their_steps() -> None:
    _, table = render_engines(
        [
            make_trained_record("torch", [9.0, 8.0, 7.0, 6.0]),
            make_trained_record("other", [9.0, 8.5, 7.0, 6.0]),
        ]
    )
    titles = [column.title for column in table.columns]
    assert titles[:5] == [
        "engine",
        "loss, largest difference",
        "grad_norm, largest difference",
        "loss_after, difference",
        "loss_after",
    ]
    assert list_cell_texts(table)[1][:5] == [
        ("other (not tested)", ""),
        ("0.5000", "step 1"),
        ("0", ""),
        ("0", ""),
        ("6.000 nats", ""),
    ]


def test_an_engine_without_a_finished_run_is_named() -> None:
    lost = make_scoring_record("lost", "A" * 8, status="failed", passes=[], outputs={}, metrics={})
    page, _ = render_engines(
        [make_scoring_record("torch", "A" * 8), lost, make_scoring_record("other", "A" * 8)]
    )
    assert Paragraph("No finished run: lost.") in page.elements


def test_the_section_in_chinese() -> None:
    _, table = render_engines(
        [make_scoring_record("torch", "A" * 8), make_scoring_record("other", "A" * 7 + "B")], "zh"
    )
    assert [column.title for column in table.columns][:3] == ["引擎", "答案不同数", "acc 差异"]
    assert list_cell_texts(table)[1][1] == ("1 / 8", "12.5%")


def test_a_page_has_the_section_where_there_are_two_engines() -> None:
    blocks = report.build_report_page(
        [make_scoring_record("torch", "A" * 8), make_scoring_record("other", "A" * 8)], "en"
    ).elements
    index = blocks.index(Heading(3, "Engines"))
    assert blocks[index + 1] == Paragraph(
        "Runs #1, #2: bf16 · closed · whole · NVIDIA H200", "strong"
    )
    assert [column.title for column in blocks[index + 2].columns] == HEADS
    one_engine = report.build_report_page(
        [make_scoring_record("torch", "A" * 8), make_scoring_record("torch", "A" * 8)], "en"
    ).elements
    assert Heading(3, "Engines") not in one_engine


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_every_format_shows_the_differences(format: str) -> None:
    assert "2 of 8" in report.render(
        [make_scoring_record("torch", "A" * 8), make_scoring_record("other", "A" * 6 + "BB")],
        format,
        "en",
    )


def test_without_two_engines_there_is_no_page() -> None:
    assert report.build_engines_page([make_record()]) is None
