"""What a run was made with: data, model and weights, environment, tool and strategy."""

from collections import Counter
from typing import Any

from steelyard.case.case import AUTO
from steelyard.record.facts import PeakFacts
from steelyard.record.record import Record
from steelyard.report.document import Fact, Facts
from steelyard.report.numbers import UNKNOWN, counted, gib_of_bytes, spelled
from steelyard.report.runs import FRAMEWORKS
from steelyard.words import Words

_WEIGHTS = ("source", "header_sha256")


def _rows(table: dict[str, Any], known: tuple[str, ...], prefix: str, say: Words) -> list[Fact]:
    """Known keys first and always, then whatever else the record says, by its own name."""
    rest = sorted(set(table) - set(known))
    return [Fact(say.known(f"{prefix}.{key}", key), counted(table.get(key))) for key in (*known, *rest)]


def data(record: Record, say: Words) -> Facts:
    asked = Fact(say("data.asked"), spelled(record.case.question["data"]))
    return Facts((asked, *_rows(record.data.model_dump(), record.task.kind_row.data_facts, "data", say)))


def model(record: Record, say: Words) -> Facts:
    question = record.case.question
    named = [name for name in ("model", "precision", "train") if name != "train" or question.get(name)]
    asked = (Fact(say(f"model.{name}"), spelled(question[name])) for name in named)
    return Facts((*asked, *_rows(record.weights.model_dump(), _WEIGHTS, "model", say)))


def environment(record: Record) -> str:
    """Return a short name of what a run ran on."""
    hardware = record.environment.hardware
    kinds = Counter(spelled(device.name) for device in hardware.devices)
    return ", ".join(f"{count}x {name}" for name, count in kinds.items()) or spelled(hardware.cpu)


def hardware(record: Record, say: Words) -> Facts:
    hardware, site = record.environment.hardware, record.site
    kinds = dict.fromkeys(f"{spelled(d.name)} ({gib_of_bytes(d.memory_bytes)})" for d in hardware.devices)
    cpu = spelled(hardware.cpu)
    known = (
        ("machine", site.get("machine") or spelled(hardware.machine)),
        ("accelerator", ", ".join(kinds) or spelled(hardware.accelerator)),
        ("count", counted(len(hardware.devices)) if hardware.devices else UNKNOWN),
        ("peak", _peak(hardware.peak)),
        ("cpu", cpu if hardware.cpu_cores is None else say("hardware.cores", cpu, counted(hardware.cpu_cores))),
        ("memory", gib_of_bytes(hardware.memory_bytes)),
        ("network", spelled(site.get("network"))),
    )
    shown_above = ("machine", "network", "file", "file_sha256")
    stated = [Fact(key, site[key]) for key in sorted(site) if key not in shown_above]
    if "file" in site:
        stated.append(Fact(say("hardware.site"), f"{site['file']}, SHA-256 {site.get('file_sha256', '')[:12]}"))
    return Facts((*(Fact(say(f"hardware.{key}"), text) for key, text in known), *stated))


def _peak(peak: PeakFacts | None) -> str:
    if peak is None:
        return UNKNOWN
    listed = ", ".join(f"{name} {spelled(rate / 1e12)}" for name, rate in peak.flops_per_s.items())
    return f"{spelled(peak.name)}: {listed} TFLOP/s ({spelled(peak.source)})" if listed else UNKNOWN


def software(record: Record, say: Words) -> Facts:
    software, source = record.environment.software, record.environment.source
    packages, cleanness = software.packages, "source.dirty" if source.dirty else "source.clean"
    framework = next((name for name in FRAMEWORKS if name in packages), None)
    versions = {**software.libraries, "python": software.python}
    dependent = {name: version for name, version in versions.items() if version}
    dependent |= {name: version for name, version in sorted(packages.items()) if name != framework}
    listed = ", ".join(f"{name} {spelled(version)}" for name, version in dependent.items())
    known = (
        *((key, spelled(getattr(software, key))) for key in ("os", "kernel", "driver", "container")),
        ("framework", f"{framework} {spelled(packages[framework])}" if framework else UNKNOWN),
        ("packages", listed or UNKNOWN),
        ("source", say(cleanness, spelled(source.version), spelled(source.revision))),
    )
    return Facts(tuple(Fact(say(f"software.{key}"), text) for key, text in known))


def setup(record: Record, say: Words) -> Facts:
    """Return tool, optimisation and parallel strategy."""
    heading, details = record.task.kind_row.tool_heading, record.engine.details.model_dump()
    tool = f"{record.engine.name} ({spelled(details)})" if details else record.engine.name
    plan = say("plan.text", parallel(record), record.plan.config, record.plan.launcher)
    known = (
        (say.known(heading, heading), tool),
        (say("tune.set"), changed(record, say)),
        (say("tune.all"), spelled(_stored(record))),
        (say("plan"), plan),
    )
    return Facts(tuple(Fact(label, text) for label, text in known))


def changed(record: Record, say: Words | None = None) -> str:
    """Tuned values that are not the defaults, as the record's own origins tell; with where they come from, in words."""
    out = []
    for key, value in _stored(record).items():
        origin = _origin(key, record.case.origins)
        if origin is not None and origin != "default":
            where = f" ({say.known(f'origin.{origin}', origin)})" if say is not None else ""
            out.append(f"{key}={spelled(value, depth=1)}{f' ({AUTO})' if key in record.auto else where}")
    return ", ".join(out) or UNKNOWN


def tuned(record: Record) -> str:
    """Tuned values that are not the case's own: those that were typed, and defaults of an earlier version. Empty where none."""
    out = []
    for key, value in _stored(record).items():
        origin = _origin(key, record.case.origins) or "default"
        default = type(record.tune).model_fields[key].get_default(call_default_factory=True)
        if value != default if origin == "default" else not origin.startswith("case"):
            out.append(f"{key}={spelled(value, depth=1)}{f' ({AUTO})' if key in record.auto else ''}")
    return ", ".join(out)


def _stored(record: Record) -> dict[str, Any]:
    """Return the tune as the record stores it: an older one has fewer settings."""
    return record.tune.model_dump(mode="json", exclude_unset=True)


def _origin(key: str, origins: dict[str, str]) -> str | None:
    """Where a value came from; a table's, from its first entry."""
    exact = origins.get(f"tune.{key}")
    return exact or next((where for name, where in sorted(origins.items()) if name.startswith(f"tune.{key}.")), None)


def parallel(record: Record) -> str:
    """Degrees, and the stage of sharding where replicas divide anything."""
    sharding = record.tune.sharding
    divided = f" SH{sharding}" if record.task.kind_row.trains and sharding else ""
    return f"{record.plan}{divided}"
