"""Seeded draws from a dataset: a sample of it, and its order in every epoch."""

import random
from functools import lru_cache

from steelyard.errors import RequestError


def chosen(
    total: int, sample: int | None, seed: int, noun: str = "question", pool: list[int] | None = None
) -> list[int]:
    """Which items are asked, in the order of the set: all, or a seeded sample; of those in `pool`
    alone, where one is given.
    """
    every = list(range(total)) if pool is None else pool
    if sample is None:
        return every
    if not 1 <= sample <= len(every):
        whose = "the data has" if pool is None else "of those chosen there are"
        raise RequestError(
            f"--sample {sample}: {whose} {len(every)} {noun}s; allowed: 1 to {len(every)}"
        )
    picked = sorted(random.Random(f"sample:{seed}").sample(range(len(every)), sample))
    return [every[i] for i in picked]


def batch_of_step(step: int, batch: int, count: int, seed: str) -> list[int]:
    """Return the numbers of the samples in the batch of a step, counted from 0, of an endless
    sequence of epochs. Each epoch is a permutation of its own of all `count` samples."""
    places = (divmod(place, count) for place in range(step * batch, (step + 1) * batch))
    return [permutation(count, f"{seed}:{epoch}")[i] for epoch, i in places]


@lru_cache(maxsize=4)
def permutation(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
