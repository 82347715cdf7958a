"""Tensor parallelism of the Llama family as a table: which dimension of each parameter is divided
among shards, and what happens to the outputs of divided modules.

A shard is the same model with part of the heads, the FFN and the vocabulary. A parameter is
described by its logical view, in which each named part (key groups, gate and up) has a dimension of
its own, so that a shard is one range along one dimension whatever the degree. A box is such a range
along every dimension. Used by weights/ (loading and converting shards), engines/torch and
engines/megatron.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.shapes import count_vocab_rows

Box = tuple[tuple[int, int], ...]  # begin and end along every dimension of a logical view
SumOverShards = Callable[[Tensor], Tensor]  # returns the sum of a tensor over all shards


@dataclass(frozen=True)
class Shard:
    """Which part of a model a tensor-parallel rank has: number `index` (from 0) of `count` shards,
    equal ones except that the last ones' parts of the vocabulary may be shorter or empty. The
    default, `WHOLE`, is the whole model. Also used for the shards of rows into which replicas
    divide a parameter.
    """

    index: int = 0
    count: int = 1


WHOLE = Shard()


@dataclass(frozen=True)
class ParameterPlacement:
    """How tensor parallelism divides a parameter, a row of `PLACEMENTS`: `logical_shape(shape)`
    gives the shape of its logical view (in which a shard is a range of one dimension) from the
    model's shape, `split` is the dimension of that view that is divided (None: every shard has the
    whole parameter), and `swapped` is True if the stored parameter has the first two dimensions in
    the other order.
    """

    logical_shape: Callable[[LlamaShape], tuple[int, ...]]
    split: int | None
    # True if the first two dimensions are in the other order in the stored parameter
    swapped: bool = False


def _get_qkv_logical_shape(shape: LlamaShape) -> tuple[int, int, int]:
    """Return the logical shape of QKV's output: key groups, heads of a group (queries, key, value),
    head dimension.
    """
    return shape.kv_heads, shape.heads // shape.kv_heads + 2, shape.head_dim


PLACEMENTS = {
    "embed.weight": ParameterPlacement(lambda s: (s.vocab, s.hidden), 0),
    "attention_norm.weight": ParameterPlacement(lambda s: (s.hidden,), None),
    "qkv.weight": ParameterPlacement(lambda s: (*_get_qkv_logical_shape(s), s.hidden), 0),
    "qkv.bias": ParameterPlacement(_get_qkv_logical_shape, 0),
    "q_norm.weight": ParameterPlacement(lambda s: (s.head_dim,), None),
    "k_norm.weight": ParameterPlacement(lambda s: (s.head_dim,), None),
    "out.weight": ParameterPlacement(lambda s: (s.hidden, s.heads * s.head_dim), 1),
    "ffn_norm.weight": ParameterPlacement(lambda s: (s.hidden,), None),
    "gate_up.weight": ParameterPlacement(
        lambda s: (2, s.ffn // s.gate_up_chunk, s.gate_up_chunk, s.hidden), 1, swapped=True
    ),
    "down.weight": ParameterPlacement(lambda s: (s.hidden, s.ffn), 1),
    "norm.weight": ParameterPlacement(lambda s: (s.hidden,), None),
    "output.weight": ParameterPlacement(lambda s: (s.vocab, s.hidden), 0),
}

SUMMED_MODULES = ("out", "down")  # their inputs are divided: outputs must be summed over shards

# modules before which tokens are gathered in training with sequence parallelism
GATHERED_MODULES = ("qkv", "gate_up")
VOCABULARY_PARAMETERS = ("embed.weight", "output.weight")


def find_placement(name: str) -> ParameterPlacement:
    """Return the placement of a parameter by its full name, such as `layers.0.qkv.weight`; raise
    KeyError if unknown.
    """
    module, _, leaf = name.rpartition(".")
    return PLACEMENTS[f"{module.rpartition('.')[2]}.{leaf}"]


def flatten_logical_shape(name: str, logical_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the stored tensor of parameter `name` with this logical view: one
    dimension for norms and biases, otherwise two, with all but the last merged into rows.
    """
    if len(logical_shape) == 1 or name.endswith("bias"):
        return (math.prod(logical_shape),)
    return (math.prod(logical_shape[:-1]), logical_shape[-1])


def find_flat_split(name: str) -> int | None:
    """Return the dimension of the stored parameter (by its full name) that tensor parallelism
    divides: 0 (rows), 1 (columns: `out` and `down`) or None (not divided). Raises KeyError if the
    name is unknown.
    """
    if find_placement(name).split is None:
        return None
    return int(name.split(".")[-2] in SUMMED_MODULES)


def make_shard_shape(shape: LlamaShape, shard: Shard) -> LlamaShape:
    """Return the shape of one shard of a model of this shape: heads, kv_heads and ffn divided by
    the number of shards, and the vocabulary padded and divided if there are several. Raises
    ValueError if that number does not divide kv_heads and ffn.
    """
    n = shard.count
    for name, size in (("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
        if size % n:
            raise ValueError(f"{name} {size} cannot be divided by {n}")
    return replace(
        shape,
        heads=shape.heads // n,
        kv_heads=shape.kv_heads // n,
        ffn=shape.ffn // n,
        vocab=count_vocab_rows(shape.vocab, n),
    )


def find_shard_box(name: str, shape: LlamaShape, shard: Shard) -> Box:
    """Return the range (begin, end), along every dimension of the whole parameter's logical view,
    that a shard holds; `shape` is that of the whole model. Rows that pad a vocabulary are in no
    box, so that a last shard's may be shorter or empty.
    """
    row = find_placement(name)
    ranges = [(0, size) for size in row.logical_shape(shape)]
    if row.split is not None:
        size = ranges[row.split][1]
        rows = (
            count_vocab_rows(size, shard.count)
            if name in VOCABULARY_PARAMETERS
            else size // shard.count
        )
        ranges[row.split] = (min(shard.index * rows, size), min((shard.index + 1) * rows, size))
    return tuple(ranges)


def view_logically(name: str, parameter: Tensor, shape: LlamaShape, shard: Shard) -> Tensor:
    """Return a view of a shard's parameter in its logical shape, as large as its box, without rows
    that pad a vocabulary: writing to it writes to the parameter. `shape` is that of the whole
    model.
    """
    row = find_placement(name)
    size = row.logical_shape(make_shard_shape(shape, shard))
    whole = (
        parameter.view(size[1], size[0], *size[2:]).transpose(0, 1)
        if row.swapped
        else parameter.view(size)
    )
    if row.split is None:
        return whole
    begin, end = find_shard_box(name, shape, shard)[row.split]
    return whole.narrow(row.split, 0, end - begin)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which this shard holds the rows (token ids) from `first` on; ids of other
    shards give zeros, and `sum_over_shards(tensor)` adds up the results, so that all shards must
    call it together and all get the embeddings of all tokens. It takes over the weight of the given
    table.
    """

    def __init__(self, table: nn.Embedding, first: int, sum_over_shards: SumOverShards) -> None:
        """Take over the weight of `table`, this shard's rows; no memory is allocated."""
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        self.weight = table.weight
        self.first = first
        self.sum_over_shards = sum_over_shards

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of all tokens, [..., hidden], from this shard's rows and a sum over
        all shards.
        """
        row = tokens - self.first
        in_shard = (row >= 0) & (row < self.num_embeddings)
        embedded = F.embedding(row.clamp(0, self.num_embeddings - 1), self.weight)
        return self.sum_over_shards(
            torch.where(in_shard[..., None], embedded, torch.zeros_like(embedded))
        )


def apply_tensor_parallel(model: Llama, shard: Shard, sum_over_shards: SumOverShards) -> None:
    """Make a shard compute what the whole model does, by changing it in place: its embedding
    becomes a `VocabParallelEmbedding`, and forward hooks sum the outputs of `out` and `down` over
    shards. Logits stay divided over the vocabulary. Does nothing for one shard.

    All shards must then run the model together; `sum_over_shards` returns the sum of a tensor over
    them.
    """
    if shard.count == 1:
        return
    rows = model.embed.num_embeddings
    model.embed = VocabParallelEmbedding(model.embed, shard.index * rows, sum_over_shards)
    if model.shape.tied:
        model.output.weight = model.embed.weight
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in SUMMED_MODULES:
            module.register_forward_hook(lambda module, inputs, out: sum_over_shards(out))
