"""Tensor parallelism with sequence parallelism for training: each rank has a part of the tokens of
the residual stream, and inside attention and FFN all tokens of a part of the heads and columns.

Before a column-parallel matmul tokens are gathered; after a row-parallel one the partial sums are
reduce-scattered over tokens. A rank saves only its own tokens for the backward pass and gathers the
others again there, while the gradient of the input is computed; that gradient is reduce-scattered
while the gradient of the weight is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.engines.torch.collectives import PlanGroup
from steelyard.models.llama_fused import (
    AccumulatingLinears,
    BlockKernels,
    BlockLinears,
    GradientOf,
    add_product,
)


def start_gathering_tokens(x: Tensor, group: PlanGroup) -> tuple[Tensor, Any]:
    """Start an all-gather of the tokens (first dimension) of all ranks, and return (tensor [tokens
    of all ranks, ...] that will hold them in the order of ranks, collective to `wait` for). All
    ranks of the group must call it, with equally many tokens.
    """
    whole = x.new_empty(len(x) * group.size, *x.shape[1:])
    return whole, group.all_gather([(whole, x.contiguous())])


def start_scattering_tokens(x: Tensor, group: PlanGroup) -> tuple[Tensor, Any]:
    """Start a reduce-scatter over the first dimension, and return (tensor [tokens / ranks, ...]
    that will hold the sum over ranks at this rank's tokens, collective to `wait` for). All ranks of
    the group must call it; the tokens must be a multiple of the ranks.
    """
    part = x.new_empty(len(x) // group.size, *x.shape[1:])
    return part, group.reduce_scatter([(x.contiguous(), part)])


class GatherTokens(torch.autograd.Function):
    """An autograd function that gathers all tokens (first dimension) from the parts of the ranks of
    a `PlanGroup`, in the order of ranks, and waits for them; the backward pass reduce-scatters the
    gradient. All ranks of the group must run both.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, group: PlanGroup) -> Tensor:
        """Return x of all ranks of the group along the first dimension, in the order of ranks."""
        context.group = group
        whole, pending = start_gathering_tokens(x, group)
        pending.wait()
        return whole

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of gathered tokens summed over ranks, at this rank's tokens, and None
        for the group.
        """
        part, pending = start_scattering_tokens(grads[0], context.group)
        pending.wait()
        return part, None


class ScatterTokens(torch.autograd.Function):
    """An autograd function that sums partial sums of all tokens (first dimension) over the ranks of
    a `PlanGroup` and returns this rank's tokens of it (a reduce-scatter), waiting for them; the
    backward pass gathers the gradient. All ranks of the group must run both; tokens are a multiple
    of the ranks.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, group: PlanGroup) -> Tensor:
        """Return the sum of x [all tokens, ...] over the ranks of the group, at this rank's tokens:
        [tokens / ranks, ...].
        """
        context.group = group
        part, pending = start_scattering_tokens(x, group)
        pending.wait()
        return part

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of scattered tokens, gathered from all ranks: [all tokens, ...], and
        None for the group.
        """
        whole, pending = start_gathering_tokens(grads[0], context.group)
        pending.wait()
        return whole, None


class GatheredLinear(torch.autograd.Function):
    """An autograd function, the column-parallel linear layer without bias: gather the tokens of all
    ranks from this rank's x, then compute x @ weight.T, [all tokens, this rank's columns]. All
    ranks of the group must run both passes.

    The backward pass gathers the tokens again, returns this rank's tokens of x's gradient, summed
    over ranks, adds the weight's gradient to the tensor that `gradient(weight)` returns and gives
    autograd none for it.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, gradient: GradientOf, group: PlanGroup
    ) -> Tensor:
        """Return x of all ranks times weightᵀ: [all tokens, this rank's output columns]. Of x only
        this rank's tokens are saved.
        """
        context.save_for_backward(x)
        context.weight, context.gradient, context.group = weight, gradient, group
        whole, pending = start_gathering_tokens(x, group)
        pending.wait()
        return whole @ weight.t()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of x, this rank's tokens of it summed over ranks, and None for all
        else; add the weight's to `gradient(weight)`. Tokens are gathered again; that and the
        reduce-scatter overlap with the two matmuls.
        """
        [x] = context.saved_tensors
        whole, gathering = start_gathering_tokens(x, context.group)
        input_grad = grads[0] @ context.weight
        part, scattering = start_scattering_tokens(input_grad, context.group)
        gathering.wait()
        add_product(context.gradient(context.weight), grads[0], whole)
        scattering.wait()
        return part, None, None, None


class TokenParallelLinears:
    """The matmuls of transformer blocks (`linear`, `swiglu_linear`: a `BlockLinears`) whose tokens
    are divided among the tensor-parallel ranks of `group`, which must all call them: the matmul is
    that of `inner`, with a gather of tokens before or a reduce-scatter after it.

    `columns` are the column-parallel layers (QKV, gate and up), which take this rank's tokens and
    return all tokens with this rank's columns; all others are row-parallel, and the other way
    round.
    """

    def __init__(self, inner: BlockLinears, group: PlanGroup, columns: list[nn.Linear]) -> None:
        self.inner, self.group, self.columns = inner, group, {id(layer) for layer in columns}

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Apply a layer of a tensor-parallel block: a column-parallel one takes this rank's tokens
        and returns all tokens with this rank's columns; a row-parallel one takes all tokens and
        returns this rank's, summed over ranks. All ranks must call it.
        """
        if id(layer) not in self.columns:
            return apply_function(ScatterTokens, self.inner.linear(x, layer), self.group)
        # other matmuls keep all tokens, as they want them
        if not isinstance(self.inner, AccumulatingLinears):
            return self.inner.linear(apply_function(GatherTokens, x, self.group), layer)
        out = apply_function(GatheredLinear, x, layer.weight, self.inner.gradient, self.group)
        return out if layer.bias is None else out + layer.bias

    def swiglu_linear(
        self, gate_up: Tensor, layer: nn.Linear, chunk: int, kernels: BlockKernels
    ) -> Tensor:
        """Apply SwiGLU and the row-parallel layer after it to all tokens, and return this rank's
        tokens of the sum over ranks. `chunk` is the number of columns in which gate and up
        alternate in `gate_up`.
        """
        return apply_function(
            ScatterTokens, self.inner.swiglu_linear(gate_up, layer, chunk, kernels), self.group
        )


class EmbedTokens(torch.autograd.Function):
    """An autograd function: embedding lookup in this rank's rows of the vocabulary, which begin at
    token `first_token`.

    With several ranks, tokens of other ranks' rows give zeros, and the result is reduce-scattered
    to this rank's tokens. The backward pass adds the table's gradient to the tensor that
    `gradient(table)` returns, gives autograd none, and then calls `done`: it is the last of the
    stage.
    """

    @staticmethod
    def forward(
        context: Any,
        table: Tensor,
        tokens: Tensor,
        first_token: int,
        gradient: GradientOf,
        group: PlanGroup,
        done: Callable[[], None],
    ) -> Tensor:
        """Return the embeddings of `tokens` [T] from this rank's rows `table`: [T, hidden], or with
        several ranks this rank's [T / ranks, hidden]. A rank's table may have no rows. `done` is
        called after the backward pass.
        """
        is_own = None
        if group.size > 1:
            tokens = tokens - first_token
            is_own = (tokens >= 0) & (tokens < len(table))
            tokens = torch.where(is_own, tokens, 0)
        context.save_for_backward(tokens, is_own)
        context.rows = len(table)  # by then its numbers may be elsewhere
        context.table, context.gradient, context.group, context.done = table, gradient, group, done
        if is_own is None:
            return F.embedding(tokens, table)
        rows = (
            F.embedding(tokens, table)
            if len(table)
            else table.new_empty(len(tokens), table.shape[1])
        )
        part, pending = start_scattering_tokens(torch.where(is_own[:, None], rows, 0), group)
        pending.wait()
        return part

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, ...]:
        """Add the embedding table's gradient to `gradient(table)` in place, unless this rank has no
        rows; then call `done` and return None for every input. With several ranks the gradients of
        all tokens are gathered first.
        """
        tokens, is_own = context.saved_tensors
        grad = grads[0]
        if is_own is not None:
            grad, pending = start_gathering_tokens(grad, context.group)
            pending.wait()
            grad = torch.where(is_own[:, None], grad, 0)
        if context.rows:
            table_grad = torch.ops.aten.embedding_dense_backward(
                grad, tokens, context.rows, -1, False
            )
            context.gradient(context.table).add_(table_grad)
        context.done()
        return (None,) * 6


class PickRows(torch.autograd.Function):
    """An autograd function that selects rows of x, each at most once (not checked):
    x.index_select(0, pick). The backward pass puts gradients back into zeros without sorting
    indices, which torch's own does.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, pick: Tensor) -> Tensor:
        """Return the rows of x at the indices `pick`."""
        context.save_for_backward(pick)
        context.size = x.shape
        return x.index_select(0, pick)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x: zeros with the picked rows' gradients put back; None for
        `pick`.
        """
        [pick] = context.saved_tensors
        return grads[0].new_zeros(context.size).index_copy_(0, pick, grads[0]), None


class ColumnParallelLosses(torch.autograd.Function):
    """An autograd function: cross-entropy of each target, [targets], from logits [targets, columns]
    of which every tensor-parallel rank has some columns, beginning at token `first_token`. Logits
    are never gathered; only maxima and sums are all-reduced.
    """

    @staticmethod
    def forward(
        context: Any,
        logits: Tensor,
        targets: Tensor,
        first_token: int,
        group: PlanGroup,
        functions: "LossFunctions",
    ) -> Tensor:
        """Return log(sum of exp(logits)) - target's logit of each target in nats, [targets] in fp32
        at least, the same on all ranks. `targets` are tokens of the whole vocabulary. All ranks
        must call it: two all-reduces.
        """
        local_targets = targets - first_token
        is_own = (local_targets >= 0) & (local_targets < logits.shape[1])
        local_targets = torch.where(is_own, local_targets, 0)
        maxima = group.reduce_now(functions.maxima(logits), dist.ReduceOp.MAX)
        sums = group.reduce_now(functions.sums(logits, maxima, local_targets, is_own))
        log_sum_exp = sums[0].log() + maxima
        context.save_for_backward(logits, log_sum_exp, local_targets, is_own)
        context.functions = functions
        return log_sum_exp - sums[1]

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of this rank's columns of the logits, in their dtype, and None for
        all else. Nothing is exchanged.
        """
        return context.functions.gradients(*context.saved_tensors, grads[0]), None, None, None, None


class LossFunctions:
    """The functions that compute losses and their gradients from logits: compiled by torch.compile
    for dynamic sizes, on their first call, if `compiled`, else as they are written.

    For logits divided by columns among ranks (`ColumnParallelLosses`): `maxima` of a row's columns,
    `sums` of exponentials with targets' logits, `gradients` of logits. `losses` is the
    cross-entropy of whole logits.
    """

    def __init__(self, compiled: bool) -> None:
        """Choose the functions, compiled or plain; a compiled one is compiled when it is first
        called.
        """

        def maybe_compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            """Return the function compiled for dynamic sizes if `compiled`, else itself."""
            return torch.compile(function, dynamic=True) if compiled else function

        self.maxima, self.sums, self.gradients = (
            maybe_compile(_maxima),
            maybe_compile(_exp_sums_and_targets),
            maybe_compile(_logit_gradients),
        )
        self.losses = maybe_compile(_losses)


def _at_least_fp32(logits: Tensor) -> Tensor:
    """Return the logits as fp32 if their type is narrower, else unchanged."""
    return logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target in nats, [targets], computed in fp32 at least. It is
    not summed here: a compiler would choose other code for a sum whenever there are few targets.
    """
    return F.cross_entropy(_at_least_fp32(logits), targets, reduction="none")


def _maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each target in this rank's columns, [targets] in fp32 at least;
    -inf if this rank has no columns.
    """
    wide = _at_least_fp32(logits)
    return wide.amax(1) if logits.shape[1] else wide.new_full(logits.shape[:1], -torch.inf)


def _exp_sums_and_targets(
    logits: Tensor, maxima: Tensor, local_targets: Tensor, is_own: Tensor
) -> Tensor:
    """Return [2, targets] in fp32 at least: the sum of exp(logit - maximum) over this rank's
    columns, and the target's logit if its column is on this rank, else 0; zeros if this rank has no
    columns. `maxima` [targets] are over all ranks; `local_targets` are the targets' columns on this
    rank, valid where `is_own` is true.
    """
    wide = _at_least_fp32(logits)
    if not logits.shape[1]:
        return wide.new_zeros(2, len(logits))
    target = torch.where(is_own, wide.gather(1, local_targets[:, None])[:, 0], 0)
    return torch.stack(((wide - maxima[:, None]).exp().sum(1), target))


def _logit_gradients(
    logits: Tensor, log_sum_exp: Tensor, local_targets: Tensor, is_own: Tensor, grad: Tensor
) -> Tensor:
    """Return the gradient of this rank's logits [targets, columns], (softmax - one-hot target) x
    grad, in the logits' dtype. `log_sum_exp` [targets] is over all ranks, `grad` [targets] the
    gradient of the losses; a target's column `local_targets` counts only where `is_own` is true.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = (columns == local_targets[:, None]) & is_own[:, None]
    out = (
        (_at_least_fp32(logits) - log_sum_exp[:, None]).exp() - is_target.to(log_sum_exp.dtype)
    ) * grad[:, None]
    return out.to(logits.dtype)


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call an autograd Function with these arguments and return its output, typed as one tensor."""
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
