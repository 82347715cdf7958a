"""Any AutoModelForCausalLM of the transformers library, for cases of family `auto`: built from a
case's configuration or loaded from its folder, split into base and head, and its FLOPs counted on
meta tensors.

No code of a model's folder is ever run, no pickle is read and nothing is downloaded: only the
library's own classes, and safetensors.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from steelyard.errors import RequestError
from steelyard.models.auto_shape import AutoModel
from steelyard.weights import hf_config, hf_folder, huggingface

# tokens that are counted: a forward of T costs a·T + b·T², and the third proves it
LENGTHS = (16, 32, 48)
COUNTED_BY = "torch.utils.flop_counter on meta tensors"
PLAIN = ("F64", "F32", "F16", "BF16")  # types of weights that mean what they say
CHECKED = 8  # tokens on which a divided model is compared with the whole


def configuration(model_type: str, config: dict[str, Any], null: list[str]) -> Any:
    """Return the library's configuration object of a model type, from these fields; the fields in
    `null` are set to None. Raises RequestError if the library does not know the type or rejects a
    field.
    """
    if model_type not in CONFIG_MAPPING:
        raise RequestError(
            f"model_type {model_type!r} is none that this version of transformers has; install a"
            " newer one"
        )
    # The library modifies its arguments.
    told = deepcopy({key: value for key, value in config.items() if key != "model_type"})
    try:
        return AutoConfig.for_model(model_type, **told, **dict.fromkeys(null))
    except Exception as error:  # each class checks its own fields, and has its own errors
        first = " ".join(str(error).split())[:300]
        raise RequestError(
            f"transformers does not take this configuration of {model_type!r}: {first}"
        ) from error


def of_shape(model: AutoModel) -> Any:
    """Return the library's configuration object of a case's model."""
    return configuration(model.model_type, dict(model.config), model.null)


def make(config: Any, experts: str | None = None) -> Any:
    """Return a causal language model in eval mode on the current default device, with the library's
    random weights and choice of attention. `experts` names the library's implementation of
    mixture-of-experts layers. Raises RequestError if it cannot be built.
    """
    told = {} if experts is None else {"experts_implementation": experts}
    build: Any = AutoModelForCausalLM.from_config
    try:
        return build(config, trust_remote_code=False, **told).eval()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise RequestError(
            f"transformers makes no causal language model of this configuration: {error}"
        ) from error


@dataclass(frozen=True)
class Divided:
    """A model split in two: `base` computes hidden states from tokens, `head` logits from hidden
    states, with all that the model does to logits. `layers` is the attribute of `owner` that holds
    the list of layers; None if there is no such list.
    """

    model: Any
    base: Any
    head: Callable[[Tensor], Tensor]
    owner: Any
    layers: str | None


class _Given(nn.Module):
    """A stand-in for a model's base that returns the given `inputs_embeds` as its hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **others: Any) -> Any:
        """Return `inputs_embeds` as the last hidden states; other arguments are ignored."""
        return _Output(inputs_embeds)


class _Output:
    """The output of a base model with hidden states alone: any other attribute is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        """Return None for every output that a base model may have beside its hidden states."""
        return None  # noqa: RET501

    def __getitem__(self, place: Any) -> Tensor | None:
        """Return the hidden states for item 0 and None for any other."""
        return self.last_hidden_state if place == 0 else None


def divide(model: Any, device: torch.device) -> Divided:
    """Split a model into base and head. The head calls the whole model with its base replaced for
    the time of the call.

    Raises RequestError if base and head are not separate, the two together do not compute what the
    model computes, or tokens see later ones; a trial run on 8 tokens checks this.
    """
    base, name = model.base_model, model.base_model_prefix
    if base is model or not hasattr(model, name):
        raise RequestError(
            f"{type(model).__name__}: its layers and its head are not apart; engine transformers"
            " needs that"
        )
    stub = _Given()

    def head(hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of hidden states [rows, hidden]."""
        setattr(model, name, stub)
        try:
            logits: Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            setattr(model, name, base)
        return logits

    _check(model, base, head, device)
    owner, layers = _layers(base, model.config.get_text_config().num_hidden_layers)
    return Divided(model, base, head, owner, layers)


def _check(model: Any, base: Any, head: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Run the model and its two halves on 8 tokens; raise RequestError if logits differ, or hidden
    states of earlier tokens change with the last one (it is not causal).
    """
    tokens = (
        torch.arange(3, 3 + CHECKED, device=device)[None]
        % model.config.get_text_config().vocab_size
    )
    other = torch.cat((tokens[:, :-1], tokens[:, :1]), 1)  # another last token
    with torch.inference_mode():
        whole = model(input_ids=tokens, use_cache=False).logits[0]
        hidden, changed = (
            base(input_ids=one, use_cache=False).last_hidden_state[0] for one in (tokens, other)
        )
        parts = head(hidden)
    if not torch.allclose(hidden[:-1], changed[:-1], rtol=1e-4, atol=1e-4, equal_nan=True):
        raise RequestError(
            f"{type(model).__name__}: tokens see those behind them, so it is no causal language"
            " model"
        )
    if whole.shape != parts.shape or not torch.allclose(
        whole, parts, rtol=1e-4, atol=1e-4, equal_nan=True
    ):
        raise RequestError(
            f"{type(model).__name__}: its head alone does not give the model's logits; it cannot be"
            " scored here"
        )


def _layers(base: nn.Module, count: int) -> tuple[Any, str | None]:
    """Find the module list with `count` entries, and return (module that has it, attribute name);
    (base, None) if there is none.
    """
    for module in base.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    return base, None


@dataclass(frozen=True)
class Counted:
    """The size of a model: number of parameters, and forward FLOPs per token, per pair of tokens
    (attention), and per token's logits.
    """

    parameters: int
    token_flops: int
    pair_flops: int
    logit_flops: int


def count(config: Any) -> Counted:
    """Count parameters and forward FLOPs of a model by torch's counter on meta tensors.

    Attention is counted over the whole square of pairs; of experts, those that a token is routed
    to. Raises RequestError if FLOPs are not a·T + b·T² in the number of tokens T, or cannot be
    counted.
    """
    with torch.device("meta"):
        model = make(config, experts="batched_mm")
    base = model.base_model
    forwards = [_flops(partial(_forward, base, tokens)) for tokens in LENGTHS]
    one, two = LENGTHS[:2]
    pair, left = divmod(forwards[1] * one - forwards[0] * two, one * two * (two - one))
    token = forwards[0] // one - pair * one
    if left or [token * tokens + pair * tokens**2 for tokens in LENGTHS] != forwards:
        raise RequestError(
            f"{type(model).__name__}: FLOPs of {LENGTHS} tokens are {forwards}, which is not a·T +"
            " b·T²"
        )
    logits = model.get_output_embeddings()
    rows = torch.empty(1, logits.weight.shape[1], device="meta", dtype=logits.weight.dtype)
    parameters = sum(one.numel() for one in model.parameters())
    return Counted(parameters, token, pair, _flops(lambda: logits(rows)))


def _forward(base: Any, tokens: int) -> None:
    """Run the base on so many meta tokens, with a full mask: making one reads values, which meta
    tensors do not have. Models that reject such a mask get none.
    """
    # A mask is given: making one looks at values, which meta tensors do not have. Older models take
    # no mask of pairs.
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
    given = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    try:
        base(input_ids=given, attention_mask=mask, use_cache=False)
    except (RuntimeError, TypeError, ValueError):
        base(input_ids=given, use_cache=False)


def _flops(work: Callable[[], Any]) -> int:
    """Return the FLOPs of a call, by torch's counter; raise RequestError if it cannot run on meta
    tensors.
    """
    try:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            work()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"FLOPs cannot be counted on meta tensors: {str(error).splitlines()[0]}"
        ) from error
    return int(counter.get_total_flops())


def load(
    model: AutoModel, folder: Path | None, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Any, dict[str, Any]]:
    """Return (model on the device in `dtype`, without gradients; source of its weights for the
    record).

    Random from the seed if `folder` is None (sets torch's global seed). Otherwise read from
    safetensors; raises RequestError if the folder is not of this model, has no safetensors, stores
    quantized weights, or lacks tensors.
    """
    if folder is None:
        torch.manual_seed(seed)
        with torch.device(device):
            made = make(of_shape(model))
        return made.to(dtype).requires_grad_(False), {"source": "random", "seed": seed}
    hf_folder.check_auto(folder, model)
    if not any((folder / name).is_file() for name in (hf_config.SINGLE_NAME, hf_config.INDEX_NAME)):
        raise RequestError(
            f"{folder}: engine transformers reads a model of type {model.model_type!r} from"
            " safetensors alone; convert it with transformers' save_pretrained"
        )
    shards = huggingface.shards_in(folder)
    for one in (one for shard in shards for one in shard.tensors.values()):
        if one.name.endswith("weight") and one.dtype not in PLAIN:
            raise RequestError(
                f"{folder}: {one.name} is stored in {one.dtype}, allowed: {', '.join(PLAIN)}; give"
                " plain ones"
            )
    read: Any = AutoModelForCausalLM.from_pretrained
    told = {
        "dtype": dtype,
        "use_safetensors": True,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    made, info = read(folder, config=of_shape(model), output_loading_info=True, **told)
    for what in ("missing_keys", "mismatched_keys"):
        if info.get(what):  # the library fills such tensors with random numbers, and goes on
            first = min(map(str, info[what]))
            raise RequestError(
                f"{folder}: {what.replace('_', ' ')}: {first}; give a complete folder of this model"
            )
    tensors = [
        (one.name, one.dtype, list(one.shape)) for shard in shards for one in shard.tensors.values()
    ]
    facts = {
        "source": "huggingface",
        "files": [{"name": shard.path.name, "bytes": shard.size_bytes} for shard in shards],
        "header_sha256": hf_config.digest(
            [(shard.size_bytes, shard.header_sha256) for shard in shards], tensors
        ),
        "parameters": model.parameters,
    }
    return made.to(device).eval().requires_grad_(False), facts
