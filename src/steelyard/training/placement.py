"""How a model is placed on devices, as a trainer sees it: here one device, or replicas that each
hold everything.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.models.llama_fused import Gradient
from steelyard.training.optimizer import Adam, total_norm

BUCKET = 64 << 20  # numbers of gradients that replicas sum in one call

Weigh = Callable[[Tensor], Tensor]  # a micro-batch's summed loss, to what `backward` is called on


class Model(ABC):
    """What is trained, on this rank. What a micro-batch is, is between a model and its loop."""

    weights: dict[str, Any]  # where they came from, for the record; set by `build`
    roots: Sequence[nn.Module] = ()  # outermost modules whose parameters FSDP gathers

    @abstractmethod
    def build(self) -> list[Tensor] | None:
        """Make it on the device, with its weights; returns these in the precision they are kept in,
        where that is another than the one it computes in."""

    @abstractmethod
    def named_parameters(self) -> Sequence[tuple[str, Tensor]]:
        """What is learned, as far as this rank updates it."""

    @abstractmethod
    def compile(self, gradient: Gradient) -> None:
        """Choose what computes the loss. `gradient` says where that of a parameter is summed."""

    @abstractmethod
    def loss(self, micro: Any) -> Tensor:
        """The summed cross-entropy of a micro-batch, in nats."""

    def evaluate(self, micro: Any) -> Tensor:
        """Return what an evaluation reads of a micro-batch: its summed loss, or what a subclass
        makes of it.
        """
        return self.loss(micro)

    def variants(self, micro: Any) -> Iterable[Any]:
        """Return micro-batches of this size that run all the code there is for it."""
        return [micro]

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Return what the model chose by itself, for the record."""


class SingleDevice:
    """A model on one device. Other placements are this one, and say where the ranks of their plan
    meet in a step.
    """

    # replicas have micro-batches of the same sizes, and may meet while they warm up
    lockstep = True
    # Whether ranks meet in `total` and `reduce` alone, so that a step has a time of their exchange.
    # Not if they meet inside forward and backward, nor if there is nobody to meet.
    separate = False

    def attach(self, model: Model, optimizer: Adam) -> None:
        """Prepare the optimizer's gradients for the sums over ranks."""

    def no_losses(self) -> list[Tensor]:
        """Return what a step's losses begin with, on a rank that may have no micro-batch."""
        return []

    def evaluate(self, model: Model, micro: Any) -> Tensor:
        return model.evaluate(micro)

    def backward(self, model: Model, micros: list[Any], weigh: Weigh) -> None:
        """Run forward and backward of all micro-batches of a step."""
        for micro in micros:
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum gradients over replicas, and return the sum of a step's losses."""
        return loss

    def total(self, count: Tensor) -> Tensor:
        """Return a count summed over replicas."""
        return count

    def norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of all ranks."""
        return total_norm(grads, overflows)

    def updated(self) -> None:
        """Send on what the optimizer has changed on this rank."""

    def stored(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what an optimizer keeps, as a checkpoint names it: tensors that know which part
        they are of a whole.
        """
        return state


class Replicated(SingleDevice):
    """Replicas that each hold everything, and may have nothing to do in a step. One alone is one
    device. Gradients lie in a few buckets, which are summed over replicas once a step."""

    lockstep = False

    def __init__(self, replicas: int, compute: torch.dtype, device: torch.device) -> None:
        self.replicas, self.device, self.separate = replicas, device, replicas > 1
        self.wide = torch.promote_types(compute, torch.float32)
        self.buckets: list[Tensor] = []

    def attach(self, model: Model, optimizer: Adam) -> None:
        self.buckets = bucket_gradients(optimizer.master)
        # from now on they are set to zero and not dropped
        optimizer.gradient(optimizer.parameters[0])
        # a replica without samples in a step needs the scale too
        optimizer.scale(torch.zeros((), device=self.device))

    def no_losses(self) -> list[Tensor]:
        return [torch.zeros((), dtype=self.wide, device=self.device)]

    def reduce(self, loss: Tensor) -> Tensor:
        if self.replicas > 1:
            works = [dist.all_reduce(flat, async_op=True) for flat in (*self.buckets, loss)]
            for work in works:
                if work is not None:
                    work.wait()
        return loss

    def total(self, count: Tensor) -> Tensor:
        if self.replicas > 1:
            dist.all_reduce(count)
        return count


def bucket_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Gradients as parts of a few long rows of numbers: replicas sum those, and nothing is copied."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in parameters:
        if buckets[-1] and sum(p.numel() for p in buckets[-1]) + parameter.numel() > BUCKET:
            buckets.append([])
        buckets[-1].append(parameter)
    out = []
    for bucket in buckets:
        flat = torch.zeros(
            sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device
        )
        for parameter, grad in zip(
            bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True
        ):
            parameter.grad = grad.view(parameter.shape)
        out.append(flat)
    return out
