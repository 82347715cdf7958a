"""Engine `megatron`, training: Megatron's model, pipeline schedule, data parallelism and optimizer
in the loop of all engines (training/training_loop.py).

The loss is computed as Megatron does it: logits of every token, then the losses of those that are
learned from. Clipping reads the norm back to the host in every step, which is Megatron's own way.
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
from steelyard.engines.megatron.gpt_model import (
    MegatronLlama,
    describe_library,
    fill_weights,
    run_stage,
)
from steelyard.engines.megatron.optimizer import MegatronAdam
from steelyard.errors import RequestError
from steelyard.training import checkpoint_folders
from steelyard.training.adamw import describe_holdings
from steelyard.training.checkpoint_folders import CheckpointState, OptimizerScalars
from steelyard.training.micro_batches import MicroBatch, RowBatches
from steelyard.training.trainer import TorchLearner
from steelyard.training.training_loop import HeldOutLoss, TrainingLoop
from steelyard.weights import llama_weights


class MegatronTrain(TrainingLoop):
    """The engine for work `train_rows` by Megatron: the common `TrainingLoop` with a
    `MegatronTrainer`, `RowBatches` and `HeldOutLoss`. Constructing it initializes Megatron's
    process groups (all ranks together; process-wide), and raises RequestError for what the engine
    cannot do or if the checkpoint to resume from has another plan. Rows are padded to one length
    unless `tune.pack` is on and it runs uncompiled on one replica without a pipeline.
    """

    def __init__(self, job: Job) -> None:
        """Check the job and the checkpoint to resume from, initialize Megatron's process groups
        with all ranks together, and make trainer and batches; the model is built later, in
        `prepare`. Raises RequestError as the class says.
        """
        config.check_megatron(job)
        _check_resume(job)
        config.initialize_process_groups(job)
        trainer = MegatronTrainer(job)
        # Stages and compiled code are made for one size, and a replica may have no rows at all.
        any_size = job.plan.pp * job.plan.dp == 1 and not job.case.tune.compile
        batches = RowBatches(job, job.train.length, padded=not job.case.tune.pack or not any_size)
        super().__init__(job, trainer, batches, HeldOutLoss(job, trainer, batches))


def _check_resume(job: Job) -> None:
    """Raise RequestError if the checkpoint to resume from, if there is one, cannot be read or has
    another plan than the job: each rank saves what it holds, as it holds it.
    """
    if job.resume is None:
        return
    saved_plan = checkpoint_folders.read_checkpoint_json(
        job.resume / checkpoint_folders.STATE_FILE, CheckpointState
    ).plan
    if str(saved_plan) != str(job.plan):
        raise RequestError(
            "--resume: engine megatron resumes only under the plan of the checkpoint; allowed:"
            f" --parallel {saved_plan}, not {job.plan}"
        )


class MegatronStage:
    """This rank's pipeline stage with Megatron's wrappers, the `model` of a `MegatronTrainer`.
    `build()` sets `config` (TransformerConfig), `stage` (a `MegatronLlama`) and `module`,
    DistributedDataParallel around it (around Float16Module in 16 bit). `fill(optimizer)` sets the
    weights and `weights`, their source for the record (empty before). `kernel` names the attention
    kernel; constructing it raises RequestError if that is unknown or cannot train.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.kernel = job, config.choose_megatron_attention(job)
        self.weights: dict[str, Any] = {}

    def build(self) -> None:
        """Create this rank's stage and its wrappers on the device and set `config`, `stage` and
        `module`; weights are not filled in yet. Replicas sum gradients in fp32 during the backward
        pass.
        """
        job = self.job
        dp, shape = job.plan.dp, llama_weights.get_llama_shape(job.case.question.model)
        self.config = config.make_transformer_config(job, shape)
        self.stage = MegatronLlama(self.config, shape, self.kernel).to(job.device.torch_device)
        mixed = self.config.bf16 or self.config.fp16
        inner = Float16Module(self.config, self.stage) if mixed else self.stage
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=dp > 1,
            use_distributed_optimizer=config.is_sharded(job),
        )
        self.module = DistributedDataParallel(self.config, ddp, inner)
        self.config.no_sync_func = self.module.no_sync if dp > 1 else None
        self.config.finalize_model_grads_func = _finalize_gradients

    def fill(self, optimizer: MegatronAdam) -> None:
        """Write the stage's fp32 weights into its gradient buffers, which are as large and not in
        use yet, and start the optimizer from there, which zeroes them. Sets `weights`, their
        source. Raises RequestError if the checkpoint does not fit.
        """
        gradients = {name: parameter.main_grad for name, parameter in self.stage.named_parameters()}
        self.weights = fill_weights(
            self.stage,
            gradients,
            self.job,
            llama_weights.get_llama_shape(self.job.case.question.model),
        )
        optimizer.start_from_gradient_buffers(list(self.stage.parameters()))


def _finalize_gradients(
    models: list[Any], targets: Tensor | None, pg_collection: Any, force_all_reduce: bool
) -> None:
    """Finish gradients as Megatron does, without the count of targets: losses are already divided
    by the targets of all replicas. Megatron calls it after a step's last backward pass.
    """
    finalize_model_grads(models, None, pg_collection, force_all_reduce)


class MegatronTrainer(TorchLearner):
    """The learner of the training loop for Megatron, in place of `Trainer` (training/trainer.py):
    `model` (a `MegatronStage`), Megatron's pipeline schedule and, after `prepare`, `optimizer` (a
    `MegatronAdam`). `backward` runs the schedule and sums gradients over replicas, `reduce` sums
    the loss, `update` steps and returns the norm as a float. As a TorchLearner it writes and loads
    checkpoints, under the plan that they were written with. `replicas` and `stages` are this rank's
    process groups. Needs initialized process groups.
    """

    exchanges_separately = False  # replicas sum gradients inside the backward pass

    def __init__(self, job: Job) -> None:
        """Store the job and the process groups of replicas and stages, which must be initialized;
        the model is built in `prepare`. Raises RequestError if the attention kernel is unknown or
        cannot train.
        """
        self.job, self.model = job, MegatronStage(job)
        self.device: torch.device = job.device.torch_device
        self.replicas = parallel_state.get_data_parallel_group()
        self.stages = parallel_state.get_pipeline_model_parallel_group()

    def prepare(self, part: Part) -> None:
        """Build model and optimizer and fill in the weights, timed as part `weights`; sets
        `optimizer`. Raises RequestError if the checkpoint does not fit.
        """
        with part("weights"):
            self.model.build()
            sharded = config.is_sharded(self.job)
            self.optimizer = MegatronAdam(
                self.model.module, self.job.train, self.job.case.question.precision, sharded
            )
            self.model.config.grad_scale_func = self.optimizer.scale
            self.model.fill(self.optimizer)
            self.job.device.synchronize()

    def warm_up(self, micro: MicroBatch) -> None:
        """Run one evaluation, forward and backward (with the exchange of gradients) on a
        micro-batch without an update, and zero the gradients. All ranks call it together.
        """
        self.evaluate(micro)
        self.backward([micro], self.sum_over_replicas(1))
        self.optimizer.zero_grad()

    def evaluate(self, micro: MicroBatch) -> Tensor:
        """Return the summed cross-entropy of a micro-batch in nats, in fp64, the same on all
        stages, which call it together.
        """
        with torch.no_grad():
            loss = self._run_schedule(
                [micro], torch.ones((), device=self.device), forward_only=True
            )
        return self._share_with_stages(loss.double())

    def sum_over_replicas(self, number: int) -> Tensor:
        """Return a count summed over replicas, as a zero-dimensional fp32 tensor on the device; all
        replicas call it together.
        """
        # a copy from the host would wait for the device
        count = torch.full((), float(number), device=self.device)
        if self.job.plan.dp > 1:
            dist.all_reduce(count, group=self.replicas)
        return count

    def backward(self, micros: list[MicroBatch], targets: Tensor) -> Tensor:
        """Run forward and backward of a step, in which replicas also sum gradients, and return this
        replica's sum of losses / targets; 0 on all but the last stage. `targets` is their number
        over all replicas. All ranks call it together.
        """
        return self._run_schedule(micros, targets, forward_only=False)

    def _run_schedule(
        self, micros: list[MicroBatch], targets: Tensor, forward_only: bool
    ) -> Tensor:
        """Run Megatron's pipeline schedule over micro-batches of one size and return the sum of
        their losses / targets as a device tensor; 0 on all but the last stage. `forward_only` runs
        no backward pass. All stages call it together.
        """

        def forward_step(iterator: Iterator[MicroBatch], module: Any) -> Any:
            """Run the stage on the iterator's next micro-batch and return (output, function that
            computes the loss from it), as Megatron's schedule asks. `module` is the wrapped stage.
            """
            micro = next(iterator)
            labels = torch.zeros_like(micro.tokens).index_copy_(0, micro.pick, micro.targets)
            out = run_stage(
                module, self.model.stage, micro.tokens, micro.positions, micro.layout, labels[None]
            )

            def loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                """Return (sum of the losses at the picked tokens / targets, a zero count of tokens,
                a copy of the first to report), from the losses of all tokens; the zero keeps
                Megatron from dividing again.
                """
                mean = losses.flatten().float()[micro.pick].sum() / targets
                # A clone: the schedule changes the loss in place where it is told to normalise by
                # itself.
                return (
                    mean,
                    torch.zeros((), dtype=torch.int, device=self.device),
                    mean.detach().clone(),
                )

            return out, loss

        step_losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=self.model.module,
            num_microbatches=len(micros),
            seq_length=len(micros[0].tokens),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return (
            torch.stack(step_losses).sum() if step_losses else torch.zeros((), device=self.device)
        )

    def reduce(self, loss: Tensor) -> Tensor:
        """Return the loss summed over replicas (in place), the same on all stages. Gradients were
        summed in `backward`. All ranks call it together.
        """
        if self.job.plan.dp > 1:
            dist.all_reduce(loss, group=self.replicas)
        return self._share_with_stages(loss)

    def _share_with_stages(self, loss: Tensor) -> Tensor:
        """Give all stages of a pipeline the loss that only the last one has (others have 0), by a
        sum in place, and return it. All stages call it together.
        """
        if self.job.plan.pp > 1:
            dist.all_reduce(loss, group=self.stages)
        return loss

    def update(self, lr: float) -> float:
        """Clip the gradients, update the weights with this learning rate and zero the gradients;
        return their norm before clipping as a float, inf if fp16 overflowed and no step was taken.
        Waits for the device. All ranks call it together.
        """
        return self.optimizer.step(lr)

    def list_state(self) -> dict[str, Tensor]:
        """Return this rank's optimizer tensors, to be saved or filled in place, under names with
        its place in the plan (`tp0.pp1.weights.3`). Only with the distributed optimizer does the
        name contain the replica (`dp0.`): otherwise replicas have equal tensors, which are written
        once.
        """
        place = self.job.place
        replica_prefix = f"dp{place.dp}." if config.is_sharded(self.job) else ""
        return {
            f"tp{place.tp}.pp{place.pp}.{replica_prefix}{name}": tensor
            for name, tensor in self.optimizer.state().items()
        }

    def read_scalars(self) -> OptimizerScalars:
        """Return the optimizer's number of updates and, in fp16, its loss scale with growth
        counter, for a checkpoint.
        """
        return self.optimizer.numbers()

    def restore(self, scalars: OptimizerScalars) -> None:
        """Continue from the tensors of `list_state`, filled in since, and these scalars. All ranks
        call it together. Raises RequestError if this precision scales losses and the checkpoint has
        no scale.
        """
        self.optimizer.restore(scalars)

    def details(self) -> dict[str, Any]:
        """Return for the record: `library`, the optimizer's class and module, the attention kernel,
        and what this rank really holds: numbers of elements of parameters and moments, and dtypes
        of parameters, updated weights, gradients and moments.
        """
        parameters = list(self.model.stage.parameters())
        gradients = [parameter.main_grad for parameter in parameters]
        return {
            "library": describe_library(),
            "optimizer": (
                f"{type(self.optimizer.part).__name__} of {type(self.optimizer.inner).__module__}"
            ),
            "attention": self.model.kernel,
            **describe_holdings(
                parameters, self.optimizer.updated_tensors(), gradients, self.optimizer.moments()
            ),
        }
