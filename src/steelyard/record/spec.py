"""The spec record as a pydantic model, and functions that seal, write, read and check its file: the
ceilings of a machine.

`steelyard spec` measures what a machine can do at most: matmuls, memory, copies, attention,
collectives. `benches` are the raw timings of each rank. `ceilings` are derived from them, from
telemetry and from the datasheet; `steelyard verify` derives them again. run/ceilings_run.py writes
it, report reads it.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from steelyard import words
from steelyard.errors import RequestError
from steelyard.plan.ceilings import Group, Unit
from steelyard.record import sealed
from steelyard.record.facts import Environment, Number, RankFacts, Series
from steelyard.record.record import Failure, Reason, Seconds
from steelyard.schema import Frozen
from steelyard.words import Message

Amount = Annotated[float, Field(ge=1, le=1e30)]
Calls = Annotated[int, Field(ge=1, le=10**12)]
Text = Annotated[str, Field(max_length=1000)]
RAW = "benches"  # the key of the raw measurements


class Stretch(Frozen):
    """Some calls of a benchmark that were timed together. `start_s` counts from the start of the
    command, on the host's clock.
    """

    start_s: Seconds
    time_s: Annotated[float, Field(ge=0, le=1e9)]
    calls: Calls


class Checked(Frozen):
    """The error of a benchmark's result against fp64: the largest difference divided by the root
    mean square of the exact result, and the bound that is allowed. An `error` of None means that
    the result has a number that is not finite.
    """

    error: Number | None
    bound: Number

    @property
    def ok(self) -> bool:
        """Return whether the error is finite and within the bound."""
        return self.error is not None and 0 <= self.error <= self.bound


class Bench(Frozen):
    """The raw timings of one benchmark on one rank. `amount` is the FLOPs or bytes of one call, or
    the bytes of memory that could be allocated. `reason` says why there are no timings, if there
    are none.
    """

    group: Group
    name: Annotated[str, Field(max_length=200)]
    precision: Annotated[str, Field(max_length=32)] | None
    rank: Annotated[int, Field(ge=0, le=10**6)]
    unit: Unit
    detail: dict[str, int | Text]
    amount: Amount | None = None
    checked: Checked | None = None
    stretches: list[Stretch] = Field(default_factory=list)
    reason: Text | None = None


class Ceiling(Frozen):
    """The highest rate or size that a benchmark reached, in its unit. A `value` of None has its
    reason in `note`; `steady` is whether the last timings agree; `share` is `value` divided by the
    datasheet's `peak`.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    steady: bool | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    peak: float | None = Field(None, description="the datasheet's rate of this")
    share: float | None = Field(None, description="of that")
    note: str | Message | None = None


class Limits(Frozen):
    """When a benchmark ends: it is timed in stretches of `stretch_s` until the last `last` of them
    agree to `within` (a share), or `limit_s` is over. No benchmark begins after `total_s`.
    """

    stretch_s: Seconds
    limit_s: Seconds
    total_s: Seconds
    within: float = Field(ge=0, le=1)
    last: int = Field(ge=2, le=1000)


class SpecRecord(Frozen):
    """What a machine can do at most, as it is stored. `ceilings[i]` follows from `benches[i]`;
    `quick` is whether the shorter limits were used; `created` is an ISO 8601 time; `hashes` are set
    by `seal_spec_record`.
    """

    schema_version: int = Field(sealed.SCHEMA, alias="schema")
    kind: Literal["spec"] = "spec"
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    created: Annotated[str, Field(pattern=r"^[0-9T:.+Z-]{10,40}$")]
    status: Literal["valid", "failed"]
    reasons: list[Reason]
    quick: bool
    limits: Limits
    devices: Annotated[int, Field(ge=1, le=10**6)]
    environment: Environment
    budget: dict[str, Seconds]
    ranks: list[RankFacts]
    benches: list[Bench]
    telemetry: list[Series]
    ceilings: list[Ceiling]
    failure: Failure | None = None
    hashes: dict[str, str] = Field(default_factory=dict)


def to_table(record: SpecRecord) -> dict[str, Any]:
    """Return a spec record as JSON data, keys in the order of the fields."""
    return record.model_dump(mode="json", by_alias=True)


def printed(record: SpecRecord) -> dict[str, Any]:
    """Return a spec record as the JSON data that `--json` prints: with English sentences instead of
    messages.
    """
    return to_table(in_english(record))


def in_english(record: SpecRecord) -> SpecRecord:
    """Return a copy of a spec record with an English sentence in the place of each note of a
    ceiling.
    """
    said = [one.model_copy(update={"note": words.in_english(one.note)}) for one in record.ceilings]
    return record.model_copy(update={"ceilings": said})


def seal(record: SpecRecord) -> SpecRecord:
    """Return a copy of a spec record with its hashes set; `samples` is the hash of `benches`."""
    return record.model_copy(update={"hashes": sealed.hashes(to_table(record), RAW)})


def write(record: SpecRecord, folder: Path) -> Path:
    """Write a spec record into a folder, under a name of time, accelerator and id, and return its
    path. Raise LostError if the file exists already or cannot be written.
    """
    accelerator = record.environment.hardware.accelerator or "unknown"
    name = sealed.file_name(record.created, "spec", accelerator, record.id[:8])
    return sealed.write(to_table(record), folder / f"{name}.json")


def read(path: Path) -> SpecRecord:
    """Read and validate a spec record. Raise RequestError with one line if the file cannot be read,
    is not a spec record, or has not one ceiling per benchmark; hashes are not checked.
    """
    found = sealed.read(path, SpecRecord, "spec record")
    if len(found.ceilings) != len(found.benches):
        raise RequestError(
            f"{path}: not a spec record: {len(found.benches)} benches and {len(found.ceilings)}"
            " ceilings"
        )
    return found


def integrity(path: Path) -> list[str]:
    """Compare a spec record's bytes and hashes with what was written, and return a sentence for
    each difference: an empty list if there is none. Raise RequestError if the file cannot be read
    or parsed.
    """
    return sealed.integrity(path, SpecRecord, RAW)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec record."""
    return sealed.schema(SpecRecord, "Steelyard spec record")
