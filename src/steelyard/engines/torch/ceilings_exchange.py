"""Communication ceilings of `steelyard spec`: copies to the next device, and collectives with their
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
    """Yield a row for copies to the next device and one for each collective and message size. All
    ranks run them together. With one rank every row is unavailable; `lacks` may give a reason
    against device-to-device copies (key `peers`).
    """
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
    """Prepare a copy of `size_bytes` from this rank's device to the next one of the host (the last
    one copies to device 0). All ranks copy at once.
    """
    here = framework.device.torch_device
    there = torch.device(here.type, ((here.index or 0) + 1) % framework.world)
    source = torch.arange(size // 4, dtype=torch.int32, device=here)
    target = torch.zeros(size // 4, dtype=torch.int32, device=there)
    return copy(source, target, size, True)


def copy(source: Tensor, target: Tensor, size_bytes: int, non_blocking: bool) -> Made:
    """Return a copy of `source` to `target` that is ready to be timed; its check copies once and
    compares every number.
    """

    def check() -> tuple[float, float]:
        """Copy once and return (0 if all numbers are equal else 1, bound 0)."""
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
    """Prepare a collective on fp32 messages of about `size_bytes`, rounded down to a multiple of
    the ranks.

    Its amount is the bytes on the bus, as nccl-tests counts them; rank r sends r + 1 in all
    numbers, so that the result is known.
    """
    world = framework.world
    place, numbers = framework.device.torch_device, size // 4 // world * world
    mine = float(dist.get_rank() + 1)
    few, many = numbers // world, numbers
    sent = torch.full((few if name == "all_gather" else many,), mine, device=place)
    got = torch.empty(few if name == "reduce_scatter" else many, device=place)

    def work() -> None:
        """Run the collective once; an all-reduce is in place."""
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
        """Run the collective once and return (largest difference from the expected numbers, bound
        0). After an all-reduce the tensor is zeroed, so that repeated calls do not grow it.
        """
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
