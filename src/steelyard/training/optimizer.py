"""AdamW in the precisions of training, with clipping, without waiting for the device.

Kept as it is computed in (`bf16-pure`, `fp32`, `tf32`): one copy of everything. Computed in 16 bit and kept in fp32: the
model's own parameters are the 16-bit copy, and fp32 weights, gradients and states stand beside it; a micro-batch's 16-bit
gradients are added to the fp32 ones as soon as they are there, and dropped.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from steelyard.case.precision import Precision
from steelyard.case.question import Train
from steelyard.errors import RequestError
from steelyard.training.checkpoints import Numbers

FIRST_SCALE = 65536.0
GROWTH_STEPS = 1000
MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    def __init__(self, own: list[nn.Parameter], kept: list[Tensor] | None, train: Train, precision: Precision) -> None:
        """`own` are the model's parameters, `kept` the same numbers in fp32 where those are a copy."""
        self.clip = train.clip
        self.own: list[Tensor] = list(own)
        self.apart = kept is not None
        self.places: dict[int, Tensor] | None = None
        self.kept: list[Tensor] = self.own if kept is None else [nn.Parameter(one) for one in kept]
        if self.apart:
            for mine, master in zip(own, self.kept, strict=True):
                master.grad = torch.zeros_like(master)
                mine.register_post_accumulate_grad_hook(_adder(master))  # type: ignore[no-untyped-call]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.kept if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in self.kept if p.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = (train.beta1, train.beta2)
        self.inner = torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)
        scaled = precision.matmul == "fp16"
        self.scaler = torch.amp.GradScaler(own[0].device.type, FIRST_SCALE, growth_interval=GROWTH_STEPS, enabled=scaled)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: fp16's gradients would vanish unscaled."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clip, update, forget the gradients; returns their norm before clipping."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.inner)
        grads = [p.grad for p in self.kept if p.grad is not None]
        norm = self.norm(grads)
        clip_grads_with_norm_(self.kept, self.clip, norm, foreach=True)
        self.scaler.step(self.inner)
        self.scaler.update()
        if self.apart:
            self.hand_over()
        self.forget()
        return norm

    def gradient(self, own: Tensor) -> Tensor:
        """Where the gradient of one of the model's parameters is summed up, for who adds to it without autograd."""
        if self.places is None:
            self.places = {id(mine): kept for mine, kept in zip(self.own, self.kept, strict=True)}
        kept = self.places[id(own)]
        if kept.grad is None:
            kept.grad = torch.zeros_like(kept)
        return kept.grad

    def forget(self) -> None:
        """Set the gradients to zero, or drop those that autograd makes anew."""
        if self.apart or self.places is not None:
            torch._foreach_zero_([p.grad for p in self.kept if p.grad is not None])
        else:
            self.inner.zero_grad(set_to_none=True)

    def hand_over(self) -> None:
        """What is kept, to the model."""
        torch._foreach_copy_(self.own, self.kept)

    def state(self, names: list[str]) -> dict[str, Tensor]:
        """All that is kept, by the names of the model's parameters; to be saved, or to be filled."""
        out: dict[str, Tensor] = {}
        for name, kept in zip(names, self.kept, strict=True):
            states = self.inner.state[kept]
            if not states:  # as the first step would make them
                moments = {key: torch.zeros_like(kept.detach()) for key in MOMENTS}
                states.update(step=torch.zeros((), device=kept.device), **moments)
            out |= {f"weights.{name}": kept.detach()} | {f"{key}.{name}": states[key] for key in MOMENTS}
        return out

    def numbers(self) -> Numbers:
        """What is kept beside tensors, and the same on every rank."""
        updates = float(self.inner.state[self.kept[0]]["step"])
        if not self.scaler.is_enabled():
            return Numbers(updates=updates)
        scaler = self.scaler.state_dict()
        return Numbers(updates=updates, scale=float(scaler["scale"]), growth=float(scaler["_growth_tracker"]))

    def restore(self, numbers: Numbers) -> None:
        """Go on from tensors that `state` named, and that were filled since."""
        for states in self.inner.state.values():
            states["step"].fill_(numbers.updates)
        if self.scaler.is_enabled():
            if numbers.scale is None or numbers.growth is None:
                raise RequestError("the checkpoint does not say how losses were scaled, and this precision scales them")
            scaler = self.scaler.state_dict()
            self.scaler.load_state_dict({**scaler, "scale": numbers.scale, "_growth_tracker": int(numbers.growth)})
        if self.apart:
            with torch.no_grad():
                self.hand_over()

    def norm(self, grads: list[Tensor]) -> Tensor:
        """Of all gradients together."""
        return get_total_norm(grads, foreach=True)


class Kept(ABC):
    """What a trainer is asked for checkpoints; its optimiser keeps all there is."""

    adam: Adam
    weights: dict[str, Any]  # where they came from, for the record

    @abstractmethod
    def _names(self) -> list[str]:
        """Of the parameters, in the order in which the optimiser has them."""

    def state(self) -> dict[str, Tensor]:
        return self.adam.state(self._names())

    def numbers(self) -> Numbers:
        return self.adam.numbers()

    def restore(self, numbers: Numbers) -> None:
        self.adam.restore(numbers)


def _adder(master: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None and master.grad is not None:
            master.grad.add_(parameter.grad)
            parameter.grad = None

    return add
