"""Generation on pages: loads as rows of one case and as curves, the table after a run, and lead
sentences that rank no load against another.
"""

import re
from typing import Any

import pytest

from fixtures import load_records as made
from fixtures.golden import golden
from fixtures.pages import parse_html
from fixtures.report import A100_ENVIRONMENT, make_record
from steelyard import report
from steelyard.errors import RequestError
from steelyard.metrics import side_comparison
from steelyard.metrics.side_comparison import Comparison
from steelyard.metrics.time_waterfall import make_waterfalls
from steelyard.record.record import Record
from steelyard.report import as_csv, report_data
from steelyard.report.document import (
    ChartLimit,
    Page,
    Paragraph,
    PlottedPoint,
    PointChart,
    PointSeries,
    Table,
    walk_elements,
)
from steelyard.report.load_section import build_load_section, find_load_curves
from steelyard.report.numbered_runs import format_scope, group_by_case
from steelyard.report.numbers import format_times
from steelyard.report.point_geometry import Segment, find_frontier, lay_out_points
from steelyard.words import PageWords

AFTER_A_SWEEP = """\
llama3-8b-generate · size full · closed · transformers · bf16

load  status             rate     ±            TTFT            TPOT   exact
              output tokens/s           p50/p90/p99     p50/p90/p99
----  ------  ---------------  ----  --------------  --------------  ------
C1    valid             142.0  2.0%  31.2/46.8/- ms  6.67/10.0/- ms  99.9%*
C4    valid             520.0  2.0%  40.7/61.0/- ms  7.25/10.9/- ms  99.9%*
C16   valid             1,710  2.0%   83.5/125/- ms  8.47/12.7/- ms  99.9%*
* compared with the reference engine; this case sets no gate
No ttft_p99, tpot_p99: needs 662 requests, the window has 160.
Not shown: mem, e2e_time. --wide shows all columns.
"""
OFFLINE: made.Point = ("offline", 6000.0, 30.0, 5.0, 0.0333)
RATES: tuple[made.Point, ...] = (
    (4.0, 900.0, 90.0, 0.05, 0.011),
    (8.0, 1500.0, 60.0, 0.25, 0.0167),
)


def find_charts(records: list[Record]) -> list[PointChart]:
    """Return the point charts on the page of these records."""
    page = report.build_report_page(records, "en")
    return [item for item in walk_elements(page.elements) if isinstance(item, PointChart)]


def read_lead(records: list[Record], lang: report.Lang = "en") -> str:
    """Return the paragraph at the head of the page of these records."""
    [text] = [
        item.text
        for item in report.build_report_page(records, lang).elements
        if isinstance(item, Paragraph) and item.tone == "lead"
    ]
    return text


def list_rows(page: Page) -> list[list[str]]:
    """Return the cells of the first table of a page as text, with their second lines."""
    table = next(item for item in walk_elements(page.elements) if isinstance(item, Table))
    return [[f"{cell.text} {cell.sub}".strip() for cell in row.cells] for row in table.rows]


@pytest.mark.parametrize(
    ("times_s", "text"),
    [
        ((0.123, 0.18, 0.21), "123/180/210 ms"),
        ((0.0312, 0.9994, None), "31.2/999/- ms"),
        ((0.0312, 0.9996), "0.0312/1.00 s"),
        ((1234.5,), "1,234 s"),
        ((0.0,), "0 ms"),
        ((0.0000004,), "0.000400 ms"),
        ((None, None), "/"),
        ((float("nan"), 0.01), "-/10.0 ms"),
    ],
)
def test_times_have_three_digits_and_one_unit(times_s: tuple[float | None, ...], text: str) -> None:
    assert format_times(times_s) == text


def test_the_table_after_a_sweep_fits_80_columns() -> None:
    page = report.build_summary_page(made.make_sweep()[:3])
    assert report.render_text(page, 80) == AFTER_A_SWEEP
    for columns in (80, 100, 120):
        text = report.render_text(page, columns)
        assert max(map(len, text.splitlines())) <= columns
    assert "TPOT" in report.render_text(page, 80)


def test_the_mark_at_answers_that_no_reference_engine_checked() -> None:
    checked = made.make_generation_record()
    unchecked = checked.model_copy(update={"passes": checked.passes[:1]})
    other = make_record()
    unevaluated = other.quality.model_copy(update={"evaluated": False})
    other = other.model_copy(update={"quality": unevaluated})
    notes = {
        "* compared with the reference engine; this case sets no gate": [checked],
        "* not compared with the reference engine in every run; this case sets no gate": [
            checked,
            unchecked,
        ],
        "* quality is reported, not checked": [checked, other],
    }
    for note, records in notes.items():
        assert note in report.render_text(report.build_summary_page(records), None)


def test_intervals_of_size_smoke_are_not_judged() -> None:
    note = "Size smoke shows that a case runs; intervals are not judged."
    full = made.make_generation_record()
    smoke = full.model_copy(update={"case": full.case.model_copy(update={"size": "smoke"})})
    assert note not in report.render_text(report.build_summary_page([full]), None)
    assert note in report.render_text(report.build_summary_page([smoke]), None)
    assert note not in report.render_text(report.build_summary_page([full, smoke]), None)
    scored = make_record(case__size="smoke")
    assert note not in report.render_text(report.build_summary_page([scored]), None)


def test_a_window_of_generation_counts_requests() -> None:
    sampled = made.make_generation_record(scope={"kind": "window", "sample": 24, "requests": 24})
    assert format_scope(sampled, PageWords("en")) == "window: 24 requests"
    assert format_scope(sampled, PageWords("zh")) == "窗口：24 个请求"


def test_a_run_without_a_window_says_nothing_of_other_kinds_of_work() -> None:
    run = made.make_generation_record(metrics={"e2e_time": {"value": 3.0, "unit": "s"}})
    text = report.render_text(report.build_summary_page([run]), 80)
    assert "MFU" not in text
    assert "TTFT" not in text
    assert "C16" in text


def test_runs_under_a_load_have_a_table_of_their_own() -> None:
    """Their columns, rates and latencies are not those of scoring and training."""
    scored = make_record()
    page = report.build_summary_page([scored, made.make_generation_record(), scored])
    tables = [one for one in walk_elements(page.elements) if isinstance(one, Table)]
    cells = [{cell.text for row in table.rows for cell in row.cells} for table in tables]
    assert [len(table.rows) for table in tables] == [2, 1]
    assert {"62.1%", "45,903"} <= cells[0]
    assert {"83.5/125/- ms", "1,710"} <= cells[1]
    texts = [one.text for one in page.elements if isinstance(one, Paragraph)]
    assert ["C16" in text for text in texts] == [False, True]


def test_loads_are_rows_of_one_case() -> None:
    records = made.make_sweep()
    [(name, runs)] = group_by_case(records).items()
    assert name == ("llama3-8b-generate", "full")
    assert [run.number for run in runs] == [1, 2, 3, 4, 5]
    rows = list_rows(report.build_report_page(records[::-1], "en"))
    assert [row[4] for row in rows] == ["C1", "C4", "C16", "C64", "C128"]
    assert rows[0][5] == "142.0 139.2 – 144.8"
    assert rows[2][6:8] == ["83.5/125/- ms", "8.47/12.7/- ms"]


def test_another_question_is_another_case() -> None:
    record = made.make_generation_record()
    origins = record.case.origins | {"question.data.output_tokens": "command line"}
    other = record.model_copy(update={"case": record.case.model_copy(update={"origins": origins})})
    assert list(group_by_case([record, other])) == [
        ("llama3-8b-generate", "full"),
        ("llama3-8b-generate", "full", "question.data.output_tokens=256"),
    ]


def test_windows_with_too_few_requests_are_one_note() -> None:
    records = [
        made.make_generation_record(point, number, metrics=make_metrics_of_few(60 - number))
        for number, point in enumerate(made.SWEEP)
    ]
    text = report.render_text(report.build_summary_page(records), None)
    assert "No ttft_p99: needs 662 requests, the windows have 56 to 60.\n" in text


def make_metrics_of_few(count: int) -> dict[str, Any]:
    """Return metrics of a run whose window has too few requests for a 99th percentile."""
    few = {"code": "percentile.few", "values": {"least": 662, "count": count}}
    return {
        "output_tokens_per_s": {"value": 10.0, "unit": "tokens/s"},
        "ttft_p50": {"value": 0.1, "unit": "s"},
        "ttft_p99": {"value": None, "unit": "s", "note": few},
    }


def test_one_load_has_no_curve() -> None:
    runs = group_by_case([made.make_generation_record(), made.make_generation_record(number=2)])
    assert build_load_section(next(iter(runs.values())), 3, PageWords("en")) == []


def test_the_curve_has_a_series_for_each_engine_and_marks_what_does_not_count() -> None:
    chart = find_charts(made.make_two_sweeps())[0]
    assert [series.name for series in chart.series] == [
        "vllm",
        "transformers",
        golden("hollow-points"),
    ]
    vllm, transformers, hollow = chart.series
    assert [point.label for point in transformers.points] == ["C1", "C4", "C16", "C64", "C128"]
    assert [point.solid for point in vllm.points] == [True, False, True, True, False]
    assert (transformers.points[2].x, transformers.points[2].y) == (118.0, 1710.0)
    assert {vllm.line, transformers.line} == {"steps"}
    assert hollow.points == ()
    assert chart.limits == (ChartLimit("x", 10.0, golden("limit-on-interactivity")),)
    assert vllm.points[1].text == golden("point-of-a-curve")


def test_an_unproven_point_is_no_step() -> None:
    chart = find_charts(made.make_two_sweeps())[0]
    assert [point.label for point in find_frontier(chart.series[0].points)] == ["C64", "C16", "C1"]


def test_times_against_the_load_are_drawn_with_their_limits() -> None:
    _, ttft, tpot = find_charts(made.make_sweep())
    assert [series.name for series in ttft.series] == ["p50", "p90"]  # no 99th percentile is known
    assert [(point.x, round(point.y, 3)) for point in ttft.series[0].points] == [
        (1.0, 31.2),
        (4.0, 40.7),
        (16.0, 83.5),
        (64.0, 246.0),
        (128.0, 655.0),
    ]
    assert [(limit.axis, limit.value) for limit in (*ttft.limits, *tpot.limits)] == [
        ("y", 2000.0),
        ("y", 100.0),
    ]
    assert ttft.log_x
    assert ttft.log_y
    assert ttft.y_label == "ms"


def test_open_and_closed_loops_have_charts_of_their_own() -> None:
    records = [*made.make_sweep(), *made.make_sweep(first=11, points=(*RATES, OFFLINE))]
    charts = find_charts(records)
    assert [chart.x_label for chart in charts] == [
        golden("axis-of-interactivity"),
        *[golden("axis-of-concurrency")] * 2,
        *[golden("axis-of-rate")] * 2,
    ]
    assert [point.label for point in charts[0].series[0].points] == [
        *["C1", "C4", "C16", "C64", "C128", "4 req/s", "8 req/s", "offline"]
    ]
    assert [point.x for point in charts[3].series[0].points] == [4.0, 8.0]


def test_runs_of_other_definitions_or_devices_are_no_points_of_one_series() -> None:
    sweep = made.make_sweep()
    samples = sweep[1].requests[0]
    redefined = samples.model_copy(
        update={"definitions": samples.definitions | {"ttft": "sent-to-first-byte/9"}}
    )
    other_definition = sweep[1].model_copy(update={"requests": [redefined]})
    say = PageWords("en")
    [runs] = group_by_case([sweep[0], other_definition]).values()
    assert find_load_curves(runs, say) == []
    on_a100 = made.make_generation_record(made.SWEEP[1], 9, environment=A100_ENVIRONMENT)
    [runs] = group_by_case([sweep[0], on_a100]).values()
    assert find_load_curves(runs, say) == []


def test_steps_are_drawn_without_interpolation() -> None:
    def point(x: float, y: float, solid: bool = True) -> PlottedPoint:
        """Return a point without texts."""
        return PlottedPoint(x, y, "", "", solid)

    # 100 is the end of both axes but for the headroom
    points = (point(25.0, 100.0), point(50.0, 50.0), point(40.0, 40.0), point(100.0, 25.0))
    chart = PointChart("", "", "", (PointSeries("", (*points, point(90.0, 90.0, False)), "steps"),))
    [series] = lay_out_points(chart).series
    scale = 1.12
    left, middle, right = (f"{x / scale / 100:.2%}" for x in (25, 50, 100))
    top, half, low = (f"{1 - y / scale / 100:.2%}" for y in (100, 50, 25))
    assert series.segments == (
        Segment("0.00%", top, left, top),
        Segment(left, top, left, half),
        Segment(left, half, middle, half),
        Segment(middle, half, middle, low),
        Segment(middle, low, right, low),
        Segment(right, low, right, "100.00%"),
    )


def test_a_straight_line_has_a_gap_at_a_point_that_does_not_count() -> None:
    points = tuple(
        PlottedPoint(x, 10.0, "", "", solid)
        for x, solid in ((1.0, True), (2.0, True), (4.0, False), (8.0, True))
    )
    series = (PointSeries("", points, "straight"),)
    drawn = lay_out_points(PointChart("", "", "", series, log_x=True, log_y=True))
    assert len(drawn.series[0].segments) == 1
    assert [tick.text for tick in drawn.x_ticks] == ["1", "2", "4", "8"]


def test_labels_of_near_points_do_not_cover_each_other() -> None:
    points = tuple(
        PlottedPoint(50.0 + offset, 50.0 + offset, f"C{offset}", "") for offset in (0, 1, 2, 50)
    )
    [series] = lay_out_points(PointChart("", "", "", (PointSeries("", points),))).series
    assert [(dot.dx, dot.dy, dot.anchor) for dot in series.dots] == [
        (7, -6, "start"),
        (-7, 15, "end"),
        (-7, -6, "end"),
        (7, -6, "start"),
    ]


@pytest.mark.parametrize("lang", report.LANGS)
def test_the_lead_names_the_fastest_engine_of_each_load(lang: report.Lang) -> None:
    lead = read_lead(made.make_two_sweeps(), lang)
    assert golden("lead-of-two-sweeps", language=lang) in lead
    # the unproven and the invalid one are not named, though they have the higher rates
    assert "676" not in lead
    assert "6,669" not in lead


def test_the_lead_says_that_declared_hardware_has_no_best_result() -> None:
    details = {"is_external": True, "device": "One"}
    lead = read_lead(made.make_sweep("http", points=made.SWEEP[:1], details=details))
    assert "ran on hardware that is declared and not seen: it has no best result." in lead
    assert "No run of" not in lead


def test_accelerators_are_compared_at_the_same_load_only() -> None:
    here = made.make_sweep()[:2]
    there = [
        made.make_generation_record(point, number, environment=A100_ENVIRONMENT)
        for number, point in enumerate(made.SWEEP[1:3], 31)
    ]
    lead = read_lead([*here, *there])
    assert len(re.findall(r"times as fast", lead)) == 1
    assert golden("accelerators-at-one-load") in lead


def test_the_page_has_the_points_as_a_table_and_the_runs_in_full() -> None:
    parsed = parse_html(report.render(made.make_two_sweeps(), "html", "en"))
    assert [
        "transformers",
        "C16 #3",
        "1,710 1,676 – 1,744",
        "118.0",
        "83.5/125/- ms",
        "8.47/12.7/- ms",
        "6.680",
        "160",
        "yes",
        "valid",
    ] in parsed.rows
    text = report.render(made.make_two_sweeps(), "text", "en", columns=100)
    assert max(map(len, text.splitlines())) <= 100


def test_data_have_the_load() -> None:
    records = [made.make_generation_record(), make_record()]
    content = report_data.build_report(records).model_dump(mode="json", by_alias=True)
    assert [row["load"] for row in content["summary"]] == ["C16", None]
    assert list(content["summary"][0]["metrics"]) == [
        "output_tokens_per_s",
        "interactivity",
        "ttft_p50",
        "ttft_p90",
        "tpot_p50",
        "exact_tokens",
        "mem",
        "mem_total",
        "e2e_time",
    ]
    loads = [run["load"] for case in content["cases"] for run in case["runs"]]
    assert loads[0]["concurrency"] == 16
    assert loads[1] is None
    header, row, _ = as_csv.render_csv(records).splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=False))["load"] == "C16"


def test_two_runs_are_compared_without_answers_to_other_prompts() -> None:
    base, new = (
        salt_requests(made.make_generation_record(number=number), digits)
        for number, digits in ((1, "aa" * 8), (2, "bb" * 8))
    )
    found = compare(base, new)
    text = report.render_text(report.build_comparison_page(found), 80)
    assert text.splitlines()[0].endswith("bf16 · closed · C16")
    assert golden("other-items") not in text
    same = compare(base, base)
    assert golden("other-items") in report.render_text(report.build_comparison_page(same), 80)


def compare(base: Record, new: Record) -> Comparison:
    """Compare two records."""
    sides = (side_comparison.make_side(name, [one]) for name, one in (("a", base), ("b", new)))
    return side_comparison.compare_sides(*sides, [], 0.01)


def salt_requests(record: Record, digits: str) -> Record:
    """Return a copy of a record whose prompts had another salt."""
    samples = record.requests[0].model_copy(update={"salt": digits})
    return record.model_copy(update={"requests": [samples]})


def test_compared_latencies_are_in_milliseconds() -> None:
    base = made.make_generation_record(number=1)
    new = made.make_generation_record((16, 1800.0, 125.0, 0.0411, 1.25), 2)
    found = compare(base, new)
    page = report.build_comparison_page(found)
    [metrics] = [
        item
        for item in walk_elements(page.elements)
        if isinstance(item, Table) and item.columns[0].title == "metric"
    ]
    rows = {row.cells[0].text: [cell.text for cell in row.cells] for row in metrics.rows}
    units = {row.cells[0].text: row.cells[0].sub for row in metrics.rows}
    assert (units["ttft_p50"], units["tpot_p50"]) == ("ms", "s")
    assert rows["ttft_p50"][1:3] == ["83.50", "41.10"]
    assert rows["tpot_p50"][1:3] == ["0.008470", "1.250"]


@pytest.mark.parametrize(("division", "count"), [("closed", 1), ("open", 0)])
def test_a_waterfall_needs_counts_of_what_was_computed(division: str, count: int) -> None:
    record = made.make_generation_record()
    case = record.case.model_copy(update={"division": division})
    record = record.model_copy(update={"case": case})
    assert len(make_waterfalls(record)) == count
    assert "C16" in report.render_text(report.build_waterfall_page([record], "en"), 100)


def test_declared_hardware_has_no_waterfall_and_loads_no_advice_to_profile() -> None:
    external = {"name": "http", "details": {"is_external": True}}
    record = made.make_generation_record()
    declared = record.model_copy(
        update={
            "engine": type(record.engine).model_validate({**record.engine.model_dump(), **external})
        }
    )
    assert not make_waterfalls(declared)
    text = report.render_text(report.build_waterfall_page([record], "en"), 100)
    assert "of whose steps the engine reports none" in " ".join(text.split())
    brief = report.render_text(report.build_brief_page([record], "en"))
    assert "--explain" not in brief


def test_nothing_is_published_in_flagperf_s_form() -> None:
    with pytest.raises(RequestError, match="FlagPerf has no page"):
        report.flagperf_pages([made.make_generation_record()], "en")
    page = report.render([made.make_generation_record()], "md", "en")
    assert "published" not in page.lower().replace("the published set", "")
