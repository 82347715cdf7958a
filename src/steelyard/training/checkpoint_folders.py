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
from steelyard.schema import FrozenModel, describe_first_problem, to_canonical_json

# complete checkpoints of a run: if the last one turns out to be damaged, there is one before it
MAX_CHECKPOINTS = 2
MAX_JSON_BYTES = 256 << 20
MAX_CHUNKS = 4096  # of one tensor
RUN_FILE, STATE_FILE, INDEX_FILE = "run.json", "state.json", "tensors.json"
BEFORE_FILE = "before-{}.json"
STEP_FOLDER = re.compile(r"step-[0-9]{8}")
PART_SUFFIX = ".part"
CHECKSUM_KEY = "sha256"  # key of the checksum of all other values of a JSON file

JsonModel = TypeVar("JsonModel", bound=FrozenModel)


class CheckpointRun(FrozenModel):
    """`run.json` in a folder of checkpoints: the run that they are of. `name` is the case's name,
    `question` its question as a nested dict, `key` the question's key, `sample` the number of
    `--sample` (None: not used) and `engine` the engine's name. `check_same_question` compares a run
    that resumes with it.
    """

    name: str
    question: dict[str, Any]
    key: str
    sample: int | None
    engine: str


class OptimizerScalars(FrozenModel):
    """What an optimizer stores beside tensors, in `state.json` of a checkpoint: `updates`, its
    number of updates, and, if losses are scaled (fp16), `scale`, the loss scale, and `growth`, how
    many steps it has stood without overflow; both None in other precisions.
    """

    updates: float = Field(ge=0, le=2**53)
    scale: float | None = Field(None, gt=0)
    growth: float | None = Field(None, ge=0, le=2**53)


Loss = Annotated[float, Field(ge=-1e30, le=1e30)]


class CheckpointState(FrozenModel):
    """`state.json` of a checkpoint: the state of a run after `step` steps, the same for all ranks.
    `losses` has the loss of each step from the first on (None: not finite), `numbers` the
    optimizer's scalars, `plan` the parallel plan, `weights` the source of the initial weights as a
    dict, `reached` whether the evaluation's target had been reached. Tensors are not in it.
    """

    step: int = Field(ge=1, le=10**8)
    losses: list[Loss | None]
    numbers: OptimizerScalars
    plan: Plan
    weights: dict[str, Any]
    reached: bool = False


class BeforePassOutputs(FrozenModel):
    """`before-N.json` in a folder of checkpoints: `table` is the JSON-able dict of the outputs of
    pass `before` on replica N, which a resumed run takes over and does not compute again.
    """

    table: dict[str, Any]


class TensorChunk(FrozenModel):
    """A rectangular part of a stored tensor and where its bytes lie: it begins at `offset` and has
    `sizes`, in elements per dimension; its bytes are `length` bytes from byte `at` of `file`
    (`rank-N.bin`), with the checksum `crc32`. Written by `CheckpointWriter` into `tensors.json`.
    """

    offset: list[int]
    sizes: list[int]
    file: str = Field(pattern=r"^rank-\d{1,6}\.bin$")
    at: int = Field(ge=0)
    length: int = Field(ge=0)
    crc32: int = Field(ge=0)


class StoredTensor(FrozenModel):
    """A tensor of a checkpoint, as `tensors.json` has it: `dtype` (torch's name, such as
    `float32`), `size`, the shape of the whole tensor, and `chunks`, the `TensorChunk`s that cover
    it, in any order and of any rank's file.
    """

    dtype: str
    size: list[int]
    chunks: list[TensorChunk]


class CheckpointIndex(FrozenModel):
    """`tensors.json`, the index of a checkpoint: `files` maps each `rank-N.bin` to its length in
    bytes, `tensors` each tensor's name to its `StoredTensor` (dtype, whole shape, and chunks in
    ranks' files). Written by `CheckpointWriter.finish`, read and checked by `read_checked_index`.
    """

    files: dict[str, int]
    tensors: dict[str, StoredTensor]


def format_step_folder(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps, such as `step-00000050`."""
    return f"step-{step:08d}"


def list_finished_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints (named `step-N`, not `.part`), the last step
    first; none if `folder` does not exist. Their contents are not looked at.
    """
    finished = (
        [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
        if folder.is_dir()
        else []
    )
    return sorted(finished, key=lambda path: path.name, reverse=True)


def find_last_checkpoint(folder: Path) -> tuple[Path, CheckpointState, list[str]]:
    """Return (folder, state, skipped) of the last checkpoint whose index is right and whose files
    are all present with their lengths; `skipped` are the names of later checkpoints that are
    damaged, the last first.

    Raises RequestError if `folder` has no `run.json`, or no usable checkpoint. Contents of tensor
    files are not read here.
    """
    if not (folder / RUN_FILE).is_file():
        raise RequestError(
            f"--resume {str(folder)!r}: not a folder of checkpoints (it has no {RUN_FILE}); give a"
            " record,"
            " or its folder in checkpoints/"
        )
    problems: dict[str, str] = {}
    for path in list_finished_checkpoints(folder):
        try:
            read_checked_index(path)
            return path, read_checkpoint_json(path / STATE_FILE, CheckpointState), list(problems)
        except RequestError as error:
            problems[path.name] = str(error)
    first_problem_text = f" ({next(iter(problems.values()))})" if problems else ""
    raise RequestError(
        f"{folder}: no complete checkpoint{first_problem_text}; there is nothing to resume from"
    )


def read_checked_index(path: Path) -> CheckpointIndex:
    """Return the index of the checkpoint folder `path`. Raises RequestError if it cannot be read, a
    file is missing or has another length, or the chunks of a tensor overlap, leave gaps, are too
    many or lie beyond the end of their file. Contents of files are not read.
    """
    index = read_checkpoint_json(path / INDEX_FILE, CheckpointIndex)
    for name, size in index.files.items():
        actual_size = (path / name).stat().st_size if (path / name).is_file() else None
        if actual_size != size:
            raise RequestError(
                f"{path / name}:"
                f" {'missing' if actual_size is None else f'{actual_size} bytes long'}; it was"
                f" written with {size} bytes"
            )
    for name, stored in index.tensors.items():
        _check_chunks(path / INDEX_FILE, name, stored)
        if any(
            chunk.at + chunk.length > index.files.get(chunk.file, -1) for chunk in stored.chunks
        ):
            raise RequestError(f"{path / INDEX_FILE}: {name} lies beyond the end of its file")
    return index


def _check_chunks(index_path: Path, name: str, stored: StoredTensor) -> None:
    """Raise RequestError unless the chunks of a tensor lie inside of it and cover each element
    exactly once, and are at most `MAX_CHUNKS`. `index_path` and `name` are for the message.
    """
    boxes = [list(zip(chunk.offset, chunk.sizes, strict=False)) for chunk in stored.chunks]
    has_dimensions = all(
        len(chunk.offset) == len(chunk.sizes) == len(stored.size) for chunk in stored.chunks
    )
    is_inside = has_dimensions and all(_is_inside(box, stored.size) for box in boxes)
    elements = sum(prod(chunk.sizes) for chunk in stored.chunks)
    if (
        not is_inside
        or elements != prod(stored.size)
        or len(boxes) > MAX_CHUNKS
        or _has_overlap(boxes)
    ):
        raise RequestError(f"{index_path}: the chunks of {name} do not cover it exactly once")


def _is_inside(box: list[tuple[int, int]], shape: list[int]) -> bool:
    """Return whether a box, as (begin, size) per dimension, lies inside a tensor of this shape; an
    empty one may. Both must have equally many dimensions.
    """
    return all(
        begin >= 0 and size >= 0 and begin + size <= length
        for (begin, size), length in zip(box, shape, strict=True)
    )


def _has_overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    """Return whether any two boxes, as (begin, size) per dimension, share an element."""
    return any(
        all(a < b + m and b < a + n for (a, n), (b, m) in zip(box, other, strict=True))
        for box, other in combinations(boxes, 2)
    )


def read_checkpoint_json(path: Path, model: type[JsonModel]) -> JsonModel:
    """Read one of a checkpoint's JSON files as a pydantic model, and check its checksum if it has
    one. Raises RequestError, in one line, if it is missing, larger than `MAX_JSON_BYTES`, damaged
    or not of this model.
    """
    try:
        if path.exists() and not path.is_file():
            raise RequestError(f"{path}: not a file; not a JSON file of a checkpoint")
        return model.model_validate(
            _verify_checksum(path, files.parse_json(files.read_file(path, MAX_JSON_BYTES)))
        )
    except files.TooLargeError as error:
        raise RequestError(f"{path}: {error}; not a JSON file of a checkpoint") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise RequestError(
            f"{path}: not a JSON file of a checkpoint: {describe_first_problem(error)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not a JSON file of a checkpoint: {error}") from error


def write_checkpoint_json(path: Path, content: FrozenModel) -> None:
    """Write a model as a JSON object with one more key `sha256`, the checksum of its other fields.
    The file is written completely or not at all, replaces an existing one, and is on disk when this
    returns. Raises OSError if it cannot be written.
    """
    fields = json.loads(content.model_dump_json())
    files.write_file(path, json.dumps(fields | {CHECKSUM_KEY: _compute_checksum(fields)}).encode())


def _verify_checksum(path: Path, content: Any) -> Any:
    """Return the parsed JSON without its key `sha256`. Raises RequestError if that is not the
    checksum of the other fields; a content without the key, as older checkpoints have, is returned
    unchanged.
    """
    if not isinstance(content, dict) or CHECKSUM_KEY not in content:
        return content
    fields = {name: value for name, value in content.items() if name != CHECKSUM_KEY}
    if content[CHECKSUM_KEY] != _compute_checksum(fields):
        raise RequestError(f"{path}: damaged: its checksum does not match its content")
    return fields


def _compute_checksum(fields: dict[str, Any]) -> str:
    """Return the SHA-256, as hex digits, of the canonical JSON of a file's fields (without its key
    `sha256`).
    """
    return hashlib.sha256(to_canonical_json(fields).encode()).hexdigest()


def create_part_folder(folder: Path, step: int) -> Path:
    """Create the empty folder `step-N.part` (N is `step`, in eight digits) for a checkpoint, and
    `folder` if it is missing, and return it. First all unfinished checkpoints (`step-*.part`) in
    `folder` are deleted with their contents. Raises OSError if that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.endswith(PART_SUFFIX) and STEP_FOLDER.fullmatch(
            path.name.removesuffix(PART_SUFFIX)
        ):
            shutil.rmtree(path)
    part_folder = folder / f"{format_step_folder(step)}{PART_SUFFIX}"
    part_folder.mkdir()
    return part_folder


def finish_checkpoint(part_folder: Path) -> None:
    """Sync a partial checkpoint's folder (`step-N.part`) to disk and rename it to `step-N`, then
    delete all complete checkpoints beside it but the two of the last steps. Files inside must be on
    disk already. Raises OSError if that fails, such as when `step-N` exists and is not empty.
    """
    files.sync_folder(part_folder)
    part_folder.rename(part_folder.with_name(part_folder.name.removesuffix(PART_SUFFIX)))
    files.sync_folder(part_folder.parent)
    for old in list_finished_checkpoints(part_folder.parent)[MAX_CHECKPOINTS:]:
        shutil.rmtree(old)


def check_same_question(
    run: CheckpointRun, name: str, question: dict[str, Any], sample: int | None, engine: str
) -> None:
    """Raise RequestError, with the first difference, unless question, `--sample` and engine are
    those of the run that wrote the checkpoints (`run`); compared in this order. Questions are
    compared by dotted keys, in alphabetical order; a missing key equals None. `name` is the case's,
    for the message, and is not compared.
    """
    requested, stored = _flatten(question), _flatten(run.question)
    different_keys = sorted(
        key for key in requested.keys() | stored.keys() if requested.get(key) != stored.get(key)
    )
    if different_keys:
        key = different_keys[0]
        raise RequestError(
            f"--resume: the checkpoint is of {run.name} with"
            f" {key}={to_canonical_json(stored.get(key))[:60]}, this run is {name} with"
            f" {key}={to_canonical_json(requested.get(key))[:60]}; resume the same question"
        )
    if run.sample != sample:
        sample_text = "without --sample" if run.sample is None else f"with --sample {run.sample}"
        raise RequestError(
            f"--resume: the checkpoint was written {sample_text}, which changes the steps; use the"
            " same --sample"
        )
    if run.engine != engine:
        raise RequestError(
            f"--resume: the checkpoint is of engine {run.engine}, this run is of {engine}; resume"
            " with"
            f" --engine {run.engine}"
        )


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys (`a.b`), each after `prefix`; lists are
    values, and empty dicts vanish.
    """
    out: dict[str, Any] = {}
    for key, value in nested.items():
        out |= (
            _flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return out
