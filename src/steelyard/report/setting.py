"""What a run was made with: data, model and weights, environment, tool and strategy."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from steelyard.case.case import AUTO
from steelyard.record.facts import Hardware, PeakFacts, SourceFacts
from steelyard.record.record import Record
from steelyard.report.document import Block, Fact, Facts, Paragraph
from steelyard.report.numbers import UNKNOWN, counted, gib_of_bytes, spelled
from steelyard.report.runs import FRAMEWORKS, Run, distinct, labels
from steelyard.words import Words

_WEIGHTS = ("source", "header_sha256")


def _rows(table: dict[str, Any], known: tuple[str, ...], prefix: str, say: Words) -> list[Fact]:
    """Known keys first and always, then whatever else the record says, by its own name."""
    rest = sorted(set(table) - set(known))
    return [Fact(say.known(f"{prefix}.{key}", key), counted(table.get(key))) for key in (*known, *rest)]


def data(runs: list[Run], say: Words) -> list[Block]:
    def facts(run: Run) -> Facts:
        asked = Fact(say("data.asked"), spelled(run.record.case.question["data"]))
        return Facts((asked, *_rows(run.record.data.model_dump(), run.record.task.kind_row.data_facts, "data", say)))

    return _grouped(runs, facts, say)


def model(runs: list[Run], say: Words) -> list[Block]:
    def facts(run: Run) -> Facts:
        question = run.record.case.question
        model = Fact(say("model.model"), spelled(question["model"]))
        precision = Fact(say("model.precision"), spelled(question["precision"]))
        train = [Fact(say("model.train"), spelled(question["train"]))] if question.get("train") else []
        return Facts((model, precision, *train, *_rows(run.record.weights.model_dump(), _WEIGHTS, "model", say)))

    return _grouped(runs, facts, say)


def _grouped(runs: list[Run], facts: Callable[[Run], Facts], say: Words) -> list[Block]:
    groups = distinct(runs, facts)
    out: list[Block] = []
    for block, members in groups.items():
        if len(groups) > 1:
            out.append(Paragraph(labels(members, say), "strong"))
        out.append(block)
    return out


EnvironmentFacts = tuple[str, Facts, Facts]


def environment(record: Record, say: Words) -> EnvironmentFacts:
    """A name, hardware and software. Equal values are one environment."""
    hardware = record.environment.hardware
    kinds = Counter(spelled(device.name) for device in hardware.devices)
    name = ", ".join(f"{count}x {name}" for name, count in kinds.items()) or spelled(hardware.cpu)
    return name, _hardware(hardware, record.site, say), _software(record, say)


def _hardware(hardware: Hardware, site: dict[str, str], say: Words) -> Facts:
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


def _software(record: Record, say: Words) -> Facts:
    software = record.environment.software
    packages = software.packages
    framework = next((name for name in FRAMEWORKS if name in packages), None)
    versions = {**software.libraries, "python": software.python}
    dependent = {name: version for name, version in versions.items() if version}
    dependent |= {name: version for name, version in sorted(packages.items()) if name != framework}
    listed = ", ".join(f"{name} {spelled(version)}" for name, version in dependent.items())
    known = (
        *((key, spelled(getattr(software, key))) for key in ("os", "kernel", "driver", "container")),
        ("framework", f"{framework} {spelled(packages[framework])}" if framework else UNKNOWN),
        ("packages", listed or UNKNOWN),
        ("source", _source(record.environment.source, say)),
    )
    return Facts(tuple(Fact(say(f"software.{key}"), text) for key, text in known))


def _source(source: SourceFacts, say: Words) -> str:
    key = "source.dirty" if source.dirty else "source.clean"
    return say(key, spelled(source.version), spelled(source.revision))


def setup(runs: list[Run], say: Words) -> list[Block]:
    """Tool, optimisation and parallel strategy."""

    def facts(run: Run) -> Facts:
        record = run.record
        heading = record.task.kind_row.tool_heading
        told = record.engine.details.model_dump()
        details = f" ({spelled(told)})" if told else ""
        return Facts(
            (
                Fact(say.known(heading, heading), record.engine.name + details),
                Fact(say("tune.set"), changed(record, say)),
                Fact(say("tune.all"), spelled(_told(record))),
                Fact(say("plan"), say("plan.text", parallel(record), record.plan.config, record.plan.launcher)),
            )
        )

    return _grouped(runs, facts, say)


def changed(record: Record, say: Words | None = None) -> str:
    """Tuned values that are not the defaults, as the record's own origins tell; with where they come from, in words."""
    out = []
    for key, value in _told(record).items():
        origin = _origin(key, record.case.origins)
        if origin is not None and origin != "default":
            where = f" ({say.known(f'origin.{origin}', origin)})" if say is not None else ""
            out.append(f"{key}={spelled(value, depth=1)}{f' ({AUTO})' if key in record.auto else where}")
    return ", ".join(out) or UNKNOWN


def tuned(record: Record) -> str:
    """Tuned values that are not the case's own: those that were typed, and defaults of an earlier version. Empty where none."""
    out = []
    for key, value in _told(record).items():
        origin = _origin(key, record.case.origins) or "default"
        default = type(record.tune).model_fields[key].get_default(call_default_factory=True)
        if value != default if origin == "default" else not origin.startswith("case"):
            out.append(f"{key}={spelled(value, depth=1)}{f' ({AUTO})' if key in record.auto else ''}")
    return ", ".join(out)


def _told(record: Record) -> dict[str, Any]:
    """The tune as the record tells it: an older one has fewer settings."""
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
