"""The schema of a model of any architecture that transformers can build: its configuration, and
FLOPs and parameters counted from it.

It is `question.model` of a case with family `auto`. Imports no torch.
"""

import re
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from steelyard.models.shapes import Dimension
from steelyard.schema import Frozen, canonical

MOST_FLOPS = 10**18  # per token; larger than any real model, and nothing overflows
MOST_CONFIG_CHARACTERS = 32 << 10
# Keys of config.json that do not say what a model computes, or that could make transformers
# download and run code.
UNWANTED = re.compile(
    r"_.*|.*implementation.*|.*kernel.*|auto_map|architectures|quantization_config"
    r"|compression_config|transformers_version"
    r"|dtype|torch_dtype|use_cache|output_.*|return_dict|trust_remote_code|code_revision"
)


def wanted(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a Hugging Face configuration without keys that do not belong in a case
    (`UNWANTED_KEYS`), in nested dicts too, and without null values, which TOML does not have.
    """
    kept = {
        key: value
        for key, value in config.items()
        if value is not None and not UNWANTED.fullmatch(key)
    }
    return {key: wanted(value) if isinstance(value, dict) else value for key, value in kept.items()}


def unwanted(config: dict[str, Any]) -> str | None:
    """Return the dotted path of the first key, at any depth, that does not belong in a case, or
    None.
    """
    for key, value in config.items():
        if UNWANTED.fullmatch(key):
            return key
        within = unwanted(value) if isinstance(value, dict) else None
        if within is not None:
            return f"{key}.{within}"
    return None


class AutoModel(Frozen):
    """Dimensions and configuration of a model that transformers' AutoModelForCausalLM builds.

    `token_flops`, `pair_flops` and `logit_flops` are what torch's FLOP counter counts for it on
    meta tensors. Validation raises ValueError for a configuration with unwanted keys, numbers that
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
    parameters: int = Field(ge=1, le=10**15, description="of the whole model")
    token_flops: int = Field(ge=0, le=MOST_FLOPS, description="of a forward, for each token")
    pair_flops: int = Field(
        ge=0,
        le=MOST_FLOPS,
        description="of a forward, for each pair of a query and a key, in all layers",
    )
    logit_flops: int = Field(
        ge=0, le=MOST_FLOPS, description="for each token whose logits are computed"
    )
    nominal_parameters: float | None = Field(None, gt=0, le=1e18)
    config: dict[str, JsonValue] = Field(
        description="config.json, as far as it says what is computed"
    )
    null: list[str] = Field(
        [], description="keys of it that are null, where transformers takes another default"
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
    def _plain(self) -> Self:
        """Raise ValueError for a configuration with unwanted keys, numbers that are not finite, or
        too many characters as JSON.
        """
        found = unwanted(self.config)
        if found is not None:
            raise ValueError(
                f"config.{found} does not belong in a case: it does not say what the model"
                " computes; remove it"
            )
        if any(UNWANTED.fullmatch(name) for name in self.null):
            raise ValueError("null names a key that does not belong in a case; remove it")
        try:
            size = len(canonical(self.config))
        except ValueError as error:
            raise ValueError("config holds a number that is not finite") from error
        if size > MOST_CONFIG_CHARACTERS:
            raise ValueError(
                f"config has {size} characters as JSON; at most {MOST_CONFIG_CHARACTERS} are read"
            )
        return self
