"""NVIDIA devices as the parent and node agents see them: found and read through NVML, without
torch.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steelyard.accelerators.row import (
    DetectedDevice,
    DeviceSettings,
    Reading,
    Severity,
    TelemetrySource,
)
from steelyard.errors import RequestError
from steelyard.words import Message


@dataclass(frozen=True)
class ClockReason:
    """A reason why an NVIDIA device's clock is below its maximum: `bit`, the one bit of NVML's
    mask, `name` in records, such as sw_power_cap, and `severity`, what it means for a run:
    `nothing`, `note`, or `invalidates`. All are in `CLOCK_REASONS`.
    """

    bit: int
    name: str
    severity: Severity


# nvml.h, nvmlClocksEventReasons. Running at the power limit is normal for large matmuls; heat and
# power brakes are not.
CLOCK_REASONS = (
    ClockReason(0x001, "gpu_idle", "nothing"),
    ClockReason(0x002, "applications_clocks", "nothing"),
    ClockReason(0x004, "sw_power_cap", "note"),
    ClockReason(0x008, "hw_slowdown", "invalidates"),
    ClockReason(0x010, "sync_boost", "nothing"),
    ClockReason(0x020, "sw_thermal_slowdown", "invalidates"),
    ClockReason(0x040, "hw_thermal_slowdown", "invalidates"),
    ClockReason(0x080, "hw_power_brake_slowdown", "invalidates"),
    ClockReason(0x100, "display_clock", "nothing"),
    ClockReason(0x200, "board_limit", "note"),
    ClockReason(0x400, "reliability", "note"),
)
SEVERITY: dict[str, Severity] = {reason.name: reason.severity for reason in CLOCK_REASONS}


def list_reason_names(mask: int) -> list[str]:
    """Return the name of every set bit of NVML's mask of clock reasons, lowest bit first; a bit
    that is not in `CLOCK_REASONS` is named `unknown_0x…`. Empty for 0.
    """
    known = {reason.bit: reason.name for reason in CLOCK_REASONS}
    bits = [1 << position for position in range(mask.bit_length()) if mask >> position & 1]
    return [known.get(bit, f"unknown_{bit:#x}") for bit in bits]


def _import_pynvml() -> Any:
    """Import pynvml now, not with this module, and return it, so that the tables of this module can
    be used without it. Raises ImportError if it is not installed.
    """
    import pynvml

    return pynvml


def find_nvidia_devices(visible: str | None) -> list[DetectedDevice]:
    """Return the devices that a CUDA program would see if CUDA_VISIBLE_DEVICES had the value
    `visible` (None: unset), in its order; empty without an NVIDIA driver, and for "" or "-1", for
    which NVML is not asked. NVML is opened and closed again.

    Plain indices are NVML's, which are those of CUDA_DEVICE_ORDER=PCI_BUS_ID: workers must run with
    that set. Raises RequestError if NVML fails, or for a MIG device; ImportError without pynvml.
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    nvml = _import_pynvml()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return []  # a machine without such devices
    except nvml.NVMLError as error:
        raise _make_nvml_error(error) from error
    try:
        return select_visible(_list_devices(nvml), visible)
    except nvml.NVMLError as error:
        raise _make_nvml_error(error) from error
    finally:
        nvml.nvmlShutdown()


def _make_nvml_error(error: Exception) -> RequestError:
    """Return the RequestError for a failure of NVML, with what to do."""
    return RequestError(
        f"NVML: {str(error).rstrip('.')}; fix the driver, or set CUDA_VISIBLE_DEVICES= to run"
        " without NVIDIA devices"
    )


def _list_devices(nvml: Any) -> list[DetectedDevice]:
    """Return all NVIDIA devices of this machine, in NVML's order, with name, UUID, memory (None if
    the device does not tell), index and driver version. NVML must be initialized; its errors are
    raised.
    """
    driver = nvml.nvmlSystemGetDriverVersion()
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _call_first(
            nvml, handle, (lambda api, device: api.nvmlDeviceGetMemoryInfo(device).total,)
        )
        devices.append(
            DetectedDevice(
                nvml.nvmlDeviceGetName(handle),
                nvml.nvmlDeviceGetUUID(handle),
                memory,
                index,
                driver,
            )
        )
    return devices


def select_visible(devices: list[DetectedDevice], visible: str | None) -> list[DetectedDevice]:
    """Return the devices that CUDA_VISIBLE_DEVICES=`visible` leaves, in its order, by CUDA's own
    rules: nothing after the first entry that names no device; no device at all if one is named
    twice. None leaves all. Raises RequestError for a MIG device.
    """
    if visible is None:
        return devices
    chosen: list[DetectedDevice] = []
    for entry in visible.split(","):
        device = _find_visible(devices, entry.strip())
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
    return chosen


def _find_visible(devices: list[DetectedDevice], entry: str) -> DetectedDevice | None:
    """Return the device that one entry of CUDA_VISIBLE_DEVICES names, by NVML's index or by a
    beginning of its UUID (GPU-…) that only one device has; None if there is none or several. Raises
    RequestError for a MIG device (MIG-…).
    """
    if entry.startswith("MIG-"):
        raise RequestError(f"CUDA_VISIBLE_DEVICES names {entry!r}, a MIG device; use whole devices")
    if entry.startswith("GPU-"):
        matches = [
            device
            for device in devices
            if device.uuid is not None and device.uuid.startswith(entry)
        ]
        return matches[0] if len(matches) == 1 else None
    return next((device for device in devices if str(device.index) == entry), None)


MAX_VERSION_BYTES = 64 << 10  # read of torch's version.py
_CUDA_VERSION_LINE = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)

NvmlCall = Callable[[Any, Any], Any]

# Each column and the calls that give it, the preferred one first: drivers and devices lack some.
# Memory without the driver's own reserve (v2) is what nvidia-smi shows.
TELEMETRY_CALLS: dict[str, tuple[NvmlCall, ...]] = {
    "memory_bytes": (
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device, nvml.nvmlMemory_v2).used,
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used,
    ),
    "sm_clock_mhz": (lambda nvml, device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),),
    "memory_clock_mhz": (
        lambda nvml, device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
    ),
    "power_w": (lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,),
    "energy_j": (lambda nvml, device: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,),
    "temperature_c": (
        lambda nvml, device: nvml.nvmlDeviceGetTemperatureV(device, nvml.NVML_TEMPERATURE_GPU),
        lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
    ),
    "reasons": (
        lambda nvml, device: list_reason_names(nvml.nvmlDeviceGetCurrentClocksEventReasons(device)),
        lambda nvml, device: list_reason_names(
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
        ),
    ),
    "processes": (lambda nvml, device: len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device)),),
}


# The energy counter takes the driver 4 ms of a core (H200), a hundred times any other reading: read
# five times a second it would cost 2 % of a core for each device. Energy is taken between two
# readings, so that one every two seconds is enough.
SLOW_COLUMNS = ("energy_j",)
SLOW_INTERVAL = 10


def read_free_device_bytes(devices: list[DetectedDevice]) -> list[int | None]:
    """Return, for each NVIDIA device in the given order, its memory less what is in use on it by
    any process, in bytes; None if either is unknown. Initializes NVML, which stays open; NVML's
    errors are raised if it cannot be initialized.
    """
    used = [source.read(())["memory_bytes"] for source in make_sources(devices)]
    return [
        (
            device.memory_bytes - used_bytes
            if device.memory_bytes is not None and isinstance(used_bytes, int)
            else None
        )
        for device, used_bytes in zip(devices, used, strict=True)
    ]


def make_sources(devices: list[DetectedDevice]) -> list[TelemetrySource]:
    """Return a telemetry source for each device, named `cuda:0`, `cuda:1`, … by position.
    Initializes NVML, which stays open until the process ends; NVML's errors are raised.

    The energy counter is read at every tenth reading, more rarely from four devices on; `read_all`
    always reads it.
    """
    nvml = _import_pynvml()
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(device.index) for device in devices]
    readers = [
        NvmlReader(nvml, handle, SLOW_INTERVAL * max(1, len(devices) // 2)) for handle in handles
    ]
    return [
        TelemetrySource(f"cuda:{rank}", reader, read_all=reader.read_all)
        for rank, reader in enumerate(readers)
    ]


# Settings that can change the speed of a device. Watts and degrees as nvidia-smi shows them.
SETTING_CALLS: dict[str, tuple[NvmlCall, ...]] = {
    "persistence": (
        lambda nvml, device: nvml.nvmlDeviceGetPersistenceMode(device) == nvml.NVML_FEATURE_ENABLED,
    ),
    "processes": TELEMETRY_CALLS["processes"],
    "sm_clock_mhz": TELEMETRY_CALLS["sm_clock_mhz"],
    "sm_clock_max_mhz": (
        lambda nvml, device: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
    ),
    "application_clock_mhz": (
        lambda nvml, device: nvml.nvmlDeviceGetApplicationsClock(device, nvml.NVML_CLOCK_SM),
    ),
    "application_clock_default_mhz": (
        lambda nvml, device: nvml.nvmlDeviceGetDefaultApplicationsClock(device, nvml.NVML_CLOCK_SM),
    ),
    "power_limit_w": (lambda nvml, device: nvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,),
    "power_default_w": (
        lambda nvml, device: nvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1000,
    ),
    "ecc": (
        lambda nvml, device: nvml.nvmlDeviceGetEccMode(device)[0] == nvml.NVML_FEATURE_ENABLED,
    ),
    "mig": (
        lambda nvml, device: nvml.nvmlDeviceGetMigMode(device)[0] == nvml.NVML_DEVICE_MIG_ENABLE,
    ),
    "reasons": TELEMETRY_CALLS["reasons"],
    "temperature_c": TELEMETRY_CALLS["temperature_c"],
    "slowdown_c": (
        lambda nvml, device: nvml.nvmlDeviceGetTemperatureThreshold(
            device, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
    ),
    "runtime": (
        lambda nvml, device: _format_cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2()),
    ),
}
ADVICE = {  # what helps against a finding of `steelyard check`, by its key
    "driver": Message("nvidia.driver"),
    "persistence": Message("nvidia.persistence"),
    "processes": Message("nvidia.processes"),
    "clocks": Message("nvidia.clocks"),
    "power": Message("nvidia.power"),
    "ecc": Message("nvidia.ecc"),
    "mig": Message("nvidia.mig"),
    "torch": Message("nvidia.torch"),
}


def read_settings(devices: list[DetectedDevice], root: Path = Path("/")) -> list[DeviceSettings]:
    """Return the settings of each device that can change its speed, one dict for each, by the keys
    of `SETTING_CALLS` (clocks in MHz, power in W, ECC, MIG, processes, …), with `device` (cuda:0,
    by position), `invalidating` (active clock reasons that would make a run invalid) and
    `numa_node`; None for what a driver does not tell. Empty without devices.

    Nothing is changed. NVML stays open until the process ends. `root` is the root of the file
    system in which sysfs is read.
    """
    if not devices:
        return []  # there may be no driver to ask
    nvml = _import_pynvml()
    nvml.nvmlInit()
    out: list[DeviceSettings] = []
    for rank, device in enumerate(devices):
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        settings: DeviceSettings = {
            "device": f"cuda:{rank}",
            **{name: _call_first(nvml, handle, calls) for name, calls in SETTING_CALLS.items()},
        }
        reasons = settings["reasons"]
        settings["invalidating"] = (
            [n for n in reasons if SEVERITY.get(n) == "invalidates"]
            if isinstance(reasons, list)
            else None
        )
        address = _call_first(
            nvml,
            handle,
            (lambda api, pci_device: _decode_text(api.nvmlDeviceGetPciInfo(pci_device).busId),),
        )
        settings["numa_node"] = None if address is None else read_numa_node(address, root)
        out.append(settings)
    return out


def read_numa_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device from sysfs below `root`; None if the machine does not
    tell, or says -1. `address` is NVML's bus id, whose domain has eight digits where the kernel's
    has four.
    """
    domain, _, bus_and_slot = address.lower().partition(":")
    with suppress(OSError, ValueError):
        node = int(
            (
                root / "sys/bus/pci/devices" / f"{domain[-4:]}:{bus_and_slot}" / "numa_node"
            ).read_text()
        )
        return node if node >= 0 else None
    return None


def read_torch_cuda_version(folder: Path | None = None) -> str | None:
    """Return the CUDA version that the installed torch was built for, such as "12.8", from the text
    of its version.py, since importing torch takes seconds; None if torch is not installed, cannot
    be read or has no CUDA. `folder` is torch's package folder; None: it is looked for.
    """
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    with suppress(OSError):
        with (folder / "version.py").open(encoding="utf-8", errors="replace") as file:
            match = _CUDA_VERSION_LINE.search(file.read(MAX_VERSION_BYTES))
        return None if match is None else match[1]
    return None


def _decode_text(value: bytes | str) -> str:
    """Return a string of NVML, which is bytes in some releases of pynvml."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _format_cuda_version(number: int) -> str:
    """Format CUDA's version number: 12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


class NvmlReader:
    """Reads the telemetry columns of one NVIDIA device (`TELEMETRY_CALLS`: memory in use, SM and
    memory clock, power, energy, temperature, reasons for a low clock, number of compute processes):
    call it with process ids, which it ignores, for a dict by column, as `TelemetrySource.read`.
    Columns that the device lacks are None.

    The slow column `energy_j` is read at every `slow_interval`-th call only, and is None between
    them; `read_all` reads it always, for the first and last reading, and does not count as a call.
    """

    def __init__(self, nvml: Any, handle: Any, slow_interval: int) -> None:
        self._nvml, self._handle, self._slow_interval = nvml, handle, slow_interval
        self._count = 0

    def __call__(self, _pids: tuple[int, ...]) -> Reading:
        """Return a reading of one NVIDIA device by column, and count it; slow columns (`energy_j`)
        are None but for every `slow_interval`-th call. The process ids are not used, since NVML
        reads whole devices.
        """
        self._count += 1
        return self._read(self._count % self._slow_interval == 0)

    def read_all(self, _pids: tuple[int, ...]) -> Reading:
        """Return a reading of one NVIDIA device by column, slow columns (`energy_j`) included; it
        does not count as a call. The process ids are not used.
        """
        return self._read(slow=True)

    def _read(self, slow: bool) -> Reading:
        """Return all telemetry columns of the device by name; slow ones (`energy_j`) are None
        unless `slow`, and so are those that the device lacks.
        """
        return {
            column: _call_first(self._nvml, self._handle, calls)
            if slow or column not in SLOW_COLUMNS
            else None
            for column, calls in TELEMETRY_CALLS.items()
        }


def _call_first(nvml: Any, handle: Any, calls: tuple[NvmlCall, ...]) -> Any:
    """Return the result of the first of these calls, each given (nvml, device handle), that works;
    None if none does, because the device, its driver (NVMLError) or this release of pynvml
    (AttributeError) lacks them. Other errors are raised.
    """
    for call in calls:
        try:
            return call(nvml, handle)
        except (nvml.NVMLError, AttributeError):
            continue
    return None
