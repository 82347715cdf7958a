"""Recomputation: what a block does not keep for its backward pass, and computes again there."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from steelyard.models.llama import Streams

# What selective recomputation keeps: the results of matmuls and of attention. All else is computed again.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}


def recomputed(block: Callable[..., Streams], how: str) -> Callable[..., Streams]:
    """A block whose activations are computed again in the backward pass: all, or all but those of large operations."""
    if how == "none":
        return block

    def selective() -> Any:
        return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]

    def run(*arguments: Any) -> Streams:
        if how == "full":
            out: Streams = checkpoint(block, *arguments, use_reentrant=False)
        else:
            out = checkpoint(block, *arguments, use_reentrant=False, context_fn=selective)
        return out

    return run


def _policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
