"""Memory by pipeline stage, as FlagPerf's published pages write it."""

from steelyard.metrics.rates import rank_mem
from steelyard.metrics.spans import headline, windows
from steelyard.plan import degrees
from steelyard.record.record import Record
from steelyard.report.numbers import UNKNOWN


def stages(record: Record) -> str:
    """GiB of the fullest rank of each stage times the ranks of the stage: 46.80*2 + 38.93*2."""
    name = headline(record)
    by_stage: dict[int, list[float | None]] = {}
    for rank in sorted({window.rank for window in windows(record, name)} if name else ()):
        by_stage.setdefault(degrees.place(record.plan, rank).pp, []).append(rank_mem(record, rank))
    if sum(map(len, by_stage.values())) < 2:
        return UNKNOWN
    return " + ".join(f"{_fullest(sizes)}*{len(sizes)}" for _, sizes in sorted(by_stage.items()))


def _fullest(sizes: list[float | None]) -> str:
    known = [size for size in sizes if size is not None]
    return f"{max(known):.2f}" if known else UNKNOWN
