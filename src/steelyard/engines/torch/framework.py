"""PyTorch as a framework: it joins ranks by torch.distributed and drives the device that an
accelerator names.

Engines torch, transformers, megatron and reference run on it. A worker makes one `TorchFramework`
(engine/framework.py).
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from steelyard import plugins
from steelyard.accelerators.events import Clock
from steelyard.accelerators.row import TorchDevice
from steelyard.engine.framework import DeviceFramework, Meeting
from steelyard.engines.torch import tensor_parallel
from steelyard.engines.torch.profiler import TorchProfiler
from steelyard.errors import RequestError
from steelyard.kernels import fp8, jit
from steelyard.models.tensors import get_compute_dtype
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import VOCABULARY, Matmul

GRAPH_COUNTERS = {"hits": "fxgraph_cache_hit", "misses": "fxgraph_cache_miss"}


class CompileCacheCounter:
    """Counts cache hits and misses of the compilers in this process: Triton's from construction on,
    TorchInductor's since the process began. It makes itself Triton's compilation listener,
    process-wide, replacing any other, if this Triton has one. `counts` returns {"hits", "misses"},
    or None if nothing was compiled.
    """

    def __init__(self) -> None:
        """Start counting from zero, and become Triton's compilation listener, process-wide, if this
        Triton has one.
        """
        self._kernels = {"hits": 0, "misses": 0}
        knobs = getattr(jit.triton, "knobs", None)  # which older versions of Triton do not have
        if knobs is not None:
            knobs.compilation.listener = self._count_kernel

    def _count_kernel(self, *, cache_hit: bool, **event: Any) -> None:
        """Count one kernel that Triton compiled or took from its cache (Triton's listener callback,
        called with keywords of which only `cache_hit` is read).
        """
        self._kernels["hits" if cache_hit else "misses"] += 1

    def counts(self) -> dict[str, int] | None:
        """Return `hits` and `misses` of Triton's kernels and TorchInductor's graphs added up, or
        None if nothing was compiled or loaded. Imports nothing.
        """
        # not imported in a process that has compiled nothing
        dynamo = sys.modules.get("torch._dynamo.utils")
        graphs = {} if dynamo is None else dynamo.counters["inductor"]
        totals = {
            name: count + int(graphs.get(GRAPH_COUNTERS[name], 0))
            for name, count in self._kernels.items()
        }
        return totals if any(totals.values()) else None


EXCHANGE_NUMBERS = 1 << 18
_dist: Any = dist  # its stores are not in its stubs
# for all ranks to join; importing a framework from a busy disk is slow
RENDEZVOUS_TIMEOUT = timedelta(minutes=2)


def _create_store(meet: Meeting, rank: int, world: int) -> Any:
    """Return the torch.distributed store with which ranks find each other: a file store if `meet`
    has a file, else a TCP store (2 minutes timeout) that rank 0 serves on the socket `listen_fd`
    and all others connect to.

    torch's own rendezvous is not used: it listens on every interface and unpickles what it
    receives. Raises ValueError if `meet` has neither a file nor an address with port.
    """
    if meet.file is not None:
        return _dist.FileStore(str(meet.file), world)
    if meet.address is None or meet.port is None:
        raise ValueError("several ranks, but no rendezvous file or address")
    is_server = meet.listen_fd is not None and rank == 0
    return _dist.TCPStore(
        meet.address,
        meet.port,
        world,
        is_server,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=meet.listen_fd if is_server else None,
    )


def random_matrix(
    rows: int, columns: int, transposed: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a [rows, columns] matrix of standard normal numbers; if `transposed`, it is a
    transposed view of a contiguous [columns, rows].
    """
    stored_shape = (columns, rows) if transposed else (rows, columns)
    matrix = torch.randn(*stored_shape, device=device, dtype=dtype)
    return matrix.t() if transposed else matrix


class TorchFramework(DeviceFramework):
    """The framework `torch` on one rank (a `Framework`), which drives the accelerator's device (a
    `module:Class` string, constructed here as `device`): `join_ranks`, `barrier`, `leave` for ranks
    (`world` is their number), `prepare_all_reduce`, `prepare_square_matmul` and `prepare_matmul`
    for what is measured beside a pass, `profiler`, `compile_cache`, `threads`.

    Constructing it raises RequestError if the accelerator has no device class for torch, turns off
    this package's Triton kernels, for the whole process, for devices that do not say they run
    Triton, and starts to count compilations.
    """

    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        """Import and construct the accelerator's device class `device` (`module:Class`) for
        `local_rank`; `clock` is what devices without events read. Raises RequestError if `device`
        is None. Turns off this package's Triton kernels for devices that do not run Triton, and
        starts to count compilations.
        """
        if device is None:
            raise RequestError(
                "this accelerator has no device class for torch; choose another with --accelerator"
            )
        self.device: TorchDevice = plugins.load_reference(device)(local_rank, clock)
        if not getattr(self.device, "triton", False):
            jit.disable_triton(self.device.torch_device)
        self.world = 1
        self._compile_cache = CompileCacheCounter()

    def make_deterministic(self) -> None:
        """Switch torch to deterministic algorithms, process-wide; an operation without one raises
        when it runs. Uninitialized memory is not filled. This package's kernels always add in a
        fixed order.
        """
        torch.use_deterministic_algorithms(True)
        # Otherwise it costs a pass over memory; nothing here reads any of that.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def join_ranks(
        self, plan: Plan, rank: int, world: int, meet: Meeting | None
    ) -> tensor_parallel.TensorParallelGroup:
        """Initialize torch.distributed over all ranks and return this rank's tensor-parallel group;
        blocks until all ranks are there, and sets `world`. One rank alone initializes nothing and
        gets a group of one. Raises ValueError if several ranks have no rendezvous.
        """
        self.world = world
        if world == 1:
            return tensor_parallel.TensorParallelGroup()
        if meet is None:
            raise ValueError("several ranks, but no rendezvous file or address")
        dist.init_process_group(
            self.device.backend, store=_create_store(meet, rank, world), rank=rank, world_size=world
        )
        return tensor_parallel.create_tensor_parallel_group(plan, rank, self.device.torch_device)

    def prepare_all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """Prepare a sum of 1 MiB of fp32 over all ranks and return (call, size_bytes, check). All
        ranks run `call` together; rank r sends r + 1 each time, never an earlier result, so that
        `check` knows the sum. Needs an initialized process group.
        """
        own_numbers = torch.full(
            (EXCHANGE_NUMBERS,), float(dist.get_rank() + 1), device=self.device.torch_device
        )
        out = torch.empty_like(own_numbers)

        def sum_once() -> None:
            """Copy this rank's numbers into the result tensor and all-reduce it; all ranks must
            call it.
            """
            out.copy_(own_numbers)
            dist.all_reduce(out)

        def check() -> str | None:
            """Return None if every number of the last result is the sum 1 + ... + world, else a
            text with the first wrong one. Waits for the device.
            """
            expected = self.world * (self.world + 1) / 2
            wrong = out[out != expected]
            return None if wrong.numel() == 0 else f"{float(wrong[0])} instead of {expected}"

        return sum_once, own_numbers.numel() * own_numbers.element_size(), check

    def barrier(self) -> None:
        """Wait for all ranks; with one rank return at once."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """Destroy the process group, if one was initialized."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int]:
        """Allocate two random square matrices, as large as the device's `matmul_shape` says, and
        return (call, FLOPs of a call, 2 x side³). In fp8 they are quantized once, here. Running out
        of memory is not caught.
        """
        size, dtype = self.device.matmul_shape, get_compute_dtype(precision)
        a, b = (
            torch.randn(size, size, device=self.device.torch_device, dtype=dtype) for _ in range(2)
        )
        if precision == "fp8":
            scaled = fp8.quantize_rows_fast(a), fp8.quantize_rows_fast(b)
            return lambda: fp8.multiply_fp8(*scaled), 2 * size**3
        return lambda: torch.mm(a, b), 2 * size**3

    def profiler(self) -> TorchProfiler:
        """Return a new torch profiler for this rank's device."""
        return TorchProfiler(self.device.torch_device)

    def prepare_matmul(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        """Allocate a matmul of this shape with random numbers and return (call, FLOPs of a call),
        or None if the device is out of memory.

        In fp8 both operands are stored as the fp8 kernels need them, whatever the layout, with k
        padded to a multiple of 16 (the FLOPs count k itself); the vocabulary matmul stays bf16.
        """
        dtype, torch_device = get_compute_dtype(precision), self.device.torch_device
        try:
            if precision == "fp8" and shape.name != VOCABULARY:
                padded_k = -(-shape.k // fp8.ALIGNED) * fp8.ALIGNED
                left, right = (
                    fp8.quantize_rows_fast(
                        random_matrix(side, padded_k, False, dtype, torch_device)
                    )
                    for side in (shape.m, shape.n)
                )
                return lambda: fp8.multiply_fp8(left, right), shape.flops
            a = random_matrix(shape.m, shape.k, shape.layout == "tn", dtype, torch_device)
            b = random_matrix(shape.k, shape.n, shape.layout == "nt", dtype, torch_device)
            out = torch.empty(shape.m, shape.n, device=torch_device, dtype=dtype)
        except torch.OutOfMemoryError:
            return None
        return lambda: torch.mm(a, b, out=out), shape.flops

    def compile_cache(self) -> dict[str, int] | None:
        """Return `hits` and `misses` of Triton's and TorchInductor's caches in this process, added
        up, or None if nothing was compiled.
        """
        return self._compile_cache.counts()

    def threads(self) -> int:
        """Return torch's number of intra-op CPU threads."""
        return torch.get_num_threads()
