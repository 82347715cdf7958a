"""Locate the entries and tensors in the zip file that torch.save writes, as ranges of its bytes.

Every index, size and range is checked: the file is untrusted. The zip's checksums are not, because
torch may leave them out. weights/torch_files.py interprets the pickle in it.
"""

import io
import math
import mmap
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from steelyard import files
from steelyard.errors import RequestError, short_repr

MAX_ENTRIES = 1_000_000
MAX_DIRECTORY_BYTES = 128 << 20
MAX_DIMENSIONS = 64  # torch's own limit

# the magic number with which torch's old format begins
LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")
STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,  # its count is in bytes
}


class MalformedFileError(ValueError):
    """A torch.save file is damaged, or has content that is not read; the text says what.
    weights/torch_files.py turns it into a RequestError.
    """


@dataclass(eq=False, repr=False)
class Stub:
    """An object in a pickle whose type is not interpreted: `name`, the type's dotted name, and what
    it was given (`args`, and `state`, None if none), as plain data. Nothing of it was imported or
    called.

    A global that was not called, a function or class, has no `args`. `items` are those of a
    subclass of dict, `values` those of a subclass of list or set.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    # without its parts, which may be repeated so often that their text is endless
    def __repr__(self) -> str:
        """Return the name alone: an object may contain another so often that the full text would be
        endless.
        """
        return f"Stub({self.name!r})"


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file (`path`), not read: `offset_bytes` of its first element in the file,
    `dtype` (torch's), `shape`, and `stride` in elements. A storage on its own is one too, of one
    dimension and stride 1.

    `open()` returns it as a CPU tensor on a memory map; `nbytes` is the size of its elements,
    `span_bytes` what it spans in the file. Creating one with values of wrong types or beyond
    torch's limits raises MalformedFileError.
    """

    path: Path
    offset_bytes: int  # of the tensor's first element
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise MalformedFileError unless all values of this tensor have their type, shape and
        stride have one length of at most 64, and sizes are at least 0 and below 2**63.
        """
        if not isinstance(self.dtype, torch.dtype):
            raise MalformedFileError("a tensor's dtype is not a dtype of torch")
        if (
            type(self.shape) is not tuple
            or type(self.stride) is not tuple
            or len(self.shape) != len(self.stride)
        ):
            raise MalformedFileError("a tensor's shape and stride are not two tuples of one length")
        if len(self.shape) > MAX_DIMENSIONS:
            raise MalformedFileError(
                f"a tensor has {len(self.shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
            )
        for value in (self.offset_bytes, *self.shape, *self.stride):
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise MalformedFileError(
                    f"a tensor's offset, shape or stride has {short_repr(value)}, allowed: 0 to"
                    " 2**63 - 1"
                )
        if math.prod(size or 1 for size in self.shape) * self.dtype.itemsize >= 1 << 63:
            raise MalformedFileError("a tensor is larger than 2**63 bytes")

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's elements in bytes, gaps between them not counted."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Return the bytes that the tensor spans in the file, from the beginning of its first
        element to the end of its last one, with gaps between them; 0 for an empty tensor.
        """
        last = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
        )
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def open(self) -> torch.Tensor:
        """Return the tensor on the CPU, on a private memory map of its part of the file: values are
        read on use, and writing to it never changes the file. An empty tensor maps nothing.

        The map keeps a file descriptor as long as the tensor lives, so open one tensor after the
        other. Elements that are not aligned in the file are copied. Raise RequestError if the file
        cannot be mapped any more.
        """
        if not self.span_bytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        inset = self.offset_bytes % mmap.ALLOCATIONGRANULARITY
        try:
            with files.open_regular(self.path) as file:
                length, start = inset + self.span_bytes, self.offset_bytes - inset
                mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError, OverflowError) as error:
            raise RequestError(
                f"{self.path}: cannot be mapped ({short_repr(str(error))}); it changed since it was"
                " read, start again"
            ) from error
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=self.span_bytes, offset=inset)
        if self.offset_bytes % self.dtype.itemsize:  # torch assumes aligned elements
            raw = raw.clone()
        return raw.view(self.dtype).as_strided(self.shape, self.stride)


class LimitedReadFile(io.FileIO):
    """A file whose `read(size)` raises MalformedFileError for more than `MAX_DIRECTORY_BYTES`:
    zipfile trusts the size of a zip's directory and reads all of it into memory. A read without a
    size is not limited.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as FileIO does. Raise MalformedFileError if an explicit `size` is more than
        `MAX_DIRECTORY_BYTES`; only that is checked: -1 and None read the rest, however long.
        """
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise MalformedFileError(
                f"its zip directory is larger than {MAX_DIRECTORY_BYTES} bytes"
            )
        return super().read(size)


class TorchArchive:
    """The zip of a torch.save file (`path`), open as `file`: `locate_entry(name)` returns offset
    and size of an entry, `read_entry` its bytes, `locate_storage` a storage as a TensorRef. It
    moves the file's position and does not close it.

    Creating one reads the directory (`entries` by name, below the folder `root`). Raises
    MalformedFileError if it is damaged or not laid out as torch.save does, RequestError for
    TorchScript archives, torch's old format, and big-endian files.
    """

    def __init__(self, path: Path, file: LimitedReadFile) -> None:
        self.path, self.file = path, file
        self.size = file.seek(0, io.SEEK_END)
        directory = self._read_directory()
        self.entries = {info.filename: info for info in directory}
        if len(directory) > MAX_ENTRIES or len(directory) != len(self.entries):
            raise MalformedFileError(
                f"its zip has more than {MAX_ENTRIES} entries, or two of one name"
            )
        roots = [
            name[:-9]
            for name in self.entries
            if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(roots) != 1:
            raise MalformedFileError(f"its zip has {len(roots)} data.pkl, one is expected")
        self.root = roots[0]
        if any(
            name.startswith((f"{self.root}/constants.pkl", f"{self.root}/code/"))
            for name in self.entries
        ):
            raise RequestError(
                f"{path}: is a TorchScript archive, not a checkpoint; save its state_dict with"
                " torch.save"
            )
        if (
            f"{self.root}/byteorder" in self.entries
            and (order := self.read_entry("byteorder", 16)) != b"little"
        ):
            raise RequestError(
                f"{path}: its byte order is {short_repr(order)}, allowed: little; save it again on"
                " such a machine"
            )

    def _read_directory(self) -> list[zipfile.ZipInfo]:
        """Return the entries in the archive's zip directory. Raise RequestError for torch's old
        format, MalformedFileError if it is no zip, or its end is missing or damaged.
        """
        self.file.seek(0)
        head = self.file.read(32)
        if LEGACY_MAGIC in head:
            raise RequestError(
                f"{self.path}: torch's old format is not supported; load it and save it again with"
                " a"
                " newer torch"
            )
        try:
            with zipfile.ZipFile(self.file) as archive:
                return archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            problem = (
                "its end, the zip directory, is missing or damaged"
                if head.startswith(b"PK")
                else "it is not a zip file"
            )
            raise MalformedFileError(problem) from error

    def locate_entry(self, name: str) -> tuple[int, int]:
        """Return offset and size in bytes of an entry's content, `name` without the archive's root
        folder. Its local header must be read: only that says where the content begins.

        Raise MalformedFileError if the entry does not exist, is compressed or encrypted, or reaches
        beyond the end of the file.
        """
        info = self.entries.get(f"{self.root}/{name}")
        if info is None:
            raise MalformedFileError(
                f"{short_repr(name)} is named by its pickle and is not in the file"
            )
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
            or info.compress_size != info.file_size
        ):
            raise MalformedFileError(
                f"{short_repr(name)} is compressed or encrypted, torch.save stores it as it is"
            )
        self.file.seek(max(info.header_offset, 0))
        header = self.file.read(30)
        if not header.startswith(b"PK\x03\x04") or len(header) < 30:
            raise MalformedFileError(f"{short_repr(name)} has no header")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        if start + info.file_size > self.size:
            raise MalformedFileError(f"{short_repr(name)} reaches beyond the end of the file")
        return start, info.file_size

    def read_entry(self, name: str, max_bytes: int) -> bytes:
        """Return the bytes of an entry of the archive, `name` without its root folder. Raise
        MalformedFileError if it has more than `max_bytes`, or as `locate_entry` does.
        """
        start, size = self.locate_entry(name)
        if size > max_bytes:
            raise MalformedFileError(f"{name} has {size} bytes, at most {max_bytes} are allowed")
        self.file.seek(start)
        return self.file.read(size)

    def locate_storage(self, persistent_id: Any) -> TensorRef:
        """Return a storage in the archive as a one-dimensional `TensorRef`, from torch's persistent
        id: a tuple of "storage", type (a Stub), key, device and number of elements. Raise
        MalformedFileError if it is not one, its type is unknown, or its entry is missing or too
        small.
        """
        if (
            type(persistent_id) is not tuple
            or len(persistent_id) != 5
            or persistent_id[0] != "storage"
            or type(persistent_id[2]) is not str
        ):
            raise MalformedFileError(
                "its pickle refers to an external object that is not a storage of torch"
            )
        storage_type, key, count = persistent_id[1], persistent_id[2], persistent_id[4]
        dtype = STORAGE_DTYPES.get(storage_type.name) if isinstance(storage_type, Stub) else None
        if dtype is None:
            raise MalformedFileError(
                f"a storage is of the type {short_repr(storage_type)}, which is not supported"
            )
        start, size = self.locate_entry(f"data/{key}")
        storage_ref = TensorRef(self.path, start, dtype, (count,), (1,))
        if storage_ref.nbytes > size:
            raise MalformedFileError(
                f"storage {short_repr(key)} has {size} bytes, {storage_ref.nbytes} are needed"
            )
        return storage_ref
