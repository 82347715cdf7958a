"""Engine `megatron`, scoring: packed prompts through Megatron's model, logits only where an answer is read.

Both passes run the same code: Megatron has no compiler for a whole layer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steelyard.data.batches import Batch, closed_batch, equal_bins
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.engines.megatron import config, groups
from steelyard.engines.megatron.model import MegatronLlama, fill, library, run
from steelyard.errors import RequestError
from steelyard.models.answers import READERS, Answers, Picked
from steelyard.models.attention import Layout, layout
from steelyard.models.tensors import dtype_names, send
from steelyard.weights import load

Inputs = tuple[Tensor, Tensor, Layout, Picked]


class MegatronScore:
    def __init__(self, job: Job) -> None:
        self.job, self.tune, self.question = job, job.case.tune, job.case.question
        if self.tune.batching not in ("auto", "packed"):
            raise RequestError(
                f"engine megatron packs sequences; tune.batching={self.tune.batching!r} is for engine transformers"
            )
        config.check(job)
        self.kernel = config.choose_kernel(job)
        groups.join(job)
        self.device: torch.device = job.device.torch_device
        make = READERS[job.work]
        self.reader = make(job.inputs, self.question.model.vocab, job.group.share, job.group.gather, self.device)
        rows, parts = job.inputs.rows, job.plan.dp
        bins = equal_bins([len(row) for row in rows], self.tune.batch_tokens, self.tune.order, parts)
        mine = bins[job.place.dp :: parts][: job.steps]
        self.batches: list[Callable[[], Batch]] = [partial(closed_batch, rows, items) for items in mine]
        self.answers: dict[str, Answers] = {}
        self.model: MegatronLlama | None = None
        self.weights: dict[str, Any] = {}

    def prepare(self, name: str, part: Part) -> None:
        if self.model is None:
            with part("weights"):
                self.model = self._load()
                self.job.device.synchronize()
        with part(f"warmup_{name}"), torch.inference_mode():
            for batch in self.batches[: self.tune.warmup]:
                self._answer(*self._to_device(batch())[1])
            self.job.device.synchronize()

    def _load(self) -> MegatronLlama:
        shape = load.shape_of(self.question.model)
        made = config.make(self.job, shape)
        model = MegatronLlama(made, shape, self.kernel).to(self.device, made.params_dtype)
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.weights = fill(model, own, self.job, shape)
        model.post_process = False  # it ends with its last norm: logits are made of the tokens that are asked alone
        return model.eval().requires_grad_(False)  # type: ignore[no-any-return]

    def total(self, name: str) -> int:
        return len(self.batches) + 1

    def work(self, name: str) -> Iterator[Phase | Work]:
        answers = self.answers[name] = Answers()
        with torch.inference_mode():
            for make in self.batches:
                yield Phase("data")
                batch, inputs = self._to_device(make())
                yield Phase("compute")
                answers.add(batch.items, self._answer(*inputs))
                yield Work(rows=batch.items)
            yield Phase("score")
            answers.read()
            yield Work({})

    def _to_device(self, batch: Batch) -> tuple[Batch, Inputs]:
        to = self.device
        asked = self.reader.ask(batch.items, batch.pick, partial(send, device=to))
        return batch, (send(batch.tokens, to), send(batch.positions, to), layout(batch.q_lens, None, to), asked)

    def _answer(self, tokens: Tensor, positions: Tensor, rows: Layout, asked: Picked) -> Tensor:
        if self.model is None:
            raise RuntimeError("work before prepare")
        hidden = run(self.model, self.model, tokens, positions, rows, None)
        return self.reader.answer(self._logits, hidden.squeeze(1)[asked.pick], asked, False)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of this rank's part of the vocabulary."""
        if self.model is None:
            raise RuntimeError("work before prepare")
        shared = self.model.embedding.word_embeddings.weight if self.question.model.tied else None
        out: Tensor = self.model.output_layer(hidden, weight=shared)[0]
        return out

    def outputs(self, name: str) -> dict[str, Any]:
        return self.answers[name].table(self.reader)

    def details(self) -> dict[str, Any]:
        """With what this rank really holds: numbers, and their type."""
        if self.model is None:
            raise RuntimeError("details before prepare")
        parameters = list(self.model.parameters())
        return {
            "library": library(),
            "attention": self.kernel,
            "batches": len(self.batches),
            "parameters": sum(one.numel() for one in parameters),
            "dtypes": {"parameters": dtype_names(parameters)},
        }
