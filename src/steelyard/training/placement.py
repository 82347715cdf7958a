"""How a trained model is placed on devices: the model's interface, and the placements on one device
and on replicas that each hold the whole model.

A `Trainer` (trainer.py) combines a model, a placement and an optimizer. FSDP is in fsdp.py, other
plans in engines/torch/train.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.models.llama_fused import GradientOf
from steelyard.training.adamw import MixedPrecisionAdamW, compute_total_norm

BUCKET_NUMBERS = 64 << 20  # gradient elements that replicas sum in one call

WeighLoss = Callable[[Tensor], Tensor]  # turns a summed loss into what `backward` is called on


class TrainableModel(ABC):
    """A model that is trained, as far as this rank holds it (an abstract class between a `Trainer`
    and an engine's model). `build()` makes it with its weights, sets `weights` (their source), and
    returns separate master weights or None; `named_parameters()` are (name, parameter) pairs that
    this rank updates; `compile(gradient)` chooses what computes; `loss(micro)` is the summed
    cross-entropy in nats, `evaluate(micro)` what an evaluation reads; `list_variants(micro)` what
    warm-up runs; `details()` a dict for the record. `fsdp_roots` are the outermost modules that
    FSDP gathers, else empty. What a micro-batch is, is between a model and its batches.
    """

    weights: dict[str, Any]  # where they came from, for the record; set by `build`
    fsdp_roots: Sequence[nn.Module] = ()  # outermost modules whose parameters FSDP gathers

    @abstractmethod
    def build(self) -> list[Tensor] | None:
        """Build the model on the device, with its weights, and set `weights`. Return the parameters
        in the dtype that they are stored in (the master weights), or None if that is the dtype that
        is computed in.
        """

    @abstractmethod
    def named_parameters(self) -> Sequence[tuple[str, Tensor]]:
        """Return (name, parameter) of the trained parameters that this rank updates, always in the
        same order; names are those in a checkpoint.
        """

    @abstractmethod
    def compile(self, gradient: GradientOf) -> None:
        """Choose and compile what computes the loss. `gradient(parameter)` returns the tensor in
        which that parameter's gradient is summed.
        """

    @abstractmethod
    def loss(self, micro: Any) -> Tensor:
        """Return the summed cross-entropy of a micro-batch in nats, a tensor on the device with
        gradients; not divided by the number of targets.
        """

    def evaluate(self, micro: Any) -> Tensor:
        """Return what an evaluation reads of a micro-batch: its summed loss, unless a subclass
        returns something else.
        """
        return self.loss(micro)

    def list_variants(self, micro: Any) -> Iterable[Any]:
        """Return micro-batches of the size of `micro` that together run all code that can run for
        this size; here only `micro` itself.
        """
        return [micro]

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Return what the model chose by itself, such as its kernels, as a JSON-able dict for the
        record.
        """


class SingleDevicePlacement:
    """A model on one device, without any exchange: how a `Trainer` runs a step. Other placements
    subclass it, and override where the ranks of their plan exchange data: `backward(model, micros,
    weigh)`, `reduce(loss)`, `sum_over_replicas(count)`, `compute_norm(grads, overflows)`,
    `send_updates()`; also `attach`, `start_losses`, `evaluate` and `to_checkpoint_tensors`.

    `lockstep`: replicas have micro-batches of equal sizes, so that they can exchange while warming
    up. `exchanges_separately`: ranks exchange only in `sum_over_replicas` and `reduce`, so that its
    time can be measured (here False).
    """

    # replicas have micro-batches of equal sizes, so that they can exchange data while warming up
    lockstep = True
    # Whether ranks exchange data only in `sum_over_replicas` and `reduce`, so that the time of the
    # exchange can be measured. False if they exchange inside forward and backward, or are alone.
    exchanges_separately = False

    def attach(self, model: TrainableModel, optimizer: MixedPrecisionAdamW) -> None:
        """Prepare the optimizer's gradients for the sums over ranks; a placement on one device does
        nothing.
        """

    def start_losses(self) -> list[Tensor]:
        """Return the list that a step's losses are appended to: one zero in placements whose ranks
        may have no micro-batch, an empty list in this one, of one device.
        """
        return []

    def evaluate(self, model: TrainableModel, micro: Any) -> Tensor:
        """Return what an evaluation reads of a micro-batch, the model's `evaluate`: a summed loss
        in nats, or scores. Gradients are switched off by the caller.
        """
        return model.evaluate(micro)

    def backward(self, model: TrainableModel, micros: list[Any], weigh: WeighLoss) -> None:
        """Run forward and backward of all micro-batches of a step. `weigh` turns a micro-batch's
        summed loss into the tensor that `backward` is called on.
        """
        for micro in micros:
            weigh(model.loss(micro)).backward()  # type: ignore[no-untyped-call]

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum the gradients over replicas in place, and return the step's loss summed over
        replicas; this placement, of one device, returns the loss itself and changes nothing.
        """
        return loss

    def sum_over_replicas(self, count: Tensor) -> Tensor:
        """Return a count (a tensor) summed over replicas in place; this placement, of one device,
        returns the count itself.
        """
        return count

    def compute_norm(self, grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
        """Return the 2-norm of all gradients of all ranks, a tensor on the device; in this
        placement those of one device. `overflows` are fp16's overflow flags, which placements on
        several ranks may have to agree on; here not used.
        """
        return compute_total_norm(grads, overflows)

    def send_updates(self) -> None:
        """Send the weights that the optimizer has changed on this rank to the ranks that need them;
        this placement, of one device, does nothing.
        """

    def to_checkpoint_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's tensors (by name) as they are named and divided in a checkpoint;
        this placement, of one device, returns them unchanged.
        """
        return state


class ReplicatedPlacement(SingleDevicePlacement):
    """Replicas that each hold the whole model, one rank each, and may have no samples in a step;
    also one alone (a `SingleDevicePlacement` for a `Trainer`). All gradients are views of a few
    long tensors (`buckets`, set by `attach`), which `reduce` all-reduces over all ranks once a
    step. With several `replicas`, `exchanges_separately` is true; `lockstep` is false: they do not
    exchange data while warming up. `loss_dtype` is the matmuls' dtype, at least fp32.
    """

    lockstep = False

    def __init__(self, replicas: int, matmul_dtype: torch.dtype, device: torch.device) -> None:
        self.replicas, self.device, self.exchanges_separately = replicas, device, replicas > 1
        self.loss_dtype = torch.promote_types(matmul_dtype, torch.float32)
        self.buckets: list[Tensor] = []

    def attach(self, model: TrainableModel, optimizer: MixedPrecisionAdamW) -> None:
        """Allocate all gradients inside `buckets`, zeroed, and make the optimizer zero them and not
        drop them. Also initialize its loss scale, which a replica without samples needs too.
        """
        self.buckets = bucket_gradients(optimizer.master)
        # from this call on gradients are zeroed and not dropped
        optimizer.get_gradient(optimizer.parameters[0])
        # a replica without samples in a step needs the loss scale too
        optimizer.scale(torch.zeros((), device=self.device))

    def start_losses(self) -> list[Tensor]:
        """Return the list that a step's losses are appended to, with one zero on the device
        (`loss_dtype`), since a replica may have no samples in a step.
        """
        return [torch.zeros((), dtype=self.loss_dtype, device=self.device)]

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum the gradient buckets and the loss over replicas in place, wait for that, and return
        the loss; one replica returns it at once. All replicas call it together.
        """
        if self.replicas > 1:
            pending = [dist.all_reduce(flat, async_op=True) for flat in (*self.buckets, loss)]
            for collective in pending:
                if collective is not None:
                    collective.wait()
        return loss

    def sum_over_replicas(self, count: Tensor) -> Tensor:
        """Sum a count over replicas in place, and return it; all replicas call it together. One
        replica returns it unchanged.
        """
        if self.replicas > 1:
            dist.all_reduce(count)
        return count


def bucket_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Allocate zeroed gradients of all parameters as views of a few long tensors (buckets), and
    return these. A bucket has at most `BUCKET_NUMBERS` numbers, or one larger parameter. Replicas
    can then sum a bucket in one call without copying. Sets each parameter's `grad`; parameters of
    one bucket must have one dtype and device. Raises IndexError for no parameters.
    """
    buckets: list[list[Tensor]] = [[]]
    for parameter in parameters:
        if buckets[-1] and sum(p.numel() for p in buckets[-1]) + parameter.numel() > BUCKET_NUMBERS:
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
