"""The ceilings that torch measures on a device for `steelyard spec`: matmuls, memory bandwidth and
capacity, host copies.

Attention and collectives are in attention_ceilings.py and exchange_ceilings.py. The rows are
prepared and timed by run/ceilings_worker.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engine.ceiling_rows import CallBudget, CeilingRow, PreparedCeiling, UnavailableError
from steelyard.engines.torch import attention_ceilings, ceiling_errors, exchange_ceilings
from steelyard.engines.torch.framework import TorchFramework, random_matrix
from steelyard.plan import ceiling_shapes
from steelyard.plan.ceiling_shapes import ERROR_BOUNDS, MIB, MIN_ROWS, CaseMatmul
from steelyard.plan.matmuls import Matmul
from steelyard.words import Message

SAMPLED_LINES = 32  # rows and columns of a product that are compared with fp64
CHUNK_BYTES = (1 << 30, 128 * MIB, 16 * MIB)  # in which memory is allocated until refused
# of an array that is read or written; caches have up to some hundred MiB
FULL_BYTES, QUICK_BYTES = 4096 * MIB, 256 * MIB
# between host and device, by whether it is quick
COPIED_BYTES = {False: 1024 * MIB, True: 128 * MIB}
MAX_ARRAYS = 4  # that must fit into free memory, though at most two are made


@dataclass(frozen=True)
class PreparedMatmul:
    """A matmul of `steelyard spec` that is ready to be called, with its operands `a` [m, k] and `b`
    [k, n] as the call sees them (either may be a transposed view), for the check of its result;
    `call()` returns the product [m, n], which the next call may overwrite.
    """

    call: Callable[[], Tensor]
    a: Tensor
    b: Tensor


def _prepare_plain_matmul(
    dtype: torch.dtype, shape: Matmul, device: torch.device
) -> PreparedMatmul:
    """Allocate a torch.mm of standard normal numbers in `dtype`, with the operand stored transposed
    that the layout names (`tn`: a, `nt`: b, `nn`: none). Every call overwrites the same result.
    """
    a = random_matrix(shape.m, shape.k, shape.layout == "tn", dtype, device)
    b = random_matrix(shape.k, shape.n, shape.layout == "nt", dtype, device)
    out = torch.empty(shape.m, shape.n, dtype=dtype, device=device)
    return PreparedMatmul(lambda: torch.mm(a, b, out=out), a, b)


def _prepare_fp8_matmul(shape: Matmul, device: torch.device) -> PreparedMatmul:
    """Allocate a matmul of random E4M3 operands with one scale of 1 each, whatever the shape's
    layout. b is stored by columns, as the kernel requires; the result is bf16.
    """
    a, b = (
        torch.randn(rows, shape.k, device=device).to(torch.float8_e4m3fn)
        for rows in (shape.m, shape.n)
    )
    unit_scale = torch.ones((), device=device)
    multiply: Any = torch._scaled_mm
    return PreparedMatmul(
        lambda: multiply(
            a, b.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16
        ),
        a,
        b.t(),
    )


def _prepare_int8_matmul(shape: Matmul, device: torch.device) -> PreparedMatmul:
    """Allocate a matmul of random int8 operands (-128 to 127) whose result is int32, whatever the
    shape's layout. b is stored by columns.
    """
    a, b = (
        torch.randint(-128, 128, (rows, shape.k), device=device).to(torch.int8)
        for rows in (shape.m, shape.n)
    )
    multiply: Any = torch._int_mm
    return PreparedMatmul(lambda: multiply(a, b.t()), a, b.t())


MATMULS: Mapping[str, Callable[[Matmul, torch.device], PreparedMatmul]] = {
    "fp64": partial(_prepare_plain_matmul, torch.float64),
    "fp32": partial(_prepare_plain_matmul, torch.float32),
    "tf32": partial(_prepare_plain_matmul, torch.float32),
    "fp16": partial(_prepare_plain_matmul, torch.float16),
    "bf16": partial(_prepare_plain_matmul, torch.bfloat16),
    "fp8": _prepare_fp8_matmul,
    "int8": _prepare_int8_matmul,
}


def check_matmul(matmul: PreparedMatmul, precision: str) -> tuple[float, float]:
    """Run the matmul once, compute up to 32 of its rows and columns again in fp64, and return
    (largest relative error, allowed error of this precision); a wrong result raises nothing.

    The sample is evenly spaced and includes the first and last row and column. The error is that of
    `max_relative_error`. KeyError for a precision without a bound.
    """
    out = matmul.call()
    rows, columns = (_spread_indices(size, out.device) for size in out.shape)
    right = _select(matmul.a, 0, rows).double() @ _select(matmul.b, 1, columns).double()
    return max_relative_error(
        out.index_select(0, rows).index_select(1, columns), right
    ), ERROR_BOUNDS[precision]


def _select(matrix: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return the rows (dim 0) or columns (dim 1) of a matrix at these indices. One-byte types are
    selected as uint8, for not every device indexes fp8.
    """
    if matrix.dtype.itemsize > 1:
        return matrix.index_select(dim, indices)
    return matrix.view(torch.uint8).index_select(dim, indices).view(matrix.dtype)


def _spread_indices(size: int, device: torch.device) -> Tensor:
    """Return up to 32 evenly spaced indices from 0 to size - 1, both included."""
    return torch.linspace(0, size - 1, min(SAMPLED_LINES, size), device=device).round().long()


def max_relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of the result from the expected numbers, as a fraction
    of these numbers' root mean square; computed in fp64. NaN if the result has one.
    """
    root_mean_square = expected.double().square().mean().sqrt()
    return float(
        (result.double() - expected.double()).abs().max()
        / root_mean_square.clamp_min(torch.finfo(torch.float64).tiny)
    )


class TorchCeilings:
    """The rows of `steelyard spec` (best rates and sizes that a device reaches) for torch's device,
    a `FrameworkCeilings`: `rows(quick)` yields them as `CeilingRow`s, in the order capacity,
    memory, square matmuls, host copies, exchanges between ranks, the shipped cases' matmuls,
    attention. `all_reduce_max` is over ranks, `release_memory` empties the allocator's cache,
    `explain_error` words an exception.

    Reasons why a device cannot run some of them come from the device class's `lacks`, by precision
    or `copies` or `peers`.
    """

    def __init__(self, framework: TorchFramework) -> None:
        """Take the framework's device, and what it lacks (nothing, if its class does not say)."""
        self.framework, self.device = framework, framework.device
        self.torch_device = self.device.torch_device
        self.lacks: Mapping[str, str] = getattr(self.device, "lacks", {})

    def rows(self, quick: bool) -> Iterator[CeilingRow]:
        """Yield the ceiling rows of this device, the most informative first, as a slow device may
        run out of time before the end: capacity, memory, square matmuls of each precision, host
        copies, exchanges, then the shipped cases' matmuls and attention. With `quick`, fewer and
        smaller ones.
        """
        yield CeilingRow("capacity", "memory of one process", None, "B", self._measure_capacity)
        yield from self._memory_rows(quick)
        for precision in MATMULS:
            for size in ceiling_shapes.QUICK_SQUARE_SIDES if quick else ceiling_shapes.SQUARE_SIDES:
                shape = Matmul(
                    name="square",
                    layout="nt" if precision in ("fp8", "int8") else "nn",
                    m=size,
                    n=size,
                    k=size,
                )
                yield self._matmul_row(f"square {size}", precision, shape, shrinks=False)
        yield from self._host_copy_rows(quick)
        yield from exchange_ceilings.exchange_rows(self.framework, self.lacks, quick)
        yield from map(self._case_matmul_row, ceiling_shapes.list_shipped_matmuls(quick))
        yield from attention_ceilings.attention_rows(self.torch_device, self.lacks, quick)

    def all_reduce_max(self, value: float) -> float:
        """Return the maximum of `value` over all ranks of `steelyard spec` by an all-reduce, which
        all must call; one rank alone gets its own value back.
        """
        if self.framework.world == 1:
            return value
        maximum = torch.tensor([value], dtype=torch.float64, device=self.torch_device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return float(maximum)

    def release_memory(self) -> None:
        """Empty the allocator's cache, so that the device has its memory back."""
        self.device.release_memory()

    def explain_error(self, error: Exception, precision: str | None) -> Message:
        """Return what an exception of a row in this precision means (ceiling_errors.py)."""
        return ceiling_errors.explain_error(error, precision)

    def _case_matmul_row(self, case_shape: CaseMatmul) -> CeilingRow:
        """Return the row of a shipped case's own matmul shape, which may get fewer rows on a slow
        device. Its name has the case, the matmul and, of a backward one, which gradient.
        """
        backward = {"nt": "", "nn": " (input gradient)", "tn": " (weight gradient)"}[
            case_shape.matmul.layout
        ]
        return self._matmul_row(
            f"{case_shape.case} {case_shape.matmul.name}{backward}",
            case_shape.precision,
            case_shape.matmul,
            shrinks=True,
        )

    def _matmul_row(self, name: str, precision: str, shape: Matmul, shrinks: bool) -> CeilingRow:
        """Return the row of one matmul in FLOP/s, unavailable if the device lacks the precision. If
        `shrinks`, it gets fewer rows on a slow device; preparing it raises UnavailableError if one
        call would still take too long.
        """

        def prepare(budget: CallBudget) -> PreparedCeiling:
            """Allocate the matmul in a shape that the budget allows and return it with its check.
            Raises UnavailableError if none does. For fp32 and tf32 the process's matmul precision
            is set to that one.
            """
            fitting = _fit_to_budget(shape, budget, shrinks)
            if precision in ("fp32", "tf32"):
                self.framework.set_precision(precision)
            matmul = MATMULS[precision](fitting, self.torch_device)
            detail = {"m": fitting.m, "n": fitting.n, "k": fitting.k, "layout": fitting.layout}
            return PreparedCeiling(
                matmul.call, fitting.flops, partial(check_matmul, matmul, precision), detail
            )

        return CeilingRow("matmul", name, precision, "FLOP/s", prepare, self.lacks.get(precision))

    def _memory_rows(self, quick: bool) -> Iterator[CeilingRow]:
        """Yield rows for reading, writing and copying device memory, on fp32 arrays of 4 GiB
        (quick: 256 MiB), or a quarter of the memory that is free now if that is less (at least 1
        MiB). A copy counts its bytes twice.
        """
        size = min(
            QUICK_BYTES if quick else FULL_BYTES,
            max(MIB, self._free_bytes() // MAX_ARRAYS // MIB * MIB),
        )

        def allocate() -> Tensor:
            """Allocate an fp32 array of ones on the device, `size` bytes large."""
            return torch.ones(size // 4, device=self.torch_device)

        def prepare_read(budget: CallBudget) -> PreparedCeiling:
            """Prepare the sum of an array of ones; its check compares it with the number of
            elements. `budget` is ignored.
            """
            tensor = allocate()
            expected = torch.tensor(float(tensor.numel()), dtype=torch.float64)
            return PreparedCeiling(
                tensor.sum,
                size,
                lambda: (max_relative_error(tensor.sum().cpu(), expected), ERROR_BOUNDS["fp32"]),
                {"bytes": size},
            )

        def prepare_write(budget: CallBudget) -> PreparedCeiling:
            """Prepare filling an array with a constant; its check counts elements that have another
            value. `budget` is ignored.
            """
            tensor = allocate()

            def check() -> tuple[float, float]:
                """Fill the array with 3 and return (how many elements are not 3, bound 0)."""
                tensor.fill_(3.0)
                return float((tensor != 3.0).sum()), 0.0

            return PreparedCeiling(lambda: tensor.fill_(2.0), size, check, {"bytes": size})

        def prepare_copy(budget: CallBudget) -> PreparedCeiling:
            """Prepare a copy from one device array to another; its check counts elements that
            differ. Its amount is twice the array: read and written. `budget` is ignored.
            """
            source, target = allocate(), torch.zeros(size // 4, device=self.torch_device)

            def check() -> tuple[float, float]:
                """Copy the array once and return (how many elements differ, bound 0)."""
                target.copy_(source)
                return float((target != source).sum()), 0.0

            return PreparedCeiling(lambda: target.copy_(source), 2 * size, check, {"bytes": size})

        for name, prepare in (
            ("read", prepare_read),
            ("write", prepare_write),
            ("copy", prepare_copy),
        ):
            yield CeilingRow("memory", name, None, "B/s", prepare)

    def _free_bytes(self) -> int:
        """Return the free memory of this rank's device in bytes, now. Of a CPU, the host's
        available memory divided by the number of ranks.
        """
        if self.torch_device.type == "cpu":
            return int(psutil.virtual_memory().available) // self.framework.world
        module: Any = getattr(torch, self.torch_device.type)
        return int(module.mem_get_info(self.torch_device)[0])

    def _measure_capacity(self, budget: CallBudget) -> PreparedCeiling:
        """Measure how much memory one process can allocate on the device, and return it as the
        `amount`, in bytes, of a row that is never called; `detail` has `how` it was found.

        It is what the device class's `capacity` says, otherwise found by allocating chunks of 1
        GiB, 128 MiB and 16 MiB until refused, all of which are freed again. `budget` is ignored.
        """
        known_capacity = self.device.capacity() if hasattr(self.device, "capacity") else None
        if known_capacity is not None:
            return PreparedCeiling(
                lambda: None, known_capacity[0], None, {"how": known_capacity[1]}
            )
        self.release_memory()
        chunks: list[Tensor] = []
        for size in CHUNK_BYTES:
            try:
                while True:
                    chunks.append(torch.empty(size, dtype=torch.uint8, device=self.torch_device))
            except torch.OutOfMemoryError:
                continue
        amount = sum(chunk.numel() for chunk in chunks)
        chunks.clear()
        self.release_memory()
        return PreparedCeiling(
            lambda: None,
            amount,
            None,
            {"how": f"allocated in parts of 1 GiB to {CHUNK_BYTES[-1] // MIB} MiB until refused"},
        )

    def _host_copy_rows(self, quick: bool) -> Iterator[CeilingRow]:
        """Yield four rows for copies between host and device: both directions, from or to pageable
        and pinned host memory, of 1 GiB (quick: 128 MiB). Unavailable if the device lacks `copies`.
        """
        size = COPIED_BYTES[quick]

        def prepare(pinned: bool, to_host: bool, budget: CallBudget) -> PreparedCeiling:
            """Allocate host and device arrays and prepare the copy, from the device to the host if
            `to_host`. The host array is pinned if `pinned`; then the copy does not block the host.
            `budget` is ignored.
            """
            host = torch.arange(size // 4, dtype=torch.int32)
            host = host.pin_memory() if pinned else host
            on_device = torch.zeros(size // 4, dtype=torch.int32, device=self.torch_device)
            source, target = (on_device, host) if to_host else (host, on_device)
            if to_host:
                on_device.copy_(host)
                host.zero_()
            return exchange_ceilings.prepare_copy(source, target, size, pinned)

        for to_host, direction in ((False, "host to device"), (True, "device to host")):
            for pinned, kind in ((False, "pageable"), (True, "pinned")):
                yield CeilingRow(
                    "copy",
                    f"{direction}, {kind}",
                    None,
                    "B/s",
                    partial(prepare, pinned, to_host),
                    self.lacks.get("copies"),
                )


def _fit_to_budget(shape: Matmul, budget: CallBudget, shrinks: bool) -> Matmul:
    """Return the matmul's shape, with fewer rows (m halved, not below 64) if `shrinks` and one call
    would exceed the budget. Raises UnavailableError if it still exceeds it. Without a known rate
    the shape is returned unchanged.
    """
    if budget.max_amount is None:
        return shape
    rows = shape.m
    while shrinks and rows > MIN_ROWS and 2 * rows * shape.n * shape.k > budget.max_amount:
        rows = max(MIN_ROWS, rows // 2)
    fitting = shape.model_copy(update={"m": rows})
    if fitting.flops > budget.max_amount:
        if rows < shape.m:
            raise UnavailableError(
                Message("ceiling.slow_rows", {"rows": rows, "call_s": budget.call_s})
            )
        raise UnavailableError(Message("ceiling.slow", {"call_s": budget.call_s}))
    return fitting
