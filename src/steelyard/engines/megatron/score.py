"""Engine `megatron`, scoring: packed prompts through Megatron's model, with logits only where an
answer is read. All passes run the same code, for Megatron has no compiler for a whole layer.
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
    """The engine for both kinds of scoring work: the common scoring loop over packed batches with a
    `MegatronScorer`.
    """

    def __init__(self, job: Job) -> None:
        batches = packed(job, "megatron")
        super().__init__(job, MegatronScorer(job), batches)


class MegatronScorer(Scorer):
    """Megatron's Llama on one rank, as the scoring loop uses it. Constructing it initializes
    Megatron's process groups, and raises RequestError for what the engine cannot do.
    """

    model: MegatronLlama

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device: torch.device = job.device.torch_device
        config.check(job)
        self.kernel = config.choose_kernel(job)
        config.initialize_process_groups(job)

    def load(self) -> dict[str, Any]:
        """Build this rank's shard with its weights and return their source, for the record. The
        model's forward ends with the last norm.
        """
        shape = load.shape_of(self.job.case.question.model)
        made = config.make(self.job, shape)
        model = MegatronLlama(made, shape, self.kernel).to(self.device, made.params_dtype)
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        source = fill(model, own, self.job, shape)
        # forward ends with the last norm: logits are computed for the picked tokens alone
        model.post_process = False
        self.model = model.eval().requires_grad_(False)
        return source

    def to_device(self, batch: Batch) -> Inputs:
        """Copy a packed batch to the device without waiting: (tokens, positions, row layout)."""
        to = self.device
        return send(batch.tokens, to), send(batch.positions, to), layout(batch.q_lens, None, to)

    def hidden(self, inputs: Inputs, pick: Tensor) -> Tensor:
        """Return the last hidden states [picked tokens, hidden]."""
        return run(self.model, self.model, *inputs, None).squeeze(1)[pick]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's rows of the vocabulary, padding rows included."""
        shared = (
            self.model.embedding.word_embeddings.weight
            if self.job.case.question.model.tied
            else None
        )
        out: Tensor = self.model.output_layer(hidden, weight=shared)[0]
        return out

    def tensors(self) -> Iterable[Tensor]:
        """Return all parameters that this rank holds."""
        parameters: Iterable[Tensor] = self.model.parameters()
        return parameters

    def details(self) -> dict[str, Any]:
        """Return the library's version and the attention kernel."""
        return {"library": library(), "attention": self.kernel}
