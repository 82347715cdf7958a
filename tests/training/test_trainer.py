"""A trainer of a toy model: what it calls on its model, placement and optimizer, and in which
order.
"""

from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.glm import CPU, TRAINING
from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case.precision import TRAINING_PRESETS
from steelyard.training.adamw import MixedPrecisionAdamW, compute_total_norm
from steelyard.training.placement import ReplicatedPlacement, SingleDevicePlacement
from steelyard.training.trainer import Trainer
from steelyard.training.training_loop import LossWatch, compute_learning_rate


class ToyModel:
    """A linear model whose loss is the sum of squared outputs; it logs its calls in `order`."""

    def __init__(self, precision: str) -> None:
        self.precision, self.weights, self.fsdp_roots = (
            TRAINING_PRESETS[precision],
            {"source": "toy"},
            [],
        )
        self.order: list[str] = []

    def build(self) -> list[Tensor] | None:
        """Build fixed weights; return fp32 master weights if parameters are rounded to bf16, else
        None.
        """
        self.module = nn.Linear(3, 2)
        with torch.no_grad():
            self.module.weight.copy_(torch.arange(6).view(2, 3) / 8)
            self.module.bias.fill_(0.5)
        self.order.append("build")
        if self.precision.matmul != "bf16" or self.precision.weights == "bf16":
            return None
        master = [p.detach() for p in self.module.parameters()]
        self.module.to(torch.bfloat16)
        return master

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    def compile(self, gradient: Any) -> None:
        self.order.append("compile")

    def loss(self, micro: Tensor) -> Tensor:
        self.order.append("loss" if torch.is_grad_enabled() else "evaluate")
        return self.module(micro.to(self.module.weight.dtype)).float().square().sum()

    evaluate = loss

    def list_variants(self, micro: Tensor) -> list[Tensor]:
        return [micro, 2 * micro]

    def details(self) -> dict[str, Any]:
        return {"weights": self.weights}


def prepare_trainer(placement: Any, precision: str = "fp32") -> Trainer:
    """Return a prepared trainer of the toy model."""
    case = SimpleNamespace(question=SimpleNamespace(precision=TRAINING_PRESETS[precision]))
    job = SimpleNamespace(case=case, train=TRAINING, device=CpuTorchDevice(0, monotonic))
    toy_trainer = Trainer(job, ToyModel(precision), placement)
    parts = []

    @contextmanager
    def part(name: str) -> Any:
        parts.append(name)
        toy_trainer.model.order.append(f"begin {name}")
        yield
        toy_trainer.model.order.append(f"end {name}")

    toy_trainer.prepare(part)
    assert parts == ["weights"]
    return toy_trainer


MICROS = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, 0.0]])]


def test_prepare_builds_weights_before_it_compiles() -> None:
    assert prepare_trainer(SingleDevicePlacement()).model.order == [
        "begin weights",
        "build",
        "end weights",
        "compile",
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_replica_trains_as_one_device(precision: str) -> None:
    results = []
    for placement in (SingleDevicePlacement(), ReplicatedPlacement(1, torch.float32, CPU)):
        toy_trainer = prepare_trainer(placement, precision)
        steps = [
            (
                float(toy_trainer.compute_gradients(MICROS, toy_trainer.sum_over_replicas(3))),
                float(toy_trainer.update(0.1)),
            )
            for _ in range(3)
        ]
        results.append((steps, [p.tolist() for p in toy_trainer.optimizer.master]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "placement", [SingleDevicePlacement(), ReplicatedPlacement(1, torch.float32, CPU)]
)
def test_warming_up_runs_every_variant_and_changes_nothing(placement: Any) -> None:
    toy_trainer = prepare_trainer(placement)
    before = [p.detach().clone() for p in toy_trainer.optimizer.master]
    toy_trainer.warm_up(MICROS[0])
    assert toy_trainer.model.order[4:] == ["evaluate", "loss"] * 2
    assert all(torch.equal(a, b) for a, b in zip(before, toy_trainer.optimizer.master, strict=True))
    assert not any(
        p.grad is not None and bool(p.grad.count_nonzero()) for p in toy_trainer.optimizer.master
    )


def test_gradients_are_clipped_by_the_norm_that_is_passed_in() -> None:
    """The norm of all ranks may be twice that of this one, so that gradients are clipped to
    half.
    """
    grads, norms = [], []
    for factor in (1.0, 2.0):
        weight = nn.Parameter(torch.ones(2, 2))
        adam = MixedPrecisionAdamW(
            [weight],
            None,
            TRAINING,
            TRAINING_PRESETS["fp32"],
            lambda g, o, factor=factor: factor * compute_total_norm(g, o),
        )
        weight.grad = torch.full((2, 2), 4.0)
        adam.torch_adamw.register_step_pre_hook(
            lambda *args, weight=weight: grads.append(weight.grad.clone())
        )
        norms.append(float(adam.step(1e-3)))
    assert norms == [8.0, 16.0]
    torch.testing.assert_close(grads[0], 2 * grads[1])


def test_a_watch_keeps_the_first_loss_that_ends_a_run() -> None:
    watch = LossWatch(5.0)
    for step, loss in enumerate((4.0, 6.0, torch.nan)):
        watch.add(step, loss)
    assert watch.has_bad_loss()
    assert watch.stop == {"step": 1, "why": "bound", "value": 6.0}
    watch = LossWatch(None)
    watch.add(0, 1e9)
    assert not watch.has_bad_loss()
    watch.add(1, lambda: float("inf"))  # not computed yet
    assert not watch.has_bad_loss()
    assert watch.has_bad_loss(wait=True)
    assert watch.stop == {"step": 1, "why": "nan", "value": None}


def test_the_learning_rate_warms_up_and_decays() -> None:
    assert [round(compute_learning_rate(TRAINING, step), 8) for step in range(6)] == [
        1e-3,
        1e-3,
        7e-4,
        4e-4,
        1e-4,
        1e-4,
    ]
