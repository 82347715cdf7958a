"""Build a Llama, whole or one tensor-parallel shard, on a device with its weights: random from a
seed, or of a checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.models import llama_placements
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.llama_placements import WHOLE, Shard, SumOverShards
from steelyard.weights import llama_weights
from steelyard.weights.checkpoint_tensors import ByteProgress


def _return_own_part(part: Tensor) -> Tensor:
    """Return the tensor: the sum over one shard is the shard's own."""
    return part


def build_llama_with_weights(
    shape: LlamaShape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    folder: Path | None,
    shard: Shard = WHOLE,
    sum_over_shards: SumOverShards = _return_own_part,
    progress: ByteProgress | None = None,
) -> tuple[Llama, dict[str, Any]]:
    """Build a Llama shard on a device, fill it with weights, and return it with where they came
    from, for the record: `describe_llama_source`, or `source` "random" and the seed.

    Weights are loaded from `folder`, or random from `seed` if that is None: the same for every
    engine and number of shards. `sum_over_shards` is the all-reduce that the tensor-parallel layers
    will call. `progress` is called while a checkpoint is loaded, with the bytes copied and in all.
    Raise RequestError if the checkpoint is not of this model.
    """
    model = llama_weights.build_llama(shape, device, dtype, shard)
    if folder is None:
        llama_weights.fill_random_llama_weights(model, seed, shape, shard)
        source: dict[str, Any] = {"source": "random", "seed": seed}
    else:
        source = llama_weights.load_llama(model, folder, shape, shard, progress)
    llama_placements.apply_tensor_parallel(model, shard, sum_over_shards)
    return model, source
