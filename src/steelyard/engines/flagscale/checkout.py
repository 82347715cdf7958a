"""Which program a checkout is: the name of its folder, its commit, and whether files differ from it."""

from pathlib import Path
from typing import Any

from steelyard.files import git


def about(folder: Path) -> dict[str, Any]:
    """For a record. `commit` and `dirty` are None where git does not know; where a folder lies is not said."""
    commit = git(folder, "rev-parse", "--verify", "HEAD") if _top(folder) else None
    changes = git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"name": folder.name, "commit": commit, "dirty": None if changes is None else changes != ""}


def _top(folder: Path) -> bool:
    """Not a folder inside somebody else's repository."""
    top = git(folder, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == folder.resolve()
