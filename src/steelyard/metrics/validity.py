"""What makes a finished run valid: checks on a record's evidence, and the reasons that follow from
them.
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
# less than this is not worth hiding work in, and a rank without any work has nothing else
LEAST_S = 0.01


@dataclass(frozen=True)
class Judgement:
    """What follows from a record's evidence, before it has a language."""

    checks: tuple[Judged, ...]
    reasons: tuple[tuple[str, Message], ...]  # codes with what their checks say
    notes: tuple[Message, ...]
    quality: Quality
    unevaluated: Message | None  # why the quality is not evaluated


Notes = list[str | Message]


def judge(
    record: Record, values: dict[str, Value]
) -> tuple[list[Check], list[Reason], Notes, Quality]:
    """Return checks, reasons against validity (none: valid), notes and the quality, as a record of
    its wording stores them.
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
    """The same as messages."""
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
    """Return the case's quality, and why the gate may not be applied to it; None where it may."""
    gate = record.case.gate
    metric = gate.metric if gate else record.task.quality
    value = values[metric].value if metric in values else None
    why = words.both(*_unmet(record, values)) or (UNKNOWN if value is None else None)
    note = words.stored(why, record.wording)
    return Quality(metric=metric, value=value, gate=gate, evaluated=why is None, note=note), why


def _unmet(record: Record, values: dict[str, Value]) -> list[Message]:
    """Return what a gate needs to be applied and the run does not have, beside the value itself."""
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
    size = (record.case.size == "full", Message("quality.smoke"))
    return [size, (_trained(record), _RANDOM), (_published(record), _OTHER_DATA)]


def needs_of_training(record: Record) -> list[tuple[bool, Message]]:
    """That a loss falls can be asked of any size. What the full size asks is about its own data,
    and its own start.
    """
    if record.case.size != "full":
        return []
    fresh = not record.task.starts_trained
    return [(fresh or _trained(record), _RANDOM), (_published(record), _OTHER_DATA)]


def _trained(record: Record) -> bool:
    return record.weights.trained


def _published(record: Record) -> bool:
    """Unless they are known to be others."""
    return getattr(record.data, "published", False) is not False


UNKNOWN = Message("quality.unknown")
_RANDOM, _OTHER_DATA = Message("quality.random"), Message("quality.other_data")


def _of_kind(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Apply the rules that the record's kind of work names."""
    for rule in record.task.kind_row.rules:
        yield from plugins.load(rule)(record, values)


def finite_answers(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    for name, noun, tally in _tallies(record):
        told: Values = {
            "pass": name,
            "bad": tally.not_finite,
            "items": tally.items,
            "nouns": words.items(noun),
        }
        yield judged(f"finite_{name}", not tally.not_finite, "nan", "check.finite", told)


def finite_values(record: Record, values: dict[str, Value]) -> list[Finding]:
    bad = next((sample for sample in record.samples if None in sample.values.values()), None)
    told: Values = (
        {} if bad is None else {"pass": bad.pass_name, "step": bad.step, "rank": bad.rank}
    )
    return [failed("finite_values", "nan", "check.finite_values", told)] if told else []


def _stopped(record: Record) -> Stopped | None:
    answers = record.answers
    return None if answers is None else record.task.stopped(answers)


def finite_losses(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """A norm may overflow: scaled losses in fp16 look for the limit. A loss may not."""
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
    """Of every pass that has items to cover: its name, what its items are called, and how many
    there are of which kind.
    """
    task, answers = record.task, record.answers
    if answers is None:
        return []
    found = [
        (name, task.noun, task.tally(answers, name)) for name in record.outputs.get("passes", {})
    ]
    return [(name, noun, tally) for name, noun, tally in found if tally is not None]


def covered_items(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Every item in scope is answered once. Where --steps ends a pass early only some are, and none
    twice.
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
    """Every rank took every step in scope, or those until the target. A run that failed before has
    its own reason.
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
    """In division closed, the tokens that samples count are those of the data, no more and no
    fewer.
    """
    wanted = getattr(record.data, "tokens", None)
    if wanted is None or record.case.division != "closed" or record.scope.steps is not None:
        return
    for name in sorted({sample.pass_name for sample in record.samples}):
        found = passes.total(record, name).get("tokens", 0)
        told: Values = {"pass": name, "tokens": found, "wanted": wanted}
        yield judged(f"counted_{name}", found == wanted, "tokens", "check.counted", told)


def counted_any(record: Record, values: dict[str, Value]) -> list[Finding]:
    """A corpus is larger than what is trained on of it: that there is work at all is what can be
    asked.
    """
    if not passes.windows(record, "train"):
        return []
    found = passes.total(record, "train").get("tokens", 0)
    return [judged("counted_train", found > 0, "tokens", "check.counted_any", {"tokens": found})]


def _judged(record: Record) -> list[Window]:
    """The passes in which time and device are judged."""
    return [window for window in record.passes if window.pass_name in record.task.kind_row.judged]


def _accounted(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    for window in _judged(record):
        if window.pass_name in record.task.kind_row.bare:
            continue
        steps = [s for s in passes.samples(record, window.pass_name) if s.rank == window.rank]
        # What a program reports of its steps is compared with these times by a rule of its own.
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
    """Judge clocks and neighbours, inside every pass."""
    if record.case.size == "smoke":
        return
    known = accelerators.settings(lambda row: row.severity)  # older records do not state it
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
    (found, why), gate = quality(record, values), record.case.gate
    if gate is not None and gate.reach is not None and why == UNKNOWN and record.failure is None:
        # nobody looked
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
    """Judge whether a value is near its target, and the reference pass near it."""
    if gate.target is None or gate.within is None:
        return
    told: Values = {"metric": metric, "value": value, "target": gate.target, "within": gate.within}
    yield judged("gate", abs(value - gate.target) <= gate.within, "quality", "check.gate", told)
    if val is not None and val.value is not None and gate.agree_within is not None:
        apart = abs(value - val.value)
        near: Values = {"apart": apart, "most": gate.agree_within}
        yield judged("gate_agree", apart <= gate.agree_within, "quality", "check.gate_agree", near)


def _falls(metric: str, value: float, gate: GateFacts, start: float | None) -> list[Finding]:
    """A loss below another, and below a bound where one is stated."""
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
    """Note what a reader must know before comparing: another question, other limits, a sample that
    shares less."""
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
    tried = tuple(f"{name}={value}" for name, value in first.tune.items())
    tune = record.tune.model_dump()
    return Message(
        "note.stepped_down",
        {"tried": tried, "ran": tuple(f"{name}={tune.get(name)}" for name in first.tune)},
    )


def _resumed(one: Restart) -> Message:
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
    """A rank that all others wait for is no fault of the measurement, and worth knowing."""
    slow = stragglers.note(record)
    return [] if slow is None else [note(slow)]


RULES: tuple[Rule, ...] = (
    *(_of_kind, plausible.drawn, plausible.plausible, _accounted, plausible.beside, clocks.agree),
    *(clocks.reported, _interval, _device, fit.noted, busy.quiet, _even, _gate, _asked),
)
