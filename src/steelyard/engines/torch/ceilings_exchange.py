"""What ranks exchange, for `steelyard spec`: copies to the next device, and collectives with their
bus bandwidth.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engine.bench import Budgeted, Made, Row
from steelyard.engines.torch.framework import TorchFramework
from steelyard.plan.ceilings import (
    COLLECTIVE_BYTES,
    MIB,
    QUICK_COLLECTIVE_BYTES,
    Collective,
    bus_factor,
)

ALONE = "one device has nobody to exchange with; try --devices 2"
_dist: Any = dist  # untyped in parts, which parts depends on the version


def rows(framework: TorchFramework, lacks: Mapping[str, str], quick: bool) -> Iterator[Row]:
    alone = ALONE if framework.world == 1 else None
    sizes = QUICK_COLLECTIVE_BYTES if quick else COLLECTIVE_BYTES
    peer = partial(_peer, framework, sizes[-1])
    name = "device to the next device, all at once"
    yield Row("copy", name, None, "B/s", peer, alone or lacks.get("peers"), together=True)
    for one in EXPECTED:
        for size in sizes:
            make = partial(_collective, framework, one, size)
            yield Row(
                "collective",
                f"{one} {size // MIB} MiB",
                None,
                "B/s",
                make,
                alone,
                like=one,
                together=True,
            )


def _peer(framework: TorchFramework, size: int, budget: Budgeted) -> Made:
    here = framework.device.torch_device
    there = torch.device(here.type, ((here.index or 0) + 1) % framework.world)
    source = torch.arange(size // 4, dtype=torch.int32, device=here)
    target = torch.zeros(size // 4, dtype=torch.int32, device=there)
    return copy(source, target, size, True)


def copy(source: Tensor, target: Tensor, size_bytes: int, non_blocking: bool) -> Made:
    """Return a copy made ready; its check compares every number."""

    def check() -> tuple[float, float]:
        target.copy_(source)
        return (0.0 if torch.equal(target.cpu(), source.cpu()) else 1.0), 0.0

    return Made(
        lambda: target.copy_(source, non_blocking=non_blocking),
        size_bytes,
        check,
        {"bytes": size_bytes},
    )


# What each number of a rank's result must be, where rank r brings r + 1 in all its numbers: by the
# part of the result.
EXPECTED: dict[Collective, Callable[[int, int], float]] = {
    "all_reduce": lambda part, world: world * (world + 1) / 2,
    "all_gather": lambda part, world: part + 1,
    "reduce_scatter": lambda part, world: world * (world + 1) / 2,
    "all_to_all": lambda part, world: part + 1,
}


def _collective(framework: TorchFramework, name: Collective, size: int, budget: Budgeted) -> Made:
    world = framework.world
    place, numbers = framework.device.torch_device, size // 4 // world * world
    mine = float(dist.get_rank() + 1)
    few, many = numbers // world, numbers
    sent = torch.full((few if name == "all_gather" else many,), mine, device=place)
    got = torch.empty(few if name == "reduce_scatter" else many, device=place)

    def work() -> None:
        # in place: after the check all numbers are 0, or they would grow with every call
        if name == "all_reduce":
            _dist.all_reduce(sent)
        elif name == "all_gather":
            _dist.all_gather_into_tensor(got, sent)
        elif name == "reduce_scatter":
            _dist.reduce_scatter_tensor(got, sent)
        else:
            _dist.all_to_all_single(got, sent)

    def check() -> tuple[float, float]:
        work()
        out = sent if name == "all_reduce" else got
        parts = out.view(world, -1) if out.numel() == many else out.view(1, -1)
        right = torch.tensor(
            [EXPECTED[name](part, world) for part in range(len(parts))], device=place
        )
        wrong = float((parts - right[:, None]).abs().max())
        if name == "all_reduce":
            sent.zero_()
        return wrong, 0.0

    return Made(
        work, 4 * numbers * bus_factor(name, world), check, {"bytes": 4 * numbers, "ranks": world}
    )
