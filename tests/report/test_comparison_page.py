"""Pages of comparisons and of histories."""

from pathlib import Path

import pytest

from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from steelyard import report
from steelyard.metrics import rate_history, side_comparison
from steelyard.metrics.side_comparison import Comparison
from steelyard.record.index import RecordSummary
from steelyard.record.record import Record


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
            "not tested: that takes two valid runs a side",
        ),
        (
            compare_runs(make_runs(100.0), make_runs(99.0, letter="b", status="invalid")),
            "no ratio: new has no valid run",
        ),
    ],
)
def test_the_words_of_a_verdict(found: Comparison, said: str) -> None:
    assert said in " ".join(report.render_text(report.build_comparison_page(found)).split())


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
    assert "3 other metrics are equal." in text  # mfu, mem, acc


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
        " not tested, outside both"
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
