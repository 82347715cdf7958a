"""The file that torch.save writes, a zip: where each of its entries lies, and tensors as ranges of
its bytes.

Every index, size and range is checked. The zip's checksums are not: torch may leave them out.
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
LEGACY = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")
STORAGES = {
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
    "torch.storage.UntypedStorage": torch.uint8,  # counts bytes
}


class RefusedError(ValueError):
    """What is wrong with a file, in our words."""


@dataclass(eq=False, repr=False)
class Stub:
    """An object of a type we do not know: its name, and what it was given, as plain data. A global
    that was not called, a function or a class, has no args. Subclasses of dict have items, those of
    list and set values."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    # without its parts: each may be in it so often that their text is endless
    def __repr__(self) -> str:
        return f"Stub({self.name!r})"


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file, not read. A storage on its own is one too, of one dimension."""

    path: Path
    offset_bytes: int  # of the tensor's first element
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise RefusedError("a tensor's dtype is not one")
        if (
            type(self.shape) is not tuple
            or type(self.stride) is not tuple
            or len(self.shape) != len(self.stride)
        ):
            raise RefusedError("a tensor's shape and stride are not two tuples of one length")
        if len(self.shape) > MAX_DIMENSIONS:
            raise RefusedError(
                f"a tensor has {len(self.shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
            )
        for value in (self.offset_bytes, *self.shape, *self.stride):
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise RefusedError(
                    f"a tensor's offset, shape or stride has {short_repr(value)}, allowed: 0 to"
                    " 2**63 - 1"
                )
        if math.prod(size or 1 for size in self.shape) * self.dtype.itemsize >= 1 << 63:
            raise RefusedError("a tensor is larger than 2**63 bytes")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """From the first element to the end of the last one in the file."""
        last = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)
        )
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def open(self) -> torch.Tensor:
        """The tensor on a map of its part of the file: memory is taken only for what is written to
        it, which the file never sees. The map keeps a file descriptor for as long as the tensor
        lives: open one after the other."""
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
        if self.offset_bytes % self.dtype.itemsize:  # torch takes elements to be aligned
            raw = raw.clone()
        return raw.view(self.dtype).as_strided(self.shape, self.stride)


class Bounded(io.FileIO):
    """zipfile takes the size of a zip's directory on trust, and all of it into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise RefusedError(f"its zip directory is larger than {MAX_DIRECTORY_BYTES} bytes")
        return super().read(size)


class Archive:
    """The zip of torch.save: where in the file each of its entries lies."""

    def __init__(self, path: Path, file: Bounded) -> None:
        self.path, self.file = path, file
        self.size = file.seek(0, io.SEEK_END)
        every = self._directory()
        self.entries = {info.filename: info for info in every}
        if len(every) > MAX_ENTRIES or len(every) != len(self.entries):
            raise RefusedError(f"its zip has more than {MAX_ENTRIES} entries, or two of one name")
        roots = [
            name[:-9]
            for name in self.entries
            if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(roots) != 1:
            raise RefusedError(f"its zip has {len(roots)} data.pkl, one is expected")
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
            and (order := self.content("byteorder", 16)) != b"little"
        ):
            raise RequestError(
                f"{path}: its byte order is {short_repr(order)}, allowed: little; save it again on"
                " such a machine"
            )

    def _directory(self) -> list[zipfile.ZipInfo]:
        self.file.seek(0)
        head = self.file.read(32)
        if LEGACY in head:
            raise RequestError(
                f"{self.path}: torch's old format is not read; load it and save it again with a"
                " newer torch"
            )
        try:
            with zipfile.ZipFile(self.file) as archive:
                return archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            cut = (
                "its end, the zip directory, is missing or damaged"
                if head.startswith(b"PK")
                else "it is no zip"
            )
            raise RefusedError(cut) from error

    def span(self, name: str) -> tuple[int, int]:
        """Offset and size of an entry's bytes. Only the local header says where they begin."""
        info = self.entries.get(f"{self.root}/{name}")
        if info is None:
            raise RefusedError(f"{short_repr(name)} is asked for and is not in it")
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
            or info.compress_size != info.file_size
        ):
            raise RefusedError(
                f"{short_repr(name)} is compressed or encrypted, torch.save stores it as it is"
            )
        self.file.seek(max(info.header_offset, 0))
        header = self.file.read(30)
        if not header.startswith(b"PK\x03\x04") or len(header) < 30:
            raise RefusedError(f"{short_repr(name)} has no header")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        if start + info.file_size > self.size:
            raise RefusedError(f"{short_repr(name)} reaches beyond the end of the file")
        return start, info.file_size

    def content(self, name: str, limit: int) -> bytes:
        start, size = self.span(name)
        if size > limit:
            raise RefusedError(f"{name} has {size} bytes, at most {limit} are allowed")
        self.file.seek(start)
        return self.file.read(size)

    def storage(self, pid: Any) -> TensorRef:
        """What torch calls a persistent id: a storage's type, key, device and count of elements."""
        if (
            type(pid) is not tuple
            or len(pid) != 5
            or pid[0] != "storage"
            or type(pid[2]) is not str
        ):
            raise RefusedError("an external object is asked for that is not a storage of torch")
        kind, key, count = pid[1], pid[2], pid[4]
        dtype = STORAGES.get(kind.name) if isinstance(kind, Stub) else None
        if dtype is None:
            raise RefusedError(f"a storage is of the type {short_repr(kind)}, which is not read")
        start, size = self.span(f"data/{key}")
        whole = TensorRef(self.path, start, dtype, (count,), (1,))
        if whole.nbytes > size:
            raise RefusedError(
                f"storage {short_repr(key)} has {size} bytes, {whole.nbytes} are asked for"
            )
        return whole
