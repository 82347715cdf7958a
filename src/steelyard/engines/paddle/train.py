"""Engine `paddle`, training a Llama on one device, or over all devices of a plan by fleet. The loop
is training/training_loop.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from steelyard.engine.job import Job, Part
from steelyard.engines.paddle import fleet_placement, modes, optimizer, paddle_kernels
from steelyard.engines.paddle.paddle_batches import PaddleBatches, PaddleMicroBatch
from steelyard.training.training_loop import HeldOutLoss, TrainingLoop

Tensor = Any


class PaddleTrainer:
    """The learner of the training loop (`Learner`) for Paddle: a Llama, its placement by fleet, and
    its optimizer. It writes no checkpoints.

    The constructor chooses modes and kernels, and raises RequestError for modes, attention kernels
    or dtypes that Paddle or the device does not have; `prepare` builds the model (`placed`, a
    `PlacedModel`). `evaluate` returns a summed loss; `backward`, `reduce` and `update` make a step.
    `overlaps` is true for plain data parallelism without recomputation: gradients are then summed
    during the last micro-batch's backward pass, else in `reduce` or by fleet. `dtypes` has the
    dtypes seen of parameters, gradients, logits and states, which must be those of the precision
    (RuntimeError).
    """

    def __init__(self, job: Job) -> None:
        """Choose modes and kernels for the job, refusing by RequestError what Paddle or the device
        does not have; no model is built. Raises ValueError if the case does not train.
        """
        tune = job.case.tune
        self.job, self.train, self.precision = job, job.train, job.case.question.precision
        self.modes = modes.choose_modes(job)
        modes.refuse_modes(self.modes, job.device.lacks)
        self.kernels = paddle_kernels.choose_paddle_kernels(
            tune.attention, modes.DTYPES[self.precision.matmul], job.device.lacks
        )
        # Gradients are summed while the last micro-batch goes backward. With recomputation Paddle's
        # reducer sees parameters twice, and they are summed afterwards instead.
        self.overlaps = self.modes.is_data_parallel and not self.modes.recompute
        self.dtypes: dict[str, set[str]] = {}
        self.pipeline_learns: bool | None = None  # what the last call of a pipeline did

    @property
    def model(self) -> fleet_placement.PlacedModel:
        """Return the placed model, of which the loop reads `weights`."""
        return self.placed

    @property
    def exchanges_separately(self) -> bool:
        """Return whether ranks exchange only in `reduce`: plain data parallelism that does not
        overlap with the backward pass.
        """
        return self.modes.is_data_parallel and not self.overlaps

    def prepare(self, part: Part) -> None:
        """Build and place the model with weights and optimizer, timed as part `weights`, and set
        the attributes that training uses (`placed`, `net`, `stage`, `optimizer`, `scaler`, `clip`).
        All ranks call it together. Raises RuntimeError if parameters have another dtype than the
        precision prescribes, RequestError if weights do not fit.
        """
        with part("weights"):
            self.placed = fleet_placement.place_model(
                self.job, self.modes, self.kernels, self.train
            )
            self.net, self.stage, self.optimizer = (
                self.placed.net,
                self.placed.stage,
                self.placed.optimizer,
            )
            self.scaler = self.placed.scaler
            self.clip = optimizer.install_readable_clip(self.optimizer)
            self._check_tensors("parameters", [p for _, p in self.placed.parameters])
            self.job.device.synchronize()

    def warm_up(self, micro: PaddleMicroBatch) -> None:
        """Run one evaluation, forward, backward and exchange on a micro-batch without an update,
        and clear the gradients. Raises RuntimeError if gradients or logits have another dtype than
        the precision prescribes. All ranks call it together.
        """
        self.evaluate(micro)
        self.reduce(self.backward([micro], self.sum_over_replicas(1)))
        self._check_tensors(
            "gradients", [p.grad for _, p in self.placed.parameters if p.grad is not None]
        )
        self.optimizer.clear_grad()

    def evaluate(self, micro: PaddleMicroBatch) -> Tensor:
        """Return the summed cross-entropy of a micro-batch in nats, without gradients, as a tensor
        on the device; in a pipeline all stages call it together, and run fleet's evaluation
        schedule.
        """
        with paddle.no_grad():
            if self.modes.pp == 1:
                return self._forward(self.stage, micro)
            return (
                self._set_up_pipeline([micro], 1.0, False)
                .eval_batch(self._pipeline_inputs([micro]), compute_loss=True)
                .sum()
            )

    def backward(self, micros: list[PaddleMicroBatch], targets: Tensor) -> Tensor:
        """Run forward and backward of a step's micro-batches and return this replica's sum of
        losses / targets, a tensor on the device; `targets` is their number over all replicas.
        Paddle averages gradients over replicas, so losses are multiplied by their number for the
        backward pass: gradients end up summed. In a pipeline all stages call it together. Raises
        RuntimeError for logits of a wrong dtype.
        """
        if self.modes.pp > 1:
            return self._run_pipeline(micros, targets)
        losses = []
        for number, micro in enumerate(micros):
            with self._defer_gradient_sum(number == len(micros) - 1):
                loss = self._forward(self.net, micro) / targets
                losses.append(loss.detach())
                self._scale_loss(loss * self.modes.dp).backward()
        return paddle.stack(losses).sum()

    def _forward(self, net: Any, micro: PaddleMicroBatch) -> Tensor:
        """Run the forward pass of one micro-batch through `net` (the wrapped model or the stage
        itself) and return its summed loss. Raises RuntimeError if the logits have another dtype
        than the precision prescribes.
        """
        self.stage.micros.append(micro)
        nll = net(micro.tokens)
        self._check_dtypes({self.stage.logits_dtype}, "logits")
        return nll

    def _run_pipeline(self, micros: list[PaddleMicroBatch], targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches by fleet's 1F1B schedule and return this
        replica's sum of losses / targets, which every stage gets from the last. All stages call it
        together. `targets` is their number over all replicas; for the backward pass losses are
        multiplied by the number of replicas, because Paddle averages gradients over them, and in
        fp16 by the loss scale; the returned loss is not. Raises RuntimeError for logits of a wrong
        dtype.
        """
        net = self._set_up_pipeline(micros, self.modes.dp * len(micros) / targets, True)
        net.train()
        loss = net.forward_backward_pipeline(self._pipeline_inputs(micros), self.scaler)
        self._check_dtypes({self.stage.logits_dtype}, "logits")
        return loss.sum() / self.modes.dp

    def _set_up_pipeline(
        self, micros: list[PaddleMicroBatch], loss_factor: Any, learns: bool
    ) -> Any:
        """Set fleet's pipeline up for these micro-batches, with each loss multiplied by
        `loss_factor`, and return it. Stages tell each other the shapes they send only once; that is
        cleared when `learns` (true: gradients flow back, false: evaluation) differs from the call
        before.
        """
        if learns != self.pipeline_learns:
            self.net._p2p_helper.clear_meta_cache()
            self.pipeline_learns = learns
        self.stage.micros[:] = micros
        self.placed.loss_factor.value = loss_factor
        self.net.accumulate_steps = len(micros)
        for hooks in (self.net.forward_hooks, self.net.backward_hooks):  # which count as many
            hooks.set_hooks_capacity(len(micros))
        return self.net

    def _pipeline_inputs(self, micros: list[PaddleMicroBatch]) -> list[list[Tensor]] | None:
        """Return [inputs of the first stage, labels of the last], both the micro-batches' tokens,
        as fleet wants them; None on inner stages. Only their number and shapes matter: a stage
        reads its micro-batch from `micros`.
        """
        tokens = [micro.tokens for micro in micros]
        return [tokens, tokens] if self.stage.first or self.stage.last else None

    def _scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the fp16 loss scale, if there is one."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @contextmanager
    def _defer_gradient_sum(self, is_last: bool) -> Iterator[None]:
        """Keep Paddle's data parallelism from summing gradients over replicas inside the context,
        except for the last micro-batch if `overlaps`. Does nothing under other plans.
        """
        with (
            self.net.no_sync()
            if self.modes.is_data_parallel and not (is_last and self.overlaps)
            else nullcontext()
        ):
            yield

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum gradients over replicas, if `backward` or fleet does not, and return the loss summed
        over replicas. All ranks call it together.
        """
        if self.exchanges_separately:
            fused_allreduce_gradients([p for _, p in self.placed.parameters], None)
        return self._sum_over_replicas(loss)

    def sum_over_replicas(self, number: int) -> Tensor:
        """Return a count of this rank summed over replicas, as an fp32 tensor of shape [1] on the
        device. All ranks call it together.
        """
        return self._sum_over_replicas(paddle.full([1], float(number)))

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        """Return a value, of any shape with one element, summed over replicas; the value itself
        with one rank. All ranks are summed, and so must call it together, and the result is divided
        by tp x pp, because the ranks of one model have equal values.
        """
        if self.job.world == 1:
            return value
        summed = value.reshape([1])
        dist.all_reduce(summed)
        return summed.reshape(value.shape) / (self.modes.tp * self.modes.pp)

    def update(self, lr: float) -> Tensor:
        """Clip, take an optimizer step at this learning rate, clear the gradients, and return their
        norm before clipping, a tensor on the device; the float inf if fp16 gradients overflowed and
        the step was skipped. After the first step raises RuntimeError if optimizer states are not
        fp32.
        """
        self.optimizer.set_lr(lr)
        self.clip.norm = None
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.clear_grad()
        if self.clip.norm is None:
            return float("inf")  # gradients overflowed, and the step was left out
        if "states" not in self.dtypes:
            self._check_tensors(
                "states",
                [
                    *optimizer.moment_tensors(self.optimizer),
                    *optimizer.master_weights(self.optimizer),
                ],
            )
        return self.clip.norm

    def _check_tensors(self, name: str, tensors: list[Tensor]) -> None:
        """Remember the dtypes of tensors in `dtypes` under `name`: parameters, gradients or states.
        Raises RuntimeError if the precision prescribes others.
        """
        self._check_dtypes({tensor.dtype.name.lower() for tensor in tensors}, name)

    def _check_dtypes(self, dtypes: set[Any], name: str) -> None:
        """Remember Paddle's dtype names in `dtypes[name]` and raise RuntimeError if the precision
        prescribes others. Nothing is done if they are those remembered, or None is among them
        (another stage has the logits).
        """
        if dtypes != self.dtypes.get(name) and None not in dtypes:
            self.dtypes[name] = dtypes
            modes.check_dtypes(self.precision, {name: dtypes})

    def fetch(self, loss: Tensor) -> float | Callable[[], float]:
        """Return the loss as a float if it lies on a CPU; on a GPU start its copy to the host and
        return a function that waits for the copy and returns the float.
        """
        if loss.place.is_cpu_place():
            return float(loss)
        host = loss._copy_to(paddle.CUDAPinnedPlace(), False)
        event = paddle.device.cuda.Event()
        event.record(paddle.device.cuda.current_stream())

        def read() -> float:
            """Wait until the loss has been copied to the host, and return it as a float."""
            event.synchronize()
            return float(host.numpy())

        return read

    def details(self) -> dict[str, Any]:
        """Return what this rank runs and holds, for the record: Paddle's version, `modes`,
        `never_run` (those that this project's tests never ran), dtypes by kind of tensor, numbers
        of elements of parameters, moments and master weights, which show that sharding works, and
        the kernels.
        """
        device = self.job.device.place.partition(":")[0]
        return {
            "paddle": paddle.__version__,
            "modes": list(self.modes.names),
            "never_run": modes.list_untried(self.modes, device, self.precision.name),
            "dtypes": {
                name: modes.short_names(types) for name, types in sorted(self.dtypes.items())
            },
            "parameters": _count_elements([p for _, p in self.placed.parameters]),
            "optimizer_states": _count_elements(optimizer.moment_tensors(self.optimizer)),
            "master_weights": _count_elements(optimizer.master_weights(self.optimizer)),
            "compiled": False,
            **self.kernels.names,
        }


def _count_elements(tensors: list[Tensor]) -> int:
    """Return the number of elements of all these Paddle tensors together."""
    return sum(int(tensor.size) for tensor in tensors)


class PaddleTrain(TrainingLoop):
    """The engine for work `train_rows` on Paddle: the common `TrainingLoop` (its passes `before`,
    `train` and `after`) with a `PaddleTrainer`, `PaddleBatches` and `HeldOutLoss`. Rows are padded
    to one length if there are several ranks or `tune.pack` is off. Constructing it builds nothing,
    and raises RequestError for what Paddle or the device cannot do.
    """

    def __init__(self, job: Job) -> None:
        """Make the `PaddleTrainer` and its batches for the job; the model is built later, in
        `prepare`. Raises RequestError for what Paddle or the device cannot do.
        """
        trainer = PaddleTrainer(job)
        # On one device rows laid end to end need no padding; others must have micro-batches of one
        # size.
        padded = not job.case.tune.pack or job.world > 1
        batches = PaddleBatches(job, trainer.train.length, padded)
        super().__init__(job, trainer, batches, HeldOutLoss(job, trainer, batches))
