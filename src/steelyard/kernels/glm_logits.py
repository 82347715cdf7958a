"""Log-probabilities of targets from logits, which are in the precision of the matmuls and are read
as fp32: no fp32 copy of all of them is ever there. Without Triton they are read a few rows at a
time."""

import torch
from torch import Tensor

from steelyard.kernels.jit import blocks, constexpr, power_of_2, tensor, tl, varied

COLUMNS = 4096  # of a row, that a program reads at once


def log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row, and its target's logit."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1), wide.gather(-1, targets[:, None])[:, 0]


def log_probs_backward(logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor]:
    """The gradient of the logits."""
    right = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return (
        ((right.to(lse.dtype) - (logits - lse[:, None]).exp()) * grad[:, None]).to(logits.dtype),
    )


def triton_log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    lse, found = logits.new_empty(2, rows, dtype=torch.float32)
    _log_probs[(rows,)](
        logits, targets, lse, found, vocab, min(COLUMNS, power_of_2(vocab)), num_warps=8
    )
    return lse, found


def triton_log_probs_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor]:
    """In the place of the logits, which nothing reads any more."""
    rows, vocab = logits.shape
    block = min(COLUMNS, power_of_2(vocab))
    _log_probs_backward[(rows, blocks(vocab, block))](
        logits, targets, lse, grad.contiguous(), vocab, block, num_warps=8
    )
    return (logits,)


@varied()
def _log_probs(
    logits: tensor, targets: tensor, lse: tensor, found: tensor, vocab: constexpr, block: constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * vocab
    i = tl.arange(0, block)
    most = tl.full([block], -1e30, tl.float32)  # finite: less itself it must not be NaN
    total = tl.zeros([block], tl.float32)
    for begin in range(0, vocab, block):
        x = tl.load(here + begin + i, begin + i < vocab, float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        total = total * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    top = tl.max(most, 0)
    tl.store(lse + row, top + tl.log(tl.sum(total * tl.exp(most - top), 0)))
    tl.store(found + row, tl.load(here + tl.load(targets + row)).to(tl.float32))


@varied()
def _log_probs_backward(
    logits: tensor, targets: tensor, lse: tensor, grad: tensor, vocab: constexpr, block: constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    at = logits + row * vocab + i
    p = tl.exp(tl.load(at, i < vocab, 0.0).to(tl.float32) - tl.load(lse + row))
    right = tl.where(i == tl.load(targets + row), 1.0, 0.0)
    tl.store(at, (right - p) * tl.load(grad + row), i < vocab)
