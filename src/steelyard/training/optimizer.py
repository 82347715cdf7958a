"""AdamW in the precisions of training, with clipping, without waiting for the device.

Kept as it is computed in (`bf16-pure`, `fp32`, `tf32`): one copy of everything. Computed in 16 bit
and kept in fp32: the model's own parameters are the 16-bit copy, and fp32 master weights, gradients
and states stand beside it; a micro-batch's 16-bit gradients are added to the fp32 ones as soon as
they are there, and dropped.

Where Triton runs and gradients stay where they are, an update is one kernel (kernels/adam.py);
elsewhere it is torch's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from steelyard.case.precision import Precision
from steelyard.case.question import Train
from steelyard.errors import RequestError
from steelyard.kernels import adam, jit
from steelyard.models.tensors import dtype_names, local
from steelyard.training.checkpoints import Numbers

FIRST_SCALE = 65536.0
GROWTH_STEPS = 1000
MOMENTS = ("exp_avg", "exp_avg_sq")

# The norm of all gradients together; it is told the flags of gradients that overflowed too, where
# losses are scaled.
Norm = Callable[[list[Tensor], list[Tensor]], Tensor]


def total_norm(grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
    """Of gradients that all are here."""
    return get_total_norm(grads, foreach=True)


class Adam:
    def __init__(
        self,
        parameters: Sequence[Tensor],
        master: list[Tensor] | None,
        train: Train,
        precision: Precision,
        norm: Norm = total_norm,
    ) -> None:
        """`parameters` are the model's, `master` the same numbers in fp32 where those are a copy.
        Those that autograd makes no gradients for are given theirs by whoever makes them, who sets
        `clear` too: what becomes of them after an update."""
        self.clip, self.norm = train.clip, norm
        self.parameters: list[Tensor] = list(parameters)
        self.has_master = master is not None
        self.places: dict[int, Tensor] | None = None
        self.clear: Callable[[], None] | None = None
        self.updates: list[tuple[dict[str, Any], adam.Update]] | None = None
        self.updated = 0  # how many, where a kernel makes them
        self.master: list[Tensor] = (
            self.parameters if master is None else [nn.Parameter(one) for one in master]
        )
        for parameter, one in zip(parameters, self.master, strict=True):
            if self.has_master and parameter.requires_grad:
                one.grad = torch.zeros_like(one)
                parameter.register_post_accumulate_grad_hook(_adder(one))  # type: ignore[no-untyped-call]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.master if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in self.master if p.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = (train.beta1, train.beta2)
        self.inner = torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)
        scaled = precision.matmul == "fp16"
        self.scaler = torch.amp.GradScaler(
            parameters[0].device.type, FIRST_SCALE, growth_interval=GROWTH_STEPS, enabled=scaled
        )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: fp16's gradients would vanish unscaled."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clip, update, zero the gradients; returns their norm before clipping."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.inner)
        grads = [p.grad for p in self.master if p.grad is not None]
        found = (
            self.scaler._found_inf_per_device(self.inner).values()
            if self.scaler.is_enabled()
            else ()
        )
        norm = self.norm(grads, list(found))
        if self.by_kernel:
            self._by_kernel(norm.float())
            return norm
        clip_grads_with_norm_(self.master, self.clip, norm, foreach=True)
        self.scaler.step(self.inner)
        self.scaler.update()
        self.copy_to_model()
        self.zero_grad()
        return norm

    @property
    def by_kernel(self) -> bool:
        """Gradients that autograd does not make stay where they are, and the kernel is told once
        where that is.
        """
        stay = self.places is not None or self.clear is not None
        return stay and not self.scaler.is_enabled() and jit.serve(self.master[0].device)

    def warm(self) -> None:
        """Compile an update, and make what it needs, once all gradients have a place. Weights and
        gradients stay.
        """
        if self.by_kernel and self.updates is None:
            for group, update in self._updates():
                update.compile(self._numbers(group), zero=self.clear is None)

    def _updates(self) -> list[tuple[dict[str, Any], adam.Update]]:
        if self.updates is None:
            pairs = zip(self.master, self.parameters, strict=True)
            copies = {
                id(master): local(one)
                for master, one in pairs
                if local(one).data_ptr() != local(master).data_ptr()
            }
            self.updates = [
                (
                    group,
                    adam.Update(
                        self._updated(one, copies.get(id(one)))
                        for one in group["params"]
                        if one.grad is not None
                    ),
                )
                for group in self.inner.param_groups
            ]
            self.updated = int(self.numbers().updates)
        return self.updates

    def _numbers(self, group: dict[str, Any]) -> adam.Numbers:
        return adam.Numbers(
            group["lr"],
            group["weight_decay"],
            group["betas"],
            group["eps"],
            self.clip,
            self.updated + 1,
        )

    def _by_kernel(self, norm: Tensor) -> None:
        for group, update in self._updates():
            update(norm, self._numbers(group), zero=self.clear is None)
        self.updated += 1
        torch._foreach_add_([states["step"] for states in self.inner.state.values()], 1)
        torch.autograd.graph.increment_version(self.parameters)
        if self.clear is not None:
            self.clear()

    def _updated(self, master: Tensor, copy: Tensor | None) -> adam.Updated:
        states, grad = self._states(master), master.grad
        if grad is None:
            raise ValueError("a parameter without a gradient")
        first, second = (local(states[key]) for key in MOMENTS)
        return adam.Updated(local(master.detach()), local(grad), first, second, copy)

    def gradient(self, parameter: Tensor) -> Tensor:
        """Where the gradient of one of the model's parameters is summed up, for who adds to it
        without autograd.
        """
        if self.places is None:
            self.places = {
                id(one): master for one, master in zip(self.parameters, self.master, strict=True)
            }
        master = self.places[id(parameter)]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def zero_grad(self) -> None:
        """Set the gradients to zero, or drop those that autograd makes anew."""
        if self.clear is not None:
            self.clear()
        elif self.has_master or self.places is not None:
            torch._foreach_zero_([p.grad for p in self.master if p.grad is not None])
        else:
            self.inner.zero_grad(set_to_none=True)

    def copy_to_model(self) -> None:
        """The master weights, or what this rank holds of them, where the model has others. A fused
        optimizer raises no version of what it writes; readers of a parameter that keep something
        made of it must see that it changed."""
        if self.has_master:
            pairs = [
                (local(one), local(master))
                for one, master in zip(self.parameters, self.master, strict=True)
            ]
            apart = [(one, master) for one, master in pairs if one.data_ptr() != master.data_ptr()]
            torch._foreach_copy_([one for one, _ in apart], [master for _, master in apart])
        torch.autograd.graph.increment_version(self.parameters)

    def moments(self) -> list[Tensor]:
        """What this rank keeps of the states beside the weights; nothing before the first step."""
        return [
            local(states[key])
            for states in self.inner.state.values()
            for key in MOMENTS
            if key in states
        ]

    def details(self) -> dict[str, Any]:
        """How many numbers this rank really holds, and their types. A gradient has its parameter's."""
        return holding(
            [local(one) for one in self.parameters], self.master, self.master, self.moments()
        )

    def state(self, names: list[str]) -> dict[str, Tensor]:
        """All that is kept, by the names of the model's parameters; to be saved, or to be filled."""
        out: dict[str, Tensor] = {}
        for name, master in zip(names, self.master, strict=True):
            states = self._states(master)
            out |= {f"weights.{name}": master.detach()} | {
                f"{key}.{name}": states[key] for key in MOMENTS
            }
        return out

    def _states(self, master: Tensor) -> dict[str, Tensor]:
        states: dict[str, Tensor] = self.inner.state[master]
        if not states:  # as the first step would make them
            moments = {key: torch.zeros_like(master.detach()) for key in MOMENTS}
            states.update(step=torch.zeros((), device=master.device), **moments)
        return states

    def numbers(self) -> Numbers:
        """What is kept beside tensors, and the same on every rank."""
        updates = float(self.inner.state[self.master[0]]["step"])
        if not self.scaler.is_enabled():
            return Numbers(updates=updates)
        scaler = self.scaler.state_dict()
        return Numbers(
            updates=updates, scale=float(scaler["scale"]), growth=float(scaler["_growth_tracker"])
        )

    def restore(self, numbers: Numbers) -> None:
        """Go on from tensors that `state` named, and that were filled since."""
        for states in self.inner.state.values():
            states["step"].fill_(numbers.updates)
        self.updates = None  # the count of updates is another, and tensors may be
        if self.scaler.is_enabled():
            if numbers.scale is None or numbers.growth is None:
                raise RequestError(
                    "the checkpoint does not say how losses were scaled, and this precision scales"
                    " them"
                )
            scaler = self.scaler.state_dict()
            self.scaler.load_state_dict(
                {**scaler, "scale": numbers.scale, "_growth_tracker": int(numbers.growth)}
            )
        with torch.no_grad():
            self.copy_to_model()


def holding(
    parameters: list[Tensor], main: list[Tensor], gradients: list[Tensor], states: list[Tensor]
) -> dict[str, Any]:
    """Return how many numbers a rank holds and their types, for the record."""
    types = {
        "parameters": parameters,
        "main_parameters": main,
        "gradients": gradients,
        "states": states,
    }
    return {
        "parameters": sum(one.numel() for one in parameters),
        "optimizer_states": sum(one.numel() for one in states),
        "dtypes": {name: dtype_names(every) for name, every in types.items() if every},
    }


def _adder(master: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None and master.grad is not None:
            master.grad.add_(parameter.grad)
            parameter.grad = None

    return add
