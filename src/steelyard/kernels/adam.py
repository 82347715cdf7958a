"""AdamW's update of many tensors in one pass over memory (Loshchilov and Hutter 2019): gradient
clipping, the update, a copy of the weights in the type that the model computes in, and zeroing of
the gradients.

PyTorch takes one pass for each of these. All arithmetic is fp32. Tensors are cut into parts of
`PART` elements; an int64 matrix on the device has one row for each part, with the addresses of its
weights, gradients, both moments and copy, and its number of elements. One Triton program updates
one part. Called by `training/optimizer.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, tensor, tl, varied

PART = 65536  # elements that one program updates
SIZE, WARPS = 2048, 8  # elements that a program loads at a time
ALIGNED = 16  # addresses (bytes) and sizes that are multiples of it are loaded as vectors


@dataclass(frozen=True)
class Updated:
    """A parameter's tensors that AdamW reads and writes: weight, gradient, first and second moment,
    and a copy of the weight.

    All are contiguous, of equal size, and must stay at their addresses. `copy` has another type
    than `weight`, for the model to compute with; None if the model computes with `weight` itself.
    """

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    # the weight in the type that the model computes in; None: the weight itself
    copy: Tensor | None

    @property
    def every(self) -> list[Tensor]:
        """The five tensors in the order of the address matrix: weight, gradient, first moment,
        second moment, copy (the weight again if there is no copy).
        """
        return [
            self.weight,
            self.gradient,
            self.first,
            self.second,
            self.weight if self.copy is None else self.copy,
        ]

    def rows(self) -> list[list[int]]:
        """Return a row for each part of at most `PART` elements: the addresses of the five tensors
        at its beginning, and its number of elements. Raises ValueError if a tensor is not
        contiguous or has another size than the weight.
        """
        count = self.weight.numel()
        if not all(one.is_contiguous() and one.numel() == count for one in self.every):
            raise ValueError("tensors of one weight differ in size, or do not lie end to end")
        return [
            [
                *(one.data_ptr() + begin * one.element_size() for one in self.every),
                min(PART, count - begin),
            ]
            for begin in range(0, count, PART)
        ]

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype, bool]:
        """What tensors of one kernel launch have in common: the weight's type, the copy's type, and
        whether size and all addresses are multiples of `ALIGNED`, so that the kernel loads vectors.
        """
        aligned = all(
            number % ALIGNED == 0
            for number in (self.weight.numel(), *(one.data_ptr() for one in self.every))
        )
        return self.weight.dtype, self.every[-1].dtype, aligned


@dataclass(frozen=True)
class Numbers:
    """The numbers of one AdamW update: learning rate, weight decay, betas, eps, the norm that
    gradients are clipped to, and `step`, the number of updates including this one, for bias
    correction.
    """

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float
    clip: float
    updates: int


class Update:
    """A fused AdamW update of tensors that share hyperparameters; calling it runs one kernel launch
    for each combination of types and alignment.
    """

    def __init__(self, tensors: Iterable[Updated]) -> None:
        """Group the tensors by launch and copy the matrix of their addresses to their device. Empty
        tensors are left out. Raises ValueError for tensors that are not contiguous or differ in
        size.
        """
        found: dict[tuple[torch.dtype, torch.dtype, bool], list[Updated]] = {}
        # a rank may have no element of a small parameter
        for one in (one for one in tensors if one.weight.numel()):
            found.setdefault(one.kind, []).append(one)
        self.kept = found  # keeps the tensors alive whose addresses are stored
        self.tables = {
            kind: (
                torch.tensor([row for one in every for row in one.rows()], dtype=torch.int64).to(
                    every[0].weight.device
                )
            )
            for kind, every in found.items()
        }

    def __call__(self, norm: Tensor, numbers: Numbers, zero: bool) -> None:
        """Update all weights, moments and copies in place.

        Gradients are multiplied by min(1, max_norm / (norm + 1e-6)) first, where `norm` is a tensor
        on the device with the norm of all gradients of the model. With `zero` the gradients are set
        to zero afterwards.
        """
        first, second = numbers.betas
        left = 1 - first**numbers.updates, (1 - second**numbers.updates) ** 0.5
        for (kept, copied, aligned), table in self.tables.items():
            _update[(len(table),)](
                table, norm, numbers.clip, numbers.lr,
                1 - numbers.lr * numbers.decay, first, second,
                numbers.eps, *left, _type(kept),
                _type(copied), kept != copied, zero,
                ALIGNED if aligned else 1, SIZE, num_warps=WARPS,
            )  # fmt: skip

    def compile(self, numbers: Numbers, zero: bool) -> None:
        """Compile the kernels that a call would use, by updating throw-away tensors of the same
        types; the real tensors do not change.
        """
        for (kept, copied, aligned), every in self.kept.items():
            weight = torch.zeros(
                ALIGNED if aligned else 1, dtype=kept, device=every[0].weight.device
            )
            copy = weight.to(copied) if kept != copied else None
            gradient, first, second = torch.zeros(
                3, *weight.shape, dtype=kept, device=weight.device
            )
            other = Update([Updated(weight, gradient, first, second, copy)])
            other(torch.zeros((), device=weight.device), numbers, zero)


def _type(dtype: torch.dtype) -> object:
    """Return Triton's type for fp32, bf16 or fp16; raise KeyError for any other."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


@varied()
def _at(table: tensor, column: constexpr, dtype: constexpr, aligned: constexpr) -> tensor:
    """Return the pointer to one tensor's part that this program updates: the address in column
    `column` of row program_id(0), as a pointer to `dtype`, declared to be a multiple of `aligned`.
    """
    address = tl.load(table + tl.program_id(0).to(tl.int64) * 6 + column)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), aligned)


@varied("clip", "lr", "shrink", "beta1", "beta2", "eps", "left1", "left2")
def _update(
    table: tensor, norm: tensor, clip: tensor, lr: tensor, shrink: tensor, beta1: tensor,
    beta2: tensor, eps: tensor, left1: tensor, left2: tensor, kept: constexpr,
    copied: constexpr, copies: constexpr, zero: constexpr, aligned: constexpr,
    size: constexpr,
) -> None:  # fmt: skip
    """Update one part of a tensor by AdamW; program i has row i of `addresses`, an int64 matrix
    [parts, 6].

        g = gradient · min(1, clip / (norm + 1e-6))
        m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g²
        w = w · shrink - lr / left1 · m / (sqrt(v) / left2 + eps)

    `shrink` is 1 - lr · weight decay, `left1` is 1 - beta1^step and `left2` sqrt(1 - beta2^step).
    Weights, gradients and moments have the type `weight_dtype`; if `has_copy`, w is also written to
    the copy, of type `copy_dtype`; if `zero`, zeros are written to the gradient. It reads `tile`
    elements at a time. Equals `torch.optim.AdamW` after `clip_grad_norm_`, computed in fp32.
    """
    weight, gradient = _at(table, 0, kept, aligned), _at(table, 1, kept, aligned)
    first, second = _at(table, 2, kept, aligned), _at(table, 3, kept, aligned)
    copy = _at(table, 4, copied, aligned)
    count = tl.multiple_of(
        tl.load(table + tl.program_id(0).to(tl.int64) * 6 + 5).to(tl.int32), aligned
    )
    scale = tl.minimum(clip / (tl.load(norm).to(tl.float32) + 1e-6), 1.0)
    for begin in range(0, count, size):
        i = begin + tl.arange(0, size)
        there = i < count
        g = tl.load(gradient + i, there, 0.0).to(tl.float32) * scale
        m = tl.load(first + i, there, 0.0).to(tl.float32)
        v = tl.load(second + i, there, 0.0).to(tl.float32)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        w = tl.load(weight + i, there, 0.0).to(tl.float32) * shrink
        w -= lr / left1 * m / (tl.sqrt(v) / left2 + eps)
        tl.store(weight + i, w, there)
        tl.store(first + i, m, there)
        tl.store(second + i, v, there)
        if copies:
            tl.store(copy + i, w, there)
        if zero:
            tl.store(gradient + i, tl.zeros([size], tl.float32), there)
