"""The trainer of every engine: a model, its placement on devices, and an optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.engine.job import Job, Part
from steelyard.training import checkpoint_files
from steelyard.training.checkpoints import Numbers, State
from steelyard.training.optimizer import Adam
from steelyard.training.placement import Model, SingleDevice


class Kept(ABC):
    """What a learner whose tensors are torch's does with a loss and with a checkpoint."""

    job: Job

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What this rank keeps from step to step, by name: to be saved, or to be filled before
        `restore`.
        """

    @abstractmethod
    def restore(self, numbers: Numbers) -> None:
        """Go on from what `state` was filled with, and these numbers."""

    def fetch(self, loss: Tensor) -> float | Callable[[], float]:
        """A loss as a number: at once on a CPU, else what waits for its copy, which is under way."""
        if loss.device.type == "cpu":
            return float(loss)
        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss, non_blocking=True)
        event = torch.Event(loss.device)
        event.record()

        def read() -> float:
            event.synchronize()
            return float(host)

        return read

    def save(self, folder: Path, state: State) -> None:
        """Write a checkpoint, all ranks together."""
        checkpoint_files.save(folder, state, self.state(), self.job.rank)

    def load(self, path: Path, numbers: Numbers) -> None:
        """Go on from a checkpoint, whatever plan either has."""
        checkpoint_files.load(path, self.state())
        self.restore(numbers)


class Trainer(Kept):
    def __init__(self, job: Job, model: Model, placement: SingleDevice) -> None:
        self.job, self.model, self.placement = job, model, placement
        self.device: torch.device = job.device.torch_device

    def prepare(self, part: Part) -> None:
        """Build, load, compile."""
        precision = self.job.case.question.precision
        with part("weights"):
            master = self.model.build()
            parameters = [parameter for _, parameter in self.model.named_parameters()]
            self.optimizer = Adam(
                parameters, master, self.job.train, precision, self.placement.norm
            )
            self.placement.attach(self.model, self.optimizer)
            self.job.device.synchronize()
        self.model.compile(self.optimizer.gradient)

    def warm(self, micro: Any) -> None:
        """Run everything but the update once, so that nothing is compiled inside a pass. Weights
        and gradients stay.
        """
        for one in self.model.variants(micro):
            self.evaluate(one)
            if self.placement.lockstep:
                self.learn([one], self.total(1))
            else:
                self.backward([one], torch.ones((), device=self.device))
            self.optimizer.zero_grad()
        self.optimizer.warm()

    @property
    def separate(self) -> bool:
        """Whether ranks meet in `total` and `reduce` alone."""
        return self.placement.separate

    def evaluate(self, micro: Any) -> Tensor:
        """What an evaluation reads of a micro-batch: its summed loss, or scores."""
        with torch.no_grad():
            return self.placement.evaluate(self.model, micro)

    def learn(self, micros: list[Any], targets: Tensor) -> Tensor:
        """Forward and backward of a step: gradients of Σ loss / targets. Returns that mean loss
        over all replicas.
        """
        return self.reduce(self.backward(micros, targets))

    def backward(self, micros: list[Any], targets: Tensor) -> Tensor:
        """What `learn` does before ranks meet; where `separate` does not hold, they meet in it too."""
        losses = self.placement.no_losses()

        def weigh(nll: Tensor) -> Tensor:
            loss = nll / targets
            losses.append(loss.detach())
            return self.optimizer.scale(loss)

        self.placement.backward(self.model, micros, weigh)
        return torch.stack(losses).sum()

    def reduce(self, loss: Tensor) -> Tensor:
        """What `learn` does where ranks meet: sums gradients and the loss over replicas."""
        return self.placement.reduce(loss)

    def update(self, lr: float) -> Tensor:
        """Clip, step, zero the gradients. Returns their norm before clipping."""
        norm = self.optimizer.step(lr)
        self.placement.updated()
        return norm

    def total(self, number: int) -> Tensor:
        """A count of this rank, summed over all replicas, on the device."""
        # a copy from the host would wait for the device
        count = torch.full((), float(number), device=self.device)
        return self.placement.total(count)

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps from step to step, by name: to be saved, or to be filled before
        `restore`.
        """
        return self.placement.stored(
            self.optimizer.state([name for name, _ in self.model.named_parameters()])
        )

    def numbers(self) -> Numbers:
        """The same of what is no tensor, and the same on all ranks."""
        self.state()  # makes what they are read from
        return self.optimizer.numbers()

    def restore(self, numbers: Numbers) -> None:
        """Go on from what `state` was filled with, and these numbers."""
        self.optimizer.restore(numbers)
        self.placement.updated()

    def details(self) -> dict[str, Any]:
        return {**self.model.details(), **self.optimizer.details()}
