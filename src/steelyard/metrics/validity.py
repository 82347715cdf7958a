"""Decide whether a finished run is valid: rules that check a record's evidence, and the reasons
that follow.

`run/assemble.py` judges a record when it is made, `verify.py` judges it again. `RULES` is the list;
a kind of work adds its own by reference (`Kind.rules`), so their names are part of the API. A rule
takes the record and its metrics and returns `Finding`s.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import fsum

from steelyard import accelerators, plugins, words
from steelyard.case.resolve import list_changed_keys
from steelyard.metrics import (
    clock_checks,
    cpu_contention,
    device_readings,
    fitness_rules,
    interval_rules,
    passes,
    plausibility,
    shipped_cases,
    stragglers,
    training_formulas,
    weights_check,
)
from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.metrics.result import (
    CheckResult,
    Finding,
    ValidityRule,
    make_check,
    make_failed_check,
    make_note,
)
from steelyard.record.record import Check, GateFacts, PassFacts, Quality, Reason, Record, Value
from steelyard.record.run_facts import Restart, StepDown
from steelyard.tasks.task import EarlyStop, Tally
from steelyard.words import Message, MessageValues

MIN_ACCOUNTED_SHARE = 0.95  # the least share of a pass's wall time that its steps must cover
# less is too short to hide work in, and is all that a rank without work has
MIN_UNACCOUNTED_S = 0.01


@dataclass(frozen=True)
class Judgement:
    """What follows from a record's evidence, as messages that are not yet in a language; made by
    `judge_as_messages`.

    `checks` (`CheckResult`) are all checks, passed or not, in the order of the rules. `reasons` are
    (code, message) of the checks that did not pass and have a reason code; none means valid, and
    `few_steps` alone unproven.
    `notes` do not affect validity. `quality` has the metric's name and value, and whether the
    case's gate applies (`evaluated`); `unevaluated` is the message why it does not, None if it
    does.
    """

    checks: tuple[CheckResult, ...]
    reasons: tuple[tuple[str, Message], ...]  # (code, message)
    notes: tuple[Message, ...]
    quality: Quality
    unevaluated: Message | None  # why the quality is not evaluated


RecordNotes = list[str | Message]


def judge_record(
    record: Record, metrics: dict[str, Value]
) -> tuple[list[Check], list[Reason], RecordNotes, Quality]:
    """Apply all rules of `RULES` and return (checks, reasons against validity, notes, quality);
    `standing.derive_status` makes the status of the reasons.

    Texts have the form that a record of its wording stores: messages, or English sentences in older
    records. The record is not changed.
    """
    judgement = judge_as_messages(record, metrics)
    checks = [
        Check(name=item.name, ok=item.ok, detail=words.to_stored_form(item.message, record.wording))
        for item in judgement.checks
    ]
    reasons = [
        Reason(code=code, text=words.to_stored_form(message, record.wording))
        for code, message in judgement.reasons
    ]
    notes: RecordNotes = [words.to_stored_form(item, record.wording) for item in judgement.notes]
    return checks, reasons, notes, judgement.quality


def judge_as_messages(record: Record, metrics: dict[str, Value]) -> Judgement:
    """Apply all rules in the order of `RULES` to a record and its derived metrics, and return
    checks, reasons, notes and quality as messages. A check that did not pass becomes a reason if
    its finding has a reason code.
    """
    all_findings = [finding for rule in RULES for finding in rule(record, metrics)]
    failed_checks = [
        (finding.code, finding.check.message)
        for finding in all_findings
        if finding.check is not None and not finding.check.ok and finding.code
    ]
    evaluated, unevaluated = evaluate_quality(record, metrics)
    return Judgement(
        checks=tuple(finding.check for finding in all_findings if finding.check is not None),
        reasons=tuple(failed_checks),
        notes=tuple(finding.note for finding in all_findings if finding.note is not None),
        quality=evaluated,
        unevaluated=unevaluated,
    )


def evaluate_quality(record: Record, metrics: dict[str, Value]) -> tuple[Quality, Message | None]:
    """Return (quality of a record, why the case's gate may not be applied to it); the second is
    None if it may.

    The metric is the gate's, without a gate the task's own; its value comes from `metrics`, None if
    it is missing there. The gate may not be applied if a need of `_list_unmet_needs` is not met or
    the value is unknown. `Quality.note` is the same reason as the record stores it.
    """
    gate = record.case.gate
    metric = gate.metric if gate else record.task.quality
    value = metrics[metric].value if metric in metrics else None
    why = words.join_messages(*_list_unmet_needs(record, metrics)) or (
        UNKNOWN_QUALITY if value is None else None
    )
    note = words.to_stored_form(why, record.wording)
    return Quality(metric=metric, value=value, gate=gate, evaluated=why is None, note=note), why


def _list_unmet_needs(record: Record, metrics: dict[str, Value]) -> list[Message]:
    """Return a message for each condition for applying the gate that the run does not meet; empty
    if all are met.

    The conditions: the case has a gate, the command line changed nothing in the question (precision
    and division apart), the scope is full, those of the kind of work (`Kind.gate_needs`), and, for
    a gate `below` another metric, a known value of that metric.
    """
    gate = record.case.gate
    needs = [
        (gate is not None, Message("quality.no_gate")),
        (not list_changed_keys(record.case.origins), Message("quality.changed")),
        (record.scope.kind == "full", Message("quality.window")),
        *plugins.load_reference(record.task.kind_row.gate_needs)(record),
    ]
    if gate is not None and gate.below is not None:
        below = metrics.get(gate.below)
        needs.append(
            (
                below is not None and below.value is not None,
                Message("quality.no_base", {"metric": gate.below}),
            )
        )
    return [message for holds, message in needs if not holds]


def needs_of_scoring(record: Record) -> list[tuple[bool, Message]]:
    """Return (whether it holds, message if not) for each of the three needs of scoring before its
    gate applies: size full, trained weights, and data that are not known to differ from the
    published ones. `Kind.gate_needs` names this function.
    """
    size = (record.case.size == "full", Message("quality.smoke"))
    return [
        size,
        (_has_trained_weights(record), _describe_untrained_weights(record)),
        (_may_be_published_data(record), _OTHER_DATA),
    ]


def needs_of_training(record: Record) -> list[tuple[bool, Message]]:
    """Return (whether it holds, message if not) for each need of training before its gate applies:
    in size full, data that are not known to differ from the published ones, and trained weights if
    the task starts from such. Empty in other sizes, where a falling loss can be asked of any run.
    `Kind.gate_needs` names this function.
    """
    if record.case.size != "full":
        return []
    fresh = not record.task.starts_trained
    return [
        (fresh or _has_trained_weights(record), _describe_untrained_weights(record)),
        (_may_be_published_data(record), _OTHER_DATA),
    ]


def _has_trained_weights(record: Record) -> bool:
    """Return whether the run's weights came from a checkpoint."""
    return record.weights.is_trained


def _describe_untrained_weights(record: Record) -> Message:
    """Return why a gate does not apply to weights that did not come from a checkpoint as far as is
    known: their source is unknown, as that of a server's, or they are random.
    """
    return _UNKNOWN_WEIGHTS if record.weights.source == "unknown" else _RANDOM_WEIGHTS


def _may_be_published_data(record: Record) -> bool:
    """Return whether the record's data are the published set, or it is not known (`published` is
    None); False if they are known to be others, or the record has no such field because no data
    were read.
    """
    return getattr(record.data, "published", False) is not False


UNKNOWN_QUALITY = Message("quality.unknown")
_UNKNOWN_WEIGHTS = Message("quality.unknown_weights")
_RANDOM_WEIGHTS, _OTHER_DATA = Message("quality.random"), Message("quality.other_data")


def _apply_kind_rules(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: apply the rules that the record's kind of work names (`Kind.rules`, as
    `module:function`), in their order, and yield their findings.
    """
    for rule in record.task.kind_row.rules:
        yield from plugins.load_reference(rule)(record, metrics)


def finite_answers(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield for each pass whose answers the task tallies one check `finite_PASS`
    (reason `nan`), which passes if no answer is NaN or infinite. Nothing without answers. `metrics`
    is not used.
    """
    for pass_name, noun, tally in _list_tallies(record):
        message_values: MessageValues = {
            "pass": pass_name,
            "bad": tally.not_finite,
            "items": tally.items,
            "nouns": words.name_items(noun),
        }
        yield make_check(
            f"finite_{pass_name}", not tally.not_finite, "nan", "check.finite", message_values
        )


def finite_values(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: return one failed check `finite_values` (reason `nan`) if a sample of any pass
    has a value that is not finite (stored as None), naming pass, step and rank of the first;
    otherwise an empty list. `metrics` is not used.
    """
    bad_sample = next((sample for sample in record.samples if None in sample.values.values()), None)
    message_values: MessageValues = (
        {}
        if bad_sample is None
        else {"pass": bad_sample.pass_name, "step": bad_sample.step, "rank": bad_sample.rank}
    )
    return (
        [make_failed_check("finite_values", "nan", "check.finite_values", message_values)]
        if message_values
        else []
    )


def _find_early_stop(record: Record) -> EarlyStop | None:
    """Return why (`nan`, `bound` or `target`) and at which step training ended early, as the task
    reads it from the record's answers; None if it did not, or there are no answers.
    """
    answers = record.answers
    return None if answers is None else record.task.stopped(answers)


def finite_losses(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule of training: yield check `finite_loss` (reason `nan`) on the loss of every
    step, if there are losses or an early stop; a failed check `loss_bound` (reason `loss_bound`)
    only if training ended because a loss exceeded its bound; and `finite_before` and `finite_after`
    (reason `nan`) on losses on held-out data, for those passes that were evaluated.

    Gradient norms are not checked: loss scaling in fp16 makes them overflow on purpose. `metrics`
    is not used.
    """
    losses, stopped = training_formulas.list_step_values(record, "loss"), _find_early_stop(record)
    why = stopped.why if stopped else None
    bad_step = (
        losses.index(None) if None in losses else stopped.step if stopped and why == "nan" else None
    )
    if losses or stopped:
        yield make_check(
            "finite_loss",
            bad_step is None,
            "nan",
            "check.finite_loss",
            {} if bad_step is None else {"step": bad_step},
        )
    train = record.question.train
    if stopped and why == "bound" and train is not None:
        message_values: MessageValues = {
            "step": stopped.step,
            "value": str(stopped.value),
            "bound": str(train.bound),
        }
        yield make_failed_check("loss_bound", "loss_bound", "check.loss_bound", message_values)
    answers = record.answers
    for name in ("before", "after"):
        finite = None if answers is None else record.task.held_out_finite(answers, name)
        if finite is not None:
            yield make_check(
                f"finite_{name}", finite, "nan", "check.finite_held_out", {"pass": name}
            )


def _list_tallies(record: Record) -> list[tuple[str, str, Tally]]:
    """Return (pass name, the task's noun for an item, tally of answers) for each pass in the
    record's outputs that the task tallies; empty if there are no answers. A tally counts items, and
    those not answered, answered twice or not finite.
    """
    task, answers = record.task, record.answers
    if answers is None:
        return []
    tallies = [
        (name, task.noun, task.tally(answers, name)) for name in record.outputs.get("passes", {})
    ]
    return [(name, noun, tally) for name, noun, tally in tallies if tally is not None]


def covered_items(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield for each pass whose answers the task tallies a check that every item in
    scope was answered exactly once; reason `coverage`.

    The check is `covered_PASS`, or `covered_PASS_NOUNs` (the task's noun for an item) for a pass in
    global batches. If `--steps` ended a pass of scoring early, items may be missing, and none may
    be answered twice. `metrics` is not used.
    """
    kind = record.task.kind_row
    may_be_partial = kind.cut_by_steps and record.scope.steps is not None
    for pass_name, noun, tally in _list_tallies(record):
        ok = not tally.repeated and (not tally.missing or may_be_partial)
        message_values: MessageValues = {
            "pass": pass_name,
            "items": tally.items,
            "nouns": words.name_items(noun),
            "missing": tally.missing,
            "repeated": tally.repeated,
            "answered": tally.items - tally.missing,
        }
        check_name = (
            f"covered_{pass_name}_{noun}s" if pass_name in kind.stepped else f"covered_{pass_name}"
        )
        message_code = "check.covered_part" if may_be_partial and tally.missing else "check.covered"
        yield make_check(check_name, ok, "coverage", message_code, message_values)


def covered_steps(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule of training: return one check `covered_train` (reason `coverage`) that every
    rank made as many working steps as expected, on the rank that is farthest off.

    Expected are the steps of `--steps`, else those of the question, or those until the target was
    reached, less those before the last restart. Empty for a run that failed before any rank
    trained. `metrics` is not used.
    """
    ranks = {window.rank for window in passes.select_windows(record, "train")}
    if not ranks and record.failure is not None:
        return []
    train, stopped = record.question.train, _find_early_stop(record)
    expected = record.scope.steps if record.scope.steps is not None else train.steps if train else 0
    expected = stopped.step if stopped and stopped.why == "target" else expected
    expected -= record.restarts[-1].step if record.restarts else 0
    taken = passes.group_working_steps(record, "train")
    counts = {rank: len(taken.get(rank, [])) for rank in sorted(ranks | {0})}
    worst = max(counts, key=lambda rank: abs(counts[rank] - expected))
    message_values: MessageValues = {"rank": worst, "taken": counts[worst], "wanted": expected}
    return [
        make_check(
            "covered_train", counts[worst] == expected, "coverage", "check.steps", message_values
        )
    ]


def counted_all(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield for each pass that has samples a check `counted_PASS` (reason `tokens`)
    that they count, all replicas together, exactly the tokens of the data.

    Only in division closed; nothing in division open, with `--steps`, or if the data's tokens are
    unknown. `metrics` is not used.
    """
    expected = getattr(record.data, "tokens", None)
    if expected is None or record.case.division != "closed" or record.scope.steps is not None:
        return
    for pass_name in sorted({sample.pass_name for sample in record.samples}):
        counted = passes.sum_counts(record, pass_name).get("tokens", 0)
        message_values: MessageValues = {"pass": pass_name, "tokens": counted, "wanted": expected}
        yield make_check(
            f"counted_{pass_name}", counted == expected, "tokens", "check.counted", message_values
        )


def counted_any(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule of training: return one check `counted_train` (reason `tokens`) that pass
    `train` counted more than 0 tokens; empty if there was no such pass. A corpus is larger than
    what is trained on, so no exact number can be asked. `metrics` is not used.
    """
    if not passes.select_windows(record, "train"):
        return []
    counted = passes.sum_counts(record, "train").get("tokens", 0)
    return [
        make_check("counted_train", counted > 0, "tokens", "check.counted_any", {"tokens": counted})
    ]


def _select_judged_windows(record: Record) -> list[PassFacts]:
    """Return the windows (one for each rank) of the passes that the kind of work names in `judged`,
    in which times and devices are checked.
    """
    return [window for window in record.passes if window.pass_name in record.task.kind_row.judged]


def _check_accounted_time(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield for each judged pass (`Kind.judged`) on each rank a check
    `accounted_PASS` (reason `unaccounted`) that its steps cover at least 95 % of its wall time, or
    leave less than 10 ms.

    Passes without instrumentation (`Kind.bare`) are skipped, and passes of requests whose engine
    reports no steps: there the requests' own times are what counts. If an external program reported
    the step times, the host's times of the steps count instead. `metrics` is not used.
    """
    kind = record.task.kind_row
    for window in _select_judged_windows(record):
        steps = [
            s for s in passes.select_samples(record, window.pass_name) if s.rank == window.rank
        ]
        has_requests = window.pass_name in kind.request_passes
        if window.pass_name in kind.bare or (has_requests and not steps):
            continue
        # `check_reported_times` compares what a program reports of its steps with these times.
        use_host_times = record.clock == "reported"
        covered = fsum(
            s.host_end_s - s.host_start_s if use_host_times else s.end_s - s.start_s for s in steps
        )
        share = covered / window.wall_s if window.wall_s else 1.0
        check_name, uncovered_s = f"accounted_{window.pass_name}", window.wall_s - covered
        message_values: MessageValues = {
            "pass": window.pass_name,
            "rank": window.rank,
            "share": share,
            "least": MIN_ACCOUNTED_SHARE,
            "rest": 1000 * uncovered_s,
        }
        is_short = share < MIN_ACCOUNTED_SHARE and uncovered_s < MIN_UNACCOUNTED_S
        message_code = "check.accounted_short" if is_short else "check.accounted"
        yield make_check(
            check_name,
            share >= MIN_ACCOUNTED_SHARE or is_short,
            "unaccounted",
            message_code,
            message_values,
        )


def _check_devices(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check the telemetry of each device during the judged passes for clock
    slowdowns and other processes. Nothing for size smoke, and for hardware that is only declared;
    `metrics` is not used.

    A slowdown reason of severity "invalidates" yields a failed check `clocks_REASON` (reason
    `slowdown`) with the largest share of readings in any pass, one of severity "note", as unknown
    reasons are, only a note. If the device counts its processes, a check `alone` (reason `shared`)
    says whether it had more than one.
    """
    if record.case.size == "smoke" or is_hardware_declared(record):
        return
    default_severity = accelerators.collect_settings(
        lambda row: row.severity
    )  # older records do not store severities
    for series in record.telemetry:
        time_ranges = [(w.start_s, w.start_s + w.wall_s) for w in _select_judged_windows(record)]
        worst_shares: dict[str, float] = {}
        for start, end in time_ranges:
            for reason, share in device_readings.find_slowdown_shares(series, start, end).items():
                worst_shares[reason] = max(worst_shares.get(reason, 0.0), share)
        for reason, share in sorted(worst_shares.items()):
            message_values: MessageValues = {
                "device": series.device,
                "reason": reason,
                "share": share,
            }
            severity = (default_severity if series.severity is None else series.severity).get(
                reason, "note"
            )
            if severity == "invalidates":
                yield make_failed_check(
                    f"clocks_{reason}", "slowdown", "check.slowdown", message_values
                )
            elif severity == "note":
                yield make_note(Message("note.slowdown", message_values))
        foreign = [
            device_readings.has_foreign_processes(series, start, end) for start, end in time_ranges
        ]
        if any(is_foreign is not None for is_foreign in foreign):
            yield make_check(
                "alone", not any(foreign), "shared", "check.alone", {"device": series.device}
            )


def _check_gate(record: Record, metrics: dict[str, Value]) -> Iterable[Finding]:
    """Validity rule: return the checks of the quality against the case's gate; empty if it may not
    be applied (`evaluate_quality`).

    By the gate's form: `reach` (check `gate`, value at least that; reason `target_not_reached`),
    `below` (`_check_below`), or `target` (`_check_near_target`); reason `quality` for the last two.
    If a gate to reach lacks only the value, and the run did not fail, the check fails with reason
    `quality`.
    """
    (quality_result, why), gate = evaluate_quality(record, metrics), record.case.gate
    if (
        gate is not None
        and gate.reach is not None
        and why == UNKNOWN_QUALITY
        and record.failure is None
    ):
        # the metric was never evaluated
        return [
            make_failed_check(
                "gate", "quality", "check.gate_unknown", {"metric": quality_result.metric}
            )
        ]
    if not quality_result.evaluated or gate is None or quality_result.value is None:
        return []
    if gate.reach is not None:
        message_values: MessageValues = {
            "metric": quality_result.metric,
            "value": quality_result.value,
            "target": gate.reach,
        }
        return [
            make_check(
                "gate",
                quality_result.value >= gate.reach,
                "target_not_reached",
                "check.gate_reach",
                message_values,
            )
        ]
    if gate.below is not None:
        return _check_below(
            quality_result.metric, quality_result.value, gate, metrics[gate.below].value
        )
    return _check_near_target(
        quality_result.metric,
        quality_result.value,
        gate,
        metrics.get(f"{quality_result.metric}_val"),
    )


def _check_near_target(
    metric: str, value: float, gate: GateFacts, val: Value | None
) -> Iterator[Finding]:
    """Yield check `gate`, that a value is at most `gate.within` from `gate.target`, and, if
    `gate.agree_within` is set and `val` has a value, check `gate_agree`, that the two are at most
    that far apart; reason `quality` for both.

    `val` is the same metric of pass `val`. Nothing if the gate has no target or no `within`.
    """
    if gate.target is None or gate.within is None:
        return
    message_values: MessageValues = {
        "metric": metric,
        "value": value,
        "target": gate.target,
        "within": gate.within,
    }
    yield make_check(
        "gate", abs(value - gate.target) <= gate.within, "quality", "check.gate", message_values
    )
    if val is not None and val.value is not None and gate.agree_within is not None:
        apart = abs(value - val.value)
        agreement_values: MessageValues = {"apart": apart, "most": gate.agree_within}
        yield make_check(
            "gate_agree",
            apart <= gate.agree_within,
            "quality",
            "check.gate_agree",
            agreement_values,
        )


def _check_below(metric: str, value: float, gate: GateFacts, start: float | None) -> list[Finding]:
    """Return one check `gate` (reason `quality`) that a value is strictly below `start`, the value
    of the metric that `gate.below` names, and below `gate.target`; a limit that is None is not
    compared.
    """
    known = [limit for limit in (start, gate.target) if limit is not None]
    limit_messages: tuple[Message, ...] = (
        ()
        if start is None
        else (Message("gate.metric", {"name": str(gate.below), "limit": start}),)
    )
    limit_messages += (
        () if gate.target is None else (Message("gate.target", {"limit": gate.target}),)
    )
    message_values: MessageValues = {"metric": metric, "value": value, "limits": limit_messages}
    return [
        make_check(
            "gate",
            all(value < limit for limit in known),
            "quality",
            "check.gate_below",
            message_values,
        )
    ]


def _note_changes(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: return notes, and no checks, on what a reader must know before comparing;
    `metrics` is not used.

    On: a question, gate or `max_interval` changed by the command line, a case that differs from the
    shipped one or is older, each restart, a second attempt with a smaller automatic tune after
    memory ran out, a sample in division open where prefixes are shared, named subjects or rows,
    emulated fp8, and a user's own model.
    """
    case, scope = record.case, record.scope
    keys = tuple(list_changed_keys(case.origins))
    changed = [key for key, origin in case.origins.items() if origin == "command line"]
    limits = tuple(key for key in changed if key == "max_interval" or key.startswith("gate."))
    parts, fields = (
        tuple(shipped_cases.list_modified_parts(record)),
        tuple(shipped_cases.list_later_fields(record)),
    )
    shares_less = (
        case.division == "open" and scope.sample is not None and record.task.kind_row.shares
    )
    emulated = (record.engine.details.fp8 or "").startswith("emulated")
    messages = (
        Message("note.question", {"keys": keys}) if keys else None,
        Message("note.limits", {"keys": limits}) if limits else None,
        Message("note.modified", {"parts": parts, "case": case.name}) if parts else None,
        Message("note.earlier", {"case": case.name, "fields": fields}) if fields else None,
        *map(_make_resumed_note, record.restarts),
        None if record.stepped_down is None else _make_step_down_note(record, record.stepped_down),
        Message("note.sample") if shares_less else None,
        Message("note.selected") if scope.subjects or scope.rows else None,
        Message("note.emulated") if emulated else None,
        *shipped_cases.make_own_model_notes(record),
    )
    return [make_note(message) for message in messages if message is not None]


def _make_step_down_note(record: Record, attempt: StepDown) -> Message:
    """Return the note of a run whose first attempt ran out of memory: the values of the automatic
    tunes that were tried (`attempt.tune`), and those of the same tunes that ran, as "name=value".
    """
    tried = tuple(f"{name}={value}" for name, value in attempt.tune.items())
    tune = record.tune.model_dump()
    return Message(
        "note.stepped_down",
        {"tried": tried, "ran": tuple(f"{name}={tune.get(name)}" for name in attempt.tune)},
    )


def _make_resumed_note(restart: Restart) -> Message:
    """Return the note of a resumed run: from which record (first 8 characters of its id) or folder
    it was resumed, from which step and plan, and, as another message, which damaged checkpoints
    were passed over.
    """
    source = (
        Message("resumed.record", {"record": restart.record[:8]})
        if restart.record
        else Message("resumed.folder")
    )
    message_values: MessageValues = {
        "source": source,
        "step": restart.step,
        "plan": str(restart.plan),
    }
    if restart.passed_over:
        return Message(
            "note.resumed_past", {**message_values, "damaged": tuple(restart.passed_over)}
        )
    return Message("note.resumed", message_values)


def _note_straggler(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: return one note that names the slowest rank or replica if it is slow
    (`make_straggler_note`), else an empty list; no check, so the status is not affected. `metrics`
    is not used.
    """
    straggler_note = stragglers.make_straggler_note(record)
    return [] if straggler_note is None else [make_note(straggler_note)]


RULES: tuple[ValidityRule, ...] = (
    *(
        _apply_kind_rules,
        plausibility.check_drawn_counts,
        plausibility.check_plausible_rates,
        plausibility.check_calibration,
        _check_accounted_time,
        plausibility.check_time_outside_passes,
        clock_checks.check_clocks_agree,
        weights_check.check_asked_weights,
        clock_checks.check_borders_agree,
    ),
    *(
        clock_checks.check_reported_times,
        interval_rules.check_interval,
        _check_devices,
        fitness_rules.note_device_settings,
        cpu_contention.check_contention,
        _note_straggler,
        _check_gate,
        _note_changes,
    ),
)
