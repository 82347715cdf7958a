"""Checkpoints of a training run: what lies in their folder, which of them is whole, and what may go
on from it.

    FOLDER/run.json               the question that is being trained on
    FOLDER/before-N.json          what replica N found on held-out data before the first step
    FOLDER/step-00000050/         everything after 50 steps: `state.json`, `tensors.json`, `rank-N.bin`
    FOLDER/step-00000100.part/    one that is being written, or was when its run died

A checkpoint is written under its second name, brought to disk, and renamed: what has the first name
is whole. Every number is in JSON and every tensor is plain bytes. Nothing here needs torch.
"""

import hashlib
import json
import re
import shutil
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from steelyard import files
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.schema import Frozen, canonical, first_problem

# whole checkpoints of a run: should the last one turn out to be damaged, there is one before
KEPT = 2
MAX_JSON_BYTES = 256 << 20
MAX_PARTS = 4096  # of a tensor
RUN, STATE, TENSORS = "run.json", "state.json", "tensors.json"
BEFORE = "before-{}.json"
STEP = re.compile(r"step-[0-9]{8}")
PART = ".part"
CHECKSUM = "sha256"  # of a table's other values

Read = TypeVar("Read", bound=Frozen)


class CheckpointRun(Frozen):
    """What a folder's checkpoints are of."""

    name: str
    question: dict[str, Any]
    key: str
    sample: int | None
    engine: str


class Numbers(Frozen):
    """What an optimiser keeps beside tensors: its updates, and of scaled losses the scale and how
    long it has held.
    """

    updates: float = Field(ge=0, le=2**53)
    scale: float | None = Field(None, gt=0)
    growth: float | None = Field(None, ge=0, le=2**53)


Loss = Annotated[float, Field(ge=-1e30, le=1e30)]


class State(Frozen):
    """Where a run stood: `step` steps were taken, with these losses, from these weights. `reached`
    says that a target was.
    """

    step: int = Field(ge=1, le=10**8)
    losses: list[Loss | None]
    numbers: Numbers
    plan: Plan
    weights: dict[str, Any]
    reached: bool = False


class Before(Frozen):
    """What one replica found on held-out data before the first step."""

    table: dict[str, Any]


class Chunk(Frozen):
    """A box of a tensor, in a file."""

    offset: list[int]
    sizes: list[int]
    file: str = Field(pattern=r"^rank-\d{1,6}\.bin$")
    at: int = Field(ge=0)
    length: int = Field(ge=0)
    crc32: int = Field(ge=0)


class StoredTensor(Frozen):
    dtype: str
    size: list[int]
    chunks: list[Chunk]


class Tensors(Frozen):
    """What the files of a checkpoint hold, and how long they are."""

    files: dict[str, int]
    tensors: dict[str, StoredTensor]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def whole(folder: Path) -> list[Path]:
    """The checkpoints of a folder that were finished, the last one first."""
    found = (
        [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=lambda path: path.name, reverse=True)


def last(folder: Path) -> tuple[Path, State, list[str]]:
    """The last checkpoint whose files are all there and as long as they were, and the names of
    those that were passed over.
    """
    if not (folder / RUN).is_file():
        raise RequestError(
            f"--resume {str(folder)!r}: no folder of checkpoints (no {RUN} in it); give a record,"
            " or its folder in checkpoints/"
        )
    wrong: dict[str, str] = {}
    for path in whole(folder):
        try:
            check_files(path)
            return path, read(path / STATE, State), list(wrong)
        except RequestError as error:
            wrong[path.name] = str(error)
    why = f" ({next(iter(wrong.values()))})" if wrong else ""
    raise RequestError(f"{folder}: holds no whole checkpoint{why}; there is nothing to resume")


def check_files(path: Path) -> Tensors:
    """The table of a checkpoint, if its files are what it says."""
    table = read(path / TENSORS, Tensors)
    for name, size in table.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise RequestError(
                f"{path / name}: {'missing' if found is None else f'{found} bytes'}; it was written"
                f" with {size}"
            )
    for name, stored in table.tensors.items():
        _check_boxes(path / TENSORS, name, stored)
        if any(
            chunk.at + chunk.length > table.files.get(chunk.file, -1) for chunk in stored.chunks
        ):
            raise RequestError(f"{path / TENSORS}: {name} lies beyond the end of its file")
    return table


def _check_boxes(table: Path, name: str, stored: StoredTensor) -> None:
    """That the parts of a tensor lie inside of it, and have every number of it once."""
    boxes = [list(zip(chunk.offset, chunk.sizes, strict=False)) for chunk in stored.chunks]
    shaped = all(
        len(chunk.offset) == len(chunk.sizes) == len(stored.size) for chunk in stored.chunks
    )
    inside = shaped and all(_inside(box, stored.size) for box in boxes)
    numbers = sum(prod(chunk.sizes) for chunk in stored.chunks)
    if not inside or numbers != prod(stored.size) or len(boxes) > MAX_PARTS or _overlap(boxes):
        raise RequestError(f"{table}: the parts of {name} do not add up to it")


def _inside(box: list[tuple[int, int]], whole: list[int]) -> bool:
    return all(
        begin >= 0 and size >= 0 and begin + size <= most
        for (begin, size), most in zip(box, whole, strict=True)
    )


def _overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    return any(
        all(a < b + m and b < a + n for (a, n), (b, m) in zip(one, other, strict=True))
        for one, other in combinations(boxes, 2)
    )


def read(path: Path, kind: type[Read]) -> Read:
    """A table of a checkpoint, or one line on why not."""
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"{path}: not a file; not one of a checkpoint's tables")
        return kind.model_validate(_checked(path, files.parse(files.read(path, MAX_JSON_BYTES))))
    except files.TooLargeError as error:
        raise RequestError(f"{path}: {error}; not one of a checkpoint's tables") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise RequestError(f"{path}: not a checkpoint's table: {first_problem(error)}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not a checkpoint's table: {error}") from error


def write(path: Path, table: Frozen) -> None:
    """On disk when this returns, with a checksum."""
    told = json.loads(table.model_dump_json())
    files.write(path, json.dumps(told | {CHECKSUM: _checksum(told)}).encode())


def _checked(path: Path, told: Any) -> Any:
    """A table without its checksum, which must be right. Older checkpoints have none, and are read
    as they are.
    """
    if not isinstance(told, dict) or CHECKSUM not in told:
        return told
    rest = {name: value for name, value in told.items() if name != CHECKSUM}
    if told[CHECKSUM] != _checksum(rest):
        raise RequestError(f"{path}: damaged: its checksum is not that of what it holds")
    return rest


def _checksum(told: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(told).encode()).hexdigest()


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
    files.sync(place)
    place.rename(place.with_name(place.name.removesuffix(PART)))
    files.sync(place.parent)
    for old in whole(place.parent)[KEPT:]:
        shutil.rmtree(old)


def check_same(
    run: CheckpointRun, name: str, question: dict[str, Any], sample: int | None, engine: str
) -> None:
    """Refuse to go on with another question: everything that decides a loss must be as it was."""
    here, there = _flat(question), _flat(run.question)
    differ = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if differ:
        key = differ[0]
        raise RequestError(
            f"--resume: the checkpoint is of {run.name} with"
            f" {key}={canonical(there.get(key))[:60]}, asked is {name} with"
            f" {key}={canonical(here.get(key))[:60]}; resume the same question"
        )
    if run.sample != sample:
        was = "without --sample" if run.sample is None else f"with --sample {run.sample}"
        raise RequestError(
            f"--resume: the checkpoint was made {was}, which changes the steps; use the same"
        )
    if run.engine != engine:
        raise RequestError(
            f"--resume: the checkpoint is of engine {run.engine}, asked is {engine}; resume with"
            f" --engine {run.engine}"
        )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return out
