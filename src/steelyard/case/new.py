"""Make a case for a new model: the question of a shipped case of the same task, asked of another
model.

The shipped case is the template. Everything that is not the model's is copied from it; what belongs
to its model alone (gate, published rows, fingerprint of the tokens) is left out, and every
assumption is listed. `cli/model_case.py` reads the model's folder and calls `make_case` for `case
new` and `run --model`.
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

MADE = "made from"  # begins the origin of a value of a case that is in no file
# Key paths in a question of lengths that must not exceed the model's positions.
LENGTHS = (("data", "context"), ("train", "length"))
LONGEST_NAME = 64


@dataclass(frozen=True)
class Model:
    """What a Hugging Face folder says about its model, as input for a new case.

    `table` holds the fields of [question.model]; `comments` are texts by field name that are
    written beside the values; `assumed` lists sentences on what had to be assumed.
    """

    folder: str  # the name of the folder, for titles
    files: tuple[str, ...]  # names of the files that were read
    table: dict[str, Any]
    smoke: dict[str, Any] | None  # the fields of a tiny model; None if none could be made
    comments: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None  # name of a scoring precision: that of the weights, if known
    # divisions in which an engine runs it; None: those of the template
    divisions: tuple[str, ...] | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class New:
    """A new case as TOML text (in `source`), the shipped case it was made from, and sentences on
    what was assumed.
    """

    name: str
    source: Source
    template: str
    assumed: tuple[str, ...]
    random: bool  # training starts from random weights


def templates() -> dict[str, str]:
    """Return for each task the name of the shipped case that new cases are made from: the first of
    the task's cases by name.

    Tasks that train GLM on cloze texts are left out: no Hugging Face folder describes their models.
    """
    out: dict[str, str] = {}
    for name in resolve.names():
        row = resolve.resolve(name).case.question.row
        if row.work != "train_cloze":  # no Hugging Face folder describes its models
            out.setdefault(row.name, name)
    return out


def task_row(name: str) -> Task:
    """Return the row of the task that `--task` names. Raise RequestError if no case can be made for
    it.
    """
    able = templates()
    if name not in able:
        raise RequestError(f"--task {name!r}: {known(name, sorted(able), 'allowed')}")
    return tasks.row(name)


def starts_random(row: Task) -> bool:
    """Return whether the task trains a model from random weights. False for scoring, and for
    training that starts from trained weights.
    """
    return row.kind_row.trains and not row.starts_trained


def lacks_tokenizer(
    row: Task, data: Path | None, tokenizer: Path | None, weights: Path | None
) -> bool:
    """Return whether the task needs a tokenizer that is nowhere: none is named, and none lies in
    the folder of the weights or beside the data.

    False if the task trains from random weights, or if the data is not given or does not exist.
    """
    if starts_random(row) or tokenizer is not None or data is None or not data.exists():
        return False
    return not tokenizers.present(Sources(data, None, weights).tokenizer_places())


def slug(text: str) -> str:
    """Turn any text into a valid name of a case: lower case, with other characters than letters,
    digits and `.` replaced by `-`. Return `model` if nothing is left.
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def name_of(folder: str, task: str) -> str:
    """Return the default name of a new case: the folder's name and the task's joined by `-`,
    shortened to 64 characters.
    """
    return f"{slug(folder)[: LONGEST_NAME - len(task) - 1]}-{slug(task)}"


def make(name: str, task: str, model: Model) -> New:
    """Make the case of a task with a model, from the shipped case of the same task.

    Raise RequestError if no case can be made for the task. No file is written. Context and row
    lengths are cut to the model's positions, and the precision of a scoring case is that of the
    weights if it is known; the result lists these and all other assumptions.
    """
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
        # Without a parallel plan each device holds a whole model; how to divide it depends on
        # model and devices, which the template does not know.
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
    """Return the template's [question.data] without its fingerprint, which is that of the template
    model's tokens.
    """
    return {key: value for key, value in shipped.items() if key != "fingerprint"}


def _fit(question: dict[str, Any], positions: int, assumed: list[str]) -> None:
    """Cut context and row lengths in `question` to `positions`, in place, and append a sentence to
    `assumed` for each that was cut.
    """
    for part, name in LENGTHS:
        told = question.get(part, {}).get(name)
        if told is not None and told > positions:
            question[part] = {**question[part], name: positions}
            assumed.append(
                f"{part}.{name} {positions} instead of {told}: the model has no more positions"
            )


def _about(shipped: Mapping[str, Any], question: Mapping[str, Any], template: str) -> str:
    """Return the template's description, or another one if the lengths in `question` are not those
    of the template.
    """
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
    """Return the [smoke] table of a new case: the template's, with a tiny model of the new model's
    kind.

    Return an empty dict, and append a sentence to `assumed`, if no tiny model could be made. Only
    fields of the tiny model that differ from the full one are in it.
    """
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
    """Return the comments of the new case file, by dotted key: fixed texts, descriptions of the
    task's data fields, and those of the model.
    """
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
    """Return the comment lines at the top of a new case file: where it comes from, and what was
    assumed.
    """
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
    """Return a copy of the dict without entries that are None or an empty dict; nested dicts are
    not looked at.
    """
    return {key: value for key, value in table.items() if value not in (None, {})}


def _origins(text: str, origins: Mapping[str, str], template: str) -> dict[str, str]:
    """Return the origin of every value in the text of a case, by dotted key, without the [smoke]
    table.

    A key takes the origin in `origins` of itself or of a table around it, otherwise "made from
    TEMPLATE".
    """
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
