"""Engine `transformers`, scoring: the library's class of the model's type as users run it today. Eager for val, compiled for
infer. Weights of a Llama come through our own loader; a model of any other type is the library's alone (auto.py).

Batches are padded on the right, where causal attention never looks, so no mask is passed; padding is computed, and recorded
as `padded`. Layers are compiled one by one, which shares one graph among them: compiling the whole model took minutes, and
its graph cannot leave out the causal mask. `tune.batching`: `sorted` (what auto means here) batches prompts of like length,
`single` is one prompt at a time.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from steelyard.data.batches import sorted_batches
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.engines.transformers import auto
from steelyard.engines.transformers.auto import Divided
from steelyard.errors import RequestError
from steelyard.models.answers import READERS, Answers, Picked
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.models.tensors import DTYPES, dtype_names, send
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


class TransformersScore:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.question = job.case.question
        self.tune = job.case.tune
        if self.question.division != "closed":
            raise RequestError("engine transformers computes every token of every prompt; allowed: --division closed")
        if self.tune.batching == "packed":
            raise RequestError("engine transformers pads sequences; allowed: tune.batching=auto, sorted or single")
        self.attention = "sdpa" if self.tune.attention == "auto" else self.tune.attention
        if self.attention not in ATTENTION:
            raise RequestError(f"tune.attention={self.attention!r} is not known; allowed: auto, {', '.join(ATTENTION)}")
        self.device: torch.device = job.device.torch_device
        make = READERS[job.work]
        self.reader = make(job.inputs, self.question.model.vocab, job.group.share, job.group.gather, self.device)
        lengths = [len(row) for row in job.inputs.rows]
        single = self.tune.batching == "single"
        budget, pad_to = (1, 1) if single else (self.tune.batch_tokens, self.tune.pad_to)
        bins = sorted_batches(lengths, budget, pad_to, self.tune.order)
        self.pad_to = pad_to
        self.bins = bins[job.place.dp :: job.plan.dp][: job.steps]
        self.answers: dict[str, Answers] = {}
        self.model: Divided | None = None
        self.plain: nn.ModuleList = nn.ModuleList()
        self.compiled: nn.ModuleList | None = None
        self.weights: dict[str, Any] = {}
        self.counted: dict[str, Any] = {}  # of a model whose FLOPs only the library tells

    def prepare(self, name: str, part: Part) -> None:
        if self.model is None:
            with part("weights"):
                self.model = LOADERS[self.question.model.family](self)
                self.plain = getattr(self.model.owner, self.model.layers or "", nn.ModuleList())
                self.job.device.synchronize()
        compiled = self._compiled(name)
        new = compiled and self.compiled is None
        with part(f"{'compile' if new else 'warmup'}_{name}"), torch.inference_mode():
            if new:
                layers: list[Any] = [torch.compile(layer, dynamic=True) for layer in self.plain]
                self.compiled = nn.ModuleList(layers)
            if self.model.layers is not None:
                setattr(self.model.owner, self.model.layers, self.compiled if compiled else self.plain)
            for items in self._warmup() if compiled else self.bins[: self.tune.warmup]:
                self._answer(*self._to_device(items), compiled)
            self.job.device.synchronize()

    def _compiled(self, name: str) -> bool:
        """The val pass is the reference and never compiled; nor is a model whose layers are not a list."""
        return self.tune.compile and name != "val" and len(self.plain) > 0

    def _warmup(self) -> list[list[int]]:
        """Batches of every extreme shape beside the first ones: a compiler meets its special cases here, not in the pass."""
        width = {id(items): max(len(self.job.inputs.rows[i]) for i in items) for items in self.bins}
        keys = (len, lambda items: width[id(items)])
        extremes = [pick(self.bins, key=key) for key in keys for pick in (min, max)] if self.bins else []
        return [*extremes, *self.bins[: self.tune.warmup]]

    def total(self, name: str) -> int:
        return len(self.bins) + 1

    def work(self, name: str) -> Iterator[Phase | Work]:
        answers = self.answers[name] = Answers()
        with torch.inference_mode():
            for items in self.bins:
                yield Phase("data")
                tokens, asked = self._to_device(items)
                yield Phase("compute")
                answers.add(items, self._answer(tokens, asked, self._compiled(name)))
                yield Work({"padded": tokens.numel() - sum(len(self.job.inputs.rows[i]) for i in items)}, rows=items)
            yield Phase("score")
            answers.read()
            yield Work({})

    def _to_device(self, items: list[int]) -> tuple[Tensor, Picked]:
        lens = [len(self.job.inputs.rows[i]) for i in items]
        width = -(-max(lens) // self.pad_to) * self.pad_to
        table = np.zeros((len(items), width), dtype=np.int64)
        for row, i in enumerate(items):
            table[row, : lens[row]] = self.job.inputs.rows[i]
        ends = np.arange(len(items)) * width + np.array(lens, dtype=np.int64) - 1
        return send(table, self.device), self.reader.ask(items, ends, partial(send, device=self.device))

    def _answer(self, tokens: Tensor, asked: Picked, compiled: bool) -> Tensor:
        backends = ATTENTION[self.attention]
        if self.model is None:
            raise RuntimeError("answers before weights")
        with sdpa_kernel(backends) if backends else contextlib.nullcontext():
            hidden = self.model.base(input_ids=tokens, use_cache=False).last_hidden_state
        return self.reader.answer(self.model.head, hidden.flatten(0, 1)[asked.pick], asked, compiled)

    def outputs(self, name: str) -> dict[str, Any]:
        return self.answers[name].table(self.reader)

    def details(self) -> dict[str, Any]:
        held = [] if self.model is None else list(self.model.model.parameters())
        counts = {"parameters": sum(one.numel() for one in held), "dtypes": {"parameters": dtype_names(held)}}
        return {"attention": self.attention, "batches": len(self.bins), **counts, **self.counted}


def _llama(engine: TransformersScore) -> Divided:
    """The same weights as every engine: read, checked or made by our own loader, then handed over."""
    question, job, device = engine.question, engine.job, engine.device
    dtype = DTYPES[question.precision.weights]
    shape = load.shape_of(question.model)
    ours, engine.weights = build(shape, device, dtype, question.seed, job.weights, progress=job.loading)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config(question.model))  # type: ignore[no-untyped-call]
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    _restore_buffers(model)
    model.tie_weights()
    load.copy_to_hf(ours, dict(model.named_parameters(remove_duplicate=False)))
    del ours
    job.device.release_memory()
    return Divided(model, model.model, model.lm_head, model.model, "layers")


def _auto(engine: TransformersScore) -> Divided:
    """The library's own model and loader. What the case says of its FLOPs is counted again: a record must not say more."""
    question = engine.question
    counted = asdict(auto.count(auto.of_shape(question.model)))
    for name, value in counted.items():
        if getattr(question.model, name) != value:
            raise RequestError(
                f"question.model.{name} is {getattr(question.model, name)}, and of this model {value} are counted here; make "
                "the case again with steelyard case new"
            )
    dtype = DTYPES[question.precision.weights]
    model, engine.weights = auto.load(question.model, engine.job.weights, engine.device, dtype, question.seed)
    kernel = str(getattr(model.config, "_attn_implementation", engine.attention))
    engine.counted = {"attention": kernel, "flops": auto.COUNTED_BY, "class": type(model).__name__}
    return auto.divide(model, engine.device)


LOADERS = {"llama": _llama, "auto": _auto}


def config(model: LlamaModel | GlmModel) -> PretrainedConfig:
    """Of the library's class for the model."""
    told = written(load.shape_of(model))
    made: PretrainedConfig = AutoConfig.for_model(told.pop("model_type"), **told, attn_implementation="sdpa")
    return made


def _restore_buffers(model: nn.Module) -> None:
    """Rotary frequencies are computed buffers, in no checkpoint; `to_empty` left them without values."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):
            fresh = type(module)(config=module.config).to(module.inv_freq.device)
            model.set_submodule(name, fresh)
