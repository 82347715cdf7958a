"""Judge whether a machine is fit to measure: one rule for each fact, such as clocks, temperature or
free memory.

Behind `steelyard check`: `run/fitness.py` reads the facts, this module only judges them; it reads
and sets nothing. Validity notes device settings in a record by the same rules.
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

# distance to the temperature at which a device slows down: within the first warn, the second bad
COOL_C, HOT_C = 15, 5
HOT_ANYWHERE_C = 85  # for a device that does not report that temperature
SLACK = 0.01  # share; limits are reported in whole watts
SWAP_BYTES = 64 << 20  # a few pages of sleeping programs are always swapped out
MEMORY = {"bad": 0.1, "warn": 0.5}  # share of host memory that must be free, by level
DISK_BYTES = {"bad": 1 * GIB, "warn": 10 * GIB}
STEADY = "performance"  # the governor that keeps clocks high
# Clock sources of the kernel that are read without a system call, and those that take a microsecond
# or more for each reading.
QUICK = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase")
SLOW = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")


@dataclass(frozen=True)
class Row:
    """The verdict on one fact of the machine, with advice.

    `found` says what was found, `step` what to do about it (None if the level is ok, or nothing is
    known to help). `key` is the name under which an accelerator may bring advice of its own.
    """

    key: str
    name: Message
    found: Message
    level: Level
    step: Message | None = None


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """How one fact is judged.

    `verdict` returns what was found about a subject (a machine, a device or free bytes) and its
    level; None if it is unknown. `name` is the message code of the fact's name; what follows its
    last dot is the row's key.
    """

    name: str  # message code, such as fit.name.power
    verdict: Callable[[Subject], Verdict | None]
    step: Message | None = None  # advice for levels warn and bad

    def row(self, subject: Subject, values: Values | None = None) -> Row:
        """Judge a subject and return the row; its level is "unknown" if the fact is not known, and
        advice is added for warn and bad.

        `name_values` fill the template of the fact's name.
        """
        found, level = self.verdict(subject) or (Message("fit.unknown"), "unknown")
        step = self.step if level in ("warn", "bad") else None
        return Row(
            self.name.rpartition(".")[2], Message(self.name, values or {}), found, level, step
        )


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that are judged; None is unknown.

    `host` has the state of the host and of each device, `steps` the accelerator's own advice by row
    key. `others` is the share of CPU cores that other processes take now, judged by
    `contention_limits`.
    """

    accelerator: str
    devices: tuple[str, ...] = ()  # names, one for each device
    driver: str | None = None
    needs_driver: bool = False
    problem: str | None = None  # why devices could not be found
    host: HostState = field(default_factory=HostState)
    others: Share | None = None  # share of cores that other processes take now
    bounds: Bounds = CORES_ARE_THE_DEVICE
    free_bytes: Mapping[Disk, int | None] = field(default_factory=dict)  # by purpose of the folder
    versions: Mapping[str, str | None] = field(default_factory=dict)
    torch_build: str | None = None  # version of the vendor's runtime that torch was built for
    amx: bool | None = None
    steps: Mapping[str, Message] = field(default_factory=dict)


def judge(machine: Machine) -> list[Row]:
    """Return a row for every rule, in display order: accelerator, each device, host, disks,
    packages, AMX and kernel clock.

    Advice of the accelerator replaces the general advice; rows that are ok have none.
    """
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
    """Return whether no row is "bad"; warnings and unknown facts do not count."""
    return all(row.level != "bad" for row in rows)


def table(rows: list[Row]) -> list[dict[str, str | None]]:
    """Return the rows as `check --json` prints them: dicts of name, found, level and step, as
    English text; step is None without advice.
    """
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
    """Validity rule: yield a note for each device setting that was not at its default before the
    run: lowered application clocks or power limit, ECC off, MIG on.

    Records without host states get none.
    """
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
    """Return "bad" if `bad`, else "warn" if `warn`, else "ok"."""
    return "bad" if bad else "warn" if warn else "ok"


def _as_told(value: object) -> Message:
    """Return a message that shows a value as it is, such as what a driver or the kernel says."""
    return Message("fit.text", {"text": str(value)})


def _driver(machine: Machine) -> Verdict | None:
    """Judge the driver: bad if devices could not be found because of a problem, ok with its
    version, ok if none is needed; None if it is needed and its version unknown.
    """
    if machine.problem is not None:
        return _as_told(machine.problem), "bad"
    if machine.driver is not None:
        return _as_told(machine.driver), "ok"
    return None if machine.needs_driver else (Message("fit.driver.none"), "ok")


def _devices(machine: Machine) -> Verdict:
    """Judge the devices: bad if there are none, else ok with their number and names."""
    accelerator, names = machine.accelerator, tuple(dict.fromkeys(machine.devices))
    if not names:
        return Message("fit.devices.none", {"accelerator": accelerator}), "bad"
    count = len(machine.devices)
    return (
        Message("fit.devices.found", {"count": count, "accelerator": accelerator, "names": names}),
        "ok",
    )


def _switched_on(on: bool | None, off: Message) -> Verdict | None:
    """Judge a setting that should be on: ok, or warn with message `off`; None if it is unknown."""
    return None if on is None else (Message("fit.on"), "ok") if on else (off, "warn")


def _processes(device: DeviceState) -> Verdict | None:
    """Judge the number of compute processes on a device: bad if there is any; None if unknown."""
    count = device.processes
    return None if count is None else (_as_told(count), _level(count > 0, warn=False))


_CLOCKS = ("fit.clock.now", "fit.clock.most", "fit.clock.set", "fit.clock.default")


def _clocks(device: DeviceState) -> Verdict | None:
    """Judge a device's clocks (MHz): warn if its application clock is set below the default, else
    ok. The message lists the known ones; None if none is known.
    """
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
    """Judge a device's power limit (W): warn if it is more than 1 % below the default, "unknown" if
    there is no default; None if the limit is unknown.
    """
    limit, default = device.power_limit_w, device.power_default_w
    if limit is None:
        return None
    if default is None:
        return Message("fit.power.no_default", {"limit": limit}), "unknown"
    lowered = limit < default * (1 - SLACK)
    return Message("fit.power.limit", {"limit": limit, "default": default}), _level(False, lowered)


def _mig(device: DeviceState) -> Verdict | None:
    """Judge MIG mode: bad if it is on, ok if off; None if unknown."""
    if device.mig is None:
        return None
    return (Message("fit.mig.on"), "bad") if device.mig else (Message("fit.off"), "ok")


def _slowdown(device: DeviceState) -> Verdict | None:
    """Judge active clock slowdown reasons: bad if one of them would make a run invalid, else ok,
    also if others are active; None if the device does not report reasons.
    """
    if device.reasons is None:
        return None
    found = _as_told(", ".join(device.reasons)) if device.reasons else Message("fit.slowdown.none")
    return found, _level(bool(device.invalidating), warn=False)


def _temperature(device: DeviceState) -> Verdict | None:
    """Judge a device's temperature (°C): warn within 15 °C of its slowdown temperature, bad within
    5 °C; without a known one, bad from 85 °C on. None if unknown.
    """
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
    """Return a number as an "ok" verdict, which is shown and not judged; None if unknown."""
    return None if value is None else (_as_told(value), "ok")


def _load(machine: Machine) -> Verdict:
    """Judge the share of cores that other processes take, by the machine's contention limits: warn
    above `note_above`, bad above `invalid_above`, "unknown" if not measured. The message adds the
    load average, which is not judged.
    """
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
    """Judge the cores that this process may use: warn if a CPU quota is below those that its
    affinity allows; None if unknown.
    """
    allowed, cores, quota = machine.host.allowed, machine.host.cores, machine.host.quota
    if allowed is None or cores is None:
        return None
    if quota is None:
        return Message("fit.cores.whole", {"allowed": allowed, "cores": cores}), "ok"
    found = Message("fit.cores.quota", {"allowed": allowed, "cores": cores, "quota": quota})
    return found, _level(False, quota < allowed)


def _governor(machine: Machine) -> Verdict:
    """Judge the CPU frequency governors: warn unless all are "performance", "unknown" if the host
    shows none.
    """
    names = machine.host.governors
    if not names:
        return Message("fit.governor.none"), "unknown"
    return _as_told(", ".join(names)), _level(False, names != [STEADY])


def _swap(machine: Machine) -> Verdict | None:
    """Judge swap: warn if over 64 MiB are in use, else ok, also without swap; None if unknown."""
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
    """Judge free host memory: warn below 50 % of all, bad below 10 %; None if unknown."""
    whole, free = machine.host.memory_bytes, machine.host.available_bytes
    if not whole or free is None:
        return None
    found = Message("fit.memory.free", {"free": free / GIB, "whole": whole / GIB})
    return found, _level(free / whole < MEMORY["bad"], free / whole < MEMORY["warn"])


def _disk(free: int | None) -> Verdict | None:
    """Judge the free bytes of a disk: warn below 10 GiB, bad below 1 GiB; None if unknown."""
    if free is None:
        return None
    return Message("fit.disk.free", {"free": free / GIB}), _level(
        free < DISK_BYTES["bad"], free < DISK_BYTES["warn"]
    )


_DISKS: dict[Disk, str] = {"records": "fit.disk.records", "temporary": "fit.disk.temporary"}


def _package(machine: Machine, package: str, version: str | None) -> Row:
    """Return the row of a Python package: warn if it is not installed, else ok with its version.

    `torch` is also judged by whether the driver supports the runtime that it was built for, if a
    device reports that.
    """
    name = Message("fit.name.package", {"name": package})
    if version is None:
        step = Message("fit.package.step", {"name": package})
        return Row(package, name, Message("fit.package.missing"), "warn", step)
    served = next((device.runtime for device in machine.host.devices if device.runtime), None)
    if package != "torch" or served is None:
        return Row(package, name, _as_told(version), "ok")
    return _torch(Row(package, name, _as_told(version), "ok"), version, machine.torch_build, served)


def _torch(row: Row, version: str, build: str | None, served: str) -> Row:
    """Return torch's row judged by its CUDA build (or the like) and the newest runtime that the
    driver supports.

    Bad if torch was built without that runtime or for a newer major version; warn for a newer minor
    version, which still starts.
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
    """Return the numeric parts of a dotted version, for comparison; other parts are dropped."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _amx(machine: Machine) -> Verdict:
    """Judge the CPU's AMX: warn if it is there and broken, else ok, also without it."""
    if machine.amx is None:
        return Message("fit.amx.none"), "ok"
    return (Message("fit.amx.works"), "ok") if machine.amx else (Message("fit.amx.broken"), "warn")


def _clock(machine: Machine) -> Verdict | None:
    """Judge the kernel's clock source: ok if it is read without a system call, warn if it is slow,
    "unknown" for other names; None if unknown.
    """
    source = machine.host.clock_source
    level: Level = "ok" if source in QUICK else "warn" if source in SLOW else "unknown"
    return None if source is None else (_as_told(source), level)


ACCELERATOR: tuple[Rule[Machine], ...] = (
    Rule("fit.name.driver", _driver, Message("fit.driver.step")),
    Rule("fit.name.devices", _devices, Message("fit.devices.step")),
)
# A record notes only what a device was set to, not what changes by itself.
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
