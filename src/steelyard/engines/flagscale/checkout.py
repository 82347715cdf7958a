"""Which program a checkout is: the name of its folder, its commit, and whether files differ from it."""

import os
import subprocess
from pathlib import Path
from typing import Any

GIT_S = 30.0


def about(folder: Path) -> dict[str, Any]:
    """For a record. `commit` and `dirty` are None where git does not know; where a folder lies is not said."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD") if _top(folder) else None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"name": folder.name, "commit": commit, "dirty": None if changes is None else changes != ""}


def _top(folder: Path) -> bool:
    """Not a folder inside somebody else's repository."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == folder.resolve()


def _git(folder: Path, *arguments: str) -> str | None:
    # GIT_DIR and the like, set inside a hook, would point at another repository; no lock is taken to only look.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GIT_S,
            env={**kept, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
