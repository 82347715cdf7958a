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


def write_files(root: Path, **files: str) -> None:
    """Write text files under a root; keys are paths with slashes."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_proc_stat(root: Path, *cores: tuple[int, ...]) -> None:
    """Write /proc/stat with one line per core: seconds of user, nice, system, idle, iowait, irq,
    softirq, steal, guest and guest_nice.
    """
    lines = [
        f"cpu{n} {' '.join(str(second * TICKS) for second in core)}" for n, core in enumerate(cores)
    ]
    write_files(
        root, **{"proc/stat": "\n".join(["cpu  9 9 9 9", *lines, "intr 5 cpu", "ctxt 7"]) + "\n"}
    )


def write_process(
    root: Path, pid: int, *seconds: int, name: str = "a (b) c", children: tuple[int, ...] = ()
) -> None:
    """Write the stat file of a process with these CPU seconds (user, system, children's user,
    children's system) and its child processes.
    """
    times = " ".join(str(second * TICKS) for second in seconds)
    write_files(
        root, **{f"proc/{pid}/stat": f"{pid} ({name}) S 1 2 3 4 5 6 7 8 9 10 {times} 0 0\n"}
    )
    write_files(root, **{f"proc/{pid}/task/{pid}/children": " ".join(map(str, children))})


def make_reader(root: Path, cores: tuple[int, ...] = (0, 1)) -> CpuLoadReader:
    """Return a load reader of these cores whose agent is process 10 with parent 9."""
    return CpuLoadReader("t", root, cores, agent_pids=(10, 9))


def test_busy_own_and_agent_cpu_time(tmp_path: Path) -> None:
    """Idle time (100), waiting (50), guests (7, which are in user already) and the core that the
    run may not use do not count.
    """
    write_proc_stat(
        tmp_path, (1, 2, 3, 100, 50, 4, 5, 6, 7, 7), (10, 0, 0, 100, 50, 0, 0, 0, 0, 0), (99,) * 10
    )
    write_process(tmp_path, 10, 1, 1, 3, 0)
    write_process(tmp_path, 9, 2, 0, 0, 0)
    write_process(tmp_path, 20, 5, 1, 2, 1, children=(21,))
    write_process(tmp_path, 21, 3, 0, 0, 0, children=(22,))
    write_process(tmp_path, 22, 1, 0, 0, 0)
    write_process(tmp_path, 33, 70, 0, 0, 0)  # a process of somebody else
    load_reader = make_reader(tmp_path)
    load_reader.watch((20,))
    reading = load_reader.read(4.5)
    assert reading == LoadMessage(
        token="t",
        allowed=2,
        quota=None,
        t_s=4.5,
        busy_s=21.0 + 10.0,
        own_s=5.0 + 2.0 + 9.0 + 3.0 + 1.0,
        agent_s=2.0,
        group_s=None,
    )


def test_busy_time_is_none_without_a_usable_proc_stat(tmp_path: Path) -> None:
    assert make_reader(tmp_path).read(0.0).busy_s is None
    write_proc_stat(tmp_path, (1,) * 10)  # core 1 is missing
    assert make_reader(tmp_path).read(0.0).busy_s is None
    write_files(tmp_path, **{"proc/stat": "cpu0 what\ncpu1 ever\n"})
    assert make_reader(tmp_path).read(0.0).busy_s is None


def test_descendants_are_searched_seldom_when_there_are_many_threads(tmp_path: Path) -> None:
    write_proc_stat(tmp_path, (1,) * 10, (1,) * 10)
    write_process(tmp_path, 20, 0, 0, 0, 0)
    for thread in range(cpu_load.FEW_THREADS + 1):
        write_files(tmp_path, **{f"proc/20/task/{1000 + thread}/children": ""})
    load_reader = make_reader(tmp_path)
    load_reader.watch((20,))
    assert load_reader.read(0.0).own_s == 0.0
    write_process(tmp_path, 21, 3, 0, 0, 0)
    write_files(tmp_path, **{"proc/20/task/1000/children": "21"})
    own_times_s = [load_reader.read(0.0).own_s for _ in range(cpu_load.SEARCH_EVERY)]
    assert own_times_s == [0.0] * (cpu_load.SEARCH_EVERY - 1) + [3.0]


def test_cpu_quota_of_cgroups_v2(tmp_path: Path) -> None:
    """The smallest quota from the process's group up to the root holds, and the usage is that of
    the same group.
    """
    cgroup_root = "sys/fs/cgroup"
    write_files(
        tmp_path,
        **{"proc/self/cgroup": "0::/pod/box\n", f"{cgroup_root}/pod/box/cpu.max": "max 100000\n"},
    )
    assert cpu_load.find_tightest_cgroup(tmp_path) is None
    write_files(
        tmp_path,
        **{
            f"{cgroup_root}/pod/cpu.max": "250000 100000\n",
            f"{cgroup_root}/pod/cpu.stat": "usage_usec 3500000\nuser_usec 1\n",
        },
    )
    write_files(tmp_path, **{f"{cgroup_root}/cpu.max": "400000 100000\n"})
    cgroup = cpu_load.find_tightest_cgroup(tmp_path)
    assert cgroup is not None
    assert (cgroup.quota, cgroup.read_usage_s()) == (2.5, 3.5)
    write_proc_stat(tmp_path, (1,) * 10, (1,) * 10)
    reading = make_reader(tmp_path).read(0.0)
    assert (reading.quota, reading.group_s) == (2.5, 3.5)


def test_cpu_quota_of_cgroups_v1(tmp_path: Path) -> None:
    cgroup_root = "sys/fs/cgroup"
    write_files(tmp_path, **{"proc/self/cgroup": "3:cpuset:/box\n2:cpuacct:/box\n1:cpu:/box\n"})
    write_files(
        tmp_path,
        **{
            f"{cgroup_root}/cpu/box/cpu.cfs_quota_us": "-1",
            f"{cgroup_root}/cpu/box/cpu.cfs_period_us": "100000",
        },
    )
    assert cpu_load.find_tightest_cgroup(tmp_path) is None
    write_files(
        tmp_path,
        **{
            f"{cgroup_root}/cpu/box/cpu.cfs_quota_us": "150000\n",
            f"{cgroup_root}/cpuacct/box/cpuacct.usage": "2000000000\n",
        },
    )
    cgroup = cpu_load.find_tightest_cgroup(tmp_path)
    assert cgroup is not None
    assert (cgroup.quota, cgroup.read_usage_s()) == (1.5, 2.0)
    joint = tmp_path / "joint"
    write_files(
        joint,
        **{
            "proc/self/cgroup": "4:cpu,cpuacct:/not/mounted\n",
            f"{cgroup_root}/cpu,cpuacct/cpu.cfs_quota_us": "100000",
        },
    )
    write_files(
        joint,
        **{
            f"{cgroup_root}/cpu,cpuacct/cpu.cfs_period_us": "50000",
            f"{cgroup_root}/cpu,cpuacct/cpuacct.usage": "1000000000",
        },
    )
    cgroup = cpu_load.find_tightest_cgroup(joint)
    assert cgroup is not None
    assert (cgroup.quota, cgroup.read_usage_s()) == (2.0, 1.0)


def test_no_quota_without_a_readable_cgroup(tmp_path: Path) -> None:
    assert cpu_load.find_tightest_cgroup(tmp_path) is None
    write_files(
        tmp_path,
        **{"proc/self/cgroup": "nonsense\n0::/../../etc\n", "sys/fs/cgroup/cpu.max": "ten 0"},
    )
    assert cpu_load.find_tightest_cgroup(tmp_path) is None


def make_load_message(
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


def test_load_counts_from_the_first_reading() -> None:
    readings = LoadReadings()
    assert readings.to_load() is None
    for row in (make_load_message(0.5, 100.0, 10.0), make_load_message(1.5, 103.0, 12.0)):
        readings.add(row)
    host_load = readings.to_load()
    assert host_load is not None
    assert host_load.model_dump() == {
        "allowed": 4,
        "t_s": [0.5, 1.5],
        "busy_s": [0.0, 3.0],
        "own_s": [0.0, 2.0],
        "agent_s": [0.0, 0.2],
    }
    readings.add(make_load_message(2.5, None))
    assert readings.to_load() is None


def test_cpu_quota_is_recorded() -> None:
    readings = LoadReadings(
        [make_load_message(0.0, 0.0, 0.0, 2.0), make_load_message(1.0, 1.0, 1.0, 2.0)]
    )
    host_load = readings.to_load()
    assert host_load is not None
    assert (host_load.quota, host_load.group_s, host_load.cores) == (2.0, [0.0, 1.0], 2.0)


def test_readings_of_long_runs_are_thinned_but_keep_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_load, "MAX_READINGS", 4)
    readings = LoadReadings()
    for t in range(6):
        readings.add(make_load_message(float(t)))
    assert [row.t_s for row in readings.rows] == [0.0, 2.0, 4.0, 5.0]


SPIN = "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"


@pytest.fixture
def spinning() -> "Iterator[subprocess.Popen[str]]":
    """Start a process that uses a whole core, and kill it after the test."""
    with subprocess.Popen(
        [sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True
    ) as process_that_spins:
        try:
            assert process_that_spins.stdout is not None
            assert process_that_spins.stdout.readline()
            yield process_that_spins
        finally:
            process_that_spins.kill()


@pytest.mark.full
def test_process_that_spins_beside_a_run_is_noted(
    spinning: "subprocess.Popen[str]", shell: Shell
) -> None:
    """The test compares counted CPU times: whatever else the machine does, the spinning process
    alone exceeds the bound.
    """
    result = shell(*SMOKE, "--out", shell.out)
    assert result.code == 0, result.err
    (record,) = shell.records()
    (busy,) = [note for note in record["notes"] if note["code"] == "note.busy"]
    assert busy["values"]["taken"]["values"]["host"] == "localhost"
    host_load = record["hosts"][0]["load"]
    assert host_load["busy_s"] == sorted(host_load["busy_s"])
    assert 0 < host_load["agent_s"][-1] < host_load["own_s"][-1] < host_load["busy_s"][-1]
    stat_fields = Path(f"/proc/{spinning.pid}/stat").read_text().rpartition(")")[2].split()
    others_s = host_load["busy_s"][-1] - host_load["own_s"][-1]
    assert 0.05 * host_load["t_s"][-1] < others_s
    assert int(stat_fields[11]) / TICKS > 0.05 * host_load["t_s"][-1]


def test_a_cgroup_whose_statistics_lack_the_usage_has_none(tmp_path: Path) -> None:
    """cpu.stat of cgroup version 1 has only the throttling counters."""
    statistics = tmp_path / "cpu.stat"
    statistics.write_text("nr_periods 3\nnr_throttled 0\n")
    assert cpu_load.CpuCgroup(1.0, statistics).read_usage_s() is None
    statistics.write_text("usage_usec 2500000\nnr_periods 3\n")
    assert cpu_load.CpuCgroup(1.0, statistics).read_usage_s() == 2.5
