"""What one rank holds of parameters, gradients and optimizer states, and when replicas exchange it
(ZeRO levels 0 to 3).

A parameter of n rows is divided among d ranks by rows: each has ceil(n/d) of them, the last ranks
fewer or none. What is gathered is padded to d times that many, so that every rank's rows are a view
of the whole, and nothing is copied.

A unit (the embedding, a block, the last norm with the output) is what is exchanged together:
gradients as soon as its backward pass is over, while that of the unit before it is computed;
weights before they are read, while another unit computes.

    sharding 0   gradients are all-reduced over all copies, after the last micro-batch
    sharding 1   gradients are reduce-scattered in place, after the last micro-batch;
                 weights are gathered after the update
    sharding 2   the same after every micro-batch; whole gradients of two units exist at a time
    sharding 3   weights are gathered for every unit, forward and backward;
                 those of two units exist at a time
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from steelyard.engines.torch.collectives import PendingCollective, PlanGroups
from steelyard.models.llama_placements import Shard

ShardingLevel = Literal[0, 1, 2, 3]  # ZeRO levels; 0: nothing is sharded


class ShardedParameter:
    """A parameter of which this rank updates one shard of rows, with its gradient and master
    weights.

    - `parameter` is what modules compute with: the whole parameter, or empty at sharding 3 while it
      is not gathered.
    - `shard` is this rank's rows in the compute dtype, `part` the same padded to `chunk` rows.
    - `master` is this rank's rows in the stored precision (`shard` itself if that is the compute
      dtype).
    - `whole` is the padded whole parameter, None at sharding 3.
    - `gradient` is the padded whole gradient while it exists, `gradient_part` this rank's padded
      rows of it.
    - `shared`: all ranks of a tensor-parallel group hold this parameter whole, as a norm's weight.
    """

    def __init__(
        self,
        name: str,
        values: Tensor,
        compute: torch.dtype,
        sharding: ShardingLevel,
        shard: Shard,
        shared: bool,
    ) -> None:
        """Take over the tensor-parallel rank's whole parameter, `values` in the stored precision;
        `compute` is the dtype to compute in, `shard` says which of how many shards of rows is this
        rank's. `values` is not kept unless it is used as it is. Gradients come with
        `make_gradients`.
        """
        if sharding not in get_args(ShardingLevel):
            raise ValueError(f"sharding {sharding}; allowed: 0, 1, 2, 3")
        self.name, self.size, self.sharding, self.shared = name, values.shape, sharding, shared
        rows = len(values)
        self.chunk = -(-rows // shard.count)
        self.padded_rows = self.chunk * shard.count
        self.padded_begin = shard.index * self.chunk  # of this rank's rows in the padded whole
        self.begin = min(self.padded_begin, rows)
        self.rows = min(self.begin + self.chunk, rows) - self.begin
        whole = self._pad(values, compute)
        self.part = self.own_rows(whole) if sharding < 3 else self.own_rows(whole).clone()
        self.whole = whole if sharding < 3 else None
        self.shard = self.part[: self.rows]
        self.master = self.shard if compute == values.dtype else self._take_master_rows(values)
        self.parameter = nn.Parameter(whole[:rows] if sharding < 3 else whole.new_empty(0))
        self.gradient: Tensor | None = None

    def _pad(self, values: Tensor, compute: torch.dtype) -> Tensor:
        """Return the parameter's values in the compute dtype, padded with zero rows to a multiple
        of the ranks; without padding or cast it is the same tensor.
        """
        if self.padded_rows == len(values):
            return values.to(compute)
        whole = values.new_zeros(self.padded_rows, *values.shape[1:], dtype=compute)
        whole[: len(values)].copy_(values)
        return whole

    def _take_master_rows(self, values: Tensor) -> Tensor:
        """Return this rank's rows of a parameter in the stored precision, unpadded: the values
        themselves if all rows are its own, else a copy.
        """
        return (
            values
            if self.rows == len(values)
            else values[self.begin : self.begin + self.rows].clone()
        )

    def own_rows(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's `chunk` rows, padding included, in a padded whole tensor of
        this parameter (weights or gradient).
        """
        return whole.narrow(0, self.padded_begin, self.chunk)

    def make_gradients(self, master: Tensor) -> None:
        """Allocate zeroed gradients of this parameter and set `master.grad` to this rank's rows of
        them, without padding. At sharding 2 and 3 only those rows are allocated; whole gradients
        exist only while they are computed.
        """
        if self.sharding < 2:
            self.gradient = self._zeros(self.padded_rows)
        self.gradient_part = (
            self._zeros(self.chunk) if self.gradient is None else self.own_rows(self.gradient)
        )
        master.grad = self.gradient_part[: self.rows]

    def whole_gradient(self) -> Tensor:
        """Return this parameter's whole gradient for adding to, as large as the parameter (a view
        without padding rows); it is allocated with zeros, as `gradient`, if it does not exist.
        """
        if self.gradient is None:
            self.gradient = self._zeros(self.padded_rows)
        return self.gradient[: self.size[0]]

    def _zeros(self, rows: int) -> Tensor:
        """Return zeros of this many rows of the parameter, in the dtype and on the device of the
        master weights.
        """
        return self.master.new_zeros(rows, *self.size[1:])


class ExchangeUnit:
    """Parameters that are exchanged together (`parameters`: of an embedding, a block, or norm with
    output), and the state of their exchange, which `ReplicaExchange` changes.

    `backward_reads`: the backward pass needs the weights too, as all but an embedding's does.
    `exchanged` are the parameters that have rows. `gathering` and `reducing` are the collectives of
    weights and of gradients in flight (None: none), `gathered` is true from the start of gathering
    until weights are dropped (sharding 3). `adds`: the reduced gradients are added to those of
    earlier micro-batches. `last`: they are of the step's last micro-batch.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], backward_reads: bool = True) -> None:
        """Make a unit of these parameters, with no exchange in flight; those without rows are not
        exchanged.
        """
        self.backward_reads = backward_reads
        self.parameters = list(parameters)
        # of a small vocabulary a tensor-parallel rank may have nothing
        self.exchanged = [parameter for parameter in parameters if parameter.padded_rows]
        self.gathering: PendingCollective | None = None
        self.gathered = False
        self.reducing: PendingCollective | None = None
        self.adds = self.last = False


class ReplicaExchange:
    """All exchange units of this rank, and the exchange of their weights and gradients with its
    replicas, at ZeRO level `sharding` (module docstring).

    A step: `note_backward` before each backward pass, `run_unit` in each forward,
    `wait_for_gradients` after the last backward, `send_updates` after the optimizer. Autograd's own
    gradients (of norms and biases) are moved into the units' gradients by a hook on each parameter.
    Without replicas (`is_live` false) nothing is sent.
    """

    def __init__(self, units: Sequence[ExchangeUnit], sharding: int, groups: PlanGroups) -> None:
        """Take this rank's units, in the order of the forward pass, and hook into all their
        parameters to move autograd's gradients. `is_live` is whether replicas exchange at all.
        """
        self.units, self.sharding, self.groups = list(units), sharding, groups
        self.is_live = groups.copies.is_live or groups.shards.is_live
        self.parameters = [parameter for unit in self.units for parameter in unit.parameters]
        self.by_id = {id(parameter.parameter): parameter for parameter in self.parameters}
        self.is_first = self.is_last = True
        self.reducing: ExchangeUnit | None = None
        self.pending: list[PendingCollective] = []
        for parameter in self.parameters:
            parameter.parameter.register_post_accumulate_grad_hook(self._accumulate_autograd)  # type: ignore[no-untyped-call]

    def make_gradients(self, masters: Sequence[Tensor]) -> None:
        """Allocate the gradients of all parameters of this rank; `masters` are the tensors that the
        optimizer updates, in the order of `parameters`, and get their rows as `grad`. Raises
        ValueError if the numbers differ.
        """
        for parameter, master in zip(self.parameters, masters, strict=True):
            parameter.make_gradients(master)

    def gradient(self, parameter: Tensor) -> Tensor:
        """Return the whole tensor to which the gradient of a parameter (a module's, found by
        identity) is added, allocated with zeros if it does not exist. Raises KeyError for a
        parameter of no unit.
        """
        return self.by_id[id(parameter)].whole_gradient()

    def _accumulate_autograd(self, parameter: Tensor) -> None:
        """Add a gradient that autograd made (of a norm or bias) to the parameter's own gradient
        tensor, and set `parameter.grad` to None (hook, called by torch).
        """
        if parameter.grad is not None:
            self.gradient(parameter).add_(parameter.grad)
            parameter.grad = None

    def note_backward(self, first: bool, last: bool) -> None:
        """Note before a backward pass whether it is that of the step's first and of its last
        micro-batch: the exchange of gradients depends on it.
        """
        self.is_first, self.is_last = first, last

    def run_unit(
        self, index: int, forward: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the forward pass of unit `index`, `forward(*inputs)`, and return its outputs. Its
        weights are gathered before it (sharding 3), and hooks in the autograd graph gather them
        before its backward pass and send its gradients to replicas after it. Without replicas it
        only calls `forward`.
        """
        if not self.is_live:
            return forward(*inputs)
        with self.gathered_weights(
            index, keep=index == len(self.units) - 1 and torch.is_grad_enabled()
        ):
            out = forward(*_call_in_backward(lambda: self.finish_backward(index), *inputs))
        return _call_in_backward(lambda: self._begin_backward(index), *out)

    @contextmanager
    def gathered_weights(self, index: int, keep: bool = False) -> Iterator[None]:
        """Have the weights of unit `index` whole inside the context, waiting for them, and start to
        gather those of the next unit. At sharding 3 they are dropped at the end, unless `keep`: its
        backward pass comes next.
        """
        if self.is_live:
            self._wait_for_weights(index, index + 1)
        yield
        if not keep:
            self._drop_weights(self.units[index])

    def _begin_backward(self, index: int) -> None:
        """Before the backward pass of unit `index`, have its weights, start to gather those of the
        unit before it, and finish an exchange of its own gradients that is still in flight (a stage
        of one unit).
        """
        # a stage of one unit: its gradients of the micro-batch before are on their way
        if self.reducing is self.units[index]:
            self._finish_last_reduction()
        self._wait_for_weights(index, index - 1)

    def _wait_for_weights(self, index: int, following: int) -> None:
        """Gather the weights of unit `index` if that is not under way (sharding 3), wait for them,
        and start to gather those of unit `following`, if it exists and will read them: a later unit
        always, an earlier one (in the backward pass) if its `backward_reads`. At sharding 1 and 2
        it waits for what `send_updates` began.
        """
        unit = self.units[index]
        self._start_gathering(unit)
        if unit.gathering is not None:
            unit.gathering.wait()
            unit.gathering = None
        if 0 <= following < len(self.units) and (
            following > index or self.units[following].backward_reads
        ):
            self._start_gathering(self.units[following])

    def _start_gathering(self, unit: ExchangeUnit) -> None:
        """Start to gather a unit's weights from the replicas that have its shards into new tensors,
        which become the parameters' data. Only at sharding 3, and only if that has not begun
        already.
        """
        if self.sharding < 3 or unit.gathered:
            return
        pairs = []
        for parameter in unit.parameters:
            whole = parameter.part.new_empty(parameter.padded_rows, *parameter.size[1:])
            parameter.parameter.data = whole[: parameter.size[0]]
            pairs += [(whole, parameter.part)] if parameter.padded_rows else []
        unit.gathering, unit.gathered = self.groups.shards.all_gather(pairs), True

    def _drop_weights(self, unit: ExchangeUnit) -> None:
        """Drop a unit's gathered weights at sharding 3: its parameters become empty. At other
        levels do nothing.
        """
        if self.sharding == 3:
            for parameter in unit.parameters:
                parameter.parameter.data = parameter.part.new_empty(0)
            unit.gathered = False

    def finish_backward(self, index: int) -> None:
        """After the backward pass of unit `index`, drop its weights (sharding 3) and start to
        exchange its gradients with replicas: by all-reduce at sharding 0, else by reduce-scatter;
        at 0 and 1 only in the step's last micro-batch.

        After a reduce-scatter has started, that of the unit whose backward pass came before is
        finished. Without replicas nothing is sent.
        """
        unit = self.units[index]
        self._drop_weights(unit)
        if not self.is_live or (self.sharding < 2 and not self.is_last):
            return
        if self.sharding == 0:
            self.pending.append(
                self.groups.copies.all_reduce(
                    [
                        parameter.gradient
                        for parameter in unit.exchanged
                        if parameter.gradient is not None
                    ]
                )
            )
            return
        unit.adds, unit.last = self.sharding > 1 and not self.is_first, self.is_last
        pairs = []
        for parameter in unit.exchanged:
            parameter.whole_gradient()  # in a micro-batch from which nothing was learned, of zeros
            whole: Any = parameter.gradient
            pairs.append(
                (
                    whole,
                    parameter.own_rows(whole)
                    if unit.adds or self.sharding == 1
                    else parameter.gradient_part,
                )
            )
        unit.reducing = self.groups.shards.reduce_scatter(pairs)
        self._finish_last_reduction()
        self.reducing = unit

    def _finish_reduction(self, unit: ExchangeUnit | None) -> None:
        """Wait for a unit's reduce-scatter; at sharding 2 and 3 add its result to earlier
        micro-batches' gradients and free the whole gradients; after the last micro-batch start to
        sum this rank's rows over copies (into `pending`). Does nothing for None, or if none is in
        flight.
        """
        if unit is None or unit.reducing is None:
            return
        unit.reducing.wait()
        unit.reducing = None
        for parameter in unit.parameters if self.sharding > 1 else ():
            if unit.adds and parameter.gradient is not None:
                parameter.gradient_part.add_(parameter.own_rows(parameter.gradient))
            parameter.gradient = None
        if unit.last and self.groups.copies.is_live:
            self.pending.append(
                self.groups.copies.all_reduce(
                    [parameter.gradient_part for parameter in unit.exchanged]
                )
            )

    def _finish_last_reduction(self) -> None:
        """Finish the reduce-scatter of the unit whose gradients were sent last (`self.reducing`,
        then None), if there is one.
        """
        unit, self.reducing = self.reducing, None
        self._finish_reduction(unit)

    def wait_for_gradients(self) -> None:
        """Wait until all gradients of the step are summed over replicas; all ranks call it.
        Gradients of parameters that all tensor-parallel ranks hold (norms) are then also summed
        over that group, whose ranks each saw a part of the tokens.
        """
        self._finish_last_reduction()
        for collective in self.pending:
            collective.wait()
        self.pending = []
        if self.groups.tensor.is_live:  # norms saw a part of the tokens each
            self.groups.tensor.all_reduce(
                [parameter.gradient_part for parameter in self.parameters if parameter.shared]
            ).wait()

    def send_updates(self) -> None:
        """After an optimizer step, start to gather the changed rows where ranks hold whole weights
        (sharding 1 and 2); the next forward pass waits for them. Parameters' version counters are
        increased at every level, so that cached copies such as fp8 weights are made anew.
        """
        torch.autograd.graph.increment_version(
            [parameter.parameter for parameter in self.parameters]
        )
        if self.sharding in (1, 2) and self.groups.shards.is_live:
            for unit in self.units:
                pairs = [
                    (parameter.whole, parameter.part)
                    for parameter in unit.exchanged
                    if parameter.whole is not None
                ]
                unit.gathering = self.groups.shards.all_gather(pairs)

    def zero_gradients(self) -> None:
        """Zero the whole gradients of all parameters in place at sharding 0 and 1; at 2 and 3 do
        nothing, for the next step overwrites them.
        """
        if self.sharding < 2:
            torch._foreach_zero_(
                [
                    parameter.gradient
                    for parameter in self.parameters
                    if parameter.gradient is not None
                ]
            )


class _CallInBackward(torch.autograd.Function):
    """An autograd function that returns views of the same tensors; `call`, without arguments, is
    called once in the backward pass when their gradients pass, which are not changed.
    """

    @staticmethod
    def forward(context: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views of the tensors and remember `call`."""
        context.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Call `call`, then return the gradients unchanged, after a None for `call` itself."""
        context.call()
        return None, *grads


def _call_in_backward(call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of the tensors whose backward pass calls `call` first, without arguments."""
    out: tuple[Tensor, ...] = _CallInBackward.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return out
