"""What a machine can do, as a record of its own kind: every rate with the stretches of work it was
taken from.

`benches` are raw: what each rank did and how long it took. `ceilings` follow from them, from the
telemetry beside them and from the datasheet row; `steelyard verify` derives them again.
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
RAW = "benches"  # the key of what was measured


class Stretch(Frozen):
    """So many calls, timed together. `start_s` counts from the start of the command, on the host's
    clock.
    """

    start_s: Seconds
    time_s: Annotated[float, Field(ge=0, le=1e9)]
    calls: Calls


class Checked(Frozen):
    """How far a result was from the same in fp64: the largest difference, as a share of the root
    mean square of the right one, and the most that is allowed. An `error` of None is a number that
    is not finite."""

    error: Number | None
    bound: Number

    @property
    def ok(self) -> bool:
        return self.error is not None and 0 <= self.error <= self.bound


class Bench(Frozen):
    """What one rank did of one row. `amount` is the FLOPs or bytes of one call, or bytes that could
    be had. `reason` says why there is nothing, where there is nothing."""

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
    """What follows from a bench. Null has its reason in `note`; `steady`: whether its last
    stretches agree.
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
    """How a row is held: stretches of `stretch_s` until the last `last` agree within `within`, or
    `limit_s` is over; no row begins after `total_s`."""

    stretch_s: Seconds
    limit_s: Seconds
    total_s: Seconds
    within: float = Field(ge=0, le=1)
    last: int = Field(ge=2, le=1000)


class SpecRecord(Frozen):
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
    return record.model_dump(mode="json", by_alias=True)


def printed(record: SpecRecord) -> dict[str, Any]:
    """Return a record as `--json` prints it."""
    return to_table(in_english(record))


def in_english(record: SpecRecord) -> SpecRecord:
    """Return a copy with an English sentence in the place of each note."""
    said = [one.model_copy(update={"note": words.in_english(one.note)}) for one in record.ceilings]
    return record.model_copy(update={"ceilings": said})


def seal(record: SpecRecord) -> SpecRecord:
    """Return the record with its hashes, as a run's record has them; here `samples` are the
    benches.
    """
    return record.model_copy(update={"hashes": sealed.hashes(to_table(record), RAW)})


def write(record: SpecRecord, folder: Path) -> Path:
    """Write a record under a name that must not exist yet. Raise LostError if it cannot be written."""
    accelerator = record.environment.hardware.accelerator or "unknown"
    name = sealed.file_name(record.created, "spec", accelerator, record.id[:8])
    return sealed.write(to_table(record), folder / f"{name}.json")


def read(path: Path) -> SpecRecord:
    """Read a record. Raise RequestError, one line, if it is none."""
    found = sealed.read(path, SpecRecord, "spec record")
    if len(found.ceilings) != len(found.benches):
        raise RequestError(
            f"{path}: not a spec record: {len(found.benches)} benches and {len(found.ceilings)}"
            " ceilings"
        )
    return found


def integrity(path: Path) -> list[str]:
    """Return what is wrong with the bytes of a record: nothing, where it is as it was written."""
    return sealed.integrity(path, SpecRecord, RAW)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec record."""
    return sealed.schema(SpecRecord, "Steelyard spec record")
