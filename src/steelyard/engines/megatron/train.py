"""Engine `megatron`, training: Megatron's model, pipeline schedule, data parallelism and optimizer
in the loop of all engines.

The loss is read as Megatron reads it: logits of every token, then the losses of those that are
learned from. Clipping reads the norm back to the host in every step; that is Megatron's own.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from steelyard.engine.job import Job, Part
from steelyard.engines.megatron import config
from steelyard.engines.megatron.model import MegatronLlama, fill, library, run
from steelyard.engines.megatron.optimizer import MegatronAdam
from steelyard.errors import RequestError
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Numbers, State
from steelyard.training.loop import HeldOutLoss, Loop
from steelyard.training.micro_batches import MicroBatch, RowBatches
from steelyard.training.optimizer import holding
from steelyard.training.trainer import Kept
from steelyard.weights import load


class MegatronTrain(Loop):
    def __init__(self, job: Job) -> None:
        config.check(job)
        _check_resume(job)
        config.initialize_process_groups(job)
        learner = MegatronLearner(job)
        # Stages and compiled code are made for one size, and a replica may have no rows at all.
        any_size = job.plan.pp * job.plan.dp == 1 and not job.case.tune.compile
        batches = RowBatches(job, job.train.length, padded=not job.case.tune.pack or not any_size)
        super().__init__(job, learner, batches, HeldOutLoss(job, learner, batches))


def _check_resume(job: Job) -> None:
    """Every rank keeps what it holds, as it holds it."""
    if job.resume is None:
        return
    before = checkpoints.read(job.resume / checkpoints.STATE, State).plan
    if str(before) != str(job.plan):
        raise RequestError(
            f"--resume: engine megatron goes on under the plan that it began with, {before}; asked:"
            f" {job.plan}"
        )


class StageModel:
    """This rank's stage, and what Megatron puts around it."""

    def __init__(self, job: Job) -> None:
        self.job, self.kernel = job, config.choose_kernel(job)
        self.weights: dict[str, Any] = {}

    def build(self) -> None:
        job = self.job
        dp, shape = job.plan.dp, load.shape_of(job.case.question.model)
        self.config = config.make(job, shape)
        self.stage = MegatronLlama(self.config, shape, self.kernel).to(job.device.torch_device)
        mixed = self.config.bf16 or self.config.fp16
        inner = Float16Module(self.config, self.stage) if mixed else self.stage
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=dp > 1,
            use_distributed_optimizer=config.sharded(job),
        )
        self.module = DistributedDataParallel(self.config, ddp, inner)
        self.config.no_sync_func = self.module.no_sync if dp > 1 else None
        self.config.finalize_model_grads_func = _finalize

    def fill(self, optimizer: MegatronAdam) -> None:
        """Weights in fp32, by way of the memory of the gradients, which are as large and not there
        yet.
        """
        gradients = {name: parameter.main_grad for name, parameter in self.stage.named_parameters()}
        self.weights = fill(
            self.stage, gradients, self.job, load.shape_of(self.job.case.question.model)
        )
        optimizer.begin(list(self.stage.parameters()))


def _finalize(
    models: list[Any], targets: Tensor | None, pg_collection: Any, force_all_reduce: bool
) -> None:
    """Megatron's, told nothing of targets: losses come divided by those of all replicas."""
    finalize_model_grads(models, None, pg_collection, force_all_reduce)


class MegatronLearner(Kept):
    """What training/trainer.py is to other engines."""

    separate = False  # replicas sum gradients inside the backward pass

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, StageModel(job)
        self.device: torch.device = job.device.torch_device
        self.replicas = parallel_state.get_data_parallel_group()
        self.stages = parallel_state.get_pipeline_model_parallel_group()

    def prepare(self, part: Part) -> None:
        with part("weights"):
            self.model.build()
            sharded = config.sharded(self.job)
            self.optimizer = MegatronAdam(
                self.model.module, self.job.train, self.job.case.question.precision, sharded
            )
            self.model.config.grad_scale_func = self.optimizer.scale
            self.model.fill(self.optimizer)
            self.job.device.synchronize()

    def warm(self, micro: MicroBatch) -> None:
        self.evaluate(micro)
        self.backward([micro], self.total(1))
        self.optimizer.zero_grad()

    def evaluate(self, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            found = self._schedule([micro], torch.ones((), device=self.device), forward_only=True)
        return self._known(found.double())

    def total(self, number: int) -> Tensor:
        # a copy from the host would wait for the device
        count = torch.full((), float(number), device=self.device)
        if self.job.plan.dp > 1:
            dist.all_reduce(count, group=self.replicas)
        return count

    def backward(self, micros: list[MicroBatch], targets: Tensor) -> Tensor:
        return self._schedule(micros, targets, forward_only=False)

    def _schedule(self, micros: list[MicroBatch], targets: Tensor, forward_only: bool) -> Tensor:
        """Megatron's schedule over micro-batches of one size; the sum of their losses / targets, on
        the last stage.
        """

        def step(iterator: Iterator[MicroBatch], module: Any) -> Any:
            micro = next(iterator)
            labels = torch.zeros_like(micro.tokens).index_copy_(0, micro.pick, micro.targets)
            out = run(
                module, self.model.stage, micro.tokens, micro.positions, micro.rows, labels[None]
            )

            def loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                mean = losses.flatten().float()[micro.pick].sum() / targets
                # A clone: the schedule changes the loss in place where it is told to normalise by
                # itself.
                return (
                    mean,
                    torch.zeros((), dtype=torch.int, device=self.device),
                    mean.detach().clone(),
                )

            return out, loss

        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=self.model.module,
            num_microbatches=len(micros),
            seq_length=len(micros[0].tokens),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return torch.stack(found).sum() if found else torch.zeros((), device=self.device)

    def reduce(self, loss: Tensor) -> Tensor:
        if self.job.plan.dp > 1:
            dist.all_reduce(loss, group=self.replicas)
        return self._known(loss)

    def _known(self, loss: Tensor) -> Tensor:
        """To all stages, of which the last alone has one."""
        if self.job.plan.pp > 1:
            dist.all_reduce(loss, group=self.stages)
        return loss

    def update(self, lr: float) -> float:
        return self.optimizer.step(lr)

    def state(self) -> dict[str, Tensor]:
        """Of replicas that divide their states each has its own; others have the same, which is
        written once.
        """
        place = self.job.place
        own = f"dp{place.dp}." if config.sharded(self.job) else ""
        return {
            f"tp{place.tp}.pp{place.pp}.{own}{name}": one
            for name, one in self.optimizer.state().items()
        }

    def numbers(self) -> Numbers:
        return self.optimizer.numbers()

    def restore(self, numbers: Numbers) -> None:
        self.optimizer.restore(numbers)

    def details(self) -> dict[str, Any]:
        """With what this rank really holds: numbers, and their types."""
        parameters = list(self.model.stage.parameters())
        gradients = [one.main_grad for one in parameters]
        return {
            "library": library(),
            "optimizer": (
                f"{type(self.optimizer.part).__name__} of {type(self.optimizer.inner).__module__}"
            ),
            "attention": self.model.kernel,
            **holding(parameters, self.optimizer.kept(), gradients, self.optimizer.moments()),
        }
