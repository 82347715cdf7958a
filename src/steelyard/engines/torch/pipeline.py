"""A pipeline: its stages pass the residual stream on, one micro-batch after the other, forward and backward in turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.engines.torch.stage import Stage
from steelyard.training.micro_batches import MicroBatch
from steelyard.training.parallel import Last

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Pipeline:
    def __init__(self, stage: Stage, index: int, group: Any, like: Tensor, tp: int, last: Last) -> None:
        """`like` is of the kind that a stage gives to the next, of whose tokens this rank has one of `tp` parts."""
        self.stage, self.index, self.count = stage, index, dist.get_world_size(group)
        self.group, self.like, self.tp, self.last = group, like, tp, last
        self.schedules: dict[tuple[int, int], tuple[_Numbered, Schedule1F1B]] = {}
        self.weigh: Callable[[Tensor], Tensor] = lambda nll: nll

    def learn(self, micros: list[MicroBatch], weigh: Callable[[Tensor], Tensor]) -> None:
        """Forward and backward of all micro-batches. The last stage's losses are weighed before the backward pass. A
        schedule has at least as many micro-batches as stages: from those that are added, nothing is learned."""
        silent = replace(micros[0], pick=micros[0].pick[:0], targets=micros[0].targets[:0])
        micros = [*micros, *[silent] * (self.count - len(micros))]
        numbered, schedule = self._schedule(len(micros), len(micros[0].tokens))
        numbered.micros, self.weigh = micros, weigh
        numbers = torch.arange(len(micros))
        given = (numbers,) if self.stage.first else ()
        schedule.step(*given, target=numbers if self.stage.last else None, number=numbers)
        numbered.micros = []

    def _schedule(self, micros: int, tokens: int) -> "tuple[_Numbered, Schedule1F1B]":
        """A schedule is made for so many micro-batches of one size; conversations have others in every step."""
        if (micros, tokens) not in self.schedules:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes seconds: not for other plans

            numbered = _Numbered(self.stage)
            number, stream, loss = torch.zeros(1, dtype=torch.int64), self._stream(tokens), self.like.new_zeros(1)
            stage = PipelineStage(
                numbered,
                self.index,
                self.count,
                self.like.device,
                input_args=number if self.stage.first else stream.requires_grad_(),
                output_args=(loss if self.stage.last else stream).requires_grad_(),
                group=self.group,
            )
            _watch(stage, self.last)
            schedule = Schedule1F1B(stage, micros, lambda out, number: self.weigh(out.sum()), scale_grads=False)
            self.schedules[micros, tokens] = numbered, schedule
        return self.schedules[micros, tokens]

    def _stream(self, tokens: int) -> Tensor:
        """Room for what one stage gives to the next of a micro-batch."""
        return self.like.new_empty(tokens // self.tp, self.like.shape[1])

    def loss(self, micro: MicroBatch) -> Tensor:
        """The summed cross-entropy of one micro-batch, known to all stages."""
        x = None
        if not self.stage.first:
            x = self._stream(len(micro.tokens))
            dist.recv(x, group=self.group, group_src=self.index - 1)
        out = self.stage(x, micro)
        if not self.stage.last:
            dist.send(out.contiguous(), group=self.group, group_dst=self.index + 1)
        total = out.double().reshape(1) if self.stage.last else torch.zeros(1, dtype=torch.float64, device=self.like.device)
        dist.broadcast(total, group=self.group, group_src=self.count - 1)
        return total[0]


class _Numbered(nn.Module):
    """A stage that finds its micro-batch by number. What passes between stages has one shape, the rest needs none.

    Not itself a sharded module, though it holds one: of such PipelineStage would put off all communication to the end."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.micros: list[MicroBatch] = []

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        out: Tensor = self.stage(None if self.stage.first else x, self.micros[int(number)])
        return out.reshape(1) if self.stage.last else out


def _watch(stage: "PipelineStage", last: Last) -> None:
    """Tell of every backward pass, before it begins, whether it is the step's last."""
    backward = stage.backward_one_chunk

    def run(bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False) -> None:
        last(last_backward)
        backward(bwd_chunk_id, loss, full_backward, last_backward)

    stage.backward_one_chunk = run  # type: ignore[method-assign]
