"""Engine `transformers`, scoring: the library's class of the model's type as users run it today,
eager for val, compiled for infer. Weights of a Llama come through this package's loader; other
models are loaded by the library (auto_model.py).

Batches are padded on the right, where causal attention never looks, so no mask is passed; padding
is computed, and recorded as `padded`. Layers are compiled one by one, which shares one graph among
them: compiling the whole model took minutes, and its graph cannot leave out the causal mask.
`tune.batching`: `sorted` (what auto means here) batches prompts of similar length, `single` is one
prompt at a time.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from steelyard.engine.job import Job
from steelyard.engines.transformers import auto_model
from steelyard.engines.transformers.auto_model import SplitModel
from steelyard.errors import RequestError
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.models.tensors import DTYPES, send_array
from steelyard.scoring.batches import PaddedBatch, plan_padded_batches
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.weights import llama_weights
from steelyard.weights.hf_families import make_hf_config
from steelyard.weights.llama_builder import build_llama_with_weights

ATTENTION: dict[str, list[SDPBackend] | None] = {
    "sdpa": None,  # whatever scaled_dot_product_attention prefers
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


class TransformersScore(ScoringLoop):
    """The engine `transformers` for both kinds of scoring work: the common scoring loop over padded
    batches with a `TransformersScorer`. Raises RequestError for division open, packed batching, and
    an unknown attention backend.
    """

    def __init__(self, job: Job) -> None:
        """Plan this replica's padded batches and check `tune.attention`; the model is loaded by
        `prepare`.
        """
        batches = plan_padded_batches(job, "transformers")
        super().__init__(job, TransformersScorer(job), batches)


class TransformersScorer(Scorer):
    """A model of the library on one rank, as the scoring loop uses it: `load` sets `model` (a
    `SplitModel`), `use(compiled)` puts compiled or plain layers into it, `to_device`, `hidden` and
    `logits` compute a padded batch. `compiles` is whether the model has a list of layers.

    Constructing it raises RequestError if `tune.attention` is neither `auto` nor one of the SDPA
    backends in ATTENTION.
    """

    model: SplitModel

    def __init__(self, job: Job) -> None:
        """Store the job and choose the SDPA backend: that of `tune.attention`, or torch's own
        preference for `auto`. Raises RequestError for an unknown one.
        """
        self.job, tune = job, job.case.tune
        self.device: torch.device = job.device.torch_device
        self.attention = "sdpa" if tune.attention == "auto" else tune.attention
        if self.attention not in ATTENTION:
            raise RequestError(
                f"tune.attention={self.attention!r} is not known; allowed: auto,"
                f" {', '.join(ATTENTION)}"
            )
        self.plain_layers: nn.ModuleList = nn.ModuleList()
        self.compiled_layers: nn.ModuleList | None = None
        self.auto_details: dict[str, Any] = {}  # details of a model of family `auto`

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Return whether the scorer's model has a list of layers that can be compiled one by one;
        false before `load`.
        """
        return len(self.plain_layers) > 0

    def load(self) -> dict[str, Any]:
        """Build the scorer's model with its weights, by the loader of its family (`llama` or
        `auto`), and return their source for the record. Sets `model` and `plain_layers`. Raises
        RequestError if the weights are not of this model.
        """
        self.model, source = LOADERS[self.job.case.question.model.family](self)
        self.plain_layers = getattr(self.model.owner, self.model.layers or "", nn.ModuleList())
        return source

    def use(self, compiled: bool) -> None:
        """Put compiled layers (torch.compile with dynamic sizes, made at the first such call and
        kept) or the plain ones into the scorer's model, in place.
        """
        if compiled and self.compiled_layers is None:
            layers: list[Any] = [torch.compile(layer, dynamic=True) for layer in self.plain_layers]
            self.compiled_layers = nn.ModuleList(layers)
        setattr(
            self.model.owner,
            str(self.model.layers),
            self.compiled_layers if compiled else self.plain_layers,
        )

    def to_device(self, batch: PaddedBatch) -> Tensor:
        """Copy the padded tokens of a batch to the device without waiting, and return them:
        [prompts, length].
        """
        return send_array(batch.tokens, self.device)

    def hidden(self, inputs: Tensor, pick: Tensor) -> Tensor:
        """Return the last hidden states (after the final norm) at the tokens `pick`, indices into
        all rows end to end with their padding: [picked, hidden]. Computed with the chosen SDPA
        backend and without a mask.
        """
        backends = ATTENTION[self.attention]
        with sdpa_kernel(backends) if backends else contextlib.nullcontext():
            hidden: Tensor = self.model.base(input_ids=inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[pick]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states over the whole vocabulary."""
        return self.model.head(hidden)

    def tensors(self) -> Iterable[Tensor]:
        """Return all parameters of the scorer's model."""
        parameters: Iterable[Tensor] = self.model.model.parameters()
        return parameters

    def details(self) -> dict[str, Any]:
        """Return, for the record, `attention`, the SDPA backend; of a model of family `auto`
        instead the library's implementation of attention, and also its `class` and how `flops` were
        counted.
        """
        return {"attention": self.attention, **self.auto_details}


def _load_llama(scorer: TransformersScorer) -> tuple[SplitModel, dict[str, Any]]:
    """Return (the library's Llama on the device split into base and head, for hidden states and
    logits; source of its weights for the record). Weights are the same as every engine's: made or
    read and checked by this package's loader, which raises RequestError, then copied over. Both
    copies are on the device for a while; ours is freed.
    """
    job, device = scorer.job, scorer.device
    question = job.case.question
    dtype = DTYPES[question.precision.weights]
    shape = llama_weights.get_llama_shape(question.model)
    ours, source = build_llama_with_weights(
        shape, device, dtype, question.seed, job.weights, progress=job.report_loading
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(make_transformers_config(question.model))  # type: ignore[no-untyped-call]
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    _restore_buffers(model)
    model.tie_weights()
    llama_weights.copy_to_hf_model(ours, dict(model.named_parameters(remove_duplicate=False)))
    del ours
    job.device.release_memory()
    return SplitModel(model, model.model, model.lm_head, model.model, "layers"), source


def _load_auto(scorer: TransformersScorer) -> tuple[SplitModel, dict[str, Any]]:
    """Return (a model of family `auto`, loaded by the library itself and split into base and head;
    source of its weights for the record). Sets `scorer.auto_details`, details for the record.
    Weights are read from the safetensors in folder `job.weights`, or are random from the case's
    seed if that is None, which sets torch's global seed.

    Raises RequestError if FLOPs or parameters counted here differ from what the case says, the
    folder's weights do not fit or are quantized, or the model cannot be split, which a trial run on
    the device finds out.
    """
    question = scorer.job.case.question
    counted = asdict(auto_model.count_model(auto_model.config_of_model(question.model)))
    for name, value in counted.items():
        if getattr(question.model, name) != value:
            raise RequestError(
                f"question.model.{name} is {getattr(question.model, name)}, but {value} were"
                " counted here; create the case again with steelyard case new"
            )
    dtype = DTYPES[question.precision.weights]
    model, source = auto_model.load_auto_model(
        question.model, scorer.job.weights, scorer.device, dtype, question.seed
    )
    kernel = str(getattr(model.config, "_attn_implementation", scorer.attention))
    scorer.auto_details = {
        "attention": kernel,
        "flops": auto_model.COUNTED_BY,
        "class": type(model).__name__,
    }
    return auto_model.split_model(model, scorer.device), source


LOADERS = {"llama": _load_llama, "auto": _load_auto}


def make_transformers_config(model: LlamaModel | GlmModel) -> PretrainedConfig:
    """Return the library's configuration of a case's Llama, of the model type that fits its
    variants, with SDPA attention. Raises TypeError for a GLM.
    """
    fields = make_hf_config(llama_weights.get_llama_shape(model))
    library_config: PretrainedConfig = AutoConfig.for_model(
        fields.pop("model_type"), **fields, attn_implementation="sdpa"
    )
    return library_config


def _restore_buffers(model: nn.Module) -> None:
    """Compute the rotary frequencies of a model again, by replacing each module that has
    `inv_freq`, in place: they are in no checkpoint, and `to_empty` left them without values.
    """
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config=module.config).to(module.inv_freq.device)
            model.set_submodule(name, fresh)
