"""Tensor parallelism of the Llama family as a table: which dimension of each parameter is divided,
and what becomes of the output of a module that was.

A shard of the model is the same model with a part of the heads, of the FFN and of the vocabulary.
Parameters are described by their logical view, where every part that has a name of its own (a key
group, gate and up) has a dimension of its own, so that a shard is one range along one dimension,
whatever the degree. A box is such a range along every dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.shapes import vocab_rows

Box = tuple[tuple[int, int], ...]  # begin and end along every dimension of a logical view
Total = Callable[[Tensor], Tensor]  # the sum of a tensor over all shards


@dataclass(frozen=True)
class Shard:
    """Which part of a model: rank `index` of `count` that divide it equally."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


@dataclass(frozen=True)
class ParameterPlacement:
    """The shape of a parameter's logical view, and the dimension of it that is divided; None: every
    shard has all of it.
    """

    logical_shape: Callable[[LlamaShape], tuple[int, ...]]
    split: int | None
    # the first two dimensions stand the other way round in the parameter itself
    swapped: bool = False


def _qkv(shape: LlamaShape) -> tuple[int, int, int]:
    return shape.kv_heads, shape.heads // shape.kv_heads + 2, shape.head_dim


PLACEMENTS = {
    "embed.weight": ParameterPlacement(lambda s: (s.vocab, s.hidden), 0),
    "attention_norm.weight": ParameterPlacement(lambda s: (s.hidden,), None),
    "qkv.weight": ParameterPlacement(lambda s: (*_qkv(s), s.hidden), 0),
    "qkv.bias": ParameterPlacement(_qkv, 0),
    "q_norm.weight": ParameterPlacement(lambda s: (s.head_dim,), None),
    "k_norm.weight": ParameterPlacement(lambda s: (s.head_dim,), None),
    "out.weight": ParameterPlacement(lambda s: (s.hidden, s.heads * s.head_dim), 1),
    "ffn_norm.weight": ParameterPlacement(lambda s: (s.hidden,), None),
    "gate_up.weight": ParameterPlacement(
        lambda s: (2, s.ffn // s.ffn_block, s.ffn_block, s.hidden), 1, swapped=True
    ),
    "down.weight": ParameterPlacement(lambda s: (s.hidden, s.ffn), 1),
    "norm.weight": ParameterPlacement(lambda s: (s.hidden,), None),
    "output.weight": ParameterPlacement(lambda s: (s.vocab, s.hidden), 0),
}

SUMMED = ("out", "down")  # modules whose input is divided: their outputs are parts of a sum

# modules that each shard needs all tokens for, in training, where those are divided too
GATHERED = ("qkv", "gate_up")
VOCABULARY = ("embed.weight", "output.weight")


def placement(name: str) -> ParameterPlacement:
    """The row of a parameter, by its full name."""
    module, _, leaf = name.rpartition(".")
    return PLACEMENTS[f"{module.rpartition('.')[2]}.{leaf}"]


def flat_shape(name: str, logical_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor with this logical view: parts with names of their own are rows among
    the others.
    """
    if len(logical_shape) == 1 or name.endswith("bias"):
        return (math.prod(logical_shape),)
    return (math.prod(logical_shape[:-1]), logical_shape[-1])


def flat_split(name: str) -> int | None:
    """The dimension of a parameter itself that is divided."""
    if placement(name).split is None:
        return None
    return int(name.split(".")[-2] in SUMMED)


def local(shape: LlamaShape, shard: Shard) -> LlamaShape:
    """The shape of a shard."""
    n = shard.count
    for what, size in (("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
        if size % n:
            raise ValueError(f"{what} {size} cannot be divided by {n}")
    return replace(
        shape,
        heads=shape.heads // n,
        kv_heads=shape.kv_heads // n,
        ffn=shape.ffn // n,
        vocab=vocab_rows(shape.vocab, n),
    )


def box(name: str, shape: LlamaShape, shard: Shard) -> Box:
    """The part of a parameter's logical view, of the whole model's, that a shard holds. Rows that
    pad a vocabulary are in no box."""
    row = placement(name)
    ranges = [(0, size) for size in row.logical_shape(shape)]
    if row.split is not None:
        size = ranges[row.split][1]
        rows = vocab_rows(size, shard.count) if name in VOCABULARY else size // shard.count
        ranges[row.split] = (min(shard.index * rows, size), min((shard.index + 1) * rows, size))
    return tuple(ranges)


def logical_view(name: str, parameter: Tensor, shape: LlamaShape, shard: Shard) -> Tensor:
    """A shard's parameter, viewed as large as its box: writing to it writes to the parameter."""
    row = placement(name)
    size = row.logical_shape(local(shape, shard))
    whole = (
        parameter.view(size[1], size[0], *size[2:]).transpose(0, 1)
        if row.swapped
        else parameter.view(size)
    )
    if row.split is None:
        return whole
    begin, end = box(name, shape, shard)[row.split]
    return whole.narrow(row.split, 0, end - begin)


class VocabParallelEmbedding(nn.Embedding):
    """A part of an embedding table. Tokens of other parts give zeros here and their values there."""

    def __init__(self, table: nn.Embedding, first: int, total: Total) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        self.weight = table.weight
        self.first = first
        self.total = total

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        here = (own >= 0) & (own < self.num_embeddings)
        found = F.embedding(own.clamp(0, self.num_embeddings - 1), self.weight)
        return self.total(torch.where(here[..., None], found, torch.zeros_like(found)))


def apply_tensor_parallel(model: Llama, shard: Shard, total: Total) -> None:
    """Make a shard answer as the whole model does, up to its logits, which stay divided over the
    vocabulary.
    """
    if shard.count == 1:
        return
    rows = model.embed.num_embeddings
    model.embed = VocabParallelEmbedding(model.embed, shard.index * rows, total)
    if model.shape.tied:
        model.output.weight = model.embed.weight
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in SUMMED:
            module.register_forward_hook(lambda module, inputs, out: total(out))
