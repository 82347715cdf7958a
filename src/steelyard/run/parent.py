"""The parent's side of a run: start the workers, watch them, and make a record of whatever came of it. Never imports torch."""

import json
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
from typing import Any

import psutil

from steelyard import accelerators
from steelyard.case.request import Request, check, going_on, passes_of, scope, site
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.record import record
from steelyard.record.record import Plan, Record
from steelyard.run import assemble, environment, launch
from steelyard.run.assemble import Outcome
from steelyard.run.measure import now, sleep, today

POLL_S = 0.05
GRACE_S = 5.0
TAIL_BYTES = 4000
MARK = "STEELYARD_RUN"  # in the environment of all that a run starts: how it is found again
PEER_LOST = re.compile(r"gloo|nccl|connection (reset|closed|refused)|TCPStore|DistNetworkError|DistBackendError", re.IGNORECASE)
MEMORY = "SIGKILL is also what the kernel sends when memory runs out"
SCRUBBED = ("NVIDIA_TF32_OVERRIDE",)  # it would run a precision as another
WORKER_ENV = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order NVML counts in
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # python -m would import whatever lies in the current folder
    "TOKENIZERS_PARALLELISM": "true",
}


@dataclass(frozen=True)
class Progress:
    """What the workers last said, and since when that phase goes on."""

    phase: str
    done: int
    total: int
    elapsed_s: float


Watch = Callable[[Progress], None]


def run_case(request: Request, watch: Watch | None = None) -> tuple[Record, Path]:
    """Run one case and write its record. A wrong request raises RequestError and leaves nothing."""
    origin_s, created = now(), today()
    check(request)
    accelerator, layout, found = _placed(request)
    stated, earlier = site(request.site), going_on(request)
    kept = _kept(request, created)
    with ExitStack() as undisturbed, _temporary() as name:
        folder = Path(name)
        spec = folder / "spec.json"
        command = launch.LAUNCHERS[layout.launcher](str(spec), layout)
        record.writable(request.out)
        surroundings = environment.parent_side(accelerator, found)
        asked = _spec(request, accelerator.name, layout, folder, origin_s)
        asked["resume"] = str(earlier.path) if earlier else None
        asked["checkpoints"] = str(request.out.resolve() / kept) if kept else None
        spec.write_text(json.dumps(asked))
        sampler = accelerator.telemetry(found, os.getpid(), origin_s)
        sampler.start()
        spawned_s = now()
        try:
            outcome = _workers(command, request, folder, sampler, layout, watch, undisturbed)
        finally:
            series = sampler.stop()
        ended_s = now()
        _raise_request(outcome)
        facts = assemble.Facts(
            origin_s=origin_s,
            spawned_s=spawned_s,
            ended_s=ended_s,
            created=created,
            environment=surroundings,
            site=stated,
            telemetry=series,
            plan=layout,
            scope=scope(request),
            resume=earlier,
            out=request.out,
            checkpoints=kept if kept and (request.out / kept).is_dir() else None,
        )
        made = assemble.assemble(request.resolved, request.engine, facts, outcome)
        return made, record.write(made, request.out)


def _kept(request: Request, created: str) -> str | None:
    """Where this run's checkpoints go, beside its record."""
    case = request.resolved.case
    if case.question.kind != "train" or case.tune.checkpoint_every is None:
        return None
    stamp = re.sub(r"[^0-9T]", "", created.partition(".")[0])
    return f"checkpoints/{stamp}-{case.name}-{secrets.token_hex(4)}"


def _placed(request: Request) -> tuple[accelerators.Accelerator, Plan, list[accelerators.Found]]:
    """Where the work goes: the accelerator, the plan, and the devices in use."""
    case = request.resolved.case
    accelerator = accelerators.named(request.accelerator) if request.accelerator else accelerators.detect()
    found = accelerator.find()
    layout = degrees.make(case, request.nodes, request.devices, request.sample)
    if not found:
        raise RequestError(f"no {accelerator.name} device was found here; see steelyard list, or try --accelerator cpu")
    most = accelerator.most(found)
    if layout.devices > most:
        raise RequestError(f"--devices {layout.devices}: {len(found)} {accelerator.name} device(s) here; allowed: 1 to {most}")
    sharing = -(-layout.devices // len(found))  # ranks that have one device's memory between them
    memory = found[0].memory_bytes
    degrees.check_fits(case, layout, memory // sharing if memory is not None else None)
    return accelerator, layout, found[: layout.devices]


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


def _spec(request: Request, accelerator: str, layout: Plan, folder: Path, origin_s: float) -> dict[str, Any]:
    def absolute(path: Path | None) -> str | None:
        return None if path is None else str(path.resolve())

    return {
        "case": request.resolved.case.model_dump(mode="json"),
        "scope": scope(request).model_dump(mode="json"),
        "passes": list(passes_of(request)),
        "engine": request.engine,
        "plan": layout.model_dump(mode="json"),
        "accelerator": accelerator,
        "weights": absolute(request.weights),
        "data": absolute(request.data),
        "tokenizer": absolute(request.tokenizer),
        "folder": str(folder),
        "origin_s": origin_s,
        "parent_pid": os.getpid(),
    }


def _workers(
    command: list[str],
    request: Request,
    folder: Path,
    sampler: Any,
    layout: Plan,
    watch: Watch | None,
    undisturbed: ExitStack,
) -> Outcome:
    """Start the processes and stay with them until none is left."""
    inherited = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    tune = request.resolved.case.tune
    same = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if tune.deterministic else {}  # what cuBLAS asks for it
    env = {**inherited, **WORKER_ENV, **same, **tune.env, MARK: str(folder)}
    log = folder / "stderr.log"
    with log.open("wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=env, start_new_session=True)
        try:
            sampler.watch(process.pid)
            code, text = _wait(process, request, folder, watch)
        except KeyboardInterrupt:
            code, text = "interrupted", f"interrupted by the user{_where(folder)}"
        finally:
            undisturbed.enter_context(_ignoring_interrupts())
            _end(process, str(folder))
    ranks = [_read(folder / f"rank-{i}.json") for i in range(layout.devices)]
    known = [rank for rank in ranks if rank is not None]
    if code is None:
        code, text = _verdict(known, layout, process.returncode)
    return Outcome(code, text, process.returncode, _tail(log), known)


def _where(folder: Path) -> str:
    said = _read(folder / "progress.json")
    return f", in phase {said['phase']!r}" if said else ""


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode("utf-8", "replace")


def _wait(process: subprocess.Popen[bytes], request: Request, folder: Path, watch: Watch | None) -> tuple[str | None, str]:
    started = heard = phase_since = now()
    last: dict[str, Any] = {}
    while process.poll() is None:
        said = _read(folder / "progress.json")
        if said is not None and said != last:
            heard = now()
            if said["phase"] != last.get("phase"):
                phase_since = heard
            last = said
        if watch is not None and last:
            watch(Progress(last["phase"], last["done"], last["total"], now() - phase_since))
        if now() - heard > request.hang_s:
            where = last.get("phase", "start")
            return "hang", f"nothing was heard of the workers for {request.hang_s:.0f} s, in phase {where!r}"
        if request.limit_s is not None and now() - started > request.limit_s:
            return "time_limit", f"the run took longer than its limit of {request.limit_s:.0f} s{_where(folder)}"
        sleep(POLL_S)
    return None, ""


def _verdict(ranks: list[dict[str, Any]], layout: Plan, exit_code: int | None) -> tuple[str | None, str]:
    """What the rank files and the exit code say. The first rank to fail is the cause: others fail for want of a peer. A rank
    that was told to end says so; one that says nothing was killed."""
    broken = [rank for rank in ranks if rank["status"] not in ("done", "running", "ended")]
    silent = sorted(set(range(layout.devices)) - {rank["rank"] for rank in ranks if rank["status"] != "running"})
    first = min(broken, key=lambda rank: float(rank["ended_s"]), default=None)
    if first is not None and not (silent and PEER_LOST.search(str(first["error"]))):
        return first["status"], f"rank {first['rank']}: {first['error']}"
    done = {rank["rank"] for rank in ranks if rank["status"] == "done"}
    if len(done) < layout.devices or exit_code != 0:
        missing = silent or sorted(set(range(layout.devices)) - done)
        who = f"rank {missing[0]}" if missing else "a worker"
        if exit_code is not None and exit_code < 0:
            return "killed", f"{who} was ended by {_signal_name(-exit_code)} ({MEMORY})"
        killed = f" (a rank that is killed leaves none; {MEMORY})" if exit_code else ""
        return "killed", f"{who} left no result; exit code {exit_code}{killed}"
    return None, ""


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


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
