"""What a loss needs of a row of logits, in one pass over them; all is computed in fp32."""

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, power_of_2, tensor, tl, varied

NUMBERS = 4096  # that a program reads at once


def read_logits(logits: Tensor, own: Tensor) -> Tensor:
    """Per row: log of the summed exponentials, the logit at `own` (-inf where that is in no
    column), the highest logit, and how far from `own` the first of the highest stands: [4, rows],
    in fp32."""
    values = logits.float()
    here = (own >= 0) & (own < values.shape[-1])
    target = values.gather(-1, own.clamp(0, values.shape[-1] - 1)[:, None])[:, 0]
    top, best = values.max(-1)
    return torch.stack(
        (values.logsumexp(-1), torch.where(here, target, -torch.inf), top, (best - own).float())
    )


def triton_read_logits(logits: Tensor, own: Tensor) -> Tensor:
    rows, width = logits.shape
    out = logits.new_empty(4, rows, dtype=torch.float32)
    if rows:
        each = min(NUMBERS, power_of_2(width))
        _read[(rows,)](
            logits, own.contiguous(), out, logits.stride(0), rows, width, each, num_warps=8
        )
    return out


@varied("rows")
def _read(
    logits: tensor,
    own: tensor,
    out: tensor,
    stride: tensor,
    rows: tensor,
    width: constexpr,
    each: constexpr,
) -> None:
    """Each lane keeps the sum, the highest and its place of the columns it reads; they are joined
    at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    i = tl.arange(0, each)
    top = tl.full([each], -3.0e38, tl.float32)  # finite: the difference of two infinities is none
    place = tl.zeros([each], tl.int32)
    total = tl.zeros([each], tl.float32)
    for begin in range(0, width, each):
        x = tl.load(first + begin + i, begin + i < width, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        place = tl.where(x > top, begin + i, place)
        top = higher
    highest = tl.max(top, 0)
    total = total * tl.exp(top - highest)
    best = tl.min(tl.where(top == highest, place, width), 0)
    wanted = tl.load(own + row)
    here = (wanted >= 0) & (wanted < width)
    target = tl.load(first + tl.where(here, wanted, 0)).to(tl.float32)
    tl.store(out + row, tl.log(tl.sum(total, 0)) + highest)
    tl.store(out + rows + row, tl.where(here, target, float("-inf")))
    tl.store(out + 2 * rows + row, highest)
    tl.store(out + 3 * rows + row, (best - wanted).to(tl.float32))
