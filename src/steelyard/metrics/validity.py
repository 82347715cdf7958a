"""What makes a finished run valid: checks on a record's evidence, and the reasons that follow from them."""

from collections.abc import Callable
from math import fsum

from steelyard.accelerators import nvml
from steelyard.case.resolve import changed_question
from steelyard.metrics import busy, clocks, fit, plausible, readings, shipped, stats, stragglers, training
from steelyard.metrics import spans as passes
from steelyard.metrics.result import Finding, Rule
from steelyard.record.record import Check, GateFacts, Quality, Reason, Record, Value, Window
from steelyard.tasks.task import Stopped, Tally

ACCOUNTED = 0.95  # the least share of a pass's wall time that its steps must cover
LEAST_S = 0.01  # less than this is not worth hiding work in, and a rank without any work has nothing else


def judge(record: Record, values: dict[str, Value]) -> tuple[list[Check], list[Reason], list[str], Quality]:
    """Checks, reasons against validity (none: valid), notes, and the quality."""
    checks: list[Check] = []
    reasons: list[Reason] = []
    notes: list[str] = []
    for rule in RULES:
        for check, code, note in rule(record, values):
            if note is not None:
                notes.append(note)
            if check is not None:
                checks.append(check)
                if not check.ok and code is not None:
                    reasons.append(Reason(code=code, text=check.detail))
    return checks, reasons, notes, quality(record, values)


def quality(record: Record, values: dict[str, Value]) -> Quality:
    """The case's quality, and whether the gate may be applied to it."""
    gate = record.case.gate
    metric = gate.metric if gate else record.task.quality
    needs = [
        (gate is not None, "the case has no gate"),
        (not changed_question(record.case.origins), "the question was changed on the command line"),
        (record.scope.kind == "full", "the scope is a window"),
        *_NEEDS[record.task.kind](record),
    ]
    if gate is not None and gate.below is not None:
        below = values.get(gate.below)
        needs.append((below is not None and below.value is not None, f"{gate.below} is unknown"))
    unmet = [text for holds, text in needs if not holds]
    value = values[metric].value if metric in values else None
    evaluated = not unmet and value is not None
    note = "; ".join(unmet) or (None if evaluated else UNKNOWN)
    return Quality(metric=metric, value=value, gate=gate, evaluated=evaluated, note=note)


def _needs_of_scoring(record: Record) -> list[tuple[bool, str]]:
    return [(record.case.size == "full", "size smoke"), (_trained(record), _RANDOM), (_published(record), _OTHER_DATA)]


def _needs_of_training(record: Record) -> list[tuple[bool, str]]:
    """That a loss falls can be asked of any size. What the full size asks is about its own data, and its own start."""
    if record.case.size != "full":
        return []
    fresh = not record.task.starts_trained
    return [(fresh or _trained(record), _RANDOM), (_published(record), _OTHER_DATA)]


def _trained(record: Record) -> bool:
    return record.weights.trained


def _published(record: Record) -> bool:
    """Unless they are known to be others."""
    return getattr(record.data, "published", False) is not False


UNKNOWN = "the value is unknown"
_RANDOM, _OTHER_DATA = "the weights are random", "the data are not the published set"
_NEEDS: dict[str, Callable[[Record], list[tuple[bool, str]]]] = {"score": _needs_of_scoring, "train": _needs_of_training}


def _finite(record: Record, values: dict[str, Value]) -> list[Finding]:
    if record.task.kind != "train":
        return [*_finite_answers(record), *_finite_values(record)]
    return [*_finite_losses(record), *_finite_answers(record)]


def _finite_answers(record: Record) -> list[Finding]:
    out: list[Finding] = []
    for name, noun, tally in _tallies(record):
        text = f"{name}: {tally.not_finite} of {tally.items} {noun}s got logits that are not finite"
        out.append((Check(name=f"finite_{name}", ok=not tally.not_finite, detail=text), "nan", None))
    return out


def _finite_values(record: Record) -> list[Finding]:
    out: list[Finding] = []
    for sample in record.samples:
        if any(value is None for value in sample.values.values()):
            text = f"{sample.pass_name}: step {sample.step} on rank {sample.rank} has a value that is not finite"
            out.append((Check(name="finite_values", ok=False, detail=text), "nan", None))
            break
    return out


def _stopped(record: Record) -> Stopped | None:
    answers = record.answers
    return None if answers is None else record.task.stopped(answers)


def _finite_losses(record: Record) -> list[Finding]:
    """A norm may overflow: scaled losses in fp16 look for the limit. A loss may not."""
    losses, stopped = training.values(record, "loss"), _stopped(record)
    why = stopped.why if stopped else None
    bad = losses.index(None) if None in losses else stopped.step if stopped and why == "nan" else None
    text = "every loss is finite" if bad is None else f"step {bad}: the loss is not finite"
    out: list[Finding] = [(Check(name="finite_loss", ok=bad is None, detail=text), "nan", None)] if losses or stopped else []
    train = record.question.train
    if stopped and why == "bound" and train is not None:
        text = f"step {stopped.step}: the loss is {stopped.value}, beyond the bound {train.bound}; the run was ended"
        out.append((Check(name="loss_bound", ok=False, detail=text), "loss_bound", None))
    answers = record.answers
    for name in ("before", "after"):
        finite = None if answers is None else record.task.held_out_finite(answers, name)
        if finite is not None:
            text = f"{name}: the loss of the held-out rows is {'' if finite else 'not '}finite"
            out.append((Check(name=f"finite_{name}", ok=finite, detail=text), "nan", None))
    return out


def _tallies(record: Record) -> list[tuple[str, str, Tally]]:
    """Of every pass that has items to cover: its name, what its items are called, and how many there are of which kind."""
    task, answers = record.task, record.answers
    if answers is None:
        return []
    found = [(name, task.noun, task.tally(answers, name)) for name in record.outputs.get("passes", {})]
    return [(name, noun, tally) for name, noun, tally in found if tally is not None]


def _covered(record: Record, values: dict[str, Value]) -> list[Finding]:
    if record.task.kind != "train":
        return _covered_items(record, record.scope.steps is not None)
    return [*_covered_steps(record), *_covered_items(record, partly=False)]


def _covered_items(record: Record, partly: bool) -> list[Finding]:
    """Every item in scope is answered once. With --steps only some are, and none twice."""
    out: list[Finding] = []
    for name, noun, tally in _tallies(record):
        ok = not tally.repeated and (not tally.missing or partly)
        text = f"{name}: {tally.missing} {noun}s without an answer, {tally.repeated} answered more than once"
        out.append(
            (
                Check(name=f"covered_{name}_{noun}s" if name == "train" else f"covered_{name}", ok=ok, detail=text),
                "coverage",
                None,
            )
        )
    return out


def _covered_steps(record: Record) -> list[Finding]:
    """Every rank took every step in scope, or those until the target. A run that failed before has its own reason."""
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
    text = f"train: {counts[worst]} of {wanted} steps on rank {worst}"
    return [(Check(name="covered_train", ok=counts[worst] == wanted, detail=text), "coverage", None)]


def _counted(record: Record, values: dict[str, Value]) -> list[Finding]:
    return _counted_any(record) if record.task.kind == "train" else _counted_all(record)


def _counted_all(record: Record) -> list[Finding]:
    """In division closed, the tokens that samples count are those of the data, no more and no fewer."""
    wanted = getattr(record.data, "tokens", None)
    if wanted is None or record.case.division != "closed" or record.scope.steps is not None:
        return []
    out: list[Finding] = []
    for name in sorted({sample.pass_name for sample in record.samples}):
        found = passes.total(record, name).get("tokens", 0)
        text = f"{name}: samples count {found} tokens, the data have {wanted}"
        out.append((Check(name=f"counted_{name}", ok=found == wanted, detail=text), "tokens", None))
    return out


def _counted_any(record: Record) -> list[Finding]:
    """A corpus is larger than what is trained on of it: that there is work at all is what can be asked."""
    if not passes.windows(record, "train"):
        return []
    found = passes.total(record, "train").get("tokens", 0)
    text = f"train: samples count {found} tokens"
    return [(Check(name="counted_train", ok=found > 0, detail=text), "tokens", None)]


def _judged(record: Record) -> list[Window]:
    """The passes in which time and device are judged: all of scoring, of training the training alone."""
    return passes.windows(record, "train") if record.task.kind == "train" else record.passes


def _accounted(record: Record, values: dict[str, Value]) -> list[Finding]:
    out: list[Finding] = []
    for window in _judged(record):
        if window.pass_name == "bare":
            continue
        steps = [s for s in passes.samples(record, window.pass_name) if s.rank == window.rank]
        # What a program reports of its steps is compared with these times by a rule of its own.
        ours = record.clock == "reported"
        covered = fsum(s.host_end_s - s.host_start_s if ours else s.end_s - s.start_s for s in steps)
        share = covered / window.wall_s if window.wall_s else 1.0
        text = (
            f"{window.pass_name}: steps of rank {window.rank} cover {share:.1%} of the pass; at least {ACCOUNTED:.0%} is asked"
        )
        ok = share >= ACCOUNTED or window.wall_s - covered < LEAST_S
        out.append((Check(name=f"accounted_{window.pass_name}", ok=ok, detail=text), "unaccounted", None))
    return out


def _interval(record: Record, values: dict[str, Value]) -> list[Finding]:
    limit, value = record.case.max_interval, values.get("tokens_per_device_s")
    if limit is None or record.case.size == "smoke" or value is None or value.value is None:
        return []
    if value.interval is None:
        found = passes.span(record)
        steps = [step for of_rank in found.steps.values() for step in of_rank] if found else []
        if len([step for step in steps if step.counts.get("tokens")]) < stats.FEWEST * passes.devices(record):
            return [(None, None, "too few batches for an interval of the rate")]
        text = "the 95 % interval of the rate has no upper end"
        return [(Check(name="interval", ok=False, detail=text), "interval", None)]
    width = (value.interval[1] - value.interval[0]) / value.value
    text = f"the 95 % interval of the rate is {width:.2%} of it wide; the case allows {limit:.0%}"
    return [(Check(name="interval", ok=width <= limit, detail=text), "interval", None)]


def _device(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Clocks and neighbours, inside every pass."""
    out: list[Finding] = []
    if record.case.size == "smoke":
        return out
    for series in record.telemetry:
        spans = [(w.start_s, w.start_s + w.wall_s) for w in _judged(record)]
        seen: dict[str, float] = {}
        for start, end in spans:
            for name, share in readings.slowdowns(series, start, end).items():
                seen[name] = max(seen.get(name, 0.0), share)
        for name, share in sorted(seen.items()):
            text = f"device {series.device}: {name} in {share:.0%} of the readings of a pass"
            severity = (nvml.SEVERITY if series.severity is None else series.severity).get(name, "note")
            if severity == "invalidates":
                out.append((Check(name=f"clocks_{name}", ok=False, detail=text), "slowdown", None))
            elif severity == "note":
                out.append((None, None, f"{text} (a note: large matmuls run at the power limit)"))
        foreign = [readings.foreign(series, start, end) for start, end in spans]
        if any(one is not None for one in foreign):
            who = "another process used it" if any(foreign) else "no other process"
            text = f"device {series.device}: {who} during the passes"
            out.append((Check(name="alone", ok=not any(foreign), detail=text), "shared", None))
    return out


def _gate(record: Record, values: dict[str, Value]) -> list[Finding]:
    found, gate = quality(record, values), record.case.gate
    if gate is not None and gate.reach is not None and found.note == UNKNOWN and record.failure is None:
        return [(Check(name="gate", ok=False, detail=f"{found.metric} is unknown"), "quality", None)]  # nobody looked
    if not found.evaluated or gate is None or found.value is None:
        return []
    if gate.reach is not None:
        return _reaches(found.metric, found.value, gate.reach)
    if gate.below is not None:
        return _falls(found.metric, found.value, gate, values[gate.below].value)
    return _near(found.metric, found.value, gate, values.get(f"{found.metric}_val"))


def _near(metric: str, value: float, gate: GateFacts, val: Value | None) -> list[Finding]:
    """A value near its target, and the reference pass near it."""
    if gate.target is None or gate.within is None:
        return []
    text = f"{metric} is {value:.4f}; the gate is {gate.target} within {gate.within}"
    out: list[Finding] = [(Check(name="gate", ok=abs(value - gate.target) <= gate.within, detail=text), "quality", None)]
    if val is not None and val.value is not None and gate.agree_within is not None:
        apart = abs(value - val.value)
        text = f"infer and val are {apart:.4f} apart; allowed: {gate.agree_within}"
        out.append((Check(name="gate_agree", ok=apart <= gate.agree_within, detail=text), "quality", None))
    return out


def _falls(metric: str, value: float, gate: GateFacts, start: float | None) -> list[Finding]:
    """A loss below another, and below a bound where one is stated."""
    limits = [(str(gate.below), start), ("the target", gate.target)]
    known = [(name, limit) for name, limit in limits if limit is not None]
    asked = " and ".join(f"below {name}, {limit:.4f}" for name, limit in known)
    text = f"{metric} is {value:.4f}; the gate is {asked}"
    return [(Check(name="gate", ok=all(value < limit for _, limit in known), detail=text), "quality", None)]


def _reaches(metric: str, value: float, target: float) -> list[Finding]:
    text = f"{metric} is {value:.4f}; the target is {target}"
    if value < target:
        text = f"target not reached: {text}"
    return [(Check(name="gate", ok=value >= target, detail=text), "target_not_reached", None)]


def _asked(record: Record, values: dict[str, Value]) -> list[Finding]:
    """What a reader must know before comparing: another question, other limits, a sample that shares less."""
    out: list[Finding] = []
    keys = changed_question(record.case.origins)
    if keys:
        out.append((None, None, f"another question than the case's: {', '.join(keys)} changed on the command line"))
    limits = [key for key, origin in record.case.origins.items() if origin == "command line"]
    limits = [key for key in limits if key == "max_interval" or key.startswith("gate.")]
    if limits:
        out.append((None, None, f"other limits than the case's: {', '.join(limits)} changed on the command line"))
    other = shipped.modified(record)
    if other:
        out.append((None, None, f"case: modified: not the {', '.join(other)} of the shipped case {record.case.name}"))
    later = shipped.later(record)
    if later:
        text = f"case: earlier: the shipped case {record.case.name} has another question now: {', '.join(later)} came later"
        out.append((None, None, text))
    for one in record.restarts:
        of = f"record {one.record[:8]}" if one.record else "a folder of checkpoints"
        text = f"goes on from {of}, after step {one.step} of {one.plan}: times and rates are those of the steps since"
        if one.passed_over:
            text += f"; passed over, because it is damaged: {', '.join(one.passed_over)}"
        out.append((None, None, text))
    if record.case.division == "open" and record.scope.sample is not None and record.task.kind == "score":
        out.append((None, None, "a sample shares fewer tokens than the whole set: its rate is not that of a full run"))
    return out


def _even(record: Record, values: dict[str, Value]) -> list[Finding]:
    """A rank that all others wait for is no fault of the measurement, and worth knowing."""
    slow = stragglers.note(record)
    return [] if slow is None else [(None, None, slow)]


RULES: tuple[Rule, ...] = (
    *(_finite, _covered, _counted, plausible.drawn, plausible.plausible, _accounted, plausible.beside, clocks.agree),
    *(clocks.reported, _interval, _device, fit.noted, busy.quiet, _even, _gate, _asked),
)
