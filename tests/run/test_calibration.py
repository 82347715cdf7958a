"""Tests of the processes that time matmuls beside the workers: real ones, with a framework that the
test makes up.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.commands import Shell
from steelyard.run import calibration
from steelyard.run.calibration import HostCalibration
from steelyard.run.messages import (
    CalibrationAnswer,
    CalibrationMessage,
    CalibrationSpec,
    StartMessage,
)
from steelyard.run.pipe_watch import PipeWatcher, SeenLine

pytestmark = pytest.mark.process

# A framework whose device multiplies 1000 FLOPs a call. The variable FAKE says what goes wrong, on
# the device of $FAKE_RANK only where that is set.
FRAMEWORK = """
import os, signal, time
from pathlib import Path
from steelyard.accelerators.events import HostEvent

FAKE = os.environ.get("FAKE", "")
if FAKE == "import":
    raise OSError("no such driver")


class Framework:
    def __init__(self, device, local_rank, clock):
        self.clock = clock
        Path(os.environ["FAKE_MARKS"], str(os.getpid())).write_text(f"{device} {local_rank}")
        if os.environ.get("FAKE_RANK", str(local_rank)) != str(local_rank):
            return
        if FAKE == "raises":
            raise MemoryError("no room\\nfor it")
        if FAKE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAKE == "exits":
            os._exit(7)
        if FAKE == "hangs":
            time.sleep(100)

    def set_precision(self, matmul):
        self.matmul = matmul

    def make_deterministic(self):
        raise RuntimeError("it was asked to be deterministic")

    def prepare_square_matmul(self, precision):
        assert precision == self.matmul == "bf16"
        return (None if FAKE == "program" else (lambda: time.sleep(0.001), 1000))

    def prepare_matmul(self, precision, shape):
        return (lambda: time.sleep(0.001)), shape.flops

    def event(self):
        return HostEvent(self.clock)

    def synchronize(self):
        pass
"""
BATCH = {
    "tokens": 8,
    "logits": 0,
    "layouts": ["nt"],
    "layers": [{"name": "up", "outputs": 4, "inputs": 2, "count": 3}],
    "vocabulary": {"name": "vocabulary", "outputs": 9, "inputs": 2},
}


class Calibrated:
    """A calibration of a host with two devices, whose processes the test leads as an agent does."""

    def __init__(self, shell: Shell, forks: bool = True, workers: int = 2, **fake: str) -> None:
        self.marks = shell.folder / "marks"
        self.marks.mkdir()
        (shell.folder / "fake_framework.py").write_text(FRAMEWORK)
        self.pipes = PipeWatcher(lambda: None)
        self.pipes.start()
        spec = CalibrationSpec(
            framework="fake_framework:Framework", device="a:B", matmul="bf16", forks=forks
        )
        variables = shell.env(**fake, FAKE_MARKS=str(self.marks))
        variables["PYTHONPATH"] = f"{shell.folder}:{variables.get('PYTHONPATH', '')}"
        start = StartMessage(token="t", run={}, world=workers, workers=workers, first_rank=4)
        self.host = HostCalibration(
            spec, start, sys.executable, variables, shell.folder, self.pipes
        )
        self.host.batch = BATCH
        self.host.start()

    def wait(self) -> list[CalibrationMessage]:
        """Wait until the stage is done, and return its messages."""
        end_s = time.monotonic() + 60
        while not self.host.is_done:
            assert time.monotonic() < end_s
            self.take_lines()
        return self.host.end_stage()

    def take_lines(self) -> None:
        """Wait a moment, and take what came from the processes."""
        time.sleep(0.02)
        for seen in self.pipes.take():
            self.host.take_line(seen)

    def measure_before(self) -> list[CalibrationMessage]:
        """Let the workers be ready, and return the messages of the stage before their passes."""
        assert not self.host.begin_stage(False, [None, None])
        assert self.host.begin_stage(True, [None, None])
        assert not self.host.begin_stage(True, [None, None])
        return self.wait()

    def list_users(self) -> list[tuple[int, str]]:
        """Return the process id and arguments of each framework that was constructed."""
        return [(int(path.name), path.read_text()) for path in self.marks.iterdir()]


@pytest.fixture
def calibrate(shell: Shell) -> Iterator[Any]:
    """Return a function that starts the processes of a calibration, which end with the test."""
    made: list[Calibrated] = []

    def start(**options: Any) -> Calibrated:
        made.append(Calibrated(shell, **options))
        return made[-1]

    yield start
    for one in made:
        one.host.close()
        one.pipes.stop()


def test_devices_are_timed_in_processes_that_end(calibrate: Any) -> None:
    calibrated = calibrate()
    arguments = psutil.Process(calibrated.host.pids[0]).cmdline()
    assert arguments[1:4] == ["-P", "-m", "steelyard.run.calibration_worker"]
    assert CalibrationSpec.model_validate_json(arguments[4]) == calibrated.host.spec
    messages = calibrated.measure_before()
    assert [(one.rank, one.stage, one.problem) for one in messages] == [
        (4, "before", None),
        (5, "before", None),
    ]
    assert 0 < messages[0].rates["matmul_flops_per_s"] <= 1e6
    (shape,) = messages[0].rates["matmuls"]
    assert (shape["m"], shape["n"], shape["k"], shape["count"]) == (8, 4, 2, 3)
    assert not messages[0].is_shipped
    (template,) = calibrated.host.pids
    users = calibrated.list_users()
    assert sorted(text for _, text in users) == ["a:B 0", "a:B 1"]
    assert not [pid for pid, _ in users if psutil.pid_exists(pid) or pid == template]
    # the process that waits has used no device, and does nothing
    before_s = psutil.Process(template).cpu_times()
    time.sleep(0.3)
    assert psutil.Process(template).cpu_times()[:2] == before_s[:2]

    assert not calibrated.host.begin_stage(True, [None, None])
    assert not calibrated.host.begin_stage(True, [0, None])
    assert calibrated.host.begin_stage(True, [0, 0])
    assert [(one.rank, one.stage, one.problem) for one in calibrated.wait()] == [
        (4, "after", None),
        (5, "after", None),
    ]
    assert calibrated.host.is_over
    assert not psutil.pid_exists(template)


def test_a_framework_that_must_not_be_forked_gets_new_processes(calibrate: Any) -> None:
    calibrated = calibrate(forks=False)
    first, second = calibrated.host.pids
    assert [one.problem for one in calibrated.measure_before()] == [None, None]
    assert {pid for pid, _ in calibrated.list_users()} == {first, second}
    assert calibrated.host.begin_stage(True, [0, 0])
    messages = calibrated.wait()
    assert [one.problem for one in messages] == [None, None]
    assert messages[0].rates["matmul_cpu_rates"]
    assert {pid for pid, _ in calibrated.list_users()} == set(calibrated.host.pids)
    assert len(calibrated.host.pids) == 4


@pytest.mark.parametrize(
    ("fault", "problem", "forks"),
    [
        ("raises", "MemoryError: no room for it", True),
        ("killed", "its process was ended by SIGKILL", True),
        ("killed", "its process was ended by SIGKILL", False),
        pytest.param("exits", "its process ended with exit code 7", True, marks=pytest.mark.full),
        pytest.param("exits", "its process ended with exit code 7", False, marks=pytest.mark.full),
        ("import", "OSError: no such driver", True),
    ],
)
def test_a_device_that_cannot_be_timed_is_a_problem_of_its_own(
    calibrate: Any, fault: str, problem: str, forks: bool
) -> None:
    calibrated = calibrate(forks=forks, FAKE=fault, FAKE_RANK="1")
    messages = calibrated.measure_before()
    everywhere = fault == "import"
    assert [one.problem for one in messages] == [problem if everywhere else None, problem]
    assert messages[1].rates == {}
    # the other device is timed again after the passes
    assert calibrated.host.is_over == everywhere


def test_a_hanging_device_is_given_up_after_the_limit(
    calibrate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = calibrate(FAKE="hangs", FAKE_RANK="0")
    assert calibrated.host.begin_stage(True, [None, None])
    deadline_s = time.monotonic() + 60
    while 1 not in calibrated.host._answers or len(calibrated.list_users()) < 2:
        assert time.monotonic() < deadline_s
        calibrated.take_lines()
    assert not calibrated.host.is_done
    monkeypatch.setattr(calibration, "LIMIT_S", 0.5)
    messages = calibrated.wait()
    assert [one.problem for one in messages] == ["its process took longer than 0.5 s", None]
    # neither the process that was forked nor the one that forked it is left
    pids = [*calibrated.host.pids, *(pid for pid, _ in calibrated.list_users())]
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_is_killed_between_the_stages_is_a_problem_after(calibrate: Any) -> None:
    calibrated = calibrate()
    calibrated.measure_before()
    os.kill(calibrated.host.pids[0], signal.SIGKILL)
    assert calibrated.host.begin_stage(True, [0, 0])
    problems = [one.problem for one in calibrated.wait()]
    assert problems == ["its process was ended by SIGKILL"] * 2


def test_a_process_that_cannot_be_started_after_the_passes_is_a_problem(
    calibrate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = calibrate(forks=False, workers=1)
    calibrated.measure_before()
    while not all(one.ended for one in calibrated.host._processes.values()):
        calibrated.take_lines()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert calibrated.host.begin_stage(True, [0])
    (message,) = calibrated.wait()
    assert message.problem == "its process could not be started: Cannot allocate memory"


def test_nothing_is_timed_after_workers_that_failed(calibrate: Any) -> None:
    calibrated = calibrate()
    calibrated.measure_before()
    assert not calibrated.host.begin_stage(True, [0, 1])
    assert calibrated.host.is_over


def test_nothing_is_timed_for_workers_that_end_before_they_are_ready(calibrate: Any) -> None:
    calibrated = calibrate()
    assert not calibrated.host.begin_stage(True, [1, 1])
    assert calibrated.host.is_over


def test_a_device_that_a_program_drives_has_no_rates_and_no_second_stage(calibrate: Any) -> None:
    calibrated = calibrate(FAKE="program", workers=1)
    (message,) = calibrated.measure_before()
    assert (message.problem, message.rates["matmul_flops_per_s"]) == (None, None)
    assert calibrated.host.is_over


def test_processes_end_with_their_agent(calibrate: Any) -> None:
    calibrated = calibrate()
    calibrated.measure_before()
    calibrated.host.close()
    assert not psutil.pid_exists(calibrated.host.pids[0])


AGENT = """
import os, signal, sys, time
from pathlib import Path
from steelyard.run.calibration import HostCalibration
from steelyard.run.messages import CalibrationSpec, StartMessage
from steelyard.run.pipe_watch import PipeWatcher

folder = Path(sys.argv[1])
spec = CalibrationSpec(framework="fake_framework:Framework", device=None, matmul="bf16", forks=True)
start = StartMessage(token="t", run={}, world=2, workers=2)
host = HostCalibration(spec, start, sys.executable, os.environ, folder, PipeWatcher(lambda: None))
host.start()
host.begin_stage(True, [None, None])
while len(list((folder / "marks").iterdir())) < 2:
    time.sleep(0.02)
(folder / "pid").write_text(str(host.pids[0]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_that_hang_end_with_an_agent_that_is_killed(shell: Shell) -> None:
    (shell.folder / "marks").mkdir()
    (shell.folder / "fake_framework.py").write_text(FRAMEWORK)
    variables = shell.env(FAKE="hangs", FAKE_MARKS=str(shell.folder / "marks"))
    variables["PYTHONPATH"] = f"{shell.folder}:{variables.get('PYTHONPATH', '')}"
    agent = [sys.executable, "-c", AGENT, str(shell.folder)]
    assert subprocess.run(agent, env=variables, timeout=60, check=False).returncode == -9
    pids = [int(path.name) for path in (shell.folder / "marks").iterdir()]
    pids.append(int((shell.folder / "pid").read_text()))
    end_s = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_lines_that_are_no_answer_are_ignored(calibrate: Any) -> None:
    calibrated = calibrate()
    assert calibrated.host.begin_stage(True, [None, None])
    late = CalibrationAnswer(local_rank=0, stage="after", rates={"matmul_flops_per_s": 9.0})
    foreign = CalibrationAnswer(local_rank=2, stage="before", rates={"matmul_flops_per_s": 9.0})
    for line in (b"", b"{}", late.model_dump_json().encode(), foreign.model_dump_json().encode()):
        calibrated.host.take_line(SeenLine(-1, line, 0.0, 0.0))
    assert [one.rates["matmul_flops_per_s"] < 2e6 for one in calibrated.wait()] == [True, True]


def test_shipped_classes_are_told_from_those_of_other_packages() -> None:
    ours = "steelyard.engines.torch.framework:TorchFramework"
    for framework, device, shipped in (
        (ours, "steelyard.accelerators.cpu_torch:CpuTorchDevice", True),
        (ours, None, True),
        (ours, "steelyard_chip.device:Chip", False),
        ("steelyardish:Framework", None, False),
    ):
        spec = CalibrationSpec(framework=framework, device=device, matmul="fp32")
        assert spec.is_shipped is shipped


def test_a_run_has_rates_from_both_stages_and_counts_them_as_its_own(
    smoke: dict[str, Path],
) -> None:
    document = json.loads(smoke["closed"].read_text())
    (rank,) = document["ranks"]
    assert rank["calibration"] == {"matmuls": "process"}
    assert rank["matmul_flops_per_s"] > 0
    assert rank["matmuls"]
    assert set(rank["matmul_cpu_rates"]) == {"before", "after"}
    assert "matmul_flops_per_s_after" not in rank
    assert {"calibrate", "calibrate_after"} <= set(document["budget"])
    assert {check["name"]: check["ok"] for check in document["checks"]}["calibrated"] or not (
        document["hosts"][0]["state"].get("core_bound")
    )
    load = document["hosts"][0]["load"]
    assert load["own_s"] == sorted(load["own_s"])
