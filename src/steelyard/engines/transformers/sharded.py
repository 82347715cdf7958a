"""Engine `transformers` on many devices: the same model with its layers divided by FSDP, as its users do."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.models.tensors import DTYPES, compute_dtype
from steelyard.plan.degrees import shard_degree
from steelyard.training.fsdp import shard
from steelyard.training.sharded import Sharded


class ShardedLayers:
    def __init__(self, job: Job) -> None:
        tune, precision = job.case.tune, job.case.question.precision
        if not tune.sharding or shard_degree(job.case, job.plan.dp) != job.plan.dp:
            raise RequestError(
                "engine transformers divides what it holds among all its devices; add --set tune.sharding=3 (or 1 or 2), "
                "without tune.sharding_degree"
            )
        self.device, self.sharding = job.device, tune.sharding
        self.kept, self.compute = DTYPES[precision.weights], compute_dtype(precision.matmul)
        self.mesh = init_device_mesh(job.device.torch_device.type, (job.plan.dp,))

    def placement(self) -> Sharded:
        device: torch.device = self.device.torch_device
        return Sharded(self.mesh.get_group(), self.sharding, self.compute, device)

    def shard(self, model: Any, master: list[Tensor] | None) -> list[nn.Module]:
        """Every rank has made or read the whole, and keeps its part. What is kept in another precision is so in the parts, and
        gathered in that of the matmuls. Returns the outermost modules."""
        if master is not None:
            for parameter, one in zip((p for p in model.parameters() if p.requires_grad), master, strict=True):
                parameter.data = one
        roots = [model.model, model.lm_head]
        shard([*model.model.layers, *roots], self.mesh, self.sharding, self.compute, self.kept)
        self.device.release_memory()
        return roots
