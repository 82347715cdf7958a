"""Tests of small files that expand to a lot: each is refused with the limit, before it takes memory
or time.
"""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fixtures.attacks import Attacks
from fixtures.golden import golden
from fixtures.records import copy_published_record
from steelyard.data import archive
from steelyard.errors import RequestError
from steelyard.record import record, record_file
from steelyard.tasks.mmlu import data
from steelyard.weights import hf_checkpoint, torch_files

MIB = 1 << 20


def write_tar_gz(path: Path, *members: tuple[str, bytes, bytes, int]) -> Path:
    """Write a gzipped tar of these members, each given as name, type, first bytes and size; the
    rest is zeros.
    """
    with gzip.open(path, "wb", compresslevel=1) as file:
        for name, kind, content, size in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, size
            file.write(member.tobuf())
            file.write(content)
            zeros = size - len(content) + -size % 512
            for _ in range(zeros // MIB):
                file.write(bytes(MIB))
            file.write(bytes(zeros % MIB))
        file.write(bytes(1024))
    return path


def refusal_of(read: object, path: Path) -> str:
    """Return the error with which a function refuses to read a file."""
    with pytest.raises(RequestError) as caught:
        read(path)  # type: ignore[operator]
    return str(caught.value)


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["pax", "long name"]
)
def test_oversized_tar_attributes_are_refused(kind: bytes, tmp_path: Path) -> None:
    path = write_tar_gz(tmp_path / "bomb.tar.gz", ("x", kind, b"", 80 * MIB))
    assert path.stat().st_size < MIB
    assert (
        refusal_of(data.read_subjects, path)
        == f"{path}: a part of {80 * MIB} bytes; at most {65 * MIB} are read at once"
    )


def test_unpacked_tar_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_TAR_BYTES", 4 * MIB)
    path = write_tar_gz(
        tmp_path / "bomb.tar.gz", *((f"other/{n}", tarfile.REGTYPE, b"", MIB) for n in range(6))
    )
    assert (
        refusal_of(data.read_subjects, path)
        == f"{path}: larger than {4 * MIB} bytes unpacked; MMLU's tar has 166 MB"
    )
    path.write_bytes(bytes(4 * MIB + 1))
    assert (
        refusal_of(data.read_subjects, path)
        == f"{path}: larger than {4 * MIB} bytes; MMLU's tar has 166 MB"
    )


def test_rows_have_a_limit_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_ROWS", 9)
    rows = [b",,,,,A\n" * 5] * 2
    names = ("data/dev/a_dev.csv", "data/test/a_test.csv")
    path = write_tar_gz(
        tmp_path / "x.tar.gz",
        *(
            (name, tarfile.REGTYPE, content, len(content))
            for name, content in zip(names, rows, strict=True)
        ),
    )
    assert refusal_of(data.read_subjects, path) == golden("test-a_test-csv-with-it-there")
    monkeypatch.setattr(data, "MAX_ROWS", 10)
    assert len(data.read_subjects(path)[0].test) == 5


def test_record_size_limit_grows_with_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_published_record("lambada-smoke-closed-fp32-torch-a4264c79", tmp_path)
    size = path.stat().st_size
    assert len(json.loads(path.read_bytes())["ranks"]) == 2
    monkeypatch.setattr(record_file, "BASE_BYTES", 1000)
    monkeypatch.setattr(record_file, "RANK_BYTES", (size - 1000 + 1) // 2)
    assert record.read_record(path).plan.world == 2
    monkeypatch.setattr(record_file, "RANK_BYTES", (size - 1000) // 2 - 1)
    limit = 1000 + 2 * ((size - 1000) // 2 - 1)
    assert refusal_of(record.read_record, path) == golden(
        "bytes-the-limit-for-record-of-2", path, size, limit
    )
    monkeypatch.setattr(record_file, "MAX_RECORD_BYTES", size - 1)
    assert (
        refusal_of(record.find_record_damage, path)
        == f"{path}: {size} bytes; the limit for a record is {size - 1}"
    )


@pytest.mark.parametrize(
    "claim",
    [
        b'{"matmul_flops_per_s":' * 100,
        b'{"schema":1,"note":"' + b'\\"ranks\\":[{\\"rank\\":0}]' * 100 + b'","ranks":[',
        b'{"schema":1,"inner":{"ranks":[{"rank":0},{"rank":1},{"rank":2}]},"ranks":[',
        b'{"schema":1,"ranks":[' + b",".join([b'{"rank":0}'] * 100),
        b'{"schema":1,"ranks":[' + b"{}," * 100,
    ],
    ids=["repeated key", "text", "inner table", "one rank repeated", "empty ranks"],
)
def test_record_cannot_raise_its_size_limit_with_false_ranks(
    claim: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(claim + b" " * 10_000)
    size = path.stat().st_size
    monkeypatch.setattr(record_file, "BASE_BYTES", 1000)
    monkeypatch.setattr(record_file, "RANK_BYTES", 1000)
    assert refusal_of(record.read_record, path) in {
        f"{path}: {size} bytes; the limit for a record of {ranks} rank(s) is 2000"
        for ranks in (0, 1)
    }


def test_large_record_is_refused_without_enough_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_published_record("lambada-smoke-closed-fp32-torch-a4264c79", tmp_path)
    size = path.stat().st_size
    monkeypatch.setattr(record_file, "BASE_BYTES", 1000)
    # the record exceeds the limit for one rank but not the limit for its two
    monkeypatch.setattr(record_file, "RANK_BYTES", size // 2)
    monkeypatch.setattr(record_file, "SMALL_BYTES", 1000)
    content = path.read_bytes()
    needed = 25 * size + 80 * (content.count(b"{") + content.count(b"["))
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(record_file, "read_available_bytes", lambda free=free: free)
        if fits:
            assert record.read_record(path).plan.world == 2
        else:
            assert f"{size} bytes take up to {needed >> 20} MiB of memory to read" in refusal_of(
                record.read_record, path
            )


JSON_UNITS = {
    "tables": b"{}",
    "tables of one key": b'{"a":0}',
    "lists": b"[[]]",
    "deep lists": b"[" * 60 + b"]" * 60,
    "deep tables": b'{"a":' * 50 + b"0" + b"}" * 50,
    "floats": b"1.5",
    "strings": b'"ab"',
    "wide strings": '"ab","\U0001f600"'.encode(),
}
PEAK_MEMORY_PROGRAM = """
import sys
from pathlib import Path
from steelyard.record import record_file
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
path = Path(sys.argv[1])
before = kib("VmRSS")
record_file.parse_record(path, record_file.read_record_bytes(path))
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.process
@pytest.mark.parametrize("unit", JSON_UNITS)
def test_parsing_a_record_takes_no_more_memory_than_estimated(unit: str, tmp_path: Path) -> None:
    """The peak memory of a process that parses two megabytes is measured, less what it had
    before.
    """
    path = tmp_path / "record.json"
    content = (
        b'{"schema":1,"junk":['
        + b",".join([JSON_UNITS[unit]] * (2_000_000 // (len(JSON_UNITS[unit]) + 1)))
        + b"]}"
    )
    path.write_bytes(content)
    needed = record_file.MEMORY_PER_BYTE * len(content)
    needed += record_file.MEMORY_PER_TABLE * (content.count(b"{") + content.count(b"["))
    result = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY_PROGRAM, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert len(content) < int(result.stdout) <= needed


def test_a_record_of_240_mib_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        for _ in range(240):
            file.write(b"[],[" * (MIB // 4))
    monkeypatch.setattr(json, "loads", None)  # a call would raise
    assert refusal_of(record.read_record, path) == golden(
        "bytes-the-limit-for-record-of", path, 240 * MIB, 48 * MIB
    )


def test_pickle_with_too_many_opcodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive_file:
        archive_file.writestr(
            "x/data.pkl", b"\x80\x02" + b"N0" * (torch_files.MAX_OPCODES // 2) + b"N."
        )
        archive_file.writestr("x/version", "3\n")
    assert "(its pickle has more than 500000 opcodes)" in refusal_of(
        torch_files.read_torch_file, path
    )


def test_safetensors_header_has_a_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert list(hf_checkpoint.read_safetensors_header(path).tensors) == ["x"]
    monkeypatch.setattr(hf_checkpoint, "MAX_HEADER_BYTES", len(header) - 1)
    line = f"{path}: a header of {len(header)} bytes; at most {len(header) - 1} are read"
    assert refusal_of(hf_checkpoint.read_safetensors_header, path) == line


def test_bounded_reads_of_a_plain_file() -> None:
    file = archive.BoundedTarStream(io.BytesIO(b"abc"), Path("x"), 4, "")
    assert (file.read(2), file.tell(), file.seek(0), file.read(1)) == (b"ab", 2, 0, b"a")


COST_PROGRAM = """
import sys, time
from pathlib import Path
from steelyard.errors import RequestError
{imports}
def most():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

begin, before = time.monotonic(), most()
try:
    {read}(Path(sys.argv[1]))
except RequestError as error:
    print(time.monotonic() - begin, (most() - before) // 1024, error)
"""  # noqa: E501
READ_CASE_IMPORTS = (
    "from steelyard.case import resolve\ndef read_case(path): return resolve.read_case(str(path))"
)
BOMBS = {
    "17 MiB tar.gz": ("4.1 GiB", "from steelyard.tasks.mmlu import data", "data.read_subjects"),
    "240 MiB JSON record": (
        "5.7 GiB, two minutes",
        "from steelyard.record import record",
        "record.read_record",
    ),
    "200 MB record that repeats a rank's key": (
        "2.4 GiB",
        "from steelyard.record import record",
        "record.read_record",
    ),
    "64 KB case file of one dotted key": ("4 GiB, 55 s", READ_CASE_IMPORTS, "read_case"),
    "pickle of 5 M opcodes": (
        "a minute",
        "from steelyard.weights import torch_files",
        "torch_files.read_torch_file",
    ),
}


def write_bomb(name: str, folder: Path) -> Path:
    """Write the file of this name in `BOMBS` and return its path."""
    if name == "17 MiB tar.gz":
        return write_tar_gz(folder / "bomb.tar.gz", ("x", tarfile.XHDTYPE, b"", 4000 * MIB))
    if name == "240 MiB JSON record":
        path = folder / "record.json"
        path.write_bytes(b'{"a":[' + b"[],[]," * (40 * MIB) + b"[]]}")
        return path
    if name.startswith("200 MB record"):
        path = folder / "record.json"
        path.write_bytes(
            b'{"schema":1,"ranks":['
            + b'{"matmul_flops_per_s":1},' * 8_000_000
            + b'{}],"samples":[]}'
        )
        return path
    if name.startswith("64 KB case file"):
        path = folder / "bomb.toml"
        path.write_bytes(b"a." * 32_000 + b"a = 1")
        return path
    path = folder / "x.pt"
    with zipfile.ZipFile(path, "w") as archive_file:
        archive_file.writestr("x/data.pkl", b"\x80\x02" + b"N0" * 2_500_000 + b"N.")
        archive_file.writestr("x/version", "3\n")
    return path


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_with_little_memory(name: str, tmp_path: Path, attacks: Attacks) -> None:
    """The file is read in a process of its own; its memory is the peak, less what the process had
    before.
    """
    earlier_cost, imports, read = BOMBS[name]
    path = write_bomb(name, tmp_path)
    program = COST_PROGRAM.format(imports=imports, read=read)
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    time_s, memory_mib, why = result.stdout.split(" ", 2)
    assert str(path) in why
    assert int(memory_mib) <= 300, result.stdout
    attacks.add(
        f"bomb: {name}", 1, earlier_cost, f"refused in {float(time_s):.1f} s, {memory_mib} MiB"
    )
