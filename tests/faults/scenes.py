"""A run that shall fail, on this host or on two others through ssh or Slurm.

A scene starts the run with code inside it that waits, or fails, in one phase (tests/faults/inside),
and afterwards reports what is left of the run.
"""

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fixtures.commands import SRC, CommandResult, Shell, wait_for, wait_for_result
from hosts.cluster import Cluster
from hosts.runs import SILENCE_S, LoginShell
from hosts.slurm import Slurm

FAULT_PATH = Path(__file__).with_name("inside")
LONE_DEVICE_PATH = Path(__file__).parents[1] / "fixtures" / "packages" / "lone_device"
COMPILER_CACHE = "torchinductor_"  # torch's cache, shared by all runs of a user
START_S = 90.0  # seconds for a run to reach the phase of the fault
CASE_OPTIONS = {
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
class LocalStage:
    """Runs on this host alone."""

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

    def set_variables(self, variables: dict[str, str]) -> None:
        """Write a site file with a short silence limit, and set variables of the next commands."""
        site = self.folder / "config" / "steelyard" / "site.toml"
        site.parent.mkdir(parents=True, exist_ok=True)
        site.write_text(f"silence_s = {SILENCE_S}\n")
        site.chmod(0o600)
        self._variables = {**variables, "XDG_CONFIG_HOME": str(self.folder / "config")}

    def start(self, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
        """Start `steelyard ARGUMENTS`."""
        return self.shell.start(*arguments, **{**self._variables, **variables})

    def find_leftovers(self) -> list[str]:
        """Return the command lines of the processes that still live."""
        return [" ".join(process.cmdline()) for process in self.shell.processes()]

    def clean(self) -> None:
        self.shell.clean()


@dataclass
class ClusterStage:
    """Runs on two hosts, started from a third."""

    runs: LoginShell
    site_tables: str = ""  # TOML text added to the site file

    @property
    def folder(self) -> Path:
        return self.runs.folder

    @property
    def out(self) -> Path:
        return self.runs.out

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def set_variables(self, variables: dict[str, str]) -> None:
        """Write a site file that sets the variables on the hosts; the command itself gets them only
        if the parent shall fail.
        """
        host_variables = {
            "PYTHONPATH": f"{FAULT_PATH}:{LONE_DEVICE_PATH}:{SRC}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        } | variables
        exports = " ".join(f"{name}='{value}'" for name, value in host_variables.items())
        self.runs.write_site(self.site_tables, **self.runs.site, prologue=f"export {exports}")
        self._parent_variables = {"PYTHONPATH": host_variables["PYTHONPATH"]} | (
            variables if variables.get("FAULT_WHO") == "parent" else {}
        )

    def start(self, *arguments: str | Path, **variables: str) -> "subprocess.Popen[str]":
        """Start `steelyard ARGUMENTS` on the login host."""
        return self.runs.start(*arguments, **{**self._parent_variables, **variables})

    def find_leftovers(self) -> list[str]:
        """Return the command lines of the processes that still live, on any host."""
        return [_read_command_line(pid) for pid in self.runs.processes()]

    def clean(self) -> None:
        """Kill the processes that still live, on any host."""
        for pid in self.runs.processes():
            _kill(pid)


@dataclass
class Scene:
    """One run that shall fail: where it runs, its command, and the processes to do something to.

    `waiting_pid` is the process that waits in the phase of the fault, `parent_pid` the one that
    started it, `cut_hosts` the hosts whose link was cut.
    """

    where: str
    stage: LocalStage | ClusterStage
    cluster: Cluster | None = None
    slurm: Slurm | None = None
    waiting_pid: int = 0
    parent_pid: int = 0
    command: "subprocess.Popen[str] | None" = None
    cut_hosts: list[str] = field(default_factory=list)

    @property
    def mark(self) -> Path:
        """Return the file that the waiting process writes when the run is in the phase."""
        return self.stage.folder / "mark"

    def start(self, who: str, phase: str, act: str, case: str, *options: str) -> None:
        """Start a run in which the process `who` does `act` in a phase; `case` is a key of
        CASE_OPTIONS.
        """
        self.stage.set_variables(
            {"FAULT_WHO": who, "FAULT_PHASE": phase, "FAULT_ACT": act, "FAULT_MARK": str(self.mark)}
        )
        self.command = self.stage.start("run", *CASE_OPTIONS[case], *options)

    def wait_until_reached(self) -> bool:
        """Wait until the run is in the phase of the fault, and return whether it got there before
        it ended or START_S passed.

        Sets `waiting_pid` and `parent_pid`.
        """
        wait_for(lambda: self.mark.exists() or self.command.poll() is not None, START_S)
        if self.mark.exists():
            self.waiting_pid, self.parent_pid = map(int, self.mark.read_text().split())
        return self.mark.exists()

    def wait_for_end(self, within_s: float) -> CommandResult:
        """Wait for the end of the command and return its result."""
        return wait_for_result(self.command, within_s)

    def run_second(self, *options: str) -> CommandResult:
        """Run a second command at the same time, into another folder for records, and return its
        result. It does not wait in the phase: the mark exists already.
        """
        return wait_for_result(
            self.stage.start("run", *CASE_OPTIONS["score"], *options, "--out", "other")
        )

    def records(self) -> list[Path]:
        """Return the paths of the records."""
        return sorted(self.stage.out.glob("*.json"))

    def find_leftovers(self) -> list[str]:
        """Return what is left of the run: processes on any host, temporary files except the
        compiler's cache, and jobs.
        """
        files = [
            path.name
            for path in self.stage.temporary.iterdir()
            if not path.name.startswith(COMPILER_CACHE)
        ]
        return [*self.stage.find_leftovers(), *files, *self.jobs()]

    def jobs(self) -> list[str]:
        """Return the ids of Slurm jobs that have hosts or wait for them. One that is completing has
        released its hosts, and waits for a lost one.
        """
        states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
        return (
            []
            if self.slurm is None
            else self.slurm("squeue", "--noheader", "--format=%i", states).split()
        )

    def cut_link(self, host: str) -> None:
        """Cut the link of a host, and remember it."""
        self.cluster.cut_link(host)
        self.cut_hosts.append(host)

    def find_children(self, program: str) -> list[int]:
        """Return the ids of the command's child processes that run a program."""
        return [
            process.pid
            for process in psutil.Process(self.command.pid).children()
            if process.name() == program
        ]


def read_record(path: Path) -> dict[str, Any]:
    """Return the JSON of a record file."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _read_command_line(pid: int) -> str:
    """Return the command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    """Send SIGKILL to a process, which may have ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
