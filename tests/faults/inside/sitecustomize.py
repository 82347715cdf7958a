"""Faults inside a process of a run. The fault suite puts this folder on PYTHONPATH, so every Python
of a run loads this file.

FAULT_WHO (a rank, `agent` or `parent`) and FAULT_PHASE say where, FAULT_ACT what happens. Just
before, the ids of the process and of its parent are written to the file FAULT_MARK, so that a test
knows when it happens and to which process.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Phase of a fault → beginning of the name of the time budget's part, or name of the engine's phase.
PARTS = {
    "imports": "imports",
    "join": "join",
    "data": "data",
    "weights": "weights",
    "compile": "compile_",
    "warm-up": "warmup_",
}
MARKS = {"pass": "compute", "evaluation": "evaluate"}


def who() -> str | None:
    """Return the role of this process: its rank, `agent`, `parent`, or None outside of a run."""
    words = sys.orig_argv
    if "steelyard.run.worker" in words:
        return os.environ.get("RANK")
    return "agent" if "steelyard.run.node" in words else "parent" if "steelyard" in words else None


def happen() -> None:
    """Write the mark and do FAULT_ACT, unless the mark exists already: a fault happens once."""
    mark = Path(os.environ["FAULT_MARK"])
    if mark.exists():
        return
    half = mark.with_suffix(".half")
    half.write_text(f"{os.getpid()} {os.getppid()}")
    half.rename(mark)
    ACTS[os.environ.get("FAULT_ACT", "wait")]()


def wait() -> None:
    """Sleep until the process is killed."""
    while True:
        time.sleep(0.05)


def pause() -> None:
    """Sleep until the test creates the file with suffix `.go` beside the mark."""
    while not Path(os.environ["FAULT_MARK"]).with_suffix(".go").exists():
        time.sleep(0.05)


def stubborn() -> None:
    """Ignore SIGTERM, and sleep until the process is killed."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()


def memory() -> None:
    """Raise MemoryError, as if host memory were exhausted."""
    raise MemoryError("no more of it")


def device_memory() -> None:
    """Raise torch's OutOfMemoryError, as if device memory were exhausted."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def allocate() -> None:
    """Allocate 1 PiB, which torch's allocator refuses."""
    import torch

    torch.empty(1 << 50, dtype=torch.uint8)


def nan() -> None:
    """Fill all parameters of this rank's models with NaN."""
    import gc

    import torch

    with torch.no_grad():
        for one in [found for found in gc.get_objects() if isinstance(found, torch.nn.Module)]:
            for parameter in one.parameters(recurse=False):
                parameter.fill_(float("nan"))


def wrong_sum() -> None:
    """Patch all_reduce so that this rank's part of every sum is wrong by 0.5."""
    import torch.distributed as dist

    real = dist.all_reduce
    dist.all_reduce = lambda tensor, *more, **options: real(tensor.add_(0.5), *more, **options)


def full_disk() -> None:
    """Patch the writing of files so that from now on it raises ENOSPC."""
    import errno

    from steelyard import files

    def write(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.write_file = write


def die(number: int) -> Callable[[], None]:
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


ACTS: dict[str, Callable[[], None]] = {
    "wait": wait,
    "pause": pause,
    "go_on": lambda: None,
    "stubborn": stubborn,
    "memory": memory,
    "device_memory": device_memory,
    "allocate": allocate,
    "nan": nan,
    "wrong_sum": wrong_sum,
    "full_disk": full_disk,
    "exit": lambda: os._exit(0),
    "illegal": die(4),
    "segfault": die(11),
}


def in_parts(begin: str) -> None:
    """Make the fault happen inside the part of the time budget whose name begins like this."""
    from steelyard.run.measure import Budget

    real = Budget.part

    @contextmanager
    def part(self: Budget, name: str) -> Iterator[None]:
        with real(self, name):
            if name.startswith(begin):
                happen()
            yield

    Budget.part = part


def at_marks(name: str) -> None:
    """Make the fault happen where the engine begins a phase of this name."""
    from steelyard.engine.work import Phase

    real = Phase.__init__

    def made(self: Phase, told: str) -> None:
        real(self, told)
        if told == name:
            happen()

    Phase.__init__ = made


def in_compiler() -> None:
    """Make the fault happen after compilation, while the compiler's processes still live."""
    from steelyard.run.measure import Budget

    real = Budget.part

    @contextmanager
    def part(self: Budget, name: str) -> Iterator[None]:
        with real(self, name):
            yield
            if name.startswith("compile_"):
                happen()

    Budget.part = part


def in_checkpoint() -> None:
    """Make the fault happen inside a checkpoint of which a part is written."""
    from steelyard.engine.work import Phase

    real = Phase.__init__

    def made(self: Phase, told: str) -> None:
        real(self, told)
        if told == "checkpoint":
            writer = sys.modules["steelyard.training.checkpoint_storage"].CheckpointWriter
            write = writer.write_data

            def then(*arguments: Any) -> Any:
                written = write(*arguments)
                happen()
                return written

            writer.write_data = then

    Phase.__init__ = made


def at_rank_file() -> None:
    """Make the fault happen when a rank writes its final rank file."""
    from steelyard import files

    real = files.write_file

    def write(path: Path, content: Any, *more: Any, **options: Any) -> None:
        if path.name.startswith("rank-") and b'"status":"done"' in content:
            happen()
        real(path, content, *more, **options)

    files.write_file = write


def at_hello() -> None:
    """Make the fault happen when the agent is about to answer the parent's first message."""
    from steelyard.run.host import Host

    real = Host.make_hello
    Host.make_hello = lambda self: (happen(), real(self))[1]


def in_news() -> None:
    """Make the fault happen when the agent reads its ranks' progress, and they are in the train
    pass or have just left it.
    """
    from steelyard.run.ranks import HostRanks

    real = HostRanks._read_progress

    def progress(self: HostRanks) -> Any:
        said = real(self)
        if said.phase in ("train", "prepare after", "after"):
            happen()
        return said

    HostRanks._read_progress = progress


def at_record() -> None:
    """Make the fault happen when the parent writes the record of a run that has ended."""
    from steelyard.record import record

    real = record.write_record

    def write(table: Any, folder: Path, end: str = "") -> Path:
        if not end:
            happen()
        return real(table, folder, end)

    record.write_record = write


def install(phase: str) -> None:
    """Patch this process so that the fault happens in a phase."""
    if who() == "agent" and phase == "pass":
        in_news()
    elif phase in PARTS:
        in_parts(PARTS[phase])
    elif phase in MARKS:
        at_marks(MARKS[phase])
    else:
        others = {
            "compiler": in_compiler,
            "checkpoint": in_checkpoint,
            "record": at_record if who() == "parent" else at_rank_file,
            "preflight": at_hello,
        }
        others[phase]()


if os.environ.get("FAULT_PHASE") and os.environ.get("FAULT_WHO") == who():
    install(os.environ["FAULT_PHASE"])
