"""The private folder where the workers of a host and their agent meet: the names in it, and how ranks find each other."""

from pathlib import Path

from steelyard.schema import Frozen

SPEC, PROGRESS, STORE = "spec.json", "progress.json", "store"
RANK_BYTES, PROGRESS_BYTES = 100 << 20, 64 << 10  # the most that is read of one: 100,000 steps of a rank take 40 MB


def rank_name(rank: int) -> str:
    return f"rank-{rank}.json"


def stack_name(rank: int) -> str:
    return f"stack-{rank}.txt"


class Progress(Frozen):
    """How far rank 0 is."""

    phase: str
    done: int
    total: int


class Rendezvous(Frozen):
    """Where ranks meet: a `file` on one host, an `address` on several, where rank 0 serves the socket `listen_fd`, which is
    already bound to the interface of the site."""

    file: Path | None = None
    address: str | None = None
    port: int | None = None
    listen_fd: int | None = None
