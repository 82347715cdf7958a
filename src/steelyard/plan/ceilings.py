"""What `steelyard spec` measures, as shapes and constants: groups of ceilings, sizes, the shapes of
the shipped cases, and bounds on errors of results.

engines/torch/device_ceilings.py and its siblings measure them.
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
# rows that a case's matmul is reduced to on a slow device, at least: fewer would run another kernel
LEAST_ROWS = 64
LEAST_LENGTH = 256  # the same for tokens of a row of attention
# tokens of a text that is scored, at most; shorter than the positions of every shipped model
SCORED_LENGTH = 2048

# Largest allowed difference from fp64, as a share of the root mean square of the exact result, for
# operands that are equal in both. Normal numbers reach 4 to 5 times their root mean square, so a
# result rounded to r bits is off by up to 5·2^-(r+1): 0.0024 in fp16, 0.02 in bf16; sums in fp32
# add little. TF32 rounds its operands to 10 bits. fp8 is summed in few bits on some devices, and
# its results are bf16. int8 is exact.
BOUNDS = {
    "fp64": 1e-12,
    "fp32": 1e-4,
    "tf32": 1e-2,
    "fp16": 1e-2,
    "bf16": 4e-2,
    "fp8": 5e-2,
    "int8": 0.0,
}
ATTENTION_BOUND = 5e-2  # in bf16: the softmax's weights are rounded too
# a backward takes differences of rounded outputs, and sums rounded gradients of the heads of a
# group: 0.06 was measured
GRADIENT_BOUND = 0.2

MIB = 1 << 20
COLLECTIVE_BYTES = (MIB, 16 * MIB, 256 * MIB, 1024 * MIB)
QUICK_COLLECTIVE_BYTES = (MIB, 16 * MIB)


def bus_factor(name: Collective, world: int) -> float:
    """Return the bytes that cross a link for each byte of the message, as nccl-tests counts them
    (NVIDIA, nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth"): 2·(n-1)/n for all-reduce, else
    (n-1)/n of n ranks. The message is what a rank has after an all-gather, and before a
    reduce-scatter.
    """
    share = (world - 1) / world
    return 2 * share if name == "all_reduce" else share


@dataclass(frozen=True)
class CaseShape:
    """A matmul of a shipped case, with the case's name and matmul precision."""

    case: str
    precision: str
    matmul: Matmul


def case_matmuls(quick: bool) -> list[CaseShape]:
    """Return the matmuls of one batch of every shipped case on one device; with `quick` those of
    the forward pass only. Equal shapes are listed once, under the first case that has them; of a
    matmul that is split by rows, the first split only.
    """
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
    """The attention of a shipped case: numbers of query and key heads, numbers of a head (`dim`),
    and `rows` rows of `length` tokens.
    """

    case: str
    heads: int
    kv_heads: int
    dim: int
    length: int
    rows: int

    def flops(self, rows: int, length: int) -> int:
        """Return the FLOPs of a causal forward over `rows` rows of `length` tokens; a backward has
        twice as many.
        """
        return 4 * self.heads * self.dim * rows * length * (length + 1) // 2


# FLOPs of a backward in forwards: each matmul has two in backward, one for each operand
BACKWARD = 2


def case_heads(quick: bool) -> list[Heads]:
    """Return the attention shapes of all shipped cases; equal ones are listed once, under the first
    case that has them. With `quick`, one for each size of a head.
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
