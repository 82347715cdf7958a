"""The parent's side of a run: lead its hosts through it, and make a record of whatever came of it.
Imports no framework.
"""

import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from steelyard import accelerators
from steelyard.errors import LostError, RequestError
from steelyard.metrics import evidence
from steelyard.plan import auto
from steelyard.plan.auto import Devices
from steelyard.plan.degrees import Plan
from steelyard.record import record, sealed
from steelyard.record.facts import EngineDetails, Environment, HostFacts, StepDown
from steelyard.record.record import EngineFacts, Record
from steelyard.run import assemble, conformity, environment, failure, launch, preflight
from steelyard.run.assemble import Times
from steelyard.run.boundary import RunSpec, of_program
from steelyard.run.clock import now, today
from steelyard.run.connection import Connection
from steelyard.run.failure import UNFINISHED, Failure, RankResults
from steelyard.run.launch import Allocation
from steelyard.run.messages import Hello, Open, Start
from steelyard.run.ready import Ready
from steelyard.run.session import Session, Watch

# what a cancelled job looks like from here
LOST = ("connection_lost", "agent_ended", "host_silent", "killed")
GOES_ON = ("RUNNING", "CONFIGURING", "SUSPENDED")  # as squeue calls a job that has its hosts
MOST = 3  # contradictions that a reason names
# of a pass: one that runs out of memory later has cost too much to be started again unasked
FIRST_STEPS = 20
WORKER_ENV = {
    "HF_HUB_OFFLINE": "1",
    # a worker ends without taking anything down, and what it said must be there
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # python -m would import whatever lies in the current folder
    "TOKENIZERS_PARALLELISM": "true",
}

Warn = Callable[[str], None]


def run_case(
    ready: Ready,
    watch: Watch | None = None,
    allocation: Allocation | None = None,
    warn: Warn | None = None,
) -> tuple[Record, Path]:
    """Run one case and write its record. What only a host or a worker finds wrong with a request
    raises RequestError.
    """
    return Run(ready, allocation, warn).to_record(watch)


class Run:
    """One run of a case, from the first agent to its record."""

    def __init__(self, ready: Ready, allocation: Allocation | None, warn: Warn | None) -> None:
        self.ready, self.allocation, self.warn = ready, allocation, warn
        self.origin_s, self.created, self.id = now(), today(), secrets.token_hex(16)
        self.kept = _checkpoints(ready, self.created)
        self.hellos: dict[str, Hello] = {}
        self.again_s: float | None = None
        self.stepped_down: StepDown | None = None
        self.draft: Path | None = None
        self.session = Session(ready.launcher, ready.site, ready.plan.nodes, allocation)

    def to_record(self, watch: Watch | None) -> tuple[Record, Path]:
        """The record lies there from the start, as one that has not ended: a parent that is killed
        leaves it.
        """
        sealed.writable(self.ready.request.out)
        while True:
            with ExitStack() as undisturbed:
                ended = self._attempt(watch, undisturbed)
                less = self._smaller(ended)
                if ended is None or less is None:
                    return self._finished(ended)
                self._begin_again(less, ended)

    def _attempt(self, watch: Watch | None, undisturbed: ExitStack) -> Failure | None:
        request = self.ready.request
        try:
            ended = self.session.lead(
                self._prepare,
                self.origin_s,
                request.hang_s,
                request.limit_s,
                watch,
                undisturbed,
                begun=lambda: self.draft is not None,
            )
        except RequestError as error:
            if self.draft is None or self.stepped_down is None:
                raise
            return Failure(
                "out_of_memory",
                f"{self.stepped_down.error}; a second attempt did not start: {error}",
            )
        if ended is not None and ended.code in LOST and self.allocation is not None:
            return _cancelled(ended, self.allocation)
        return ended

    def _finished(self, ended: Failure | None) -> tuple[Record, Path]:
        if ended is not None and ended.code == "request":
            self._forget_draft()
            raise RequestError(ended.text.partition(": ")[2])
        finished = self._assembled(ended)
        path = record.keep(finished, self.ready.request.out)
        self._forget_draft()
        return finished, path

    def _smaller(self, ended: Failure | None) -> Ready | None:
        """What to start once more after a run that ran out of memory with sizes that were chosen
        for it, and early.
        """
        headline = self.ready.case.question.kind_row.headline
        done = {window.pass_name for rank in self.session.results.ranks for window in rank.windows}
        said = self.session.progress
        late = said is not None and said.phase in self.ready.passes and said.done > FIRST_STEPS
        # An agent needs as much memory with any sizes.
        cause_is_rank = (
            ended is not None and ended.code == "out_of_memory" and ended.rank is not None
        )
        if (
            not cause_is_rank
            or self.stepped_down is not None
            or late
            or not done.isdisjoint(headline)
        ):
            return None
        less = auto.smaller(self.ready.request.resolved, self._devices())
        return None if less is None else self.ready.with_resolved(less)

    def _begin_again(self, less: Ready, ended: Failure) -> None:
        """A second attempt, with agents of its own. It is the same run: what the first took is a
        part of its time.
        """
        resolved = self.ready.request.resolved
        tried = {name: getattr(resolved.case.tune, name) for name in resolved.auto}
        self.stepped_down = StepDown(tune=tried, error=ended.text)
        if self.warn is not None:
            instead = ", ".join(
                f"tune.{name}={getattr(less.case.tune, name)}" for name in resolved.auto
            )
            self.warn(
                f"out of memory with {', '.join(f'tune.{k}={v}' for k, v in tried.items())}; once"
                f" more with {instead}"
            )
        if self.kept is not None:
            shutil.rmtree(self.ready.request.out / self.kept, ignore_errors=True)
        self.ready, self.kept = less, _checkpoints(less, self.created)
        self.again_s = now()
        self.session = Session(less.launcher, less.site, less.plan.nodes, self.allocation)

    def _devices(self) -> Devices:
        """What sizes that are auto are chosen by."""
        ready = self.ready
        return Devices(
            plan=ready.plan,
            memory_bytes=preflight.least_bytes(self.hellos, ready.plan),
            fused=ready.engine.fused,
            even=ready.engine.even,
            factor=ready.engine.memory_factor,
            sample=ready.scope.sample,
        )

    def _forget_draft(self) -> None:
        if self.draft is not None:
            self.draft.unlink()

    def _draft(self) -> Path:
        """Written before any work, it also shows that there is room for a record."""
        self._forget_draft()
        out = self.ready.request.out
        try:
            return record.write(self._assemble(UNFINISHED, RankResults()), out, "-unfinished")
        except LostError as error:
            why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
            raise RequestError(
                f"output folder {str(out)!r} cannot be written: {why}; choose another with --out"
            ) from error

    def _prepare(self) -> Start:
        """Open the session, write the draft of the record, and return what to start."""
        self._open()
        self.draft = self._draft()
        ready = self.ready
        one_worker = ready.engine.processes == "one"
        return Start(
            run=self._spec().model_dump(mode="json", by_alias=True),
            world=1 if one_worker else ready.plan.world,
            workers=1 if one_worker else ready.plan.devices,
        )

    def _open(self) -> None:
        """All that can be known without starting a worker. Nothing stays behind where a host cannot
        take part.
        """
        ready, case, plan = self.ready, self.ready.case, self.ready.plan
        needed = preflight.files(ready)
        variables = {
            **WORKER_ENV,
            **(
                accelerators.settings(lambda row: row.deterministic_variables)
                if case.tune.deterministic
                else {}
            ),
            **case.tune.env,
        }
        with preflight.shared_probe(ready, self.kept) as probe:
            self.hellos = self.session.open(
                Open(
                    accelerator=ready.accelerator.name if ready.accelerator is not None else None,
                    devices=plan.devices,
                    matmul=case.question.precision.matmul,
                    interface=ready.site.interface,
                    environment=ready.site.environment,
                    variables=variables,
                    needs=list(ready.engine.needs),
                    python=ready.request.engine_settings.python,
                    paths=[names for names, _ in (*needed, *probe)],
                    silence_s=ready.site.silence_s,
                )
            )
        if self.again_s is None:
            self.ready = ready.with_resolved(auto.choose(ready.request.resolved, self._devices()))
            case = self.ready.case
        for warning in preflight.check(
            self.hellos, case, plan, [*needed, *probe], environment.package_hash()
        ):
            if self.warn is not None:
                self.warn(warning)
        first = next(iter(self.hellos.values()))
        if plan.nodes > 1 and first.address is not None and first.port is not None:
            self.session.reach(first.address, first.port)

    def _spec(self) -> RunSpec:
        """Return what the workers are told of the run, with absolute paths."""
        ready, request = self.ready, self.ready.request
        # beside the record, whose name ends alike
        trace = f"{ready.case.name}-{self.id[:8]}.trace.json.gz"
        named = {"weights": request.weights, "data": request.data, "tokenizer": request.tokenizer}
        named["checkout"] = request.engine_settings.checkout
        return RunSpec(
            case=ready.case,
            scope=ready.scope,
            passes=ready.passes,
            engine=ready.engine.name,
            plan=ready.plan,
            accelerator=next(iter(self.hellos.values())).accelerator,
            resume=ready.resume.path if ready.resume else None,
            checkpoints=request.out.resolve() / self.kept if self.kept else None,
            explain=request.explain,
            trace=request.out.resolve() / trace if request.trace else None,
            **{name: None if path is None else path.resolve() for name, path in named.items()},
        )

    def _assembled(self, ended: Failure | None) -> Record:
        """Rank files are another program's words, and an engine's in them: what cannot be made
        sense of is a reason too.
        """
        results = self.session.results
        if self.ready.engine.processes == "one":
            results = replace(
                results, rank_files=of_program(results.rank_files, self.ready.plan.world)
            )
        try:
            finished = self._assemble(ended, results)
            Record.model_validate(record.to_table(finished))  # what is written must be read again
            wrong = evidence.contradictions(finished)
            if not wrong:
                return finished
            rank = None if ended is None else ended.rank
            return self._assemble(Failure("contradiction", "; ".join(wrong[:MOST]), rank), results)
        except Exception as error:  # noqa: BLE001  whatever it was goes into the record
            return self._assemble(
                failure.no_record(ended, error), results.without_rank_files(error)
            )

    def _with_load(self, host: HostFacts) -> HostFacts:
        """With the CPU time that was counted on it."""
        kept = self.session.load.get(host.name)
        found = None if kept is None else kept.load()
        if found is None:
            return host
        ours = found.model_copy(
            update={"t_s": [host.on_the_parents_clock(t_s) for t_s in found.t_s]}
        )
        return host.model_copy(update={"load": ours})

    def _assemble(self, ended: Failure | None, results: RankResults) -> Record:
        ready, request = self.ready, self.ready.request
        hosts = [
            self._with_load(_host(one, i, ready.plan))
            for i, one in enumerate(self.session.connections)
        ]
        clocks = {one.name: one.on_the_parents_clock for one in hosts}
        read = sorted(
            self.session.telemetry.values(), key=lambda kept: self.session.hosts.index(kept.host)
        )
        known = _environment(list(self.hellos.values()))
        # then the packages are those of that Python
        elsewhere = request.engine_settings.python is not None
        conforms = conformity.conforms(ready.engine, known.software.packages if elsewhere else None)
        session, resume = self.session, ready.resume
        times = Times(self.origin_s, session.spawned_s, session.started_s, now(), self.again_s)
        draft = assemble.draft(
            request.resolved,
            EngineFacts(name=request.engine, details=EngineDetails(), conforms=conforms),
            id=self.id,
            created=self.created,
            environment=known,
            site=ready.site.about(),
            plan=ready.plan,
            scope=ready.scope,
            telemetry=[kept.series(clocks[kept.host]) for kept in read],
            hosts=hosts,
            restarts=[] if resume is None else [resume.restart(request.out)],
            checkpoints=self._named_checkpoints(ended),
            stepped_down=self.stepped_down,
        )
        return assemble.assemble(draft, ready.case, times, results, ended, resume)

    def _named_checkpoints(self, ended: Failure | None) -> str | None:
        """Return the folder of checkpoints that the record names, or None for a run that ended
        without making one.

        The record of a run that has not ended names the folder before it exists: if the parent is
        killed, nothing adds the name later."""
        planned = self.kept is not None and ended == UNFINISHED
        exists = self.kept is not None and (self.ready.request.out / self.kept).is_dir()
        return self.kept if planned or exists else None


def _environment(hellos: list[Hello]) -> Environment:
    """Return the first host's environment with the devices of all: hosts of a run have the same
    software and devices.
    """
    first = hellos[0].environment
    devices = [device for one in hellos for device in one.environment.hardware.devices]
    return first.model_copy(
        update={"hardware": first.hardware.model_copy(update={"devices": devices})}
    )


def _host(one: Connection, index: int, plan: Plan) -> HostFacts:
    if one.hello is None:
        raise ValueError("a host that was not heard of has no part in a run")
    hardware, clock = one.hello.environment.hardware, one.clock
    return HostFacts(
        name=one.name,
        ranks=list(range(index * plan.devices, (index + 1) * plan.devices)),
        devices=hardware.devices,
        cpu=hardware.cpu,
        cpu_cores=hardware.cpu_cores,
        memory_bytes=hardware.memory_bytes,
        clock_offset_s=clock.offset_s,
        clock_uncertainty_s=clock.uncertainty_s,
        clock_drift=clock.drift(),
        **({} if one.hello.state is None else {"state": one.hello.state}),
    )


def _checkpoints(ready: Ready, created: str) -> str | None:
    """Where this run's checkpoints go, beside its record."""
    case = ready.case
    if not case.question.kind_row.trains or case.tune.checkpoint_every is None:
        return None
    stamp = re.sub(r"[^0-9T]", "", created.partition(".")[0])
    return f"checkpoints/{stamp}-{case.name}-{secrets.token_hex(4)}"


def _cancelled(ended: Failure, allocation: Allocation) -> Failure:
    """A host is also lost when its job is: Slurm knows."""
    state = launch.job_state(allocation.job)
    if state is None or state in GOES_ON:
        return ended
    how = "was cancelled" if state.startswith(("CANCEL", "COMPLETING")) else f"ended as {state}"
    return Failure("cancelled", f"Slurm job {allocation.job} {how}; {ended.text}")
