"""Records: one run as write-once JSON. Read, check, write whole or not at all.

The bytes of a record are canonical: keys in their order, fixed separators. One changed byte is therefore either a different
value, which the hash shows, or a different spelling of the same, which `integrity` shows.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.errors import LostError, RequestError

SCHEMA = 1
MAX_RECORD_BYTES = 256 << 20
MAX_DEPTH = 64  # of nested tables and lists; a record has about ten

Status = Literal["valid", "invalid", "failed"]
Number = int | float


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Reason(Part):
    """Why a run is not valid. Codes are listed in docs/metrics.md."""

    code: str
    text: str


class Sample(Part):
    """One measured unit of work on one rank. Seconds count from the start of the pass; `start_s`, `end_s` and `phases` on
    the device's own timeline, `host_*` on the host's, which runs ahead of the device."""

    pass_name: str = Field(alias="pass")
    rank: int
    step: int
    start_s: float
    end_s: float
    host_start_s: float
    host_end_s: float
    phases: dict[str, float]
    counts: dict[str, int]
    values: dict[str, float | None] = {}


class Window(Part):
    """One pass on one rank: from its first mark until the device was idle again. `start_s` counts from the start of the run."""

    pass_name: str = Field(alias="pass")
    rank: int
    start_s: float
    wall_s: float
    allocated_bytes: int | None
    reserved_bytes: int | None


class Case(Part):
    name: str
    key: str
    size: str
    division: str
    precision: str
    question: dict[str, Any]
    gate: dict[str, Any] | None
    max_interval: float | None
    reference: list[dict[str, Any]]
    origins: dict[str, str]


class Engine(Part):
    name: str
    details: dict[str, Any]


class Plan(Part):
    nodes: int
    devices: int
    tp: int
    pp: int
    dp: int
    launcher: str


class Scope(Part):
    kind: Literal["full", "window"]
    sample: int | None = None
    steps: int | None = None


class Check(Part):
    name: str
    ok: bool
    detail: str


class Quality(Part):
    metric: str
    value: float | None
    gate: dict[str, Any] | None
    evaluated: bool
    note: str | None


class Value(Part):
    """A derived number. Null has its reason in `note`."""

    value: float | None
    unit: str
    interval: tuple[float, float] | None = None
    note: str | None = None


class Failure(Part):
    rank: int | None
    exit_code: int | None
    error: str | None
    stderr_tail: str


class Record(Part):
    schema_version: int = Field(SCHEMA, alias="schema")
    kind: Literal["run"] = "run"
    id: str
    created: str
    status: Status
    reasons: list[Reason]
    notes: list[str]
    case: Case
    scope: Scope
    tune: dict[str, Any]
    plan: Plan
    engine: Engine
    environment: dict[str, Any]
    site: dict[str, str]
    weights: dict[str, Any]
    data: dict[str, Any]
    passes: list[Window]
    budget: dict[str, float]
    ranks: list[dict[str, Any]]
    samples: list[Sample]
    telemetry: list[dict[str, Any]]
    outputs: dict[str, Any]
    checks: list[Check]
    quality: Quality
    metrics: dict[str, Value]
    restarts: list[dict[str, Any]] = []
    failure: Failure | None = None
    checkpoints: str | None = Field(None, description="folder, from where the record lies; left out where there is none")
    hashes: dict[str, str] = {}


def canonical_bytes(table: dict[str, Any]) -> bytes:
    text = json.dumps(table, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()).hexdigest()


def _hashes(table: dict[str, Any]) -> dict[str, str]:
    body = {key: value for key, value in table.items() if key != "hashes"}
    return {"samples": _digest(table["samples"]), "record": _digest(body)}


def seal(record: Record) -> Record:
    """The record with its hashes."""
    return record.model_copy(update={"hashes": _hashes(to_table(record))})


def to_table(record: Record) -> dict[str, Any]:
    table = record.model_dump(mode="json", by_alias=True)
    if record.checkpoints is None:  # records are older than this field, and their bytes stay as they are
        del table["checkpoints"]
    return table


def file_name(record: Record) -> str:
    stamp = record.created.replace("-", "").replace(":", "").split(".")[0].split("+")[0]
    case = record.case
    parts = (stamp, case.name, case.size, case.division, case.precision, record.engine.name, record.id[:8])
    # Some of these names are free text, from case files of strangers too; none may lead out of the folder.
    return "-".join(re.sub(r"[^A-Za-z0-9._-]", "_", part)[:64].lstrip(".") for part in parts) + ".json"


def writable(folder: Path) -> None:
    """Make the folder and prove, before any work, that a record can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(8)}"
        twin = probe.with_suffix(".link")
        with probe.open("xb"):
            pass
        try:
            os.link(probe, twin)  # what `write` needs, and some file systems do not have
            twin.unlink()
        finally:
            probe.unlink()
    except OSError as error:
        raise RequestError(
            f"output folder {str(folder)!r} cannot be written: {error.strerror}; choose another with --out"
        ) from error


def write(record: Record, folder: Path) -> Path:
    """The whole file or none: written beside its place, synced, then linked to a name that must not exist yet."""
    path = folder / file_name(record)
    try:
        _write(path, record)
    except OSError as error:
        raise LostError(f"the record cannot be written to {str(folder)!r}: {error.strerror}; the run is lost") from error
    return path


def _write(path: Path, record: Record) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as out:
            out.write(canonical_bytes(to_table(record)))
            out.flush()
            os.fsync(out.fileno())
        os.link(temporary, path)
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def read(path: Path) -> Record:
    """A record from a file, or one line on why not."""
    raw = _bytes(path)
    try:
        table = json.loads(raw)
        canonical_bytes(table)  # what has no such bytes was never written by us: NaN, infinities, half characters
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not a record: {error}") from error
    if _depth(table) > MAX_DEPTH:
        raise RequestError(f"{path}: not a record: nested more than {MAX_DEPTH} deep")
    version = table.get("schema") if isinstance(table, dict) else None
    if type(version) is not int or version != SCHEMA:
        raise RequestError(f"{path}: schema is {version!r}; this version reads {SCHEMA}")
    try:
        return Record.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{path}: not a record: {where}: {first['msg']}") from error


def _depth(table: Any) -> int:
    """How deep tables and lists are nested."""
    depth, level = 0, [table]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return depth


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"{path}: not a file; give the path of a record")
        size = path.stat().st_size
        if size > MAX_RECORD_BYTES:
            raise RequestError(f"{path}: {size} bytes; a record has at most {MAX_RECORD_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}; give the path of a record") from error


def integrity(path: Path, record: Record) -> list[str]:
    """What is wrong with the bytes of a record: nothing, where it is as it was written."""
    table = to_table(record)
    wrong = []
    if canonical_bytes(table) != _bytes(path):
        wrong.append("the bytes are not those that were written")
    for name, digest in _hashes(table).items():
        if record.hashes.get(name) != digest:
            wrong.append(f"the hash of {name} does not match")
    return wrong


def schema() -> dict[str, Any]:
    """The JSON Schema of a record."""
    out = Record.model_json_schema(by_alias=True)
    out["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    out["title"] = "Steelyard record"
    return out
