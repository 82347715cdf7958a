"""Decide whether a finished run is valid: rules that check a record's evidence, and the reasons
that follow.

`run/assemble.py` calls `judge_record` when a record is made, `verify.py` calls it again. `RULES` is
the list; a kind of work adds its own by reference (`Kind.rules`), so their names are part of the
API. A rule takes the record and its metrics and returns `Finding`s.
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
    passes,
    plausibility,
    shipped_cases,
    stats,
    stragglers,
    training_formulas,
)
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
    """What follows from a record's evidence, as messages that are not yet in a language.

    `reasons` are (code, message) of checks that did not pass; none means valid. `unevaluated` says
    why the quality is not checked against the gate; None if it is.
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
    """Apply all rules and return checks, reasons against validity (empty: valid), notes and
    quality, as a record of its wording stores them.
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
    """Apply all rules in the order of `RULES` and return checks, reasons, notes and quality as
    messages. A reason is added for each check that did not pass and has a reason code.
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
    """Return the quality of a record (the gate's metric, else the task's), and why the gate may not
    be applied to it; None if it may.
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
    """Return a message for each condition for applying the gate that the run does not meet: a gate,
    an unchanged question, a full scope, what the kind of work needs, and a known value of the
    metric that it is compared with.
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
    """Return (whether it holds, message if not) for what scoring needs for its gate: full size,
    trained weights, the published data.
    """
    size = (record.case.size == "full", Message("quality.smoke"))
    return [
        size,
        (_has_trained_weights(record), _RANDOM_WEIGHTS),
        (_may_be_published_data(record), _OTHER_DATA),
    ]


def needs_of_training(record: Record) -> list[tuple[bool, Message]]:
    """Return (whether it holds, message if not) for what training needs for its gate: in full size
    the published data, and trained weights if the task starts from such; nothing in other sizes,
    where a falling loss can be asked of any run.
    """
    if record.case.size != "full":
        return []
    fresh = not record.task.starts_trained
    return [
        (fresh or _has_trained_weights(record), _RANDOM_WEIGHTS),
        (_may_be_published_data(record), _OTHER_DATA),
    ]


def _has_trained_weights(record: Record) -> bool:
    """Return whether the run's weights came from a checkpoint."""
    return record.weights.is_trained


def _may_be_published_data(record: Record) -> bool:
    """Return whether the data are the published set, or nobody knows; False if they are known to be
    others, or no data were read.
    """
    return getattr(record.data, "published", False) is not False


UNKNOWN_QUALITY = Message("quality.unknown")
_RANDOM_WEIGHTS, _OTHER_DATA = Message("quality.random"), Message("quality.other_data")


def _apply_kind_rules(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Apply the rules that the record's kind of work names, and yield their findings."""
    for rule in record.task.kind_row.rules:
        yield from plugins.load_reference(rule)(record, metrics)


def finite_answers(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check for each pass that all answers are finite numbers; check `finite_PASS`,
    reason `nan`.
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
    """Validity rule: return a failed check (reason `nan`) if a step recorded a value that is not
    finite, naming the first; otherwise nothing.
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
    """Return why and at which step training ended early; None if it did not, or there are no
    answers.
    """
    answers = record.answers
    return None if answers is None else record.task.stopped(answers)


def finite_losses(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check that all training losses are finite (`finite_loss`), that training did
    not end because a loss exceeded its bound (`loss_bound`), and that losses on held-out data are
    finite (`finite_before`, `finite_after`).

    Gradient norms are not checked: loss scaling in fp16 makes them overflow on purpose.
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
    """Return (pass, noun of its items, tally of its answers) for each pass whose items must all be
    answered; empty if there are no answers.
    """
    task, answers = record.task, record.answers
    if answers is None:
        return []
    tallies = [
        (name, task.noun, task.tally(answers, name)) for name in record.outputs.get("passes", {})
    ]
    return [(name, noun, tally) for name, noun, tally in tallies if tally is not None]


def covered_items(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check for each pass that every item in scope was answered exactly once; reason
    `coverage`.

    If `--steps` ended a pass early, items may be missing, and none may be answered twice.
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
    """Validity rule: check that every rank made every training step in scope, or those until the
    target was reached, without those before a restart; reason `coverage`.

    The check is on the rank that is farthest off. Nothing for a run that failed before training.
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
    """Validity rule: check in division closed that the samples of each pass count exactly the
    tokens of the data; reason `tokens`.

    Nothing in division open, with `--steps`, or if the data's tokens are unknown.
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
    """Validity rule: check that the training pass counted any tokens; reason `tokens`. A corpus is
    larger than what is trained on, so no exact number can be asked. Nothing if there was no such
    pass.
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
    """Check for each pass on each rank that its steps cover at least 95 % of its wall time, or
    leave less than 10 ms; check `accounted_PASS`, reason `unaccounted`.

    Passes without instrumentation are skipped. If a program reported step times, the host's times
    of the steps count.
    """
    for window in _select_judged_windows(record):
        if window.pass_name in record.task.kind_row.bare:
            continue
        steps = [
            s for s in passes.select_samples(record, window.pass_name) if s.rank == window.rank
        ]
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


def _check_interval(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Check that the 95 % interval of `tokens_per_device_s`, relative to its value, is no wider
    than the case's `max_interval`; reason `interval`.

    Without an interval: a note if there are too few steps for one, else the check fails. Nothing
    for size smoke, without a limit or without a value.
    """
    limit, value = record.case.max_interval, metrics.get("tokens_per_device_s")
    if limit is None or record.case.size == "smoke" or value is None or value.value is None:
        return []
    if value.interval is None:
        rate_span = passes.find_rate_span(record)
        steps = (
            [step for of_rank in rate_span.steps.values() for step in of_rank] if rate_span else []
        )
        if len(
            [step for step in steps if step.counts.get("tokens")]
        ) < stats.MIN_STEPS * passes.count_devices(record):
            return [make_note(Message("note.few_batches"))]
        return [make_failed_check("interval", "interval", "check.interval_open", {})]
    width = (value.interval[1] - value.interval[0]) / value.value
    return [
        make_check(
            "interval",
            width <= limit,
            "interval",
            "check.interval",
            {"width": width, "limit": limit},
        )
    ]


def _check_devices(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Check telemetry of each device inside the judged passes: clock slowdowns and other processes.
    Size smoke is skipped.

    A slowdown reason whose severity is "invalidates" yields a failed check (reason `slowdown`),
    "note" (also for unknown reasons) a note. Check `alone` (reason `shared`) appears if the device
    counts its processes.
    """
    if record.case.size == "smoke":
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
    """Check the quality against the case's gate; nothing if it is not evaluated.

    A gate has one form: `reach` (value at least that; reason `target_not_reached`), `below` another
    metric, or `target` within a tolerance (reason `quality`). If a value to reach is unknown in a
    run that did not fail, the check fails.
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
    """Check that a value is within `gate.within` of its target, and, if `gate.agree_within` is set,
    that pass `val` agrees with it (`gate_agree`); reason `quality`. `val` is the same metric of
    pass `val`.
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
    """Check that a value is strictly below `start`, the value of metric `gate.below`, and below
    `gate.target` if there is one; reason `quality`.
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
    """Return notes on what a reader must know before comparing: a changed question or limits, a
    modified or earlier case, restarts, a smaller second attempt, a sample or named rows, emulated
    fp8, a user's own model.
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
    """Return the note of a run whose first attempt ran out of memory: the automatic tune that was
    tried, and the one that ran.
    """
    tried = tuple(f"{name}={value}" for name, value in attempt.tune.items())
    tune = record.tune.model_dump()
    return Message(
        "note.stepped_down",
        {"tried": tried, "ran": tuple(f"{name}={tune.get(name)}" for name in attempt.tune)},
    )


def _make_resumed_note(restart: Restart) -> Message:
    """Return the note of a resumed run: from which record or folder, step and plan, and which
    damaged checkpoints were passed over.
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
    """Return a note that names the slowest rank, if one is slow; it does not affect the status."""
    straggler_note = stragglers.make_straggler_note(record)
    return [] if straggler_note is None else [make_note(straggler_note)]


RULES: tuple[ValidityRule, ...] = (
    *(
        _apply_kind_rules,
        plausibility.check_drawn_counts,
        plausibility.check_plausible_rates,
        _check_accounted_time,
        plausibility.check_time_outside_passes,
        clock_checks.check_clocks_agree,
    ),
    *(
        clock_checks.check_reported_times,
        _check_interval,
        _check_devices,
        fitness_rules.note_device_settings,
        cpu_contention.check_contention,
        _note_straggler,
        _check_gate,
        _note_changes,
    ),
)
