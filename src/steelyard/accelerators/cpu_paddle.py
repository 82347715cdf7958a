"""The CPU in framework paddle, imported by workers only."""

import os

import paddle

from steelyard.accelerators.cpu import HostDevice
from steelyard.accelerators.events import Clock
from steelyard.errors import RequestError

# What Paddle 3.3 can do on a GPU only; all were tried.
LACKS = {
    "tp": "fleet's tensor parallel layers have kernels for GPUs only",
    "pp": "Paddle's gloo has neither send nor receive",
    "sharding 2": "group_sharded_parallel supports GPUs only",
    "copies of shards": "Paddle's gloo hangs in groups of some of the ranks",
    "flash": "flash attention has kernels for GPUs only",
}


class CpuPaddleDevice(HostDevice):
    """A CPU, driven by Paddle in a worker: HostDevice that, when constructed, sets Paddle's device
    and thread count (OMP_NUM_THREADS, else all CPUs that it may use). `place` is cpu;
    `set_precision` refuses all but fp32 (RequestError). `lacks` maps what Paddle has on GPUs alone
    (`tp`, `pp`, `sharding 2`, `copies of shards`, `flash`) to the reason.
    """

    place = "cpu"
    lacks = LACKS

    def __init__(self, local_rank: int, clock: Clock) -> None:
        """Make the CPU Paddle's device, and set Paddle's number of threads to `threads()`; it would
        be one. Both are global in this process.
        """
        super().__init__(local_rank, clock)
        paddle.set_device(self.place)
        paddle.base.core.set_num_threads(self.threads())

    def threads(self) -> int:
        """Return the number of CPU threads for Paddle: OMP_NUM_THREADS if it is a positive whole
        number, else the number of CPUs that this process may use (its affinity).
        """
        value = os.environ.get("OMP_NUM_THREADS", "")
        return int(value) if value.isdecimal() and int(value) else len(os.sched_getaffinity(0))

    def set_precision(self, matmul: str) -> None:
        """Raise RequestError unless `matmul` is fp32: Paddle's O2 leaves a model on a CPU in fp32
        without a word. Nothing is set in Paddle.
        """
        if matmul != "fp32":
            raise RequestError(f"Paddle on a CPU has no precision {matmul!r}; use --precision fp32")
