"""Record forward and backward of a micro-batch as two graphs (such as CUDA graphs) once for every
size, and replay them from then on.

The host then launches two graphs instead of some thousand kernels, so that a device that computes a
small model need not wait for it. Inputs of a new micro-batch are copied to where the recorded ones
lie. All else that the function reads (weights, a seed) is read as it is at the time of the replay,
and gradients that it adds to without autograd are added to again. All graphs share one memory pool,
so a backward pass must be replayed before the next forward pass.
"""

from collections.abc import Callable, Hashable
from copy import deepcopy
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Inputs = TypeVar("Inputs")


class ReplayableGraph(Protocol):
    """Recorded work of a device, such as a CUDA graph (a protocol): `replay()` launches it again,
    reading and writing the same memory as when it was recorded. A `GraphRecorder` makes it.
    """

    def replay(self) -> None:
        """Launch the recorded work again on the device, without waiting for it; it reads and writes
        the memory that it was recorded with.
        """


# calls a function once, and returns what it launched as a graph
GraphRecorder = Callable[[Callable[[], None]], ReplayableGraph]


class _GraphPair(Generic[Inputs]):
    """The recorded forward and backward graph of one size of micro-batch: `forward` and `backward`,
    each with `replay()`, and the tensors that they use: `inputs`, a copy of a micro-batch that they
    read, `loss`, which forward writes, and `grad`, the gradient of the loss that backward reads.
    Constructing it records both; `ReplayedFunction` makes it, and copies new inputs into `inputs`
    before a replay.
    """

    def __init__(
        self,
        function: Callable[[Inputs], Tensor],
        inputs: Inputs,
        loss: Tensor,
        recorder: GraphRecorder,
    ) -> None:
        """Copy the inputs, and record forward and backward of `function` on the copy by `recorder`,
        which runs each once. `loss` is an earlier loss, for its dtype, shape and device.
        """
        self.inputs = inputs = deepcopy(inputs)
        self.loss, self.grad = torch.empty_like(loss), torch.zeros_like(loss)
        pending_loss: list[Tensor] = []

        def forward() -> None:
            """Compute the loss from the copied inputs, copy its value to `self.loss`, and keep it
            with its autograd graph for `backward`.
            """
            pending_loss[:] = [function(inputs)]
            self.loss.copy_(pending_loss[0].detach())

        def backward() -> None:
            """Run backward of the loss that `forward` kept, from the gradient in `self.grad`, and
            let go of it; adds to the parameters' gradients.
            """
            pending_loss.pop().backward(self.grad)  # type: ignore[no-untyped-call]

        self.forward, self.backward = recorder(forward), recorder(backward)


class _ReplayFunction(torch.autograd.Function):
    """The autograd function that makes a replayed loss: its forward copies what the forward graph
    wrote, its backward replays the backward graph.
    """

    @staticmethod
    def forward(context: Any, anchor: Tensor, pair: _GraphPair[Any]) -> Tensor:
        """Return a copy of the loss that the forward graph has written; nothing is replayed here.
        `anchor` is a dummy that requires a gradient, so that autograd calls `backward`.
        """
        context.pair = pair
        return pair.loss.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[None, None]:
        """Copy the gradient of the loss to where the backward graph reads it, and replay that
        graph, which adds to the parameters' gradients. Returns no gradients.
        """
        context.pair.grad.copy_(grads[0])
        context.pair.backward.replay()
        return None, None


class ReplayedFunction(Generic[Inputs]):
    """A function from a micro-batch to its loss that is recorded as graphs for each size and then
    replayed: call it with a micro-batch. The loss's `backward` adds to the gradients as usual, and
    must run before the next call.

    `function` computes the loss, `recorder` records a call as a graph. `tensors(inputs)` returns
    the tensors that the function reads of its inputs; `key(inputs)` is equal for inputs whose
    tensors have equal shapes and which are equal in all else. The first micro-batch of a key is
    computed without graphs, because kernels are compiled then; the second records. `graph_pairs`
    has the graphs by key. All sizes should be met once before one is met again, since recordings
    keep their memory.
    """

    def __init__(
        self,
        function: Callable[[Inputs], Tensor],
        recorder: GraphRecorder,
        tensors: Callable[[Inputs], list[Tensor]],
        key: Callable[[Inputs], Hashable],
    ) -> None:
        """Store the arguments, which the class describes; nothing is computed or recorded yet.
        `first_losses` will have the first loss of each key, `graph_pairs` its graphs, `anchor` a
        dummy that makes autograd call a replay's backward.
        """
        self.function, self.recorder, self.tensors, self.key = function, recorder, tensors, key
        self.first_losses: dict[Hashable, Tensor] = {}  # the first loss of each size
        self.graph_pairs: dict[Hashable, _GraphPair[Inputs]] = {}
        self.anchor: Tensor | None = None  # makes autograd call a replay's backward

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return the loss of a micro-batch: computed for the first of its size (`key`), else
        replayed from graphs, which the second records. The new inputs are copied into the recorded
        ones; the loss is a new tensor, whose `backward` replays the backward graph.
        """
        new_tensors, key = self.tensors(inputs), self.key(inputs)
        if key not in self.first_losses:
            loss = self.function(inputs)
            self.first_losses[key] = loss.detach()
            return loss
        if self.anchor is None:
            self.anchor = torch.zeros((), device=new_tensors[0].device, requires_grad=True)
        if key not in self.graph_pairs:
            self.graph_pairs[key] = _GraphPair(
                self.function, inputs, self.first_losses[key], self.recorder
            )
        pair = self.graph_pairs[key]
        for recorded, new in zip(self.tensors(pair.inputs), new_tensors, strict=True):
            recorded.copy_(new)
        pair.forward.replay()
        out: Tensor = _ReplayFunction.apply(self.anchor, pair)  # type: ignore[no-untyped-call]
        return out
