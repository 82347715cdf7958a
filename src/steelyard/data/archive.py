"""An untrusted tar, read within limits: how large it is packed and unpacked, and how much one read
may take.

`tarfile` reads the name and the attributes of a member into memory, however long its header says
they are, so the limits stand below it, around what it reads from.
"""

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from steelyard import files
from steelyard.errors import RequestError

MAX_READ_BYTES = 65 << 20  # in one piece: a member of 64 MiB, and its padding
OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


class Bounded:
    """What a tar is read from, unpacked."""

    def __init__(self, file: IO[bytes], source: Path, most_bytes: int, usual: str) -> None:
        self.file = file
        self.source = source
        self.most_bytes = most_bytes
        self.usual = usual

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise RequestError(
                f"{self.source}: a part of {size} bytes; at most {MAX_READ_BYTES} are read at once"
            )
        self._within(self.file.tell() + size if size > 1 << 20 else self.file.tell())
        return self.file.read(size)

    def seek(self, place: int, whence: int = 0) -> int:
        self._within(place)
        return self.file.seek(place, whence)

    def tell(self) -> int:
        return self.file.tell()

    def _within(self, place: int) -> None:
        if place > self.most_bytes:
            raise RequestError(
                f"{self.source}: larger than {self.most_bytes} bytes unpacked{self.usual}"
            )


@contextmanager
def opened(
    source: Path, most_bytes: int, usual: str = ""
) -> Iterator[tuple[tarfile.TarFile, Bounded]]:
    """A tar, compressed or not, and what it is read from. Neither may be larger than the limit;
    `usual` says how large one of its kind is."""
    if source.stat().st_size > most_bytes:
        raise RequestError(f"{source}: larger than {most_bytes} bytes{usual}")
    with files.open_regular(source) as file:
        begin = file.read(max(map(len, OPENERS)))
    unpack = next((opener for magic, opener in OPENERS.items() if begin.startswith(magic)), open)
    with unpack(source, "rb") as file:
        bounded = Bounded(file, source, most_bytes, usual)
        with tarfile.open(fileobj=bounded, mode="r:") as tar:  # type: ignore[call-overload]
            yield tar, bounded
