"""Dimensions of the models of each family, and rows of a divided vocabulary. Known without torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import Frozen

Dimension = Annotated[int, Field(ge=1, le=10**9)]  # beyond all use, and no number overflows
# a divided vocabulary is padded to a multiple of this in every shard, as Megatron does
VOCAB_MULTIPLE = 64


VARIANTS = ("head_dim", "qk_norm", "window", "rope_scaling")


class LinearRope(Frozen):
    """Every position divided by `factor`."""

    kind: Literal["linear"]
    factor: float = Field(gt=0, le=1e6)


class Llama3Rope(Frozen):
    """Frequencies of long waves divided by `factor`, those of short ones kept, and between the two
    a straight line: `low` and `high` are how many waves the model's first `original_positions` hold
    at either end of it."""

    kind: Literal["llama3"]
    factor: float = Field(gt=0, le=1e6)
    low: float = Field(gt=0, le=1e6)
    high: float = Field(gt=0, le=1e6)
    original_positions: Dimension

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be less than high {self.high}")
        return self


RopeScaling = Annotated[LinearRope | Llama3Rope, Field(discriminator="kind")]


def real_window(window: int | None, longest: int) -> int | None:
    """A window no shorter than the longest row is none."""
    return None if window is None or window >= longest else window


class LlamaModel(Frozen):
    """Dimensions of a Llama, or of a model that differs in these fields alone: Qwen2 (`qkv_bias`),
    Qwen3 (`qk_norm`), Mistral (`window`). `nominal_parameters` is the round number the published
    tables count with."""

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
    head_dim: Dimension | None = Field(None, description="of a head; None: hidden / heads")
    qk_norm: bool = Field(
        False, description="an RMS norm of each query and key head, before it is rotated"
    )
    window: Dimension | None = Field(
        None, description="keys a token sees, itself among them; None: all before it"
    )
    rope_scaling: RopeScaling | None = None

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def variants(self) -> tuple[str, ...]:
        """In which fields it differs from a plain Llama: what not every engine computes."""
        return tuple(name for name in VARIANTS if getattr(self, name))

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, value: Any) -> Any:
        """What says the same as leaving it out is left out: one model has one key."""
        if not isinstance(value, dict):
            return value
        sizes = [value.get(name) for name in ("hidden", "heads", "head_dim", "window", "positions")]
        hidden, heads, dim, window, positions = (
            size if type(size) is int else None for size in sizes
        )
        usual = hidden and heads and dim and dim * heads == hidden
        endless = window and positions and real_window(window, positions) is None
        return value | ({"head_dim": None} if usual else {}) | ({"window": None} if endless else {})

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        whole = self.head_dim is not None or self.hidden % self.heads == 0
        if not whole or self.heads % self.kv_heads or self.dim % 2:
            said = (
                f"hidden {self.hidden} must be an even multiple of heads {self.heads}, and heads of"
                f" kv_heads {self.kv_heads}"
            )
            if self.head_dim is not None:
                said = (
                    f"head_dim {self.head_dim} must be even, and heads {self.heads} a multiple of"
                    f" kv_heads {self.kv_heads}"
                )
            raise ValueError(said)
        return self


class GlmModel(Frozen):
    """Dimensions of a GLM (Du et al. 2021): pre-LN, biases everywhere, one table for input and
    output, and two tables of positions with one row more than there are positions."""

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
    def dim(self) -> int:
        """Of a head."""
        return self.hidden // self.heads

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
    """A weight that every token of a layer is multiplied with; `divided` is the side that a
    tensor-parallel group divides.
    """

    name: str
    outputs: int
    inputs: int
    divided: Literal["outputs", "inputs"]


def vocab_rows(vocab: int, tp: int) -> int:
    """Rows of one tensor-parallel shard of the vocabulary: all of it as it is, or equal parts of it
    padded at its end.
    """
    return vocab if tp == 1 else padded_vocab_rows(vocab, tp)


def padded_vocab_rows(vocab: int, tp: int) -> int:
    """Rows of a shard in a Megatron checkpoint, where a vocabulary that is not divided is padded
    too.
    """
    return -(-vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE
