"""The table of accelerators: what this machine has, how to watch it, and which class drives it in each framework.

Nothing heavy is imported here. Other packages add rows through the entry-point group `steelyard.accelerators`: each entry
point names an `Accelerator`.
"""

import os

from steelyard import plugins
from steelyard.accelerators import cpu, nvml, variables
from steelyard.accelerators.peaks import Peak, shipped
from steelyard.accelerators.row import Accelerator, Found
from steelyard.errors import RequestError

GROUP = "steelyard.accelerators"


def _find_cuda() -> list[Found]:
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
    variables=(*variables.CUDA, *variables.NCCL),
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
    variables=variables.CPU,
    environment=cpu.environment,
)


def table() -> dict[str, Accelerator]:
    """All rows by name, in the order of preference: the CPU, which every machine has, is last."""
    rows = plugins.table([CUDA, CPU], GROUP, Accelerator, "accelerator")
    return {name: row for name, row in rows.items() if row is not CPU} | {CPU.name: rows[CPU.name]}


def named(name: str) -> Accelerator:
    rows = table()
    if name not in rows:
        raise RequestError(f"accelerator {name!r} is not known; known: {', '.join(rows)}")
    return rows[name]


def detect() -> Accelerator:
    """The first row with a device on this machine."""
    return next((row for row in table().values() if row.find()), CPU)


def peak(accelerator: Accelerator, found: Found) -> Peak | None:
    """The datasheet row of a device, or None: an unknown device has no peak, and never another's."""
    rows = (*accelerator.peaks, *shipped())
    return next((row for row in rows if row.fits(found.name, found.memory_bytes)), None)
