"""From rank files to a record: pure, so that a run can be put together again from what its workers left."""

import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.case.case import Resolved
from steelyard.metrics import table as metrics
from steelyard.metrics import validity
from steelyard.record import record
from steelyard.record.record import Case, Engine, Failure, Plan, Quality, Reason, Record, Sample, Scope, Window
from steelyard.run.measure import Clock, now
from steelyard.run.resume import Resume
from steelyard.tasks.table import TASKS, Task


@dataclass(frozen=True)
class Facts:
    """What the parent knows of a run. Times are on the one monotonic clock."""

    origin_s: float
    spawned_s: float
    ended_s: float
    created: str
    environment: dict[str, Any]
    site: dict[str, str]
    telemetry: list[dict[str, Any]]
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
    ranks: list[dict[str, Any]]


def assemble(resolved: Resolved, engine: str, facts: Facts, outcome: Outcome, clock: Clock = now) -> Record:
    """The finished, sealed record."""
    ranks = outcome.ranks
    first = next((rank for rank in ranks if rank["rank"] == 0), {})
    details = dict(first.get("details", {}))
    weights = details.pop("weights", {"source": None})
    draft = Record(
        id=secrets.token_hex(16),
        created=facts.created,
        status="failed",
        reasons=[],
        notes=[],
        case=_case(resolved, first),
        scope=facts.scope,
        tune=resolved.case.tune.model_dump(mode="json"),
        plan=facts.plan,
        engine=Engine(name=engine, details=details),
        environment=_environment(facts.environment, first),
        site=facts.site,
        weights=weights,
        data=first.get("data", {}),
        passes=[Window.model_validate(window) for rank in ranks for window in rank["windows"]],
        budget={},
        ranks=[_rank(rank) for rank in ranks],
        samples=[Sample.model_validate(sample) for rank in ranks for sample in rank["samples"]],
        telemetry=facts.telemetry,
        outputs=_outputs(TASKS[resolved.case.question.task], ranks, first, facts.resume),
        checks=[],
        quality=Quality(metric="acc", value=None, gate=None, evaluated=False, note="the run failed"),
        metrics={},
        restarts=[facts.resume.restart(facts.out)] if facts.resume else [],
        failure=_failure(outcome),
        checkpoints=facts.checkpoints,
    )
    return finish(draft.model_copy(update={"budget": _budget(facts, first, clock())}), outcome.code, outcome.text)


def finish(draft: Record, code: str | None, text: str) -> Record:
    """Metrics, checks and status of a draft, and its seal."""
    values = metrics.derive(draft)
    checks, reasons, notes, quality = validity.judge(draft, values)
    if code is not None:
        reasons = [Reason(code=code, text=text), *reasons]
    status = "failed" if code is not None else "invalid" if reasons else "valid"
    changed = {"metrics": values, "checks": checks, "reasons": reasons, "notes": notes, "quality": quality, "status": status}
    return record.seal(draft.model_copy(update=changed))


def _case(resolved: Resolved, first: dict[str, Any]) -> Case:
    case = resolved.case
    fingerprint = first.get("data", {}).get("fingerprint", "unknown")
    return Case(
        name=case.name,
        key=case.key(fingerprint),
        size=case.size,
        division=case.question.division,
        precision=case.question.precision.name,
        question=case.question.model_dump(mode="json"),
        gate=None if case.gate is None else case.gate.model_dump(mode="json"),
        max_interval=case.max_interval,
        reference=[row.model_dump(mode="json") for row in case.reference],
        origins=resolved.origins,
    )


def _environment(parent: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The parent's view, with the versions that only the framework knows."""
    return {**parent, "software": {**parent["software"], **first.get("versions", {})}}


def _rank(rank: dict[str, Any]) -> dict[str, Any]:
    keys = ("rank", "device", "status", "identity", "threads", "matmul_flops_per_s", "in_use_bytes", "budget")
    return {key: rank.get(key) for key in keys}


def _outputs(task: Task, ranks: list[dict[str, Any]], first: dict[str, Any], resume: Resume | None) -> dict[str, Any]:
    out: dict[str, Any] = first.get("common", {})
    if out and resume is not None and resume.before:
        with suppress(TypeError, ValueError):  # a file that says something else says nothing
            out = task.merge(out, "before", [task.check(table, out) for table in resume.before])
    if out:
        for name in first["outputs"]:
            tables = [rank["outputs"][name] for rank in ranks if name in rank["outputs"]]
            out = task.merge(out, name, tables)
    return out


def _budget(facts: Facts, first: dict[str, Any], sealed_s: float) -> dict[str, float]:
    """Wall time from the start of the run to its record. What the workers' own parts leave of their time, from start to
    end of their processes, is `launch`: interpreter start, torchrun, and taking everything down."""
    parts: dict[str, float] = first.get("budget", {})
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
    broken = [rank for rank in outcome.ranks if rank["status"] != "done"]
    rank = min(broken, key=lambda rank: float(rank["ended_s"]))["rank"] if broken else None  # the others miss their peer
    rank = int(named.group(1)) if named else rank
    return Failure(rank=rank, exit_code=outcome.exit_code, error=outcome.text, stderr_tail=outcome.stderr_tail)
