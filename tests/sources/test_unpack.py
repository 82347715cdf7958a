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

MAX_BYTES = 1 << 20


def write_tar(
    path: Path, *members: tarfile.TarInfo | tuple[str, bytes], compress=lambda raw: raw
) -> Path:
    """Write a tar of members, given as (name, content) or as headers, compress it, and return its
    path.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    path.write_bytes(compress(buffer.getvalue()))
    return path


def make_member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """Return the header of a tar member of another type than a file, such as a link to `target`."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def write_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    """Write a zip of members and return its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def unpack_refusal(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the message with which unpacking is refused, after checking that the archive is the
    only file left.
    """
    folder = path.parent / "out"
    with pytest.raises(MismatchError) as error:
        unpack_archive(path, folder, "top.txt", max_bytes)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]
    return str(error.value)


@pytest.mark.parametrize(
    "compress", [lambda raw: raw, gzip.compress, bz2.compress], ids=["tar", "gz", "bz2"]
)
def test_a_tar_is_unpacked_from_the_folder_of_its_top_file(tmp_path, compress):
    folder = make_member("a", tarfile.DIRTYPE)
    path = write_tar(
        tmp_path / "x",
        folder,
        ("a/top.txt", b"1"),
        ("a/in/deep.bin", b"22"),
        ("beside.txt", b"3"),
        compress=compress,
    )
    unpack_archive(path, tmp_path / "out", "top.txt", MAX_BYTES)
    contents = {
        entry.relative_to(tmp_path / "out").as_posix(): entry.read_bytes()
        for entry in (tmp_path / "out").rglob("*.*")
    }
    assert contents == {"top.txt": b"1", "in/deep.bin": b"22"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "x"]


def test_a_zip_is_unpacked_from_the_folder_of_its_top_file(tmp_path):
    path = write_zip(
        tmp_path / "x.zip",
        ("R/", b""),
        ("R/top.txt", b"1"),
        ("R/val.txt", b"2"),
        ("__MACOSX/R/top.txt", b"no"),
    )
    unpack_archive(path, tmp_path / "out", "top.txt", MAX_BYTES)
    assert {entry.name: entry.read_bytes() for entry in (tmp_path / "out").iterdir()} == {
        "top.txt": b"1",
        "val.txt": b"2",
    }


def test_a_tar_that_ends_in_a_zip_is_read_as_a_tar(tmp_path):
    inner = write_zip(tmp_path / "inner.zip", ("top.txt", b"of the zip")).read_bytes()
    (tmp_path / "inner.zip").unlink()
    unpack_archive(
        write_tar(tmp_path / "x", ("top.txt", b"1"), ("inner.zip", inner)),
        tmp_path / "out",
        "top.txt",
        MAX_BYTES,
    )
    assert (tmp_path / "out" / "top.txt").read_bytes() == b"1"


def test_unpacked_files_are_not_executable(tmp_path):
    info = tarfile.TarInfo("top.txt")
    info.mode = 0o6777
    unpack_archive(write_tar(tmp_path / "x", info), tmp_path / "out", "top.txt", MAX_BYTES)
    assert stat.S_IMODE((tmp_path / "out" / "top.txt").stat().st_mode) & 0o7133 == 0


UNSAFE_NAMES = [
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


@pytest.mark.parametrize("name", UNSAFE_NAMES, ids=lambda name: repr(name[:12]))
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    reason = f"a file named {name[:200]!r}, which is not a plain path inside a folder"
    assert unpack_refusal(write_tar(tmp_path / "x", ("top.txt", b""), (name, b"gotcha"))) == reason
    (tmp_path / "x").unlink()
    info = zipfile.ZipInfo()
    info.filename = name
    assert (
        unpack_refusal(write_zip(tmp_path / "x.zip", ("top.txt", b""), (info, b"gotcha"))) == reason
    )
    assert not (tmp_path.parent / "x").exists()


def test_folder_names_that_lead_out_are_refused(tmp_path):
    assert "'../x'" in unpack_refusal(
        write_tar(tmp_path / "x", make_member("../x", tarfile.DIRTYPE))
    )
    assert "'../x'" in unpack_refusal(write_zip(tmp_path / "x", ("../x/", b"")))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE],
    ids=["link", "hard link", "pipe", "device"],
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    path = write_tar(
        tmp_path / "x",
        ("top.txt", b""),
        make_member("link", kind, "/etc/passwd"),
        ("link/x", b"gotcha"),
    )
    assert unpack_refusal(path) == "'link' is a link or a device"


def test_links_in_a_zip_are_refused(tmp_path):
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    assert (
        unpack_refusal(write_zip(tmp_path / "x", ("top.txt", b""), (info, b"/etc/passwd")))
        == "'link' is a link or a device"
    )


def test_the_unpacked_size_has_a_limit(tmp_path):
    path = write_tar(
        tmp_path / "x", ("top.txt", b""), ("big", bytes(2 * MAX_BYTES)), compress=gzip.compress
    )
    assert path.stat().st_size < 10_000
    assert unpack_refusal(path) == f"more than {MAX_BYTES} bytes unpacked"
    path.unlink()
    path = write_zip(tmp_path / "x.zip", *((f"{n}", bytes(MAX_BYTES // 4)) for n in range(5)))
    assert unpack_refusal(path) == f"more than {MAX_BYTES} bytes unpacked"


def test_the_names_of_a_tar_have_a_limit(tmp_path):
    """A long name is read into memory with its header, so its size must be checked before."""
    path = tmp_path / "x"
    member = make_member("x", tarfile.GNUTYPE_LONGNAME)
    member.size = 80 << 20
    path.write_bytes(gzip.compress(member.tobuf() + bytes(80 << 20), 1))
    assert (
        unpack_refusal(path, 1 << 30)
        == f"a part of {80 << 20} bytes; at most {65 << 20} are read at once"
    )


def test_the_number_of_files_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_ENTRIES", 3)
    assert (
        unpack_refusal(write_tar(tmp_path / "x", *((f"{n}", b"") for n in range(4))))
        == "more than 3 files and folders"
    )


def test_a_repeated_name_is_refused(tmp_path):
    assert (
        unpack_refusal(write_tar(tmp_path / "x", ("top.txt", b"1"), ("TOP.txt", b"2")))
        == "'TOP.txt' is in it twice"
    )
    assert unpack_refusal(
        write_tar(tmp_path / "x", ("top.txt", b"1"), ("top.txt/x", b"2"))
    ) == golden("top-txt-is-file-and-folder")


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"\x1f\x8b12345678", b"BZh9nonsense", b"PK\x03\x04", bytes(511)],
    ids=lambda raw: repr(raw[:4]),
)
def test_an_invalid_archive_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    assert unpack_refusal(tmp_path / "x").startswith(
        ("not a readable tar or zip: ", "no top.txt in it")
    )


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
def test_a_truncated_archive_is_refused(tmp_path, compress):
    path = write_tar(
        tmp_path / "x", ("top.txt", b"1"), ("more", bytes(range(256)) * 1000), compress=compress
    )
    path.write_bytes(path.read_bytes()[:-400])
    assert unpack_refusal(path).startswith("not a readable tar or zip: ")


def test_a_damaged_zip_is_refused(tmp_path):
    path = write_zip(tmp_path / "x", ("top.txt", bytes(range(256)) * 10))
    raw = bytearray(path.read_bytes())
    raw[60] ^= 0xFF
    path.write_bytes(raw)
    assert unpack_refusal(path).startswith("not a readable tar or zip: ")


def test_an_archive_without_its_top_file_is_refused(tmp_path):
    assert unpack_refusal(write_tar(tmp_path / "x", ("other.txt", b"1"))) == "no top.txt in it"
