"""The part that every rank's process has: its rank file, progress messages and signals.

`run_rank_process` carries out a `RankProcess` and writes its rank file whatever happens. Used by
the worker of a case (run/worker.py) and by the worker of `steelyard spec` (run/ceilings_worker.py),
in the process that the node agent started.
"""

import faulthandler
import os
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from steelyard import files
from steelyard.engine.framework import Framework
from steelyard.errors import ExchangeError, RequestError, is_out_of_memory
from steelyard.run import messages, processes
from steelyard.run.clock import now, read_all_clocks
from steelyard.run.failure import DISK_FULL
from steelyard.run.measure import Budget
from steelyard.run.messages import EVENTS_VARIABLE, HostSpec, WorkerEvent, WorkerProgress
from steelyard.run.worker_files import RankFile, RankStatus
from steelyard.schema import FrozenModel

PROGRESS_S = 0.1
CHILDREN_S = 1.0  # for a compiler to delete its temporary files


def run_rank_process(make_process: Callable[[int], "RankProcess"], folder: Path) -> NoReturn:
    """Create the rank's process object with `make_process(rank)` for RANK, run it, write its final
    rank file into `folder`, which is shared with the agent, and exit this process without shutting
    libraries down.

    Exit code 0 if it is done, else 1; 74 if no rank file or stack file can be written because the
    disk is full; 3, after ending all descendants, when stdin is closed. An error goes into the rank
    file as status and text and, unless it is a RequestError, to stderr. SIGTERM writes the rank
    file as `ended`; SIGUSR1 writes all stack traces. A rank that is done leaves the process group.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        # read by the agent if the run hangs
        stacks = (folder / messages.format_stack_file_name(rank)).open("w")
    except OSError as failure:
        _exit_without_result(failure)
    processes.wake_with_parent()
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    agent_spoke = threading.Event()
    threading.Thread(target=_follow_agent, args=(agent_spoke,), daemon=True).start()
    worker = make_process(rank)
    worker.agent_spoke = agent_spoke
    signal.signal(signal.SIGTERM, worker.handle_termination)
    status: RankStatus = "done"
    error = None
    try:
        worker.run()
    except RequestError as failure:
        status, error = "request", str(failure)
    except Exception as failure:  # noqa: BLE001  whatever it was goes into the rank file, and on to stderr
        status, error = (
            _classify_error(failure),
            " ".join("".join(traceback.format_exception_only(failure)).split()),
        )
        traceback.print_exc()
    try:
        status = worker.write_final_rank_file(status, error)
    except OSError as failure:
        _exit_without_result(failure)
    if status == "done" and worker.framework is not None:
        worker.framework.leave()
    # The results are written: libraries are not shut down, because some of them abort in it now and
    # then.
    os._exit(0 if status == "done" else 1)


def _exit_without_result(failure: OSError) -> NoReturn:
    """Print the traceback of the current exception to stderr and exit the process at once, where no
    rank file can be written: code 74 if `failure` is a full disk, else 1.
    """
    traceback.print_exc()
    os._exit(DISK_FULL if failure.errno in files.DISK_FULL_ERRNOS else 1)


def _classify_error(failure: BaseException) -> RankStatus:
    """Return the status for the rank file that names an error: `out_of_memory` (host or device),
    `disk_full`, `network` for an ExchangeError, else `raised`. A RequestError is handled by the
    caller.
    """
    if is_out_of_memory(failure):
        return "out_of_memory"
    if isinstance(failure, OSError) and failure.errno in files.DISK_FULL_ERRNOS:
        return "disk_full"
    return "network" if isinstance(failure, ExchangeError) else "raised"


def _follow_agent(agent_spoke: threading.Event) -> None:
    """Wait for the agent on stdin: set `agent_spoke` when it writes something. When stdin is
    closed, which means that the agent is gone, end all descendants of this process (SIGTERM,
    SIGKILL after `CHILDREN_S`) and exit at once with code 3. Runs in a thread; no rank file is
    written.
    """
    while os.read(0, 1 << 10):
        agent_spoke.set()
    processes.end_processes(lambda: processes.find_descendants(os.getpid()), CHILDREN_S)
    os._exit(3)


class EventPipe:
    """The pipe through which this process sends events to its agent: `send` writes one. It is the
    one of the variable `EVENTS_VARIABLE`; without it nothing is sent.
    """

    def __init__(self) -> None:
        """Take the pipe's file descriptor from the environment, in which it does not stay: what
        this process starts does not inherit the pipe.
        """
        number = os.environ.pop(EVENTS_VARIABLE, None)
        self._fd = None if number is None else int(number)
        self._identity: tuple[int, int] | None = None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)
            self._identity = _identify_file(self._fd)

    @property
    def has_agent(self) -> bool:
        """Whether there is a pipe, and so an agent that reads it."""
        return self._fd is not None

    def send(self, event: WorkerEvent) -> None:
        """Write an event to the agent. Nothing is written, and nothing raised, if there is no pipe
        or something in this process has closed it, even if another file has its number now.
        """
        with suppress(OSError):
            if self._fd is not None and _identify_file(self._fd) == self._identity:
                os.write(self._fd, event.model_dump_json().encode() + b"\n")


def _identify_file(fd: int) -> tuple[int, int]:
    """Return device and inode of an open file; raise OSError if it is not open."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class RankProcess(ABC):
    """The common part of all workers, one per rank: `rank_file`, which grows in memory and is
    written by `write_rank_file` (repeatedly) and `write_final_rank_file`; `budget`, wall seconds by
    named part; `write_progress`, on rank 0; and `events`, the pipe to the agent. Subclasses
    implement `run` and set `framework`
    (None before) once it is loaded, by which `run_rank_process` leaves the process group.

    `rank`, `world_size` and `local_rank` are this process's; `host` is the node agent's part of the
    spec (shared folder, start time, rendezvous).
    """

    def __init__(self, rank: int, accelerator: str, host: HostSpec) -> None:
        """Read world size and local rank from WORLD_SIZE and LOCAL_RANK (default: the only rank),
        start the budget and read all clocks, and begin a rank file with status `running`, which is
        not written yet.
        """
        self.rank, self.host = rank, host
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.budget = Budget()
        self.events = EventPipe()
        self.agent_spoke = threading.Event()  # set when the agent has written to stdin
        self.framework: Framework | None = None
        device = f"{accelerator}:{self.local_rank}"
        self.rank_file = RankFile(
            rank=rank, device=device, status="running", error=None, ended_s=0.0, budget={}
        )
        self._progress_written_s = 0.0
        self._clocks = read_all_clocks()

    @abstractmethod
    def run(self) -> None:
        """Do the work of this rank; results go into the rank file. A raised error becomes its
        status.
        """

    def _update_rank_file(self, **facts: Any) -> None:
        """Replace these fields of the rank file in memory; nothing is written."""
        self.rank_file = self.rank_file.model_copy(update=facts)

    def write_progress(self, phase: str, done: int, total: int) -> None:
        """Write the progress file into the shared folder, on rank 0 alone: if `done` is 0 or
        `total`, else at most every `PROGRESS_S` seconds; other calls do nothing. Raises OSError if
        it cannot be written.
        """
        now_s = now()
        if self.rank == 0 and (done in (0, total) or now_s - self._progress_written_s > PROGRESS_S):
            self._progress_written_s = now_s
            self._replace_file(
                messages.PROGRESS_FILE, WorkerProgress(phase=phase, done=done, total=total)
            )

    @contextmanager
    def _time_and_report(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block as part `name` of this rank's budget, and report it at
        its start as a phase of progress, with blanks for underscores; RuntimeError inside another
        part.
        """
        self.write_progress(name.replace("_", " "), 0, 0)
        with self.budget.part(name):
            yield

    def write_rank_file(self, status: RankStatus, error: str | None) -> None:
        """Set status, error, `ended_s` (seconds since the start of the run), budget and clocks in
        this rank's file, and write it as rank-N.json into the folder that is shared with the agent,
        replacing the one before. The budget is the wall seconds so far by named part, the clocks
        are the seconds that each clock of the host (monotonic, raw, boottime, uptime) has advanced
        since this process began. Raises OSError if it cannot be written, ValueError if a value has
        no form in JSON (NaN becomes null).
        """
        clocks = {
            name: at - self._clocks[name]
            for name, at in read_all_clocks().items()
            if name in self._clocks
        }
        self._update_rank_file(
            status=status,
            error=error,
            ended_s=now() - self.host.origin_s,
            budget=self.budget.parts(),
            clocks=clocks,
        )
        self._replace_file(messages.format_rank_file_name(self.rank), self.rank_file)

    def write_final_rank_file(self, status: RankStatus, error: str | None) -> RankStatus:
        """Write the final rank file of this rank and return its status.

        If what an engine or a plug-in reported cannot be written as JSON, print the traceback, drop
        all results, write a rank file with status `raised` and `error` (None: that it cannot be
        written), and return `raised`. OSError is passed on.
        """
        try:
            self.write_rank_file(status, error)
        except ValueError as failure:  # PydanticSerializationError is one
            traceback.print_exc()
            self.rank_file = RankFile(
                rank=self.rank,
                device=self.rank_file.device,
                status="raised",
                error=None,
                ended_s=0.0,
                budget={},
            )
            status = "raised"
            self.write_rank_file(
                status, error or f"its result cannot be written as JSON: {failure}"
            )
        return status

    def _replace_file(self, name: str, content: FrozenModel) -> None:
        """Write a model as JSON into the folder that is shared with the agent, so that readers see
        the old or the new content, never a part; it is not synced to disk. Raises OSError if it
        cannot be written.
        """
        files.write_file(
            self.host.folder / name, content.model_dump_json(by_alias=True).encode(), durable=False
        )

    def handle_termination(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: write the rank file with status `ended`, restore the default handler, and
        send the same signal to this process, which dies by it.
        """
        self.write_rank_file("ended", None)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
