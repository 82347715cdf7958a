"""Engine `transformers`, training on many devices: the same model with its layers divided by FSDP, as its users do."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from steelyard.case.question import Train
from steelyard.engines.job import Job
from steelyard.engines.torch.model import DTYPES
from steelyard.engines.torch.parallel import LaidAdam, before_backward, shard
from steelyard.engines.torch.train import compute_dtype
from steelyard.engines.transformers.train import TransformersTrainer
from steelyard.errors import RequestError
from steelyard.plan.degrees import shard_degree
from steelyard.training.loop import Micro
from steelyard.training.optimizer import Adam


class LaidTransformers(TransformersTrainer):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if not self.tune.sharding or shard_degree(job.case, job.plan.dp) != job.plan.dp:
            raise RequestError(
                "engine transformers divides what it holds among all its devices; add --set tune.sharding=3 (or 1 or 2), "
                "without tune.sharding_degree"
            )
        self.compute = DTYPES[compute_dtype(self.question.precision)]

    def _load(self) -> tuple[Any, None]:
        """Every rank makes or reads the whole, and keeps its part. What is kept in another precision is so in the parts, and
        gathered in that of the matmuls."""
        model, kept = super()._load()
        if kept is not None:
            for parameter, master in zip((p for p in model.parameters() if p.requires_grad), kept, strict=True):
                parameter.data = master
        mesh = init_device_mesh(self.device.type, (self.job.plan.dp,))
        self.roots = [model.model, model.lm_head]
        kept_in = DTYPES[self.question.precision.weights]
        shard([*model.model.layers, *self.roots], mesh, self.tune.sharding, self.compute, kept_in)
        self.job.device.release_memory()
        return model, None

    def _optimizer(self, kept: list[Tensor] | None, train: Train) -> Adam:
        learned = [p for p in self.hf.parameters() if p.requires_grad]
        return LaidAdam(learned, None, train, self.question.precision, None)

    def learn(self, micros: list[Micro], targets: Tensor) -> Tensor:
        losses = [torch.zeros((), device=self.device)]
        for i, micro in enumerate(micros):
            for root in self.roots:
                before_backward(root, self.tune.sharding, i == len(micros) - 1)
            loss = self.loss(micro) / targets
            self.adam.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return self._sum(torch.stack(losses).sum())

    def total(self, number: int) -> Tensor:
        return self._sum(super().total(number))

    def _sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def details(self) -> dict[str, Any]:
        return {**super().details(), "sharding": self.tune.sharding}
