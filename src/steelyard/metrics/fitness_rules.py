"""Judge whether a machine is fit to measure: one rule for each fact, such as clocks, temperature or
free memory.

Behind `steelyard check`: `run/machine_inspection.py` reads the facts, this module only judges them;
it reads and sets nothing. Validity notes device settings in a record by the same rules.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from steelyard import words
from steelyard.metrics.cpu_contention import CPU_IS_DEVICE_LIMITS, ContentionLimits, ContentionShare
from steelyard.metrics.result import GIB, Finding, make_note
from steelyard.record.record import Record, Value
from steelyard.record.run_facts import DeviceState, HostState
from steelyard.words import Message, MessageValues

DiskPurpose = Literal["records", "temporary"]
FitnessLevel = Literal["ok", "warn", "bad", "unknown"]
FactVerdict = tuple[Message, FitnessLevel]
Subject = TypeVar("Subject")

# distance to the temperature at which a device slows down: within the first warn, the second bad
WARM_MARGIN_C, HOT_MARGIN_C = 15, 5
HOT_ANYWHERE_C = 85  # for a device that does not report that temperature
POWER_SLACK = 0.01  # share; limits are reported in whole watts
MAX_SWAP_BYTES = 64 << 20  # a few pages of sleeping programs are always swapped out
MIN_FREE_MEMORY = {"bad": 0.1, "warn": 0.5}  # share of host memory that must be free, by level
MIN_FREE_DISK_BYTES = {"bad": 1 * GIB, "warn": 10 * GIB}
STEADY_GOVERNOR = "performance"  # the governor that keeps clocks high
# Clock sources of the kernel that are read without a system call, and those that take a microsecond
# or more for each reading.
QUICK_CLOCK_SOURCES = (
    "tsc",
    "kvm-clock",
    "arch_sys_counter",
    "hyperv_clocksource_tsc_page",
    "timebase",
)
SLOW_CLOCK_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen")


@dataclass(frozen=True)
class FitnessRow:
    """The verdict on one fact of the machine, with advice: a row of `steelyard check`, made by
    `FitnessRule.judge`.

    `name` names the fact and `found` says what was found, as messages. `level` is "ok", "warn",
    "bad" or "unknown". `step` is what to do about it; None if the level is ok, or nothing is known
    to help. `key` is the short name of the fact, such as "power", under which an accelerator may
    bring advice of its own.
    """

    key: str
    name: Message
    found: Message
    level: FitnessLevel
    step: Message | None = None


@dataclass(frozen=True)
class FitnessRule(Generic[Subject]):
    """How one fact is judged; `judge(subject)` returns its `FitnessRow` for a machine, a device or
    a number of free bytes.

    `verdict` is a function of the subject that returns (what was found, level), or None if the fact
    is unknown, which gives level "unknown". `name` is the message code of the fact's name, such as
    fit.name.power; what follows its last dot is the row's key. `step` is the advice for levels warn
    and bad, or None.
    """

    name: str  # message code, such as fit.name.power
    verdict: Callable[[Subject], FactVerdict | None]
    step: Message | None = None  # advice for levels warn and bad

    def judge(self, subject: Subject, name_values: MessageValues | None = None) -> FitnessRow:
        """Apply this fitness rule to a subject (a machine, a device or free bytes) and return its
        `FitnessRow`.

        If the rule's verdict is None, the level is "unknown" and `found` says so. The rule's advice
        is added for levels warn and bad only. `name_values` fill the template of the fact's name.
        """
        finding, level = self.verdict(subject) or (Message("fit.unknown"), "unknown")
        step = self.step if level in ("warn", "bad") else None
        return FitnessRow(
            self.name.rpartition(".")[2],
            Message(self.name, name_values or {}),
            finding,
            level,
            step,
        )


@dataclass(frozen=True)
class MachineFacts:
    """The facts of a machine that `judge_machine` judges, read by `run/machine_inspection.py`; None
    is unknown.

    `devices` has a name for each device of `accelerator`, `problem` says why none could be found;
    `driver` is its version, `needs_driver` whether it must have one. `host` has the state of the
    host and of each device. `others` is the share of CPU cores that other processes take now,
    judged by `contention_limits`. `free_bytes` of disk are by purpose ("records", "temporary").
    `versions` are those of Python packages by name (None: not installed), `torch_build` is the
    vendor runtime that torch was built for. `amx`: whether the CPU's matrix tiles work (None: it
    has none). `steps`: the accelerator's own advice by row key.
    """

    accelerator: str
    devices: tuple[str, ...] = ()  # names, one for each device
    driver: str | None = None
    needs_driver: bool = False
    problem: str | None = None  # why devices could not be found
    host: HostState = field(default_factory=HostState)
    others: ContentionShare | None = None  # share of cores that other processes take now
    contention_limits: ContentionLimits = CPU_IS_DEVICE_LIMITS
    free_bytes: Mapping[DiskPurpose, int | None] = field(
        default_factory=dict
    )  # by purpose of the folder
    versions: Mapping[str, str | None] = field(default_factory=dict)
    torch_build: str | None = None  # version of the vendor's runtime that torch was built for
    amx: bool | None = None
    steps: Mapping[str, Message] = field(default_factory=dict)


def judge_machine(machine: MachineFacts) -> list[FitnessRow]:
    """Return the rows of all rules, in display order: accelerator, each device, host, disks,
    packages, AMX and kernel clock. Nothing is read from the machine.

    Advice of the accelerator (`machine.steps`, by row key) replaces that of the rule in every row
    that is not ok, unknown ones included; rows that are ok have none.
    """
    disks = [
        (free, Message(_DISK_MESSAGES[disk_name])) for disk_name, free in machine.free_bytes.items()
    ]
    rows = [
        *(rule.judge(machine) for rule in ACCELERATOR_RULES),
        *(
            rule.judge(device, {"device": device.device})
            for device in machine.host.devices
            for rule in DEVICE_RULES
        ),
        *(rule.judge(machine) for rule in HOST_RULES),
        *(DISK_RULE.judge(free, {"what": disk_name}) for free, disk_name in disks),
        *(_judge_package(machine, name, version) for name, version in machine.versions.items()),
        *(rule.judge(machine) for rule in LAST_RULES),
    ]
    return [
        replace(row, step=None if row.level == "ok" else machine.steps.get(row.key, row.step))
        for row in rows
    ]


def is_fit(rows: list[FitnessRow]) -> bool:
    """Return whether no row is "bad"; warnings and unknown facts do not count."""
    return all(row.level != "bad" for row in rows)


def make_json_rows(rows: list[FitnessRow]) -> list[dict[str, str | None]]:
    """Return the rows as `check --json` prints them: dicts of name, found, level and step, as
    English text; step is None without advice.
    """
    return [
        {
            "name": words.render_text(row.name),
            "found": words.render_text(row.found),
            "level": row.level,
            "step": words.render_in_english(row.step),
        }
        for row in rows
    ]


def note_device_settings(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield a note for each setting of a device that was not at its default before
    the run: a lowered application clock or power limit, ECC off, MIG on. No checks.

    Unknown settings, and hosts without a state in the record, yield nothing. `metrics` is not used.
    """
    for host in record.hosts:
        for device in host.state.devices if host.state is not None else []:
            for row in (rule.judge(device, {"device": device.device}) for rule in SETTING_RULES):
                if row.level in ("warn", "bad"):
                    yield make_note(
                        Message(
                            "note.setting",
                            {"host": host.name, "what": row.name, "found": row.found},
                        )
                    )


def _choose_level(bad: bool, warn: bool) -> FitnessLevel:
    """Return "bad" if `bad`, else "warn" if `warn`, else "ok"."""
    return "bad" if bad else "warn" if warn else "ok"


def _make_text_message(value: object) -> Message:
    """Return a message that shows a value as it is, such as what a driver or the kernel says."""
    return Message("fit.text", {"text": str(value)})


def _judge_driver(machine: MachineFacts) -> FactVerdict | None:
    """Judge the accelerator's driver: bad with the problem's text if devices could not be looked
    for, else ok with its version, or ok if none is needed; None (unknown) if one is needed and its
    version is not known.
    """
    if machine.problem is not None:
        return _make_text_message(machine.problem), "bad"
    if machine.driver is not None:
        return _make_text_message(machine.driver), "ok"
    return None if machine.needs_driver else (Message("fit.driver.none"), "ok")


def _judge_devices(machine: MachineFacts) -> FactVerdict:
    """Judge the machine's devices: bad if there are none, else ok; the message has their number and
    their names, each once.
    """
    accelerator, device_names = machine.accelerator, tuple(dict.fromkeys(machine.devices))
    if not device_names:
        return Message("fit.devices.none", {"accelerator": accelerator}), "bad"
    count = len(machine.devices)
    return (
        Message(
            "fit.devices.found", {"count": count, "accelerator": accelerator, "names": device_names}
        ),
        "ok",
    )


def _judge_switch(is_on: bool | None, off_message: Message) -> FactVerdict | None:
    """Judge a setting that should be on: ok with the message "on", or warn with `off_message`; None
    if it is unknown (`is_on` is None).
    """
    return None if is_on is None else (Message("fit.on"), "ok") if is_on else (off_message, "warn")


def _judge_processes(device: DeviceState) -> FactVerdict | None:
    """Judge the number of compute processes on a device: bad if there is any, ok for 0; None if the
    device does not count them.
    """
    count = device.processes
    return (
        None if count is None else (_make_text_message(count), _choose_level(count > 0, warn=False))
    )


_CLOCK_MESSAGES = ("fit.clock.now", "fit.clock.most", "fit.clock.set", "fit.clock.default")


def _judge_clocks(device: DeviceState) -> FactVerdict | None:
    """Judge a device's clocks (MHz): warn if its application clock is set below the default, else
    ok. The message lists those known of: clock now, maximum, set, default; None if none is known.
    """
    set_to, default = device.application_clock_mhz, device.application_clock_default_mhz
    known = (device.sm_clock_mhz, device.sm_clock_max_mhz, set_to, default)
    parts = tuple(
        Message(code, {"mhz": mhz})
        for code, mhz in zip(_CLOCK_MESSAGES, known, strict=True)
        if mhz is not None
    )
    lowered = set_to is not None and default is not None and set_to < default
    return (
        (Message("fit.clock.listed", {"parts": parts}), _choose_level(False, lowered))
        if parts
        else None
    )


def _judge_power(device: DeviceState) -> FactVerdict | None:
    """Judge a device's power limit (W): warn if it is more than 1 % below the default, else ok;
    level "unknown" if the default is not known. None if the limit is unknown.
    """
    limit, default = device.power_limit_w, device.power_default_w
    if limit is None:
        return None
    if default is None:
        return Message("fit.power.no_default", {"limit": limit}), "unknown"
    lowered = limit < default * (1 - POWER_SLACK)
    return Message("fit.power.limit", {"limit": limit, "default": default}), _choose_level(
        False, lowered
    )


def _judge_mig(device: DeviceState) -> FactVerdict | None:
    """Judge a device's MIG mode, its division into parts: bad if it is on, ok if off; None if
    unknown.
    """
    if device.mig is None:
        return None
    return (Message("fit.mig.on"), "bad") if device.mig else (Message("fit.off"), "ok")


def _judge_slowdown(device: DeviceState) -> FactVerdict | None:
    """Judge the reasons for a low clock that are active on a device: bad if one of them would make
    a run invalid (`device.invalidating`), else ok. The message lists all active ones; None if the
    device does not report reasons.
    """
    if device.reasons is None:
        return None
    finding = (
        _make_text_message(", ".join(device.reasons))
        if device.reasons
        else Message("fit.slowdown.none")
    )
    return finding, _choose_level(bool(device.invalidating), warn=False)


def _judge_temperature(device: DeviceState) -> FactVerdict | None:
    """Judge a device's temperature (°C): warn from 15 °C below its slowdown temperature on, bad
    from 5 °C below; if that is not known, bad from 85 °C on and never warn. None if the temperature
    is unknown.
    """
    temperature_c, limit_c = device.temperature_c, device.slowdown_c
    if temperature_c is None:
        return None
    if limit_c is None:
        return Message("fit.temperature.alone", {"now": temperature_c}), _choose_level(
            temperature_c >= HOT_ANYWHERE_C, warn=False
        )
    finding = Message("fit.temperature.limit", {"now": temperature_c, "limit": limit_c})
    return finding, _choose_level(
        temperature_c >= limit_c - HOT_MARGIN_C, temperature_c >= limit_c - WARM_MARGIN_C
    )


def _show_number(value: int | None) -> FactVerdict | None:
    """Return a number as an "ok" verdict, which is shown and not judged; None if unknown."""
    return None if value is None else (_make_text_message(value), "ok")


def _judge_load(machine: MachineFacts) -> FactVerdict:
    """Judge the share of cores that other processes take: warn above the machine's limit
    `note_above`, bad above `invalid_above`, level "unknown" with the reason if it was not measured.
    The message adds the load average of a minute, if known, which is not judged.
    """
    load, taken, bounds = machine.host.load_1m, machine.others, machine.contention_limits
    average = None if load is None else Message("fit.load.average", {"load": load})
    if taken is None or taken.value is None:
        why = (
            taken.why
            if taken is not None and taken.why is not None
            else Message("fit.load.not_measured")
        )
        unknown = Message("fit.load.unknown", {"why": why})
        return words.join_messages(unknown, average) or unknown, "unknown"
    taken_message = Message("fit.load.taken", {"share": taken.value})
    return words.join_messages(taken_message, average) or taken_message, _choose_level(
        taken.value > bounds.invalid_above, taken.value > bounds.note_above
    )


def _judge_cores(machine: MachineFacts) -> FactVerdict | None:
    """Judge the CPU cores that this process may use: warn if a CPU quota is below the number that
    its affinity allows, else ok; None if the numbers of allowed or of all cores are unknown.
    """
    allowed, cores, quota = machine.host.allowed, machine.host.cores, machine.host.quota
    if allowed is None or cores is None:
        return None
    if quota is None:
        return Message("fit.cores.whole", {"allowed": allowed, "cores": cores}), "ok"
    finding = Message("fit.cores.quota", {"allowed": allowed, "cores": cores, "quota": quota})
    return finding, _choose_level(False, quota < allowed)


def _judge_governor(machine: MachineFacts) -> FactVerdict:
    """Judge the CPU frequency governors in use: ok if "performance" is the only one, else warn;
    level "unknown" if the host shows none.
    """
    names = machine.host.governors
    if not names:
        return Message("fit.governor.none"), "unknown"
    return _make_text_message(", ".join(names)), _choose_level(False, names != [STEADY_GOVERNOR])


def _judge_swap(machine: MachineFacts) -> FactVerdict | None:
    """Judge the host's swap: warn if more than 64 MiB are in use, else ok, also without swap; None
    if its size or use is unknown.
    """
    total_bytes, used_bytes = machine.host.swap_bytes, machine.host.swap_used_bytes
    if total_bytes is None or used_bytes is None:
        return None
    finding = (
        Message("fit.swap.used", {"used": used_bytes / GIB, "whole": total_bytes / GIB})
        if total_bytes
        else Message("fit.swap.none")
    )
    return finding, _choose_level(False, used_bytes > MAX_SWAP_BYTES)


def _judge_memory(machine: MachineFacts) -> FactVerdict | None:
    """Judge the host's available memory: warn below 50 % of all memory, bad below 10 %, else ok;
    None if either is unknown.
    """
    total_bytes, free_bytes = machine.host.memory_bytes, machine.host.available_bytes
    if not total_bytes or free_bytes is None:
        return None
    finding = Message("fit.memory.free", {"free": free_bytes / GIB, "whole": total_bytes / GIB})
    return finding, _choose_level(
        free_bytes / total_bytes < MIN_FREE_MEMORY["bad"],
        free_bytes / total_bytes < MIN_FREE_MEMORY["warn"],
    )


def _judge_disk(free_bytes: int | None) -> FactVerdict | None:
    """Judge the free bytes of the disk of a folder: warn below 10 GiB, bad below 1 GiB, else ok;
    None if unknown.
    """
    if free_bytes is None:
        return None
    return Message("fit.disk.free", {"free": free_bytes / GIB}), _choose_level(
        free_bytes < MIN_FREE_DISK_BYTES["bad"], free_bytes < MIN_FREE_DISK_BYTES["warn"]
    )


_DISK_MESSAGES: dict[DiskPurpose, str] = {
    "records": "fit.disk.records",
    "temporary": "fit.disk.temporary",
}


def _judge_package(machine: MachineFacts, package: str, version: str | None) -> FitnessRow:
    """Return the row of a Python package of the accelerator, whose key is the package's name: warn
    with advice to install it if `version` is None, else ok with its version.

    `torch` is judged by `_judge_torch` if a device reports the newest runtime that its driver
    supports.
    """
    name = Message("fit.name.package", {"name": package})
    if version is None:
        step = Message("fit.package.step", {"name": package})
        return FitnessRow(package, name, Message("fit.package.missing"), "warn", step)
    driver_runtime = next(
        (device.runtime for device in machine.host.devices if device.runtime), None
    )
    if package != "torch" or driver_runtime is None:
        return FitnessRow(package, name, _make_text_message(version), "ok")
    return _judge_torch(
        FitnessRow(package, name, _make_text_message(version), "ok"),
        version,
        machine.torch_build,
        driver_runtime,
    )


def _judge_torch(
    row: FitnessRow, version: str, built_runtime: str | None, driver_runtime: str
) -> FitnessRow:
    """Return a copy of torch's row, judged by the runtime (CUDA or the like) that torch was built
    for and the newest that the driver supports, both dotted versions.

    Bad if torch was built without one (`built_runtime` is None) or for a newer major version, warn
    for a newer minor version, which still starts, else ok. `step` is set in every case.
    """
    if built_runtime is None:
        without = Message("fit.torch.without", {"version": version})
        return replace(row, found=without, level="bad", step=Message("fit.torch.another"))
    supported, built_for = _parse_version(driver_runtime), _parse_version(built_runtime)
    finding = Message(
        "fit.torch.built", {"version": version, "built": built_runtime, "served": driver_runtime}
    )
    return replace(
        row,
        found=finding,
        level=_choose_level(built_for[:1] > supported[:1], built_for > supported),
        step=Message("fit.torch.step"),
    )


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the numeric parts of a dotted version, for comparison; other parts are dropped."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _judge_amx(machine: MachineFacts) -> FactVerdict:
    """Judge the CPU's matrix tiles (AMX): warn if it advertises them and they do not work, else ok;
    `machine.amx` is None if it advertises none.
    """
    if machine.amx is None:
        return Message("fit.amx.none"), "ok"
    return (Message("fit.amx.works"), "ok") if machine.amx else (Message("fit.amx.broken"), "warn")


def _judge_clock_source(machine: MachineFacts) -> FactVerdict | None:
    """Judge the kernel's clock source by its name: ok if it is read without a system call, warn if
    it is one of the slow ones, level "unknown" for other names; None if the name is not known.
    """
    source = machine.host.clock_source
    level: FitnessLevel = (
        "ok"
        if source in QUICK_CLOCK_SOURCES
        else "warn"
        if source in SLOW_CLOCK_SOURCES
        else "unknown"
    )
    return None if source is None else (_make_text_message(source), level)


ACCELERATOR_RULES: tuple[FitnessRule[MachineFacts], ...] = (
    FitnessRule("fit.name.driver", _judge_driver, Message("fit.driver.step")),
    FitnessRule("fit.name.devices", _judge_devices, Message("fit.devices.step")),
)
# A record notes only what a device was set to, not what changes by itself.
_POWER_RULE = FitnessRule("fit.name.power", _judge_power, Message("fit.step.back"))
_ECC_RULE = FitnessRule[DeviceState](
    "fit.name.ecc",
    lambda device: _judge_switch(device.ecc, Message("fit.ecc.off")),
    Message("fit.step.on"),
)
_MIG_RULE = FitnessRule("fit.name.mig", _judge_mig, Message("fit.step.off"))
_SET_CLOCKS_RULE = FitnessRule[DeviceState](
    "fit.name.clocks",
    lambda device: _judge_clocks(
        device.model_copy(update={"sm_clock_mhz": None, "sm_clock_max_mhz": None})
    ),
)
SETTING_RULES: tuple[FitnessRule[DeviceState], ...] = (
    _SET_CLOCKS_RULE,
    _POWER_RULE,
    _ECC_RULE,
    _MIG_RULE,
)
DEVICE_RULES: tuple[FitnessRule[DeviceState], ...] = (
    FitnessRule(
        "fit.name.persistence",
        lambda device: _judge_switch(device.persistence, Message("fit.persistence.off")),
        Message("fit.step.on"),
    ),
    FitnessRule("fit.name.processes", _judge_processes, Message("fit.processes.step")),
    FitnessRule("fit.name.clocks", _judge_clocks, Message("fit.step.back")),
    _POWER_RULE,
    _ECC_RULE,
    _MIG_RULE,
    FitnessRule("fit.name.slowdown", _judge_slowdown, Message("fit.slowdown.step")),
    FitnessRule("fit.name.temperature", _judge_temperature, Message("fit.temperature.step")),
    FitnessRule("fit.name.attached", lambda device: _show_number(device.numa_node)),
)
HOST_RULES: tuple[FitnessRule[MachineFacts], ...] = (
    FitnessRule("fit.name.load", _judge_load, Message("fit.load.step")),
    FitnessRule("fit.name.cores", _judge_cores, Message("fit.cores.step")),
    FitnessRule("fit.name.numa", lambda machine: _show_number(machine.host.numa_nodes)),
    FitnessRule(
        "fit.name.governor",
        _judge_governor,
        Message("fit.governor.step", {"governor": STEADY_GOVERNOR}),
    ),
    FitnessRule("fit.name.memory", _judge_memory, Message("fit.memory.step")),
    FitnessRule("fit.name.swap", _judge_swap, Message("fit.swap.step")),
)
DISK_RULE = FitnessRule("fit.name.disk", _judge_disk, Message("fit.disk.step"))
LAST_RULES: tuple[FitnessRule[MachineFacts], ...] = (
    FitnessRule("fit.name.amx", _judge_amx, Message("fit.amx.step")),
    FitnessRule("fit.name.clock", _judge_clock_source, Message("fit.clock.step")),
)
