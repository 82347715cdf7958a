"""Communication ceilings of `steelyard spec`: copies to the next device, and collectives with their
bus bandwidth.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.engine.ceiling_rows import CallBudget, CeilingRow, PreparedCeiling
from steelyard.engines.torch.framework import TorchFramework
from steelyard.plan.ceiling_shapes import (
    COLLECTIVE_BYTES,
    MIB,
    QUICK_COLLECTIVE_BYTES,
    Collective,
    get_bus_factor,
)
from steelyard.words import Message

ONE_DEVICE = Message("ceiling.one_device")
_dist: Any = dist  # untyped in parts, which parts depends on the version


def exchange_rows(
    framework: TorchFramework, lacks: Mapping[str, str], quick: bool
) -> Iterator[CeilingRow]:
    """Yield rows of `steelyard spec`: one for copies to the next device, and one for each
    collective and message size (1 MiB to 1 GiB, `quick`: 1 and 16 MiB). All ranks run them
    together. With one rank every row is unavailable; `lacks` may give a reason against
    device-to-device copies (key `peers`).
    """
    reason = ONE_DEVICE if framework.world == 1 else None
    sizes = QUICK_COLLECTIVE_BYTES if quick else COLLECTIVE_BYTES
    prepare_peer_copy = partial(_prepare_peer_copy, framework, sizes[-1])
    name = "device to the next device, all at once"
    yield CeilingRow(
        "copy", name, None, "B/s", prepare_peer_copy, reason or lacks.get("peers"), all_ranks=True
    )
    for collective in EXPECTED:
        for size in sizes:
            prepare = partial(_prepare_collective, framework, collective, size)
            yield CeilingRow(
                "collective",
                f"{collective} {size // MIB} MiB",
                None,
                "B/s",
                prepare,
                reason,
                kind=collective,
                all_ranks=True,
            )


def _prepare_peer_copy(
    framework: TorchFramework, size_bytes: int, budget: CallBudget
) -> PreparedCeiling:
    """Prepare a copy of `size_bytes` from this rank's device to the next one of the host (the last
    one copies to device 0), on which the target is allocated. All ranks copy at once. `budget` is
    ignored.
    """
    own_device = framework.device.torch_device
    next_device = torch.device(own_device.type, ((own_device.index or 0) + 1) % framework.world)
    source = torch.arange(size_bytes // 4, dtype=torch.int32, device=own_device)
    target = torch.zeros(size_bytes // 4, dtype=torch.int32, device=next_device)
    return prepare_copy(source, target, size_bytes, True)


def prepare_copy(
    source: Tensor, target: Tensor, size_bytes: int, non_blocking: bool
) -> PreparedCeiling:
    """Return a copy of `source` to `target`, of `size_bytes`, that is ready to be timed; with
    `non_blocking` the host does not wait for it. Its check copies once and compares every number on
    the host: error 0 or 1, bound 0.
    """

    def check() -> tuple[float, float]:
        """Copy `source` to `target` and return (0.0 if all numbers are equal else 1.0, 0.0)."""
        target.copy_(source)
        return (0.0 if torch.equal(target.cpu(), source.cpu()) else 1.0), 0.0

    return PreparedCeiling(
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


def _prepare_collective(
    framework: TorchFramework, name: Collective, size_bytes: int, budget: CallBudget
) -> PreparedCeiling:
    """Prepare a collective on fp32 messages of about `size_bytes`, rounded down to a multiple of
    the ranks; `budget` is ignored.

    Its amount is the bytes on the bus, as nccl-tests counts them; rank r sends r + 1 in all
    numbers, so that its check knows the result. All ranks must call both together.
    """
    world = framework.world
    device, numbers = framework.device.torch_device, size_bytes // 4 // world * world
    own_value = float(dist.get_rank() + 1)
    part_numbers, whole_numbers = numbers // world, numbers
    sent = torch.full(
        (part_numbers if name == "all_gather" else whole_numbers,), own_value, device=device
    )
    received = torch.empty(
        part_numbers if name == "reduce_scatter" else whole_numbers, device=device
    )

    def call() -> None:
        """Run the collective `name` once, from `sent` to `received`; an all-reduce is in place in
        `sent`.
        """
        # in place: after the check all numbers are 0, or they would grow with every call
        if name == "all_reduce":
            _dist.all_reduce(sent)
        elif name == "all_gather":
            _dist.all_gather_into_tensor(received, sent)
        elif name == "reduce_scatter":
            _dist.reduce_scatter_tensor(received, sent)
        else:
            _dist.all_to_all_single(received, sent)

    def check() -> tuple[float, float]:
        """Run the collective once and return (largest difference from the expected numbers, bound
        0). After an all-reduce the tensor is zeroed, so that repeated calls do not grow it; a
        second check would find zeros.
        """
        call()
        out = sent if name == "all_reduce" else received
        parts = out.view(world, -1) if out.numel() == whole_numbers else out.view(1, -1)
        expected = torch.tensor(
            [EXPECTED[name](part, world) for part in range(len(parts))], device=device
        )
        wrong = float((parts - expected[:, None]).abs().max())
        if name == "all_reduce":
            sent.zero_()
        return wrong, 0.0

    return PreparedCeiling(
        call,
        4 * numbers * get_bus_factor(name, world),
        check,
        {"bytes": 4 * numbers, "ranks": world},
    )
