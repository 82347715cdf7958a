"""Attention ceilings of `steelyard spec`: forward and backward of every attention kernel with the
heads of each shipped case, checked against fp64.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steelyard.engine.ceiling_rows import CallBudget, CeilingRow, PreparedCeiling
from steelyard.models.attention import ATTENTION_KERNELS, make_packed_layout
from steelyard.plan.ceiling_shapes import (
    ATTENTION_BOUND,
    BACKWARD_FACTOR,
    GRADIENT_BOUND,
    MIN_LENGTH,
    AttentionShape,
    list_shipped_attention,
)

PRECISION = "bf16"  # which every kernel takes
# tokens of the rows compared with fp64: two rows, so that attention across rows is detected
CHECKED_ROWS = (150, 106)


def attention_rows(
    device: torch.device, lacks: Mapping[str, str], quick: bool
) -> Iterator[CeilingRow]:
    """Yield a row of `steelyard spec` for each shipped case's heads, attention kernel and direction
    (forward, backward), in bf16 and FLOP/s; with `quick`, one case for each size of a head. `lacks`
    maps a precision to the reason why the device does not have it; the rows are then unavailable.
    """
    for heads in list_shipped_attention(quick):
        for kernel in ATTENTION_KERNELS:
            for backward in (False, True):
                direction = "backward" if backward else "forward"
                name = f"{heads.case} {kernel} {direction}"
                prepare = partial(_prepare_attention, device, heads, kernel, backward)
                yield CeilingRow(
                    "attention",
                    name,
                    PRECISION,
                    "FLOP/s",
                    prepare,
                    lacks.get(PRECISION),
                    kind=f"{kernel} {direction}",
                )


def _prepare_attention(
    device: torch.device, heads: AttentionShape, kernel: str, backward: bool, budget: CallBudget
) -> PreparedCeiling:
    """Allocate attention of the case's heads and return it ready to be timed, with the rows halved,
    then their length (at least 256 tokens), until one call fits the budget. The smallest size is
    used even if it does not fit. A backward counts twice the FLOPs of a causal forward.
    """
    count, length, flops_factor = heads.rows, heads.length, BACKWARD_FACTOR if backward else 1
    while (
        budget.max_amount is not None
        and flops_factor * heads.count_flops(count, length) > budget.max_amount
        and (count > 1 or length > MIN_LENGTH)
    ):
        count, length = (count // 2, length) if count > 1 else (1, max(MIN_LENGTH, length // 2))
    call = _attention_call(device, heads, kernel, [length] * count, backward)
    detail = {
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "dim": heads.dim,
        "rows": count,
        "tokens": length,
    }
    return PreparedCeiling(
        call,
        flops_factor * heads.count_flops(count, length),
        partial(_check_attention, device, heads, kernel, backward),
        detail,
    )


def _random_inputs(
    device: torch.device, heads: AttentionShape, lens: list[int], requires_grad: bool
) -> list[Tensor]:
    """Return random bf16 queries, keys and values, [tokens of all rows, heads or kv_heads, head
    dim] each; `lens` are tokens of each row. With `requires_grad` they are leaves of an autograd
    graph.
    """
    head_counts = (heads.heads, heads.kv_heads, heads.kv_heads)
    return [
        torch.randn(sum(lens), n, heads.dim, device=device, dtype=torch.bfloat16).requires_grad_(
            requires_grad
        )
        for n in head_counts
    ]


def _attention_call(
    device: torch.device, heads: AttentionShape, kernel: str, lens: list[int], backward: bool
) -> Callable[[], Any]:
    """Return a function without arguments that runs the kernel's forward, or if `backward` only its
    backward, over a graph that is computed once here. `lens` are tokens of each row; inputs are
    random.
    """
    q, k, v = _random_inputs(device, heads, lens, backward)
    run = partial(ATTENTION_KERNELS[kernel], q, k, v, make_packed_layout(lens, None, device), None)
    if not backward:
        return run
    out = run()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _check_attention(
    device: torch.device, heads: AttentionShape, kernel: str, backward: bool
) -> tuple[float, float]:
    """Run the kernel on two rows of 150 and 106 random tokens and return (`_max_error` against
    fp64, bound): of the output or, if `backward`, the largest of the three gradients' errors.
    """
    lens = list(CHECKED_ROWS)
    q, k, v = inputs = _random_inputs(device, heads, lens, backward)
    fp64_inputs = [tensor.detach().double().requires_grad_(backward) for tensor in inputs]
    result = ATTENTION_KERNELS[kernel](q, k, v, make_packed_layout(lens, None, device), None)
    expected = _attention_by_definition(fp64_inputs[0], fp64_inputs[1], fp64_inputs[2], lens)
    if not backward:
        return _max_error(result, expected), ATTENTION_BOUND
    gradient = torch.randn_like(result)
    gradients = torch.autograd.grad(result, inputs, gradient)
    expected_gradients = torch.autograd.grad(expected, fp64_inputs, gradient.double())
    return max(
        _max_error(a, b) for a, b in zip(gradients, expected_gradients, strict=True)
    ), GRADIENT_BOUND


def _attention_by_definition(q: Tensor, k: Tensor, v: Tensor, lens: list[int]) -> Tensor:
    """Compute causal attention inside each row by its definition: q [tokens, heads, D], k and v
    [tokens, kv_heads, D], packed rows of `lens` tokens. Returns the same shape as q. Each key head
    serves heads / kv_heads neighbouring query heads.
    """
    group = q.shape[1] // k.shape[1]
    out = []
    for a, b, c in zip(*(torch.split(tensor, lens) for tensor in (q, k, v)), strict=True):
        keys, values = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", a, keys) * q.shape[-1] ** -0.5
        masked = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        out.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(masked, -torch.inf).softmax(-1), values)
        )
    return torch.cat(out)


def _max_error(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference from the expected numbers, each relative to its own expected
    value plus the root mean square of all: a row's first tokens see few keys and have values many
    times larger than the others. NaN if the result has one.
    """
    result, expected = result.detach().double(), expected.detach()
    return float(
        ((result - expected).abs() / (expected.abs() + expected.square().mean().sqrt())).max()
    )
