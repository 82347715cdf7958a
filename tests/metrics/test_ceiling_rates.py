"""Ceilings derived from the stretches of a bench: exact rates, and no rate where a result is
wrong.
"""

import json
from pathlib import Path

import pytest

from fixtures.golden import golden
from fixtures.specs import LIMITS, make_bench, make_spec_record, make_stretches
from steelyard.errors import RequestError
from steelyard.metrics import ceiling_rates
from steelyard.record import ceilings_record, record_file
from steelyard.record.ceilings_record import ErrorCheck
from steelyard.words import Message


def derive_ceiling(**overrides):
    """Return the ceiling of a made bench; `overrides` replaces fields of the bench."""
    return ceiling_rates.derive_ceilings(make_spec_record(make_bench(**overrides)))[0]


def test_a_ceiling_has_rate_interval_share_clock_and_power():
    """Ten calls of 1e11 FLOPs in each of five stretches of 1 s; readings at 100.5 s and 101.5 s
    fall between them.
    """
    ceiling = derive_ceiling()
    assert (ceiling.value, ceiling.interval, ceiling.steady, ceiling.note) == (
        1e12,
        (1e12, 1e12),
        True,
        None,
    )
    assert (ceiling.peak, ceiling.share) == (4e12, 0.25)
    assert (ceiling.sm_clock_mhz, ceiling.power_w) == (1600.0, 650.0)


def test_a_rate_is_of_the_steady_stretches():
    """The first stretch ran at another clock; it stays in the record but is no part of the rate."""
    assert derive_ceiling(stretches=make_stretches(0.5, 1.0, 1.0, 1.0, 1.0, 1.0)).value == 1e12


def test_unsteady_stretches_are_noted():
    """The later half of twelve, of which three took half the time: six stretches in 4.5 s."""
    times = [1.0] * 6 + [1.0, 0.5] * 3
    ceiling = derive_ceiling(stretches=make_stretches(*times))
    assert ceiling.value == pytest.approx(6e12 / 4.5, rel=1e-12)
    assert (ceiling.steady, ceiling.note) == (
        False,
        Message("ceiling.not_steady", {"last": 5, "within": 0.01}),
    )
    assert ceiling.interval is not None
    assert ceiling.interval[0] < 6e12 / 4.5 < ceiling.interval[1]


def test_the_tolerance_of_steady_stretches():
    assert ceiling_rates.select_settled_stretches(make_stretches(1.0, 1.01, 1.0, 1.0, 1.0), LIMITS)[
        0
    ]
    assert not ceiling_rates.select_settled_stretches(
        make_stretches(1.0, 1.0101, 1.0, 1.0, 1.0), LIMITS
    )[0]
    assert not ceiling_rates.select_settled_stretches(make_stretches(1.0, 1.0, 1.0, 1.0), LIMITS)[0]


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
    ceiling = derive_ceiling(checked=checked)
    assert (ceiling.value, ceiling.interval, ceiling.share, ceiling.note) == (
        None,
        None,
        None,
        note,
    )


def test_a_missing_ceiling_has_a_note():
    assert derive_ceiling(reason="a CPU has no TF32", stretches=[]).note == Message(
        "ceiling.text", {"text": "a CPU has no TF32"}
    )
    lacks = Message("ceiling.unsupported", {"framework": "torch"})
    assert derive_ceiling(reason=lacks, stretches=[]).note == lacks
    assert derive_ceiling(amount=None).note == Message("ceiling.nothing")
    assert derive_ceiling(stretches=make_stretches(*[0.0] * 5)).note == Message("ceiling.short")


@pytest.mark.parametrize(
    ("reason", "error_text", "code", "shown"),
    [
        ("RuntimeError: no kernel at /opt/a/b.so", None, "failed", "RuntimeError: no kernel at …"),
        ("NotImplementedError", None, "failed", "NotImplementedError"),
        ("a RuntimeError of old", None, "text", None),
        ("needs two devices", None, "text", None),
        (Message("ceiling.memory"), "MemoryError: 0x12", "memory", "MemoryError: …"),
    ],
)
def test_an_exception_is_no_reason(reason, error_text, code, shown):
    """Older records hold type and first line of an exception as the reason."""
    bench = make_bench(reason=reason, error_text=error_text, stretches=[])
    note = ceiling_rates.make_ceiling_note(bench, LIMITS)
    assert note is not None
    assert note.code == f"ceiling.{code}"
    assert ceiling_rates.find_error_text(bench) == shown


def test_shares_are_of_the_matching_datasheet_figure():
    """Memory is compared with the datasheet's bandwidth, copies with nothing; a precision without a
    figure has no share.
    """
    assert derive_ceiling(group="memory", unit="B/s", precision=None).share == 0.5
    assert derive_ceiling(group="copy", unit="B/s", precision=None).share is None
    assert derive_ceiling(precision="fp8").share is None
    assert derive_ceiling(group="attention").share == 0.25


def test_a_capacity_has_no_interval():
    ceiling = derive_ceiling(
        group="capacity", unit="B", amount=2e9, stretches=[], detail={"how": "allocated"}
    )
    assert (ceiling.value, ceiling.interval, ceiling.note) == (
        2e9,
        None,
        Message("ceiling.text", {"text": "allocated"}),
    )


def test_a_rank_without_readings_has_no_clock_and_power():
    ceiling = derive_ceiling(rank=1)
    assert (ceiling.value, ceiling.sm_clock_mhz, ceiling.power_w) == (1e12, None, None)


def test_a_record_verifies(tmp_path: Path):
    path = ceilings_record.write_spec_record(make_spec_record(), tmp_path)
    assert path.name == "20261116T050000-spec-cuda-abababab.json"
    assert ceiling_rates.verify_spec_record(path) == []
    assert ceiling_rates.read_verified_spec_record(path) == make_spec_record()


def rewrite_record(path: Path, change, seal: bool) -> Path:
    """Change the table of the spec record at `path` in place, seal it again if `seal`, and return
    the path.
    """
    table = json.loads(path.read_bytes())
    change(table)
    if seal:
        table["hashes"] = record_file.compute_hashes(table, ceilings_record.RAW_KEY)
    path.write_bytes(record_file.to_canonical_bytes(table))
    return path


def test_a_ceiling_that_does_not_follow_from_its_stretches_does_not_verify(tmp_path: Path):
    def faster(table):
        table["ceilings"][0]["value"] *= 2

    path = rewrite_record(
        ceilings_record.write_spec_record(make_spec_record(), tmp_path), faster, seal=True
    )
    assert ceiling_rates.verify_spec_record(path) == [golden("matmul-square-512-bf-16-on")]
    with pytest.raises(RequestError, match="does not verify: matmul square 512"):
        ceiling_rates.read_verified_spec_record(path)


def test_a_changed_byte_does_not_verify(tmp_path: Path):
    def rename_bench(table):
        table["benches"][0]["name"] = "square 513"

    wrong = ceiling_rates.verify_spec_record(
        rewrite_record(
            ceilings_record.write_spec_record(make_spec_record(), tmp_path),
            rename_bench,
            seal=False,
        )
    )
    assert wrong == [
        f"the hash of {name} does not match" for name in ("samples", "record", "bytes")
    ]


def test_a_failed_status_without_a_reason_does_not_verify(tmp_path: Path):
    def failed(table):
        table["status"] = "failed"

    assert ceiling_rates.verify_spec_record(
        rewrite_record(
            ceilings_record.write_spec_record(make_spec_record(), tmp_path), failed, seal=True
        )
    ) == [golden("the-status-does-not-follow-from")]
