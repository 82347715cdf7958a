"""Build a Llama, whole or one tensor-parallel shard, on a device with its weights: random from a
seed, or of a checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.models import placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.placements import WHOLE, Shard, Total
from steelyard.weights import load
from steelyard.weights.checkpoint import ByteProgress


def _nothing_to_sum(part: Tensor) -> Tensor:
    """Return the tensor: the sum over one shard is the shard's own."""
    return part


def build(
    shape: LlamaShape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    folder: Path | None,
    share: Shard = WHOLE,
    total: Total = _nothing_to_sum,
    progress: ByteProgress | None = None,
) -> tuple[Llama, dict[str, Any]]:
    """Build a Llama shard on a device, fill it with weights, and return it with where they came
    from, for the record.

    Weights are loaded from `folder`, or random from `seed` if that is None: the same for every
    engine and number of shards. `sum_over_shards` is the all-reduce that the tensor-parallel layers
    call. `progress` is called while a checkpoint is loaded, with the bytes copied and in all. Raise
    RequestError if the checkpoint is not of this model.
    """
    model = load.build(shape, device, dtype, share)
    if folder is None:
        load.fill_random(model, seed, shape, share)
        source: dict[str, Any] = {"source": "random", "seed": seed}
    else:
        source = load.load(model, folder, shape, share, progress)
    placements.apply_tensor_parallel(model, share, total)
    return model, source
