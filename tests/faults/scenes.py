"""Where a run goes wrong: this host, or two others through ssh or Slurm. A scene starts the run
with something inside it that waits, or breaks, in one phase, and afterwards says what is left of
it."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fixtures.commands import SRC, Done, Shell, finish, wait_for
from hosts.cluster import Cluster
from hosts.runs import SILENCE_S, Runs
from hosts.slurm import Slurm

INSIDE = Path(__file__).with_name("inside")
LONE = Path(__file__).parents[1] / "fixtures" / "packages" / "lone_device"
COMPILER_CACHE = "torchinductor_"  # torch's own, for all runs of a user
START_S = 90.0  # for a run to get to the phase
CASES = {
    "train": (
        "llama1-7b-openwebtext",
        "--size",
        "smoke",
        "--steps",
        "4",
        "--checkpoint-every",
        "2",
    ),
    "score": ("llama2-7b-mmlu", "--size", "smoke"),
}


@dataclass
class Here:
    """This host alone."""

    shell: Shell

    @property
    def folder(self) -> Path:
        return self.shell.folder

    @property
    def out(self) -> Path:
        return self.shell.out

    @property
    def temporary(self) -> Path:
        return self.shell.tmp

    def tell(self, variables: dict[str, str]) -> None:
        site = self.folder / "config" / "steelyard" / "site.toml"
        site.parent.mkdir(parents=True, exist_ok=True)
        site.write_text(f"silence_s = {SILENCE_S}\n")
        site.chmod(0o600)
        self._told = {**variables, "XDG_CONFIG_HOME": str(self.folder / "config")}

    def start(self, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
        return self.shell.start(*arguments, **{**self._told, **variables})

    def left(self) -> list[str]:
        return [" ".join(one.cmdline()) for one in self.shell.processes()]

    def clean(self) -> None:
        self.shell.clean()


@dataclass
class Elsewhere:
    """Two hosts, led from a third."""

    runs: Runs
    more: str = ""  # tables of the site file

    @property
    def folder(self) -> Path:
        return self.runs.folder

    @property
    def out(self) -> Path:
        return self.runs.out

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def tell(self, variables: dict[str, str]) -> None:
        told = {
            "PYTHONPATH": f"{INSIDE}:{LONE}:{SRC}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        } | variables
        exports = " ".join(f"{name}='{value}'" for name, value in told.items())
        self.runs.write_site(self.more, **self.runs.site, prologue=f"export {exports}")
        self._parent = {"PYTHONPATH": told["PYTHONPATH"]} | (
            variables if variables.get("FAULT_WHO") == "parent" else {}
        )

    def start(self, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
        return self.runs.start(*arguments, **{**self._parent, **variables})

    def left(self) -> list[str]:
        return [_words(pid) for pid in self.runs.processes()]

    def clean(self) -> None:
        for pid in self.runs.processes():
            _kill(pid)


@dataclass
class Scene:
    """One run. `waiting` is the process that waits where the run shall go wrong, `above` the one
    that started it.
    """

    where: str
    stage: Here | Elsewhere
    cluster: Cluster | None = None
    slurm: Slurm | None = None
    waiting: int = 0
    above: int = 0
    command: "subprocess.Popen[str] | None" = None
    were_cut: list[str] = field(default_factory=list)

    @property
    def mark(self) -> Path:
        return self.stage.folder / "mark"

    def start(self, who: str, phase: str, act: str, case: str, *options: str) -> None:
        self.stage.tell(
            {"FAULT_WHO": who, "FAULT_PHASE": phase, "FAULT_ACT": act, "FAULT_MARK": str(self.mark)}
        )
        self.command = self.stage.start("run", *CASES[case], *options)

    def reached(self) -> bool:
        """Whether the run gets to where it shall go wrong."""
        wait_for(lambda: self.mark.exists() or self.command.poll() is not None, START_S)
        if self.mark.exists():
            self.waiting, self.above = map(int, self.mark.read_text().split())
        return self.mark.exists()

    def ended(self, within_s: float) -> Done:
        return finish(self.command, within_s)

    def again(self, *options: str) -> Done:
        """A second run at the same time. Where the first one waits it does not: the mark is there."""
        return finish(self.stage.start("run", *CASES["score"], *options, "--out", "other"))

    def records(self) -> list[Path]:
        return sorted(self.stage.out.glob("*.json"))

    def left(self) -> list[str]:
        """Processes on any host, temporary files, and jobs."""
        files = [
            path.name
            for path in self.stage.temporary.iterdir()
            if not path.name.startswith(COMPILER_CACHE)
        ]
        return [*self.stage.left(), *files, *self.jobs()]

    def jobs(self) -> list[str]:
        """Those that have hosts, or wait for some. One that is completing has been given back, and
        waits for a lost host.
        """
        states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
        return (
            []
            if self.slurm is None
            else self.slurm("squeue", "--noheader", "--format=%i", states).split()
        )

    def cut(self, host: str) -> None:
        self.cluster.cut(host)
        self.were_cut.append(host)

    def started_by_command(self, program: str) -> list[int]:
        return [
            one.pid for one in psutil.Process(self.command.pid).children() if one.name() == program
        ]


def read(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
