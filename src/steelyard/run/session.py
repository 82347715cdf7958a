"""Run the workers on all hosts of a run, as the parent leads it: connect to the agents, start the
ranks, receive messages until the end, and leave no process behind.

Used by run/parent.py and run/ceilings_parent.py. One `Connection` (run/connection.py) per host;
what the ranks leave is collected in `RankResults`.
"""

import hashlib
import queue
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from steelyard.errors import MORE_MEMORY_HINT, OUT_OF_MEMORY_LINE, RequestError
from steelyard.run import connection, launch, messages, preflight, processes
from steelyard.run.clock import PINGS, now
from steelyard.run.connection import Connection
from steelyard.run.cpu_load import LoadReadings
from steelyard.run.failure import Failure, RankResults, find_failure
from steelyard.run.launch import Allocation, Launcher
from steelyard.run.messages import (
    BorderMessage,
    ByeMessage,
    CalibrationMessage,
    HelloMessage,
    LoadMessage,
    OpenMessage,
    PongMessage,
    ProgressMessage,
    RankFileMessage,
    ReachedMessage,
    ReachMessage,
    StartMessage,
    StopMessage,
    SweepMessage,
    WorkerEnded,
)
from steelyard.run.site import Site
from steelyard.run.telemetry import DeviceReadings
from steelyard.run.worker_files import parse_rank_file

POLL_S = 0.05
# for `hello` of every host; a first import over a network file system is slow
OPEN_S = 90.0
REACH_S = 15.0
SETTLE_S = 0.5  # after the first rank failed, so that others that failed with it can report it
STOP_S = 20.0  # for agents to end their workers by SIGTERM, then SIGKILL
SWEEP_S = 15.0
STARTING = "starting"  # phase before the first progress
STALLED_S = 2.0  # a longer gap between two calls shows that this process was suspended


@dataclass(frozen=True)
class PhaseProgress:
    """The last progress that rank 0 reported: `done` of `total` steps in `phase` (both 0 where
    nothing is counted), and the seconds since the phase began.
    """

    phase: str
    done: int
    total: int
    elapsed_s: float


ProgressCallback = Callable[[PhaseProgress], None]


class Session:
    """The node agents of one run as the parent leads them, and all that they have reported so far:
    `results` (rank files, exits, output), `telemetry` by host and device, `load_readings` by host,
    and `progress` of rank 0 (None before the first).

    `run_to_end` does it all and returns why the run failed; its callback `prepare` calls
    `connect_hosts` and `check_reachable`; `stop_agents` ends it. `agents_started_s` and
    `workers_started_s` are times on the parent's clock. Creating it chooses the `hosts` and their
    command lines and starts nothing; RequestError if there are not enough hosts.
    """

    def __init__(
        self, launcher: Launcher, site: Site, nodes: int, allocation: Allocation | None = None
    ) -> None:
        """Choose the hosts, their command lines, the run's random token and the mark by which its
        processes are found; start nothing. Raises RequestError if there are not enough hosts, or a
        host is listed twice.
        """
        self.launcher, self.site = launcher, site
        self._progress_callback: ProgressCallback | None = None
        self.hosts = launch.choose_hosts(launcher, site, nodes, allocation)
        self.token = messages.make_token()
        self._mark = hashlib.sha256(self.token.encode()).hexdigest()[:16]
        self.commands = {host: launcher.command(site, host, allocation) for host in self.hosts}
        self.results = RankResults()
        self.telemetry: dict[tuple[str, str], DeviceReadings] = {}  # by host and device
        self.load_readings: dict[str, LoadReadings] = {}  # by host
        self.progress: PhaseProgress | None = None
        self.connections: list[Connection] = []
        self.agents_started_s = self.workers_started_s = (
            now()
        )  # replaced when agents and workers are started
        self._inbox: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()
        self._stopping = False
        self._created_s = self._last_listen_s = self._phase_s = self._progress_s = now()

    def run_to_end(
        self,
        prepare: Callable[[], StartMessage],
        origin_s: float,
        hang_s: float,
        limit_s: float | None,
        show_progress: ProgressCallback | None,
        interrupt_guard: ExitStack,
        has_begun: Callable[[], bool] = lambda: False,
    ) -> Failure | None:
        """Run the session from the first agent to the end of the last, and return why the run
        failed, or None.

        `prepare` connects to and checks the hosts, and returns what to start; its errors are passed
        on. An interrupt raises KeyboardInterrupt before it has returned or `has_begun` is True, and
        is the failure `interrupted` later. All agents are stopped before this returns or raises;
        interrupts are then ignored until `interrupt_guard` is closed. `hang_s`: seconds without
        progress of rank 0 after which the run fails with `hang`; `limit_s`: the longest that
        workers may take. `origin_s`: start of the run on the parent's clock.
        """
        self._progress_callback = show_progress
        start: StartMessage | None = None
        failure: Failure | None = None
        try:
            start = prepare()
            failure = self._start_and_wait(start, origin_s, hang_s, limit_s)
        except KeyboardInterrupt as error:
            if start is None and not has_begun():
                raise
            where = "" if self.progress is None else f", in phase {self.progress.phase!r}"
            failure = Failure("interrupted", f"interrupted by {str(error) or 'the user'}{where}")
        finally:
            interrupt_guard.enter_context(processes.ignore_interrupts())
            self.stop_agents()
        if failure is None and start is not None:
            workers = start.workers
            failure = find_failure(
                self.results, start.world, lambda rank: self._format_rank(rank, workers)
            )
        if not self.results.get_stderr_tail(None if failure is None else failure.rank):
            self.results.agent_output = "\n".join(
                filter(
                    None, (host_connection.read_output() for host_connection in self.connections)
                )
            )
        return failure

    def _start_and_wait(
        self, start: StartMessage, origin_s: float, hang_s: float, limit_s: float | None
    ) -> Failure | None:
        """Send `start` to every host of this session, completed with its first rank, clock and rank
        0's address, and wait until all have ended or something is wrong; return what, or None, also
        if a rank failed, which its results tell.

        Sets `workers_started_s`. After a `hang` the agents are stopped here, and the workers write
        their stack traces before.
        """
        first = self.connections[0].hello
        self.workers_started_s = self._progress_s = self._phase_s = now()
        for index, host_connection in enumerate(self.connections):
            host_fields = {
                "token": self.token,
                "first_rank": index * start.workers,
                "origin_s": origin_s + host_connection.clock.offset_s,
                "address": first.address if first is not None else None,
                "port": first.port if first is not None else None,
            }
            host_connection.send(start.model_copy(update=host_fields))
        failure = self._wait_for_end(hang_s, limit_s)
        if failure is not None and failure.code == "hang":
            self.stop_agents(with_stacks=True)
        return failure

    def _format_rank(self, rank: int, ranks_per_host: int) -> str:
        """Return a rank's name for messages: `rank 3`, or `rank 3 on HOST` if this session has
        several hosts with `ranks_per_host` ranks each.
        """
        return (
            f"rank {rank}"
            if len(self.hosts) == 1
            else f"rank {rank} on {self.hosts[rank // ranks_per_host]}"
        )

    def connect_hosts(self, open_message: OpenMessage) -> dict[str, HelloMessage]:
        """Start an agent on every host of the session, send it `open_message` with token, mark and
        the name of another host as peer (None: a single host), wait for its `hello`, compare clocks
        by `PINGS` pings, and return the `hello` messages by host name.

        Appends to `connections`. Raises RequestError if an agent cannot be started, ends, or does
        not answer within `OPEN_S` seconds; what the hosts say is checked by the caller.
        """
        self.agents_started_s = now()
        for index, host in enumerate(self.hosts):
            # One mark per host: two names may lead to one machine, or to hosts that see each
            # other's processes and temporary files.
            mark = f"{self._mark}-{index}"
            try:
                self.connections.append(
                    Connection(host, self.commands[host], self.token, mark, self._inbox)
                )
            # RuntimeError: a thread that cannot be started
            except (OSError, RuntimeError) as error:
                why = getattr(error, "strerror", None) or error
                raise RequestError(f"{self.commands[host][0]} cannot be started: {why}") from error
        several = len(self.hosts) > 1
        for index, host_connection in enumerate(self.connections):
            peer = self.hosts[1 if index == 0 else 0].rpartition("@")[2] if several else None
            host_connection.send(
                open_message.model_copy(
                    update={"token": self.token, "peer": peer, "mark": host_connection.mark}
                )
            )
        self._listen_until(
            lambda: all(host_connection.hello is not None for host_connection in self.connections),
            OPEN_S,
            "no hello",
        )
        for _ in range(PINGS):
            for host_connection in self.connections:
                host_connection.ping(immediately=True)
            self._listen_until(
                lambda: all(
                    host_connection.pongs >= host_connection.pings
                    for host_connection in self.connections
                ),
                OPEN_S,
                "no answer to a ping",
            )
        self.workers_started_s = now()  # for the draft of the record; set again when workers start
        return {
            host_connection.name: host_connection.hello
            for host_connection in self.connections
            if host_connection.hello is not None
        }

    def check_reachable(self, address: str, port: int) -> None:
        """Ask every host but the first whether it can connect to this address and port, where rank
        0 will be; raise RequestError if one cannot, its agent ends, or there is no answer within
        `REACH_S` seconds.
        """
        others = self.connections[1:]
        for host_connection in others:
            host_connection.send(ReachMessage(token=self.token, address=address, port=port))
        self._listen_until(
            lambda: all(host_connection.reached is not None for host_connection in others),
            REACH_S,
            f"no answer on whether it can connect to {address}",
        )
        for host_connection in others:
            if host_connection.reached is not None and host_connection.reached.problem is not None:
                raise RequestError(
                    f"host {host_connection.name} cannot connect to {self.hosts[0]} at {address}:"
                    f" {host_connection.reached.problem}; name an interface that hosts share in the"
                    " site file"
                )

    def _listen_until(self, is_done: Callable[[], bool], limit_s: float, missing_text: str) -> None:
        """Receive messages of this session's agents until `is_done` returns True; raise
        RequestError if an agent ends or its output does, or after `limit_s` seconds. `missing_text`
        says in the message what did not come.
        """
        end_s = now() + limit_s
        while not is_done():
            self._receive_messages()
            self._show_progress()
            for host_connection in self.connections:
                if host_connection.disconnected or host_connection.bye is not None:
                    output = (
                        host_connection.bye.failure.text
                        if host_connection.bye is not None
                        and host_connection.bye.failure is not None
                        else host_connection.read_output()
                    )
                    python = self.site.choose_python(host_connection.name)
                    raise RequestError(
                        preflight.explain_agent_not_started(
                            host_connection.name,
                            python,
                            self.commands[host_connection.name],
                            host_connection.wait_for_exit_code(),
                            output,
                        )
                    )
                if now() > end_s:
                    late = [c for c in self.connections if c.hello is None] or self.connections
                    raise RequestError(f"host {late[0].name}: {missing_text} for {limit_s:.0f} s")

    def _wait_for_end(self, hang_s: float, limit_s: float | None) -> Failure | None:
        """Wait until every agent of this session has said bye, and return the failure of one that
        ended by itself, else None; or return early: a lost host, `hang` or `time_limit` as failure,
        and None if a rank failed or is suspended, because the results tell why.

        After a rank failed it waits `SETTLE_S` seconds and until every host has answered a ping:
        the loss of a host may be the cause. `hang_s` and `limit_s` (None: no limit) are seconds, as
        for `_find_timeout`.
        """
        begin_s, failed_s = now(), None
        pinged: list[tuple[Connection, int]] = []
        while not all(one.bye is not None for one in self.connections):
            self._receive_messages()
            self._show_progress()
            failure = self._find_lost_host() or self._find_timeout(begin_s, hang_s, limit_s)
            if failure is not None:
                return failure
            if failed_s is None and any(
                one.suspended or one.code for one in self.results.exits.values()
            ):
                failed_s, pinged = now(), self._ping_all()
            # A rank also fails when the host of another is lost, which does not answer and is the
            # cause.
            answered = all(one.bye is not None or one.pongs >= pings for one, pings in pinged)
            if failed_s is not None and now() - failed_s > SETTLE_S and answered:
                return None
        return self._find_lost_host()

    def _show_progress(self) -> None:
        """Call the progress callback of `run_to_end`, if there is one, with the last progress and
        the seconds in its phase; before the first progress, with the phase `starting` and the
        seconds since the session's creation.
        """
        if self._progress_callback is None:
            return
        if self.progress is None:
            self._progress_callback(PhaseProgress(STARTING, 0, 0, now() - self._created_s))
        else:
            self._progress_callback(replace(self.progress, elapsed_s=now() - self._phase_s))

    def _ping_all(self) -> list[tuple[Connection, int]]:
        """Ping every host now, and return each connection with the number of pings sent to it so
        far: once its `pongs` are as many, it has answered this one.
        """
        for host_connection in self.connections:
            host_connection.ping(immediately=True)
        return [(host_connection, host_connection.pings) for host_connection in self.connections]

    def _receive_messages(self) -> None:
        """Send heartbeats that are due, and handle all messages of the agents that have arrived, or
        wait up to `POLL_S` seconds for one.

        If this process itself was suspended (more than `STALLED_S` since the last call), the
        silence of every host is counted from now.
        """
        if now() - self._last_listen_s > STALLED_S:
            for host_connection in self.connections:
                host_connection.heard_s = now()
        self._last_listen_s = now()
        for host_connection in self.connections:
            if host_connection.bye is None and not host_connection.disconnected:
                host_connection.ping()
        try:
            host_connection, message = self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return
        while True:
            self._handle_message(host_connection, message)
            try:
                host_connection, message = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _handle_message(self, host_connection: Connection, message: Any) -> None:
        """Store one message of an agent in its connection or in the session's results, telemetry,
        load or progress; None says that the agent's output has ended.

        Exits of workers after the session began to stop them are not stored; `started` is ignored.
        """
        match message:
            case None:
                host_connection.disconnected = True
            case HelloMessage():
                host_connection.hello = message
            case ReachedMessage():
                host_connection.reached = message
            case PongMessage():
                host_connection.pongs += 1
            case ByeMessage():
                host_connection.bye = message
                self.results.stderr_tails |= message.stderr_tails
                self.results.stacks |= message.stacks
            case ProgressMessage():
                self._progress_s = now()
                if self.progress is None or self.progress.phase != message.phase:
                    self._phase_s = self._progress_s
                self.progress = PhaseProgress(message.phase, message.done, message.total, 0.0)
            case messages.TelemetryMessage():
                device_key = (host_connection.name, message.device)
                readings = self.telemetry.setdefault(
                    device_key,
                    DeviceReadings(host_connection.name, message.device, message.severity),
                )
                readings.add(message.period_s, message.columns)
            case LoadMessage():
                self.load_readings.setdefault(host_connection.name, LoadReadings()).add(message)
            case BorderMessage():
                self.results.add_border(message)
            case CalibrationMessage():
                self.results.calibrations[message.rank, message.stage] = message
            case RankFileMessage():
                self._store_rank_file(message)
            case WorkerEnded() if not self._stopping:
                self.results.exits[message.rank] = message

    def _store_rank_file(self, message: RankFileMessage) -> None:
        """Parse and store the rank file of a message in `results.rank_files`; if it cannot be read
        or did not arrive intact, store why in `results.unreadable`, and the rank's earlier file
        stays. Nothing is raised.
        """
        self.results.unreadable.pop(message.rank, None)
        try:
            if message.problem is not None or not messages.is_intact(message):
                raise ValueError(
                    message.problem or "its checksum differs from the one sent with it"
                )
            self.results.rank_files[message.rank] = parse_rank_file(message.text, message.rank)
        except ValueError as error:
            self.results.unreadable[message.rank] = str(error)

    def _find_lost_host(self) -> Failure | None:
        """Return the failure of the first host that is lost, else None: the failure that its agent
        gave in `bye`; `out_of_memory`, `connection_lost` (remote launcher) or `agent_killed` if its
        output ended without a bye; `host_silent` if nothing was heard for the site's `silence_s`
        seconds.
        """
        for host_connection in self.connections:
            if host_connection.bye is not None and host_connection.bye.failure is not None:
                return replace(
                    host_connection.bye.failure,
                    text=f"host {host_connection.name}: {host_connection.bye.failure.text}",
                )
            if host_connection.bye is not None:
                continue
            if host_connection.disconnected:
                code = host_connection.wait_for_exit_code()
                why = host_connection.read_output().splitlines()
                last_line = f": {why[-1].strip()}" if why else ""
                if why and OUT_OF_MEMORY_LINE.match(why[-1].strip()):
                    text = (
                        f"its agent ran out of memory (exit code {code}){last_line};"
                        f" {MORE_MEMORY_HINT}"
                    )
                    return Failure("out_of_memory", f"host {host_connection.name}: {text}")
                if self.launcher.remote:
                    return Failure(
                        "connection_lost",
                        f"host {host_connection.name}: its connection ended (exit code"
                        f" {code}){last_line}",
                    )
                return Failure(
                    "agent_killed",
                    f"host {host_connection.name}: its agent ended without a message (exit code"
                    f" {code}){last_line}",
                )
            if now() - host_connection.heard_s > self.site.silence_s:
                return Failure(
                    "host_silent",
                    f"host {host_connection.name}: no message from it for {self.site.silence_s:g}"
                    " s",
                )
        return None

    def _find_timeout(self, begin_s: float, hang_s: float, limit_s: float | None) -> Failure | None:
        """Return the failure `hang` if rank 0 has reported no progress for `hang_s` seconds,
        `time_limit` if more than `limit_s` (None: no limit) have passed since `begin_s`, else None.
        """
        phase = self.progress.phase if self.progress is not None else "start"
        if now() - self._progress_s > hang_s:
            return Failure(
                "hang", f"no progress from the workers for {hang_s:.12g} s, in phase {phase!r}"
            )
        if limit_s is not None and now() - begin_s > limit_s:
            return Failure(
                "time_limit",
                f"the run took longer than its limit of {limit_s:.12g} s, in phase {phase!r}",
            )
        return None

    def stop_agents(self, with_stacks: bool = False) -> None:
        """Ask all agents to end their workers, and wait up to `STOP_S` seconds for their last
        messages, but not for lost or silent ones; then end the processes that lead to them, handle
        what is left in the inbox, and clean up on hosts whose agent was lost. A second call does
        nothing.

        `with_stacks`: workers write their stack traces before they are ended.
        """
        if self._stopping:
            return
        self._stopping = True
        for host_connection in self.connections:
            if host_connection.bye is None:
                host_connection.send(StopMessage(token=self.token, stacks=with_stacks))
        end_s = now() + STOP_S
        while now() < end_s and any(
            host_connection.bye is None
            and not host_connection.disconnected
            and now() - host_connection.heard_s <= self.site.silence_s
            for host_connection in self.connections
        ):
            self._receive_messages()
        connection.close_connections(self.connections)
        while not self._inbox.empty():
            self._handle_message(*self._inbox.get())
        self._sweep_lost_hosts(
            [
                host_connection
                for host_connection in self.connections
                if host_connection.bye is None and host_connection.hello is not None
            ]
        )

    def _sweep_lost_hosts(self, lost: list[Connection]) -> None:
        """Start new agents on the hosts of lost ones, which end what those left running and delete
        its folders, and wait up to `SWEEP_S` seconds; then end these agents too.

        Hosts that cannot be reached are skipped: the old agent there ends it all by itself, as it
        hears nothing of the parent.
        """
        sweepers = []
        for host_connection in lost:
            # RuntimeError: a thread that cannot be started
            with suppress(OSError, RuntimeError):
                sweepers.append(
                    Connection(
                        host_connection.name,
                        self.commands[host_connection.name],
                        self.token,
                        host_connection.mark,
                        self._inbox,
                    )
                )
        for host_connection in sweepers:
            host_connection.send(
                SweepMessage(
                    token=self.token, mark=host_connection.mark, environment=self.site.environment
                )
            )
        end_s = now() + SWEEP_S
        while now() < end_s and any(
            host_connection.bye is None and not host_connection.disconnected
            for host_connection in sweepers
        ):
            self._receive_messages()
        connection.close_connections(sweepers)
