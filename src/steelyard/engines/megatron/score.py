"""Engine `megatron`, scoring: packed prompts through Megatron's model, with logits only where an
answer is read. All passes run the same code, for Megatron has no compiler for a whole layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from steelyard.data.prompt_batches import PromptBatch
from steelyard.engine.job import Job
from steelyard.engines.megatron import config
from steelyard.engines.megatron.gpt_model import (
    MegatronLlama,
    describe_library,
    fill_weights,
    run_stage,
)
from steelyard.models.attention import PackedLayout, make_packed_layout
from steelyard.models.tensors import send_array
from steelyard.scoring.batches import plan_packed_batches
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.weights import llama_weights

Inputs = tuple[Tensor, Tensor, PackedLayout]


class MegatronScore(ScoringLoop):
    """The engine for works `score_choices` and `score_texts` by Megatron: the common `ScoringLoop`
    over packed batches with a `MegatronScorer`. Constructing it plans the batches and initializes
    Megatron's process groups (all ranks together; process-wide), and raises RequestError for what
    the engine cannot do, such as padded batches. The model is built later, in `prepare`.
    """

    def __init__(self, job: Job) -> None:
        batches = plan_packed_batches(job, "megatron")
        super().__init__(job, MegatronScorer(job), batches)


class MegatronScorer(Scorer):
    """Megatron's Llama on one rank, as the scoring loop uses it (`Scorer`): `load` builds it with
    its weights (`model`), `to_device`, `hidden` and `logits` compute a batch. It has no compiled
    form. `kernel` is the name of the attention kernel. Constructing it initializes Megatron's
    process groups (all ranks together; process-wide), and raises RequestError for what the engine
    cannot do.
    """

    model: MegatronLlama

    def __init__(self, job: Job) -> None:
        """Check the job, choose the attention kernel and initialize Megatron's process groups, with
        all ranks together. Raises RequestError for what the engine cannot do; the model is built in
        `load`.
        """
        self.job = job
        self.device: torch.device = job.device.torch_device
        config.check_megatron(job)
        self.kernel = config.choose_megatron_attention(job)
        config.initialize_process_groups(job)

    def load(self) -> dict[str, Any]:
        """Build this rank's shard of the model with its weights, without gradients, set `model`,
        and return the weights' source for the record. Its forward ends with the last norm: logits
        are computed for picked tokens alone. Raises RequestError if the checkpoint does not fit.
        """
        shape = llama_weights.get_llama_shape(self.job.case.question.model)
        transformer_config = config.make_transformer_config(self.job, shape)
        model = MegatronLlama(transformer_config, shape, self.kernel).to(
            self.device, transformer_config.params_dtype
        )
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        source = fill_weights(model, parameters, self.job, shape)
        # forward ends with the last norm: logits are computed for the picked tokens alone
        model.post_process = False
        self.model = model.eval().requires_grad_(False)
        return source

    def to_device(self, batch: PromptBatch) -> Inputs:
        """Copy a packed batch to the device without waiting, and return (tokens, positions, layout
        of its rows).
        """
        device = self.device
        return (
            send_array(batch.tokens, device),
            send_array(batch.positions, device),
            make_packed_layout(batch.q_lens, None, device),
        )

    def hidden(self, inputs: Inputs, pick: Tensor) -> Tensor:
        """Return the last hidden states, after the last norm, of the tokens `pick`, [picked tokens,
        hidden]; `inputs` are those of `to_device`. All tokens are computed. Ranks that hold one
        model call it together.
        """
        return run_stage(self.model, self.model, *inputs, None).squeeze(1)[pick]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows of `hidden`, rows of the vocabulary] of this rank's part of the
        vocabulary, with those of its padding rows.
        """
        shared = (
            self.model.embedding.word_embeddings.weight
            if self.job.case.question.model.tied
            else None
        )
        out: Tensor = self.model.output_layer(hidden, weight=shared)[0]
        return out

    def tensors(self) -> Iterable[Tensor]:
        """Return all parameters of the model that this rank holds, with the padding rows of its
        part of the vocabulary.
        """
        parameters: Iterable[Tensor] = self.model.parameters()
        return parameters

    def details(self) -> dict[str, Any]:
        """Return for the record `library`, the version of megatron-core, and `attention`, the name
        of the kernel.
        """
        return {"library": describe_library(), "attention": self.kernel}
