"""Tests of how a run's end is reported in hostile surroundings: variables of other launchers, no
memory, no processes.
"""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from steelyard.run import cpu_load
from steelyard.run.failure import Failure, RankResults, find_failure
from steelyard.run.host import is_scrubbed
from steelyard.run.messages import WorkerEnded

RUN = (*SMOKE, "--engine", "faulty", "--passes", "val")
LAUNCHER_VARIABLES = {
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "203.0.113.1",
    "MASTER_PORT": "1",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "OMPI_COMM_WORLD_RANK": "3",
    "PADDLE_TRAINERS_NUM": "8",
}
MEMORY_LIMIT_BYTES = 1536 << 20


@pytest.mark.full
@pytest.mark.parametrize("devices", ["1", "2"])
def test_variables_of_another_launcher_are_not_inherited(
    faulty: Shell, devices: str, attacks: Attacks
) -> None:
    result = faulty(
        *RUN, "--devices", devices, "--out", faulty.out, "--hang-after", "60", **LAUNCHER_VARIABLES
    )
    assert result.code == 0, result.err
    (record,) = faulty.records()
    assert [rank["rank"] for rank in record["ranks"]] == list(range(int(devices)))
    assert not set(record["environment"]["software"]["variables"]) & set(LAUNCHER_VARIABLES)
    attacks.add(
        f"variables of another launcher, {devices} rank(s)", 1, "hangs for 30 minutes", "runs"
    )


def test_only_launcher_variables_are_scrubbed() -> None:
    assert [name for name in LAUNCHER_VARIABLES if not is_scrubbed(name)] == []
    assert not any(
        map(
            is_scrubbed,
            ("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "OMP_NUM_THREADS", "RANKING"),
        )
    )


@pytest.mark.parametrize(
    ("ended", "tail", "expected"),
    [
        (-9, "", ("killed", "rank 1 was ended by SIGKILL")),
        (-9, "No space left on device", ("killed", "rank 1 was ended by SIGKILL")),
        (-11, "", ("killed", "rank 1 was ended by SIGSEGV")),
        (1, "", ("killed", "rank 1 wrote no result; exit code 1")),
        (
            1,
            f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}: 'x'",
            (
                "disk_full",
                "rank 1 wrote no result; exit code 1, and its stderr says: No space left on device",
            ),
        ),
    ],
)
def test_failure_of_a_rank_without_a_result(
    ended: int, tail: str, expected: tuple[str, str]
) -> None:
    exits = {1: WorkerEnded(token="t", rank=1, code=ended, time_s=1.0)}
    assert find_failure(RankResults(exits=exits, stderr_tails={1: tail}), 2) == Failure(
        *expected, 1
    )


@pytest.mark.parametrize(("starved", "more"), [(None, ""), (0, ""), (2, "2 process(es)")])
def test_oom_kills_of_the_cgroup_are_reported(starved: int | None, more: str) -> None:
    exits = {0: WorkerEnded(token="t", rank=0, code=-9, time_s=1.0, oom_kills=starved)}
    suffix = (
        f"; meanwhile the kernel killed {more} of its control group because memory ran out"
        if more
        else ""
    )
    assert find_failure(RankResults(exits=exits), 2) == Failure(
        "killed", f"rank 0 was ended by SIGKILL{suffix}", 0
    )


@pytest.mark.parametrize(
    ("groups", "name", "text", "found"),
    [
        ("0::/a/b\n", "a/b/memory.events", "low 0\noom 4\noom_kill 3\n", 3),
        ("0::/a/b\n", "memory.events", "oom_kill 2\n", 2),  # a container sees its group as the root
        (
            "1:cpu:/a\n4:memory:/a\n0::/\n",
            "memory/a/memory.oom_control",
            "under_oom 0\noom_kill 7\n",
            7,
        ),
        ("0::/a\n", "a/memory.events", "oom_kill many\n", None),
        ("0::/a\n", "a/other", "oom_kill 1\n", None),
        ("nothing", "a/memory.events", "oom_kill 1\n", None),
    ],
)
def test_oom_kills_are_read_from_the_cgroup(
    tmp_path: Path, groups: str, name: str, text: str, found: int | None
) -> None:
    proc, cgroup_root = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    (cgroup_root / name).parent.mkdir(parents=True)
    (cgroup_root / name).write_text(text)
    assert cpu_load.count_oom_kills(tmp_path) == found
    assert cpu_load.count_oom_kills(tmp_path / "none") is None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a cgroup with a memory limit of 1.5 GiB, and remove it after the test; skip where none
    can be made.
    """
    for folder, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = folder / f"steelyard-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(MEMORY_LIMIT_BYTES))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no control group of memory can be made here")


@pytest.mark.full
def test_rank_killed_by_the_kernel_for_lack_of_memory(
    faulty: Shell, small_group: Path, attacks: Attacks
) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "steelyard", *RUN, "--out", str(faulty.out)],
        env=faulty.env(FAULTY="eats@work"),
        cwd=faulty.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: (small_group / "cgroup.procs").write_text("0"),  # this process
    )
    assert result.returncode == 1, result.stderr
    (record,) = faulty.records()
    assert record["reasons"][0]["code"] == "killed"
    assert record["reasons"][0]["text"] == (golden("rank-0-was-ended-by-sigkill"))
    assert record["failure"]["exit_code"] == -signal.SIGKILL
    attacks.add(
        "rank ended by the kernel for lack of memory",
        1,
        "a guess at any SIGKILL",
        "what its control group counted",
    )


FAILING_START_PROGRAM = """
import subprocess, sys, threading
if "steelyard.run.node" in sys.orig_argv:
    real, count = {place}, 0
    def fail(*arguments, **options):
        global count
        count += "steelyard.run.worker" in arguments[0]
        if count >= {number}:
            raise {error}
        return real(*arguments, **options)
    {place} = fail
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "number", "error", "why"),
    [
        (
            "subprocess.Popen",
            2,
            "BlockingIOError(11, 'Resource temporarily unavailable')",
            "Resource temporarily unavailable",
        ),
        ("subprocess.Popen", 1, "PermissionError(13, 'Permission denied')", "Permission denied"),
    ],
    ids=["the second", "the first"],
)
def test_failure_to_start_workers_is_recorded(
    faulty: Shell, place: str, number: int, error: str, why: str
) -> None:
    (faulty.folder / "more").mkdir()
    (faulty.folder / "more" / "sitecustomize.py").write_text(
        FAILING_START_PROGRAM.format(place=place, number=number, error=error)
    )
    shell = Shell(faulty.folder, (faulty.folder / "more", *faulty.extra))
    result = shell(*RUN, "--devices", "2", "--out", shell.out)
    assert result.code == 1, result.err
    (record,) = shell.records()
    assert record["reasons"][0] == {
        "code": "not_started",
        "text": golden("host-localhost-the-ranks-could-not", why),
    }
    assert shell.wait_until_ended(1.0)


TRUNCATED_WRITE_PROGRAM = """
import sys
if "steelyard.run.worker" in sys.orig_argv:
    from steelyard import files
    real = files.write_file
    def write(path, content, *more, **options):
        real(path, content[:7] if path.name.startswith("{name}") else content, *more, **options)
    files.write_file = write
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "code", "status", "reason"),
    [("progress", 0, "valid", None), ("rank-1", 1, "failed", "malformed")],
)
def test_truncated_worker_files(
    faulty: Shell, name: str, code: int, status: str, reason: str | None
) -> None:
    (faulty.folder / "more").mkdir()
    (faulty.folder / "more" / "sitecustomize.py").write_text(
        TRUNCATED_WRITE_PROGRAM.format(name=name)
    )
    shell = Shell(faulty.folder, (faulty.folder / "more", *faulty.extra))
    result = shell(*RUN, "--devices", "2", "--out", shell.out)
    assert (result.code, "Traceback" in result.err) == (code, False), result.err
    (record,) = shell.records()
    assert (record["status"], record["reasons"][0]["code"] if reason else None) == (status, reason)
    assert (record["failure"] or {}).get("rank") == (1 if reason else None)


@pytest.mark.full
def test_deleted_working_directory_is_refused(shell: Shell, attacks: Attacks) -> None:
    (shell.folder / "gone").mkdir()
    prefix = [
        "sh",
        "-c",
        'cd gone && rmdir ../gone && exec "$@"',
        "sh",
        sys.executable,
        "-P",
        "-m",
        "steelyard",
    ]
    command = [*prefix, *SMOKE, "--out", str(shell.out)]
    result = subprocess.run(
        command,
        cwd=shell.folder,
        env=shell.env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == golden("error-the-working-directory-no-longer")
    assert not shell.out.exists()
    attacks.add("working directory deleted", 1, "`killed`", "refused, exit code 2")


def test_run_without_proc_is_refused(shell: Shell) -> None:
    script = 'mount -t tmpfs none /proc && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-P",
        "-m",
        "steelyard",
        *SMOKE,
    ]
    try:
        if subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/proc"], capture_output=True
        ).returncode:
            pytest.skip("mounting over /proc is not allowed here")
    except FileNotFoundError:
        pytest.skip("no unshare command")
    result = subprocess.run(
        command,
        cwd=shell.folder,
        env=shell.env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == golden("error-proc-is-not-mounted-run")
