"""Recorded functions: a replay copies new inputs in, adds to gradients again, and reads current
weights and seeds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixtures.glm import Rerun
from steelyard.training.graph_replay import ReplayedFunction


@dataclass(frozen=True)
class Row:
    """The inputs of the recorded function."""

    x: Tensor


class Adding(torch.autograd.Function):
    """The sum of weight times x; backward adds the weight's gradient to a given tensor, outside
    autograd.
    """

    @staticmethod
    def forward(context, x, weight, place):
        context.save_for_backward(x)
        context.place = place
        return (weight * x).sum()

    @staticmethod
    def backward(context, grad):
        context.place.add_(grad * context.saved_tensors[0].sum())
        return None, None, None


def made(
    weight: Tensor, place: Tensor, noise: Tensor, calls: list[int]
) -> tuple[ReplayedFunction[Row], Rerun]:
    """Return a recorded function and its fake recorder; the function appends the length of its
    input to `calls` whenever it runs.
    """

    def function(row: Row) -> Tensor:
        calls.append(len(row.x))
        return Adding.apply(row.x, weight, place) + noise.sum()

    record = Rerun()
    return ReplayedFunction(function, record, lambda row: [row.x], lambda row: len(row.x)), record


def test_a_replay_reads_new_inputs_and_adds_to_gradients() -> None:
    weight, place, noise = torch.tensor(2.0, requires_grad=True), torch.zeros(()), torch.zeros(1)
    recorded, record = made(weight, place, noise, [])
    first, second = Row(torch.tensor([1.0, 2.0])), Row(torch.tensor([10.0, 20.0]))
    losses = []
    for row, scale in ((first, 1.0), (second, 0.5), (first, 4.0), (second, 0.25)):
        loss = recorded(row)
        losses.append(float(loss.detach()))
        (loss * scale).backward()
    assert losses == [6.0, 60.0, 6.0, 60.0]
    assert float(place) == 3 * 1.0 + 30 * 0.5 + 3 * 4.0 + 30 * 0.25
    assert first.x.tolist() == [1.0, 2.0]  # the caller's tensors are not overwritten
    assert weight.grad is None
    assert len(record.made) == 2  # one size: forward and backward graphs


def test_weights_and_seeds_are_those_of_the_replay() -> None:
    weight, place, noise = torch.tensor(2.0, requires_grad=True), torch.zeros(()), torch.zeros(1)
    recorded, _ = made(weight, place, noise, [])
    row = Row(torch.tensor([1.0, 2.0]))
    assert [float(recorded(row).detach()) for _ in range(3)] == [6.0, 6.0, 6.0]
    with torch.no_grad():
        weight.fill_(3.0)
    noise.fill_(0.25)
    assert float(recorded(row).detach()) == 9.25


def test_a_size_is_recorded_once_when_it_is_met_again() -> None:
    calls: list[int] = []
    weight, place = torch.tensor(2.0, requires_grad=True), torch.zeros(())
    recorded, record = made(weight, place, torch.zeros(1), calls)
    for size in (2, 3):
        recorded(Row(torch.ones(size)))
    assert (calls, record.made) == ([2, 3], [])  # first time: not recorded
    recorded(Row(torch.ones(2)))
    assert float(place) == 0.0
    recorded(Row(torch.ones(2)))
    recorded(Row(torch.ones(3)))
    assert len(record.made) == 4
    # size 2: recorded and replayed, then replayed; size 3: recorded and replayed
    assert calls == [2, 3, 2, 2, 2, 3, 3]


def test_losses_of_replays_do_not_change_each_other() -> None:
    recorded, _ = made(torch.tensor(2.0, requires_grad=True), torch.zeros(()), torch.zeros(1), [])
    recorded(Row(torch.ones(2)))
    one = recorded(Row(torch.tensor([1.0, 2.0])))
    recorded(Row(torch.tensor([3.0, 4.0])))
    assert float(one.detach()) == 6.0
