"""The folder of a training run's checkpoints: its layout, which checkpoints are complete, and
whether a run may resume from one.

    FOLDER/run.json               the question that is being trained on
    FOLDER/before-N.json          outputs of pass `before` on replica N
    FOLDER/step-00000050/         all after 50 steps: `state.json`, `tensors.json`, `rank-N.bin`
    FOLDER/step-00000100.part/    one that is being written, or was when its run died

A checkpoint is written as `.part`, synced to disk and then renamed, so that a folder without
`.part` is complete. All numbers are in JSON and all tensors are plain bytes. Nothing here imports
torch: the parent uses it for `--resume`, workers for writing (run/worker.py,
checkpoint_storage.py).
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

# complete checkpoints of a run: if the last one turns out to be damaged, there is one before it
KEPT = 2
MAX_JSON_BYTES = 256 << 20
MAX_PARTS = 4096  # of one tensor
RUN, STATE, TENSORS = "run.json", "state.json", "tensors.json"
BEFORE = "before-{}.json"
STEP = re.compile(r"step-[0-9]{8}")
PART = ".part"
CHECKSUM = "sha256"  # key of the checksum of all other values of a JSON file

Read = TypeVar("Read", bound=Frozen)


class CheckpointRun(Frozen):
    """`run.json`: the case name, question, key, `--sample` and engine of the run whose checkpoints
    the folder holds.
    """

    name: str
    question: dict[str, Any]
    key: str
    sample: int | None
    engine: str


class Numbers(Frozen):
    """What an optimizer stores beside tensors: its number of updates and, if losses are scaled
    (fp16), the loss scale and how many steps it has stood without overflow (`growth`).
    """

    updates: float = Field(ge=0, le=2**53)
    scale: float | None = Field(None, gt=0)
    growth: float | None = Field(None, ge=0, le=2**53)


Loss = Annotated[float, Field(ge=-1e30, le=1e30)]


class State(Frozen):
    """`state.json`: the state of a run after `step` steps, with the loss of each step (None: not
    finite), the source of the initial weights, the plan, and whether the target accuracy was
    reached.
    """

    step: int = Field(ge=1, le=10**8)
    losses: list[Loss | None]
    numbers: Numbers
    plan: Plan
    weights: dict[str, Any]
    reached: bool = False


class Before(Frozen):
    """`before-N.json`: the outputs of pass `before` on one replica, which a resumed run does not
    compute again.
    """

    table: dict[str, Any]


class Chunk(Frozen):
    """A rectangular part of a tensor (`offset`, `sizes`), and the bytes that hold it: `length`
    bytes from byte `at` of a file.
    """

    offset: list[int]
    sizes: list[int]
    file: str = Field(pattern=r"^rank-\d{1,6}\.bin$")
    at: int = Field(ge=0)
    length: int = Field(ge=0)
    crc32: int = Field(ge=0)


class StoredTensor(Frozen):
    """A tensor of a checkpoint: its dtype, whole shape, and the chunks that make it up."""

    dtype: str
    size: list[int]
    chunks: list[Chunk]


class Tensors(Frozen):
    """`tensors.json`: the index of a checkpoint. `files` has the length of each file in bytes,
    `tensors` the tensors by name.
    """

    files: dict[str, int]
    tensors: dict[str, StoredTensor]


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps, such as `step-00000050`."""
    return f"step-{step:08d}"


def whole(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints, the last step first; none if `folder` does
    not exist.
    """
    found = (
        [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=lambda path: path.name, reverse=True)


def last(folder: Path) -> tuple[Path, State, list[str]]:
    """Return the last checkpoint whose files are all present with their lengths, its state, and the
    names of later checkpoints that were skipped because they are damaged.

    Raises RequestError if `folder` has no `run.json`, or no usable checkpoint. Contents of tensor
    files are not read here.
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
    """Return the index of a checkpoint. Raises RequestError if it cannot be read, a file is missing
    or has another length, or the chunks of a tensor overlap, leave gaps or lie beyond the end of
    their file.
    """
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
    """Raise RequestError unless the chunks of a tensor lie inside of it and cover each element
    exactly once, and are at most `MAX_CHUNKS`.
    """
    boxes = [list(zip(chunk.offset, chunk.sizes, strict=False)) for chunk in stored.chunks]
    shaped = all(
        len(chunk.offset) == len(chunk.sizes) == len(stored.size) for chunk in stored.chunks
    )
    inside = shaped and all(_inside(box, stored.size) for box in boxes)
    numbers = sum(prod(chunk.sizes) for chunk in stored.chunks)
    if not inside or numbers != prod(stored.size) or len(boxes) > MAX_PARTS or _overlap(boxes):
        raise RequestError(f"{table}: the parts of {name} do not add up to it")


def _inside(box: list[tuple[int, int]], whole: list[int]) -> bool:
    """Return whether a box, as (begin, size) per dimension, lies inside a tensor of this shape."""
    return all(
        begin >= 0 and size >= 0 and begin + size <= most
        for (begin, size), most in zip(box, whole, strict=True)
    )


def _overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    """Return whether any two boxes, as (begin, size) per dimension, share an element."""
    return any(
        all(a < b + m and b < a + n for (a, n), (b, m) in zip(one, other, strict=True))
        for one, other in combinations(boxes, 2)
    )


def read(path: Path, kind: type[Read]) -> Read:
    """Read one of a checkpoint's JSON files as a pydantic model, and check its checksum if it has
    one. Raises RequestError, in one line, if it is missing, larger than `MAX_JSON_BYTES`, damaged
    or not of this model.
    """
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
    """Write a model as JSON with its checksum; it is on disk when this returns."""
    told = json.loads(table.model_dump_json())
    files.write(path, json.dumps(told | {CHECKSUM: _checksum(told)}).encode())


def _checked(path: Path, told: Any) -> Any:
    """Return the content without its checksum. Raises RequestError if the checksum is wrong; a
    content without one, as older checkpoints have, is returned unchanged.
    """
    if not isinstance(told, dict) or CHECKSUM not in told:
        return told
    rest = {name: value for name, value in told.items() if name != CHECKSUM}
    if told[CHECKSUM] != _checksum(rest):
        raise RequestError(f"{path}: damaged: its checksum is not that of what it holds")
    return rest


def _checksum(told: dict[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON, as hex digits."""
    return hashlib.sha256(canonical(told).encode()).hexdigest()


def begin(folder: Path, step: int) -> Path:
    """Create the empty folder `step-N.part` for a checkpoint and return it. Partial checkpoints
    that an earlier run left in `folder` are deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.endswith(PART) and STEP.fullmatch(path.name.removesuffix(PART)):
            shutil.rmtree(path)
    place = folder / f"{name_of(step)}{PART}"
    place.mkdir()
    return place


def finish(place: Path) -> None:
    """Rename a partial checkpoint to its final name, synced to disk, and delete all complete
    checkpoints but the last two.
    """
    files.sync(place)
    place.rename(place.with_name(place.name.removesuffix(PART)))
    files.sync(place.parent)
    for old in whole(place.parent)[KEPT:]:
        shutil.rmtree(old)


def check_same(
    run: CheckpointRun, name: str, question: dict[str, Any], sample: int | None, engine: str
) -> None:
    """Raise RequestError, with the first difference, unless the question, `--sample` and engine are
    those of the run that wrote the checkpoints.
    """
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
    """Return nested dicts as one dict with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return out
