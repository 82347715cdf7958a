"""Hugging Face folders: config.json and files of weights, read lazily. Names, boxes and settings are tables.

What the digest covers: for every file of weights, in order of name, its size and the sha256 of its header; and the name,
dtype and shape of every tensor, in order of name. It does not cover the values (hashing all of a large model takes long):
two trainings of one architecture saved by the same tool have the same digest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.models import placements
from steelyard.models.llama import LlamaShape
from steelyard.weights import checkpoint
from steelyard.weights.checkpoint import Piece, Stored, TensorPart
from steelyard.weights.hf_config import CONFIG_NAME as CONFIG_NAME
from steelyard.weights.hf_config import INDEX_NAME as INDEX_NAME
from steelyard.weights.hf_config import SINGLE_NAME as SINGLE_NAME
from steelyard.weights.hf_config import check_config, digest, first_told, read_json
from steelyard.weights.hf_shards import WeightsFile
from steelyard.weights.hf_shards import names_in as names_in
from steelyard.weights.hf_shards import present as present
from steelyard.weights.hf_shards import shards_in as shards_in

EMBED = "model.embed_tokens.weight"


def _queries(shape: LlamaShape) -> int:
    return shape.heads // shape.kv_heads


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes: a parameter, and the range of its logical view along one dimension; None: all of it."""

    parameter: str
    dimension: int = 0
    span: Callable[[LlamaShape], tuple[int, int]] | None = None

    def part(self, shape: LlamaShape, prefix: str = "") -> TensorPart:
        name = prefix + self.parameter
        box = list(placements.box(name, shape, placements.Shard()))
        if self.span is not None:
            box[self.dimension] = self.span(shape)
        return TensorPart(name, tuple(box), tuple(end - begin for begin, end in box))


TOP = {
    EMBED: Slot("embed.weight"),
    "model.norm.weight": Slot("norm.weight"),
    "lm_head.weight": Slot("output.weight"),
}
# Names in a layer, less their prefix.
LAYER = {
    "input_layernorm.weight": Slot("attention_norm.weight"),
    "self_attn.q_proj.weight": Slot("qkv.weight", 1, lambda s: (0, _queries(s))),
    "self_attn.k_proj.weight": Slot("qkv.weight", 1, lambda s: (_queries(s), _queries(s) + 1)),
    "self_attn.v_proj.weight": Slot("qkv.weight", 1, lambda s: (_queries(s) + 1, _queries(s) + 2)),
    "self_attn.o_proj.weight": Slot("out.weight"),
    "post_attention_layernorm.weight": Slot("ffn_norm.weight"),
    "mlp.gate_proj.weight": Slot("gate_up.weight", 0, lambda s: (0, 1)),
    "mlp.up_proj.weight": Slot("gate_up.weight", 0, lambda s: (1, 2)),
    "mlp.down_proj.weight": Slot("down.weight"),
}
# Those that only some shapes have; the names are the same in all model types.
OPTIONAL = {
    f"self_attn.{which}_proj.bias": Slot("qkv.bias", 1, LAYER[f"self_attn.{which}_proj.weight"].span) for which in "qkv"
} | {f"self_attn.{which}_norm.weight": Slot(f"{which}_norm.weight") for which in "qk"}


@dataclass(frozen=True)
class Redundant:
    """A tensor without a place in our model, and when it may be left out without changing an answer. `embed` gives the
    embedding."""

    harmless: Callable[[Tensor, Callable[[], Tensor]], bool]
    otherwise: str


OUT_BIAS = Redundant(
    lambda found, embed: not bool(found.count_nonzero()), "is not zero, and this model's output projection has no bias"
)
INV_FREQ = Redundant(lambda found, embed: True, "")  # computed from the rope base; old checkpoints store it
TIED_HEAD = Redundant(
    lambda found, embed: torch.equal(found.to(embed().dtype), embed()),
    "differs from model.embed_tokens.weight, and this model's output is tied to it",
)


def parts(shape: LlamaShape) -> dict[str, TensorPart]:
    """Every tensor a checkpoint of this shape must have, and what it covers: each parameter is covered exactly once."""
    layer = LAYER | {name: slot for name, slot in OPTIONAL.items() if checkpoint.OPTIONAL_WEIGHTS[slot.parameter](shape)}
    top = {name: slot for name, slot in TOP.items() if not (shape.tied and name == "lm_head.weight")}
    out = {name: slot.part(shape) for name, slot in top.items()}
    for i in range(shape.layers):
        out |= {f"model.layers.{i}.{name}": slot.part(shape, f"layers.{i}.") for name, slot in layer.items()}
    return out


def redundant(shape: LlamaShape) -> dict[str, Redundant]:
    """Tensors a checkpoint of this shape may have beside its parts."""
    out = {"model.rotary_emb.inv_freq": INV_FREQ} | ({"lm_head.weight": TIED_HEAD} if shape.tied else {})
    for i in range(shape.layers):
        out[f"model.layers.{i}.self_attn.o_proj.bias"] = OUT_BIAS
        out[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = INV_FREQ
    return out


@dataclass(frozen=True)
class HuggingFace:
    """A folder whose config.json, the settings, and headers were read."""

    folder: Path
    settings: dict[str, Any]
    shards: list[WeightsFile]

    family = "llama"
    format = "huggingface"
    tp = 1
    iteration = None
    step = 0

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.folder,)

    @property
    def files(self) -> list[tuple[str, int]]:
        return [(shard.path.name, shard.size_bytes) for shard in self.shards]

    @property
    def tensors(self) -> list[Stored]:
        return [stored for shard in self.shards for stored in shard.tensors.values()]

    def config(self) -> dict[str, Any]:
        path = self.folder / CONFIG_NAME
        return checkpoint.typed(path, first_told(path, self.settings))

    def pieces(self, shape: LlamaShape) -> list[Piece]:
        check_config(self.folder / CONFIG_NAME, self.settings, vars(shape))
        wanted, known = parts(shape), redundant(shape)
        checkpoint.check_entries(self.tensors, wanted, lambda name: name in known)
        checkpoint.check_missing(self.folder, [stored.name for stored in self.tensors], wanted)
        here = [(stored, wanted[stored.name]) for stored in self.tensors if stored.name in wanted]
        return [Piece(stored, part.parameter, part.box, part.inside) for stored, part in here]

    def check_values(self, shape: LlamaShape) -> None:
        known = redundant(shape)
        every = {stored.name: stored for stored in self.tensors}
        for stored in every.values():
            if stored.name in known and not known[stored.name].harmless(stored.open(), every[EMBED].open):
                about = f"{stored.path}: tensor {stored.name!r} {list(stored.shape)}"
                raise RequestError(f"{about} {known[stored.name].otherwise}; give other weights")

    def count(self) -> int:
        return checkpoint.count(self)

    def digest(self) -> str:
        tensors = [(stored.name, stored.dtype, list(stored.shape)) for stored in self.tensors]
        return digest([(shard.size_bytes, shard.header_sha256) for shard in self.shards], tensors)

    def notes(self) -> list[str]:
        return []


def holds(folder: Path) -> bool:
    """Whether a folder holds weights of a Llama."""
    return EMBED in names_in(folder)


def read(folder: Path) -> HuggingFace:
    """A folder, its config and every header read."""
    return HuggingFace(folder, read_json(folder / CONFIG_NAME), shards_in(folder))
