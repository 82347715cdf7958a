"""A rank as a process: one file out, whatever happens in between. It ends when its stdin is closed: then its agent is gone."""

import faulthandler
import os
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from steelyard import files
from steelyard.engine.framework import Framework
from steelyard.errors import ExchangeError, RequestError, lacks_memory
from steelyard.run import boundary, processes
from steelyard.run.boundary import DISK_FULL, Progress, RankFile, RankStatus
from steelyard.run.clock import every, now
from steelyard.run.measure import Budget
from steelyard.schema import Frozen

PROGRESS_S = 0.1
CHILDREN_S = 1.0  # for a compiler to take its temporary files away


def serve(make: Callable[[int], "RankProcess"], place: Path) -> NoReturn:
    """Carry out what a rank is to do, and end with it. `place` is the folder that it shares with its agent."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        stacks = (place / boundary.stack_name(rank)).open("w")  # for an agent that wants to know where this hangs
    except OSError as failure:
        _end_without_result(failure)
    processes.wake_with_parent()
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    threading.Thread(target=_end_with_agent, daemon=True).start()
    worker = make(rank)
    signal.signal(signal.SIGTERM, worker.ended)
    status: RankStatus = "done"
    error = None
    try:
        worker.run()
    except RequestError as failure:
        status, error = "request", str(failure)
    except Exception as failure:  # noqa: BLE001  whatever it was goes into the rank file, and on to stderr
        status, error = _kind(failure), " ".join("".join(traceback.format_exception_only(failure)).split())
        traceback.print_exc()
    try:
        status = worker.leave(status, error)
    except OSError as failure:
        _end_without_result(failure)
    if status == "done" and worker.framework is not None:
        worker.framework.leave()
    # Its work is done and told: what libraries do while they are taken down, and now and then abort in, is no part of a run.
    os._exit(0 if status == "done" else 1)


def _end_without_result(failure: OSError) -> NoReturn:
    """Where nothing can be written, the exit code says what there is to say."""
    traceback.print_exc()
    os._exit(DISK_FULL if failure.errno in files.FULL else 1)


def _kind(failure: BaseException) -> RankStatus:
    if lacks_memory(failure):
        return "out_of_memory"
    if isinstance(failure, OSError) and failure.errno in files.FULL:
        return "disk_full"
    return "network" if isinstance(failure, ExchangeError) else "raised"


def _end_with_agent() -> None:
    """A worker outlives nobody: without its agent there is no one to tell. What it started ends with it."""
    while os.read(0, 1 << 10):
        pass
    processes.end(lambda: processes.children(os.getpid()), CHILDREN_S)
    os._exit(3)


class RankProcess(ABC):
    """What every kind of worker has: its rank file, which grows, and how far it is. Each brings `run`."""

    def __init__(self, rank: int, accelerator: str, place: Path, origin_s: float) -> None:
        self.rank, self.folder, self.origin_s = rank, place, origin_s
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.budget = Budget()
        self.framework: Framework | None = None
        device = f"{accelerator}:{self.local_rank}"
        self.file = RankFile(rank=rank, device=device, status="running", error=None, ended_s=0.0, budget={})
        self._told = 0.0
        self._clocks = every()

    @abstractmethod
    def run(self) -> None: ...

    def _add(self, **facts: Any) -> None:
        self.file = self.file.model_copy(update=facts)

    def tell(self, phase: str, done: int, total: int) -> None:
        """How far this is, for whoever watches: rank 0 alone, and not too often."""
        at = now()
        if self.rank == 0 and (done in (0, total) or at - self._told > PROGRESS_S):
            self._told = at
            self._replace(boundary.PROGRESS, Progress(phase=phase, done=done, total=total))

    def write(self, status: RankStatus, error: str | None) -> None:
        clocks = {name: at - self._clocks[name] for name, at in every().items() if name in self._clocks}
        self._add(status=status, error=error, ended_s=now() - self.origin_s, budget=self.budget.parts(), clocks=clocks)
        self._replace(boundary.rank_name(self.rank), self.file)

    def leave(self, status: RankStatus, error: str | None) -> RankStatus:
        """The last rank file. What an engine or a plug-in said may not fit into one: then it says so, and no more."""
        try:
            self.write(status, error)
        except ValueError as failure:  # PydanticSerializationError is one
            traceback.print_exc()
            self.file = RankFile(rank=self.rank, device=self.file.device, status="raised", error=None, ended_s=0.0, budget={})
            status = "raised"
            self.write(status, error or f"its result cannot be written as JSON: {failure}")
        return status

    def _replace(self, name: str, table: Frozen) -> None:
        """Readers see the old file or the new one, never half of one; none outlives the machine."""
        files.write(self.folder / name, table.model_dump_json(by_alias=True).encode(), durable=False)

    def ended(self, number: int, frame: Any) -> None:
        """Told to end: leave what there is, then go the way the signal says."""
        self.write("ended", None)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
