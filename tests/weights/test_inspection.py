"""Test what is known of a weights folder before loading: its family by file and tensor names, and a
GLM's dimensions by its headers.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fixtures import huggingface, megatron
from fixtures.conversions import refused
from fixtures.glm_checkpoints import FILE, made, put, weights
from fixtures.golden import golden
from steelyard.models import families
from steelyard.weights import checkpoint_tensors, convert, llama_weights
from steelyard.weights import glm_checkpoint as glm_checkpoint
from steelyard.weights.inspection import Inspection, inspect_checkpoint

COUNT = sum(parameter.numel() for parameter in made().parameters())
DIMENSIONS = {"layers": 2, "hidden": 32, "heads": None, "ffn": 48, "vocab": 61, "positions": 24}


def safetensors(folder: Path, prefix: str = "") -> Path:
    """Write GLM's weights as one fp16 safetensors file, with a prefix to its names, and return the
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {prefix + name: tensor.half() for name, tensor in weights().items()},
        folder / "model.safetensors",
    )
    return folder


def hf(folder: Path) -> Path:
    """Write a Llama in Hugging Face's layout and return the folder."""
    folder.mkdir()
    return huggingface.write(folder)


FOLDERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "glm's own": ("glm", lambda folder: put(folder, weights())),
    "glm's file": ("glm", lambda folder: put(folder, weights()) / "500"),
    "glm safetensors": ("glm", safetensors),
    "glm safetensors, prefixed": ("glm", lambda folder: safetensors(folder, "glm.")),
    "hugging face": ("llama", hf),
    "megatron": ("llama", megatron.write_megatron),
    "megatron below": ("llama", lambda folder: megatron.write_megatron(folder / "ckpts").parent),
    "megatron shards": ("llama", lambda folder: megatron.write_megatron(folder) / "iter_0135000"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_family(name: str, tmp_path: Path) -> None:
    family, write = FOLDERS[name]
    folder = write(tmp_path / "x")
    assert checkpoint_tensors.detect_family(folder) == family
    assert (inspect_checkpoint(folder).layout in ("glm", "safetensors")) == (family == "glm")
    other = next(row for row in families.load_families() if row != family)
    reader = {
        "llama": llama_weights.open_llama_checkpoint,
        "glm": glm_checkpoint.open_glm_checkpoint,
    }[other]
    said = (
        f"{folder}: holds a checkpoint of the family {family}, and one of the family {other} is"
        " wanted; give "
    )
    refused(lambda: reader(folder), said)


def test_no_family(tmp_path: Path) -> None:
    assert checkpoint_tensors.detect_family(tmp_path) is None
    assert checkpoint_tensors.detect_family(tmp_path / "nowhere") is None
    refused(
        lambda: inspect_checkpoint(tmp_path),
        f"{tmp_path}: holds no checkpoint, neither Hugging Face's (",
    )
    refused(lambda: inspect_checkpoint(tmp_path / "nowhere"), "does not exist; ")


def test_two_families(tmp_path: Path) -> None:
    put(hf(tmp_path / "x"), weights())
    for action in (
        inspect_checkpoint,
        llama_weights.open_llama_checkpoint,
        glm_checkpoint.open_glm_checkpoint,
    ):
        refused(
            lambda action=action: action(tmp_path / "x"),
            "holds checkpoints of the families llama and glm; move one away",
        )


def test_inspect_the_authors_format(tmp_path: Path) -> None:
    folder = put(tmp_path, weights(), optimizer={"state": [torch.ones(3)]})
    size = (folder / "500" / FILE).stat().st_size
    assert inspect_checkpoint(folder) == Inspection(
        layout="glm",
        tp=1,
        iteration="500",
        dtype="fp32",
        parameters=COUNT,
        size_bytes=size,
        files=[(f"500/{FILE}", size)],
        shape=DIMENSIONS,
        notes=[golden("the-file-holds-an-optimizer-state")],
        header_sha256=glm_checkpoint.open_glm_checkpoint(folder).headers.digest,
    )


@pytest.mark.parametrize("prefix", ["", "glm."])
def test_inspect_safetensors(tmp_path: Path, prefix: str) -> None:
    size = (safetensors(tmp_path, prefix) / "model.safetensors").stat().st_size
    files = [("model.safetensors", size)]
    digest = glm_checkpoint.open_glm_checkpoint(tmp_path).headers.digest
    assert inspect_checkpoint(tmp_path) == Inspection(
        "safetensors", 1, None, "fp16", COUNT, size, files, DIMENSIONS, [], digest
    )


def test_inspect_a_glm_that_is_not_whole(tmp_path: Path) -> None:
    """Dimensions that the tensors give are listed, and what is wrong is a note."""
    without = {
        name: tensor
        for name, tensor in weights().items()
        if "position" not in name and "layers.1.mlp" not in name
    }
    found = inspect_checkpoint(put(tmp_path / "a", without))
    assert found.shape == DIMENSIONS | {"positions": None}
    assert found.parameters == sum(tensor.numel() for tensor in without.values())
    assert found.notes[-1].endswith(golden("does-not-tell-positions-of-its"))
    gone = {name: tensor for name, tensor in weights().items() if "layers.1.mlp" not in name}
    assert (
        "dense_4h_to_h.bias' [32] is missing, 4 in all; "
        in inspect_checkpoint(put(tmp_path / "b", gone)).notes[-1]
    )
    odd = weights() | {
        "word_embeddings.weight": torch.zeros(61),
        "transformer.position_embeddings.weight": torch.zeros(0, 32),
    }
    assert inspect_checkpoint(put(tmp_path / "c", odd)).shape == DIMENSIONS | dict.fromkeys(
        ("hidden", "vocab", "positions")
    )


def test_a_glm_wider_than_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size from a file is checked before anything is allocated by it."""
    monkeypatch.setattr(glm_checkpoint, "MAX_SIZE", 60)
    assert (
        "vocab is 61, allowed: up to 60; " in inspect_checkpoint(put(tmp_path, weights())).notes[-1]
    )


def test_shapes_are_those_of_the_model() -> None:
    model = made()
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert glm_checkpoint.get_parameter_shapes(model.shape) == wanted


def test_a_glm_is_not_converted(tmp_path: Path) -> None:
    for i, source in enumerate((put(tmp_path / "a", weights()), safetensors(tmp_path / "b"))):
        target = tmp_path / str(i)
        said = (
            f"{source}: holds a checkpoint of the family glm, and one of the family llama is"
            " wanted; "
        )
        refused(
            lambda source=source, target=target: convert.convert_checkpoint(
                source, target, "hf", 1
            ),
            said,
        )
        assert not target.exists()
