"""What a machine can do, as a record of its own kind: every rate with the stretches of work it was taken from.

`benches` are raw: what each rank did and how long it took. `ceilings` follow from them, from the telemetry beside them and
from the datasheet row; `steelyard verify` derives them again.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from steelyard import files, words
from steelyard.errors import LostError, RequestError
from steelyard.plan.ceilings import Group, Unit
from steelyard.record import sealed
from steelyard.record.facts import Environment, Number, RankFacts, Series
from steelyard.record.record import Failure, Reason, Seconds
from steelyard.schema import Frozen, first_problem
from steelyard.words import Message

Amount = Annotated[float, Field(ge=1, le=1e30)]
Calls = Annotated[int, Field(ge=1, le=10**12)]
Text = Annotated[str, Field(max_length=1000)]
FILE_NAME = "{}-spec-{}-{}.json"


class Stretch(Frozen):
    """So many calls, timed together. `start_s` counts from the start of the command, on the host's clock."""

    start_s: Seconds
    time_s: Annotated[float, Field(ge=0, le=1e9)]
    calls: Calls


class Checked(Frozen):
    """How far a result was from the same in fp64: the largest difference, as a share of the root mean square of the right one,
    and the most that is allowed. An `error` of None is a number that is not finite."""

    error: Number | None
    bound: Number

    @property
    def ok(self) -> bool:
        return self.error is not None and 0 <= self.error <= self.bound


class Bench(Frozen):
    """What one rank did of one row. `amount` is the FLOPs or bytes of one call, or bytes that could be had. `reason` says why
    there is nothing, where there is nothing."""

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
    """What follows from a bench. Null has its reason in `note`; `steady`: whether its last stretches agree."""

    value: float | None
    interval: tuple[float, float] | None = None
    steady: bool | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    peak: float | None = Field(None, description="the datasheet's rate of this")
    share: float | None = Field(None, description="of that")
    note: str | Message | None = None


class Limits(Frozen):
    """How a row is held: stretches of `stretch_s` until the last `last` agree within `within`, or `limit_s` is over; no row
    begins after `total_s`."""

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


def _hashes(table: dict[str, Any]) -> dict[str, str]:
    """As a run's record has them; here `samples` are the benches."""
    body = {key: value for key, value in table.items() if key != "hashes"}
    in_order = hashlib.sha256(sealed.canonical_bytes(body)).hexdigest()
    return {"samples": sealed.digest(table.get("benches")), "record": sealed.digest(body), "bytes": in_order}


def seal(record: SpecRecord) -> SpecRecord:
    return record.model_copy(update={"hashes": _hashes(to_table(record))})


def write(record: SpecRecord, folder: Path) -> Path:
    """The whole file or none, under a name that must not exist yet."""
    stamp = re.sub(r"[^0-9T]", "", record.created.partition(".")[0].partition("+")[0])
    accelerator = re.sub(r"[^A-Za-z0-9._-]", "_", record.environment.hardware.accelerator or "unknown")[:64].lstrip(".")
    path = folder / FILE_NAME.format(stamp, accelerator, record.id[:8])
    try:
        files.write(path, sealed.canonical_bytes(to_table(record)), new=True)
    except OSError as error:
        raise LostError(f"the record cannot be written to {str(folder)!r}: {error.strerror}; it is lost") from error
    return path


def read(path: Path) -> SpecRecord:
    """A record from a file, or one line on why not."""
    table = sealed.table(path, sealed.read_bytes(path))
    try:
        found = SpecRecord.model_validate(table)
    except ValidationError as error:
        raise RequestError(f"{path}: not a spec record: {first_problem(error)}") from error
    if len(found.ceilings) != len(found.benches):
        raise RequestError(f"{path}: not a spec record: {len(found.benches)} benches and {len(found.ceilings)} ceilings")
    return found


def integrity(path: Path) -> list[str]:
    """What is wrong with the bytes of a record: nothing, where it is as it was written."""
    raw = sealed.read_bytes(path)
    table = sealed.table(path, raw)
    order = [info.alias or name for name, info in SpecRecord.model_fields.items()]
    wrong = []
    if sealed.canonical_bytes(table) != raw or list(table) != order:
        wrong.append("the bytes are not those that were written")
    told = table.get("hashes") or {}
    return wrong + [f"the hash of {name} does not match" for name, found in _hashes(table).items() if told.get(name) != found]


def schema() -> dict[str, Any]:
    """The JSON Schema of a spec record."""
    out = SpecRecord.model_json_schema(by_alias=True)
    out["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    out["title"] = "Steelyard spec record"
    return out
