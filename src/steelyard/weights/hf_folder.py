"""A folder as Hugging Face publishes a model: what is in it, and whether it is the model of a case.
Without torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError, short_repr
from steelyard.models.auto_shape import AutoModel, wanted
from steelyard.models.shapes import LlamaModel
from steelyard.weights import hf_config
from steelyard.weights.hf_config import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from steelyard.weights.hf_families import NOT_SCALED, ROPE_TABLES, ROPE_TYPES

OWN = "to run them: steelyard run --model DIR --task TASK"
# of what config.json says weights are stored in
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Folder:
    """`weights` is the file that holds the weights, or the index of several; None if there is
    neither."""

    path: Path
    config: dict[str, Any]
    weights: str | None

    @property
    def files(self) -> tuple[str, ...]:
        """The files that make the model."""
        return (CONFIG_NAME,) if self.weights is None else (CONFIG_NAME, self.weights)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def precision(self) -> str | None:
        """What the weights are stored in, as config.json says it."""
        told = self.config.get("dtype", self.config.get("torch_dtype"))
        return PRECISIONS.get(told) if isinstance(told, str) else None


def read(path: Path) -> Folder:
    """A folder with a model, perhaps without its weights; refuses one that is none."""
    if not path.exists() and HUB_ID.fullmatch(str(path)):
        raise RequestError(
            f"{str(path)!r} is not a folder here; if it is a model of the Hugging Face hub, "
            f"download it first: steelyard weights get {path}"
        )
    if not path.is_dir():
        raise RequestError(
            f"{str(path)!r} is not a folder; give a Hugging Face folder: {CONFIG_NAME}, weights and"
            " tokenizer"
        )
    config = hf_config.read_json(path / CONFIG_NAME)
    check_plain(path, config)
    found = next(
        (name for name in (SINGLE_NAME, INDEX_NAME, *PICKLES) if (path / name).is_file()), None
    )
    return Folder(path, config, found)


def check_complete(found: Folder, instead: str = "") -> None:
    """Refuse a folder without weights; `instead` says what else can be done."""
    if found.weights is None:
        raise RequestError(
            f"{str(found.path)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; give a complete"
            f" Hugging Face folder{instead}"
        )


def check_code(path: Path, config: dict[str, Any]) -> None:
    """Refuse a model of a type that only Python files of its folder compute: nothing that is read
    is ever run. (Folders of types that are computed without may name such files too.)"""
    if config.get("auto_map"):
        kind = short_repr(config.get("model_type"))
        raise RequestError(
            f"{path / CONFIG_NAME}: auto_map names code of the folder itself (model_type {kind},"
            " trust_remote_code), which is never run here; give a model that transformers has by"
            " itself"
        )


def check_plain(path: Path, config: dict[str, Any]) -> None:
    """Refuse quantised weights: read without their scales they are another model's."""
    if config.get("quantization_config") or config.get("compression_config"):
        raise RequestError(
            f"{path / CONFIG_NAME}: its weights are quantised, which are not read here; give plain"
            " ones"
        )


def check_rope(path: Path, config: dict[str, Any]) -> None:
    """Refuse rotary positions that depend on what else is in a batch, whatever the engine."""
    for table in (config.get(name) for name in ROPE_TABLES):
        kinds = [table.get(key) for key in ROPE_TYPES] if isinstance(table, dict) else []
        for kind in (kind for kind in kinds if isinstance(kind, str) and kind in NOT_SCALED):
            raise RequestError(
                f"{path / CONFIG_NAME}: rope_type is {kind!r}, which {NOT_SCALED[kind]}; give"
                " another model"
            )


def check_llama(folder: Path, model: LlamaModel) -> None:
    """Refuse weights of another model than a case's, by their config.json alone, where there is
    one: before memory is looked at, and long before a worker reads them."""
    path = folder / CONFIG_NAME
    if path.is_file():
        config = hf_config.read_json(path)
        check_plain(folder, config)
        if config.get("model_type") is None:  # what a converter wrote may not say it
            return
        try:
            hf_config.check_config(path, config, {**dict(model), "head_dim": model.dim})
        except RequestError as error:
            raise RequestError(
                f"other weights, of model_type {short_repr(config['model_type'])}: {error}; {OWN}"
            ) from error


def check_auto(folder: Path, model: AutoModel) -> None:
    """The same of a model of any type: its configuration must be the case's, key by key."""
    path = folder / CONFIG_NAME
    config = hf_config.read_json(path)
    check_plain(folder, config)
    found = config.get("model_type")
    if found != model.model_type:
        raise RequestError(
            f"other weights, of model_type {short_repr(found)}: {path}: the case's model_type is"
            f" {model.model_type!r}; {OWN}"
        )
    ours, theirs = dict(model.config), wanted(config)
    for key in sorted({*ours, *theirs} - {"model_type"}):
        if ours.get(key) != theirs.get(key):
            raise RequestError(
                f"other weights: {path}: {key} is {short_repr(theirs.get(key))}, "
                f"the case's is {short_repr(ours.get(key))}; {OWN}"
            )
