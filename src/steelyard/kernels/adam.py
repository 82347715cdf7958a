"""AdamW's update of many tensors in one pass over memory: clipping, the update, the copy in the
type that is computed in, and the gradients set to zero. Torch takes a pass for each of these. All
is computed in fp32 (Loshchilov and Hutter 2019).

A table on the device has a row for each part of a tensor: the addresses of its weights, gradients,
moments and copy, and how many numbers it has. A program has a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, tensor, tl, varied

PART = 65536  # numbers of a program
SIZE, WARPS = 2048, 8  # numbers that it reads at once
ALIGNED = 16  # bytes of an address, and numbers of a part, that are read in vectors


@dataclass(frozen=True)
class Updated:
    """A tensor, all of whose tensors lie end to end each and stay where they are."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    # of another type; None where the weights are computed with as they are kept
    copy: Tensor | None

    @property
    def every(self) -> list[Tensor]:
        return [
            self.weight,
            self.gradient,
            self.first,
            self.second,
            self.weight if self.copy is None else self.copy,
        ]

    def rows(self) -> list[list[int]]:
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
        """What one launch has in common."""
        aligned = all(
            number % ALIGNED == 0
            for number in (self.weight.numel(), *(one.data_ptr() for one in self.every))
        )
        return self.weight.dtype, self.every[-1].dtype, aligned


@dataclass(frozen=True)
class Numbers:
    """Of one update. `decay` is that of weights, `updates` how many there are with this one."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float
    clip: float
    updates: int


class Update:
    """Of tensors that have everything in common but their sizes."""

    def __init__(self, tensors: Iterable[Updated]) -> None:
        found: dict[tuple[torch.dtype, torch.dtype, bool], list[Updated]] = {}
        # a rank may hold nothing of a small one
        for one in (one for one in tensors if one.weight.numel()):
            found.setdefault(one.kind, []).append(one)
        self.kept = found  # nothing that a table points at goes
        self.tables = {
            kind: (
                torch.tensor([row for one in every for row in one.rows()], dtype=torch.int64).to(
                    every[0].weight.device
                )
            )
            for kind, every in found.items()
        }

    def __call__(self, norm: Tensor, numbers: Numbers, zero: bool) -> None:
        """Clip by the norm of all gradients (fp32), update, and with `zero` set the gradients to
        zero.
        """
        first, second = numbers.betas
        left = 1 - first**numbers.updates, (1 - second**numbers.updates) ** 0.5
        for (kept, copied, aligned), table in self.tables.items():
            _update[(len(table),)](
                table, norm, numbers.clip, numbers.lr, 1 - numbers.lr * numbers.decay, first, second, numbers.eps, *left,
                _type(kept), _type(copied), kept != copied, zero, ALIGNED if aligned else 1, SIZE, num_warps=WARPS,
            )  # fmt: skip

    def compile(self, numbers: Numbers, zero: bool) -> None:
        """What a call needs, by a call that changes other tensors."""
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
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


@varied()
def _at(table: tensor, column: constexpr, dtype: constexpr, aligned: constexpr) -> tensor:
    """Where a tensor's part begins."""
    address = tl.load(table + tl.program_id(0).to(tl.int64) * 6 + column)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), aligned)


@varied("clip", "lr", "shrink", "beta1", "beta2", "eps", "left1", "left2")
def _update(
    table: tensor, norm: tensor, clip: tensor, lr: tensor, shrink: tensor, beta1: tensor, beta2: tensor, eps: tensor,
    left1: tensor, left2: tensor, kept: constexpr, copied: constexpr, copies: constexpr, zero: constexpr, aligned: constexpr,
    size: constexpr,
) -> None:  # fmt: skip
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
