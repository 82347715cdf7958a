"""The share of a host's cores that other processes use, in made records: exact shares, limits for
CPUs and for devices, both sizes.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from metrics.test_table import facts, made, resolved, value
from steelyard.metrics import cpu_contention, evidence
from steelyard.metrics.cpu_contention import ContentionShare, measure_contention
from steelyard.record.record import Record
from steelyard.record.run_facts import CpuLoad, Environment, HostFacts
from steelyard.words import Message

T_S = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


def load(others: float, own: float = 2.0, allowed: int = 4, **over: Any) -> CpuLoad:
    """Return CPU time readings in which other processes and the run use constant numbers of cores.

    `overrides` replaces fields of the readings.
    """
    told = {
        "t_s": T_S,
        "busy_s": [(others + own) * t for t in T_S],
        "own_s": [own * t for t in T_S],
    }
    return CpuLoad(**{"allowed": allowed, **told, **over})


def test_the_share_of_others() -> None:
    assert measure_contention(load(1.0), 20.0, 40.0) == ContentionShare(0.25, 20.0)
    # a pass between two readings takes the readings around it
    assert measure_contention(load(1.0), 21.0, 29.0) == ContentionShare(0.25, 10.0)
    assert measure_contention(load(0.0), 20.0, 40.0) == ContentionShare(0.0, 20.0)


def test_load_that_comes_later_is_seen() -> None:
    # the run uses two cores, and from 20 s on other processes use two more
    late = [0.0, 20.0, 40.0, 80.0, 120.0, 160.0]
    found = load(0.0, busy_s=late)
    assert measure_contention(found, 0.0, 20.0) == ContentionShare(0.0, 20.0)
    assert measure_contention(found, 10.0, 30.0) == ContentionShare(0.25, 20.0)
    assert measure_contention(found, 20.0, 40.0) == ContentionShare(0.5, 20.0)


def test_under_a_quota_others_have_the_cores_that_it_keeps_from_the_run() -> None:
    two = {"allowed": 8, "quota": 2.0}
    assert (
        measure_contention(load(5.0, **two), 10.0, 40.0).value == 0.0
    )  # six cores are outside the quota
    assert measure_contention(load(7.0, **two), 10.0, 40.0).value == 0.5  # one of the two is taken
    group = [2.5 * t for t in T_S]  # others in the same cgroup use half a core
    assert measure_contention(load(5.0, **two, group_s=group), 10.0, 40.0).value == 0.25
    assert measure_contention(load(5.0, **two, group_s=[None] * 6), 10.0, 40.0).value == 0.0


def test_what_is_not_known() -> None:
    assert measure_contention(load(1.0), -5.0, 20.0) == ContentionShare(
        None, why=Message("busy.no_reading")
    )
    assert measure_contention(load(1.0), 20.0, 60.0) == ContentionShare(
        None, why=Message("busy.no_reading")
    )
    zero = load(0.0, busy_s=[0.0] * 6)  # some sandboxes have an empty /proc/stat
    assert measure_contention(zero, 10.0, 30.0) == ContentionShare(
        None, 20.0, Message("busy.not_counted")
    )


def run(others: float, accelerator: str, size: str | None = None) -> Record:
    """Return a record of a run beside processes that use `other_cores` of the host's four cores."""
    host = HostFacts(name="here", ranks=[0], load=load(others))
    hardware = {"devices": [], "accelerator": accelerator}
    environment = Environment.model_validate({"hardware": hardware, "software": {}, "source": {}})
    known = facts(hosts=[host], environment=environment, telemetry=[])
    return made(facts=known, resolved=resolved(size=size) if size else resolved())


def codes(found: Record) -> list[str]:
    """Return the codes of the record's reasons."""
    return [reason.code for reason in found.reasons]


def taken(share: float) -> Message:
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
    found = run(others, accelerator)
    limits = (
        cpu_contention.CPU_IS_DEVICE_LIMITS
        if accelerator == "cpu"
        else cpu_contention.CPU_SERVES_DEVICE_LIMITS
    )
    (check,) = [one for one in found.checks if one.name == "quiet"]
    code = "check.quiet.ok" if valid else "check.quiet.bad"
    assert (check.ok, check.detail) == (
        valid,
        Message(code, {"taken": taken(share), "most": limits.invalid_above}),
    )
    assert ("busy" in codes(found)) is not valid
    assert (
        Message("note.busy", {"taken": taken(share), "least": limits.note_above}) in found.notes
    ) is noted


def busy_notes(found: Record) -> list[Message | str]:
    """Return the notes of the record that say that the host was busy."""
    return [note for note in found.notes if isinstance(note, Message) and note.code == "note.busy"]


def test_smoke_gets_a_note_alone() -> None:
    found = run(3.8, "cpu", "smoke")
    assert "busy" not in codes(found)
    assert busy_notes(found) == [Message("note.busy", {"taken": taken(0.95), "least": 0.03})]
    assert busy_notes(run(0.1, "cpu", "smoke")) == []


def test_a_record_of_before_is_not_judged() -> None:
    """A record of an earlier version, which has no CPU time readings, has no check `quiet`."""
    found = made(facts=facts(hosts=[HostFacts(name="here", ranks=[0])]))
    assert value(found, "mem") == 7.0
    assert "quiet" not in [one.name for one in found.checks]
    assert "load" not in found.hosts[0].model_dump()


def test_what_is_unknown_is_said() -> None:
    late = HostFacts(
        name="here", ranks=[0], load=load(1.0, t_s=[31.0, 32.0, 33.0, 34.0, 35.0, 36.0])
    )
    found = made(facts=facts(hosts=[late]))
    assert (
        Message("note.busy_unknown", {"host": "here", "why": Message("busy.no_reading")})
        in found.notes
    )


def test_readings_out_of_order_contradict() -> None:
    host = HostFacts(name="here", ranks=[0], load=load(1.0, t_s=[0.0, 10.0, 5.0, 30.0, 40.0, 99.0]))
    found = made(facts=facts(hosts=[host]))
    wrong = [text for text in evidence.find_contradictions(found) if "CPU time" in text]
    assert wrong[0] == golden("host-here-readings-of-cpu-time")
    assert wrong[1].startswith(golden("host-here-reading-of-cpu-time"))


def test_columns_are_of_one_length() -> None:
    with pytest.raises(ValueError, match="own_s has not as many readings as t_s, which has 6"):
        load(1.0, own_s=[0.0])
