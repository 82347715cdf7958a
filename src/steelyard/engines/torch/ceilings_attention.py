"""Attention ceilings of `steelyard spec`: forward and backward of every attention kernel with the
heads of each shipped case, checked against fp64.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steelyard.engine.bench import Budgeted, Made, Row
from steelyard.models.attention import KERNELS, layout
from steelyard.plan.ceilings import (
    ATTENTION_BOUND,
    BACKWARD,
    GRADIENT_BOUND,
    LEAST_LENGTH,
    Heads,
    case_heads,
)

PRECISION = "bf16"  # which every kernel takes
# tokens of the rows compared with fp64: two rows, so that attention across rows is detected
CHECKED_ROWS = (150, 106)


def rows(place: torch.device, lacks: Mapping[str, str], quick: bool) -> Iterator[Row]:
    """Yield a row for each case's heads, attention kernel and direction, in bf16. `lacks` maps a
    precision to the reason why the device does not have it.
    """
    for heads in case_heads(quick):
        for kernel in KERNELS:
            for backward in (False, True):
                way = "backward" if backward else "forward"
                name = f"{heads.case} {kernel} {way}"
                make = partial(_make, place, heads, kernel, backward)
                yield Row(
                    "attention",
                    name,
                    PRECISION,
                    "FLOP/s",
                    make,
                    lacks.get(PRECISION),
                    like=f"{kernel} {way}",
                )


def _make(place: torch.device, heads: Heads, kernel: str, backward: bool, budget: Budgeted) -> Made:
    """Allocate attention of the case's heads, with fewer rows (then shorter ones, at least 256
    tokens) until one call fits the budget. A backward counts twice the FLOPs of a forward. The
    smallest size is used even if it does not fit.
    """
    count, length, times = heads.rows, heads.length, BACKWARD if backward else 1
    while (
        budget.most is not None
        and times * heads.flops(count, length) > budget.most
        and (count > 1 or length > LEAST_LENGTH)
    ):
        count, length = (count // 2, length) if count > 1 else (1, max(LEAST_LENGTH, length // 2))
    work = _work(place, heads, kernel, [length] * count, backward)
    detail = {
        "heads": heads.heads,
        "kv_heads": heads.kv_heads,
        "dim": heads.dim,
        "rows": count,
        "tokens": length,
    }
    return Made(
        work,
        times * heads.flops(count, length),
        partial(_check, place, heads, kernel, backward),
        detail,
    )


def _inputs(place: torch.device, heads: Heads, lens: list[int], learn: bool) -> list[Tensor]:
    """Return random bf16 queries, keys and values, [tokens of all rows, heads or kv_heads, head
    dim] each; with gradients if `requires_grad`.
    """
    numbers = (heads.heads, heads.kv_heads, heads.kv_heads)
    return [
        torch.randn(sum(lens), n, heads.dim, device=place, dtype=torch.bfloat16).requires_grad_(
            learn
        )
        for n in numbers
    ]


def _work(
    place: torch.device, heads: Heads, kernel: str, lens: list[int], backward: bool
) -> Callable[[], Any]:
    """Return a function that runs the kernel's forward, or only its backward over a graph that is
    computed once here. `lens` are tokens of each row.
    """
    q, k, v = _inputs(place, heads, lens, backward)
    run = partial(KERNELS[kernel], q, k, v, layout(lens, None, place), None)
    if not backward:
        return run
    out = run()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _check(place: torch.device, heads: Heads, kernel: str, backward: bool) -> tuple[float, float]:
    """Run the kernel on two short rows and return (error, bound) against fp64: of the output, or
    the largest of the three gradients' errors.
    """
    lens = list(CHECKED_ROWS)
    q, k, v = inputs = _inputs(place, heads, lens, backward)
    wide = [one.detach().double().requires_grad_(backward) for one in inputs]
    told = KERNELS[kernel](q, k, v, layout(lens, None, place), None)
    right = _reference(wide[0], wide[1], wide[2], lens)
    if not backward:
        return _apart(told, right), ATTENTION_BOUND
    gradient = torch.randn_like(told)
    ours = torch.autograd.grad(told, inputs, gradient)
    theirs = torch.autograd.grad(right, wide, gradient.double())
    return max(_apart(a, b) for a, b in zip(ours, theirs, strict=True)), GRADIENT_BOUND


def _reference(q: Tensor, k: Tensor, v: Tensor, lens: list[int]) -> Tensor:
    """Compute causal attention inside each row by its definition, from [tokens, heads, D] packed
    rows; returns the same shape as q.
    """
    group = q.shape[1] // k.shape[1]
    out = []
    for a, b, c in zip(*(torch.split(one, lens) for one in (q, k, v)), strict=True):
        keys, values = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", a, keys) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        out.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        )
    return torch.cat(out)


def _apart(told: Tensor, right: Tensor) -> float:
    """Return the largest difference, each relative to its own right value plus the root mean square
    of all: a row's first tokens see few keys and have values many times larger than the others.
    """
    told, right = told.detach().double(), right.detach()
    return float(((told - right).abs() / (right.abs() + right.square().mean().sqrt())).max())
