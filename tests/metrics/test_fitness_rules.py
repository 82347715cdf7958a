"""Fitness of a machine for measuring, from made facts: each row that is not ok, the step that
helps, and the settings that a record notes.
"""

from dataclasses import replace
from typing import Any

import pytest

from fixtures.golden import golden
from metrics.test_metric_table import make_mmlu_record, make_run_facts
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
FIT_MACHINE = MachineFacts(
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


def make_machine_with_host(**changes: Any) -> MachineFacts:
    """Return the fit machine with changed facts of its host."""
    return replace(
        FIT_MACHINE, host=HostState(**{**HOST, "devices": FIT_MACHINE.host.devices, **changes})
    )


def make_machine_with_device(**changes: Any) -> MachineFacts:
    """Return the fit machine with changed facts of its device."""
    return replace(
        FIT_MACHINE, host=HostState(**HOST, devices=[DeviceState(**{**DEVICE, **changes})])
    )


def find_row(machine: MachineFacts, name: str) -> tuple[str, FitnessLevel]:
    """Return the text and the level of the machine's row `name`."""
    (row,) = [row for row in judge_machine(machine) if render_text(row.name) == name]
    return render_text(row.found), row.level


def test_a_machine_that_is_fit() -> None:
    rows = judge_machine(FIT_MACHINE)
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
def test_device_rows(
    change: dict[str, Any], name: str, said: str | None, level: FitnessLevel
) -> None:
    row = find_row(
        make_machine_with_device(**change), f"{name} {'on' if name == 'processes' else 'of'} cuda:0"
    )
    assert row[1] == level
    assert said is None or row[0] == said
    assert fitness_rules.is_fit(judge_machine(make_machine_with_device(**change))) is (
        level != "bad"
    )


def test_unknown_device_facts_do_not_make_a_machine_unfit() -> None:
    rows = judge_machine(
        replace(FIT_MACHINE, host=HostState(**HOST, devices=[DeviceState(device="cuda:0")]))
    )
    assert {row.level for row in rows if render_text(row.name).endswith("of cuda:0")} == {"unknown"}
    assert fitness_rules.is_fit(rows)


@pytest.mark.parametrize(
    ("machine", "name", "said", "level"),
    [
        (
            make_machine_with_host(quota=8.0),
            "cores",
            "64 of 64 by affinity; a control-group quota of 8",
            "warn",
        ),
        (make_machine_with_host(governors=["powersave"]), "CPU governor", "powersave", "warn"),
        (
            make_machine_with_host(governors=["performance", "schedutil"]),
            "CPU governor",
            "performance, schedutil",
            "warn",
        ),
        (
            make_machine_with_host(governors=None),
            "CPU governor",
            "unknown: the kernel shows none, as in most virtual machines",
            "unknown",
        ),
        (
            make_machine_with_host(swap_bytes=8 * GIB, swap_used_bytes=GIB),
            "swap",
            "1.0 of 8.0 GiB in use",
            "warn",
        ),
        (
            make_machine_with_host(swap_bytes=8 * GIB, swap_used_bytes=1),
            "swap",
            "0.0 of 8.0 GiB in use",
            "ok",
        ),
        (
            make_machine_with_host(available_bytes=40 * GIB),
            "free memory",
            "40.0 of 100.0 GiB",
            "warn",
        ),
        (make_machine_with_host(available_bytes=9 * GIB), "free memory", "9.0 of 100.0 GiB", "bad"),
        (make_machine_with_host(clock_source="hpet"), "clock source", "hpet", "warn"),
        (make_machine_with_host(clock_source="new"), "clock source", "new", "unknown"),
        (make_machine_with_host(clock_source=None), "clock source", "unknown", "unknown"),
        (replace(FIT_MACHINE, others=ContentionShare(0.3, 1.0)), "host load", None, "warn"),
        (replace(FIT_MACHINE, others=ContentionShare(0.8, 1.0)), "host load", None, "bad"),
        (
            replace(FIT_MACHINE, others=None),
            "host load",
            "unknown: not measured; load average 0.5",
            "unknown",
        ),
        (
            replace(FIT_MACHINE, others=ContentionShare(None, why=Message("busy.not_counted"))),
            "host load",
            "unknown: the host does not count what its cores do; load average 0.5",
            "unknown",
        ),
        (
            replace(FIT_MACHINE, free_bytes={"records": 5 * GIB}),
            "free disk for records",
            "5.0 GiB",
            "warn",
        ),
        (
            replace(FIT_MACHINE, free_bytes={"records": GIB - 1}),
            "free disk for records",
            "1.0 GiB",
            "bad",
        ),
        (
            replace(FIT_MACHINE, free_bytes={"records": None}),
            "free disk for records",
            "unknown",
            "unknown",
        ),
        (
            replace(FIT_MACHINE, versions={"transformers": None}),
            "transformers",
            "not installed",
            "warn",
        ),
        (
            replace(FIT_MACHINE, torch_build="12.9"),
            "torch",
            "2.8.0, built for 12.9; the driver supports 12.8",
            "warn",
        ),
        (
            replace(FIT_MACHINE, torch_build="13.0"),
            "torch",
            "2.8.0, built for 13.0; the driver supports 12.8",
            "bad",
        ),
        (
            replace(FIT_MACHINE, torch_build="11.8"),
            "torch",
            "2.8.0, built for 11.8; the driver supports 12.8",
            "ok",
        ),
        (
            replace(FIT_MACHINE, torch_build=None),
            "torch",
            "2.8.0, built without the runtime of the device",
            "bad",
        ),
        (replace(FIT_MACHINE, amx=None), "AMX", "not advertised", "ok"),
        (replace(FIT_MACHINE, problem="NVML: no"), "driver", "NVML: no", "bad"),
        (replace(FIT_MACHINE, driver=None), "driver", "unknown", "unknown"),
        (replace(FIT_MACHINE, driver=None, needs_driver=False), "driver", "not needed", "ok"),
        (replace(FIT_MACHINE, devices=()), "devices", "no cuda device", "bad"),
    ],
)
def test_host_rows(machine: MachineFacts, name: str, said: str | None, level: FitnessLevel) -> None:
    row = find_row(machine, name)
    assert row[1] == level
    assert said is None or row[0] == said
    assert fitness_rules.is_fit(judge_machine(machine)) is (level != "bad")


def test_amx_that_is_advertised_and_does_not_work() -> None:
    (row,) = [row for row in judge_machine(replace(FIT_MACHINE, amx=False)) if row.key == "amx"]
    assert (row.level, row.step) == ("warn", Message("fit.amx.step"))


def test_rows_that_are_not_ok_have_a_step_from_the_accelerator_first() -> None:
    bad = make_machine_with_device(
        persistence=False,
        processes=1,
        power_limit_w=1.0,
        ecc=False,
        mig=True,
        application_clock_mhz=1,
    )
    default_steps = {row.key: row.step for row in judge_machine(bad)}
    assert default_steps["mig"] == Message("fit.step.off")
    accelerator_steps = {
        row.key: row.step for row in judge_machine(replace(bad, steps=nvml.ADVICE))
    }
    assert accelerator_steps["mig"] == nvml.ADVICE["mig"]
    assert accelerator_steps["swap"] is None
    assert set(nvml.ADVICE) <= set(default_steps)
    assert all(row.step for row in judge_machine(bad) if row.level in ("warn", "bad"))


def list_setting_notes(record: Record) -> list[Message | str]:
    """Return the notes of the record on settings that are not the default."""
    return [
        note for note in record.notes if isinstance(note, Message) and note.code == "note.setting"
    ]


def test_a_record_notes_settings_that_differ_from_the_default() -> None:
    states = [
        DeviceState(**{**DEVICE, "power_limit_w": 400.0, "temperature_c": 99, "processes": 4})
    ]
    host_facts = HostFacts(name="here", ranks=[0], state=HostState(**HOST, devices=states))
    record = make_mmlu_record(facts=make_run_facts(hosts=[host_facts]))
    name_values, limit_values = {"device": "cuda:0"}, {"limit": 400.0, "default": 700.0}
    values = {
        "host": "here",
        "what": Message("fit.name.power", name_values),
        "found": Message("fit.power.limit", limit_values),
    }
    assert list_setting_notes(record) == [Message("note.setting", values)]
    good = HostFacts(name="here", ranks=[0], state=FIT_MACHINE.host)
    assert list_setting_notes(make_mmlu_record(facts=make_run_facts(hosts=[good]))) == []
