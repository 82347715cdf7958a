"""What a rank holds of parameters, gradients and states, and when replicas exchange it.

A parameter of n rows is divided among d ranks by its rows: each has ⌈n/d⌉ of them, the last ones
fewer or none. What is gathered is padded to d times that many, so that every rank's rows are a view
of the whole, and nothing is copied.

A unit (the embedding, a layer, the last norm with the output) is what is exchanged together:
gradients as soon as its backward pass is over, while that of the unit before it is computed;
weights before they are read, while another unit computes.

    sharding 0   gradients are summed over all copies, after the last micro-batch
    sharding 1   gradients are reduce-scattered in place, after the last micro-batch; weights are gathered after the update
    sharding 2   the same after every micro-batch; whole gradients of two units exist at a time
    sharding 3   weights are gathered for every unit, forward and backward; those of two units exist at a time
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.engines.torch.exchange import Groups, Pending
from steelyard.models.placements import Shard


class Held:
    """A parameter, as this rank holds it. `shared`: the ranks of a tensor-parallel group all have
    it.
    """

    def __init__(
        self,
        name: str,
        values: Tensor,
        compute: torch.dtype,
        sharding: int,
        place: Shard,
        shared: bool,
    ) -> None:
        self.name, self.size, self.sharding, self.shared = name, values.shape, sharding, shared
        rows = len(values)
        self.chunk = -(-rows // place.count)
        self.padded = self.chunk * place.count
        self.at = place.index * self.chunk  # of this rank's rows in the padded whole
        self.begin = min(self.at, rows)
        self.rows = min(self.begin + self.chunk, rows) - self.begin
        whole = self._padded(values, compute)
        self.part = self.own(whole) if sharding < 3 else self.own(whole).clone()
        self.whole = whole if sharding < 3 else None
        self.shard = self.part[: self.rows]
        self.master = self.shard if compute == values.dtype else self._master(values)
        self.parameter = nn.Parameter(whole[:rows] if sharding < 3 else whole.new_empty(0))
        self.gradient: Tensor | None = None

    def _padded(self, values: Tensor, compute: torch.dtype) -> Tensor:
        if self.padded == len(values):
            return values.to(compute)
        whole = values.new_zeros(self.padded, *values.shape[1:], dtype=compute)
        whole[: len(values)].copy_(values)
        return whole

    def _master(self, values: Tensor) -> Tensor:
        return (
            values
            if self.rows == len(values)
            else values[self.begin : self.begin + self.rows].clone()
        )

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a padded whole, padded."""
        return whole.narrow(0, self.at, self.chunk)

    def make_gradients(self, master: Tensor) -> None:
        """Room for what the optimizer reads; where it is divided, whole gradients have room only
        while they are made.
        """
        if self.sharding < 2:
            self.gradient = self._zeros(self.padded)
        self.gradient_part = (
            self._zeros(self.chunk) if self.gradient is None else self.own(self.gradient)
        )
        master.grad = self.gradient_part[: self.rows]

    def whole_gradient(self) -> Tensor:
        """To be added to: as large as the parameter."""
        if self.gradient is None:
            self.gradient = self._zeros(self.padded)
        return self.gradient[: self.size[0]]

    def _zeros(self, rows: int) -> Tensor:
        return self.master.new_zeros(rows, *self.size[1:])


class Unit:
    """Parameters that are exchanged together. `again`: its backward reads them too, as all but an
    embedding's does.
    """

    def __init__(self, held: Sequence[Held], again: bool = True) -> None:
        self.again = again
        self.held = list(held)
        # of a small vocabulary a tensor-parallel rank may have nothing
        self.sent = [one for one in held if one.padded]
        self.gathering: Pending | None = None
        self.gathered = False
        self.reducing: Pending | None = None
        self.adds = self.last = False


class Replicas:
    """The units of a rank, and what its replicas exchange of them."""

    def __init__(self, units: Sequence[Unit], sharding: int, groups: Groups) -> None:
        self.units, self.sharding, self.groups = list(units), sharding, groups
        self.live = groups.copies.live or groups.shards.live
        self.held = [one for unit in self.units for one in unit.held]
        self.places = {id(one.parameter): one for one in self.held}
        self.first = self.last = True
        self.reducing: Unit | None = None
        self.works: list[Pending] = []
        for one in self.held:
            one.parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    def make_gradients(self, masters: Sequence[Tensor]) -> None:
        """For what the optimizer updates."""
        for one, master in zip(self.held, masters, strict=True):
            one.make_gradients(master)

    def gradient(self, parameter: Tensor) -> Tensor:
        """Where a parameter's gradient is summed."""
        return self.places[id(parameter)].whole_gradient()

    def _add(self, parameter: Tensor) -> None:
        """What autograd made: the gradients of norms and biases."""
        if parameter.grad is not None:
            self.gradient(parameter).add_(parameter.grad)
            parameter.grad = None

    def before(self, first: bool, last: bool) -> None:
        """Told before every backward pass whether it is the step's first, and last."""
        self.first, self.last = first, last

    def around(
        self, index: int, run: Callable[..., tuple[Tensor, ...]], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """A unit's forward, with what is exchanged before it, and before and after its backward."""
        if not self.live:
            return run(*given)
        with self.weights(index, keep=index == len(self.units) - 1 and torch.is_grad_enabled()):
            out = run(*_around(lambda: self.finish(index), *given))
        return _around(lambda: self._begin(index), *out)

    @contextmanager
    def weights(self, index: int, keep: bool = False) -> Iterator[None]:
        """Around a unit's forward: it has its weights. They are kept where its backward is next."""
        if self.live:
            self._ready(index, index + 1)
        yield
        if not keep:
            self._release(self.units[index])

    def _begin(self, index: int) -> None:
        """Before a unit's backward."""
        # a stage of one unit: its gradients of the micro-batch before are on their way
        if self.reducing is self.units[index]:
            self._settle_last()
        self._ready(index, index - 1)

    def _ready(self, index: int, following: int) -> None:
        """Have a unit's weights, and those of the following one on their way."""
        unit = self.units[index]
        self._gather(unit)
        if unit.gathering is not None:
            unit.gathering.wait()
            unit.gathering = None
        if 0 <= following < len(self.units) and (following > index or self.units[following].again):
            self._gather(self.units[following])

    def _gather(self, unit: Unit) -> None:
        if self.sharding < 3 or unit.gathered:
            return
        pairs = []
        for one in unit.held:
            whole = one.part.new_empty(one.padded, *one.size[1:])
            one.parameter.data = whole[: one.size[0]]
            pairs += [(whole, one.part)] if one.padded else []
        unit.gathering, unit.gathered = self.groups.shards.all_gather(pairs), True

    def _release(self, unit: Unit) -> None:
        if self.sharding == 3:
            for one in unit.held:
                one.parameter.data = one.part.new_empty(0)
            unit.gathered = False

    def finish(self, index: int) -> None:
        """After a unit's backward."""
        unit = self.units[index]
        self._release(unit)
        if not self.live or (self.sharding < 2 and not self.last):
            return
        if self.sharding == 0:
            self.works.append(
                self.groups.copies.all_reduce(
                    [one.gradient for one in unit.sent if one.gradient is not None]
                )
            )
            return
        unit.adds, unit.last = self.sharding > 1 and not self.first, self.last
        pairs = []
        for one in unit.sent:
            one.whole_gradient()  # in a micro-batch from which nothing was learned, of zeros
            whole: Any = one.gradient
            pairs.append(
                (whole, one.own(whole) if unit.adds or self.sharding == 1 else one.gradient_part)
            )
        unit.reducing = self.groups.shards.reduce_scatter(pairs)
        self._settle_last()
        self.reducing = unit

    def _settle(self, unit: Unit | None) -> None:
        """The gradients of a unit, which were on their way while the next one's were computed."""
        if unit is None or unit.reducing is None:
            return
        unit.reducing.wait()
        unit.reducing = None
        for one in unit.held if self.sharding > 1 else ():
            if unit.adds and one.gradient is not None:
                one.gradient_part.add_(one.own(one.gradient))
            one.gradient = None
        if unit.last and self.groups.copies.live:
            self.works.append(
                self.groups.copies.all_reduce([one.gradient_part for one in unit.sent])
            )

    def _settle_last(self) -> None:
        unit, self.reducing = self.reducing, None
        self._settle(unit)

    def drain(self) -> None:
        """Have all gradients."""
        self._settle_last()
        for work in self.works:
            work.wait()
        self.works = []
        if self.groups.tensor.live:  # norms saw a part of the tokens each
            self.groups.tensor.all_reduce(
                [one.gradient_part for one in self.held if one.shared]
            ).wait()

    def updated(self) -> None:
        """The optimizer has changed this rank's rows: send them to those that hold whole weights.
        Who keeps something made of a weight looks at its version."""
        torch.autograd.graph.increment_version([one.parameter for one in self.held])
        if self.sharding in (1, 2) and self.groups.shards.live:
            for unit in self.units:
                pairs = [(one.whole, one.part) for one in unit.sent if one.whole is not None]
                unit.gathering = self.groups.shards.all_gather(pairs)

    def zero(self) -> None:
        """Whole gradients; those that are divided are written anew."""
        if self.sharding < 2:
            torch._foreach_zero_([one.gradient for one in self.held if one.gradient is not None])


class _Around(torch.autograd.Function):
    """The same tensors; `call` is called in the backward pass."""

    @staticmethod
    def forward(context: Any, call: Callable[[], None], *given: Tensor) -> tuple[Tensor, ...]:
        context.call = call
        return tuple(one.view_as(one) for one in given)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        context.call()
        return None, *grads


def _around(call: Callable[[], None], *given: Tensor) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = _Around.apply(call, *given)  # type: ignore[no-untyped-call]
    return out
