"""What every kind of record has in common as a file: canonical bytes, hashes over them, and limits on what is read."""

import hashlib
import json
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError

SCHEMA = 1
# How large a record may be, by its ranks: 100,000 steps of one take 40 MB. Parsed it takes 25 times its size in memory.
BASE_BYTES, RANK_BYTES, MAX_RECORD_BYTES = 32 << 20, 16 << 20, 1 << 30
RANK_MARK = b'"matmul_flops_per_s":'  # stands in a record once for each rank
MAX_DEPTH = 64  # of nested tables and lists; a record has about ten


def canonical_bytes(table: dict[str, Any]) -> bytes:
    text = json.dumps(table, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text + "\n").encode()


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()).hexdigest()


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


def table(path: Path, raw: bytes) -> dict[str, Any]:
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
    found: dict[str, Any] = table
    return found


def _depth(table: Any) -> int:
    """How deep tables and lists are nested."""
    depth, level = 0, [table]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return depth


def read_bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"{path}: not a file; give the path of a record")
        size = path.stat().st_size
        if size > BASE_BYTES + RANK_BYTES:
            ranks = _ranks(path) if size <= MAX_RECORD_BYTES else size
            most = min(BASE_BYTES + RANK_BYTES * max(1, ranks), MAX_RECORD_BYTES)
            if size > most:
                of = f" of {ranks} rank(s)" if most < MAX_RECORD_BYTES else ""
                raise RequestError(f"{path}: {size} bytes; the limit for a record{of} is {most}")
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}; give the path of a record") from error


def _ranks(path: Path) -> int:
    """How many ranks a file tells of, without parsing it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return sum(1 for _ in re.finditer(RANK_MARK, content))


def kind(path: Path) -> str:
    """Which kind of record a file begins as, told by its first bytes: whoever reads it checks the rest."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return "run"
        with path.open("rb") as file:
            found = re.match(rb'\{"schema":\d+,"kind":"(\w{1,16})"', file.read(64))
    except OSError:
        return "run"
    return found[1].decode() if found else "run"
