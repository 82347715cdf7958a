"""The accelerators that are known: how their devices are found and watched, and which class drives
them in each framework.

Nothing heavy is imported here. Other packages add accelerators through the entry-point group
`steelyard.accelerators`: each entry point names an `Accelerator` (row.py).
"""

import os
from collections.abc import Callable, Iterable, Mapping

from steelyard import plugins
from steelyard.accelerators import cpu, nvml, variables
from steelyard.accelerators.peaks import Peak, shipped
from steelyard.accelerators.row import Accelerator, Found
from steelyard.errors import RequestError

GROUP = "steelyard.accelerators"


def _find_cuda() -> list[Found]:
    """Return the NVIDIA devices that CUDA_VISIBLE_DEVICES allows."""
    return nvml.find(os.environ.get("CUDA_VISIBLE_DEVICES"))


CUDA = Accelerator(
    name="cuda",
    find=_find_cuda,
    sources=nvml.sources,
    free=nvml.free,
    devices={
        "torch": "steelyard.accelerators.cuda_torch:Device",
        "paddle": "steelyard.accelerators.cuda_paddle:Device",
    },
    severity=nvml.SEVERITY,
    libraries=("cuda", "cudnn"),
    collectives="nccl",
    packages=("nvidia-ml-py",),
    variables=(
        *(*variables.CUDA, *variables.CUDA_TUNE),
        *(*variables.NCCL, *variables.NCCL_TUNE, *variables.NCCL_SITE),
    ),
    tune_variables=(*variables.CUDA_TUNE, *variables.NCCL_TUNE),
    site_variables=(*variables.NCCL_SITE, *variables.NCCL_ADDRESSES),
    ignored_variables=("NVIDIA_TF32_OVERRIDE",),
    worker_variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # the order that NVML counts in
    deterministic_variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    # NCCL takes a name without `=` as a prefix of interface names
    interface_variables={"NCCL_SOCKET_IFNAME": "={}"},
    torch_build=nvml.torch_build,
    states=nvml.states,
    steps=nvml.STEPS,
)
CPU = Accelerator(
    name="cpu",
    find=cpu.find,
    sources=lambda found: [cpu.source()],
    free=lambda found: [cpu.free()],
    devices={
        "torch": "steelyard.accelerators.cpu_torch:Device",
        "paddle": "steelyard.accelerators.cpu_paddle:Device",
    },
    divisible=True,
    is_host=True,
    variables=(*variables.CPU, *variables.CPU_TUNE, *variables.CPU_SITE),
    tune_variables=variables.CPU_TUNE,
    site_variables=variables.CPU_SITE,
    interface_variables={"GLOO_SOCKET_IFNAME": "{}"},
    environment=cpu.environment,
)


def table() -> dict[str, Accelerator]:
    """Return all accelerators by name, shipped and installed, in order of preference: the CPU,
    which every machine has, is last. Raises RequestError if an installed package's entry is not
    usable.
    """
    rows = plugins.table([CUDA, CPU], GROUP, Accelerator, "accelerator")
    return {name: row for name, row in rows.items() if row is not CPU} | {CPU.name: rows[CPU.name]}


def names(field: Callable[[Accelerator], Iterable[str]]) -> frozenset[str]:
    """Return the names that any accelerator lists in a field, of all accelerators together: workers
    may use libraries of several, such as Gloo beside NCCL. `field` reads the field.
    """
    return frozenset(name for row in table().values() for name in field(row))


def settings(field: Callable[[Accelerator], Mapping[str, str]]) -> dict[str, str]:
    """Return the mappings that all accelerators have in a field, merged into one. `field` reads the
    field.
    """
    return {name: value for row in table().values() for name, value in field(row).items()}


def tune_variables() -> frozenset[str]:
    """Return the environment variables that `tune.env` may set."""
    return names(lambda row: row.tune_variables)


def named(name: str) -> Accelerator:
    """Return the accelerator of this name. Raises RequestError if it is not known."""
    rows = table()
    if name not in rows:
        raise RequestError(f"accelerator {name!r} is not known; known: {', '.join(rows)}")
    return rows[name]


def detect() -> Accelerator:
    """Return the first accelerator that has a device on this machine; the CPU if none has."""
    return next((row for row in table().values() if row.find()), CPU)


def peak(accelerator: Accelerator, found: Found) -> Peak | None:
    """Return the datasheet peaks of a device, by its name and memory; None if it is unknown: a
    device never gets another's peaks. Rows that come with the accelerator are looked at first.
    """
    rows = (*accelerator.peaks, *shipped())
    return next((row for row in rows if row.fits(found.name, found.memory_bytes)), None)
