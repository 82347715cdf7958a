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
from steelyard.weights import hf_checkpoint, hf_config, hf_folder

# tokens that are counted: a forward of T costs a·T + b·T², and the third proves it
COUNTED_TOKENS = (16, 32, 48)
COUNTED_BY = "torch.utils.flop_counter on meta tensors"
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # types of weights that mean what they say
CHECKED_TOKENS = 8  # tokens on which a divided model is compared with the whole


def make_library_config(model_type: str, config: dict[str, Any], null: list[str]) -> Any:
    """Return the library's configuration object of a model type, from the fields in `config`
    (copied; a `model_type` among them is ignored); the fields in `null` are set to None. Raises
    RequestError if the library does not know the type or rejects a field.
    """
    if model_type not in CONFIG_MAPPING:
        raise RequestError(
            f"this version of transformers has no model_type {model_type!r}; install a newer one"
        )
    # The library modifies its arguments.
    fields = deepcopy({key: value for key, value in config.items() if key != "model_type"})
    try:
        return AutoConfig.for_model(model_type, **fields, **dict.fromkeys(null))
    except Exception as error:  # each class checks its own fields, and has its own errors
        first = " ".join(str(error).split())[:300]
        raise RequestError(
            f"transformers does not take this configuration of {model_type!r}: {first}"
        ) from error


def config_of_model(model: AutoModel) -> Any:
    """Return the library's configuration object of a case's model of family `auto`. Raises
    RequestError as `make_library_config`.
    """
    return make_library_config(model.model_type, dict(model.config), model.null)


def make_causal_lm(config: Any, experts: str | None = None) -> Any:
    """Return a causal language model in eval mode on the current default device, with the library's
    random weights and choice of attention. No code of a model's folder is run. `experts` names the
    library's implementation of mixture-of-experts layers; None: its own choice. Raises RequestError
    if the model cannot be built.
    """
    options = {} if experts is None else {"experts_implementation": experts}
    build: Any = AutoModelForCausalLM.from_config
    try:
        return build(config, trust_remote_code=False, **options).eval()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise RequestError(
            f"transformers makes no causal language model of this configuration: {error}"
        ) from error


@dataclass(frozen=True)
class SplitModel:
    """A causal language model of the library split in two: `base` computes hidden states from
    tokens, `head` logits [rows, vocabulary] from hidden states [rows, hidden], with all that the
    model does to logits. `model` is the whole.

    `layers` is the name of the attribute of `owner`, a module inside the base, that holds the list
    of layers, so that they can be replaced by compiled ones; None if there is no such list.
    """

    model: Any
    base: Any
    head: Callable[[Tensor], Tensor]
    owner: Any
    layers: str | None


class _BaseStub(nn.Module):
    """A stand-in for a model's base, for the time in which its head alone is called: it returns the
    given `inputs_embeds` as its hidden states (`_BaseOutput`).
    """

    def forward(self, *args: Any, inputs_embeds: Tensor, **others: Any) -> Any:
        """Return `inputs_embeds` as the last hidden states; other arguments are ignored."""
        return _BaseOutput(inputs_embeds)


class _BaseOutput:
    """The output of a base model with hidden states alone, as `last_hidden_state` and item 0: any
    other attribute or item is None.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        """Return None for every output that a base model may have beside its hidden states."""
        return None  # noqa: RET501

    def __getitem__(self, index: Any) -> Tensor | None:
        """Return the hidden states for item 0 and None for any other."""
        return self.last_hidden_state if index == 0 else None


def split_model(model: Any, device: torch.device) -> SplitModel:
    """Split a model into base and head and return both with its list of layers. The head calls the
    whole model with its base replaced for the time of the call, in place.

    Raises RequestError if base and head are not separate, the two together do not compute what the
    model computes, or tokens see later ones; a trial run on 8 tokens on `device` checks this.
    """
    base, name = model.base_model, model.base_model_prefix
    if base is model or not hasattr(model, name):
        raise RequestError(
            f"{type(model).__name__}: its base model and head are not separate modules, which"
            " engine transformers needs"
        )
    stub = _BaseStub()

    def head(hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of hidden states [rows, hidden]. During the call the
        model's base is replaced by a stub, so it must not be called from two threads.
        """
        setattr(model, name, stub)
        try:
            logits: Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            setattr(model, name, base)
        return logits

    _check_split(model, base, head, device)
    owner, layers = _find_layers(base, model.config.get_text_config().num_hidden_layers)
    return SplitModel(model, base, head, owner, layers)


def _check_split(
    model: Any, base: Any, head: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """Run the model and its two halves on 8 tokens; raise RequestError if logits of
    `head(base(tokens))` differ from the model's by more than 1e-4 (relative and absolute), or
    hidden states of earlier tokens change with the last one (it is not causal).
    """
    tokens = (
        torch.arange(3, 3 + CHECKED_TOKENS, device=device)[None]
        % model.config.get_text_config().vocab_size
    )
    other = torch.cat((tokens[:, :-1], tokens[:, :1]), 1)  # another last token
    with torch.inference_mode():
        whole_logits = model(input_ids=tokens, use_cache=False).logits[0]
        hidden, changed = (
            base(input_ids=ids, use_cache=False).last_hidden_state[0] for ids in (tokens, other)
        )
        split_logits = head(hidden)
    if not torch.allclose(hidden[:-1], changed[:-1], rtol=1e-4, atol=1e-4, equal_nan=True):
        raise RequestError(
            f"{type(model).__name__}: tokens see later tokens: it is not a causal language model"
        )
    if whole_logits.shape != split_logits.shape or not torch.allclose(
        whole_logits, split_logits, rtol=1e-4, atol=1e-4, equal_nan=True
    ):
        raise RequestError(
            f"{type(model).__name__}: its head alone does not give the model's logits; it cannot be"
            " scored here"
        )


def _find_layers(base: nn.Module, count: int) -> tuple[Any, str | None]:
    """Find the first module list with `count` entries inside the base, and return (module that has
    it, attribute name); (base, None) if there is none.
    """
    for module in base.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    return base, None


@dataclass(frozen=True)
class ModelCounts:
    """The size of a model, counted on meta tensors by `count_model`: `parameters`, their number,
    and forward FLOPs per token without attention over pairs (`token_flops`), per pair of tokens in
    all layers (`pair_flops`, attention), and per token whose logits are computed (`logit_flops`).
    """

    parameters: int
    token_flops: int
    pair_flops: int
    logit_flops: int


def count_model(config: Any) -> ModelCounts:
    """Count parameters and forward FLOPs of a model of this library configuration by torch's
    counter on meta tensors; nothing is allocated.

    Attention is counted over the whole square of pairs; of experts, those that a token is routed
    to. Raises RequestError if the model cannot be built, its FLOPs are not a·T + b·T² in the number
    of tokens T (tried with 16, 32 and 48), or cannot be counted.
    """
    with torch.device("meta"):
        model = make_causal_lm(config, experts="batched_mm")
    base = model.base_model
    forwards = [_count_flops(partial(_run_base, base, tokens)) for tokens in COUNTED_TOKENS]
    one, two = COUNTED_TOKENS[:2]
    pair, remainder = divmod(forwards[1] * one - forwards[0] * two, one * two * (two - one))
    token = forwards[0] // one - pair * one
    if remainder or [token * tokens + pair * tokens**2 for tokens in COUNTED_TOKENS] != forwards:
        raise RequestError(
            f"{type(model).__name__}: FLOPs of {COUNTED_TOKENS} tokens are {forwards}, which is not"
            " a·T +"
            " b·T²"
        )
    logits = model.get_output_embeddings()
    rows = torch.empty(1, logits.weight.shape[1], device="meta", dtype=logits.weight.dtype)
    parameters = sum(one.numel() for one in model.parameters())
    return ModelCounts(parameters, token, pair, _count_flops(lambda: logits(rows)))


def _run_base(base: Any, tokens: int) -> None:
    """Run the base on one sequence of so many meta tokens, with a full mask: making one reads
    values, which meta tensors do not have. Models that reject such a mask (RuntimeError, TypeError,
    ValueError) get none. The result is dropped.
    """
    # A mask is given: making one looks at values, which meta tensors do not have. Older models take
    # no mask of pairs.
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    try:
        base(input_ids=ids, attention_mask=mask, use_cache=False)
    except (RuntimeError, TypeError, ValueError):
        base(input_ids=ids, use_cache=False)


def _count_flops(call: Callable[[], Any]) -> int:
    """Return the FLOPs of a call, by torch's counter, under inference mode; raise RequestError if
    it cannot run on meta tensors.
    """
    try:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            call()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"FLOPs cannot be counted on meta tensors: {str(error).splitlines()[0]}"
        ) from error
    return int(counter.get_total_flops())


def load_auto_model(
    model: AutoModel, folder: Path | None, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Any, dict[str, Any]]:
    """Return (model on the device in `dtype`, in eval mode, without gradients; source of its
    weights for the record).

    Random from the seed if `folder` is None (sets torch's global seed). Otherwise read from
    safetensors; raises RequestError if the folder is not of this model, has no safetensors or
    damaged ones, stores quantized weights, or lacks tensors or has them in another shape.
    """
    if folder is None:
        torch.manual_seed(seed)
        with torch.device(device):
            loaded = make_causal_lm(config_of_model(model))
        return loaded.to(dtype).requires_grad_(False), {"source": "random", "seed": seed}
    hf_folder.check_auto_folder(folder, model)
    if not any((folder / name).is_file() for name in (hf_config.SINGLE_NAME, hf_config.INDEX_NAME)):
        raise RequestError(
            f"{folder}: engine transformers reads a model of type {model.model_type!r} from"
            " safetensors files only; convert it with transformers' save_pretrained"
        )
    shards = hf_checkpoint.read_weights_files(folder)
    for tensor in (tensor for shard in shards for tensor in shard.tensors.values()):
        if tensor.name.endswith("weight") and tensor.dtype not in PLAIN_DTYPES:
            raise RequestError(
                f"{folder}: {tensor.name} is stored in {tensor.dtype}, allowed:"
                f" {', '.join(PLAIN_DTYPES)}; give weights that are not quantized"
            )
    read: Any = AutoModelForCausalLM.from_pretrained
    options = {
        "dtype": dtype,
        "use_safetensors": True,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    loaded, info = read(folder, config=config_of_model(model), output_loading_info=True, **options)
    for problem in ("missing_keys", "mismatched_keys"):
        if info.get(problem):  # the library fills such tensors with random numbers, and goes on
            first = min(map(str, info[problem]))
            raise RequestError(
                f"{folder}: {problem.replace('_', ' ')}: {first}; give a complete folder of this"
                " model"
            )
    tensors = [
        (tensor.name, tensor.dtype, list(tensor.shape))
        for shard in shards
        for tensor in shard.tensors.values()
    ]
    facts = {
        "source": "huggingface",
        "files": [{"name": shard.path.name, "bytes": shard.size_bytes} for shard in shards],
        "header_sha256": hf_config.hash_headers(
            [(shard.size_bytes, shard.header_sha256) for shard in shards], tensors
        ),
        "parameters": model.parameters,
    }
    return loaded.to(device).eval().requires_grad_(False), facts
