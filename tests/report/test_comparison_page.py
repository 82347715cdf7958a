"""Pages of comparisons and of histories."""

from pathlib import Path

import pytest

from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from fixtures.report import WITHOUT_INTERVAL, make_training_record
from steelyard import report
from steelyard.metrics import rate_history, side_comparison
from steelyard.metrics.side_comparison import Comparison
from steelyard.record.index import RecordSummary
from steelyard.record.record import Record
from steelyard.report.document import Table


def make_runs(*rates: float, letter: str = "a", **changes: object) -> list[Record]:
    """Return one scored record for each rate; `letter` begins their ids and `changes` replaces
    fields.
    """
    return [
        make_scoring_record("torch", "ABCDABCD", rate, id=f"{letter}{i:011d}", **changes)
        for i, rate in enumerate(rates)
    ]


def compare_runs(base: list[Record], new: list[Record], threshold: float = 0.01) -> Comparison:
    """Compare two lists of records, named old and new, across cases."""
    return side_comparison.compare_sides(
        side_comparison.make_side("old", base),
        side_comparison.make_side("new", new),
        ["case"],
        threshold,
    )


SLOWER = compare_runs(
    make_runs(100.0, 100.1, 99.9), make_runs(95.0, 95.1, 94.9, letter="b", tune__compile=False)
)


def test_the_verdict_comes_first() -> None:
    lines = report.render_text(report.build_comparison_page(SLOWER)).splitlines()
    assert lines[0] == "Comparison: llama2-7b-mmlu · full · bf16 · closed"
    assert lines[3] == "new / base 0.9500, 95 % interval 0.9478 – 0.9522: slower: significant"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            compare_runs(make_runs(100.0, 100.1, 99.9), make_runs(95.0, 95.1, 94.9), 0.06),
            "significant, but below the threshold of 6.0%",
        ),
        (
            compare_runs(make_runs(100.0, 104.0), make_runs(99.0, 103.0, letter="b")),
            "not significant",
        ),
        (
            compare_runs(make_runs(100.0), make_runs(99.0, letter="b")),
            "not tested: that takes two runs a side that count",
        ),
        (
            compare_runs(make_runs(100.0), make_runs(99.0, letter="b", status="invalid")),
            "no ratio: new has no valid run",
        ),
    ],
)
def test_the_words_of_a_verdict(found: Comparison, said: str) -> None:
    assert said in " ".join(report.render_text(report.build_comparison_page(found)).split())


def render_comparison(base: list[Record], new: list[Record], lang: report.Lang = "en") -> str:
    """Return the page of a comparison as wide text."""
    return report.render_text(report.build_comparison_page(compare_runs(base, new), lang))


def test_single_runs_are_not_tested_and_have_no_interval() -> None:
    """As on the page of a report: intervals of steps inside a run are those of its rate alone."""
    sides = make_runs(100.0), make_runs(99.0, letter="b")
    lines = render_comparison(*sides).splitlines()
    assert lines[3] == golden("new-base-0-9900-not-tested")
    assert "95 % interval" not in lines[3]
    assert "99.00 – 101.0" in lines[9]  # below the rate of the base
    assert render_comparison(*sides, "zh").splitlines()[3] == golden(
        "new-base-0-9900-not-tested", language="zh"
    )
    repeats = make_runs(100.0, 101.0), make_runs(99.0, letter="b")
    assert render_comparison(*repeats).splitlines()[3].startswith("new / base 0.9851: not tested")


def test_an_unproven_side_is_named_with_what_it_takes() -> None:
    short = make_runs(90.0, 90.3, 89.7, letter="b", **WITHOUT_INTERVAL)
    base = make_runs(100.0, 101.0)
    assert render_comparison(base, short[:2]).splitlines()[3] == golden("no-ratio-unproven", "new")
    assert render_comparison(short[:1], base).splitlines()[3] == golden("no-ratio-unproven", "old")
    assert render_comparison(base, short[:2], "zh").splitlines()[3] == golden(
        "no-ratio-unproven", "new", language="zh"
    )
    text = render_comparison(base, short[:1])
    assert "Not counted, and in no mean: b0000000 of new (few_steps)." in text
    assert (
        render_comparison(base, short).splitlines()[3]
        == "new / base 0.8955, 95 % interval 0.8547 – 0.9384: slower: significant"
    )


def test_runs_that_are_left_out_are_named() -> None:
    bad = make_runs(1.0, letter="c", status="invalid", reasons=[{"code": "clock", "text": ""}])
    text = report.render_text(
        report.build_comparison_page(
            compare_runs(make_runs(100.0), [*make_runs(100.0, letter="b"), *bad])
        )
    )
    assert golden("not-valid-and-in-no-mean") in text


def test_answers_metrics_phases_and_differences_are_in_this_order() -> None:
    text = report.render_text(report.build_comparison_page(SLOWER))
    positions = [
        text.index(title)
        for title in ("\nAnswers\n", "\nMetrics\n", "\nSeconds per step\n", "\nWhat else differs\n")
    ]
    assert positions == sorted(positions)
    assert "tune.compile  true  false" in text
    assert "0 of 8" in text
    assert "Other metrics that are equal in the digits shown: 3." in text  # mfu, mem, acc


def metrics_of(rate: float, mem: float, mfu: float) -> dict[str, object]:
    """Return the metrics of a run: rate, memory in GiB and MFU."""
    return {
        "tokens_per_device_s": {
            "value": rate,
            "unit": "tokens/s/device",
            "interval": (rate - 0.1, rate + 0.1),
        },
        "mem": {"value": mem, "unit": "GiB"},
        "mfu": {"value": mfu, "unit": "fraction"},
    }


def compare_metrics(
    base: list[tuple[float, float, float]], new: list[tuple[float, float, float]]
) -> Comparison:
    """Compare runs with these rates, memory sizes and MFU."""
    return compare_runs(
        [
            record
            for i, values in enumerate(base)
            for record in make_runs(0.0, letter=f"a{i}", metrics=metrics_of(*values))
        ],
        [
            record
            for i, values in enumerate(new)
            for record in make_runs(0.0, letter=f"b{i}", metrics=metrics_of(*values))
        ],
    )


def list_changes(comparison: Comparison) -> dict[str, list[str]]:
    """Return the cells of the table of metrics by the name in its first column, with the second
    line of a cell after a slash.
    """
    elements = report.build_comparison_page(comparison).elements
    [table] = [
        element
        for element in elements
        if isinstance(element, Table) and element.columns[0].title == "metric"
    ]
    texts = [
        [f"{cell.text}/{cell.sub}" if cell.sub else cell.text for cell in row.cells]
        for row in table.rows
    ]
    return {first.partition("/")[0]: [first, *others] for first, *others in texts}


def test_worse_is_only_what_is_significant() -> None:
    comparison = compare_metrics(
        [(100.0, 10.0, 0.50), (100.2, 20.0, 0.51)], [(50.0, 12.0, 0.50), (50.1, 24.0, 0.50)]
    )
    changes = list_changes(comparison)
    assert changes["token"] == [
        *("token/p/s/tokens/s/device", "100.1", "50.05", "0.5000/0.4970 – 0.5030"),
        "worse/significant",
    ]
    assert changes["mem"][1:] == ["15.00", "18.00", "1.200/0.1456 – 9.888", "not significant"]
    assert changes["MFU"][1:] == ["50.50%", "50.00%", "0.9901/0.8731 – 1.123", "not significant"]


def test_metrics_that_look_equal_are_not_listed_as_changed() -> None:
    comparison = compare_metrics([(100.0, 10.00001, 0.50)], [(99.0, 10.00002, 0.500004)])
    assert list(list_changes(comparison)) == ["token"]
    assert "equal in the digits shown: 2." in report.render_text(
        report.build_comparison_page(comparison)
    )
    seen = compare_metrics([(100.0, 10.0, 0.50)], [(100.0, 10.01, 0.5001)])
    assert {name: cells[1:3] for name, cells in list_changes(seen).items()} == {
        "MFU": ["50.00%", "50.01%"],
        "mem": ["10.00", "10.01"],
    }


@pytest.mark.parametrize(
    ("base", "new", "said"),
    [
        ((100.0, 102.0), (102.001, 100.0), "equal in the digits shown; not significant"),
        ((100.0,), (100.001,), "equal in the digits shown; not tested: that takes two runs"),
        ((100.0, 102.0), (102.4, 100.0), "1.002, 95 % interval 0.9337 – 1.075: not significant"),
        # significant, and seen by a reader who asks for more digits
        (
            (1e5, 1e5 + 0.01),
            (1e5 + 0.1, 1e5 + 0.11),
            "significant, but below the threshold of 1.0%",
        ),
    ],
)
def test_rates_that_look_equal_are_called_equal(
    base: tuple[float, ...], new: tuple[float, ...], said: str
) -> None:
    comparison = compare_runs(make_runs(*base), make_runs(*new, letter="b"))
    text = " ".join(report.render_text(report.build_comparison_page(comparison)).split())
    assert said in text


def test_phases_that_look_equal_stay_in_the_table() -> None:
    base = make_training_record(((2.0, *(1.0,) * 5),))
    new = make_training_record(((2.0, *(1.0,) * 4, 1.0000001),), id="c" * 12)
    text = report.render_text(report.build_comparison_page(compare_runs([base], [new])))
    rows = text[text.index("Seconds per step") :].splitlines()
    assert [row.split()[-1] for row in rows if row.startswith(("data", "compute", "other"))] == [
        "equal",
        "equal",
        "equal",
    ]


def test_a_comparison_of_a_record_with_itself_is_noted() -> None:
    records = make_runs(100.0)
    text = report.render_text(report.build_comparison_page(compare_runs(records, records)))
    assert "1 record(s) stand on both sides." in text
    assert "Nothing else differs." in text
    assert "No metric differs." in text


@pytest.mark.parametrize("format_", sorted(report.FORMATS))
@pytest.mark.parametrize("lang", report.LANGS)
def test_every_format_and_language(format_: str, lang: report.Lang) -> None:
    page = report.FORMATS[format_](report.build_comparison_page(SLOWER, lang))
    assert "0.9500" in page
    assert ("显著" in page) == (lang == "zh")
    assert ("significant" in page) == (lang == "en")


def test_values_of_records_are_escaped() -> None:
    comparison = compare_runs(
        make_runs(100.0), make_runs(100.0, letter="b", site={"rack": "<script>alert(1)</script>"})
    )
    assert "<script>alert" not in report.render_html(report.build_comparison_page(comparison))


def make_entry(day: int, rate: float | None, **changes: object) -> RecordSummary:
    """Return an index entry of a run on a day of January 2026, with an interval of its rate ± 1."""
    base: dict[str, object] = {
        "id": f"{day}" * 12,
        "created": f"2026-01-0{day}T00:00:00.000",
        "status": "valid",
        "key": "k",
    }
    base |= {
        "setup": f"{day}",
        "name": "case",
        "engine": "torch",
        "unit": "tokens/s",
        "revision": "a" * 40,
    }
    interval = None if rate is None else (rate - 1, rate + 1)
    return RecordSummary.model_validate(
        base | {"rate": rate, "interval": interval, "quality": "acc"} | changes
    )


def make_history(*entries: RecordSummary) -> rate_history.RateHistory:
    """Return the history of the entries with a threshold of 1 %."""
    return rate_history.build_history(
        {Path(f"{entry.id[:2]}.json"): entry for entry in entries}, 0.01
    )


def test_a_history_names_the_first_bad_record() -> None:
    text = report.render_text(
        report.build_history_page(
            make_history(make_entry(1, 100.0), make_entry(2, 90.0), make_entry(3, 80.0))
        )
    )
    expected = (
        "First bad record: 22222222 (22.json): its rate is 0.9000 of the best before it (11111111),"
        " not tested; their intervals do not overlap"
    )
    assert expected in " ".join(text.split())
    assert "aaaaaaaaaaaa " in text
    assert "0.8889" in text  # the third run's rate over the second's
    invalid = make_history(
        make_entry(1, 100.0), make_entry(2, None, status="invalid", codes=("clock",))
    )
    assert "First bad record: 22222222 (22.json): invalid: clock" in report.render_text(
        report.build_history_page(invalid)
    )
    assert "No bad record." in report.render_text(
        report.build_history_page(make_history(make_entry(1, 100.0)))
    )


def list_history_rows(*entries: RecordSummary) -> list[list[str]]:
    """Return the texts of each point's row in a history, with the texts below them."""
    page = report.build_history_page(make_history(*entries))
    [table] = [block for block in page.elements if isinstance(block, Table)]
    return [[f"{cell.text} {cell.sub}".strip() for cell in row.cells] for row in table.rows]


def test_a_history_shows_unproven_points_without_a_rate() -> None:
    short = {"status": "unproven", "codes": ("few_steps",), "interval": None, "setup": "short"}
    entries = [make_entry(1, 100.0), *(make_entry(day, 69.0 + day, **short) for day in (2, 3, 4))]
    assert [row[2:] for row in list_history_rows(*entries[:3])] == [
        ["1 / 1", "100.0 99.00 – 101.0", "/", "/", "/", "valid"],
        ["0 / 2", "/", "/", "/", "/", "unproven few_steps"],
    ]
    assert list_history_rows(*entries)[1][2:] == [
        "3 / 3",
        "72.00 69.52 – 74.48",
        "0.7200 not tested",
        "0.7200 not tested",
        "/",
        "valid few_steps",
    ]
    text = " ".join(
        report.render_text(report.build_history_page(make_history(*entries[:3]))).split()
    )
    assert "No bad record." in text
    assert "and unproven runs are not bad." in text


@pytest.mark.parametrize(
    ("scope", "lang", "shown"),
    [("full", "en", "whole"), ("full", "zh", "全部"), ("sample 16", "en", "sample 16")],
)
def test_a_history_shows_a_scope_of_everything_as_whole(
    scope: str, lang: report.Lang, shown: str
) -> None:
    entry = make_entry(1, 100.0, size="full", plan="1x1", scope=scope, devices=("H200",))
    text = report.render_text(report.build_history_page(make_history(entry), lang))
    assert f" · torch · 1x1 · {shown} · H200\n" in text


def test_files_that_do_not_verify_are_listed() -> None:
    broken = rate_history.build_history(
        {
            Path("x.json"): RecordSummary(
                wrong="does not verify: the hash of samples does not match"
            )
        },
        0.01,
    )
    text = report.render_text(report.build_history_page(broken))
    assert "No sound record." in text
    assert golden("records-that-do-not-verify-and") in text
    assert "x.json" in text


@pytest.mark.parametrize("format_", sorted(report.FORMATS))
@pytest.mark.parametrize("lang", report.LANGS)
def test_every_format_and_language_of_a_history(format_: str, lang: report.Lang) -> None:
    page = report.FORMATS[format_](
        report.build_history_page(make_history(make_entry(1, 100.0), make_entry(2, 90.0)), lang)
    )
    assert "0.9000" in page
    assert ("首条异常记录" in page) == (lang == "zh")
    assert ("<svg" in page) == (format_ == "html")
