"""What makes a finished run valid: checks on a record's evidence, and the reasons that follow from them."""

from collections.abc import Callable
from math import fsum

from steelyard import metrics, stats, telemetry
from steelyard.accelerators import nvml
from steelyard.case import changed_question
from steelyard.record import Check, Quality, Reason, Record, Value
from steelyard.tasks import TASKS, Tally

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


Finding = tuple[Check | None, str | None, str | None]  # a check, its reason code if it fails, a note
Rule = Callable[[Record, dict[str, Value]], list[Finding]]


def quality(record: Record, values: dict[str, Value]) -> Quality:
    """The case's quality, and whether the gate may be applied to it."""
    gate = record.case.gate
    metric = gate["metric"] if gate else "acc"
    unmet = [
        text
        for holds, text in (
            (gate is not None, "the case has no gate"),
            (not changed_question(record.case.origins), "the question was changed on the command line"),
            (record.scope.kind == "full", "the scope is a window"),
            (record.case.size == "full", "size smoke"),
            (record.weights.get("source") not in (None, "random"), "the weights are random"),
            (bool(record.data.get("published")), "the data are not the published set"),
        )
        if not holds
    ]
    value = values[metric].value if metric in values else None
    evaluated = not unmet and value is not None
    return Quality(metric=metric, value=value, gate=gate, evaluated=evaluated, note="; ".join(unmet) or None)


def _finite(record: Record, values: dict[str, Value]) -> list[Finding]:
    out: list[Finding] = []
    for name, noun, tally in _tallies(record):
        text = f"{name}: {tally.not_finite} of {tally.items} {noun}s got logits that are not finite"
        out.append((Check(name=f"finite_{name}", ok=not tally.not_finite, detail=text), "nan", None))
    for sample in record.samples:
        if any(value is None for value in sample.values.values()):
            text = f"{sample.pass_name}: step {sample.step} on rank {sample.rank} has a value that is not finite"
            out.append((Check(name="finite_values", ok=False, detail=text), "nan", None))
            break
    return out


def _tallies(record: Record) -> list[tuple[str, str, Tally]]:
    """Of every pass that answered: its name, what its items are called, and how many there are of which kind."""
    task = TASKS[record.case.question["task"]]
    return [(name, task.noun, Tally(*task.tally(record.outputs, name))) for name in record.outputs.get("passes", {})]


def _covered(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Every item in scope is answered once. With --steps only some are, and none twice."""
    out: list[Finding] = []
    for name, noun, tally in _tallies(record):
        ok = not tally.repeated and (not tally.missing or record.scope.steps is not None)
        text = f"{name}: {tally.missing} {noun}s without an answer, {tally.repeated} answered more than once"
        out.append((Check(name=f"covered_{name}", ok=ok, detail=text), "coverage", None))
    return out


def _counted(record: Record, values: dict[str, Value]) -> list[Finding]:
    """In division closed, the tokens that samples count are those of the data, no more and no fewer."""
    wanted = record.data.get("tokens")
    if wanted is None or record.case.division != "closed" or record.scope.steps is not None:
        return []
    out: list[Finding] = []
    for name in sorted({sample.pass_name for sample in record.samples}):
        found = metrics.total(record, name).get("tokens", 0)
        text = f"{name}: samples count {found} tokens, the data have {wanted}"
        out.append((Check(name=f"counted_{name}", ok=found == wanted, detail=text), "tokens", None))
    return out


def _accounted(record: Record, values: dict[str, Value]) -> list[Finding]:
    out: list[Finding] = []
    for window in record.passes:
        if window.pass_name == "bare":
            continue
        steps = [s for s in metrics.samples(record, window.pass_name) if s.rank == window.rank]
        covered = fsum(s.end_s - s.start_s for s in steps)
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
        name = metrics.headline(record) or ""
        if len([s for s in metrics.samples(record, name) if s.counts.get("tokens")]) < stats.FEWEST * metrics.devices(record):
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
        spans = [(w.start_s, w.start_s + w.wall_s) for w in record.passes]
        seen: dict[str, float] = {}
        for start, end in spans:
            for name, share in telemetry.slowdowns(series, start, end).items():
                seen[name] = max(seen.get(name, 0.0), share)
        for name, share in sorted(seen.items()):
            text = f"device {series['device']}: {name} in {share:.0%} of the readings of a pass"
            severity = series.get("severity", nvml.SEVERITY).get(name, "note")
            if severity == "invalidates":
                out.append((Check(name=f"clocks_{name}", ok=False, detail=text), "slowdown", None))
            elif severity == "note":
                out.append((None, None, f"{text} (a note: large matmuls run at the power limit)"))
        foreign = [telemetry.foreign(series, start, end) for start, end in spans]
        if any(one is not None for one in foreign):
            who = "another process used it" if any(foreign) else "no other process"
            text = f"device {series['device']}: {who} during the passes"
            out.append((Check(name="alone", ok=not any(foreign), detail=text), "shared", None))
    return out


def _gate(record: Record, values: dict[str, Value]) -> list[Finding]:
    found, gate = quality(record, values), record.case.gate
    if not found.evaluated or gate is None or found.value is None:
        return []
    off = abs(found.value - gate["target"])
    text = f"{found.metric} is {found.value:.4f}; the gate is {gate['target']} within {gate['within']}"
    out: list[Finding] = [(Check(name="gate", ok=off <= gate["within"], detail=text), "quality", None)]
    val = values.get(f"{found.metric}_val")
    if val is not None and val.value is not None:
        apart = abs(found.value - val.value)
        text = f"infer and val are {apart:.4f} apart; allowed: {gate['agree_within']}"
        out.append((Check(name="gate_agree", ok=apart <= gate["agree_within"], detail=text), "quality", None))
    return out


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
    if record.case.division == "open" and record.scope.sample is not None:
        out.append((None, None, "a sample shares fewer tokens than the whole set: its rate is not that of a full run"))
    return out


RULES: tuple[Rule, ...] = (_finite, _covered, _counted, _accounted, _interval, _device, _gate, _asked)
