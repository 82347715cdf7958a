"""Schemas of the dimensions of each model family, as a case gives them, and the rows of a divided
vocabulary. Imports no torch.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import FrozenModel

Dimension = Annotated[int, Field(ge=1, le=10**9)]  # larger than any real one, and nothing overflows
# a divided vocabulary is padded to a multiple of this in every shard, as Megatron does
VOCAB_MULTIPLE = 64


VARIANT_FIELDS = ("head_dim", "qk_norm", "window", "rope_scaling")


class LinearRope(FrozenModel):
    """Scaled rotary positions, kind `linear`: every position is divided by `factor`."""

    kind: Literal["linear"]
    factor: float = Field(gt=0, le=1e6)


class Llama3Rope(FrozenModel):
    """Scaled rotary positions as in Llama 3, kind `llama3`: frequencies of fewer than `low` waves
    in the first `original_positions` positions are divided by `factor`, those of more than `high`
    are unchanged, and those between are interpolated. Validation raises ValueError unless `low` is
    less than `high`.
    """

    kind: Literal["llama3"]
    factor: float = Field(gt=0, le=1e6)
    low: float = Field(gt=0, le=1e6)
    high: float = Field(gt=0, le=1e6)
    original_positions: Dimension

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Raise ValueError unless `low`, the number of waves at which interpolation of rotary
        frequencies begins, is less than `high`; return the model itself.
        """
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be less than high {self.high}")
        return self


RopeScaling = Annotated[LinearRope | Llama3Rope, Field(discriminator="kind")]


def get_effective_window(window: int | None, longest: int) -> int | None:
    """Return the window, or None if it is None or at least as long as the longest row and so hides
    nothing.
    """
    return None if window is None or window >= longest else window


class LlamaModel(FrozenModel):
    """Dimensions of a Llama in a case, or of a model that differs in these fields only: Qwen2
    (`qkv_bias`), Qwen3 (`qk_norm`), Mistral (`window`, keys that a token sees with its own; None:
    all before it).

    `kv_heads` are key groups, `positions` the longest sequence; `nominal_parameters` is the round
    number of parameters that published tables count with (None: none); `head_dim` None means hidden
    / heads (`dim` is the number). `variants` names the set fields in which it differs from a plain
    Llama. Validation raises ValueError unless heads is a multiple of kv_heads and the head
    dimension is a whole even number, and drops a head_dim or window that says nothing.
    """

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
    head_dim: Dimension | None = Field(None, description="elements of a head; None: hidden / heads")
    qk_norm: bool = Field(
        False, description="an RMS norm of each query and key head, before it is rotated"
    )
    window: Dimension | None = Field(
        None, description="keys that a token sees, with its own; None: all before it and its own"
    )
    rope_scaling: RopeScaling | None = None

    @property
    def dim(self) -> int:
        """The elements of a head: head_dim, or hidden / heads."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the set fields (of `VARIANT_FIELDS`) in which it differs from a plain Llama;
        not every engine supports them.
        """
        return tuple(name for name in VARIANT_FIELDS if getattr(self, name))

    @model_validator(mode="before")
    @classmethod
    def _drop_redundant_fields(cls, value: Any) -> Any:
        """Return a Llama's raw fields with head_dim and window set to None where they say the same
        as leaving them out (hidden / heads; a window of all positions), so that one model has one
        key.

        Runs before validation: a value that is no dict, and fields that are no integers, are left
        to it.
        """
        if not isinstance(value, dict):
            return value
        sizes = [value.get(name) for name in ("hidden", "heads", "head_dim", "window", "positions")]
        hidden, heads, dim, window, positions = (
            size if type(size) is int else None for size in sizes
        )
        default_dim = hidden and heads and dim and dim * heads == hidden
        useless_window = window and positions and get_effective_window(window, positions) is None
        return (
            value
            | ({"head_dim": None} if default_dim else {})
            | ({"window": None} if useless_window else {})
        )

    @model_validator(mode="after")
    def _check_divisible(self) -> Self:
        """Raise ValueError unless heads is a multiple of kv_heads and the head dimension is a whole
        even number.
        """
        whole = self.head_dim is not None or self.hidden % self.heads == 0
        if not whole or self.heads % self.kv_heads or self.dim % 2:
            message = (
                f"hidden {self.hidden} must be an even multiple of heads {self.heads}, and heads of"
                f" kv_heads {self.kv_heads}"
            )
            if self.head_dim is not None:
                message = (
                    f"head_dim {self.head_dim} must be even, and heads {self.heads} a multiple of"
                    f" kv_heads {self.kv_heads}"
                )
            raise ValueError(message)
        return self


class GlmModel(FrozenModel):
    """Dimensions of a GLM (Du et al. 2021) in a case: pre-LN, biases everywhere, tied embeddings,
    and two position tables with one row more than `positions`. `dropout` is the probability for
    embeddings, attention and outputs, `nominal_parameters` the round number of published tables
    (None: none); `kv_heads` equals heads, `dim` is hidden / heads. Validation raises ValueError
    unless hidden is a multiple of heads.
    """

    family: Literal["glm"]
    layers: Dimension
    hidden: Dimension
    heads: Dimension
    ffn: Dimension
    vocab: Dimension
    positions: Dimension
    norm_eps: float = 1e-5
    dropout: float = Field(
        0.1, ge=0, lt=1, description="dropout of embeddings, attention and outputs"
    )
    nominal_parameters: float | None = Field(None, gt=0, le=1e18)

    @property
    def kv_heads(self) -> int:
        """The number of heads: a GLM has no grouped keys."""
        return self.heads

    @property
    def dim(self) -> int:
        """The elements of a head, hidden / heads."""
        return self.hidden // self.heads

    @property
    def tied(self) -> bool:
        """Always True: the output matrix is the word embedding."""
        return True

    @model_validator(mode="after")
    def _check_divisible(self) -> Self:
        """Raise ValueError unless hidden is a multiple of heads."""
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}")
        return self


@dataclass(frozen=True)
class LayerMatrix:
    """A weight matrix `name` of a layer, [`outputs`, `inputs`], that every token is multiplied by;
    `divided` is the side that tensor parallelism splits, "outputs" or "inputs".
    """

    name: str
    outputs: int
    inputs: int
    divided: Literal["outputs", "inputs"]


def count_vocab_rows(vocab: int, tp: int) -> int:
    """Return the vocabulary rows of one tensor-parallel shard: all of them, unpadded, if tp is 1,
    otherwise an equal part of the vocabulary padded at its end to a multiple of 64 · tp.
    """
    return vocab if tp == 1 else count_padded_vocab_rows(vocab, tp)


def count_padded_vocab_rows(vocab: int, tp: int) -> int:
    """Return the vocabulary rows of one of `tp` shards in a Megatron checkpoint: an equal part of
    the vocabulary padded to a multiple of 64 · tp, even if tp is 1.
    """
    return -(-vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE
