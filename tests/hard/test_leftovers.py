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

DEAD, ALIVE = "d" * 16 + "-0", "a" * 16 + "-0"
HOLDER = """
import sys, time
from steelyard.run.processes import RunFolder
print(RunFolder(sys.argv[1]).path, flush=True)
time.sleep(300)
"""


def killed_holder(shell: Shell, mark: str) -> Path:
    """Make the folder of a run with this mark, kill the process that holds it, and return its path."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mark], env=shell.env(), stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    path = Path(holder.stdout.readline().strip())
    holder.kill()
    holder.wait()
    return path


def test_the_dead_are_swept_and_nobody_else(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.tmp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shell.tmp))
    dead = killed_holder(shell, DEAD)
    (dead / "store").write_text("left")
    stopped = subprocess.Popen(
        ["sleep", "300"], env={**shell.env(), messages.MARK_VARIABLE: DEAD}, start_new_session=True
    )
    # the environment of a new process can be read only a moment after it starts
    assert wait_for(lambda: processes.has_mark(psutil.Process(stopped.pid), DEAD))
    stopped.send_signal(signal.SIGSTOP)
    alive = RunFolder(ALIVE)
    (shell.tmp / "steelyard-notes").mkdir()
    (shell.tmp / f"steelyard-{'b' * 16}-0-x1").symlink_to(tmp_path)
    others = shell.tmp / f"steelyard-{'c' * 16}-0-x1"
    others.mkdir()
    if os.getuid() == 0:
        os.chown(others, 65534, 65534)
    assert processes.sweep_dead_runs() == [DEAD, *([] if os.getuid() == 0 else ["c" * 16 + "-0"])]
    assert stopped.wait(300) == -signal.SIGTERM
    kept = {
        alive.path.name,
        "steelyard-notes",
        f"steelyard-{'b' * 16}-0-x1",
        *([others.name] if os.getuid() == 0 else []),
    }
    assert {path.name for path in shell.tmp.iterdir()} == kept
    alive.remove()
    assert not alive.path.exists()


def test_a_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one = RunFolder(ALIVE)
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.remove()


def test_a_run_that_starts_does_not_sweep_the_folder_of_another_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    real, swept = processes.fcntl.flock, []

    def sweep_before_it_is_locked(handle: int, how: int) -> None:
        monkeypatch.setattr(processes.fcntl, "flock", real)
        swept.append(processes.sweep_dead_runs())
        real(handle, how)

    monkeypatch.setattr(processes.fcntl, "flock", sweep_before_it_is_locked)
    one = RunFolder(ALIVE)
    assert (swept, processes.sweep_dead_runs()) == ([[]], [])
    assert processes.FOLDER_NAME.fullmatch(one.path.name)["mark"] == ALIVE
    one.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_never_locked_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(Path, "rename", lambda self, to: full_disk())
        RunFolder(ALIVE)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f".steelyard-{ALIVE}-")
    # a lock ends with its process, and this process still runs: pretend that nobody holds it
    monkeypatch.setattr(processes, "_is_unlocked", lambda path: True)
    assert (processes.sweep_dead_runs(), list(tmp_path.iterdir())) == ([], [])


def full_disk() -> None:
    """Raise the error of a full disk."""
    raise OSError("no space left on device")


@pytest.mark.full
def test_all_killed_at_once_and_a_rank_stopped(faulty: Shell, attacks: Attacks) -> None:
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
    by_words = {
        word: one
        for one in faulty.processes()
        for word in ("worker", "node")
        if f"steelyard.run.{word}" in one.cmdline()
    }
    by_words["worker"].send_signal(signal.SIGSTOP)
    assert wait_for(lambda: by_words["worker"].status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGKILL)
    by_words["node"].send_signal(signal.SIGKILL)
    process.wait()
    assert faulty.nothing_left(15.0), [one.cmdline() for one in faulty.processes()]
    (left,) = [path for path in faulty.tmp.iterdir() if path.name.startswith("steelyard-")]
    done = faulty(*SMOKE, "--engine", "faulty", "--passes", "val", "--out", "records")
    assert done.code == 0, done.err
    assert not left.exists()
    assert [one["status"] for one in faulty.records()] == ["failed", "valid"]
    attacks.add(
        "parent and agent killed, a rank stopped",
        1,
        "the rank and the folder stay",
        "it ends; the next run sweeps",
    )
