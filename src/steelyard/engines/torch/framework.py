"""PyTorch as a framework: joins ranks by torch.distributed, and drives the device that an accelerator names."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from steelyard import plugins
from steelyard.accelerators.events import Clock, Event
from steelyard.accelerators.row import TorchDevice
from steelyard.engine.framework import Meeting
from steelyard.engines.torch import tensor_parallel
from steelyard.engines.torch.compile_cache import CompileCache
from steelyard.engines.torch.profile import TorchProfiler
from steelyard.errors import RequestError
from steelyard.kernels import fp8, jit
from steelyard.models.tensors import compute_dtype
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import VOCABULARY, Matmul

EXCHANGE_NUMBERS = 1 << 18
_dist: Any = dist  # its stores are not in its stubs
MEET = timedelta(minutes=2)  # for all ranks to be there; reading a framework from a busy disk takes its time


def _store(meet: Meeting, rank: int, world: int) -> Any:
    """What ranks find each other with. No rendezvous of torch's own: it listens on every interface, and unpickles what it is
    sent. This one holds bytes, in a private file or behind a socket that is bound to one interface."""
    if meet.file is not None:
        return _dist.FileStore(str(meet.file), world)
    if meet.address is None or meet.port is None:
        raise ValueError("ranks that are told nowhere to meet")
    serves = meet.listen_fd is not None and rank == 0
    return _dist.TCPStore(
        meet.address,
        meet.port,
        world,
        serves,
        timeout=MEET,
        wait_for_workers=False,
        master_listen_fd=meet.listen_fd if serves else None,
    )


class TorchFramework:
    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        if device is None:
            raise RequestError("this accelerator has no device class for torch; choose another with --accelerator")
        self.device: TorchDevice = plugins.load(device)(local_rank, clock)
        if not getattr(self.device, "triton", False):
            jit.disable(self.device.torch_device)
        self.world = 1
        self._compiled = CompileCache()

    def set_precision(self, matmul: str) -> None:
        self.device.set_precision(matmul)

    def make_deterministic(self) -> None:
        """Torch's kernels in their deterministic variants. Our own add in a fixed order."""
        torch.use_deterministic_algorithms(True)
        # Otherwise it costs a pass over memory; nothing here reads any of that.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def join(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> tensor_parallel.TensorParallelGroup:
        self.world = world
        if world == 1:
            return tensor_parallel.TensorParallelGroup()
        if meet is None:
            raise ValueError("ranks that are told nowhere to meet")
        dist.init_process_group(self.device.backend, store=_store(meet, rank, world), rank=rank, world_size=world)
        return tensor_parallel.form(plan, rank, self.device.torch_device)

    def all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """Rank r brings r + 1, and nothing it got before."""
        mine = torch.full((EXCHANGE_NUMBERS,), float(dist.get_rank() + 1), device=self.device.torch_device)
        out = torch.empty_like(mine)

        def work() -> None:
            out.copy_(mine)
            dist.all_reduce(out)

        def check() -> str | None:
            expected = self.world * (self.world + 1) / 2
            wrong = out[out != expected]
            return None if wrong.numel() == 0 else f"{float(wrong[0])} where it must be {expected}"

        return work, mine.numel() * mine.element_size(), check

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def matmul(self, precision: str) -> tuple[Callable[[], Any], int]:
        size, dtype = self.device.matmul_shape, compute_dtype(precision)
        a, b = (torch.randn(size, size, device=self.device.torch_device, dtype=dtype) for _ in range(2))
        if precision == "fp8":
            scaled = fp8.make_rows(a), fp8.make_rows(b)
            return lambda: fp8.product(*scaled), 2 * size**3
        return lambda: torch.mm(a, b), 2 * size**3

    def profiler(self) -> TorchProfiler:
        return TorchProfiler(self.device.torch_device)

    def product(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        """Of fp8, both operands lie as its matmuls want them, whatever the layout; the vocabulary's stay bf16."""
        dtype, place = compute_dtype(precision), self.device.torch_device

        def random(rows: int, columns: int, transposed: bool) -> torch.Tensor:
            sides = (columns, rows) if transposed else (rows, columns)
            made = torch.randn(*sides, device=place, dtype=dtype)
            return made.t() if transposed else made

        try:
            if precision == "fp8" and shape.name != VOCABULARY:
                inner = -(-shape.k // fp8.ALIGNED) * fp8.ALIGNED
                left, right = (fp8.make_rows(random(side, inner, False)) for side in (shape.m, shape.n))
                return lambda: fp8.product(left, right), shape.flops
            a, b = random(shape.m, shape.k, shape.layout == "tn"), random(shape.k, shape.n, shape.layout == "nt")
            out = torch.empty(shape.m, shape.n, device=place, dtype=dtype)
        except torch.OutOfMemoryError:
            return None
        return lambda: torch.mm(a, b, out=out), shape.flops

    def event(self) -> Event:
        return self.device.event()

    def synchronize(self) -> None:
        self.device.synchronize()

    def reset_memory(self) -> None:
        self.device.reset_memory()

    def memory(self) -> dict[str, int | None]:
        return self.device.memory()

    def identity(self) -> dict[str, Any]:
        return self.device.identity()

    def versions(self) -> dict[str, str | None]:
        return self.device.versions()

    def compile_cache(self) -> dict[str, int] | None:
        return self._compiled.counts()

    def threads(self) -> int:
        return torch.get_num_threads()
