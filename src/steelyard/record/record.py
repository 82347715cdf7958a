"""The record of a run as a pydantic model, and functions that seal, write, read and check its file.

A record is one write-once JSON file. run/assemble.py builds it; metrics, report and cli read it.
Its bytes are canonical (keys in the order of the fields, fixed separators): a changed byte is
either another value, which a hash shows, or another spelling of the same value, which
`find_record_damage` shows.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from steelyard import files, tasks, words
from steelyard.accelerators.events import ClockName
from steelyard.case.case import PublishedReference, Tune
from steelyard.case.load import Slo
from steelyard.case.question import Question
from steelyard.case.resolve import find_auto_tunes
from steelyard.data.division import COUNT_NAMES
from steelyard.errors import LostError, RequestError
from steelyard.plan.degrees import Plan
from steelyard.record import record_file
from steelyard.record.profile_facts import Profile
from steelyard.record.record_file import SCHEMA_VERSION, to_canonical_bytes
from steelyard.record.request_samples import RequestPasses
from steelyard.record.run_facts import (
    EngineDetails,
    Environment,
    HostFacts,
    RankFacts,
    Restart,
    StepDown,
    TelemetrySeries,
    WeightsFacts,
)
from steelyard.schema import ExtensibleModel, FrozenModel, GrownModel, describe_first_problem
from steelyard.tasks.task import DataFacts, GroupName, RowId, Selection, Task
from steelyard.words import Message

# prefix of the temporary folder for a record that could not be written where it belongs
RESCUE_PREFIX = "steelyard-kept-"
# `unproven`: as valid, but with too few steps for an interval of its rate; older records lack it
Status = Literal["valid", "unproven", "invalid", "failed"]
# bounds far beyond any run, so that no formula overflows
Seconds = Annotated[float, Field(ge=-1e9, le=1e9)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
Count = Annotated[int, Field(ge=0, le=10**18)]
WeightsKind = Literal["random", "checkpoint"]
RAW_KEY = "samples"  # the key of the raw measurements
LATER_HASHES = ("bytes",)  # hashes that older records lack
# fields that are left out of the file if they are empty: older records do not have them
OMITTED_IF_EMPTY = (
    "formulas",
    "wording",
    "providers",
    "clock",
    "drawn",
    "profile",
    "checkpoints",
    "stepped_down",
    "asked_weights",
    "requests",
)
# Version of the metric formulas. A record is verified with the version that it states; 1 if it
# states none.
FORMULAS_VERSION = 5
# How texts are stored: 3 as codes and values; 2, and 1 (if none is stated), as the English
# sentences of their time.
WORDING_VERSION = 3


class Reason(FrozenModel):
    """Why a run is unproven, invalid or failed: a `code`, listed in docs/metrics.md, and a `text`,
    which is a message (a code with values, rendered later) or, of a failed run, the sentence that
    was reported.
    """

    code: str
    text: str | Message = Field(description="a message; of a failed run, what was reported then")


class Sample(FrozenModel):
    """One measured step of a pass on one rank.

    Seconds count from the start of the pass: `start_s`, `end_s` and the durations in `phases` on
    the device's timeline, `host_start_s` and `host_end_s` on the host's clock, which runs ahead of
    the device. `counts` are amounts of work (tokens, samples, ...), `values` measured numbers such
    as the loss.
    """

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
    def _check_counts(self) -> Self:
        """Raise ValueError if this step has counts but lacks one that every step must have
        (`COUNT_NAMES`); a step without any counts passes.
        """
        missing = [name for name in COUNT_NAMES if self.counts and name not in self.counts]
        if missing:
            raise ValueError(f"the Work of step {self.step} does not count {', '.join(missing)}")
        return self


class PassFacts(GrownModel):
    """One pass on one rank, from its first mark until the device was idle again. `start_s` counts
    from the start of the run; `wall_s` is its duration on the host's clock, `device_s` on the
    device's own and `cpu_s` the CPU time of the rank's process, the last two None if unknown.
    `allocated_bytes` and `reserved_bytes` are peaks of the framework's allocator, None if it has
    none.

    `seen_start_s` and `seen_end_s` are when the host's node agent, on its own clock, saw the rank
    report that the pass begins and ends, at most `seen_within_s` seconds later than it was
    reported; all three are None, and left out, if it did not see both.
    """

    LATER = ("seen_start_s", "seen_end_s", "seen_within_s")

    pass_name: str = Field(alias="pass")
    rank: int
    start_s: Seconds
    wall_s: Seconds
    allocated_bytes: Count | None
    reserved_bytes: Count | None
    device_s: Seconds | None = Field(
        None, description="wall time by the device's own clock, where it has one"
    )
    cpu_s: Seconds | None = Field(None, description="CPU time of the rank's process")
    seen_start_s: Seconds | None = Field(
        None, description="when the node agent saw the pass begin, since the start of the run"
    )
    seen_end_s: Seconds | None = Field(
        None, description="when the node agent saw the pass end, since the start of the run"
    )
    seen_within_s: Seconds | None = Field(
        None, description="at most so long after the rank reported it did the agent see a border"
    )


class GateFacts(ExtensibleModel):
    """The quality gate of a case: which values of the metric `metric` are good enough, in its unit;
    None is what the gate does not use. Scoring: at most `within` from `target`, and at most
    `agree_within` between the infer and val passes. Training: less than the metric that `below`
    names and, if it is set, than `target`; or at least `reach`, at which training stops.
    """

    metric: str
    target: float | None = None
    within: float | None = None
    agree_within: float | None = None
    below: str | None = None
    reach: float | None = None


class PublishedFacts(PublishedReference, ExtensibleModel):
    """A published result of the case, from its file, as a record keeps it: the fields of
    `PublishedReference`, and any keys that a later version may add.
    """


class CaseFacts(GrownModel):
    """The case of a run. `question` is the dict that was hashed, with the data's fingerprint, for
    `key`; `Record.question` is the same with its types. `size` is full or smoke; `gate` the quality
    gate (None: none); `max_interval` the widest relative confidence interval that is valid (None:
    no limit); `reference` the published results; `slo` the limits of goodput (None: none, and left
    out). `origins` says by dotted key where each setting
    came from (case file, command line, default, automatic).
    """

    LATER: ClassVar[tuple[str, ...]] = ("slo",)

    name: str
    key: str
    size: str
    division: str
    precision: str
    question: dict[str, Any]
    gate: GateFacts | None
    max_interval: float | None
    reference: list[PublishedFacts]
    origins: dict[str, str]
    slo: Slo | None = Field(None, description="limits that goodput counts by; of generation")


class EngineFacts(GrownModel):
    """The engine of a run: its `name`, what it chose by itself (`details`), and `conforms`, whether
    `steelyard conform` found that this version computes what engine torch does (None: not tested).
    `identity` is the hash over all code that its workers' Python could import, the same on all
    hosts (None: not looked up, as the engine was never tested here, or not known).
    """

    LATER: ClassVar[tuple[str, ...]] = ("identity",)

    name: str
    details: EngineDetails
    conforms: bool | None = Field(
        None, description="the result of `steelyard conform` for its version; null: not tested"
    )
    identity: str | None = Field(
        None, description="hash over all code that the workers' Python could import"
    )


class Scope(GrownModel):
    """How much of the question was run: all (`kind` is `full`) or a `window` of it. `sample`
    (`--sample`) is a number of samples, for training rows of each batch, `steps` (`--steps`) a
    number of steps; `subjects` and `rows` are the parts of the data that a user named
    (`--subjects`, `--rows`), each sorted. None is no restriction. Of generation, `requests` is how
    many were to be sent at least and `min_time_s` for how long (None: no least time). `selected`
    gives it in the form that a task's reader takes.
    """

    LATER: ClassVar[tuple[str, ...]] = ("subjects", "rows", "requests", "min_time_s")

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
    requests: int | None = Field(
        None, ge=1, le=2_000_000, description="of generation: requests to send at least"
    )
    min_time_s: Seconds | None = Field(
        None, description="of generation: seconds for which requests were to be sent at least"
    )

    @property
    def selected(self) -> Selection:
        """Return the selection of data in the form that a task's reader takes."""
        return Selection(self.subjects, self.rows, self.sample)


class Check(FrozenModel):
    """A check of a finished run by metrics/validity.py: its `name`, whether it passed (`ok`), and
    `detail`, a message (in older records a sentence) with what was compared.
    """

    name: str
    ok: bool
    detail: str | Message


class Quality(FrozenModel):
    """The quality metric of a run and the gate (required value) for it. `metric` is its name;
    `value` is None if it is not known; `gate` is None if the case has none; `evaluated` is whether
    the value was compared with the gate, and `note` says why not.
    """

    metric: str
    value: float | None
    gate: GateFacts | None
    evaluated: bool
    note: str | Message | None


class Value(FrozenModel):
    """A derived metric: `value` in `unit`, and `interval`, the low and high end of its 95 %
    confidence interval (None: it has none). A `value` of None has its reason in `note`, a message
    or, in older records, a sentence.
    """

    value: float | None
    unit: str
    interval: tuple[float, float] | None = None
    note: str | Message | None = None


NotedModel = TypeVar("NotedModel", Quality, Value)


class FailureFacts(FrozenModel):
    """Where and how a failed run failed: `rank` and `host` that caused it (None: no single one),
    its `exit_code` (negative: a signal; None: it did not exit by itself), its `error` as text, the
    end of its stderr (`stderr_tail`; of all ranks if `rank` is None), and by rank the `stacks` of a
    run that hung.
    """

    rank: int | None
    host: str | None = None
    exit_code: int | None
    error: str | None
    stderr_tail: str
    stacks: dict[int, str] = Field(
        default_factory=dict, description="the stack of each rank, if the run hung"
    )


class NoDataFacts(FrozenModel):
    """Stands in for the facts on the data in the record of a run that ended before it read any. It
    has no fields.
    """


class Record(FrozenModel):
    """One run, as its file stores it, built by run/assemble.py. What was asked: `case`, `scope`
    (how much of it), `tune`, `plan`. On what: `engine`, `providers` (other packages that brought a
    part of it), `environment`, `site`, `weights`, `data`, `hosts`. What was measured: `passes`,
    `samples` (steps), `requests` (of generation), `ranks`, `telemetry`, `outputs` (the task's
    answers), `drawn`, `profile`.
    `budget` are the parts of the wall time in seconds; `restarts`, `checkpoints` and `stepped_down`
    tell of a resumed run, its folder and a first attempt without enough memory; `failure` is None
    unless it failed. `weights` is what the engine says of them, `asked_weights` what was asked.

    `metrics`, `checks`, `quality`, `reasons`, `notes` and `status` (valid, unproven, invalid,
    failed) are derived from the rest, and `steelyard verify` derives them again. `created` is an
    ISO 8601 time; `hashes` are set by `seal_record`.
    """

    schema_version: int = Field(SCHEMA_VERSION, alias="schema")
    kind: Literal["run"] = "run"
    formulas: Literal[2, 3, 4, 5] | None = Field(
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
    providers: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "the package, with its version, that brought a part of the run which is not"
            " Steelyard's own: engine, framework, task, kind, family, accelerator, peak, launcher,"
            " metrics.NAME; left out where all parts are"
        ),
    )
    environment: Environment
    site: dict[str, str]
    weights: WeightsFacts
    data: SerializeAsAny[DataFacts | NoDataFacts]
    passes: list[PassFacts]
    budget: dict[str, Seconds]
    hosts: list[HostFacts] = Field(default_factory=list)
    ranks: list[RankFacts]
    samples: list[Sample]
    clock: ClockName | None = Field(
        None,
        description=(
            "the clock of the samples: device events, the host's clock, or what a program"
            " reported; left out where nothing was timed, and by older records"
        ),
    )
    drawn: dict[str, list[dict[str, Count]]] = Field(
        default_factory=dict,
        description=(
            "tokens and samples of the rows drawn, for a whole pass, and for each step of"
            " training; left out where they were not counted"
        ),
    )
    profile: list[Profile] = Field(
        default_factory=list,
        description="of `--explain`: one per pipeline stage; left out without it",
    )
    telemetry: list[TelemetrySeries]
    outputs: dict[str, Any] = Field(
        description="what the task keeps of the answers; its own schema says what"
    )
    checks: list[Check]
    quality: Quality
    metrics: dict[str, Value]
    restarts: list[Restart] = Field(default_factory=list)
    failure: FailureFacts | None = None
    checkpoints: str | None = Field(
        None, description="folder, relative to the record; left out where there is none"
    )
    stepped_down: StepDown | None = Field(
        None,
        description=(
            "the first attempt, which ran out of memory with an auto tune; left out where there is"
            " none"
        ),
    )
    asked_weights: WeightsKind | None = Field(
        None,
        description=(
            "whether `--weights` named a checkpoint, as the parent knows it; left out by older"
            " records"
        ),
    )
    requests: RequestPasses = Field(
        default_factory=list,
        description="of generation: the requests of each pass; left out by other kinds of work",
    )
    hashes: dict[str, str] = Field(default_factory=dict)

    @property
    def question(self) -> Question:
        """Return the question of this record as a validated model. Raise pydantic's ValidationError
        if the stored dict is not a question.
        """
        return Question.model_validate(self.case.question)

    @property
    def task(self) -> Task:
        """Return the row of this record's task. Raise RequestError if no package here has it."""
        return tasks.find_task(str(self.case.question.get("task")))

    @property
    def answers(self) -> FrozenModel | None:
        """Return the record's outputs as the model that their task defines, or None if the run
        ended before there were any. Raise pydantic's ValidationError if they do not fit,
        RequestError if the task is unknown here.
        """
        return self.task.outputs.model_validate(self.outputs) if self.outputs else None

    @property
    def auto_tunes(self) -> tuple[str, ...]:
        """Return the names of the record's tune settings that were `auto` and chosen for the
        devices, such as `micro_batch`.
        """
        return find_auto_tunes(self.case.origins)

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the data that was read, or "unknown" if none was."""
        return self.data.fingerprint if isinstance(self.data, DataFacts) else "unknown"


def seal_record(record: Record) -> Record:
    """Return a copy of a record with its three hashes computed anew: `samples`, `record` and
    `bytes` (`compute_hashes`). To be called last: any later change makes them wrong.
    """
    return record.model_copy(
        update={"hashes": record_file.compute_hashes(record_to_json(record), RAW_KEY)}
    )


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record as a dict of JSON data as its file holds it, keys in the order of the fields;
    fields that older records do not have (`OMITTED_IF_EMPTY`) are left out if they are empty.
    """
    data = record.model_dump(mode="json", by_alias=True)
    for name in OMITTED_IF_EMPTY:
        if not data[name]:
            del data[name]
    return data


def record_to_english_json(record: Record) -> dict[str, Any]:
    """Return a record as the JSON data that `--json` prints: with English sentences instead of
    messages.
    """
    return record_to_json(render_record_in_english(record))


def render_record_in_english(record: Record) -> Record:
    """Return a copy of a record with an English sentence in the place of each message in its
    reasons, notes, checks, quality and metrics; sentences stay as they are. Its hashes then no
    longer fit.
    """
    texts = {
        "reasons": [
            item.model_copy(update={"text": words.render_text(item.text)})
            for item in record.reasons
        ],
        "notes": [words.render_text(item) for item in record.notes],
        "checks": [
            item.model_copy(update={"detail": words.render_text(item.detail)})
            for item in record.checks
        ],
        "quality": _render_note(record.quality),
        "metrics": {name: _render_note(item) for name, item in record.metrics.items()},
    }
    return record.model_copy(update=texts)


def _render_note(noted: NotedModel) -> NotedModel:
    """Return a copy of a quality or metric with its note, if any, as an English sentence."""
    return noted.model_copy(update={"note": words.render_in_english(noted.note)})


def make_record_file_name(record: Record, suffix: str = "") -> str:
    """Return the file name of a record, its parts joined by `-`: time, case, size, division,
    precision, engine and the first 8 characters of its id, then `suffix` and `.json`. Unsafe
    characters in parts become `_`.
    """
    case = record.case
    parts = (case.name, case.size, case.division, case.precision, record.engine.name, record.id[:8])
    return f"{record_file.join_file_name(record.created, *parts)}{suffix}.json"


def write_record(record: Record, folder: Path, suffix: str = "") -> Path:
    """Write a record to a new file in a folder, named by `make_record_file_name` (`suffix` goes
    before `.json`), and return its path. Hashes must be set before (`seal_record`). Raise LostError
    if the file exists already or cannot be written.
    """
    return record_file.write_record_file(
        record_to_json(record), folder / make_record_file_name(record, suffix)
    )


def write_or_rescue_record(record: Record, folder: Path) -> Path:
    """Write a finished record into a folder and return its path; if that fails, rescue it and raise
    LostError.

    The record is then written to a new temporary folder, whose path the error names. If that fails
    too, the error holds the record's JSON in `unsaved` for the command to print.
    """
    try:
        return write_record(record, folder)
    except LostError as error:
        problem = (
            f"the record cannot be written to {str(folder)!r}:"
            f" {getattr(error.__cause__, 'strerror', error)}"
        )
        try:
            rescue_path = Path(tempfile.mkdtemp(prefix=RESCUE_PREFIX)) / make_record_file_name(
                record
            )
            files.write_file(rescue_path, to_canonical_bytes(record_to_json(record)))
        except OSError as second_error:
            unsaved = to_canonical_bytes(record_to_json(record)).decode()
            text = (
                f"{problem}; nor to {tempfile.gettempdir()!r}: {second_error.strerror};"
                " the record is printed above as JSON"
            )
            raise LostError(text, unsaved) from second_error
        raise LostError(f"{problem}; it is saved as {rescue_path}") from error


def read_record(path: Path) -> Record:
    """Read and validate the file of a record of a run, its question and its outputs included, and
    return it. Raise RequestError with one line if the file cannot be read, is not a record of this
    schema (a spec record is none), or is of a task that is not installed; hashes are not checked.
    """
    record = record_file.read_record_file(path, Record, "record")
    for attribute in ("question", "answers"):
        try:
            getattr(record, attribute)
        except ValidationError as error:
            raise RequestError(
                f"{path}: not a record: its {attribute}: {describe_first_problem(error)}"
            ) from error
    return record


def find_record_damage(path: Path) -> list[str]:
    """Compare a record's file with what was written, and return a sentence for each difference, an
    empty list if there is none: bytes or order of keys that are not the canonical ones, a hash that
    does not match or is missing (`bytes` may be, in older records), or an unknown hash. Raise
    RequestError if the file cannot be read or parsed.
    """
    return record_file.find_file_damage(path, Record, RAW_KEY, LATER_HASHES)


def make_record_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a record of a run as a dict, as record.schema.json
    ships it; docstrings are its descriptions.
    """
    return record_file.make_json_schema(Record, "Steelyard record")
