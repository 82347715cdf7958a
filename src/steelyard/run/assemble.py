"""Assemble the record of a run from its rank files and what the parent knows.

Called by run/parent.py after the workers ended, and once before for the draft. It reads no files
and starts nothing, so a record can be assembled again from the same rank files. Metrics and checks
come from metrics/.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from steelyard.accelerators.events import Clock
from steelyard.case.case import Case
from steelyard.case.resolve import ResolvedCase
from steelyard.metrics import metric_table, validity
from steelyard.metrics.standing import derive_status
from steelyard.plan.degrees import Plan
from steelyard.record import record
from steelyard.record.record import (
    FORMULAS_VERSION,
    WORDING_VERSION,
    CaseFacts,
    EngineFacts,
    FailureFacts,
    GateFacts,
    NoDataFacts,
    PassFacts,
    PublishedFacts,
    Quality,
    Reason,
    Record,
    Scope,
    WeightsKind,
)
from steelyard.record.run_facts import (
    CalibrationFacts,
    Environment,
    HostFacts,
    RankFacts,
    Restart,
    Software,
    StepDown,
    TelemetrySeries,
    WeightsFacts,
)
from steelyard.run.calibrate import CalibratedRates
from steelyard.run.checked_request import ResumePoint
from steelyard.run.clock import now
from steelyard.run.failure import Failure, RankResults
from steelyard.run.messages import CalibrationMessage
from steelyard.run.worker_files import RankFile
from steelyard.schema import describe_first_problem
from steelyard.tasks.task import Task


@dataclass(frozen=True)
class RunTimes:
    """When the stages of a run began, in seconds on the parent's monotonic clock, for the record's
    budget: the run (`origin_s`), its second attempt (`second_attempt_s`; None: there was none), its
    node agents (`agents_started_s`), its workers (`workers_started_s`); and when the workers had
    ended (`ended_s`).
    """

    origin_s: float
    agents_started_s: float  # when the node agents were started
    workers_started_s: float  # when the workers were started
    ended_s: float
    second_attempt_s: float | None = None  # start of a second attempt; None: there was none


def make_draft(
    resolved: ResolvedCase,
    engine: EngineFacts,
    *,
    id: str,
    created: str,
    environment: Environment,
    site: dict[str, str],
    plan: Plan,
    scope: Scope,
    telemetry: list[TelemetrySeries],
    providers: dict[str, str] | None = None,
    hosts: Sequence[HostFacts] = (),
    restarts: Sequence[Restart] = (),
    checkpoints: str | None = None,
    stepped_down: StepDown | None = None,
    asked_weights: WeightsKind | None = None,
) -> Record:
    """Return a record with what the parent knows of a run and nothing of its ranks: status `failed`
    without reasons, no data, samples or metrics, a key for unknown data, and no hashes. `created`
    is an ISO time, `site` what the record states of the site file, `scope` how much of the question
    is run, `providers` the other packages that bring a part of it (None: none), `checkpoints` their
    folder relative to the record, `stepped_down` a first attempt that ran out of memory,
    `asked_weights` whether a checkpoint was named. Nothing is written.
    """
    case = resolved.case
    return Record(
        formulas=FORMULAS_VERSION,
        wording=WORDING_VERSION,
        id=id,
        created=created,
        status="failed",
        reasons=[],
        notes=[],
        case=CaseFacts(
            name=case.name,
            key=case.compute_key("unknown"),
            size=case.size,
            division=case.question.division,
            precision=case.question.precision.name,
            question=case.question.model_dump(mode="json"),
            gate=None if case.gate is None else GateFacts(**case.gate.model_dump(mode="json")),
            max_interval=case.max_interval,
            reference=[PublishedFacts(**row.model_dump(mode="json")) for row in case.reference],
            origins=resolved.origins,
            slo=case.slo,
        ),
        scope=scope,
        tune=case.tune,
        plan=plan,
        engine=engine,
        providers=providers or {},
        environment=environment,
        site=site,
        weights=WeightsFacts(source=None),
        data=NoDataFacts(),
        passes=[],
        budget={},
        hosts=list(hosts),
        ranks=[],
        samples=[],
        telemetry=telemetry,
        outputs={},
        checks=[],
        quality=Quality(
            metric=case.question.task_row.quality, value=None, gate=None, evaluated=False, note=None
        ),
        metrics={},
        restarts=list(restarts),
        checkpoints=checkpoints,
        stepped_down=stepped_down,
        asked_weights=asked_weights,
    )


def assemble_record(
    draft: Record,
    case: Case,
    times: RunTimes,
    results: RankResults,
    failure: Failure | None,
    resume: ResumePoint | None = None,
    clock: Clock = now,
) -> Record:
    """Return the finished record with its hashes set (sealed): the draft with what the ranks left,
    metrics, checks and status. Nothing is written, and the draft is not changed.

    `failure` is None for a run that went well. Data, weights, details and drawn counts are those of
    rank 0, as far as it left a rank file. `resume` brings the answers from before the first step
    for a run that continued from a checkpoint. `clock` is read once, for the end of the budget.
    """
    rank_files, first = results.ordered_rank_files, results.rank_files.get(0)
    hosts = {rank_file: host for host in draft.hosts for rank_file in host.ranks}
    updates: dict[str, Any] = {
        "environment": add_library_versions(draft.environment, first),
        "passes": [
            _to_parent_clock(_add_borders(window, results), hosts.get(window.rank))
            for rank_file in rank_files
            for window in rank_file.windows
        ],
        "ranks": [
            _make_rank_facts(rank_file, hosts.get(rank_file.rank), results)
            for rank_file in rank_files
        ],
        "samples": [sample for rank_file in rank_files for sample in rank_file.samples],
        "requests": [one for rank_file in rank_files for one in rank_file.requests],
        "profile": [rank_file.profile for rank_file in rank_files if rank_file.profile is not None],
        "outputs": _merge_outputs(case.question.task_row, rank_files, first, resume),
    }
    if first is not None:
        updates |= {name: getattr(first, name) for name in ("weights", "clock", "drawn")}
        if first.details.model_fields_set or first.details.model_extra:
            updates["engine"] = draft.engine.model_copy(update={"details": first.details})
    if first is not None and first.data is not None:
        updates |= {
            "data": first.data,
            "case": draft.case.model_copy(update={"key": case.compute_key(first.data.fingerprint)}),
        }
    if failure is not None:
        host = None if failure.rank is None else hosts.get(failure.rank)
        updates["failure"] = make_failure_facts(
            failure, results, None if host is None else host.name
        )
    updates["budget"] = _make_budget(times, first, results.calibrations.get((0, "after")), clock())
    return finish_record(draft.model_copy(update=updates), failure)


def finish_record(draft: Record, failure: Failure | None) -> Record:
    """Derive metrics, checks, reasons, notes, quality and status of a record, and return a copy
    with them and its hashes set (sealed).

    The status follows from `failure`, which becomes the first reason, and the codes of the reasons
    (`derive_status`).
    """
    values = metric_table.derive_metrics(draft)
    checks, reasons, notes, quality = validity.judge_record(draft, values)
    if failure is not None:
        reasons = [Reason(code=failure.code, text=failure.text), *reasons]
    status = derive_status(failure is not None, (reason.code for reason in reasons))
    updates = {
        "metrics": values,
        "checks": checks,
        "reasons": reasons,
        "notes": notes,
        "quality": quality,
        "status": status,
    }
    return record.seal_record(draft.model_copy(update=updates))


def _make_rank_facts(
    rank_file: RankFile, host: HostFacts | None, results: RankResults
) -> RankFacts:
    """Return what the record states of a rank: from its rank file, the matmul rates of its device
    from the processes that timed them, and the name of its host if that is known (`host` is not
    None).
    """
    facts = rank_file.to_rank_facts().model_dump()
    before, after = (
        results.calibrations.get((rank_file.rank, stage)) for stage in ("before", "after")
    )
    rates: dict[str, Any] = {"matmul_flops_per_s": None}
    if before is not None:
        rates = _make_calibration_fields(before, after, rank_file)
    return RankFacts(**({} if host is None else {"host": host.name}), **facts, **rates)


def _make_calibration_fields(
    before: CalibrationMessage, after: CalibrationMessage | None, rank_file: RankFile
) -> dict[str, Any]:
    """Return the fields of RankFacts with the matmul rates of a rank's device, from those timed
    before and after the passes; rates that do not fit their model are a problem as well.
    """
    problems: dict[str, str] = {}
    rates: dict[str, CalibratedRates] = {}
    for message in filter(None, (before, after)):
        try:
            rates[message.stage] = CalibratedRates.model_validate(message.rates)
        except ValidationError as error:
            problems[message.stage] = describe_first_problem(error)
        if message.problem is not None:
            problems[message.stage] = message.problem
    first, last = (rates.get(stage, CalibratedRates()) for stage in ("before", "after"))
    cpu_rates = {
        stage: one.matmul_cpu_rates for stage, one in rates.items() if one.matmul_cpu_rates
    }
    collectives = None if rank_file.all_reduce_bytes_per_s is None else "worker"
    calibration = CalibrationFacts(
        matmuls="process" if before.is_shipped else "third_party",
        **({} if collectives is None else {"collectives": collectives}),
        **({"problems": problems} if problems else {}),
    )
    measured = {
        "matmul_flops_per_cpu_s": first.matmul_flops_per_cpu_s,
        "matmul_cpu_rates": cpu_rates,
        "matmul_flops_per_s_after": last.matmul_flops_per_s,
        "matmuls": first.matmuls,
    }
    return {
        "matmul_flops_per_s": first.matmul_flops_per_s,
        **{name: value for name, value in measured.items() if value},
        "calibration": calibration,
    }


def _add_borders(window: PassFacts, results: RankResults) -> PassFacts:
    """Return the window of a pass with what the agent saw of it: when it began and ended, and
    within how many seconds it saw that; all None unless it saw both. What the rank itself says of
    them does not count.
    """
    begin, end = (
        results.borders.get((window.rank, window.pass_name, event)) for event in ("begin", "end")
    )
    seen = (
        (None, None, None)
        if begin is None or end is None
        else (begin.t_s, end.t_s, max(begin.within_s, end.within_s))
    )
    names = ("seen_start_s", "seen_end_s", "seen_within_s")
    return window.model_copy(update=dict(zip(names, seen, strict=True)))


def _to_parent_clock(window: PassFacts, host: HostFacts | None) -> PassFacts:
    """Return the window of a pass (its `PassFacts`) as a copy with its times since the start of the
    run corrected for the drift of the host's clock; the same object without a host. All are moved
    by as much as its start: the wall time of a pass, to which they are compared, stays as the host
    counted it.
    """
    if host is None:
        return window
    moved_s = host.to_parent_clock(window.start_s) - window.start_s
    times = {name: getattr(window, name) for name in ("start_s", "seen_start_s", "seen_end_s")}
    return window.model_copy(
        update={
            name: None if time_s is None else time_s + moved_s for name, time_s in times.items()
        }
    )


def add_library_versions(environment: Environment, first_rank_file: RankFile | None) -> Environment:
    """Return a copy of the environment with the library versions that only the framework in a
    worker knows, from the rank file of rank 0; with None the versions stay as they are.
    """
    software = Software(
        **{
            **environment.software.model_dump(),
            **(first_rank_file.versions if first_rank_file else {}),
        }
    )
    return environment.model_copy(update={"software": software})


def _merge_outputs(
    task: Task,
    rank_files: list[RankFile],
    first_rank_file: RankFile | None,
    resume: ResumePoint | None,
) -> dict[str, Any]:
    """Return the task's outputs as JSON values: the common part of rank 0 merged with the answers
    of all ranks for each pass that rank 0 has and, for a resumed run, the answers from before the
    first step as pass `before`.

    Empty if rank 0 left no common part. Answers of the checkpoint that do not fit are ignored.
    """
    if first_rank_file is None or not first_rank_file.common:
        return {}
    outputs = task.outputs.model_validate(first_rank_file.common)
    if resume is not None and resume.before_answers:
        with suppress(TypeError, ValueError):  # answers that do not fit are ignored
            outputs = task.merge(
                outputs,
                "before",
                [task.check(answers, outputs) for answers in resume.before_answers],
            )
    for pass_name in first_rank_file.outputs:
        outputs = task.merge(
            outputs,
            pass_name,
            [
                rank_file.outputs[pass_name]
                for rank_file in rank_files
                if pass_name in rank_file.outputs
            ],
        )
    return outputs.model_dump(mode="json")


def _make_budget(
    times: RunTimes,
    first_rank_file: RankFile | None,
    calibration_after: CalibrationMessage | None,
    sealed_s: float,
) -> dict[str, float]:
    """Return wall seconds by part, from the start of the run to its record at `sealed_s`; the parts
    add up to all of it.

    `start`: until agents are started. `agents`: until every host was connected, checked and told to
    start. `launch`: what the parts of rank 0's own budget, which follow, leave of the workers'
    time, such as interpreter start. `calibrate_after`: matmuls timed after the passes, if they
    were. `record`: from the workers' end. `first_attempt`: the whole first attempt, if it ran out
    of memory; the other parts are then those of the second.
    """
    parts = first_rank_file.budget if first_rank_file else {}
    after = {} if calibration_after is None else {"calibrate_after": calibration_after.time_s}
    attempt_start_s = times.origin_s if times.second_attempt_s is None else times.second_attempt_s
    return {
        **(
            {}
            if times.second_attempt_s is None
            else {"first_attempt": attempt_start_s - times.origin_s}
        ),
        "start": times.agents_started_s - attempt_start_s,
        "agents": times.workers_started_s - times.agents_started_s,
        "launch": (
            times.ended_s - times.workers_started_s - sum(parts.values()) - sum(after.values())
        ),
        **parts,
        **after,
        "record": sealed_s - times.ended_s,
    }


def make_failure_facts(
    failure: Failure, results: RankResults, host: str | None = None
) -> FailureFacts:
    """Return what a record states of a failure: its text, rank, exit code, the stacks of all ranks,
    the end of stderr of the rank that caused it (of all ranks, if none did), and the name of its
    `host`, if known.
    """
    return FailureFacts(
        rank=failure.rank,
        host=host,
        exit_code=results.get_exit_code(failure.rank),
        error=failure.text,
        stderr_tail=results.get_stderr_tail(failure.rank),
        stacks=results.stacks,
    )
