"""The parent's side of `steelyard spec`: run the workers on this host and write a spec record of
the ceilings that they measured.

Called by cli/check_and_spec.py; the workers are run/ceilings_worker.py.
"""

import secrets
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from steelyard import accelerators
from steelyard.errors import RequestError
from steelyard.metrics import ceiling_rates
from steelyard.plan.degrees import MAX_DEVICES, Plan
from steelyard.record import ceilings_record, record_file
from steelyard.record.ceilings_record import SpecRecord
from steelyard.record.record import Reason
from steelyard.record.run_facts import RankFacts
from steelyard.run import launch, preflight, processes
from steelyard.run.assemble import add_library_versions, make_failure_facts
from steelyard.run.ceilings_worker import FRAMEWORK, FULL_LIMITS, QUICK_LIMITS, CeilingsSpec
from steelyard.run.clock import now, read_utc_time
from steelyard.run.failure import Failure
from steelyard.run.messages import OpenMessage, StartMessage
from steelyard.run.parent import WORKER_ENV, WarningCallback
from steelyard.run.session import ProgressCallback, Session
from steelyard.run.site import Site
from steelyard.run.worker_files import RankFile

HANG_S = 300.0  # longest time without progress; one row takes seconds
MAX_TOTAL_S = 24 * 3600.0  # largest --limit
SPARE_S = 600.0  # beyond the time of all rows, for preparing and checking each


class CeilingsRun:
    """One run of `steelyard spec` on this host, from its node agent to the record in folder `out`:
    `run_and_record` does it and returns the record and its path. One worker for each of `devices`
    devices; `quick`: fewer rows and shorter limits.

    Creating it starts nothing, and raises RequestError for `devices` or `limit_s` (the time for all
    rows, in seconds; None: the default) out of range, an unknown accelerator (None detects one), or
    a host without /proc or working directory.
    """

    def __init__(
        self, accelerator: str | None, devices: int, quick: bool, out: Path, limit_s: float | None
    ) -> None:
        """Check the options, choose the accelerator (None: detect one) and create a session with
        the local launcher; start nothing. Raises RequestError for options out of range, an unknown
        accelerator, or a host without /proc or working directory.
        """
        processes.check_process_control()
        self.quick, self.out, self.limits = quick, out, QUICK_LIMITS if quick else FULL_LIMITS
        if limit_s is not None:
            if not 1 <= limit_s <= MAX_TOTAL_S:
                raise RequestError(
                    f"--limit {limit_s:g}: must be from 1 to {MAX_TOTAL_S:g} seconds"
                )
            self.limits = self.limits.model_copy(update={"total_s": limit_s})
        if not 1 <= devices <= MAX_DEVICES:
            raise RequestError(f"--devices {devices}: must be 1 to {MAX_DEVICES}")
        self.accelerator = (
            accelerators.find_accelerator(accelerator)
            if accelerator
            else accelerators.detect_accelerator()
        )
        self.plan = Plan(nodes=1, devices=devices, tp=1, pp=1, dp=devices, launcher="local")
        self.origin_s, self.created, self.id = now(), read_utc_time(), secrets.token_hex(16)
        self.session = Session(launch.get_launcher("local"), Site(), 1)

    def run_and_record(
        self, show_progress: ProgressCallback | None, warn: WarningCallback
    ) -> tuple[SpecRecord, Path]:
        """Run the workers of `steelyard spec`, write the spec record into `out`, and return it with
        its path.

        A run that fails after its workers were started gives a record with status `failed`; a wrong
        request, a host that cannot run it, or a folder that is not writable raises RequestError;
        LostError if the record cannot be written. `show_progress` gets each `PhaseProgress`, `warn`
        each line of warning. Interrupts are ignored while the record is written.
        """
        record_file.prove_writable(self.out)
        with ExitStack() as interrupt_guard:
            limit_s = self.limits.total_s + SPARE_S
            prepare = partial(self._prepare, warn)
            spec_record = self._assemble_record(
                self.session.run_to_end(
                    prepare, self.origin_s, HANG_S, limit_s, show_progress, interrupt_guard
                )
            )
            return spec_record, ceilings_record.write_spec_record(spec_record, self.out)

    def _prepare(self, warn: WarningCallback) -> StartMessage:
        """Connect to the agent on this host, check it, warn about used devices that another run
        uses too (where ranks share devices), and return the message that starts the workers of
        `steelyard spec`. Raises RequestError if the host cannot run them.
        """
        open_message = OpenMessage(
            accelerator=self.accelerator.name,
            devices=self.plan.devices,
            matmul="bf16",
            interface=None,
            environment={},
            variables=WORKER_ENV,
            needs=[FRAMEWORK],
            paths=[],
        )
        (name, hello), *_ = self.session.connect_hosts(open_message).items()
        preflight.check_host(name, hello, self.plan, [])
        for device in hello.devices[: self.plan.devices]:
            if device.busy is not None:
                warn(f"{device.name} is also used by {device.busy}; both will be slower than alone")
        ceilings_spec = CeilingsSpec(
            accelerator=hello.accelerator, plan=self.plan, quick=self.quick, limits=self.limits
        )
        return StartMessage(
            run=ceilings_spec.model_dump(mode="json"),
            world=self.plan.world,
            workers=self.plan.devices,
            worker="steelyard.run.ceilings_worker",
        )

    def _assemble_record(self, failure: Failure | None) -> SpecRecord:
        """Return the spec record of this session's results, with the ceilings derived from the
        benches of all ranks and its hashes set: status `valid`, or `failed` with the failure as
        reason. Nothing is written.

        Raises RequestError with the worker's text if the failure is `request` (a worker refused),
        ValueError if the host sent no `hello`.
        """
        if failure is not None and failure.code == "request":
            raise RequestError(failure.text.partition(": ")[2])
        session, ranks = self.session, self.session.results.ordered_rank_files
        hello = session.connections[0].hello
        if hello is None:
            raise ValueError("no hello message from a host of this run")
        draft = SpecRecord(
            id=self.id,
            created=self.created,
            status="valid" if failure is None else "failed",
            reasons=[] if failure is None else [Reason(code=failure.code, text=failure.text)],
            quick=self.quick,
            limits=self.limits,
            devices=self.plan.devices,
            environment=add_library_versions(hello.environment, ranks[0] if ranks else None),
            budget=self._make_budget(ranks),
            ranks=[
                RankFacts(host=session.hosts[0], **rank.to_rank_facts().model_dump())
                for rank in ranks
            ],
            benches=[bench for rank in ranks for bench in rank.benches],
            telemetry=[readings.to_series() for readings in session.telemetry.values()],
            ceilings=[],
            failure=None if failure is None else make_failure_facts(failure, session.results),
        )
        return ceilings_record.seal_spec_record(
            draft.model_copy(update={"ceilings": ceiling_rates.derive_ceilings(draft)})
        )

    def _make_budget(self, ranks: list[RankFile]) -> dict[str, float]:
        """Return wall seconds by part of this run, adding up to all of it until now: `agents` until
        workers were started, the parts of the budget of the first of `ranks` (rank files; may be
        empty), and `launch` for what those leave of the workers' time.
        """
        parts = ranks[0].budget if ranks else {}
        agents_s, workers_s = (
            self.session.workers_started_s - self.origin_s,
            now() - self.session.workers_started_s,
        )
        return {"agents": agents_s, "launch": workers_s - sum(parts.values()), **parts}
