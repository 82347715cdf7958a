"""Fitness of a machine for measuring, from made facts: each row that is not ok, the step that
helps, and the settings that a record notes.
"""

from dataclasses import replace
from typing import Any

import pytest

from fixtures.golden import golden
from metrics.test_table import facts, made
from steelyard.accelerators import nvml
from steelyard.metrics import fitness_rules
from steelyard.metrics.cpu_contention import CPU_SERVES_DEVICE_LIMITS, ContentionShare
from steelyard.metrics.fitness_rules import GIB, FitnessLevel, MachineFacts, judge_machine
from steelyard.record.record import Record
from steelyard.record.run_facts import DeviceState, HostFacts, HostState
from steelyard.words import Message, render_text

DEVICE = {
    "device": "cuda:0",
    "persistence": True,
    "processes": 0,
    "sm_clock_mhz": 345,
    "sm_clock_max_mhz": 1980,
    "application_clock_mhz": 1980,
    "application_clock_default_mhz": 1980,
    "power_limit_w": 700.0,
    "power_default_w": 700.0,
    "ecc": True,
    "mig": False,
    "reasons": ["gpu_idle"],
    "invalidating": [],
    "temperature_c": 30,
    "slowdown_c": 92,
    "numa_node": 1,
    "runtime": "12.8",
}
HOST = {
    "load_1m": 0.5,
    "cores": 64,
    "allowed": 64,
    "memory_bytes": 100 * GIB,
    "available_bytes": 90 * GIB,
    "swap_bytes": 0,
    "swap_used_bytes": 0,
    "governors": ["performance"],
    "clock_source": "tsc",
    "numa_nodes": 2,
}
GOOD = MachineFacts(
    accelerator="cuda",
    devices=("NVIDIA H200", "NVIDIA H200"),
    driver="570.86.15",
    needs_driver=True,
    host=HostState(**HOST, devices=[DeviceState(**DEVICE)]),
    others=ContentionShare(0.01, 1.0),
    contention_limits=CPU_SERVES_DEVICE_LIMITS,
    free_bytes={"records": 50 * GIB, "temporary": 20 * GIB},
    versions={"Python": "3.11.7", "torch": "2.8.0", "transformers": "4.56.0"},
    torch_build="12.8",
    amx=True,
)


def host(**changes: Any) -> MachineFacts:
    """Return the fit machine with changed facts of its host."""
    return replace(GOOD, host=HostState(**{**HOST, "devices": GOOD.host.devices, **changes}))


def device(**changes: Any) -> MachineFacts:
    """Return the fit machine with changed facts of its device."""
    return replace(GOOD, host=HostState(**HOST, devices=[DeviceState(**{**DEVICE, **changes})]))


def found(machine: MachineFacts, name: str) -> tuple[str, FitnessLevel]:
    """Return the text and the level of the machine's row `name`."""
    (row,) = [row for row in judge_machine(machine) if render_text(row.name) == name]
    return render_text(row.found), row.level


def test_a_machine_that_is_fit() -> None:
    rows = judge_machine(GOOD)
    assert [(render_text(row.name), render_text(row.found)) for row in rows] == [
        ("driver", "570.86.15"),
        ("devices", "2 cuda: NVIDIA H200"),
        ("persistence mode of cuda:0", "on"),
        ("processes on cuda:0", "0"),
        ("clocks of cuda:0", golden("now-345-mhz-at-most-1980")),
        ("power limit of cuda:0", "700 W; the default is 700 W"),
        ("ECC of cuda:0", "on"),
        ("MIG of cuda:0", "off"),
        ("slowdown reasons of cuda:0", "gpu_idle"),
        ("temperature of cuda:0", "30 °C; it slows down at 92 °C"),
        ("NUMA node of cuda:0", "1"),
        ("host load", golden("other-processes-use-1-0-of")),
        ("cores", "64 of 64 by affinity; no quota"),
        ("NUMA nodes", "2"),
        ("CPU governor", "performance"),
        ("free memory", "90.0 of 100.0 GiB"),
        ("swap", "none"),
        ("free disk for records", "50.0 GiB"),
        ("free disk for temporary files", "20.0 GiB"),
        ("Python", "3.11.7"),
        ("torch", "2.8.0, built for 12.8; the driver supports 12.8"),
        ("transformers", "4.56.0"),
        ("AMX", "works"),
        ("clock source", "tsc"),
    ]
    assert {(row.level, row.step) for row in rows} == {("ok", None)}
    assert fitness_rules.is_fit(rows)


@pytest.mark.parametrize(
    ("change", "name", "said", "level"),
    [
        (
            {"persistence": False},
            "persistence mode",
            "off: each process starts the driver again",
            "warn",
        ),
        ({"processes": 3}, "processes", "3", "bad"),
        ({"power_limit_w": 500.0}, "power limit", "500 W; the default is 700 W", "warn"),
        ({"power_limit_w": 699.0}, "power limit", "699 W; the default is 700 W", "ok"),
        ({"power_default_w": None}, "power limit", "700 W; the default is unknown", "unknown"),
        ({"ecc": False}, "ECC", "off: memory errors go unnoticed", "warn"),
        ({"mig": True}, "MIG", "on: the device is partitioned", "bad"),
        ({"reasons": ["sw_power_cap"]}, "slowdown reasons", "sw_power_cap", "ok"),
        (
            {"reasons": ["hw_slowdown"], "invalidating": ["hw_slowdown"]},
            "slowdown reasons",
            "hw_slowdown",
            "bad",
        ),
        ({"temperature_c": 77}, "temperature", "77 °C; it slows down at 92 °C", "warn"),
        ({"temperature_c": 87}, "temperature", "87 °C; it slows down at 92 °C", "bad"),
        (
            {"temperature_c": 84, "slowdown_c": None},
            "temperature",
            "84 °C; where it slows down is unknown",
            "ok",
        ),
        ({"numa_node": None}, "NUMA node", "unknown", "unknown"),
        ({"application_clock_mhz": 990}, "clocks", None, "warn"),
    ],
)
def test_devices(change: dict[str, Any], name: str, said: str | None, level: FitnessLevel) -> None:
    got = found(device(**change), f"{name} {'on' if name == 'processes' else 'of'} cuda:0")
    assert got[1] == level
    assert said is None or got[0] == said
    assert fitness_rules.is_fit(judge_machine(device(**change))) is (level != "bad")


def test_what_a_device_does_not_tell_is_unknown_and_no_reason_against_it() -> None:
    rows = judge_machine(
        replace(GOOD, host=HostState(**HOST, devices=[DeviceState(device="cuda:0")]))
    )
    assert {row.level for row in rows if render_text(row.name).endswith("of cuda:0")} == {"unknown"}
    assert fitness_rules.is_fit(rows)


@pytest.mark.parametrize(
    ("machine", "name", "said", "level"),
    [
        (host(quota=8.0), "cores", "64 of 64 by affinity; a control-group quota of 8", "warn"),
        (host(governors=["powersave"]), "CPU governor", "powersave", "warn"),
        (
            host(governors=["performance", "schedutil"]),
            "CPU governor",
            "performance, schedutil",
            "warn",
        ),
        (
            host(governors=None),
            "CPU governor",
            "unknown: the kernel shows none, as in most virtual machines",
            "unknown",
        ),
        (host(swap_bytes=8 * GIB, swap_used_bytes=GIB), "swap", "1.0 of 8.0 GiB in use", "warn"),
        (host(swap_bytes=8 * GIB, swap_used_bytes=1), "swap", "0.0 of 8.0 GiB in use", "ok"),
        (host(available_bytes=40 * GIB), "free memory", "40.0 of 100.0 GiB", "warn"),
        (host(available_bytes=9 * GIB), "free memory", "9.0 of 100.0 GiB", "bad"),
        (host(clock_source="hpet"), "clock source", "hpet", "warn"),
        (host(clock_source="new"), "clock source", "new", "unknown"),
        (host(clock_source=None), "clock source", "unknown", "unknown"),
        (replace(GOOD, others=ContentionShare(0.3, 1.0)), "host load", None, "warn"),
        (replace(GOOD, others=ContentionShare(0.8, 1.0)), "host load", None, "bad"),
        (
            replace(GOOD, others=None),
            "host load",
            "unknown: not measured; load average 0.5",
            "unknown",
        ),
        (
            replace(GOOD, others=ContentionShare(None, why=Message("busy.not_counted"))),
            "host load",
            "unknown: the host does not count what its cores do; load average 0.5",
            "unknown",
        ),
        (
            replace(GOOD, free_bytes={"records": 5 * GIB}),
            "free disk for records",
            "5.0 GiB",
            "warn",
        ),
        (replace(GOOD, free_bytes={"records": GIB - 1}), "free disk for records", "1.0 GiB", "bad"),
        (
            replace(GOOD, free_bytes={"records": None}),
            "free disk for records",
            "unknown",
            "unknown",
        ),
        (replace(GOOD, versions={"transformers": None}), "transformers", "not installed", "warn"),
        (
            replace(GOOD, torch_build="12.9"),
            "torch",
            "2.8.0, built for 12.9; the driver supports 12.8",
            "warn",
        ),
        (
            replace(GOOD, torch_build="13.0"),
            "torch",
            "2.8.0, built for 13.0; the driver supports 12.8",
            "bad",
        ),
        (
            replace(GOOD, torch_build="11.8"),
            "torch",
            "2.8.0, built for 11.8; the driver supports 12.8",
            "ok",
        ),
        (
            replace(GOOD, torch_build=None),
            "torch",
            "2.8.0, built without the runtime of the device",
            "bad",
        ),
        (replace(GOOD, amx=None), "AMX", "not advertised", "ok"),
        (replace(GOOD, problem="NVML: no"), "driver", "NVML: no", "bad"),
        (replace(GOOD, driver=None), "driver", "unknown", "unknown"),
        (replace(GOOD, driver=None, needs_driver=False), "driver", "not needed", "ok"),
        (replace(GOOD, devices=()), "devices", "no cuda device", "bad"),
    ],
)
def test_hosts(machine: MachineFacts, name: str, said: str | None, level: FitnessLevel) -> None:
    got = found(machine, name)
    assert got[1] == level
    assert said is None or got[0] == said
    assert fitness_rules.is_fit(judge_machine(machine)) is (level != "bad")


def test_amx_that_is_advertised_and_does_not_work() -> None:
    (row,) = [row for row in judge_machine(replace(GOOD, amx=False)) if row.key == "amx"]
    assert (row.level, row.step) == ("warn", Message("fit.amx.step"))


def test_what_is_not_ok_has_a_step_and_the_accelerators_own_comes_first() -> None:
    bad = device(
        persistence=False,
        processes=1,
        power_limit_w=1.0,
        ecc=False,
        mig=True,
        application_clock_mhz=1,
    )
    plain = {row.key: row.step for row in judge_machine(bad)}
    assert plain["mig"] == Message("fit.step.off")
    theirs = {row.key: row.step for row in judge_machine(replace(bad, steps=nvml.ADVICE))}
    assert theirs["mig"] == nvml.ADVICE["mig"]
    assert theirs["swap"] is None
    assert set(nvml.ADVICE) <= set(plain)
    assert all(row.step for row in judge_machine(bad) if row.level in ("warn", "bad"))


def settings(found: Record) -> list[Message | str]:
    """Return the notes of the record on settings that are not the default."""
    return [
        note for note in found.notes if isinstance(note, Message) and note.code == "note.setting"
    ]


def test_a_record_notes_what_was_set_otherwise() -> None:
    states = [
        DeviceState(**{**DEVICE, "power_limit_w": 400.0, "temperature_c": 99, "processes": 4})
    ]
    told = HostFacts(name="here", ranks=[0], state=HostState(**HOST, devices=states))
    found = made(facts=facts(hosts=[told]))
    what, limit = {"device": "cuda:0"}, {"limit": 400.0, "default": 700.0}
    said = {
        "host": "here",
        "what": Message("fit.name.power", what),
        "found": Message("fit.power.limit", limit),
    }
    assert settings(found) == [Message("note.setting", said)]
    good = HostFacts(name="here", ranks=[0], state=GOOD.host)
    assert settings(made(facts=facts(hosts=[good]))) == []
