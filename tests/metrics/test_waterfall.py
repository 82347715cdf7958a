"""The waterfall of a step's time: a made profile whose parts are summed by hand."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import COUNTS, make, training
from steelyard import report
from steelyard.cli.execute_runs import print_waterfall
from steelyard.cli.printing import OutputOptions
from steelyard.metrics.time_waterfall import make_waterfalls
from steelyard.record.profile_facts import KernelFacts, Profile
from steelyard.record.record import Record

PEAK = 4e6  # of the chip in `fixtures.report`
# FLOPs of one training step (3 forwards): two layers of 640 weights each, the vocabulary matrix of
# 32 x 8, and attention over pairs.
MATMULS = 3 * (2 * 1280 * COUNTS["tokens"] + 2 * 32 * 8 * COUNTS["logits"])
ATTENTION = 3 * 4 * 2 * 8 * COUNTS["pairs"]


def kernel(name: str, kind: str, time_s: float, size_bytes: int | None = None) -> dict[str, Any]:
    """Return the table of one kernel that was called four times and took `time_s` in all."""
    return KernelFacts(
        name=name, kind=kind, calls=4, time_s=time_s, size_bytes=size_bytes
    ).model_dump()


def stretch(wall_s: float = 2.0, rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a profile of two steps: 1.75 s of kernels and 0.25 s without one, of which 0.125 s
    wait for data.
    """
    kernels = [
        kernel("gemm", "matmul", 1.0),
        kernel("flash", "attention", 0.25),
        kernel("norm", "other", 0.25, size_bytes=1000),
        kernel("Memcpy", "copy", 0.0625, size_bytes=10),
        kernel("ncclReduce", "communication", 0.125),
        kernel("ncclSendRecv", "bubble", 0.0625),
    ]
    counts = {name: 2 * count for name, count in COUNTS.items()}
    made = {
        "pass": "train",
        "rank": rank,
        "steps": 2,
        "counts": counts,
        "wall_s": wall_s,
        "data_s": 0.1875,
        "kernels": kernels,
    }
    return Profile.model_validate(made | changes).model_dump(by_alias=True)


def explained(*profiles: dict[str, Any], **changes: Any) -> Record:
    """Return a training record with these profiles."""
    return training(profile=list(profiles), **changes)


def test_rows_are_the_hand_sum() -> None:
    """Measured steps take one second each, and the profiled ones as long."""
    [found] = make_waterfalls(explained(stretch()))
    ideal_matmul_s, ideal_attention_s = 2 * MATMULS / PEAK, 2 * ATTENTION / PEAK
    assert (found.measured_s, found.steps, found.is_close) == (2.0, 2, True)
    assert {row.name: row.time_s for row in found.rows} == pytest.approx(
        {
            "peak": ideal_matmul_s + ideal_attention_s,
            "matmul": 1.0 - ideal_matmul_s,
            "attention": 0.25 - ideal_attention_s,
            "other": 0.25,
            "copy": 0.0625,
            "communication": 0.125,
            "bubble": 0.0625,
            "data": 0.125,  # 0.1875 s of data phase less 0.0625 s of copies
            "host": 0.125,
        }
    )
    assert sum(row.time_s for row in found.rows) == pytest.approx(found.measured_s)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wall_s", "agrees"), [(1.95, False), (1.97, True), (2.03, True), (2.05, False)]
)
def test_how_far_a_stretch_is_from_the_measured_pass(wall_s: float, agrees: bool) -> None:
    [found] = make_waterfalls(explained(stretch(wall_s)))
    assert found.is_close is agrees
    page = report.render_text(report.build_waterfall_page([explained(stretch(wall_s))], "en"))
    assert ("more than 2 % away" in page) is not agrees


def test_a_faster_stretch_leaves_a_part_of_the_pass() -> None:
    [found] = make_waterfalls(explained(stretch(1.95)))
    assert {row.name: row.time_s for row in found.rows}["unexplained"] == pytest.approx(0.05)
    assert (found.whole_s, sum(row.time_s for row in found.rows)) == (2.0, pytest.approx(2.0))
    page = report.render_text(report.build_waterfall_page([explained(stretch(1.95))], "en"))
    assert "between the stretch" in page
    assert "profiled steps, not of the pass" not in page


@pytest.mark.parametrize(("wall_s", "whole_s"), [(2.01, 2.0), (2.03, 2.03), (3.14, 3.14)])
def test_a_slower_stretch_has_no_negative_part(wall_s: float, whole_s: float) -> None:
    """Up to 1 % more than the pass is tolerated; beyond it the shares are of the profile."""
    [found] = make_waterfalls(explained(stretch(wall_s)))
    assert found.whole_s == whole_s
    assert min(row.share for row in found.rows) > 0
    assert sum(row.time_s for row in found.rows) == pytest.approx(wall_s)
    assert sum(row.share for row in found.rows) == pytest.approx(wall_s / whole_s)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0, abs=0.01)


def test_a_page_says_what_its_shares_are_of() -> None:
    page = report.render_text(report.build_waterfall_page([explained(stretch(3.14))], "en"))
    flat = " ".join(page.split())
    assert golden("took-157-0-of-what-as") in flat
    assert golden("the-shares-are-those-of-the") in flat
    [total] = [line for line in page.splitlines() if line.startswith("profiled steps ")]
    assert total.split()[2:4] == ["1,570", "100.0%"]
    assert not [word for word in page.split() if word.startswith("-") and word.endswith("%")]
    assert "占比按分析段计" in report.render_text(
        report.build_waterfall_page([explained(stretch(3.14))], "zh")
    )


def test_attention_in_matmul_kernels_is_one_part_with_them() -> None:
    """Attention is computed by plain matmuls: its FLOPs at the peak take longer than the kernels
    named attention, of which there are none.
    """
    kernels = [kernel("gemm", "matmul", 1.25), kernel("norm", "other", 0.25)]
    [found] = make_waterfalls(explained(stretch(kernels=kernels)))
    rows = {row.name: row.time_s for row in found.rows}
    assert rows["products"] == pytest.approx(1.25 - 2 * (MATMULS + ATTENTION) / PEAK)
    assert not {"matmul", "attention"} & set(rows)
    assert sum(rows.values()) == pytest.approx(2.0)


def test_products_in_other_kernels_are_one_part_with_them() -> None:
    [found] = make_waterfalls(explained(stretch(kernels=[kernel("fused", "other", 1.5)])))
    rows = {row.name: row.time_s for row in found.rows}
    assert rows["kernels"] == pytest.approx(1.5 - 2 * (MATMULS + ATTENTION) / PEAK)
    assert not {"matmul", "attention", "products", "other"} & set(rows)
    assert sum(rows.values()) == pytest.approx(2.0)


def test_flops_that_no_kernel_had_time_for_are_said() -> None:
    one = explained(stretch(kernels=[kernel("norm", "other", 1e-6)]))
    [found] = make_waterfalls(one)
    assert [row.name for row in found.rows if row.time_s < 0] == ["kernels"]
    page = " ".join(report.render_text(report.build_waterfall_page([one], "en")).split())
    assert "take longer than all kernels did" in page


def test_recomputation_is_a_second_forward_of_the_layers() -> None:
    record = explained(stretch(), tune__recompute="full")
    [found] = make_waterfalls(record)
    second = (2 * 1280 * COUNTS["tokens"] + 4 * 2 * 8 * COUNTS["pairs"]) / (MATMULS + ATTENTION)
    rows = {row.name: row.time_s for row in found.rows}
    assert rows["recompute"] == pytest.approx(1.25 * second / (1 + second))
    assert sum(rows.values()) == pytest.approx(2.0)


def test_without_a_datasheet_all_time_of_matmuls_is_theirs() -> None:
    [found] = make_waterfalls(explained(stretch(), environment__hardware__peak=None))
    rows = {row.name: row.time_s for row in found.rows}
    assert (rows["matmuls"], rows["attentions"]) == (1.0, 0.25)
    assert "peak" not in rows
    assert sum(rows.values()) == pytest.approx(2.0)


def test_replicas_and_stages_have_their_parts() -> None:
    """Two replicas of two stages: a replica's profile holds half of the measured work, a stage half
    of a replica's FLOPs.
    """
    times = ((2.0, 1.0, 1.0, 1.0),) * 4
    one = training(times, plan=(1, 2, 2), profile=[stretch(rank=0), stretch(rank=1)])
    found = make_waterfalls(one)
    assert [(each.rank, each.measured_s) for each in found] == [(0, 2.0), (1, 2.0)]
    assert next(row.time_s for row in found[0].rows if row.name == "peak") == pytest.approx(
        (MATMULS + ATTENTION) / PEAK
    )


def test_without_a_stretch_the_samples_tell_what_they_can() -> None:
    [found] = make_waterfalls(training())
    rows = {row.name: row.time_s for row in found.rows}
    whole = 3 * (MATMULS + ATTENTION)
    assert found.profile is None
    assert rows == pytest.approx(
        {
            "peak": whole / 4e6,
            "rate": whole / 2e6 - whole / 4e6,
            "data": 3 / 8,
            "rest": 3 - 3 / 8 - whole / 2e6,
        }
    )


def test_a_matmul_rate_below_the_runs_own_separates_nothing() -> None:
    """The rate was timed while another program used the cores, say: at that rate the matmuls alone
    would take longer than the pass.
    """
    ranks = [one.model_copy(update={"matmul_flops_per_s": 1.0}) for one in training().ranks]
    record = training().model_copy(update={"ranks": ranks})
    [found] = make_waterfalls(record)
    rows = {row.name: row.time_s for row in found.rows}
    ideal_s = 3 * (MATMULS + ATTENTION) / PEAK
    assert rows == pytest.approx({"peak": ideal_s, "data": 3 / 8, "together": 3 - 3 / 8 - ideal_s})
    page = " ".join(report.render_text(report.build_waterfall_page([record], "en")).split())
    assert golden("the-matmul-rate-measured-in-the") in page


def test_pages_show_it_where_it_was_asked_for() -> None:
    with_stretch, without = explained(stretch(trace="x.trace.json.gz")), training()
    assert "Why it is not higher" in report.render([with_stretch], "text", "en")
    assert "Why it is not higher" not in report.render([without], "text", "en")
    assert "From the samples alone" in report.render(
        [without], "text", "en", report.build_waterfall_page
    )
    for lang, words in (
        ("en", ("pipeline bubble", "more micro-batches a step", "norm")),
        ("zh", ("流水线气泡", "每步更多 micro-batch")),
    ):
        for form in report.FORMATS:
            page = report.render([with_stretch], form, lang, report.build_waterfall_page)
            assert all(word in page for word in (*words, "x.trace.json.gz")), (lang, form)


def test_bytes_are_set_beside_the_datasheets_bandwidth() -> None:
    hardware = training().environment.hardware.model_dump(mode="json")
    hardware["peak"] |= {"bandwidth_bytes_per_s": 8000.0}
    page = report.render_text(
        report.build_waterfall_page([explained(stretch(), environment__hardware=hardware)], "en")
    )
    [line] = [line for line in page.splitlines() if line.startswith("norm ")]
    assert "50.0%" in line  # 1000 bytes in 0.25 s: half of 8000 bytes/s


def test_a_failed_run_has_none() -> None:
    assert make_waterfalls(make(status="failed", samples=[], metrics={})) == []


def test_after_a_run_its_waterfall_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels are left out, as `report --explain` lists them; where no run was profiled, one line
    says so.
    """
    print_waterfall([training()], Path("records"), OutputOptions())
    assert capsys.readouterr() == ("", golden("no-waterfall-no-run-got-to"))
    print_waterfall([explained(stretch()), training()], Path("my records"), OutputOptions())
    printed = capsys.readouterr()
    assert printed.out.count("Why it is not higher") == 1
    shares = [word for word in printed.out.split() if word.endswith("%")]
    assert "pipeline bubble" in printed.out
    assert "100.0%" in shares
    assert "norm " not in printed.out
    assert printed.err == golden("by-kernel-steelyard-report-my-records")
    print_waterfall([explained(stretch())], Path("records"), OutputOptions(quiet=True))
    assert capsys.readouterr().err == ""
