"""Log-probabilities of targets and their gradient, from logits in 16 bits that are computed with in
fp32.

The kernels never make an fp32 copy of all logits. The plain functions do, so models/glm_fused.py
calls them on a few rows at a time unless they are compiled.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import (
    constexpr,
    count_tiles,
    jit_without_specializing,
    next_power_of_2,
    tensor,
    tl,
)

TILE = 4096  # columns that a program loads at a time


def compute_log_prob_terms(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's log-sum-exp and its target's logit, both [rows], fp32 or wider; the
    log-probability is the second minus the first.

    `logits` are [rows, vocab], `targets` int64 [rows].
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1), wide.gather(-1, targets[:, None])[:, 0]


def log_probs_backward(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor]:
    """Return the gradient of the logits [rows, vocab], in their type, as a tuple of one tensor:
    (one_hot(targets) - exp(logits - lse)) · grad, where `lse` is that of `compute_log_prob_terms`
    and `grad` [rows] the gradient of the log-probabilities.
    """
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return (
        ((is_target.to(lse.dtype) - (logits - lse[:, None]).exp()) * grad[:, None]).to(
            logits.dtype
        ),
    )


def triton_compute_log_prob_terms(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `compute_log_prob_terms` by a kernel, a program per row; results are fp32. `logits`
    is contiguous.
    """
    rows, vocab = logits.shape
    lse, target_logits = logits.new_empty(2, rows, dtype=torch.float32)
    _compute_log_prob_terms[(rows,)](
        logits, targets, lse, target_logits, vocab, min(TILE, next_power_of_2(vocab)), num_warps=8
    )
    return lse, target_logits


def triton_log_probs_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor]:
    """Compute `log_probs_backward` by a kernel, in place: the returned gradient, in a tuple of one,
    is `logits` itself, overwritten. `logits` is contiguous.
    """
    rows, vocab = logits.shape
    columns = min(TILE, next_power_of_2(vocab))
    _log_probs_backward[(rows, count_tiles(vocab, columns))](
        logits, targets, lse, grad.contiguous(), vocab, columns, num_warps=8
    )
    return (logits,)


@jit_without_specializing()
def _compute_log_prob_terms(
    logits: tensor,
    targets: tensor,
    lse: tensor,
    target_logits: tensor,
    vocab: constexpr,
    columns: constexpr,
) -> None:
    """Write one row's log-sum-exp to lse[i] and its target's logit to target_logits[i], in fp32;
    equals `compute_log_prob_terms`.

    Program i has row i of contiguous `logits` [rows, vocab] and reads `columns` columns at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * vocab
    i = tl.arange(0, columns)
    maximum = tl.full([columns], -1e30, tl.float32)  # finite, because -inf minus -inf is NaN
    total = tl.zeros([columns], tl.float32)
    for begin in range(0, vocab, columns):
        x = tl.load(first + begin + i, begin + i < vocab, float("-inf")).to(tl.float32)
        larger = tl.maximum(maximum, x)
        total = total * tl.exp(maximum - larger) + tl.exp(x - larger)
        maximum = larger
    top = tl.max(maximum, 0)
    tl.store(lse + row, top + tl.log(tl.sum(total * tl.exp(maximum - top), 0)))
    tl.store(target_logits + row, tl.load(first + tl.load(targets + row)).to(tl.float32))


@jit_without_specializing()
def _log_probs_backward(
    logits: tensor, targets: tensor, lse: tensor, grad: tensor, vocab: constexpr, columns: constexpr
) -> None:
    """Replace a tile of logits by its gradient, (one_hot(target) - exp(logit - lse)) · grad; equals
    `log_probs_backward`.

    Program (i, c) has row i of contiguous `logits` [rows, vocab] and columns c · columns to (c + 1)
    · columns; `targets`, `lse` and `grad` (of the log-probabilities) are [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * columns + tl.arange(0, columns)
    pointers = logits + row * vocab + i
    p = tl.exp(tl.load(pointers, i < vocab, 0.0).to(tl.float32) - tl.load(lse + row))
    is_target = tl.where(i == tl.load(targets + row), 1.0, 0.0)
    tl.store(pointers, (is_target - p) * tl.load(grad + row), i < vocab)
