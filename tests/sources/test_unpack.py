"""Test archives that would leave their folder, fill the disk or create links: they are refused and
leave no files.
"""

import bz2
import gzip
import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from fixtures.golden import golden
from steelyard.sources import unpack as unpacking
from steelyard.sources.download import MismatchError
from steelyard.sources.unpack import unpack_archive

MOST = 1 << 20


def tar(
    path: Path, *members: tarfile.TarInfo | tuple[str, bytes], compress=lambda raw: raw
) -> Path:
    """Write a tar of members, given as (name, content) or as headers, compress it, and return its
    path.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as out:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                out.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                out.addfile(info, io.BytesIO(member[1]))
    path.write_bytes(compress(raw.getvalue()))
    return path


def odd(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """Return the header of a tar member of another type than a file, such as a link to `target`."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    """Write a zip of members and return its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members:
            out.writestr(name, content)
    return path


def refusal(path: Path, most: int = MOST) -> str:
    """Return the message with which unpacking is refused, after checking that the archive is the
    only file left.
    """
    folder = path.parent / "out"
    with pytest.raises(MismatchError) as caught:
        unpack_archive(path, folder, "top.txt", most)
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name]
    return str(caught.value)


@pytest.mark.parametrize(
    "compress", [lambda raw: raw, gzip.compress, bz2.compress], ids=["tar", "gz", "bz2"]
)
def test_a_tar_is_unpacked_from_the_folder_of_its_top(tmp_path, compress):
    folder = odd("a", tarfile.DIRTYPE)
    path = tar(
        tmp_path / "x",
        folder,
        ("a/top.txt", b"1"),
        ("a/in/deep.bin", b"22"),
        ("beside.txt", b"3"),
        compress=compress,
    )
    unpack_archive(path, tmp_path / "out", "top.txt", MOST)
    found = {
        one.relative_to(tmp_path / "out").as_posix(): one.read_bytes()
        for one in (tmp_path / "out").rglob("*.*")
    }
    assert found == {"top.txt": b"1", "in/deep.bin": b"22"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "x"]


def test_a_zip_is_unpacked_from_the_folder_of_its_top(tmp_path):
    path = zipped(
        tmp_path / "x.zip",
        ("R/", b""),
        ("R/top.txt", b"1"),
        ("R/val.txt", b"2"),
        ("__MACOSX/R/top.txt", b"no"),
    )
    unpack_archive(path, tmp_path / "out", "top.txt", MOST)
    assert {one.name: one.read_bytes() for one in (tmp_path / "out").iterdir()} == {
        "top.txt": b"1",
        "val.txt": b"2",
    }


def test_a_tar_that_ends_in_a_zip_is_a_tar(tmp_path):
    inner = zipped(tmp_path / "inner.zip", ("top.txt", b"of the zip")).read_bytes()
    (tmp_path / "inner.zip").unlink()
    unpack_archive(
        tar(tmp_path / "x", ("top.txt", b"1"), ("inner.zip", inner)),
        tmp_path / "out",
        "top.txt",
        MOST,
    )
    assert (tmp_path / "out" / "top.txt").read_bytes() == b"1"


def test_files_are_no_programs_whatever_the_archive_says(tmp_path):
    info = tarfile.TarInfo("top.txt")
    info.mode = 0o6777
    unpack_archive(tar(tmp_path / "x", info), tmp_path / "out", "top.txt", MOST)
    assert stat.S_IMODE((tmp_path / "out" / "top.txt").stat().st_mode) & 0o7133 == 0


NAMES = [
    "/etc/x",
    "../x",
    "a/../../x",
    "a//x",
    "a\\x",
    "C:x",
    "a/./x",
    "a\nb",
    "x" * 1025,
    "/".join("a" * 33),
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
def test_a_name_stays_below_the_folder(tmp_path, name):
    line = f"a file named {name[:200]!r}, which is no plain path below a folder"
    assert refusal(tar(tmp_path / "x", ("top.txt", b""), (name, b"gotcha"))) == line
    (tmp_path / "x").unlink()
    info = zipfile.ZipInfo()
    info.filename = name
    assert refusal(zipped(tmp_path / "x.zip", ("top.txt", b""), (info, b"gotcha"))) == line
    assert not (tmp_path.parent / "x").exists()


def test_a_folder_of_a_bad_name_is_refused_too(tmp_path):
    assert "'../x'" in refusal(tar(tmp_path / "x", odd("../x", tarfile.DIRTYPE)))
    assert "'../x'" in refusal(zipped(tmp_path / "x", ("../x/", b"")))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE],
    ids=["link", "hard link", "pipe", "device"],
)
def test_a_tar_holds_files_only(tmp_path, kind):
    path = tar(
        tmp_path / "x", ("top.txt", b""), odd("link", kind, "/etc/passwd"), ("link/x", b"gotcha")
    )
    assert refusal(path) == "'link' is a link or a device"


def test_a_zip_holds_files_only(tmp_path):
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    assert (
        refusal(zipped(tmp_path / "x", ("top.txt", b""), (info, b"/etc/passwd")))
        == "'link' is a link or a device"
    )


def test_what_is_unpacked_has_a_limit(tmp_path):
    path = tar(tmp_path / "x", ("top.txt", b""), ("big", bytes(2 * MOST)), compress=gzip.compress)
    assert path.stat().st_size < 10_000
    assert refusal(path) == f"more than {MOST} bytes unpacked"
    path.unlink()
    path = zipped(tmp_path / "x.zip", *((f"{n}", bytes(MOST // 4)) for n in range(5)))
    assert refusal(path) == f"more than {MOST} bytes unpacked"


def test_the_names_of_a_tar_have_a_limit(tmp_path):
    """A long name is read into memory with its header, so its size must be checked before."""
    path = tmp_path / "x"
    member = odd("x", tarfile.GNUTYPE_LONGNAME)
    member.size = 80 << 20
    path.write_bytes(gzip.compress(member.tobuf() + bytes(80 << 20), 1))
    assert (
        refusal(path, 1 << 30) == f"a part of {80 << 20} bytes; at most {65 << 20} are read at once"
    )


def test_the_number_of_files_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_ENTRIES", 3)
    assert (
        refusal(tar(tmp_path / "x", *((f"{n}", b"") for n in range(4))))
        == "more than 3 files and folders"
    )


def test_a_name_stands_once(tmp_path):
    assert (
        refusal(tar(tmp_path / "x", ("top.txt", b"1"), ("TOP.txt", b"2")))
        == "'TOP.txt' stands in it twice"
    )
    assert refusal(tar(tmp_path / "x", ("top.txt", b"1"), ("top.txt/x", b"2"))) == golden(
        "top-txt-is-file-and-folder"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"\x1f\x8b12345678", b"BZh9nonsense", b"PK\x03\x04", bytes(511)],
    ids=lambda raw: repr(raw[:4]),
)
def test_what_is_no_archive_is_said_so(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert refusal(tmp_path / "x").startswith(("not a readable tar or zip: ", "no top.txt in it"))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
def test_a_cut_archive_is_said_so(tmp_path, compress):
    path = tar(
        tmp_path / "x", ("top.txt", b"1"), ("more", bytes(range(256)) * 1000), compress=compress
    )
    path.write_bytes(path.read_bytes()[:-400])
    assert refusal(path).startswith("not a readable tar or zip: ")


def test_a_damaged_zip_is_said_so(tmp_path):
    path = zipped(tmp_path / "x", ("top.txt", bytes(range(256)) * 10))
    raw = bytearray(path.read_bytes())
    raw[60] ^= 0xFF
    path.write_bytes(raw)
    assert refusal(path).startswith("not a readable tar or zip: ")


def test_an_archive_of_something_else_is_said_so(tmp_path):
    assert refusal(tar(tmp_path / "x", ("other.txt", b"1"))) == "no top.txt in it"
