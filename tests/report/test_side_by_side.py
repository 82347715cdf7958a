"""The comparison at the head of a page: machines, summary, charts and table, from made records."""

from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import (
    make_failed_record,
    make_rated_record,
    make_record,
    make_records_of_all_statuses,
    make_records_of_two_accelerators,
)
from steelyard import report
from steelyard.record.record import PublishedFacts, Record
from steelyard.report import chart_geometry, charts
from steelyard.report.case_tables import build_comparison_table
from steelyard.report.document import (
    BarChart,
    Contents,
    Fact,
    Facts,
    Fold,
    Heading,
    Link,
    Panel,
    Paragraph,
    ReferenceLine,
    Table,
)
from steelyard.report.numbered_runs import group_by_case
from steelyard.report.published_rows import PublishedRow
from steelyard.report.report_page import build_date_paragraph, list_machines
from steelyard.words import PageWords

EN = PageWords("en")
PUBLISHED = {
    "source": "page",
    "config": "8x NVIDIA A100-SXM4-40GB (1x8), PyTorch 1.8",
    "published_as": "fp32",
    "ran_as": "fp16",
    "note": None,
    "values": {"p_infer_whole": 80000.0, "mfu_nominal": 0.5, "mem": 33.0},
}


def list_block_kinds(page: report.Page) -> list[str]:
    """Return the class names of the page's top-level blocks."""
    return [type(block).__name__ for block in page.elements]


def render_summary(records: list[Record], lang: Any = "en") -> str:
    """Return the text of the page's only summary paragraph."""
    [text] = [
        block.text
        for block in report.build_report_page(records, lang).elements
        if isinstance(block, Paragraph) and block.tone == "lead"
    ]
    return text


def list_cell_texts(table: Table) -> list[list[str]]:
    """Return the text of each cell with the text below it, by row."""
    return [[f"{cell.text} {cell.sub}".strip() for cell in row.cells] for row in table.rows]


def render_table(records: list[Record]) -> Table:
    """Return the comparison table of the records' only case."""
    [runs] = group_by_case(records).values()
    return build_comparison_table(runs, EN)


def render_chart(records: list[Record]) -> BarChart:
    """Return the only bar chart of the records' only case."""
    [runs] = group_by_case(records).values()
    [chart] = charts.build_case_charts(runs, "c", EN)
    assert isinstance(chart, BarChart)
    return chart


def test_the_comparison_comes_first() -> None:
    page = report.build_report_page(make_records_of_two_accelerators(), "en")
    names = list_block_kinds(page)
    head = [
        "Heading",
        "Paragraph",
        "Facts",
        "Paragraph",
        "Contents",
        "Heading",
        "BarChart",
        "Table",
    ]
    assert names[: len(head)] == head
    anchors = [
        block.anchor for block in page.elements if isinstance(block, Heading) and block.anchor
    ]
    assert anchors == ["case-1", "metrics", "runs"]
    [contents] = [block for block in page.elements if isinstance(block, Contents)]
    assert [link.anchor for link in contents.items] == anchors
    runs = [block for block in page.elements if isinstance(block, Fold) and block.heading.anchor]
    assert page.elements[-5:] == tuple(runs)
    assert runs[0].heading == Heading(
        3, "#1 NVIDIA H200 × 1 · torch · bf16 · closed", "run-00000001"
    )
    assert (runs[2].note, runs[2].tone) == ("invalid: interval", "bad")


def test_runs_of_one_id_have_anchors_of_their_own() -> None:
    [runs] = group_by_case([make_record(), make_record(), make_record(id='Ab" x<9')]).values()
    assert [run.anchor for run in runs] == ["run-0f3c9a7e", "run-0f3c9a7e-2", "run-ab-x-9"]


def test_measured_dates_are_days() -> None:
    assert (
        build_date_paragraph(
            [make_record(), make_record(created="2026-03-01T00:00:00+00:00")], EN
        ).text
        == "Measured 2026-01-02 to 2026-03-01"
    )
    assert build_date_paragraph([make_record(created="<script>")], EN).text == "Measured /"


def test_machines_are_one_line_each() -> None:
    host = "AMD EPYC 9454 48-Core Processor, 16 cores, 128.0 GiB · Ubuntu 24.04 · driver 570.86"
    assert list_machines(make_records_of_two_accelerators(), EN) == Facts(
        (Fact("NVIDIA H200 × 1", f"{host} · 3 runs"), Fact("NVIDIA A100 × 1", f"{host} · 2 runs"))
    )
    named = make_record(site={"machine": "rack 7"})
    assert list_machines([make_record(), named], EN) == Facts(
        (Fact("NVIDIA H200 × 1", f"{host} · rack 7 · 2 runs"),)
    )


def test_the_summary_compares_accelerators() -> None:
    assert render_summary(make_records_of_two_accelerators()) == (golden("5-runs-of-1-case-on"))
    assert render_summary(make_records_of_two_accelerators(), "zh") == golden(
        "5-runs-of-1-case-on", language="zh"
    )


def test_the_summary_of_one_accelerator() -> None:
    text = render_summary(
        [
            make_rated_record(1, 40000.0),
            make_rated_record(2, None, status="failed", reasons=[{"code": "oom", "text": "x"}]),
        ]
    )
    assert text == (golden("2-runs-of-1-case-on"))
    assert render_summary([make_failed_record()]).startswith(golden("1-run-of-1-case-on"))
    assert render_summary([make_rated_record(1, 1.0)]).endswith("All runs are valid.")


def test_smoke_runs_are_not_in_the_summary() -> None:
    text = render_summary(
        [make_rated_record(1, 40000.0), make_rated_record(2, 90000.0, case__size="smoke")]
    )
    assert "90,000" not in text
    assert golden("1-run-of-size-smoke-show") in text


def test_rows_of_the_table() -> None:
    table = render_table(make_records_of_two_accelerators())
    heads = [(column.title, column.sub, column.priority) for column in table.columns]
    assert heads == [
        ("accelerator", "", 1),
        ("engine", "plan", 1),
        ("precision", "division", 2),
        ("settings changed", "scope", 3),
        ("rate per device", "tokens/s", 1),
        ("MFU", "", 1),
        ("acc", "", 2),
        ("mem", "GiB", 2),
        ("energy", "J/token", 2),
        ("status", "", 1),
    ]
    fast, torch, other, *others = list_cell_texts(table)
    settings = ["transformers TP1PP1DP1", "bf16 closed", "order=1 whole"]
    assert fast == [
        "NVIDIA H200 × 1 #2",
        *settings,
        "42,000 41,000 – 43,000",
        "42.0%",
        "/",
        "22.0",
        "0.01429",
        "valid",
    ]
    assert (torch[0], torch[4], torch[-1]) == (
        "NVIDIA H200 × 1 #1, #3",  # equal settings: one row; only the valid run counts
        "40,000 39,000 – 41,000",
        "valid 1 of 2 count, interval",
    )
    assert other[0] == "NVIDIA A100 × 1 #5"
    assert table.pinned
    assert table.rows[0].cells[0].links == (Link("#2", "run-00000002"),)
    assert [row[0] for row in others[:1]] == ["NVIDIA A100 × 1 #4"]


def test_published_rows_follow_measured_ones() -> None:
    table = render_table([make_rated_record(1, 40000.0, case__reference=[PUBLISHED])])
    row = list_cell_texts(table)[1]
    name = ["NVIDIA A100-SXM4-40GB × 8 published [1]", "PyTorch 1.8", "fp32 ran fp16", ""]
    assert row == [*name, "10,000", "50.0% nominal", "/", "33.0", "/", ""]
    assert table.rows[1].kind == "published"
    assert table.footnotes[1].startswith("Published, not measured here: [1];")
    md = report.render([make_rated_record(1, 40000.0, case__reference=[PUBLISHED])], "md", "en")
    assert "| _fp32_<br>ran fp16 |  | _10,000_ |" in md


def test_bars_have_intervals_and_published_lines() -> None:
    chart = render_chart(
        [
            make_rated_record(1, 40000.0, (39000.0, 41000.0), case__reference=[PUBLISHED]),
            make_rated_record(
                2, 20000.0, status="invalid", case__precision="fp16", case__reference=[PUBLISHED]
            ),
        ]
    )
    rate, mfu, energy = chart.panels
    assert [row.text for row in chart.rows] == ["NVIDIA H200 × 1 · torch"] * 2
    assert [(row.sub, row.valid) for row in chart.rows] == [
        ("bf16 · closed", True),
        ("fp16 · closed · invalid", False),
    ]
    assert (rate.bars[0].value, rate.bars[0].interval) == (40000.0, (39000.0, 41000.0))
    assert (
        rate.bars[0].text == "Throughput per device: 40,000 tokens/s, 95 % interval 39,000 – 41,000"
    )
    assert rate.references == (
        ReferenceLine(10000.0, "1", "published [1]: 10,000, NVIDIA A100-SXM4-40GB"),
    )
    assert mfu.references == (
        ReferenceLine(0.5, "1", "published [1]: 50.0%, nominal convention, NVIDIA A100-SXM4-40GB"),
    )
    assert (rate.low, rate.high, rate.note, energy.references) == (
        0.0,
        pytest.approx(41820.0),
        "",
        (),
    )


def test_an_axis_of_close_values_is_cut_with_a_note() -> None:
    first, *_ = render_chart(
        [
            make_rated_record(1, 40000.0, (40000.0, 40000.0), case__reference=[]),
            make_rated_record(
                2, 39000.0, (39000.0, 39000.0), case__precision="fp16", case__reference=[]
            ),
        ]
    ).panels
    assert (first.low, first.high) == (37000.0, 40800.0)
    assert first.note == golden("the-axis-starts-at-37-000")
    only_panel, *_ = render_chart([make_rated_record(1, 40000.0)]).panels
    assert (only_panel.low, only_panel.note) == (0.0, "")


def test_a_smoke_run_has_no_published_line() -> None:
    chart = render_chart(
        [make_rated_record(1, 40000.0, case__size="smoke", case__reference=[PUBLISHED])]
    )
    assert [panel.references for panel in chart.panels] == [(), (), ()]


def test_units_of_rates_have_charts_of_their_own() -> None:
    per_s = {"samples_per_s": {"value": 300.0, "unit": "questions/s"}}
    [runs] = group_by_case(
        [
            make_rated_record(1, 40000.0),
            make_record(id="9" * 32, case__division="open", metrics=per_s),
        ]
    ).values()
    case_charts = charts.build_case_charts(runs, "c", EN)
    assert [chart.panels[0].unit for chart in case_charts if isinstance(chart, BarChart)] == [
        "tokens/s",
        "questions/s",
    ]
    assert [row[4] for row in list_cell_texts(build_comparison_table(runs, EN))][:2] == [
        "40,000 39,600 – 40,400",
        "300.0 questions/s",
    ]


def test_a_chart_keeps_the_best_of_every_engine_and_precision() -> None:
    """The slowest two of 14 runs are the only ones of their engine and precision: runs like the
    best one are left out instead.
    """
    similar = [
        make_rated_record(number, 50000.0 - 100 * number, tune__batch_tokens=1024 * number)
        for number in range(1, 13)
    ]
    others = [
        make_rated_record(13, 900.0, engine__name="transformers"),
        make_rated_record(14, 800.0, case__precision="fp32"),
    ]
    chart = render_chart([*similar, *others])
    assert len(chart.rows) == charts.MAX_ROWS == 10
    assert [bar.value for bar in chart.panels[0].bars] == [
        50000.0 - 100 * number for number in range(1, 9)
    ] + [900.0, 800.0]


def test_without_rates_there_is_no_chart() -> None:
    [runs] = group_by_case([make_failed_record()]).values()
    assert charts.build_case_charts(runs, "c", EN) == []
    [runs] = group_by_case([make_rated_record(1, 1e20)]).values()
    assert charts.build_case_charts(runs, "c", EN) == []


def test_bar_positions_are_shares_of_the_width() -> None:
    chart = render_chart(
        [make_rated_record(1, 40000.0, (30000.0, 50000.0), case__reference=[PUBLISHED])]
    )
    panel = chart.panels[0]
    [bar], [reference] = panel.bars, panel.references
    assert [
        chart_geometry.axis_percentage(value, panel) for value in (bar.value, *bar.interval)
    ] == ["78.43%", "58.82%", "98.04%"]
    assert chart_geometry.axis_percentage(reference.value, panel) == "19.61%"
    close = tuple(
        ReferenceLine(value, mark, "") for value, mark in ((10.0, "1"), (12.0, "2"), (90.0, "3"))
    )
    assert [
        (mark.position, mark.text)
        for mark in chart_geometry.place_references(Panel("", "", (), close, 0.0, 100.0))
    ] == [("10.00%", "[1, 2]"), ("90.00%", "[3]")]


@pytest.mark.parametrize("format", report.FORMATS)
@pytest.mark.parametrize("lang", report.LANGS)
def test_every_format_has_the_same_order(format: str, lang: str) -> None:
    text = report.render(make_records_of_all_statuses(), format, lang)
    words = PageWords("zh" if lang == "zh" else "en")
    marks = [
        "llama2-7b-mmlu",
        "2026-01-02",
        "NVIDIA H200 × 1",
        words("side.tune"),
        words("page.meanings"),
        words("setup"),
    ]
    body = text[text.index("<main>") :] if format == "html" else text
    positions = [body.index(mark) for mark in marks[:4]] + [body.rindex(mark) for mark in marks[4:]]
    assert positions == sorted(positions)


def test_a_breakdown_of_zeros_is_one_line() -> None:
    from steelyard.report.run_details import _breakdown_elements

    class Task:
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def breakdowns(self, answers: Any) -> list[Any]:
            from steelyard.tasks.task import Breakdown

            return [Breakdown(("By subject", "x"), (("Subject", "x"), ("val", "val")), self.rows)]

    class Stub:
        answers = 1

        def __init__(self, rows: Any) -> None:
            self.task = Task(rows)

    [line] = _breakdown_elements(Stub((("a", 0.0), ("b", None))), 5, EN)  # type: ignore[arg-type]
    assert line == Paragraph("By subject: 2 rows, nothing but zeros.", "muted")
    blocks = _breakdown_elements(Stub((("a", 0.0), ("b", 0.5))), 5, EN)  # type: ignore[arg-type]
    assert [type(block).__name__ for block in blocks] == ["Heading", "Table"]


def test_a_published_rate_that_is_text_gives_way_to_the_next() -> None:
    facts = PublishedFacts.model_construct(
        config="2x NVIDIA A100 (1x2)", values={"p_infer_whole": "see note", "p_whole": 10.0}
    )
    assert PublishedRow(1, facts).device_rate(in_samples=False) == (5.0, "tokens/s")
