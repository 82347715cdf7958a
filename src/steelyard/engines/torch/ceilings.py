"""The ceilings that torch measures on a device for `steelyard spec`: matmuls, memory bandwidth and
capacity, host copies.

Attention and collectives are in attention_ceilings.py and exchange_ceilings.py. The rows are
prepared and timed by run/ceilings.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engine.bench import Budgeted, LacksError, Made, Row
from steelyard.engines.torch import ceilings_attention, ceilings_exchange
from steelyard.engines.torch.framework import TorchFramework, random
from steelyard.plan import ceilings
from steelyard.plan.ceilings import BOUNDS, LEAST_ROWS, MIB, CaseShape
from steelyard.plan.matmuls import Matmul

SAMPLED = 32  # rows and columns of a product that are compared with fp64
CHUNKS = (1 << 30, 128 * MIB, 16 * MIB)  # in which memory is allocated until refused
# of an array that is read or written; caches have up to some hundred MiB
FULL_BYTES, QUICK_BYTES = 4096 * MIB, 256 * MIB
# between host and device, by whether it is quick
COPIED_BYTES = {False: 1024 * MIB, True: 128 * MIB}
ARRAYS = 4  # that must fit into free memory, though at most two are made


@dataclass(frozen=True)
class Operands:
    """A matmul that is ready to be called, with its operands a [m, k] and b [k, n] as the call sees
    them.
    """

    work: Callable[[], Tensor]
    a: Tensor
    b: Tensor


def _plain(dtype: torch.dtype, shape: Matmul, place: torch.device) -> Operands:
    """Allocate a torch.mm of random numbers in `dtype`, with the operand stored transposed that the
    layout says.
    """
    a = random(shape.m, shape.k, shape.layout == "tn", dtype, place)
    b = random(shape.k, shape.n, shape.layout == "nt", dtype, place)
    out = torch.empty(shape.m, shape.n, dtype=dtype, device=place)
    return Operands(lambda: torch.mm(a, b, out=out), a, b)


def _fp8(shape: Matmul, place: torch.device) -> Operands:
    """Allocate a matmul of random E4M3 operands with scale 1 each. b is stored by columns, as the
    kernel requires; the result is bf16.
    """
    a, b = (
        torch.randn(rows, shape.k, device=place).to(torch.float8_e4m3fn)
        for rows in (shape.m, shape.n)
    )
    one = torch.ones((), device=place)
    scaled: Any = torch._scaled_mm
    return Operands(
        lambda: scaled(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16), a, b.t()
    )


def _int8(shape: Matmul, place: torch.device) -> Operands:
    """Allocate a matmul of random int8 operands whose result is int32. b is stored by columns."""
    a, b = (
        torch.randint(-128, 128, (rows, shape.k), device=place).to(torch.int8)
        for rows in (shape.m, shape.n)
    )
    multiply: Any = torch._int_mm
    return Operands(lambda: multiply(a, b.t()), a, b.t())


PRODUCTS: Mapping[str, Callable[[Matmul, torch.device], Operands]] = {
    "fp64": partial(_plain, torch.float64),
    "fp32": partial(_plain, torch.float32),
    "tf32": partial(_plain, torch.float32),
    "fp16": partial(_plain, torch.float16),
    "bf16": partial(_plain, torch.bfloat16),
    "fp8": _fp8,
    "int8": _int8,
}


def compare(made: Operands, precision: str) -> tuple[float, float]:
    """Run the matmul once, compute up to 32 of its rows and columns again in fp64, and return
    (largest relative error, bound of this precision).

    The sample is evenly spaced and includes the first and last row and column. The error is that of
    `max_relative_error`.
    """
    out = made.work()
    rows, columns = (_spread(size, out.device) for size in out.shape)
    right = _picked(made.a, 0, rows).double() @ _picked(made.b, 1, columns).double()
    return apart(out.index_select(0, rows).index_select(1, columns), right), BOUNDS[precision]


def _picked(matrix: Tensor, dim: int, places: Tensor) -> Tensor:
    """Return the rows (dim 0) or columns (dim 1) of a matrix at these indices. One-byte types are
    selected as uint8, for not every device indexes fp8.
    """
    if matrix.dtype.itemsize > 1:
        return matrix.index_select(dim, places)
    return matrix.view(torch.uint8).index_select(dim, places).view(matrix.dtype)


def _spread(size: int, place: torch.device) -> Tensor:
    """Return up to 32 evenly spaced indices from 0 to size - 1, both included."""
    return torch.linspace(0, size - 1, min(SAMPLED, size), device=place).round().long()


def apart(told: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference as a fraction of the root mean square of the right
    result.
    """
    size = right.double().square().mean().sqrt()
    return float(
        (told.double() - right.double()).abs().max()
        / size.clamp_min(torch.finfo(torch.float64).tiny)
    )


class TorchCeilings:
    """The rows of `steelyard spec` for torch's device. Reasons why a device cannot run some of them
    come from the device class's `lacks`.
    """

    def __init__(self, framework: TorchFramework) -> None:
        self.framework, self.device = framework, framework.device
        self.place = self.device.torch_device
        self.lacks: Mapping[str, str] = getattr(self.device, "lacks", {})

    def rows(self, quick: bool) -> Iterator[Row]:
        """Yield the rows, the most informative first: a slow device may run out of time before the
        end.
        """
        yield Row("capacity", "memory of one process", None, "B", self._capacity)
        yield from self._memory(quick)
        for precision in PRODUCTS:
            for size in ceilings.QUICK_SQUARES if quick else ceilings.SQUARES:
                shape = Matmul(
                    name="square",
                    layout="nt" if precision in ("fp8", "int8") else "nn",
                    m=size,
                    n=size,
                    k=size,
                )
                yield self._matmul(f"square {size}", precision, shape, shrinks=False)
        yield from self._copies(quick)
        yield from ceilings_exchange.rows(self.framework, self.lacks, quick)
        yield from map(self._case, ceilings.case_matmuls(quick))
        yield from ceilings_attention.rows(self.place, self.lacks, quick)

    def agree(self, value: float) -> float:
        """Return the maximum of `value` over all ranks by an all-reduce; one rank alone gets its
        own value back.
        """
        if self.framework.world == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self.place)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    def release(self) -> None:
        """Empty the allocator's cache, so that the device has its memory back."""
        self.device.release_memory()

    def _case(self, one: CaseShape) -> Row:
        """Make the row of a shipped case's own matmul shape, which may shrink for a slow device.
        Its name has the case, the matmul and, of a backward one, which gradient.
        """
        backward = {"nt": "", "nn": " (input gradient)", "tn": " (weight gradient)"}[
            one.matmul.layout
        ]
        return self._matmul(
            f"{one.case} {one.matmul.name}{backward}", one.precision, one.matmul, shrinks=True
        )

    def _matmul(self, name: str, precision: str, shape: Matmul, shrinks: bool) -> Row:
        """Make the row of one matmul. If `shrinks`, it gets fewer rows on a slow device; otherwise
        preparing it raises UnavailableError if one call would take too long.
        """

        def make(budget: Budgeted) -> Made:
            """Allocate the matmul in a shape that the budget allows. For fp32 and tf32 the
            process's matmul precision is set to that one.
            """
            fits = _fitting(shape, budget, shrinks)
            if precision in ("fp32", "tf32"):
                self.framework.set_precision(precision)
            made = PRODUCTS[precision](fits, self.place)
            detail = {"m": fits.m, "n": fits.n, "k": fits.k, "layout": fits.layout}
            return Made(made.work, fits.flops, partial(compare, made, precision), detail)

        return Row("matmul", name, precision, "FLOP/s", make, self.lacks.get(precision))

    def _memory(self, quick: bool) -> Iterator[Row]:
        """Yield rows for reading, writing and copying device memory, on arrays of 4 GiB (quick: 256
        MiB), or a quarter of the free memory if that is less. A copy counts its bytes twice.
        """
        size = min(
            QUICK_BYTES if quick else FULL_BYTES, max(MIB, self._free() // ARRAYS // MIB * MIB)
        )

        def array() -> Tensor:
            """Allocate an fp32 array of ones on the device, `size` bytes large."""
            return torch.ones(size // 4, device=self.place)

        def read(budget: Budgeted) -> Made:
            """Prepare the sum of an array; its check compares it with the number of elements."""
            one = array()
            right = torch.tensor(float(one.numel()), dtype=torch.float64)
            return Made(
                one.sum,
                size,
                lambda: (apart(one.sum().cpu(), right), BOUNDS["fp32"]),
                {"bytes": size},
            )

        def write(budget: Budgeted) -> Made:
            """Prepare filling an array with a constant; its check counts elements that have another
            value.
            """
            one = array()

            def check() -> tuple[float, float]:
                """Fill the array with 3 and return (number of elements that are not 3, bound 0)."""
                one.fill_(3.0)
                return float((one != 3.0).sum()), 0.0

            return Made(lambda: one.fill_(2.0), size, check, {"bytes": size})

        def copy(budget: Budgeted) -> Made:
            """Prepare a copy from one device array to another; its check counts elements that
            differ.
            """
            one, other = array(), torch.zeros(size // 4, device=self.place)

            def check() -> tuple[float, float]:
                """Copy once and return (number of elements that differ, bound 0)."""
                other.copy_(one)
                return float((other != one).sum()), 0.0

            return Made(lambda: other.copy_(one), 2 * size, check, {"bytes": size})

        for name, make in (("read", read), ("write", write), ("copy", copy)):
            yield Row("memory", name, None, "B/s", make)

    def _free(self) -> int:
        """Return the free memory of the device in bytes. Of a CPU, the host's available memory
        divided by the number of ranks.
        """
        if self.place.type == "cpu":
            return int(psutil.virtual_memory().available) // self.framework.world
        module: Any = getattr(torch, self.place.type)
        return int(module.mem_get_info(self.place)[0])

    def _capacity(self, budget: Budgeted) -> Made:
        """Return the bytes that one process can allocate on the device: what the device class says,
        otherwise found by allocating chunks of 1 GiB to 16 MiB until refused, all of which are
        freed again. The result is never called.
        """
        told = self.device.capacity() if hasattr(self.device, "capacity") else None
        if told is not None:
            return Made(lambda: None, told[0], None, {"how": told[1]})
        self.release()
        held: list[Tensor] = []
        for size in CHUNKS:
            try:
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device=self.place))
            except torch.OutOfMemoryError:
                continue
        amount = sum(one.numel() for one in held)
        held.clear()
        self.release()
        return Made(
            lambda: None,
            amount,
            None,
            {"how": f"allocated in parts of 1 GiB to {CHUNKS[-1] // MIB} MiB until refused"},
        )

    def _copies(self, quick: bool) -> Iterator[Row]:
        """Yield rows for copies between host and device in both directions, from pageable and from
        pinned host memory: 1 GiB, quick 128 MiB.
        """
        size = COPIED_BYTES[quick]

        def make(pinned: bool, down: bool, budget: Budgeted) -> Made:
            """Allocate host and device arrays and prepare the copy. `to_host`: from the device to
            the host. Copies of pinned memory do not block the host.
            """
            host = torch.arange(size // 4, dtype=torch.int32)
            host = host.pin_memory() if pinned else host
            there = torch.zeros(size // 4, dtype=torch.int32, device=self.place)
            source, target = (there, host) if down else (host, there)
            if down:
                there.copy_(host)
                host.zero_()
            return ceilings_exchange.copy(source, target, size, pinned)

        for down, way in ((False, "host to device"), (True, "device to host")):
            for pinned, kind in ((False, "pageable"), (True, "pinned")):
                yield Row(
                    "copy",
                    f"{way}, {kind}",
                    None,
                    "B/s",
                    partial(make, pinned, down),
                    self.lacks.get("copies"),
                )


def _fitting(shape: Matmul, budget: Budgeted, shrinks: bool) -> Matmul:
    """Return the shape, with fewer rows (m halved, at least 64) if `shrinks` and one call would
    exceed the budget. Raises UnavailableError if it still exceeds it. Without a known rate the
    shape is returned unchanged.
    """
    if budget.most is None:
        return shape
    rows = shape.m
    while shrinks and rows > LEAST_ROWS and 2 * rows * shape.n * shape.k > budget.most:
        rows = max(LEAST_ROWS, rows // 2)
    fits = shape.model_copy(update={"m": rows})
    if fits.flops > budget.most:
        least = f" even with {rows} rows" if rows < shape.m else ""
        raise LacksError(
            f"not tried: one call{least} would take more than {budget.call_s:g} s here"
        )
    return fits
