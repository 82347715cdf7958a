"""The parent's side of a run: start agents and workers through a session, and write the record of
whatever came of it.

Called by cli/execute_runs.py with a `CheckedRequest`. Uses run/session.py to run, run/preflight.py to check
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
from steelyard.run.messages import HelloMessage, OpenMessage, StartMessage
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
    """Run one case and write its record; return the record and its path.

    A run that fails after its start also gives a record. What only a host or a worker finds wrong
    with the request raises RequestError. `show_progress` is called with the progress, `warn` with
    warnings; `allocation` are Slurm's hosts.
    """
    return CaseRun(checked, allocation, warn).run_and_record(show_progress)


class CaseRun:
    """One run of a case, from its first agent to its record; it has a second attempt if the first
    runs out of memory with sizes that were chosen automatically.
    """

    def __init__(
        self, checked: CheckedRequest, allocation: Allocation | None, warn: WarningCallback | None
    ) -> None:
        """Take the start time, id and name of the checkpoint folder of the run, and create its
        session; start and write nothing.
        """
        self.checked, self.allocation, self.warn = checked, allocation, warn
        self.origin_s, self.created, self.id = now(), read_utc_time(), secrets.token_hex(16)
        self.checkpoints_folder = _name_checkpoints_folder(checked, self.created)
        self.hellos: dict[str, HelloMessage] = {}
        self.second_attempt_s: float | None = None
        self.stepped_down: StepDown | None = None
        self.draft_path: Path | None = None
        self.session = Session(checked.launcher, checked.site, checked.plan.nodes, allocation)

    def run_and_record(self, show_progress: ProgressCallback | None) -> tuple[Record, Path]:
        """Run the case, write the record into the output folder, and return it with its path.

        A draft of the record with the reason `unfinished` lies in the folder during the run, so
        that a parent that is killed leaves it. Raises RequestError if the folder is not writable or
        the request turns out to be wrong.
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
        """Run the session once, and return why it failed, or None.

        A lost host is reported as `cancelled` if its Slurm job ended. A RequestError is passed on,
        except in a second attempt, where it becomes `out_of_memory`.
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
        """Assemble and write the finished record, delete the draft, and return the record with its
        path; raise RequestError if a worker refused the request.
        """
        if run_failure is not None and run_failure.code == "request":
            self._delete_draft()
            raise RequestError(run_failure.text.partition(": ")[2])
        finished = self._assemble_sound_record(run_failure)
        path = record.write_or_rescue_record(finished, self.checked.request.out)
        self._delete_draft()
        return finished, path

    def _choose_smaller_sizes(self, run_failure: Failure | None) -> CheckedRequest | None:
        """Return the request with smaller automatic sizes for a second attempt, or None if there is
        to be none.

        There is one only after a rank ran out of memory in the first attempt, before the headline
        pass was done and within the first `FIRST_STEPS` steps of a pass, if a tune value was `auto`
        and can be smaller.
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
        """Prepare a second attempt with smaller sizes and a new session: warn, delete the first
        one's checkpoints, and note what was tried. The time of the first attempt stays a part of
        the run.
        """
        resolved = self.checked.request.resolved
        tried = {name: getattr(resolved.case.tune, name) for name in resolved.auto}
        self.stepped_down = StepDown(tune=tried, error=run_failure.text)
        if self.warn is not None:
            new_sizes = ", ".join(
                f"tune.{name}={getattr(smaller.case.tune, name)}" for name in resolved.auto
            )
            self.warn(
                f"out of memory with {', '.join(f'tune.{k}={v}' for k, v in tried.items())}; once"
                f" more with {new_sizes}"
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
        """Return memory limit, plan and engine properties from which `auto` sizes are chosen."""
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
        """Delete the draft of the record, if there is one."""
        if self.draft_path is not None:
            self.draft_path.unlink()

    def _write_draft(self) -> Path:
        """Write the draft of the record, replacing an earlier one, and return its path; raise
        RequestError if it cannot be written. It also shows that there is room for a record.
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
        """Open the session, write the draft of the record, and return the message that starts the
        workers.
        """
        self._open_session()
        self.draft_path = self._write_draft()
        checked = self.checked
        one_worker = checked.engine.processes == "one"
        return StartMessage(
            run=self._make_run_spec().model_dump(mode="json", by_alias=True),
            world=1 if one_worker else checked.plan.world,
            workers=1 if one_worker else checked.plan.devices,
        )

    def _open_session(self) -> None:
        """Connect to the hosts, check them, choose `auto` sizes and warn; raise RequestError if a
        host cannot take part. No worker is started, and no file stays behind.
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
                    python=checked.request.engine_settings.python,
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
            self.hellos, case, plan, [*needed, *probe], environment.hash_package()
        ):
            if self.warn is not None:
                self.warn(warning)
        first = next(iter(self.hellos.values()))
        if plan.nodes > 1 and first.address is not None and first.port is not None:
            self.session.check_reachable(first.address, first.port)

    def _make_run_spec(self) -> RunSpec:
        """Return what the workers are told of the run, with absolute paths."""
        checked, request = self.checked, self.checked.request
        # in the record's folder; the record's name has the same end
        trace = f"{checked.case.name}-{self.id[:8]}.trace.json.gz"
        paths = {"weights": request.weights, "data": request.data, "tokenizer": request.tokenizer}
        paths["checkout"] = request.engine_settings.checkout
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
            **{name: None if path is None else path.resolve() for name, path in paths.items()},
        )

    def _assemble_sound_record(self, run_failure: Failure | None) -> Record:
        """Return the record of the session's results, and check that it can be read again and does
        not contradict itself.

        Rank files may come from any program: if no record can be made of them, or it contradicts
        itself, the result is a failed record with the reason `malformed` or `contradiction`.
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
        """Return the host's facts with its CPU load readings, on the parent's clock; unchanged if
        there are none.
        """
        readings = self.session.load_readings.get(host.name)
        load = None if readings is None else readings.to_load()
        if load is None:
            return host
        shifted = load.model_copy(update={"t_s": [host.to_parent_clock(t_s) for t_s in load.t_s]})
        return host.model_copy(update={"load": shifted})

    def _assemble_record(self, run_failure: Failure | None, results: RankResults) -> Record:
        """Assemble the sealed record from the session's state, these results and the failure, if
        any.
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
        # then the packages of that Python count
        in_other_python = request.engine_settings.python is not None
        conforms = conformity.read_conformity(
            checked.engine, host_environment.software.packages if in_other_python else None
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
            EngineFacts(name=request.engine, details=EngineDetails(), conforms=conforms),
            id=self.id,
            created=self.created,
            environment=host_environment,
            site=checked.site.describe(),
            plan=checked.plan,
            scope=checked.scope,
            telemetry=[readings.to_series(clocks[readings.host]) for readings in telemetry],
            hosts=hosts,
            restarts=[] if resume is None else [resume.to_restart(request.out)],
            checkpoints=self._find_recorded_checkpoints(run_failure),
            stepped_down=self.stepped_down,
        )
        return assemble.assemble_record(draft, checked.case, times, results, run_failure, resume)

    def _find_recorded_checkpoints(self, run_failure: Failure | None) -> str | None:
        """Return the folder of checkpoints that the record names, relative to the output folder, or
        None for a run that ended without making one.

        The draft names the folder before it exists: if the parent is killed, nothing adds the name
        later.
        """
        planned = self.checkpoints_folder is not None and run_failure == UNFINISHED
        exists = (
            self.checkpoints_folder is not None
            and (self.checked.request.out / self.checkpoints_folder).is_dir()
        )
        return self.checkpoints_folder if planned or exists else None


def _merge_environments(hellos: list[HelloMessage]) -> Environment:
    """Return the first host's environment with the devices of all hosts: hosts of a run have the
    same software.
    """
    first = hellos[0].environment
    devices = [device for hello in hellos for device in hello.environment.hardware.devices]
    return first.model_copy(
        update={"hardware": first.hardware.model_copy(update={"devices": devices})}
    )


def _make_host_facts(connection: Connection, index: int, plan: Plan) -> HostFacts:
    """Return what the record states of host number `index`: its ranks, hardware, state and clock
    offset; raise ValueError if it sent no `hello`.
    """
    if connection.hello is None:
        raise ValueError("a host that was not heard of has no part in a run")
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
    """Return a new name for this run's folder of checkpoints, relative to the output folder, or
    None if the run keeps none. The folder is not created.
    """
    case = checked.case
    if not case.question.kind_row.trains or case.tune.checkpoint_every is None:
        return None
    stamp = re.sub(r"[^0-9T]", "", created.partition(".")[0])
    return f"checkpoints/{stamp}-{case.name}-{secrets.token_hex(4)}"


def _explain_cancelled_job(run_failure: Failure, allocation: Allocation) -> Failure:
    """Return the failure `cancelled` if Slurm says that the job of the lost host has ended, else
    the given failure.
    """
    state = launch.ask_job_state(allocation.job)
    if state is None or state in ACTIVE_JOB_STATES:
        return run_failure
    how = "was cancelled" if state.startswith(("CANCEL", "COMPLETING")) else f"ended as {state}"
    return Failure("cancelled", f"Slurm job {allocation.job} {how}; {run_failure.text}")
