"""Engine `megatron`, scoring: packed prompts through Megatron's model, logits only where an answer
is read.

Both passes run the same code: Megatron has no compiler for a whole layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from steelyard.data.batches import Batch
from steelyard.engine.job import Job
from steelyard.engines.megatron import config
from steelyard.engines.megatron.model import MegatronLlama, fill, library, run
from steelyard.models.attention import Layout, layout
from steelyard.models.tensors import send
from steelyard.scoring.batches import packed
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.weights import load

Inputs = tuple[Tensor, Tensor, Layout]


class MegatronScore(ScoringLoop):
    def __init__(self, job: Job) -> None:
        batches = packed(job, "megatron")
        super().__init__(job, MegatronScorer(job), batches)


class MegatronScorer(Scorer):
    model: MegatronLlama

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device: torch.device = job.device.torch_device
        config.check(job)
        self.kernel = config.choose_kernel(job)
        config.initialize_process_groups(job)

    def load(self) -> dict[str, Any]:
        shape = load.shape_of(self.job.case.question.model)
        made = config.make(self.job, shape)
        model = MegatronLlama(made, shape, self.kernel).to(self.device, made.params_dtype)
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        source = fill(model, own, self.job, shape)
        # it ends with its last norm: logits are made of the tokens that are asked alone
        model.post_process = False
        self.model = model.eval().requires_grad_(False)
        return source

    def to_device(self, batch: Batch) -> Inputs:
        to = self.device
        return send(batch.tokens, to), send(batch.positions, to), layout(batch.q_lens, None, to)

    def hidden(self, inputs: Inputs, pick: Tensor) -> Tensor:
        return run(self.model, self.model, *inputs, None).squeeze(1)[pick]

    def logits(self, hidden: Tensor) -> Tensor:
        shared = (
            self.model.embedding.word_embeddings.weight
            if self.job.case.question.model.tied
            else None
        )
        out: Tensor = self.model.output_layer(hidden, weight=shared)[0]
        return out

    def tensors(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self.model.parameters()
        return parameters

    def details(self) -> dict[str, Any]:
        return {"library": library(), "attention": self.kernel}
