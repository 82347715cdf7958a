"""A Llama, or a share of one, on a device with its weights: random ones from a seed, or a
checkpoint's.
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
    """The model and where its weights came from, for the record: the same for every engine. `total`
    sums over all shares.
    """
    model = load.build(shape, device, dtype, share)
    if folder is None:
        load.fill_random(model, seed, shape, share)
        source: dict[str, Any] = {"source": "random", "seed": seed}
    else:
        source = load.load(model, folder, shape, share, progress)
    placements.apply_tensor_parallel(model, share, total)
    return model, source
