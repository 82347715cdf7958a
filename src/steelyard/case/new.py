"""A new case: the question of a shipped case of the same task, asked of another model.

Whatever is not the model's is taken from that case, its template. What belongs to the template's
model alone (gate, published rows, the fingerprint of its tokens) is left out, and what had to be
assumed is said.
"""

import re
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard import tasks
from steelyard.case import resolve, toml
from steelyard.case.resolve import Source
from steelyard.data import tokenizer as tokenizers
from steelyard.errors import RequestError, known
from steelyard.tasks.task import Sources, Task

MADE = "made from"  # what the origin of a value begins with that no case file holds
# Fields whose value must fit into the model's positions, and where they stand in a question.
LENGTHS = (("data", "context"), ("train", "length"))
LONGEST_NAME = 64


@dataclass(frozen=True)
class Model:
    """What a folder tells of its model. Tables are as in [question.model]; `comments` by field."""

    folder: str  # its name, for titles
    files: tuple[str, ...]  # that were read
    table: dict[str, Any]
    smoke: dict[str, Any] | None  # the same, tiny; None: it could not be made
    comments: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None  # what its weights are stored in, where that is known
    # those that an engine has for it; None: the template's
    divisions: tuple[str, ...] | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class New:
    """A case as text, and what was assumed in making it."""

    name: str
    source: Source
    template: str
    assumed: tuple[str, ...]
    random: bool  # training starts from random weights


def templates() -> dict[str, str]:
    """By task, the shipped case whose question is asked; the first of a task's cases by name."""
    out: dict[str, str] = {}
    for name in resolve.names():
        row = resolve.resolve(name).case.question.row
        if row.work != "train_cloze":  # whose models no folder of Hugging Face describes
            out.setdefault(row.name, name)
    return out


def task_row(name: str) -> Task:
    """The task of a command line, if a case of it can be made."""
    able = templates()
    if name not in able:
        raise RequestError(f"--task {name!r}: {known(name, sorted(able), 'allowed')}")
    return tasks.row(name)


def starts_random(row: Task) -> bool:
    """Whether the question of a task is to train from random weights."""
    return row.kind_row.trains and not row.starts_trained


def lacks_tokenizer(
    row: Task, data: Path | None, tokenizer: Path | None, weights: Path | None
) -> bool:
    """Whether a task reads texts that are here, and no tokenizer is named or lies beside them or
    the weights."""
    if starts_random(row) or tokenizer is not None or data is None or not data.exists():
        return False
    return not tokenizers.present(Sources(data, None, weights).tokenizer_places())


def slug(text: str) -> str:
    """A name that a case may have."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def name_of(folder: str, task: str) -> str:
    return f"{slug(folder)[: LONGEST_NAME - len(task) - 1]}-{slug(task)}"


def make(name: str, task: str, model: Model) -> New:
    """The case of a task with a model."""
    row = task_row(task)
    template = templates()[row.name]
    shipped = resolve.read(template).table
    assumed = [*model.assumed]
    question = {
        **shipped["question"],
        "model": model.table,
        "data": _data(shipped["question"]["data"]),
    }
    _fit(question, model.table["positions"], assumed)
    if not row.kind_row.trains and model.precision is not None:
        question["precision"] = model.precision
        assumed.append(f"precision {model.precision}, as the weights are stored")
    else:
        assumed.append(f"precision {question['precision']}, as in {template}")
    divisions = [
        one for one in shipped["divisions"] if model.divisions is None or one in model.divisions
    ]
    table: dict[str, Any] = {
        "name": name,
        "title": f"{model.folder}: {row.name}",
        "about": _about(shipped, question, template),
        "divisions": divisions,
        "max_interval": shipped.get("max_interval"),
        "question": question,
        # How many devices share a model is for whoever knows both: without it, each holds a whole
        # one.
        "tune": {key: value for key, value in shipped.get("tune", {}).items() if key != "parallel"},
    }
    if row.kind_row.trains and "below" in shipped.get("gate", {}):
        table["gate"] = shipped["gate"]
    else:
        assumed.append("no gate: no accuracy of this model is known here, so none can be missed")
    table["smoke"] = _smoke(shipped, model, table, assumed)
    assumed.append(f"data, training and tune: as in the shipped case {template}")
    comments = _comments(row, template, model)
    text = _head(model, row, name, template, assumed) + toml.write(_without_empty(table), comments)
    origins = {f"question.model.{key}": f"{MADE} config.json" for key in model.table}
    source = Source(name, text, tomllib.loads(text), _origins(text, origins, template))
    return New(name, source, template, tuple(assumed), starts_random(row))


def _data(shipped: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fingerprint: it is of tokens, and another model has others."""
    return {key: value for key, value in shipped.items() if key != "fingerprint"}


def _fit(question: dict[str, Any], positions: int, assumed: list[str]) -> None:
    for part, name in LENGTHS:
        told = question.get(part, {}).get(name)
        if told is not None and told > positions:
            question[part] = {**question[part], name: positions}
            assumed.append(
                f"{part}.{name} {positions} instead of {told}: the model has no more positions"
            )


def _about(shipped: Mapping[str, Any], question: Mapping[str, Any], template: str) -> str:
    same = all(
        question.get(part, {}).get(name) == shipped["question"].get(part, {}).get(name)
        for part, name in LENGTHS
    )
    return (
        str(shipped["about"])
        if same
        else f"As {template}, with texts as long as the model has positions."
    )


def _smoke(
    shipped: Mapping[str, Any], model: Model, table: Mapping[str, Any], assumed: list[str]
) -> dict[str, Any]:
    """The template's, of a model of the same kind that is tiny."""
    if model.smoke is None:
        assumed.append("no size smoke: this model could not be made tiny")
        return {}
    out: dict[str, Any] = deepcopy(shipped["smoke"])
    out.pop("devices", None)
    tiny = {**model.smoke}
    for key, value in out["question"]["model"].items():
        if (
            key in tiny
            and key != "nominal_parameters"
            and not isinstance(model.smoke.get("config"), dict)
        ):
            tiny[key] = value
    out["question"]["model"] = {
        key: value for key, value in tiny.items() if model.table.get(key) != value
    }
    if "gate" not in table:
        out.pop("gate", None)
    return out


def _comments(row: Task, template: str, model: Model) -> dict[str, str]:
    as_there = f"as in {template}"
    out = {
        "name": "of records and pages; the file may have another",
        "divisions": "closed: every token is computed; open: what prompts share is computed once",
        "max_interval": "the widest 95 % interval of the rate that is valid, as a share of it",
        "question": (
            "what is asked: a change of anything below it is another question, with another key"
        ),
        "question.task": "steelyard run needs its data: --data",
        "question.precision": "what matmuls run in; --precision changes it for one run",
        "question.model": "from config.json",
        "question.data": as_there,
        "question.train": as_there,
        "tune": "may be changed without changing the question: --set tune.KEY=VALUE",
        "gate": f"what a valid result must have; {as_there}",
        "smoke.question": (
            "size smoke: the same, tiny, with made data; seconds on a CPU: --size smoke"
        ),
        "smoke.tune.env": "tiny matmuls gain nothing from more threads",
    }
    for name, info in row.data.model_fields.items():
        out[f"question.data.{name}"] = info.description or ""
    return out | {f"question.model.{key}": text for key, text in model.comments.items()}


def _head(model: Model, row: Task, name: str, template: str, assumed: list[str]) -> str:
    lines = [
        (
            f"{model.folder} on {row.name}, made by `steelyard case new` from"
            f" {', '.join(model.files)}."
        ),
        "docs/cases.md explains every key. Assumed:",
        *(f"- {one}" for one in assumed),
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + "\n"


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in (None, {})}


def _origins(text: str, origins: Mapping[str, str], template: str) -> dict[str, str]:
    """Where every value came from, for a case that is in no file."""
    table = tomllib.loads(text)
    table.pop("smoke", None)
    out: dict[str, str] = {}
    level = [("", table)]
    while level:
        prefix, node = level.pop()
        for key, value in node.items():
            if isinstance(value, dict):
                level.append((f"{prefix}{key}.", value))
            else:
                whole = f"{prefix}{key}"
                near = next(
                    (one for one in origins if whole == one or whole.startswith(f"{one}.")), None
                )
                out[whole] = origins[near] if near else f"{MADE} {template}"
    return out
