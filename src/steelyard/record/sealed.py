"""What every kind of record has in common as a file: name, canonical bytes, hashes over them, and
limits on what is read.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError

from steelyard import files
from steelyard.accelerators.cpu import available_to_process
from steelyard.errors import LostError, RequestError
from steelyard.record.facts import RankFacts
from steelyard.schema import Frozen, first_problem

Kind = TypeVar("Kind", bound=Frozen)

SCHEMA = 1
# How large a record may be, by its ranks: 100,000 steps of one take 40 MB.
BASE_BYTES, RANK_BYTES, MAX_RECORD_BYTES = 32 << 20, 16 << 20, 1 << 30
HEAD_BYTES = 4 << 20  # of a record, in which its ranks are counted
# Memory that a parsed record takes at most, by its bytes, and by its tables and lists on top of
# these. Measured on lists in lists, which take 51 times their size, tables, floats, strings and
# integers (tests/hard/test_bombs.py).
MEMORY_PER_BYTE, MEMORY_PER_TABLE = 25, 80
SMALL_BYTES = 1 << 20
MAX_DEPTH = 64  # of nested tables and lists; a record has about ten


def canonical_bytes(table: dict[str, Any]) -> bytes:
    text = json.dumps(table, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode()


def digest(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()
    ).hexdigest()


def hashes(table: dict[str, Any], raw: str) -> dict[str, str]:
    """Return the hashes of a record: `samples` of what was measured, under the key `raw`; `record`
    of the values; `bytes` of the order of keys too, which in some tables has a meaning."""
    body = {key: value for key, value in table.items() if key != "hashes"}
    in_order = hashlib.sha256(canonical_bytes(body)).hexdigest()
    return {"samples": digest(table.get(raw)), "record": digest(body), "bytes": in_order}


def file_name(created: str, *parts: str) -> str:
    """Return the name of a record without its ending. Some parts are free text, from case files of
    strangers too; none may lead out of the folder."""
    stamp = created.replace("-", "").replace(":", "").split(".")[0].split("+")[0]
    return "-".join(
        re.sub(r"[^A-Za-z0-9._-]", "_", part)[:64].lstrip(".") for part in (stamp, *parts)
    )


def write(table: dict[str, Any], path: Path) -> Path:
    """Write the whole file or none. Raise LostError if it exists already or cannot be written."""
    try:
        files.write(path, canonical_bytes(table), new=True)
    except OSError as error:
        why = (
            f"the record cannot be written to {str(path.parent)!r}: {error.strerror}; the record is"
            " lost"
        )
        raise LostError(why) from error
    return path


def read(path: Path, kind: type[Kind], noun: str) -> Kind:
    """Read a record of one kind. Raise RequestError, one line, if it is none."""
    try:
        return kind.model_validate(table(path, read_bytes(path)))
    except ValidationError as error:
        raise RequestError(f"{path}: not a {noun}: {first_problem(error)}") from error


def integrity(path: Path, kind: type[Frozen], raw: str, later: tuple[str, ...] = ()) -> list[str]:
    """Return what is wrong with the bytes of a record: nothing, where it is as it was written.
    Older records lack the hashes in `later`."""
    read = read_bytes(path)
    found = table(path, read)
    order = [info.alias or name for name, info in kind.model_fields.items()]
    wrong = []
    if canonical_bytes(found) != read or list(found) != [name for name in order if name in found]:
        wrong.append("the bytes are not those that were written")
    told, ours = found.get("hashes") or {}, hashes(found, raw)
    for name, made in ours.items():
        if told.get(name) != made and (name in told or name not in later):
            wrong.append(f"the hash of {name} does not match")
    return wrong + [
        f"hashes has a key {name!r}, which no record has" for name in told if name not in ours
    ]


def schema(kind: type[Frozen], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of record."""
    out = kind.model_json_schema(by_alias=True)
    return {**out, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}


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
            f"output folder {str(folder)!r} cannot be written: {error.strerror}; choose another"
            " with --out"
        ) from error


def table(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        table = json.loads(raw)
        # what has no such bytes was never written by us: NaN, infinities, half characters
        canonical_bytes(table)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not a record: {error}") from error
    if _depth(table) > MAX_DEPTH:
        raise RequestError(f"{path}: not a record: nested more than {MAX_DEPTH} deep")
    version = table.get("schema") if isinstance(table, dict) else None
    if type(version) is not int or version != SCHEMA:
        raise RequestError(f"{path}: schema is {version!r}; this version reads {SCHEMA}")
    found: dict[str, Any] = table
    return found


def _depth(table: Any) -> int:
    """How deep tables and lists are nested."""
    depth, level = 0, [table]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return depth


def read_bytes(path: Path) -> bytes:
    """Read the bytes of a record. Raise RequestError if it is no regular file, cannot be read, is
    larger than a record of its ranks may be, or would take more memory than there is once it is
    parsed."""
    try:
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > BASE_BYTES + RANK_BYTES:
                _check_size(path, size, file)
            raw = file.read()
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read: {error.strerror}; give the path of a record"
        ) from error
    _check_memory(path, raw)
    return raw


def _check_size(path: Path, size: int, file: BinaryIO) -> None:
    """Raise RequestError unless the ranks in the head of a record explain its size. Leave the file
    at its beginning."""
    ranks = _count_ranks(file.read(HEAD_BYTES)) if size <= MAX_RECORD_BYTES else 0
    file.seek(0)
    most = min(BASE_BYTES + RANK_BYTES * max(1, ranks), MAX_RECORD_BYTES)
    if size > most:
        of = f" of {ranks} rank(s)" if size <= MAX_RECORD_BYTES else ""
        limit = most if of else MAX_RECORD_BYTES
        raise RequestError(f"{path}: {size} bytes; the limit for a record{of} is {limit}")


def _check_memory(path: Path, raw: bytes) -> None:
    """Raise RequestError if a record could take more memory than there is. Small ones always fit."""
    tables = raw.count(b"{") + raw.count(b"[") if len(raw) > SMALL_BYTES else 0
    needed = MEMORY_PER_BYTE * len(raw) + MEMORY_PER_TABLE * tables
    if len(raw) <= SMALL_BYTES or needed <= (free := available_to_process()):
        return
    raise RequestError(
        f"{path}: {len(raw)} bytes take up to {needed >> 20} MiB of memory to read, and"
        f" {free >> 20} MiB are free; free some, or read it on a larger machine"
    )


def _count_ranks(head: bytes) -> int:
    """Return how many ranks the first bytes of a record list, 0 where it is not as records are
    written.

    `ranks` stands before everything that grows with the number of steps. Values are parsed one
    after the other, so that a text that only looks like a rank is not counted."""
    text = head.decode("utf-8", "ignore")
    decoder, place, ranks = json.JSONDecoder(), 0, 0
    # the head ends, or it is no record
    with contextlib.suppress(ValueError, IndexError, RecursionError):
        key = None
        while key != "ranks" and text[place] in "{,":
            key, place = decoder.raw_decode(text, place + 1)
            place += 1
            if key != "ranks":
                _, place = decoder.raw_decode(text, place)
        while key == "ranks" and text[place] in "[,":
            rank, place = decoder.raw_decode(text, place + 1)
            if RankFacts.model_validate(rank).rank != ranks:
                return 0
            ranks += 1
    return ranks


def kind(path: Path) -> str:
    """Which kind of record a file begins as, told by its first bytes: whoever reads it checks the
    rest.
    """
    try:
        with files.open_regular(path) as file:
            found = re.match(rb'\{"schema":\d+,"kind":"(\w{1,16})"', file.read(64))
    except OSError:
        return "run"
    return found[1].decode() if found else "run"
