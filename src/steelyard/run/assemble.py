"""From rank files to a record: pure, so that a run can be put together again from what its workers left."""

import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.case.resolve import Resolved
from steelyard.metrics import table, validity
from steelyard.plan.degrees import Plan
from steelyard.record import record
from steelyard.record.facts import EngineDetails, Environment, HostFacts, RankFacts, Series, Software, StepDown, Weights
from steelyard.record.record import (
    FORMULAS,
    WORDING,
    CaseFacts,
    EngineFacts,
    GateFacts,
    Nothing,
    Published,
    Quality,
    Reason,
    Record,
    Scope,
    Window,
)
from steelyard.record.record import Failure as FailureFacts
from steelyard.run.boundary import RankFile
from steelyard.run.clock import now
from steelyard.run.failure import Failure, RankResults
from steelyard.run.ready import Resume
from steelyard.tasks.task import Task


@dataclass(frozen=True)
class RunFacts:
    """What the parent knows of a run. Times are on its monotonic clock."""

    origin_s: float
    spawned_s: float  # agents
    started_s: float  # workers
    ended_s: float
    created: str
    environment: Environment
    site: dict[str, str]
    telemetry: list[Series]
    plan: Plan
    scope: Scope
    hosts: list[HostFacts] = field(default_factory=list)
    resume: Resume | None = None
    checkpoints: str | None = None
    conforms: bool | None = None  # the engine, in this version
    out: Path = Path()  # the folder of the record
    again_s: float | None = None  # when the second attempt began, where the first ran out of memory
    stepped_down: StepDown | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(16))

    def host_of(self, rank: int) -> HostFacts | None:
        return next((one for one in self.hosts if rank in one.ranks), None)


def assemble(
    resolved: Resolved, engine: str, facts: RunFacts, results: RankResults, failure: Failure | None, clock: Clock = now
) -> Record:
    """Return the finished, sealed record of a run that left `results` and ended with `failure`, or well."""
    ranks, first, case = results.ranks, results.rank_files.get(0), resolved.case
    draft = Record(
        formulas=FORMULAS,
        wording=WORDING,
        id=facts.id,
        created=facts.created,
        status="failed",
        reasons=[],
        notes=[],
        case=_case(resolved, first),
        scope=facts.scope,
        tune=case.tune,
        plan=facts.plan,
        engine=EngineFacts(name=engine, details=first.details if first else EngineDetails(), conforms=facts.conforms),
        environment=with_versions(facts.environment, first),
        site=facts.site,
        weights=first.weights if first else Weights(source=None),
        data=first.data if first and first.data else Nothing(),
        passes=[_on_our_clock(window, facts) for rank in ranks for window in rank.windows],
        budget={},
        hosts=facts.hosts,
        ranks=[_rank(rank, facts.host_of(rank.rank)) for rank in ranks],
        samples=[sample for rank in ranks for sample in rank.samples],
        clock=first.clock if first else None,
        drawn=first.drawn if first else {},
        profile=[rank.profile for rank in ranks if rank.profile is not None],
        telemetry=facts.telemetry,
        outputs=_outputs(case.question.row, ranks, first, facts.resume),
        checks=[],
        quality=Quality(metric=case.question.row.quality, value=None, gate=None, evaluated=False, note=None),
        metrics={},
        restarts=[facts.resume.restart(facts.out)] if facts.resume else [],
        failure=None if failure is None else failure_facts(failure, results, _host_name(failure.rank, facts)),
        checkpoints=facts.checkpoints,
        stepped_down=facts.stepped_down,
    )
    return finish(draft.model_copy(update={"budget": _budget(facts, first, clock())}), failure)


def finish(draft: Record, failure: Failure | None) -> Record:
    """Metrics, checks and status of a draft, and its seal."""
    values = table.derive(draft)
    checks, reasons, notes, quality = validity.judge(draft, values)
    if failure is not None:
        reasons = [Reason(code=failure.code, text=failure.text), *reasons]
    status = "failed" if failure is not None else "invalid" if reasons else "valid"
    changed = {"metrics": values, "checks": checks, "reasons": reasons, "notes": notes, "quality": quality, "status": status}
    return record.seal(draft.model_copy(update=changed))


def _case(resolved: Resolved, first: RankFile | None) -> CaseFacts:
    case = resolved.case
    fingerprint = first.data.fingerprint if first and first.data else "unknown"
    return CaseFacts(
        name=case.name,
        key=case.key(fingerprint),
        size=case.size,
        division=case.question.division,
        precision=case.question.precision.name,
        question=case.question.model_dump(mode="json"),
        gate=None if case.gate is None else GateFacts(**case.gate.model_dump(mode="json")),
        max_interval=case.max_interval,
        reference=[Published(**row.model_dump(mode="json")) for row in case.reference],
        origins=resolved.origins,
    )


def _rank(rank: RankFile, host: HostFacts | None) -> RankFacts:
    told = rank.facts()
    return told if host is None else RankFacts(host=host.name, **told.model_dump())


def _host_name(rank: int | None, facts: RunFacts) -> str | None:
    host = None if rank is None else facts.host_of(rank)
    return None if host is None else host.name


def _on_our_clock(window: Window, facts: RunFacts) -> Window:
    host = facts.host_of(window.rank)
    return window if host is None else window.model_copy(update={"start_s": host.on_the_parents_clock(window.start_s)})


def with_versions(told: Environment, first: RankFile | None) -> Environment:
    """With the versions that only the framework knows."""
    software = Software(**{**told.software.model_dump(), **(first.versions if first else {})})
    return told.model_copy(update={"software": software})


def _outputs(task: Task, ranks: list[RankFile], first: RankFile | None, resume: Resume | None) -> dict[str, Any]:
    if first is None or not first.common:
        return {}
    out = task.outputs.model_validate(first.common)
    if resume is not None and resume.before:
        with suppress(TypeError, ValueError):  # a file that says something else says nothing
            out = task.merge(out, "before", [task.check(answers, out) for answers in resume.before])
    for name in first.outputs:
        out = task.merge(out, name, [rank.outputs[name] for rank in ranks if name in rank.outputs])
    return out.model_dump(mode="json")


def _budget(facts: RunFacts, first: RankFile | None, sealed_s: float) -> dict[str, float]:
    """Wall time from the start of the run to its record. `agents`: until every host was heard, checked and told to start.
    What the workers' own parts leave of their time is `launch`: interpreter start, and taking everything down. The others are
    those of the second attempt, where there was a first."""
    parts = first.budget if first else {}
    begun_s = facts.origin_s if facts.again_s is None else facts.again_s
    return {
        **({} if facts.again_s is None else {"first_attempt": begun_s - facts.origin_s}),
        "start": facts.spawned_s - begun_s,
        "agents": facts.started_s - facts.spawned_s,
        "launch": facts.ended_s - facts.started_s - sum(parts.values()),
        **parts,
        "record": sealed_s - facts.ended_s,
    }


def failure_facts(failure: Failure, results: RankResults, host: str | None = None) -> FailureFacts:
    """Return what a record states of a failure: its text, and the last words of the rank that caused it."""
    return FailureFacts(
        rank=failure.rank,
        host=host,
        exit_code=results.exit_code(failure.rank),
        error=failure.text,
        stderr_tail=results.tail(failure.rank),
        stacks=results.stacks,
    )
