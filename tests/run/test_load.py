"""Tests of the CPU load of a host: reading fake /proc and /sys trees, thinning the readings, and a
real process that spins beside a real run.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import SMOKE, Shell
from steelyard.run import cpu_load
from steelyard.run.cpu_load import CpuLoadReader, LoadReadings
from steelyard.run.messages import LoadMessage

TICKS = cpu_load.TICKS_PER_S


def put(root: Path, **files: str) -> None:
    """Write text files under a root; keys are paths with slashes."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def stat(root: Path, *cores: tuple[int, ...]) -> None:
    """Write /proc/stat with one line per core: seconds of user, nice, system, idle, iowait, irq,
    softirq, steal, guest and guest_nice.
    """
    lines = [
        f"cpu{n} {' '.join(str(second * TICKS) for second in core)}" for n, core in enumerate(cores)
    ]
    put(root, **{"proc/stat": "\n".join(["cpu  9 9 9 9", *lines, "intr 5 cpu", "ctxt 7"]) + "\n"})


def process(
    root: Path, pid: int, *seconds: int, name: str = "a (b) c", children: tuple[int, ...] = ()
) -> None:
    """Write the stat file of a process with these CPU seconds (user, system, children's user,
    children's system) and its child processes.
    """
    times = " ".join(str(second * TICKS) for second in seconds)
    put(root, **{f"proc/{pid}/stat": f"{pid} ({name}) S 1 2 3 4 5 6 7 8 9 10 {times} 0 0\n"})
    put(root, **{f"proc/{pid}/task/{pid}/children": " ".join(map(str, children))})


def reader(root: Path, cores: tuple[int, ...] = (0, 1)) -> CpuLoadReader:
    """Return a load reader of these cores whose agent is process 10 with parent 9."""
    return CpuLoadReader("t", root, cores, agent_pids=(10, 9))


def test_what_is_counted(tmp_path: Path) -> None:
    """Idle time (100), waiting (50), guests (7, which are in user already) and the core that the
    run may not use do not count.
    """
    stat(
        tmp_path, (1, 2, 3, 100, 50, 4, 5, 6, 7, 7), (10, 0, 0, 100, 50, 0, 0, 0, 0, 0), (99,) * 10
    )
    process(tmp_path, 10, 1, 1, 3, 0)
    process(tmp_path, 9, 2, 0, 0, 0)
    process(tmp_path, 20, 5, 1, 2, 1, children=(21,))
    process(tmp_path, 21, 3, 0, 0, 0, children=(22,))
    process(tmp_path, 22, 1, 0, 0, 0)
    process(tmp_path, 33, 70, 0, 0, 0)  # a process of somebody else
    one = reader(tmp_path)
    one.watch((20,))
    found = one.read(4.5)
    assert found == LoadMessage(
        token="t",
        allowed=2,
        quota=None,
        t_s=4.5,
        busy_s=21.0 + 10.0,
        own_s=5.0 + 2.0 + 9.0 + 3.0 + 1.0,
        agent_s=2.0,
        group_s=None,
    )


def test_a_host_that_does_not_count(tmp_path: Path) -> None:
    assert reader(tmp_path).read(0.0).busy_s is None
    stat(tmp_path, (1,) * 10)  # core 1 is missing
    assert reader(tmp_path).read(0.0).busy_s is None
    put(tmp_path, **{"proc/stat": "cpu0 what\ncpu1 ever\n"})
    assert reader(tmp_path).read(0.0).busy_s is None


def test_descendants_are_looked_for_seldom_where_threads_are_many(tmp_path: Path) -> None:
    stat(tmp_path, (1,) * 10, (1,) * 10)
    process(tmp_path, 20, 0, 0, 0, 0)
    for thread in range(cpu_load.FEW_THREADS + 1):
        put(tmp_path, **{f"proc/20/task/{1000 + thread}/children": ""})
    one = reader(tmp_path)
    one.watch((20,))
    assert one.read(0.0).own_s == 0.0
    process(tmp_path, 21, 3, 0, 0, 0)
    put(tmp_path, **{"proc/20/task/1000/children": "21"})
    seen = [one.read(0.0).own_s for _ in range(cpu_load.SEARCH_EVERY)]
    assert seen == [0.0] * (cpu_load.SEARCH_EVERY - 1) + [3.0]


def test_the_quota_of_control_groups_version_2(tmp_path: Path) -> None:
    """The smallest quota from the process's group up to the root holds, and the usage is that of
    the same group.
    """
    top = "sys/fs/cgroup"
    put(tmp_path, **{"proc/self/cgroup": "0::/pod/box\n", f"{top}/pod/box/cpu.max": "max 100000\n"})
    assert cpu_load.find_tightest_cgroup(tmp_path) is None
    put(
        tmp_path,
        **{
            f"{top}/pod/cpu.max": "250000 100000\n",
            f"{top}/pod/cpu.stat": "usage_usec 3500000\nuser_usec 1\n",
        },
    )
    put(tmp_path, **{f"{top}/cpu.max": "400000 100000\n"})
    found = cpu_load.find_tightest_cgroup(tmp_path)
    assert found is not None
    assert (found.quota, found.read_usage_s()) == (2.5, 3.5)
    stat(tmp_path, (1,) * 10, (1,) * 10)
    read = reader(tmp_path).read(0.0)
    assert (read.quota, read.group_s) == (2.5, 3.5)


def test_the_quota_of_control_groups_version_1(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    put(tmp_path, **{"proc/self/cgroup": "3:cpuset:/box\n2:cpuacct:/box\n1:cpu:/box\n"})
    put(
        tmp_path,
        **{f"{top}/cpu/box/cpu.cfs_quota_us": "-1", f"{top}/cpu/box/cpu.cfs_period_us": "100000"},
    )
    assert cpu_load.find_tightest_cgroup(tmp_path) is None
    put(
        tmp_path,
        **{
            f"{top}/cpu/box/cpu.cfs_quota_us": "150000\n",
            f"{top}/cpuacct/box/cpuacct.usage": "2000000000\n",
        },
    )
    found = cpu_load.find_tightest_cgroup(tmp_path)
    assert found is not None
    assert (found.quota, found.read_usage_s()) == (1.5, 2.0)
    joint = tmp_path / "joint"
    put(
        joint,
        **{
            "proc/self/cgroup": "4:cpu,cpuacct:/not/mounted\n",
            f"{top}/cpu,cpuacct/cpu.cfs_quota_us": "100000",
        },
    )
    put(
        joint,
        **{
            f"{top}/cpu,cpuacct/cpu.cfs_period_us": "50000",
            f"{top}/cpu,cpuacct/cpuacct.usage": "1000000000",
        },
    )
    found = cpu_load.find_tightest_cgroup(joint)
    assert found is not None
    assert (found.quota, found.read_usage_s()) == (2.0, 1.0)


def test_no_control_group_and_one_that_makes_no_sense(tmp_path: Path) -> None:
    assert cpu_load.find_tightest_cgroup(tmp_path) is None
    put(
        tmp_path,
        **{"proc/self/cgroup": "nonsense\n0::/../../etc\n", "sys/fs/cgroup/cpu.max": "ten 0"},
    )
    assert cpu_load.find_tightest_cgroup(tmp_path) is None


def said(
    t_s: float, busy_s: float | None = 0.0, own_s: float = 0.0, quota: float | None = None
) -> LoadMessage:
    """Return a load message of a host with four allowed cores; the agent's time is a tenth of the
    run's.
    """
    group = None if quota is None else 7.0 + t_s
    return LoadMessage(
        token="t",
        allowed=4,
        quota=quota,
        t_s=t_s,
        busy_s=busy_s,
        own_s=own_s,
        agent_s=own_s / 10,
        group_s=group,
    )


def test_what_is_kept_counts_from_the_first_reading() -> None:
    kept = LoadReadings()
    assert kept.to_load() is None
    for row in (said(0.5, 100.0, 10.0), said(1.5, 103.0, 12.0)):
        kept.add(row)
    found = kept.to_load()
    assert found is not None
    assert found.model_dump() == {
        "allowed": 4,
        "t_s": [0.5, 1.5],
        "busy_s": [0.0, 3.0],
        "own_s": [0.0, 2.0],
        "agent_s": [0.0, 0.2],
    }
    kept.add(said(2.5, None))
    assert kept.to_load() is None


def test_a_quota_is_kept() -> None:
    kept = LoadReadings([said(0.0, 0.0, 0.0, 2.0), said(1.0, 1.0, 1.0, 2.0)])
    found = kept.to_load()
    assert found is not None
    assert (found.quota, found.group_s, found.cores) == (2.0, [0.0, 1.0], 2.0)


def test_long_runs_are_thinned_and_keep_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load, "MAX_READINGS", 4)
    kept = LoadReadings()
    for t in range(6):
        kept.add(said(float(t)))
    assert [row.t_s for row in kept.rows] == [0.0, 2.0, 4.0, 5.0]


SPIN = "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"


@pytest.fixture
def spinning() -> "Iterator[subprocess.Popen[str]]":
    """Start a process that uses a whole core, and kill it after the test."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline()
            yield one
        finally:
            one.kill()


@pytest.mark.full
def test_a_process_that_spins_beside_a_run_is_seen(
    spinning: "subprocess.Popen[str]", shell: Shell
) -> None:
    """The test compares counted CPU times: whatever else the machine does, the spinning process
    alone exceeds the bound.
    """
    done = shell(*SMOKE, "--out", shell.out)
    assert done.code == 0, done.err
    (found,) = shell.records()
    (busy,) = [note for note in found["notes"] if note["code"] == "note.busy"]
    assert busy["values"]["taken"]["values"]["host"] == "localhost"
    told = found["hosts"][0]["load"]
    assert told["busy_s"] == sorted(told["busy_s"])
    assert 0 < told["agent_s"][-1] < told["own_s"][-1] < told["busy_s"][-1]
    spun = Path(f"/proc/{spinning.pid}/stat").read_text().rpartition(")")[2].split()
    others_s = told["busy_s"][-1] - told["own_s"][-1]
    assert 0.05 * told["t_s"][-1] < others_s
    assert int(spun[11]) / TICKS > 0.05 * told["t_s"][-1]
