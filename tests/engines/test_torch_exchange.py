"""When replicas exchange gradients and weights: collectives of one unit overlap with the
computation of another.

One rank issues the collectives of several, and their order is logged.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.train_plans import build_engine
from steelyard.engines.torch import collectives
from steelyard.engines.torch.shards import ReplicaExchange, ShardedParameter
from steelyard.models import tensors
from steelyard.models.llama_fused import AccumulatingLinears
from steelyard.models.llama_placements import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

UNITS = ("embed", "layer 0", "layer 1", "head")


class LoggedPending:
    """A pending collective that logs when it is waited for."""

    def __init__(self, log: list[str], name: str, pending: Any) -> None:
        self.log, self.name, self.pending = log, name, pending

    def wait(self) -> None:
        """Log the wait, then wait."""
        self.log.append(f"wait {self.name}")
        self.pending.wait()


def unit_name_of(replicas: ReplicaExchange, tensor: Tensor) -> str | None:
    """Return the name of the unit that a gradient, weight or shard of either belongs to; None for
    other tensors.
    """
    for unit, name in zip(replicas.units, UNITS, strict=True):
        if any(
            tensor is candidate
            for sharded in unit.parameters
            for candidate in (sharded.gradient, sharded.whole, sharded.part, sharded.gradient_part)
        ):
            return name
    return None


def exchange_events(sharding: int, monkeypatch: pytest.MonkeyPatch, micros: int = 1) -> list[str]:
    """Return the events of one step in order: collectives issued and waited for, and units whose
    weights matmuls read and whose gradients they add to.

    Repeated events in a row are one. Patches the process group, the matmuls and the dtype of fp32
    for the test.
    """
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)
    settings = {"tune.distributed": "true", "tune.sharding": sharding, "question.model.layers": 2}
    engine = build_engine({"settings": settings | {"tune.micro_batch": 16 // micros}}, 0, 1)
    engine.prepare("train", lambda part: nullcontext())
    log: list[str] = []
    model = engine.trainer.model
    replicas = model.exchange
    names = {
        id(sharded.parameter): name
        for unit, name in zip(replicas.units, UNITS, strict=True)
        for sharded in unit.parameters
    }

    def log_collective(kind: str) -> Any:
        """Return a replacement of a collective that logs calls on tensors of a unit."""
        original = getattr(collectives.PlanGroup, kind)

        def call(group: collectives.PlanGroup, operands: Sequence[Any], *options: Any) -> Any:
            first = operands[0] if isinstance(operands[0], tuple) else operands[:1]
            unit_name = next(
                filter(None, (unit_name_of(replicas, tensor) for tensor in first)), None
            )
            pending = original(group, operands, *options)
            if unit_name is None:
                return pending
            log.append(f"{kind} {unit_name}")
            return LoggedPending(log, f"{kind} {unit_name}", pending)

        return call

    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        monkeypatch.setattr(collectives.PlanGroup, kind, log_collective(kind))
    gradient, linear = replicas.gradient, AccumulatingLinears.linear

    def read_gradient(parameter: Tensor) -> Tensor:
        log.append(f"gradient {names[id(parameter)]}")
        return gradient(parameter)

    def read_weight(self: AccumulatingLinears, x: Tensor, layer: Any) -> Tensor:
        log.append(f"read {names[id(layer.weight)]}")
        return linear(self, x, layer)

    model.linears.gradient = read_gradient
    monkeypatch.setattr(AccumulatingLinears, "linear", read_weight)
    packs = [engine.batches.pack(keys) for keys in engine._split_step(0)]
    engine.trainer.compute_gradients(
        [engine.batches.to_device(pack) for pack in packs], engine.trainer.sum_over_replicas(100)
    )
    log.append("update")
    engine.trainer.update(1e-3)
    # several matmuls of one unit count as one event
    return [event for i, event in enumerate(log) if i == 0 or event != log[i - 1]]


FORWARD = ["read layer 0", "read layer 1", "read head"]


def test_gradients_are_reduced_while_the_previous_unit_is_computed(monkeypatch):
    step = [*FORWARD]
    for name in reversed(UNITS):
        step += [*([f"gradient {name}"] if name != "embed" else []), f"all_reduce {name}"]
    waits = [f"wait all_reduce {name}" for name in reversed(UNITS)]
    assert exchange_events(0, monkeypatch) == [*step, *waits, "update"]


def reduce_scatter_backward(last: str | None = None) -> list[str]:
    """Return the events of a backward pass that reduce-scatters gradients; `last` is the unit whose
    reduce-scatter the previous micro-batch left pending.
    """
    out = []
    for name in reversed(UNITS):
        out += [f"gradient {name}"] if name != "embed" else []
        out += [f"reduce_scatter {name}", *([f"wait reduce_scatter {last}"] if last else [])]
        last = name
    return out


ALL_GATHERS = [f"all_gather {name}" for name in UNITS]


def test_sharded_optimizer_states_gather_weights_after_the_update(monkeypatch):
    step_events = exchange_events(1, monkeypatch, micros=2)
    first_backward = ["gradient head", "gradient layer 1", "gradient layer 0"]
    assert step_events == [
        *FORWARD,
        *first_backward,
        *FORWARD,
        *reduce_scatter_backward(),
        "wait reduce_scatter embed",
        "update",
        *ALL_GATHERS,
    ]


def test_sharded_gradients_are_reduced_after_every_micro_batch(monkeypatch):
    step_events = exchange_events(2, monkeypatch, micros=2)
    micro_batches = [
        *FORWARD,
        *reduce_scatter_backward(),
        *FORWARD,
        *reduce_scatter_backward("embed"),
    ]
    assert step_events == [*micro_batches, "wait reduce_scatter embed", "update", *ALL_GATHERS]


def test_sharded_weights_are_gathered_before_they_are_read(monkeypatch):
    forward = ["all_gather embed", "wait all_gather embed", "all_gather layer 0"]
    for name, following in (("layer 0", "layer 1"), ("layer 1", "head"), ("head", None)):
        forward += [
            f"wait all_gather {name}",
            *([f"all_gather {following}"] if following else []),
            f"read {name}",
        ]
    backward = ["all_gather layer 1", "gradient head", "reduce_scatter head"]
    backward += ["wait all_gather layer 1", "all_gather layer 0", "gradient layer 1"]
    backward += [
        "reduce_scatter layer 1",
        "wait reduce_scatter head",
        "wait all_gather layer 0",
        "gradient layer 0",
    ]
    backward += [
        "reduce_scatter layer 0",
        "wait reduce_scatter layer 1",
        "reduce_scatter embed",
        "wait reduce_scatter layer 0",
    ]
    assert exchange_events(3, monkeypatch) == [
        *forward,
        *backward,
        "wait reduce_scatter embed",
        "update",
    ]


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (5, [2, 2, 1, 0]), (2, [1, 1, 0, 0])]
)
@pytest.mark.parametrize("sharding", [1, 3])
def test_rows_are_sharded_like_torch_chunk(rows, sizes, sharding):
    values = torch.arange(rows * 3.0).view(rows, 3)
    sharded = [
        ShardedParameter("one", values.clone(), torch.bfloat16, sharding, Shard(i, 4), False)
        for i in range(4)
    ]
    assert [parameter.rows for parameter in sharded] == sizes
    assert torch.equal(torch.cat([parameter.master for parameter in sharded]), values)
    chunks = values.chunk(4)
    for i, parameter in enumerate(sharded):
        assert torch.equal(
            parameter.shard, (chunks[i] if i < len(chunks) else values[:0]).bfloat16()
        )
        assert len(parameter.part) == -(-rows // 4)


def test_master_weights_share_memory_with_parameters_of_the_same_dtype():
    values = torch.ones(6, 2)
    unsharded = ShardedParameter("one", values, torch.float32, 0, Shard(), False)
    assert unsharded.master.data_ptr() == unsharded.parameter.data_ptr() == values.data_ptr()
    sharded = ShardedParameter("one", values, torch.float32, 1, Shard(1, 3), False)
    assert sharded.master.data_ptr() == sharded.parameter[2:].data_ptr()
    unsharded.make_gradients(unsharded.master)
    assert unsharded.master.grad.data_ptr() == unsharded.whole_gradient().data_ptr()
