"""What the training loop yields: where the phases of a step begin, with a separate exchange and
without.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.glm import CPU, TRAINING
from steelyard.engine.work import Phase, Work
from steelyard.engines.torch.collectives import PlanGroup, PlanGroups
from steelyard.engines.torch.train import PlanPlacement as TorchPlaced
from steelyard.training.placement import ReplicatedPlacement, SingleDevicePlacement
from steelyard.training.trainer import Trainer
from steelyard.training.training_loop import COUNT_NAMES, TrainingLoop

PACK = SimpleNamespace(counts=dict.fromkeys(COUNT_NAMES, 5))


class FakePlacement:
    """A placement of two replicas, of which the other does the same as this one; it logs its
    calls.
    """

    lockstep = True

    def __init__(self, log: list[str], separate: bool) -> None:
        self.log, self.exchanges_separately = log, separate

    def start_losses(self) -> list[Tensor]:
        return [torch.zeros(())]

    def backward(self, model: Any, micros: list[Any], weigh: Any) -> None:
        self.log.append("backward")
        weigh(torch.tensor(6.0 * len(micros)))

    def reduce(self, loss: Tensor) -> Tensor:
        self.log.append("reduce")
        return 2 * loss

    def sum_over_replicas(self, count: Tensor) -> Tensor:
        self.log.append("total")
        return 2 * count

    def send_updates(self) -> None:
        self.log.append("updated")


class FakeBatches:
    """Batches of two equal micro-batches; it logs transfers and seeds."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def split_keys(self, keys: list[Any], size: int | None = None) -> list[list[Any]]:
        return [keys, keys]

    def pack(self, keys: list[Any]) -> Any:
        return PACK

    def to_device(self, pack: Any) -> str:
        self.log.append("to_device")
        return "micro"

    def count_targets(self, pack: Any) -> int:
        return 3

    def seed(self, step: int) -> None:
        self.log.append(f"seed {step}")


def make_loop(log: list[str], placement: Any, steps: int = 2) -> TrainingLoop:
    """Return a training loop over fakes that log to `log`."""
    case = SimpleNamespace(tune=SimpleNamespace(compile=False))
    inputs = SimpleNamespace(batch=lambda step: [step])
    job_fields = {
        "checkpoint_schedule": None,
        "world": 2,
        "device": SimpleNamespace(torch_device=CPU),
    }
    job = SimpleNamespace(case=case, train=TRAINING, steps=steps, inputs=inputs, **job_fields)
    trainer = Trainer(job, SimpleNamespace(details=dict), placement)

    def update(lr: float) -> Tensor:
        log.append("update")
        return torch.tensor(1.0)

    trainer.optimizer = SimpleNamespace(scale=lambda loss: loss, step=update, details=dict)
    evaluation = SimpleNamespace(reached=False, is_due=lambda taken: False)
    return TrainingLoop(job, trainer, FakeBatches(log), evaluation)


def run_loop(separate: bool) -> tuple[list[str], list[Work]]:
    """Run two steps; return the log of calls with phases and works (`<>`) in between, and the
    works.
    """
    log: list[str] = []
    works = []
    for item in make_loop(log, FakePlacement(log, separate)).work("train"):
        log.append(f"<{item.name}>" if isinstance(item, Phase) else "<>")
        works += [item] if isinstance(item, Work) else []
    return log, works


def test_a_separate_exchange_is_a_phase_of_its_own():
    step = [
        "<data>",
        "to_device",
        "to_device",
        "<meet>",
        "total",
        "<compute>",
        "seed {}",
        "backward",
        "<exchange>",
    ]
    step += ["reduce", "<compute>", "update", "updated", "<>"]
    assert run_loop(separate=True)[0] == [
        event.format(number) for number in (0, 1) for event in step
    ]


def test_an_exchange_inside_the_step_is_no_phase():
    step = [
        "<data>",
        "to_device",
        "to_device",
        "<meet>",
        "total",
        "<compute>",
        "seed {}",
        "backward",
        "reduce",
    ]
    step += ["update", "updated", "<>"]
    assert run_loop(separate=False)[0] == [
        event.format(number) for number in (0, 1) for event in step
    ]


def test_phases_do_not_change_the_loss():
    (_, separate_works), (_, inside_works) = run_loop(separate=True), run_loop(separate=False)
    # losses of both replicas (12 each) over the targets of both (6 each)
    assert [float(work.values["loss"]) for work in separate_works] == [2 * 12.0 / (2 * 6)] * 2
    assert separate_works == inside_works


@pytest.mark.parametrize(("separate", "said"), [(True, "separate"), (False, "inside")])
def test_details_say_whether_the_exchange_is_separate(separate, said):
    train_loop = make_loop([], FakePlacement([], separate))
    assert train_loop.details() == {"micro_batches": 2, "exchange": said}
    train_loop.job.world = 1
    assert train_loop.details() == {"micro_batches": 2}


@pytest.mark.parametrize(
    ("sizes", "separate"),
    [
        ((4, 1, 1, 1), True),
        ((1, 4, 1, 1), False),
        ((2, 2, 1, 1), False),
        ((4, 1, 2, 1), False),
        ((4, 1, 1, 2), False),
        ((1, 1, 1, 2), False),
        ((1, 1, 1, 1), False),
    ],
)
def test_only_unsharded_replicas_exchange_separately(sizes, separate):
    """`sizes` are those of the groups copies, shards, stages and tensor."""
    groups = PlanGroups(*(PlanGroup(size=size) for size in sizes))
    assert (
        TorchPlaced(SimpleNamespace(matmul_dtype=torch.float32), groups, CPU).exchanges_separately
        is separate
    )


def test_one_device_has_no_separate_exchange():
    assert not SingleDevicePlacement().exchanges_separately
    assert [
        ReplicatedPlacement(replicas, torch.float32, CPU).exchanges_separately
        for replicas in (1, 2)
    ] == [False, True]
