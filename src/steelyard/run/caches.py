"""Where compilers keep what they made. Torch and Triton would share a folder under the temporary one, and load machine code
from it whoever put it there first; workers get folders that are ours alone, kept across runs."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from steelyard.errors import RequestError

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
NEXT = "name a folder of yours in XDG_CACHE_HOME"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers are told of caches, each a folder that is made and checked here. One that is named already stays. Nothing,
    where a user has no place for any."""
    try:
        return {name: str(private(environment, folder)) for name, folder in FOLDERS.items() if not environment.get(name)}
    except OSError:
        return {}


def within(folder: Path) -> dict[str, str]:
    """The same in the private folder of a run, which ends with it."""
    return {name: str(folder / "cache" / place) for name, place in FOLDERS.items()}


def private(environment: Mapping[str, str], name: str = "") -> Path:
    """A folder of this user's cache that nobody else can write."""
    home = Path(environment.get("XDG_CACHE_HOME") or "")
    home = home if home.is_absolute() else Path(environment.get("HOME") or Path.home()) / ".cache"
    top = home / "steelyard"
    for folder in (top, top / name):
        _make(folder)
    return top / name


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    wrong = {
        "is a link": stat.S_ISLNK(found.st_mode),
        f"belongs to user {found.st_uid}": found.st_uid != os.geteuid(),
        "is one that others can write": bool(found.st_mode & 0o022),
    }
    for what, holds in wrong.items():
        if holds:
            raise RequestError(
                f"the cache {str(folder)!r} {what}: other users could change what is in it; remove it, or {NEXT}"
            )
