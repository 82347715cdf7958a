"""Make a case for a user's own model from its Hugging Face folder, for `case new` and `run
--model`.

Models that this program does not compute itself are described by transformers in a subprocess: the
parent never imports a framework. `case/new_case.py` makes the case.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.case import new
from steelyard.case.new import Model, New
from steelyard.data import tokenizer
from steelyard.errors import RequestError, short_repr
from steelyard.models import families
from steelyard.weights import hf_config, hf_folder
from steelyard.weights.hf_folder import Folder

if TYPE_CHECKING:
    from steelyard.tasks.task import Task

PROBE = "steelyard.engines.transformers.probe"
PROBE_S = 600.0
AUTO = "auto"
# Dimensions of a tiny Llama for size smoke; those in the template's [smoke] table override them.
TINY = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 160,
    "vocab": 512,
    "positions": 512,
}
TINY_HEAD, TINY_WINDOW = 32, 48


def new_case(folder: Path, task: str, name: str | None = None, check_tokenizer: bool = True) -> New:
    """Make the case of a task with the model in a Hugging Face folder; `name` defaults to folder
    and task. No file is written.

    Raise RequestError if the folder is no model or lacks weights, if no case of the task can be
    made with it, or, with `check_tokenizer` and a task on texts, if its tokenizer is missing or
    does not fit. May start a subprocess, for models that transformers has to describe.
    """
    row = new.task_row(task)
    found = hf_folder.read(folder)
    hf_folder.check_complete(found)
    return _case(found, row, name, check_tokenizer and not new.starts_random(row))


def case_to_run(
    folder: Path,
    task: str,
    load_weights: bool,
    data: Path | None,
    tokenizer: Path | None,
    weights: Path | None,
) -> New:
    """Make the case of a task with the model in a Hugging Face folder, for one run.

    If its weights are not loaded (`load_weights` is False, or the task trains from random ones),
    config.json is enough, but a task on texts then needs a tokenizer: named, or beside the data or
    the other `weights`. Raise RequestError if something is missing, or no case can be made. May
    start a subprocess, for models that transformers has to describe.
    """
    row = new.task_row(task)
    found = hf_folder.read(folder)
    if load_weights and not new.starts_random(row):
        hf_folder.check_complete(found, ", or measure speed alone with --weights random")
    elif new.lacks_tokenizer(row, data, tokenizer, weights):
        raise RequestError(
            f"--model {str(folder)!r}: no tokenizer in it nor beside the data, "
            f"and task {task} needs one; name it with --tokenizer"
        )
    return _case(found, row, None, check_tokenizer=False)


def _case(found: Folder, row: "Task", name: str | None, check_tokenizer: bool) -> New:
    """Make the case of a task (`row`) with the model of a folder, named `name` or after folder and
    task. Raise RequestError if the model's family does not do the task's work.
    """
    model = _model(found, check_tokenizer)
    if row.work not in _works(model):
        able = sorted(name for name in new.templates() if new.task_row(name).work in _works(model))
        raise RequestError(
            f"--task {row.name}: a model of type {shown_type(found)} is run by engine transformers,"
            f" which does not train it; allowed: {', '.join(able)}"
        )
    return new.make(name or new.name_of(found.name, row.name), row.name, model)


def shown_type(found: Folder) -> str:
    """Return the model_type of a folder's config.json as short text for messages, `None` if it has
    none.
    """
    return short_repr(found.config.get("model_type"))


def _works(model: Model) -> tuple[str, ...]:
    """Return the kinds of work that the model's family does, such as scoring and training."""
    return families.row(str(model.table["family"])).works


def _model(found: Folder, check_tokenizer: bool) -> Model:
    """Describe the model of a folder: from its config.json if it is a type that this program
    computes, otherwise by asking transformers in a subprocess. With `check_tokenizer` its tokenizer
    is checked and listed too. Raise RequestError if any of it fails.
    """
    path = found.path / hf_config.CONFIG_NAME
    try:
        hf_config.check_computed(path, found.config)
    except RequestError as error:
        model = _auto(found, str(error))
    else:
        model = _llama(found)
    return _with_tokenizer(found, model) if check_tokenizer else model


def _llama(found: Folder) -> Model:
    """Describe a model of a type that this program computes (Llama and relatives): dimensions from
    config.json, a tiny version for size smoke, and for each field the key that it came from.
    """
    path = found.path / hf_config.CONFIG_NAME
    shape = hf_config.model_of(path, found.config)
    table = {
        name: value for name, value in shape.model_dump(mode="json").items() if value is not None
    }
    told = hf_config.told(path, found.config)
    comments = {
        one.field: one.key
        if one.key in _keys(found.config)
        else f"{one.key}: not told, so transformers' default"
        for one in reversed(told)
    }
    comments |= {one.field: one.key for one in told if " of model_type " in one.key}
    comments["family"] = f"model_type {found.config.get('model_type')}"
    smoke = {**table, **TINY, **({"head_dim": TINY_HEAD} if "head_dim" in table else {})}
    smoke |= {"window": TINY_WINDOW} if "window" in table else {}
    return Model(found.name, found.files, table, smoke, comments, found.precision)


def _keys(config: dict[str, Any]) -> set[str]:
    """Return all keys of a config.json: those at the top, and those of the tables directly below
    it.
    """
    return {key for table in (config, *config.values()) if isinstance(table, dict) for key in table}


def _auto(found: Folder, why: str) -> Model:
    """Describe a model that only engine transformers runs, with parameters and FLOPs that torch
    counts in a subprocess.

    `reason` is why this program does not compute it. Raise RequestError if its weights are pickles,
    its rotary positions depend on the batch, or transformers cannot make it.
    """
    hf_folder.check_rope(found.path, found.config)
    if found.weights in hf_folder.PICKLES:
        raise RequestError(
            f"{found.path}: engine transformers reads a model of type {shown_type(found)} from"
            f" safetensors alone, and it has {found.weights}; convert it with transformers'"
            " save_pretrained"
        )
    told = _probe(found)
    comments = {
        "family": f"run by engine transformers alone: {why.split(': ', 1)[-1].split(';')[0]}",
        "parameters": "counted by torch",
        **dict.fromkeys(
            ("token_flops", "pair_flops", "logit_flops"),
            "counted by torch on meta tensors; see docs/own-model.md",
        ),
        "config": "config.json, as far as it says what is computed",
    }
    assumed = [
        "engine transformers, which alone has this model; FLOPs are those that torch's counter"
        " counts on meta tensors"
    ]
    if told["why"]:
        assumed.append(f"no tiny model: {told['why']}")
    model, smoke = told["model"], told["smoke"]
    return Model(
        found.name,
        found.files,
        model,
        smoke,
        comments,
        found.precision,
        ("closed",),
        tuple(assumed),
    )


def _probe(found: Folder) -> dict[str, Any]:
    """Ask transformers about a model in a subprocess, for at most 600 s, and return its answer:
    `model` and `smoke` (fields of [question.model]; smoke may be None) and `why` (why there is no
    tiny model, or empty).

    Raise RequestError if torch or transformers is not installed, does not answer in time, or cannot
    make the model.
    """
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise RequestError(
                f"{module} is not installed, and a model of type {shown_type(found)} needs it; "
                "pip install 'steelyard[transformers]'"
            )
    with tempfile.TemporaryDirectory(prefix="steelyard-") as work:
        answer = Path(work) / "answer.json"
        command = [sys.executable, "-P", "-m", PROBE, str(found.path.resolve()), str(answer)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PROBE_S
            )
        except subprocess.TimeoutExpired as error:
            raise RequestError(
                f"{found.path}: transformers did not answer within {PROBE_S:.0f} s"
            ) from error
        if not answer.is_file():
            said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise RequestError(f"{found.path}: transformers cannot make this model: {said[0]}")
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in told:
        raise RequestError(str(told["error"]))
    return told


def _with_tokenizer(found: Folder, model: Model) -> Model:
    """Return a copy of the model that also lists the tokenizer in its folder. Raise RequestError if
    there is none, or if its number of tokens does not fit the model's vocabulary (more, or 1024 or
    more fewer).
    """

    one = tokenizer.load([found.path])
    tokenizer.check_vocab(one, model.table["vocab"])
    end = "" if one.end is not None else "; it does not say which token ends a text"
    assumed = (
        *model.assumed,
        f"tokenizer {one.source} of the folder, {one.vocab} tokens for a vocabulary of "
        f"{model.table['vocab']}{end}",
    )
    return replace(model, files=(*model.files, one.source), assumed=assumed)
