"""The CPU in framework torch, imported by workers only."""

import torch

from steelyard.accelerators.cpu import HostDevice, read_memory_limit
from steelyard.errors import RequestError

PRECISIONS = ("fp32", "fp16", "bf16", "fp8")  # fp8 is emulated: its answers count, its rates do not
LACKS = {
    "tf32": "a CPU has no TF32",
    "copies": "a CPU's memory is the host's: nothing is copied between them",
    "peers": "ranks of a CPU share one memory: there is no other device to copy to",
}


class CpuTorchDevice(HostDevice):
    """A CPU, driven by torch in a worker: HostDevice with `torch_device`, attention kernel `rows`,
    no Triton, and `capacity`, the bytes that control group or host allow. `set_precision` sets
    nothing and refuses all but fp32, fp16, bf16 and fp8 (RequestError). `lacks` says why a CPU has
    no `tf32`, `copies` (host and device share memory) and `peers`.
    """

    triton = False
    lacks = LACKS

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def release_memory(self) -> None:
        """Do nothing: freed memory of a CPU is back with the system."""

    def attention(self, dtype_name: str, shared: bool) -> str:
        """Return `rows`, the attention kernel for CPUs."""
        return "rows"

    def capacity(self) -> tuple[int, str]:
        """Return (bytes that this process can have on the CPU, a text that says who limits them:
        control group or host). They are read and not tried, because a system that runs out of
        memory kills processes rather than refuse to allocate.
        """
        return read_memory_limit()

    def set_precision(self, matmul: str) -> None:
        """Raise RequestError for a matmul precision that a CPU does not have: all but fp32, fp16,
        bf16 and fp8 (emulated). Nothing is set in torch.
        """
        if matmul not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise RequestError(
                f"a CPU has no precision {matmul!r}; use --precision with one of: {allowed}"
            )
