"""Draw from a data set with a seed: a sample of its items, and its order in every epoch."""

import random
from functools import lru_cache

from steelyard.errors import RequestError


def choose_items(
    total: int, sample: int | None, seed: int, noun: str = "question", pool: list[int] | None = None
) -> list[int]:
    """Return the indices of the items to run, in the order of the set: all `total`, or a seeded
    random sample of `sample` items.

    If `pool` is given (sorted indices), only these are chosen from; without a sample it is returned
    itself. `noun` names an item in the message. Raises RequestError if `sample` is below 1 or more
    than there are.
    """
    items = list(range(total)) if pool is None else pool
    if sample is None:
        return items
    if not 1 <= sample <= len(items):
        subject = "the data has" if pool is None else "of those chosen there are"
        raise RequestError(
            f"--sample {sample}: {subject} {len(items)} {noun}s; allowed: 1 to {len(items)}"
        )
    drawn = sorted(random.Random(f"sample:{seed}").sample(range(len(items)), sample))
    return [items[i] for i in drawn]


def draw_step_batch(step: int, batch_size: int, count: int, seed: str) -> list[int]:
    """Return the `batch_size` item indices in the batch of a step (counted from 0) of an endless
    sequence of epochs. Each epoch is its own permutation of all `count` items, drawn from `seed`
    and its number; a batch may span several epochs.
    """
    positions = (
        divmod(position, count) for position in range(step * batch_size, (step + 1) * batch_size)
    )
    return [draw_permutation(count, f"{seed}:{epoch}")[i] for epoch, i in positions]


@lru_cache(maxsize=4)
def draw_permutation(count: int, seed: str) -> tuple[int, ...]:
    """Return the numbers 0 to count-1 in an order that `seed` determines. The last four results are
    cached.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
