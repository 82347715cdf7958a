"""Records as a page sees them: what ran, numbered within its case, with the cells that several
tables share.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.case.case import AUTO
from steelyard.case.resolve import changed_question
from steelyard.metrics.rates import rank_mem
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.runs import Estimate, kinds
from steelyard.metrics.shipped import apart
from steelyard.metrics.spans import headline, windows
from steelyard.metrics.table import row as metric_row
from steelyard.plan import degrees
from steelyard.record.record import Record, Value
from steelyard.report.document import EMPTY, Cell, Lang, Tone
from steelyard.report.numbers import UNKNOWN, ends, formed, spelled
from steelyard.words import Words

CaseName = tuple[str, ...]  # name, size, what was changed of the question, and what of the case

SUBJECTS = 3  # that a table names; of more it says how many
STATUS_TONE: dict[str, Tone] = {"valid": "good", "invalid": "bad", "failed": "bad"}


@dataclass(frozen=True)
class Run:
    """`anchor` is the id of its part of a page, and its permanent link."""

    number: int
    record: Record
    anchor: str = ""

    @property
    def label(self) -> str:
        return f"#{self.number}"

    @property
    def title(self) -> str:
        case = self.record.case
        plan = self.record.plan
        many = f" · {plan.config} {plan}" if plan.world > 1 else ""
        engine = self.record.engine.name
        return (
            f"{self.label} {accelerator(self.record)} · {engine} · {case.precision} ·"
            f" {case.division}{many}"
        )


def accelerator(record: Record) -> str:
    """Return the kind of device and how many of them the run had: NVIDIA H200 × 8."""
    kind = ", ".join(kinds(record)) or spelled(record.environment.hardware.cpu)
    return f"{kind} × {record.plan.world}"


def by_case(records: list[Record], lang: Lang = "en") -> dict[CaseName, list[Run]]:
    """Group runs by case and size: precisions and divisions are rows of one table."""
    out: dict[CaseName, list[Run]] = {}
    anchors: Counter[str] = Counter()
    for record in records:
        runs = out.setdefault(_name(record, lang), [])
        anchor = "run-" + re.sub(r"[^0-9A-Za-z]+", "-", record.id[:8]).strip("-").lower()
        anchors[anchor] += 1
        runs.append(
            Run(
                len(runs) + 1,
                record,
                anchor if anchors[anchor] == 1 else f"{anchor}-{anchors[anchor]}",
            )
        )
    return out


def _name(record: Record, lang: Lang) -> CaseName:
    """Return the name under which a run is grouped. The command line may change the question of a
    case, a case file of one's own may bear a shipped name, and a shipped case may have changed
    since: such runs stand apart, under what differs."""
    keys = changed_question(record.case.origins)
    asked = [f"{key}={_value(record.case.question, key)}" for key in keys]
    return (
        record.case.name,
        record.case.size,
        *asked,
        *(words.text(one, lang) for one in apart(record)),
    )


def _value(question: Any, key: str) -> str:
    for part in key.split(".")[1:]:
        question = question.get(part) if isinstance(question, dict) else None
    return str(question)


def labels(runs: list[Run], say: Words) -> str:
    names = ", ".join(run.label for run in runs)
    return say("run" if len(runs) == 1 else "runs", names)


def codes(records: Record | Iterable[Record], say: Words) -> str:
    """List the codes of the reasons why runs are not valid, each once; empty where there is
    none."""
    every = [records] if isinstance(records, Record) else records
    found = dict.fromkeys(reason.code for record in every for reason in record.reasons)
    return say("comma").join(found)


def status(record: Record, say: Words) -> str:
    """Return the status of a run with the codes of its reasons."""
    return ": ".join(filter(None, (say(record.status), codes(record, say))))


def scope(record: Record, say: Words) -> str:
    """Return how much of the question was run: a window's size as the operator typed it. A resumed
    run says from which step."""
    extent = record.scope
    many = "window.subjects.many" if len(extent.subjects or ()) > SUBJECTS else "window.subjects"
    listed = None if extent.subjects is None else say("comma").join(extent.subjects)
    sizes = (
        ("window.rows", extent.selected.row_count),
        ("window.sample", extent.sample),
        (many, len(extent.subjects or ()) if many.endswith("many") else listed),
        ("window.steps", extent.steps),
    )
    named = (
        say("comma").join(say(key, str(size)) for key, size in sizes if size is not None) or UNKNOWN
    )
    said = say("full") if record.scope.kind == "full" else say("window", named)
    begun = [say("resumed", str(one.step)) for one in record.restarts]
    return say("comma").join([said, *begun])


def shown(name: str, value: Value | None) -> str:
    """Format a metric's number alone."""
    return UNKNOWN if value is None else formed(metric_row(name, value.unit).form, value.value)


def estimate(one: Estimate | Ratio | None, form: str = "number", tone: Tone = "plain") -> Cell:
    """Return a number with its interval below it; EMPTY where it is not known."""
    return EMPTY if one is None else Cell(formed(form, one.value), ends(one.interval, form), tone)


def unit(name: str, value: Value | None, lang: Lang = "en") -> str:
    if value is None or metric_row(name, value.unit).form == "percent":
        return ""
    return words.unit(value.unit, lang)


def with_unit(name: str, value: Value | None, lang: Lang = "en") -> str:
    text = shown(name, value)
    return text if text == UNKNOWN else f"{text} {unit(name, value, lang)}".rstrip()


# Packages that are the framework of an engine, best known name first; the others are dependent
# software.
FRAMEWORKS = ("torch", "paddlepaddle-gpu", "paddlepaddle", "tensorflow", "jax", "mindspore")


@dataclass(frozen=True)
class Version:
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"


def framework_version(record: Record) -> Version | None:
    packages = record.environment.software.packages
    return next((Version(name, packages[name]) for name in FRAMEWORKS if name in packages), None)


def engine_version(record: Record) -> Version | None:
    """Return the package that bears the engine's name, or the first whose name contains it: engine
    megatron is megatron-core. None if the engine is no package of its own."""
    packages, name = record.environment.software.packages, record.engine.name
    found = [name] if name in packages else sorted(one for one in packages if name in one)
    return Version(found[0], packages[found[0]]) if found else None


def tuned(record: Record) -> dict[str, Any]:
    """Return settings whose value is not the default, by name."""
    return record.tune.model_dump(mode="json", exclude_defaults=True)


def changes(record: Record) -> list[str]:
    """Return what makes its question or its case another than the shipped one of its name."""
    return [*changed_question(record.case.origins), *(words.text(one) for one in apart(record))]


def identity(record: Record) -> dict[str, Any]:
    """Return what a record is, by the names that CSV and JSON give it."""
    case, plan, scope = record.case, record.plan, record.scope
    engine, framework = engine_version(record), framework_version(record)
    return {
        "id": record.id,
        "created": record.created,
        "case": case.name,
        "size": case.size,
        "changed": changes(record),
        "key": case.key,
        "division": case.division,
        "precision": case.precision,
        "scope": scope.kind,
        "subjects": scope.subjects,
        "rows": scope.rows,
        "sample": scope.sample,
        "steps": scope.steps,
        "engine": record.engine.name,
        "engine_version": None if engine is None else engine.version,
        "framework": None if framework is None else framework.name,
        "framework_version": None if framework is None else framework.version,
        "accelerator": kinds(record),
        "accelerators": plan.world,
        "nodes": plan.nodes,
        "plan": str(plan),
        "tune": tuned(record),
        "weights": record.weights.source,
        "status": record.status,
        "reasons": list(dict.fromkeys(reason.code for reason in record.reasons)),
        "quality": record.quality.metric,
        "quality_evaluated": record.quality.evaluated,
    }


def stages(record: Record) -> str:
    """Return GiB of the fullest rank of each stage times its ranks: 46.80*2 + 38.93*2."""
    name = headline(record)
    by_stage: dict[int, list[float | None]] = {}
    for rank in sorted({window.rank for window in windows(record, name)} if name else ()):
        by_stage.setdefault(degrees.place(record.plan, rank).pp, []).append(rank_mem(record, rank))
    if sum(map(len, by_stage.values())) < 2:
        return UNKNOWN
    return " + ".join(f"{_fullest(sizes)}*{len(sizes)}" for _, sizes in sorted(by_stage.items()))


def _fullest(sizes: list[float | None]) -> str:
    known = [size for size in sizes if size is not None]
    return f"{max(known):.2f}" if known else UNKNOWN


def changed(record: Record, say: Words | None = None) -> str:
    """Return tuned values that the record's origins say are no defaults; with `say`, where each
    came from."""
    out = []
    for key, value in stored_tune(record).items():
        origin = _origin(key, record.case.origins)
        if origin is not None and origin != "default":
            where = f" ({say.known(f'origin.{origin}', origin)})" if say is not None else ""
            out.append(
                f"{key}={spelled(value, depth=1)}{f' ({AUTO})' if key in record.auto else where}"
            )
    return ", ".join(out) or UNKNOWN


def tuned_text(record: Record) -> str:
    """Return tuned values that are not the case's own: those that were typed, and defaults of an
    earlier version. Empty if there are none."""
    out = []
    for key, value in stored_tune(record).items():
        origin = _origin(key, record.case.origins) or "default"
        default = type(record.tune).model_fields[key].get_default(call_default_factory=True)
        if value != default if origin == "default" else not origin.startswith("case"):
            out.append(
                f"{key}={spelled(value, depth=1)}{f' ({AUTO})' if key in record.auto else ''}"
            )
    return ", ".join(out)


def stored_tune(record: Record) -> dict[str, Any]:
    """Return the tune as the record stores it: an older one has fewer settings."""
    return record.tune.model_dump(mode="json", exclude_unset=True)


def _origin(key: str, origins: dict[str, str]) -> str | None:
    """Return where a value came from; of a table, where its first entry did."""
    exact = origins.get(f"tune.{key}")
    return exact or next(
        (where for name, where in sorted(origins.items()) if name.startswith(f"tune.{key}.")), None
    )


def parallel(record: Record) -> str:
    """Return the degrees of the plan, and the sharding stage of training."""
    sharding = record.tune.sharding
    divided = f" SH{sharding}" if record.task.kind_row.trains and sharding else ""
    return f"{record.plan}{divided}"
