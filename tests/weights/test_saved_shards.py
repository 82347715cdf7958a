"""Test weights in pytorch_model.bin, in one file or several: loaded like safetensors, without
executing anything they name.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.huggingface import (
    SHAPE,
    TIED,
    assert_holds,
    assert_load_refused,
    load_llama,
    make_config,
    make_tensors,
    write_hf_folder,
)
from steelyard.models.llama import LlamaShape
from steelyard.weights import hf_checkpoint
from steelyard.weights import llama_weights as weights
from steelyard.weights.inspection import inspect_checkpoint

SINGLE_NAME, INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"


def write_saved(folder: Path, tensors: Any = None, shape: LlamaShape = SHAPE) -> Path:
    """Write config.json and pytorch_model.bin with torch.save and return the folder."""
    (folder / "config.json").write_text(json.dumps(make_config(shape)))
    torch.save(make_tensors(shape) if tensors is None else tensors, folder / SINGLE_NAME)
    return folder


def write_shards(
    folder: Path, change: Callable[[dict[str, str]], None] = lambda where: None
) -> Path:
    """Write the weights as three files with an index, which `change` may alter, and return the
    folder.
    """
    (folder / "config.json").write_text(json.dumps(make_config(SHAPE)))
    weight_map: dict[str, str] = {}
    shards: dict[str, dict[str, Tensor]] = {}
    for number, (name, tensor) in enumerate(make_tensors(SHAPE).items()):
        weight_map[name] = f"pytorch_model-{number % 3 + 1:05}-of-00003.bin"
        shards.setdefault(weight_map[name], {})[name] = tensor
    for file, shard_tensors in shards.items():
        torch.save(shard_tensors, folder / file)
    change(weight_map)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_a_single_file_is_loaded(shape: LlamaShape, tmp_path: Path) -> None:
    """Parameters in place of tensors, and the rotary buffers of old checkpoints, are accepted."""
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in make_tensors(shape).items()}
    stored = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert_holds(load_llama(write_saved(tmp_path, stored, shape), shape), make_tensors(shape))


def test_several_files_are_loaded(tmp_path: Path) -> None:
    assert_holds(load_llama(write_shards(tmp_path)), make_tensors(SHAPE))
    inspection = inspect_checkpoint(tmp_path)
    assert [name for name, _ in inspection.files] == [
        f"pytorch_model-{number}-of-00003.bin" for number in ("00001", "00002", "00003")
    ]
    assert (inspection.layout, inspection.dtype, inspection.notes) == ("huggingface", "fp32", [])


def test_the_digest_depends_on_dtypes_and_not_on_values(tmp_path: Path) -> None:
    """The digest covers names, dtypes and shapes, as that of safetensors does."""
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    doubled = {name: tensor * 2 for name, tensor in make_tensors(SHAPE).items()}
    half_precision = {name: tensor.half() for name, tensor in make_tensors(SHAPE).items()}
    written = [
        write_saved(folder, tensors)
        for folder, tensors in zip(folders, (None, doubled, half_precision), strict=True)
    ]
    digest, doubled_digest, half_digest = (
        weights.open_llama_checkpoint(folder).headers.digest for folder in written
    )
    assert digest == doubled_digest != half_digest


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    (tmp_path / SINGLE_NAME).write_bytes(b"not read")
    assert_holds(load_llama(tmp_path), make_tensors(SHAPE))
    assert [shard.path.name for shard in hf_checkpoint.read_weights_files(tmp_path)] == [
        "model.safetensors"
    ]


class FolderMakingPickle:
    """An object whose unpickling would make the folder `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("where", ["beside", "as a weight", "as all"])
def test_no_pickled_object_is_executed(where: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    name = next(iter(make_tensors(SHAPE)))
    contents_by_place = {
        "beside": (
            make_tensors(SHAPE) | {"x": FolderMakingPickle(marker)},
            "'x' is not a tensor; ",
        ),
        "as a weight": (
            make_tensors(SHAPE) | {name: FolderMakingPickle(marker)},
            f"{name!r} is not a tensor; ",
        ),
        "as all": (FolderMakingPickle(marker), "is not a table of tensors by name; "),
    }
    content, reason = contents_by_place[where]
    assert_load_refused(write_saved(tmp_path, content), SINGLE_NAME, reason)
    assert not marker.exists()
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / SINGLE_NAME, weights_only=True)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    write_saved(tmp_path)
    content = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(content[: len(content) // 2])
    assert_load_refused(tmp_path, f"{SINGLE_NAME}: is not a whole file written by torch.save (")
    torch.save(make_tensors(SHAPE), tmp_path / SINGLE_NAME, _use_new_zipfile_serialization=False)
    assert_load_refused(tmp_path, f"{SINGLE_NAME}: torch's old format is not supported; ")
    torch.save([torch.ones(3)], tmp_path / SINGLE_NAME)
    assert_load_refused(tmp_path, "is not a table of tensors by name; ")
    torch.save({"model": make_tensors(SHAPE)}, tmp_path / SINGLE_NAME)
    assert_load_refused(tmp_path, "'model' is not a tensor; ")


@pytest.mark.parametrize(
    "file", ["../pytorch_model.bin", "/etc/passwd", "a\\b.bin", "model.safetensors", "x.bin.py"]
)
def test_shard_names_outside_the_folder_are_refused(file: str, tmp_path: Path) -> None:
    def change(weight_map: dict[str, str]) -> None:
        weight_map[next(iter(weight_map))] = file

    assert_load_refused(
        write_shards(tmp_path, change),
        "names the shard ",
        "allowed: a plain file name ending in .bin; ",
    )


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "pytorch_model-00002-of-00003.bin").unlink()
    assert_load_refused(tmp_path, "pytorch_model-00002-of-00003.bin: shard is missing; ")
