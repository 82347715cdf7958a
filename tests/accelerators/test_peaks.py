"""Test the table of peak rates: every row has a source, only equal device names match, and an
invalid table is refused.
"""

import re
from dataclasses import replace

import pytest

from steelyard import accelerators
from steelyard.accelerators import CUDA, DetectedDevice, peaks
from steelyard.accelerators.peaks import Peak

REQUIRED = [
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


def peak(name: str, memory_bytes: int | None) -> Peak | None:
    """Return the peak rates of a CUDA device with this name and memory, or None."""
    return accelerators.find_peak(CUDA, DetectedDevice(name, None, memory_bytes, 0, None))


@pytest.mark.parametrize("name", REQUIRED)
def test_required_peaks(name: str) -> None:
    found = peak(name, None)
    assert found is not None
    assert name in found.match


@pytest.mark.parametrize("found", peaks.load_shipped_peaks(), ids=lambda found: found.name)
def test_every_peak(found: Peak) -> None:
    assert re.search(r"\b20[12]\d\b", found.source), "a source has its year"
    assert all(rate >= 1e12 for rate in found.flops_per_s.values()), "a rate in other units"
    assert found.bandwidth_bytes_per_s is None or 1e11 < found.bandwidth_bytes_per_s < 1e14
    fp16, bf16 = found.flops_per_s.get("fp16"), found.flops_per_s["bf16"]
    assert fp16 in (None, bf16) or found.accelerator == "hpu"
    assert [peak(name, None) for name in found.match] == [found] * len(found.match)


def test_the_peaks_of_an_h200_are_dense() -> None:
    found = peak("NVIDIA H200", 150754820096)
    assert found is not None
    assert found.flops_per_s["bf16"] == found.flops_per_s["fp16"] == 989.4e12
    assert (found.flops_per_s["tf32"], found.flops_per_s["fp32"]) == (494.7e12, 66.9e12)
    assert found.bandwidth_bytes_per_s == 4.8e12


@pytest.mark.parametrize(
    "name", ["", "NVIDIA H20", "H200", "nvidia h200", "NVIDIA H200 ", "AMD EPYC", "Tesla T4"]
)
def test_only_equal_names_match(name: str) -> None:
    found = peak(name, None)
    assert found is None or name == "NVIDIA H20" == found.match[0]


ROW = """[[peak]]
name = "{name}"
accelerator = "cuda"
match = ["X"]
source = "a book, 2020"
{more}
[peak.flops_per_s]
bf16 = {rate}
"""


def test_memory_tells_devices_of_one_name_apart() -> None:
    small, large = peaks.parse_peaks(
        ROW.format(name="small", more="memory_gib = 40", rate=1e12)
        + ROW.format(name="large", more="memory_gib = 80", rate=2e12)
    )
    assert [(small.is_of_device("X", gib << 30), large.is_of_device("X", gib << 30)) for gib in (35, 39, 60, 79)] == [
        (False, False), (True, False), (False, False), (False, True)
    ]  # fmt: skip
    assert not small.is_of_device("X", None)
    assert not small.is_of_device("Y", 40 << 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW.format(name="a", more="", rate=0), "greater than 0"),
        (ROW.format(name="a", more="colour = 1", rate=1), "Extra inputs"),
        (ROW.format(name="a", more="", rate=1) + "fp7 = 1", "unknown precisions"),
        (ROW.format(name="a", more="", rate=1).replace("a book, 2020", ""), "at least 1 character"),
        (
            ROW.format(name="a", more="", rate=1)
            + ROW.format(name="b", more="memory_gib = 1", rate=1),
            "also in another row",
        ),
    ],
)
def test_a_bad_peak_table(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peaks.parse_peaks(text)


def test_a_row_that_an_accelerator_brings_comes_first() -> None:
    [own] = peaks.parse_peaks(ROW.format(name="own", more="", rate=3e12))
    mine = replace(CUDA, peaks=(own,))
    assert accelerators.find_peak(mine, DetectedDevice("X", None, None, 0, None)) is own
    assert accelerators.find_peak(CUDA, DetectedDevice("X", None, None, 0, None)) is None
    assert accelerators.find_peak(mine, DetectedDevice("NVIDIA H200", None, None, 0, None)) == peak(
        "NVIDIA H200", None
    )
