"""The learner of most torch engines: a model, its placement on devices, and an optimizer.

`TrainingLoop` (training_loop.py) drives it through the `Learner` protocol.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.engine.job import Job, Part
from steelyard.training import checkpoint_storage
from steelyard.training.adamw import MixedPrecisionAdamW
from steelyard.training.checkpoint_folders import CheckpointState, OptimizerScalars
from steelyard.training.placement import SingleDevicePlacement, TrainableModel


class TorchLearner(ABC):
    """The part of a learner that all torch engines share (an abstract class). `fetch(loss)` copies
    a loss to the host without waiting, `save(folder, state)` writes a checkpoint `step-N` and
    `load(path, scalars)` loads one; both are called by all ranks together. A subclass supplies
    `list_state()`, the tensors that a checkpoint stores by name, and `restore(scalars)`, which
    continues after they were filled in place. `job` is the engine's job.
    """

    job: Job

    @abstractmethod
    def list_state(self) -> dict[str, Tensor]:
        """Return all tensors of this rank that a checkpoint stores, by name, to be saved, or to be
        filled in place before `restore`.
        """

    @abstractmethod
    def restore(self, scalars: OptimizerScalars) -> None:
        """Continue from the tensors that `list_state` returned and that have been filled since, and
        these scalars.
        """

    def fetch(self, loss: Tensor) -> float | Callable[[], float]:
        """Return a loss as a float if it lies on a CPU; else start its copy to the host and return
        a function that waits for the copy and returns the float.
        """
        if loss.device.type == "cpu":
            return float(loss)
        host_loss = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host_loss.copy_(loss, non_blocking=True)
        event = torch.Event(loss.device)
        event.record()

        def wait_for_loss() -> float:
            """Wait until the loss has been copied to the host, and return it as a float."""
            event.synchronize()
            return float(host_loss)

        return wait_for_loss

    def save(self, folder: Path, state: CheckpointState) -> None:
        """Write a checkpoint of this learner's tensors and `state` as `step-N` into `folder`, of
        which the last two are kept; all ranks call it together. Raises OSError if it cannot be
        written.
        """
        checkpoint_storage.save_checkpoint(folder, state, self.list_state(), self.job.rank)

    def load(self, path: Path, scalars: OptimizerScalars) -> None:
        """Load the checkpoint `path`, which may have been written under another plan, and continue
        from it; all ranks call it together. Raises RequestError if it does not match the model or
        is damaged.
        """
        checkpoint_storage.load_checkpoint(path, self.list_state())
        self.restore(scalars)


class Trainer(TorchLearner):
    """Trains `model` (a `TrainableModel`) under `placement`, which says where ranks exchange data,
    with a `MixedPrecisionAdamW`: the `Learner` of the training loop for engines torch, transformers
    and reference.

    `prepare` builds the model and creates `optimizer`; `backward`, `reduce` and `update` make a
    step, `compute_gradients` is the first two; `evaluate` computes without gradients; `list_state`,
    `read_scalars` and `restore` are for checkpoints, which `TorchLearner` writes and loads.
    """

    def __init__(self, job: Job, model: TrainableModel, placement: SingleDevicePlacement) -> None:
        self.job, self.model, self.placement = job, model, placement
        self.device: torch.device = job.device.torch_device

    def prepare(self, part: Part) -> None:
        """Build the model with its weights, create the optimizer, attach the placement to it, and
        compile the model. The time of all but compiling is booked as `weights`. Raises RequestError
        if a checkpoint does not fit.
        """
        precision = self.job.case.question.precision
        with part("weights"):
            master = self.model.build()
            parameters = [parameter for _, parameter in self.model.named_parameters()]
            self.optimizer = MixedPrecisionAdamW(
                parameters, master, self.job.train, precision, self.placement.compute_norm
            )
            self.placement.attach(self.model, self.optimizer)
            self.job.device.synchronize()
        self.model.compile(self.optimizer.get_gradient)

    def warm_up(self, micro: Any) -> None:
        """Run evaluation, forward and backward once for each variant of a micro-batch, and compile
        the update, so that nothing is compiled inside a pass. Weights do not change, and gradients
        are zero afterwards. Ranks exchange data in it only if the placement is in lockstep
        (micro-batches of equal sizes on all).
        """
        for variant in self.model.list_variants(micro):
            self.evaluate(variant)
            if self.placement.lockstep:
                self.compute_gradients([variant], self.sum_over_replicas(1))
            else:
                self.backward([variant], torch.ones((), device=self.device))
            self.optimizer.zero_grad()
        self.optimizer.compile_update()

    @property
    def exchanges_separately(self) -> bool:
        """Return whether ranks exchange data only in `sum_over_replicas` and `reduce`."""
        return self.placement.exchanges_separately

    def evaluate(self, micro: Any) -> Tensor:
        """Return what an evaluation reads of a micro-batch, without gradients: its summed loss in
        nats, or scores.
        """
        with torch.no_grad():
            return self.placement.evaluate(self.model, micro)

    def compute_gradients(self, micros: list[Any], targets: Tensor) -> Tensor:
        """Run forward and backward of a step and sum gradients over replicas: gradients of Σ loss /
        targets. Return that mean loss over all replicas.
        """
        return self.reduce(self.backward(micros, targets))

    def backward(self, micros: list[Any], targets: Tensor) -> Tensor:
        """Run forward and backward of a step's micro-batches, and return this replica's part of the
        mean loss Σ loss / targets, a tensor on the device. `targets` is their number over all
        replicas (tokens, or samples of a cloze). Gradients are added to those that are there. Ranks
        exchange data in it unless `exchanges_separately` or there is one.
        """
        losses = self.placement.start_losses()

        def weigh(nll: Tensor) -> Tensor:
            """Divide a micro-batch's summed loss by `targets`, the step's targets of all replicas
            (tokens, or samples of a cloze), append the quotient to the step's losses, detached, and
            return it multiplied by the fp16 loss scale, for `backward`.
            """
            loss = nll / targets
            losses.append(loss.detach())
            return self.optimizer.scale(loss)

        self.placement.backward(self.model, micros, weigh)
        return torch.stack(losses).sum()

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum gradients and the loss over replicas, where the placement did not in `backward`, and
        return the loss: the mean over the targets of all replicas. All ranks call it together.
        """
        return self.placement.reduce(loss)

    def update(self, lr: float) -> Tensor:
        """Clip, update the weights with this learning rate, start to send them to ranks that need
        them, and zero the gradients. Return the gradients' norm before clipping, a tensor on the
        device. In fp16 a step whose gradients overflow changes no weights.
        """
        norm = self.optimizer.step(lr)
        self.placement.send_updates()
        return norm

    def sum_over_replicas(self, number: int) -> Tensor:
        """Return a count of this rank summed over all replicas, a zero-dimensional fp32 tensor on
        the device; all ranks call it together.
        """
        # a copy from the host would wait for the device
        count = torch.full((), float(number), device=self.device)
        return self.placement.sum_over_replicas(count)

    def list_state(self) -> dict[str, Tensor]:
        """Return all tensors of this rank that a checkpoint stores, by name, to be saved, or to be
        filled in place before `restore`.
        """
        return self.placement.to_checkpoint_tensors(
            self.optimizer.list_state([name for name, _ in self.model.named_parameters()])
        )

    def read_scalars(self) -> OptimizerScalars:
        """Return the optimizer's number of updates and, in fp16, its loss scale; equal on all
        ranks. Creates the moments if there are none yet, and waits for the device.
        """
        self.list_state()  # creates the optimizer's state, from which they are read
        return self.optimizer.read_scalars()

    def restore(self, scalars: OptimizerScalars) -> None:
        """Continue from the tensors that `list_state` returned and that have been filled since, and
        these scalars; updated weights are sent to ranks that need them. All ranks call it together.
        Raises RequestError if fp16 needs a loss scale that the scalars lack.
        """
        self.optimizer.restore(scalars)
        self.placement.send_updates()

    def details(self) -> dict[str, Any]:
        """Return for the record the model's choices (its `details`), and how many elements of which
        dtypes this rank holds (the optimizer's `details`).
        """
        return {**self.model.details(), **self.optimizer.details()}
