"""The values that fill a page of FlagPerf's form: PAGE_VALUES for the page as a whole, and
ROW_SETTINGS for the row of a run.

Functions for the page return a list of texts, empty if unknown; functions for a row return one
text, UNKNOWN (a slash) if unknown.
"""

from collections.abc import Callable
from typing import Any

from steelyard.case.resolve import list_changed_keys
from steelyard.metrics import estimates
from steelyard.metrics.passes import count_devices
from steelyard.metrics.result import GIB
from steelyard.record.record import Record
from steelyard.record.run_facts import Software
from steelyard.report.marks import format_engine
from steelyard.report.numbered_runs import (
    find_engine_version,
    find_framework_version,
    format_changed_settings,
    format_parallel_plan,
    format_stage_memory,
    list_non_default_settings,
)
from steelyard.report.numbers import UNKNOWN, format_setting, format_without_separators
from steelyard.words import PageWords

DATA_KEYS = ("source", "rows", "tokens", "fingerprint")
DEGREES = ("tp", "pp", "dp")
ListValues = Callable[[Record, PageWords], list[str]]


def _single_value(get: Callable[[Record], Any]) -> ListValues:
    """Return a function that lists the value that `get` reads from a record as one text; an empty
    list for None and empty text.
    """
    return lambda record, say: [] if get(record) in (None, "") else [format_setting(get(record))]


def format_device_kinds(record: Record) -> str:
    """Return the kinds of device of a run, each once; UNKNOWN if it had none."""
    return ", ".join(estimates.list_device_names(record)) or UNKNOWN


def _machine_name(record: Record) -> str | None:
    """Return the machine's name from the site file, or else the one that was detected; None if
    unknown.
    """
    return record.site.get("machine") or record.environment.hardware.machine


def _list_cpu(record: Record, say: PageWords) -> list[str]:
    """List the CPU with its number of cores as one text, or the CPU alone if the number is unknown;
    empty if the CPU is unknown.
    """
    hardware = record.environment.hardware
    if hardware.cpu is None or hardware.cpu_cores is None:
        return [] if hardware.cpu is None else [hardware.cpu]
    return [say("hardware.cores", hardware.cpu, str(hardware.cpu_cores))]


def _list_packages(record: Record, say: PageWords) -> list[str]:
    """List as `name: version` the libraries and collective libraries below the framework, and the
    engine's package if it is another than the framework's; unknown versions are left out.
    """
    software: Software = record.environment.software
    versions = {**software.libraries, **software.collectives}
    engine = find_engine_version(record)
    if engine is not None and engine != find_framework_version(record):
        versions[engine.name] = engine.version
    return [f"{name}: {version}" for name, version in versions.items() if version]


def _list_toolkit(record: Record, say: PageWords) -> list[str]:
    """List the engine with its mark, and its package's version if it has one."""
    version, name = find_engine_version(record), format_engine(record, say)
    return [name if version is None else f"{name} ({version})"]


def _list_data(record: Record, say: PageWords) -> list[str]:
    """List source, rows, tokens and fingerprint of the data that was read, each with its label;
    missing ones are left out.
    """
    data_facts = record.data.model_dump()
    return [
        f"{say(f'data.{name}')}{say('flagperf.colon')}{format_setting(data_facts[name])}"
        for name in DATA_KEYS
        if data_facts.get(name)
    ]


def has_generated_data(record: Record) -> bool:
    """Return whether the run used generated data: the question asks for it (`made`), and no file
    was read instead.
    """
    return (
        bool(record.case.question["data"].get("made"))
        and record.data.model_dump().get("source") == "made"
    )


def _tokenizer_facts(record: Record) -> Any:
    """Return the record's facts about its tokenizer; an empty dict if there are none."""
    return record.data.model_dump().get("tokenizer") or {}


def _list_weights(record: Record, say: PageWords) -> list[str]:
    """List the recorded facts of the weights as `name: value`, with the language's colon; unknown
    ones are left out.
    """
    weights_facts = record.weights.model_dump(mode="json")
    return [
        f"{name}{say('flagperf.colon')}{format_setting(value)}"
        for name, value in weights_facts.items()
        if value is not None
    ]


def _degrees_above_one(record: Record) -> list[tuple[str, int]]:
    """Return (name, degree) of tensor, pipeline and data parallelism for degrees above 1."""
    degrees = record.plan.model_dump(include=set(DEGREES))
    return [(name, degrees[name]) for name in DEGREES if degrees[name] > 1]


def _list_degrees(record: Record, say: PageWords) -> list[str]:
    """List the parallel degrees above 1, each as a text, or one text for "none"."""
    texts = [say(f"flagperf.{name}", str(degree)) for name, degree in _degrees_above_one(record)]
    return texts or [say("flagperf.none")]


def _list_techniques(record: Record, say: PageWords) -> list[str]:
    """List one sentence that names the parallel techniques used, or a text for "none"."""
    names = [say(f"flagperf.technique.{name}") for name, _ in _degrees_above_one(record)]
    return [
        (
            say("flagperf.techniques", say("flagperf.and").join(names))
            if names
            else say("flagperf.none")
        )
    ]


def _list_optimization(record: Record, say: PageWords) -> list[str]:
    """List as `name=value` the attention kernel that the engine chose and the settings that are not
    the default, without the parallel plan; a text for "none" if there are none.
    """
    settings = {"attention": record.engine.details.attention, **list_non_default_settings(record)}
    chosen = {
        name: value for name, value in settings.items() if name != "parallel" and value is not None
    }
    return [f"{name}={format_setting(value, depth=1)}" for name, value in chosen.items()] or [
        say("flagperf.none")
    ]


def _find_batch(record: Record) -> int | None:
    """Return the global batch of training in the task's unit, or the sample of it that a step of a
    window takes; None for inference.
    """
    train = record.question.train
    return None if train is None else record.scope.sample or train.batch


def _list_global_batch(record: Record, say: PageWords) -> list[str]:
    """List the global batch with its unit; empty for inference."""
    batch = _find_batch(record)
    return [] if batch is None else [f"{batch} {record.task.batch_unit}"]


def find_model_name(record: Record) -> str:
    """Return the model's name: that of the case without its task at the end."""
    return record.case.name.removesuffix(f"-{record.task.key}")


# Values of a page by name; a page lists those of all its runs, each once.
PAGE_VALUES: dict[str, ListValues] = {
    "case": _single_value(lambda record: record.case.name),
    "model": _single_value(find_model_name),
    "precision": _single_value(lambda record: record.case.precision),
    "changes": lambda record, say: [
        ", ".join(list_changed_keys(record.case.origins)) or say("flagperf.none")
    ],
    "device": _single_value(format_device_kinds),
    "machine": _single_value(_machine_name),
    "machine_device": lambda record, say: [
        say("comma").join(filter(None, (_machine_name(record), format_device_kinds(record))))
    ],
    "cpu": _list_cpu,
    "network": _single_value(lambda record: record.site.get("network")),
    "os": _single_value(lambda record: record.environment.software.os),
    "kernel": _single_value(lambda record: record.environment.software.kernel),
    "driver": _single_value(lambda record: record.environment.software.driver),
    # a record says whether it ran in a container, but not the version
    "docker": lambda record, say: [],
    "framework": _single_value(find_framework_version),
    "framework_name": _single_value(
        lambda record: getattr(find_framework_version(record), "name", None)
    ),
    "packages": _list_packages,
    "toolkit": _list_toolkit,
    "engine": lambda record, say: [format_engine(record, say)],
    "implementation": lambda record, say: [
        f"{format_engine(record, say)}, {record.question.model.family}"
    ],
    "data": _list_data,
    "data_line": lambda record, say: [
        say("flagperf.data", say("comma").join(_list_data(record, say)) or UNKNOWN)
    ],
    "data_source": _single_value(lambda record: record.data.model_dump().get("source")),
    "tokenizer": _single_value(lambda record: _tokenizer_facts(record) or None),
    "tokenizer_source": _single_value(lambda record: _tokenizer_facts(record).get("source")),
    "weights": _list_weights,
    "weights_loaded": _single_value(lambda record: record.weights.source),
    "degrees": _list_degrees,
    "techniques": _list_techniques,
    "plans": _single_value(format_parallel_plan),
    "optimization": _list_optimization,
    "micro_batch": _single_value(lambda record: record.tune.micro_batch),
    "length": _single_value(lambda record: getattr(record.question.train, "length", None)),
    "accumulation": _single_value(lambda record: record.engine.details.micro_batches),
    "global_batch": _list_global_batch,
}


def list_page_values(records: list[Record], name: str, say: PageWords) -> list[str]:
    """Return the texts of the page value `name` (a key of PAGE_VALUES) of all records, each once,
    in their order; empty if unknown in all of them. KeyError for an unknown name.
    """
    return list(
        dict.fromkeys(value for record in records for value in PAGE_VALUES[name](record, say))
    )


def _format_config(record: Record, say: PageWords, memory: str = "") -> str:
    """Return device, number of nodes, number of cards and `nodes x devices` as FlagPerf writes a
    configuration; `memory` is appended to the last.
    """
    plan = record.plan
    plural_nodes = say.get_or_fallback(
        f"flagperf.nodes.{plan.nodes}", say("flagperf.nodes", str(plan.nodes))
    )
    nodes = say("flagperf.node") if plan.nodes == 1 else plural_nodes
    devices = count_devices(record)
    cards = say("flagperf.card") if devices == 1 else say("flagperf.cards", str(devices))
    return say(
        "flagperf.config", format_device_kinds(record), nodes, cards, f"{plan.config}{memory}"
    )


def _format_config_memory(record: Record, say: PageWords) -> str:
    """Return the configuration with the memory of a device, such as `*80G` (in GiB, rounded), if
    all devices have the same.
    """
    sizes = {item.memory_bytes for item in record.environment.hardware.devices} - {None}
    return _format_config(
        record, say, f"*{round((sizes.pop() or 0) / GIB)}G" if len(sizes) == 1 else ""
    )


def _format_changes(record: Record, say: PageWords) -> str:
    """Return the settings that come from the case or a user, as `key=value` joined by commas, and
    for a window the part of the global batch that a step takes, as `GBS=N`; UNKNOWN if there are
    none.
    """
    batch, window = _find_batch(record), record.scope.sample
    parts = [format_changed_settings(record), f"GBS={batch}" if window else ""]
    return ", ".join(part for part in parts if part not in ("", UNKNOWN)) or UNKNOWN


def _format_batch(record: Record, say: PageWords) -> str:
    """Return `per_device_bs=…, accumulate=…, (global bs = … tokens)`: micro-batch, number of
    micro-batches in a step, and tokens of a global batch; the tokens are UNKNOWN unless the batch
    counts rows of training.
    """
    train, batch = record.question.train, _find_batch(record)
    accumulate = record.engine.details.micro_batches
    parts = [f"per_device_bs={record.tune.micro_batch}", f"accumulate={format_setting(accumulate)}"]
    tokens = (
        None
        if train is None or batch is None or record.task.batch_unit != "rows"
        else batch * train.length
    )
    return ", ".join([*parts, f"(global bs = {format_setting(tokens)} tokens)"])


def _format_strategy(record: Record, say: PageWords) -> str:
    """Return attention, compiler, recomputation, sharding stage and degree, and parallel degrees
    above 1 as `key=value` joined by commas; those that are unset are left out.
    """
    tune, plan = record.tune, record.plan
    strategy = {
        "attention": record.engine.details.attention or tune.attention,
        "compile": tune.compile,
        "recompute": tune.recompute,
        "sharding": f"stage{tune.sharding}" if tune.sharding else None,
        "sharding_degree": (tune.sharding_degree or plan.dp) if tune.sharding else None,
        "tensor_parallel_degree": plan.tp if plan.tp > 1 else None,
        "pipeline_parallel_degree": plan.pp if plan.pp > 1 else None,
        "data_parallel_degree": plan.dp if plan.dp > 1 else None,
    }
    return format_setting(strategy)


def _format_memory(record: Record, say: PageWords) -> str:
    """Return the memory of one device times the devices, such as `71.2 * 8 GiB`; with a pipeline,
    stage by stage; UNKNOWN if not measured.
    """
    if record.plan.pp > 1:
        stage_memory = format_stage_memory(record)
        return stage_memory if stage_memory == UNKNOWN else f"{stage_memory} GiB"
    text = format_without_separators("gib", estimates.get_metric_value(record, "mem"))
    return text if text == UNKNOWN else f"{text} * {record.plan.world} GiB"


# Settings of a run by name, each the text of a cell.
ROW_SETTINGS: dict[str, Callable[[Record, PageWords], str]] = {
    "tool": format_engine,
    "precision": lambda record, say: record.case.precision,
    "config": _format_config,
    "config_memory": _format_config_memory,
    "case": lambda record, say: record.case.name,
    "parallel": lambda record, say: format_parallel_plan(record),
    "fix_hp": _format_changes,
    "batch": _format_batch,
    "strategy": _format_strategy,
    "memory": _format_memory,
}
