"""What torch can show of a device, for `steelyard spec`: matmuls, memory and copies here, attention
and exchanges beside it.
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
CHUNKS = (1 << 30, 128 * MIB, 16 * MIB)  # in which memory is asked for, until none is had
# of an array that is read or written; caches have up to some hundred MiB
FULL_BYTES, QUICK_BYTES = 4096 * MIB, 256 * MIB
# between host and device, by whether it is quick
COPIED_BYTES = {False: 1024 * MIB, True: 128 * MIB}
ARRAYS = 4  # that must fit into what is free, though two are made at most


@dataclass(frozen=True)
class Operands:
    """A product made ready, and its operands."""

    work: Callable[[], Tensor]
    a: Tensor
    b: Tensor


def _plain(dtype: torch.dtype, shape: Matmul, place: torch.device) -> Operands:
    a = random(shape.m, shape.k, shape.layout == "tn", dtype, place)
    b = random(shape.k, shape.n, shape.layout == "nt", dtype, place)
    out = torch.empty(shape.m, shape.n, dtype=dtype, device=place)
    return Operands(lambda: torch.mm(a, b, out=out), a, b)


def _fp8(shape: Matmul, place: torch.device) -> Operands:
    """E4M3 operands, the second stored by columns as its kernels want it, one scale each; given out
    in bf16.
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
    """The largest difference in a sample of rows and columns, first and last among them."""
    out = made.work()
    rows, columns = (_spread(size, out.device) for size in out.shape)
    right = _picked(made.a, 0, rows).double() @ _picked(made.b, 1, columns).double()
    return apart(out.index_select(0, rows).index_select(1, columns), right), BOUNDS[precision]


def _picked(matrix: Tensor, dim: int, places: Tensor) -> Tensor:
    """Rows or columns of it, as bytes where a number is one: not every device picks from fp8."""
    if matrix.dtype.itemsize > 1:
        return matrix.index_select(dim, places)
    return matrix.view(torch.uint8).index_select(dim, places).view(matrix.dtype)


def _spread(size: int, place: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, min(SAMPLED, size), device=place).round().long()


def apart(told: Tensor, right: Tensor) -> float:
    """The largest difference as a share of the root mean square of what is right."""
    size = right.double().square().mean().sqrt()
    return float(
        (told.double() - right.double()).abs().max()
        / size.clamp_min(torch.finfo(torch.float64).tiny)
    )


class TorchCeilings:
    def __init__(self, framework: TorchFramework) -> None:
        self.framework, self.device = framework, framework.device
        self.place = self.device.torch_device
        self.lacks: Mapping[str, str] = getattr(self.device, "lacks", {})

    def rows(self, quick: bool) -> Iterator[Row]:
        """What says most comes first, for a slow device may not come to the end."""
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
        if self.framework.world == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self.place)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    def release(self) -> None:
        self.device.release_memory()

    def _case(self, one: CaseShape) -> Row:
        backward = {"nt": "", "nn": " (input gradient)", "tn": " (weight gradient)"}[
            one.matmul.layout
        ]
        return self._matmul(
            f"{one.case} {one.matmul.name}{backward}", one.precision, one.matmul, shrinks=True
        )

    def _matmul(self, name: str, precision: str, shape: Matmul, shrinks: bool) -> Row:
        def make(budget: Budgeted) -> Made:
            fits = _fitting(shape, budget, shrinks)
            if precision in ("fp32", "tf32"):
                self.framework.set_precision(precision)
            made = PRODUCTS[precision](fits, self.place)
            detail = {"m": fits.m, "n": fits.n, "k": fits.k, "layout": fits.layout}
            return Made(made.work, fits.flops, partial(compare, made, precision), detail)

        return Row("matmul", name, precision, "FLOP/s", make, self.lacks.get(precision))

    def _memory(self, quick: bool) -> Iterator[Row]:
        size = min(
            QUICK_BYTES if quick else FULL_BYTES, max(MIB, self._free() // ARRAYS // MIB * MIB)
        )

        def array() -> Tensor:
            return torch.ones(size // 4, device=self.place)

        def read(budget: Budgeted) -> Made:
            one = array()
            right = torch.tensor(float(one.numel()), dtype=torch.float64)
            return Made(
                one.sum,
                size,
                lambda: (apart(one.sum().cpu(), right), BOUNDS["fp32"]),
                {"bytes": size},
            )

        def write(budget: Budgeted) -> Made:
            one = array()

            def check() -> tuple[float, float]:
                one.fill_(3.0)
                return float((one != 3.0).sum()), 0.0

            return Made(lambda: one.fill_(2.0), size, check, {"bytes": size})

        def copy(budget: Budgeted) -> Made:
            one, other = array(), torch.zeros(size // 4, device=self.place)

            def check() -> tuple[float, float]:
                other.copy_(one)
                return float((other != one).sum()), 0.0

            return Made(lambda: other.copy_(one), 2 * size, check, {"bytes": size})

        for name, make in (("read", read), ("write", write), ("copy", copy)):
            yield Row("memory", name, None, "B/s", make)

    def _free(self) -> int:
        """Bytes of the device that are free; ranks of a host share that of a CPU."""
        if self.place.type == "cpu":
            return int(psutil.virtual_memory().available) // self.framework.world
        module: Any = getattr(torch, self.place.type)
        return int(module.mem_get_info(self.place)[0])

    def _capacity(self, budget: Budgeted) -> Made:
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
        size = COPIED_BYTES[quick]

        def make(pinned: bool, down: bool, budget: Budgeted) -> Made:
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
    """The shape, or with so few rows that one call takes as long as it may."""
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
