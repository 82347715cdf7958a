"""Read a server's counters from its /metrics, in Prometheus's text format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.engine.server_rows import MetricNames

# a line such as `name{label="x"} 12.0`, with an optional time behind it
SAMPLE_LINE = re.compile(
    r"^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(?P<value>[0-9.eE+-]+)(?:\s+-?\d+)?$"
)


@dataclass(frozen=True)
class ServerCounters:
    """A server's counters at one time: prompt tokens taken from its cache so far
    (`cached_tokens`), requests that wait (`queue`), `preemptions` so far; None where it has none.
    """

    cached_tokens: int | None = None
    queue: int | None = None
    preemptions: int | None = None


def parse_counters(text: str, names: Sequence[MetricNames]) -> ServerCounters:
    """Return the counters in a page of /metrics, by the first of `names` that it has any of; values
    of one name with several labels are added up.
    """
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE_LINE.match(line)
        if match is not None:
            try:
                value = float(match["value"])
            except ValueError:
                continue
            if 0 <= value < 1e15:
                sums[match["name"]] = sums.get(match["name"], 0.0) + value
    for row in names:
        found = [sums.get(name) for name in (row.cached_tokens, row.queue, row.preemptions)]
        if any(value is not None for value in found):
            return ServerCounters(*(None if value is None else int(value) for value in found))
    return ServerCounters()
