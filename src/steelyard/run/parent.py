"""The parent's side of a run: start the workers, watch them, and make a record of whatever came of it. Imports no framework."""

import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.record import record
from steelyard.record.record import Record
from steelyard.run import assemble, environment, launch
from steelyard.run.assemble import Outcome
from steelyard.run.measure import now, sleep, today
from steelyard.run.ready import Ready
from steelyard.run.spec import PROGRESS, SPEC, RankFile, WorkerSpec
from steelyard.run.spec import Progress as ProgressFile
from steelyard.run.telemetry import Sampler

POLL_S = 0.05
GRACE_S = 5.0
TAIL_BYTES = 4000
MARK = "STEELYARD_RUN"  # in the environment of all that a run starts: how it is found again
PEER_LOST = re.compile(r"gloo|nccl|connection (reset|closed|refused)|TCPStore|DistNetworkError|DistBackendError", re.IGNORECASE)
MEMORY = "SIGKILL is also what the kernel sends when memory runs out"
ILLEGAL = re.compile(r"SIGILL|Signal 4\b|Illegal instruction")
ILLEGAL_HINT = (
    "the CPU does not run an instruction that it advertises, as some virtual machines do not run AMX; set "
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and run again"
)
SCRUBBED = ("NVIDIA_TF32_OVERRIDE",)  # it would run a precision as another
WORKER_ENV = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order NVML counts in
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",  # a worker ends without taking anything down, and what it said must be there
    "PYTHONSAFEPATH": "1",  # python -m would import whatever lies in the current folder
    "TOKENIZERS_PARALLELISM": "true",
}


@dataclass(frozen=True)
class PhaseProgress:
    """What the workers last said, and since when that phase goes on."""

    phase: str
    done: int
    total: int
    elapsed_s: float


Watch = Callable[[PhaseProgress], None]


def run_case(ready: Ready, watch: Watch | None = None) -> tuple[Record, Path]:
    """Run one case and write its record. What only a worker finds wrong with a request raises RequestError."""
    origin_s, created = now(), today()
    request = ready.request
    kept = _checkpoints(ready, created)
    variables = _variables(ready)
    with ExitStack() as undisturbed, _temporary() as name:
        folder = Path(name)
        command = launch.LAUNCHERS[ready.plan.launcher](str(folder / SPEC), ready.plan)
        record.writable(request.out)
        surroundings = environment.parent_side(ready.accelerator, ready.devices, variables)
        (folder / SPEC).write_text(_spec(ready, folder, origin_s, kept).model_dump_json())
        sampler = Sampler(ready.accelerator.sources(ready.devices), os.getpid(), origin_s)
        sampler.start()
        spawned_s = now()
        try:
            outcome = _workers(command, ready, folder, variables, sampler, watch, undisturbed)
        finally:
            series = sampler.stop()
        ended_s = now()
        _raise_request(outcome)
        facts = assemble.RunFacts(
            origin_s=origin_s,
            spawned_s=spawned_s,
            ended_s=ended_s,
            created=created,
            environment=surroundings,
            site=ready.site,
            telemetry=series,
            plan=ready.plan,
            scope=ready.scope,
            resume=ready.resume,
            out=request.out,
            checkpoints=kept if kept and (request.out / kept).is_dir() else None,
        )
        made = assemble.assemble(request.resolved, request.engine, facts, outcome)
        return made, record.write(made, request.out)


def _checkpoints(ready: Ready, created: str) -> str | None:
    """Where this run's checkpoints go, beside its record."""
    case = ready.case
    if case.question.kind != "train" or case.tune.checkpoint_every is None:
        return None
    stamp = re.sub(r"[^0-9T]", "", created.partition(".")[0])
    return f"checkpoints/{stamp}-{case.name}-{secrets.token_hex(4)}"


def _variables(ready: Ready) -> dict[str, str]:
    """The environment of the workers: inherited, then what the accelerator needs, then what the tune says."""
    inherited = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    tune = ready.case.tune
    same = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if tune.deterministic else {}  # what cuBLAS asks for it
    needed = ready.accelerator.environment(ready.case.question.precision.matmul)
    return {**inherited, **WORKER_ENV, **same, **needed, **tune.env}


def _temporary() -> "tempfile.TemporaryDirectory[str]":
    """Where workers and parent meet. That it cannot be removed is no reason to lose a record."""
    try:
        return tempfile.TemporaryDirectory(prefix="steelyard-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RequestError(f"no temporary folder can be made: {error.strerror}; name another with TMPDIR") from error


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """From the end of the workers until the record is there, a second Ctrl-C would only lose it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _spec(ready: Ready, folder: Path, origin_s: float, kept: str | None) -> WorkerSpec:
    request = ready.request

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else path.resolve()

    return WorkerSpec(
        case=ready.case,
        scope=ready.scope,
        passes=ready.passes,
        engine=ready.engine.name,
        plan=ready.plan,
        accelerator=ready.accelerator.name,
        weights=absolute(request.weights),
        data=absolute(request.data),
        tokenizer=absolute(request.tokenizer),
        folder=folder,
        origin_s=origin_s,
        parent_pid=os.getpid(),
        resume=ready.resume.path if ready.resume else None,
        checkpoints=request.out.resolve() / kept if kept else None,
    )


def _workers(
    command: list[str],
    ready: Ready,
    folder: Path,
    variables: dict[str, str],
    sampler: Sampler,
    watch: Watch | None,
    undisturbed: ExitStack,
) -> Outcome:
    """Start the processes and stay with them until none is left."""
    env = {**variables, MARK: str(folder)}
    log = folder / "stderr.log"
    with log.open("wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=env, start_new_session=True)
        try:
            sampler.watch(process.pid)
            code, text = _wait(process, ready, folder, watch)
        except KeyboardInterrupt:
            code, text = "interrupted", f"interrupted by the user{_where(folder)}"
        finally:
            undisturbed.enter_context(_ignoring_interrupts())
            _end(process, str(folder))
    found = [_rank_file(folder / RankFile.name(rank)) for rank in range(ready.plan.devices)]
    ranks = [rank for rank in found if rank is not None]
    tail = _tail(log)
    if code is None:
        code, text = _verdict(ranks, ready.plan, process.returncode, tail)
    return Outcome(code, text, process.returncode, tail, ranks)


def _where(folder: Path) -> str:
    said = _progress(folder)
    return f", in phase {said.phase!r}" if said else ""


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode("utf-8", "replace")


def _wait(process: subprocess.Popen[bytes], ready: Ready, folder: Path, watch: Watch | None) -> tuple[str | None, str]:
    started = heard = phase_since = now()
    hang_s, limit_s = ready.request.hang_s, ready.request.limit_s
    last: ProgressFile | None = None
    while process.poll() is None:
        said = _progress(folder)
        if said is not None and said != last:
            heard = now()
            if last is None or said.phase != last.phase:
                phase_since = heard
            last = said
        if watch is not None and last is not None:
            watch(PhaseProgress(last.phase, last.done, last.total, now() - phase_since))
        if now() - heard > hang_s:
            where = last.phase if last is not None else "start"
            return "hang", f"nothing was heard of the workers for {hang_s:.0f} s, in phase {where!r}"
        if limit_s is not None and now() - started > limit_s:
            return "time_limit", f"the run took longer than its limit of {limit_s:.0f} s{_where(folder)}"
        sleep(POLL_S)
    return None, ""


def _verdict(ranks: list[RankFile], plan: Plan, exit_code: int | None, tail: str) -> tuple[str | None, str]:
    """What the rank files and the exit code say. The first rank to fail is the cause: others fail for want of a peer. A rank
    that was told to end says so; one that says nothing was killed."""
    broken = [rank for rank in ranks if rank.status not in ("done", "running", "ended")]
    silent = sorted(set(range(plan.devices)) - {rank.rank for rank in ranks if rank.status != "running"})
    first = min(broken, key=lambda rank: rank.ended_s, default=None)
    if first is not None and not (silent and PEER_LOST.search(str(first.error))):
        return first.status, f"rank {first.rank}: {first.error}"
    done = {rank.rank for rank in ranks if rank.status == "done"}
    if len(done) == plan.devices and exit_code == 0:
        return None, ""
    missing = silent or sorted(set(range(plan.devices)) - done)
    who = f"rank {missing[0]}" if missing else "a worker"
    if exit_code == -signal.SIGILL or (missing and ILLEGAL.search(tail)):
        return "illegal_instruction", f"{who} was ended by SIGILL: {ILLEGAL_HINT}"
    if exit_code is not None and exit_code < 0:
        return "killed", f"{who} was ended by {_signal_name(-exit_code)} ({MEMORY})"
    killed = f" (a rank that is killed leaves none; {MEMORY})" if exit_code else ""
    return "killed", f"{who} left no result; exit code {exit_code}{killed}"


def _signal_name(number: int) -> str:
    names = {one.value: one.name for one in signal.Signals}
    return names.get(number, f"signal {number}")


def _raise_request(outcome: Outcome) -> None:
    if outcome.code == "request":
        raise RequestError(outcome.text.partition(": ")[2])


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a worker and all it started: first kindly, then for certain, with whatever was started in between."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        family = _family(process.pid, mark)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        end_s = now() + GRACE_S
        while now() < end_s and any(map(_alive, family)):
            sleep(POLL_S)
    process.wait()


def _family(pid: int, mark: str) -> list[psutil.Process]:
    """The worker, its session, and all that carry the run's mark: a child may have a session of its own (torchrun's do),
    and its parent may be gone."""
    return [one for one in psutil.process_iter() if _alive(one) and _belongs(one, pid, mark)]


def _belongs(process: psutil.Process, pid: int, mark: str) -> bool:
    try:
        return os.getsid(process.pid) == pid or process.environ().get(MARK) == mark
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _alive(process: psutil.Process) -> bool:
    """A zombie is at its end; whether it is waited for is up to its parent."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _progress(folder: Path) -> ProgressFile | None:
    try:
        return ProgressFile.model_validate_json((folder / PROGRESS).read_bytes())
    except FileNotFoundError:
        return None


def _rank_file(path: Path) -> RankFile | None:
    try:
        return RankFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
