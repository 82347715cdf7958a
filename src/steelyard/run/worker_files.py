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
from steelyard.case.request import EngineSettings
from steelyard.plan.degrees import Plan
from steelyard.record.ceilings_record import BenchTimings
from steelyard.record.profile_facts import Profile
from steelyard.record.record import PassFacts, Sample, Scope
from steelyard.record.request_samples import RequestPasses
from steelyard.record.run_facts import EngineDetails, RankFacts, WeightsFacts
from steelyard.run.messages import HostSpec
from steelyard.schema import FrozenModel, describe_first_problem
from steelyard.tasks.task import DataFacts

ALWAYS_STATED = (
    "rank",
    "device",
    "status",
    "identity",
    "threads",
    "in_use_bytes",
    "budget",
)
RankStatus = Literal[
    "running", "done", "request", "raised", "out_of_memory", "disk_full", "network", "ended"
]


class RunSpec(FrozenModel):
    """The parent's part of a worker's spec, the same for all workers, created by run/parent.py:
    `case`, `scope` (how much of it is run), `passes` in order, names of `engine` and `accelerator`,
    `plan`. Paths are absolute. None means: random `weights`, generated `data`, a `tokenizer` beside
    weights or data, no checkpoint folder to `resume` from, no `checkpoints` written (else the new
    folder for all of this run's), no `trace` file, no `checkout` of a program, no
    `rehearsed_rows`. `explain`: profile some steps after the passes. `settings` are the engine's,
    `salt` is for prompts of generation.
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
    explain: bool = Field(False, description="profile some steps after the passes")
    trace: Path | None = Field(
        None, description="file into which rank 0 writes the whole trace of the profiled steps"
    )
    checkout: Path | None = Field(
        None, description="folder of the program that the engine starts; None: it starts none"
    )
    rehearsed_rows: tuple[str, ...] | None = Field(
        None,
        description=(
            "ids of rows over which another engine object runs the passes first, in reverse order;"
            " its answers are dropped (`steelyard conform`)"
        ),
    )
    settings: EngineSettings = Field(
        EngineSettings(), description="values of `--set engine.KEY=VALUE`"
    )
    salt: str = Field(
        "",
        max_length=64,
        pattern="^[0-9a-f]*$",
        description="generation: hex digits that make the prompts of this run unlike all others",
    )
    framework: str | None = Field(
        None,
        description="`module:Class` of the framework, imported first; None: with the engine",
    )


class WorkerSpec(FrozenModel):
    """The spec file of the workers of a host: what the parent says (`run`) and what the node agent
    adds (`host`). A worker's rank, rank on its host and world size are not in it but in the
    environment variables RANK, LOCAL_RANK and WORLD_SIZE. A worker ends when its stdin is closed.
    """

    run: RunSpec
    host: HostSpec


def parse_rank_file(text: str, rank: int) -> "RankFile":
    """Parse the JSON text of a rank file and return it; raise ValueError with the first problem if
    it is no JSON, not valid, or states another rank than `rank`.
    """
    try:
        rank_file = RankFile.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(describe_first_problem(error)) from error
    if rank_file.rank != rank:
        raise ValueError(f"it is the file of rank {rank_file.rank}")
    return rank_file


class RankFile(FrozenModel):
    """What one worker reports to the parent, as rank-N.json in the run's folder, written after
    every pass and at its end: measured passes (`windows`), `samples` (steps), `requests`, answers
    and facts on device, data, weights and engine.

    `status` is `running` until the end, then `done`, or how it failed, with `error` as text.
    `ended_s` is when it was written, since the start of the run. `outputs` are the answers by pass,
    as the task checked them; `common` is the part of the outputs that no pass changes, which only
    rank 0 writes. `budget` is wall seconds by part, `clocks` the seconds that passed on each of the
    host's clocks, `in_use_bytes` device memory after each pass; `benches` are of `steelyard spec`.
    `to_rank_facts` makes what the record states of the rank.
    """

    rank: int
    device: str
    status: RankStatus
    error: str | None
    ended_s: float = Field(description="when it was written, in seconds since the start of the run")
    budget: dict[str, float]
    windows: list[PassFacts] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    requests: RequestPasses = Field(default_factory=list)
    outputs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    common: dict[str, Any] = Field(default_factory=dict)
    identity: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str | None] = Field(default_factory=dict)
    threads: int | None = None
    drawn: dict[str, list[dict[str, int]]] = Field(
        default_factory=dict,
        description="counts of the rows that each pass must compute, from the data; rank 0 only",
    )
    all_reduce_bytes_per_s: float | None = None
    beside: dict[str, float] = Field(
        default_factory=dict,
        description="seconds of work that ran at the same time as parts of the budget",
    )
    compile_cache: dict[str, int] | None = Field(
        None, description="hits and misses of the compiler's cache; None: nothing was compiled"
    )
    clock: ClockName | None = Field(None, description="which clock the sample times are from")
    clocks: dict[str, float] = Field(
        default_factory=dict, description="seconds that each clock of the host counted so far"
    )
    in_use_bytes: dict[str, int | None] = Field(default_factory=dict)
    profile: Profile | None = Field(
        None, description="profile of some steps, of a rank that profiled"
    )
    details: EngineDetails = EngineDetails()
    benches: list[BenchTimings] = Field(
        default_factory=list, description="timings of each row of `steelyard spec` on this rank"
    )
    weights: SerializeAsAny[WeightsFacts] = WeightsFacts(source=None)
    data: SerializeAsAny[DataFacts] | None = None

    def to_rank_facts(self) -> RankFacts:
        """Return what a record states about this rank: of the fields of RankFacts always those in
        `ALWAYS_STATED`, the others only if they are not empty. `host` is not set here.
        """
        names = (
            name
            for name in RankFacts.model_fields
            if name in ALWAYS_STATED or getattr(self, name, None)
        )
        return RankFacts(**{name: getattr(self, name) for name in names})


def check_json_value(label: str, value: Any) -> Any:
    """Return `value` unchanged if it can be written as JSON without NaN or infinity, else raise
    TypeError that says that the engine's `label`, such as `details`, are not plain values.
    """
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the engine's {label} are not plain values: {error}") from error
    return value


def fill_program_rank_files(
    rank_files: dict[int, RankFile], world_size: int
) -> dict[int, RankFile]:
    """Return rank files for all ranks of a program that one worker, rank 0, started and that
    reports for all of them.

    If rank 0 is done, ranks 1 to `world_size` - 1 get a new rank file with status `done`, a device
    name and rank 0's budget and end time, without samples; others in `rank_files` are dropped. If
    it is missing or not done, `rank_files` is returned as it is.
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
