"""Ceilings derived from the stretches of a bench: exact rates, and no rate where a result is wrong."""

import json
from pathlib import Path

import pytest

from fixtures.golden import golden
from fixtures.specs import LIMITS, bench, record, stretches
from steelyard.errors import RequestError
from steelyard.metrics import ceiling_rates
from steelyard.record import ceilings_record, record_file
from steelyard.record.ceilings_record import ErrorCheck
from steelyard.words import Message


def one(**over):
    """Return the ceiling of a made bench; `overrides` replaces fields of the bench."""
    return ceiling_rates.derive_ceilings(record(bench(**over)))[0]


def test_a_rate_with_all_that_belongs_to_it():
    """Ten calls of 1e11 FLOPs in each of five stretches of 1 s; readings at 100.5 s and 101.5 s
    fall between them.
    """
    found = one()
    assert (found.value, found.interval, found.steady, found.note) == (
        1e12,
        (1e12, 1e12),
        True,
        None,
    )
    assert (found.peak, found.share) == (4e12, 0.25)
    assert (found.sm_clock_mhz, found.power_w) == (1600.0, 650.0)


def test_a_rate_is_of_the_steady_stretches():
    """The first stretch ran at another clock; it stays in the record but is no part of the rate."""
    assert one(stretches=stretches(0.5, 1.0, 1.0, 1.0, 1.0, 1.0)).value == 1e12


def test_what_is_not_steady_says_so():
    """The later half of twelve, of which three took half the time: six stretches in 4.5 s."""
    times = [1.0] * 6 + [1.0, 0.5] * 3
    found = one(stretches=stretches(*times))
    assert found.value == pytest.approx(6e12 / 4.5, rel=1e-12)
    assert (found.steady, found.note) == (
        False,
        Message("ceiling.not_steady", {"last": 5, "within": 0.01}),
    )
    assert found.interval is not None
    assert found.interval[0] < 6e12 / 4.5 < found.interval[1]


def test_the_border_of_steady():
    assert ceiling_rates.select_settled_stretches(stretches(1.0, 1.01, 1.0, 1.0, 1.0), LIMITS)[0]
    assert not ceiling_rates.select_settled_stretches(
        stretches(1.0, 1.0101, 1.0, 1.0, 1.0), LIMITS
    )[0]
    assert not ceiling_rates.select_settled_stretches(stretches(1.0, 1.0, 1.0, 1.0), LIMITS)[0]


@pytest.mark.parametrize(
    ("checked", "note"),
    [
        (
            ErrorCheck(error=0.05, bound=0.04),
            Message("ceiling.wrong", {"error": 0.05, "bound": 0.04}),
        ),
        (ErrorCheck(error=None, bound=0.04), Message("ceiling.not_finite")),
        (
            ErrorCheck(error=-1.0, bound=0.04),
            Message("ceiling.wrong", {"error": -1.0, "bound": 0.04}),
        ),
    ],
)
def test_a_wrong_result_has_no_rate(checked, note):
    found = one(checked=checked)
    assert (found.value, found.interval, found.share, found.note) == (None, None, None, note)


def test_what_there_is_not_has_its_reason():
    assert one(reason="a CPU has no TF32", stretches=[]).note == Message(
        "ceiling.text", {"text": "a CPU has no TF32"}
    )
    assert one(amount=None).note == Message("ceiling.nothing")
    assert one(stretches=stretches(*[0.0] * 5)).note == Message("ceiling.short")


def test_shares_are_of_the_same_thing():
    """Memory is compared with the datasheet's bandwidth, copies with nothing; a precision without a
    figure has no share.
    """
    assert one(group="memory", unit="B/s", precision=None).share == 0.5
    assert one(group="copy", unit="B/s", precision=None).share is None
    assert one(precision="fp8").share is None
    assert one(group="attention").share == 0.25


def test_an_amount_is_no_rate():
    found = one(group="capacity", unit="B", amount=2e9, stretches=[], detail={"how": "allocated"})
    assert (found.value, found.interval, found.note) == (
        2e9,
        None,
        Message("ceiling.text", {"text": "allocated"}),
    )


def test_a_rank_without_readings_has_none():
    found = one(rank=1)
    assert (found.value, found.sm_clock_mhz, found.power_w) == (1e12, None, None)


def test_a_record_verifies(tmp_path: Path):
    path = ceilings_record.write_spec_record(record(), tmp_path)
    assert path.name == "20261116T050000-spec-cuda-abababab.json"
    assert ceiling_rates.verify_spec_record(path) == []
    assert ceiling_rates.read_verified_spec_record(path) == record()


def rewritten(path: Path, change, seal: bool) -> Path:
    """Change the table of the spec record at `path` in place, seal it again if `seal`, and return
    the path.
    """
    table = json.loads(path.read_bytes())
    change(table)
    if seal:
        table["hashes"] = record_file.compute_hashes(table, ceilings_record.RAW_KEY)
    path.write_bytes(record_file.to_canonical_bytes(table))
    return path


def test_a_number_that_does_not_follow_is_seen(tmp_path: Path):
    def faster(table):
        table["ceilings"][0]["value"] *= 2

    path = rewritten(ceilings_record.write_spec_record(record(), tmp_path), faster, seal=True)
    assert ceiling_rates.verify_spec_record(path) == [golden("matmul-square-512-bf-16-on")]
    with pytest.raises(RequestError, match="does not verify: matmul square 512"):
        ceiling_rates.read_verified_spec_record(path)


def test_a_changed_byte_is_seen(tmp_path: Path):
    def faster(table):
        table["benches"][0]["name"] = "square 513"

    wrong = ceiling_rates.verify_spec_record(
        rewritten(ceilings_record.write_spec_record(record(), tmp_path), faster, seal=False)
    )
    assert wrong == [
        f"the hash of {name} does not match" for name in ("samples", "record", "bytes")
    ]


def test_a_failure_without_its_reason_is_seen(tmp_path: Path):
    def failed(table):
        table["status"] = "failed"

    assert ceiling_rates.verify_spec_record(
        rewritten(ceilings_record.write_spec_record(record(), tmp_path), failed, seal=True)
    ) == [golden("the-status-does-not-follow-from")]
