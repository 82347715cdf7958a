"""Forward and backward of a micro-batch, recorded once for every size and replayed from then on:
the host then launches two graphs instead of some thousand kernels, and a device that computes a
small model need not wait for it.

A recorded function reads its inputs where they were when it was recorded, so those of a new
micro-batch are copied there. What it reads besides (weights, a seed) it finds as it is at the time
of the replay. What it adds to without autograd, gradients, it adds again. Everything recorded
shares one pool of memory: a backward pass is replayed before another forward pass is.
"""

from collections.abc import Callable, Hashable
from copy import deepcopy
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Inputs = TypeVar("Inputs")


class Graph(Protocol):
    def replay(self) -> None: ...


# what a function launches, in a graph; the function is called once
Record = Callable[[Callable[[], None]], Graph]


class _Pair(Generic[Inputs]):
    """The two graphs of one size, with where they read their inputs and write their loss."""

    def __init__(
        self, function: Callable[[Inputs], Tensor], inputs: Inputs, loss: Tensor, record: Record
    ) -> None:
        self.inputs = inputs = deepcopy(inputs)
        self.loss, self.grad = torch.empty_like(loss), torch.zeros_like(loss)
        held: list[Tensor] = []

        def forward() -> None:
            held[:] = [function(inputs)]
            self.loss.copy_(held[0].detach())

        def backward() -> None:
            held.pop().backward(self.grad)  # type: ignore[no-untyped-call]

        self.forward, self.backward = record(forward), record(backward)


class _Replay(torch.autograd.Function):
    """The loss of a forward pass that was replayed, and the replay of its backward."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, pair: _Pair[Any]) -> Tensor:
        context.pair = pair
        return pair.loss.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None]:
        context.pair.grad.copy_(grads[0])
        context.pair.backward.replay()
        return None, None


class Recorded(Generic[Inputs]):
    """A function of a micro-batch to its loss, whose `backward` adds to gradients. `tensors` are
    what it reads of the inputs, and `key` says which inputs have tensors of the same sizes and are
    the same in all else.

    The first micro-batch of a size is computed as it is: kernels are compiled and loaded then,
    which a recording cannot do. The second is recorded. So let all sizes be met once before one is
    met again: recordings keep their memory."""

    def __init__(
        self,
        function: Callable[[Inputs], Tensor],
        record: Record,
        tensors: Callable[[Inputs], list[Tensor]],
        key: Callable[[Inputs], Hashable],
    ) -> None:
        self.function, self.record, self.tensors, self.key = function, record, tensors, key
        self.met: dict[Hashable, Tensor] = {}  # a loss of each size
        self.pairs: dict[Hashable, _Pair[Inputs]] = {}
        self.anchor: Tensor | None = None  # what makes autograd call the backward of a replay

    def __call__(self, inputs: Inputs) -> Tensor:
        every, key = self.tensors(inputs), self.key(inputs)
        if key not in self.met:
            loss = self.function(inputs)
            self.met[key] = loss.detach()
            return loss
        if self.anchor is None:
            self.anchor = torch.zeros((), device=every[0].device, requires_grad=True)
        if key not in self.pairs:
            self.pairs[key] = _Pair(self.function, inputs, self.met[key], self.record)
        pair = self.pairs[key]
        for kept, one in zip(self.tensors(pair.inputs), every, strict=True):
            kept.copy_(one)
        pair.forward.replay()
        out: Tensor = _Replay.apply(self.anchor, pair)  # type: ignore[no-untyped-call]
        return out
