"""A pipeline stage, which without a pipeline is the whole model, and how it is made tensor parallel.

Its parameters have the names that they have in the whole model. Between its modules are plain tensors: each tensor-parallel
rank has a part of the tokens of the residual stream, and inside attention and FFN a part of the heads and of the columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from steelyard.models.llama import Block, LlamaShape, rotary
from steelyard.models.placements import TRAINING_PLACEMENTS
from steelyard.plan.degrees import stage_layers
from steelyard.training.micro_batches import MicroBatch


class GatheredColwise(ColwiseParallel):
    """Waits for the tokens of other ranks at once. Selective recomputation keeps the product and gathers its factor again
    for the backward pass; where that was left on its way until then, ranks over gloo crashed now and then (torch 2.13)."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: tuple[DTensor], device_mesh: DeviceMesh
    ) -> DTensor:
        return inputs[0].redistribute(placements=desired_input_layouts)


# How a module divided so takes its input and gives its output. Tokens are dimension 0.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "table": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "tokens": lambda: SequenceParallel(sequence_dim=0),
    "columns": lambda: GatheredColwise(input_layouts=Shard(0)),
    "sum": lambda: RowwiseParallel(output_layouts=Shard(0)),
    "logits": lambda: ColwiseParallel(use_local_output=False),
}


class Stage(nn.Module):
    def __init__(self, shape: LlamaShape, index: int, count: int, kernel: str) -> None:
        super().__init__()
        self.shape, self.kernel = shape, kernel
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in stage_layers(shape.layers, count)[index]})
        if self.last:
            self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
            self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.read: Callable[[Tensor, Tensor], Tensor] = summed_loss
        self.tie()

    def tie(self) -> None:
        """One table for input and output, where the shape says so; moving a module to a device makes two of it."""
        if self.shape.tied and self.first and self.last:
            self.output.weight = self.embed.weight

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """The residual stream after this stage; of the last one, the summed cross-entropy of the micro-batch."""
        if x is None:
            x = self.embed(micro.tokens).clone()  # a plain tensor: one still on its way is another type to a compiler
        cos, sin = rotary(micro.positions, self.shape, x.dtype)
        delta = torch.zeros_like(x)
        for block in self.layers.values():
            x, delta = block(x, delta, cos, sin, micro.rows, self.kernel, None)[:2]
        out: Tensor = x + delta
        return self._loss(out, micro) if self.last else out

    def _loss(self, x: Tensor, micro: MicroBatch) -> Tensor:
        hidden = self.norm(x)
        if isinstance(hidden, DTensor):
            hidden = hidden.full_tensor()
        loss = self.read(self.output(hidden[micro.pick]), micro.targets)
        return loss.to_local() if isinstance(loss, DTensor) else loss


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
    return F.cross_entropy(wide, targets, reduction="sum")


def tensor_parallel(stage: Stage, mesh: DeviceMesh) -> None:
    """Make every rank hold and compute its share. Nothing is sent to the others: weights are filled later."""
    styles = {}
    for name, _ in stage.named_modules():
        kind = TRAINING_PLACEMENTS.get(name.rpartition(".")[2])
        if kind is not None:
            styles[name] = STYLES[kind]()
    parallelize_module(stage, mesh, styles, src_data_rank=None)
