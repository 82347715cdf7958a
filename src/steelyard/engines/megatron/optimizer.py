"""Megatron's optimizer around AdamW for engine `megatron`; its distributed optimizer if replicas
divide the states.
"""

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from steelyard.case.precision import Precision
from steelyard.case.question import Train
from steelyard.errors import RequestError
from steelyard.models.tensors import get_compute_dtype
from steelyard.training.adamw import FIRST_SCALE, GROWTH_STEPS, MOMENTS
from steelyard.training.checkpoint_folders import OptimizerScalars


class MegatronAdam:
    """Megatron's mixed-precision AdamW over `model` (its DistributedDataParallel), with clipping
    and, in fp16, loss scaling; the distributed optimizer, which divides states over replicas, if
    `distributed`.

    `scale(loss)` multiplies by the loss scale, `step(lr)` updates, zeroes gradients and returns
    their norm as a float; `start_from_gradient_buffers` sets the initial fp32 weights; `state`,
    `numbers` and `restore` are for checkpoints, `updated_tensors` and `moments` for the record.
    `whole` is Megatron's chained optimizer, `part` the only one in it, `inner` the torch optimizer
    inside that; if it is torch's AdamW, it is switched to its fused form.
    """

    def __init__(self, model: Any, train: Train, precision: Precision, distributed: bool) -> None:
        """Create Megatron's optimizer over the wrapped model with the settings of `train`; moments
        are allocated later. `precision` decides on fp16 loss scaling and the parameters' dtype.
        """
        self.model, self.decay = model, train.weight_decay
        self.whole = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=train.lr,
                min_lr=train.min_lr,
                weight_decay=train.weight_decay,
                adam_beta1=train.beta1,
                adam_beta2=train.beta2,
                adam_eps=train.eps,
                clip_grad=train.clip,
                bf16=precision.matmul == "bf16",
                fp16=precision.matmul == "fp16",
                params_dtype=get_compute_dtype(precision.matmul),
                initial_loss_scale=FIRST_SCALE,
                loss_scale_window=GROWTH_STEPS,
                hysteresis=1,
                use_distributed_optimizer=distributed,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        [self.part] = self.whole.chained_optimizers
        self.inner: torch.optim.Optimizer = self.part.optimizer
        if isinstance(self.inner, torch.optim.AdamW):
            # Megatron means a fused Adam. Torch's default makes copies of all states for an update.
            for group in self.inner.param_groups:
                group |= {"fused": True, "foreach": False}

    def start_from_gradient_buffers(self, parameters: list[Any]) -> None:
        """Take the initial fp32 weights from the parameters' gradient buffers (`main_grad`), copy
        them into the parameters and, where these have them, into this replica's part of the fp32
        main weights, and zero the gradients.

        Megatron would start its fp32 weights from the rounded parameters: updates below half a step
        of bf16 would then change nothing, and a model would learn later than it should.
        """
        with torch.no_grad():
            for parameter in parameters:
                weights = parameter.main_grad.view(-1)
                parameter.view(-1).copy_(weights)
                main = getattr(parameter, "main_param", None)
                if main is not None:
                    main.view(-1).copy_(weights[self._updated_slice(parameter)])
        self.zero_grad()

    def _updated_slice(self, parameter: Any) -> slice:
        """Return the slice of a flattened parameter that this replica's optimizer updates; all of
        it without the distributed optimizer.
        """
        if not self.part.config.use_distributed_optimizer:
            return slice(None)
        updated = self.part._get_model_param_range_map(parameter)["param"]
        return slice(updated.start, updated.end)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale in fp16, else unchanged (a factor of 1)."""
        scaled: Tensor = self.whole.scale_loss(loss)
        return scaled

    def step(self, lr: float) -> float:
        """Clip, update at this learning rate, and zero the gradients. Returns the gradients' norm
        before clipping as a float, which waits for the device; inf if fp16 overflowed and no step
        was taken. All ranks call it together.

        Sets learning rate and weight decay of the parameter groups, as Megatron's scheduler would;
        otherwise norms would get the decay of matrices.
        """
        for group in self.inner.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.decay * group["wd_mult"]
        taken, norm, _ = self.whole.step()
        self.zero_grad()
        return float(norm) if taken else math.inf

    def zero_grad(self) -> None:
        """Zero the gradient buffers of the model (Megatron's DistributedDataParallel) and the
        optimizer's gradients.
        """
        self.model.zero_grad_buffer()
        self.whole.zero_grad()

    def updated_tensors(self) -> list[Tensor]:
        """Return the tensors that AdamW updates on this rank: the parameters, or their fp32 main
        weights if these exist, or this replica's part of those with the distributed optimizer.
        """
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    def moments(self) -> list[Tensor]:
        """Return all of Adam's moment tensors that exist on this rank; none before the first step
        or `state`.
        """
        return [
            states[key] for states in self.inner.state.values() for key in MOMENTS if key in states
        ]

    def state(self) -> dict[str, Tensor]:
        """Return the updated tensors and their moments as `weights.N`, `exp_avg.N` and
        `exp_avg_sq.N`, N their number on this rank, for saving or for filling in place. Missing
        moments and step counts are created as zeros, as the first step would.
        """
        out: dict[str, Tensor] = {}
        for i, parameter in enumerate(self.updated_tensors()):
            states = self.inner.state[parameter]
            if not states:  # as the first step would make them
                moments = {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
                states.update(
                    step=torch.zeros((), dtype=torch.float32, device=parameter.device), **moments
                )
            out |= {f"weights.{i}": parameter.detach()} | {
                f"{key}.{i}": states[key] for key in MOMENTS
            }
        return out

    def numbers(self) -> OptimizerScalars:
        """Return the number of updates (0 before the first) and, in fp16, the loss scale and the
        steps since it last changed, for a checkpoint.
        """
        updates = max((float(states["step"]) for states in self.inner.state.values()), default=0.0)
        scaler = getattr(self.part, "grad_scaler", None)
        if scaler is None:
            return OptimizerScalars(updates=updates)
        scaler_state = scaler.state_dict()
        return OptimizerScalars(
            updates=updates,
            scale=float(scaler_state["scale"]),
            growth=float(scaler_state["growth_tracker"]),
        )

    def restore(self, numbers: OptimizerScalars) -> None:
        """Continue from the tensors that `state` returned, filled in since, and these numbers: sets
        step counts, loss scale and its growth counter, copies main weights to the parameters and,
        with the distributed optimizer, gathers these from all replicas: all ranks call it together.
        Raises RequestError if this precision scales losses and the checkpoint has no scale or
        growth counter.
        """
        for states in self.inner.state.values():
            states["step"].fill_(numbers.updates)
        scaler = getattr(self.part, "grad_scaler", None)
        if scaler is not None:
            if numbers.scale is None or numbers.growth is None:
                raise RequestError(
                    "--resume: the checkpoint has no loss scale, and this precision scales losses;"
                    " resume with the precision of the checkpoint"
                )
            scaler_state = scaler.state_dict()
            scale = torch.full_like(scaler_state["scale"], numbers.scale)
            scaler.load_state_dict(
                {**scaler_state, "scale": scale, "growth_tracker": int(numbers.growth)}
            )
        # the model's parameters are a copy of the main weights
        if hasattr(self.part, "_copy_main_params_to_model_params"):
            with torch.no_grad():
                self.part._copy_main_params_to_model_params()
        if self.part.config.use_distributed_optimizer:
            self.model.start_param_sync(force_sync=True)
