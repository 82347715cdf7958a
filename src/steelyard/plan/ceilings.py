"""What `steelyard spec` measures, as shapes and constants: groups, sizes, the cases' own shapes,
bounds on results.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from steelyard.case import resolve
from steelyard.plan import matmuls
from steelyard.plan.matmuls import Matmul

Group = Literal["matmul", "memory", "capacity", "copy", "attention", "collective"]
GROUPS: tuple[Group, ...] = get_args(Group)
Unit = Literal["FLOP/s", "B/s", "B"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SQUARES = (512, 1024, 2048, 8192)
# of a case's shape that is made smaller for a slow device: less is another kind of product
LEAST_ROWS = 64
LEAST_LENGTH = 256  # of a row of attention, likewise
# tokens of a text that is scored, at most; shorter than the positions of every shipped model
SCORED_LENGTH = 2048

# Largest difference from fp64 as a share of the root mean square of the right result, for operands
# that are exactly what they
# are in fp64. Normal numbers reach 4 to 5 times their mean square, so a result rounded to r bits is
# off by up to 5·2^-(r+1):
# 0.0024 in fp16, 0.02 in bf16; sums in fp32 add little. TF32 rounds its operands to 10 bits. fp8 is
# summed in few bits on some
# devices, and given out in bf16. int8 is exact.
BOUNDS = {
    "fp64": 1e-12,
    "fp32": 1e-4,
    "tf32": 1e-2,
    "fp16": 1e-2,
    "bf16": 4e-2,
    "fp8": 5e-2,
    "int8": 0.0,
}
ATTENTION_BOUND = 5e-2  # in bf16: weights of the softmax are rounded too
# a backward differences rounded outputs, and sums rounded gradients of a group's heads: 0.06 was
# seen
GRADIENT_BOUND = 0.2

MIB = 1 << 20
COLLECTIVE_BYTES = (MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
QUICK_COLLECTIVE_BYTES = (MIB, 16 * MIB)


def bus_factor(name: Collective, world: int) -> float:
    """Bytes on the bus for each byte of the message, as nccl-tests counts them (NVIDIA, nccl-tests,
    doc/PERFORMANCE.md, "Bus bandwidth"). The message is what a rank has after an all-gather, and
    before a reduce-scatter, of all ranks."""
    share = (world - 1) / world
    return 2 * share if name == "all_reduce" else share


@dataclass(frozen=True)
class CaseShape:
    case: str
    precision: str
    matmul: Matmul


def case_matmuls(quick: bool) -> list[CaseShape]:
    """The matmuls of one batch of every shipped case on one device; quick: of its forward alone.
    Equal shapes stand once, under the first case that has them; of a product that is taken in
    blocks, one block."""
    out: list[CaseShape] = []
    seen: set[tuple[object, ...]] = set()
    for name in resolve.names():
        case = resolve.resolve(name, "full").case
        precision = case.question.precision.matmul
        for one in matmuls.of_case(case, 1):
            keys = {(precision, one.layout, one.m, one.n, one.k), (name, one.name, one.layout)}
            if not keys & seen and (one.layout == "nt" or not quick):
                seen |= keys
                out.append(CaseShape(name, precision, one))
    return out


@dataclass(frozen=True)
class Heads:
    """Attention of a case: heads, groups of keys, numbers of a head, rows of so many tokens."""

    case: str
    heads: int
    kv_heads: int
    dim: int
    length: int
    rows: int

    def flops(self, rows: int, length: int) -> int:
        """Of a forward in the causal convention; a backward has twice as many."""
        return 4 * self.heads * self.dim * rows * length * (length + 1) // 2


# forwards that a backward is worth: every matmul of a forward has two in it, one for each side
BACKWARD = 2


def case_heads(quick: bool) -> list[Heads]:
    """Of every shipped case; equal ones stand once, under the first case that has them. Quick: one
    for each size of a head.
    """
    out: dict[tuple[int, ...], Heads] = {}
    for name in resolve.names():
        case = resolve.resolve(name, "full").case
        model, train = case.question.model, case.question.train
        length = min(model.positions, SCORED_LENGTH) if train is None else train.length
        rows = max(1, matmuls.batch(case)[0] // length)
        one = Heads(name, model.heads, model.kv_heads, model.dim, length, rows)
        out.setdefault((one.dim,) if quick else (one.heads, one.kv_heads, one.dim, length), one)
    return list(out.values())
