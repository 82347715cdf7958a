"""Start and watch the processes that time matmuls on the devices of one host, for its node agent.

They run run/calibration_worker.py, which imports no engine. Each stage, `before` the engine's
import and `after` the last pass, is one order to them and one answer for every local rank; a
process that fails, hangs or is killed gives a problem in place of rates, and the run goes on.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.run.clock import now
from steelyard.run.failure import format_signal
from steelyard.run.messages import (
    EVENTS_VARIABLE,
    CalibrationAnswer,
    CalibrationMessage,
    CalibrationOrder,
    CalibrationSpec,
    CalibrationStage,
    StartMessage,
)
from steelyard.run.pipe_watch import PipeWatcher, SeenLine

MODULE = "steelyard.run.calibration_worker"
# The longest that a stage may take, from its order: a second on an idle machine, more where a
# driver or a disk is slow.
LIMIT_S = 120.0
EXIT_S = 1.0  # for a process to end after its last answer
TAIL_BYTES = 500
# torch imports the packages of other devices by their entry points, which any package may have
ALONE_VARIABLES = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
FIRST_SOURCE = -1  # of their pipes; those of workers are their ranks


@dataclass
class CalibrationProcess:
    """A process that times matmuls for some `local_ranks`: its `process`, and the file that has its
    output.
    """

    process: "subprocess.Popen[bytes]"
    local_ranks: tuple[int, ...]
    output: Path
    ended: bool = False


@dataclass
class HostCalibration:
    """The processes of this host that time matmuls, as its node agent leads them: `start` starts
    them, `begin_stage` begins the next stage when its time has come, `take_line` takes what came
    through one of their pipes, `is_done` says whether the stage has ended, and `end_stage` returns
    messages with its rates. `is_over`: no stage is left; `close` lets the processes end.

    `stage` is being timed now (None: none is), `batch` are the matmuls of the case (None: unknown),
    `pids` the processes. `start_message` is the parent's, `variables` the environment of workers
    without their rank, `folder` the run's private one, where the output of the processes goes.
    """

    spec: CalibrationSpec
    start_message: StartMessage
    python: str
    variables: Mapping[str, str]
    folder: Path
    pipes: PipeWatcher
    clock: Clock = now
    batch: dict[str, Any] | None = None
    stage: CalibrationStage | None = None
    pids: list[int] = field(default_factory=list)
    _next_stage: CalibrationStage | None = "before"
    _processes: dict[int, CalibrationProcess] = field(default_factory=dict)  # by source
    _answers: dict[int, CalibrationAnswer] = field(default_factory=dict)  # by local rank
    _begin_s: float = 0.0
    _rates: dict[int, float] = field(default_factory=dict)  # of the square matmul before
    _start_problem: str | None = None  # why a process could not be started after the passes

    def __post_init__(self) -> None:
        """Fork nowhere but on Linux: libraries of other systems do not work in a forked process."""
        self.spec = self.spec.model_copy(
            update={"forks": self.spec.forks and sys.platform == "linux"}
        )

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The local ranks whose devices are timed: those of all workers of this host."""
        return tuple(range(self.start_message.workers))

    @property
    def is_over(self) -> bool:
        """Whether no stage is being timed, and none is left."""
        return self.stage is None and self._next_stage is None

    def start(self) -> None:
        """Start the processes, each in a session of its own: one for all local ranks, or one each
        if the framework must not be forked. They import the framework and wait for an order.
        Raises OSError if one cannot be started.
        """
        each = [(rank,) for rank in self.local_ranks]
        for local_ranks in [self.local_ranks] if self.spec.forks else each:
            self._start_process(local_ranks)

    def _start_process(self, local_ranks: tuple[int, ...]) -> None:
        """Start the process of these local ranks, and watch the pipe of its answers. Raises OSError
        if it cannot be started.
        """
        source = FIRST_SOURCE - len(self.pids)
        output = self.folder / f"calibration{source}.txt"
        answers_fd, answers_end = os.pipe()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(self.python, "-P", "-m", MODULE, self.spec.model_dump_json()),
                    ",".join(map(str, local_ranks)),
                ],
                stdin=subprocess.PIPE,  # closes when this agent dies, however it does
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **self.variables,
                    **(ALONE_VARIABLES if self.spec.is_shipped else {}),
                    EVENTS_VARIABLE: str(answers_end),
                },
                start_new_session=True,
                pass_fds=[answers_end],
            )
        os.close(answers_end)
        self.pipes.add(source, answers_fd)
        self.pids.append(process.pid)
        self._processes[source] = CalibrationProcess(process, local_ranks, output)

    def begin_stage(self, are_ready: bool, exit_codes: list[int | None]) -> bool:
        """Begin the next stage if its time has come, and return whether it did: `before` when all
        workers are ready (`are_ready`), `after` when all have exited with code 0. If workers have
        exited in another way, no stage is left.
        """
        have_exited = None not in exit_codes
        if self.stage is not None or self._next_stage is None:
            return False
        if self._next_stage == "before" and are_ready and not have_exited:
            self.stage = "before"
        elif have_exited:
            self.stage = "after" if self._next_stage == "after" and not any(exit_codes) else None
            self._next_stage = None
        if self.stage is None:
            return False
        self._answers, self._begin_s = {}, self.clock()
        self._order(CalibrationOrder(stage=self.stage, batch=self.batch, rates=self._rates))
        return True

    def _order(self, order: CalibrationOrder) -> None:
        """Send an order to all processes. Where they have ended after the stage before, as those of
        a framework that must not be forked, new ones are started first; one that cannot be is a
        problem of the stage, because the passes are done.
        """
        if order.stage == "after" and not self.spec.forks:
            try:
                self.start()
            except OSError as error:
                self._start_problem = f"its process could not be started: {error.strerror}"
        for one in self._processes.values():
            if not one.ended and one.process.stdin is not None:
                with suppress(OSError):  # it has ended: the end of its pipe says so
                    one.process.stdin.write(order.model_dump_json().encode() + b"\n")
                    one.process.stdin.flush()

    def take_line(self, seen: SeenLine) -> None:
        """Take a line that came through the pipe of one of these processes, or its end. A line that
        is no answer is ignored.
        """
        if seen.line is None:
            if seen.source in self._processes:  # else of a worker that could not be started
                self._processes[seen.source].ended = True
            return
        with suppress(ValueError):  # a ValidationError is one
            answer = CalibrationAnswer.model_validate_json(seen.line)
            if answer.stage == self.stage and answer.local_rank in self.local_ranks:
                self._answers.setdefault(answer.local_rank, answer)

    @property
    def is_done(self) -> bool:
        """Whether the stage that is being timed has ended: every local rank has its answer, or the
        process that would give it has ended, or the time limit is over.
        """
        is_late = self.clock() - self._begin_s > LIMIT_S
        return self.stage is not None and (
            is_late
            or all(rank in self._answers or self._has_ended(rank) for rank in self.local_ranks)
        )

    def _has_ended(self, local_rank: int) -> bool:
        """Return whether no process is left that can answer for a local rank."""
        return all(one.ended for one in self._processes.values() if local_rank in one.local_ranks)

    def end_stage(self) -> list[CalibrationMessage]:
        """End the stage that is done, and return a message for each local rank, with its rates or a
        problem; processes that have not answered are killed, and after the last stage all end. The
        stage `after` is left only if matmuls have a rate before.
        """
        if self.stage is None:
            return []
        stage, time_s = self.stage, self.clock() - self._begin_s
        answers = [
            self._answers.get(rank) or self._explain_missing(rank, stage)
            for rank in self.local_ranks
        ]
        for answer in answers if stage == "before" else ():
            if isinstance(rate := answer.rates.get("matmul_flops_per_s"), float):
                self._rates[answer.local_rank] = rate
        self.stage = None
        self._next_stage = "after" if stage == "before" and self._rates else None
        if self._next_stage is None:
            self.close()
        return [
            CalibrationMessage(
                token=self.start_message.token,
                rank=self.start_message.first_rank + answer.local_rank,
                stage=stage,
                rates=answer.rates,
                problem=answer.problem,
                is_shipped=self.spec.is_shipped,
                time_s=time_s,
            )
            for answer in answers
        ]

    def _explain_missing(self, local_rank: int, stage: CalibrationStage) -> CalibrationAnswer:
        """Return an answer that says why a local rank has no rates: its process ended, could not be
        started, or took longer than the limit and is killed here.
        """
        one = [one for one in self._processes.values() if local_rank in one.local_ranks][-1]
        if not one.ended:
            one.process.kill()
            problem = f"its process took longer than {LIMIT_S:g} s"
        else:
            problem = self._start_problem or _describe_end(one)
        return CalibrationAnswer(local_rank=local_rank, stage=stage, problem=problem)

    def close(self) -> None:
        """Close the pipes to the processes, on which they exit, and wait up to `EXIT_S` seconds
        until they have.
        """
        end_s = self.clock() + EXIT_S
        for one in self._processes.values():
            if one.process.stdin is not None:
                with suppress(OSError):
                    one.process.stdin.close()
        for one in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, end_s - self.clock()))


def _describe_end(ended: CalibrationProcess) -> str:
    """Return how a process ended, with the last line of its output, if any."""
    with suppress(subprocess.TimeoutExpired):
        ended.process.wait(EXIT_S)
    code = ended.process.returncode
    how = (
        f"was ended by {format_signal(-code)}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    lines = ended.output.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace").split("\n")
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"its process {how}{': ' if last_line else ''}{last_line}"
