"""Megatron's GPTModel as a Llama: its layers from the local spec, with our core attention, and
weights by our names.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from steelyard.engine.job import Job
from steelyard.models import placements
from steelyard.models.attention import Layout, attend
from steelyard.models.llama import LlamaShape
from steelyard.models.placements import Shard
from steelyard.models.shapes import vocab_rows
from steelyard.models.tensors import DTYPES
from steelyard.weights import load


def packed(rows: Layout) -> Any:
    """The borders of rows as Megatron's layers pass them on."""
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=rows.cu_q,
        cu_seqlens_kv=rows.cu_k,
        max_seqlen_q=rows.max_q,
        max_seqlen_kv=rows.max_k,
    )


class PackedAttention(nn.Module):
    """A core attention for Megatron's layer spec: one of the kernels of models/attention.py."""

    kernel = ""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if softmax_scale is not None:
            raise ValueError(f"softmax_scale {softmax_scale}: kernels have that of the head's size")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[tokens, 1, heads, D] each, to [tokens, 1, heads x D]."""
        told = packed_seq_params
        rows = Layout(told.cu_seqlens_q, told.cu_seqlens_kv, told.max_seqlen_q, told.max_seqlen_kv)
        out = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), rows, self.kernel)
        return out.flatten(1).unsqueeze(1)


def with_kernel(kernel: str) -> type[PackedAttention]:
    """The class for a layer spec, which gives it no arguments of ours."""
    return type("PackedAttention", (PackedAttention,), {"kernel": kernel})


class SegmentRotary(RotaryEmbedding):  # type: ignore[misc]
    """Megatron's angles, of the positions that tokens have in their segments. Its own `forward`
    remembers the answer to a length."""

    positions: Tensor  # of the batch that is computed next

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        return torch.outer(self.positions.to(self.inv_freq.dtype), self.inv_freq)

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor:
        out: Tensor = self.get_emb(max_seq_len, offset)
        return out


# Our names of what a layer holds, and Megatron's. QKV stands by key group in both; gate and up are
# one after the other.
LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "qkv.weight": "self_attention.linear_qkv.weight",
    "qkv.bias": "self_attention.linear_qkv.bias",
    "out.weight": "self_attention.linear_proj.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "gate_up.weight": "mlp.linear_fc1.weight",
    "down.weight": "mlp.linear_fc2.weight",
}
TOP = {
    "embed.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "output.weight": "output_layer.weight",
}


class MegatronLlama(GPTModel):  # type: ignore[misc]
    """This rank's pipeline stage of a Llama."""

    def __init__(self, config: Any, shape: LlamaShape, kernel: str) -> None:
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        rows = vocab_rows(shape.vocab, tp)
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = with_kernel(kernel)
        block = TransformerBlockSubmodules([layer] * (shape.layers // pp), WrappedTorchNorm)
        super().__init__(
            config,
            block,
            rows * tp,
            shape.positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
        )
        self.rotary_pos_emb = SegmentRotary(shape.head_dim, 1.0, rotary_base=shape.rope_base)
        first = parallel_state.get_tensor_model_parallel_rank() * rows
        self.own_rows = max(0, min(rows, shape.vocab - first))  # the rest pads the vocabulary

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Megatron's, without the logits of rows that pad the vocabulary."""
        if self.own_rows < logits.shape[-1]:
            logits[..., self.own_rows :] = -torch.inf
        out: Tensor = super().compute_language_model_loss(labels, logits)
        return out


def run(
    wrapped: Any,
    model: MegatronLlama,
    tokens: Tensor,
    positions: Tensor,
    rows: Layout,
    labels: Tensor | None,
) -> Tensor:
    """A stage on tokens that lie end to end, through whatever is around it. The last one gives
    losses [1, tokens] where there are labels."""
    model.rotary_pos_emb.positions = positions
    out: Tensor = wrapped(tokens[None], None, None, labels=labels, packed_seq_params=packed(rows))
    return out


def fill(
    model: MegatronLlama, into: Mapping[str, Tensor], job: Job, shape: LlamaShape
) -> dict[str, Any]:
    """The same weights as every engine's: random ones from the seed, or a checkpoint's, each rank
    its part. They are put into tensors as large as the parameters, by Megatron's names. Returns
    where they came from, for the record."""
    question, shard = job.case.question, Shard(job.place.tp, job.plan.tp)
    found = places(model, into, shape, shard)
    with torch.no_grad():
        for name in ("embed.weight", "output.weight"):
            if name in found:
                into[TOP[name]].zero_()  # rows that pad a vocabulary stay so
        if job.weights is not None:
            return load.load_places(found, job.weights, shape, shard, job.loading)
        for name, place in found.items():
            if name.endswith("bias"):
                place.zero_()
            elif place.dim() == 1:
                place.fill_(1.0)
            else:
                load.fill_place(
                    name, place, question.seed, shape, shard, DTYPES[question.precision.weights]
                )
    return {"source": "random", "seed": question.seed}


def places(
    model: MegatronLlama, tensors: Mapping[str, Tensor], shape: LlamaShape, shard: Shard
) -> dict[str, Tensor]:
    """By our names: views of tensors for this stage's parameters, each as large as the box that the
    shard holds of it.
    """
    names = {theirs: ours for ours, theirs in TOP.items()}
    for i, layer in enumerate(model.decoder.layers):
        names |= {
            f"decoder.layers.{i}.{theirs}": f"layers.{layer.layer_number - 1}.{ours}"
            for ours, theirs in LAYER.items()
        }
    unknown = sorted(tensors.keys() - names.keys())
    if unknown:
        raise RuntimeError(f"Megatron's parameter {unknown[0]} is none of a Llama's")
    return {
        names[name]: _place(names[name], tensor, shape, shard) for name, tensor in tensors.items()
    }


def _place(name: str, tensor: Tensor, shape: LlamaShape, shard: Shard) -> Tensor:
    row = placements.placement(name)
    view = tensor.view(row.logical_shape(placements.local(shape, shard)))
    if row.split is None:
        return view
    begin, end = placements.box(name, shape, shard)[row.split]
    return view.narrow(row.split, 0, end - begin)


def library() -> str:
    """What computed, for the record. Megatron takes Transformer Engine's Adam and norms' sums where
    it finds them.
    """
    engine = (
        "with Transformer Engine's optimizer"
        if "transformer_engine" in sys.modules
        else "without Transformer Engine"
    )
    return f"megatron-core {version('megatron-core')}, {engine}"
