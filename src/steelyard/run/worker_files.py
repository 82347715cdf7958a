"""The two JSON files of a worker process: the `WorkerSpec` that it reads at its start and the
`RankFile` that it writes.

The node agent writes the spec into the folder that it shares with its workers and forwards their
rank files to the parent, which assembles the record from them (run/assemble.py). Any program that
reads a `WorkerSpec` and writes a `RankFile` is a worker; `steelyard schema worker` and `steelyard
schema rank` print both as JSON Schema.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError

from steelyard.accelerators.events import ClockName
from steelyard.case.case import Case
from steelyard.plan.degrees import Plan
from steelyard.record.ceilings_record import BenchTimings
from steelyard.record.profile_facts import Profile
from steelyard.record.record import PassFacts, Sample, Scope
from steelyard.record.run_facts import EngineDetails, MatmulRate, RankFacts, WeightsFacts
from steelyard.run.messages import HostSpec
from steelyard.schema import FrozenModel, describe_first_problem
from steelyard.tasks.task import DataFacts

ALWAYS_STATED = (
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


class RunSpec(FrozenModel):
    """The parent's part of a worker's spec: what to run, the same for all workers. Paths are
    absolute.
    """

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


class WorkerSpec(FrozenModel):
    """All that a worker is told. Its rank, its rank on its host and the world size are in the
    environment variables RANK, LOCAL_RANK and WORLD_SIZE. A worker ends when its stdin is closed.
    """

    run: RunSpec
    host: HostSpec


def parse_rank_file(text: str, rank: int) -> "RankFile":
    """Parse the JSON text of a rank file and return it; raise ValueError with the reason if it is
    not a valid rank file or is that of another rank than `rank`.
    """
    try:
        rank_file = RankFile.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(describe_first_problem(error)) from error
    if rank_file.rank != rank:
        raise ValueError(f"it is that of rank {rank_file.rank}")
    return rank_file


class RankFile(FrozenModel):
    """What one worker reports: measured passes, samples, answers and facts, written after every
    pass and at its end.

    `status` is `running` until the end. `outputs` are the answers of each pass as the task checked
    them; `common` is the part of the outputs that no pass changes, which only rank 0 writes.
    """

    rank: int
    device: str
    status: RankStatus
    error: str | None
    ended_s: float = Field(description="when it was written, from the start of the run")
    budget: dict[str, float]
    windows: list[PassFacts] = Field(default_factory=list)
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
    benches: list[BenchTimings] = Field(
        default_factory=list, description="of `steelyard spec`: what this rank did of each row"
    )
    weights: SerializeAsAny[WeightsFacts] = WeightsFacts(source=None)
    data: SerializeAsAny[DataFacts] | None = None

    def to_rank_facts(self) -> RankFacts:
        """Return what a record states about the rank: always the fields in `ALWAYS_STATED`, the
        other fields of RankFacts only if they are not empty.
        """
        names = (
            name
            for name in RankFacts.model_fields
            if name in ALWAYS_STATED or getattr(self, name, None)
        )
        return RankFacts(**{name: getattr(self, name) for name in names})


def check_json_value(label: str, value: Any) -> Any:
    """Return `value` unchanged if it can be written as JSON without NaN or infinity, else raise
    TypeError; `label` names it in the message, such as `details` of the engine.
    """
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the engine's {label} are not plain values: {error}") from error
    return value


def fill_program_rank_files(
    rank_files: dict[int, RankFile], world_size: int
) -> dict[int, RankFile]:
    """Return rank files for all ranks of a program that one worker started and that reports for all
    of them.

    If rank 0 is done, ranks 1 to `world_size` - 1 get a rank file with status `done`, a device name
    and rank 0's budget and end time, without samples. Otherwise `rank_files` is returned as it is.
    """
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
        for rank in range(1, world_size)
    }
    return {0: first, **others}
