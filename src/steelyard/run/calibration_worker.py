"""The process that times matmuls on the devices of a host, before the engine is imported and after
the last pass.

It imports the framework that its spec names and nothing of an engine, so that no engine can change
what it measures. Started by the node agent (run/calibration.py) as `python -m
steelyard.run.calibration_worker SPEC LOCAL_RANKS`; it reads orders from stdin, writes an answer for
each device to the pipe of `EVENTS_VARIABLE`, and ends when stdin is closed.

A process has imported the framework once, and forks for every device and order: what is forked uses
the device, answers and ends, and the process itself never uses one. A framework that must not be
forked gets a process for each device and stage, which ends after its answer.
"""

import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from steelyard import plugins
from steelyard.engine.framework import Framework
from steelyard.plan.matmuls import BatchMatmuls
from steelyard.run import processes
from steelyard.run.calibrate import CalibratedRates, calibrate_matmuls, recalibrate_square_matmul
from steelyard.run.clock import now
from steelyard.run.failure import format_signal
from steelyard.run.messages import (
    EVENTS_VARIABLE,
    CalibrationAnswer,
    CalibrationOrder,
    CalibrationSpec,
)

READ_BYTES = 1 << 16
PROBLEM_CHARS = 500


class OrderReader:
    """Reads the agent's orders from stdin: `read_order` waits for one; `read_more` takes what there
    is, and ends the process if stdin was closed.
    """

    def __init__(self) -> None:
        self._unread = b""

    def read_order(self) -> CalibrationOrder:
        """Wait for the next line of stdin, and return its order."""
        while b"\n" not in self._unread:
            self.read_more()
        line, _, self._unread = self._unread.partition(b"\n")
        return CalibrationOrder.model_validate_json(line)

    def read_more(self) -> None:
        """Read what stdin has, waiting for it; exit the process with code 0 if it was closed: the
        agent needs nothing more, or is gone.
        """
        chunk = os.read(0, READ_BYTES)
        if not chunk:
            os._exit(0)
        self._unread += chunk


class Calibrator:
    """Answers orders for the devices of some local ranks: `answer_orders` does it until there are
    no more.
    """

    def __init__(
        self, spec: CalibrationSpec, local_ranks: list[int], orders: OrderReader, answers_fd: int
    ) -> None:
        """Import the framework that the spec names; what that raises is stored, and is the answer
        to every order.
        """
        self.spec, self.local_ranks = spec, local_ranks
        self._orders, self._answers_fd = orders, answers_fd
        self._make_framework: Callable[..., Framework] | None = None
        self._problem: str | None = None
        try:
            self._make_framework = plugins.load_reference(spec.framework)
        except Exception as error:  # noqa: BLE001  a framework's import may raise anything
            self._problem = _describe_error(error)

    def answer_orders(self) -> NoReturn:
        """Answer every order for all local ranks, and exit the process with code 0: when stdin is
        closed or, if the framework must not be forked, after the first order.
        """
        while True:
            order = self._orders.read_order()
            if not self.spec.forks:
                for local_rank in self.local_ranks:
                    self._send(self._measure(order, local_rank))
                os._exit(0)
            self._answer_by_forks(order)

    def _answer_by_forks(self, order: CalibrationOrder) -> None:
        """Fork a process for every local rank, all at the same time, and send their answers as they
        come; return when all have ended. If stdin is closed meanwhile, kill them and exit.
        """
        own_pid = os.getpid()
        children = {}  # reading end of its pipe → (local rank, process id, what it wrote)
        for local_rank in self.local_ranks:
            reading_end, writing_end = os.pipe()
            with warnings.catch_warnings():
                # that libraries have threads: the framework's row says that they do not matter
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._answer_in_child(order, local_rank, writing_end, own_pid)
            os.close(writing_end)
            children[reading_end] = (local_rank, pid, bytearray())
        while children:
            ready, _, _ = select.select([0, *children], [], [])
            if 0 in ready:
                _exit_with_children(0, [pid for _, pid, _ in children.values()])
            for fd in ready:
                local_rank, pid, text = children[fd]
                chunk = os.read(fd, READ_BYTES)
                text += chunk
                if not chunk:
                    os.close(fd)
                    del children[fd]
                    self._send(_read_answer(order, local_rank, pid, bytes(text)))

    def _answer_in_child(
        self, order: CalibrationOrder, local_rank: int, answer_fd: int, parent_pid: int
    ) -> NoReturn:
        """Measure in this forked process, write the answer and exit with code 0; the kernel kills
        it if its parent, which has the id `parent_pid`, dies.
        """
        processes.die_with_parent(parent_pid)
        os.close(self._answers_fd)
        answer = self._measure(order, local_rank)
        with os.fdopen(answer_fd, "wb") as pipe:
            pipe.write(answer.model_dump_json().encode())
        os._exit(0)

    def _measure(self, order: CalibrationOrder, local_rank: int) -> CalibrationAnswer:
        """Construct the framework on the device of a local rank and time what the order says;
        return the rates or, as the problem, whatever was raised.
        """
        spec, stage = self.spec, order.stage
        if self._make_framework is None:
            return CalibrationAnswer(local_rank=local_rank, stage=stage, problem=self._problem)
        try:
            framework = self._make_framework(spec.device, local_rank, now)
            framework.set_precision(spec.matmul)
            if spec.deterministic:
                framework.make_deterministic()
            rates = _STAGES[stage](framework, spec.matmul, order, local_rank)
        except Exception as error:  # noqa: BLE001  a device may raise anything; the run goes on
            problem = _describe_error(error)
            return CalibrationAnswer(local_rank=local_rank, stage=stage, problem=problem)
        return CalibrationAnswer(
            local_rank=local_rank, stage=stage, rates=rates.model_dump(mode="json")
        )

    def _send(self, answer: CalibrationAnswer) -> None:
        """Write an answer as a line to the agent."""
        unsent = answer.model_dump_json().encode() + b"\n"
        while unsent:
            unsent = unsent[os.write(self._answers_fd, unsent) :]


def _measure_before(
    framework: Framework, precision: str, order: CalibrationOrder, local_rank: int
) -> CalibratedRates:
    """Time the square matmul and those of the order's batch (none: the square one alone)."""
    if order.batch is None:
        return calibrate_matmuls(framework, precision, lambda divisor: ())
    batch = BatchMatmuls.model_validate(order.batch)
    return calibrate_matmuls(framework, precision, batch.list_shapes)


def _measure_after(
    framework: Framework, precision: str, order: CalibrationOrder, local_rank: int
) -> CalibratedRates:
    """Time the square matmul for a short time; without its rate before there is nothing to time."""
    rate = order.rates.get(local_rank)
    return (
        CalibratedRates() if rate is None else recalibrate_square_matmul(framework, precision, rate)
    )


_STAGES: dict[str, Callable[[Framework, str, CalibrationOrder, int], CalibratedRates]] = {
    "before": _measure_before,
    "after": _measure_after,
}


def _read_answer(
    order: CalibrationOrder, local_rank: int, pid: int, text: bytes
) -> CalibrationAnswer:
    """Wait for a forked process to end, and return the answer that it wrote, or one that says how
    it ended without.
    """
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0 and text:
        return CalibrationAnswer.model_validate_json(text)
    problem = (
        f"its process was ended by {format_signal(-status)}"
        if status < 0
        else f"its process ended with exit code {status}"
    )
    return CalibrationAnswer(local_rank=local_rank, stage=order.stage, problem=problem)


def _exit_with_children(fd: int, pids: list[int]) -> None:
    """Kill the processes and exit with code 0 if the file `fd` is at its end; otherwise raise
    RuntimeError, because the agent gives no second order before the first is answered.
    """
    if os.read(fd, READ_BYTES):
        raise RuntimeError("an order came before the last was answered")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _describe_error(error: Exception) -> str:
    """Return an error as one line of at most `PROBLEM_CHARS` characters."""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:PROBLEM_CHARS]


def main() -> None:
    """Answer the agent's orders for the spec (JSON) and the local ranks (with commas between them)
    in the arguments, and exit the process. The kernel kills it if the agent dies.
    """
    arguments: list[Any] = sys.argv[1:]
    processes.die_with_parent(os.getppid())
    answers_fd = int(os.environ.pop(EVENTS_VARIABLE))
    os.set_inheritable(answers_fd, False)
    spec = CalibrationSpec.model_validate_json(arguments[0])
    local_ranks = [int(rank) for rank in arguments[1].split(",")]
    Calibrator(spec, local_ranks, OrderReader(), answers_fd).answer_orders()


if __name__ == "__main__":
    main()
