"""Engine `transformers`, scoring: the library's class of the model's type as users run it today.
Eager for val, compiled for infer. Weights of a Llama come through our own loader; a model of any
other type is the library's alone (auto.py).

Batches are padded on the right, where causal attention never looks, so no mask is passed; padding
is computed, and recorded as `padded`. Layers are compiled one by one, which shares one graph among
them: compiling the whole model took minutes, and its graph cannot leave out the causal mask.
`tune.batching`: `sorted` (what auto means here) batches prompts of like length, `single` is one
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
    def __init__(self, job: Job) -> None:
        batches = padded(job, "transformers")
        super().__init__(job, TransformersScorer(job), batches)


class TransformersScorer(Scorer):
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
        self.counted: dict[str, Any] = {}  # of a model whose FLOPs only the library tells

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Return whether the model's layers are a list, of which each can be compiled."""
        return len(self.plain) > 0

    def load(self) -> dict[str, Any]:
        self.model, source = LOADERS[self.job.case.question.model.family](self)
        self.plain = getattr(self.model.owner, self.model.layers or "", nn.ModuleList())
        return source

    def use(self, compiled: bool) -> None:
        if compiled and self.compiled is None:
            layers: list[Any] = [torch.compile(layer, dynamic=True) for layer in self.plain]
            self.compiled = nn.ModuleList(layers)
        setattr(self.model.owner, str(self.model.layers), self.compiled if compiled else self.plain)

    def to_device(self, batch: PaddedBatch) -> Tensor:
        return send(batch.tokens, self.device)

    def hidden(self, inputs: Tensor, pick: Tensor) -> Tensor:
        backends = ATTENTION[self.attention]
        with sdpa_kernel(backends) if backends else contextlib.nullcontext():
            hidden: Tensor = self.model.base(input_ids=inputs, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)[pick]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.head(hidden)

    def tensors(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self.model.model.parameters()
        return parameters

    def details(self) -> dict[str, Any]:
        return {"attention": self.attention, **self.counted}


def _llama(engine: TransformersScorer) -> tuple[Divided, dict[str, Any]]:
    """The same weights as every engine: read, checked or made by our own loader, then handed over."""
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
    """The library's own model and loader. What the case says of its FLOPs is counted again: a
    record must not say more.
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
    """Of the library's class for the model."""
    told = written(load.shape_of(model))
    made: PretrainedConfig = AutoConfig.for_model(
        told.pop("model_type"), **told, attn_implementation="sdpa"
    )
    return made


def _restore_buffers(model: nn.Module) -> None:
    """Rotary frequencies are computed buffers, in no checkpoint; `to_empty` left them without
    values.
    """
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config=module.config).to(module.inv_freq.device)
            model.set_submodule(name, fresh)
