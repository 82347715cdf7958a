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
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Chunk, State, StoredTensor, Tensors

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Part(Tensor):
    """The part of a tensor that this rank holds, which tells DCP's planner the shape of the whole
    tensor and where in it this part begins.
    """

    whole: torch.Size
    offset: torch.Size

    def size(self, *given: Any) -> Any:
        """Return the shape of the whole tensor, or its size in the given dimension; `shape` remains
        that of this part.
        """
        return self.whole[given[0]] if given else self.whole

    def __create_write_items__(self, fqn: str, held: Tensor) -> list[WriteItem]:
        """Return the items that DCP writes: one shard, or none if the part is empty."""
        return [
            WriteItem(
                MetadataIndex(fqn, self.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return offset and shape of this part for DCP; an empty list if the part is empty."""
        return [ChunkStorageMetadata(self.offset, self.shape)] if self.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return this part as a plain tensor that shares its memory."""
        return self.as_subclass(Tensor)


def part(held: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> Part:
    """Return the local tensor as part of a whole of shape `whole_shape` that begins at `offset`. It
    is detached and shares memory with `tensor`.
    """
    one = held.detach().as_subclass(Part)
    one.whole, one.offset = torch.Size(whole), torch.Size(offset)
    return one


def save(folder: Path, state: State, tensors: dict[str, Tensor], rank: int) -> None:
    """Write a checkpoint into `folder`; all ranks must call it together. It is written as
    `step-N.part` and renamed to `step-N` when it is complete; only the last two complete ones are
    kept.

    Raises OSError on every rank if one of them cannot write, with the errno of the first cause; the
    partial folder is then deleted.
    """
    place = folder / f"{checkpoints.name_of(state.step)}{checkpoints.PART}"
    if rank == 0:
        checkpoints.begin(folder, state.step)
        checkpoints.write(place / checkpoints.STATE, state)
    _meet()
    try:
        with _quiet():
            dcp_save(tensors, storage_writer=CheckpointWriter(place))
    except CheckpointException as error:
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)  # if the disk is full, the record needs room
        raise _not_written(state.step, _cause(error)) from error
    _meet()
    if rank == 0:
        checkpoints.finish(place)


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place from the checkpoint folder `path`; all ranks must call it together.
    The checkpoint may have been written under another parallel plan.

    Raises RequestError if a tensor is missing, has another shape or dtype, or its bytes are
    damaged.
    """
    reader = CheckpointReader(path)
    reader.check(tensors)
    try:
        with _quiet():
            dcp_load(tensors, storage_reader=reader)
    except CheckpointException as error:
        cause = _cause(error)
        text = (
            str(cause)
            if isinstance(cause, RequestError)
            else f"checkpoint {path} cannot be loaded: {cause}"
        )
        raise RequestError(text) from error


def _cause(error: CheckpointException) -> BaseException:
    """Return the exception of the lowest rank that failed."""
    rank = min(error.failures)
    return error.failures[rank][0]


def _not_written(step: int, cause: BaseException) -> OSError:
    """Return an OSError that says that the checkpoint of this step was not written. It has the
    errno of the cause, by which callers recognize a full disk.
    """
    told = f"the checkpoint after step {step} was not written: "
    return (
        OSError(cause.errno, f"{told}{cause.strerror}")
        if isinstance(cause, OSError)
        else OSError(f"{told}{cause}")
    )


def _meet() -> None:
    """Wait until all ranks are here; do nothing without torch.distributed."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore DCP's warning that torch.distributed is disabled (for one process)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class CheckpointWriter(StorageWriter):
    """DCP's storage writer: each rank writes its tensors to `rank-N.bin` in the folder, and the
    coordinator writes the index `tensors.json`.
    """

    def __init__(self, place: Path) -> None:
        self.place = place

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks, each with the number of its rank as `storage_data`."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all tensors of this rank's plan one after the other to `rank-N.bin`, sync the file,
        and return one result per tensor, with a `TensorChunk` that says where its bytes lie and
        their CRC-32. Raises FileExistsError if the file exists, and TypeError for an item that is
        no tensor.
        """
        name, results, at = f"rank-{plan.storage_data}.bin", [], 0
        with (self.place / name).open("xb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{item.index.fqn} is no tensor")
                raw = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
                file.write(raw)
                sizes = list(tensor.shape)
                offset = (
                    list(item.index.offset) if item.index.offset is not None else [0] * len(sizes)
                )
                chunk = Chunk(
                    offset=offset,
                    sizes=sizes,
                    file=name,
                    at=at,
                    length=raw.nbytes,
                    crc32=zlib.crc32(raw),
                )
                results.append(
                    WriteResult(index=item.index, size_in_bytes=raw.nbytes, storage_data=chunk)
                )
                at += raw.nbytes
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index `tensors.json` from the results of all ranks (called on the coordinator
        only).
        """
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, int] = {}
        for one in (one for of_rank in results for one in of_rank):
            chunk: Chunk = one.storage_data
            chunks.setdefault(one.index.fqn, []).append(chunk)
            files[chunk.file] = max(files.get(chunk.file, 0), chunk.at + chunk.length)
        tensors = {}
        for name, known in metadata.state_dict_metadata.items():
            if not isinstance(known, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor")
            tensors[name] = StoredTensor(
                dtype=NAMES[known.properties.dtype], size=list(known.size), chunks=chunks[name]
            )
        checkpoints.write(self.place / checkpoints.TENSORS, Tensors(files=files, tensors=tensors))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class CheckpointReader(StorageReader):
    """DCP's storage reader for a folder that `CheckpointWriter` wrote."""

    def __init__(self, path: Path) -> None:
        """Read and check the index. Raises RequestError if it cannot be read, or a file is missing
        or has another length.
        """
        self.path = path
        self.table = checkpoints.check_files(path)
        self.found: dict[MetadataIndex, tuple[Chunk, torch.dtype]] = {}

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raise RequestError unless the checkpoint has all these tensors, with the same whole shape
        and dtype.
        """
        for name, tensor in tensors.items():
            stored = self.table.tensors.get(name)
            if (
                stored is None
                or stored.size != list(tensor.size())
                or stored.dtype != NAMES.get(tensor.dtype)
            ):
                there = "missing" if stored is None else f"{stored.dtype} of {stored.size}"
                here = f"{NAMES.get(tensor.dtype)} of {list(tensor.size())}"
                raise RequestError(
                    f"checkpoint {self.path}: {name} is {there}; the model has {here}"
                )

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata, made from the JSON index. Raises RequestError for a dtype that is
        not in `DTYPES`, or if the length of a chunk does not match its shape.
        """
        described: dict[str, Any] = {}
        for name, stored in self.table.tensors.items():
            dtype = DTYPES.get(stored.dtype)
            if dtype is None:
                raise RequestError(
                    f"checkpoint {self.path}: {name} is of {stored.dtype}; allowed:"
                    f" {', '.join(DTYPES)}"
                )
            chunks = [
                ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.sizes))
                for one in stored.chunks
            ]
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(stored.size), chunks
            )
            for one in stored.chunks:
                if one.length != prod(one.sizes) * dtype.itemsize:
                    raise RequestError(
                        f"checkpoint {self.path}: a part of {name} of {one.sizes} has {one.length}"
                        " bytes"
                    )
                self.found[MetadataIndex(name, one.offset)] = one, dtype
        return Metadata(described, storage_data=self.found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over the chunks from the metadata, which DCP sends from the coordinator to all
        ranks.
        """
        self.found = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank's plan asks for from the files into the planner's tensors."""
        for item in plan.items:
            part = self._part(*self.found[item.storage_index])
            for dim, (begin, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dim, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Read one chunk from its file as a CPU tensor. Raises RequestError if bytes are missing or
        their CRC-32 is wrong.
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
