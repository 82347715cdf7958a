"""The parent's side of a run: start agents and workers through a session, and write the record of
whatever came of it.

Called by cli/runs.py with a `CheckedRequest`. Uses run/session.py to run, run/preflight.py to check
hosts, and run/assemble.py to make the record. It imports no framework.
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

# failures that a cancelled Slurm job causes
LOST = ("connection_lost", "agent_ended", "host_silent", "killed")
GOES_ON = ("RUNNING", "CONFIGURING", "SUSPENDED")  # as squeue calls a job that has its hosts
MOST = 3  # contradictions listed in a reason
# steps of a pass; a run that fails later has cost too much to be restarted automatically
FIRST_STEPS = 20
WORKER_ENV = {
    "HF_HUB_OFFLINE": "1",
    # a worker exits without flushing, and its output must be complete
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
    """Run one case and write its record; return the record and its path.

    A run that fails after its start also gives a record. What only a host or a worker finds wrong
    with the request raises RequestError. `show_progress` is called with the progress, `warn` with
    warnings; `allocation` are Slurm's hosts.
    """
    return Run(ready, allocation, warn).to_record(watch)


class Run:
    """One run of a case, from its first agent to its record; it has a second attempt if the first
    runs out of memory with sizes that were chosen automatically.
    """

    def __init__(self, ready: Ready, allocation: Allocation | None, warn: Warn | None) -> None:
        """Take the start time, id and name of the checkpoint folder of the run, and create its
        session; start and write nothing.
        """
        self.ready, self.allocation, self.warn = ready, allocation, warn
        self.origin_s, self.created, self.id = now(), today(), secrets.token_hex(16)
        self.kept = _checkpoints(ready, self.created)
        self.hellos: dict[str, Hello] = {}
        self.again_s: float | None = None
        self.stepped_down: StepDown | None = None
        self.draft: Path | None = None
        self.session = Session(ready.launcher, ready.site, ready.plan.nodes, allocation)

    def to_record(self, watch: Watch | None) -> tuple[Record, Path]:
        """Run the case, write the record into the output folder, and return it with its path.

        A draft of the record with the reason `unfinished` lies in the folder during the run, so
        that a parent that is killed leaves it. Raises RequestError if the folder is not writable or
        the request turns out to be wrong.
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
        """Run the session once, and return why it failed, or None.

        A lost host is reported as `cancelled` if its Slurm job ended. A RequestError is passed on,
        except in a second attempt, where it becomes `out_of_memory`.
        """
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
        """Assemble and write the finished record, delete the draft, and return the record with its
        path; raise RequestError if a worker refused the request.
        """
        if ended is not None and ended.code == "request":
            self._forget_draft()
            raise RequestError(ended.text.partition(": ")[2])
        finished = self._assembled(ended)
        path = record.keep(finished, self.ready.request.out)
        self._forget_draft()
        return finished, path

    def _smaller(self, ended: Failure | None) -> Ready | None:
        """Return the request with smaller automatic sizes for a second attempt, or None if there is
        to be none.

        There is one only after a rank ran out of memory in the first attempt, before the headline
        pass was done and within the first `FIRST_STEPS` steps of a pass, if a tune value was `auto`
        and can be smaller.
        """
        headline = self.ready.case.question.kind_row.headline
        done = {window.pass_name for rank in self.session.results.ranks for window in rank.windows}
        said = self.session.progress
        late = said is not None and said.phase in self.ready.passes and said.done > FIRST_STEPS
        # If an agent ran out of memory, smaller sizes do not help.
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
        """Prepare a second attempt with smaller sizes and a new session: warn, delete the first
        one's checkpoints, and note what was tried. The time of the first attempt stays a part of
        the run.
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
        """Return memory limit, plan and engine properties from which `auto` sizes are chosen."""
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
        """Delete the draft of the record, if there is one."""
        if self.draft is not None:
            self.draft.unlink()

    def _draft(self) -> Path:
        """Write the draft of the record, replacing an earlier one, and return its path; raise
        RequestError if it cannot be written. It also shows that there is room for a record.
        """
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
        """Open the session, write the draft of the record, and return the message that starts the
        workers.
        """
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
        """Connect to the hosts, check them, choose `auto` sizes and warn; raise RequestError if a
        host cannot take part. No worker is started, and no file stays behind.
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
        # in the record's folder; the record's name has the same end
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
        """Return the record of the session's results, and check that it can be read again and does
        not contradict itself.

        Rank files may come from any program: if no record can be made of them, or it contradicts
        itself, the result is a failed record with the reason `malformed` or `contradiction`.
        """
        results = self.session.results
        if self.ready.engine.processes == "one":
            results = replace(
                results, rank_files=of_program(results.rank_files, self.ready.plan.world)
            )
        try:
            finished = self._assemble(ended, results)
            Record.model_validate(record.to_table(finished))  # it must be readable again
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
        """Return the host's facts with its CPU load readings, on the parent's clock; unchanged if
        there are none.
        """
        kept = self.session.load.get(host.name)
        found = None if kept is None else kept.load()
        if found is None:
            return host
        ours = found.model_copy(
            update={"t_s": [host.on_the_parents_clock(t_s) for t_s in found.t_s]}
        )
        return host.model_copy(update={"load": ours})

    def _assemble(self, ended: Failure | None, results: RankResults) -> Record:
        """Assemble the sealed record from the session's state, these results and the failure, if
        any.
        """
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
        # then the packages of that Python count
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
        """Return the folder of checkpoints that the record names, relative to the output folder, or
        None for a run that ended without making one.

        The draft names the folder before it exists: if the parent is killed, nothing adds the name
        later.
        """
        planned = self.kept is not None and ended == UNFINISHED
        exists = self.kept is not None and (self.ready.request.out / self.kept).is_dir()
        return self.kept if planned or exists else None


def _environment(hellos: list[Hello]) -> Environment:
    """Return the first host's environment with the devices of all hosts: hosts of a run have the
    same software.
    """
    first = hellos[0].environment
    devices = [device for one in hellos for device in one.environment.hardware.devices]
    return first.model_copy(
        update={"hardware": first.hardware.model_copy(update={"devices": devices})}
    )


def _host(one: Connection, index: int, plan: Plan) -> HostFacts:
    """Return what the record states of host number `index`: its ranks, hardware, state and clock
    offset; raise ValueError if it sent no `hello`.
    """
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
    """Return a new name for this run's folder of checkpoints, relative to the output folder, or
    None if the run keeps none. The folder is not created.
    """
    case = ready.case
    if not case.question.kind_row.trains or case.tune.checkpoint_every is None:
        return None
    stamp = re.sub(r"[^0-9T]", "", created.partition(".")[0])
    return f"checkpoints/{stamp}-{case.name}-{secrets.token_hex(4)}"


def _cancelled(ended: Failure, allocation: Allocation) -> Failure:
    """Return the failure `cancelled` if Slurm says that the job of the lost host has ended, else
    the given failure.
    """
    state = launch.job_state(allocation.job)
    if state is None or state in GOES_ON:
        return ended
    how = "was cancelled" if state.startswith(("CANCEL", "COMPLETING")) else f"ended as {state}"
    return Failure("cancelled", f"Slurm job {allocation.job} {how}; {ended.text}")
