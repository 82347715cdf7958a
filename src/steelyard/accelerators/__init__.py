"""The accelerators that are known: how their devices are found and watched, and which class drives
them in each framework.

Nothing heavy is imported here. Other packages add accelerators through the entry-point group
`steelyard.accelerators`: each entry point names an `Accelerator` (row.py).
"""

import os
from collections.abc import Callable, Iterable, Mapping

from steelyard import plugins
from steelyard.accelerators import cpu, environment_variables, nvml
from steelyard.accelerators.peaks import Peak, load_shipped_peaks
from steelyard.accelerators.row import Accelerator, DetectedDevice
from steelyard.errors import RequestError

ENTRY_POINT_GROUP = "steelyard.accelerators"


def _find_cuda() -> list[DetectedDevice]:
    """Return the NVIDIA devices that CUDA_VISIBLE_DEVICES allows."""
    return nvml.find_nvidia_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))


CUDA = Accelerator(
    name="cuda",
    find=_find_cuda,
    sources=nvml.make_sources,
    free=nvml.read_free_device_bytes,
    devices={
        "torch": "steelyard.accelerators.cuda_torch:CudaTorchDevice",
        "paddle": "steelyard.accelerators.cuda_paddle:CudaPaddleDevice",
    },
    severity=nvml.SEVERITY,
    libraries=("cuda", "cudnn"),
    collectives="nccl",
    packages=("nvidia-ml-py",),
    variables=(
        *(*environment_variables.CUDA_VARIABLES, *environment_variables.CUDA_TUNE_VARIABLES),
        *(
            *environment_variables.NCCL_VARIABLES,
            *environment_variables.NCCL_TUNE_VARIABLES,
            *environment_variables.NCCL_SITE_VARIABLES,
        ),
    ),
    tune_variables=(
        *environment_variables.CUDA_TUNE_VARIABLES,
        *environment_variables.NCCL_TUNE_VARIABLES,
    ),
    site_variables=(
        *environment_variables.NCCL_SITE_VARIABLES,
        *environment_variables.NCCL_ADDRESS_VARIABLES,
    ),
    ignored_variables=("NVIDIA_TF32_OVERRIDE",),
    worker_variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # the order that NVML counts in
    deterministic_variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    # NCCL takes a name without `=` as a prefix of interface names
    interface_variables={"NCCL_SOCKET_IFNAME": "={}"},
    torch_build=nvml.read_torch_cuda_version,
    states=nvml.read_settings,
    steps=nvml.ADVICE,
)
CPU = Accelerator(
    name="cpu",
    find=cpu.find_cpu,
    sources=lambda found: [cpu.make_cpu_source()],
    free=lambda found: [cpu.read_free_bytes()],
    devices={
        "torch": "steelyard.accelerators.cpu_torch:CpuTorchDevice",
        "paddle": "steelyard.accelerators.cpu_paddle:CpuPaddleDevice",
    },
    divisible=True,
    is_host=True,
    variables=(
        *environment_variables.CPU_VARIABLES,
        *environment_variables.CPU_TUNE_VARIABLES,
        *environment_variables.CPU_SITE_VARIABLES,
    ),
    tune_variables=environment_variables.CPU_TUNE_VARIABLES,
    site_variables=environment_variables.CPU_SITE_VARIABLES,
    interface_variables={"GLOO_SOCKET_IFNAME": "{}"},
    environment=cpu.choose_worker_environment,
)


SHIPPED_ACCELERATORS = [CUDA, CPU]


def load_accelerators() -> dict[str, Accelerator]:
    """Return all accelerators by name, shipped and of installed packages, in order of preference:
    cuda, installed ones, and last the CPU, which every machine has. Imports these packages at each
    call. Raises RequestError if an installed package's entry cannot be loaded, is no `Accelerator`,
    or has a name that is taken.
    """
    rows = plugins.load_rows_by_name(
        SHIPPED_ACCELERATORS, ENTRY_POINT_GROUP, Accelerator, "accelerator"
    )
    return {name: row for name, row in rows.items() if row is not CPU} | {CPU.name: rows[CPU.name]}


def collect_names(field: Callable[[Accelerator], Iterable[str]]) -> frozenset[str]:
    """Return the names, such as environment variables, that any accelerator lists in a field, of
    all accelerators together: workers may use libraries of several, such as Gloo beside NCCL.
    `field` is a function that returns the field of an accelerator.
    """
    return frozenset(name for row in load_accelerators().values() for name in field(row))


def collect_settings(field: Callable[[Accelerator], Mapping[str, str]]) -> dict[str, str]:
    """Return the mappings that all accelerators have in a field, merged into one dict; of equal
    keys the later accelerator's value counts. `field` is a function that returns the field of an
    accelerator.
    """
    return {
        name: value for row in load_accelerators().values() for name, value in field(row).items()
    }


def list_tune_variables() -> frozenset[str]:
    """Return the names of the environment variables that `tune.env` may set, of all accelerators
    together.
    """
    return collect_names(lambda row: row.tune_variables)


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator of this name, shipped or of an installed package. Raises RequestError,
    with the known names, if there is none.
    """
    rows = load_accelerators()
    if name not in rows:
        raise RequestError(f"accelerator {name!r} is not known; allowed: {', '.join(rows)}")
    return rows[name]


def detect_accelerator() -> Accelerator:
    """Return the first accelerator, in order of preference, that finds a device on this machine;
    the CPU if no other does. Asks drivers; RequestError if one fails.
    """
    return next((row for row in load_accelerators().values() if row.find()), CPU)


def find_peak(accelerator: Accelerator, device: DetectedDevice) -> Peak | None:
    """Return the datasheet peaks of a device, by its exact name and its memory; None if it is
    unknown: a device never gets another's peaks. Rows that come with the accelerator are looked at
    before those of peaks.toml.
    """
    rows = (*accelerator.peaks, *load_shipped_peaks())
    return next((row for row in rows if row.is_of_device(device.name, device.memory_bytes)), None)
