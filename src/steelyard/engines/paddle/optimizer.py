"""AdamW of Paddle with clipping, as a run of one device or fleet's hybrid one needs it, and the
norm before clipping.

Paddle clips inside `step` and keeps the norm to itself: these clips leave it where it can be read.
"""

from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import (
    HybridParallelClipGrad,
)

from steelyard.case.question import Train

Tensor = Any
FIRST_SCALE = 65536.0
GROWTH_STEPS = 1000


class Clip(nn.ClipGradByGlobalNorm):  # type: ignore[misc]
    """Of gradients that all are here."""

    norm: Tensor = None

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def _dygraph_clip(
        self, params_grads: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        found = [grad for _, grad in params_grads if grad is not None]
        self.norm = (
            paddle.stack([grad.astype("float32").square().sum() for grad in found]).sum().sqrt()
        )
        factor = self.clip_norm / paddle.clip(self.norm, min=self.clip_norm)
        for grad in found:
            grad.multiply_(factor.astype(grad.dtype))
        return params_grads


class HybridClip(HybridParallelClipGrad):  # type: ignore[misc]
    """Fleet's, over tensor parallel, pipeline and sharding ranks."""

    norm: Tensor = None

    def _global_norm(self, divided: Tensor, whole: Tensor) -> None:
        super()._global_norm(divided, whole)  # sums both over the ranks that have other parts
        self.norm = (divided + whole).sqrt().sum()


def adamw(named: list[tuple[str, Any]], train: Train) -> Any:
    """Over parameters by name. Matrices decay, norms and biases do not."""
    decays = {parameter.name for _, parameter in named if parameter.ndim > 1}
    return paddle.optimizer.AdamW(
        learning_rate=train.lr,
        beta1=train.beta1,
        beta2=train.beta2,
        epsilon=train.eps,
        parameters=[parameter for _, parameter in named],
        weight_decay=train.weight_decay,
        grad_clip=Clip(train.clip),
        apply_decay_param_fun=decays.__contains__,
    )


def innermost(optimizer: Any) -> Any:
    """The AdamW that fleet's optimizers wrap."""
    while True:
        inner = vars(optimizer).get("_inner_opt") or vars(optimizer).get("_optim")
        if inner is None:
            return optimizer
        optimizer = inner


def readable_clip(optimizer: Any) -> Any:
    """The clip of an optimizer, whose `norm` can be read after a step: fleet puts its own in the
    place of ours.
    """
    adam = innermost(optimizer)
    found = adam._grad_clip
    if isinstance(found, HybridParallelClipGrad):
        adam._grad_clip = HybridClip(found._clip, found._hcg, found.split_norm_comm)
    return adam._grad_clip


def states(optimizer: Any) -> list[Tensor]:
    """What this rank keeps of moments."""
    kept = innermost(optimizer)._accumulators.items()
    return [tensor for name, tensors in kept if "moment" in name for tensor in tensors.values()]


def masters(optimizer: Any) -> list[Tensor]:
    """What it keeps of fp32 master weights, where parameters are in 16 bit."""
    return list(innermost(optimizer)._master_weights.values())
