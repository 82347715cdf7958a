"""The command line on the login host of a cluster, as a user starts it there."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixtures.commands import Done, finish, wait_for
from hosts.cluster import MARK, Cluster

SILENCE_S = 5.0  # a host that is not heard of for so long is lost


@dataclass
class Runs:
    """A folder of a user on the login host, with a site file and records, and a mark on all that is started from it."""

    cluster: Cluster
    folder: Path
    launcher: str = "ssh"
    site: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.write_site(**self.site)
        (self.folder / "tmp").mkdir(exist_ok=True)

    @property
    def out(self) -> Path:
        return self.folder / "records"

    @property
    def mark(self) -> str:
        return f"test:{self.folder}"

    def write_site(self, more: str = "", **keys: Any) -> None:
        """Top-level keys, then tables as text."""
        told: dict[str, Any] = {
            "launcher": self.launcher,
            "hosts": list(self.cluster.hosts),
            "interface": "eth0",
            "python": sys.executable,
            "silence_s": SILENCE_S,
        } | keys
        lines = [f"{key} = {json.dumps(value)}" for key, value in told.items() if value is not None]
        (self.folder / "site.toml").write_text("\n".join([*lines, more]))

    def start(self, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
        """`steelyard ARGUMENTS` on the login host, in the folder."""
        command = [sys.executable, "-P", "-m", "steelyard", *map(str, arguments)]
        mine = {MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")}
        return self.cluster.on(
            self.cluster.login,
            command,
            env={**mine, **variables},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_listen,
        )

    def __call__(self, *arguments: str | Path, timeout_s: float = 120.0, **variables: str) -> Done:
        return finish(self.start(*arguments, **variables), timeout_s)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]

    def processes(self) -> list[int]:
        """All that carry the mark, on any host."""
        return self.cluster.processes(self.mark)

    def nothing_left(self, within_s: float = 0.0) -> bool:
        return wait_for(lambda: not self.processes(), within_s)


def _listen() -> None:
    """As from a terminal: a test runner in the background hands down that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
