"""Recorded functions: a replay copies new inputs in, adds to gradients again, and reads current
weights and seeds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixtures.glm import RerunRecorder
from steelyard.training.graph_replay import ReplayedFunction


@dataclass(frozen=True)
class Inputs:
    """The inputs of the recorded function."""

    x: Tensor


class AccumulatingProduct(torch.autograd.Function):
    """The sum of weight times x; backward adds the weight's gradient to a given tensor, outside
    autograd.
    """

    @staticmethod
    def forward(context, x, weight, weight_gradient):
        context.save_for_backward(x)
        context.place = weight_gradient
        return (weight * x).sum()

    @staticmethod
    def backward(context, grad):
        context.place.add_(grad * context.saved_tensors[0].sum())
        return None, None, None


def make_recorded(
    weight: Tensor, weight_gradient: Tensor, noise: Tensor, calls: list[int]
) -> tuple[ReplayedFunction[Inputs], RerunRecorder]:
    """Return a recorded function and its fake recorder; the function appends the length of its
    input to `calls` whenever it runs.
    """

    def function(row: Inputs) -> Tensor:
        calls.append(len(row.x))
        return AccumulatingProduct.apply(row.x, weight, weight_gradient) + noise.sum()

    record = RerunRecorder()
    return ReplayedFunction(function, record, lambda row: [row.x], lambda row: len(row.x)), record


def test_a_replay_reads_new_inputs_and_adds_to_gradients() -> None:
    weight, weight_gradient, noise = (
        torch.tensor(2.0, requires_grad=True),
        torch.zeros(()),
        torch.zeros(1),
    )
    recorded, record = make_recorded(weight, weight_gradient, noise, [])
    first, second = Inputs(torch.tensor([1.0, 2.0])), Inputs(torch.tensor([10.0, 20.0]))
    losses = []
    for row, scale in ((first, 1.0), (second, 0.5), (first, 4.0), (second, 0.25)):
        loss = recorded(row)
        losses.append(float(loss.detach()))
        (loss * scale).backward()
    assert losses == [6.0, 60.0, 6.0, 60.0]
    assert float(weight_gradient) == 3 * 1.0 + 30 * 0.5 + 3 * 4.0 + 30 * 0.25
    assert first.x.tolist() == [1.0, 2.0]  # the caller's tensors are not overwritten
    assert weight.grad is None
    assert len(record.graphs) == 2  # one size: forward and backward graphs


def test_a_replay_reads_current_weights_and_seeds() -> None:
    weight, weight_gradient, noise = (
        torch.tensor(2.0, requires_grad=True),
        torch.zeros(()),
        torch.zeros(1),
    )
    recorded, _ = make_recorded(weight, weight_gradient, noise, [])
    row = Inputs(torch.tensor([1.0, 2.0]))
    assert [float(recorded(row).detach()) for _ in range(3)] == [6.0, 6.0, 6.0]
    with torch.no_grad():
        weight.fill_(3.0)
    noise.fill_(0.25)
    assert float(recorded(row).detach()) == 9.25


def test_a_size_is_recorded_when_it_occurs_a_second_time() -> None:
    calls: list[int] = []
    weight, weight_gradient = torch.tensor(2.0, requires_grad=True), torch.zeros(())
    recorded, record = make_recorded(weight, weight_gradient, torch.zeros(1), calls)
    for size in (2, 3):
        recorded(Inputs(torch.ones(size)))
    assert (calls, record.graphs) == ([2, 3], [])  # first time: not recorded
    recorded(Inputs(torch.ones(2)))
    assert float(weight_gradient) == 0.0
    recorded(Inputs(torch.ones(2)))
    recorded(Inputs(torch.ones(3)))
    assert len(record.graphs) == 4
    # size 2: recorded and replayed, then replayed; size 3: recorded and replayed
    assert calls == [2, 3, 2, 2, 2, 3, 3]


def test_a_later_replay_does_not_overwrite_an_earlier_loss() -> None:
    recorded, _ = make_recorded(
        torch.tensor(2.0, requires_grad=True), torch.zeros(()), torch.zeros(1), []
    )
    recorded(Inputs(torch.ones(2)))
    first_loss = recorded(Inputs(torch.tensor([1.0, 2.0])))
    recorded(Inputs(torch.tensor([3.0, 4.0])))
    assert float(first_loss.detach()) == 6.0
