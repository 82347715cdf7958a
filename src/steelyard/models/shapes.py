"""Dimensions of the models of each family, and rows of a divided vocabulary. Known without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import Frozen

Dimension = Annotated[int, Field(ge=1, le=10**9)]  # beyond all use, and no number overflows
VOCAB_MULTIPLE = 64  # a divided vocabulary is padded to a multiple of this in every shard, as Megatron does


class LlamaModel(Frozen):
    """Dimensions of a Llama. `nominal_parameters` is the round number the published tables count with."""

    family: Literal["llama"]
    layers: Dimension
    hidden: Dimension
    heads: Dimension
    kv_heads: Dimension
    ffn: Dimension
    vocab: Dimension
    positions: Dimension
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tied: bool = False
    nominal_parameters: float | None = Field(None, gt=0, le=1e18)

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden {self.hidden} must be an even multiple of heads {self.heads}, and heads of kv_heads {self.kv_heads}"
            )
        return self


class GlmModel(Frozen):
    """Dimensions of a GLM (Du et al. 2021): pre-LN, biases everywhere, one table for input and output, and two tables of
    positions with one row more than there are positions."""

    family: Literal["glm"]
    layers: Dimension
    hidden: Dimension
    heads: Dimension
    ffn: Dimension
    vocab: Dimension
    positions: Dimension
    norm_eps: float = 1e-5
    dropout: float = Field(0.1, ge=0, lt=1, description="on embeddings, attention and outputs")
    nominal_parameters: float | None = Field(None, gt=0, le=1e18)

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def tied(self) -> bool:
        return True

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}")
        return self


@dataclass(frozen=True)
class Matrix:
    """A weight that every token of a layer is multiplied with; `divided` is the side that a tensor-parallel group divides."""

    name: str
    outputs: int
    inputs: int
    divided: Literal["outputs", "inputs"]


def vocab_rows(vocab: int, tp: int) -> int:
    """Rows of one tensor-parallel shard of the vocabulary: all of it as it is, or equal parts of it padded at its end."""
    return vocab if tp == 1 else padded_vocab_rows(vocab, tp)


def padded_vocab_rows(vocab: int, tp: int) -> int:
    """Rows of a shard in a Megatron checkpoint, where a vocabulary that is not divided is padded too."""
    return -(-vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE
