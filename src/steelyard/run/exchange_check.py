"""Test that ranks can exchange before anything depends on it."""

from steelyard.engine.framework import Framework
from steelyard.errors import ExchangeError
from steelyard.run.measure import time_calls

ALL_REDUCES = 3


def check_all_reduce(framework: Framework, world_size: int) -> float:
    """Run a small all-reduce over all ranks: one call that is not timed, then `ALL_REDUCES` timed
    ones. Return tensor bytes per second of a call; raise ExchangeError if the sum is wrong. A
    collective call.
    """
    work, size_bytes, check = framework.prepare_all_reduce()
    time_calls(work, framework, 1)  # the first call sets up connections
    time_s = time_calls(work, framework, ALL_REDUCES) / ALL_REDUCES
    problem = check()
    if problem is not None:
        raise ExchangeError(f"an all-reduce over {world_size} ranks is wrong: {problem}")
    return size_bytes / time_s
