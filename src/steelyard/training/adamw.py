"""AdamW with gradient clipping for all precisions of training, without waiting for the device.

If weights are stored in the dtype that is computed in (`bf16-pure`, `fp32`, `tf32`), there is one
copy of everything. If a model is computed in 16 bit and stored in fp32, the model's own parameters
are the 16-bit copy, and fp32 master weights, gradients and moments stand beside it; a micro-batch's
16-bit gradients are added to the fp32 ones as soon as autograd has made them, and then dropped.

Where Triton runs and gradient buffers stay in one place, an update is one kernel (kernels/adam.py);
elsewhere it is torch's fused AdamW.
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
from steelyard.models.tensors import format_dtypes, get_local_tensor
from steelyard.training.checkpoint_folders import OptimizerScalars

FIRST_SCALE = 65536.0
GROWTH_STEPS = 1000
MOMENTS = ("exp_avg", "exp_avg_sq")

# Returns the norm of all gradients together. The second argument are the overflow flags of scaled
# losses (fp16), which ranks may have to agree on; empty if losses are not scaled.
GradientNorm = Callable[[list[Tensor], list[Tensor]], Tensor]


def compute_total_norm(grads: list[Tensor], overflows: list[Tensor]) -> Tensor:
    """Return the 2-norm of all these gradients together, a tensor on the device (a DTensor if they
    are). `overflows` is not used: it is for norms over several ranks.
    """
    return get_total_norm(grads, foreach=True)


class MixedPrecisionAdamW:
    """AdamW over the parameters that this rank updates, with clipping to a global norm, optional
    fp32 master weights, and loss scaling in fp16. Matrices have weight decay, vectors have none.

    `parameters` are the model's, `master` the weights that are updated (the same tensors if there
    is no separate copy). A step is `scale(loss)`, `backward` on that, then `step(lr)`, which
    returns the gradients' norm. `get_gradient(parameter)` is the buffer of a gradient,
    `clear_gradients` (None, or set by the caller) resets gradients that autograd does not make.
    `compile_update` prepares the Triton kernel where `uses_kernel`. `list_state`, `read_scalars`
    and `restore` are for checkpoints, `details` for the record.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        master: list[Tensor] | None,
        train: Train,
        precision: Precision,
        norm: GradientNorm = compute_total_norm,
    ) -> None:
        """Create the optimizer; moments are allocated later. `parameters` are the model's; `master`
        are the same weights in fp32 if the parameters are a 16-bit copy of them, else None.
        Parameters that require gradients then get a hook that adds each new gradient to the
        master's and drops it. `norm` returns the norm of all gradients, of all ranks.

        For parameters whose gradients autograd does not make, the caller sets the master's `grad`
        itself, and `clear_gradients`, the function that resets them after an update.
        """
        self.clip, self.norm = train.clip, norm
        self.parameters: list[Tensor] = list(parameters)
        self.has_master = master is not None
        self.master_by_parameter: dict[int, Tensor] | None = None
        self.clear_gradients: Callable[[], None] | None = None
        self.kernel_updates: list[tuple[dict[str, Any], adam.FusedAdamW]] | None = None
        self.update_count = 0  # number of updates by the kernel
        self.master: list[Tensor] = (
            self.parameters if master is None else [nn.Parameter(weight) for weight in master]
        )
        for parameter, weight in zip(parameters, self.master, strict=True):
            if self.has_master and parameter.requires_grad:
                weight.grad = torch.zeros_like(weight)
                parameter.register_post_accumulate_grad_hook(_make_gradient_adder(weight))  # type: ignore[no-untyped-call]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.master if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in self.master if p.dim() <= 1], "weight_decay": 0.0},
        ]
        betas = (train.beta1, train.beta2)
        self.torch_adamw = torch.optim.AdamW(
            groups, lr=train.lr, betas=betas, eps=train.eps, fused=True
        )
        scaled = precision.matmul == "fp16"
        self.scaler = torch.amp.GradScaler(
            parameters[0].device.type, FIRST_SCALE, growth_interval=GROWTH_STEPS, enabled=scaled
        )

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss that `backward` is called on: multiplied by the loss scale in fp16, where
        gradients would vanish, else unchanged.
        """
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clip the gradients to the norm `clip`, update the weights with this learning rate, copy
        them to the model, and zero the gradients (or drop or reset them, as `zero_grad`). Return
        the gradients' norm before clipping (without the loss scale), a tensor on the device. In
        fp16 a step whose gradients overflow changes no weights and lowers the loss scale. If `norm`
        is over several ranks, all call it together.
        """
        for group in self.torch_adamw.param_groups:
            group["lr"] = lr
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.torch_adamw)
        grads = [p.grad for p in self.master if p.grad is not None]
        overflows = (
            self.scaler._found_inf_per_device(self.torch_adamw).values()
            if self.scaler.is_enabled()
            else ()
        )
        norm = self.norm(grads, list(overflows))
        if self.uses_kernel:
            self._update_by_kernel(norm.float())
            return norm
        clip_grads_with_norm_(self.master, self.clip, norm, foreach=True)
        self.scaler.step(self.torch_adamw)
        self.scaler.update()
        self.copy_to_model()
        self.zero_grad()
        return norm

    @property
    def uses_kernel(self) -> bool:
        """Return whether updates run in the Triton kernel: gradients stay in one place, whose
        addresses the kernel is given once (`get_gradient` was called or `clear_gradients` set),
        losses are not scaled, and Triton runs on the device.
        """
        gradients_stay = self.master_by_parameter is not None or self.clear_gradients is not None
        return (
            gradients_stay
            and not self.scaler.is_enabled()
            and jit.has_triton(self.master[0].device)
        )

    def compile_update(self) -> None:
        """Compile the update kernel and allocate the moments. Call it once all gradients have their
        buffers; weights and gradients do not change. Does nothing if the kernel is not used or its
        updates exist already.
        """
        if self.uses_kernel and self.kernel_updates is None:
            for group, update in self._get_kernel_updates():
                update.compile(self._make_hyperparameters(group), zero=self.clear_gradients is None)

    def _get_kernel_updates(self) -> list[tuple[dict[str, Any], adam.FusedAdamW]]:
        """Return pairs of a parameter group and its update by the kernel, made when first needed
        and again after `restore`; making them allocates moments and reads the number of updates.
        Parameters without a gradient are left out.
        """
        if self.kernel_updates is None:
            pairs = zip(self.master, self.parameters, strict=True)
            copies = {
                id(master): get_local_tensor(parameter)
                for master, parameter in pairs
                if get_local_tensor(parameter).data_ptr() != get_local_tensor(master).data_ptr()
            }
            self.kernel_updates = [
                (
                    group,
                    adam.FusedAdamW(
                        self._list_adam_tensors(parameter, copies.get(id(parameter)))
                        for parameter in group["params"]
                        if parameter.grad is not None
                    ),
                )
                for group in self.torch_adamw.param_groups
            ]
            self.update_count = int(self.read_scalars().updates)
        return self.kernel_updates

    def _make_hyperparameters(self, group: dict[str, Any]) -> adam.AdamHyperparameters:
        """Return a parameter group's hyper-parameters for its next update by the kernel: learning
        rate, weight decay, betas, eps, clip, and the update's number from 1.
        """
        return adam.AdamHyperparameters(
            group["lr"],
            group["weight_decay"],
            group["betas"],
            group["eps"],
            self.clip,
            self.update_count + 1,
        )

    def _update_by_kernel(self, norm: Tensor) -> None:
        """Clip, update the weights and the model's copy in one kernel per parameter group, given
        the norm of all gradients, zero or reset the gradients, count the update, and raise the
        autograd versions of the parameters.
        """
        for group, update in self._get_kernel_updates():
            update(norm, self._make_hyperparameters(group), zero=self.clear_gradients is None)
        self.update_count += 1
        torch._foreach_add_([states["step"] for states in self.torch_adamw.state.values()], 1)
        torch.autograd.graph.increment_version(self.parameters)
        if self.clear_gradients is not None:
            self.clear_gradients()

    def _list_adam_tensors(self, master: Tensor, copy: Tensor | None) -> adam.AdamTensors:
        """Return this rank's tensors of one parameter for the kernel: weight, gradient, two moments
        (created if missing), and `copy`, the model's 16-bit copy, or None. Raises ValueError if it
        has no gradient.
        """
        states, grad = self._get_states(master), master.grad
        if grad is None:
            raise ValueError("a parameter without a gradient")
        first, second = (get_local_tensor(states[key]) for key in MOMENTS)
        return adam.AdamTensors(
            get_local_tensor(master.detach()), get_local_tensor(grad), first, second, copy
        )

    def get_gradient(self, parameter: Tensor) -> Tensor:
        """Return the tensor in which the gradient of one of the model's parameters is summed up,
        for code that adds to it without autograd: the master weight's `grad`, created as zeros when
        first asked for. From the first call on all gradients are zeroed and not dropped. Raises
        KeyError for a tensor that is none of `parameters`.
        """
        if self.master_by_parameter is None:
            self.master_by_parameter = {
                id(model_parameter): master
                for model_parameter, master in zip(self.parameters, self.master, strict=True)
            }
        master = self.master_by_parameter[id(parameter)]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def zero_grad(self) -> None:
        """Set all gradients to zero, by `clear_gradients` if that is set; drop them (None) if
        autograd makes new ones in every step.
        """
        if self.clear_gradients is not None:
            self.clear_gradients()
        elif self.has_master or self.master_by_parameter is not None:
            torch._foreach_zero_([p.grad for p in self.master if p.grad is not None])
        else:
            self.torch_adamw.zero_grad(set_to_none=True)

    def copy_to_model(self) -> None:
        """Copy the master weights, as far as this rank holds them, into the model's parameters if
        these are a copy in other memory. In any case raise the autograd version of all parameters,
        which a fused optimizer does not do: code that caches something made from a parameter must
        see that it changed.
        """
        if self.has_master:
            pairs = [
                (get_local_tensor(parameter), get_local_tensor(master))
                for parameter, master in zip(self.parameters, self.master, strict=True)
            ]
            separate_pairs = [
                (parameter, master)
                for parameter, master in pairs
                if parameter.data_ptr() != master.data_ptr()
            ]
            torch._foreach_copy_(
                [parameter for parameter, _ in separate_pairs],
                [master for _, master in separate_pairs],
            )
        torch.autograd.graph.increment_version(self.parameters)

    def list_moments(self) -> list[Tensor]:
        """Return this rank's part of Adam's two moments, for all parameters; empty before the first
        update, unless `compile_update` or `list_state` has created them.
        """
        return [
            get_local_tensor(states[key])
            for states in self.torch_adamw.state.values()
            for key in MOMENTS
            if key in states
        ]

    def details(self) -> dict[str, Any]:
        """Return how many elements of parameters and moments this rank holds, and the dtypes of
        parameters, master weights, gradients and moments, for the record (`describe_holdings`). A
        gradient has its master weight's dtype.
        """
        return describe_holdings(
            [get_local_tensor(parameter) for parameter in self.parameters],
            self.master,
            self.master,
            self.list_moments(),
        )

    def list_state(self, names: list[str]) -> dict[str, Tensor]:
        """Return all tensors of the optimizer by name, `weights.NAME` (the master weights),
        `exp_avg.NAME` and `exp_avg_sq.NAME`, to be saved or to be filled in place. `names` are
        those of the model's parameters, in order. Moments are created as zeros if there are none.
        """
        out: dict[str, Tensor] = {}
        for name, master in zip(names, self.master, strict=True):
            states = self._get_states(master)
            out |= {f"weights.{name}": master.detach()} | {
                f"{key}.{name}": states[key] for key in MOMENTS
            }
        return out

    def _get_states(self, master: Tensor) -> dict[str, Tensor]:
        """Return torch's optimizer state of a master weight (`step` and two moments), created as
        zeros if it has none.
        """
        states: dict[str, Tensor] = self.torch_adamw.state[master]
        if not states:  # the same as torch's first step would create
            moments = {key: torch.zeros_like(master.detach()) for key in MOMENTS}
            states.update(step=torch.zeros((), device=master.device), **moments)
        return states

    def read_scalars(self) -> OptimizerScalars:
        """Return the number of updates and, in fp16, the loss scale with its growth counter, which
        are the same on every rank. Waits for the device. Raises KeyError if no state exists yet:
        call it after an update or `list_state`.
        """
        updates = float(self.torch_adamw.state[self.master[0]]["step"])
        if not self.scaler.is_enabled():
            return OptimizerScalars(updates=updates)
        scaler = self.scaler.state_dict()
        return OptimizerScalars(
            updates=updates, scale=float(scaler["scale"]), growth=float(scaler["_growth_tracker"])
        )

    def restore(self, scalars: OptimizerScalars) -> None:
        """Continue from a checkpoint, once the tensors of `list_state` have been filled: set the
        number of updates and, in fp16, the loss scale and its growth counter, and copy the master
        weights to the model. Raises RequestError if this precision scales losses and the checkpoint
        has no scale.
        """
        for states in self.torch_adamw.state.values():
            states["step"].fill_(scalars.updates)
        self.kernel_updates = None  # number of updates, and maybe tensors, have changed
        if self.scaler.is_enabled():
            if scalars.scale is None or scalars.growth is None:
                raise RequestError(
                    "--resume: the checkpoint has no loss scale, and this precision scales losses;"
                    " resume with the precision of the checkpoint"
                )
            scaler = self.scaler.state_dict()
            self.scaler.load_state_dict(
                {**scaler, "scale": scalars.scale, "_growth_tracker": int(scalars.growth)}
            )
        with torch.no_grad():
            self.copy_to_model()


def describe_holdings(
    parameters: list[Tensor],
    master_weights: list[Tensor],
    gradients: list[Tensor],
    states: list[Tensor],
) -> dict[str, Any]:
    """Return for the record `parameters` and `optimizer_states`, the numbers of elements of these
    tensors that a rank holds, and `dtypes`, a text such as `bf16/fp32` for `parameters`,
    `main_parameters` (master weights), `gradients` and `states`; kinds without tensors are left
    out.
    """
    tensors_by_kind = {
        "parameters": parameters,
        "main_parameters": master_weights,
        "gradients": gradients,
        "states": states,
    }
    return {
        "parameters": sum(tensor.numel() for tensor in parameters),
        "optimizer_states": sum(tensor.numel() for tensor in states),
        "dtypes": {
            name: format_dtypes(tensors) for name, tensors in tensors_by_kind.items() if tensors
        },
    }


def _make_gradient_adder(master: Tensor) -> Any:
    """Return a post-accumulate hook for a 16-bit parameter that adds its new gradient to the `grad`
    of `master`, and sets the parameter's own to None.
    """

    def add(parameter: Tensor) -> None:
        """Add the 16-bit parameter's gradient to the `grad` of `master` in place, and set the
        parameter's to None; nothing if one of them is None. Autograd calls it after it has made the
        gradient.
        """
        if parameter.grad is not None and master.grad is not None:
            master.grad.add_(parameter.grad)
            parameter.grad = None

    return add
