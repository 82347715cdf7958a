"""A run as it was asked for."""

from dataclasses import dataclass
from pathlib import Path

from steelyard.case.resolve import Resolved
from steelyard.case.sweep import Point


@dataclass(frozen=True)
class Request:
    """What a command line says of one run."""

    resolved: Resolved
    engine: str = "torch"
    accelerator: str | None = None
    launcher: str | None = None
    nodes: int = 1
    devices: int = 1
    passes: tuple[str, ...] | None = None
    sample: int | None = None
    steps: int | None = None
    resume: Path | None = None
    weights: Path | None = None
    data: Path | None = None
    tokenizer: Path | None = None
    site: Path | None = None
    out: Path = Path("records")
    hang_s: float = 1800.0
    limit_s: float | None = None
    point: Point = ()  # of a sweep
