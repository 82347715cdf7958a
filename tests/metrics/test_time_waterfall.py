"""The waterfall of a step's time: a made profile whose parts are summed by hand."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import COUNTS, make_record, make_training_record
from steelyard import report
from steelyard.cli.execute_runs import print_waterfall
from steelyard.cli.printing import OutputOptions
from steelyard.metrics.time_waterfall import make_waterfalls
from steelyard.record.profile_facts import KernelFacts, Profile
from steelyard.record.record import Record

PEAK_FLOPS_PER_S = 4e6  # of the chip in `fixtures.report`
# FLOPs of one training step (3 forwards): two layers of 640 weights each, the vocabulary matrix of
# 32 x 8, and attention over pairs.
MATMUL_FLOPS = 3 * (2 * 1280 * COUNTS["tokens"] + 2 * 32 * 8 * COUNTS["logits"])
ATTENTION_FLOPS = 3 * 4 * 2 * 8 * COUNTS["pairs"]


def make_kernel(
    name: str, kind: str, time_s: float, size_bytes: int | None = None
) -> dict[str, Any]:
    """Return the table of one kernel that was called four times and took `time_s` in all."""
    return KernelFacts(
        name=name, kind=kind, calls=4, time_s=time_s, size_bytes=size_bytes
    ).model_dump()


def make_profile(wall_s: float = 2.0, rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a profile of two steps: 1.75 s of kernels and 0.25 s without one, of which 0.125 s
    wait for data.
    """
    kernels = [
        make_kernel("gemm", "matmul", 1.0),
        make_kernel("flash", "attention", 0.25),
        make_kernel("norm", "other", 0.25, size_bytes=1000),
        make_kernel("Memcpy", "copy", 0.0625, size_bytes=10),
        make_kernel("ncclReduce", "communication", 0.125),
        make_kernel("ncclSendRecv", "bubble", 0.0625),
    ]
    counts = {name: 2 * count for name, count in COUNTS.items()}
    values = {
        "pass": "train",
        "rank": rank,
        "steps": 2,
        "counts": counts,
        "wall_s": wall_s,
        "data_s": 0.1875,
        "kernels": kernels,
    }
    return Profile.model_validate(values | changes).model_dump(by_alias=True)


def make_profiled_record(*profiles: dict[str, Any], **changes: Any) -> Record:
    """Return a training record with these profiles."""
    return make_training_record(profile=list(profiles), **changes)


def test_rows_by_hand() -> None:
    """Measured steps take one second each, and the profiled ones as long."""
    [waterfall] = make_waterfalls(make_profiled_record(make_profile()))
    ideal_matmul_s, ideal_attention_s = (
        2 * MATMUL_FLOPS / PEAK_FLOPS_PER_S,
        2 * ATTENTION_FLOPS / PEAK_FLOPS_PER_S,
    )
    assert (waterfall.measured_s, waterfall.steps, waterfall.is_close) == (2.0, 2, True)
    assert {row.name: row.time_s for row in waterfall.rows} == pytest.approx(
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
    assert sum(row.time_s for row in waterfall.rows) == pytest.approx(waterfall.measured_s)
    assert sum(row.share for row in waterfall.rows) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wall_s", "agrees"), [(1.95, False), (1.97, True), (2.03, True), (2.05, False)]
)
def test_a_profile_agrees_within_two_percent_of_the_pass(wall_s: float, agrees: bool) -> None:
    [waterfall] = make_waterfalls(make_profiled_record(make_profile(wall_s)))
    assert waterfall.is_close is agrees
    page = report.render_text(
        report.build_waterfall_page([make_profiled_record(make_profile(wall_s))], "en")
    )
    assert ("more than 2 % away" in page) is not agrees


def test_a_faster_profile_leaves_an_unexplained_row() -> None:
    [waterfall] = make_waterfalls(make_profiled_record(make_profile(1.95)))
    assert {row.name: row.time_s for row in waterfall.rows}["unexplained"] == pytest.approx(0.05)
    assert (waterfall.whole_s, sum(row.time_s for row in waterfall.rows)) == (
        2.0,
        pytest.approx(2.0),
    )
    page = report.render_text(
        report.build_waterfall_page([make_profiled_record(make_profile(1.95))], "en")
    )
    assert "between the stretch" in page
    assert "profiled steps, not of the pass" not in page


@pytest.mark.parametrize(("wall_s", "whole_s"), [(2.01, 2.0), (2.03, 2.03), (3.14, 3.14)])
def test_a_slower_profile_has_no_negative_row(wall_s: float, whole_s: float) -> None:
    """Up to 1 % more than the pass is tolerated; beyond it the shares are of the profile."""
    [waterfall] = make_waterfalls(make_profiled_record(make_profile(wall_s)))
    assert waterfall.whole_s == whole_s
    assert min(row.share for row in waterfall.rows) > 0
    assert sum(row.time_s for row in waterfall.rows) == pytest.approx(wall_s)
    assert sum(row.share for row in waterfall.rows) == pytest.approx(wall_s / whole_s)
    assert sum(row.share for row in waterfall.rows) == pytest.approx(1.0, abs=0.01)


def test_a_page_says_that_shares_are_of_the_profile() -> None:
    page = report.render_text(
        report.build_waterfall_page([make_profiled_record(make_profile(3.14))], "en")
    )
    flat = " ".join(page.split())
    assert golden("took-157-0-of-what-as") in flat
    assert golden("the-shares-are-those-of-the") in flat
    [total] = [line for line in page.splitlines() if line.startswith("profiled steps ")]
    assert total.split()[2:4] == ["1,570", "100.0%"]
    assert not [word for word in page.split() if word.startswith("-") and word.endswith("%")]
    assert "占比按分析段计" in report.render_text(
        report.build_waterfall_page([make_profiled_record(make_profile(3.14))], "zh")
    )


def test_attention_in_matmul_kernels_is_one_row_with_them() -> None:
    """Attention is computed by plain matmuls: its FLOPs at the peak take longer than the kernels
    named attention, of which there are none.
    """
    kernels = [make_kernel("gemm", "matmul", 1.25), make_kernel("norm", "other", 0.25)]
    [waterfall] = make_waterfalls(make_profiled_record(make_profile(kernels=kernels)))
    rows = {row.name: row.time_s for row in waterfall.rows}
    assert rows["products"] == pytest.approx(
        1.25 - 2 * (MATMUL_FLOPS + ATTENTION_FLOPS) / PEAK_FLOPS_PER_S
    )
    assert not {"matmul", "attention"} & set(rows)
    assert sum(rows.values()) == pytest.approx(2.0)


def test_matmuls_in_other_kernels_are_one_row_with_them() -> None:
    [waterfall] = make_waterfalls(
        make_profiled_record(make_profile(kernels=[make_kernel("fused", "other", 1.5)]))
    )
    rows = {row.name: row.time_s for row in waterfall.rows}
    assert rows["kernels"] == pytest.approx(
        1.5 - 2 * (MATMUL_FLOPS + ATTENTION_FLOPS) / PEAK_FLOPS_PER_S
    )
    assert not {"matmul", "attention", "products", "other"} & set(rows)
    assert sum(rows.values()) == pytest.approx(2.0)


def test_flops_beyond_the_kernel_time_are_noted() -> None:
    record = make_profiled_record(make_profile(kernels=[make_kernel("norm", "other", 1e-6)]))
    [waterfall] = make_waterfalls(record)
    assert [row.name for row in waterfall.rows if row.time_s < 0] == ["kernels"]
    page = " ".join(report.render_text(report.build_waterfall_page([record], "en")).split())
    assert "take longer than all kernels did" in page


def test_recomputation_is_a_second_forward_of_the_layers() -> None:
    record = make_profiled_record(make_profile(), tune__recompute="full")
    [waterfall] = make_waterfalls(record)
    second = (2 * 1280 * COUNTS["tokens"] + 4 * 2 * 8 * COUNTS["pairs"]) / (
        MATMUL_FLOPS + ATTENTION_FLOPS
    )
    rows = {row.name: row.time_s for row in waterfall.rows}
    assert rows["recompute"] == pytest.approx(1.25 * second / (1 + second))
    assert sum(rows.values()) == pytest.approx(2.0)


def test_without_a_datasheet_matmul_time_is_not_split() -> None:
    [waterfall] = make_waterfalls(
        make_profiled_record(make_profile(), environment__hardware__peak=None)
    )
    rows = {row.name: row.time_s for row in waterfall.rows}
    assert (rows["matmuls"], rows["attentions"]) == (1.0, 0.25)
    assert "peak" not in rows
    assert sum(rows.values()) == pytest.approx(2.0)


def test_profiles_of_replicas_and_stages() -> None:
    """Two replicas of two stages: a replica's profile holds half of the measured work, a stage half
    of a replica's FLOPs.
    """
    times = ((2.0, 1.0, 1.0, 1.0),) * 4
    record = make_training_record(
        times, plan=(1, 2, 2), profile=[make_profile(rank=0), make_profile(rank=1)]
    )
    stages = make_waterfalls(record)
    assert [(waterfall.rank, waterfall.measured_s) for waterfall in stages] == [(0, 2.0), (1, 2.0)]
    assert next(row.time_s for row in stages[0].rows if row.name == "peak") == pytest.approx(
        (MATMUL_FLOPS + ATTENTION_FLOPS) / PEAK_FLOPS_PER_S
    )


def test_without_a_profile_rows_come_from_the_samples() -> None:
    [waterfall] = make_waterfalls(make_training_record())
    rows = {row.name: row.time_s for row in waterfall.rows}
    whole = 3 * (MATMUL_FLOPS + ATTENTION_FLOPS)
    assert waterfall.profile is None
    assert rows == pytest.approx(
        {
            "peak": whole / 4e6,
            "rate": whole / 2e6 - whole / 4e6,
            "data": 3 / 8,
            "rest": 3 - 3 / 8 - whole / 2e6,
        }
    )


def test_a_matmul_rate_below_that_of_the_run_is_not_used() -> None:
    """The rate was timed while another program used the cores, say: at that rate the matmuls alone
    would take longer than the pass.
    """
    ranks = [
        rank.model_copy(update={"matmul_flops_per_s": 1.0}) for rank in make_training_record().ranks
    ]
    record = make_training_record().model_copy(update={"ranks": ranks})
    [waterfall] = make_waterfalls(record)
    rows = {row.name: row.time_s for row in waterfall.rows}
    ideal_s = 3 * (MATMUL_FLOPS + ATTENTION_FLOPS) / PEAK_FLOPS_PER_S
    assert rows == pytest.approx({"peak": ideal_s, "data": 3 / 8, "together": 3 - 3 / 8 - ideal_s})
    page = " ".join(report.render_text(report.build_waterfall_page([record], "en")).split())
    assert golden("the-matmul-rate-measured-in-the") in page


def test_pages_show_a_waterfall_of_profiled_and_explained_runs() -> None:
    with_stretch, without = (
        make_profiled_record(make_profile(trace="x.trace.json.gz")),
        make_training_record(),
    )
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


def test_kernel_bandwidth_is_compared_with_the_datasheet() -> None:
    hardware = make_training_record().environment.hardware.model_dump(mode="json")
    hardware["peak"] |= {"bandwidth_bytes_per_s": 8000.0}
    page = report.render_text(
        report.build_waterfall_page(
            [make_profiled_record(make_profile(), environment__hardware=hardware)], "en"
        )
    )
    [line] = [line for line in page.splitlines() if line.startswith("norm ")]
    assert "50.0%" in line  # 1000 bytes in 0.25 s: half of 8000 bytes/s


def test_a_failed_run_has_no_waterfall() -> None:
    assert make_waterfalls(make_record(status="failed", samples=[], metrics={})) == []


def test_after_a_run_its_waterfall_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels are left out, as `report --explain` lists them; where no run was profiled, one line
    says so.
    """
    print_waterfall([make_training_record()], Path("records"), OutputOptions())
    assert capsys.readouterr() == ("", golden("no-waterfall-no-run-got-to"))
    print_waterfall(
        [make_profiled_record(make_profile()), make_training_record()],
        Path("my records"),
        OutputOptions(),
    )
    printed = capsys.readouterr()
    assert printed.out.count("Why it is not higher") == 1
    shares = [word for word in printed.out.split() if word.endswith("%")]
    assert "pipeline bubble" in printed.out
    assert "100.0%" in shares
    assert "norm " not in printed.out
    assert printed.err == golden("by-kernel-steelyard-report-my-records")
    print_waterfall(
        [make_profiled_record(make_profile())], Path("records"), OutputOptions(quiet=True)
    )
    assert capsys.readouterr().err == ""
