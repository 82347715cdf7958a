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

from steelyard.accelerators.row import Found, Reading, Severity, Source, State
from steelyard.errors import RequestError
from steelyard.words import Message


@dataclass(frozen=True)
class ClockReason:
    """A reason why a device's clock is below its maximum, which is one bit of NVML's mask, and what
    it means for a run.
    """

    bit: int
    name: str
    severity: Severity


# nvml.h, nvmlClocksEventReasons. Running at the power limit is normal for large matmuls; heat and
# power brakes are not.
REASONS = (
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
SEVERITY: dict[str, Severity] = {reason.name: reason.severity for reason in REASONS}


def reason_names(mask: int) -> list[str]:
    """Return the name of every set bit of NVML's mask; a bit that is not in `CLOCK_REASONS` is
    named `unknown_0x…`.
    """
    known = {reason.bit: reason.name for reason in REASONS}
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return [known.get(bit, f"unknown_{bit:#x}") for bit in bits]


def _pynvml() -> Any:
    """Import and return pynvml when it is needed, so that the tables of this module can be used
    without it.
    """
    import pynvml

    return pynvml


def find(visible: str | None) -> list[Found]:
    """Return the devices that a CUDA program would see if CUDA_VISIBLE_DEVICES had the value
    `visible` (None: unset), in its order; empty without an NVIDIA driver.

    Plain indices are NVML's, which are those of CUDA_DEVICE_ORDER=PCI_BUS_ID: workers must run with
    that set. Raises RequestError if NVML fails, or for a MIG device.
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    nvml = _pynvml()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return []  # a machine without such devices
    except nvml.NVMLError as error:
        raise _unusable(error) from error
    try:
        return select(_all(nvml), visible)
    except nvml.NVMLError as error:
        raise _unusable(error) from error
    finally:
        nvml.nvmlShutdown()


def _unusable(error: Exception) -> RequestError:
    """Return the RequestError for a failure of NVML, with what to do."""
    return RequestError(
        f"NVML: {str(error).rstrip('.')}; fix the driver, or set CUDA_VISIBLE_DEVICES= to run"
        " without NVIDIA devices"
    )


def _all(nvml: Any) -> list[Found]:
    """Return all NVIDIA devices of this machine, in NVML's order. NVML must be initialized."""
    driver = nvml.nvmlSystemGetDriverVersion()
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _first(
            nvml, handle, (lambda api, device: api.nvmlDeviceGetMemoryInfo(device).total,)
        )
        found.append(
            Found(
                nvml.nvmlDeviceGetName(handle),
                nvml.nvmlDeviceGetUUID(handle),
                memory,
                index,
                driver,
            )
        )
    return found


def select(devices: list[Found], visible: str | None) -> list[Found]:
    """Return the devices that CUDA_VISIBLE_DEVICES=`visible` leaves, by CUDA's own rules: nothing
    after the first entry that names no device; no device at all if one is named twice. Raises
    RequestError for a MIG device.
    """
    if visible is None:
        return devices
    chosen: list[Found] = []
    for entry in visible.split(","):
        device = _device(devices, entry.strip())
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
    return chosen


def _device(devices: list[Found], entry: str) -> Found | None:
    """Return the device that one entry of CUDA_VISIBLE_DEVICES names, by index or by a unique
    beginning of its UUID; None if there is none. Raises RequestError for a MIG device.
    """
    if entry.startswith("MIG-"):
        raise RequestError(
            f"CUDA_VISIBLE_DEVICES names {entry!r}, a part of a device; use whole devices"
        )
    if entry.startswith("GPU-"):
        fits = [
            device
            for device in devices
            if device.uuid is not None and device.uuid.startswith(entry)
        ]
        return fits[0] if len(fits) == 1 else None
    return next((device for device in devices if str(device.index) == entry), None)


VERSION_BYTES = 64 << 10  # read of torch's version.py
_BUILD = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)

Read = Callable[[Any, Any], Any]

# Each column and the calls that give it, the preferred one first: drivers and devices lack some.
# Memory without the driver's own reserve (v2) is what nvidia-smi shows.
READERS: dict[str, tuple[Read, ...]] = {
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
        lambda nvml, device: reason_names(nvml.nvmlDeviceGetCurrentClocksEventReasons(device)),
        lambda nvml, device: reason_names(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)),
    ),
    "processes": (lambda nvml, device: len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device)),),
}


# The energy counter takes the driver 4 ms of a core (H200), a hundred times any other reading: read
# five times a second it would cost 2 % of a core for each device. Energy is taken between two
# readings, so that one every two seconds is enough.
SLOW = ("energy_j",)
SELDOM = 10


def free(found: list[Found]) -> list[int | None]:
    """Return the bytes of each device's memory that no process uses; None if unknown."""
    used = [source.read(())["memory_bytes"] for source in sources(found)]
    return [
        (
            device.memory_bytes - taken
            if device.memory_bytes is not None and isinstance(taken, int)
            else None
        )
        for device, taken in zip(found, used, strict=True)
    ]


def sources(found: list[Found]) -> list[Source]:
    """Return a telemetry source for each device. Initializes NVML, which stays open until the
    process ends.
    """
    nvml = _pynvml()
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(device.index) for device in found]
    readings = [Readings(nvml, handle, SELDOM * max(1, len(found) // 2)) for handle in handles]
    return [Source(f"cuda:{rank}", one, whole=one.whole) for rank, one in enumerate(readings)]


# Settings that can change the speed of a device. Watts and degrees as nvidia-smi shows them.
STATES: dict[str, tuple[Read, ...]] = {
    "persistence": (
        lambda nvml, device: nvml.nvmlDeviceGetPersistenceMode(device) == nvml.NVML_FEATURE_ENABLED,
    ),
    "processes": READERS["processes"],
    "sm_clock_mhz": READERS["sm_clock_mhz"],
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
    "reasons": READERS["reasons"],
    "temperature_c": READERS["temperature_c"],
    "slowdown_c": (
        lambda nvml, device: nvml.nvmlDeviceGetTemperatureThreshold(
            device, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
    ),
    "runtime": (lambda nvml, device: _version(nvml.nvmlSystemGetCudaDriverVersion_v2()),),
}
STEPS = {  # what helps against a finding of `steelyard check`, by its key
    "driver": Message("nvidia.driver"),
    "persistence": Message("nvidia.persistence"),
    "processes": Message("nvidia.processes"),
    "clocks": Message("nvidia.clocks"),
    "power": Message("nvidia.power"),
    "ecc": Message("nvidia.ecc"),
    "mig": Message("nvidia.mig"),
    "torch": Message("nvidia.torch"),
}


def states(found: list[Found], root: Path = Path("/")) -> list[State]:
    """Return the settings of each device that can change its speed (clocks, power limit, ECC, MIG,
    …), with the NUMA node that it is attached to; None for what a driver does not tell. Nothing is
    changed. NVML stays open until the process ends.
    """
    if not found:
        return []  # there may be no driver to ask
    nvml = _pynvml()
    nvml.nvmlInit()
    out: list[State] = []
    for rank, device in enumerate(found):
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        told: State = {
            "device": f"cuda:{rank}",
            **{name: _first(nvml, handle, calls) for name, calls in STATES.items()},
        }
        seen = told["reasons"]
        told["invalidating"] = (
            [n for n in seen if SEVERITY.get(n) == "invalidates"]
            if isinstance(seen, list)
            else None
        )
        address = _first(
            nvml, handle, (lambda api, one: _text(api.nvmlDeviceGetPciInfo(one).busId),)
        )
        told["numa_node"] = None if address is None else numa_node(address, root)
        out.append(told)
    return out


def numa_node(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device from sysfs; None if the machine does not tell. `address`
    is NVML's bus id, whose domain has eight digits where the kernel's has four.
    """
    domain, _, rest = address.lower().partition(":")
    with suppress(OSError, ValueError):
        node = int(
            (root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text()
        )
        return node if node >= 0 else None
    return None


def torch_build(folder: Path | None = None) -> str | None:
    """Return the CUDA version that the installed torch was built for, from the text of its
    version.py, since importing torch takes seconds; None if torch is not installed or has no CUDA.
    `folder` is torch's package folder.
    """
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    with suppress(OSError):
        with (folder / "version.py").open(encoding="utf-8", errors="replace") as file:
            found = _BUILD.search(file.read(VERSION_BYTES))
        return None if found is None else found[1]
    return None


def _text(value: bytes | str) -> str:
    """Return a string of NVML, which is bytes in some releases of pynvml."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _version(number: int) -> str:
    """Format CUDA's version number: 12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


class Readings:
    """Reads the telemetry columns of one device. Slow columns are read at every `slow_interval`-th
    reading, and are None between them.
    """

    def __init__(self, nvml: Any, handle: Any, seldom: int) -> None:
        self._nvml, self._handle, self._seldom = nvml, handle, seldom
        self._count = 0

    def __call__(self, _pids: tuple[int, ...]) -> Reading:
        """Return a reading; the process ids are not used, since NVML reads whole devices."""
        self._count += 1
        return self._read(self._count % self._seldom == 0)

    def whole(self, _pids: tuple[int, ...]) -> Reading:
        """Return a reading with all columns, slow ones too."""
        return self._read(slow=True)

    def _read(self, slow: bool) -> Reading:
        """Return all columns by name, slow ones as None unless `slow`."""
        return {
            column: _first(self._nvml, self._handle, calls) if slow or column not in SLOW else None
            for column, calls in READERS.items()
        }


def _first(nvml: Any, handle: Any, calls: tuple[Read, ...]) -> Any:
    """Return the result of the first call that works; None if none does, because the device, its
    driver or this release of pynvml (AttributeError) lacks them.
    """
    for call in calls:
        try:
            return call(nvml, handle)
        except (nvml.NVMLError, AttributeError):
            continue
    return None
