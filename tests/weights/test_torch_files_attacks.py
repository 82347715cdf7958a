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

from fixtures.pickles import MARKER, checkpoint, raw, refused, same, saved
from steelyard.errors import RequestError
from steelyard.weights import torch_archive, torch_files
from steelyard.weights.torch_files import Stub, TensorRef, read_torch_file


class Attack:
    """An object that is pickled as a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def attacks(marker: str) -> dict[str, bytes]:
    """Return pickles by name, each of which would create the file `marker` or import a module in
    another way.
    """
    touch = f"touch {marker}"
    line = f"open({marker!r}, 'w')"
    quoted, system, arg = (
        b"V" + touch.encode() + b"\n",
        b"cposix\nsystem\n",
        b"X" + struct.pack("<I", len(touch)) + touch.encode(),
    )
    by_getattr = Attack(getattr, Attack(__import__, "os"), "system")
    made = {
        f"{name} {protocol}": pickle.dumps({"args": attack}, protocol)
        for protocol in (0, 2, 4)
        for name, attack in {
            "system": Attack(os.system, touch),
            "popen": Attack(subprocess.Popen, ["touch", marker]),
            "eval": Attack(eval, line),
            "exec": Attack(exec, line),
            "load": Attack(torch.load, marker),
            "getattr": by_getattr,
            "import": Attack(__import__, "antigravity"),
        }.items()
    }
    return made | {
        "called twice": (
            b"\x80\x02c__builtin__\ngetattr\n"
            + system
            + b"X\x08\x00\x00\x00__call__\x86R"
            + arg
            + b"\x85R."
        ),
        "module": b"\x80\x02cimportlib\nimport_module\nX\x0b\x00\x00\x00antigravity\x85R.",
        "global": b"\x80\x02cantigravity\nfly\n.",
        "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + arg + b"\x85R.",
        "inst": b"(" + quoted + b"iposix\nsystem\n.",
        "obj": b"(" + system + quoted + b"o.",
        "newobj": b"\x80\x02" + system + arg + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + system + arg + b"\x85}\x92.",
        "newobj_ex with names": (
            b"\x80\x04" + system + b")}X\x07\x00\x00\x00command" + arg + b"s\x92."
        ),
        "build a global": (
            b"\x80\x02" + system + b"}X\x08\x00\x00\x00__call__" + system + b"sb" + arg + b"\x85R."
        ),
        "build slots": (
            b"\x80\x02" + system + b"N}X\x04\x00\x00\x00name" + system + b"s\x86b" + arg + b"\x85R."
        ),
        "build a stub": b"\x80\x02ca\nb\n)\x81" + system + arg + b"\x85Rb.",
        "build with setstate": (
            b"\x80\x02ca\nb\n)\x81}X\x0c\x00\x00\x00__setstate__" + system + b"sb" + arg + b"b."
        ),
        "build the rebuilder": (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__"
            + system
            + b"sb."
        ),
        "build an ordered dict": (
            b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00items" + system + b"sb."
        ),
        "items of a global": b"\x80\x02" + system + b"(X\x01\x00\x00\x00a" + arg + b"u.",
        "values of a global": b"\x80\x02" + system + b"(" + arg + b"e.",
        "pid with a call": b"\x80\x02" + system + arg + b"\x85RQ.",
        "as a key": b"\x80\x02}" + system + arg + b"\x85RNs.",
        "our own": b"\x80\x02csteelyard.models.pickles\n_Machine\n)R.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x15_utils.__builtins__.ev\x93" + arg + b"\x85R.",
    }


ATTACKS = sorted(attacks(MARKER))


def tables() -> Any:
    """Return copies of the reader's lookup tables, classes and functions, to show that an attack
    changed none.
    """
    every = (
        torch_files.INTERPRETED_FUNCTIONS,
        torch_files.REBUILD_FUNCTIONS,
        torch_files.OPCODE_STEPS,
        torch_files.DTYPES,
        torch_archive.STORAGE_DTYPES,
    )
    classes = [
        dict(vars(kind))
        for kind in (Stub, TensorRef, torch_files._PickleMachine, torch_archive.TorchArchive)
    ]
    functions = [
        (f.__code__, dict(f.__dict__), f.__defaults__)
        for f in torch_files.INTERPRETED_FUNCTIONS.values()
    ]
    return [dict(table) for table in every], classes, functions


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_called(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    modules, before = set(sys.modules), tables()
    path = raw(tmp_path, attacks(MARKER)[name])
    try:
        found = read_torch_file(path)
    except RequestError:
        refused(path)
    else:
        inner = found["args"] if isinstance(found, dict) and "args" in found else found
        assert isinstance(inner, (Stub, dict))
        repr(found)
    assert not (tmp_path / MARKER).exists()
    assert "antigravity" not in sys.modules
    # Python imports codecs when they are first used
    assert {one for one in sys.modules if not one.startswith("encodings.")} <= modules
    assert tables() == before


@pytest.mark.process
def test_the_attacks_work_on_the_unpickler(tmp_path, monkeypatch):
    """Otherwise test_no_attack_imports_or_calls_anything would show nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("system 0", "exec 4", "stack global", "inst", "obj", "called twice", "eval 2"):
        pickle.loads(attacks(MARKER)[name])
        (tmp_path / MARKER).unlink()


def test_what_an_attack_leaves_is_its_name_and_arguments(tmp_path):
    found = read_torch_file(raw(tmp_path, attacks(MARKER)["system 2"]))["args"]
    assert (found.name, found.args, found.state) == ("posix.system", (f"touch {MARKER}",), None)


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
def test_opcodes_that_reach_outside(code, tmp_path):
    refused(raw(tmp_path, code + b"."), "its pickle has the opcode ")


BOMBS = {
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


@pytest.mark.parametrize("name", BOMBS)
def test_pickles_that_make_no_sense(name, tmp_path):
    refused(raw(tmp_path, BOMBS[name]), "is not a whole file written by torch.save (")


@pytest.mark.parametrize("index", [b"r\xff\xff\xff\xff", b"p99999999999\n"])
def test_a_memo_of_few_entries_is_small(index, tmp_path):
    assert read_torch_file(raw(tmp_path, b"\x80\x02K\x05" + index + b".")) == 5


@pytest.mark.parametrize(
    "data",
    [
        b"]" * 200_000 + b"a" * 199_999,
        b"}" + b"K\x01}" * 99_999 + b"s" * 99_999,
        b"ca\nb\n" * 50_000 + b"b" * 49_999,
        b")" + b"\x85" * 200_000,
    ],
)
def test_deep_nesting_ends_well(data, tmp_path):
    found = read_torch_file(raw(tmp_path, b"\x80\x02" + data + b"."))
    assert isinstance(found, (list, dict, tuple, Stub))


@pytest.mark.parametrize(
    "limit, value, fragment",
    [
        ("MAX_OPCODES", 50, "its pickle has more than 50 opcodes"),
        ("MAX_PICKLE_BYTES", 50, "bytes, at most 50 are allowed"),
        ("MAX_ENTRIES", 3, "its zip has more than 3 entries"),
        ("MAX_DIRECTORY_BYTES", 100, "its zip directory is larger than 100 bytes"),
    ],
)
def test_limits(limit, value, fragment, tmp_path, monkeypatch):
    path = saved(tmp_path, checkpoint())
    monkeypatch.setattr(torch_files if hasattr(torch_files, limit) else torch_archive, limit, value)
    refused(path, fragment)


def storage(key: str = "0", count: Any = b"K\x04", kind: str = "FloatStorage") -> bytes:
    """Return opcodes that push a storage `key` of `count` elements, which is itself an opcode with
    its argument.
    """
    keyed = b"X" + struct.pack("<I", len(key)) + key.encode()
    return (
        b"(X\x07\x00\x00\x00storagectorch\n"
        + kind.encode()
        + b"\n"
        + keyed
        + b"X\x03\x00\x00\x00cpu"
        + count
        + b"tQ"
    )


def tensor(
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
        + (base or storage())
        + offset
        + size
        + stride
        + b"\x89}tR."
    )


def test_a_tensor_written_by_hand(tmp_path):
    same(
        read_torch_file(raw(tmp_path, tensor(), {"0": np.arange(4, dtype="<f4").tobytes()})),
        torch.arange(4.0),
    )


HUGE = b"\x8a\x09" + (2**64).to_bytes(9, "little")
LARGE = b"\x8a\x08" + (2**62).to_bytes(8, "little")
BEYOND = {
    "key that climbs": (
        tensor(base=storage("../data.pkl")),
        "'data/../data.pkl' is asked for and is not in it",
    ),
    "absent key": (tensor(base=storage("7")), "'data/7' is asked for and is not in it"),
    "long key": (tensor(base=storage("x\n" * 999)), "'data/x\\nx\\n"),
    "count": (tensor(base=storage(count=b"K\x05")), "storage '0' has 16 bytes, 20 are asked for"),
    "negative count": (
        tensor(base=storage(count=b"J\xff\xff\xff\xff")),
        "shape or stride has -1, allowed: 0 to",
    ),
    "huge count": (
        tensor(base=storage(count=HUGE)),
        "shape or stride has 18446744073709551616, allowed: ",
    ),
    "text count": (
        tensor(base=storage(count=b"X\x01\x00\x00\x00a")),
        "shape or stride has 'a', allowed: ",
    ),
    "true count": (tensor(base=storage(count=b"\x88")), "shape or stride has True, allowed: "),
    "kind": (
        tensor(base=storage(kind="QInt8Storage")),
        "a storage is of the type Stub('torch.QInt8Storage')",
    ),
    "no storage": (tensor(base=b"K\x01"), "a tensor is made of something that is not a storage"),
    "pid of text": (
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        "an external object is asked for that is not a storage",
    ),
    "short pid": (
        b"\x80\x02X\x07\x00\x00\x00storage\x85Q.",
        "an external object is asked for that is not a storage",
    ),
    "pid in a pid": (
        b"\x80\x02(" + storage() + storage() + b"K\x01K\x01K\x01tQ.",
        "an external object is asked for",
    ),
    "size": (tensor(size=b"K\x05\x85"), "a tensor at 0 reaches beyond its storage of 16 bytes"),
    "offset": (tensor(offset=b"K\x01"), "a tensor at 1 reaches beyond its storage of 16 bytes"),
    "negative offset": (tensor(offset=b"J\xff\xff\xff\xff"), "a tensor at -1 reaches beyond"),
    "huge offset": (tensor(offset=HUGE), "a tensor at 18446744073709551616 reaches beyond"),
    "text offset": (tensor(offset=b"X\x01\x00\x00\x00a"), "a tensor at 'a' reaches beyond"),
    "stride": (tensor(stride=b"K\x02\x85"), "a tensor at 0 reaches beyond its storage of 16 bytes"),
    "negative stride": (tensor(stride=b"J\xff\xff\xff\xff\x85"), "shape or stride has -1"),
    "negative size": (tensor(size=b"J\xff\xff\xff\xff\x85"), "shape or stride has -1"),
    "float size": (
        tensor(size=b"G\x3f\xf0\x00\x00\x00\x00\x00\x00\x85"),
        "shape or stride has 1.0",
    ),
    "huge size": (
        tensor(size=HUGE + b"\x85", stride=b"K\x00\x85"),
        "shape or stride has 18446744073709551616",
    ),
    "repeated": (
        tensor(size=LARGE + b"\x85", stride=b"K\x00\x85"),
        "a tensor is larger than 2**63 bytes",
    ),
    "repeated less": (
        tensor(size=b"J\x00\x00\x00\x02\x85", stride=b"K\x00\x85"),
        "repeats its storage of 16 bytes into 134217728",
    ),
    "empty and huge": (
        tensor(size=b"K\x00" + LARGE + b"\x86", stride=b"K\x00K\x00\x86"),
        "larger than 2**63 bytes",
    ),
    "lengths": (tensor(stride=b")"), "not two tuples of one length"),
    "list of sizes": (tensor(size=b"]"), "not two tuples of one length"),
    "dimensions": (
        tensor(size=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t"),
        "has 65 dimensions",
    ),
    "a view as a storage": (
        tensor(base=tensor(size=b"K\x02\x85", stride=b"K\x02\x85")[2:-1]),
        "that is not a storage",
    ),
    "metadata": (
        tensor().replace(b"\x89}tR", b"\x89}}X\x03\x00\x00\x00neg\x88stR"),
        "lazily negated or conjugated",
    ),
    "dtype": (
        tensor().replace(b"_v2", b"_v3").replace(b"\x89}tR", b"\x89}X\x01\x00\x00\x00atR"),
        "dtype is not one",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_tensors_beyond_their_storage(name, tmp_path):
    data, fragment = BEYOND[name]
    refused(raw(tmp_path, data, {"0": bytes(16)}), fragment)


def directory_changed(path: Path, change: Any) -> Path:
    """Change the entry data/0 in the zip's directory, not in its local header, and return the path."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"a/data/0"))
    change(content, at)
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
def test_zips_that_lie(change, fragment, tmp_path):
    refused(directory_changed(raw(tmp_path, tensor(), {"0": bytes(16)}), change), fragment)


def test_the_local_header_says_where_the_bytes_begin(tmp_path):
    path = raw(tmp_path, tensor())
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("a/data/0")
        info.extra = b"FB" + struct.pack("<H", 9) + b"Z" * 9  # torch.save aligns with such padding
        archive.writestr(info, np.arange(4, dtype="<f4").tobytes())
    same(read_torch_file(path), torch.arange(4.0))


def test_what_is_not_a_file_of_torch_save(tmp_path):
    path = saved(tmp_path, torch.ones(3))
    whole = path.read_bytes()
    refused(tmp_path / "absent.pt", "is not a file; give a checkpoint")
    refused(tmp_path, "is not a file; give a checkpoint")
    for content, fragment in (
        (b"", "it is no zip"),
        (b"x" * 99, "it is no zip"),
        (whole[:-30], "the zip directory, is missing"),
    ):
        path.write_bytes(content)
        refused(path, fragment)
    refused(
        saved(tmp_path, {"a": 1}, _use_new_zipfile_serialization=False),
        "torch's old format is not read; ",
    )
    refused(raw(tmp_path, b"N.", byteorder=b"big"), "its byte order is b'big', allowed: little; ")
    refused(raw(tmp_path, b"N.", **{"constants.pkl": b""}), "is a TorchScript archive")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/other", b"")
    refused(path, "its zip has 0 data.pkl, one is expected")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/data.pkl", b"N." + b" " * 99)
    refused(path, "'data.pkl' is compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/data.pkl", b"N.")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("b/data.pkl", b"N.")
    refused(path, "or two of one name")


def test_a_torchscript_archive(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    refused(
        tmp_path / "script.pt", "is a TorchScript archive, not a checkpoint; save its state_dict"
    )


def walk(value: Any) -> None:
    """Open every tensor inside a value that was read."""
    stack, seen = [value], set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, TensorRef):
            one.open().contiguous()
        elif isinstance(one, Stub):
            stack += [one.args, one.state, one.items, one.values]
        elif isinstance(one, dict):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            stack += one


def outcome(path: Path) -> None:
    """Read a file and open its tensors, or assert that it is refused in one line."""
    try:
        walk(read_torch_file(path))
    except RequestError:
        refused(path)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Return the data with one to eight random changes of single bytes or bits, deletions or
    insertions.
    """
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        out = out or bytearray(1)
        at = draw.randrange(len(out))
        match draw.randrange(4):
            case 0:
                out[at] = draw.randrange(256)
            case 1:
                out[at] ^= 1 << draw.randrange(8)
            case 2:
                del out[at : at + draw.randrange(1, 9)]
            case _:
                out[at:at] = draw.randbytes(draw.randrange(1, 5))
    return bytes(out)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_pickles(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    with zipfile.ZipFile(
        saved(tmp_path, checkpoint(), pickle_protocol=draw.choice((2, 4)))
    ) as archive:
        entries = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    data = entries.pop("data.pkl")
    bases = [data, data, *attacks(MARKER).values()]
    modules, before = set(sys.modules), tables()
    for _ in range(30):
        base = draw.choice(bases)
        outcome(raw(tmp_path, mutate(base, draw), **entries))
        outcome(raw(tmp_path, base[: draw.randrange(len(base))], **entries))
    assert not (tmp_path / MARKER).exists()
    assert (set(sys.modules), tables()) == (modules, before)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_zips(seed, tmp_path):
    draw = random.Random(seed)
    path = saved(tmp_path, {"w": torch.ones(3), "n": [1, 2]})
    whole = path.read_bytes()
    for _ in range(30):
        path.write_bytes(mutate(whole, draw))
        outcome(path)
        path.write_bytes(whole[: draw.randrange(len(whole))])
        outcome(path)
    end = whole.rindex(b"PK\x05\x06")
    for at in range(end - 60, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        outcome(path)
