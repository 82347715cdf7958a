"""Where a step's time goes: a made stretch whose parts are summed by hand."""

from typing import Any

import pytest

from fixtures.report import COUNTS, make, training
from steelyard import report
from steelyard.metrics.waterfall import waterfalls
from steelyard.record.profile import KernelFacts, Profile
from steelyard.record.record import Record

PEAK = 4e6  # of the made chip
# Layers of 640 weights each, twice; the vocabulary of 32 x 8; attention over pairs; forward and backward.
MATMULS = 3 * (2 * 1280 * COUNTS["tokens"] + 2 * 32 * 8 * COUNTS["logits"])
ATTENTION = 3 * 4 * 2 * 8 * COUNTS["pairs"]


def kernel(name: str, kind: str, time_s: float, size_bytes: int | None = None) -> dict[str, Any]:
    return KernelFacts(name=name, kind=kind, calls=4, time_s=time_s, size_bytes=size_bytes).model_dump()


def stretch(wall_s: float = 2.0, rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Two steps: 1.75 s of kernels, 0.25 of nothing, of which 0.125 wait for data."""
    kernels = [
        kernel("gemm", "matmul", 1.0),
        kernel("flash", "attention", 0.25),
        kernel("norm", "other", 0.25, size_bytes=1000),
        kernel("Memcpy", "copy", 0.0625, size_bytes=10),
        kernel("ncclReduce", "communication", 0.125),
        kernel("ncclSendRecv", "bubble", 0.0625),
    ]
    counts = {name: 2 * count for name, count in COUNTS.items()}
    made = {"pass": "train", "rank": rank, "steps": 2, "counts": counts, "wall_s": wall_s, "data_s": 0.1875, "kernels": kernels}
    return Profile.model_validate(made | changes).model_dump(by_alias=True)


def explained(*profiles: dict[str, Any], **changes: Any) -> Record:
    return training(profile=list(profiles), **changes)


def test_rows_are_the_hand_sum() -> None:
    """Steps of one second were measured; the profiled ones take as long."""
    [found] = waterfalls(explained(stretch()))
    ideal_matmul_s, ideal_attention_s = 2 * MATMULS / PEAK, 2 * ATTENTION / PEAK
    assert (found.measured_s, found.steps, found.agrees) == (2.0, 2, True)
    assert {row.name: row.time_s for row in found.rows} == pytest.approx(
        {
            "peak": ideal_matmul_s + ideal_attention_s,
            "matmul": 1.0 - ideal_matmul_s,
            "attention": 0.25 - ideal_attention_s,
            "other": 0.25,
            "copy": 0.0625,
            "communication": 0.125,
            "bubble": 0.0625,
            "data": 0.125,  # 0.1875 of waiting and copying, less the copies
            "host": 0.125,
        }
    )
    assert sum(row.time_s for row in found.rows) == pytest.approx(found.measured_s)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)


@pytest.mark.parametrize(("wall_s", "agrees"), [(1.95, False), (1.97, True), (2.03, True), (2.05, False)])
def test_what_is_left_to_the_measured_pass_is_said(wall_s: float, agrees: bool) -> None:
    [found] = waterfalls(explained(stretch(wall_s)))
    assert {row.name: row.time_s for row in found.rows}["unexplained"] == pytest.approx(2.0 - wall_s)
    assert found.agrees is agrees
    assert sum(row.time_s for row in found.rows) == pytest.approx(2.0)
    page = report.text(report.explain([explained(stretch(wall_s))], "en"))
    assert ("more than 2 % away" in page) is not agrees


def test_recomputation_is_a_second_forward_of_the_layers() -> None:
    record = explained(stretch(), tune__recompute="full")
    [found] = waterfalls(record)
    second = (2 * 1280 * COUNTS["tokens"] + 4 * 2 * 8 * COUNTS["pairs"]) / (MATMULS + ATTENTION)
    rows = {row.name: row.time_s for row in found.rows}
    assert rows["recompute"] == pytest.approx(1.25 * second / (1 + second))
    assert sum(rows.values()) == pytest.approx(2.0)


def test_without_a_datasheet_all_time_of_matmuls_is_theirs() -> None:
    [found] = waterfalls(explained(stretch(), environment__hardware__peak=None))
    rows = {row.name: row.time_s for row in found.rows}
    assert (rows["matmuls"], rows["attentions"]) == (1.0, 0.25)
    assert "peak" not in rows
    assert sum(rows.values()) == pytest.approx(2.0)


def test_replicas_and_stages_have_their_parts() -> None:
    """Two replicas of two stages: a replica's stretch is half of the measured work, a stage's products half of a replica's."""
    times = ((2.0, 1.0, 1.0, 1.0),) * 4
    one = training(times, plan=(1, 2, 2), profile=[stretch(rank=0), stretch(rank=1)])
    found = waterfalls(one)
    assert [(each.rank, each.measured_s) for each in found] == [(0, 2.0), (1, 2.0)]
    assert next(row.time_s for row in found[0].rows if row.name == "peak") == pytest.approx((MATMULS + ATTENTION) / PEAK)


def test_without_a_stretch_the_samples_tell_what_they_can() -> None:
    [found] = waterfalls(training())
    rows = {row.name: row.time_s for row in found.rows}
    whole = 3 * (MATMULS + ATTENTION)
    assert found.profile is None
    assert rows == pytest.approx(
        {"peak": whole / 4e6, "rate": whole / 2e6 - whole / 4e6, "data": 3 / 8, "rest": 3 - 3 / 8 - whole / 2e6}
    )


def test_pages_show_it_where_it_was_asked_for() -> None:
    with_stretch, without = explained(stretch(trace="x.trace.json.gz")), training()
    assert "Why it is not higher" in report.render([with_stretch], "text", "en")
    assert "Why it is not higher" not in report.render([without], "text", "en")
    assert "From the samples alone" in report.render([without], "text", "en", report.explain)
    for lang, words in (
        ("en", ("pipeline bubble", "more micro-batches a step", "norm")),
        ("zh", ("流水线气泡", "每步更多 micro-batch")),
    ):
        for form in report.FORMATS:
            page = report.render([with_stretch], form, lang, report.explain)
            assert all(word in page for word in (*words, "x.trace.json.gz")), (lang, form)


def test_bytes_are_set_beside_the_datasheets_bandwidth() -> None:
    hardware = training().environment.hardware.model_dump(mode="json")
    hardware["peak"] |= {"bandwidth_bytes_per_s": 8000.0}
    page = report.text(report.explain([explained(stretch(), environment__hardware=hardware)], "en"))
    [line] = [line for line in page.splitlines() if line.startswith("norm ")]
    assert "50.0%" in line  # 1000 bytes in 0.25 s


def test_a_failed_run_has_none() -> None:
    assert waterfalls(make(status="failed", samples=[], metrics={})) == []
