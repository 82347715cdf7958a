"""Checkpoints of a training run: what lies in their folder, which of them is whole, and what may go on from it.

    FOLDER/run.json               the question that is being trained on
    FOLDER/step-00000050/         everything after 50 steps: `state.json`, `tensors.json`, `rank-N.bin`
    FOLDER/step-00000100.part/    one that is being written, or was when its run died

A checkpoint is written under its second name, brought to disk, and renamed: what has the first name is whole. Every number
is in JSON and every tensor is plain bytes. Nothing here needs torch.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from steelyard.case import canonical
from steelyard.errors import RequestError
from steelyard.question import Frozen
from steelyard.record import Plan

KEPT = 2  # whole checkpoints of a run: should the last one turn out to be damaged, there is one before
MAX_JSON_BYTES = 256 << 20
RUN, STATE, TENSORS = "run.json", "state.json", "tensors.json"
STEP = re.compile(r"step-(\d{8})")
PART = ".part"

Read = TypeVar("Read", bound=Frozen)


class Run(Frozen):
    """What a folder's checkpoints are of."""

    name: str
    question: dict[str, Any]
    key: str
    sample: int | None
    engine: str


class State(Frozen):
    """Where a run stood: `step` steps were taken, with these losses."""

    step: int = Field(ge=1)
    losses: list[float | None]
    numbers: dict[str, float]
    plan: Plan


class Chunk(Frozen):
    """A box of a tensor, in a file."""

    offset: list[int]
    sizes: list[int]
    file: str = Field(pattern=r"^rank-\d{1,6}\.bin$")
    at: int = Field(ge=0)
    length: int = Field(ge=0)
    crc32: int = Field(ge=0)


class Stored(Frozen):
    dtype: str
    size: list[int]
    chunks: list[Chunk]


class Tensors(Frozen):
    """What the files of a checkpoint hold, and how long they are."""

    files: dict[str, int]
    tensors: dict[str, Stored]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def whole(folder: Path) -> list[Path]:
    """The checkpoints of a folder that were finished, the last one first."""
    found = [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def last(folder: Path) -> tuple[Path, State]:
    """The last checkpoint whose files are all there and as long as they were."""
    if not folder.is_dir():
        raise RequestError(f"checkpoint folder {str(folder)!r} does not exist; give the record of a run that has one")
    wrong = ""
    for path in whole(folder):
        try:
            check_files(path)
            return path, read(path / STATE, State)
        except RequestError as error:
            wrong = wrong or f" ({error})"
    raise RequestError(f"{folder}: holds no whole checkpoint{wrong}; run again without --resume")


def check_files(path: Path) -> Tensors:
    """The table of a checkpoint, if its files are what it says."""
    table = read(path / TENSORS, Tensors)
    for name, size in table.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise RequestError(f"{path / name}: {'missing' if found is None else f'{found} bytes'}; it was written with {size}")
    for name, stored in table.tensors.items():
        for chunk in stored.chunks:
            if chunk.at + chunk.length > table.files.get(chunk.file, -1):
                raise RequestError(f"{path / TENSORS}: {name} lies beyond the end of {chunk.file}")
    return table


def read(path: Path, kind: type[Read]) -> Read:
    """A table of a checkpoint, or one line on why not."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise RequestError(f"{path}: larger than {MAX_JSON_BYTES} bytes; not one of a checkpoint's tables")
        return kind.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{path}: not a checkpoint's table: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not a checkpoint's table: {error}") from error


def write(path: Path, table: Frozen) -> None:
    """On disk when this returns."""
    with path.open("wb") as file:
        file.write(table.model_dump_json().encode())
        file.flush()
        os.fsync(file.fileno())


def begin(folder: Path, step: int) -> Path:
    """An empty place for a checkpoint. What a run that died left half done is taken away."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.endswith(PART) and STEP.fullmatch(path.name.removesuffix(PART)):
            shutil.rmtree(path)
    place = folder / f"{name_of(step)}{PART}"
    place.mkdir()
    return place


def finish(place: Path) -> None:
    """Give a checkpoint its name, and forget the oldest ones."""
    sync(place)
    place.rename(place.with_name(place.name.removesuffix(PART)))
    sync(place.parent)
    for old in whole(place.parent)[KEPT:]:
        shutil.rmtree(old)


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_same(run: Run, name: str, question: dict[str, Any], sample: int | None, engine: str) -> None:
    """Refuse to go on with another question: everything that decides a loss must be as it was."""
    here, there = _flat(question), _flat(run.question)
    differ = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if differ:
        key = differ[0]
        raise RequestError(
            f"--resume: the checkpoint is of {run.name} with {key}={_shown(there.get(key))}, asked is {name} with "
            f"{key}={_shown(here.get(key))}; resume the same question"
        )
    if run.sample != sample:
        was = "without --sample" if run.sample is None else f"with --sample {run.sample}"
        raise RequestError(f"--resume: the checkpoint was made {was}, and a step is another with another; give the same")
    if run.engine != engine:
        raise RequestError(
            f"--resume: the checkpoint is of engine {run.engine}, asked is {engine}; resume with --engine {run.engine}"
        )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _shown(value: Any) -> str:
    return canonical(value)[:60]
