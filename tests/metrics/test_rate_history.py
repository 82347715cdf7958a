"""Trends over made-up entries: points, ratios, and the first bad record."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import make_scoring_record
from fixtures.golden import golden
from fixtures.report import WITHOUT_INTERVAL
from fixtures.series import write_series
from steelyard.case.key import compute_question_key
from steelyard.errors import RequestError
from steelyard.metrics import rate_history, verify
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.rate_history import RateHistory, Trend
from steelyard.metrics.ratio import compare_values
from steelyard.record.index import RecordSummary


def make_entry(
    day: int, rate: float | None, interval: tuple[float, float] | None = None, **changes: Any
) -> RecordSummary:
    """Return an index entry of a run on a day of January 2026; `changes` replaces fields."""
    base: dict[str, Any] = {
        "id": f"{day:012d}",
        "created": f"2026-01-{day:02d}",
        "status": "valid",
        "key": "k",
        "setup": f"s{day}",
    }
    base |= {
        "engine": "torch",
        "plan": "1x1",
        "precision": "bf16",
        "devices": ("A",),
        "scope": "full",
        "unit": "tokens/s",
    }
    return RecordSummary(**(base | {"rate": rate, "interval": interval} | changes))


def make_history(*entries: RecordSummary, threshold: float = 0.01) -> RateHistory:
    """Return the history of the entries."""
    return rate_history.build_history(
        {Path(f"{i}.json"): entry for i, entry in enumerate(entries)}, threshold
    )


def make_trend(*entries: RecordSummary, threshold: float = 0.01) -> Trend:
    """Return the only trend of the entries."""
    [rate_trend] = make_history(*entries, threshold=threshold).trends
    return rate_trend


def get_first_bad_id(rate_trend: Trend) -> str | None:
    """Return the day of the trend's first bad run as text, or None if there is none."""
    return (
        None if rate_trend.first_bad is None else rate_trend.first_bad.record.entry.id.lstrip("0")
    )


def test_points_are_in_the_order_of_time_with_their_ratios() -> None:
    rate_trend = make_trend(make_entry(3, 90.0), make_entry(1, 100.0), make_entry(2, 120.0))
    assert [point.rate for point in rate_trend.points] == [
        Estimate(100.0),
        Estimate(120.0),
        Estimate(90.0),
    ]
    first, second, third = rate_trend.points
    assert (first.to_first, first.to_previous) == (None, None)
    assert second.to_first is not None
    assert second.to_previous is not None
    assert (second.to_first.value, second.to_previous.value) == (
        pytest.approx(1.2),
        pytest.approx(1.2),
    )
    assert third.to_first is not None
    assert third.to_previous is not None
    assert (third.to_first.value, third.to_previous.value) == (
        pytest.approx(0.9),
        pytest.approx(0.75),
    )
    assert rate_trend.unit == "tokens/s"


def test_repeats_are_one_point() -> None:
    rate_trend = make_trend(
        make_entry(1, 100.0, setup="a"),
        make_entry(2, 104.0, setup="a"),
        make_entry(3, 90.0, setup="b"),
        make_entry(4, 99.0, setup="a"),
    )
    assert [[run.entry.created[-1] for run in point.runs] for point in rate_trend.points] == [
        ["1", "2"],
        ["3"],
        ["4"],
    ]
    assert rate_trend.points[0].rate is not None
    assert rate_trend.points[0].rate.value == 102.0
    assert rate_trend.points[0].source == "runs"


@pytest.mark.parametrize(
    "other",
    [
        {"key": "j"},
        {"engine": "x"},
        {"plan": "1x8"},
        {"precision": "fp16"},
        {"devices": ("B",)},
        {"scope": "sample 4"},
    ],
)
def test_fields_that_separate_trends(other: dict[str, Any]) -> None:
    assert len(make_history(make_entry(1, 100.0), make_entry(2, 100.0, **other)).trends) == 2


def test_with_repeats_the_first_bad_run_is_significantly_below_the_best() -> None:
    good = [make_entry(1, 100.0, setup="a"), make_entry(2, 100.2, setup="a")]
    best = [make_entry(3, 110.0, setup="b"), make_entry(4, 110.2, setup="b")]
    loose = [make_entry(5, 90.0, setup="c"), make_entry(6, 115.0, setup="c")]  # too noisy to judge
    slow = [make_entry(7, 105.0, setup="d"), make_entry(8, 105.2, setup="d")]
    rate_trend = make_trend(*good, *best, *loose, *slow)
    assert get_first_bad_id(rate_trend) == "7"
    assert rate_trend.first_bad is not None
    assert rate_trend.first_bad.ratio is not None
    assert rate_trend.first_bad.best is not None
    assert rate_trend.first_bad.ratio.verdict == "significant"
    assert rate_trend.first_bad.ratio.value == pytest.approx((105 * 105.2 / 110 / 110.2) ** 0.5)
    assert rate_trend.first_bad.best.entry.id.lstrip("0") == "3"
    assert get_first_bad_id(make_trend(*good, *best, *slow, threshold=0.1)) is None


def test_without_repeats_a_bad_run_needs_disjoint_intervals_beyond_the_threshold() -> None:
    base = make_entry(1, 100.0, (99.0, 101.0))
    assert get_first_bad_id(make_trend(base, make_entry(2, 95.0, (94.0, 96.0)))) == "2"
    assert get_first_bad_id(make_trend(base, make_entry(2, 95.0, (90.0, 99.5)))) is None
    assert (
        get_first_bad_id(make_trend(base, make_entry(2, 98.5, (98.0, 98.9)), threshold=0.02))
        is None
    )
    assert (
        get_first_bad_id(make_trend(base, make_entry(2, 50.0))) is None
    )  # no interval: not judged
    assert (
        get_first_bad_id(
            make_trend(
                base, make_entry(2, 120.0, (119.0, 121.0)), make_entry(3, 105.0, (104.0, 106.0))
            )
        )
        == "3"
    )  # compared with the best run, not with the first


def test_a_run_that_is_not_valid_is_bad_unless_it_was_interrupted() -> None:
    assert (
        get_first_bad_id(
            make_trend(
                make_entry(1, 100.0),
                make_entry(2, None, status="invalid", codes=("clock",)),
                make_entry(3, 100.0),
            )
        )
        == "2"
    )
    assert (
        get_first_bad_id(
            make_trend(
                make_entry(1, 100.0), make_entry(2, None, status="failed", codes=("out_of_memory",))
            )
        )
        == "2"
    )
    for code in ("interrupted", "cancelled", "unfinished"):
        assert (
            get_first_bad_id(
                make_trend(
                    make_entry(1, 100.0), make_entry(2, None, status="failed", codes=(code,))
                )
            )
            is None
        )


def test_the_rate_of_a_run_that_is_not_valid_counts_nowhere() -> None:
    rate_trend = make_trend(
        make_entry(1, 100.0), make_entry(2, 500.0, status="invalid", codes=("clock",))
    )
    assert rate_trend.points[1].rate is None
    assert rate_trend.points[1].to_first is None


SHORT: dict[str, Any] = {"status": "unproven", "codes": ("few_steps",)}


def test_an_unproven_run_has_no_rate_and_is_not_bad() -> None:
    rate_trend = make_trend(
        make_entry(1, 100.0, (99.0, 101.0)),
        make_entry(2, 50.0, **SHORT),
        make_entry(3, 100.0, (99.0, 101.0)),
    )
    assert [point.rate and point.rate.value for point in rate_trend.points] == [100.0, None, 100.0]
    assert [len(point.counted) for point in rate_trend.points] == [1, 0, 1]
    assert (rate_trend.points[1].to_first, rate_trend.points[1].to_previous) == (None, None)
    assert rate_trend.points[2].to_previous is not None
    assert rate_trend.points[2].to_previous.value == 1.0  # to the last point that has a rate
    assert rate_trend.first_bad is None


def test_three_unproven_repeats_are_a_point_with_a_rate() -> None:
    good = [make_entry(day, 99.0 + day, setup="a") for day in (1, 2)]
    slow = [make_entry(day, 86.0 + day, setup="b", **SHORT) for day in (3, 4, 5)]
    rate_trend = make_trend(*good, *slow)
    point = rate_trend.points[1]
    assert point.rate is not None
    assert (point.rate.value, point.source, len(point.counted)) == (90.0, "runs", 3)
    assert point.to_first == compare_values([100.0, 101.0], [89.0, 90.0, 91.0])
    assert get_first_bad_id(rate_trend) == "3"
    # two of them have no rate, and so nothing to judge
    assert get_first_bad_id(make_trend(*good, *slow[:2])) is None


def test_the_best_run_named_beside_a_bad_one_has_a_rate() -> None:
    best = [make_entry(1, None, setup="a"), *(make_entry(n, 99.0 + n, setup="a") for n in (2, 3))]
    slow = [make_entry(4, None, setup="b"), *(make_entry(n, 45.0 + n, setup="b") for n in (5, 6))]
    rate_trend = make_trend(*best, *slow)
    assert get_first_bad_id(rate_trend) == "5"
    assert rate_trend.first_bad is not None
    assert rate_trend.first_bad.best is not None
    assert rate_trend.first_bad.best.entry.id.lstrip("0") == "2"


def test_a_run_that_failed_before_reading_data_is_in_the_trend_of_its_question() -> None:
    finished = make_entry(1, 100.0, key="with data", unread_key="u")
    failed = make_entry(
        2, None, key="u", unread_key="u", read=False, status="failed", codes=("killed",)
    )
    assert get_first_bad_id(make_trend(finished, failed)) == "2"
    assert (
        len(make_history(make_entry(1, 1.0, key="with data", unread_key="v"), failed).trends) == 2
    )


def test_copies_count_once_and_broken_records_are_listed() -> None:
    whole_history = make_history(
        make_entry(1, 100.0), make_entry(1, 100.0), RecordSummary(wrong="not a record")
    )
    assert [len(item.points[0].runs) for item in whole_history.trends] == [1]
    assert [(item.path.name, item.entry.wrong) for item in whole_history.not_verified] == [
        ("2.json", "not a record")
    ]


def test_no_entries_make_an_empty_history() -> None:
    assert make_history() == RateHistory((), (), 0.01)
    with pytest.raises(RequestError, match="--threshold 2"):
        make_history(threshold=2.0)


def test_an_entry_summarizes_its_record(tmp_path: Path) -> None:
    [path] = write_series(tmp_path, [1.0])
    record, entry = verify.read_verified_record(path), rate_history.summarize_record(path)
    assert (entry.id, entry.status, entry.key) == (record.id, "valid", record.case.key)
    assert entry.unread_key == compute_question_key(record.case.question, "unknown")
    assert (entry.name, entry.size, entry.scope, entry.plan) == (
        "llama2-7b-mmlu",
        "smoke",
        "full",
        "1x1 TP1PP1DP1",
    )
    assert entry.rate == record.metrics["tokens_per_device_s"].value
    assert (entry.quality, entry.quality_value) == ("acc", record.metrics["acc"].value)
    assert entry.revision == record.environment.source.revision


def test_an_entry_has_the_status_of_today() -> None:
    records = [
        make_scoring_record("torch", "A" * 8, **WITHOUT_INTERVAL),
        make_scoring_record("torch", "A" * 8, **WITHOUT_INTERVAL, case__size="smoke"),
        make_scoring_record("torch", "A" * 8),
    ]
    entries = [rate_history._make_entry(record) for record in records]
    assert [(entry.status, entry.codes) for entry in entries] == [
        ("unproven", ("few_steps",)),
        ("valid", ()),
        ("valid", ()),
    ]


def test_repeats_have_one_setup_and_other_tunes_another() -> None:
    first, repeat, retuned = (
        make_scoring_record("torch", "A" * 8, id=c * 12, **k)
        for c, k in (("a", {}), ("b", {}), ("c", {"tune__pad_to": 8}))
    )
    entries = [rate_history._make_entry(record) for record in (first, repeat, retuned)]
    assert entries[0].setup == entries[1].setup != entries[2].setup


def test_a_file_that_does_not_verify_says_why(tmp_path: Path) -> None:
    [path] = write_series(tmp_path, [1.0])
    path.write_bytes(path.read_bytes().replace(b'"rank":0', b'"rank":1', 1))
    entry = rate_history.summarize_record(path)
    assert entry.wrong is not None
    assert entry.wrong.startswith("does not verify: ")
    assert rate_history.summarize_record(tmp_path / "none.json").wrong == golden(
        "cannot-be-read-no-such-file-2"
    )
