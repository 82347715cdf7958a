"""The schema of a model of any architecture that transformers can build: its configuration, and
FLOPs and parameters counted from it.

It is `question.model` of a case with family `auto`. Imports no torch.
"""

import re
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from steelyard.models.shapes import Dimension
from steelyard.schema import FrozenModel, to_canonical_json

MAX_FLOPS = 10**18  # per token; larger than any real model, and nothing overflows
MAX_CONFIG_CHARACTERS = 32 << 10
# Keys of config.json that do not say what a model computes, or that could make transformers
# download and run code.
UNWANTED_KEYS = re.compile(
    r"_.*|.*implementation.*|.*kernel.*|auto_map|architectures|quantization_config"
    r"|compression_config|transformers_version"
    r"|dtype|torch_dtype|use_cache|output_.*|return_dict|trust_remote_code|code_revision"
)


def remove_unwanted_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a Hugging Face configuration without keys that do not belong in a case
    (`UNWANTED_KEYS`) and without null values, which TOML does not have; in nested dicts too, but
    not in dicts inside lists.
    """
    remaining = {
        key: value
        for key, value in config.items()
        if value is not None and not UNWANTED_KEYS.fullmatch(key)
    }
    return {
        key: remove_unwanted_keys(value) if isinstance(value, dict) else value
        for key, value in remaining.items()
    }


def find_unwanted_key(config: dict[str, Any]) -> str | None:
    """Return the dotted path of the first key, at any depth of nested dicts, that does not belong
    in a case (`UNWANTED_KEYS`), in the dict's order; None if there is none. Dicts inside lists are
    not searched.
    """
    for key, value in config.items():
        if UNWANTED_KEYS.fullmatch(key):
            return key
        nested = find_unwanted_key(value) if isinstance(value, dict) else None
        if nested is not None:
            return f"{key}.{nested}"
    return None


class AutoModel(FrozenModel):
    """Dimensions and configuration of a model that transformers' AutoModelForCausalLM builds
    (family `auto`): `model_type` is the library's name of the architecture, `config` its
    config.json as far as it says what is computed, `null` the keys of it that are null.

    `token_flops`, `pair_flops` (per query-key pair, over all layers) and `logit_flops` are the
    forward FLOPs that torch's FLOP counter counts for it on meta tensors, `parameters` the whole
    model's; `nominal_parameters` is the round number of published tables (None: none). `window` is
    always None. Validation raises ValueError for unwanted keys in `config` or `null`, numbers that
    are not finite, or more than `MAX_CONFIG_CHARACTERS` characters as JSON.
    """

    family: Literal["auto"]
    model_type: str = Field(
        pattern=r"^[A-Za-z0-9_-]{1,64}$", description="transformers' name of the architecture"
    )
    layers: Dimension
    hidden: Dimension
    heads: Dimension
    vocab: Dimension
    positions: Dimension
    tied: bool = False
    parameters: int = Field(ge=1, le=10**15, description="parameters of the whole model")
    token_flops: int = Field(ge=0, le=MAX_FLOPS, description="forward FLOPs per token")
    pair_flops: int = Field(
        ge=0,
        le=MAX_FLOPS,
        description="forward FLOPs per query-key pair, over all layers",
    )
    logit_flops: int = Field(
        ge=0, le=MAX_FLOPS, description="forward FLOPs per token whose logits are computed"
    )
    nominal_parameters: float | None = Field(None, gt=0, le=1e18)
    config: dict[str, JsonValue] = Field(
        description="the keys of config.json that say what is computed"
    )
    null: list[str] = Field(
        [], description="keys of config.json that are null where transformers has another default"
    )

    @property
    def kv_heads(self) -> int:
        """The number of heads: `auto` does not know of grouped keys."""
        return self.heads

    @property
    def dim(self) -> int:
        """The elements of a head, hidden / heads rounded down."""
        return self.hidden // self.heads

    @property
    def window(self) -> None:
        """Always None: attention pairs are counted over all earlier tokens, because only
        transformers knows which layers have a window.
        """
        return None

    @model_validator(mode="after")
    def _check_config(self) -> Self:
        """Raise ValueError if `config` or `null` has a key that does not belong in a case
        (`UNWANTED_KEYS`), or if `config` has numbers that are not finite or more than
        `MAX_CONFIG_CHARACTERS` characters as JSON; return the model itself.
        """
        unwanted_key = find_unwanted_key(self.config)
        if unwanted_key is not None:
            raise ValueError(
                f"config.{unwanted_key} does not belong in a case: it does not say what the model"
                " computes; remove it"
            )
        if any(UNWANTED_KEYS.fullmatch(name) for name in self.null):
            raise ValueError("null names a key that does not belong in a case; remove it")
        try:
            size = len(to_canonical_json(self.config))
        except ValueError as error:
            raise ValueError("config holds a number that is not finite") from error
        if size > MAX_CONFIG_CHARACTERS:
            raise ValueError(
                f"config has {size} characters as JSON; at most {MAX_CONFIG_CHARACTERS} are read"
            )
        return self
