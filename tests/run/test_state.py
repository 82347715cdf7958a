"""Tests of the state of a host, read from fake /proc and /sys trees, and of the command `check` on
this machine.
"""

import json
import socket
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from run.test_cpu_load import write_files
from steelyard import accelerators
from steelyard.accelerators import nvml
from steelyard.errors import RequestError
from steelyard.run import cpu_load, host, machine_inspection

CPU_FOLDER = "sys/devices/system/cpu"


def write_complete_host(root: Path) -> None:
    """Write the files of a host with all values that are read."""
    write_files(
        root,
        **{
            "proc/loadavg": "30.25 12.00 4.00 3/133 999\n",
            "proc/meminfo": (
                "MemTotal:  1000 kB\nMemAvailable: 600 kB\nSwapTotal: 80 kB\nSwapFree: 20"
                " kB\nHuge: x\n"
            ),
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/cpu.max": "150000 100000\n",
            f"{CPU_FOLDER}/online": "0-3,8\n",
            f"{CPU_FOLDER}/cpufreq/policy0/scaling_governor": "performance\n",
            f"{CPU_FOLDER}/cpufreq/policy4/scaling_governor": "powersave\n",
            "sys/devices/system/node/online": "0-1\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        },
    )


def test_state_of_a_complete_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_complete_host(tmp_path)
    monkeypatch.setattr(cpu_load, "read_allowed_cores", lambda: frozenset({0, 1}))
    state = host.read_host_state(accelerators.CPU, accelerators.CPU.find(), tmp_path)
    assert state.model_dump() == {
        "load_1m": 30.25,
        "cores": 5,
        "allowed": 2,
        "quota": 1.5,
        "memory_bytes": 1000 << 10,
        "available_bytes": 600 << 10,
        "swap_bytes": 80 << 10,
        "swap_used_bytes": 60 << 10,
        "governors": ["performance", "powersave"],
        "clock_source": "tsc",
        "numa_nodes": 2,
        "devices": [],
    }


def test_governors_of_older_kernels(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        **{
            f"{CPU_FOLDER}/cpu0/cpufreq/scaling_governor": "ondemand\n",
            f"{CPU_FOLDER}/cpu11/cpufreq/scaling_governor": "ondemand",
        },
    )
    assert host.read_host_state(accelerators.CPU, [], tmp_path).governors == ["ondemand"]


@pytest.mark.parametrize("text", ["", "what ever\n", "nan 1", "0-x,,"])
def test_state_of_a_host_with_unreadable_files(text: str, tmp_path: Path) -> None:
    for name in (
        "proc/loadavg",
        "proc/meminfo",
        f"{CPU_FOLDER}/online",
        "sys/devices/system/node/online",
    ):
        write_files(tmp_path, **{name: text})
    state = host.read_host_state(accelerators.CPU, [], tmp_path).model_dump()
    assert set(state) == {"cores", "allowed", "devices"}


def test_numa_node_of_a_pci_device(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        **{
            "sys/bus/pci/devices/0001:3b:00.0/numa_node": "3\n",
            "sys/bus/pci/devices/0000:5e:00.0/numa_node": "-1\n",
        },
    )
    assert nvml.read_numa_node("00000001:3B:00.0", tmp_path) == 3
    assert nvml.read_numa_node("00000000:5E:00.0", tmp_path) is None
    assert nvml.read_numa_node("00000000:FF:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("__version__ = '2.1'\ncuda = \"13.0\"\n", "13.0"),
        ("cuda: Optional[str] = None\n", None),
        ("", None),
    ],
)
def test_cuda_version_that_torch_was_built_for(
    text: str, build: str | None, tmp_path: Path
) -> None:
    (tmp_path / "version.py").write_text(text)
    assert nvml.read_torch_cuda_version(tmp_path) == build
    assert nvml.read_torch_cuda_version(tmp_path / "nowhere") is None


def test_free_disk_space_of_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    free_bytes = machine_inspection.measure_free_bytes(tmp_path / "records" / "of" / "today")
    assert free_bytes is not None
    assert free_bytes > 0


def test_a_driver_that_does_not_answer_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find() -> list[object]:
        raise RequestError("NVML: Unknown Error")

    row = accelerators.Accelerator("broken", find, lambda machine: [], {})  # type: ignore[arg-type]
    monkeypatch.setattr(
        accelerators, "load_accelerators", lambda: {"broken": row, "cpu": accelerators.CPU}
    )
    monkeypatch.setattr(machine_inspection, "WATCH_S", 0.0)
    for requested in (None, "broken"):
        machine = machine_inspection.inspect_machine(requested, tmp_path)
        assert (machine.accelerator, machine.problem, machine.devices) == (
            "broken",
            "NVML: Unknown Error",
            (),
        )


def test_check_command(shell: Shell) -> None:
    """This machine may be busy and then not fit to measure, but for no other reason."""
    result = shell.run_in_process("check", "--accelerator", "cpu", "--json")
    answer = json.loads(result.out)
    assert result.err == ""
    assert set(answer) == {"fit", "accelerator", "findings"}
    bad = [row["name"] for row in answer["findings"] if row["level"] == "bad"]
    assert (result.code, answer["fit"]) == ((1, False) if bad else (0, True))
    rows = {row["name"]: row for row in answer["findings"]}
    assert {
        "driver",
        "devices",
        "host load",
        "cores",
        "NUMA nodes",
        "CPU governor",
        "swap",
        "AMX",
        "clock source",
    } <= set(rows)
    assert set(bad) <= {
        "host load",
        "free memory",
        "free disk for records",
        "free disk for temporary files",
    }
    assert rows["devices"]["found"].startswith("1 cpu: ")
    result = shell.run_in_process("check", "--accelerator", "nothing")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(golden("error-accelerator-nothing-is-not-known"))


def test_a_machine_without_such_a_device_is_not_fit(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = shell.run_in_process("check", "--accelerator", "cuda")
    assert (result.code, result.err) == (1, "")
    line = next(line for line in result.out.splitlines() if " devices " in line)
    assert line.split() == ["bad", "devices", "no", "cuda", "device"]
    assert result.out.splitlines()[-1].startswith("not fit to measure (")


def test_a_machine_with_a_hidden_boot_id_is_identified_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert host._identify_machine() == socket.gethostname()
