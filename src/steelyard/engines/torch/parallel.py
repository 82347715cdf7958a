"""A Llama trained on many devices: this rank's pipeline stage, tensor parallel and sharded as the plan says.

Its blocks are those of one device, with autograd's gradients. With tensor parallelism they are the model's own, compiled
whole: norms are then modules that divide the tokens of the residual stream.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from steelyard.engines.job import Job
from steelyard.engines.torch.pipeline import Pipeline
from steelyard.engines.torch.recompute import recomputed
from steelyard.engines.torch.sharded_weights import fill
from steelyard.engines.torch.stage import Stage, summed_loss, tensor_parallel
from steelyard.errors import RequestError
from steelyard.models.llama import Block, Streams
from steelyard.models.llama_fused import BlockKernels, ByAutograd, FusedBlock, Gradient
from steelyard.models.placements import Shard
from steelyard.models.tensors import DTYPES, compute_dtype
from steelyard.plan.degrees import shard_degree
from steelyard.training.fsdp import shard
from steelyard.training.micro_batches import MicroBatch
from steelyard.training.parallel import REPLICAS, Last, Parallel, plan_mesh
from steelyard.training.placement import Model
from steelyard.training.trainer import Trainer
from steelyard.weights import load


class ParallelLlama:
    """What this rank holds of a Llama."""

    def __init__(self, job: Job, kernel: str, mesh: DeviceMesh, sharding: int) -> None:
        self.job, self.kernel, self.mesh, self.sharding = job, kernel, mesh, sharding
        precision = job.case.question.precision
        self.kept, self.compute = DTYPES[precision.weights], compute_dtype(precision.matmul)
        self.block = "fused" if job.plan.tp == 1 else "plain"
        self.weights: dict[str, Any] = {}

    def build(self) -> list[Tensor] | None:
        """It takes memory only once it is divided. Without shards, master weights stand beside the model's own."""
        self.module = self._stage()
        self.roots: list[nn.Module] = [self.module]
        if self.sharding or self.compute == self.kept:
            return None
        master = [p.detach() for p in self.module.parameters()]
        self.module.to(self.compute)
        return master

    def _stage(self) -> Stage:
        plan, place = self.job.plan, self.job.place
        shape = load.shape_of(self.job.case.question.model)
        with torch.device("meta"):
            stage = Stage(shape, place.pp, plan.pp, self.kernel).to(self.kept)
        if plan.tp > 1:
            tensor_parallel(stage, self.mesh["tensor"])
        self._choose_code(stage)
        shards = Shard()
        if self.sharding:
            self._shard(stage)
            shards = Shard(self.mesh["shards"].get_local_rank(), self.mesh["shards"].size())
        stage.to_empty(device=self.job.device.torch_device)
        stage.tie()
        self.weights = fill(stage, self.job, shape, Shard(place.tp, plan.tp), shards)
        return stage.train()

    def _choose_code(self, stage: Stage) -> None:
        """What computes a block and the loss: inside the hooks that gather weights, so that these are never compiled."""
        kernels = BlockKernels(self.job.case.tune.compile)
        for block in stage.layers.values():
            block.forward = self._code(cast(Block, block), kernels)
        if self.job.case.tune.compile and self.job.plan.tp == 1:
            stage.read = torch.compile(summed_loss, dynamic=True)

    def _code(self, block: Block, kernels: BlockKernels) -> Callable[..., tuple[Tensor, Tensor]]:
        tune = self.job.case.tune
        if self.block == "fused":
            return _streams(recomputed(FusedBlock(block, ByAutograd(), kernels), tune.recompute))
        run = _streams(recomputed(block.forward, tune.recompute))
        return torch.compile(run) if tune.compile else run

    def _shard(self, stage: Stage) -> None:
        """Replicas divide what they hold."""
        mesh: DeviceMesh = self.mesh[REPLICAS] if self.mesh["copies"].size() > 1 else self.mesh["shards"]
        shard([*stage.layers.values(), stage], mesh, self.sharding, self.compute, self.kept)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    def compile(self, gradient: Gradient) -> None:
        """Done before the model was divided."""

    def loss(self, micro: MicroBatch) -> Tensor:
        out: Tensor = self.module(None, micro)
        return out

    def evaluate(self, micro: MicroBatch) -> Tensor:
        return self.loss(micro)

    def variants(self, micro: MicroBatch) -> list[MicroBatch]:
        return [micro]

    def details(self) -> dict[str, Any]:
        return {"attention": self.kernel, "block": self.block}


def parallel_trainer(job: Job, kernel: str) -> Trainer:
    device: torch.device = job.device.torch_device
    question, plan = job.case.question, job.plan
    if question.precision.matmul == "fp8":
        raise RequestError("engine torch trains in fp8 on one device; use --devices 1 or --precision bf16")
    degree = shard_degree(job.case, plan.dp)
    sharding = job.case.tune.sharding if degree > 1 else 0
    mesh, compute = plan_mesh(device, plan, degree), compute_dtype(question.precision.matmul)

    def pipeline(model: Model, group: Any, last: Last) -> Pipeline:
        like = torch.empty(0, question.model.hidden, dtype=compute, device=device)
        return Pipeline(cast(Stage, model.roots[0]), job.place.pp, group, like, plan.tp, last)

    placement = Parallel(mesh, sharding, compute, device, pipeline if plan.pp > 1 else None)
    return Trainer(job, ParallelLlama(job, kernel, mesh, sharding), placement)


def _streams(block: Callable[..., Streams]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A block without its keys and values, which nobody asks for here."""

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        return block(*arguments)[:2]

    return run
