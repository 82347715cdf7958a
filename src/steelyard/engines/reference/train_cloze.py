"""A GLM trained on cloze samples as its authors' program does, for a baseline: the same numbers as
engine `torch`, more slowly.

Every candidate is a sequence of its own, padded to all positions of the model; every layer is
recomputed in the backward pass; logits are computed at every position. Nothing is compiled or
fused: torch's layers, SDPA with a mask, autograd.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from steelyard.data.cloze_samples import ClozePack
from steelyard.engine.job import Job
from steelyard.models.glm import Glm, GlmBlock
from steelyard.models.tensors import send_array
from steelyard.training.cloze_training import ClozeAccuracy, ClozeBatches
from steelyard.training.glm_trainer import (
    ClozeMicroBatch,
    LogProbComputation,
    check_glm_recompute,
    choose_cloze_attention,
    get_glm_shape,
    make_glm_trainer,
)
from steelyard.training.trainer import Trainer
from steelyard.training.training_loop import TrainingLoop


class ReferenceCloze(TrainingLoop):
    """The engine `reference` for work `train_cloze`, in the published program's way: the common
    training loop with the accuracy as evaluation, where every candidate is a sequence of its own,
    padded to all positions of the model, every layer is recomputed, and nothing is compiled. Its
    padding tokens are recorded, and never counted as work. RequestError for an unknown attention
    kernel or recompute mode.
    """

    def __init__(self, job: Job) -> None:
        """Create the trainer of the GLM and batches that count padding to all positions; the model
        is built by `prepare`. Raises RequestError for what `make_reference_trainer` refuses.
        """
        cloze_trainer = make_reference_trainer(job)
        padding = partial(count_padding, positions=get_glm_shape(job).positions)
        super().__init__(
            job, cloze_trainer, ClozeBatches(job, padding), ClozeAccuracy(job, cloze_trainer)
        )


def make_reference_trainer(job: Job) -> Trainer:
    """Return the trainer of a GLM computed by `compute_log_probs`, which each replica holds whole.
    `tune.attention` and `tune.recompute` are only checked (RequestError if not known, or if the
    kernel cannot run here): SDPA and full recomputation always run.
    """
    choose_cloze_attention(job)  # refuses what is not known, though nothing else is ever run
    check_glm_recompute(job)
    details = {"attention": "sdpa", "padded_to": get_glm_shape(job).positions}
    return make_glm_trainer(
        job, lambda model, gradient: LogProbComputation(partial(compute_log_probs, model)), details
    )


def count_padding(pack: ClozePack, positions: int) -> int:
    """Return how many padding tokens are computed for a pack when every candidate is a sequence of
    `positions` tokens: all of them less the candidates' own tokens and their contexts'.
    """
    context_lengths = [
        length
        for length, count in zip(pack.contexts, pack.groups, strict=True)
        for _ in range(count)
    ]
    return len(pack.spans) * positions - sum(context_lengths) - sum(pack.spans)


def compute_log_probs(model: Glm, micro: ClozeMicroBatch, dropout: float) -> Tensor:
    """Return the log-probabilities of the spans' target tokens, [span tokens] in fp32 at least, in
    the order of the pack, with every layer recomputed in the backward pass. Logits are computed at
    every position, also of padding. `dropout` is the rate after embeddings, attention and FFN, and
    of attention's weights.
    """
    token_index, mask, picked = unpack_sequences(micro, model.shape.positions)
    ids = (
        torch.cat((row, row.new_zeros(1)))[token_index]
        for row in (micro.tokens, micro.positions, micro.blocks)
    )
    x = F.dropout(model.embed(*ids), dropout)
    for block in model.transformer.layers:
        x = checkpoint(_apply_layer, block, x, mask, dropout, use_reentrant=False)
    logits = F.linear(model.transformer.final_layernorm(x), model.word_embeddings.weight)
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide_logits.log_softmax(-1).flatten(0, 1)[picked, micro.targets]


def _apply_layer(block: GlmBlock, x: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Apply one GLM layer to x [sequences, positions, hidden] and return the same shape: the same
    function as models/glm.py computes for packed tokens. `mask` [sequences, 1, positions,
    positions] is true where a position may look; `dropout` is the rate in attention, and after
    attention and FFN.
    """
    qkv: Tensor = block.attention.query_key_value(block.input_layernorm(x))
    q, k, v = qkv.unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)  # type: ignore[no-untyped-call]
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    x = x + F.dropout(block.attention.dense(attended.transpose(1, 2).flatten(2)), dropout)
    activated = F.gelu(
        block.mlp.dense_h_to_4h(block.post_attention_layernorm(x)), approximate="tanh"
    )
    return x + F.dropout(block.mlp.dense_4h_to_h(activated), dropout)


def unpack_sequences(micro: ClozeMicroBatch, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack a micro-batch into one sequence per span (candidate), padded to `positions`: its
    context, then itself. Returns three tensors on the device.

    - [spans, positions]: index of the pack's token at each position; its length (one past the last
      token) for padding.
    - [spans, 1, positions, positions], bool: which positions each one sees (the whole context, and
      all up to itself).
    - [span tokens]: where each token of the spans is in the flattened sequences.
    """
    contexts, spans, groups = (np.array(part) for part in micro.layout.lengths)
    ends = np.cumsum(spans), np.cumsum(contexts)
    per_span = [
        np.repeat(contexts, groups),
        np.repeat(ends[1] - contexts, groups),
        spans,
        ends[0] - spans,
    ]
    length, start, span_length, first = send_array(
        np.stack(per_span), micro.tokens.device
    ).unsqueeze(-1)
    n, position = micro.layout.context_tokens, torch.arange(positions, device=micro.tokens.device)
    within = position - length
    token_index = torch.where(
        position < length,
        start + position,
        torch.where(within < span_length, n + first + within, len(micro.tokens)),
    )
    mask = (position < length)[:, None, :] | (position <= position[:, None])
    span = micro.span_of_token
    count = torch.arange(len(span), device=span.device)
    picked = (span * positions + (length - first)[span, 0]) + count
    return token_index, mask[:, None], picked
