"""One rank of four: leave all-gathers pending while an all-reduce is waited for, many times."""

import torch
import torch.distributed as dist

from steelyard.engines.torch import collectives
from steelyard.plan.degrees import Plan

SIZES = ((64,), (96, 64), (64, 32), (64,), (160, 64), (64, 80))
ROUNDS = 150


def main() -> None:
    """Check the result of every round and print that all are right."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = Plan(nodes=1, devices=world, tp=1, pp=1, dp=world, launcher="torchrun")
    group = collectives.create_plan_groups(
        torch.device("cpu"), "gloo", plan, world, 2, False
    ).shards
    for number in range(ROUNDS):
        units = [[torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(6)]
        gathering = []
        for unit in units:
            pairs = [(whole, whole.chunk(world)[rank].fill_(number + rank)) for whole in unit]
            gathering.append(group.all_gather(pairs))
        total = group.reduce_now(torch.ones((), dtype=torch.float64))
        assert float(total) == world
        for pending in gathering:
            pending.wait()
        for whole in (whole for unit in units for whole in unit):
            assert [float(part.mean()) for part in whole.chunk(world)] == [
                number + source_rank for source_rank in range(world)
            ]
    print(f"{ROUNDS} rounds are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
