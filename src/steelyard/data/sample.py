"""A seeded sample of a dataset."""

import random

from steelyard.errors import RequestError


def chosen(total: int, sample: int | None, seed: int, noun: str = "question", pool: list[int] | None = None) -> list[int]:
    """Which items are asked, in the order of the set: all, or a seeded sample; of those in `pool` alone, where one is given."""
    every = list(range(total)) if pool is None else pool
    if sample is None:
        return every
    if not 1 <= sample <= len(every):
        whose = "the data has" if pool is None else "of those chosen there are"
        raise RequestError(f"--sample {sample}: {whose} {len(every)} {noun}s; allowed: 1 to {len(every)}")
    picked = sorted(random.Random(f"sample:{seed}").sample(range(len(every)), sample))
    return [every[i] for i in picked]
