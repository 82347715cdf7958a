"""Paddle's AdamW with gradient clipping, for one device or for fleet's hybrid parallelism, and
access to the gradient norm before clipping.

Paddle clips inside `step` and does not tell the norm: the clip classes here keep it in `norm`.
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


class GradientClip(nn.ClipGradByGlobalNorm):  # type: ignore[misc]
    """Paddle's clipping by the global norm (`clip_norm`) for gradients that are all on this rank,
    which keeps the norm before clipping in `norm`: an fp32 tensor on the device, None until a step
    has clipped. Paddle calls `_dygraph_clip` inside the optimizer's step; gradients are scaled in
    place.
    """

    norm: Tensor = None

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def _dygraph_clip(
        self, params_grads: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Set `norm` to the 2-norm of all gradients, computed in fp32, scale them in place so that
        it is at most `clip_norm`, and return the given pairs (parameter, gradient). Gradients that
        are None are left out. Paddle calls it inside a step.
        """
        grads = [grad for _, grad in params_grads if grad is not None]
        self.norm = (
            paddle.stack([grad.astype("float32").square().sum() for grad in grads]).sum().sqrt()
        )
        factor = self.clip_norm / paddle.clip(self.norm, min=self.clip_norm)
        for grad in grads:
            grad.multiply_(factor.astype(grad.dtype))
        return params_grads


class HybridGradientClip(HybridParallelClipGrad):  # type: ignore[misc]
    """Fleet's clipping by the norm over tensor-parallel, pipeline and sharding ranks, which also
    keeps the norm before clipping in `norm`: a tensor on the device, None until a step has clipped.
    `install_readable_clip` puts it in the place of fleet's own.
    """

    norm: Tensor = None

    def _global_norm(self, divided: Tensor, whole: Tensor) -> None:
        """Sum the squared norms over ranks in place, as fleet does, and set `norm` to the root of
        their sum. `divided` is the squared norm of parameters that ranks have parts of, `whole` of
        those that all hold. All ranks call it together, inside a step.
        """
        super()._global_norm(divided, whole)  # sums both over the ranks that have other parts
        self.norm = (divided + whole).sqrt().sum()


def make_adamw(named: list[tuple[str, Any]], train: Train) -> Any:
    """Return Paddle's AdamW over (name, parameter) pairs, with `GradientClip` at `train.clip` and a
    learning rate that the trainer sets before each step. Weight decay applies to matrices, not to
    norms and biases.
    """
    decays = {parameter.name for _, parameter in named if parameter.ndim > 1}
    return paddle.optimizer.AdamW(
        learning_rate=train.lr,
        beta1=train.beta1,
        beta2=train.beta2,
        epsilon=train.eps,
        parameters=[parameter for _, parameter in named],
        weight_decay=train.weight_decay,
        grad_clip=GradientClip(train.clip),
        apply_decay_param_fun=decays.__contains__,
    )


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the AdamW inside fleet's wrappers, however many there are; an optimizer without any is
    returned itself.
    """
    while True:
        inner = vars(optimizer).get("_inner_opt") or vars(optimizer).get("_optim")
        if inner is None:
            return optimizer
        optimizer = inner


def install_readable_clip(optimizer: Any) -> Any:
    """Return the gradient clip of an optimizer, whose `norm` can be read after a step. If fleet has
    replaced it by its own, that one is replaced by a `HybridGradientClip`, inside the optimizer.
    """
    adam = unwrap_optimizer(optimizer)
    clip = adam._grad_clip
    if isinstance(clip, HybridParallelClipGrad):
        adam._grad_clip = HybridGradientClip(clip._clip, clip._hcg, clip.split_norm_comm)
    return adam._grad_clip


def moment_tensors(optimizer: Any) -> list[Tensor]:
    """Return Adam's moment tensors that this rank keeps, without its powers of beta; empty before
    the first step.
    """
    accumulators = unwrap_optimizer(optimizer)._accumulators.items()
    return [
        tensor for name, tensors in accumulators if "moment" in name for tensor in tensors.values()
    ]


def master_weights(optimizer: Any) -> list[Tensor]:
    """Return the fp32 master weights that this rank keeps; empty if parameters are fp32."""
    return list(unwrap_optimizer(optimizer)._master_weights.values())
