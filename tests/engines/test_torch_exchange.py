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

from ranks.train_plans import build
from steelyard.engines.torch import collectives
from steelyard.engines.torch.shards import ReplicaExchange, ShardedParameter
from steelyard.models import tensors
from steelyard.models.llama_fused import AccumulatingLinears
from steelyard.models.llama_placements import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

UNITS = ("embed", "layer 0", "layer 1", "head")


class Waited:
    """A pending collective that logs when it is waited for."""

    def __init__(self, log: list[str], name: str, pending: Any) -> None:
        self.log, self.name, self.pending = log, name, pending

    def wait(self) -> None:
        """Log the wait, then wait."""
        self.log.append(f"wait {self.name}")
        self.pending.wait()


def unit_of(replicas: ReplicaExchange, one: Tensor) -> str | None:
    """Return the name of the unit that a gradient, weight or shard of either belongs to; None for
    other tensors.
    """
    for unit, name in zip(replicas.units, UNITS, strict=True):
        if any(
            one is mine
            for held in unit.parameters
            for mine in (held.gradient, held.whole, held.part, held.gradient_part)
        ):
            return name
    return None


def events(sharding: int, monkeypatch: pytest.MonkeyPatch, micros: int = 1) -> list[str]:
    """Return the events of one step in order: collectives issued and waited for, and units whose
    weights matmuls read and whose gradients they add to.

    Repeated events in a row are one. Patches the process group, the matmuls and the dtype of fp32
    for the test.
    """
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)
    settings = {"tune.distributed": "true", "tune.sharding": sharding, "question.model.layers": 2}
    engine = build({"settings": settings | {"tune.micro_batch": 16 // micros}}, 0, 1)
    engine.prepare("train", lambda part: nullcontext())
    log: list[str] = []
    model = engine.trainer.model
    replicas = model.exchange
    names = {
        id(held.parameter): name
        for unit, name in zip(replicas.units, UNITS, strict=True)
        for held in unit.parameters
    }

    def logged(kind: str) -> Any:
        """Return a replacement of a collective that logs calls on tensors of a unit."""
        plain = getattr(collectives.PlanGroup, kind)

        def call(group: collectives.PlanGroup, given: Sequence[Any], *rest: Any) -> Any:
            first = given[0] if isinstance(given[0], tuple) else given[:1]
            found = next(filter(None, (unit_of(replicas, one) for one in first)), None)
            pending = plain(group, given, *rest)
            if found is None:
                return pending
            log.append(f"{kind} {found}")
            return Waited(log, f"{kind} {found}", pending)

        return call

    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        monkeypatch.setattr(collectives.PlanGroup, kind, logged(kind))
    gradient, linear = replicas.gradient, AccumulatingLinears.linear

    def asked(parameter: Tensor) -> Tensor:
        log.append(f"gradient {names[id(parameter)]}")
        return gradient(parameter)

    def read(self: AccumulatingLinears, x: Tensor, layer: Any) -> Tensor:
        log.append(f"read {names[id(layer.weight)]}")
        return linear(self, x, layer)

    model.linears.gradient = asked
    monkeypatch.setattr(AccumulatingLinears, "linear", read)
    packs = [engine.batches.pack(keys) for keys in engine._split_step(0)]
    engine.trainer.compute_gradients(
        [engine.batches.to_device(pack) for pack in packs], engine.trainer.sum_over_replicas(100)
    )
    log.append("update")
    engine.trainer.update(1e-3)
    # several matmuls of one unit count as one event
    return [one for i, one in enumerate(log) if i == 0 or one != log[i - 1]]


FORWARD = ["read layer 0", "read layer 1", "read head"]


def test_gradients_are_summed_while_the_unit_before_is_computed(monkeypatch):
    step = [*FORWARD]
    for name in reversed(UNITS):
        step += [*([f"gradient {name}"] if name != "embed" else []), f"all_reduce {name}"]
    waits = [f"wait all_reduce {name}" for name in reversed(UNITS)]
    assert events(0, monkeypatch) == [*step, *waits, "update"]


def reduced(last: str | None = None) -> list[str]:
    """Return the events of a backward pass that reduce-scatters gradients; `last` is the unit whose
    reduce-scatter the previous micro-batch left pending.
    """
    out = []
    for name in reversed(UNITS):
        out += [f"gradient {name}"] if name != "embed" else []
        out += [f"reduce_scatter {name}", *([f"wait reduce_scatter {last}"] if last else [])]
        last = name
    return out


GATHERED = [f"all_gather {name}" for name in UNITS]


def test_divided_states_are_gathered_after_the_update_and_waited_for_by_the_next_forward(
    monkeypatch,
):
    found = events(1, monkeypatch, micros=2)
    once = ["gradient head", "gradient layer 1", "gradient layer 0"]
    assert found == [
        *FORWARD,
        *once,
        *FORWARD,
        *reduced(),
        "wait reduce_scatter embed",
        "update",
        *GATHERED,
    ]


def test_divided_gradients_are_exchanged_after_every_micro_batch(monkeypatch):
    found = events(2, monkeypatch, micros=2)
    both = [*FORWARD, *reduced(), *FORWARD, *reduced("embed")]
    assert found == [*both, "wait reduce_scatter embed", "update", *GATHERED]


def test_divided_weights_are_on_their_way_before_they_are_read(monkeypatch):
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
    assert events(3, monkeypatch) == [*forward, *backward, "wait reduce_scatter embed", "update"]


@pytest.mark.parametrize(
    ("rows", "sizes"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (5, [2, 2, 1, 0]), (2, [1, 1, 0, 0])]
)
@pytest.mark.parametrize("sharding", [1, 3])
def test_rows_are_divided_as_torch_divides_them(rows, sizes, sharding):
    values = torch.arange(rows * 3.0).view(rows, 3)
    held = [
        ShardedParameter("one", values.clone(), torch.bfloat16, sharding, Shard(i, 4), False)
        for i in range(4)
    ]
    assert [one.rows for one in held] == sizes
    assert torch.equal(torch.cat([one.master for one in held]), values)
    chunks = values.chunk(4)
    for i, one in enumerate(held):
        assert torch.equal(one.shard, (chunks[i] if i < len(chunks) else values[:0]).bfloat16())
        assert len(one.part) == -(-rows // 4)


def test_what_is_computed_with_is_what_is_kept_where_types_agree():
    values = torch.ones(6, 2)
    held = ShardedParameter("one", values, torch.float32, 0, Shard(), False)
    assert held.master.data_ptr() == held.parameter.data_ptr() == values.data_ptr()
    divided = ShardedParameter("one", values, torch.float32, 1, Shard(1, 3), False)
    assert divided.master.data_ptr() == divided.parameter[2:].data_ptr()
    held.make_gradients(held.master)
    assert held.master.grad.data_ptr() == held.whole_gradient().data_ptr()
