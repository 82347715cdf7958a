"""AdamW's update of many tensors in one pass over memory (Loshchilov and Hutter 2019): gradient
clipping, the update, a copy of the weights in the type that the model computes in, and zeroing of
the gradients.

PyTorch takes one pass for each of these. All arithmetic is fp32. Tensors are cut into parts of
`PART` elements; an int64 matrix on the device has one row for each part, with the addresses of its
weights, gradients, both moments and copy, and its number of elements. One Triton program updates
one part. Called by `training/adamw.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.jit import constexpr, jit_without_specializing, tensor, tl

PART = 65536  # elements that one program updates
TILE, WARPS = 2048, 8  # elements that a program loads at a time
ALIGNED = 16  # addresses (bytes) and sizes that are multiples of it are loaded as vectors


@dataclass(frozen=True)
class AdamTensors:
    """A parameter's tensors that AdamW reads and writes: `weight`, `gradient`, `first_moment`,
    `second_moment`, and `copy`, the weight in another type for the model to compute with (None if
    the model computes with `weight` itself).

    All are contiguous and of equal size, which `list_address_rows` checks, and must stay at their
    addresses. Gradient and moments must have the type of the weight, which is not checked.
    """

    weight: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    # the weight in the type that the model computes in; None: the weight itself
    copy: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """The five tensors in the order of the address matrix: weight, gradient, first moment,
        second moment, copy (the weight again if there is no copy).
        """
        return [
            self.weight,
            self.gradient,
            self.first_moment,
            self.second_moment,
            self.weight if self.copy is None else self.copy,
        ]

    def list_address_rows(self) -> list[list[int]]:
        """Return a row of six integers for each part of at most `PART` elements of this parameter:
        the addresses of its five tensors (weight, gradient, both moments, copy) at the part's
        beginning, and the part's number of elements. Raises ValueError if a tensor is not
        contiguous or has another size than the weight.
        """
        count = self.weight.numel()
        if not all(x.is_contiguous() and x.numel() == count for x in self.tensors):
            raise ValueError("the tensors of a parameter differ in size or are not contiguous")
        return [
            [
                *(x.data_ptr() + begin * x.element_size() for x in self.tensors),
                min(PART, count - begin),
            ]
            for begin in range(0, count, PART)
        ]

    @property
    def launch_key(self) -> tuple[torch.dtype, torch.dtype, bool]:
        """What tensors of one kernel launch have in common: the weight's type, the copy's type, and
        whether size and all addresses are multiples of `ALIGNED`, so that the kernel loads vectors.
        """
        aligned = all(
            number % ALIGNED == 0
            for number in (self.weight.numel(), *(x.data_ptr() for x in self.tensors))
        )
        return self.weight.dtype, self.tensors[-1].dtype, aligned


@dataclass(frozen=True)
class AdamHyperparameters:
    """The numbers of one AdamW update: learning rate `lr`, `weight_decay`, `betas`, `eps`,
    `max_norm`, the norm that gradients are clipped to, and `step`, the number of updates including
    this one (from 1), for bias correction.
    """

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_norm: float
    step: int


class FusedAdamW:
    """A fused AdamW update of tensors that share hyperparameters: calling it updates all of them,
    by one kernel launch for each combination of types and alignment (`AdamTensors.launch_key`);
    `compile` only compiles those kernels.

    `addresses` has for each launch the int64 matrix [parts, 6] of addresses; `tensors_by_launch`
    keeps the tensors alive.
    """

    def __init__(self, tensors: Iterable[AdamTensors]) -> None:
        """Group the tensors by launch (types and alignment) and copy the matrix of their addresses
        to their device. Parameters without elements are left out. Raises ValueError for tensors of
        a parameter that are not contiguous or differ in size.
        """
        by_launch: dict[tuple[torch.dtype, torch.dtype, bool], list[AdamTensors]] = {}
        # a rank may have no element of a small parameter
        for one in (one for one in tensors if one.weight.numel()):
            by_launch.setdefault(one.launch_key, []).append(one)
        self.tensors_by_launch = by_launch  # keeps the tensors alive whose addresses are stored
        self.addresses = {
            kind: (
                torch.tensor(
                    [row for one in group for row in one.list_address_rows()], dtype=torch.int64
                ).to(group[0].weight.device)
            )
            for kind, group in by_launch.items()
        }

    def __call__(self, norm: Tensor, hyperparameters: AdamHyperparameters, zero: bool) -> None:
        """Update all weights, moments and copies by one step of AdamW, in place.

        Gradients are multiplied by min(1, max_norm / (norm + 1e-6)) first, where `norm` is a tensor
        on the device with the norm of all gradients of the model. With `zero` the gradients are set
        to zero afterwards, otherwise they stay as they were. Raises KeyError for types other than
        fp32, bf16 and fp16.
        """
        beta1, beta2 = hyperparameters.betas
        bias_corrections = 1 - beta1**hyperparameters.step, (1 - beta2**hyperparameters.step) ** 0.5
        for (weight_dtype, copy_dtype, aligned), rows in self.addresses.items():
            _adamw_update[(len(rows),)](
                rows, norm, hyperparameters.max_norm, hyperparameters.lr,
                1 - hyperparameters.lr * hyperparameters.weight_decay, beta1, beta2,
                hyperparameters.eps, *bias_corrections, _get_triton_dtype(weight_dtype),
                _get_triton_dtype(copy_dtype), weight_dtype != copy_dtype, zero,
                ALIGNED if aligned else 1, TILE, num_warps=WARPS,
            )  # fmt: skip

    def compile(self, hyperparameters: AdamHyperparameters, zero: bool) -> None:
        """Compile the kernels that a call with this `zero` would use, by updating throw-away
        tensors of the same types and alignment; the real tensors do not change.
        """
        for (weight_dtype, copy_dtype, aligned), group in self.tensors_by_launch.items():
            weight = torch.zeros(
                ALIGNED if aligned else 1, dtype=weight_dtype, device=group[0].weight.device
            )
            copy = weight.to(copy_dtype) if weight_dtype != copy_dtype else None
            gradient, first, second = torch.zeros(
                3, *weight.shape, dtype=weight_dtype, device=weight.device
            )
            throwaway = FusedAdamW([AdamTensors(weight, gradient, first, second, copy)])
            throwaway(torch.zeros((), device=weight.device), hyperparameters, zero)


def _get_triton_dtype(dtype: torch.dtype) -> object:
    """Return Triton's type for fp32, bf16 or fp16; raise KeyError for any other."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


@jit_without_specializing()
def _get_part_pointer(
    addresses: tensor, column: constexpr, dtype: constexpr, aligned: constexpr
) -> tensor:
    """Return the pointer to one tensor's part that this program updates: the address in column
    `column` of row program_id(0), as a pointer to `dtype`, declared to be a multiple of `aligned`.
    """
    address = tl.load(addresses + tl.program_id(0).to(tl.int64) * 6 + column)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), aligned)


@jit_without_specializing("clip", "lr", "shrink", "beta1", "beta2", "eps", "left1", "left2")
def _adamw_update(
    addresses: tensor, norm: tensor, clip: tensor, lr: tensor, shrink: tensor, beta1: tensor,
    beta2: tensor, eps: tensor, left1: tensor, left2: tensor, weight_dtype: constexpr,
    copy_dtype: constexpr, has_copy: constexpr, zero: constexpr, aligned: constexpr,
    tile: constexpr,
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
    weight, gradient = (
        _get_part_pointer(addresses, 0, weight_dtype, aligned),
        _get_part_pointer(addresses, 1, weight_dtype, aligned),
    )
    first, second = (
        _get_part_pointer(addresses, 2, weight_dtype, aligned),
        _get_part_pointer(addresses, 3, weight_dtype, aligned),
    )
    copy = _get_part_pointer(addresses, 4, copy_dtype, aligned)
    count = tl.multiple_of(
        tl.load(addresses + tl.program_id(0).to(tl.int64) * 6 + 5).to(tl.int32), aligned
    )
    scale = tl.minimum(clip / (tl.load(norm).to(tl.float32) + 1e-6), 1.0)
    for begin in range(0, count, tile):
        i = begin + tl.arange(0, tile)
        mask = i < count
        g = tl.load(gradient + i, mask, 0.0).to(tl.float32) * scale
        m = tl.load(first + i, mask, 0.0).to(tl.float32)
        v = tl.load(second + i, mask, 0.0).to(tl.float32)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        w = tl.load(weight + i, mask, 0.0).to(tl.float32) * shrink
        w -= lr / left1 * m / (tl.sqrt(v) / left2 + eps)
        tl.store(weight + i, w, mask)
        tl.store(first + i, m, mask)
        tl.store(second + i, v, mask)
        if has_copy:
            tl.store(copy + i, w, mask)
        if zero:
            tl.store(gradient + i, tl.zeros([tile], tl.float32), mask)
