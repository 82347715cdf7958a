"""Test of what telemetry costs: the CPU time of a real agent beside a real worker that computes all
the time.
"""

from pathlib import Path

import pytest

from fixtures.commands import SMOKE, Shell, install_faulty_engine

# Share of one core. The documentation promises less than 1 %; test machines are slow and busy.
MAX_CPU_SHARE = 0.05


@pytest.mark.full
def test_the_agent_takes_little_of_a_core(tmp_path: Path) -> None:
    """The engine runs eight steps of 2 s of CPU time; the kernel counts CPU time in hundredths of a
    second.
    """
    shell = Shell(tmp_path, (install_faulty_engine(tmp_path / "engine"),))
    result = shell(*SMOKE, "--engine", "faulty", "--out", shell.out, FAULTY_STEP_S="2")
    shell.clean()
    assert result.code == 0, result.err
    (record,) = shell.records()
    host_load = record["hosts"][0]["load"]
    begin_s = min(window["start_s"] for window in record["passes"])
    end_s = max(window["start_s"] + window["wall_s"] for window in record["passes"])
    positions = [
        position for position, t_s in enumerate(host_load["t_s"]) if begin_s <= t_s <= end_s
    ]
    first, last = positions[0], positions[-1]
    time_s = host_load["t_s"][last] - host_load["t_s"][first]
    agent_cpu_s = host_load["agent_s"][last] - host_load["agent_s"][first]
    print(
        f"the agent used {agent_cpu_s:.2f} s of a core in {time_s:.1f} s:"
        f" {agent_cpu_s / time_s:.2%}"
    )
    assert len(positions) >= 8
    assert 0 <= agent_cpu_s / time_s < MAX_CPU_SHARE
    rows = len([t_s for t_s in record["telemetry"][0]["columns"]["t_s"] if begin_s <= t_s <= end_s])
    assert rows > len(positions)  # telemetry was sampled
