"""A seeded sample of a dataset."""

import random

from steelyard.errors import RequestError


def chosen(total: int, sample: int | None, seed: int, noun: str = "question") -> list[int]:
    """Which items are asked: all, or a seeded sample in the order of the set."""
    if sample is None:
        return list(range(total))
    if not 1 <= sample <= total:
        raise RequestError(f"--sample {sample}: the data has {total} {noun}s; allowed: 1 to {total}")
    return sorted(random.Random(f"sample:{seed}").sample(range(total), sample))
