"""What `steelyard spec` measures, as shapes and constants: groups of ceilings, sizes, the shapes of
the shipped cases, and bounds on errors of results.

engines/torch/device_ceilings.py and its siblings measure them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from steelyard.case import resolve
from steelyard.plan import matmuls
from steelyard.plan.matmuls import Matmul

CeilingGroup = Literal["matmul", "memory", "capacity", "copy", "attention", "collective"]
CEILING_GROUPS: tuple[CeilingGroup, ...] = get_args(CeilingGroup)
CeilingUnit = Literal["FLOP/s", "B/s", "B"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

SQUARE_SIDES = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SQUARE_SIDES = (512, 1024, 2048, 8192)
# rows that a case's matmul is reduced to on a slow device, at least: fewer would run another kernel
MIN_ROWS = 64
MIN_LENGTH = 256  # the same for tokens of a row of attention
# tokens of a text that is scored, at most; shorter than the positions of every shipped model
SCORED_LENGTH = 2048

# Largest allowed difference from fp64, as a share of the root mean square of the exact result, for
# operands that are equal in both. Normal numbers reach 4 to 5 times their root mean square, so a
# result rounded to r bits is off by up to 5·2^-(r+1): 0.0024 in fp16, 0.02 in bf16; sums in fp32
# add little. TF32 rounds its operands to 10 bits. fp8 is summed in few bits on some devices, and
# its results are bf16. int8 is exact.
ERROR_BOUNDS = {
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


def get_bus_factor(collective: Collective, world: int) -> float:
    """Return the bytes that cross a link for each byte of the message in a collective of `world`
    ranks, as nccl-tests counts them (NVIDIA, nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth"):
    2·(n-1)/n for all-reduce, else (n-1)/n. The message is what a rank has after an all-gather, and
    before a reduce-scatter.
    """
    share = (world - 1) / world
    return 2 * share if collective == "all_reduce" else share


@dataclass(frozen=True)
class CaseMatmul:
    """A matmul of a shipped case that `steelyard spec` measures: `case` is the name of the first
    shipped case that has it, `precision` the precision of that case's matmuls (such as bf16),
    `matmul` its shape and layout. Made by `list_shipped_matmuls`.
    """

    case: str
    precision: str
    matmul: Matmul


def list_shipped_matmuls(quick: bool) -> list[CaseMatmul]:
    """Return the matmuls of one batch of every shipped case (in size full, with its own precision)
    on one device; with `quick` those of the forward pass only.

    Equal shapes in one precision are listed once, under the first case that has them; of a matmul
    that is split by rows, the first split only.
    """
    out: list[CaseMatmul] = []
    seen: set[tuple[object, ...]] = set()
    for name in resolve.list_shipped_cases():
        case = resolve.resolve_case(name, "full").case
        precision = case.question.precision.matmul
        for matmul in matmuls.list_case_matmuls(case, 1):
            keys = {
                (precision, matmul.layout, matmul.m, matmul.n, matmul.k),
                (name, matmul.name, matmul.layout),
            }
            if not keys & seen and (matmul.layout == "nt" or not quick):
                seen |= keys
                out.append(CaseMatmul(name, precision, matmul))
    return out


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a shipped case (in size full), as `steelyard spec` measures it: `case`, its
    name; `heads` and `kv_heads`, numbers of query and key heads; `dim`, numbers of a head; and
    `rows` rows of `length` tokens in a batch. `count_flops` returns the FLOPs of a causal forward.
    Made by `list_shipped_attention`.
    """

    case: str
    heads: int
    kv_heads: int
    dim: int
    length: int
    rows: int

    def count_flops(self, rows: int, length: int) -> int:
        """Return the FLOPs of a causal attention forward with this shape's heads over `rows` rows
        of `length` tokens each, which replace the shape's own; a backward has `BACKWARD_FACTOR`
        times as many.
        """
        return 4 * self.heads * self.dim * rows * length * (length + 1) // 2


# FLOPs of a backward in forwards: each matmul has two in backward, one for each operand
BACKWARD_FACTOR = 2


def list_shipped_attention(quick: bool) -> list[AttentionShape]:
    """Return the attention shapes of all shipped cases (in size full), in their order; equal ones
    (heads, key heads, dim, length) are listed once, under the first case that has them. With
    `quick`, only the first for each `dim`.

    Rows are as long as in training; in scoring as the model's positions, at most 2048.
    """
    out: dict[tuple[int, ...], AttentionShape] = {}
    for name in resolve.list_shipped_cases():
        case = resolve.resolve_case(name, "full").case
        model, train = case.question.model, case.question.train
        length = min(model.positions, SCORED_LENGTH) if train is None else train.length
        rows = max(1, matmuls.count_tokens_and_logits(case)[0] // length)
        shape = AttentionShape(name, model.heads, model.kv_heads, model.dim, length, rows)
        out.setdefault(
            (shape.dim,) if quick else (shape.heads, shape.kv_heads, shape.dim, length), shape
        )
    return list(out.values())
