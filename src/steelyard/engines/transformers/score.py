"""Engine `transformers`, scoring: the library's class of the model's type as users run it today. Eager for val, compiled for
infer.

Batches are padded on the right, where causal attention never looks, so no mask is passed; padding is computed, and recorded
as `padded`. Layers are compiled one by one, which shares one graph among them: compiling the whole model took minutes, and
its graph cannot leave out the causal mask. `tune.batching`: `sorted` (what auto means here) batches prompts of like length,
`single` is one prompt at a time.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from steelyard.data.batches import sorted_batches
from steelyard.engines.job import Job, Part
from steelyard.engines.work import Phase, Work
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
        self.model: Any = None
        self.plain: nn.ModuleList = nn.ModuleList()
        self.compiled: nn.ModuleList | None = None
        self.weights: dict[str, Any] = {}

    def prepare(self, name: str, part: Part) -> None:
        if self.model is None:
            with part("weights"):
                self.model = self._load()
                self.plain = self.model.model.layers
                self.job.device.synchronize()
        compiled = self._compiled(name)
        new = compiled and self.compiled is None
        with part(f"{'compile' if new else 'warmup'}_{name}"), torch.inference_mode():
            if new:
                layers: list[Any] = [torch.compile(layer, dynamic=True) for layer in self.plain]
                self.compiled = nn.ModuleList(layers)
            self.model.model.layers = self.compiled if compiled else self.plain
            for items in self._warmup() if compiled else self.bins[: self.tune.warmup]:
                self._answer(*self._to_device(items), compiled)
            self.job.device.synchronize()

    def _compiled(self, name: str) -> bool:
        """The val pass is the reference and never compiled."""
        return self.tune.compile and name != "val"

    def _warmup(self) -> list[list[int]]:
        """Batches of every extreme shape beside the first ones: a compiler meets its special cases here, not in the pass."""
        width = {id(items): max(len(self.job.inputs.rows[i]) for i in items) for items in self.bins}
        keys = (len, lambda items: width[id(items)])
        extremes = [pick(self.bins, key=key) for key in keys for pick in (min, max)] if self.bins else []
        return [*extremes, *self.bins[: self.tune.warmup]]

    def _load(self) -> Any:
        """The same weights as every engine: read, checked or made by our own loader, then handed over."""
        question, dtype = self.question, DTYPES[self.question.precision.weights]
        shape = load.shape_of(question.model)
        ours, self.weights = build(shape, self.device, dtype, question.seed, self.job.weights, progress=self.job.loading)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config(self.question.model))  # type: ignore[no-untyped-call]
        model = model.to(dtype).to_empty(device=self.device).eval().requires_grad_(False)
        _restore_buffers(model)
        model.tie_weights()
        load.copy_to_hf(ours, dict(model.named_parameters(remove_duplicate=False)))
        del ours
        self.job.device.release_memory()
        return model

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
        with sdpa_kernel(backends) if backends else contextlib.nullcontext():
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return self.reader.answer(self.model.lm_head, hidden.flatten(0, 1)[asked.pick], asked, compiled)

    def outputs(self, name: str) -> dict[str, Any]:
        return self.answers[name].table(self.reader)

    def details(self) -> dict[str, Any]:
        held = [] if self.model is None else list(self.model.parameters())
        counts = {"parameters": sum(one.numel() for one in held), "dtypes": {"parameters": dtype_names(held)}}
        return {"attention": self.attention, "batches": len(self.bins), **counts}


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
