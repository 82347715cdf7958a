"""PaddlePaddle as a framework (engine/framework.py): it joins ranks by paddle.distributed and
drives the device that an accelerator names.
"""

import os
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist

from steelyard import plugins
from steelyard.accelerators.events import Clock
from steelyard.accelerators.row import PaddleDevice
from steelyard.engine.framework import DeviceFramework, Meeting
from steelyard.engines.paddle import rendezvous
from steelyard.engines.paddle.modes import DTYPES
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.plan.matmuls import Matmul

EXCHANGE_NUMBERS = 1 << 18
DETERMINISTIC_FLAGS = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}


class PaddleFramework(DeviceFramework):
    """The framework `paddle` on one rank (a `Framework`): joins ranks by paddle.distributed
    (`join_ranks`, `barrier`, `leave`), drives `device` (the accelerator's device object for
    Paddle), and returns functions that are timed: `prepare_square_matmul`, `prepare_matmul` and
    `prepare_all_reduce`. It has no profiler and compiles nothing (both None). `world` is the number
    of ranks, 1 until they have joined.

    The constructor's `device` is the reference `module:Class` of the device class; None raises
    RequestError.
    """

    def __init__(self, device: str | None, local_rank: int, clock: Clock) -> None:
        if device is None:
            raise RequestError(
                "this accelerator has no device class for paddle; choose another with --accelerator"
            )
        self.device: PaddleDevice = plugins.load_reference(device)(local_rank, clock)
        self.world, self.local_rank = 1, local_rank

    def make_deterministic(self) -> None:
        """Set Paddle's flags for deterministic cuDNN and embedding kernels, process-wide, as far as
        this build has them; a CPU's kernels need none.
        """
        known = paddle.get_flags(
            [name for name in DETERMINISTIC_FLAGS if paddle.base.core.globals().is_public(name)]
        )
        paddle.set_flags({name: DETERMINISTIC_FLAGS[name] for name in known})

    def join_ranks(self, plan: Plan, rank: int, world: int, meet: Meeting | None) -> None:
        """Join all ranks of the run in one group of paddle.distributed, together with the other
        ranks; returns None, for the engine forms its own groups with fleet. `plan` is not used.

        Sets `world`, and Paddle's environment variables in this process. One rank alone joins
        nothing; several without a rendezvous (`meet` None) raise ValueError.
        """
        self.world = world
        if world == 1:
            return
        if meet is None:
            raise ValueError("several ranks, but no rendezvous file or address")
        host, port = rendezvous.find_master(meet, rank)
        os.environ.update(
            rendezvous.launcher_variables(
                host, port, rank, self.local_rank, world, self.device.backend
            )
        )
        dist.init_parallel_env()

    def prepare_all_reduce(self) -> tuple[Callable[[], Any], int, Callable[[], str | None]]:
        """Prepare a sum of 1 MiB of fp32 over all ranks and return (call, bytes per call, check).
        Rank r sends r + 1 each time, never an earlier result. All ranks must call `call` together;
        `check` returns None, or a text on the first wrong number.
        """
        own_numbers = paddle.full([EXCHANGE_NUMBERS], float(dist.get_rank() + 1))
        out = paddle.zeros_like(own_numbers)

        def sum_once() -> None:
            """Copy this rank's numbers into the result tensor and all-reduce it in place over all
            ranks, which call it together; does not check the result.
            """
            paddle.assign(own_numbers, out)
            dist.all_reduce(out)

        def check() -> str | None:
            """Wait for the last result, and return None if each of its numbers is the sum 1 + 2 +
            ... + ranks, else a text with the first wrong one.
            """
            expected = self.world * (self.world + 1) / 2
            wrong = out.numpy()[out.numpy() != expected]
            return None if wrong.size == 0 else f"{float(wrong[0])} instead of {expected}"

        return sum_once, EXCHANGE_NUMBERS * 4, check

    def barrier(self) -> None:
        """Wait for all ranks; with one rank return at once."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """Wait for all ranks: rank 0 serves the store, and must not exit while another may still
        ask it.
        """
        self.barrier()

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int]:
        """Allocate two random square matrices whose side is the device's `matmul_shape`, in the
        dtype of `precision` (fp32, tf32, fp16 or bf16), and return (a function that multiplies
        them, FLOPs of a call).
        """
        size, dtype = self.device.matmul_shape, DTYPES[precision]
        a, b = (paddle.randn([size, size]).astype(dtype) for _ in range(2))
        return lambda: paddle.matmul(a, b), 2 * size**3

    def profiler(self) -> None:
        """Return None: Paddle's profiler is not read."""
        return

    def prepare_matmul(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int]:
        """Allocate random matrices for a matmul of this shape and return (a function that
        multiplies them, FLOPs of a call). The first is stored transposed in layout `tn`, the second
        in `nt`. `precision` names the dtype: fp32, tf32, fp16 or bf16.
        """
        # which operand is stored transposed
        a_transposed, b_transposed = shape.layout == "tn", shape.layout == "nt"
        sides = (
            [shape.k, shape.m] if a_transposed else [shape.m, shape.k],
            [shape.n, shape.k] if b_transposed else [shape.k, shape.n],
        )
        a, b = (paddle.randn(side).astype(DTYPES[precision]) for side in sides)
        return lambda: paddle.matmul(
            a, b, transpose_x=a_transposed, transpose_y=b_transposed
        ), shape.flops

    def versions(self) -> dict[str, str | None]:
        """Return the versions of the libraries that the device class knows, and `paddle`, Paddle's
        own, by name.
        """
        return {**super().versions(), "paddle": paddle.__version__}

    def compile_cache(self) -> dict[str, int] | None:
        """Return None: nothing is compiled."""
        return None

    def threads(self) -> int:
        """Return how many CPU threads this rank computes with."""
        return self.device.threads()
