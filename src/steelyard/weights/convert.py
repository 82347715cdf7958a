"""Convert a Llama checkpoint to another format or number of shards, bit for bit: `steelyard weights
convert`.

One tensor is made at a time, whatever the size of the model. A journal in the target folder lists
the complete files: run again, the conversion continues after the last one. The small files that
make the folder a checkpoint are written last, then the journal says that all is finished; it stays,
so that repeating a finished conversion does nothing.
"""

import errno
import fcntl
import hashlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import files
from steelyard.errors import LostError, RequestError
from steelyard.models.llama import LlamaShape
from steelyard.models.llama_init import get_llama_shape
from steelyard.models.shapes import LlamaModel
from steelyard.schema import to_canonical_json
from steelyard.weights import checkpoint_tensors, llama_weights
from steelyard.weights import checkpoint_writer as writing
from steelyard.weights.checkpoint_tensors import (
    JOURNAL_NAME,
    ByteProgress,
    CheckpointHeaders,
    LlamaCheckpoint,
    TensorPart,
    TensorPiece,
)
from steelyard.weights.checkpoint_writer import FilePlan, PlannedFile, PlannedTensor, PlanRequest

LOCK_NAME = "conversion.lock"
# errors of file systems without locks, such as those of some clusters
NO_LOCKS_ERRNOS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
SAMPLE_BYTES = 4 << 10
SAMPLE_EVERY_BYTES = 32 << 20


@dataclass(frozen=True)
class ConversionResult:
    """The result of `convert_checkpoint`: `files`, (name, bytes) of each file in the target,
    `size_bytes`, their sum, and `reused`, how many of the files an earlier run had already
    completed (all, if there was nothing left to do).
    """

    files: list[tuple[str, int]]
    size_bytes: int
    reused: int


def convert_checkpoint(
    source: Path,
    target: Path,
    to: str,
    tp: int,
    model: LlamaModel | None = None,
    progress: ByteProgress | None = None,
) -> ConversionResult:
    """Write a Llama checkpoint's weights to a folder in format `to` (`hf` or `megatron`) with `tp`
    tensor-parallel shards, bit for bit, and return the files.

    An interrupted conversion of the same source continues; a finished one is only checked. `model`
    gives the shape where the files do not tell it. `progress` is called after every tensor with the
    bytes written, files of earlier runs included, and in all. Raise RequestError if the source is
    not usable, the request is impossible, the target is not empty, lies in or above the source, is
    being written by another conversion, or is too small; LostError if writing fails.
    """
    opened = llama_weights.open_llama_checkpoint(source)
    shape, headers = _choose_shape(opened, model), opened.headers
    _check_request(to, tp, shape)
    pieces = checkpoint_tensors.group_by_parameter(opened.list_pieces(shape))
    opened.check_values(shape)
    plan = writing.PLANNERS[to](
        PlanRequest(shape, lambda p: _choose_dtype(p, pieces), headers.iteration, headers.step), tp
    )
    _check_apart(target, (source, *headers.folders))
    request = {
        "source": _identify_source(headers),
        "to": to,
        "tp": tp,
        "shape": checkpoint_tensors.shape_to_json(shape),
    }
    journal = ConversionJournal.open(target, request, plan.names)
    reused = len(plan.names)
    if not journal.is_complete:
        _check_room(target, plan, journal)
        with _hold_lock(target):
            # another conversion, which held the lock until now, may have changed it
            journal = ConversionJournal.open(target, request, plan.names)
            reused = len([name for name in plan.names if journal.is_finished(name)])
            if not journal.is_complete:
                _write_checkpoint(
                    target, plan, journal, lambda planned: _make_tensor(planned, pieces), progress
                )
    written = [(name, (target / name).stat().st_size) for name in plan.names]
    return ConversionResult(written, sum(size for _, size in written), reused)


def _identify_source(headers: CheckpointHeaders) -> dict[str, Any]:
    """Return what distinguishes a source from another of the same shapes, for the journal: the
    digest of its headers, and name, size, mtime in ns and a hash of sampled bytes of each file.

    The times alone do not suffice: unpacking an archive may restore them. Raise RequestError if a
    file cannot be read.
    """
    file_marks: list[Any] = []
    for name, size in headers.files:
        path = headers.folders[0] / name
        try:
            file_marks.append([name, size, path.stat().st_mtime_ns, _hash_sample(path, size)])
        except OSError as error:
            raise RequestError(
                f"{path}: cannot be read ({error.strerror}); make it readable, or fetch it again"
            ) from error
    return {"headers": headers.digest, "files": file_marks}


def _hash_sample(path: Path, size: int) -> str:
    """Return a SHA-256 over 4 KiB at a pseudo-random position in every stretch of a file: at least
    16 stretches of at most 32 MiB. A file of up to 64 KiB is hashed whole. Positions depend on
    `size` alone.
    """
    positions, digest = random.Random(size), hashlib.sha256()
    stretch_bytes = max(SAMPLE_BYTES, min(SAMPLE_EVERY_BYTES, size // 16))
    with files.open_regular(path) as file:
        for begin in range(0, size, stretch_bytes):
            file.seek(begin + positions.randrange(stretch_bytes - SAMPLE_BYTES + 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _choose_shape(opened: LlamaCheckpoint, model: LlamaModel | None) -> LlamaShape:
    """Return the whole model's shape: that of `model`, a case's, if it is given, with the number of
    positions that the files tell (else the case's); otherwise what the files tell. Raise
    RequestError if they do not tell enough.
    """
    if model is None:
        return checkpoint_tensors.read_shape(opened)
    shape = get_llama_shape(model)
    return replace(shape, positions=opened.read_dimensions()["positions"] or shape.positions)


def _check_request(to: str, tp: int, shape: LlamaShape) -> None:
    """Raise RequestError if the format `to` is unknown, `tp` is below 1 or (for `hf`) not 1, or
    `tp` does not divide the model's KV heads and feed-forward size.
    """
    if to not in writing.PLANNERS:
        raise RequestError(f"layout {to!r} is not known; allowed: {', '.join(writing.PLANNERS)}")
    if tp < 1 or (to == "hf" and tp != 1):
        raise RequestError(
            f"tensor parallel size {tp} is not possible for {to}; allowed: 1, for megatron more"
        )
    for dimension, size in (("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
        if size % tp:
            raise RequestError(
                f"{dimension} {size} cannot be divided by {tp}; give a tensor parallel size that"
                " divides it"
            )


def _choose_dtype(part: TensorPart, pieces: dict[str, list[TensorPiece]]) -> str:
    """Return the dtype name, such as `BF16`, of a tensor that is to be written: that of the
    source's pieces that overlap it, or of all its parameter's pieces if none does; the most
    frequent of all weights if its parameter has no pieces (a zero bias).

    `pieces` are by parameter name. Raise RequestError if the pieces of the parameter that count
    have different dtypes.
    """
    own_pieces = pieces.get(part.parameter, [])
    all_pieces = own_pieces or [
        piece for parameter_pieces in pieces.values() for piece in parameter_pieces
    ]
    dtypes = Counter(
        piece.stored.dtype
        for piece, _ in checkpoint_tensors.find_overlaps(own_pieces, lambda name: part.box)
    )
    dtypes = dtypes or Counter(piece.stored.dtype for piece in all_pieces)
    if own_pieces and len(dtypes) > 1:
        first, *_ = own_pieces
        raise RequestError(
            f"{first.stored}: must be merged with tensors of another dtype"
            f" ({', '.join(sorted(dtypes))}); save the weights in one dtype"
        )
    return dtypes.most_common(1)[0][0]


def _make_tensor(planned: PlannedTensor, pieces: dict[str, list[TensorPiece]]) -> Tensor:
    """Return the values of a planned tensor as a new CPU tensor in its logical shape and dtype,
    copied from the source's pieces (by parameter name); zero where there are none, as in padding.
    """
    part = planned.part
    tensor = torch.zeros(part.logical_shape, dtype=checkpoint_tensors.DTYPES[planned.dtype])
    for piece, overlap_box in checkpoint_tensors.find_overlaps(
        pieces.get(part.parameter, ()), lambda name: part.box
    ):
        checkpoint_tensors.copy_overlap(piece, overlap_box, part.view_box(tensor), part.box)
    return tensor


def _write_checkpoint(
    target: Path,
    plan: FilePlan,
    journal: "ConversionJournal",
    make_tensor: Callable[[PlannedTensor], Tensor],
    progress: ByteProgress | None,
) -> None:
    """Write all files of the plan into the target that the journal does not have yet, then the
    small ones, and finish the journal. Files that a killed run left half-written (`*.part`) are
    removed first.

    `make_tensor` returns the values of a planned tensor; `progress` is called after each tensor
    with the bytes written, those of earlier runs included, and in all. Raise RequestError if the
    folder cannot be written at all, LostError if writing fails later; complete files stay.
    """
    done_bytes = sum(file.nbytes for file in plan.files if journal.is_finished(file.name))
    counter = checkpoint_tensors.ByteCounter(
        progress, sum(file.nbytes for file in plan.files), done_bytes
    )
    journal.begin()
    try:
        for leftover in target.rglob(
            f"*{files.PART_SUFFIX}"
        ):  # left by a conversion that was killed
            leftover.unlink()
        for file in plan.files:
            _write_file(
                target / file.name,
                file,
                journal,
                make_tensor,
                lambda planned: counter.add(planned.nbytes),
            )
        for name, content in plan.small_files.items():
            files.write_file(target / name, content)
        journal.finish(plan.names)
    except OSError as error:
        raise LostError(
            f"{error.filename or target}: cannot be written ({error.strerror}); make room for it,"
            " then convert again: complete files are kept"
        ) from error


def _write_file(
    path: Path,
    file: PlannedFile,
    journal: "ConversionJournal",
    make_tensor: writing.MakeTensor,
    on_written: writing.OnWritten,
) -> None:
    """Write one file of the plan under a temporary name (`.part`), rename it and add it to the
    journal; do nothing if the journal has it already. Folders are created. Raise OSError if it
    cannot be written.
    """
    if not journal.is_finished(file.name):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + files.PART_SUFFIX)
        file.write(temporary, file, make_tensor, on_written)
        files.move_into_place(temporary, path)
        journal.add_file(file.name)


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Return a context manager that creates a folder and holds an exclusive lock file in it, which
    is removed at the end.

    The kernel releases the lock of a killed process, whose file stays. Raise RequestError, without
    waiting, if another conversion has the lock, or if the folder cannot be written. File systems
    without locks are used unlocked.
    """
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _open_locked(path)
    except BlockingIOError as error:
        raise RequestError(
            f"target {str(folder)!r}: another conversion is writing there; wait for it, or give"
            " another folder"
        ) from error
    except OSError as error:
        raise RequestError(
            f"target {str(folder)!r} cannot be written ({error.strerror}); give another folder"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _open_locked(path: Path) -> int:
    """Create and lock a lock file, and return its descriptor, which the caller closes. Raise
    BlockingIOError at once if another process has the lock, OSError if the file cannot be opened.
    Where the file system has no locks, the descriptor is returned without one.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(handle, path):
                return handle
        except OSError as error:
            if error.errno in NO_LOCKS_ERRNOS:
                return handle
            os.close(handle)
            raise
        # the previous owner removed this file after it was opened; there may be a new one
        os.close(handle)


def _is_same_file(handle: int, path: Path) -> bool:
    """Return whether an open descriptor is the file that is now at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _check_apart(target: Path, sources: tuple[Path, ...]) -> None:
    """Raise RequestError if the target is a folder of the source, inside one, or around one."""
    target_path = target.resolve()
    for source in sources:
        source_path = source.resolve()
        if source_path.is_relative_to(target_path) or target_path.is_relative_to(source_path):
            raise RequestError(
                f"target {str(target)!r} is the source {str(source)!r}, in it or above it; give"
                " another folder"
            )


def _check_room(target: Path, plan: FilePlan, journal: "ConversionJournal") -> None:
    """Raise RequestError if the disk of the target (of its nearest existing parent) has fewer free
    bytes than the tensors of the files that are not in the journal yet.
    """
    needed_bytes = sum(file.nbytes for file in plan.files if not journal.is_finished(file.name))
    free_bytes = shutil.disk_usage(
        next(folder for folder in (target, *target.resolve().parents) if folder.is_dir())
    ).free
    if needed_bytes > free_bytes:
        raise RequestError(
            f"target {str(target)!r} needs {needed_bytes} bytes and {free_bytes} are free; make"
            " room, or give"
            " another folder"
        )


class ConversionJournal:
    """The journal of a conversion, `conversion.json` in the target folder: what is converted to
    what (`request`), the size of every complete file by name (`files`), and whether all are
    complete (`is_complete`).

    `open` reads it, or makes a new one without writing; `begin`, `add_file`, `finish` and `write`
    replace the file; `is_finished(name)` returns whether one file is complete.
    """

    def __init__(
        self, folder: Path, request: dict[str, Any], files: dict[str, int], is_complete: bool
    ) -> None:
        self.path = folder / JOURNAL_NAME
        self.request = request
        self.files = files
        self.is_complete = is_complete

    @classmethod
    def open(
        cls, folder: Path, request: dict[str, Any], names: tuple[str, ...]
    ) -> "ConversionJournal":
        """Return the journal in a target folder, of an interrupted or complete conversion with the
        same `request`, or a new empty one if the folder is absent or holds at most leftovers of a
        run killed at its beginning. Nothing is written.

        `names` are the files of the complete conversion. Raise RequestError if the folder holds
        anything else, cannot be read, or is said to be complete and a file has not the size noted.
        """
        path = folder / JOURNAL_NAME
        try:
            if path.is_file():
                return cls._read_existing(folder, request, names)
            if folder.exists() and not all(_is_leftover(item.name) for item in folder.iterdir()):
                raise _make_not_empty_error(folder)
        except OSError as error:
            raise RequestError(
                f"target {str(folder)!r} cannot be read ({error.strerror}); give another folder"
            ) from error
        return cls(folder, request, {}, False)

    @classmethod
    def _read_existing(
        cls, folder: Path, request: dict[str, Any], names: tuple[str, ...]
    ) -> "ConversionJournal":
        """Return the journal that a target folder has; `open` calls it if the journal file exists.
        `names` are all files of the complete conversion.

        Raise RequestError if the file is no journal, is of another conversion than `request`, or
        says that all is complete and one of the files `names` is missing or has another size. An
        interrupted journal is returned without a check of its files. OSError is passed on.
        """
        path = folder / JOURNAL_NAME
        content = checkpoint_tensors.read_journal(path)
        files, is_complete = content.get("files"), content.get("finished") is True
        if not isinstance(files, dict) or not all(isinstance(size, int) for size in files.values()):
            raise RequestError(
                f"{path}: is not the journal of a conversion; give another folder, or empty"
                " this one"
            )
        different_keys = sorted(key for key in request if content.get(key) != request[key])
        if different_keys and is_complete:
            raise _make_not_empty_error(folder)
        if different_keys:
            raise RequestError(
                f"{path}: belongs to another conversion ({', '.join(different_keys)} differ); give"
                " another"
                " folder, or empty this one"
            )
        journal = cls(folder, request, files, is_complete)
        changed = [name for name in names if not journal.is_finished(name)]
        if is_complete and changed:
            raise RequestError(
                f"{path}: the conversion was complete, but {changed[0]} has changed since; give"
                " another folder, or empty this one"
            )
        return journal

    def begin(self) -> None:
        """Write the journal file, to prove before any work that the target folder can be written
        to. Raise RequestError if it cannot.
        """
        folder = self.path.parent
        try:
            self.write()
        except OSError as error:
            raise RequestError(
                f"target {str(folder)!r} cannot be written ({error.strerror}); give another folder"
            ) from error

    def is_finished(self, name: str) -> bool:
        """Return whether a file of the conversion is in this journal, and in the target folder with
        the noted size.
        """
        path = self.path.parent / name
        return name in self.files and path.is_file() and path.stat().st_size == self.files[name]

    def add_file(self, name: str) -> None:
        """Add a complete file of the target folder (`name` is relative to it) to this journal with
        its present size, and write the journal file. Raise OSError if that fails.
        """
        self.files[name] = (self.path.parent / name).stat().st_size
        self.write()

    def finish(self, names: tuple[str, ...]) -> None:
        """Replace the journal's `files` by the present sizes of `names`, all files of the complete
        conversion, mark it complete, and write the journal file. Raise OSError if a file is missing
        or the journal cannot be written.
        """
        self.files = {name: (self.path.parent / name).stat().st_size for name in names}
        self.is_complete = True
        self.write()

    def write(self) -> None:
        """Replace the journal file by this journal's content as canonical JSON, completely or not
        at all. Raise OSError if it cannot be written.
        """
        content = {**self.request, "files": self.files} | (
            {"finished": True} if self.is_complete else {}
        )
        files.write_file(self.path, to_canonical_json(content).encode())


def _is_leftover(name: str) -> bool:
    """Return whether a run that was killed at its very beginning may have left a file of this name:
    the lock, or a half-written journal.
    """
    return name == LOCK_NAME or (
        name.lstrip(".").startswith(JOURNAL_NAME) and name.endswith(files.PART_SUFFIX)
    )


def _make_not_empty_error(folder: Path) -> RequestError:
    """Return the error that the target folder is not empty."""
    return RequestError(
        f"target {str(folder)!r} is not empty; give a folder that is, or that does not exist"
    )
