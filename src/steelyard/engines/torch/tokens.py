"""Tensor parallelism with sequence parallelism: each rank has a part of the tokens of the residual
stream, and inside attention and FFN all tokens of a part of the heads and columns.

Before a matmul that is divided by what it gives, tokens are gathered; after one that is divided by
what it takes, parts of a sum are summed and tokens divided again. A rank keeps only its own tokens
for the backward pass, and gathers the others' again there, while the gradient of the input is
computed; that is summed and divided while the gradient of the weight is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.engines.torch.exchange import Group
from steelyard.models.llama_fused import Accumulating, BlockKernels, Gradient, Linears, add_product


def gathered(x: Tensor, group: Group) -> tuple[Tensor, Any]:
    """All tokens, on their way."""
    whole = x.new_empty(len(x) * group.size, *x.shape[1:])
    return whole, group.all_gather([(whole, x.contiguous())])


def scattered(x: Tensor, group: Group) -> tuple[Tensor, Any]:
    """The sum of own tokens, on its way."""
    part = x.new_empty(len(x) // group.size, *x.shape[1:])
    return part, group.reduce_scatter([(x.contiguous(), part)])


class GatherTokens(torch.autograd.Function):
    """All tokens of what each rank has a part of."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        whole, pending = gathered(x, group)
        pending.wait()
        return whole

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        part, pending = scattered(grads[0], context.group)
        pending.wait()
        return part, None


class ScatterTokens(torch.autograd.Function):
    """Own tokens of the sum over ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        part, pending = scattered(x, group)
        pending.wait()
        return part

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole, pending = gathered(grads[0], context.group)
        pending.wait()
        return whole, None


class GatheredLinear(torch.autograd.Function):
    """All tokens times a weight, from a part of them."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, gradient: Gradient, group: Group
    ) -> Tensor:
        context.save_for_backward(x)
        context.weight, context.gradient, context.group = weight, gradient, group
        whole, pending = gathered(x, group)
        pending.wait()
        return whole @ weight.t()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        [x] = context.saved_tensors
        whole, gathering = gathered(x, context.group)
        wide = grads[0] @ context.weight
        part, scattering = scattered(wide, context.group)
        gathering.wait()
        add_product(context.gradient(context.weight), grads[0], whole)
        scattering.wait()
        return part, None, None, None


class TokenLinears:
    """The matmuls of a block whose tokens are divided: `columns` are those that are divided by what
    they give.
    """

    def __init__(self, inner: Linears, group: Group, columns: list[nn.Linear]) -> None:
        self.inner, self.group, self.columns = inner, group, {id(layer) for layer in columns}

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if id(layer) not in self.columns:
            return apply(ScatterTokens, self.inner.linear(x, layer), self.group)
        # other matmuls keep all tokens, as they want them
        if not isinstance(self.inner, Accumulating):
            return self.inner.linear(apply(GatherTokens, x, self.group), layer)
        out = apply(GatheredLinear, x, layer.weight, self.inner.gradient, self.group)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, block: int, kernels: BlockKernels
    ) -> Tensor:
        return apply(
            ScatterTokens, self.inner.swiglu_linear(gate_up, layer, block, kernels), self.group
        )


class Embed(torch.autograd.Function):
    """Rows of a table, whose gradient is added to where `gradient` says. Of a part of a table,
    which begins at token `first`, the tokens of other parts give zeros; they are summed over the
    group, and divided. Nothing comes before it: its backward pass is the stage's last, and calls
    `done`."""

    @staticmethod
    def forward(
        context: Any,
        table: Tensor,
        tokens: Tensor,
        first: int,
        gradient: Gradient,
        group: Group,
        done: Callable[[], None],
    ) -> Tensor:
        here = None
        if group.size > 1:
            tokens = tokens - first
            here = (tokens >= 0) & (tokens < len(table))
            tokens = torch.where(here, tokens, 0)
        context.save_for_backward(tokens, here)
        context.rows = len(table)  # by then its numbers may be elsewhere
        context.table, context.gradient, context.group, context.done = table, gradient, group, done
        if here is None:
            return F.embedding(tokens, table)
        rows = (
            F.embedding(tokens, table)
            if len(table)
            else table.new_empty(len(tokens), table.shape[1])
        )
        part, pending = scattered(torch.where(here[:, None], rows, 0), group)
        pending.wait()
        return part

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, ...]:
        tokens, here = context.saved_tensors
        grad = grads[0]
        if here is not None:
            grad, pending = gathered(grad, context.group)
            pending.wait()
            grad = torch.where(here[:, None], grad, 0)
        if context.rows:
            made = torch.ops.aten.embedding_dense_backward(grad, tokens, context.rows, -1, False)
            context.gradient(context.table).add_(made)
        context.done()
        return (None,) * 6


class Pick(torch.autograd.Function):
    """Some rows, each at most once: their gradients are put back without sorting them first."""

    @staticmethod
    def forward(context: Any, x: Tensor, pick: Tensor) -> Tensor:
        context.save_for_backward(pick)
        context.size = x.shape
        return x.index_select(0, pick)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [pick] = context.saved_tensors
        return grads[0].new_zeros(context.size).index_copy_(0, pick, grads[0]), None


class DividedLosses(torch.autograd.Function):
    """The cross-entropy of each target, from logits of which every rank has a part of the columns:
    they are never gathered.
    """

    @staticmethod
    def forward(
        context: Any, logits: Tensor, targets: Tensor, first: int, group: Group, code: "LossCode"
    ) -> Tensor:
        own = targets - first
        here = (own >= 0) & (own < logits.shape[1])
        own = torch.where(here, own, 0)
        most = group.total(code.most(logits), dist.ReduceOp.MAX)
        sums = group.total(code.sums(logits, most, own, here))
        spread = sums[0].log() + most
        context.save_for_backward(logits, spread, own, here)
        context.code = code
        return spread - sums[1]

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return context.code.gradients(*context.saved_tensors, grads[0]), None, None, None, None


class LossCode:
    """What a rank computes of its part of the logits, as it is written or compiled."""

    def __init__(self, compiled: bool) -> None:
        def make(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return torch.compile(function, dynamic=True) if compiled else function

        self.most, self.sums, self.gradients = make(_most), make(_sums), make(_gradients)
        self.losses = make(_losses)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """One for each target: a compiler has several ways to reduce over them, and takes another
    whenever they become few.
    """
    return F.cross_entropy(_wide(logits), targets, reduction="none")


def _most(logits: Tensor) -> Tensor:
    wide = _wide(logits)
    return wide.amax(1) if logits.shape[1] else wide.new_full(logits.shape[:1], -torch.inf)


def _sums(logits: Tensor, most: Tensor, own: Tensor, here: Tensor) -> Tensor:
    """Of the exponentials, and the logit of the target where it is here: [2, targets]."""
    wide = _wide(logits)
    if not logits.shape[1]:
        return wide.new_zeros(2, len(logits))
    target = torch.where(here, wide.gather(1, own[:, None])[:, 0], 0)
    return torch.stack(((wide - most[:, None]).exp().sum(1), target))


def _gradients(logits: Tensor, spread: Tensor, own: Tensor, here: Tensor, grad: Tensor) -> Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = (columns == own[:, None]) & here[:, None]
    out = ((_wide(logits) - spread[:, None]).exp() - hit.to(spread.dtype)) * grad[:, None]
    return out.to(logits.dtype)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
