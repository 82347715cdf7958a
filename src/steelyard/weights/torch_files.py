"""What a file of torch.save holds, read without running any of it.

A pickle is a small program. Python's unpickler imports and calls what it names, and in C it can be made to crash the
process (the hash of a tuple nested a million deep) or to fill memory (a memo slot of index 2**32). So the opcodes, split
by `pickletools.genops`, are carried out here. A global is never more than its name: the few names of torch that describe
tensors become a `TensorRef`, a range of bytes of the file that is mapped on demand, every other one a `Stub`.

Every index, size and range is checked, the count of opcodes, and what may be a key. The zip's checksums are not: torch
may leave them out.
"""

import io
import math
import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from steelyard.errors import RequestError

MAX_PICKLE_BYTES = 64 << 20
MAX_OPCODES = 5_000_000  # one of a single byte can make an object of 200
MAX_ENTRIES = 1_000_000
MAX_DIRECTORY_BYTES = 128 << 20
MAX_NAME = 500
MAX_DIMENSIONS = 64  # torch's own limit
MAX_EXPANDED_BYTES = 64 << 20  # of a tensor larger than its storage: one of stride 0

LEGACY = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")  # the magic number with which torch's old format begins
AGAIN = "fetch it again, or save it again with torch.save"

FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128"
INTEGERS = "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in f"{FLOATS} {INTEGERS}".split()}
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
TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")


class RefusedError(ValueError):
    """What is wrong with a file, in our words."""


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
        if type(self.shape) is not tuple or type(self.stride) is not tuple or len(self.shape) != len(self.stride):
            raise RefusedError("a tensor's shape and stride are not two tuples of one length")
        if len(self.shape) > MAX_DIMENSIONS:
            raise RefusedError(f"a tensor has {len(self.shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
        for value in (self.offset_bytes, *self.shape, *self.stride):
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise RefusedError(f"a tensor's offset, shape or stride has {_shown(value)}, allowed: 0 to 2**63 - 1")
        if math.prod(size or 1 for size in self.shape) * self.dtype.itemsize >= 1 << 63:
            raise RefusedError("a tensor is larger than 2**63 bytes")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """From the first element to the end of the last one in the file."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def open(self) -> torch.Tensor:
        """The tensor on a map of its part of the file: memory is taken only for what is written to it, which the file
        never sees. The map keeps a file descriptor for as long as the tensor lives: open one after the other."""
        if not self.span_bytes:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        inset = self.offset_bytes % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                length, start = inset + self.span_bytes, self.offset_bytes - inset
                mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, ValueError, OverflowError) as error:
            raise RequestError(
                f"{self.path}: cannot be mapped ({_shown(str(error))}); it changed since it was read, start again"
            ) from error
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=self.span_bytes, offset=inset)
        if self.offset_bytes % self.dtype.itemsize:  # torch takes elements to be aligned
            raw = raw.clone()
        return raw.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(eq=False, repr=False)
class Stub:
    """An object of a type we do not know: its name, and what it was given, as plain data. A global that was not called,
    a function or a class, has no args. Subclasses of dict have items, those of list and set values."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:  # without its parts: each may be in it so often that their text is endless
        return f"Stub({self.name!r})"


def read(path: Path) -> Any:
    """The object in a torch.save file: dicts, lists, tuples, numbers, strings as they are, tensors as TensorRef, the
    rest as Stub."""
    if not path.is_file():  # opening a pipe would wait for ever
        raise RequestError(f"{path}: is not a file; give a checkpoint written by torch.save")
    try:
        with _Bounded(path) as file:
            return _Machine(_Archive(path, file)).run()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or _shown(str(error))}); {AGAIN}") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError, EOFError) as error:
        what = error if isinstance(error, RefusedError) else _shown(f"{type(error).__name__} {error}")
        raise RequestError(f"{path}: is not a whole file written by torch.save ({what}); {AGAIN}") from error


class _Bounded(io.FileIO):
    """zipfile takes the size of a zip's directory on trust, and all of it into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise RefusedError(f"its zip directory is larger than {MAX_DIRECTORY_BYTES} bytes")
        return super().read(size)


class _Archive:
    """The zip of torch.save: where in the file each of its entries lies."""

    def __init__(self, path: Path, file: _Bounded) -> None:
        self.path, self.file = path, file
        self.size = file.seek(0, io.SEEK_END)
        every = self._directory()
        self.entries = {info.filename: info for info in every}
        if len(every) > MAX_ENTRIES or len(every) != len(self.entries):
            raise RefusedError(f"its zip has more than {MAX_ENTRIES} entries, or two of one name")
        roots = [name[:-9] for name in self.entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise RefusedError(f"its zip has {len(roots)} data.pkl, one is expected")
        self.root = roots[0]
        if any(name.startswith((f"{self.root}/constants.pkl", f"{self.root}/code/")) for name in self.entries):
            raise RequestError(f"{path}: is a TorchScript archive, not a checkpoint; save its state_dict with torch.save")
        if f"{self.root}/byteorder" in self.entries and (order := self.content("byteorder", 16)) != b"little":
            raise RequestError(f"{path}: its byte order is {_shown(order)}, allowed: little; save it again on such a machine")

    def _directory(self) -> list[zipfile.ZipInfo]:
        self.file.seek(0)
        head = self.file.read(32)
        if LEGACY in head:
            raise RequestError(f"{self.path}: torch's old format is not read; load it and save it again with a newer torch")
        try:
            with zipfile.ZipFile(self.file) as archive:
                return archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            cut = "its end, the zip directory, is missing or damaged" if head.startswith(b"PK") else "it is no zip"
            raise RefusedError(cut) from error

    def span(self, name: str) -> tuple[int, int]:
        """Offset and size of an entry's bytes. Only the local header says where they begin."""
        info = self.entries.get(f"{self.root}/{name}")
        if info is None:
            raise RefusedError(f"{_shown(name)} is asked for and is not in it")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise RefusedError(f"{_shown(name)} is compressed or encrypted, torch.save stores it as it is")
        self.file.seek(max(info.header_offset, 0))
        header = self.file.read(30)
        if not header.startswith(b"PK\x03\x04") or len(header) < 30:
            raise RefusedError(f"{_shown(name)} has no header")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        if start + info.file_size > self.size:
            raise RefusedError(f"{_shown(name)} reaches beyond the end of the file")
        return start, info.file_size

    def content(self, name: str, limit: int) -> bytes:
        start, size = self.span(name)
        if size > limit:
            raise RefusedError(f"{name} has {size} bytes, at most {limit} are allowed")
        self.file.seek(start)
        return self.file.read(size)

    def storage(self, pid: Any) -> TensorRef:
        """What torch calls a persistent id: a storage's type, key, device and count of elements."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[2]) is not str:
            raise RefusedError("an external object is asked for that is not a storage of torch")
        kind, key, count = pid[1], pid[2], pid[4]
        dtype = STORAGES.get(kind.name) if isinstance(kind, Stub) else None
        if dtype is None:
            raise RefusedError(f"a storage is of the type {_shown(kind)}, which is not read")
        start, size = self.span(f"data/{key}")
        whole = TensorRef(self.path, start, dtype, (count,), (1,))
        if whole.nbytes > size:
            raise RefusedError(f"storage {_shown(key)} has {size} bytes, {whole.nbytes} are asked for")
        return whole


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any, metadata: Any) -> TensorRef:
    if not isinstance(storage, TensorRef) or storage.stride != (1,):
        raise RefusedError("a tensor is made of something that is not a storage")
    if metadata:
        raise RefusedError("a tensor is lazily negated or conjugated, which is not read")
    place = TensorRef(storage.path, 0, dtype, size, stride)
    if type(offset) is not int or not 0 <= offset * dtype.itemsize <= storage.nbytes - place.span_bytes:
        raise RefusedError(f"a tensor at {_shown(offset)} reaches beyond its storage of {storage.nbytes} bytes")
    if place.nbytes > max(storage.nbytes, MAX_EXPANDED_BYTES):
        raise RefusedError(f"a tensor repeats its storage of {storage.nbytes} bytes into {place.nbytes}")
    return replace(place, offset_bytes=storage.offset_bytes + offset * dtype.itemsize)


def _typed(storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, hooks: Any = None, meta: Any = None) -> Any:
    return _tensor(storage, offset, size, stride, getattr(storage, "dtype", None), meta)


def _untyped(store: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, meta: Any = None) -> Any:
    return _tensor(store, offset, size, stride, dtype, meta)


def _of_type(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes, which are left out. A subclass may mean its bytes otherwise: it stays a stub."""
    known = REBUILD.get(make.name) if isinstance(make, Stub) else None
    if known is None or not isinstance(kind, Stub) or kind.name not in TENSORS or type(args) is not tuple:
        return Stub("torch._tensor._rebuild_from_type_v2", (make, kind, args, state))
    return known(*args)


REBUILD: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _typed,
    "torch._utils._rebuild_tensor_v2": _typed,
    "torch._utils._rebuild_tensor_v3": _untyped,
}
KNOWN: dict[str, Callable[..., Any]] = REBUILD | {
    "torch._utils._rebuild_parameter": lambda data, grad, hooks: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, grad, hooks, state: data,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": lambda size=(): size,
    "collections.OrderedDict": lambda *pairs: Stub("collections.OrderedDict", pairs) if pairs else {},
}


class _Machine:
    """A pickle's stack and memo. A mark sets the stack aside and starts a new one: no opcode reaches below it."""

    def __init__(self, archive: _Archive) -> None:
        self.archive = archive
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        raw = self.archive.content("data.pkl", MAX_PICKLE_BYTES)
        for count, (opcode, value, _) in enumerate(pickletools.genops(raw)):
            if count == MAX_OPCODES:
                raise RefusedError(f"its pickle has more than {MAX_OPCODES} opcodes")
            if opcode.name not in STEPS:
                raise RefusedError(f"its pickle has the opcode {opcode.name}, which is not read")
            STEPS[opcode.name](self, value)
        return self.stack.pop()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def take(self, count: int) -> tuple[Any, ...]:
        """The top of the stack, in the order it was pushed."""
        if len(self.stack) < count:
            raise RefusedError("its pickle takes more than it put")
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        parts, self.stack = self.stack, self.below.pop()
        return parts

    def named(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > MAX_NAME:
            raise RefusedError(f"a global's name is not text of at most {MAX_NAME} characters")
        return DTYPES.get(f"{module}.{name}") or Stub(f"{module}.{name}")

    def call(self, made: Any, args: Any) -> None:
        """What a known name describes, else a stub that keeps the arguments."""
        if not isinstance(made, Stub) or type(args) is not tuple:
            raise RefusedError(f"{_shown(made)} is called with {_shown(args)}")
        known = KNOWN.get(made.name)
        self.push(known(*args) if known else Stub(made.name, args))

    def build(self) -> None:
        made, state = self.take(2)
        if isinstance(made, Stub):
            made.state = state
        elif type(made) is not dict:  # the attributes of an OrderedDict, a state_dict's _metadata, are left out
            raise RefusedError(f"{_shown(made)} is given a state")
        self.push(made)

    def put(self, parts: Sequence[Any]) -> None:
        top = self.stack[-1]
        target = top.items if isinstance(top, Stub) else top
        if type(target) is not dict:
            raise RefusedError(f"{_shown(top)} is given items")
        target.update((_key(key), value) for key, value in zip(parts[::2], parts[1::2], strict=True))

    def add(self, parts: Sequence[Any]) -> None:
        top = self.stack[-1]
        target = top.values if isinstance(top, Stub) else top
        if type(target) is set:
            target.update(map(_key, parts))
        elif type(target) is list:
            target.extend(parts)
        else:
            raise RefusedError(f"{_shown(top)} is given values")


def _key(key: Any, deep: int = 3) -> Any:
    """A key of a dict or set. Hashing a tuple goes through its parts in C, however deep and however often the same."""
    if type(key) is tuple and len(key) <= 16 and deep:
        for part in key:
            _key(part, deep - 1)
    elif not isinstance(key, (str, bytes, int, float, type(None), torch.dtype, Stub)):
        raise RefusedError(f"{_shown(key)} is a key")
    return key


def _object(machine: _Machine, _: Any) -> None:
    made, *args = machine.marked()
    machine.call(made, tuple(args))


def _object_with_names(machine: _Machine, _: Any) -> None:
    made, args, named = machine.take(3)
    machine.call(made, (args, named) if named else args)


def _table(machine: _Machine, _: Any) -> None:
    parts = machine.marked()
    machine.push({})
    machine.put(parts)


def _pop(machine: _Machine, _: Any) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.marked()


LITERALS = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(LITERALS.split(), _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, value: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, index: m.memo.update({index: m.stack[-1]})),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, index: m.push(m.memo[index])),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, _: m.call(*m.take(2))),
    "MEMOIZE": lambda m, _: m.memo.update({len(m.memo): m.stack[-1]}),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "TUPLE1": lambda m, _: m.push(m.take(1)),
    "TUPLE2": lambda m, _: m.push(m.take(2)),
    "TUPLE3": lambda m, _: m.push(m.take(3)),
    "TUPLE": lambda m, _: m.push(tuple(m.marked())),
    "LIST": lambda m, _: m.push(m.marked()),
    "DICT": _table,
    "FROZENSET": lambda m, _: m.push(frozenset(map(_key, m.marked()))),
    "APPEND": lambda m, _: m.add(m.take(1)),
    "APPENDS": lambda m, _: m.add(m.marked()),
    "ADDITEMS": lambda m, _: m.add(m.marked()),
    "SETITEM": lambda m, _: m.put(m.take(2)),
    "SETITEMS": lambda m, _: m.put(m.marked()),
    "MARK": lambda m, _: m.mark(),
    "POP": _pop,
    "POP_MARK": lambda m, _: m.marked(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "GLOBAL": lambda m, names: m.push(m.named(*names.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.push(m.named(*m.take(2))),
    "INST": lambda m, names: m.call(m.named(*names.split(" ", 1)), tuple(m.marked())),
    "OBJ": _object,
    "NEWOBJ_EX": _object_with_names,
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.push(m.archive.storage(*m.take(1))),
}


def _shown(value: Any) -> str:
    """A value of a stranger's file in a message: on one line, and not a megabyte of it."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of over 128 bits"
    if not isinstance(value, (str, bytes, int, Stub)):  # the text of a container can be endless
        return f"a {type(value).__name__}"
    text = repr(value[:100] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."
