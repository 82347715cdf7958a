"""What a token's loss and the model's answer need of a row of logits (log-sum-exp, target's logit,
highest logit), in one pass and in fp32.

Called by scoring/answers.py, where each tensor-parallel shard reads its own columns of the
vocabulary and the results are joined.
"""

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, jit_without_specializing, next_power_of_2, tensor, tl

TILE = 4096  # columns that a program loads at a time


def reduce_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return four values of each row of logits as fp32 [4, rows].

    They are the log-sum-exp; the logit in column `targets` (-inf if that is no column of this
    shard: negative, or the width or more); the highest logit; and the first column of the highest
    logit minus `targets`, 0 where the target is the likeliest.
    """
    values = logits.float()
    in_shard = (targets >= 0) & (targets < values.shape[-1])
    target = values.gather(-1, targets.clamp(0, values.shape[-1] - 1)[:, None])[:, 0]
    top, best = values.max(-1)
    return torch.stack(
        (
            values.logsumexp(-1),
            torch.where(in_shard, target, -torch.inf),
            top,
            (best - targets).float(),
        )
    )


def triton_reduce_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute `reduce_logits` by a kernel, a program per row; without rows nothing is launched and
    the result is [4, 0]. Rows of `logits` may be apart in memory, columns not.
    """
    rows, width = logits.shape
    out = logits.new_empty(4, rows, dtype=torch.float32)
    if rows:
        columns = min(TILE, next_power_of_2(width))
        _reduce_logits[(rows,)](
            logits, targets.contiguous(), out, logits.stride(0), rows, width, columns, num_warps=8
        )
    return out


@jit_without_specializing("rows")
def _reduce_logits(
    logits: tensor,
    targets: tensor,
    out: tensor,
    stride: tensor,
    rows: tensor,
    width: constexpr,
    columns: constexpr,
) -> None:
    """Reduce one row of logits to four values; equals `reduce_logits`.

    Program i has row i of `logits` [rows, width], whose rows are `stride` elements apart, and
    column targets[i]; it writes log-sum-exp, target's logit, highest logit and its offset from the
    target to out[0..3][i], fp32 [4, rows]. It reads `columns` columns at a time: every lane keeps
    the running sum of exponentials, the maximum and its column, and the lanes are joined at the
    end.
    """
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    i = tl.arange(0, columns)
    top = tl.full([columns], -3.0e38, tl.float32)  # finite, because inf minus inf is NaN
    top_column = tl.zeros([columns], tl.int32)
    total = tl.zeros([columns], tl.float32)
    for begin in range(0, width, columns):
        x = tl.load(first + begin + i, begin + i < width, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top_column = tl.where(x > top, begin + i, top_column)
        top = higher
    highest = tl.max(top, 0)
    total = total * tl.exp(top - highest)
    best = tl.min(tl.where(top == highest, top_column, width), 0)
    target_column = tl.load(targets + row)
    in_shard = (target_column >= 0) & (target_column < width)
    target = tl.load(first + tl.where(in_shard, target_column, 0)).to(tl.float32)
    tl.store(out + row, tl.log(tl.sum(total, 0)) + highest)
    tl.store(out + rows + row, tl.where(in_shard, target, float("-inf")))
    tl.store(out + 2 * rows + row, highest)
    tl.store(out + 3 * rows + row, (best - target_column).to(tl.float32))
