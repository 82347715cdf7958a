"""Whether a machine is fit to measure: facts judged, one row each. Nothing is read here, and nothing is set anywhere."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from steelyard.metrics.busy import CORES_ARE_THE_DEVICE, Bounds, Share
from steelyard.metrics.result import GIB, Finding
from steelyard.record.facts import DeviceState, HostState
from steelyard.record.record import Record, Value

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
    """A finding, and what helps where it is not ok."""

    name: str
    found: str
    level: Level
    step: str | None = None


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
    free_bytes: Mapping[str, int | None] = field(default_factory=dict)  # by what a folder is for
    versions: Mapping[str, str | None] = field(default_factory=dict)
    torch_build: str | None = None  # of the vendor's runtime
    amx: bool | None = None
    steps: Mapping[str, str] = field(default_factory=dict)


def judge(machine: Machine) -> list[Row]:
    """Every row in order. What helps on this accelerator is its own row's to say."""
    rows = [row for rule in RULES for row in rule(machine)]
    return [replace(row, step=_step(machine, row)) for row in rows]


def fit(rows: list[Row]) -> bool:
    return all(row.level != "bad" for row in rows)


def table(rows: list[Row]) -> list[dict[str, str | None]]:
    return [asdict(row) for row in rows]


def noted(record: Record, values: dict[str, Value]) -> list[Finding]:
    """What of a run's devices was set otherwise than they come, before it began."""
    out: list[Finding] = []
    for host in record.hosts:
        for device in host.state.devices if host.state is not None else []:
            rows = [rule(device) for rule in _SETTINGS]
            out += [(None, None, f"host {host.name}: {row.name}: {row.found}") for row in rows if row.level in ("warn", "bad")]
    return out


def _step(machine: Machine, row: Row) -> str | None:
    return None if row.level == "ok" else machine.steps.get(row.name.partition(" of ")[0], row.step)


def _driver(machine: Machine) -> list[Row]:
    if machine.problem is not None:
        return [Row("driver", machine.problem, "bad", "mend the driver")]
    if machine.driver is None:
        return [Row("driver", "unknown", "unknown") if machine.needs_driver else Row("driver", "none is needed", "ok")]
    return [Row("driver", machine.driver, "ok")]


def _devices(machine: Machine) -> list[Row]:
    if not machine.devices:
        return [
            Row("devices", f"no {machine.accelerator} device", "bad", "see steelyard list, or choose another --accelerator")
        ]
    return [Row("devices", f"{len(machine.devices)} {machine.accelerator}: {', '.join(dict.fromkeys(machine.devices))}", "ok")]


def _each_device(machine: Machine) -> list[Row]:
    return [rule(device) for device in machine.host.devices for rule in _OF_DEVICE]


def _persistence(device: DeviceState) -> Row:
    name, on = f"persistence mode of {device.device}", device.persistence
    if on is None:
        return Row(name, "unknown", "unknown")
    return Row(name, "on", "ok") if on else Row(name, "off: each process starts the driver anew", "warn", "turn it on")


def _processes(device: DeviceState) -> Row:
    name, count = f"processes on the device of {device.device}", device.processes
    if count is None:
        return Row(name, "unknown", "unknown")
    return Row(name, str(count), "bad" if count else "ok", "wait for them to end" if count else None)


def _clocks(device: DeviceState) -> Row:
    name = f"device clocks of {device.device}"
    now, most, set_to, default = (
        device.sm_clock_mhz,
        device.sm_clock_max_mhz,
        device.application_clock_mhz,
        device.application_clock_default_mhz,
    )
    parts = [("now", now), ("at most", most), ("set to", set_to), ("default", default)]
    text = ", ".join(f"{word} {value:g} MHz" for word, value in parts if value is not None)
    if not text:
        return Row(name, "unknown", "unknown")
    lowered = set_to is not None and default is not None and set_to < default
    return Row(name, text, "warn" if lowered else "ok", "set them back" if lowered else None)


def _application_clocks(device: DeviceState) -> Row:
    """Without what changes by itself."""
    still = DeviceState(
        device=device.device,
        application_clock_mhz=device.application_clock_mhz,
        application_clock_default_mhz=device.application_clock_default_mhz,
    )
    return _clocks(still)


def _power(device: DeviceState) -> Row:
    name, limit, default = f"power limit of {device.device}", device.power_limit_w, device.power_default_w
    if limit is None or default is None:
        return Row(name, "unknown" if limit is None else f"{limit:g} W; the default is unknown", "unknown")
    text = f"{limit:g} W; the default is {default:g} W"
    lowered = limit < default * (1 - SLACK)
    return Row(name, text, "warn" if lowered else "ok", "set it back" if lowered else None)


def _ecc(device: DeviceState) -> Row:
    name, on = f"ECC of {device.device}", device.ecc
    if on is None:
        return Row(name, "unknown", "unknown")
    return Row(name, "on", "ok") if on else Row(name, "off: errors of its memory are not seen", "warn", "turn it on")


def _mig(device: DeviceState) -> Row:
    name, on = f"MIG of {device.device}", device.mig
    if on is None:
        return Row(name, "unknown", "unknown")
    return Row(name, "on: the device is divided", "bad", "turn it off") if on else Row(name, "off", "ok")


def _slowdown(device: DeviceState) -> Row:
    name, seen = f"slowdown reasons of {device.device}", device.reasons
    if seen is None:
        return Row(name, "unknown", "unknown")
    hard = device.invalidating or []
    return Row(name, ", ".join(seen) or "none", "bad" if hard else "ok", "cool it, and see its power supply" if hard else None)


def _temperature(device: DeviceState) -> Row:
    name, now, limit = f"temperature of {device.device}", device.temperature_c, device.slowdown_c
    if now is None:
        return Row(name, "unknown", "unknown")
    text = f"{now:g} °C; it slows down at {'an unknown one' if limit is None else f'{limit:g} °C'}"
    hot = limit - HOT_C if limit is not None else HOT_ANYWHERE_C
    warm = limit - COOL_C if limit is not None else HOT_ANYWHERE_C
    level: Level = "bad" if now >= hot else "warn" if now >= warm else "ok"
    return Row(name, text, level, None if level == "ok" else "let it cool down, and see its fans")


def _attached(device: DeviceState) -> Row:
    name, node = f"NUMA node of {device.device}", device.numa_node
    return Row(name, "unknown" if node is None else str(node), "unknown" if node is None else "ok")


def _load(machine: Machine) -> list[Row]:
    load, taken = machine.host.load_1m, machine.others
    average = "" if load is None else f"; load average {load:g}"
    if taken is None or taken.value is None:
        return [Row("host load", f"unknown: {taken.why if taken is not None else 'not measured'}{average}", "unknown")]
    text = f"processes use {taken.value:.1%} of the cores that a run may use{average}"
    level: Level = "bad" if taken.value > machine.bounds.most else "warn" if taken.value > machine.bounds.note else "ok"
    return [Row("host load", text, level, None if level == "ok" else "end what else runs here; top shows it")]


def _cores(machine: Machine) -> list[Row]:
    host = machine.host
    if host.allowed is None or host.cores is None:
        return [Row("cores", "unknown", "unknown")]
    text = f"{host.allowed} of {host.cores} by affinity; " + (
        "no quota" if host.quota is None else f"a quota of {host.quota:g} by the control group"
    )
    throttled = host.quota is not None and host.quota < host.allowed
    step = "give the container whole cores (an affinity): threads beyond a quota are stopped in turn" if throttled else None
    return [Row("cores", text, "warn" if throttled else "ok", step)]


def _numa(machine: Machine) -> list[Row]:
    nodes = machine.host.numa_nodes
    return [Row("NUMA nodes", "unknown" if nodes is None else str(nodes), "unknown" if nodes is None else "ok")]


def _governor(machine: Machine) -> list[Row]:
    names = machine.host.governors
    if not names:
        return [Row("CPU governor", "unknown: the kernel shows none, as in most virtual machines", "unknown")]
    steady = names == [STEADY]
    step = None if steady else f"ask the operator for {STEADY}: cpupower frequency-set -g {STEADY}"
    return [Row("CPU governor", ", ".join(names), "ok" if steady else "warn", step)]


def _swap(machine: Machine) -> list[Row]:
    whole, used = machine.host.swap_bytes, machine.host.swap_used_bytes
    if whole is None or used is None:
        return [Row("swap", "unknown", "unknown")]
    text = "none" if not whole else f"{used / GIB:.1f} of {whole / GIB:.1f} GiB in use"
    much = used > SWAP_BYTES
    return [Row("swap", text, "warn" if much else "ok", "free memory, then swapoff -a && swapon -a" if much else None)]


def _memory(machine: Machine) -> list[Row]:
    whole, free = machine.host.memory_bytes, machine.host.available_bytes
    if not whole or free is None:
        return [Row("free memory", "unknown", "unknown")]
    share = free / whole
    level: Level = "bad" if share < MEMORY["bad"] else "warn" if share < MEMORY["warn"] else "ok"
    text = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB"
    return [Row("free memory", text, level, None if level == "ok" else "end what else runs here")]


def _disk(machine: Machine) -> list[Row]:
    out = []
    for what, free in machine.free_bytes.items():
        if free is None:
            out.append(Row(f"free disk for {what}", "unknown", "unknown"))
            continue
        level: Level = "bad" if free < DISK_BYTES["bad"] else "warn" if free < DISK_BYTES["warn"] else "ok"
        step = None if level == "ok" else "make room, or name another folder: --out, TMPDIR"
        out.append(Row(f"free disk for {what}", f"{free / GIB:.1f} GiB", level, step))
    return out


def _versions(machine: Machine) -> list[Row]:
    out = []
    for name, version in machine.versions.items():
        missing = f"pip install {name}, for engines that stand on it"
        out.append(Row(name, version or "not installed", "ok" if version else "warn", None if version else missing))
    return [_built(machine, row) if row.name == "torch" and row.level == "ok" else row for row in out]


def _built(machine: Machine, row: Row) -> Row:
    """A torch that was built for a newer runtime than the driver serves does not start; of the same major version it does."""
    serves = next((device.runtime for device in machine.host.devices if device.runtime), None)
    if serves is None:
        return row
    if machine.torch_build is None:
        return replace(row, found=f"{row.found}, built without the device's runtime", level="bad", step="install another torch")
    built, served = _numbers(machine.torch_build), _numbers(serves)
    text = f"{row.found}, built for {machine.torch_build}; the driver serves {serves}"
    level: Level = "bad" if built[:1] > served[:1] else "warn" if built > served else "ok"
    return replace(row, found=text, level=level, step=None if level == "ok" else "install a torch for this driver")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _amx(machine: Machine) -> list[Row]:
    if machine.amx is None:
        return [Row("AMX", "not advertised", "ok")]
    if machine.amx:
        return [Row("AMX", "works", "ok")]
    text = "advertised and does not work: a matmul in bf16 ends in an illegal instruction"
    return [Row("AMX", text, "warn", "runs do without it; the host's hypervisor is to blame")]


def _clock(machine: Machine) -> list[Row]:
    source = machine.host.clock_source
    level: Level = "ok" if source in QUICK else "warn" if source in SLOW else "unknown"
    step = "see why the kernel does not trust tsc: dmesg | grep -i clocksource" if level == "warn" else None
    return [Row("clock source", source or "unknown", level, step)]


_OF_DEVICE: tuple[Callable[[DeviceState], Row], ...] = (
    *(_persistence, _processes, _clocks, _power, _ecc, _mig, _slowdown, _temperature, _attached),
)
_SETTINGS: tuple[Callable[[DeviceState], Row], ...] = (_application_clocks, _power, _ecc, _mig)
RULES: tuple[Callable[[Machine], list[Row]], ...] = (
    *(_driver, _devices, _each_device, _load, _cores, _numa, _governor, _memory, _swap, _disk, _versions, _amx, _clock),
)
