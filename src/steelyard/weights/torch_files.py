"""Read what a torch.save file holds without running any of it.

A pickle is a small program. Python's unpickler imports and calls what it names, and in C it can be
made to crash the process (the hash of a tuple nested a million deep) or to fill memory (a memo slot
of index 2**32). So the opcodes, split by `pickletools.genops`, are carried out here. A global is
never more than its name: the few names of torch that describe tensors become a `TensorRef`, a range
of bytes of the file that is mapped on demand, every other one a `Stub`.

Every index, size and range is checked, as are the number of opcodes and the types of dict keys.
"""

import pickletools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from steelyard.errors import RequestError, short_repr
from steelyard.weights.torch_archive import (
    LimitedReadFile,
    MalformedFileError,
    Stub,
    TensorRef,
    TorchArchive,
)

__all__ = ["Stub", "TensorRef", "read_torch_file"]

MAX_PICKLE_BYTES = 64 << 20
MAX_OPCODES = 500_000  # takes seconds; a shard of 1,000 tensors has about 40,000
MAX_NAME_CHARACTERS = 500
MAX_EXPANDED_BYTES = 64 << 20  # limit for a tensor larger than its storage (stride 0)

FETCH_AGAIN_HINT = "fetch it again, or save it again with torch.save"

FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128"
INTEGERS = "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name) for name in f"{FLOATS} {INTEGERS}".split()
}
PLAIN_TENSOR_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter")


def read_torch_file(path: Path) -> Any:
    """Return the object in a torch.save file without running anything of it: dicts, lists, tuples,
    sets, numbers and strings as they are, tensors as `TensorRef` (values are not read), everything
    else as `Stub`.

    Raise RequestError if it is no regular file, cannot be read, is damaged or too complex, is
    TorchScript, in torch's old format or big-endian.
    """
    if not path.is_file():  # opening a pipe would wait for ever
        raise RequestError(f"{path}: is not a file; give a checkpoint written by torch.save")
    try:
        with LimitedReadFile(path) as file:
            return _PickleMachine(TorchArchive(path, file)).run()
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror or short_repr(str(error))});"
            f" {FETCH_AGAIN_HINT}"
        ) from error
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        MemoryError,
        EOFError,
    ) as error:
        problem = (
            error
            if isinstance(error, MalformedFileError)
            else short_repr(f"{type(error).__name__} {error}")
        )
        raise RequestError(
            f"{path}: is not a whole file written by torch.save ({problem}); {FETCH_AGAIN_HINT}"
        ) from error


def _locate_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, dtype: Any, metadata: Any
) -> TensorRef:
    """Return the `TensorRef` of a tensor in a storage, which is a one-dimensional `TensorRef`;
    `offset`, `size` and `stride` count elements of `dtype`.

    Raise MalformedFileError if the storage is none, a value has a wrong type, the tensor reaches
    beyond its storage, repeats it (stride 0) to more than 64 MiB and the storage's own size, or is
    lazily negated or conjugated (`metadata` is not empty).
    """
    if not isinstance(storage, TensorRef) or storage.stride != (1,):
        raise MalformedFileError("a tensor is made of something that is not a storage")
    if metadata:
        raise MalformedFileError("a tensor is lazily negated or conjugated, which is not supported")
    tensor_ref = TensorRef(storage.path, 0, dtype, size, stride)
    if (
        type(offset) is not int
        or not 0 <= offset * dtype.itemsize <= storage.nbytes - tensor_ref.span_bytes
    ):
        raise MalformedFileError(
            f"a tensor at {short_repr(offset)} reaches beyond its storage of {storage.nbytes} bytes"
        )
    if tensor_ref.nbytes > max(storage.nbytes, MAX_EXPANDED_BYTES):
        raise MalformedFileError(
            f"a tensor repeats its storage of {storage.nbytes} bytes into {tensor_ref.nbytes}"
        )
    return replace(tensor_ref, offset_bytes=storage.offset_bytes + offset * dtype.itemsize)


def _rebuild_typed(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any = None,
    hooks: Any = None,
    meta: Any = None,
) -> Any:
    """Return the `TensorRef` of a tensor that has the dtype of its storage, from the arguments of
    torch's _rebuild_tensor_v2. Gradient flag and hooks are ignored. Raise MalformedFileError as
    `_locate_tensor` does.
    """
    return _locate_tensor(storage, offset, size, stride, getattr(storage, "dtype", None), meta)


def _rebuild_untyped(
    store: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    meta: Any = None,
) -> Any:
    """Return the `TensorRef` of a tensor that has its own dtype in an untyped storage, from the
    arguments of torch's _rebuild_tensor_v3. Gradient flag and hooks are ignored. Raise
    MalformedFileError as `_locate_tensor` does.
    """
    return _locate_tensor(store, offset, size, stride, dtype, meta)


def _rebuild_from_type(rebuild: Any, tensor_type: Any, args: Any, state: Any) -> Any:
    """Return the `TensorRef` of a plain tensor or parameter that has attributes (`state`), which
    are dropped; arguments as those of torch's _rebuild_from_type_v2.

    Any other subclass of a tensor, or an unknown `rebuild` function, becomes a `Stub` with the
    arguments: it may interpret its bytes differently.
    """
    rebuild_function = REBUILD_FUNCTIONS.get(rebuild.name) if isinstance(rebuild, Stub) else None
    if (
        rebuild_function is None
        or not isinstance(tensor_type, Stub)
        or tensor_type.name not in PLAIN_TENSOR_TYPES
        or type(args) is not tuple
    ):
        return Stub("torch._tensor._rebuild_from_type_v2", (rebuild, tensor_type, args, state))
    return rebuild_function(*args)


REBUILD_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_typed,
    "torch._utils._rebuild_tensor_v2": _rebuild_typed,
    "torch._utils._rebuild_tensor_v3": _rebuild_untyped,
}
INTERPRETED_FUNCTIONS: dict[str, Callable[..., Any]] = REBUILD_FUNCTIONS | {
    "torch._utils._rebuild_parameter": lambda data, grad, hooks: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, grad, hooks, state: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": lambda size=(): size,
    "collections.OrderedDict": lambda *pairs: (
        Stub("collections.OrderedDict", pairs) if pairs else {}
    ),
}


class _PickleMachine:
    """Executes the pickle `data.pkl` of a torch.save archive without importing or calling what it
    names: `run` returns its object.

    It holds the pickle's stack and memo; the methods are what opcodes do. A mark sets the stack
    aside and starts a new one, so that no opcode reaches below a mark.
    """

    def __init__(self, archive: TorchArchive) -> None:
        self.archive = archive
        self.stack: list[Any] = []
        self.stacks_below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute all opcodes of the archive's pickle and return the object on top of the stack.

        Raise MalformedFileError at an opcode that is not read, after `MAX_OPCODES`, or if the
        pickle is larger than `MAX_PICKLE_BYTES`; another ValueError, TypeError or LookupError if it
        is malformed.
        """
        raw = self.archive.read_entry("data.pkl", MAX_PICKLE_BYTES)
        for count, (opcode, value, _) in enumerate(pickletools.genops(raw)):
            if count == MAX_OPCODES:
                raise MalformedFileError(f"its pickle has more than {MAX_OPCODES} opcodes")
            if opcode.name not in OPCODE_STEPS:
                raise MalformedFileError(
                    f"its pickle has the opcode {opcode.name}, which is not supported"
                )
            OPCODE_STEPS[opcode.name](self, value)
        return self.stack.pop()

    def push(self, value: Any) -> None:
        """Push a value on the pickle's current stack."""
        self.stack.append(value)

    def pop_values(self, count: int) -> tuple[Any, ...]:
        """Remove the top `count` values (at least 1) from the stack, and return them in the order
        they were pushed. Raise MalformedFileError if there are fewer above the last mark.
        """
        if len(self.stack) < count:
            raise MalformedFileError("its pickle pops more values than it pushed")
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def push_mark(self) -> None:
        """Set the pickle's current stack aside and start an empty one, until `pop_marked`."""
        self.stacks_below.append(self.stack)
        self.stack = []

    def pop_marked(self) -> list[Any]:
        """Return all values pushed since the last mark as a list, and make the stack below the mark
        the current one again. Raise IndexError without a mark.
        """
        parts, self.stack = self.stack, self.stacks_below.pop()
        return parts

    def resolve_global(self, module: Any, name: Any) -> Any:
        """Return what a global of a pickle stands for: a torch dtype for its own name
        (`torch.float32`), for all else, storage types too, a Stub with the full name `module.name`;
        nothing is imported. Raise MalformedFileError if one is no text, or both together have more
        than `MAX_NAME_CHARACTERS`.
        """
        if (
            type(module) is not str
            or type(name) is not str
            or len(module) + len(name) > MAX_NAME_CHARACTERS
        ):
            raise MalformedFileError(
                f"a global's name is not text of at most {MAX_NAME_CHARACTERS} characters"
            )
        return DTYPES.get(f"{module}.{name}") or Stub(f"{module}.{name}")

    def push_call(self, function: Any, args: Any) -> None:
        """Push the result of calling `function` with `args` in the pickle: for names of torch that
        describe tensors, and an empty OrderedDict, what they mean; else a `Stub` with name and
        arguments. Nothing is really called but functions of this file.

        Raise MalformedFileError unless `function` is a Stub and `args` a tuple; TypeError if the
        arguments do not fit.
        """
        if not isinstance(function, Stub) or type(args) is not tuple:
            raise MalformedFileError(f"{short_repr(function)} is called with {short_repr(args)}")
        interpret = INTERPRETED_FUNCTIONS.get(function.name)
        self.push(interpret(*args) if interpret else Stub(function.name, args))

    def set_state(self) -> None:
        """Store the top of the stack as the state of the Stub below it, which stays on the stack;
        for a dict the state (a state_dict's _metadata) is dropped. Raise MalformedFileError for any
        other object.
        """
        target, state = self.pop_values(2)
        if isinstance(target, Stub):
            target.state = state
        # attributes of an OrderedDict, such as a state_dict's _metadata, are dropped
        elif type(target) is not dict:
            raise MalformedFileError(f"{short_repr(target)} is given a state")
        self.push(target)

    def set_items(self, keys_and_values: Sequence[Any]) -> None:
        """Add alternating keys and values to the dict, or to `items` of the Stub, on top of the
        stack, in place. Raise MalformedFileError if it is something else or a key is refused by
        `_check_key`, ValueError for a key without a value.
        """
        top = self.stack[-1]
        target = top.items if isinstance(top, Stub) else top
        if type(target) is not dict:
            raise MalformedFileError(f"{short_repr(top)} is given items")
        target.update(
            (_check_key(key), value)
            for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True)
        )

    def add_values(self, values: Sequence[Any]) -> None:
        """Add values to the list or set, or to `values` of the Stub, on top of the stack, in place.
        Raise MalformedFileError if it is something else, or for a value that a set may not hold
        (`_check_key`).
        """
        top = self.stack[-1]
        target = top.values if isinstance(top, Stub) else top
        if type(target) is set:
            target.update(map(_check_key, values))
        elif type(target) is list:
            target.extend(values)
        else:
            raise MalformedFileError(f"{short_repr(top)} is given values")


def _check_key(key: Any, max_depth: int = 3) -> Any:
    """Return a key of a dict or set unchanged if it is safe to hash: text, bytes, number, None,
    dtype, Stub, or a tuple of at most 16 of these, tuples nested at most `max_depth` deep.

    Raise MalformedFileError if not: hashing a tuple visits all parts in C, however deep.
    """
    if type(key) is tuple and len(key) <= 16 and max_depth:
        for part in key:
            _check_key(part, max_depth - 1)
    elif not isinstance(key, (str, bytes, int, float, type(None), torch.dtype, Stub)):
        raise MalformedFileError(f"{short_repr(key)} is a key")
    return key


def _call_object(machine: _PickleMachine, _: Any) -> None:
    """Carry out opcode OBJ on the machine: call the first value since the mark with the others, and
    push the result (`push_call`).
    """
    function, *args = machine.pop_marked()
    machine.push_call(function, tuple(args))


def _call_with_keywords(machine: _PickleMachine, _: Any) -> None:
    """Carry out opcode NEWOBJ_EX on the machine: pop function, arguments and keyword arguments, and
    push the result of the call. If there are keywords, arguments and keywords are passed as a pair,
    which a Stub keeps.
    """
    function, args, keywords = machine.pop_values(3)
    machine.push_call(function, (args, keywords) if keywords else args)


def _push_dict(machine: _PickleMachine, _: Any) -> None:
    """Carry out opcode DICT on the machine: push a dict of the alternating keys and values since
    the mark.
    """
    parts = machine.pop_marked()
    machine.push({})
    machine.set_items(parts)


def _drop_top(machine: _PickleMachine, _: Any) -> None:
    """Carry out opcode POP on the machine: drop the top of the stack, or the last mark if nothing
    was pushed since; IndexError if there is neither.
    """
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_marked()


LITERAL_OPCODES = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING"
    " UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
OPCODE_STEPS: dict[str, Callable[[_PickleMachine, Any], Any]] = {
    **dict.fromkeys(LITERAL_OPCODES.split(), _PickleMachine.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, value: None),
    **dict.fromkeys(
        ("PUT", "BINPUT", "LONG_BINPUT"), lambda m, index: m.memo.update({index: m.stack[-1]})
    ),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, index: m.push(m.memo[index])),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, _: m.push_call(*m.pop_values(2))),
    "MEMOIZE": lambda m, _: m.memo.update({len(m.memo): m.stack[-1]}),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "TUPLE1": lambda m, _: m.push(m.pop_values(1)),
    "TUPLE2": lambda m, _: m.push(m.pop_values(2)),
    "TUPLE3": lambda m, _: m.push(m.pop_values(3)),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_marked())),
    "LIST": lambda m, _: m.push(m.pop_marked()),
    "DICT": _push_dict,
    "FROZENSET": lambda m, _: m.push(frozenset(map(_check_key, m.pop_marked()))),
    "APPEND": lambda m, _: m.add_values(m.pop_values(1)),
    "APPENDS": lambda m, _: m.add_values(m.pop_marked()),
    "ADDITEMS": lambda m, _: m.add_values(m.pop_marked()),
    "SETITEM": lambda m, _: m.set_items(m.pop_values(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_marked()),
    "MARK": lambda m, _: m.push_mark(),
    "POP": _drop_top,
    "POP_MARK": lambda m, _: m.pop_marked(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "GLOBAL": lambda m, names: m.push(m.resolve_global(*names.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.push(m.resolve_global(*m.pop_values(2))),
    "INST": lambda m, names: m.push_call(
        m.resolve_global(*names.split(" ", 1)), tuple(m.pop_marked())
    ),
    "OBJ": _call_object,
    "NEWOBJ_EX": _call_with_keywords,
    "BUILD": lambda m, _: m.set_state(),
    "BINPERSID": lambda m, _: m.push(m.archive.locate_storage(*m.pop_values(1))),
}
