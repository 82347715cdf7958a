"""The process boundary: what a worker is told, what it leaves, and the folder where it meets its
agent.

Any program that reads a `WorkerSpec` and writes a `RankFile` is a worker; `steelyard schema worker`
and `steelyard schema rank` print both as JSON Schema.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError

from steelyard.accelerators.events import ClockName
from steelyard.case.case import Case
from steelyard.plan.degrees import Plan
from steelyard.record.facts import EngineDetails, MatmulRate, RankFacts, Weights
from steelyard.record.profile import Profile
from steelyard.record.record import Sample, Scope, Window
from steelyard.record.spec import Bench
from steelyard.run.messages import HostSpec
from steelyard.schema import Frozen, first_problem
from steelyard.tasks.task import DataFacts

STATED = (
    "rank",
    "device",
    "status",
    "identity",
    "threads",
    "matmul_flops_per_s",
    "in_use_bytes",
    "budget",
)
RankStatus = Literal[
    "running", "done", "request", "raised", "out_of_memory", "disk_full", "network", "ended"
]


class RunSpec(Frozen):
    """What the parent knows of a run; the same for all workers. Paths are absolute."""

    case: Case
    scope: Scope
    passes: tuple[str, ...]
    engine: str
    plan: Plan
    accelerator: str
    weights: Path | None
    data: Path | None
    tokenizer: Path | None
    resume: Path | None = None
    checkpoints: Path | None = None
    explain: bool = Field(False, description="profile a stretch of steps after the passes")
    trace: Path | None = Field(
        None, description="where rank 0 leaves the whole trace of that stretch"
    )
    checkout: Path | None = Field(
        None, description="the folder of the program that the engine starts, where it is one"
    )


class WorkerSpec(Frozen):
    """What a worker is told. Its rank, its rank on its host and the world size are in RANK,
    LOCAL_RANK and WORLD_SIZE. It ends when its stdin is closed."""

    run: RunSpec
    host: HostSpec


def read_rank(text: str, rank: int) -> "RankFile":
    """What that rank left. Any program may have written it: ValueError with the reason, where it is
    no rank file.
    """
    try:
        found = RankFile.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    if found.rank != rank:
        raise ValueError(f"it is that of rank {found.rank}")
    return found


class RankFile(Frozen):
    """What a worker leaves: after every pass, and at its end. `outputs` are a pass's answers as the
    task checked them, `common` the part of the outputs that no pass changes, which rank 0 alone
    has."""

    rank: int
    device: str
    status: RankStatus
    error: str | None
    ended_s: float = Field(description="when it was written, from the start of the run")
    budget: dict[str, float]
    windows: list[Window] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    outputs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    common: dict[str, Any] = Field(default_factory=dict)
    identity: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str | None] = Field(default_factory=dict)
    threads: int | None = None
    matmul_flops_per_s: float | None = None
    matmul_flops_per_cpu_s: float | None = Field(
        None, description="the same over the CPU time of this process"
    )
    matmul_cpu_rates: dict[str, list[float]] = Field(
        default_factory=dict,
        description="the same in several short timings: `before` the first pass, `after` the last",
    )
    matmuls: list[MatmulRate] = Field(
        default_factory=list, description="the case's own shapes, each with its rate"
    )
    drawn: dict[str, list[dict[str, int]]] = Field(
        default_factory=dict, description="what rows drawn count; rank 0 alone"
    )
    all_reduce_bytes_per_s: float | None = None
    beside: dict[str, float] = Field(
        default_factory=dict, description="time of work that ran beside parts of the budget"
    )
    compile_cache: dict[str, int] | None = Field(
        None, description="hits and misses, where something was compiled"
    )
    clock: ClockName | None = Field(None, description="whose times its samples have")
    clocks: dict[str, float] = Field(
        default_factory=dict, description="seconds that each clock of the host counted so far"
    )
    in_use_bytes: dict[str, int | None] = Field(default_factory=dict)
    profile: Profile | None = Field(None, description="of a rank that profiled a stretch")
    details: EngineDetails = EngineDetails()
    benches: list[Bench] = Field(
        default_factory=list, description="of `steelyard spec`: what this rank did of each row"
    )
    weights: SerializeAsAny[Weights] = Weights(source=None)
    data: SerializeAsAny[DataFacts] | None = None

    def facts(self) -> RankFacts:
        """Return what a record states of the rank; what is not known of it is left out, but for the
        fields in `STATED`.
        """
        names = (
            name for name in RankFacts.model_fields if name in STATED or getattr(self, name, None)
        )
        return RankFacts(**{name: getattr(self, name) for name in names})


def plain(what: str, value: Any) -> Any:
    """Return what an engine states, or raise TypeError if it cannot go into a rank file."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the engine's {what} are not plain values: {error}") from error
    return value


def of_program(rank_files: dict[int, RankFile], world: int) -> dict[int, RankFile]:
    """Return the rank files of a program that one worker started: it speaks for all ranks. Of the
    others it is known that they ended, and on which devices they were."""
    first = rank_files.get(0)
    if first is None or first.status != "done":
        return rank_files
    kind = first.device.partition(":")[0]
    others = {
        rank: RankFile(
            rank=rank,
            device=f"{kind}:{rank}",
            status="done",
            error=None,
            ended_s=first.ended_s,
            budget=first.budget,
        )
        for rank in range(1, world)
    }
    return {0: first, **others}
