"""A model of any architecture that transformers builds, as a case tells it: its configuration, and
what was counted of it. Known without torch."""

import re
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from steelyard.models.shapes import Dimension
from steelyard.schema import Frozen, canonical

MOST_FLOPS = 10**18  # of one token: beyond all use
MOST_CONFIG_CHARACTERS = 32 << 10
# Keys of a configuration that do not say what a model computes, or that could make the library
# fetch and run code.
UNWANTED = re.compile(
    r"_.*|.*implementation.*|.*kernel.*|auto_map|architectures|quantization_config|compression_config|transformers_version"
    r"|dtype|torch_dtype|use_cache|output_.*|return_dict|trust_remote_code|code_revision"
)


def wanted(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what does not belong in a case, at any depth; without null, which
    TOML does not have.
    """
    kept = {
        key: value
        for key, value in config.items()
        if value is not None and not UNWANTED.fullmatch(key)
    }
    return {key: wanted(value) if isinstance(value, dict) else value for key, value in kept.items()}


def unwanted(config: dict[str, Any]) -> str | None:
    """The first key that does not belong in a case."""
    for key, value in config.items():
        if UNWANTED.fullmatch(key):
            return key
        within = unwanted(value) if isinstance(value, dict) else None
        if within is not None:
            return f"{key}.{within}"
    return None


class AutoModel(Frozen):
    """A model that AutoModelForCausalLM builds. FLOPs are what torch's counter counts of it on meta
    tensors.
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
        return self.heads

    @property
    def dim(self) -> int:
        return self.hidden // self.heads

    @property
    def window(self) -> None:
        """Pairs are counted over all that is before a token: which layers see less, only the
        library knows.
        """
        return None

    @model_validator(mode="after")
    def _plain(self) -> Self:
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
