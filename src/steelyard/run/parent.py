"""The parent's side of a run: start agents and workers through a session, and write the record of
whatever came of it.

Called by cli/execute_runs.py with a `CheckedRequest`. Uses run/session.py to run, run/preflight.py
to check hosts, and run/assemble.py to make the record. It imports no framework.
"""

import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from steelyard import accelerators
from steelyard.data.prompts import SALT_DIGITS
from steelyard.engine import engine_rows
from steelyard.errors import LostError, RequestError
from steelyard.metrics import evidence
from steelyard.plan import auto_sizes
from steelyard.plan.auto_sizes import DeviceLimits
from steelyard.plan.degrees import Plan
from steelyard.record import record, record_file
from steelyard.record.record import EngineFacts, Record
from steelyard.record.run_facts import EngineDetails, Environment, HostFacts, StepDown
from steelyard.run import assemble, conformity, environment, failure, launch, preflight
from steelyard.run.assemble import RunTimes
from steelyard.run.checked_request import CheckedRequest
from steelyard.run.clock import now, read_utc_time
from steelyard.run.connection import Connection
from steelyard.run.failure import UNFINISHED, Failure, RankResults
from steelyard.run.launch import Allocation
from steelyard.run.messages import (
    CalibrationSpec,
    HelloMessage,
    OpenMessage,
    StartMessage,
    is_shipped,
)
from steelyard.run.providers import find_providers
from steelyard.run.session import ProgressCallback, Session
from steelyard.run.worker_files import RunSpec, fill_program_rank_files

# failures that a cancelled Slurm job causes
LOST_CODES = ("connection_lost", "agent_ended", "host_silent", "killed")
ACTIVE_JOB_STATES = (
    "RUNNING",
    "CONFIGURING",
    "SUSPENDED",
)  # as squeue calls a job that has its hosts
MAX_CONTRADICTIONS = 3  # contradictions listed in a reason
# steps of a pass; a run that fails later has cost too much to be restarted automatically
FIRST_STEPS = 20
WORKER_ENV = {
    "HF_HUB_OFFLINE": "1",
    # a worker exits without flushing, and its output must be complete
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # python -m would import whatever lies in the current folder
    "TOKENIZERS_PARALLELISM": "true",
}

WarningCallback = Callable[[str], None]


def run_case(
    checked: CheckedRequest,
    show_progress: ProgressCallback | None = None,
    allocation: Allocation | None = None,
    warn: WarningCallback | None = None,
) -> tuple[Record, Path]:
    """Run one case on its hosts, write its record into the output folder of the request, and return
    the record and the path of its file. Meanwhile a draft `...-unfinished.json` lies there.

    A run that fails, or is interrupted, after its hosts were checked also gives a record, with
    status `failed`. Raises RequestError if the folder is not writable and for what only a host or a
    worker finds wrong with the request, KeyboardInterrupt for an interrupt before that, and
    LostError if the record cannot be written. `show_progress` gets each `PhaseProgress`, `warn`
    each line of warning; `allocation` are the hosts that Slurm gave (None: not asked).
    """
    return CaseRun(checked, allocation, warn).run_and_record(show_progress)


class CaseRun:
    """One run of a case, from its first agent to its record: `run_and_record` does it all. Created
    by `run_case`; `session` leads the agents, `id`, `created` and `origin_s` are id, ISO time and
    start of the run.

    If a rank runs out of memory with sizes that were `auto`, there is a second attempt with smaller
    ones in a new session, begun at `second_attempt_s` (None: none); `checked` then holds the new
    sizes and `stepped_down` what was tried. `hellos` are the hosts' answers by host name,
    `salt` is for prompts of generation (empty: none), `draft_path` the file of the unfinished
    record (None: not written yet), `checkpoints_folder` relative to the output folder (None: none
    are saved).
    """

    def __init__(
        self, checked: CheckedRequest, allocation: Allocation | None, warn: WarningCallback | None
    ) -> None:
        """Take the start time, a random id and the name of the checkpoint folder of the run, and
        create its session; start and write nothing. Raises RequestError if there are not enough
        hosts.
        """
        self.checked, self.allocation, self.warn = checked, allocation, warn
        self.origin_s, self.created, self.id = now(), read_utc_time(), secrets.token_hex(16)
        self.checkpoints_folder = _name_checkpoints_folder(checked, self.created)
        self.salt = self._choose_salt()
        self.hellos: dict[str, HelloMessage] = {}
        self.second_attempt_s: float | None = None
        self.stepped_down: StepDown | None = None
        self.draft_path: Path | None = None
        self.session = Session(checked.launcher, checked.site, checked.plan.nodes, allocation)

    def _choose_salt(self) -> str:
        """Return the hex digits that make the prompts of this run unlike all others: the request's
        or, for generation, newly drawn ones; empty for other kinds of work.
        """
        if self.checked.request.salt is not None:
            return self.checked.request.salt
        return secrets.token_hex(SALT_DIGITS // 2) if self.checked.case.question.load else ""

    def run_and_record(self, show_progress: ProgressCallback | None) -> tuple[Record, Path]:
        """Run the case, in a second attempt with smaller sizes if memory ran out, write the record
        into the output folder, and return it with its path.

        A draft of the record with the reason `unfinished` lies in the folder during the run and is
        deleted at the end, so that a parent that is killed leaves it. Interrupts are ignored from
        the end of the workers until the record is written. Raises RequestError if the folder is not
        writable or the request turns out to be wrong, LostError if the record cannot be written.
        """
        record_file.prove_writable(self.checked.request.out)
        while True:
            with ExitStack() as interrupt_guard:
                run_failure = self._run_session(show_progress, interrupt_guard)
                smaller = self._choose_smaller_sizes(run_failure)
                if run_failure is None or smaller is None:
                    return self._write_record(run_failure)
                self._prepare_second_attempt(smaller, run_failure)

    def _run_session(
        self, show_progress: ProgressCallback | None, interrupt_guard: ExitStack
    ) -> Failure | None:
        """Run the session of this attempt to its end, and return why it failed, or None.

        Where Slurm's job has ended, a lost or killed host or rank (`LOST_CODES`) becomes the
        failure `cancelled`. A RequestError is passed on, except in a second attempt after the draft
        was written, where it becomes the failure `out_of_memory` with the first attempt's error.
        `interrupt_guard`: on it interrupts stay ignored, until the caller closes it.
        """
        request = self.checked.request
        try:
            run_failure = self.session.run_to_end(
                self._prepare,
                self.origin_s,
                request.hang_s,
                request.limit_s,
                show_progress,
                interrupt_guard,
                has_begun=lambda: self.draft_path is not None,
            )
        except RequestError as error:
            if self.draft_path is None or self.stepped_down is None:
                raise
            return Failure(
                "out_of_memory",
                f"{self.stepped_down.error}; a second attempt did not start: {error}",
            )
        if (
            run_failure is not None
            and run_failure.code in LOST_CODES
            and self.allocation is not None
        ):
            return _explain_cancelled_job(run_failure, self.allocation)
        return run_failure

    def _write_record(self, run_failure: Failure | None) -> tuple[Record, Path]:
        """Assemble the finished record, write it into the output folder, delete the draft, and
        return the record with its path.

        If the failure is `request` (a worker refused the request), only the draft is deleted and
        RequestError is raised with the worker's text. Raises LostError if the record cannot be
        written; the draft then stays.
        """
        if run_failure is not None and run_failure.code == "request":
            self._delete_draft()
            raise RequestError(run_failure.text.partition(": ")[2])
        finished = self._assemble_sound_record(run_failure)
        path = record.write_or_rescue_record(finished, self.checked.request.out)
        self._delete_draft()
        return finished, path

    def _choose_smaller_sizes(self, run_failure: Failure | None) -> CheckedRequest | None:
        """Return this run's request with smaller automatic sizes for a second attempt, or None if
        there is to be none.

        There is one only after a rank (not an agent) ran out of memory in the first attempt, if no
        rank has finished a headline pass, no more than `FIRST_STEPS` steps of the current pass were
        done, and a tune value was `auto` and can be smaller. Nothing is changed here.
        """
        headline = self.checked.case.question.kind_row.headline
        finished_passes = {
            window.pass_name
            for rank in self.session.results.ordered_rank_files
            for window in rank.windows
        }
        progress = self.session.progress
        is_late = (
            progress is not None
            and progress.phase in self.checked.passes
            and progress.done > FIRST_STEPS
        )
        # If an agent ran out of memory, smaller sizes do not help.
        cause_is_rank = (
            run_failure is not None
            and run_failure.code == "out_of_memory"
            and run_failure.rank is not None
        )
        if (
            not cause_is_rank
            or self.stepped_down is not None
            or is_late
            or not finished_passes.isdisjoint(headline)
        ):
            return None
        smaller = auto_sizes.choose_smaller_sizes(
            self.checked.request.resolved, self._device_limits()
        )
        return None if smaller is None else self.checked.with_resolved(smaller)

    def _prepare_second_attempt(self, smaller: CheckedRequest, run_failure: Failure) -> None:
        """Prepare a second attempt with the request `smaller`: note tried sizes and error in
        `stepped_down`, warn, delete the first attempt's checkpoints, and replace `checked`,
        `checkpoints_folder` and `session`.

        The draft is not deleted here, and the time of the first attempt stays a part of the run.
        """
        resolved = self.checked.request.resolved
        tried = {name: getattr(resolved.case.tune, name) for name in resolved.auto}
        self.stepped_down = StepDown(tune=tried, error=run_failure.text)
        if self.warn is not None:
            new_sizes = ", ".join(
                f"tune.{name}={getattr(smaller.case.tune, name)}" for name in resolved.auto
            )
            self.warn(
                f"out of memory with {', '.join(f'tune.{k}={v}' for k, v in tried.items())}; trying"
                f" again with {new_sizes}"
            )
        if self.checkpoints_folder is not None:
            shutil.rmtree(self.checked.request.out / self.checkpoints_folder, ignore_errors=True)
        self.checked, self.checkpoints_folder = (
            smaller,
            _name_checkpoints_folder(smaller, self.created),
        )
        self.second_attempt_s = now()
        self.session = Session(smaller.launcher, smaller.site, smaller.plan.nodes, self.allocation)

    def _device_limits(self) -> DeviceLimits:
        """Return what `auto` sizes of this run are chosen from: plan, sample size, the least device
        memory in bytes of a rank on the connected hosts (None: unknown), and of the engine whether
        its blocks are fused, whether it needs even sizes, and its memory factor.
        """
        checked = self.checked
        return DeviceLimits(
            plan=checked.plan,
            memory_bytes=preflight.find_least_memory(self.hellos, checked.plan),
            fused_blocks=checked.engine.fused,
            needs_even=checked.engine.even,
            memory_factor=checked.engine.memory_factor,
            sample_size=checked.scope.sample,
        )

    def _delete_draft(self) -> None:
        """Delete the file of the draft, the unfinished record of this run, if one was written."""
        if self.draft_path is not None:
            self.draft_path.unlink()

    def _write_draft(self) -> Path:
        """Write the draft, a failed record with the reason `unfinished` and nothing of the ranks,
        into the output folder as `...-unfinished.json`, and return its path; an earlier one is
        deleted first.

        Raises RequestError if it cannot be written, before a worker has started.
        """
        self._delete_draft()
        out = self.checked.request.out
        try:
            return record.write_record(
                self._assemble_record(UNFINISHED, RankResults()), out, "-unfinished"
            )
        except LostError as error:
            why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
            raise RequestError(
                f"output folder {str(out)!r} cannot be written: {why}; choose another with --out"
            ) from error

    def _prepare(self) -> StartMessage:
        """Connect to and check the hosts of this run, write the draft of the record (its path is
        stored in `draft_path`), and return the message that starts the workers: one per device, or
        a single one for an engine that starts its own processes.

        Raises RequestError if a host cannot take part or the draft cannot be written.
        """
        self._open_session()
        self.draft_path = self._write_draft()
        checked = self.checked
        one_worker = checked.engine.processes == "one"
        return StartMessage(
            run=self._make_run_spec().model_dump(mode="json", by_alias=True),
            calibration=self._make_calibration_spec(),
            world=1 if one_worker else checked.plan.world,
            workers=1 if one_worker else checked.plan.devices,
        )

    def _open_session(self) -> None:
        """Start an agent on every host of this run, check the hosts, choose the `auto` sizes and
        pass on warnings; no worker is started.

        Sets `hellos` and, in the first attempt only, `checked` with the chosen sizes. With several
        hosts, the others must reach the first host's address. Raises RequestError if a host cannot
        take part. A probe file in a shared output folder is removed again.
        """
        checked, case, plan = self.checked, self.checked.case, self.checked.plan
        needed = preflight.list_needed_paths(checked)
        variables = {
            **WORKER_ENV,
            **(
                accelerators.collect_settings(lambda row: row.deterministic_variables)
                if case.tune.deterministic
                else {}
            ),
            **case.tune.env,
        }
        with preflight.probe_shared_folder(checked, self.checkpoints_folder) as probe:
            self.hellos = self.session.connect_hosts(
                OpenMessage(
                    accelerator=checked.accelerator.name
                    if checked.accelerator is not None
                    else None,
                    devices=plan.devices,
                    matmul=case.question.precision.matmul,
                    interface=checked.site.interface,
                    environment=checked.site.environment,
                    variables=variables,
                    needs=list(checked.engine.needs),
                    python=None
                    if checked.engine.server
                    else checked.request.engine_settings.python,
                    engine_modules=self._list_engine_modules(),
                    paths=[names for names, _ in (*needed, *probe)],
                    silence_s=checked.site.silence_s,
                )
            )
        if self.second_attempt_s is None:
            self.checked = checked.with_resolved(
                auto_sizes.choose_sizes(checked.request.resolved, self._device_limits())
            )
            case = self.checked.case
        for warning in preflight.check_hosts(
            self.hellos,
            case,
            plan,
            [*needed, *probe],
            environment.hash_package(),
            is_elsewhere=checked.engine.endpoint,
        ):
            if self.warn is not None:
                self.warn(warning)
        first = next(iter(self.hellos.values()))
        if plan.nodes > 1 and first.address is not None and first.port is not None:
            self.session.check_reachable(first.address, first.port)

    def _list_engine_modules(self) -> list[str] | None:
        """Return the modules of the engine that agents are to identify, or None if there is nothing
        to compare its identity with: no version was tested here, and none is asked for.
        """
        engine = self.checked.engine
        wanted = self.checked.request.identify or conformity.is_tested(engine)
        return conformity.list_modules(engine) if wanted else None

    def _declare_details(self) -> EngineDetails:
        """Return what is known of the engine before its worker says more: that a server of the
        user's runs on what they declare.
        """
        if not self.checked.engine.endpoint:
            return EngineDetails()
        settings = self.checked.request.engine_settings
        return EngineDetails(is_external=True, device=settings.device, devices=settings.devices)

    def _find_engine_identity(self) -> str | None:
        """Return the identity of the engine that all hosts of this run have, or None if they
        differ, or one does not know it or was not asked.
        """
        identities = [hello.engine_identity for hello in self.hellos.values()]
        return conformity.merge_identities(
            None if identity is None else identity.hash for identity in identities
        )

    def _make_calibration_spec(self) -> CalibrationSpec:
        """Return what the processes are told that time matmuls before the engine is imported and
        after the passes: framework and device class, precision and determinism of this run.
        """
        case, framework = (
            self.checked.case,
            engine_rows.find_framework(self.checked.engine.framework),
        )
        accelerator = accelerators.find_accelerator(next(iter(self.hellos.values())).accelerator)
        return CalibrationSpec(
            framework=framework.make,
            device=accelerator.devices.get(framework.name),
            matmul=case.question.precision.matmul,
            deterministic=case.tune.deterministic,
            forks=framework.forks,
        )

    def _make_run_spec(self) -> RunSpec:
        """Return the parent's part of the workers' spec for this run, the same for all workers:
        case with chosen sizes, scope, passes, engine, plan, accelerator of the first host, and
        absolute paths (None: not given).
        """
        checked, request = self.checked, self.checked.request
        # in the record's folder; the record's name has the same end
        trace = f"{checked.case.name}-{self.id[:8]}.trace.json.gz"
        paths = {"weights": request.weights, "data": request.data, "tokenizer": request.tokenizer}
        paths["checkout"] = request.engine_settings.checkout
        framework = engine_rows.find_framework(checked.engine.framework).make
        return RunSpec(
            case=checked.case,
            scope=checked.scope,
            passes=checked.passes,
            engine=checked.engine.name,
            plan=checked.plan,
            accelerator=next(iter(self.hellos.values())).accelerator,
            resume=checked.resume.path if checked.resume else None,
            checkpoints=request.out.resolve() / self.checkpoints_folder
            if self.checkpoints_folder
            else None,
            explain=request.explain,
            trace=request.out.resolve() / trace if request.trace else None,
            rehearsed_rows=request.rehearsed_rows,
            settings=request.engine_settings,
            salt=self.salt,
            framework=framework if is_shipped(framework) else None,
            **{name: None if path is None else path.resolve() for name, path in paths.items()},
        )

    def _assemble_sound_record(self, run_failure: Failure | None) -> Record:
        """Return the sealed record of the session's results, after checking that it can be read
        again and does not contradict itself; nothing is written.

        Rank files may come from any program. If the record contradicts itself, the result is a
        failed one with the reason `contradiction`, in place of `run_failure`, and all samples. If
        no record can be made, it is one without the rank files, with reason `malformed` or, if the
        run had failed, its own with the error added.
        """
        results = self.session.results
        if self.checked.engine.processes == "one":
            results = replace(
                results,
                rank_files=fill_program_rank_files(results.rank_files, self.checked.plan.world),
            )
        try:
            finished = self._assemble_record(run_failure, results)
            Record.model_validate(record.record_to_json(finished))  # it must be readable again
            contradictions = evidence.find_contradictions(finished)
            if not contradictions:
                return finished
            rank = None if run_failure is None else run_failure.rank
            return self._assemble_record(
                Failure("contradiction", "; ".join(contradictions[:MAX_CONTRADICTIONS]), rank),
                results,
            )
        except Exception as error:  # noqa: BLE001  whatever it was goes into the record
            return self._assemble_record(
                failure.explain_assembly_error(run_failure, error),
                results.without_rank_files(error),
            )

    def _add_load(self, host: HostFacts) -> HostFacts:
        """Return the facts of a host with the CPU load readings that this run received from it as
        `load`, times on the parent's clock; the same object if there are none.
        """
        readings = self.session.load_readings.get(host.name)
        load = None if readings is None else readings.to_load()
        if load is None:
            return host
        shifted = load.model_copy(update={"t_s": [host.to_parent_clock(t_s) for t_s in load.t_s]})
        return host.model_copy(update={"load": shifted})

    def _assemble_record(self, run_failure: Failure | None, results: RankResults) -> Record:
        """Return the record of this run with metrics, checks and status derived and its hashes set
        (sealed); nothing is written.

        Made of the session's hosts, clocks, telemetry and times, these results and the failure
        (None: the run went well, status `valid` or `invalid`; else `failed`). Also makes the draft
        at the start, with the failure `UNFINISHED` and empty results. Raises whatever rank files
        that do not fit cause.
        """
        checked, request = self.checked, self.checked.request
        hosts = [
            self._add_load(_make_host_facts(one, i, checked.plan))
            for i, one in enumerate(self.session.connections)
        ]
        clocks = {one.name: one.to_parent_clock for one in hosts}
        telemetry = sorted(
            self.session.telemetry.values(),
            key=lambda readings: self.session.hosts.index(readings.host),
        )
        host_environment = _merge_environments(list(self.hellos.values()))
        identity = self._find_engine_identity()
        engine_facts = EngineFacts(
            name=request.engine,
            details=self._declare_details(),
            conforms=conformity.read_conformity(checked.engine, identity),
            identity=identity,
        )
        session, resume = self.session, checked.resume
        times = RunTimes(
            self.origin_s,
            session.agents_started_s,
            session.workers_started_s,
            now(),
            self.second_attempt_s,
        )
        draft = assemble.make_draft(
            request.resolved,
            engine_facts,
            id=self.id,
            created=self.created,
            environment=host_environment,
            site=checked.site.describe(),
            plan=checked.plan,
            scope=checked.scope,
            telemetry=[readings.to_series(clocks[readings.host]) for readings in telemetry],
            providers=find_providers(checked, list(self.hellos.values())),
            hosts=hosts,
            restarts=[] if resume is None else [resume.to_restart(request.out)],
            checkpoints=self._find_recorded_checkpoints(run_failure),
            stepped_down=self.stepped_down,
            asked_weights="random" if request.weights is None else "checkpoint",
        )
        return assemble.assemble_record(draft, checked.case, times, results, run_failure, resume)

    def _find_recorded_checkpoints(self, run_failure: Failure | None) -> str | None:
        """Return the folder of checkpoints that the record of this run names, relative to the
        output folder: for the draft (failure `UNFINISHED`) the planned one, which does not exist
        yet, else only a folder that exists. None if there is none.

        The draft names it early, because nothing adds the name later if the parent is killed.
        """
        planned = self.checkpoints_folder is not None and run_failure == UNFINISHED
        exists = (
            self.checkpoints_folder is not None
            and (self.checked.request.out / self.checkpoints_folder).is_dir()
        )
        return self.checkpoints_folder if planned or exists else None


def _merge_environments(hellos: list[HelloMessage]) -> Environment:
    """Return the environment of the first host with the devices of all hosts, in the order of the
    hosts: their software was checked to be the same. `hellos` must not be empty.
    """
    first = hellos[0].environment
    devices = [device for hello in hellos for device in hello.environment.hardware.devices]
    return first.model_copy(
        update={"hardware": first.hardware.model_copy(update={"devices": devices})}
    )


def _make_host_facts(connection: Connection, index: int, plan: Plan) -> HostFacts:
    """Return what the record states of host number `index` of the run: its ranks (`plan.devices`
    for each host, in order), hardware, state, and the offset, uncertainty and drift of its clock;
    raise ValueError if it sent no `hello`.
    """
    if connection.hello is None:
        raise ValueError("no hello message from a host of this run")
    hardware, clock = connection.hello.environment.hardware, connection.clock
    return HostFacts(
        name=connection.name,
        ranks=list(range(index * plan.devices, (index + 1) * plan.devices)),
        devices=hardware.devices,
        cpu=hardware.cpu,
        cpu_cores=hardware.cpu_cores,
        memory_bytes=hardware.memory_bytes,
        clock_offset_s=clock.offset_s,
        clock_uncertainty_s=clock.uncertainty_s,
        clock_drift=clock.estimate_drift(),
        **({} if connection.hello.state is None else {"state": connection.hello.state}),
    )


def _name_checkpoints_folder(checked: CheckedRequest, created: str) -> str | None:
    """Return a new name for this run's folder of checkpoints, relative to the output folder, as
    `checkpoints/TIME-CASE-RANDOM`, or None if it is no training case or has no
    `tune.checkpoint_every`. The folder is not created. `created` is the run's ISO time.
    """
    case = checked.case
    if not case.question.kind_row.trains or case.tune.checkpoint_every is None:
        return None
    stamp = re.sub(r"[^0-9T]", "", created.partition(".")[0])
    return f"checkpoints/{stamp}-{case.name}-{secrets.token_hex(4)}"


def _explain_cancelled_job(run_failure: Failure, allocation: Allocation) -> Failure:
    """Ask Slurm for the state of the allocation's job, and return the failure `cancelled`, with
    state and earlier text, if the job has ended or is unknown; return the given failure if the job
    is active or Slurm does not answer.
    """
    state = launch.ask_job_state(allocation.job)
    if state is None or state in ACTIVE_JOB_STATES:
        return run_failure
    how = "was cancelled" if state.startswith(("CANCEL", "COMPLETING")) else f"ended as {state}"
    return Failure("cancelled", f"Slurm job {allocation.job} {how}; {run_failure.text}")
