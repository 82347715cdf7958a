"""Storage for PyTorch's distributed checkpoint (DCP): tensors as plain bytes in one file per rank,
and one JSON index of what lies where.

DCP's own storage keeps the index as a pickle, and reading a pickle runs whatever code the file
names. The planner, which divides and reassembles tensors between any two parallel plans, is DCP's.
`TorchLearner` (trainer.py) calls `save_checkpoint` and `load_checkpoint`; checkpoint_folders.py has
the layout of the folder and the JSON models.
"""

import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from steelyard import files
from steelyard.errors import RequestError
from steelyard.training import checkpoint_folders
from steelyard.training.checkpoint_folders import (
    CheckpointIndex,
    CheckpointState,
    StoredTensor,
    TensorChunk,
)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PartialTensor(Tensor):
    """The part of a tensor that this rank holds, which tells the planner of PyTorch's distributed
    checkpoint (DCP) the shape of the whole tensor (`whole_shape`, also returned by `size()`) and
    where in it this part begins (`offset`, per dimension). `shape` is that of the part. Made by
    `make_partial_tensor`, sharing memory; DCP calls its dunder methods, which list the part as one
    shard, or none if it is empty.
    """

    whole_shape: torch.Size
    offset: torch.Size

    def size(self, *dims: Any) -> Any:
        """Return the shape of the whole tensor, or its size in the given dimension; `shape` remains
        that of this part.
        """
        return self.whole_shape[dims[0]] if dims else self.whole_shape

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list[WriteItem]:
        """Return the items that PyTorch's distributed checkpoint writes for this part of the tensor
        named `fqn`: one shard with its offset, dtype and the whole shape, or none if the part is
        empty.
        """
        return [
            WriteItem(
                MetadataIndex(fqn, self.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties(dtype=self.dtype), self.whole_shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return offset and shape of this part for DCP; an empty list if the part is empty."""
        return [ChunkStorageMetadata(self.offset, self.shape)] if self.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return this part as a plain tensor that shares its memory; `index` is not used, since a
        rank has one part.
        """
        return self.as_subclass(Tensor)


def make_partial_tensor(
    tensor: Tensor, whole_shape: tuple[int, ...], offset: tuple[int, ...]
) -> PartialTensor:
    """Return the local tensor as part of a whole of shape `whole_shape` that begins at `offset`. It
    is detached and shares memory with `tensor`.
    """
    partial = tensor.detach().as_subclass(PartialTensor)
    partial.whole_shape, partial.offset = torch.Size(whole_shape), torch.Size(offset)
    return partial


def save_checkpoint(
    folder: Path, state: CheckpointState, tensors: dict[str, Tensor], rank: int
) -> None:
    """Write `state` and this rank's `tensors` as a checkpoint into `folder`; all ranks must call it
    together. It is written as `step-N.part` (`state.json`, `tensors.json`, `rank-N.bin`) and
    renamed by rank 0 to `step-N` when it is complete, which other ranks do not wait for; only the
    last two complete ones are kept.

    Raises OSError on every rank if one of them cannot write its tensors or the index, with the
    errno of the first cause; the partial folder is then deleted. If rank 0 cannot create the
    folder, write `state.json` or rename at the end, it alone raises OSError.
    """
    part_folder = (
        folder
        / f"{checkpoint_folders.format_step_folder(state.step)}{checkpoint_folders.PART_SUFFIX}"
    )
    if rank == 0:
        checkpoint_folders.create_part_folder(folder, state.step)
        checkpoint_folders.write_checkpoint_json(part_folder / checkpoint_folders.STATE_FILE, state)
    _wait_for_ranks()
    try:
        with _ignore_single_process_warning():
            dcp_save(tensors, storage_writer=CheckpointWriter(part_folder))
    except CheckpointException as error:
        if rank == 0:
            shutil.rmtree(
                part_folder, ignore_errors=True
            )  # if the disk is full, the record needs room
        raise _make_write_error(state.step, _find_first_cause(error)) from error
    _wait_for_ranks()
    if rank == 0:
        checkpoint_folders.finish_checkpoint(part_folder)


def load_checkpoint(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's `tensors` in place from the checkpoint folder `path`; all ranks must call it
    together. The checkpoint may have been written under another parallel plan, and may hold more
    tensors.

    Raises RequestError if the index is damaged, a tensor is missing or has another shape or dtype,
    or its bytes are damaged.
    """
    reader = CheckpointReader(path)
    reader.check_tensors(tensors)
    try:
        with _ignore_single_process_warning():
            dcp_load(tensors, storage_reader=reader)
    except CheckpointException as error:
        cause = _find_first_cause(error)
        text = (
            str(cause)
            if isinstance(cause, RequestError)
            else f"checkpoint {path} cannot be loaded: {cause}"
        )
        raise RequestError(text) from error


def _find_first_cause(error: CheckpointException) -> BaseException:
    """Return the exception that the lowest rank of those that failed in DCP's save or load met
    there.
    """
    rank = min(error.failures)
    return error.failures[rank][0]


def _make_write_error(step: int, cause: BaseException) -> OSError:
    """Return, without raising it, an OSError that says that the checkpoint of this step was not
    written. It has the errno of the cause, by which callers recognize a full disk, if that is an
    OSError.
    """
    prefix = f"the checkpoint after step {step} was not written: "
    return (
        OSError(cause.errno, f"{prefix}{cause.strerror}")
        if isinstance(cause, OSError)
        else OSError(f"{prefix}{cause}")
    )


def _wait_for_ranks() -> None:
    """Wait until all ranks are here (a barrier of torch.distributed); return at once if that is not
    initialized, which is so with one process.
    """
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _ignore_single_process_warning() -> Iterator[None]:
    """Ignore, inside the context, DCP's warning that torch.distributed is disabled, which it gives
    for one process; other warnings are shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class CheckpointWriter(StorageWriter):
    """The storage writer of PyTorch's distributed checkpoint (DCP) for a `folder`, which must
    exist: `write_data` writes this rank's tensors as plain bytes to `rank-N.bin`, which must not
    exist, and `finish`, called on the coordinator (rank 0) alone, writes the index `tensors.json`.
    `save_checkpoint` makes it; DCP calls its methods.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the save plans of all ranks, in the order of ranks, as copies with the number of
        the rank as `storage_data`, by which `write_data` names its file.
        """
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all tensors of this rank's plan one after the other to `rank-N.bin`, sync the file,
        and return a finished future with one result per tensor, whose `storage_data` is a
        `TensorChunk` that says where its bytes lie and their CRC-32. Raises FileExistsError if the
        file exists, and TypeError for an item that is no tensor.
        """
        name, results, position = f"rank-{plan.storage_data}.bin", [], 0
        with (self.folder / name).open("xb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{item.index.fqn} is not a tensor")
                raw = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
                file.write(raw)
                sizes = list(tensor.shape)
                offset = (
                    list(item.index.offset) if item.index.offset is not None else [0] * len(sizes)
                )
                chunk = TensorChunk(
                    offset=offset,
                    sizes=sizes,
                    file=name,
                    at=position,
                    length=raw.nbytes,
                    crc32=zlib.crc32(raw),
                )
                results.append(
                    WriteResult(index=item.index, size_in_bytes=raw.nbytes, storage_data=chunk)
                )
                position += raw.nbytes
            file.flush()
            os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index `tensors.json` from DCP's metadata and the results of all ranks (called
        on the coordinator only). Raises TypeError for an item that is no tensor, KeyError for a
        dtype that is not in `DTYPES`.
        """
        chunks: dict[str, list[TensorChunk]] = {}
        file_sizes: dict[str, int] = {}
        for result in (result for rank_results in results for result in rank_results):
            chunk: TensorChunk = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            file_sizes[chunk.file] = max(file_sizes.get(chunk.file, 0), chunk.at + chunk.length)
        tensors = {}
        for name, described in metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor")
            tensors[name] = StoredTensor(
                dtype=DTYPE_NAMES[described.properties.dtype],
                size=list(described.size),
                chunks=chunks[name],
            )
        checkpoint_folders.write_checkpoint_json(
            self.folder / checkpoint_folders.INDEX_FILE,
            CheckpointIndex(files=file_sizes, tensors=tensors),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class CheckpointReader(StorageReader):
    """The storage reader of PyTorch's distributed checkpoint (DCP) for a folder `path` that
    `CheckpointWriter` wrote; `load_checkpoint` makes it. Constructing it reads and checks
    `tensors.json` into `index`. `check_tensors` compares names, shapes and dtypes with a model's
    tensors, `read_metadata` gives DCP the index and fills `chunks` (where each chunk's bytes lie),
    `read_data` copies chunks into the planner's tensors and checks their CRC-32. All raise
    RequestError for what is damaged or does not match.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the index `tensors.json`. Raises RequestError if it cannot be read, a file
        is missing or has another length, or chunks do not cover a tensor exactly once.
        """
        self.path = path
        self.index = checkpoint_folders.read_checked_index(path)
        self.chunks: dict[MetadataIndex, tuple[TensorChunk, torch.dtype]] = {}

    def check_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Raise RequestError unless the checkpoint has all these tensors, with the same whole shape
        and dtype; it may have others too.
        """
        for name, tensor in tensors.items():
            stored = self.index.tensors.get(name)
            if (
                stored is None
                or stored.size != list(tensor.size())
                or stored.dtype != DTYPE_NAMES.get(tensor.dtype)
            ):
                stored_text = "missing" if stored is None else f"{stored.dtype} {stored.size}"
                model_text = f"{DTYPE_NAMES.get(tensor.dtype)} {list(tensor.size())}"
                raise RequestError(
                    f"checkpoint {self.path}: {name} is {stored_text}; the model has {model_text}"
                )

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata, made from the JSON index, and fill `chunks`. Raises RequestError
        for a dtype that is not in `DTYPES`, or if the length of a chunk does not match its shape.
        Arguments are ignored.
        """
        described: dict[str, Any] = {}
        for name, stored in self.index.tensors.items():
            dtype = DTYPES.get(stored.dtype)
            if dtype is None:
                raise RequestError(
                    f"checkpoint {self.path}: {name} has dtype {stored.dtype}; allowed:"
                    f" {', '.join(DTYPES)}"
                )
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes))
                for chunk in stored.chunks
            ]
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(stored.size), chunks
            )
            for chunk in stored.chunks:
                if chunk.length != prod(chunk.sizes) * dtype.itemsize:
                    raise RequestError(
                        f"checkpoint {self.path}: a chunk of {name} of shape {chunk.sizes} has"
                        f" {chunk.length} bytes, which is not its size"
                    )
                self.chunks[MetadataIndex(name, chunk.offset)] = chunk, dtype
        return Metadata(described, storage_data=self.chunks)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over the chunks from the metadata, which DCP sends from the coordinator to all
        ranks.
        """
        self.chunks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank's plan asks for from the files into the planner's tensors, in place,
        and return a finished future. Raises RequestError if a chunk's bytes are missing or damaged.
        """
        for item in plan.items:
            data = self._read_chunk(*self.chunks[item.storage_index])
            for dim, (begin, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                data = data.narrow(dim, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(data)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_chunk(self, chunk: TensorChunk, dtype: torch.dtype) -> Tensor:
        """Read one whole chunk from its file as a CPU tensor of its shape. Raises RequestError if
        bytes are missing or their CRC-32 is wrong.
        """
        with files.open_regular(self.path / chunk.file) as file:
            file.seek(chunk.at)
            raw = bytearray(file.read(chunk.length))
        if len(raw) != chunk.length or zlib.crc32(raw) != chunk.crc32:
            raise RequestError(
                f"{self.path / chunk.file}: bytes {chunk.at} to {chunk.at + chunk.length} are"
                " damaged; move this checkpoint away, and resume from the one before"
            )
        return (
            torch.frombuffer(raw, dtype=dtype).view(chunk.sizes)
            if raw
            else torch.empty(chunk.sizes, dtype=dtype)
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
