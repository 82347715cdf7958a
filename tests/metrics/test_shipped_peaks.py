"""Tests of the remarks on datasheet peaks that the shipped table does not have and never had."""

from typing import Any

import pytest

from fixtures.golden import golden
from steelyard.accelerators import peaks
from steelyard.metrics.shipped_peaks import list_peak_remarks
from steelyard.record.run_facts import DeviceFacts, Hardware, PeakFacts

GIB = 1 << 30
TABLE = peaks.parse_peaks("""
[[peak]]
name = "Chip A"
accelerator = "chip"
match = ["Chip A", "A"]
bandwidth_bytes_per_s = 2e12
source = "a datasheet, 2025"
[peak.flops_per_s]
bf16 = 300e12
fp16 = 300e12
[[peak.superseded]]
since = 2026-11-15
until = 2027-03-01
flops_per_s = { bf16 = 312.5e12 }
why = "the first edition"
[[peak.superseded]]
since = 2027-03-01
until = 2027-04-01
flops_per_s = { bf16 = 310e12 }
bandwidth_bytes_per_s = 1.9e12
why = "the second edition"

[[peak]]
name = "Chip B, 40 GiB"
accelerator = "chip"
match = ["Chip B"]
memory_gib = 40
source = "a datasheet, 2025"
[peak.flops_per_s]
bf16 = 100e12
""")
CHIP_A, CHIP_B, OTHER_CHIP_B = (
    DeviceFacts(name="Chip A", uuid="1"),
    DeviceFacts(name="Chip B", memory_bytes=39 * GIB),
    DeviceFacts(name="Chip B", memory_bytes=80 * GIB),
)


def describe_unknown(device: str) -> str:
    """Return the remark on a device that the shipped table does not know."""
    return golden("the-datasheet-peak-does-not-come", device)


def describe_figure(what: str, stored: str, known: str) -> str:
    """Return the remark on a figure of Chip A that was never shipped: what it is, the stored value
    with its unit, and the known values.
    """
    return golden("the-datasheet-figure-was-never-shipped", what, "Chip A", stored, known)


def list_remarks(
    devices: list[DeviceFacts], bandwidth: float | None = None, **flops_per_s: float
) -> list[str]:
    """Return the remarks on a record with these devices and these figures of its datasheet row."""
    peak = PeakFacts(
        name="a row", flops_per_s=flops_per_s, bandwidth_bytes_per_s=bandwidth, source="a book"
    )
    return list_peak_remarks(Hardware(devices=devices, peak=peak), TABLE)


@pytest.mark.parametrize(
    "figures",
    [
        {"bf16": 300e12, "fp16": 300e12, "bandwidth": 2e12},
        {"bf16": 300e12 * (1 + 1e-12)},
        {"bf16": 312.5e12},  # of the first edition
        {"bf16": 310e12, "bandwidth": 1.9e12},
        {},
    ],
)
def test_figures_that_were_shipped_are_not_remarked_on(figures: dict[str, Any]) -> None:
    assert list_remarks([CHIP_A], **figures) == []


def test_figure_that_was_never_shipped_is_remarked_on() -> None:
    earlier = (
        "3.125e+14 (from 2026-11-15 until 2027-03-01), 3.1e+14 (from 2027-03-01 until 2027-04-01)"
    )
    assert list_remarks([CHIP_A], bf16=250e12, fp16=300e12) == [
        describe_figure("bf16 peak", "2.5e+14 FLOP/s", f"3e+14, {earlier}")
    ]
    # 312.5e12 was that of bf16
    assert list_remarks([CHIP_A], fp16=312.5e12) == [
        describe_figure("fp16 peak", "3.125e+14 FLOP/s", "3e+14")
    ]
    assert list_remarks([CHIP_A], bandwidth=3e12, fp8=1e15) == [
        describe_figure("fp8 peak", "1e+15 FLOP/s", "no value"),
        describe_figure(
            "memory bandwidth", "3e+12 B/s", "2e+12, 1.9e+12 (from 2027-03-01 until 2027-04-01)"
        ),
    ]


def test_device_that_the_table_does_not_know_is_remarked_on_once() -> None:
    abacus = DeviceFacts(name="Abacus 13")
    assert list_remarks([abacus, abacus], fp32=1e12) == [describe_unknown("Abacus 13")]
    assert list_remarks([CHIP_B], bf16=100e12) == []
    # another memory is another device
    assert list_remarks([OTHER_CHIP_B], bf16=100e12) == [describe_unknown("Chip B")]


def test_each_distinct_device_is_compared_once() -> None:
    second = CHIP_A.model_copy(update={"uuid": "2"})
    remarks = list_remarks([CHIP_A, second, CHIP_B, CHIP_B], bf16=100e12)
    assert len(remarks) == 1
    assert remarks[0].startswith("the datasheet bf16 peak of Chip A is 1e+14 FLOP/s")


def test_record_without_a_peak_is_not_remarked_on() -> None:
    assert list_peak_remarks(Hardware(devices=[DeviceFacts(name="Abacus 13")]), TABLE) == []


def test_peak_of_no_device_is_remarked_on() -> None:
    assert list_remarks([], bf16=300e12) == [
        "the record has a datasheet peak, and no device that it could be of"
    ]


def test_shipped_rows_are_the_default() -> None:
    shipped_row = peaks.load_shipped_peaks()[0]
    stored = shipped_row.model_dump(include={"name", "flops_per_s", "source"})
    device = DeviceFacts(name=shipped_row.match[0])
    assert list_peak_remarks(Hardware(devices=[device], peak=PeakFacts(**stored))) == []
    assert list_peak_remarks(Hardware(devices=[CHIP_A], peak=PeakFacts(**stored))) == [
        describe_unknown("Chip A")
    ]
