"""The share of a host's cores that other processes use, in made records: exact shares, limits for
CPUs and for devices, both sizes.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from metrics.test_metric_table import (
    get_metric_value,
    make_mmlu_record,
    make_run_facts,
    resolve_small_case,
)
from steelyard.metrics import cpu_contention, evidence
from steelyard.metrics.cpu_contention import ContentionShare, measure_contention
from steelyard.record.record import Record
from steelyard.record.run_facts import CpuLoad, Environment, HostFacts
from steelyard.words import Message

T_S = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


def make_load(
    other_cores: float, own_cores: float = 2.0, allowed: int = 4, **overrides: Any
) -> CpuLoad:
    """Return CPU time readings in which other processes and the run use constant numbers of cores.

    `overrides` replaces fields of the readings.
    """
    columns = {
        "t_s": T_S,
        "busy_s": [(other_cores + own_cores) * t for t in T_S],
        "own_s": [own_cores * t for t in T_S],
    }
    return CpuLoad(**{"allowed": allowed, **columns, **overrides})


def test_the_share_of_others() -> None:
    assert measure_contention(make_load(1.0), 20.0, 40.0) == ContentionShare(0.25, 20.0)
    # a pass between two readings takes the readings around it
    assert measure_contention(make_load(1.0), 21.0, 29.0) == ContentionShare(0.25, 10.0)
    assert measure_contention(make_load(0.0), 20.0, 40.0) == ContentionShare(0.0, 20.0)


def test_the_share_counts_load_that_starts_later() -> None:
    # the run uses two cores, and from 20 s on other processes use two more
    busy_s = [0.0, 20.0, 40.0, 80.0, 120.0, 160.0]
    readings = make_load(0.0, busy_s=busy_s)
    assert measure_contention(readings, 0.0, 20.0) == ContentionShare(0.0, 20.0)
    assert measure_contention(readings, 10.0, 30.0) == ContentionShare(0.25, 20.0)
    assert measure_contention(readings, 20.0, 40.0) == ContentionShare(0.5, 20.0)


def test_under_a_quota_others_may_use_the_cores_outside_it() -> None:
    quota_of_two = {"allowed": 8, "quota": 2.0}
    assert (
        measure_contention(make_load(5.0, **quota_of_two), 10.0, 40.0).value == 0.0
    )  # six cores are outside the quota
    assert (
        measure_contention(make_load(7.0, **quota_of_two), 10.0, 40.0).value == 0.5
    )  # one of the two is taken
    group_s = [2.5 * t for t in T_S]  # others in the same cgroup use half a core
    assert (
        measure_contention(make_load(5.0, **quota_of_two, group_s=group_s), 10.0, 40.0).value
        == 0.25
    )
    assert (
        measure_contention(make_load(5.0, **quota_of_two, group_s=[None] * 6), 10.0, 40.0).value
        == 0.0
    )


def test_the_share_is_unknown_without_readings() -> None:
    assert measure_contention(make_load(1.0), -5.0, 20.0) == ContentionShare(
        None, why=Message("busy.no_reading")
    )
    assert measure_contention(make_load(1.0), 20.0, 60.0) == ContentionShare(
        None, why=Message("busy.no_reading")
    )
    zero = make_load(0.0, busy_s=[0.0] * 6)  # some sandboxes have an empty /proc/stat
    assert measure_contention(zero, 10.0, 30.0) == ContentionShare(
        None, 20.0, Message("busy.not_counted")
    )


def make_busy_record(other_cores: float, accelerator: str, size: str | None = None) -> Record:
    """Return a record of a run beside processes that use `other_cores` of the host's four cores."""
    host = HostFacts(name="here", ranks=[0], load=make_load(other_cores))
    hardware = {"devices": [], "accelerator": accelerator}
    environment = Environment.model_validate({"hardware": hardware, "software": {}, "source": {}})
    run_facts = make_run_facts(hosts=[host], environment=environment, telemetry=[])
    return make_mmlu_record(
        facts=run_facts, resolved=resolve_small_case(size=size) if size else resolve_small_case()
    )


def list_reason_codes(record: Record) -> list[str]:
    """Return the codes of the record's reasons."""
    return [reason.code for reason in record.reasons]


def make_busy_message(share: float) -> Message:
    """Return the message that others took `share` of the four cores, measured over 10 s."""
    return Message(
        "busy.taken", {"host": "here", "share": pytest.approx(share), "cores": 4, "time": 10.0}
    )


@pytest.mark.parametrize(
    ("accelerator", "others", "share", "noted", "valid"),
    [
        ("cpu", 0.1, 0.025, False, True),
        ("cpu", 0.2, 0.05, True, True),
        ("cpu", 0.8, 0.2, True, False),
        ("cuda", 0.8, 0.2, False, True),
        ("cuda", 1.2, 0.3, True, True),
        ("cuda", 3.2, 0.8, True, False),
        ("another", 3.2, 0.8, True, False),
    ],
)
def test_bounds_of_full_runs(
    accelerator: str, others: float, share: float, noted: bool, valid: bool
) -> None:
    record = make_busy_record(others, accelerator)
    limits = (
        cpu_contention.CPU_IS_DEVICE_LIMITS
        if accelerator == "cpu"
        else cpu_contention.CPU_SERVES_DEVICE_LIMITS
    )
    (check,) = [candidate for candidate in record.checks if candidate.name == "quiet"]
    code = "check.quiet.ok" if valid else "check.quiet.bad"
    assert (check.ok, check.detail) == (
        valid,
        Message(code, {"taken": make_busy_message(share), "most": limits.invalid_above}),
    )
    assert ("busy" in list_reason_codes(record)) is not valid
    assert (
        Message("note.busy", {"taken": make_busy_message(share), "least": limits.note_above})
        in record.notes
    ) is noted


def list_busy_notes(record: Record) -> list[Message | str]:
    """Return the notes of the record that say that the host was busy."""
    return [note for note in record.notes if isinstance(note, Message) and note.code == "note.busy"]


def test_a_busy_smoke_run_gets_only_a_note() -> None:
    record = make_busy_record(3.8, "cpu", "smoke")
    assert "busy" not in list_reason_codes(record)
    assert list_busy_notes(record) == [
        Message("note.busy", {"taken": make_busy_message(0.95), "least": 0.03})
    ]
    assert list_busy_notes(make_busy_record(0.1, "cpu", "smoke")) == []


def test_a_record_without_load_readings_is_not_judged() -> None:
    """A record of an earlier version, which has no CPU time readings, has no check `quiet`."""
    record = make_mmlu_record(facts=make_run_facts(hosts=[HostFacts(name="here", ranks=[0])]))
    assert get_metric_value(record, "mem") == 7.0
    assert "quiet" not in [check.name for check in record.checks]
    assert "load" not in record.hosts[0].model_dump()


def test_an_unknown_share_is_noted() -> None:
    late = HostFacts(
        name="here", ranks=[0], load=make_load(1.0, t_s=[31.0, 32.0, 33.0, 34.0, 35.0, 36.0])
    )
    record = make_mmlu_record(facts=make_run_facts(hosts=[late]))
    assert (
        Message("note.busy_unknown", {"host": "here", "why": Message("busy.no_reading")})
        in record.notes
    )


def test_readings_out_of_order_are_contradictions() -> None:
    host = HostFacts(
        name="here", ranks=[0], load=make_load(1.0, t_s=[0.0, 10.0, 5.0, 30.0, 40.0, 99.0])
    )
    record = make_mmlu_record(facts=make_run_facts(hosts=[host]))
    wrong = [text for text in evidence.find_contradictions(record) if "CPU time" in text]
    assert wrong[0] == golden("host-here-readings-of-cpu-time")
    assert wrong[1].startswith(golden("host-here-reading-of-cpu-time"))


def test_columns_must_have_equal_lengths() -> None:
    with pytest.raises(ValueError, match="own_s must have as many readings as t_s: 6"):
        make_load(1.0, own_s=[0.0])
