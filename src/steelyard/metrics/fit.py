"""Whether a machine is fit to measure: facts judged, one row each. Nothing is read here, and nothing is set anywhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from steelyard import words
from steelyard.metrics.busy import CORES_ARE_THE_DEVICE, Bounds, Share
from steelyard.metrics.result import GIB, Finding, note
from steelyard.record.facts import DeviceState, HostState
from steelyard.record.record import Record, Value
from steelyard.words import Message, Values

Disk = Literal["records", "temporary"]
Level = Literal["ok", "warn", "bad", "unknown"]

COOL_C, HOT_C = 15, 5  # below the temperature at which a device slows down: less is worth a warning, and too hot
HOT_ANYWHERE_C = 85  # where a device does not tell that temperature
SLACK = 0.01  # limits are told in whole watts
SWAP_BYTES = 64 << 20  # a few pages of programs that sleep are always there
MEMORY = {"bad": 0.1, "warn": 0.5}  # the least share that is free
DISK_BYTES = {"bad": 1 * GIB, "warn": 10 * GIB}
STEADY = "performance"  # the governor that keeps a clock up
# Clocks of the kernel that are read without leaving the process, and those that take a microsecond or more each time.
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
    rows = [row for rule in RULES for row in rule(machine)]
    return [replace(row, step=_step(machine, row)) for row in rows]


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


def noted(record: Record, values: dict[str, Value]) -> list[Finding]:
    """What of a run's devices was set otherwise than they come, before it began."""
    out: list[Finding] = []
    for host in record.hosts:
        for device in host.state.devices if host.state is not None else []:
            rows = [rule(device) for rule in _SETTINGS]
            wrong = [row for row in rows if row.level in ("warn", "bad")]
            out += [note(Message("note.setting", {"host": host.name, "what": row.name, "found": row.found})) for row in wrong]
    return out


def _step(machine: Machine, row: Row) -> Message | None:
    return None if row.level == "ok" else machine.steps.get(row.key, row.step)


def _unknown(key: str, name: Message) -> Row:
    return Row(key, name, Message("fit.unknown"), "unknown")


def _as_told(text: str) -> Message:
    """What a driver, a package or the kernel says."""
    return Message("fit.text", {"text": text})


def _driver(machine: Machine) -> list[Row]:
    key, name = "driver", Message("fit.name.driver")
    if machine.problem is not None:
        return [Row(key, name, _as_told(machine.problem), "bad", Message("fit.driver.step"))]
    if machine.driver is None:
        return [_unknown(key, name) if machine.needs_driver else Row(key, name, Message("fit.driver.none"), "ok")]
    return [Row(key, name, _as_told(machine.driver), "ok")]


def _devices(machine: Machine) -> list[Row]:
    key, name, accelerator = "devices", Message("fit.name.devices"), machine.accelerator
    if not machine.devices:
        return [Row(key, name, Message("fit.devices.none", {"accelerator": accelerator}), "bad", Message("fit.devices.step"))]
    names = tuple(dict.fromkeys(machine.devices))
    told: Values = {"count": len(machine.devices), "accelerator": accelerator, "names": names}
    return [Row(key, name, Message("fit.devices.found", told), "ok")]


def _each_device(machine: Machine) -> list[Row]:
    return [rule(device) for device in machine.host.devices for rule in _OF_DEVICE]


def _better_on(key: str, name: Message, on: bool | None, off: Message) -> Row:
    if on is None:
        return _unknown(key, name)
    return Row(key, name, Message("fit.on"), "ok") if on else Row(key, name, off, "warn", Message("fit.step.on"))


def _persistence(device: DeviceState) -> Row:
    name = Message("fit.name.persistence", {"device": device.device})
    return _better_on("persistence", name, device.persistence, Message("fit.persistence.off"))


def _processes(device: DeviceState) -> Row:
    key, name, count = "processes", Message("fit.name.processes", {"device": device.device}), device.processes
    if count is None:
        return _unknown(key, name)
    found = _as_told(str(count))
    return Row(key, name, found, "bad", Message("fit.processes.step")) if count else Row(key, name, found, "ok")


def _clocks(device: DeviceState) -> Row:
    key, name = "clocks", Message("fit.name.clocks", {"device": device.device})
    set_to, default = device.application_clock_mhz, device.application_clock_default_mhz
    known = (device.sm_clock_mhz, device.sm_clock_max_mhz, set_to, default)
    parts = tuple(Message(code, {"mhz": mhz}) for code, mhz in zip(_CLOCKS, known, strict=True) if mhz is not None)
    if not parts:
        return _unknown(key, name)
    lowered = set_to is not None and default is not None and set_to < default
    found = Message("fit.clock.listed", {"parts": parts})
    return Row(key, name, found, "warn", Message("fit.step.back")) if lowered else Row(key, name, found, "ok")


_CLOCKS = ("fit.clock.now", "fit.clock.most", "fit.clock.set", "fit.clock.default")


def _application_clocks(device: DeviceState) -> Row:
    """Without what changes by itself."""
    still = DeviceState(
        device=device.device,
        application_clock_mhz=device.application_clock_mhz,
        application_clock_default_mhz=device.application_clock_default_mhz,
    )
    return _clocks(still)


def _power(device: DeviceState) -> Row:
    key, name = "power", Message("fit.name.power", {"device": device.device})
    limit, default = device.power_limit_w, device.power_default_w
    if limit is None:
        return _unknown(key, name)
    if default is None:
        return Row(key, name, Message("fit.power.no_default", {"limit": limit}), "unknown")
    found = Message("fit.power.limit", {"limit": limit, "default": default})
    lowered = limit < default * (1 - SLACK)
    return Row(key, name, found, "warn", Message("fit.step.back")) if lowered else Row(key, name, found, "ok")


def _ecc(device: DeviceState) -> Row:
    return _better_on("ecc", Message("fit.name.ecc", {"device": device.device}), device.ecc, Message("fit.ecc.off"))


def _mig(device: DeviceState) -> Row:
    key, name, on = "mig", Message("fit.name.mig", {"device": device.device}), device.mig
    if on is None:
        return _unknown(key, name)
    if on:
        return Row(key, name, Message("fit.mig.on"), "bad", Message("fit.step.off"))
    return Row(key, name, Message("fit.off"), "ok")


def _slowdown(device: DeviceState) -> Row:
    key, name, seen = "slowdown", Message("fit.name.slowdown", {"device": device.device}), device.reasons
    if seen is None:
        return _unknown(key, name)
    found = _as_told(", ".join(seen)) if seen else Message("fit.slowdown.none")
    return Row(key, name, found, "bad", Message("fit.slowdown.step")) if device.invalidating else Row(key, name, found, "ok")


def _temperature(device: DeviceState) -> Row:
    key, name = "temperature", Message("fit.name.temperature", {"device": device.device})
    now, limit = device.temperature_c, device.slowdown_c
    if now is None:
        return _unknown(key, name)
    found = Message("fit.temperature.alone", {"now": now})
    if limit is not None:
        found = Message("fit.temperature.limit", {"now": now, "limit": limit})
    hot = limit - HOT_C if limit is not None else HOT_ANYWHERE_C
    warm = limit - COOL_C if limit is not None else HOT_ANYWHERE_C
    level: Level = "bad" if now >= hot else "warn" if now >= warm else "ok"
    return Row(key, name, found, level, None if level == "ok" else Message("fit.temperature.step"))


def _attached(device: DeviceState) -> Row:
    key, name, node = "attached", Message("fit.name.attached", {"device": device.device}), device.numa_node
    return _unknown(key, name) if node is None else Row(key, name, _as_told(str(node)), "ok")


def _load(machine: Machine) -> list[Row]:
    key, name, load, taken = "load", Message("fit.name.load"), machine.host.load_1m, machine.others
    average = None if load is None else Message("fit.load.average", {"load": load})
    if taken is None or taken.value is None:
        why = taken.why if taken is not None and taken.why is not None else Message("fit.load.not_measured")
        unknown = Message("fit.load.unknown", {"why": why})
        return [Row(key, name, words.both(unknown, average) or unknown, "unknown")]
    said = Message("fit.load.taken", {"share": taken.value})
    level: Level = "bad" if taken.value > machine.bounds.most else "warn" if taken.value > machine.bounds.note else "ok"
    return [Row(key, name, words.both(said, average) or said, level, None if level == "ok" else Message("fit.load.step"))]


def _cores(machine: Machine) -> list[Row]:
    key, name, host = "cores", Message("fit.name.cores"), machine.host
    if host.allowed is None or host.cores is None:
        return [_unknown(key, name)]
    told = {"allowed": host.allowed, "cores": host.cores}
    if host.quota is None:
        return [Row(key, name, Message("fit.cores.whole", told), "ok")]
    found = Message("fit.cores.quota", {**told, "quota": host.quota})
    throttled = host.quota < host.allowed
    return [Row(key, name, found, "warn", Message("fit.cores.step")) if throttled else Row(key, name, found, "ok")]


def _numa(machine: Machine) -> list[Row]:
    key, name, nodes = "numa", Message("fit.name.numa"), machine.host.numa_nodes
    return [_unknown(key, name) if nodes is None else Row(key, name, _as_told(str(nodes)), "ok")]


def _governor(machine: Machine) -> list[Row]:
    key, name, names = "governor", Message("fit.name.governor"), machine.host.governors
    if not names:
        return [Row(key, name, Message("fit.governor.none"), "unknown")]
    found = _as_told(", ".join(names))
    step = Message("fit.governor.step", {"governor": STEADY})
    return [Row(key, name, found, "ok") if names == [STEADY] else Row(key, name, found, "warn", step)]


def _swap(machine: Machine) -> list[Row]:
    key, name = "swap", Message("fit.name.swap")
    whole, used = machine.host.swap_bytes, machine.host.swap_used_bytes
    if whole is None or used is None:
        return [_unknown(key, name)]
    found = Message("fit.swap.used", {"used": used / GIB, "whole": whole / GIB}) if whole else Message("fit.swap.none")
    much = used > SWAP_BYTES
    return [Row(key, name, found, "warn", Message("fit.swap.step")) if much else Row(key, name, found, "ok")]


def _memory(machine: Machine) -> list[Row]:
    key, name = "memory", Message("fit.name.memory")
    whole, free = machine.host.memory_bytes, machine.host.available_bytes
    if not whole or free is None:
        return [_unknown(key, name)]
    share = free / whole
    level: Level = "bad" if share < MEMORY["bad"] else "warn" if share < MEMORY["warn"] else "ok"
    found = Message("fit.memory.free", {"free": free / GIB, "whole": whole / GIB})
    return [Row(key, name, found, level, None if level == "ok" else Message("fit.memory.step"))]


def _disk(machine: Machine) -> list[Row]:
    out = []
    for what, free in machine.free_bytes.items():
        key, name = "disk", Message("fit.name.disk", {"what": Message(_DISKS[what])})
        if free is None:
            out.append(_unknown(key, name))
            continue
        level: Level = "bad" if free < DISK_BYTES["bad"] else "warn" if free < DISK_BYTES["warn"] else "ok"
        found = Message("fit.disk.free", {"free": free / GIB})
        out.append(Row(key, name, found, level, None if level == "ok" else Message("fit.disk.step")))
    return out


_DISKS: dict[Disk, str] = {"records": "fit.disk.records", "temporary": "fit.disk.temporary"}


def _versions(machine: Machine) -> list[Row]:
    out = []
    for package, version in machine.versions.items():
        name = Message("fit.name.package", {"name": package})
        if version is None:
            step = Message("fit.package.step", {"name": package})
            out.append(Row(package, name, Message("fit.package.missing"), "warn", step))
        else:
            row = Row(package, name, _as_told(version), "ok")
            out.append(_built(machine, row, version) if package == "torch" else row)
    return out


def _built(machine: Machine, row: Row, version: str) -> Row:
    """A torch that was built for a newer runtime than the driver serves does not start; of the same major version it does."""
    serves = next((device.runtime for device in machine.host.devices if device.runtime), None)
    if serves is None:
        return row
    if machine.torch_build is None:
        without = Message("fit.torch.without", {"version": version})
        return replace(row, found=without, level="bad", step=Message("fit.torch.another"))
    built, served = _numbers(machine.torch_build), _numbers(serves)
    found = Message("fit.torch.built", {"version": version, "built": machine.torch_build, "served": serves})
    level: Level = "bad" if built[:1] > served[:1] else "warn" if built > served else "ok"
    return replace(row, found=found, level=level, step=None if level == "ok" else Message("fit.torch.step"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _amx(machine: Machine) -> list[Row]:
    key, name = "amx", Message("fit.name.amx")
    if machine.amx is None:
        return [Row(key, name, Message("fit.amx.none"), "ok")]
    if machine.amx:
        return [Row(key, name, Message("fit.amx.works"), "ok")]
    return [Row(key, name, Message("fit.amx.broken"), "warn", Message("fit.amx.step"))]


def _clock(machine: Machine) -> list[Row]:
    key, name, source = "clock", Message("fit.name.clock"), machine.host.clock_source
    if source is None:
        return [_unknown(key, name)]
    level: Level = "ok" if source in QUICK else "warn" if source in SLOW else "unknown"
    return [Row(key, name, _as_told(source), level, Message("fit.clock.step") if level == "warn" else None)]


_OF_DEVICE: tuple[Callable[[DeviceState], Row], ...] = (
    *(_persistence, _processes, _clocks, _power, _ecc, _mig, _slowdown, _temperature, _attached),
)
_SETTINGS: tuple[Callable[[DeviceState], Row], ...] = (_application_clocks, _power, _ecc, _mig)
RULES: tuple[Callable[[Machine], list[Row]], ...] = (
    *(_driver, _devices, _each_device, _load, _cores, _numa, _governor, _memory, _swap, _disk, _versions, _amx, _clock),
)
