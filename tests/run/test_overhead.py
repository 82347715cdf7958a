"""Test of what telemetry costs: the CPU time of a real agent beside a real worker that computes all
the time.
"""

from pathlib import Path

import pytest

from fixtures.commands import SMOKE, Shell, faulty_engine

# Share of one core. The documentation promises less than 1 %; test machines are slow and busy.
MOST = 0.05


@pytest.mark.full
def test_the_agent_takes_little_of_a_core(tmp_path: Path) -> None:
    """The engine runs eight steps of 2 s of CPU time; the kernel counts CPU time in hundredths of a
    second.
    """
    shell = Shell(tmp_path, (faulty_engine(tmp_path / "engine"),))
    done = shell(*SMOKE, "--engine", "faulty", "--out", shell.out, FAULTY_STEP_S="2")
    shell.clean()
    assert done.code == 0, done.err
    (found,) = shell.records()
    told = found["hosts"][0]["load"]
    begin_s = min(one["start_s"] for one in found["passes"])
    end_s = max(one["start_s"] + one["wall_s"] for one in found["passes"])
    inside = [place for place, t_s in enumerate(told["t_s"]) if begin_s <= t_s <= end_s]
    first, last = inside[0], inside[-1]
    time_s = told["t_s"][last] - told["t_s"][first]
    used_s = told["agent_s"][last] - told["agent_s"][first]
    print(f"the agent used {used_s:.2f} s of a core in {time_s:.1f} s: {used_s / time_s:.2%}")
    assert len(inside) >= 8
    assert 0 <= used_s / time_s < MOST
    rows = len([t_s for t_s in found["telemetry"][0]["columns"]["t_s"] if begin_s <= t_s <= end_s])
    assert rows > len(inside)  # telemetry was sampled
