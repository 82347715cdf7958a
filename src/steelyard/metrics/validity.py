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
from steelyard.case.resolve import changed_question
from steelyard.metrics import (
    busy,
    clocks,
    fit,
    plausible,
    readings,
    shipped,
    stats,
    stragglers,
    training,
)
from steelyard.metrics import spans as passes
from steelyard.metrics.result import Finding, Judged, Rule, failed, judged, note
from steelyard.record.facts import Restart, StepDown
from steelyard.record.record import Check, GateFacts, Quality, Reason, Record, Value, Window
from steelyard.tasks.task import Stopped, Tally
from steelyard.words import Message, Values

ACCOUNTED = 0.95  # the least share of a pass's wall time that its steps must cover
# less is too short to hide work in, and is all that a rank without work has
LEAST_S = 0.01


@dataclass(frozen=True)
class Judgement:
    """What follows from a record's evidence, as messages that are not yet in a language.

    `reasons` are (code, message) of checks that did not pass; none means valid. `unevaluated` says
    why the quality is not checked against the gate; None if it is.
    """

    checks: tuple[Judged, ...]
    reasons: tuple[tuple[str, Message], ...]  # (code, message)
    notes: tuple[Message, ...]
    quality: Quality
    unevaluated: Message | None  # why the quality is not evaluated


Notes = list[str | Message]


def judge(
    record: Record, values: dict[str, Value]
) -> tuple[list[Check], list[Reason], Notes, Quality]:
    """Apply all rules and return checks, reasons against validity (empty: valid), notes and
    quality, as a record of its wording stores them.
    """
    found = findings(record, values)
    checks = [
        Check(name=one.name, ok=one.ok, detail=words.stored(one.said, record.wording))
        for one in found.checks
    ]
    reasons = [
        Reason(code=code, text=words.stored(said, record.wording)) for code, said in found.reasons
    ]
    notes: Notes = [words.stored(one, record.wording) for one in found.notes]
    return checks, reasons, notes, found.quality


def findings(record: Record, values: dict[str, Value]) -> Judgement:
    """Apply all rules in the order of `RULES` and return checks, reasons, notes and quality as
    messages. A reason is added for each check that did not pass and has a reason code.
    """
    found = [one for rule in RULES for one in rule(record, values)]
    failed = [
        (one.code, one.check.said)
        for one in found
        if one.check is not None and not one.check.ok and one.code
    ]
    evaluated, unevaluated = quality(record, values)
    return Judgement(
        checks=tuple(one.check for one in found if one.check is not None),
        reasons=tuple(failed),
        notes=tuple(one.note for one in found if one.note is not None),
        quality=evaluated,
        unevaluated=unevaluated,
    )


def quality(record: Record, values: dict[str, Value]) -> tuple[Quality, Message | None]:
    """Return the quality of a record (the gate's metric, else the task's), and why the gate may not
    be applied to it; None if it may.
    """
    gate = record.case.gate
    metric = gate.metric if gate else record.task.quality
    value = values[metric].value if metric in values else None
    why = words.both(*_unmet(record, values)) or (UNKNOWN if value is None else None)
    note = words.stored(why, record.wording)
    return Quality(metric=metric, value=value, gate=gate, evaluated=why is None, note=note), why


def _unmet(record: Record, values: dict[str, Value]) -> list[Message]:
    """Return a message for each condition for applying the gate that the run does not meet: a gate,
    an unchanged question, a full scope, what the kind of work needs, and a known value of the
    metric that it is compared with.
    """
    gate = record.case.gate
    needs = [
        (gate is not None, Message("quality.no_gate")),
        (not changed_question(record.case.origins), Message("quality.changed")),
        (record.scope.kind == "full", Message("quality.window")),
        *plugins.load(record.task.kind_row.gate_needs)(record),
    ]
    if gate is not None and gate.below is not None:
        below = values.get(gate.below)
        needs.append(
            (
                below is not None and below.value is not None,
                Message("quality.no_base", {"metric": gate.below}),
            )
        )
    return [text for holds, text in needs if not holds]


def needs_of_scoring(record: Record) -> list[tuple[bool, Message]]:
    """Return (whether it holds, message if not) for what scoring needs for its gate: full size,
    trained weights, the published data.
    """
    size = (record.case.size == "full", Message("quality.smoke"))
    return [size, (_trained(record), _RANDOM), (_published(record), _OTHER_DATA)]


def needs_of_training(record: Record) -> list[tuple[bool, Message]]:
    """Return (whether it holds, message if not) for what training needs for its gate: in full size
    the published data, and trained weights if the task starts from such; nothing in other sizes,
    where a falling loss can be asked of any run.
    """
    if record.case.size != "full":
        return []
    fresh = not record.task.starts_trained
    return [(fresh or _trained(record), _RANDOM), (_published(record), _OTHER_DATA)]


def _trained(record: Record) -> bool:
    """Return whether the run's weights came from a checkpoint."""
    return record.weights.trained


def _published(record: Record) -> bool:
    """Return whether the data are the published set, or nobody knows; False if they are known to be
    others, or no data were read.
    """
    return getattr(record.data, "published", False) is not False


UNKNOWN = Message("quality.unknown")
_RANDOM, _OTHER_DATA = Message("quality.random"), Message("quality.other_data")


def _of_kind(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Apply the rules that the record's kind of work names, and yield their findings."""
    for rule in record.task.kind_row.rules:
        yield from plugins.load(rule)(record, values)


def finite_answers(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check for each pass that all answers are finite numbers; check `finite_PASS`,
    reason `nan`.
    """
    for name, noun, tally in _tallies(record):
        told: Values = {
            "pass": name,
            "bad": tally.not_finite,
            "items": tally.items,
            "nouns": words.items(noun),
        }
        yield judged(f"finite_{name}", not tally.not_finite, "nan", "check.finite", told)


def finite_values(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Validity rule: return a failed check (reason `nan`) if a step recorded a value that is not
    finite, naming the first; otherwise nothing.
    """
    bad = next((sample for sample in record.samples if None in sample.values.values()), None)
    told: Values = (
        {} if bad is None else {"pass": bad.pass_name, "step": bad.step, "rank": bad.rank}
    )
    return [failed("finite_values", "nan", "check.finite_values", told)] if told else []


def _stopped(record: Record) -> Stopped | None:
    """Return why and at which step training ended early; None if it did not, or there are no
    answers.
    """
    answers = record.answers
    return None if answers is None else record.task.stopped(answers)


def finite_losses(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check that all training losses are finite (`finite_loss`), that training did
    not end because a loss exceeded its bound (`loss_bound`), and that losses on held-out data are
    finite (`finite_before`, `finite_after`).

    Gradient norms are not checked: loss scaling in fp16 makes them overflow on purpose.
    """
    losses, stopped = training.values(record, "loss"), _stopped(record)
    why = stopped.why if stopped else None
    bad = (
        losses.index(None) if None in losses else stopped.step if stopped and why == "nan" else None
    )
    if losses or stopped:
        yield judged(
            "finite_loss",
            bad is None,
            "nan",
            "check.finite_loss",
            {} if bad is None else {"step": bad},
        )
    train = record.question.train
    if stopped and why == "bound" and train is not None:
        told: Values = {
            "step": stopped.step,
            "value": str(stopped.value),
            "bound": str(train.bound),
        }
        yield failed("loss_bound", "loss_bound", "check.loss_bound", told)
    answers = record.answers
    for name in ("before", "after"):
        finite = None if answers is None else record.task.held_out_finite(answers, name)
        if finite is not None:
            yield judged(f"finite_{name}", finite, "nan", "check.finite_held_out", {"pass": name})


def _tallies(record: Record) -> list[tuple[str, str, Tally]]:
    """Return (pass, noun of its items, tally of its answers) for each pass whose items must all be
    answered; empty if there are no answers.
    """
    task, answers = record.task, record.answers
    if answers is None:
        return []
    found = [
        (name, task.noun, task.tally(answers, name)) for name in record.outputs.get("passes", {})
    ]
    return [(name, noun, tally) for name, noun, tally in found if tally is not None]


def covered_items(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check for each pass that every item in scope was answered exactly once; reason
    `coverage`.

    If `--steps` ended a pass early, items may be missing, and none may be answered twice.
    """
    kind = record.task.kind_row
    partly = kind.cut_by_steps and record.scope.steps is not None
    for name, noun, tally in _tallies(record):
        ok = not tally.repeated and (not tally.missing or partly)
        told: Values = {
            "pass": name,
            "items": tally.items,
            "nouns": words.items(noun),
            "missing": tally.missing,
            "repeated": tally.repeated,
            "answered": tally.items - tally.missing,
        }
        check = f"covered_{name}_{noun}s" if name in kind.stepped else f"covered_{name}"
        said = "check.covered_part" if partly and tally.missing else "check.covered"
        yield judged(check, ok, "coverage", said, told)


def covered_steps(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Validity rule: check that every rank made every training step in scope, or those until the
    target was reached, without those before a restart; reason `coverage`.

    The check is on the rank that is farthest off. Nothing for a run that failed before training.
    """
    ranks = {window.rank for window in passes.windows(record, "train")}
    if not ranks and record.failure is not None:
        return []
    train, stopped = record.question.train, _stopped(record)
    wanted = record.scope.steps if record.scope.steps is not None else train.steps if train else 0
    wanted = stopped.step if stopped and stopped.why == "target" else wanted
    wanted -= record.restarts[-1].step if record.restarts else 0
    taken = passes.working(record, "train")
    counts = {rank: len(taken.get(rank, [])) for rank in sorted(ranks | {0})}
    worst = max(counts, key=lambda rank: abs(counts[rank] - wanted))
    told: Values = {"rank": worst, "taken": counts[worst], "wanted": wanted}
    return [judged("covered_train", counts[worst] == wanted, "coverage", "check.steps", told)]


def counted_all(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check in division closed that the samples of each pass count exactly the
    tokens of the data; reason `tokens`.

    Nothing in division open, with `--steps`, or if the data's tokens are unknown.
    """
    wanted = getattr(record.data, "tokens", None)
    if wanted is None or record.case.division != "closed" or record.scope.steps is not None:
        return
    for name in sorted({sample.pass_name for sample in record.samples}):
        found = passes.total(record, name).get("tokens", 0)
        told: Values = {"pass": name, "tokens": found, "wanted": wanted}
        yield judged(f"counted_{name}", found == wanted, "tokens", "check.counted", told)


def counted_any(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Validity rule: check that the training pass counted any tokens; reason `tokens`. A corpus is
    larger than what is trained on, so no exact number can be asked. Nothing if there was no such
    pass.
    """
    if not passes.windows(record, "train"):
        return []
    found = passes.total(record, "train").get("tokens", 0)
    return [judged("counted_train", found > 0, "tokens", "check.counted_any", {"tokens": found})]


def _judged(record: Record) -> list[Window]:
    """Return the windows (one for each rank) of the passes that the kind of work names in `judged`,
    in which times and devices are checked.
    """
    return [window for window in record.passes if window.pass_name in record.task.kind_row.judged]


def _accounted(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Check for each pass on each rank that its steps cover at least 95 % of its wall time, or
    leave less than 10 ms; check `accounted_PASS`, reason `unaccounted`.

    Passes without instrumentation are skipped. If a program reported step times, the host's times
    of the steps count.
    """
    for window in _judged(record):
        if window.pass_name in record.task.kind_row.bare:
            continue
        steps = [s for s in passes.samples(record, window.pass_name) if s.rank == window.rank]
        # `check_reported_times` compares what a program reports of its steps with these times.
        ours = record.clock == "reported"
        covered = fsum(
            s.host_end_s - s.host_start_s if ours else s.end_s - s.start_s for s in steps
        )
        share = covered / window.wall_s if window.wall_s else 1.0
        name, rest_s = f"accounted_{window.pass_name}", window.wall_s - covered
        told: Values = {
            "pass": window.pass_name,
            "rank": window.rank,
            "share": share,
            "least": ACCOUNTED,
            "rest": 1000 * rest_s,
        }
        short = share < ACCOUNTED and rest_s < LEAST_S
        said = "check.accounted_short" if short else "check.accounted"
        yield judged(name, share >= ACCOUNTED or short, "unaccounted", said, told)


def _interval(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Check that the 95 % interval of `tokens_per_device_s`, relative to its value, is no wider
    than the case's `max_interval`; reason `interval`.

    Without an interval: a note if there are too few steps for one, else the check fails. Nothing
    for size smoke, without a limit or without a value.
    """
    limit, value = record.case.max_interval, values.get("tokens_per_device_s")
    if limit is None or record.case.size == "smoke" or value is None or value.value is None:
        return []
    if value.interval is None:
        found = passes.span(record)
        steps = [step for of_rank in found.steps.values() for step in of_rank] if found else []
        if len(
            [step for step in steps if step.counts.get("tokens")]
        ) < stats.FEWEST * passes.devices(record):
            return [note(Message("note.few_batches"))]
        return [failed("interval", "interval", "check.interval_open", {})]
    width = (value.interval[1] - value.interval[0]) / value.value
    return [
        judged(
            "interval",
            width <= limit,
            "interval",
            "check.interval",
            {"width": width, "limit": limit},
        )
    ]


def _device(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Check telemetry of each device inside the judged passes: clock slowdowns and other processes.
    Size smoke is skipped.

    A slowdown reason whose severity is "invalidates" yields a failed check (reason `slowdown`),
    "note" (also for unknown reasons) a note. Check `alone` (reason `shared`) appears if the device
    counts its processes.
    """
    if record.case.size == "smoke":
        return
    known = accelerators.settings(lambda row: row.severity)  # older records do not store severities
    for series in record.telemetry:
        spans = [(w.start_s, w.start_s + w.wall_s) for w in _judged(record)]
        seen: dict[str, float] = {}
        for start, end in spans:
            for name, share in readings.slowdowns(series, start, end).items():
                seen[name] = max(seen.get(name, 0.0), share)
        for name, share in sorted(seen.items()):
            told: Values = {"device": series.device, "reason": name, "share": share}
            severity = (known if series.severity is None else series.severity).get(name, "note")
            if severity == "invalidates":
                yield failed(f"clocks_{name}", "slowdown", "check.slowdown", told)
            elif severity == "note":
                yield note(Message("note.slowdown", told))
        foreign = [readings.foreign(series, start, end) for start, end in spans]
        if any(one is not None for one in foreign):
            yield judged(
                "alone", not any(foreign), "shared", "check.alone", {"device": series.device}
            )


def _gate(record: Record, values: dict[str, Value]) -> Iterable[Finding]:
    """Check the quality against the case's gate; nothing if it is not evaluated.

    A gate has one form: `reach` (value at least that; reason `target_not_reached`), `below` another
    metric, or `target` within a tolerance (reason `quality`). If a value to reach is unknown in a
    run that did not fail, the check fails.
    """
    (found, why), gate = quality(record, values), record.case.gate
    if gate is not None and gate.reach is not None and why == UNKNOWN and record.failure is None:
        # the metric was never evaluated
        return [failed("gate", "quality", "check.gate_unknown", {"metric": found.metric})]
    if not found.evaluated or gate is None or found.value is None:
        return []
    if gate.reach is not None:
        told: Values = {"metric": found.metric, "value": found.value, "target": gate.reach}
        return [
            judged(
                "gate", found.value >= gate.reach, "target_not_reached", "check.gate_reach", told
            )
        ]
    if gate.below is not None:
        return _falls(found.metric, found.value, gate, values[gate.below].value)
    return _near(found.metric, found.value, gate, values.get(f"{found.metric}_val"))


def _near(metric: str, value: float, gate: GateFacts, val: Value | None) -> Iterator[Finding]:
    """Check that a value is within `gate.within` of its target, and, if `gate.agree_within` is set,
    that pass `val` agrees with it (`gate_agree`); reason `quality`. `val` is the same metric of
    pass `val`.
    """
    if gate.target is None or gate.within is None:
        return
    told: Values = {"metric": metric, "value": value, "target": gate.target, "within": gate.within}
    yield judged("gate", abs(value - gate.target) <= gate.within, "quality", "check.gate", told)
    if val is not None and val.value is not None and gate.agree_within is not None:
        apart = abs(value - val.value)
        near: Values = {"apart": apart, "most": gate.agree_within}
        yield judged("gate_agree", apart <= gate.agree_within, "quality", "check.gate_agree", near)


def _falls(metric: str, value: float, gate: GateFacts, start: float | None) -> list[Finding]:
    """Check that a value is strictly below `start`, the value of metric `gate.below`, and below
    `gate.target` if there is one; reason `quality`.
    """
    known = [limit for limit in (start, gate.target) if limit is not None]
    asked: tuple[Message, ...] = (
        ()
        if start is None
        else (Message("gate.metric", {"name": str(gate.below), "limit": start}),)
    )
    asked += () if gate.target is None else (Message("gate.target", {"limit": gate.target}),)
    told: Values = {"metric": metric, "value": value, "limits": asked}
    return [
        judged("gate", all(value < limit for limit in known), "quality", "check.gate_below", told)
    ]


def _asked(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Return notes on what a reader must know before comparing: a changed question or limits, a
    modified or earlier case, restarts, a smaller second attempt, a sample or named rows, emulated
    fp8, a user's own model.
    """
    case, scope = record.case, record.scope
    keys = tuple(changed_question(case.origins))
    changed = [key for key, origin in case.origins.items() if origin == "command line"]
    limits = tuple(key for key in changed if key == "max_interval" or key.startswith("gate."))
    parts, fields = tuple(shipped.modified(record)), tuple(shipped.later(record))
    shares_less = (
        case.division == "open" and scope.sample is not None and record.task.kind_row.shares
    )
    emulated = (record.engine.details.fp8 or "").startswith("emulated")
    every = (
        Message("note.question", {"keys": keys}) if keys else None,
        Message("note.limits", {"keys": limits}) if limits else None,
        Message("note.modified", {"parts": parts, "case": case.name}) if parts else None,
        Message("note.earlier", {"case": case.name, "fields": fields}) if fields else None,
        *map(_resumed, record.restarts),
        None if record.stepped_down is None else _stepped_down(record, record.stepped_down),
        Message("note.sample") if shares_less else None,
        Message("note.selected") if scope.subjects or scope.rows else None,
        Message("note.emulated") if emulated else None,
        *shipped.own_notes(record),
    )
    return [note(one) for one in every if one is not None]


def _stepped_down(record: Record, first: StepDown) -> Message:
    """Return the note of a run whose first attempt ran out of memory: the automatic tune that was
    tried, and the one that ran.
    """
    tried = tuple(f"{name}={value}" for name, value in first.tune.items())
    tune = record.tune.model_dump()
    return Message(
        "note.stepped_down",
        {"tried": tried, "ran": tuple(f"{name}={tune.get(name)}" for name in first.tune)},
    )


def _resumed(one: Restart) -> Message:
    """Return the note of a resumed run: from which record or folder, step and plan, and which
    damaged checkpoints were passed over.
    """
    source = (
        Message("resumed.record", {"record": one.record[:8]})
        if one.record
        else Message("resumed.folder")
    )
    told: Values = {"source": source, "step": one.step, "plan": str(one.plan)}
    if one.passed_over:
        return Message("note.resumed_past", {**told, "damaged": tuple(one.passed_over)})
    return Message("note.resumed", told)


def _even(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Return a note that names the slowest rank, if one is slow; it does not affect the status."""
    slow = stragglers.note(record)
    return [] if slow is None else [note(slow)]


RULES: tuple[Rule, ...] = (
    *(_of_kind, plausible.drawn, plausible.plausible, _accounted, plausible.beside, clocks.agree),
    *(clocks.reported, _interval, _device, fit.noted, busy.quiet, _even, _gate, _asked),
)
