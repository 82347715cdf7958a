"""Whether a machine is fit to measure: facts judged, one row each. Nothing is read here, and
nothing is set anywhere.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from steelyard import words
from steelyard.metrics.busy import CORES_ARE_THE_DEVICE, Bounds, Share
from steelyard.metrics.result import GIB, Finding, note
from steelyard.record.facts import DeviceState, HostState
from steelyard.record.record import Record, Value
from steelyard.words import Message, Values

Disk = Literal["records", "temporary"]
Level = Literal["ok", "warn", "bad", "unknown"]
Verdict = tuple[Message, Level]
Subject = TypeVar("Subject")

# below the temperature at which a device slows down: less is worth a warning, and too hot
COOL_C, HOT_C = 15, 5
HOT_ANYWHERE_C = 85  # where a device does not tell that temperature
SLACK = 0.01  # limits are told in whole watts
SWAP_BYTES = 64 << 20  # a few pages of programs that sleep are always there
MEMORY = {"bad": 0.1, "warn": 0.5}  # the least share that is free
DISK_BYTES = {"bad": 1 * GIB, "warn": 10 * GIB}
STEADY = "performance"  # the governor that keeps a clock up
# Clocks of the kernel that are read without leaving the process, and those that take a microsecond
# or more each time.
QUICK = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase")
SLOW = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")


@dataclass(frozen=True)
class Row:
    """A finding, and what helps where it is not ok. `key` names it in an accelerator's own steps."""

    key: str
    name: Message
    found: Message
    level: Level
    step: Message | None = None


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """A fact to judge. `verdict` returns what was found of a subject and its level, or None if that
    is not known."""

    name: str  # the code of its name, which ends in its key
    verdict: Callable[[Subject], Verdict | None]
    step: Message | None = None  # what helps where the level is warn or bad

    def row(self, subject: Subject, values: Values | None = None) -> Row:
        """Judge a subject. `values` are those of the name."""
        found, level = self.verdict(subject) or (Message("fit.unknown"), "unknown")
        step = self.step if level in ("warn", "bad") else None
        return Row(
            self.name.rpartition(".")[2], Message(self.name, values or {}), found, level, step
        )


@dataclass(frozen=True)
class Machine:
    """What was read. None is what is not known."""

    accelerator: str
    devices: tuple[str, ...] = ()  # their names
    driver: str | None = None
    needs_driver: bool = False
    problem: str | None = None  # why devices could not be found
    host: HostState = field(default_factory=HostState)
    others: Share | None = None  # what processes take of the cores now
    bounds: Bounds = CORES_ARE_THE_DEVICE
    free_bytes: Mapping[Disk, int | None] = field(default_factory=dict)  # by what a folder is for
    versions: Mapping[str, str | None] = field(default_factory=dict)
    torch_build: str | None = None  # of the vendor's runtime
    amx: bool | None = None
    steps: Mapping[str, Message] = field(default_factory=dict)


def judge(machine: Machine) -> list[Row]:
    """Every row in order. What helps on this accelerator is its own row's to say."""
    disks = [(free, Message(_DISKS[what])) for what, free in machine.free_bytes.items()]
    rows = [
        *(rule.row(machine) for rule in ACCELERATOR),
        *(
            rule.row(device, {"device": device.device})
            for device in machine.host.devices
            for rule in DEVICE
        ),
        *(rule.row(machine) for rule in HOST),
        *(DISK.row(free, {"what": what}) for free, what in disks),
        *(_package(machine, name, version) for name, version in machine.versions.items()),
        *(rule.row(machine) for rule in LAST),
    ]
    return [
        replace(row, step=None if row.level == "ok" else machine.steps.get(row.key, row.step))
        for row in rows
    ]


def fit(rows: list[Row]) -> bool:
    return all(row.level != "bad" for row in rows)


def table(rows: list[Row]) -> list[dict[str, str | None]]:
    """In English, as `--json` prints it."""
    return [
        {
            "name": words.text(row.name),
            "found": words.text(row.found),
            "level": row.level,
            "step": words.in_english(row.step),
        }
        for row in rows
    ]


def noted(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Note what of a run's devices was set otherwise than they come, before it began."""
    for host in record.hosts:
        for device in host.state.devices if host.state is not None else []:
            for row in (rule.row(device, {"device": device.device}) for rule in SETTINGS):
                if row.level in ("warn", "bad"):
                    yield note(
                        Message(
                            "note.setting",
                            {"host": host.name, "what": row.name, "found": row.found},
                        )
                    )


def _level(bad: bool, warn: bool) -> Level:
    return "bad" if bad else "warn" if warn else "ok"


def _as_told(value: object) -> Message:
    """Return what a driver, a package or the kernel says."""
    return Message("fit.text", {"text": str(value)})


def _driver(machine: Machine) -> Verdict | None:
    if machine.problem is not None:
        return _as_told(machine.problem), "bad"
    if machine.driver is not None:
        return _as_told(machine.driver), "ok"
    return None if machine.needs_driver else (Message("fit.driver.none"), "ok")


def _devices(machine: Machine) -> Verdict:
    accelerator, names = machine.accelerator, tuple(dict.fromkeys(machine.devices))
    if not names:
        return Message("fit.devices.none", {"accelerator": accelerator}), "bad"
    count = len(machine.devices)
    return (
        Message("fit.devices.found", {"count": count, "accelerator": accelerator, "names": names}),
        "ok",
    )


def _switched_on(on: bool | None, off: Message) -> Verdict | None:
    """Judge a switch that is better on."""
    return None if on is None else (Message("fit.on"), "ok") if on else (off, "warn")


def _processes(device: DeviceState) -> Verdict | None:
    count = device.processes
    return None if count is None else (_as_told(count), _level(count > 0, warn=False))


_CLOCKS = ("fit.clock.now", "fit.clock.most", "fit.clock.set", "fit.clock.default")


def _clocks(device: DeviceState) -> Verdict | None:
    set_to, default = device.application_clock_mhz, device.application_clock_default_mhz
    known = (device.sm_clock_mhz, device.sm_clock_max_mhz, set_to, default)
    parts = tuple(
        Message(code, {"mhz": mhz})
        for code, mhz in zip(_CLOCKS, known, strict=True)
        if mhz is not None
    )
    lowered = set_to is not None and default is not None and set_to < default
    return (
        (Message("fit.clock.listed", {"parts": parts}), _level(False, lowered)) if parts else None
    )


def _power(device: DeviceState) -> Verdict | None:
    limit, default = device.power_limit_w, device.power_default_w
    if limit is None:
        return None
    if default is None:
        return Message("fit.power.no_default", {"limit": limit}), "unknown"
    lowered = limit < default * (1 - SLACK)
    return Message("fit.power.limit", {"limit": limit, "default": default}), _level(False, lowered)


def _mig(device: DeviceState) -> Verdict | None:
    if device.mig is None:
        return None
    return (Message("fit.mig.on"), "bad") if device.mig else (Message("fit.off"), "ok")


def _slowdown(device: DeviceState) -> Verdict | None:
    if device.reasons is None:
        return None
    found = _as_told(", ".join(device.reasons)) if device.reasons else Message("fit.slowdown.none")
    return found, _level(bool(device.invalidating), warn=False)


def _temperature(device: DeviceState) -> Verdict | None:
    now, limit = device.temperature_c, device.slowdown_c
    if now is None:
        return None
    if limit is None:
        return Message("fit.temperature.alone", {"now": now}), _level(
            now >= HOT_ANYWHERE_C, warn=False
        )
    found = Message("fit.temperature.limit", {"now": now, "limit": limit})
    return found, _level(now >= limit - HOT_C, now >= limit - COOL_C)


def _count(value: int | None) -> Verdict | None:
    """Judge a number that is only told."""
    return None if value is None else (_as_told(value), "ok")


def _load(machine: Machine) -> Verdict:
    load, taken, bounds = machine.host.load_1m, machine.others, machine.bounds
    average = None if load is None else Message("fit.load.average", {"load": load})
    if taken is None or taken.value is None:
        why = (
            taken.why
            if taken is not None and taken.why is not None
            else Message("fit.load.not_measured")
        )
        unknown = Message("fit.load.unknown", {"why": why})
        return words.both(unknown, average) or unknown, "unknown"
    said = Message("fit.load.taken", {"share": taken.value})
    return words.both(said, average) or said, _level(
        taken.value > bounds.most, taken.value > bounds.note
    )


def _cores(machine: Machine) -> Verdict | None:
    allowed, cores, quota = machine.host.allowed, machine.host.cores, machine.host.quota
    if allowed is None or cores is None:
        return None
    if quota is None:
        return Message("fit.cores.whole", {"allowed": allowed, "cores": cores}), "ok"
    found = Message("fit.cores.quota", {"allowed": allowed, "cores": cores, "quota": quota})
    return found, _level(False, quota < allowed)


def _governor(machine: Machine) -> Verdict:
    names = machine.host.governors
    if not names:
        return Message("fit.governor.none"), "unknown"
    return _as_told(", ".join(names)), _level(False, names != [STEADY])


def _swap(machine: Machine) -> Verdict | None:
    whole, used = machine.host.swap_bytes, machine.host.swap_used_bytes
    if whole is None or used is None:
        return None
    found = (
        Message("fit.swap.used", {"used": used / GIB, "whole": whole / GIB})
        if whole
        else Message("fit.swap.none")
    )
    return found, _level(False, used > SWAP_BYTES)


def _memory(machine: Machine) -> Verdict | None:
    whole, free = machine.host.memory_bytes, machine.host.available_bytes
    if not whole or free is None:
        return None
    found = Message("fit.memory.free", {"free": free / GIB, "whole": whole / GIB})
    return found, _level(free / whole < MEMORY["bad"], free / whole < MEMORY["warn"])


def _disk(free: int | None) -> Verdict | None:
    if free is None:
        return None
    return Message("fit.disk.free", {"free": free / GIB}), _level(
        free < DISK_BYTES["bad"], free < DISK_BYTES["warn"]
    )


_DISKS: dict[Disk, str] = {"records": "fit.disk.records", "temporary": "fit.disk.temporary"}


def _package(machine: Machine, package: str, version: str | None) -> Row:
    name = Message("fit.name.package", {"name": package})
    if version is None:
        step = Message("fit.package.step", {"name": package})
        return Row(package, name, Message("fit.package.missing"), "warn", step)
    served = next((device.runtime for device in machine.host.devices if device.runtime), None)
    if package != "torch" or served is None:
        return Row(package, name, _as_told(version), "ok")
    return _torch(Row(package, name, _as_told(version), "ok"), version, machine.torch_build, served)


def _torch(row: Row, version: str, build: str | None, served: str) -> Row:
    """A torch that was built for a newer runtime than the driver serves does not start; of the same
    major version it does.
    """
    if build is None:
        without = Message("fit.torch.without", {"version": version})
        return replace(row, found=without, level="bad", step=Message("fit.torch.another"))
    newest, ours = _numbers(served), _numbers(build)
    found = Message("fit.torch.built", {"version": version, "built": build, "served": served})
    return replace(
        row,
        found=found,
        level=_level(ours[:1] > newest[:1], ours > newest),
        step=Message("fit.torch.step"),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _amx(machine: Machine) -> Verdict:
    if machine.amx is None:
        return Message("fit.amx.none"), "ok"
    return (Message("fit.amx.works"), "ok") if machine.amx else (Message("fit.amx.broken"), "warn")


def _clock(machine: Machine) -> Verdict | None:
    source = machine.host.clock_source
    level: Level = "ok" if source in QUICK else "warn" if source in SLOW else "unknown"
    return None if source is None else (_as_told(source), level)


ACCELERATOR: tuple[Rule[Machine], ...] = (
    Rule("fit.name.driver", _driver, Message("fit.driver.step")),
    Rule("fit.name.devices", _devices, Message("fit.devices.step")),
)
# What a record notes of a device: what it was set to, and nothing that changes by itself.
_POWER = Rule("fit.name.power", _power, Message("fit.step.back"))
_ECC = Rule[DeviceState](
    "fit.name.ecc",
    lambda device: _switched_on(device.ecc, Message("fit.ecc.off")),
    Message("fit.step.on"),
)
_MIG = Rule("fit.name.mig", _mig, Message("fit.step.off"))
_SET_CLOCKS = Rule[DeviceState](
    "fit.name.clocks",
    lambda device: _clocks(
        device.model_copy(update={"sm_clock_mhz": None, "sm_clock_max_mhz": None})
    ),
)
SETTINGS: tuple[Rule[DeviceState], ...] = (_SET_CLOCKS, _POWER, _ECC, _MIG)
DEVICE: tuple[Rule[DeviceState], ...] = (
    Rule(
        "fit.name.persistence",
        lambda device: _switched_on(device.persistence, Message("fit.persistence.off")),
        Message("fit.step.on"),
    ),
    Rule("fit.name.processes", _processes, Message("fit.processes.step")),
    Rule("fit.name.clocks", _clocks, Message("fit.step.back")),
    _POWER,
    _ECC,
    _MIG,
    Rule("fit.name.slowdown", _slowdown, Message("fit.slowdown.step")),
    Rule("fit.name.temperature", _temperature, Message("fit.temperature.step")),
    Rule("fit.name.attached", lambda device: _count(device.numa_node)),
)
HOST: tuple[Rule[Machine], ...] = (
    Rule("fit.name.load", _load, Message("fit.load.step")),
    Rule("fit.name.cores", _cores, Message("fit.cores.step")),
    Rule("fit.name.numa", lambda machine: _count(machine.host.numa_nodes)),
    Rule("fit.name.governor", _governor, Message("fit.governor.step", {"governor": STEADY})),
    Rule("fit.name.memory", _memory, Message("fit.memory.step")),
    Rule("fit.name.swap", _swap, Message("fit.swap.step")),
)
DISK = Rule("fit.name.disk", _disk, Message("fit.disk.step"))
LAST: tuple[Rule[Machine], ...] = (
    Rule("fit.name.amx", _amx, Message("fit.amx.step")),
    Rule("fit.name.clock", _clock, Message("fit.clock.step")),
)
