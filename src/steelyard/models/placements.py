"""Tensor parallelism of the Llama family as a table: which dimension of each parameter is divided, and what becomes of the
output of a module that was.

A share of the model is the same model with a part of the heads, of the FFN and of the vocabulary. Parameters are described
in their plain form, where every part that has a name of its own (a key group, gate and up) has a dimension of its own, so
that a share is one range along one dimension, whatever the degree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.models.llama import Llama, LlamaShape

VOCAB_MULTIPLE = 64  # a divided vocabulary is padded to a multiple of this in every share, as Megatron does

Box = tuple[tuple[int, int], ...]  # a range along every dimension of a plain form
Total = Callable[[Tensor], Tensor]  # the sum of a tensor over all shares


@dataclass(frozen=True)
class Share:
    """Which part of a model: one of `count` equal ones."""

    index: int = 0
    count: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class Placement:
    """The plain form of a parameter, and the dimension of it that is divided; None: every share has all of it."""

    form: Callable[[LlamaShape], tuple[int, ...]]
    split: int | None
    swapped: bool = False  # the first two dimensions stand the other way round in the parameter itself


def _qkv(shape: LlamaShape) -> tuple[int, int, int]:
    return shape.kv_heads, shape.heads // shape.kv_heads + 2, shape.head_dim


TABLE = {
    "embed.weight": Placement(lambda s: (s.vocab, s.hidden), 0),
    "attention_norm.weight": Placement(lambda s: (s.hidden,), None),
    "qkv.weight": Placement(lambda s: (*_qkv(s), s.hidden), 0),
    "qkv.bias": Placement(_qkv, 0),
    "out.weight": Placement(lambda s: (s.hidden, s.heads * s.head_dim), 1),
    "ffn_norm.weight": Placement(lambda s: (s.hidden,), None),
    "gate_up.weight": Placement(lambda s: (2, s.ffn // s.ffn_block, s.ffn_block, s.hidden), 1, swapped=True),
    "down.weight": Placement(lambda s: (s.hidden, s.ffn), 1),
    "norm.weight": Placement(lambda s: (s.hidden,), None),
    "output.weight": Placement(lambda s: (s.vocab, s.hidden), 0),
}

SUMMED = ("out", "down")  # modules whose input is divided: their outputs are parts of a sum

# How a team divides a module in training, where it divides the tokens of the residual stream too: a table of tokens by its
# rows, a norm's tokens, a matrix by what it gives (columns) or by what it takes (sum); the logits stay divided.
TRAINING = {
    "embed": "table",
    "attention_norm": "tokens",
    "qkv": "columns",
    "out": "sum",
    "ffn_norm": "tokens",
    "gate_up": "columns",
    "down": "sum",
    "norm": "tokens",
    "output": "logits",
}


def placement(name: str) -> Placement:
    """The row of a parameter, by its full name."""
    module, _, leaf = name.rpartition(".")
    return TABLE[f"{module.rpartition('.')[2]}.{leaf}"]


def vocab_rows(vocab: int, count: int) -> int:
    """Rows of a share of the vocabulary: all of it as it is, or equal parts of it padded at its end."""
    return vocab if count == 1 else math.ceil(vocab / (VOCAB_MULTIPLE * count)) * VOCAB_MULTIPLE


def local(shape: LlamaShape, share: Share) -> LlamaShape:
    """The shape of a share."""
    n = share.count
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


def box(name: str, shape: LlamaShape, share: Share) -> Box:
    """The part of a parameter's plain form, of the whole model's, that a share holds. Rows that pad a vocabulary are in
    no box."""
    row = placement(name)
    ranges = [(0, size) for size in row.form(shape)]
    if row.split is not None:
        size = ranges[row.split][1]
        rows = vocab_rows(size, share.count) if name in ("embed.weight", "output.weight") else size // share.count
        ranges[row.split] = (min(share.index * rows, size), min((share.index + 1) * rows, size))
    return tuple(ranges)


def plain(name: str, parameter: Tensor, shape: LlamaShape, share: Share) -> Tensor:
    """A view of a share's parameter in its plain form, as large as its box: writing to it writes to the parameter."""
    row = placement(name)
    form = row.form(local(shape, share))
    whole = parameter.view(form[1], form[0], *form[2:]).transpose(0, 1) if row.swapped else parameter.view(form)
    if row.split is None:
        return whole
    begin, end = box(name, shape, share)[row.split]
    return whole.narrow(row.split, 0, end - begin)


class VocabShare(nn.Embedding):
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


def connect(model: Llama, share: Share, total: Total) -> None:
    """Make a share answer as the whole model does, up to its logits, which stay divided over the vocabulary."""
    if share.count == 1:
        return
    rows = model.embed.num_embeddings
    model.embed = VocabShare(model.embed, share.index * rows, total)
    if model.shape.tied:
        model.output.weight = model.embed.weight
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in SUMMED:
            module.register_forward_hook(lambda module, inputs, out: total(out))
