"""Unpack an untrusted tar or zip into a new folder: only regular files, under names that stay
inside it, within limits of size and number.
"""

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from steelyard import files
from steelyard.data import archive
from steelyard.errors import RequestError
from steelyard.sources.download import MismatchError, NoSpaceError, check_disk_space

ZIP_MAGIC = b"PK"
MAX_ENTRIES = 10_000
MAX_NAME_CHARACTERS = 1024
MAX_DEPTH = 32
ARCHIVE_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
    RuntimeError,
)


def unpack_archive(source: Path, folder: Path, top: str, most_bytes: int) -> None:
    """Unpack an archive, and keep as the new folder `folder` the directory in it that holds a file
    named `top`: the least deep one, then the first by name. Everything outside that directory is
    dropped.

    Unpacks into `FOLDER.whole` beside it, which is deleted in any case. Raises MismatchError if the
    archive is malformed, unsafe, has more than `most_bytes` unpacked or no `top`; NoSpaceError if
    the disk is full.
    """
    temporary = folder.with_name(f"{folder.name}.whole")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_members(source, temporary, most_bytes)
        folders = sorted(
            (path.parent for path in temporary.rglob(top)), key=lambda path: (len(path.parts), path)
        )
        if not folders:
            raise MismatchError(f"no {top} in it")
        folders[0].rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_members(source: Path, folder: Path, most_bytes: int) -> None:
    """Write all files of an archive into `folder`, making subfolders. Raises MismatchError for a
    malformed archive, an unsafe name, a name that occurs twice (ignoring case) or as file and
    folder, or more than `most_bytes` in all; NoSpaceError before a file for which the disk has no
    room.
    """
    left_bytes, names = most_bytes, set()
    with _open_archive(source, most_bytes) as members:
        for name, size, content in members:
            path = folder / _check_member_name(name)
            if str(path).casefold() in names:
                raise MismatchError(f"{name[:200]!r} is in it twice")
            names.add(str(path).casefold())
            if size > left_bytes:
                raise MismatchError(f"more than {most_bytes} bytes unpacked")
            check_disk_space(folder, size)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                left_bytes -= _write_member(content, path, left_bytes, most_bytes)
            except (FileExistsError, NotADirectoryError) as error:
                raise MismatchError(f"{name[:200]!r} is both a file and a folder in it") from error


def _write_member(content: IO[bytes], path: Path, left_bytes: int, most_bytes: int) -> int:
    """Write one member to the new file `path`, sync it and return its size in bytes. Raises
    MismatchError beyond `left_bytes`, whatever size the archive's header says (`most_bytes` is only
    for the message); FileExistsError if the file exists.
    """
    size = 0
    with path.open("xb") as target:
        while chunk := content.read(files.CHUNK_BYTES):
            size += len(chunk)
            if size > left_bytes:
                raise MismatchError(f"more than {most_bytes} bytes unpacked")
            target.write(chunk)
        files.sync_file(target)
    return size


def _check_member_name(name: str) -> PurePosixPath:
    """Return a member's name as a relative path, without a leading "./". Raises MismatchError if it
    could leave the folder on any operating system (absolute, "..", a backslash or colon), has an
    empty or unprintable part, more than 1024 characters or more than 32 parts.
    """
    parts = name.removeprefix("./").split("/")
    unsafe = any(
        part in ("", ".", "..") or "\\" in part or ":" in part or not part.isprintable()
        for part in parts
    )
    if unsafe or len(name) > MAX_NAME_CHARACTERS or len(parts) > MAX_DEPTH:
        raise MismatchError(
            f"a file named {name[:200]!r}, which is not a plain path inside a folder"
        )
    return PurePosixPath(*parts)


@contextmanager
def _open_archive(source: Path, most_bytes: int) -> Iterator[Iterator[tuple[str, int, IO[bytes]]]]:
    """As a context manager, open a zip (by its first bytes) or else a tar, plain or compressed, and
    yield an iterator over (name, size, content) of its files.

    Errors of the archive, also those met inside the `with` block, become MismatchError;
    NoSpaceError and OSError of the disk pass through. A tar may have at most `most_bytes`, packed
    and unpacked.
    """
    try:
        with files.open_regular(source) as file:
            zipped = (
                file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
            )  # not is_zipfile: a tar that ends in a zip is a tar
        if zipped:
            with zipfile.ZipFile(source) as zip_file:
                yield _iterate_zip(zip_file)
        else:
            with archive.open_tar(source, most_bytes) as (tar, _):
                yield _iterate_tar(tar)
    except NoSpaceError:
        raise
    except RequestError as error:  # raised by the bounded stream
        raise MismatchError(str(error).removeprefix(f"{source}: ")) from error
    except (*ARCHIVE_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the archive
        first = str(error).partition("\n")[0].rstrip(":")
        raise MismatchError(f"not a readable tar or zip: {first}") from error


def _check_entry_count(number: int) -> None:
    """Raise MismatchError if `number` entries are more than `MAX_ENTRIES`; folders count too,
    because each costs memory.
    """
    if number > MAX_ENTRIES:
        raise MismatchError(f"more than {MAX_ENTRIES} files and folders")


def _iterate_zip(zip_file: zipfile.ZipFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield (name, unpacked size, open content) of each file in a zip; a content is closed when the
    next is taken. Folders are skipped after their names were checked. Raises MismatchError for
    links, devices, unsafe folder names, and, before the first, for too many entries.
    """
    _check_entry_count(len(zip_file.infolist()))
    for info in zip_file.infolist():
        file_type = stat.S_IFMT(info.external_attr >> 16)
        if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise MismatchError(f"{info.filename[:200]!r} is a link or a device")
        if info.is_dir():
            _check_member_name(info.filename.rstrip("/"))
            continue
        with zip_file.open(info) as content:
            yield info.filename, info.file_size, content


def _iterate_tar(tar: tarfile.TarFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield (name, size, open content) of each file in a tar; a content is closed when the next is
    taken. Folders are skipped after their names were checked. Raises MismatchError for links,
    devices and unsafe folder names, and when the entries become too many.
    """
    for number, member in enumerate(tar, 1):
        _check_entry_count(number)
        if member.isdir():
            if member.name.rstrip("/") not in ("", "."):
                _check_member_name(member.name.rstrip("/"))
            continue
        content = tar.extractfile(member) if member.isreg() else None
        if content is None:
            raise MismatchError(f"{member.name[:200]!r} is a link or a device")
        with content:
            yield member.name, member.size, content
