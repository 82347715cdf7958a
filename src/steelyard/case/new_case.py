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
from steelyard.case import resolve, toml_writer
from steelyard.case.resolve import CaseSource
from steelyard.data import corpus
from steelyard.data import tokenizer as tokenizers
from steelyard.errors import RequestError, suggest_name
from steelyard.tasks.task import Sources, Task

MADE_FROM = "made from"  # begins the origin of a value of a case that is in no file
# Key paths in a question of lengths that must not exceed the model's positions.
LENGTH_FIELDS = (("data", "context"), ("train", "length"))
MAX_NAME_LENGTH = 64


@dataclass(frozen=True)
class ModelDescription:
    """The model of a Hugging Face folder, described as input for a new case; cli/model_case.py
    makes it.

    `fields` are those of [question.model], `tiny_fields` the same for size smoke, None if no tiny
    model could be made; `comments` are texts by field name that are written beside the values.
    `precision` is that of the weights, for scoring, `divisions` those in which an engine runs it;
    None: as in the template. `assumed` lists sentences on what had to be assumed; `folder_name` and
    `files` (names of the files read) are for titles and the header.
    """

    folder_name: str  # the name of the folder, for titles
    files: tuple[str, ...]  # names of the files that were read
    fields: dict[str, Any]
    tiny_fields: dict[str, Any] | None  # the fields of a tiny model; None if none could be made
    comments: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None  # name of a scoring precision: that of the weights, if known
    # divisions in which an engine runs it; None: those of the template
    divisions: tuple[str, ...] | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewCase:
    """A new case, made by `make_case` and in no file yet: its `name`; `source`, a CaseSource with
    its TOML text, the parsed table and where each value came from; `template`, the name of the
    shipped case it was made from; `assumed`, sentences on what was assumed; and `starts_random`,
    whether its training starts from random weights (False for scoring).
    """

    name: str
    source: CaseSource
    template: str
    assumed: tuple[str, ...]
    starts_random: bool  # training starts from random weights


def find_templates() -> dict[str, str]:
    """Return for each task, by name, the name of the shipped case that new cases are made from: the
    first of the task's cases by name. All shipped cases are read.

    Tasks that train GLM on cloze texts are left out: no Hugging Face folder describes their models.
    """
    case_by_task: dict[str, str] = {}
    for name in resolve.list_shipped_cases():
        row = resolve.resolve_case(name).case.question.task_row
        if row.work != "train_cloze":  # no Hugging Face folder describes its models
            case_by_task.setdefault(row.name, name)
    return case_by_task


def find_task_row(name: str) -> Task:
    """Return the row of the task that `--task` names. Raise RequestError, with a suggestion, if no
    shipped case can be a template for it.
    """
    template_by_task = find_templates()
    if name not in template_by_task:
        raise RequestError(
            f"--task {name!r}: {suggest_name(name, sorted(template_by_task), 'allowed')}"
        )
    return tasks.find_task(name)


def is_trained_from_random(row: Task) -> bool:
    """Return whether the task trains a model from random weights. False for scoring, and for
    training that starts from trained weights.
    """
    return row.kind_row.trains and not row.starts_trained


def is_tokenizer_missing(
    row: Task, data: Path | None, tokenizer: Path | None, weights: Path | None
) -> bool:
    """Return whether the task needs a tokenizer that is nowhere: none is named, and none lies in
    the folder of the weights or beside the data.

    False if the task trains from random weights, if the data are not given or do not exist, or if
    they are token files.
    """
    if is_trained_from_random(row) or tokenizer is not None or data is None or not data.exists():
        return False
    if row.reads_tokens and _has_token_files(data):
        return False
    return not tokenizers.has_tokenizer(Sources(data, None, weights).tokenizer_paths())


def _has_token_files(data: Path) -> bool:
    """Return whether a path holds, or is the prefix of, a pair of token files."""
    try:
        corpus.check_token_files(data)
    except RequestError:
        return False
    return True


def make_slug(text: str) -> str:
    """Turn any text into a valid name of a case: lower case, with other characters than letters,
    digits and `.` replaced by `-`. Return `model` if nothing is left.
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def make_case_name(folder_name: str, task: str) -> str:
    """Return the default name of a new case: the folder's name and the task's joined by `-`,
    shortened to 64 characters.
    """
    return f"{make_slug(folder_name)[: MAX_NAME_LENGTH - len(task) - 1]}-{make_slug(task)}"


def make_case(name: str, task: str, model: ModelDescription, has_data: bool = True) -> NewCase:
    """Make the case of a task with a model, from the shipped case of the same task. No file is
    written; the text is in the result's `source`. Without data (`has_data`) a task that can make
    them itself does (`Task.self_made`).

    Model, name and title are new; the template's gate (unless training with `below`), published
    rows, limits of goodput, parallel plan and data fingerprint are left out. Context, prompts and
    rows are cut to the model's positions, and the precision of a case that does not train is that
    of the weights if it is known. The result lists all assumptions. Raise RequestError if no case
    can be made for the task.
    """
    row = find_task_row(task)
    template = find_templates()[row.name]
    shipped = resolve.read_case(template).table
    assumed = [*model.assumed]
    question = {
        **shipped["question"],
        "model": model.fields,
        "data": _drop_fingerprint(shipped["question"]["data"]),
    }
    if not has_data and row.self_made:
        question["data"] = {**question["data"], **row.self_made}
        made = ", ".join(f"{key} {value}" for key, value in row.self_made.items())
        assumed.append(f"data: {made}, which needs no data; with --data as in {template}")
    _cut_lengths(question, row, model.fields["positions"], assumed)
    if not row.kind_row.trains and model.precision is not None:
        question["precision"] = model.precision
        assumed.append(f"precision {model.precision}, as the weights are stored")
    else:
        assumed.append(f"precision {question['precision']}, as in {template}")
    divisions = [
        division
        for division in shipped["divisions"]
        if model.divisions is None or division in model.divisions
    ]
    table: dict[str, Any] = {
        "name": name,
        "title": f"{model.folder_name}: {row.name}",
        "about": _choose_description(shipped, question, template),
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
        assumed.append("no gate: no accuracy of this model is known, so quality is not checked")
    table["smoke"] = _make_smoke_table(shipped, model, table, assumed)
    copied = "load" if row.kind_row.has_load else "training"
    assumed.append(f"data, {copied} and tune: as in the shipped case {template}")
    comments = _make_comments(row, template, model, question)
    text = _format_header(model, row, assumed) + toml_writer.format_toml(
        _drop_empty(table), comments
    )
    origins = {f"question.model.{key}": f"{MADE_FROM} config.json" for key in model.fields}
    source = CaseSource(name, text, tomllib.loads(text), _trace_origins(text, origins, template))
    return NewCase(name, source, template, tuple(assumed), is_trained_from_random(row))


def _drop_fingerprint(shipped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's [question.data] without its fingerprint, which is that of the template
    model's tokens.
    """
    return {key: value for key, value in shipped.items() if key != "fingerprint"}


def _cut_lengths(question: dict[str, Any], row: Task, positions: int, assumed: list[str]) -> None:
    """Cut the lengths in `question` (context, rows, prompts and outputs) so that they fit into
    `positions`, in place, and append a sentence to `assumed` for each that was cut.
    """
    cuts = {
        (part, name): positions
        for part, name in LENGTH_FIELDS
        if question.get(part, {}).get(name, 0) > positions
    }
    shorter = row.shorten(row.data.model_validate(question["data"]), positions)
    cuts |= {("data", name): length for name, length in shorter.items()}
    for (part, name), length in cuts.items():
        before = question[part][name]
        question[part] = {**question[part], name: length}
        if length != before:
            assumed.append(
                f"{part}.{name} {length} instead of {before}: the model has no more positions"
            )


def _choose_description(
    shipped: Mapping[str, Any], question: Mapping[str, Any], template: str
) -> str:
    """Return the text `about` for a new case: the template's, or another one if the data or a
    length in `question` are not the template's. `shipped` is the template's table.
    """
    data, other = question["data"], _drop_fingerprint(shipped["question"]["data"])
    is_same_length = all(
        question.get(part, {}).get(name) == shipped["question"].get(part, {}).get(name)
        for part, name in LENGTH_FIELDS
    )
    if is_same_length and data == other:
        return str(shipped["about"])
    if data.get("source") != other.get("source"):
        return f"As {template}, with prompts that need no data."
    return f"As {template}, with texts as long as the model has positions."


def _make_smoke_table(
    shipped: Mapping[str, Any],
    model: ModelDescription,
    table: Mapping[str, Any],
    assumed: list[str],
) -> dict[str, Any]:
    """Return the [smoke] table of a new case: a copy of the template's with a tiny model of the new
    model's kind, without `devices`, and without a gate if `table`, the new case, has none.

    Only fields of the tiny model that differ from the full one are in it; where the template's tiny
    model has a field, its value is taken, unless transformers computes the model (`config`). Return
    an empty dict, and append a sentence to `assumed`, if no tiny model could be made.
    """
    if model.tiny_fields is None:
        assumed.append("no size smoke: no tiny model of this type could be built")
        return {}
    smoke: dict[str, Any] = deepcopy(shipped["smoke"])
    smoke.pop("devices", None)
    tiny = {**model.tiny_fields}
    for key, value in smoke["question"]["model"].items():
        if (
            key in tiny
            and key != "nominal_parameters"
            and not isinstance(model.tiny_fields.get("config"), dict)
        ):
            tiny[key] = value
    smoke["question"]["model"] = {
        key: value for key, value in tiny.items() if model.fields.get(key) != value
    }
    if "gate" not in table:
        smoke.pop("gate", None)
    return smoke


def _make_comments(
    row: Task, template: str, model: ModelDescription, question: Mapping[str, Any]
) -> dict[str, str]:
    """Return the comments of the new case file, by dotted key: fixed texts, descriptions of the
    task's data fields, and those of the model. Keys that the case does not have may be among them.
    """
    needs_data = row.needs_data(row.data.model_validate(question["data"]))
    as_template = f"as in {template}"
    comments = {
        "name": "name in records and on pages; the file may have another name",
        "divisions": "closed: every token is computed; open: what prompts share is computed once",
        "max_interval": "the widest 95 % interval of the rate that is valid, as a share of it",
        "question": (
            "the question: a change of anything in it is another question, with another key"
        ),
        "question.task": "steelyard run needs its data: --data" if needs_data else "",
        "question.precision": "what matmuls run in; --precision changes it for one run",
        "question.model": "from config.json",
        "question.data": as_template,
        "question.train": as_template,
        "question.load": f"when requests are sent; {as_template}",
        "tune": "may be changed without changing the question: --set tune.KEY=VALUE",
        "gate": f"the quality that a valid result must reach; {as_template}",
        "smoke.question": (
            "size smoke: the same, tiny, with generated data; seconds on a CPU: --size smoke"
        ),
        "smoke.tune.env": "tiny matmuls gain nothing from more threads",
    }
    for name, info in row.data.model_fields.items():
        comments[f"question.data.{name}"] = info.description or ""
    return comments | {f"question.model.{key}": text for key, text in model.comments.items()}


def _format_header(model: ModelDescription, row: Task, assumed: list[str]) -> str:
    """Return the comment lines (`# …`) at the top of a new case file, with an empty line at their
    end: where it comes from, and what was assumed.
    """
    lines = [
        (
            f"{model.folder_name} on {row.name}, made by `steelyard case new` from"
            f" {', '.join(model.files)}."
        ),
        "docs/cases.md explains every key. Assumed:",
        *(f"- {assumption}" for assumption in assumed),
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines) + "\n"


def _drop_empty(table: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the dict without entries that are None or an empty dict; nested dicts are
    not looked at.
    """
    return {key: value for key, value in table.items() if value not in (None, {})}


def _trace_origins(text: str, origins: Mapping[str, str], template: str) -> dict[str, str]:
    """Return the origin of every value in the TOML text of a case, by dotted key, without the
    [smoke] table.

    A key takes the origin in `origins` of itself or of a table around it (the first that fits),
    otherwise "made from TEMPLATE".
    """
    table = tomllib.loads(text)
    table.pop("smoke", None)
    origin_by_key: dict[str, str] = {}
    pending = [("", table)]
    while pending:
        prefix, node = pending.pop()
        for key, value in node.items():
            if isinstance(value, dict):
                pending.append((f"{prefix}{key}.", value))
            else:
                dotted_key = f"{prefix}{key}"
                listed_key = next(
                    (
                        candidate
                        for candidate in origins
                        if dotted_key == candidate or dotted_key.startswith(f"{candidate}.")
                    ),
                    None,
                )
                origin_by_key[dotted_key] = (
                    origins[listed_key] if listed_key else f"{MADE_FROM} {template}"
                )
    return origin_by_key
