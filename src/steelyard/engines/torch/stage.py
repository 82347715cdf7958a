"""A pipeline stage of a tensor-parallel share, which without either is the whole model. Its parameters are plain tensors, with
the names that they have in the whole model."""

from typing import Any

from torch import nn
from torch.nn.utils import skip_init

from steelyard.models import placements
from steelyard.models.llama import Block, LlamaShape
from steelyard.models.placements import Shard
from steelyard.plan.degrees import stage_layers


class Stage(nn.Module):
    def __init__(self, shape: LlamaShape, index: int, count: int, share: Shard) -> None:
        super().__init__()
        local = placements.local(shape, share)
        self.shape, self.share = shape, share
        self.first, self.last = index == 0, index == count - 1
        begin, end = placements.box("embed.weight", shape, share)[0]
        self.first_token = begin  # of those whose rows of the tables are here
        make: Any = skip_init  # there may be no row
        if self.first:
            self.embed: nn.Embedding = make(nn.Embedding, end - begin, shape.hidden, device="meta")
        self.layers = nn.ModuleDict({str(i): Block(local) for i in stage_layers(shape.layers, count)[index]})
        if self.last:
            self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
            self.output: nn.Linear = make(nn.Linear, shape.hidden, end - begin, bias=False, device="meta")
        self.tie()

    def tie(self) -> None:
        """One table for input and output, where the shape says so."""
        if self.shape.tied and self.first and self.last:
            self.output.weight = self.embed.weight
