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

from steelyard.case import new_case
from steelyard.case.new_case import ModelDescription, NewCase
from steelyard.data import tokenizer
from steelyard.errors import RequestError, short_repr
from steelyard.models import families
from steelyard.weights import hf_config, hf_folder
from steelyard.weights.hf_folder import HfFolder

if TYPE_CHECKING:
    from steelyard.tasks.task import Task

PROBE_MODULE = "steelyard.engines.transformers.probe"
PROBE_TIMEOUT_S = 600.0
AUTO_FAMILY = "auto"
# Dimensions of a tiny Llama for size smoke; those in the template's [smoke] table override them.
TINY_DIMENSIONS = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 160,
    "vocab": 512,
    "positions": 512,
}
TINY_HEAD_DIM, TINY_WINDOW = 32, 48


def make_complete_case(
    path: Path, task: str, name: str | None = None, check_tokenizer: bool = True
) -> NewCase:
    """Make the case of a task with the model in a Hugging Face folder, for `case new`; `name`
    defaults to folder and task. No file is written.

    Raise RequestError if the folder is no model or lacks weights, if no case of the task can be
    made with it, or, with `check_tokenizer` and unless the task trains from random weights, if its
    tokenizer is missing or does not fit. A task that can make its data itself does so in a folder
    without a tokenizer. May start a subprocess, for models that transformers has
    to describe.
    """
    row = new_case.find_task_row(task)
    folder = hf_folder.read_hf_folder(path)
    hf_folder.check_has_weights(folder)
    check_tokenizer = check_tokenizer and not new_case.is_trained_from_random(row)
    has_data = not (row.self_made and check_tokenizer) or tokenizer.has_tokenizer([folder.path])
    return _make_case(folder, row, name, check_tokenizer and has_data, has_data)


def make_case_to_run(
    path: Path,
    task: str,
    load_weights: bool,
    data: Path | None,
    tokenizer: Path | None,
    weights: Path | None,
) -> NewCase:
    """Make the case of a task with the model in a Hugging Face folder, for one run (`run --model`);
    the folder's own tokenizer is not checked.

    If its weights are not loaded (`load_weights` is False, or the task trains from random ones),
    config.json is enough, but a task on given texts (`data`) then needs a tokenizer: named, or
    beside the data or the other `weights`. Raise RequestError if something is missing, or no case
    can be made. May start a subprocess, for models that transformers has to describe.
    """
    row = new_case.find_task_row(task)
    folder = hf_folder.read_hf_folder(path)
    if load_weights and not new_case.is_trained_from_random(row):
        hf_folder.check_has_weights(folder, ", or measure speed alone with --weights random")
    elif new_case.is_tokenizer_missing(row, data, tokenizer, weights):
        raise RequestError(
            f"--model {str(path)!r}: no tokenizer in it nor beside the data, "
            f"and task {task} needs one; name it with --tokenizer"
        )
    return _make_case(folder, row, None, check_tokenizer=False, has_data=data is not None)


def _make_case(
    folder: HfFolder, row: "Task", name: str | None, check_tokenizer: bool, has_data: bool
) -> NewCase:
    """Make the case of a task (`row`) with the model of a folder, named `name` or after folder and
    task, for data of the user or (`has_data` is False) such as the task makes itself; no file is
    written. Raise RequestError if the model cannot be described, or its family does not do the
    task's work.
    """
    model = _describe_model(folder, check_tokenizer)
    if row.work not in _list_works(model):
        allowed = sorted(
            name
            for name in new_case.find_templates()
            if new_case.find_task_row(name).work in _list_works(model)
        )
        raise RequestError(
            f"--task {row.name}: a model of type {format_model_type(folder)} is run by engine"
            " transformers,"
            f" which does not train it; allowed: {', '.join(allowed)}"
        )
    return new_case.make_case(
        name or new_case.make_case_name(folder.name, row.name), row.name, model, has_data
    )


def format_model_type(folder: HfFolder) -> str:
    """Return the model_type of a folder's config.json as short text for messages, `None` if it has
    none.
    """
    return short_repr(folder.config.get("model_type"))


def _list_works(model: ModelDescription) -> tuple[str, ...]:
    """Return the kinds of work that the model's family does, as rows of tasks name them, such as
    `train_rows`.
    """
    return families.find_family(str(model.fields["family"])).works


def _describe_model(folder: HfFolder, check_tokenizer: bool) -> ModelDescription:
    """Describe the model of a folder: from its config.json if it is a type that this program
    computes, otherwise by asking transformers in a subprocess. With `check_tokenizer` its tokenizer
    is checked against the vocabulary and listed too. Raise RequestError if any of it fails.
    """
    path = folder.path / hf_config.CONFIG_NAME
    try:
        hf_config.check_supported(path, folder.config)
    except RequestError as error:
        model = _describe_auto_model(folder, str(error))
    else:
        model = _describe_llama(folder)
    return _add_tokenizer(folder, model) if check_tokenizer else model


def _describe_llama(folder: HfFolder) -> ModelDescription:
    """Describe a model of a type that this program computes (Llama and relatives): the fields of
    [question.model] from config.json, a tiny version for size smoke, and as comment of each field
    the key that it came from, or that it is transformers' default. Raise RequestError if a value is
    missing or wrong.
    """
    path = folder.path / hf_config.CONFIG_NAME
    shape = hf_config.parse_hf_model(path, folder.config)
    table = {
        name: value for name, value in shape.model_dump(mode="json").items() if value is not None
    }
    settings = hf_config.list_config_values(path, folder.config)
    comments = {
        setting.field: setting.key
        if setting.key in _collect_keys(folder.config)
        else f"{setting.key}: not given, so transformers' default"
        for setting in reversed(settings)
    }
    comments |= {
        setting.field: setting.key for setting in settings if " of model_type " in setting.key
    }
    comments["family"] = f"model_type {folder.config.get('model_type')}"
    smoke = {
        **table,
        **TINY_DIMENSIONS,
        **({"head_dim": TINY_HEAD_DIM} if "head_dim" in table else {}),
    }
    smoke |= {"window": TINY_WINDOW} if "window" in table else {}
    return ModelDescription(folder.name, folder.files, table, smoke, comments, folder.precision)


def _collect_keys(config: dict[str, Any]) -> set[str]:
    """Return all keys of a config.json: those at the top, and those of the tables directly below
    it.
    """
    return {key for table in (config, *config.values()) if isinstance(table, dict) for key in table}


def _describe_auto_model(folder: HfFolder, reason: str) -> ModelDescription:
    """Describe a model that only engine transformers runs, in division closed, with parameters and
    FLOPs that torch counts in a subprocess.

    `reason` is why this program does not compute it, for a comment. Raise RequestError if its
    weights are pickles, its rotary positions depend on the batch, or transformers cannot make it.
    """
    hf_folder.check_static_rope(folder.path, folder.config)
    if folder.weights in hf_folder.PICKLES:
        raise RequestError(
            f"{folder.path}: engine transformers reads a model of type {format_model_type(folder)}"
            " from"
            f" safetensors alone, and it has {folder.weights}; convert it with transformers'"
            " save_pretrained"
        )
    probed = _ask_transformers(folder)
    comments = {
        "family": f"run by engine transformers alone: {reason.split(': ', 1)[-1].split(';')[0]}",
        "parameters": "counted by torch",
        **dict.fromkeys(
            ("token_flops", "pair_flops", "logit_flops"),
            "counted by torch on meta tensors; see docs/own-model.md",
        ),
        "config": "config.json, the keys that affect the computation",
    }
    assumed = [
        "only engine transformers runs this model; its FLOPs are counted by torch on meta tensors"
    ]
    if probed["why"]:
        assumed.append(f"no tiny model: {probed['why']}")
    model, smoke = probed["model"], probed["smoke"]
    return ModelDescription(
        folder.name,
        folder.files,
        model,
        smoke,
        comments,
        folder.precision,
        ("closed",),
        tuple(assumed),
    )


def _ask_transformers(folder: HfFolder) -> dict[str, Any]:
    """Ask transformers about a model in a subprocess, for at most 600 s, and return its answer:
    `model` and `smoke` (fields of [question.model]; smoke may be None) and `why` (why there is no
    tiny model, or empty).

    Raise RequestError if torch or transformers is not installed, does not answer in time, or cannot
    make the model.
    """
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise RequestError(
                f"{module} is not installed, and a model of type {format_model_type(folder)} needs"
                " it; "
                "pip install 'steelyard[transformers]'"
            )
    with tempfile.TemporaryDirectory(prefix="steelyard-") as temporary:
        answer_path = Path(temporary) / "answer.json"
        command = [
            sys.executable,
            "-P",
            "-m",
            PROBE_MODULE,
            str(folder.path.resolve()),
            str(answer_path),
        ]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise RequestError(
                f"{folder.path}: transformers did not answer within {PROBE_TIMEOUT_S:.0f} s"
            ) from error
        if not answer_path.is_file():
            last_line = process.stderr.strip().splitlines()[-1:] or [
                f"exit code {process.returncode}"
            ]
            raise RequestError(
                f"{folder.path}: transformers cannot build this model: {last_line[0]}"
            )
        answer: dict[str, Any] = json.loads(answer_path.read_text(encoding="utf-8"))
    if "error" in answer:
        raise RequestError(str(answer["error"]))
    return answer


def _add_tokenizer(folder: HfFolder, model: ModelDescription) -> ModelDescription:
    """Return a copy of the model that also lists the tokenizer in its folder. Raise RequestError if
    there is none, or if its number of tokens does not fit the model's vocabulary (more, or 1024 or
    more fewer).
    """

    loaded = tokenizer.load_tokenizer([folder.path])
    tokenizer.check_vocabulary_size(loaded, model.fields["vocab"])
    remark = "" if loaded.end is not None else "; it does not define a token that ends a text"
    assumed = (
        *model.assumed,
        f"tokenizer {loaded.source} of the folder, {loaded.vocab} tokens for a vocabulary of "
        f"{model.fields['vocab']}{remark}",
    )
    return replace(model, files=(*model.files, loaded.source), assumed=assumed)
