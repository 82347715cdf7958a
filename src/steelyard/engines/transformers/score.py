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
from steelyard.engines.transformers import auto
from steelyard.engines.transformers.auto import Divided
from steelyard.errors import RequestError
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.models.tensors import DTYPES, send
from steelyard.scoring.batches import PaddedBatch, padded
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.weights import load
from steelyard.weights.hf_families import written
from steelyard.weights.model import build

ATTENTION: dict[str, list[SDPBackend] | None] = {
    "sdpa": None,  # whatever scaled_dot_product_attention prefers
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


class TransformersScore(ScoringLoop):
    """The engine for both kinds of scoring work: the common scoring loop over padded batches with a
    `TransformersScorer`.
    """

    def __init__(self, job: Job) -> None:
        batches = padded(job, "transformers")
        super().__init__(job, TransformersScorer(job), batches)


class TransformersScorer(Scorer):
    """A model of the library on one rank, as the scoring loop uses it. Raises RequestError if
    `tune.attention` is not one of the SDPA backends in ATTENTION.
    """

    model: Divided

    def __init__(self, job: Job) -> None:
        self.job, tune = job, job.case.tune
        self.device: torch.device = job.device.torch_device
        self.attention = "sdpa" if tune.attention == "auto" else tune.attention
        if self.attention not in ATTENTION:
            raise RequestError(
                f"tune.attention={self.attention!r} is not known; allowed: auto,"
                f" {', '.join(ATTENTION)}"
            )
        self.plain: nn.ModuleList = nn.ModuleList()
        self.compiled: nn.ModuleList | None = None
        self.counted: dict[str, Any] = {}  # details of a model of family `auto`

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Return whether the model has a list of layers that can be compiled one by one; false
        before `load`.
        """
        return len(self.plain) > 0

    def load(self) -> dict[str, Any]:
        """Build the model with its weights and return their source, for the record."""
        self.model, source = LOADERS[self.job.case.question.model.family](self)
        self.plain = getattr(self.model.owner, self.model.layers or "", nn.ModuleList())
        return source

    def use(self, compiled: bool) -> None:
        """Put compiled layers (made at the first such call) or the plain ones into the model."""
        if compiled and self.compiled is None:
            layers: list[Any] = [torch.compile(layer, dynamic=True) for layer in self.plain]
            self.compiled = nn.ModuleList(layers)
        setattr(self.model.owner, str(self.model.layers), self.compiled if compiled else self.plain)

    def to_device(self, batch: PaddedBatch) -> Tensor:
        """Copy the padded tokens [prompts, length] to the device without waiting."""
        return send(batch.tokens, self.device)

    def hidden(self, inputs: Tensor, pick: Tensor) -> Tensor:
        """Return the last hidden states at the picked tokens of all rows end to end, computed with
        the chosen SDPA backend.
        """
        backends = ATTENTION[self.attention]
        with sdpa_kernel(backends) if backends else contextlib.nullcontext():
            hidden: Tensor = self.model.base(input_ids=inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[pick]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states over the whole vocabulary."""
        return self.model.head(hidden)

    def tensors(self) -> Iterable[Tensor]:
        """Return all parameters of the model."""
        parameters: Iterable[Tensor] = self.model.model.parameters()
        return parameters

    def details(self) -> dict[str, Any]:
        """Return the attention backend and, of a model of family `auto`, its class and how FLOPs
        were counted.
        """
        return {"attention": self.attention, **self.counted}


def _llama(engine: TransformersScorer) -> tuple[Divided, dict[str, Any]]:
    """Return (the library's Llama on the device, source of its weights). Weights are the same as
    every engine's: made or read and checked by this package's loader, then copied over.
    """
    job, device = engine.job, engine.device
    question = job.case.question
    dtype = DTYPES[question.precision.weights]
    shape = load.shape_of(question.model)
    ours, source = build(shape, device, dtype, question.seed, job.weights, progress=job.loading)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config(question.model))  # type: ignore[no-untyped-call]
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    _restore_buffers(model)
    model.tie_weights()
    load.copy_to_hf(ours, dict(model.named_parameters(remove_duplicate=False)))
    del ours
    job.device.release_memory()
    return Divided(model, model.model, model.lm_head, model.model, "layers"), source


def _auto(engine: TransformersScorer) -> tuple[Divided, dict[str, Any]]:
    """Return (the library's own model with its own loader, source of its weights). Raises
    RequestError if FLOPs or parameters counted here differ from what the case says. Sets
    `scorer.auto_details`, details for the record.
    """
    question = engine.job.case.question
    counted = asdict(auto.count(auto.of_shape(question.model)))
    for name, value in counted.items():
        if getattr(question.model, name) != value:
            raise RequestError(
                f"question.model.{name} is {getattr(question.model, name)}, and of this model"
                f" {value} are counted here; make the case again with steelyard case new"
            )
    dtype = DTYPES[question.precision.weights]
    model, source = auto.load(
        question.model, engine.job.weights, engine.device, dtype, question.seed
    )
    kernel = str(getattr(model.config, "_attn_implementation", engine.attention))
    engine.counted = {"attention": kernel, "flops": auto.COUNTED_BY, "class": type(model).__name__}
    return auto.divide(model, engine.device), source


LOADERS = {"llama": _llama, "auto": _auto}


def config(model: LlamaModel | GlmModel) -> PretrainedConfig:
    """Return the library's configuration of a case's model, with SDPA attention."""
    told = written(load.shape_of(model))
    made: PretrainedConfig = AutoConfig.for_model(
        told.pop("model_type"), **told, attn_implementation="sdpa"
    )
    return made


def _restore_buffers(model: nn.Module) -> None:
    """Compute the rotary frequencies again, in place: they are in no checkpoint, and `to_empty`
    left them without values.
    """
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config=module.config).to(module.inv_freq.device)
            model.set_submodule(name, fresh)
