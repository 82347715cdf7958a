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
    config_of,
    load,
    refused,
    tensors_of,
    write,
)
from steelyard.models.llama import LlamaShape
from steelyard.weights import hf_checkpoint
from steelyard.weights import llama_weights as weights
from steelyard.weights.inspection import inspect_checkpoint

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def write_saved(folder: Path, tensors: Any = None, shape: LlamaShape = SHAPE) -> Path:
    """Write config.json and pytorch_model.bin with torch.save and return the folder."""
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    torch.save(tensors_of(shape) if tensors is None else tensors, folder / SINGLE)
    return folder


def write_shards(
    folder: Path, change: Callable[[dict[str, str]], None] = lambda where: None
) -> Path:
    """Write the weights as three files with an index, which `change` may alter, and return the
    folder.
    """
    (folder / "config.json").write_text(json.dumps(config_of(SHAPE)))
    where: dict[str, str] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for i, (name, tensor) in enumerate(tensors_of(SHAPE).items()):
        where[name] = f"pytorch_model-{i % 3 + 1:05}-of-00003.bin"
        parts.setdefault(where[name], {})[name] = tensor
    for file, table in parts.items():
        torch.save(table, folder / file)
    change(where)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_one_file(shape: LlamaShape, tmp_path: Path) -> None:
    """Parameters in place of tensors, and the rotary buffers of old checkpoints, are accepted."""
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in tensors_of(shape).items()}
    found = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert_holds(load(write_saved(tmp_path, found, shape), shape), tensors_of(shape))


def test_several_files(tmp_path: Path) -> None:
    assert_holds(load(write_shards(tmp_path)), tensors_of(SHAPE))
    told = inspect_checkpoint(tmp_path)
    assert [name for name, _ in told.files] == [
        f"pytorch_model-{i}-of-00003.bin" for i in ("00001", "00002", "00003")
    ]
    assert (told.layout, told.dtype, told.notes) == ("huggingface", "fp32", [])


def test_its_digest_tells_of_its_tensors(tmp_path: Path) -> None:
    """The digest covers names, dtypes and shapes, as that of safetensors does."""
    folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        folder.mkdir()
    twice = {name: tensor * 2 for name, tensor in tensors_of(SHAPE).items()}
    less = {name: tensor.half() for name, tensor in tensors_of(SHAPE).items()}
    made = [
        write_saved(folder, tensors)
        for folder, tensors in zip(folders, (None, twice, less), strict=True)
    ]
    one, same, other = (weights.open_llama_checkpoint(folder).headers.digest for folder in made)
    assert one == same != other


def test_safetensors_come_first(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"not read")
    assert_holds(load(tmp_path), tensors_of(SHAPE))
    assert [shard.path.name for shard in hf_checkpoint.read_weights_files(tmp_path)] == [
        "model.safetensors"
    ]


class Attack:
    """An object whose unpickling would make the folder `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("where", ["beside", "as a weight", "as all"])
def test_nothing_in_it_is_run(where: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    name = next(iter(tensors_of(SHAPE)))
    tables = {
        "beside": (tensors_of(SHAPE) | {"x": Attack(marker)}, "'x' is no tensor; "),
        "as a weight": (tensors_of(SHAPE) | {name: Attack(marker)}, f"{name!r} is no tensor; "),
        "as all": (Attack(marker), "is no table of tensors by name; "),
    }
    table, line = tables[where]
    refused(write_saved(tmp_path, table), SINGLE, line)
    assert not marker.exists()
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / SINGLE, weights_only=True)


def test_files_that_are_refused(tmp_path: Path) -> None:
    write_saved(tmp_path)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, f"{SINGLE}: is not a whole file written by torch.save (")
    torch.save(tensors_of(SHAPE), tmp_path / SINGLE, _use_new_zipfile_serialization=False)
    refused(tmp_path, f"{SINGLE}: torch's old format is not read; ")
    torch.save([torch.ones(3)], tmp_path / SINGLE)
    refused(tmp_path, "is no table of tensors by name; ")
    torch.save({"model": tensors_of(SHAPE)}, tmp_path / SINGLE)
    refused(tmp_path, "'model' is no tensor; ")


@pytest.mark.parametrize(
    "file", ["../pytorch_model.bin", "/etc/passwd", "a\\b.bin", "model.safetensors", "x.bin.py"]
)
def test_names_of_shards_stay_in_the_folder(file: str, tmp_path: Path) -> None:
    def change(where: dict[str, str]) -> None:
        where[next(iter(where))] = file

    refused(
        write_shards(tmp_path, change),
        "names the shard ",
        "allowed: a plain file name ending in .bin; ",
    )


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "pytorch_model-00002-of-00003.bin").unlink()
    refused(tmp_path, "pytorch_model-00002-of-00003.bin: shard is missing; ")
