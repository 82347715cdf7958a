"""Records: one run as write-once JSON. Read, check, write whole or not at all.

The bytes of a record are canonical: keys in their order, fixed separators. One changed byte is
therefore either a different value, which the hash shows, or a different spelling of the same, which
`integrity` shows.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from steelyard import files, tasks, words
from steelyard.accelerators.events import ClockName
from steelyard.case.case import Reference, Tune
from steelyard.case.question import Question
from steelyard.case.resolve import auto_tunes
from steelyard.data.division import COUNTED
from steelyard.errors import LostError, RequestError
from steelyard.plan.degrees import Plan
from steelyard.record import sealed
from steelyard.record.facts import (
    EngineDetails,
    Environment,
    HostFacts,
    RankFacts,
    Restart,
    Series,
    StepDown,
    Weights,
)
from steelyard.record.profile import Profile
from steelyard.record.sealed import SCHEMA, canonical_bytes
from steelyard.schema import Frozen, GrownTable, OpenTable, first_problem
from steelyard.tasks.task import DataFacts, GroupName, RowId, Selected, Task
from steelyard.words import Message

# begins the name of a folder that keeps what could not be written where it belongs
KEPT = "steelyard-kept-"
Status = Literal["valid", "invalid", "failed"]
# bounds that no run comes near: a formula never overflows
Seconds = Annotated[float, Field(ge=-1e9, le=1e9)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
Count = Annotated[int, Field(ge=0, le=10**18)]
RAW = "samples"  # the key of what was measured
LATER_HASHES = ("bytes",)  # which older records do not have
# where nothing is known of them
LEFT_OUT = ("formulas", "wording", "clock", "drawn", "profile", "checkpoints", "stepped_down")
# the version of what metrics mean: a record is verified by that of its time, 1 where it says
# nothing
FORMULAS = 4
# how texts are stored: 3 as codes and values, 1 (where none is stated) and 2 as the English of
# their time
WORDING = 3


class Reason(Frozen):
    """Why a run is not valid. Codes are listed in docs/metrics.md."""

    code: str
    text: str | Message = Field(description="a message; of a failed run, what was reported then")


class Sample(Frozen):
    """One measured unit of work on one rank. Seconds count from the start of the pass; `start_s`,
    `end_s` and `phases` on the device's own timeline, `host_*` on the host's, which runs ahead of
    the device."""

    pass_name: str = Field(alias="pass")
    rank: int
    step: int
    start_s: Seconds
    end_s: Seconds
    host_start_s: Seconds
    host_end_s: Seconds
    phases: dict[str, Seconds]
    counts: dict[str, Count]
    values: dict[str, Number | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _counted(self) -> Self:
        missing = [name for name in COUNTED if self.counts and name not in self.counts]
        if missing:
            raise ValueError(f"the Work of step {self.step} does not count {', '.join(missing)}")
        return self


class Window(Frozen):
    """One pass on one rank: from its first mark until the device was idle again. `start_s` counts
    from the start of the run.
    """

    pass_name: str = Field(alias="pass")
    rank: int
    start_s: Seconds
    wall_s: Seconds
    allocated_bytes: Count | None
    reserved_bytes: Count | None
    device_s: Seconds | None = Field(
        None, description="wall time as the device's own clock tells it, where it has one"
    )
    cpu_s: Seconds | None = Field(None, description="CPU time of the rank's process")


class GateFacts(OpenTable):
    """The quality that the case asks for: `target` and `within`, `below` another metric, or
    `reach`.
    """

    metric: str
    target: float | None = None
    within: float | None = None
    agree_within: float | None = None
    below: str | None = None
    reach: float | None = None


class Published(Reference, OpenTable):
    """A published row of the case."""


class CaseFacts(Frozen):
    """`question` is kept as it was hashed; `Record.question` is the same with its types."""

    name: str
    key: str
    size: str
    division: str
    precision: str
    question: dict[str, Any]
    gate: GateFacts | None
    max_interval: float | None
    reference: list[Published]
    origins: dict[str, str]


class EngineFacts(Frozen):
    name: str
    details: EngineDetails
    conforms: bool | None = Field(
        None, description="what `steelyard conform` found of its version; null: nobody tried"
    )


class Scope(GrownTable):
    """How much of the question was run. `subjects` and `rows` are what a user named of the data,
    each sorted.
    """

    LATER: ClassVar[tuple[str, ...]] = ("subjects", "rows")

    kind: Literal["full", "window"]
    sample: int | None = None
    steps: int | None = None
    subjects: tuple[GroupName, ...] | None = Field(
        None, min_length=1, description="of `--subjects`; left out where none were named"
    )
    rows: tuple[RowId, ...] | None = Field(
        None,
        min_length=1,
        description=(
            "of `--rows`: ids and ranges of ids (docs/records.md); left out where none were named"
        ),
    )

    @property
    def selected(self) -> Selected:
        return Selected(self.subjects, self.rows, self.sample)


class Check(Frozen):
    name: str
    ok: bool
    detail: str | Message


class Quality(Frozen):
    metric: str
    value: float | None
    gate: GateFacts | None
    evaluated: bool
    note: str | Message | None


class Value(Frozen):
    """A derived number. Null has its reason in `note`."""

    value: float | None
    unit: str
    interval: tuple[float, float] | None = None
    note: str | Message | None = None


Noted = TypeVar("Noted", Quality, Value)


class Failure(Frozen):
    rank: int | None
    host: str | None = None
    exit_code: int | None
    error: str | None
    stderr_tail: str
    stacks: dict[int, str] = Field(
        default_factory=dict, description="where each rank was, of a run that hung"
    )


class Nothing(Frozen):
    """Facts on data that a run did not come to read."""


class Record(Frozen):
    schema_version: int = Field(SCHEMA, alias="schema")
    kind: Literal["run"] = "run"
    formulas: Literal[2, 3, 4] | None = Field(
        None,
        description=(
            "version of the formulas that its metrics follow (docs/records.md); left out where it"
            " is 1"
        ),
    )
    wording: Literal[2, 3] | None = Field(
        None,
        description=(
            "3: notes, checks and reasons are messages, of a code and values (docs/records.md); 2,"
            " or left out: they are English sentences"
        ),
    )
    id: str
    created: str
    status: Status
    reasons: list[Reason]
    notes: list[str | Message]
    case: CaseFacts
    scope: Scope
    tune: Tune
    plan: Plan
    engine: EngineFacts
    environment: Environment
    site: dict[str, str]
    weights: Weights
    data: SerializeAsAny[DataFacts | Nothing]
    passes: list[Window]
    budget: dict[str, Seconds]
    hosts: list[HostFacts] = Field(default_factory=list)
    ranks: list[RankFacts]
    samples: list[Sample]
    clock: ClockName | None = Field(
        None,
        description=(
            "whose times samples have: device events, the host's clock, or what a program reported"
            " of itself; left out where nothing was timed, and by older records"
        ),
    )
    drawn: dict[str, list[dict[str, Count]]] = Field(
        default_factory=dict,
        description=(
            "what the rows drawn count: of a whole pass, of training each step; left out where"
            " nobody counted"
        ),
    )
    profile: list[Profile] = Field(
        default_factory=list,
        description="of `--explain`: a stage each; left out where none was asked",
    )
    telemetry: list[Series]
    outputs: dict[str, Any] = Field(
        description="what the task keeps of the answers; its own schema says what"
    )
    checks: list[Check]
    quality: Quality
    metrics: dict[str, Value]
    restarts: list[Restart] = Field(default_factory=list)
    failure: Failure | None = None
    checkpoints: str | None = Field(
        None, description="folder, from where the record lies; left out where there is none"
    )
    stepped_down: StepDown | None = Field(
        None,
        description=(
            "of a run whose first attempt ran out of memory with a tune that was auto; left out"
            " where none did"
        ),
    )
    hashes: dict[str, str] = Field(default_factory=dict)

    @property
    def question(self) -> Question:
        """The question with its types."""
        return Question.model_validate(self.case.question)

    @property
    def task(self) -> Task:
        return tasks.row(str(self.case.question.get("task")))

    @property
    def answers(self) -> Frozen | None:
        """The outputs with the types of their task; None where the run did not come to any."""
        return self.task.outputs.model_validate(self.outputs) if self.outputs else None

    @property
    def auto(self) -> tuple[str, ...]:
        """Its tunes that were chosen by the devices."""
        return auto_tunes(self.case.origins)

    @property
    def fingerprint(self) -> str:
        """Of the data that were read."""
        return self.data.fingerprint if isinstance(self.data, DataFacts) else "unknown"


def seal(record: Record) -> Record:
    """Return the record with its hashes."""
    return record.model_copy(update={"hashes": sealed.hashes(to_table(record), RAW)})


def to_table(record: Record) -> dict[str, Any]:
    """A record as JSON."""
    table = record.model_dump(mode="json", by_alias=True)
    for name in LEFT_OUT:
        if not table[name]:
            del table[name]
    return table


def printed(record: Record) -> dict[str, Any]:
    """Return a record as `--json` prints it."""
    return to_table(in_english(record))


def in_english(record: Record) -> Record:
    """Return a copy with an English sentence in the place of each message."""
    texts = {
        "reasons": [
            one.model_copy(update={"text": words.text(one.text)}) for one in record.reasons
        ],
        "notes": [words.text(one) for one in record.notes],
        "checks": [
            one.model_copy(update={"detail": words.text(one.detail)}) for one in record.checks
        ],
        "quality": _noted(record.quality),
        "metrics": {name: _noted(one) for name, one in record.metrics.items()},
    }
    return record.model_copy(update=texts)


def _noted(one: Noted) -> Noted:
    return one.model_copy(update={"note": words.in_english(one.note)})


def file_name(record: Record, end: str = "") -> str:
    """Return the name of a record's file, with `end` before its ending."""
    case = record.case
    parts = (case.name, case.size, case.division, case.precision, record.engine.name, record.id[:8])
    return f"{sealed.file_name(record.created, *parts)}{end}.json"


def write(record: Record, folder: Path, end: str = "") -> Path:
    """Write a record under a name that must not exist yet. Raise LostError if it cannot be written."""
    return sealed.write(to_table(record), folder / file_name(record, end))


def keep(record: Record, folder: Path) -> Path:
    """Write a finished record. Where its folder cannot take it, it is kept in the folder for
    temporary files, else handed to whoever prints: hours of work are not lost to a full disk."""
    try:
        return write(record, folder)
    except LostError as error:
        why = (
            f"the record cannot be written to {str(folder)!r}:"
            f" {getattr(error.__cause__, 'strerror', error)}"
        )
        try:
            beside = Path(tempfile.mkdtemp(prefix=KEPT)) / file_name(record)
            files.write(beside, canonical_bytes(to_table(record)))
        except OSError as other:
            left = canonical_bytes(to_table(record)).decode()
            text = (
                f"{why}; nor can {tempfile.gettempdir()!r}: {other.strerror}; it stands above, as"
                " JSON"
            )
            raise LostError(text, left) from other
        raise LostError(f"{why}; it is saved as {beside}") from error


def read(path: Path) -> Record:
    """Read a record. Raise RequestError, one line, if it is none: all that a formula reads has its
    type.
    """
    record = sealed.read(path, Record, "record")
    for what in ("question", "answers"):
        try:
            getattr(record, what)
        except ValidationError as error:
            raise RequestError(
                f"{path}: not a record: its {what}: {first_problem(error)}"
            ) from error
    return record


def integrity(path: Path) -> list[str]:
    """Return what is wrong with the bytes of a record: nothing, where it is as it was written."""
    return sealed.integrity(path, Record, RAW, LATER_HASHES)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a record."""
    return sealed.schema(Record, "Steelyard record")
