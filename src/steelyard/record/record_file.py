"""What records and spec records have in common as files: name, canonical bytes, hashes, and limits
on what is read.

record/record.py and record/ceilings_record.py call this with their model. A record may come from a
stranger: size, nesting and the memory that parsing takes are bounded before it is parsed.
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
from steelyard.accelerators.cpu import read_available_bytes
from steelyard.errors import LostError, RequestError
from steelyard.record.run_facts import RankFacts
from steelyard.schema import FrozenModel, describe_first_problem

RecordType = TypeVar("RecordType", bound=FrozenModel)

SCHEMA_VERSION = 1
# Largest record by number of ranks: 100,000 steps of one rank take 40 MB.
BASE_BYTES, RANK_BYTES, MAX_RECORD_BYTES = 32 << 20, 16 << 20, 1 << 30
HEAD_BYTES = 4 << 20  # the beginning of a record, in which its ranks are counted
# Bytes of memory that a parsed record takes at most: per byte of JSON, plus per dict or list.
# Measured on nested lists, which take 51 times their size, dicts, floats, strings and integers
# (tests/hard/test_bombs.py).
MEMORY_PER_BYTE, MEMORY_PER_TABLE = 25, 80
SMALL_BYTES = 1 << 20
MAX_DEPTH = 64  # of nested dicts and lists; a record has about ten


def to_canonical_bytes(data: dict[str, Any]) -> bytes:
    """Return the one spelling of a record's JSON data as bytes: UTF-8, keys in their given order,
    no spaces, a line feed at the end. Raise ValueError for NaN, infinity or a lone surrogate.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode()


def hash_json(value: Any) -> str:
    """Return the SHA-256 of JSON data in hexadecimal, over text with sorted keys and without
    spaces, so that the order of keys does not matter. Raise ValueError for NaN or infinity.
    """
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()
    ).hexdigest()


def compute_hashes(data: dict[str, Any], raw_key: str) -> dict[str, str]:
    """Return the three hashes of a record's JSON data, SHA-256 in hexadecimal by name: `samples` of
    the raw measurements, which are under the key `raw_key`; `record` of all values except `hashes`;
    `bytes` of the same including the order of keys, which has a meaning in some places.
    """
    body = {key: value for key, value in data.items() if key != "hashes"}
    in_order = hashlib.sha256(to_canonical_bytes(body)).hexdigest()
    return {"samples": hash_json(data.get(raw_key)), "record": hash_json(body), "bytes": in_order}


def join_file_name(created: str, *parts: str) -> str:
    """Join a record's time stamp and name parts with `-` to a file name without its ending.

    `created` is ISO 8601; its `-` and `:`, fraction and zone are dropped. In each part, characters
    other than letters, digits, `.`, `_` and `-` become `_`, at most 64 stay, and leading dots are
    removed: parts may come from an untrusted case file and must not lead out of the folder.
    """
    stamp = created.replace("-", "").replace(":", "").split(".")[0].split("+")[0]
    return "-".join(
        re.sub(r"[^A-Za-z0-9._-]", "_", part)[:64].lstrip(".") for part in (stamp, *parts)
    )


def write_record_file(data: dict[str, Any], path: Path) -> Path:
    """Write a record's JSON data in canonical bytes to a new file, completely or not at all, and
    return its path. Raise LostError if the file exists already or cannot be written.
    """
    try:
        files.write_file(path, to_canonical_bytes(data), new=True)
    except OSError as error:
        problem = (
            f"the record cannot be written to {str(path.parent)!r}: {error.strerror};"
            " the record is lost"
        )
        raise LostError(problem) from error
    return path


def read_record_file(path: Path, record_type: type[RecordType], noun: str) -> RecordType:
    """Read a record file and return it as a validated model of type `record_type`; hashes are not
    checked. Raise RequestError with one line if it cannot be read, is too large, is not JSON of
    this schema version, or does not fit; `noun` names the kind of record in the message.
    """
    try:
        return record_type.model_validate(parse_record(path, read_record_bytes(path)))
    except ValidationError as error:
        raise RequestError(f"{path}: not a {noun}: {describe_first_problem(error)}") from error


def find_file_damage(
    path: Path, record_type: type[FrozenModel], raw_key: str, later: tuple[str, ...] = ()
) -> list[str]:
    """Compare a record file with what was written, and return a sentence for each problem: bytes
    that are not the canonical ones or keys in another order, a hash that does not match or is
    missing, or an unknown hash. An empty list means intact.

    `raw_key` is the key of the raw measurements; hashes in `later` may be absent, because older
    records lack them. Values are not validated. Raise RequestError if the file cannot be read or
    parsed.
    """
    content = read_record_bytes(path)
    data = parse_record(path, content)
    order = [info.alias or name for name, info in record_type.model_fields.items()]
    problems = []
    if to_canonical_bytes(data) != content or list(data) != [
        name for name in order if name in data
    ]:
        problems.append("the bytes are not those that were written")
    stored_hashes, expected_hashes = data.get("hashes") or {}, compute_hashes(data, raw_key)
    for name, expected in expected_hashes.items():
        if stored_hashes.get(name) != expected and (name in stored_hashes or name not in later):
            problems.append(f"the hash of {name} does not match")
    return problems + [
        f"unknown hash {name!r}" for name in stored_hashes if name not in expected_hashes
    ]


def make_json_schema(record_type: type[FrozenModel], title: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a record's model as a dict, under this title; it
    describes what is read, with docstrings as descriptions.
    """
    json_schema = record_type.model_json_schema(by_alias=True)
    return {
        **json_schema,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
    }


def prove_writable(folder: Path) -> None:
    """Create a folder with its parents and prove, before any work, that a record can be written
    into it: create, hard-link and remove an empty probe file `.probe-…`. The folder stays. Raise
    RequestError if one of these fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(8)}"
        probe_link = probe.with_suffix(".link")
        with probe.open("xb"):
            pass
        try:
            os.link(probe, probe_link)  # some file systems have no links
            probe_link.unlink()
        finally:
            probe.unlink()
    except OSError as error:
        raise RequestError(
            f"output folder {str(folder)!r} cannot be written: {error.strerror}; choose another"
            " with --out"
        ) from error


def parse_record(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse the bytes of a record, and return its JSON data. `path` is only for messages.

    Raise RequestError if they are not JSON, hold NaN, infinity or a lone surrogate, are nested more
    than `MAX_DEPTH` deep, or have another `schema` than this version reads.
    """
    try:
        parsed = json.loads(raw)
        # raises for what we never write: NaN, infinities, lone surrogates
        to_canonical_bytes(parsed)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not a record: {error}") from error
    if _nesting_depth(parsed) > MAX_DEPTH:
        raise RequestError(f"{path}: not a record: nested more than {MAX_DEPTH} deep")
    version = parsed.get("schema") if isinstance(parsed, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise RequestError(f"{path}: schema is {version!r}; this version reads {SCHEMA_VERSION}")
    data: dict[str, Any] = parsed
    return data


def _nesting_depth(data: Any) -> int:
    """Return how deep dicts and lists in JSON data are nested: 0 for a plain value, 1 for a flat
    dict. Not recursive.
    """
    depth, level = 0, [data]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return depth


def read_record_bytes(path: Path) -> bytes:
    """Return the bytes of a record file. Raise RequestError if it is not a regular file, cannot be
    read, is larger than a record with its number of ranks may be, or would take more memory than is
    free once it is parsed.
    """
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
    """Raise RequestError if a record file of `size` bytes is larger than the number of ranks in its
    first `HEAD_BYTES` allows (`BASE_BYTES` and `RANK_BYTES` for each), or than `MAX_RECORD_BYTES`.
    `file` is the open file; its position is at its beginning afterwards.
    """
    ranks = _count_ranks(file.read(HEAD_BYTES)) if size <= MAX_RECORD_BYTES else 0
    file.seek(0)
    max_bytes = min(BASE_BYTES + RANK_BYTES * max(1, ranks), MAX_RECORD_BYTES)
    if size > max_bytes:
        rank_text = f" of {ranks} rank(s)" if size <= MAX_RECORD_BYTES else ""
        limit = max_bytes if rank_text else MAX_RECORD_BYTES
        raise RequestError(f"{path}: {size} bytes; the limit for a record{rank_text} is {limit}")


def _check_memory(path: Path, raw: bytes) -> None:
    """Raise RequestError if parsing these bytes of a record could take more memory than this
    process can get (`MEMORY_PER_BYTE`, and `MEMORY_PER_TABLE` for each bracket). Records of up to
    `SMALL_BYTES` are not checked.
    """
    tables = raw.count(b"{") + raw.count(b"[") if len(raw) > SMALL_BYTES else 0
    needed_bytes = MEMORY_PER_BYTE * len(raw) + MEMORY_PER_TABLE * tables
    if len(raw) <= SMALL_BYTES or needed_bytes <= (free_bytes := read_available_bytes()):
        return
    raise RequestError(
        f"{path}: {len(raw)} bytes take up to {needed_bytes >> 20} MiB of memory to read, and"
        f" {free_bytes >> 20} MiB are free; free some, or read it on a larger machine"
    )


def _count_ranks(head: bytes) -> int:
    """Return how many ranks the first bytes of a record list; those that are cut off are not
    counted, and it is 0 if the bytes are not as records are written.

    `ranks` stands before everything that grows with the number of steps. Values are parsed one
    after the other, so that a text that only looks like a rank is not counted.
    """
    text = head.decode("utf-8", "ignore")
    decoder, position, ranks = json.JSONDecoder(), 0, 0
    # raised where the head ends, or if it is no record
    with contextlib.suppress(ValueError, IndexError, RecursionError):
        key = None
        while key != "ranks" and text[position] in "{,":
            key, position = decoder.raw_decode(text, position + 1)
            position += 1
            if key != "ranks":
                _, position = decoder.raw_decode(text, position)
        while key == "ranks" and text[position] in "[,":
            rank, position = decoder.raw_decode(text, position + 1)
            if RankFacts.model_validate(rank).rank != ranks:
                return 0
            ranks += 1
    return ranks


def read_record_kind(path: Path) -> str:
    """Return the kind of record that a file's first bytes name, `run` or `spec` in files of this
    program; `run` if they name none or the file cannot be read. The rest of the file is not
    checked, and nothing is raised.
    """
    try:
        with files.open_regular(path) as file:
            match = re.match(rb'\{"schema":\d+,"kind":"(\w{1,16})"', file.read(64))
    except OSError:
        return "run"
    return match[1].decode() if match else "run"
