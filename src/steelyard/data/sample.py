"""Draw from a data set with a seed: a sample of its items, and its order in every epoch."""

import random
from functools import lru_cache

from steelyard.errors import RequestError


def chosen(
    total: int, sample: int | None, seed: int, noun: str = "question", pool: list[int] | None = None
) -> list[int]:
    """Return the indices of the items to run, in ascending order of the set: all, or a seeded
    random sample of `sample` items.

    If `pool` is given, only these indices are chosen from. `noun` names an item in the message.
    Raises RequestError if `sample` is below 1 or more than there are.
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
    """Return the item indices in the batch of a step (counted from 0), of an endless sequence of
    epochs. Each epoch is its own seeded permutation of all `count` items; a batch may span two
    epochs.
    """
    places = (divmod(place, count) for place in range(step * batch, (step + 1) * batch))
    return [permutation(count, f"{seed}:{epoch}")[i] for epoch, i in places]


@lru_cache(maxsize=4)
def permutation(count: int, seed: str) -> tuple[int, ...]:
    """Return the numbers 0 to count-1, shuffled with `seed`. The last four results are cached."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
