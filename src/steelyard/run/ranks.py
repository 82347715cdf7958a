"""Start, watch and end the worker processes of one host, and sample its devices and CPU load
meanwhile.

Used by the node agent (run/node.py), which sends the messages that are produced here to the parent.
"""

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from steelyard import files
from steelyard.run import environment, load, messages, processes
from steelyard.run.clock import now, sleep
from steelyard.run.failure import Failure
from steelyard.run.host import Host
from steelyard.run.messages import (
    MARK,
    Bye,
    HostSpec,
    Message,
    Progress,
    ProgressSaid,
    RankSaid,
    Rendezvous,
    Start,
    Started,
    TelemetryRows,
    WorkerEnded,
)
from steelyard.run.processes import RunFolder
from steelyard.run.telemetry import Sampler

TAIL_BYTES = 4000
STACK_BYTES = 32 << 10
STACK_S = 2.0  # for workers to write their stacks
STOPPED_S = 3.0  # a worker suspended for so long is not expected to resume
LOOK_S = 1.0  # between two checks for suspended workers
SEND_S = 1.0  # between two readings that are sent


class WorkerProcess:
    """One worker process and the end of its output; a thread reads its stdout and stderr."""

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Start the thread that reads the process's output."""
        self.rank, self.process = rank, process
        self.stopped_since: float | None = None
        self.told = False  # whether its end or suspension was reported
        self._tail: deque[bytes] = deque()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read the output until it ends, and keep the last `TAIL_BYTES`."""
        if self.process.stdout is None:
            return
        size = 0
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            self._tail.append(chunk)
            size += len(chunk)
            while size - len(self._tail[0]) >= TAIL_BYTES:
                size -= len(self._tail.popleft())

    def tail(self) -> str:
        """Return the last `TAIL_BYTES` of its stdout and stderr as text. Waits at most 0.5 s for
        the reader, because a child of the worker may hold the pipe open.
        """
        self._reader.join(0.5)
        return b"".join(tuple(self._tail))[-TAIL_BYTES:].decode("utf-8", "replace")

    def stopped(self) -> bool:
        """Return whether a signal has suspended the worker for at least `SUSPENDED_S` seconds, as
        far as repeated calls have seen.
        """
        if not processes.stopped(self.process.pid):
            self.stopped_since = None
            return False
        self.stopped_since = self.stopped_since if self.stopped_since is not None else now()
        return now() - self.stopped_since >= STOPPED_S


class Ranks:
    """The workers of this host, and what is sampled while they run.

    Creating it makes the run's private folder and starts telemetry, before there is a worker.
    """

    def __init__(self, host: Host, start: Start) -> None:
        """Start telemetry, create the run's private folder and note the OOM kills so far; start no
        worker.
        """
        self._host, self._start, self._token = host, start, start.token
        self._sampler, self._load = (
            Sampler(host.sources(), start.origin_s),
            load.Reader(start.token),
        )
        self._sampler.start()
        self._sent_s = 0.0
        self._private = RunFolder(host.asked.mark)
        self._folder = self._private.path
        self._workers: list[WorkerProcess] = []
        self._seen: dict[str, int] = {}  # file name → its last modification time seen
        self._looked_s = now()
        self._killed = load.oom_kills()  # count before this run

    def start(self) -> Iterator[Message]:
        """Clean up after dead runs, write the spec file and start the workers; yield a reading of
        the CPU load first, and the process ids last.
        """
        yield self._load.read(now() - self._start.origin_s)
        processes.sweep_dead()
        start, host, path = self._start, self._host, self._folder / messages.SPEC
        meet = self._rendezvous()
        here = HostSpec(folder=self._folder, origin_s=start.origin_s, rendezvous=meet)
        path.write_text(json.dumps({"run": start.run, "host": here.model_dump(mode="json")}))
        variables = {
            **environment.cache_variables_within(self._folder),
            **self._threads(),
            **host.variables(),
            MARK: host.asked.mark,
            "WORLD_SIZE": str(start.world),
        }
        for local_rank in range(start.workers):
            rank = start.first_rank + local_rank
            process = subprocess.Popen(
                [host.python, "-P", "-m", start.worker, str(path)],
                stdin=subprocess.PIPE,  # closes when this agent dies, however it does
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                start_new_session=True,
                pass_fds=(
                    [meet.listen_fd]
                    if meet is not None and meet.listen_fd is not None and rank == 0
                    else []
                ),
            )
            self._workers.append(WorkerProcess(rank, process))
        if host.listening is not None:
            host.listening.close()
        pids = [one.process.pid for one in self._workers]
        self._sampler.watch(tuple(pids))
        self._load.watch(tuple(pids))
        yield Started(token=self._token, pids=pids)

    def _threads(self) -> dict[str, str]:
        """Return OMP_NUM_THREADS for the workers, an equal share of the host's cores for each
        device; empty for one device. Otherwise each rank would use all cores.
        """
        ranks = self._host.asked.devices
        return (
            {} if ranks == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        )

    def _rendezvous(self) -> Rendezvous | None:
        """Return where the ranks meet: None for a single rank, a file on one host, else rank 0's
        address.

        On rank 0's host, connections that other hosts opened to test the address are closed first.
        """
        start, listening = self._start, self._host.listening
        if start.world == 1:
            return None
        if start.address is None or listening is None:
            return Rendezvous(file=self._folder / messages.STORE)
        if start.first_rank:
            return Rendezvous(address=start.address, port=start.port)
        listening.setblocking(False)
        with suppress(BlockingIOError):  # connections by which other hosts tested the address
            while True:
                listening.accept()[0].close()
        return Rendezvous(address=start.address, port=start.port, listen_fd=listening.fileno())

    @property
    def over(self) -> bool:
        """Whether every worker has exited."""
        return all(one.process.poll() is not None for one in self._workers)

    def news(self) -> Iterator[Message]:
        """Yield messages on what is new since the last call: progress, rank files and exits and,
        once a second, telemetry and CPU load.
        """
        yield from self._rank_news()
        if now() - self._sent_s > SEND_S:
            yield from self._readings()

    def _readings(self) -> Iterator[Message]:
        """Yield the new telemetry of every device, and the CPU load of the host."""
        self._sent_s = now()
        period_s, rows = self._sampler.take()
        for source, columns in zip(self._sampler.sources, rows, strict=True):
            if columns:
                yield TelemetryRows(
                    token=self._token,
                    device=source.device,
                    period_s=period_s,
                    severity=self._host.severity,
                    columns=columns,
                )
        yield self._load.read(now() - self._start.origin_s)

    def _rank_news(self) -> Iterator[Message]:
        """Yield new progress and rank files, and which workers ended or are suspended; each
        worker's end is reported once.
        """
        if self._changed(messages.PROGRESS):
            yield self._progress()
        ended = [one for one in self._workers if not one.told and one.process.poll() is not None]
        for one in self._workers:
            if self._changed(messages.rank_name(one.rank)):
                yield self._rank_file(one.rank)
        for one in ended:
            one.told = True
            yield self._exit(one)
        if now() - self._looked_s > LOOK_S:
            self._looked_s = now()
            for one in self._workers:
                if not one.told and one.stopped():
                    one.told = True
                    yield self._exit(one, suspended=True)

    def _progress(self) -> ProgressSaid:
        """Return the content of the progress file as a message; one that cannot be read is a sign
        of life too, and gives the phase `unreadable progress`.
        """
        try:
            said = Progress.model_validate_json(
                self._read(messages.PROGRESS, messages.PROGRESS_BYTES)
            )
        except (OSError, ValueError):  # a ValidationError is a ValueError
            said = Progress(phase="unreadable progress", done=0, total=0)
        return ProgressSaid(token=self._token, **said.model_dump())

    def _rank_file(self, rank: int) -> RankSaid:
        """Return the message with the text of a rank file, or with the reason why it cannot be
        read.
        """
        try:
            text = self._read(messages.rank_name(rank), messages.RANK_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            return messages.rank(self._token, rank, "", str(error))
        return messages.rank(self._token, rank, text)

    def _read(self, name: str, most_bytes: int) -> bytes:
        """Read a file that a worker wrote. Raise OSError if it cannot be read, ValueError if it is
        larger than `max_bytes`.
        """
        try:
            return files.read(self._folder / name, most_bytes, unpack=False)
        except files.TooLargeError as error:
            raise ValueError(f"it is {error}") from error

    def _exit(self, one: WorkerProcess, suspended: bool = False) -> WorkerEnded:
        """Return the message that a worker ended or is suspended, with its exit code and the
        processes that the kernel has killed for lack of memory since the run began.
        """
        time_s, killed = now() - self._start.origin_s, load.oom_kills()
        return WorkerEnded(
            token=self._token,
            rank=one.rank,
            code=one.process.returncode,
            time_s=time_s,
            suspended=suspended,
            oom_kills=None if killed is None or self._killed is None else killed - self._killed,
        )

    def _changed(self, name: str) -> bool:
        """Return whether a file of the run's folder is new or was modified since the last call for
        it; False if it does not exist.
        """
        try:
            at = (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return False
        before, self._seen[name] = self._seen.get(name), at
        return before != at

    def _stacks(self) -> dict[int, str]:
        """Send SIGUSR1 to all live workers, on which they write their stack traces, wait up to
        `STACK_S` seconds, and return the traces by rank, or a text that a worker did not answer.
        """
        asked = [one for one in self._workers if one.process.poll() is None]
        for one in asked:
            one.process.send_signal(signal.SIGUSR1)
        end_s = now() + STACK_S
        while now() < end_s and not all(map(self._stack, asked)):
            sleep(processes.POLL_S)
        sleep(processes.POLL_S)  # for the last lines of the last worker
        return {one.rank: self._stack(one) or "it did not answer" for one in asked}

    def _stack(self, one: WorkerProcess) -> str:
        """Return the stack traces that a worker has written, at most `STACK_BYTES` characters;
        empty if there are none.
        """
        with suppress(FileNotFoundError):
            return (self._folder / messages.stack_name(one.rank)).read_text("utf-8", "replace")[
                :STACK_BYTES
            ]
        return ""

    def finish(self, failure: Failure | None, with_stacks: bool) -> Iterator[Message]:
        """End the workers and all processes they started, yield what they left and last the `bye`
        message with `failure`, then delete the run's folder.

        `with_stacks`: collect stack traces before ending them.
        """
        stacks = self._stacks() if with_stacks else {}
        mark = self._host.asked.mark
        ended = processes.end(lambda: processes.family(mark, os.getpid()))
        self._sampler.stop()
        yield from self._rank_news()
        yield from self._readings()
        yield Bye(
            token=self._token,
            exits={one.rank: one.process.poll() for one in self._workers},
            stderr_tails={one.rank: one.tail() for one in self._workers},
            stacks=stacks,
            ended=ended,
            failure=failure,
        )
        self._private.remove()
