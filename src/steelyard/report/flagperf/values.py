"""What stands in the places of a page of FlagPerf's form: values of the page, and settings of a
run. Unknown is a slash.
"""

from collections.abc import Callable
from typing import Any

from steelyard.case.resolve import changed_question
from steelyard.metrics import runs
from steelyard.metrics.result import GIB
from steelyard.record.facts import Software
from steelyard.record.record import Record
from steelyard.report.numbers import UNKNOWN, bare, spelled
from steelyard.report.runs import (
    changed,
    engine_version,
    framework_version,
    parallel,
    stages,
    tuned,
)
from steelyard.words import Words

DATA = ("source", "rows", "tokens", "fingerprint")
DEGREES = ("tp", "pp", "dp")
Values = Callable[[Record, Words], list[str]]


def _one(of: Callable[[Record], Any]) -> Values:
    """Return a function that spells out one value of a record; it lists nothing if unknown."""
    return lambda record, say: [] if of(record) in (None, "") else [spelled(of(record))]


def device(record: Record) -> str:
    return ", ".join(runs.kinds(record)) or UNKNOWN


def _machine(record: Record) -> str | None:
    return record.site.get("machine") or record.environment.hardware.machine


def _cpu(record: Record, say: Words) -> list[str]:
    hardware = record.environment.hardware
    if hardware.cpu is None or hardware.cpu_cores is None:
        return [] if hardware.cpu is None else [hardware.cpu]
    return [say("hardware.cores", hardware.cpu, str(hardware.cpu_cores))]


def _packages(record: Record, say: Words) -> list[str]:
    """Return what lies below the framework, and the engine if it is a package beside it."""
    software: Software = record.environment.software
    found = {**software.libraries, **software.collectives}
    engine = engine_version(record)
    if engine is not None and engine != framework_version(record):
        found[engine.name] = engine.version
    return [f"{name}: {version}" for name, version in found.items() if version]


def _toolkit(record: Record, say: Words) -> list[str]:
    version = engine_version(record)
    return [record.engine.name if version is None else f"{record.engine.name} ({version})"]


def _data(record: Record, say: Words) -> list[str]:
    table = record.data.model_dump()
    return [
        f"{say(f'data.{name}')}{say('flagperf.colon')}{spelled(table[name])}"
        for name in DATA
        if table.get(name)
    ]


def is_made(record: Record) -> bool:
    """Return whether the package made the data; a case that would have them made may be given a
    file."""
    return (
        bool(record.case.question["data"].get("made"))
        and record.data.model_dump().get("source") == "made"
    )


def _tokenizer(record: Record) -> Any:
    return record.data.model_dump().get("tokenizer") or {}


def _weights(record: Record, say: Words) -> list[str]:
    table = record.weights.model_dump(mode="json")
    return [
        f"{name}{say('flagperf.colon')}{spelled(value)}"
        for name, value in table.items()
        if value is not None
    ]


def _divided(record: Record) -> list[tuple[str, int]]:
    """Return the degrees that divide anything, by name."""
    degrees = record.plan.model_dump(include=set(DEGREES))
    return [(name, degrees[name]) for name in DEGREES if degrees[name] > 1]


def _degrees(record: Record, say: Words) -> list[str]:
    named = [say(f"flagperf.{name}", str(degree)) for name, degree in _divided(record)]
    return named or [say("flagperf.none")]


def _techniques(record: Record, say: Words) -> list[str]:
    named = [say(f"flagperf.technique.{name}") for name, _ in _divided(record)]
    return [
        (
            say("flagperf.techniques", say("flagperf.and").join(named))
            if named
            else say("flagperf.none")
        )
    ]


def _optimization(record: Record, say: Words) -> list[str]:
    """Return settings that are not the default, and the attention kernel that the engine chose."""
    told = {"attention": record.engine.details.attention, **tuned(record)}
    chosen = {
        name: value for name, value in told.items() if name != "parallel" and value is not None
    }
    return [f"{name}={spelled(value, depth=1)}" for name, value in chosen.items()] or [
        say("flagperf.none")
    ]


def _batch(record: Record) -> int | None:
    """Return the global batch, or how much of it a step takes in a window."""
    train = record.question.train
    return None if train is None else record.scope.sample or train.batch


def _global_batch(record: Record, say: Words) -> list[str]:
    batch = _batch(record)
    return [] if batch is None else [f"{batch} {record.task.batch_unit}"]


def model(record: Record) -> str:
    """Return the model of a case, which is named after its model and its task."""
    return record.case.name.removesuffix(f"-{record.task.key}")


# Values of a page by name: those of all its runs, each once.
PAGE: dict[str, Values] = {
    "case": _one(lambda record: record.case.name),
    "model": _one(model),
    "precision": _one(lambda record: record.case.precision),
    "changes": lambda record, say: [
        ", ".join(changed_question(record.case.origins)) or say("flagperf.none")
    ],
    "device": _one(device),
    "machine": _one(_machine),
    "machine_device": lambda record, say: [
        say("comma").join(filter(None, (_machine(record), device(record))))
    ],
    "cpu": _cpu,
    "network": _one(lambda record: record.site.get("network")),
    "os": _one(lambda record: record.environment.software.os),
    "kernel": _one(lambda record: record.environment.software.kernel),
    "driver": _one(lambda record: record.environment.software.driver),
    # a record knows that a container is around it, and not its version
    "docker": lambda record, say: [],
    "framework": _one(framework_version),
    "framework_name": _one(lambda record: getattr(framework_version(record), "name", None)),
    "packages": _packages,
    "toolkit": _toolkit,
    "engine": _one(lambda record: record.engine.name),
    "implementation": _one(lambda record: f"{record.engine.name}, {record.question.model.family}"),
    "data": _data,
    "data_line": lambda record, say: [
        say("flagperf.data", say("comma").join(_data(record, say)) or UNKNOWN)
    ],
    "data_source": _one(lambda record: record.data.model_dump().get("source")),
    "tokenizer": _one(lambda record: _tokenizer(record) or None),
    "tokenizer_source": _one(lambda record: _tokenizer(record).get("source")),
    "weights": _weights,
    "weights_loaded": _one(lambda record: record.weights.source),
    "degrees": _degrees,
    "techniques": _techniques,
    "plans": _one(parallel),
    "optimization": _optimization,
    "micro_batch": _one(lambda record: record.tune.micro_batch),
    "length": _one(lambda record: getattr(record.question.train, "length", None)),
    "accumulation": _one(lambda record: record.engine.details.micro_batches),
    "global_batch": _global_batch,
}


def page_values(records: list[Record], name: str, say: Words) -> list[str]:
    return list(dict.fromkeys(value for record in records for value in PAGE[name](record, say)))


def _config(record: Record, say: Words, memory: str = "") -> str:
    plan = record.plan
    many = say.known(f"flagperf.nodes.{plan.nodes}", say("flagperf.nodes", str(plan.nodes)))
    nodes = say("flagperf.node") if plan.nodes == 1 else many
    cards = say("flagperf.card") if plan.world == 1 else say("flagperf.cards", str(plan.world))
    return say("flagperf.config", device(record), nodes, cards, f"{plan.config}{memory}")


def _config_memory(record: Record, say: Words) -> str:
    sizes = {one.memory_bytes for one in record.environment.hardware.devices} - {None}
    return _config(record, say, f"*{round((sizes.pop() or 0) / GIB)}G" if len(sizes) == 1 else "")


def _fix_hp(record: Record, say: Words) -> str:
    batch, window = _batch(record), record.scope.sample
    told = [changed(record), f"GBS={batch}" if window else ""]
    return ", ".join(one for one in told if one not in ("", UNKNOWN)) or UNKNOWN


def _batch_text(record: Record, say: Words) -> str:
    train, batch = record.question.train, _batch(record)
    accumulate = record.engine.details.micro_batches
    parts = [f"per_device_bs={record.tune.micro_batch}", f"accumulate={spelled(accumulate)}"]
    tokens = (
        None
        if train is None or batch is None or record.task.batch_unit != "rows"
        else batch * train.length
    )
    return ", ".join([*parts, f"(global bs = {spelled(tokens)} tokens)"])


def _strategy(record: Record, say: Words) -> str:
    tune, plan = record.tune, record.plan
    known = {
        "attention": record.engine.details.attention or tune.attention,
        "compile": tune.compile,
        "recompute": tune.recompute,
        "sharding": f"stage{tune.sharding}" if tune.sharding else None,
        "sharding_degree": (tune.sharding_degree or plan.dp) if tune.sharding else None,
        "tensor_parallel_degree": plan.tp if plan.tp > 1 else None,
        "pipeline_parallel_degree": plan.pp if plan.pp > 1 else None,
        "data_parallel_degree": plan.dp if plan.dp > 1 else None,
    }
    return spelled(known)


def _memory(record: Record, say: Words) -> str:
    """Return memory of one device times the devices, or stage by stage of a pipeline."""
    if record.plan.pp > 1:
        found = stages(record)
        return found if found == UNKNOWN else f"{found} GiB"
    text = bare("gib", runs.metric(record, "mem"))
    return text if text == UNKNOWN else f"{text} * {record.plan.world} GiB"


# Settings of a run by name, each a cell.
ROW: dict[str, Callable[[Record, Words], str]] = {
    "tool": lambda record, say: record.engine.name,
    "precision": lambda record, say: record.case.precision,
    "config": _config,
    "config_memory": _config_memory,
    "case": lambda record, say: record.case.name,
    "parallel": lambda record, say: parallel(record),
    "fix_hp": _fix_hp,
    "batch": _batch_text,
    "strategy": _strategy,
    "memory": _memory,
}
