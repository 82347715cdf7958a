"""One run over its hosts, as the parent leads it: open, check, start, listen until the end, and leave nothing behind."""

import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from steelyard.errors import MORE_MEMORY, OUT_OF_MEMORY_LINE, RequestError
from steelyard.run import connection, messages, preflight
from steelyard.run.clock import now
from steelyard.run.clocks import PINGS
from steelyard.run.connection import Connection
from steelyard.run.launch import Allocation, Launcher
from steelyard.run.load import Kept as KeptLoad
from steelyard.run.messages import (
    Bye,
    Exit,
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
)
from steelyard.run.outcome import Verdict
from steelyard.run.site import Site
from steelyard.run.spec import RankFile, read_rank
from steelyard.run.telemetry import Kept

POLL_S = 0.05
OPEN_S = 90.0  # until every host has said hello; a first import over a network file system takes its time
REACH_S = 15.0
SETTLE_S = 0.5  # after the first rank failed: those that failed with it can still say so
STOP_S = 20.0  # for agents to end their workers, kindly and then for certain
SWEEP_S = 15.0
STARTING = "starting"  # the phase until a worker tells its own
STALLED_S = 2.0  # between two looks: this process itself was stopped


@dataclass(frozen=True)
class PhaseProgress:
    """What the workers last said, and since when that phase goes on."""

    phase: str
    done: int
    total: int
    elapsed_s: float


Watch = Callable[[PhaseProgress], None]


@dataclass
class Heard:
    """What the hosts have said so far."""

    ranks: dict[int, RankFile] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)  # why the last file of a rank is none
    exits: dict[int, Exit] = field(default_factory=dict)  # that nobody asked for
    telemetry: dict[tuple[str, str], Kept] = field(default_factory=dict)
    load: dict[str, KeptLoad] = field(default_factory=dict)  # by host
    progress: PhaseProgress | None = None
    progress_s: float = 0.0  # when it last changed
    phase_s: float = 0.0


class Session:
    def __init__(
        self, launcher: Launcher, site: Site, hosts: list[str], allocation: Allocation | None, token: str, mark: str
    ) -> None:
        self.launcher, self.site, self.hosts, self.token = launcher, site, hosts, token
        # One each: two names may lead to one machine, or to hosts that see each other's processes and temporary files.
        self._marks = [f"{mark}-{index}" for index in range(len(hosts))]
        self.commands = {host: launcher.command(site, host, allocation) for host in hosts}
        self.heard = Heard()
        self._watch: Watch | None = None
        self._inbox: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()
        self.connections: list[Connection] = []
        self._stopping = False
        self._begun_s = self._awake_s = now()

    def open(self, asked: Open, watch: Watch | None = None) -> dict[str, Hello]:
        """Reach every host and hear what it has. One that cannot be reached raises RequestError."""
        self._watch = watch
        for host, mark in zip(self.hosts, self._marks, strict=True):
            try:
                self.connections.append(Connection(host, self.commands[host], self.token, mark, self._inbox))
            except (OSError, RuntimeError) as error:  # RuntimeError: a thread that cannot be started
                why = getattr(error, "strerror", None) or error
                raise RequestError(f"{self.commands[host][0]} cannot be started: {why}") from error
        several = len(self.hosts) > 1
        for index, one in enumerate(self.connections):
            peer = self.hosts[1 if index == 0 else 0].rpartition("@")[2] if several else None
            one.send(asked.model_copy(update={"peer": peer, "mark": one.mark}))
        self._until(lambda: all(one.hello is not None for one in self.connections), OPEN_S, "no hello")
        for _ in range(PINGS):
            for one in self.connections:
                one.ping(at_once=True)
            self._until(lambda: all(one.pongs >= one.pings for one in self.connections), OPEN_S, "no answer to a ping")
        return {one.name: one.hello for one in self.connections if one.hello is not None}

    def reach(self, address: str, port: int) -> None:
        """Every other host must get to the address where rank 0 will be."""
        others = self.connections[1:]
        for one in others:
            one.send(Reach(token=self.token, address=address, port=port))
        self._until(lambda: all(one.reached is not None for one in others), REACH_S, f"no word on whether it reaches {address}")
        for one in others:
            if one.reached is not None and one.reached.problem is not None:
                raise RequestError(
                    f"host {one.name} does not reach {self.hosts[0]} at {address}: {one.reached.problem}; "
                    "name an interface that hosts share in the site file"
                )

    def _until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Listen until something is so, before anything was started."""
        end_s = now() + limit_s
        while not done():
            self._listen()
            self._show()
            for one in self.connections:
                if one.closed or one.bye is not None:
                    said = one.bye.problem if one.bye is not None and one.bye.problem else one.said()
                    python = self.site.python_on(one.name)
                    raise RequestError(preflight.not_started(one.name, python, self.commands[one.name], one.exit_code(), said))
                if now() > end_s:
                    late = [c for c in self.connections if c.hello is None] or self.connections
                    raise RequestError(f"host {late[0].name}: {what} for {limit_s:.0f} s")

    def start(self, start: Callable[[Connection, int], Start]) -> None:
        self.heard.progress_s = self.heard.phase_s = now()
        for index, one in enumerate(self.connections):
            one.send(start(one, index))

    def wait(self, hang_s: float, limit_s: float | None, watch: Watch | None) -> Verdict:
        """Until every agent has said its last word, or something is wrong. Says what; a rank that failed says it itself."""
        begun, failed, self._watch = now(), None, watch
        asked: list[tuple[Connection, int]] = []
        while not all(one.bye is not None for one in self.connections):
            self._listen()
            self._show()
            wrong = self._lost() or self._late(begun, hang_s, limit_s)
            if wrong is not None:
                return wrong
            if failed is None and any(one.stopped or one.code for one in self.heard.exits.values()):
                failed, asked = now(), self._ask()
            if failed is not None and now() - failed > SETTLE_S and self._answered(asked):
                return Verdict(None)
        return self._lost() or Verdict(None)

    def _show(self) -> None:
        if self._watch is None:
            return
        last = self.heard.progress
        if last is None:
            self._watch(PhaseProgress(STARTING, 0, 0, now() - self._begun_s))
        else:
            self._watch(PhaseProgress(last.phase, last.done, last.total, now() - self.heard.phase_s))

    def _ask(self) -> list[tuple[Connection, int]]:
        """Ping every host now; with each the number of answers that it then has given."""
        for one in self.connections:
            one.ping(at_once=True)
        return [(one, one.pings) for one in self.connections]

    def _answered(self, asked: list[tuple[Connection, int]]) -> bool:
        """Whether all have. A rank also fails when the host of another is lost, which does not answer and is the cause."""
        return all(one.bye is not None or one.pongs >= pings for one, pings in asked)

    def _listen(self) -> None:
        """One message, or a moment without; and the heartbeat. What was said while this process was stopped is heard first."""
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
        heard = self.heard
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
            case ProgressSaid():
                last = heard.progress
                heard.progress_s = now()
                if last is None or last.phase != message.phase:
                    heard.phase_s = heard.progress_s
                heard.progress = PhaseProgress(message.phase, message.done, message.total, 0.0)
            case messages.TelemetryRows():
                name = (one.name, message.device)
                kept = heard.telemetry.setdefault(name, Kept(one.name, message.device, message.severity))
                kept.add(message.period_s, message.columns)
            case LoadSaid():
                heard.load.setdefault(one.name, KeptLoad()).add(message)
            case RankSaid():
                self._rank(message)
            case Exit() if not self._stopping:
                heard.exits[message.rank] = message

    def _rank(self, said: RankSaid) -> None:
        """The one before stands, where this cannot be read."""
        self.heard.unreadable.pop(said.rank, None)
        try:
            if said.problem is not None or not messages.whole(said):
                raise ValueError(said.problem or "it did not arrive as it was sent")
            self.heard.ranks[said.rank] = read_rank(said.text, said.rank)
        except ValueError as error:
            self.heard.unreadable[said.rank] = str(error)

    def _lost(self) -> Verdict | None:
        """A host that is gone, or does not say anything."""
        for one in self.connections:
            if one.bye is not None and one.bye.code is not None:
                return Verdict(one.bye.code, f"host {one.name}: {one.bye.problem}")
            if one.bye is not None:
                continue
            if one.closed:
                code = one.exit_code()
                why = one.said().splitlines()
                told = f": {why[-1].strip()}" if why else ""
                if why and OUT_OF_MEMORY_LINE.match(why[-1].strip()):
                    text = f"its agent ran out of memory (exit code {code}){told}; {MORE_MEMORY}"
                    return Verdict("out_of_memory", f"host {one.name}: {text}")
                if self.launcher.remote:
                    return Verdict("connection_lost", f"host {one.name}: its connection ended (exit code {code}){told}")
                return Verdict("agent_killed", f"host {one.name}: its agent ended without a word (exit code {code}){told}")
            if now() - one.heard_s > self.site.silence_s:
                return Verdict("host_silent", f"host {one.name}: nothing was heard of it for {self.site.silence_s:g} s")
        return None

    def _late(self, begun: float, hang_s: float, limit_s: float | None) -> Verdict | None:
        last = self.heard.progress
        where = last.phase if last is not None else "start"
        if now() - self.heard.progress_s > hang_s:
            return Verdict("hang", f"nothing was heard of the workers for {hang_s:.12g} s, in phase {where!r}")
        if limit_s is not None and now() - begun > limit_s:
            return Verdict("time_limit", f"the run took longer than its limit of {limit_s:.12g} s, in phase {where!r}")
        return None

    def stop(self, stacks: bool = False) -> None:
        """Tell all agents to end, and wait for their last words. What a host that is lost may have left is swept up."""
        if self._stopping:
            return
        self._stopping = True
        for one in self.connections:
            if one.bye is None:
                one.send(Stop(token=self.token, stacks=stacks))
        silent_s = self.site.silence_s
        end_s = now() + STOP_S
        while now() < end_s and any(self._talks(one, silent_s) for one in self.connections):
            self._listen()
        connection.close(self.connections)
        while not self._inbox.empty():
            self._take(*self._inbox.get())
        self._sweep([one for one in self.connections if one.bye is None and one.hello is not None])

    @staticmethod
    def _talks(one: Connection, silent_s: float) -> bool:
        return one.bye is None and not one.closed and now() - one.heard_s <= silent_s

    def _sweep(self, lost: list[Connection]) -> None:
        """Ask new agents on those hosts to end what the lost ones left. A host that cannot be reached ends it by itself: its
        agent hears nothing of us."""
        again = []
        for one in lost:
            with suppress(OSError):
                again.append(Connection(one.name, self.commands[one.name], self.token, one.mark, self._inbox))
        for one in again:
            one.send(Sweep(token=self.token, mark=one.mark, environment=self.site.environment))
        end_s = now() + SWEEP_S
        while now() < end_s and any(one.bye is None and not one.closed for one in again):
            self._listen()
        connection.close(again)


def last_words(connections: list[Connection]) -> dict[int, str]:
    """The tail of each rank's stderr."""
    return {rank: text for one in connections if one.bye is not None for rank, text in one.bye.stderr_tails.items()}
