"""Tests of sweeping: the next run of the same user removes what killed runs left behind, and
nothing else.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell, wait_for
from steelyard.run import messages, processes
from steelyard.run.processes import RunFolder

DEAD_MARK, LIVE_MARK = "d" * 16 + "-0", "a" * 16 + "-0"
HOLDER_PROGRAM = """
import sys, time
from steelyard.run.processes import RunFolder
print(RunFolder(sys.argv[1]).path, flush=True)
time.sleep(300)
"""


def make_folder_of_dead_agent(shell: Shell, mark: str) -> Path:
    """Make the folder of a run with this mark, kill the process that holds it, and return its
    path.
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER_PROGRAM, mark],
        env=shell.env(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    path = Path(holder.stdout.readline().strip())
    holder.kill()
    holder.wait()
    return path


def test_only_folders_and_processes_of_dead_agents_are_swept(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.tmp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shell.tmp))
    dead_folder = make_folder_of_dead_agent(shell, DEAD_MARK)
    (dead_folder / "store").write_text("left")
    suspended = subprocess.Popen(
        ["sleep", "300"],
        env={**shell.env(), messages.MARK_VARIABLE: DEAD_MARK},
        start_new_session=True,
    )
    # the environment of a new process can be read only a moment after it starts
    assert wait_for(lambda: processes.has_mark(psutil.Process(suspended.pid), DEAD_MARK))
    suspended.send_signal(signal.SIGSTOP)
    live_folder = RunFolder(LIVE_MARK)
    (shell.tmp / "steelyard-notes").mkdir()
    (shell.tmp / f"steelyard-{'b' * 16}-0-x1").symlink_to(tmp_path)
    foreign_folder = shell.tmp / f"steelyard-{'c' * 16}-0-x1"
    foreign_folder.mkdir()
    if os.getuid() == 0:
        os.chown(foreign_folder, 65534, 65534)
    assert processes.sweep_dead_runs() == [
        DEAD_MARK,
        *([] if os.getuid() == 0 else ["c" * 16 + "-0"]),
    ]
    assert suspended.wait(300) == -signal.SIGTERM
    expected = {
        live_folder.path.name,
        "steelyard-notes",
        f"steelyard-{'b' * 16}-0-x1",
        *([foreign_folder.name] if os.getuid() == 0 else []),
    }
    assert {path.name for path in shell.tmp.iterdir()} == expected
    live_folder.remove()
    assert not live_folder.path.exists()


def test_run_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_folder = RunFolder(LIVE_MARK)
    assert run_folder.path.stat().st_mode & 0o777 == 0o700
    run_folder.remove()


def test_sweep_spares_a_run_folder_that_is_not_locked_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    real_flock, swept = processes.fcntl.flock, []

    def sweep_before_it_is_locked(handle: int, how: int) -> None:
        monkeypatch.setattr(processes.fcntl, "flock", real_flock)
        swept.append(processes.sweep_dead_runs())
        real_flock(handle, how)

    monkeypatch.setattr(processes.fcntl, "flock", sweep_before_it_is_locked)
    run_folder = RunFolder(LIVE_MARK)
    assert (swept, processes.sweep_dead_runs()) == ([[]], [])
    assert processes.FOLDER_NAME.fullmatch(run_folder.path.name)["mark"] == LIVE_MARK
    run_folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_never_locked_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(Path, "rename", lambda self, to: raise_full_disk())
        RunFolder(LIVE_MARK)
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(f".steelyard-{LIVE_MARK}-")
    # a lock ends with its process, and this process still runs: pretend that nobody holds it
    monkeypatch.setattr(processes, "_is_unlocked", lambda path: True)
    assert (processes.sweep_dead_runs(), list(tmp_path.iterdir())) == ([], [])


def raise_full_disk() -> None:
    """Raise the error of a full disk."""
    raise OSError("no space left on device")


@pytest.mark.full
def test_suspended_rank_ends_when_parent_and_agent_are_killed(
    faulty: Shell, attacks: Attacks
) -> None:
    """The suspended rank is woken by its agent's death, notices that it is alone and ends. The
    folder stays for the next run to sweep.
    """
    mark = faulty.folder / "there"
    process = faulty.start(
        *SMOKE,
        "--engine",
        "faulty",
        "--out",
        "records",
        pipes=False,
        FAULTY="waits@work",
        FAULTY_MARK=str(mark),
    )
    assert wait_for(mark.exists)
    processes_by_role = {
        word: one
        for one in faulty.processes()
        for word in ("worker", "node")
        if f"steelyard.run.{word}" in one.cmdline()
    }
    processes_by_role["worker"].send_signal(signal.SIGSTOP)
    assert wait_for(lambda: processes_by_role["worker"].status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGKILL)
    processes_by_role["node"].send_signal(signal.SIGKILL)
    process.wait()
    assert faulty.wait_until_ended(15.0), [one.cmdline() for one in faulty.processes()]
    (leftover,) = [path for path in faulty.tmp.iterdir() if path.name.startswith("steelyard-")]
    result = faulty(*SMOKE, "--engine", "faulty", "--passes", "val", "--out", "records")
    assert result.code == 0, result.err
    assert not leftover.exists()
    assert [one["status"] for one in faulty.records()] == ["failed", "valid"]
    attacks.add(
        "parent and agent killed, a rank stopped",
        1,
        "the rank and the folder stay",
        "it ends; the next run sweeps",
    )
