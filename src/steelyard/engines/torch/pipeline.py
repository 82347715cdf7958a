"""The pipeline schedule of engine `torch` (1F1B): stages pass the residual stream on, one
micro-batch after the other, forward and backward in turn.

Stage s of p has at most p - s micro-batches in flight. All stages know the size of every
micro-batch, so sizes may differ. What a stage sends to a neighbour and what it receives from it are
exchanged together, so that neither waits for the other; a sent tensor is kept alive until the next
exchange with the same neighbour.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engines.torch.collectives import PlanGroup
from steelyard.training.micro_batches import MicroBatch
from steelyard.training.placement import WeighLoss

# called before every backward pass: whether it is the step's first, and its last
BeforeBackward = Callable[[bool, bool], None]


class StageComputation(Protocol):
    """The interface of what computes one pipeline stage (`LlamaStage` is one): `forward(x, micro)`
    returns the stage's output for a micro-batch, on the last stage the summed loss; `x` is the
    output of the stage before, None on the first.
    """

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """Return the stage's output; `x` is the output of the stage before, None for the first
        stage.
        """


@dataclass
class Neighbour:
    """The stage before or after this one in the pipeline, number `index` of `group`: `exchange`
    sends a tensor to it and receives one, `wait_for_sends` ends sends that are under way. At the
    ends of the pipeline `index` is out of range and every exchange does nothing. `sent` are
    (tensor, send) of sends that may still read the tensor.
    """

    group: PlanGroup
    index: int
    sent: list[tuple[Tensor, dist.Work]] = field(default_factory=list)

    def exchange(self, give: Tensor | None, take: Tensor | None) -> Tensor | None:
        """Send `give` to this neighbour and receive into `take` in one batched operation; either
        may be None. Returns `take`, filled, or None if it is None or there is no such neighbour.

        Waits for the receive and for sends of earlier calls, not for this one's: the sent tensor is
        remembered until the next exchange or `wait_for_sends`.
        """
        if not 0 <= self.index < self.group.size:
            return None
        ops = []
        if give is not None:
            give = give.contiguous()
            ops.append(dist.P2POp(dist.isend, give, group=self.group.handle, group_peer=self.index))
        if take is not None:
            ops.append(dist.P2POp(dist.irecv, take, group=self.group.handle, group_peer=self.index))
        if not ops:
            return None
        works = dist.batch_isend_irecv(ops)
        if take is not None:
            works[-1].wait()
        self.wait_for_sends()
        if give is not None:
            self.sent.append((give, works[0]))
        return take

    def wait_for_sends(self) -> None:
        """Wait until all tensors sent to this neighbour have been transferred and may be
        overwritten.
        """
        for _, work in self.sent:
            work.wait()
        self.sent = []


class Pipeline:
    """Runs this rank's stage for all micro-batches of a step in 1F1B order (`run_step`), or one
    without backward (`loss`, known to all stages); all stages call them together. `group` are the
    ranks of the stages, in order. `in_flight` are (input, output) of forward passes without their
    backward pass.

    `like` has the dtype, device and width (its second dimension) of the stream that stages
    exchange; of its tokens this rank has one of `tp` parts. `before_backward(is_first, is_last)` is
    called before each backward pass of a step.
    """

    def __init__(
        self,
        stage: StageComputation,
        group: PlanGroup,
        like: Tensor,
        tp: int,
        before_backward: BeforeBackward,
    ) -> None:
        """Store this rank's stage of the pipeline and its two neighbours; nothing is sent. The
        parameters are explained at the class.
        """
        self.stage, self.group, self.like, self.tp, self.before_backward = (
            stage,
            group,
            like,
            tp,
            before_backward,
        )
        self.first, self.last = group.rank == 0, group.rank == group.size - 1
        self.previous_stage, self.next_stage = (
            Neighbour(group, group.rank - 1),
            Neighbour(group, group.rank + 1),
        )
        self.in_flight: list[tuple[Tensor | None, Tensor]] = []

    def run_step(self, micros: list[MicroBatch], weigh: WeighLoss) -> None:
        """Run forward and backward of all micro-batches of a step on this rank's stage; all stages
        must call it, with the same micro-batches. Gradients accumulate in the parameters. On the
        last stage `weigh` turns each micro-batch's summed loss into what backward starts from;
        elsewhere it is not called.
        """
        warmup_count = min(self.group.size - self.group.rank - 1, len(micros))
        x = self._receive_input(micros, 0)
        for i in range(warmup_count):
            self.next_stage.exchange(self._forward(x, micros[i], weigh), None)
            x = self._receive_input(micros, i + 1)
        for i in range(len(micros)):
            out = (
                self._forward(x, micros[warmup_count + i], weigh)
                if warmup_count + i < len(micros)
                else None
            )
            grad = self.next_stage.exchange(out, self._empty_stream(micros[i]))
            self.before_backward(i == 0, i == len(micros) - 1)
            input_grad = self._backward(grad)
            following = warmup_count + i + 1
            buffer = self._empty_stream(micros[following]) if following < len(micros) else None
            x = self.previous_stage.exchange(input_grad, buffer)
        self.previous_stage.wait_for_sends()
        self.next_stage.wait_for_sends()

    def _receive_input(self, micros: list[MicroBatch], number: int) -> Tensor | None:
        """Receive the input of micro-batch `number` of `micros` from the stage before, and wait for
        it; None on the first stage, or if there is no such micro-batch.
        """
        return (
            self.previous_stage.exchange(None, self._empty_stream(micros[number]))
            if number < len(micros)
            else None
        )

    def _forward(self, x: Tensor | None, micro: MicroBatch, weigh: WeighLoss) -> Tensor:
        """Run the stage's forward pass, queue its graph for the backward pass, and return the
        detached output: the stream for the next stage or, on the last stage, the weighed loss. Sets
        `x.requires_grad`.
        """
        if x is not None:
            x.requires_grad_()
        out = self.stage.forward(x, micro)
        if self.last:
            out = weigh(out)
        self.in_flight.append((x, out))
        return out.detach()

    def _backward(self, grad: Tensor | None) -> Tensor | None:
        """Run the stage's backward pass for the oldest micro-batch in flight and return the
        gradient of its input; None on the first stage. `grad` is the gradient of the stage's
        output, None on the last stage.
        """
        x, out = self.in_flight.pop(0)
        torch.autograd.backward(out, grad)
        return None if x is None else x.grad

    def _empty_stream(self, micro: MicroBatch) -> Tensor:
        """Allocate an uninitialized tensor for what one stage sends to the next for this
        micro-batch: [tokens / tp, hidden].
        """
        return self.like.new_empty(len(micro.tokens) // self.tp, self.like.shape[1])

    def loss(self, micro: MicroBatch) -> Tensor:
        """Return the summed cross-entropy of one micro-batch in nats, an fp64 scalar, broadcast
        from the last stage of this pipeline to all. Runs no backward pass; all stages must call it.
        """
        out = self.stage.forward(self._receive_input([micro], 0), micro)
        self.next_stage.exchange(None if self.last else out, None)
        self.next_stage.wait_for_sends()
        total = (
            out.double().reshape(1)
            if self.last
            else torch.zeros(1, dtype=torch.float64, device=self.like.device)
        )
        dist.broadcast(total, group=self.group.handle, group_src=self.group.size - 1)
        return total[0]
