"""The parent's side of `steelyard spec`: run the workers on this host and write a spec record of
the ceilings that they measured.

Called by cli/machine.py; the workers are run/ceilings_worker.py.
"""

import secrets
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from steelyard import accelerators
from steelyard.errors import RequestError
from steelyard.metrics import ceilings
from steelyard.plan.degrees import MOST_DEVICES, Plan
from steelyard.record import sealed, spec
from steelyard.record.facts import RankFacts
from steelyard.record.record import Reason
from steelyard.record.spec import SpecRecord
from steelyard.run import launch, preflight, processes
from steelyard.run.assemble import failure_facts, with_versions
from steelyard.run.boundary import RankFile
from steelyard.run.ceilings import FRAMEWORK, FULL, QUICK, CeilingsSpec
from steelyard.run.clock import now, today
from steelyard.run.failure import Failure
from steelyard.run.messages import Open, Start
from steelyard.run.parent import WORKER_ENV, Warn
from steelyard.run.session import Session, Watch
from steelyard.run.site import Site

HANG_S = 300.0  # longest time without progress; one row takes seconds
MOST_S = 24 * 3600.0  # largest --limit
SPARE_S = 600.0  # beyond the time of all rows, for preparing and checking each


class SpecRun:
    """One run of `steelyard spec` on this host, from its node agent to the record in folder `out`.

    Raises RequestError for `devices` or `limit_s` (the time for all rows, in seconds; None: the
    default) out of range, or an unknown accelerator; None detects one.
    """

    def __init__(
        self, accelerator: str | None, devices: int, quick: bool, out: Path, limit_s: float | None
    ) -> None:
        """Check the options, choose the accelerator (None: detect one) and create the session;
        start nothing. Raises RequestError for options out of range or an unknown accelerator.
        """
        processes.check()
        self.quick, self.out, self.limits = quick, out, QUICK if quick else FULL
        if limit_s is not None:
            if not 1 <= limit_s <= MOST_S:
                raise RequestError(f"--limit {limit_s:g}: must be from 1 to {MOST_S:g} seconds")
            self.limits = self.limits.model_copy(update={"total_s": limit_s})
        if not 1 <= devices <= MOST_DEVICES:
            raise RequestError(f"--devices {devices}: must be 1 to {MOST_DEVICES}")
        self.accelerator = accelerators.named(accelerator) if accelerator else accelerators.detect()
        self.plan = Plan(nodes=1, devices=devices, tp=1, pp=1, dp=devices, launcher="local")
        self.origin_s, self.created, self.id = now(), today(), secrets.token_hex(16)
        self.session = Session(launch.named("local"), Site(), 1)

    def to_record(self, watch: Watch | None, warn: Warn) -> tuple[SpecRecord, Path]:
        """Run the workers, write the record into `out`, and return it with its path.

        A run that fails after its workers were started gives a record with status `failed`; a wrong
        request, or a host that cannot run it, raises RequestError. `show_progress` is called with
        the progress, `warn` with warnings.
        """
        sealed.writable(self.out)
        with ExitStack() as undisturbed:
            limit_s = self.limits.total_s + SPARE_S
            prepare = partial(self._prepare, warn)
            made = self._assemble(
                self.session.lead(prepare, self.origin_s, HANG_S, limit_s, watch, undisturbed)
            )
            return made, spec.write(made, self.out)

    def _prepare(self, warn: Warn) -> Start:
        """Open the session, check the host, warn about devices that another run uses, and return
        the message that starts the workers.
        """
        asked = Open(
            accelerator=self.accelerator.name,
            devices=self.plan.devices,
            matmul="bf16",
            interface=None,
            environment={},
            variables=WORKER_ENV,
            needs=[FRAMEWORK],
            paths=[],
        )
        (name, hello), *_ = self.session.open(asked).items()
        preflight.able(name, hello, self.plan, [])
        for device in hello.devices[: self.plan.devices]:
            if device.busy is not None:
                warn(
                    f"{device.name} is also used by {device.busy}: neither will show what it can do"
                )
        told = CeilingsSpec(
            accelerator=hello.accelerator, plan=self.plan, quick=self.quick, limits=self.limits
        )
        return Start(
            run=told.model_dump(mode="json"),
            world=self.plan.world,
            workers=self.plan.devices,
            worker="steelyard.run.ceilings",
        )

    def _assemble(self, failure: Failure | None) -> SpecRecord:
        """Return the sealed record of the session's results, with the ceilings derived from the
        benches; raise RequestError if a worker refused the request.
        """
        if failure is not None and failure.code == "request":
            raise RequestError(failure.text.partition(": ")[2])
        session, ranks = self.session, self.session.results.ranks
        hello = session.connections[0].hello
        if hello is None:
            raise ValueError("a host that was not heard of has no part in a run")
        draft = SpecRecord(
            id=self.id,
            created=self.created,
            status="valid" if failure is None else "failed",
            reasons=[] if failure is None else [Reason(code=failure.code, text=failure.text)],
            quick=self.quick,
            limits=self.limits,
            devices=self.plan.devices,
            environment=with_versions(hello.environment, ranks[0] if ranks else None),
            budget=self._budget(ranks),
            ranks=[RankFacts(host=session.hosts[0], **rank.facts().model_dump()) for rank in ranks],
            benches=[bench for rank in ranks for bench in rank.benches],
            telemetry=[kept.series() for kept in session.telemetry.values()],
            ceilings=[],
            failure=None if failure is None else failure_facts(failure, session.results),
        )
        return spec.seal(draft.model_copy(update={"ceilings": ceilings.derive(draft)}))

    def _budget(self, ranks: list[RankFile]) -> dict[str, float]:
        """Return wall seconds by part of the run, adding up to all of it: `agents`, the parts of
        rank 0's own budget, and `launch` for what those leave.
        """
        parts = ranks[0].budget if ranks else {}
        agents_s, worked_s = self.session.started_s - self.origin_s, now() - self.session.started_s
        return {"agents": agents_s, "launch": worked_s - sum(parts.values()), **parts}
