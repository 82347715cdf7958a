"""The values that fill a page of FlagPerf's form: PAGE_VALUES for the page as a whole, and
ROW_SETTINGS for the row of a run.

Functions for the page return a list of texts, empty if unknown; functions for a row return one
text, UNKNOWN (a slash) if unknown.
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
    """Return a function that lists the value that `get` reads from a record as one text; an empty
    list for None and empty text.
    """
    return lambda record, say: [] if of(record) in (None, "") else [spelled(of(record))]


def device(record: Record) -> str:
    """Return the kinds of device of a run, each once; UNKNOWN if it had none."""
    return ", ".join(runs.kinds(record)) or UNKNOWN


def _machine(record: Record) -> str | None:
    """Return the machine's name from the site file, or else the one that was detected; None if
    unknown.
    """
    return record.site.get("machine") or record.environment.hardware.machine


def _cpu(record: Record, say: Words) -> list[str]:
    """List the CPU with its number of cores, or the CPU alone if that is unknown; empty if the CPU
    is.
    """
    hardware = record.environment.hardware
    if hardware.cpu is None or hardware.cpu_cores is None:
        return [] if hardware.cpu is None else [hardware.cpu]
    return [say("hardware.cores", hardware.cpu, str(hardware.cpu_cores))]


def _packages(record: Record, say: Words) -> list[str]:
    """List versions of libraries and collective libraries below the framework, and of the engine if
    it is a package other than the framework.
    """
    software: Software = record.environment.software
    found = {**software.libraries, **software.collectives}
    engine = engine_version(record)
    if engine is not None and engine != framework_version(record):
        found[engine.name] = engine.version
    return [f"{name}: {version}" for name, version in found.items() if version]


def _toolkit(record: Record, say: Words) -> list[str]:
    """List the engine, with its package's version if it has one."""
    version = engine_version(record)
    return [record.engine.name if version is None else f"{record.engine.name} ({version})"]


def _data(record: Record, say: Words) -> list[str]:
    """List source, rows, tokens and fingerprint of the data that was read, each with its label;
    missing ones are left out.
    """
    table = record.data.model_dump()
    return [
        f"{say(f'data.{name}')}{say('flagperf.colon')}{spelled(table[name])}"
        for name in DATA
        if table.get(name)
    ]


def is_made(record: Record) -> bool:
    """Return whether the run used generated data: the question asks for it, and no file was given
    instead.
    """
    return (
        bool(record.case.question["data"].get("made"))
        and record.data.model_dump().get("source") == "made"
    )


def _tokenizer(record: Record) -> Any:
    """Return the record's facts about its tokenizer; an empty dict if there are none."""
    return record.data.model_dump().get("tokenizer") or {}


def _weights(record: Record, say: Words) -> list[str]:
    """List the facts of the weights, each with its name; unknown ones are left out."""
    table = record.weights.model_dump(mode="json")
    return [
        f"{name}{say('flagperf.colon')}{spelled(value)}"
        for name, value in table.items()
        if value is not None
    ]


def _divided(record: Record) -> list[tuple[str, int]]:
    """Return (name, degree) of tensor, pipeline and data parallelism for degrees above 1."""
    degrees = record.plan.model_dump(include=set(DEGREES))
    return [(name, degrees[name]) for name in DEGREES if degrees[name] > 1]


def _degrees(record: Record, say: Words) -> list[str]:
    """List the parallel degrees above 1, each as a text, or one text for "none"."""
    named = [say(f"flagperf.{name}", str(degree)) for name, degree in _divided(record)]
    return named or [say("flagperf.none")]


def _techniques(record: Record, say: Words) -> list[str]:
    """List one sentence that names the parallel techniques used, or a text for "none"."""
    named = [say(f"flagperf.technique.{name}") for name, _ in _divided(record)]
    return [
        (
            say("flagperf.techniques", say("flagperf.and").join(named))
            if named
            else say("flagperf.none")
        )
    ]


def _optimization(record: Record, say: Words) -> list[str]:
    """List the settings that are not the default and the attention kernel that the engine chose, or
    a text for "none"; the parallel plan is left out.
    """
    told = {"attention": record.engine.details.attention, **tuned(record)}
    chosen = {
        name: value for name, value in told.items() if name != "parallel" and value is not None
    }
    return [f"{name}={spelled(value, depth=1)}" for name, value in chosen.items()] or [
        say("flagperf.none")
    ]


def _batch(record: Record) -> int | None:
    """Return the global batch of training, or the part of it that a step of a window takes; None
    for inference.
    """
    train = record.question.train
    return None if train is None else record.scope.sample or train.batch


def _global_batch(record: Record, say: Words) -> list[str]:
    """List the global batch with its unit; empty for inference."""
    batch = _batch(record)
    return [] if batch is None else [f"{batch} {record.task.batch_unit}"]


def model(record: Record) -> str:
    """Return the model's name: that of the case without its task at the end."""
    return record.case.name.removesuffix(f"-{record.task.key}")


# Values of a page by name; a page lists those of all its runs, each once.
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
    # a record says whether it ran in a container, but not the version
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
    """Return the values of this name (a key of PAGE_VALUES) of all records, each once; KeyError for
    an unknown name.
    """
    return list(dict.fromkeys(value for record in records for value in PAGE[name](record, say)))


def _config(record: Record, say: Words, memory: str = "") -> str:
    """Return device, nodes, cards and nodes x devices as FlagPerf writes a configuration; `memory`
    is appended to it.
    """
    plan = record.plan
    many = say.known(f"flagperf.nodes.{plan.nodes}", say("flagperf.nodes", str(plan.nodes)))
    nodes = say("flagperf.node") if plan.nodes == 1 else many
    cards = say("flagperf.card") if plan.world == 1 else say("flagperf.cards", str(plan.world))
    return say("flagperf.config", device(record), nodes, cards, f"{plan.config}{memory}")


def _config_memory(record: Record, say: Words) -> str:
    """Return the configuration with the memory of a device, such as `*80G` (in GiB, rounded), if
    all devices have the same.
    """
    sizes = {one.memory_bytes for one in record.environment.hardware.devices} - {None}
    return _config(record, say, f"*{round((sizes.pop() or 0) / GIB)}G" if len(sizes) == 1 else "")


def _fix_hp(record: Record, say: Words) -> str:
    """Return the settings that were changed, and for a window the part of the global batch that a
    step takes, as GBS.
    """
    batch, window = _batch(record), record.scope.sample
    told = [changed(record), f"GBS={batch}" if window else ""]
    return ", ".join(one for one in told if one not in ("", UNKNOWN)) or UNKNOWN


def _batch_text(record: Record, say: Words) -> str:
    """Return micro-batch, accumulation steps and tokens of a global batch; the tokens are UNKNOWN
    unless the batch counts rows of training.
    """
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
    """Return attention, compiler, recomputation, sharding and degrees above 1 as `key=value` joined
    by commas.
    """
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
    """Return the memory of one device times the devices, in GiB; with a pipeline, stage by stage;
    UNKNOWN if not measured.
    """
    if record.plan.pp > 1:
        found = stages(record)
        return found if found == UNKNOWN else f"{found} GiB"
    text = bare("gib", runs.metric(record, "mem"))
    return text if text == UNKNOWN else f"{text} * {record.plan.world} GiB"


# Settings of a run by name, each the text of a cell.
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
