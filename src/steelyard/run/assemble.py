"""From rank files to a record: pure, so that a run can be put together again from what its workers left."""

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.case.resolve import Resolved
from steelyard.metrics import table, validity
from steelyard.plan.degrees import Plan
from steelyard.record import record
from steelyard.record.facts import Environment, Series, Software, Weights
from steelyard.record.record import (
    CaseFacts,
    EngineFacts,
    Failure,
    GateFacts,
    Nothing,
    Published,
    Quality,
    Reason,
    Record,
    Scope,
)
from steelyard.run.measure import now
from steelyard.run.resume import Resume
from steelyard.run.spec import RankFile
from steelyard.tasks.task import Task


@dataclass(frozen=True)
class RunFacts:
    """What the parent knows of a run. Times are on the one monotonic clock."""

    origin_s: float
    spawned_s: float
    ended_s: float
    created: str
    environment: Environment
    site: dict[str, str]
    telemetry: list[Series]
    plan: Plan
    scope: Scope
    resume: Resume | None = None
    checkpoints: str | None = None
    out: Path = Path()  # the folder of the record


@dataclass(frozen=True)
class Outcome:
    """How the processes ended. `code` is None where all went as it should."""

    code: str | None
    text: str
    exit_code: int | None
    stderr_tail: str
    ranks: list[RankFile]

    @property
    def first(self) -> RankFile | None:
        """Rank 0, which has what ranks have in common."""
        return next((rank for rank in self.ranks if rank.rank == 0), None)


def assemble(resolved: Resolved, engine: str, facts: RunFacts, outcome: Outcome, clock: Clock = now) -> Record:
    """The finished, sealed record."""
    ranks, first, case = outcome.ranks, outcome.first, resolved.case
    draft = Record(
        id=secrets.token_hex(16),
        created=facts.created,
        status="failed",
        reasons=[],
        notes=[],
        case=_case(resolved, first),
        scope=facts.scope,
        tune=case.tune,
        plan=facts.plan,
        engine=EngineFacts(name=engine, details=first.details if first else {}),
        environment=_environment(facts.environment, first),
        site=facts.site,
        weights=first.weights if first else Weights(source=None),
        data=first.data if first and first.data else Nothing(),
        passes=[window for rank in ranks for window in rank.windows],
        budget={},
        ranks=[rank.facts() for rank in ranks],
        samples=[sample for rank in ranks for sample in rank.samples],
        telemetry=facts.telemetry,
        outputs=_outputs(case.question.row, ranks, first, facts.resume),
        checks=[],
        quality=Quality(metric=case.question.row.quality, value=None, gate=None, evaluated=False, note="the run failed"),
        metrics={},
        restarts=[facts.resume.restart(facts.out)] if facts.resume else [],
        failure=_failure(outcome),
        checkpoints=facts.checkpoints,
    )
    return finish(draft.model_copy(update={"budget": _budget(facts, first, clock())}), outcome.code, outcome.text)


def finish(draft: Record, code: str | None, text: str) -> Record:
    """Metrics, checks and status of a draft, and its seal."""
    values = table.derive(draft)
    checks, reasons, notes, quality = validity.judge(draft, values)
    if code is not None:
        reasons = [Reason(code=code, text=text), *reasons]
    status = "failed" if code is not None else "invalid" if reasons else "valid"
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


def _environment(parent: Environment, first: RankFile | None) -> Environment:
    """The parent's view, with the versions that only the framework knows."""
    software = Software(**{**parent.software.model_dump(), **(first.versions if first else {})})
    return parent.model_copy(update={"software": software})


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
    """Wall time from the start of the run to its record. What the workers' own parts leave of their time, from start to
    end of their processes, is `launch`: interpreter start, torchrun, and taking everything down."""
    parts = first.budget if first else {}
    return {
        "start": facts.spawned_s - facts.origin_s,
        "launch": facts.ended_s - facts.spawned_s - sum(parts.values()),
        **parts,
        "record": sealed_s - facts.ended_s,
    }


def _failure(outcome: Outcome) -> Failure | None:
    if outcome.code is None:
        return None
    named = re.match(r"rank (\d+)", outcome.text)  # the verdict's own cause
    broken = [rank for rank in outcome.ranks if rank.status != "done"]
    rank = min(broken, key=lambda rank: rank.ended_s).rank if broken else None  # the others miss their peer
    rank = int(named.group(1)) if named else rank
    return Failure(rank=rank, exit_code=outcome.exit_code, error=outcome.text, stderr_tail=outcome.stderr_tail)
