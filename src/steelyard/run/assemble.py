"""Assemble the record of a run from its rank files and what the parent knows.

Called by run/parent.py after the workers ended, and once before for the draft. It reads no files
and starts nothing, so a record can be assembled again from the same rank files. Metrics and checks
come from metrics/.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from steelyard.accelerators.events import Clock
from steelyard.case.case import Case
from steelyard.case.resolve import Resolved
from steelyard.metrics import table, validity
from steelyard.plan.degrees import Plan
from steelyard.record import record
from steelyard.record.facts import (
    Environment,
    HostFacts,
    RankFacts,
    Restart,
    Series,
    Software,
    StepDown,
    Weights,
)
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
class Times:
    """When the stages of a run began, in seconds on the parent's monotonic clock."""

    origin_s: float
    spawned_s: float  # when the node agents were started
    started_s: float  # when the workers were started
    ended_s: float
    again_s: float | None = None  # start of a second attempt; None: there was none


def draft(
    resolved: Resolved,
    engine: EngineFacts,
    *,
    id: str,
    created: str,
    environment: Environment,
    site: dict[str, str],
    plan: Plan,
    scope: Scope,
    telemetry: list[Series],
    hosts: Sequence[HostFacts] = (),
    restarts: Sequence[Restart] = (),
    checkpoints: str | None = None,
    stepped_down: StepDown | None = None,
) -> Record:
    """Return a record with what the parent knows of a run and nothing of its ranks: status
    `failed`, no samples, no metrics.
    """
    case = resolved.case
    return Record(
        formulas=FORMULAS,
        wording=WORDING,
        id=id,
        created=created,
        status="failed",
        reasons=[],
        notes=[],
        case=CaseFacts(
            name=case.name,
            key=case.key("unknown"),
            size=case.size,
            division=case.question.division,
            precision=case.question.precision.name,
            question=case.question.model_dump(mode="json"),
            gate=None if case.gate is None else GateFacts(**case.gate.model_dump(mode="json")),
            max_interval=case.max_interval,
            reference=[Published(**row.model_dump(mode="json")) for row in case.reference],
            origins=resolved.origins,
        ),
        scope=scope,
        tune=case.tune,
        plan=plan,
        engine=engine,
        environment=environment,
        site=site,
        weights=Weights(source=None),
        data=Nothing(),
        passes=[],
        budget={},
        hosts=list(hosts),
        ranks=[],
        samples=[],
        telemetry=telemetry,
        outputs={},
        checks=[],
        quality=Quality(
            metric=case.question.row.quality, value=None, gate=None, evaluated=False, note=None
        ),
        metrics={},
        restarts=list(restarts),
        checkpoints=checkpoints,
        stepped_down=stepped_down,
    )


def assemble(
    draft: Record,
    case: Case,
    times: Times,
    results: RankResults,
    failure: Failure | None,
    resume: Resume | None = None,
    clock: Clock = now,
) -> Record:
    """Return the finished, sealed record: the draft with what the ranks left, metrics, checks and
    status.

    `failure` is None for a run that went well. `resume` brings the answers from before the first
    step for a run that continued from a checkpoint. `clock` is read once, for the end of the
    budget.
    """
    ranks, first = results.ranks, results.rank_files.get(0)
    hosts = {rank: host for host in draft.hosts for rank in host.ranks}
    told: dict[str, Any] = {
        "environment": with_versions(draft.environment, first),
        "passes": [
            _on_our_clock(window, hosts.get(window.rank))
            for rank in ranks
            for window in rank.windows
        ],
        "ranks": [_rank(rank, hosts.get(rank.rank)) for rank in ranks],
        "samples": [sample for rank in ranks for sample in rank.samples],
        "profile": [rank.profile for rank in ranks if rank.profile is not None],
        "outputs": _outputs(case.question.row, ranks, first, resume),
    }
    if first is not None:
        told |= {name: getattr(first, name) for name in ("weights", "clock", "drawn")}
        told["engine"] = draft.engine.model_copy(update={"details": first.details})
    if first is not None and first.data is not None:
        told |= {
            "data": first.data,
            "case": draft.case.model_copy(update={"key": case.key(first.data.fingerprint)}),
        }
    if failure is not None:
        host = None if failure.rank is None else hosts.get(failure.rank)
        told["failure"] = failure_facts(failure, results, None if host is None else host.name)
    told["budget"] = _budget(times, first, clock())
    return finish(draft.model_copy(update=told), failure)


def finish(draft: Record, failure: Failure | None) -> Record:
    """Derive metrics, checks, reasons, notes, quality and status of a draft, and return it sealed
    with its hashes; `failure` becomes the first reason and makes the status `failed`.
    """
    values = table.derive(draft)
    checks, reasons, notes, quality = validity.judge(draft, values)
    if failure is not None:
        reasons = [Reason(code=failure.code, text=failure.text), *reasons]
    status = "failed" if failure is not None else "invalid" if reasons else "valid"
    changed = {
        "metrics": values,
        "checks": checks,
        "reasons": reasons,
        "notes": notes,
        "quality": quality,
        "status": status,
    }
    return record.seal(draft.model_copy(update=changed))


def _rank(rank: RankFile, host: HostFacts | None) -> RankFacts:
    """Return what the record states of a rank, with the name of its host if that is known."""
    told = rank.facts()
    return told if host is None else RankFacts(host=host.name, **told.model_dump())


def _on_our_clock(window: Window, host: HostFacts | None) -> Window:
    """Return the window of a pass with its start corrected for the drift of the host's clock;
    unchanged without a host.
    """
    return (
        window
        if host is None
        else window.model_copy(update={"start_s": host.on_the_parents_clock(window.start_s)})
    )


def with_versions(told: Environment, first: RankFile | None) -> Environment:
    """Return the environment with the library versions that only the framework in rank 0 knows;
    unchanged without its rank file.
    """
    software = Software(**{**told.software.model_dump(), **(first.versions if first else {})})
    return told.model_copy(update={"software": software})


def _outputs(
    task: Task, ranks: list[RankFile], first: RankFile | None, resume: Resume | None
) -> dict[str, Any]:
    """Return the task's outputs as JSON values: the common part of rank 0 merged with each pass's
    answers of all ranks and, for a resumed run, the answers from before the first step.

    Empty without outputs of rank 0. Answers of the checkpoint that do not fit are ignored.
    """
    if first is None or not first.common:
        return {}
    out = task.outputs.model_validate(first.common)
    if resume is not None and resume.before:
        with suppress(TypeError, ValueError):  # answers that do not fit are ignored
            out = task.merge(out, "before", [task.check(answers, out) for answers in resume.before])
    for name in first.outputs:
        out = task.merge(out, name, [rank.outputs[name] for rank in ranks if name in rank.outputs])
    return out.model_dump(mode="json")


def _budget(times: Times, first: RankFile | None, sealed_s: float) -> dict[str, float]:
    """Return wall seconds by part, from the start of the run to its record at `sealed_s`; the parts
    add up to all of it.

    `agents`: until every host was connected, checked and told to start. `launch`: what the workers'
    own parts leave of their time, such as interpreter start and shutdown. `first_attempt`: the
    whole first attempt, if it ran out of memory; the other parts are then those of the second.
    """
    parts = first.budget if first else {}
    begun_s = times.origin_s if times.again_s is None else times.again_s
    return {
        **({} if times.again_s is None else {"first_attempt": begun_s - times.origin_s}),
        "start": times.spawned_s - begun_s,
        "agents": times.started_s - times.spawned_s,
        "launch": times.ended_s - times.started_s - sum(parts.values()),
        **parts,
        "record": sealed_s - times.ended_s,
    }


def failure_facts(failure: Failure, results: RankResults, host: str | None = None) -> FailureFacts:
    """Return what a record states of a failure: its text, host, exit code, stacks, and the end of
    stderr of the rank that caused it.
    """
    return FailureFacts(
        rank=failure.rank,
        host=host,
        exit_code=results.exit_code(failure.rank),
        error=failure.text,
        stderr_tail=results.tail(failure.rank),
        stacks=results.stacks,
    )
