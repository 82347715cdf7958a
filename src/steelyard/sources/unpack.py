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
from steelyard.sources.download import MismatchError, NoSpaceError, check_space

ZIP = b"PK"
MOST_FILES = 10_000
MOST_NAME = 1024
MOST_DEPTH = 32
BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
    RuntimeError,
)


def unpack(source: Path, folder: Path, top: str, most_bytes: int) -> None:
    """Unpack an archive, and keep as `folder` the directory in it that holds the file `top` (the
    least deep one).

    Unpacks into a temporary folder beside it, which is deleted. Raises MismatchError if the archive
    is malformed, unsafe, too large or has no `top`; NoSpaceError if the disk is full.
    """
    whole = folder.with_name(f"{folder.name}.whole")
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    try:
        _all(source, whole, most_bytes)
        wanted = sorted(
            (path.parent for path in whole.rglob(top)), key=lambda path: (len(path.parts), path)
        )
        if not wanted:
            raise MismatchError(f"no {top} in it")
        wanted[0].rename(folder)
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def _all(source: Path, folder: Path, most_bytes: int) -> None:
    """Write all files of an archive into `folder`. Raises MismatchError for an unsafe or repeated
    name (ignoring case), or more than `most_bytes` in all.
    """
    left, names = most_bytes, set()
    with _opened(source, most_bytes) as members:
        for name, size, content in members:
            path = folder / _inside(name)
            if str(path).casefold() in names:
                raise MismatchError(f"{name[:200]!r} stands in it twice")
            names.add(str(path).casefold())
            if size > left:
                raise MismatchError(f"more than {most_bytes} bytes unpacked")
            check_space(folder, size)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                left -= _write(content, path, left, most_bytes)
            except (FileExistsError, NotADirectoryError) as error:
                raise MismatchError(f"{name[:200]!r} is a file and a folder in it") from error


def _write(content: IO[bytes], path: Path, left: int, most_bytes: int) -> int:
    """Write one member to a new file, sync it and return its size. Raises MismatchError beyond
    `left_bytes`, whatever size the archive's header says; `most_bytes` is only for the message.
    """
    size = 0
    with path.open("xb") as out:
        while chunk := content.read(files.CHUNK_BYTES):
            size += len(chunk)
            if size > left:
                raise MismatchError(f"more than {most_bytes} bytes unpacked")
            out.write(chunk)
        files.synced(out)
    return size


def _inside(name: str) -> PurePosixPath:
    """Return a member's name as a relative path. Raises MismatchError if it could leave the folder
    on any operating system, is unprintable, too long or too deep.
    """
    parts = name.removeprefix("./").split("/")
    odd = any(
        part in ("", ".", "..") or "\\" in part or ":" in part or not part.isprintable()
        for part in parts
    )
    if odd or len(name) > MOST_NAME or len(parts) > MOST_DEPTH:
        raise MismatchError(f"a file named {name[:200]!r}, which is no plain path below a folder")
    return PurePosixPath(*parts)


@contextmanager
def _opened(source: Path, most_bytes: int) -> Iterator[Iterator[tuple[str, int, IO[bytes]]]]:
    """Open a tar or zip and yield an iterator over (name, size, content) of its files. Errors of
    the archive become MismatchError; errors of the disk stay OSError or NoSpaceError.
    """
    try:
        with files.open_regular(source) as file:
            zipped = file.read(len(ZIP)) == ZIP  # not is_zipfile: a tar that ends in a zip is a tar
        if zipped:
            with zipfile.ZipFile(source) as opened:
                yield _zipped(opened)
        else:
            with archive.opened(source, most_bytes) as (tar, _):
                yield _tarred(tar)
    except NoSpaceError:
        raise
    except RequestError as error:  # raised by the bounded stream
        raise MismatchError(str(error).removeprefix(f"{source}: ")) from error
    except (*BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the archive
        first = str(error).partition("\n")[0].rstrip(":")
        raise MismatchError(f"not a readable tar or zip: {first}") from error


def _count(number: int) -> None:
    """Raise MismatchError if an archive has too many entries; folders count too, because each costs
    memory.
    """
    if number > MOST_FILES:
        raise MismatchError(f"more than {MOST_FILES} files and folders")


def _zipped(opened: zipfile.ZipFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield (name, size, content) of each file in a zip. Raises MismatchError for links, devices,
    unsafe folder names, and too many entries.
    """
    _count(len(opened.infolist()))
    for info in opened.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise MismatchError(f"{info.filename[:200]!r} is a link or a device")
        if info.is_dir():
            _inside(info.filename.rstrip("/"))
            continue
        with opened.open(info) as content:
            yield info.filename, info.file_size, content


def _tarred(tar: tarfile.TarFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield (name, size, content) of each file in a tar. Raises MismatchError for links, devices,
    unsafe folder names, and too many entries.
    """
    for number, member in enumerate(tar, 1):
        _count(number)
        if member.isdir():
            if member.name.rstrip("/") not in ("", "."):
                _inside(member.name.rstrip("/"))
            continue
        content = tar.extractfile(member) if member.isreg() else None
        if content is None:
            raise MismatchError(f"{member.name[:200]!r} is a link or a device")
        with content:
            yield member.name, member.size, content
