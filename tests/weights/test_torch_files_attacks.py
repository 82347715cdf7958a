"""Test malicious and damaged files of torch.save: nothing they name is imported or called, and each
is read or refused in one line.
"""

import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.pickles import (
    MARKER,
    assert_read_refused,
    assert_same_tensor,
    make_checkpoint,
    save_with_torch,
    write_raw_pickle,
)
from steelyard.errors import RequestError
from steelyard.weights import torch_archive, torch_files
from steelyard.weights.torch_files import Stub, TensorRef, read_torch_file


class ReducedCall:
    """An object that is pickled as a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def make_attacks(marker: str) -> dict[str, bytes]:
    """Return pickles by name, each of which would create the file `marker` or import a module in
    another way.
    """
    shell_command = f"touch {marker}"
    statement = f"open({marker!r}, 'w')"
    quoted_command, system_global, pushed_command = (
        b"V" + shell_command.encode() + b"\n",
        b"cposix\nsystem\n",
        b"X" + struct.pack("<I", len(shell_command)) + shell_command.encode(),
    )
    getattr_call = ReducedCall(getattr, ReducedCall(__import__, "os"), "system")
    pickled = {
        f"{name} {protocol}": pickle.dumps({"args": attack}, protocol)
        for protocol in (0, 2, 4)
        for name, attack in {
            "system": ReducedCall(os.system, shell_command),
            "popen": ReducedCall(subprocess.Popen, ["touch", marker]),
            "eval": ReducedCall(eval, statement),
            "exec": ReducedCall(exec, statement),
            "load": ReducedCall(torch.load, marker),
            "getattr": getattr_call,
            "import": ReducedCall(__import__, "antigravity"),
        }.items()
    }
    return pickled | {
        "called twice": (
            b"\x80\x02c__builtin__\ngetattr\n"
            + system_global
            + b"X\x08\x00\x00\x00__call__\x86R"
            + pushed_command
            + b"\x85R."
        ),
        "module": b"\x80\x02cimportlib\nimport_module\nX\x0b\x00\x00\x00antigravity\x85R.",
        "global": b"\x80\x02cantigravity\nfly\n.",
        "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + pushed_command + b"\x85R.",
        "inst": b"(" + quoted_command + b"iposix\nsystem\n.",
        "obj": b"(" + system_global + quoted_command + b"o.",
        "newobj": b"\x80\x02" + system_global + pushed_command + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + system_global + pushed_command + b"\x85}\x92.",
        "newobj_ex with names": (
            b"\x80\x04" + system_global + b")}X\x07\x00\x00\x00command" + pushed_command + b"s\x92."
        ),
        "build a global": (
            b"\x80\x02"
            + system_global
            + b"}X\x08\x00\x00\x00__call__"
            + system_global
            + b"sb"
            + pushed_command
            + b"\x85R."
        ),
        "build slots": (
            b"\x80\x02"
            + system_global
            + b"N}X\x04\x00\x00\x00name"
            + system_global
            + b"s\x86b"
            + pushed_command
            + b"\x85R."
        ),
        "build a stub": b"\x80\x02ca\nb\n)\x81" + system_global + pushed_command + b"\x85Rb.",
        "build with setstate": (
            b"\x80\x02ca\nb\n)\x81}X\x0c\x00\x00\x00__setstate__"
            + system_global
            + b"sb"
            + pushed_command
            + b"b."
        ),
        "build the rebuilder": (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__"
            + system_global
            + b"sb."
        ),
        "build an ordered dict": (
            b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00items" + system_global + b"sb."
        ),
        "items of a global": (
            b"\x80\x02" + system_global + b"(X\x01\x00\x00\x00a" + pushed_command + b"u."
        ),
        "values of a global": b"\x80\x02" + system_global + b"(" + pushed_command + b"e.",
        "pid with a call": b"\x80\x02" + system_global + pushed_command + b"\x85RQ.",
        "as a key": b"\x80\x02}" + system_global + pushed_command + b"\x85RNs.",
        "our own": b"\x80\x02csteelyard.models.pickles\n_Machine\n)R.",
        "dotted": (
            b"\x80\x04\x8c\x05torch\x8c\x15_utils.__builtins__.ev\x93" + pushed_command + b"\x85R."
        ),
    }


ATTACK_NAMES = sorted(make_attacks(MARKER))


def snapshot_module_state() -> Any:
    """Return copies of the reader's lookup tables, classes and functions, to show that an attack
    changed none.
    """
    lookup_tables = (
        torch_files.INTERPRETED_FUNCTIONS,
        torch_files.REBUILD_FUNCTIONS,
        torch_files.OPCODE_STEPS,
        torch_files.DTYPES,
        torch_archive.STORAGE_DTYPES,
    )
    classes = [
        dict(vars(class_))
        for class_ in (Stub, TensorRef, torch_files._PickleMachine, torch_archive.TorchArchive)
    ]
    functions = [
        (function.__code__, dict(function.__dict__), function.__defaults__)
        for function in torch_files.INTERPRETED_FUNCTIONS.values()
    ]
    return [dict(table) for table in lookup_tables], classes, functions


@pytest.mark.parametrize("name", ATTACK_NAMES)
def test_no_attack_imports_or_calls_anything(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    modules, state_before = set(sys.modules), snapshot_module_state()
    path = write_raw_pickle(tmp_path, make_attacks(MARKER)[name])
    try:
        loaded = read_torch_file(path)
    except RequestError:
        assert_read_refused(path)
    else:
        payload = loaded["args"] if isinstance(loaded, dict) and "args" in loaded else loaded
        assert isinstance(payload, (Stub, dict))
        repr(loaded)
    assert not (tmp_path / MARKER).exists()
    assert "antigravity" not in sys.modules
    # Python imports codecs when they are first used
    assert {module for module in sys.modules if not module.startswith("encodings.")} <= modules
    assert snapshot_module_state() == state_before


@pytest.mark.process
def test_the_attacks_succeed_with_pickle(tmp_path, monkeypatch):
    """Otherwise test_no_attack_imports_or_calls_anything would show nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("system 0", "exec 4", "stack global", "inst", "obj", "called twice", "eval 2"):
        pickle.loads(make_attacks(MARKER)[name])
        (tmp_path / MARKER).unlink()


def test_an_attack_is_read_as_its_name_and_arguments(tmp_path):
    stub = read_torch_file(write_raw_pickle(tmp_path, make_attacks(MARKER)["system 2"]))["args"]
    assert (stub.name, stub.args, stub.state) == ("posix.system", (f"touch {MARKER}",), None)


@pytest.mark.parametrize(
    "code",
    [
        b"\x82\x01",
        b"\x83\x01\x00",
        b"\x84\x01\x00\x00\x00",
        b"Pa\n",
        b"\x80\x05\x97",
        b"\x80\x05N\x98",
    ],
)
def test_opcodes_for_extensions_and_buffers_are_refused(code, tmp_path):
    assert_read_refused(write_raw_pickle(tmp_path, code + b"."), "its pickle has the opcode ")


INVALID_PICKLES = {
    "long4": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "negative long4": b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62),
    "bytes8": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"a.",
    "bytes8 of 64 bits": b"\x80\x04\x8e" + b"\xff" * 8 + b"a.",
    "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"a.",
    "text8": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
    "digits": b"L" + b"9" * 100_000 + b"L\n.",
    "deep key": b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",
    "wide key": b"\x80\x02})" + b"2\x86" * 64 + b"Ns.",
    "deep element": b"\x80\x04\x8f()" + b"\x85" * 100_000 + b"\x90.",
    "long name": b"\x80\x04X" + struct.pack("<I", 10_000) + b"a" * 10_000 + b"2\x93.",
    "no memo": b"\x80\x02h\x07.",
    "no mark": b"\x80\x02t.",
    "nothing": b"\x80\x02.",
    "empty": b"",
    "no stop": b"\x80\x02N",
    "text": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "unknown": b"\x80\x02\xfe.",
    "a list as a key": b"\x80\x02}]Ns.",
    "odd items": b"\x80\x02}(Nu.",
    "items of a number": b"\x80\x02K\x01(NNu.",
    "values of a number": b"\x80\x02K\x01(Ne.",
    "state of a number": b"\x80\x02K\x01}b.",
    "call of a number": b"\x80\x02K\x01)R.",
    "call with a list": b"\x80\x02ca\nb\n]R.",
    "too few arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "pop at the bottom": b"\x80\x020.",
    "below the mark": b"\x80\x02NN(\x86.",
}


@pytest.mark.parametrize("name", INVALID_PICKLES)
def test_invalid_pickles_are_refused(name, tmp_path):
    assert_read_refused(
        write_raw_pickle(tmp_path, INVALID_PICKLES[name]),
        "is not a whole file written by torch.save (",
    )


@pytest.mark.parametrize("index", [b"r\xff\xff\xff\xff", b"p99999999999\n"])
def test_a_high_memo_index_allocates_little(index, tmp_path):
    assert read_torch_file(write_raw_pickle(tmp_path, b"\x80\x02K\x05" + index + b".")) == 5


@pytest.mark.parametrize(
    "data",
    [
        b"]" * 200_000 + b"a" * 199_999,
        b"}" + b"K\x01}" * 99_999 + b"s" * 99_999,
        b"ca\nb\n" * 50_000 + b"b" * 49_999,
        b")" + b"\x85" * 200_000,
    ],
)
def test_deep_nesting_is_read(data, tmp_path):
    loaded = read_torch_file(write_raw_pickle(tmp_path, b"\x80\x02" + data + b"."))
    assert isinstance(loaded, (list, dict, tuple, Stub))


@pytest.mark.parametrize(
    "limit, value, fragment",
    [
        ("MAX_OPCODES", 50, "its pickle has more than 50 opcodes"),
        ("MAX_PICKLE_BYTES", 50, "bytes, at most 50 are allowed"),
        ("MAX_ENTRIES", 3, "its zip has more than 3 entries"),
        ("MAX_DIRECTORY_BYTES", 100, "its zip directory is larger than 100 bytes"),
    ],
)
def test_pickle_and_zip_sizes_have_limits(limit, value, fragment, tmp_path, monkeypatch):
    path = save_with_torch(tmp_path, make_checkpoint())
    monkeypatch.setattr(torch_files if hasattr(torch_files, limit) else torch_archive, limit, value)
    assert_read_refused(path, fragment)


def pickle_storage(key: str = "0", count: Any = b"K\x04", kind: str = "FloatStorage") -> bytes:
    """Return opcodes that push a storage `key` of `count` elements, which is itself an opcode with
    its argument.
    """
    pushed_key = b"X" + struct.pack("<I", len(key)) + key.encode()
    return (
        b"(X\x07\x00\x00\x00storagectorch\n"
        + kind.encode()
        + b"\n"
        + pushed_key
        + b"X\x03\x00\x00\x00cpu"
        + count
        + b"tQ"
    )


def pickle_tensor(
    offset: bytes = b"K\x00",
    size: bytes = b"K\x04\x85",
    stride: bytes = b"K\x01\x85",
    base: bytes | None = None,
) -> bytes:
    """Return a pickle of one tensor; offset, size and stride are opcodes, and `base` is the storage
    it views.
    """
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + (base or pickle_storage())
        + offset
        + size
        + stride
        + b"\x89}tR."
    )


def test_a_tensor_pickled_by_hand_is_read(tmp_path):
    assert_same_tensor(
        read_torch_file(
            write_raw_pickle(tmp_path, pickle_tensor(), {"0": np.arange(4, dtype="<f4").tobytes()})
        ),
        torch.arange(4.0),
    )


TWO_TO_64 = b"\x8a\x09" + (2**64).to_bytes(9, "little")
TWO_TO_62 = b"\x8a\x08" + (2**62).to_bytes(8, "little")
INVALID_TENSORS = {
    "key that climbs": (
        pickle_tensor(base=pickle_storage("../data.pkl")),
        "'data/../data.pkl' is named by its pickle and is not in the file",
    ),
    "absent key": (
        pickle_tensor(base=pickle_storage("7")),
        "'data/7' is named by its pickle and is not in the file",
    ),
    "long key": (pickle_tensor(base=pickle_storage("x\n" * 999)), "'data/x\\nx\\n"),
    "count": (
        pickle_tensor(base=pickle_storage(count=b"K\x05")),
        "storage '0' has 16 bytes, 20 are needed",
    ),
    "negative count": (
        pickle_tensor(base=pickle_storage(count=b"J\xff\xff\xff\xff")),
        "shape or stride has -1, allowed: 0 to",
    ),
    "huge count": (
        pickle_tensor(base=pickle_storage(count=TWO_TO_64)),
        "shape or stride has 18446744073709551616, allowed: ",
    ),
    "text count": (
        pickle_tensor(base=pickle_storage(count=b"X\x01\x00\x00\x00a")),
        "shape or stride has 'a', allowed: ",
    ),
    "true count": (
        pickle_tensor(base=pickle_storage(count=b"\x88")),
        "shape or stride has True, allowed: ",
    ),
    "kind": (
        pickle_tensor(base=pickle_storage(kind="QInt8Storage")),
        "a storage is of the type Stub('torch.QInt8Storage')",
    ),
    "no storage": (
        pickle_tensor(base=b"K\x01"),
        "a tensor is made of something that is not a storage",
    ),
    "pid of text": (
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        "its pickle refers to an external object that is not a storage",
    ),
    "short pid": (
        b"\x80\x02X\x07\x00\x00\x00storage\x85Q.",
        "its pickle refers to an external object that is not a storage",
    ),
    "pid in a pid": (
        b"\x80\x02(" + pickle_storage() + pickle_storage() + b"K\x01K\x01K\x01tQ.",
        "its pickle refers to an external object",
    ),
    "size": (
        pickle_tensor(size=b"K\x05\x85"),
        "a tensor at 0 reaches beyond its storage of 16 bytes",
    ),
    "offset": (
        pickle_tensor(offset=b"K\x01"),
        "a tensor at 1 reaches beyond its storage of 16 bytes",
    ),
    "negative offset": (
        pickle_tensor(offset=b"J\xff\xff\xff\xff"),
        "a tensor at -1 reaches beyond",
    ),
    "huge offset": (
        pickle_tensor(offset=TWO_TO_64),
        "a tensor at 18446744073709551616 reaches beyond",
    ),
    "text offset": (pickle_tensor(offset=b"X\x01\x00\x00\x00a"), "a tensor at 'a' reaches beyond"),
    "stride": (
        pickle_tensor(stride=b"K\x02\x85"),
        "a tensor at 0 reaches beyond its storage of 16 bytes",
    ),
    "negative stride": (pickle_tensor(stride=b"J\xff\xff\xff\xff\x85"), "shape or stride has -1"),
    "negative size": (pickle_tensor(size=b"J\xff\xff\xff\xff\x85"), "shape or stride has -1"),
    "float size": (
        pickle_tensor(size=b"G\x3f\xf0\x00\x00\x00\x00\x00\x00\x85"),
        "shape or stride has 1.0",
    ),
    "huge size": (
        pickle_tensor(size=TWO_TO_64 + b"\x85", stride=b"K\x00\x85"),
        "shape or stride has 18446744073709551616",
    ),
    "repeated": (
        pickle_tensor(size=TWO_TO_62 + b"\x85", stride=b"K\x00\x85"),
        "a tensor is larger than 2**63 bytes",
    ),
    "repeated less": (
        pickle_tensor(size=b"J\x00\x00\x00\x02\x85", stride=b"K\x00\x85"),
        "repeats its storage of 16 bytes into 134217728",
    ),
    "empty and huge": (
        pickle_tensor(size=b"K\x00" + TWO_TO_62 + b"\x86", stride=b"K\x00K\x00\x86"),
        "larger than 2**63 bytes",
    ),
    "lengths": (pickle_tensor(stride=b")"), "not two tuples of one length"),
    "list of sizes": (pickle_tensor(size=b"]"), "not two tuples of one length"),
    "dimensions": (
        pickle_tensor(size=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t"),
        "has 65 dimensions",
    ),
    "a view as a storage": (
        pickle_tensor(base=pickle_tensor(size=b"K\x02\x85", stride=b"K\x02\x85")[2:-1]),
        "that is not a storage",
    ),
    "metadata": (
        pickle_tensor().replace(b"\x89}tR", b"\x89}}X\x03\x00\x00\x00neg\x88stR"),
        "lazily negated or conjugated",
    ),
    "dtype": (
        pickle_tensor().replace(b"_v2", b"_v3").replace(b"\x89}tR", b"\x89}X\x01\x00\x00\x00atR"),
        "dtype is not a dtype of torch",
    ),
}


@pytest.mark.parametrize("name", INVALID_TENSORS)
def test_tensors_that_do_not_fit_their_storage_are_refused(name, tmp_path):
    data, fragment = INVALID_TENSORS[name]
    assert_read_refused(write_raw_pickle(tmp_path, data, {"0": bytes(16)}), fragment)


def change_zip_directory(path: Path, change: Any) -> Path:
    """Change the entry data/0 in the zip's directory, not in its local header, and return the
    path.
    """
    content = bytearray(path.read_bytes())
    entry_offset = content.rindex(b"PK\x01\x02", 0, content.rindex(b"a/data/0"))
    change(content, entry_offset)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "change, fragment",
    [
        (
            lambda c, at: struct.pack_into("<H", c, at + 10, 8),
            "'data/0' is compressed or encrypted",
        ),
        (lambda c, at: struct.pack_into("<H", c, at + 8, 1), "'data/0' is compressed or encrypted"),
        (
            lambda c, at: struct.pack_into("<II", c, at + 20, 9999, 9999),
            "'data/0' reaches beyond the end of the file",
        ),
        (lambda c, at: struct.pack_into("<I", c, at + 42, 5), "'data/0' has no header"),
        (lambda c, at: struct.pack_into("<I", c, at + 42, 2**31), "'data/0' has no header"),
        (
            lambda c, at: struct.pack_into("<H", c, at + 6, 99),
            "the zip directory, is missing or damaged",
        ),
    ],
)
def test_a_wrong_zip_directory_is_refused(change, fragment, tmp_path):
    assert_read_refused(
        change_zip_directory(write_raw_pickle(tmp_path, pickle_tensor(), {"0": bytes(16)}), change),
        fragment,
    )


def test_the_local_header_says_where_the_bytes_begin(tmp_path):
    path = write_raw_pickle(tmp_path, pickle_tensor())
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("a/data/0")
        info.extra = b"FB" + struct.pack("<H", 9) + b"Z" * 9  # torch.save aligns with such padding
        archive.writestr(info, np.arange(4, dtype="<f4").tobytes())
    assert_same_tensor(read_torch_file(path), torch.arange(4.0))


def test_other_files_than_those_of_torch_save_are_refused(tmp_path):
    path = save_with_torch(tmp_path, torch.ones(3))
    valid_content = path.read_bytes()
    assert_read_refused(tmp_path / "absent.pt", "is not a file; give a checkpoint")
    assert_read_refused(tmp_path, "is not a file; give a checkpoint")
    for content, fragment in (
        (b"", "it is not a zip file"),
        (b"x" * 99, "it is not a zip file"),
        (valid_content[:-30], "the zip directory, is missing"),
    ):
        path.write_bytes(content)
        assert_read_refused(path, fragment)
    assert_read_refused(
        save_with_torch(tmp_path, {"a": 1}, _use_new_zipfile_serialization=False),
        "torch's old format is not supported; ",
    )
    assert_read_refused(
        write_raw_pickle(tmp_path, b"N.", byteorder=b"big"),
        "its byte order is b'big', allowed: little; ",
    )
    assert_read_refused(
        write_raw_pickle(tmp_path, b"N.", **{"constants.pkl": b""}), "is a TorchScript archive"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/other", b"")
    assert_read_refused(path, "its zip has 0 data.pkl, one is expected")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/data.pkl", b"N." + b" " * 99)
    assert_read_refused(path, "'data.pkl' is compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/data.pkl", b"N.")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("b/data.pkl", b"N.")
    assert_read_refused(path, "or two of one name")


def test_a_torchscript_archive_is_refused(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    assert_read_refused(
        tmp_path / "script.pt", "is a TorchScript archive, not a checkpoint; save its state_dict"
    )


def open_every_tensor(value: Any) -> None:
    """Open every tensor inside a value that was read."""
    stack, visited = [value], set()
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, TensorRef):
            item.open().contiguous()
        elif isinstance(item, Stub):
            stack += [item.args, item.state, item.items, item.values]
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += item


def read_or_refuse(path: Path) -> None:
    """Read a file and open its tensors, or assert that it is refused in one line."""
    try:
        open_every_tensor(read_torch_file(path))
    except RequestError:
        assert_read_refused(path)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Return the data with one to eight random changes of single bytes or bits, deletions or
    insertions.
    """
    mutated = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        mutated = mutated or bytearray(1)
        offset = draw.randrange(len(mutated))
        match draw.randrange(4):
            case 0:
                mutated[offset] = draw.randrange(256)
            case 1:
                mutated[offset] ^= 1 << draw.randrange(8)
            case 2:
                del mutated[offset : offset + draw.randrange(1, 9)]
            case _:
                mutated[offset:offset] = draw.randbytes(draw.randrange(1, 5))
    return bytes(mutated)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_pickles_are_read_or_refused(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    with zipfile.ZipFile(
        save_with_torch(tmp_path, make_checkpoint(), pickle_protocol=draw.choice((2, 4)))
    ) as archive:
        entries = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    data = entries.pop("data.pkl")
    bases = [data, data, *make_attacks(MARKER).values()]
    modules, state_before = set(sys.modules), snapshot_module_state()
    for _ in range(30):
        base = draw.choice(bases)
        read_or_refuse(write_raw_pickle(tmp_path, mutate(base, draw), **entries))
        read_or_refuse(write_raw_pickle(tmp_path, base[: draw.randrange(len(base))], **entries))
    assert not (tmp_path / MARKER).exists()
    assert (set(sys.modules), snapshot_module_state()) == (modules, state_before)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_zips_are_read_or_refused(seed, tmp_path):
    draw = random.Random(seed)
    path = save_with_torch(tmp_path, {"w": torch.ones(3), "n": [1, 2]})
    valid_content = path.read_bytes()
    for _ in range(30):
        path.write_bytes(mutate(valid_content, draw))
        read_or_refuse(path)
        path.write_bytes(valid_content[: draw.randrange(len(valid_content))])
        read_or_refuse(path)
    directory_end = valid_content.rindex(b"PK\x05\x06")
    for offset in range(directory_end - 60, len(valid_content)):
        path.write_bytes(
            valid_content[:offset]
            + bytes([valid_content[offset] ^ 0xFF])
            + valid_content[offset + 1 :]
        )
        read_or_refuse(path)
