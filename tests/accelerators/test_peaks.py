"""Test the table of peak rates: every row has a source, only equal device names match, and an
invalid table is refused.
"""

import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from steelyard import accelerators
from steelyard.accelerators import CUDA, DetectedDevice, peaks
from steelyard.accelerators.peaks import Peak

REQUIRED_DEVICES = [
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200",
    "NVIDIA B200",
    "NVIDIA GeForce RTX 4090",
    "AMD Instinct MI300X",
    "Ascend910B3",
]


def find_peak(name: str, memory_bytes: int | None) -> Peak | None:
    """Return the peak rates of a CUDA device with this name and memory, or None."""
    return accelerators.find_peak(CUDA, DetectedDevice(name, None, memory_bytes, 0, None))


@pytest.mark.parametrize("name", REQUIRED_DEVICES)
def test_required_devices_have_a_peak(name: str) -> None:
    device_peak = find_peak(name, None)
    assert device_peak is not None
    assert name in device_peak.match


@pytest.mark.parametrize("found", peaks.load_shipped_peaks(), ids=lambda found: found.name)
def test_every_peak_has_a_dated_source_and_plausible_rates(found: Peak) -> None:
    assert re.search(r"\b20[12]\d\b", found.source), "a source has its year"
    assert all(rate >= 1e12 for rate in found.flops_per_s.values()), "a rate in other units"
    assert found.bandwidth_bytes_per_s is None or 1e11 < found.bandwidth_bytes_per_s < 1e14
    fp16, bf16 = found.flops_per_s.get("fp16"), found.flops_per_s["bf16"]
    assert fp16 in (None, bf16) or found.accelerator == "hpu"
    assert [find_peak(name, None) for name in found.match] == [found] * len(found.match)


def test_the_peaks_of_an_h200_are_dense() -> None:
    h200 = find_peak("NVIDIA H200", 150754820096)
    assert h200 is not None
    assert h200.flops_per_s["bf16"] == h200.flops_per_s["fp16"] == 989.4e12
    assert (h200.flops_per_s["tf32"], h200.flops_per_s["fp32"]) == (494.7e12, 66.9e12)
    assert h200.bandwidth_bytes_per_s == 4.8e12


@pytest.mark.parametrize(
    "name", ["", "NVIDIA H20", "H200", "nvidia h200", "NVIDIA H200 ", "AMD EPYC", "Tesla T4"]
)
def test_only_equal_device_names_match(name: str) -> None:
    device_peak = find_peak(name, None)
    assert device_peak is None or name == "NVIDIA H20" == device_peak.match[0]


PEAK_ROW = """[[peak]]
name = "{name}"
accelerator = "cuda"
match = ["X"]
source = "a book, 2020"
{more}
[peak.flops_per_s]
bf16 = {rate}
"""


SUPERSEDING_ROW = (
    PEAK_ROW.format(name="a", more="", rate=1)
    + """
[[peak.superseded]]
since = 2026-11-15
until = 2027-03-01
flops_per_s = { bf16 = 2 }
why = "a misprint"
"""
)


def test_superseded_figures_are_kept_with_their_dates() -> None:
    [row] = peaks.parse_peaks(SUPERSEDING_ROW)
    [earlier] = row.superseded
    assert (row.flops_per_s, earlier.flops_per_s) == ({"bf16": 1}, {"bf16": 2})
    assert (earlier.since, earlier.until) == (date(2026, 11, 15), date(2027, 3, 1))
    assert (earlier.bandwidth_bytes_per_s, earlier.why) == (None, "a misprint")


def list_known_figures(rows: tuple[Peak, ...]) -> set[tuple[str, str, float]]:
    """Return (device name, figure, value) of every figure that rows have or had."""
    return {
        (name, figure, value)
        for row in rows
        for version in (row, *row.superseded)
        for figure, value in peaks.list_figures(
            version.flops_per_s, version.bandwidth_bytes_per_s
        ).items()
        for name in row.match
    }


def read_figures_ever_shipped() -> set[tuple[str, str, float]]:
    """Return (device name, figure, value) of each line of the list of all figures that were ever
    shipped.
    """
    lines = Path(__file__).with_name("peaks_ever_shipped.csv").read_text().splitlines()
    figures = [line.rsplit(",", 2) for line in lines if not line.startswith("#")]
    return {(name, figure, float(value)) for name, figure, value in figures}


def test_no_figure_that_was_ever_shipped_is_lost() -> None:
    known = list_known_figures(peaks.load_shipped_peaks())
    lost = read_figures_ever_shipped() - known
    assert lost == set(), "keep these under `superseded` in peaks.toml"
    new = known - read_figures_ever_shipped()
    assert new == set(), "append these to peaks_ever_shipped.csv"


def test_a_corrected_figure_without_a_superseded_one_is_detected() -> None:
    assert len(read_figures_ever_shipped()) == len(list_known_figures(peaks.load_shipped_peaks()))
    h200 = find_peak("NVIDIA H200", None)
    assert h200 is not None
    corrected = h200.model_copy(update={"flops_per_s": {**h200.flops_per_s, "bf16": 1e15}})
    assert read_figures_ever_shipped() & list_known_figures((h200,)) - list_known_figures(
        (corrected,)
    ) == {("NVIDIA H200", "bf16", 989.4e12)}


def test_memory_size_distinguishes_devices_of_one_name() -> None:
    small, large = peaks.parse_peaks(
        PEAK_ROW.format(name="small", more="memory_gib = 40", rate=1e12)
        + PEAK_ROW.format(name="large", more="memory_gib = 80", rate=2e12)
    )
    assert [
        (small.is_of_device("X", gib << 30), large.is_of_device("X", gib << 30))
        for gib in (35, 39, 60, 79)
    ] == [(False, False), (True, False), (False, False), (False, True)]
    assert not small.is_of_device("X", None)
    assert not small.is_of_device("Y", 40 << 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PEAK_ROW.format(name="a", more="", rate=0), "greater than 0"),
        (PEAK_ROW.format(name="a", more="colour = 1", rate=1), "Extra inputs"),
        (PEAK_ROW.format(name="a", more="", rate=1) + "fp7 = 1", "unknown precisions"),
        (
            PEAK_ROW.format(name="a", more="", rate=1).replace("a book, 2020", ""),
            "at least 1 character",
        ),
        (
            PEAK_ROW.format(name="a", more="", rate=1)
            + PEAK_ROW.format(name="b", more="memory_gib = 1", rate=1),
            "also in another row",
        ),
        (SUPERSEDING_ROW.replace("bf16 = 2", "fp7 = 2"), "unknown precisions"),
        (SUPERSEDING_ROW.replace("bf16 = 2", "bf16 = 1"), "superseded bf16 is today's figure"),
        (SUPERSEDING_ROW.replace("{ bf16 = 2 }", "{}"), "neither flops_per_s nor bandwidth"),
        (SUPERSEDING_ROW.replace("2027", "2025"), "until 2025-03-01 is not after since 2026-11-15"),
        (SUPERSEDING_ROW.replace("a misprint", ""), "at least 1 character"),
    ],
)
def test_an_invalid_peak_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peaks.parse_peaks(text)


def test_a_peak_of_the_accelerator_is_tried_first() -> None:
    [own_peak] = peaks.parse_peaks(PEAK_ROW.format(name="own", more="", rate=3e12))
    accelerator = replace(CUDA, peaks=(own_peak,))
    assert accelerators.find_peak(accelerator, DetectedDevice("X", None, None, 0, None)) is own_peak
    assert accelerators.find_peak(CUDA, DetectedDevice("X", None, None, 0, None)) is None
    assert accelerators.find_peak(
        accelerator, DetectedDevice("NVIDIA H200", None, None, 0, None)
    ) == find_peak("NVIDIA H200", None)
