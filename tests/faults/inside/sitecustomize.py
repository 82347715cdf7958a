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
BUDGET_PARTS = {
    "imports": "imports",
    "join": "join",
    "data": "data",
    "weights": "weights",
    "compile": "compile_",
    "warm-up": "warmup_",
}
ENGINE_PHASES = {"pass": "compute", "evaluation": "evaluate"}


def find_role() -> str | None:
    """Return the role of this process: its rank, `agent`, `parent`, or None outside of a run."""
    words = sys.orig_argv
    if "steelyard.run.worker" in words:
        return os.environ.get("RANK")
    return "agent" if "steelyard.run.node" in words else "parent" if "steelyard" in words else None


def act_once() -> None:
    """Write the mark and do FAULT_ACT, unless the mark exists already: a fault happens once."""
    mark = Path(os.environ["FAULT_MARK"])
    if mark.exists():
        return
    unfinished = mark.with_suffix(".half")
    unfinished.write_text(f"{os.getpid()} {os.getppid()}")
    unfinished.rename(mark)
    ACTS[os.environ.get("FAULT_ACT", "wait")]()


def wait_forever() -> None:
    """Sleep until the process is killed."""
    while True:
        time.sleep(0.05)


def wait_for_go() -> None:
    """Sleep until the test creates the file with suffix `.go` beside the mark."""
    while not Path(os.environ["FAULT_MARK"]).with_suffix(".go").exists():
        time.sleep(0.05)


def ignore_sigterm_and_wait() -> None:
    """Ignore SIGTERM, and sleep until the process is killed."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_forever()


def raise_memory_error() -> None:
    """Raise MemoryError, as if host memory were exhausted."""
    raise MemoryError("no more of it")


def raise_device_memory_error() -> None:
    """Raise torch's OutOfMemoryError, as if device memory were exhausted."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def allocate_too_much() -> None:
    """Allocate 1 PiB, which torch's allocator refuses."""
    import torch

    torch.empty(1 << 50, dtype=torch.uint8)


def fill_parameters_with_nan() -> None:
    """Fill all parameters of this rank's models with NaN."""
    import gc

    import torch

    with torch.no_grad():
        for module in [
            candidate for candidate in gc.get_objects() if isinstance(candidate, torch.nn.Module)
        ]:
            for parameter in module.parameters(recurse=False):
                parameter.fill_(float("nan"))


def falsify_all_reduce() -> None:
    """Patch all_reduce so that this rank's part of every sum is wrong by 0.5."""
    import torch.distributed as dist

    real = dist.all_reduce
    dist.all_reduce = lambda tensor, *more, **options: real(tensor.add_(0.5), *more, **options)


def make_disk_full() -> None:
    """Patch the writing of files so that from now on it raises ENOSPC."""
    import errno

    from steelyard import files

    def write(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.write_file = write


def make_self_kill(number: int) -> Callable[[], None]:
    """Return a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


ACTS: dict[str, Callable[[], None]] = {
    "wait": wait_forever,
    "pause": wait_for_go,
    "go_on": lambda: None,
    "stubborn": ignore_sigterm_and_wait,
    "memory": raise_memory_error,
    "device_memory": raise_device_memory_error,
    "allocate": allocate_too_much,
    "nan": fill_parameters_with_nan,
    "wrong_sum": falsify_all_reduce,
    "full_disk": make_disk_full,
    "exit": lambda: os._exit(0),
    "illegal": make_self_kill(4),
    "segfault": make_self_kill(11),
}


def act_in_budget_part(begin: str) -> None:
    """Make the fault happen inside the part of the time budget whose name begins like this."""
    from steelyard.run.measure import Budget

    real = Budget.part

    @contextmanager
    def part(self: Budget, name: str) -> Iterator[None]:
        with real(self, name):
            if name.startswith(begin):
                act_once()
            yield

    Budget.part = part


def act_at_engine_phase(name: str) -> None:
    """Make the fault happen where the engine begins a phase of this name."""
    from steelyard.engine.work import Phase

    real = Phase.__init__

    def patched_init(self: Phase, phase_name: str) -> None:
        real(self, phase_name)
        if phase_name == name:
            act_once()

    Phase.__init__ = patched_init


def act_after_compilation() -> None:
    """Make the fault happen after compilation, while the compiler's processes still live."""
    from steelyard.run.measure import Budget

    real = Budget.part

    @contextmanager
    def part(self: Budget, name: str) -> Iterator[None]:
        with real(self, name):
            yield
            if name.startswith("compile_"):
                act_once()

    Budget.part = part


def act_in_checkpoint() -> None:
    """Make the fault happen inside a checkpoint of which a part is written."""
    from steelyard.engine.work import Phase

    real = Phase.__init__

    def patched_init(self: Phase, phase_name: str) -> None:
        real(self, phase_name)
        if phase_name == "checkpoint":
            writer = sys.modules["steelyard.training.checkpoint_storage"].CheckpointWriter
            write = writer.write_data

            def write_then_act(*arguments: Any) -> Any:
                written = write(*arguments)
                act_once()
                return written

            writer.write_data = write_then_act

    Phase.__init__ = patched_init


def act_at_rank_file() -> None:
    """Make the fault happen when a rank writes its final rank file."""
    from steelyard import files

    real = files.write_file

    def write(path: Path, content: Any, *more: Any, **options: Any) -> None:
        if path.name.startswith("rank-") and b'"status":"done"' in content:
            act_once()
        real(path, content, *more, **options)

    files.write_file = write


def act_at_hello() -> None:
    """Make the fault happen when the agent is about to answer the parent's first message."""
    from steelyard.run.host import Host

    real = Host.make_hello
    Host.make_hello = lambda self: (act_once(), real(self))[1]


def act_in_pass_of_agent() -> None:
    """Make the fault happen when the agent reads its ranks' progress, and they are in the train
    pass or have just left it.
    """
    from steelyard.run.ranks import HostRanks

    real = HostRanks._read_progress

    def progress(self: HostRanks) -> Any:
        reported = real(self)
        if reported.phase in ("train", "prepare after", "after"):
            act_once()
        return reported

    HostRanks._read_progress = progress


def act_at_record() -> None:
    """Make the fault happen when the parent writes the record of a run that has ended."""
    from steelyard.record import record

    real = record.write_record

    def write(table: Any, folder: Path, suffix: str = "") -> Path:
        if not suffix:
            act_once()
        return real(table, folder, suffix)

    record.write_record = write


def install_fault(phase: str) -> None:
    """Patch this process so that the fault happens in a phase."""
    if find_role() == "agent" and phase == "pass":
        act_in_pass_of_agent()
    elif phase in BUDGET_PARTS:
        act_in_budget_part(BUDGET_PARTS[phase])
    elif phase in ENGINE_PHASES:
        act_at_engine_phase(ENGINE_PHASES[phase])
    else:
        others = {
            "compiler": act_after_compilation,
            "checkpoint": act_in_checkpoint,
            "record": act_at_record if find_role() == "parent" else act_at_rank_file,
            "preflight": act_at_hello,
        }
        others[phase]()


if os.environ.get("FAULT_PHASE") and os.environ.get("FAULT_WHO") == find_role():
    install_fault(os.environ["FAULT_PHASE"])
