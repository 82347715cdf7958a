"""Start, watch and end the worker processes of one host, with the processes that time matmuls
before and after them, and sample its devices and CPU load meanwhile.

Used by the node agent (run/node.py), which sends the messages that are produced here to the parent.
"""

import json
import os
import signal
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from steelyard import files
from steelyard.run import cpu_load, environment, messages, processes
from steelyard.run.calibration import HostCalibration
from steelyard.run.clock import now, sleep
from steelyard.run.failure import Failure
from steelyard.run.host import Host
from steelyard.run.messages import (
    EVENTS_VARIABLE,
    MARK_VARIABLE,
    BorderMessage,
    ByeMessage,
    HostSpec,
    ProgressMessage,
    ProtocolMessage,
    RankFileMessage,
    Rendezvous,
    StartedMessage,
    StartMessage,
    TelemetryMessage,
    WorkerEnded,
    WorkerEvent,
    WorkerProgress,
)
from steelyard.run.pipe_watch import PipeWatcher, SeenLine
from steelyard.run.processes import RunFolder
from steelyard.run.telemetry import TelemetrySampler

TAIL_BYTES = 4000
STACK_BYTES = 32 << 10
STACK_S = 2.0  # for workers to write their stacks
SUSPENDED_S = 3.0  # a worker suspended for so long is not expected to resume
SUSPENSION_CHECK_S = 1.0  # between two checks for suspended workers
SEND_S = 1.0  # between two readings that are sent
MAX_BORDERS = 1000  # that are sent of one rank: a run has some passes


class WorkerProcess:
    """One worker process of this host, already started (`process`, of `rank`), and the last
    `TAIL_BYTES` of its stdout and stderr, which a thread reads: `read_tail` returns them.
    `is_suspended` returns whether a signal has suspended it for some seconds; `suspended_since_s`
    is since when (None: it is not); `end_reported` is whether the parent was told of its end or
    suspension; `is_ready` whether it waits to import its engine, which `let_go` allows. Created by
    `HostRanks`.
    """

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Start the thread that reads the output of `process`, a worker that was already started
        with a stdout pipe.
        """
        self.rank, self.process = rank, process
        self.suspended_since_s: float | None = None
        self.end_reported = False  # whether its end or suspension was reported
        self.is_ready = False  # whether it waits to import its engine
        self._tail: deque[bytes] = deque()
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _read_output(self) -> None:
        """Read the worker's output until it ends, and keep at least its last `TAIL_BYTES`; earlier
        chunks are dropped. Runs in a thread; does nothing without a pipe.
        """
        if self.process.stdout is None:
            return
        size = 0
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            self._tail.append(chunk)
            size += len(chunk)
            while size - len(self._tail[0]) >= TAIL_BYTES:
                size -= len(self._tail.popleft())

    def read_tail(self) -> str:
        """Return the last `TAIL_BYTES` bytes of the worker's stdout and stderr as text, invalid
        bytes replaced. Waits at most 0.5 s for the reader, because a child of the worker may hold
        the pipe open.
        """
        self._reader.join(0.5)
        return b"".join(tuple(self._tail))[-TAIL_BYTES:].decode("utf-8", "replace")

    def let_go(self) -> None:
        """Let a worker that is ready go on: write a byte to its stdin; nothing happens if it has
        ended.
        """
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.write(b"\n")
                self.process.stdin.flush()

    def is_suspended(self) -> bool:
        """Return whether a signal has suspended the worker for at least `SUSPENDED_S` seconds:
        since the first of the calls that all found it suspended, so a first call returns False.
        `suspended_since_s` is updated.
        """
        if not processes.is_suspended(self.process.pid):
            self.suspended_since_s = None
            return False
        self.suspended_since_s = (
            self.suspended_since_s if self.suspended_since_s is not None else now()
        )
        return now() - self.suspended_since_s >= SUSPENDED_S


class HostRanks:
    """The workers of this host and what is sampled while they run, for the node agent: `start`
    starts them, `read_news` gives messages on what is new (progress, rank files, exits, telemetry,
    CPU load), `finish` ends them all and deletes the run's folder; all three are generators of
    messages for the parent. `is_over` is whether all have exited and nothing is left to measure.

    If matmuls are to be timed, workers that are ready to import their engine wait until that is
    done, and it is done again when all have exited with code 0 (`_advance_calibration`).

    Creating it makes the run's private folder and starts telemetry, before there is a worker.
    """

    def __init__(self, host: Host, start: StartMessage, wake: Callable[[], None]) -> None:
        """Start the telemetry thread and the one that watches the workers' pipes, create the run's
        private folder and note the OOM kills so far; start no worker. `wake` is called, in a
        thread, when there are news. Raises OSError or RuntimeError if folder or thread cannot be
        had.
        """
        self._host, self._start, self._token = host, start, start.token
        self._sampler, self._load_reader = (
            TelemetrySampler(host.make_telemetry_sources(), start.origin_s),
            cpu_load.CpuLoadReader(start.token),
        )
        self._sampler.start()
        self._pipes = PipeWatcher(wake)
        self._pipes.start()
        self._border_counts: Counter[int] = Counter()  # sent so far, by rank
        self._calibration: HostCalibration | None = None
        self._sent_s = 0.0
        self._run_folder = RunFolder(host.open_message.mark)
        self._folder = self._run_folder.path
        self._workers: list[WorkerProcess] = []
        self._modified_ns: dict[str, int] = {}  # file name → its last modification time seen
        self._suspension_checked_s = now()
        self._oom_kills_before = cpu_load.count_oom_kills()  # count before this run

    def start(self) -> Iterator[ProtocolMessage]:
        """Clean up after dead runs, write the spec file and start the workers of this host, each in
        its own session with its rank in RANK; yield a reading of the CPU load first, and `started`
        with the process ids last.

        A generator: it does nothing unless it is iterated. The host's listening socket is closed
        here after rank 0 has inherited it. Raises OSError or RuntimeError if a process or thread
        cannot be started.
        """
        yield self._load_reader.read(now() - self._start.origin_s)
        processes.sweep_dead_runs()
        start, host, path = self._start, self._host, self._folder / messages.SPEC_FILE
        rendezvous = self._make_rendezvous()
        host_spec = HostSpec(folder=self._folder, origin_s=start.origin_s, rendezvous=rendezvous)
        path.write_text(json.dumps({"run": start.run, "host": host_spec.model_dump(mode="json")}))
        variables = {
            **environment.name_run_cache_folders(self._folder),
            **self._make_thread_variables(),
            **host.make_worker_environment(),
            MARK_VARIABLE: host.open_message.mark,
            "WORLD_SIZE": str(start.world),
        }
        if start.calibration is not None:
            self._calibration = HostCalibration(
                start.calibration, start, host.python, variables, self._folder, self._pipes
            )
            self._calibration.start()
        for local_rank in range(start.workers):
            rank = start.first_rank + local_rank
            events_fd, events_end = os.pipe()
            process = subprocess.Popen(
                [host.python, "-P", "-m", start.worker, str(path)],
                stdin=subprocess.PIPE,  # closes when this agent dies, however it does
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **variables,
                    EVENTS_VARIABLE: str(events_end),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                },
                start_new_session=True,
                pass_fds=(
                    [events_end, rendezvous.listen_fd]
                    if rendezvous is not None and rendezvous.listen_fd is not None and rank == 0
                    else [events_end]
                ),
            )
            os.close(events_end)
            self._pipes.add(rank, events_fd)
            self._workers.append(WorkerProcess(rank, process))
        if host.listener is not None:
            host.listener.close()
        pids = [worker.process.pid for worker in self._workers]
        self._sampler.watch(tuple(pids))
        self._watch_load()
        yield StartedMessage(token=self._token, pids=pids)

    def _watch_load(self) -> None:
        """Count the CPU time of the workers, and of the processes that time matmuls, as the run's
        own.
        """
        pids = [worker.process.pid for worker in self._workers]
        self._load_reader.watch((*pids, *(self._calibration.pids if self._calibration else ())))

    def _make_thread_variables(self) -> dict[str, str]:
        """Return {OMP_NUM_THREADS: an equal share of this host's cores for each device, at least
        1}, because otherwise each rank would use all cores; empty if the run uses one device.
        """
        ranks = self._host.open_message.devices
        return (
            {} if ranks == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        )

    def _make_rendezvous(self) -> Rendezvous | None:
        """Return where the ranks meet: None if the run has one rank, a file in the run's folder on
        one host, else rank 0's address and port.

        On rank 0's host it has the descriptor of the listening socket too, which is made
        non-blocking, and connections by which other hosts tested the address are closed first.
        """
        start, listener = self._start, self._host.listener
        if start.world == 1:
            return None
        if start.address is None or listener is None:
            return Rendezvous(file=self._folder / messages.STORE_FILE)
        if start.first_rank:
            return Rendezvous(address=start.address, port=start.port)
        listener.setblocking(False)
        with suppress(BlockingIOError):  # connections by which other hosts tested the address
            while True:
                listener.accept()[0].close()
        return Rendezvous(address=start.address, port=start.port, listen_fd=listener.fileno())

    @property
    def is_over(self) -> bool:
        """Whether every worker of this host has exited, and nothing is left to measure; True before
        any was started.
        """
        has_exited = all(worker.process.poll() is not None for worker in self._workers)
        return has_exited and (self._calibration is None or self._calibration.is_over)

    def read_news(self) -> Iterator[ProtocolMessage]:
        """Yield messages for the parent on what is new on this host since the last call: borders of
        passes, progress, rank files and exits and, if more than `SEND_S` seconds have passed,
        telemetry and CPU load.
        """
        yield from self._read_pipes()
        yield from self._read_rank_news()
        yield from self._advance_calibration()
        if now() - self._sent_s > SEND_S:
            yield from self._read_sensors()

    def _read_sensors(self) -> Iterator[ProtocolMessage]:
        """Yield a telemetry message with the new rows of every device of this host that has any,
        and then a reading of the CPU load; notes the time as that of the last sending.
        """
        self._sent_s = now()
        period_s, rows = self._sampler.take_new_rows()
        for source, columns in zip(self._sampler.sources, rows, strict=True):
            if columns:
                yield TelemetryMessage(
                    token=self._token,
                    device=source.device,
                    period_s=period_s,
                    severity=self._host.severity,
                    columns=columns,
                )
        yield self._load_reader.read(now() - self._start.origin_s)

    def _read_pipes(self) -> Iterator[ProtocolMessage]:
        """Take what came through the pipes of workers and of the processes that time matmuls since
        the last call, and yield a message for each border of a pass, with the time at which it was
        seen; lines that are no event are ignored, and so are borders beyond `MAX_BORDERS` of a
        rank.
        """
        workers = {worker.rank: worker for worker in self._workers}
        for seen in self._pipes.take():
            if seen.source not in workers:
                if self._calibration is not None:
                    self._calibration.take_line(seen)
                continue
            event = _parse_event(seen)
            if event is None:
                continue
            if event.event == "ready":
                self._admit_worker(workers[seen.source], event.batch)
            elif self._border_counts[seen.source] < MAX_BORDERS:
                self._border_counts[seen.source] += 1
                yield BorderMessage(
                    token=self._token,
                    rank=seen.source,
                    event=event.event,
                    pass_name=event.pass_name,
                    t_s=seen.seen_s - self._start.origin_s,
                    within_s=seen.within_s,
                )

    def _admit_worker(self, worker: WorkerProcess, batch: dict[str, Any] | None) -> None:
        """Note that a worker is ready to import its engine, and the matmuls of its case; let it go
        on at once if there is nothing to wait for.
        """
        worker.is_ready = True
        if self._calibration is None:
            worker.let_go()
        else:
            self._calibration.batch = batch

    def _advance_calibration(self) -> Iterator[ProtocolMessage]:
        """Begin and end the stages of the calibration when their time has come; workers go on when
        the one before their engine's import has ended. Yields the rates of a stage that has ended,
        with readings of the CPU load at its borders, and progress where no worker can report it.
        """
        calibration = self._calibration
        if calibration is None:
            return
        codes = [worker.process.poll() for worker in self._workers]
        if calibration.begin_stage(all(worker.is_ready for worker in self._workers), codes):
            self._watch_load()
            yield self._load_reader.read(now() - self._start.origin_s)
            if self._start.first_rank == 0:  # as rank 0 would say, which waits or has exited
                yield ProgressMessage(token=self._token, phase="calibrate", done=0, total=0)
        elif calibration.is_done:
            is_before = calibration.stage == "before"
            yield from calibration.end_stage()
            yield self._load_reader.read(now() - self._start.origin_s)
            for worker in self._workers if is_before else ():
                worker.let_go()

    def _read_rank_news(self) -> Iterator[ProtocolMessage]:
        """Yield progress and rank files that changed since the last call, then which workers exited
        and, looked at once a second, which are suspended; each worker's end or suspension is
        reported once, an exit after its last rank file.
        """
        if self._has_changed(messages.PROGRESS_FILE):
            yield self._read_progress()
        ended = [
            worker
            for worker in self._workers
            if not worker.end_reported and worker.process.poll() is not None
        ]
        for worker in self._workers:
            if self._has_changed(messages.format_rank_file_name(worker.rank)):
                yield self._read_rank_file(worker.rank)
        for worker in ended:
            worker.end_reported = True
            yield self._make_worker_ended(worker)
        if now() - self._suspension_checked_s > SUSPENSION_CHECK_S:
            self._suspension_checked_s = now()
            for worker in self._workers:
                if not worker.end_reported and worker.is_suspended():
                    worker.end_reported = True
                    yield self._make_worker_ended(worker, suspended=True)

    def _read_progress(self) -> ProgressMessage:
        """Return the content of the progress file in this run's folder as a message; one that
        cannot be read is a sign of life too, and gives the phase `unreadable progress`. Nothing is
        raised.
        """
        try:
            progress = WorkerProgress.model_validate_json(
                self._read_worker_file(messages.PROGRESS_FILE, messages.MAX_PROGRESS_BYTES)
            )
        except (OSError, ValueError):  # a ValidationError is a ValueError
            progress = WorkerProgress(phase="unreadable progress", done=0, total=0)
        return ProgressMessage(token=self._token, **progress.model_dump())

    def _read_rank_file(self, rank: int) -> RankFileMessage:
        """Return the message with the text of the rank file of a rank of this host, or with an
        empty text and the reason why it cannot be read (missing, too large, not UTF-8); its content
        is not parsed.
        """
        try:
            text = self._read_worker_file(
                messages.format_rank_file_name(rank), messages.MAX_RANK_FILE_BYTES
            ).decode("utf-8")
        except (OSError, ValueError) as error:
            return messages.make_rank_file_message(self._token, rank, "", str(error))
        return messages.make_rank_file_message(self._token, rank, text)

    def _read_worker_file(self, name: str, max_bytes: int) -> bytes:
        """Return the bytes of file `name` in the run's folder, which a worker wrote. Raise OSError
        if it cannot be read, ValueError if it is larger than `max_bytes`.
        """
        try:
            return files.read_file(self._folder / name, max_bytes, unpack=False)
        except files.TooLargeError as error:
            raise ValueError(f"it is {error}") from error

    def _make_worker_ended(self, worker: WorkerProcess, suspended: bool = False) -> WorkerEnded:
        """Return the message that a worker ended or is suspended: its exit code (None: it has none,
        negative: the signal), the time since the start of the run, and how many processes of this
        cgroup the kernel has killed for lack of memory since the run began (None: unknown).
        """
        time_s, oom_kills = now() - self._start.origin_s, cpu_load.count_oom_kills()
        return WorkerEnded(
            token=self._token,
            rank=worker.rank,
            code=worker.process.returncode,
            time_s=time_s,
            suspended=suspended,
            oom_kills=None
            if oom_kills is None or self._oom_kills_before is None
            else oom_kills - self._oom_kills_before,
        )

    def _has_changed(self, name: str) -> bool:
        """Return whether file `name` in the run's folder is new or was modified since the last call
        for it, by its modification time, which is remembered; False if it does not exist.
        """
        try:
            modified_ns = (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return False
        before, self._modified_ns[name] = self._modified_ns.get(name), modified_ns
        return before != modified_ns

    def _collect_stacks(self) -> dict[int, str]:
        """Send SIGUSR1 to all live workers, on which they write their stack traces, wait up to
        `STACK_S` seconds until each has begun to, and return by rank the traces, or `it did not
        answer`. Empty if no worker lives.
        """
        running = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in running:
            worker.process.send_signal(signal.SIGUSR1)
        end_s = now() + STACK_S
        while now() < end_s and not all(map(self._read_stack, running)):
            sleep(processes.POLL_S)
        sleep(processes.POLL_S)  # for the last lines of the last worker
        return {worker.rank: self._read_stack(worker) or "it did not answer" for worker in running}

    def _read_stack(self, worker: WorkerProcess) -> str:
        """Return the first `STACK_BYTES` characters of the stack traces that a worker has written
        into the run's folder so far; empty if there are none.
        """
        with suppress(FileNotFoundError):
            return (self._folder / messages.format_stack_file_name(worker.rank)).read_text(
                "utf-8", "replace"
            )[:STACK_BYTES]
        return ""

    def finish(self, failure: Failure | None, with_stacks: bool) -> Iterator[ProtocolMessage]:
        """End the workers of this host and all processes they started (SIGTERM, then SIGKILL), stop
        telemetry, yield the news that are left and last the `bye` message with `failure` and the
        workers' exit codes and output; then delete the run's folder. A generator: it must be
        iterated to its end.

        `with_stacks`: collect stack traces before ending them. An error that the telemetry thread
        met is raised here.
        """
        stacks = self._collect_stacks() if with_stacks else {}
        if self._calibration is not None:
            self._calibration.close()
        mark = self._host.open_message.mark
        ended = processes.end_processes(lambda: processes.find_run_processes(mark, os.getpid()))
        self._sampler.stop()
        self._pipes.stop()
        yield from self._read_pipes()
        yield from self._read_rank_news()
        yield from self._read_sensors()
        yield ByeMessage(
            token=self._token,
            exits={worker.rank: worker.process.poll() for worker in self._workers},
            stderr_tails={worker.rank: worker.read_tail() for worker in self._workers},
            stacks=stacks,
            ended=ended,
            failure=failure,
        )
        self._run_folder.remove()


def _parse_event(seen: SeenLine) -> WorkerEvent | None:
    """Return the event in a line of a worker, or None if it is none, or the end of its pipe."""
    with suppress(ValueError):  # a ValidationError is one
        return None if seen.line is None else WorkerEvent.model_validate_json(seen.line)
    return None
