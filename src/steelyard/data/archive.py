"""Open an untrusted tar with limits on its packed size, its unpacked size and the size of one read.

`tarfile` reads a member's name and attributes into memory, however long the header says they are.
So the limits are enforced below it, in the file object that it reads from. Used by `tasks/mmlu` and
`sources/unpack`.
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

MAX_READ_BYTES = 65 << 20  # of one read: a member of 64 MiB with its padding
OPENERS_BY_MAGIC: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


class BoundedTarStream:
    """The unpacked byte stream that `tarfile` reads from, with `read`, `seek` and `tell`, made by
    `open_tar`.

    Raises RequestError for a read of more than `MAX_READ_BYTES` (65 MiB) at once or of unlimited
    size, and beyond position `most_bytes` of the unpacked stream. `size_hint` is appended to the
    latter error and says how large such a file normally is; `source` is the archive's path, for
    messages.
    """

    def __init__(self, file: IO[bytes], source: Path, most_bytes: int, size_hint: str) -> None:
        """Wrap `file`, the unpacked stream; `source` is the archive's path, for messages."""
        self.file = file
        self.source = source
        self.most_bytes = most_bytes
        self.size_hint = size_hint

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes of the unpacked tar, fewer at its end. Raises RequestError
        if `size` is negative (read all) or above `MAX_READ_BYTES`, or if the read goes beyond
        `most_bytes`; for a read of up to 1 MiB only the position before it counts.
        """
        if not 0 <= size <= MAX_READ_BYTES:
            raise RequestError(
                f"{self.source}: a part of {size} bytes; at most {MAX_READ_BYTES} are read at once"
            )
        self._check_position(self.file.tell() + size if size > 1 << 20 else self.file.tell())
        return self.file.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position in the unpacked tar and return the new position. Raises RequestError
        if `position` is above `most_bytes`.
        """
        self._check_position(position)
        return self.file.seek(position, whence)

    def tell(self) -> int:
        """Return the position in the unpacked stream."""
        return self.file.tell()

    def _check_position(self, position: int) -> None:
        """Raise RequestError if a position in the unpacked tar is beyond `most_bytes`."""
        if position > self.most_bytes:
            raise RequestError(
                f"{self.source}: larger than {self.most_bytes} bytes unpacked{self.size_hint}"
            )


@contextmanager
def open_tar(
    source: Path, most_bytes: int, size_hint: str = ""
) -> Iterator[tuple[tarfile.TarFile, BoundedTarStream]]:
    """As a context manager, open a tar, plain or compressed with gzip, bzip2 or xz (by its first
    bytes), and yield (tar, the bounded stream below it); both are closed afterwards.

    Raises RequestError if the file itself is larger than `most_bytes`, and on any later read beyond
    that many unpacked bytes. `size_hint` ends these messages (such as "; MMLU's tar has 166 MB").
    OSError and the errors of `tarfile` and the decompressors pass through.
    """
    if source.stat().st_size > most_bytes:
        raise RequestError(f"{source}: larger than {most_bytes} bytes{size_hint}")
    with files.open_regular(source) as file:
        first_bytes = file.read(max(map(len, OPENERS_BY_MAGIC)))
    open_unpacked = next(
        (opener for magic, opener in OPENERS_BY_MAGIC.items() if first_bytes.startswith(magic)),
        open,
    )
    with open_unpacked(source, "rb") as file:
        bounded = BoundedTarStream(file, source, most_bytes, size_hint)
        with tarfile.open(fileobj=bounded, mode="r:") as tar:  # type: ignore[call-overload]
            yield tar, bounded
