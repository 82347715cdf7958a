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

from steelyard.errors import MORE_MEMORY, OUT_OF_MEMORY_LINE, RequestError
from steelyard.run import connection, launch, messages, preflight, processes
from steelyard.run.boundary import read_rank
from steelyard.run.clock import PINGS, now
from steelyard.run.connection import Connection
from steelyard.run.failure import Failure, RankResults, find_failure
from steelyard.run.launch import Allocation, Launcher
from steelyard.run.load import LoadReadings
from steelyard.run.messages import (
    Bye,
    Hello,
    LoadSaid,
    Open,
    Pong,
    ProgressSaid,
    RankSaid,
    Reach,
    Reached,
    Start,
    Stop,
    Sweep,
    WorkerEnded,
)
from steelyard.run.site import Site
from steelyard.run.telemetry import DeviceReadings

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
    """The last progress that rank 0 reported, and the seconds since its phase began."""

    phase: str
    done: int
    total: int
    elapsed_s: float


Watch = Callable[[PhaseProgress], None]


class Session:
    """The node agents of one run, and all that they have reported so far.

    Creating it chooses the hosts and their command lines, and starts nothing; RequestError if there
    are not enough hosts.
    """

    def __init__(
        self, launcher: Launcher, site: Site, nodes: int, allocation: Allocation | None = None
    ) -> None:
        """Choose the hosts, their command lines, the run's token and the mark of its processes;
        start nothing. Raises RequestError if there are not enough hosts.
        """
        self.launcher, self.site = launcher, site
        self._watch: Watch | None = None
        self.hosts = launch.hosts(launcher, site, nodes, allocation)
        self.token = messages.token()
        self._mark = hashlib.sha256(self.token.encode()).hexdigest()[:16]
        self.commands = {host: launcher.command(site, host, allocation) for host in self.hosts}
        self.results = RankResults()
        self.telemetry: dict[tuple[str, str], DeviceReadings] = {}  # by host and device
        self.load: dict[str, LoadReadings] = {}  # by host
        self.progress: PhaseProgress | None = None
        self.connections: list[Connection] = []
        self.spawned_s = self.started_s = now()  # replaced when agents and workers are started
        self._inbox: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()
        self._stopping = False
        self._begun_s = self._awake_s = self._phase_s = self._progress_s = now()

    def lead(
        self,
        prepare: Callable[[], Start],
        origin_s: float,
        hang_s: float,
        limit_s: float | None,
        watch: Watch | None,
        undisturbed: ExitStack,
        begun: Callable[[], bool] = lambda: False,
    ) -> Failure | None:
        """Run from the first agent to the end of the last, and return why the run failed, or None.

        `prepare` opens the session, checks the hosts, and returns what to start. Ctrl-C raises
        KeyboardInterrupt until it has returned or `has_begun` returns True (there is a run to
        record), and is the failure `interrupted` afterwards. All agents are stopped before this
        returns or raises. From then on interrupts are ignored until the stack `interrupt_guard` is
        closed, so that the record can be written.

        `hang_s`: without news of the workers for so long, the run fails with `hang`; `limit_s`: the
        longest that workers may take. Times in seconds; `origin_s` is the start of the run on the
        parent's clock.
        """
        self._watch = watch
        start: Start | None = None
        failure: Failure | None = None
        try:
            start = prepare()
            failure = self._follow(start, origin_s, hang_s, limit_s)
        except KeyboardInterrupt as error:
            if start is None and not begun():
                raise
            where = "" if self.progress is None else f", in phase {self.progress.phase!r}"
            failure = Failure("interrupted", f"interrupted by {str(error) or 'the user'}{where}")
        finally:
            undisturbed.enter_context(processes.ignore_interrupts())
            self.stop()
        if failure is None and start is not None:
            workers = start.workers
            failure = find_failure(
                self.results, start.world, lambda rank: self._name(rank, workers)
            )
        if not self.results.tail(None if failure is None else failure.rank):
            self.results.agent_output = "\n".join(
                filter(None, (one.said() for one in self.connections))
            )
        return failure

    def _follow(
        self, start: Start, origin_s: float, hang_s: float, limit_s: float | None
    ) -> Failure | None:
        """Start the ranks on every host and wait until all have ended or something is wrong; return
        what, or None. Stack traces are collected if the run hangs.
        """
        first = self.connections[0].hello
        self.started_s = self._progress_s = self._phase_s = now()
        for index, one in enumerate(self.connections):
            own = {
                "token": self.token,
                "first_rank": index * start.workers,
                "origin_s": origin_s + one.clock.offset_s,
                "address": first.address if first is not None else None,
                "port": first.port if first is not None else None,
            }
            one.send(start.model_copy(update=own))
        failure = self._wait(hang_s, limit_s)
        if failure is not None and failure.code == "hang":
            self.stop(stacks=True)
        return failure

    def _name(self, rank: int, workers: int) -> str:
        """Return a rank's name for messages, with its host if there are several; `ranks_per_host`
        is the number of ranks per host.
        """
        return (
            f"rank {rank}"
            if len(self.hosts) == 1
            else f"rank {rank} on {self.hosts[rank // workers]}"
        )

    def open(self, asked: Open) -> dict[str, Hello]:
        """Start an agent on every host, send it `open_message` with the host's own token, mark and
        peer, wait for its `hello`, compare clocks by several pings, and return the `hello` messages
        by host name.

        Raises RequestError if an agent cannot be started, ends, or does not answer within `OPEN_S`
        seconds.
        """
        self.spawned_s = now()
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
        for index, one in enumerate(self.connections):
            peer = self.hosts[1 if index == 0 else 0].rpartition("@")[2] if several else None
            one.send(asked.model_copy(update={"token": self.token, "peer": peer, "mark": one.mark}))
        self._until(
            lambda: all(one.hello is not None for one in self.connections), OPEN_S, "no hello"
        )
        for _ in range(PINGS):
            for one in self.connections:
                one.ping(at_once=True)
            self._until(
                lambda: all(one.pongs >= one.pings for one in self.connections),
                OPEN_S,
                "no answer to a ping",
            )
        self.started_s = now()  # for the draft of the record; set again when workers start
        return {one.name: one.hello for one in self.connections if one.hello is not None}

    def reach(self, address: str, port: int) -> None:
        """Ask every host but the first whether it can connect to the address where rank 0 will be;
        raise RequestError if one cannot or does not answer.
        """
        others = self.connections[1:]
        for one in others:
            one.send(Reach(token=self.token, address=address, port=port))
        self._until(
            lambda: all(one.reached is not None for one in others),
            REACH_S,
            f"no word on whether it reaches {address}",
        )
        for one in others:
            if one.reached is not None and one.reached.problem is not None:
                raise RequestError(
                    f"host {one.name} does not reach {self.hosts[0]} at {address}:"
                    f" {one.reached.problem}; name an interface that hosts share in the site file"
                )

    def _until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Receive messages until `is_done` returns True; raise RequestError if an agent ends, or
        after `limit_s` seconds. `missing_text` says in the message what did not come.
        """
        end_s = now() + limit_s
        while not done():
            self._listen()
            self._show()
            for one in self.connections:
                if one.closed or one.bye is not None:
                    said = (
                        one.bye.failure.text
                        if one.bye is not None and one.bye.failure is not None
                        else one.said()
                    )
                    python = self.site.python_on(one.name)
                    raise RequestError(
                        preflight.not_started(
                            one.name, python, self.commands[one.name], one.exit_code(), said
                        )
                    )
                if now() > end_s:
                    late = [c for c in self.connections if c.hello is None] or self.connections
                    raise RequestError(f"host {late[0].name}: {what} for {limit_s:.0f} s")

    def _wait(self, hang_s: float, limit_s: float | None) -> Failure | None:
        """Wait until every agent has said bye, or something is wrong, and return what; return None
        if a rank failed, because its rank file and exit code tell why.
        """
        begun, failed = now(), None
        asked: list[tuple[Connection, int]] = []
        while not all(one.bye is not None for one in self.connections):
            self._listen()
            self._show()
            wrong = self._lost() or self._late(begun, hang_s, limit_s)
            if wrong is not None:
                return wrong
            if failed is None and any(
                one.suspended or one.code for one in self.results.exits.values()
            ):
                failed, asked = now(), self._ask()
            # A rank also fails when the host of another is lost, which does not answer and is the
            # cause.
            answered = all(one.bye is not None or one.pongs >= pings for one, pings in asked)
            if failed is not None and now() - failed > SETTLE_S and answered:
                return None
        return self._lost()

    def _show(self) -> None:
        """Call the progress callback, if there is one, with the last progress and the time in its
        phase.
        """
        if self._watch is None:
            return
        if self.progress is None:
            self._watch(PhaseProgress(STARTING, 0, 0, now() - self._begun_s))
        else:
            self._watch(replace(self.progress, elapsed_s=now() - self._phase_s))

    def _ask(self) -> list[tuple[Connection, int]]:
        """Ping every host now, and return each connection with the number of answers that it will
        have given when it answers this ping.
        """
        for one in self.connections:
            one.ping(at_once=True)
        return [(one, one.pings) for one in self.connections]

    def _listen(self) -> None:
        """Send heartbeats that are due, and handle all messages that have arrived, or wait a moment
        for one.

        If this process itself was suspended for more than `STALLED_S`, no host counts as silent for
        that time.
        """
        if now() - self._awake_s > STALLED_S:
            for one in self.connections:
                one.heard_s = now()
        self._awake_s = now()
        for one in self.connections:
            if one.bye is None and not one.closed:
                one.ping()
        try:
            one, message = self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return
        while True:
            self._take(one, message)
            try:
                one, message = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _take(self, one: Connection, message: Any) -> None:
        """Store one message of an agent in the connection or in the session's results; None says
        that the agent's output has ended. Exits after the session began to stop are not stored.
        """
        match message:
            case None:
                one.closed = True
            case Hello():
                one.hello = message
            case Reached():
                one.reached = message
            case Pong():
                one.pongs += 1
            case Bye():
                one.bye = message
                self.results.stderr_tails |= message.stderr_tails
                self.results.stacks |= message.stacks
            case ProgressSaid():
                self._progress_s = now()
                if self.progress is None or self.progress.phase != message.phase:
                    self._phase_s = self._progress_s
                self.progress = PhaseProgress(message.phase, message.done, message.total, 0.0)
            case messages.TelemetryRows():
                name = (one.name, message.device)
                kept = self.telemetry.setdefault(
                    name, DeviceReadings(one.name, message.device, message.severity)
                )
                kept.add(message.period_s, message.columns)
            case LoadSaid():
                self.load.setdefault(one.name, LoadReadings()).add(message)
            case RankSaid():
                self._rank(message)
            case WorkerEnded() if not self._stopping:
                self.results.exits[message.rank] = message

    def _rank(self, said: RankSaid) -> None:
        """Store a rank file, or why it cannot be read; then the rank's earlier file stays."""
        self.results.unreadable.pop(said.rank, None)
        try:
            if said.problem is not None or not messages.whole(said):
                raise ValueError(said.problem or "it did not arrive as it was sent")
            self.results.rank_files[said.rank] = read_rank(said.text, said.rank)
        except ValueError as error:
            self.results.unreadable[said.rank] = str(error)

    def _lost(self) -> Failure | None:
        """Return the failure of the first host whose agent ended by itself, whose connection ended
        without a bye, or of which nothing was heard for `silence_s` seconds; else None.
        """
        for one in self.connections:
            if one.bye is not None and one.bye.failure is not None:
                return replace(one.bye.failure, text=f"host {one.name}: {one.bye.failure.text}")
            if one.bye is not None:
                continue
            if one.closed:
                code = one.exit_code()
                why = one.said().splitlines()
                told = f": {why[-1].strip()}" if why else ""
                if why and OUT_OF_MEMORY_LINE.match(why[-1].strip()):
                    text = f"its agent ran out of memory (exit code {code}){told}; {MORE_MEMORY}"
                    return Failure("out_of_memory", f"host {one.name}: {text}")
                if self.launcher.remote:
                    return Failure(
                        "connection_lost",
                        f"host {one.name}: its connection ended (exit code {code}){told}",
                    )
                return Failure(
                    "agent_killed",
                    f"host {one.name}: its agent ended without a word (exit code {code}){told}",
                )
            if now() - one.heard_s > self.site.silence_s:
                return Failure(
                    "host_silent",
                    f"host {one.name}: nothing was heard of it for {self.site.silence_s:g} s",
                )
        return None

    def _late(self, begun: float, hang_s: float, limit_s: float | None) -> Failure | None:
        """Return the failure `hang` if workers have reported no progress for `hang_s` seconds,
        `time_limit` if more than `limit_s` have passed since `begin_s`, else None.
        """
        where = self.progress.phase if self.progress is not None else "start"
        if now() - self._progress_s > hang_s:
            return Failure(
                "hang", f"nothing was heard of the workers for {hang_s:.12g} s, in phase {where!r}"
            )
        if limit_s is not None and now() - begun > limit_s:
            return Failure(
                "time_limit",
                f"the run took longer than its limit of {limit_s:.12g} s, in phase {where!r}",
            )
        return None

    def stop(self, stacks: bool = False) -> None:
        """Stop all agents and wait up to `STOP_S` seconds for their last messages; then end their
        processes, and clean up on hosts whose agent was lost. A second call does nothing.

        `with_stacks`: workers write their stack traces before they are ended.
        """
        if self._stopping:
            return
        self._stopping = True
        for one in self.connections:
            if one.bye is None:
                one.send(Stop(token=self.token, stacks=stacks))
        end_s = now() + STOP_S
        while now() < end_s and any(
            one.bye is None and not one.closed and now() - one.heard_s <= self.site.silence_s
            for one in self.connections
        ):
            self._listen()
        connection.close(self.connections)
        while not self._inbox.empty():
            self._take(*self._inbox.get())
        self._sweep([one for one in self.connections if one.bye is None and one.hello is not None])

    def _sweep(self, lost: list[Connection]) -> None:
        """Start new agents on the hosts of lost ones to end what those left, and wait up to
        `SWEEP_S` seconds. On a host that cannot be reached the old agent ends it all by itself, as
        it hears nothing of the parent.
        """
        again = []
        for one in lost:
            with suppress(OSError):
                again.append(
                    Connection(one.name, self.commands[one.name], self.token, one.mark, self._inbox)
                )
        for one in again:
            one.send(Sweep(token=self.token, mark=one.mark, environment=self.site.environment))
        end_s = now() + SWEEP_S
        while now() < end_s and any(one.bye is None and not one.closed for one in again):
            self._listen()
        connection.close(again)
