"""The command line on the login host of a cluster, as a user starts it there."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixtures.commands import CommandResult, wait_for, wait_for_result
from hosts.cluster import MARK_VARIABLE, Cluster, kill_and_wait
from hosts.host import network_of

STEELYARD = [sys.executable, "-P", "-m", "steelyard"]
SILENCE_S = 5.0  # after so many seconds without a message a host is lost


@dataclass
class LoginShell:
    """A user's folder on the login host, with a site file and records; all processes started from
    it carry a mark.

    `site` are keys of the site file. Calling it runs `steelyard ARGUMENTS` to its end.
    """

    cluster: Cluster
    folder: Path
    launcher: str = "ssh"
    site: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.write_site(**self.site)
        self.tmp.mkdir(exist_ok=True)

    @property
    def out(self) -> Path:
        return self.folder / "records"

    @property
    def tmp(self) -> Path:
        """Return the folder for temporary files, on a file system that all hosts share."""
        return self.folder / "tmp"

    @property
    def mark(self) -> str:
        """Return the text by which the processes of this folder are found."""
        return f"test:{self.folder}"

    def write_site(
        self, more: str = "", environment: dict[str, str] | None = None, **keys: Any
    ) -> None:
        """Write the site file: these top-level keys, then `more`, which is TOML text.

        None leaves out a default key. Temporary files of the hosts go into `tmp`; `environment`
        adds variables.
        """
        site_keys: dict[str, Any] = {
            "launcher": self.launcher,
            "hosts": list(self.cluster.hosts),
            "interface": "eth0",
            "python": sys.executable,
            "silence_s": SILENCE_S,
        } | keys
        variables = {"TMPDIR": str(self.tmp)} | (environment or {})
        site_keys |= {f"environment.{name}": value for name, value in variables.items()}
        lines = [
            f"{key} = {json.dumps(value)}" for key, value in site_keys.items() if value is not None
        ]
        self.write_site_file("\n".join([*lines, more]))

    @property
    def site_file(self) -> Path:
        """Return the path of the site file in the configuration folder of these commands, where it
        is found without an option.
        """
        return self.folder / "config" / "steelyard" / "site.toml"

    def write_site_file(self, text: str) -> None:
        """Write this text as the site file, readable by its owner alone."""
        self.site_file.parent.mkdir(parents=True, exist_ok=True)
        self.site_file.write_text(text)
        self.site_file.chmod(0o600)

    def start(self, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
        """Start `steelyard ARGUMENTS` on the login host, in the folder."""
        return self.start_command([*STEELYARD, *map(str, arguments)], **variables)

    def start_command(
        self, argv: Sequence[str | Path], **variables: str
    ) -> "subprocess.Popen[str]":
        """Start any command on the login host, in the folder."""
        login_variables = {
            MARK_VARIABLE: self.mark,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.tmp),
        }
        login_variables["XDG_CONFIG_HOME"] = str(self.folder / "config")
        return self.cluster.start_command(
            self.cluster.login,
            argv,
            env={**login_variables, **variables},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_restore_sigint,
        )

    def __call__(
        self, *arguments: str | Path, timeout_s: float = 600.0, **variables: str
    ) -> CommandResult:
        return wait_for_result(self.start(*arguments, **variables), timeout_s)

    def records(self) -> list[dict[str, Any]]:
        """Return all records in the folder for records as dicts, sorted by file name."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]

    def run_valid(self, *arguments: str | Path, **variables: str) -> dict[str, Any]:
        """Run `steelyard run` and return its record, which must be valid, verify, and be all that
        the run leaves behind.
        """
        out = self.folder / f"records-{len(list(self.folder.glob('records*')))}"
        result = self("run", *arguments, "--out", out, **variables)
        assert result.code == 0, result.err
        assert self.find_leftovers() == []
        [path] = out.iterdir()
        verification = self("verify", path)
        assert (verification.code, verification.err) == (0, ""), verification.out
        assert "the record lacks" not in verification.out
        contents: dict[str, Any] = json.loads(path.read_text())
        assert contents["status"] == "valid"
        return contents

    def run_refused(self, *arguments: str | Path, **variables: str) -> str:
        """Return the error line of a run that is refused before it starts; nothing of it may be
        left on any host.
        """
        result = self("run", *arguments, **variables)
        assert (result.code, result.out) == (2, ""), result.err
        assert self.find_leftovers() == []
        assert not list(self.out.glob("**/*"))
        site, line = result.lines
        assert site == f"site: {self.site_file}"
        return line.removeprefix("error: ")

    def processes(self) -> list[int]:
        """Return the ids of all processes that carry the mark, on any host."""
        return self.cluster.processes(self.mark)

    def find_workers(self, host: str) -> list[int]:
        """Return the process ids of the ranks on a host."""
        network = network_of(self.cluster.keepers[host].pid)
        pids = [pid for pid in self.processes() if network_of(pid) == network]
        return [
            pid
            for pid in pids
            if b"steelyard.run.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def read_phase(self) -> str | None:
        """Return the phase of rank 0 in the progress file; None before there is one."""
        for path in self.tmp.glob("steelyard-*/progress.json"):
            return str(json.loads(path.read_text())["phase"])
        return None

    def find_leftovers(self, within_s: float = 5.0) -> list[int | str]:
        """Return the processes of this folder that have not ended within so many seconds, and the
        temporary folders of runs.

        Torch's caches beside them do not count.
        """
        self.wait_until_ended(within_s)
        return [*self.processes(), *(path.name for path in self.tmp.glob("steelyard-*"))]

    def wait_until_ended(self, within_s: float = 0.0) -> bool:
        """Return whether all processes of this folder end within so many seconds."""
        return wait_for(lambda: not self.processes(), within_s)

    def clean(self) -> None:
        """Kill the processes that a failed test left behind: those with this folder's mark."""
        kill_and_wait(self.processes())


def _restore_sigint() -> None:
    """Let the child handle SIGINT as if started from a terminal: a test runner in the background
    hands down that it is ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
