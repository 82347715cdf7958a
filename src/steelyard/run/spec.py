"""The process boundary: what a worker is told, and what it leaves. Any program that reads the one and writes the other is a
worker; `steelyard schema worker|rank` prints both as JSON Schema."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny

from steelyard.case.case import Case
from steelyard.plan.degrees import Plan
from steelyard.record.facts import RankFacts, Weights
from steelyard.record.record import Sample, Scope, Window
from steelyard.schema import Frozen
from steelyard.tasks.task import DataFacts

SPEC, PROGRESS = "spec.json", "progress.json"

RankStatus = Literal["running", "done", "request", "raised", "out_of_memory", "ended"]


class WorkerSpec(Frozen):
    """What a worker is told. Paths are absolute; `origin_s` is the start of the run on the host's monotonic clock."""

    case: Case
    scope: Scope
    passes: tuple[str, ...]
    engine: str
    plan: Plan
    accelerator: str
    weights: Path | None
    data: Path | None
    tokenizer: Path | None
    folder: Path
    origin_s: float
    parent_pid: int
    resume: Path | None = None
    checkpoints: Path | None = None


class Progress(Frozen):
    """How far rank 0 is."""

    phase: str
    done: int
    total: int


class RankFile(Frozen):
    """What a worker leaves: after every pass, and at its end. `outputs` are a pass's answers as the task checked them, `common`
    the part of the outputs that no pass changes, which rank 0 alone has."""

    rank: int
    device: str
    status: RankStatus
    error: str | None
    ended_s: float
    budget: dict[str, float]
    windows: list[Window] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    outputs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    common: dict[str, Any] = Field(default_factory=dict)
    identity: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str | None] = Field(default_factory=dict)
    threads: int | None = None
    matmul_flops_per_s: float | None = None
    in_use_bytes: dict[str, int | None] = Field(default_factory=dict)
    details: dict[str, Any] = Field(default_factory=dict)
    weights: SerializeAsAny[Weights] = Weights(source=None)
    data: SerializeAsAny[DataFacts] | None = None

    @staticmethod
    def name(rank: int) -> str:
        return f"rank-{rank}.json"

    def facts(self) -> RankFacts:
        """What a record keeps of the rank."""
        names = ("rank", "device", "status", "identity", "threads", "matmul_flops_per_s", "in_use_bytes", "budget")
        return RankFacts(**{name: getattr(self, name) for name in names})
