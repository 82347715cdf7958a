"""Megatron's GPTModel as a Llama: layers from its local spec with this package's attention kernels,
and weights by this package's parameter names.
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
from steelyard.models import llama_placements
from steelyard.models.attention import PackedLayout, attend_packed_rows
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_placements import Shard
from steelyard.models.shapes import count_vocab_rows
from steelyard.models.tensors import DTYPES
from steelyard.weights import llama_weights


def make_packed_seq_params(rows: PackedLayout) -> Any:
    """Return the layout of packed rows (offsets and longest lengths) as the PackedSeqParams that
    Megatron's layers pass on to `MegatronPackedAttention`.
    """
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=rows.cu_q,
        cu_seqlens_kv=rows.cu_k,
        max_seqlen_q=rows.max_q,
        max_seqlen_kv=rows.max_k,
    )


class MegatronPackedAttention(nn.Module):
    """The core attention of Megatron's layers: causal attention inside each packed row by the
    kernel `kernel` (a name of models/attention.py, a class attribute that `attention_class` sets).
    `forward` takes query, key and value [tokens, 1, heads, D] and returns [tokens, 1, heads x D].
    Constructed by Megatron, whose arguments are ignored; raises ValueError if any softmax scale is
    given, for kernels use 1/sqrt(D).
    """

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
            raise ValueError(
                f"softmax_scale {softmax_scale}: the kernels only have 1/sqrt(head dimension)"
            )

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
        """Return causal attention inside each row as [tokens, 1, heads x D]; query is [tokens, 1,
        heads, D], key and value [tokens, 1, kv heads, D]. The rows come from `packed_seq_params`;
        mask and bias are ignored.
        """
        params = packed_seq_params
        rows = PackedLayout(
            params.cu_seqlens_q, params.cu_seqlens_kv, params.max_seqlen_q, params.max_seqlen_kv
        )
        out = attend_packed_rows(
            query.squeeze(1), key.squeeze(1), value.squeeze(1), rows, self.kernel
        )
        return out.flatten(1).unsqueeze(1)


def attention_class(kernel: str) -> type[MegatronPackedAttention]:
    """Return a subclass of the attention with this kernel: a layer spec takes a class, and passes
    it no arguments of ours.
    """
    return type("PackedAttention", (MegatronPackedAttention,), {"kernel": kernel})


class SegmentRotary(RotaryEmbedding):  # type: ignore[misc]
    """Megatron's rotary embedding by each token's position in its own segment, in place of
    Megatron's `rotary_pos_emb`. `run_stage` sets `positions` [tokens] before each forward pass;
    `forward` returns the angles [tokens, 1, 1, D], computed from them in every call, because
    Megatron's own forward caches them by length. Its arguments have no effect.
    """

    positions: Tensor  # of the batch that is computed next

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of all tokens, [tokens, D/2], from `positions`; the arguments are
        ignored.
        """
        return torch.outer(self.positions.to(self.inv_freq.dtype), self.inv_freq)

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Tensor:
        """Return the rotary angles of the tokens at `positions` in Megatron's layout, [tokens, 1,
        1, D], computed anew in each call; the arguments have no effect.
        """
        out: Tensor = self.get_emb(max_seq_len, offset)
        return out


# This package's names of a layer's parameters, and Megatron's. Both store QKV by key group, and
# gate and up one after the other.
LAYER_PARAMETERS = {
    "attention_norm.weight": "input_layernorm.weight",
    "qkv.weight": "self_attention.linear_qkv.weight",
    "qkv.bias": "self_attention.linear_qkv.bias",
    "out.weight": "self_attention.linear_proj.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "gate_up.weight": "mlp.linear_fc1.weight",
    "down.weight": "mlp.linear_fc2.weight",
}
OUTER_PARAMETERS = {
    "embed.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "output.weight": "output_layer.weight",
}


class MegatronLlama(GPTModel):  # type: ignore[misc]
    """This rank's pipeline stage and tensor-parallel shard of a Llama, as Megatron's GPTModel with
    the attention kernel `kernel`; weights are not filled in (`fill_weights`). `config` is a
    TransformerConfig, from which TP and PP are taken. The vocabulary is padded to equally many rows
    on all ranks; `own_rows` of this rank's rows are real. On the last stage its forward returns the
    loss of each label. `run_stage` calls it. Needs Megatron's initialized process groups.
    """

    def __init__(self, config: Any, shape: LlamaShape, kernel: str) -> None:
        """Build this rank's stage by Megatron's local layer spec, with `MegatronPackedAttention` of
        this kernel and `SegmentRotary` in place of Megatron's own. Needs initialized process
        groups, and layers that PP divides.
        """
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        rows = count_vocab_rows(shape.vocab, tp)
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = attention_class(kernel)
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
        """Return Megatron's loss of each token [1, tokens], over the vocabulary of all ranks.
        Logits of rows that pad the vocabulary are set to -inf first, in place.
        """
        if self.own_rows < logits.shape[-1]:
            logits[..., self.own_rows :] = -torch.inf
        out: Tensor = super().compute_language_model_loss(labels, logits)
        return out


def run_stage(
    wrapped: Any,
    model: MegatronLlama,
    tokens: Tensor,
    positions: Tensor,
    rows: PackedLayout,
    labels: Tensor | None,
) -> Tensor:
    """Run a pipeline stage on packed `tokens` [tokens], called through `wrapped` (the model itself,
    or what DDP and Float16Module put around it).

    Returns hidden states [tokens, 1, hidden] or, on the last stage of a model with its output
    layer, losses [1, tokens] of `labels` [1, tokens]. `positions` are those in each segment, and
    are stored in `model` for the rotary embedding; `rows` is the layout of the segments.
    """
    model.rotary_pos_emb.positions = positions
    out: Tensor = wrapped(
        tokens[None], None, None, labels=labels, packed_seq_params=make_packed_seq_params(rows)
    )
    return out


def fill_weights(
    model: MegatronLlama, tensors: Mapping[str, Tensor], job: Job, shape: LlamaShape
) -> dict[str, Any]:
    """Write the case's weights into `tensors`, which have the parameters' sizes and Megatron's
    names, in place, and return their source for the record.

    They are the same as every engine's: random from the seed (norms one, biases zero), or read from
    the checkpoint (RequestError if it does not fit); each rank fills its shard. Rows that pad the
    vocabulary become zero.
    """
    question, shard = job.case.question, Shard(job.place.tp, job.plan.tp)
    views = parameter_views(model, tensors, shape, shard)
    with torch.no_grad():
        for name in ("embed.weight", "output.weight"):
            if name in views:
                tensors[OUTER_PARAMETERS[name]].zero_()  # rows that pad a vocabulary stay so
        if job.weights is not None:
            return llama_weights.load_into_views(
                views, job.weights, shape, shard, job.report_loading
            )
        for name, view in views.items():
            if name.endswith("bias"):
                view.zero_()
            elif view.dim() == 1:
                view.fill_(1.0)
            else:
                llama_weights.fill_random_view(
                    name, view, question.seed, shape, shard, DTYPES[question.precision.weights]
                )
    return {"source": "random", "seed": question.seed}


def parameter_views(
    model: MegatronLlama, tensors: Mapping[str, Tensor], shape: LlamaShape, shard: Shard
) -> dict[str, Tensor]:
    """Return views of `tensors` (by Megatron's names, of this stage) to write to, by this package's
    parameter names with the layer's number in the whole model; each of the logical shape of this
    shard's part. Raises RuntimeError if a tensor is no Llama parameter.
    """
    names = {theirs: ours for ours, theirs in OUTER_PARAMETERS.items()}
    for i, layer in enumerate(model.decoder.layers):
        names |= {
            f"decoder.layers.{i}.{theirs}": f"layers.{layer.layer_number - 1}.{ours}"
            for ours, theirs in LAYER_PARAMETERS.items()
        }
    unknown = sorted(tensors.keys() - names.keys())
    if unknown:
        raise RuntimeError(f"Megatron's parameter {unknown[0]} is not a parameter of a Llama")
    return {
        names[name]: _logical_view(names[name], tensor, shape, shard)
        for name, tensor in tensors.items()
    }


def _logical_view(name: str, tensor: Tensor, shape: LlamaShape, shard: Shard) -> Tensor:
    """Return a view of a tensor in the parameter's logical shape (models/llama_placements.py),
    without the rows that pad the vocabulary; it shares the tensor's memory. `name` is this
    package's.
    """
    row = llama_placements.find_placement(name)
    view = tensor.view(row.logical_shape(llama_placements.make_shard_shape(shape, shard)))
    if row.split is None:
        return view
    begin, end = llama_placements.find_shard_box(name, shape, shard)[row.split]
    return view.narrow(row.split, 0, end - begin)


def describe_library() -> str:
    """Return the version of megatron-core and whether Transformer Engine was imported, as a text
    for the record: Megatron then uses its optimizer.
    """
    engine = (
        "with Transformer Engine's optimizer"
        if "transformer_engine" in sys.modules
        else "without Transformer Engine"
    )
    return f"megatron-core {version('megatron-core')}, {engine}"
