"""Read a folder as Hugging Face publishes a model, and refuse it if it cannot be used or is not the
model of a case. Imports no torch.

Commands check a folder with this before a worker starts.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError, short_repr
from steelyard.models.auto_shape import AutoModel, remove_unwanted_keys
from steelyard.models.shapes import LlamaModel
from steelyard.weights import hf_config
from steelyard.weights.hf_config import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from steelyard.weights.hf_families import REFUSED_ROPE, ROPE_TABLES, ROPE_TYPES

OWN_MODEL_HINT = "to run them: steelyard run --model DIR --task TASK"
# by the dtype in config.json
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class HfFolder:
    """A Hugging Face folder (`path`) with its parsed config.json (`config`), made by
    `read_hf_folder`. `weights` is the name of the file with the weights, or of the index of
    several; None if there is neither. `files` are the names that make the model, `name` is the
    folder's own, `precision` how the weights are stored (fp32, fp16, bf16; None: not told).
    """

    path: Path
    config: dict[str, Any]
    weights: str | None

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the files that make the model: config.json, and the weights if there
        are any.
        """
        return (CONFIG_NAME,) if self.weights is None else (CONFIG_NAME, self.weights)

    @property
    def name(self) -> str:
        """Return the folder's own name, links resolved."""
        return self.path.resolve().name

    @property
    def precision(self) -> str | None:
        """Return `fp32`, `fp16` or `bf16` as the folder's config.json (`dtype`, or the older
        `torch_dtype`) says weights are stored, or None if it says nothing or something else.
        """
        dtype = self.config.get("dtype", self.config.get("torch_dtype"))
        return PRECISIONS.get(dtype) if isinstance(dtype, str) else None


def read_hf_folder(path: Path) -> HfFolder:
    """Read the config.json of a Hugging Face folder and look which weights it has:
    model.safetensors, its index, pytorch_model.bin or its index, the first that exists; they may be
    missing.

    Raise RequestError if `path` is no folder (a hub id gets a hint to download it), has no valid
    config.json, or says that weights are quantized.
    """
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
    config = hf_config.read_hf_json(path / CONFIG_NAME)
    check_not_quantized(path, config)
    weights_name = next(
        (name for name in (SINGLE_NAME, INDEX_NAME, *PICKLES) if (path / name).is_file()), None
    )
    return HfFolder(path, config, weights_name)


def check_has_weights(folder: HfFolder, hint: str = "") -> None:
    """Raise RequestError if a folder has no weights; `hint` is added to the message to say what
    else can be done.
    """
    if folder.weights is None:
        raise RequestError(
            f"{str(folder.path)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; give a complete"
            f" Hugging Face folder{hint}"
        )


def check_no_remote_code(path: Path, config: dict[str, Any]) -> None:
    """Raise RequestError if config.json names Python code of the folder (`auto_map`): it is never
    run. Called for model types that transformers cannot compute without; folders of other types may
    name such files too.
    """
    if config.get("auto_map"):
        model_type = short_repr(config.get("model_type"))
        raise RequestError(
            f"{path / CONFIG_NAME}: auto_map names code of the folder itself (model_type"
            f" {model_type},"
            " trust_remote_code), which is never run here; give a model that transformers has by"
            " itself"
        )


def check_not_quantized(path: Path, config: dict[str, Any]) -> None:
    """Raise RequestError if config.json says that weights are quantized: read without their scales
    they are another model's.
    """
    if config.get("quantization_config") or config.get("compression_config"):
        raise RequestError(
            f"{path / CONFIG_NAME}: its weights are quantized, which is not supported; give"
            " weights that are not"
        )


def check_static_rope(path: Path, config: dict[str, Any]) -> None:
    """Raise RequestError if config.json names a kind of rotary positions that depends on the length
    of the batch (`dynamic`), which no engine may use. `path` is the folder, for the message.
    """
    for table in (config.get(name) for name in ROPE_TABLES):
        kinds = [table.get(key) for key in ROPE_TYPES] if isinstance(table, dict) else []
        for kind in (kind for kind in kinds if isinstance(kind, str) and kind in REFUSED_ROPE):
            raise RequestError(
                f"{path / CONFIG_NAME}: rope_type is {kind!r}, which {REFUSED_ROPE[kind]}; give"
                " another model"
            )


def check_llama_folder(folder: Path, model: LlamaModel) -> None:
    """Raise RequestError if a folder has a config.json that is not that of the case's Llama, cannot
    be read, or says that weights are quantized; called before a worker starts, and no weights are
    read.

    A folder without config.json, or whose config names no model type, passes.
    """
    path = folder / CONFIG_NAME
    if path.is_file():
        config = hf_config.read_hf_json(path)
        check_not_quantized(folder, config)
        if config.get("model_type") is None:  # some converters leave it out
            return
        try:
            hf_config.check_config(path, config, {**dict(model), "head_dim": model.dim})
        except RequestError as error:
            raise RequestError(
                f"not the case's model (model_type {short_repr(config['model_type'])}): {error};"
                f" {OWN_MODEL_HINT}"
            ) from error


def check_auto_folder(folder: Path, model: AutoModel) -> None:
    """Raise RequestError if a folder's config.json is not the case's, for a model that transformers
    computes: model type and every key that `remove_unwanted_keys` leaves must be equal, and weights
    not quantized. A missing config.json is refused too.
    """
    path = folder / CONFIG_NAME
    config = hf_config.read_hf_json(path)
    check_not_quantized(folder, config)
    model_type = config.get("model_type")
    if model_type != model.model_type:
        raise RequestError(
            f"not the case's model (model_type {short_repr(model_type)}): {path}: the case's"
            " model_type is"
            f" {model.model_type!r}; {OWN_MODEL_HINT}"
        )
    ours, theirs = dict(model.config), remove_unwanted_keys(config)
    for key in sorted({*ours, *theirs} - {"model_type"}):
        if ours.get(key) != theirs.get(key):
            raise RequestError(
                f"not the case's model: {path}: {key} is {short_repr(theirs.get(key))}, "
                f"the case's is {short_repr(ours.get(key))}; {OWN_MODEL_HINT}"
            )
