"""Trends over made-up entries: points, ratios, and the first bad record."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import scored
from fixtures.golden import golden
from fixtures.series import series
from steelyard.case.key import compute_question_key
from steelyard.errors import RequestError
from steelyard.metrics import rate_history, verify
from steelyard.metrics.estimates import Estimate
from steelyard.metrics.rate_history import RateHistory, Trend
from steelyard.record.index import RecordSummary


def entry(
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


def over(*entries: RecordSummary, threshold: float = 0.01) -> RateHistory:
    """Return the history of the entries."""
    return rate_history.build_history(
        {Path(f"{i}.json"): one for i, one in enumerate(entries)}, threshold
    )


def trend(*entries: RecordSummary, threshold: float = 0.01) -> Trend:
    """Return the only trend of the entries."""
    [found] = over(*entries, threshold=threshold).trends
    return found


def bad(found: Trend) -> str | None:
    """Return the day of the trend's first bad run as text, or None if there is none."""
    return None if found.first_bad is None else found.first_bad.record.entry.id.lstrip("0")


def test_points_are_in_the_order_of_time_with_their_ratios() -> None:
    found = trend(entry(3, 90.0), entry(1, 100.0), entry(2, 120.0))
    assert [one.rate for one in found.points] == [Estimate(100.0), Estimate(120.0), Estimate(90.0)]
    first, second, third = found.points
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
    assert found.unit == "tokens/s"


def test_repeats_are_one_point() -> None:
    found = trend(
        entry(1, 100.0, setup="a"),
        entry(2, 104.0, setup="a"),
        entry(3, 90.0, setup="b"),
        entry(4, 99.0, setup="a"),
    )
    assert [[one.entry.created[-1] for one in point.runs] for point in found.points] == [
        ["1", "2"],
        ["3"],
        ["4"],
    ]
    assert found.points[0].rate is not None
    assert found.points[0].rate.value == 102.0
    assert found.points[0].source == "runs"


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
def test_what_makes_another_trend(other: dict[str, Any]) -> None:
    assert len(over(entry(1, 100.0), entry(2, 100.0, **other)).trends) == 2


def test_with_repeats_the_first_bad_is_the_first_that_is_surely_below_the_best() -> None:
    good = [entry(1, 100.0, setup="a"), entry(2, 100.2, setup="a")]
    best = [entry(3, 110.0, setup="b"), entry(4, 110.2, setup="b")]
    loose = [entry(5, 90.0, setup="c"), entry(6, 115.0, setup="c")]  # too noisy to judge
    slow = [entry(7, 105.0, setup="d"), entry(8, 105.2, setup="d")]
    found = trend(*good, *best, *loose, *slow)
    assert bad(found) == "7"
    assert found.first_bad is not None
    assert found.first_bad.ratio is not None
    assert found.first_bad.best is not None
    assert found.first_bad.ratio.verdict == "significant"
    assert found.first_bad.ratio.value == pytest.approx((105 * 105.2 / 110 / 110.2) ** 0.5)
    assert found.first_bad.best.entry.id.lstrip("0") == "3"
    assert bad(trend(*good, *best, *slow, threshold=0.1)) is None


def test_without_repeats_it_takes_the_threshold_and_intervals_that_do_not_meet() -> None:
    base = entry(1, 100.0, (99.0, 101.0))
    assert bad(trend(base, entry(2, 95.0, (94.0, 96.0)))) == "2"
    assert bad(trend(base, entry(2, 95.0, (90.0, 99.5)))) is None
    assert bad(trend(base, entry(2, 98.5, (98.0, 98.9)), threshold=0.02)) is None
    assert bad(trend(base, entry(2, 50.0))) is None  # no interval: not judged
    assert (
        bad(trend(base, entry(2, 120.0, (119.0, 121.0)), entry(3, 105.0, (104.0, 106.0)))) == "3"
    )  # compared with the best run, not with the first


def test_a_run_that_is_not_valid_is_bad_unless_somebody_ended_it() -> None:
    assert (
        bad(
            trend(
                entry(1, 100.0), entry(2, None, status="invalid", codes=("clock",)), entry(3, 100.0)
            )
        )
        == "2"
    )
    assert (
        bad(trend(entry(1, 100.0), entry(2, None, status="failed", codes=("out_of_memory",))))
        == "2"
    )
    for code in ("interrupted", "cancelled", "unfinished"):
        assert bad(trend(entry(1, 100.0), entry(2, None, status="failed", codes=(code,)))) is None


def test_the_rate_of_a_run_that_is_not_valid_counts_nowhere() -> None:
    found = trend(entry(1, 100.0), entry(2, 500.0, status="invalid", codes=("clock",)))
    assert found.points[1].rate is None
    assert found.points[1].to_first is None


def test_a_run_that_failed_before_it_read_its_data_stands_with_its_question() -> None:
    read = entry(1, 100.0, key="with data", unread_key="u")
    lost = entry(2, None, key="u", unread_key="u", read=False, status="failed", codes=("killed",))
    assert bad(trend(read, lost)) == "2"
    assert len(over(entry(1, 1.0, key="with data", unread_key="v"), lost).trends) == 2


def test_copies_count_once_and_what_does_not_verify_is_named() -> None:
    found = over(entry(1, 100.0), entry(1, 100.0), RecordSummary(wrong="not a record"))
    assert [len(one.points[0].runs) for one in found.trends] == [1]
    assert [(one.path.name, one.entry.wrong) for one in found.not_verified] == [
        ("2.json", "not a record")
    ]


def test_nothing_is_a_history_too() -> None:
    assert over() == RateHistory((), (), 0.01)
    with pytest.raises(RequestError, match="--threshold 2"):
        over(threshold=2.0)


def test_an_entry_says_what_its_record_does(tmp_path: Path) -> None:
    [path] = series(tmp_path, [1.0])
    record, found = verify.read_verified_record(path), rate_history.summarize_record(path)
    assert (found.id, found.status, found.key) == (record.id, "valid", record.case.key)
    assert found.unread_key == compute_question_key(record.case.question, "unknown")
    assert (found.name, found.size, found.scope, found.plan) == (
        "llama2-7b-mmlu",
        "smoke",
        "full",
        "1x1 TP1PP1DP1",
    )
    assert found.rate == record.metrics["tokens_per_device_s"].value
    assert (found.quality, found.quality_value) == ("acc", record.metrics["acc"].value)
    assert found.revision == record.environment.source.revision


def test_repeats_have_one_setup_and_other_tunes_another() -> None:
    one, again, other = (
        scored("torch", "A" * 8, id=c * 12, **k)
        for c, k in (("a", {}), ("b", {}), ("c", {"tune__pad_to": 8}))
    )
    found = [rate_history._make_entry(record) for record in (one, again, other)]
    assert found[0].setup == found[1].setup != found[2].setup


def test_a_file_that_does_not_verify_says_why(tmp_path: Path) -> None:
    [path] = series(tmp_path, [1.0])
    path.write_bytes(path.read_bytes().replace(b'"rank":0', b'"rank":1', 1))
    found = rate_history.summarize_record(path)
    assert found.wrong is not None
    assert found.wrong.startswith("does not verify: ")
    assert rate_history.summarize_record(tmp_path / "none.json").wrong == golden(
        "cannot-be-read-no-such-file-2"
    )
