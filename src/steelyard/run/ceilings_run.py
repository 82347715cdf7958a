"""The parent's side of `steelyard spec`: lead this host's workers through it, and make a record of whatever came of it."""

import hashlib
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from steelyard import accelerators
from steelyard.errors import RequestError
from steelyard.metrics import ceilings
from steelyard.plan.degrees import MOST_DEVICES, Plan
from steelyard.record import sealed, spec
from steelyard.record.facts import Environment, RankFacts, Software
from steelyard.record.record import Failure, Reason
from steelyard.record.spec import SpecRecord
from steelyard.run import launch, messages, outcome, preflight, processes
from steelyard.run.boundary import RankFile
from steelyard.run.ceilings import FRAMEWORK, FULL, QUICK, CeilingsSpec
from steelyard.run.clock import now, today
from steelyard.run.connection import Connection
from steelyard.run.messages import Hello, Open, Start
from steelyard.run.outcome import Left, Verdict
from steelyard.run.parent import WORKER_ENV, Warn
from steelyard.run.session import Session, Watch, last_words
from steelyard.run.site import Site

HANG_S = 300.0  # without a sign of life; one row takes seconds
MOST_S = 24 * 3600.0  # for all rows
SPARE_S = 600.0  # beyond the time of all rows, for what is made and checked before each


@dataclass(frozen=True)
class SpecRequest:
    accelerator: str | None
    devices: int
    quick: bool
    out: Path
    limit_s: float | None = None


class SpecRun:
    def __init__(self, request: SpecRequest) -> None:
        processes.check()
        self.request = request
        self.limits = QUICK if request.quick else FULL
        if request.limit_s is not None:
            if not 1 <= request.limit_s <= MOST_S:
                raise RequestError(f"--limit {request.limit_s:g}: must be from 1 to {MOST_S:g} seconds")
            self.limits = self.limits.model_copy(update={"total_s": request.limit_s})
        if not 1 <= request.devices <= MOST_DEVICES:
            raise RequestError(f"--devices {request.devices}: must be 1 to {MOST_DEVICES}")
        self.accelerator = accelerators.named(request.accelerator) if request.accelerator else accelerators.detect()
        self.plan = Plan(nodes=1, devices=request.devices, tp=1, pp=1, dp=request.devices, launcher="local")
        self.origin_s, self.created, self.id = now(), today(), secrets.token_hex(16)
        self.token = messages.token()
        launcher, site = launch.named("local"), Site()
        mark = hashlib.sha256(self.token.encode()).hexdigest()[:16]
        self.session = Session(launcher, site, launch.hosts(launcher, site, 1, None), None, self.token, mark)
        self.started_s = self.origin_s
        self.hello: Hello | None = None

    def to_record(self, watch: Watch | None, warn: Warn) -> tuple[SpecRecord, Path]:
        """Whatever came of it, once workers were started; what is wrong with the request raises RequestError."""
        sealed.writable(self.request.out)
        with ExitStack() as undisturbed:
            try:
                self.hello = self._open(warn)
                verdict = self._lead(self.hello, watch)
            except KeyboardInterrupt as error:
                if self.hello is None:
                    raise  # nothing was started
                verdict = Verdict("interrupted", f"interrupted by {str(error) or 'the user'}")
            finally:
                undisturbed.enter_context(processes.ignore_interrupts())  # until the record is there
                self.session.stop(stacks=False)
            made = self._assemble(self.hello, verdict)
            return made, spec.write(made, self.request.out)

    def _open(self, warn: Warn) -> Hello:
        asked = Open(
            token=self.token,
            mark="",
            accelerator=self.accelerator.name,
            devices=self.plan.devices,
            matmul="bf16",
            interface=None,
            peer=None,
            environment={},
            variables=WORKER_ENV,
            needs=[FRAMEWORK],
            paths=[],
        )
        (name, hello), *_ = self.session.open(asked).items()
        preflight.able(name, hello, self.plan, [])
        for device in hello.devices[: self.plan.devices]:
            if device.busy is not None:
                warn(f"{device.name} is also used by {device.busy}: neither will show what it can do")
        return hello

    def _lead(self, hello: Hello, watch: Watch | None) -> Verdict:
        told = CeilingsSpec(
            accelerator=hello.accelerator,
            plan=self.plan,
            quick=self.request.quick,
            limits=self.limits,
            folder=Path(),  # the agent's own, and its own clock
            origin_s=0.0,
        ).model_dump(mode="json")

        def start(one: Connection, index: int) -> Start:
            return Start(
                token=self.token,
                spec=told,
                first_rank=0,
                world=self.plan.world,
                workers=self.plan.devices,
                worker="steelyard.run.ceilings",
                origin_s=self.origin_s + one.clock.offset_s,
            )

        self.started_s = now()
        self.session.start(start)
        verdict = self.session.wait(HANG_S, self.limits.total_s + SPARE_S, watch)
        if verdict.code == "hang":
            self.session.stop(stacks=True)
        return verdict

    def _assemble(self, hello: Hello, verdict: Verdict) -> SpecRecord:
        heard, tails = self.session.heard, last_words(self.session.connections)
        ranks = [heard.ranks[rank] for rank in sorted(heard.ranks)]
        if verdict.code is None:
            verdict = outcome.judge(Left(ranks, heard.exits, heard.unreadable, tails), self.plan, self.session.hosts)
        if verdict.code == "request":
            raise RequestError(verdict.text.partition(": ")[2])
        draft = SpecRecord(
            id=self.id,
            created=self.created,
            status="valid" if verdict.code is None else "failed",
            reasons=[] if verdict.code is None else [Reason(code=verdict.code, text=verdict.text)],
            quick=self.request.quick,
            limits=self.limits,
            devices=self.plan.devices,
            environment=_environment(hello, ranks),
            budget=self._budget(ranks),
            ranks=[RankFacts(host=self.session.hosts[0], **rank.facts().model_dump()) for rank in ranks],
            benches=[bench for rank in ranks for bench in rank.benches],
            telemetry=[kept.series(lambda t_s: t_s) for kept in heard.telemetry.values()],
            ceilings=[],
            failure=None if verdict.code is None else self._failure(verdict, tails),
        )
        return spec.seal(draft.model_copy(update={"ceilings": ceilings.derive(draft)}))

    def _failure(self, verdict: Verdict, tails: dict[int, str]) -> Failure:
        tail = tails.get(verdict.rank, "") if verdict.rank is not None else "\n".join(filter(None, tails.values()))
        exited = self.session.heard.exits.get(verdict.rank) if verdict.rank is not None else None
        return Failure(
            rank=verdict.rank,
            exit_code=exited.code if exited else None,
            error=verdict.text,
            stderr_tail=tail[-outcome.TAIL_CHARS :],
            stacks={rank: text for one in self.session.connections if one.bye for rank, text in one.bye.stacks.items()},
        )

    def _budget(self, ranks: list[RankFile]) -> dict[str, float]:
        """Wall time by name, adding up to all of it; what a rank's own parts leave is `launch`."""
        parts = ranks[0].budget if ranks else {}
        agents_s, worked_s = self.started_s - self.origin_s, now() - self.started_s
        return {"agents": agents_s, "launch": worked_s - sum(parts.values()), **parts}


def _environment(hello: Hello, ranks: list[RankFile]) -> Environment:
    """With the versions that only the framework knows."""
    told = hello.environment
    software = Software(**{**told.software.model_dump(), **(ranks[0].versions if ranks else {})})
    return told.model_copy(update={"software": software})
