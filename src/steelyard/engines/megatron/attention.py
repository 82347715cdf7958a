"""Packed rows in Megatron's layers: its own attention makes a mask of tokens x tokens, and counts positions from the first
token of a batch. Here segments do not see each other, no mask is made, and each has positions of its own.

A batch is one long row: [tokens, 1, …] in Megatron's order of sequence and batch. Where its segments begin travels in
`PackedSeqParams`, which recomputation keeps with a micro-batch. Their format is called sbhd: of `thd` Megatron reads the
lengths back to the host in every layer.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from steelyard.models.attention import Layout, attend


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
    """Megatron's angles, of the positions that tokens have in their segments. Its own `forward` remembers the answer to a
    length."""

    positions: Tensor  # of the batch that is computed next

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        return torch.outer(self.positions.to(self.inv_freq.dtype), self.inv_freq)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        out: Tensor = self.get_emb(max_seq_len, offset)
        return out
