"""Test what is known of a weights folder before loading: its family by file and tensor names, and a
GLM's dimensions by its headers.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fixtures import huggingface, megatron
from fixtures.conversions import assert_refused
from fixtures.glm_checkpoints import FILE, make_random_model, make_weights, write_glm_checkpoint
from fixtures.golden import golden
from steelyard.models import families
from steelyard.weights import checkpoint_tensors, convert, glm_checkpoint, llama_weights
from steelyard.weights.inspection import Inspection, inspect_checkpoint

PARAMETER_COUNT = sum(parameter.numel() for parameter in make_random_model().parameters())
DIMENSIONS = {"layers": 2, "hidden": 32, "heads": None, "ffn": 48, "vocab": 61, "positions": 24}


def write_safetensors(folder: Path, prefix: str = "") -> Path:
    """Write GLM's weights as one fp16 safetensors file, with a prefix to its names, and return the
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {prefix + name: tensor.half() for name, tensor in make_weights().items()},
        folder / "model.safetensors",
    )
    return folder


def write_hf(folder: Path) -> Path:
    """Write a Llama in Hugging Face's layout and return the folder."""
    folder.mkdir()
    return huggingface.write_hf_folder(folder)


WRITERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "glm's own": ("glm", lambda folder: write_glm_checkpoint(folder, make_weights())),
    "glm's file": ("glm", lambda folder: write_glm_checkpoint(folder, make_weights()) / "500"),
    "glm safetensors": ("glm", write_safetensors),
    "glm safetensors, prefixed": ("glm", lambda folder: write_safetensors(folder, "glm.")),
    "hugging face": ("llama", write_hf),
    "megatron": ("llama", megatron.write_megatron),
    "megatron below": ("llama", lambda folder: megatron.write_megatron(folder / "ckpts").parent),
    "megatron shards": ("llama", lambda folder: megatron.write_megatron(folder) / "iter_0135000"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_family_is_known_by_file_and_tensor_names(name: str, tmp_path: Path) -> None:
    family, write = WRITERS[name]
    folder = write(tmp_path / "x")
    assert checkpoint_tensors.detect_family(folder) == family
    assert (inspect_checkpoint(folder).layout in ("glm", "safetensors")) == (family == "glm")
    other_family = next(row for row in families.load_families() if row != family)
    reader = {
        "llama": llama_weights.open_llama_checkpoint,
        "glm": glm_checkpoint.open_glm_checkpoint,
    }[other_family]
    reason = f"{folder}: holds a {family} checkpoint; a {other_family} checkpoint is needed; give "
    assert_refused(lambda: reader(folder), reason)


def test_a_folder_without_a_checkpoint_has_no_family(tmp_path: Path) -> None:
    assert checkpoint_tensors.detect_family(tmp_path) is None
    assert checkpoint_tensors.detect_family(tmp_path / "nowhere") is None
    assert_refused(
        lambda: inspect_checkpoint(tmp_path),
        f"{tmp_path}: holds no checkpoint, neither Hugging Face's (",
    )
    assert_refused(lambda: inspect_checkpoint(tmp_path / "nowhere"), "does not exist; ")


def test_a_folder_with_checkpoints_of_two_families_is_refused(tmp_path: Path) -> None:
    write_glm_checkpoint(write_hf(tmp_path / "x"), make_weights())
    for action in (
        inspect_checkpoint,
        llama_weights.open_llama_checkpoint,
        glm_checkpoint.open_glm_checkpoint,
    ):
        assert_refused(
            lambda action=action: action(tmp_path / "x"),
            "holds checkpoints of two families, llama and glm; move one away",
        )


def test_inspection_of_the_glm_authors_format(tmp_path: Path) -> None:
    folder = write_glm_checkpoint(tmp_path, make_weights(), optimizer={"state": [torch.ones(3)]})
    size = (folder / "500" / FILE).stat().st_size
    assert inspect_checkpoint(folder) == Inspection(
        layout="glm",
        tp=1,
        iteration="500",
        dtype="fp32",
        parameters=PARAMETER_COUNT,
        size_bytes=size,
        files=[(f"500/{FILE}", size)],
        shape=DIMENSIONS,
        notes=[golden("the-file-holds-an-optimizer-state")],
        header_sha256=glm_checkpoint.open_glm_checkpoint(folder).headers.digest,
    )


@pytest.mark.parametrize("prefix", ["", "glm."])
def test_inspection_of_glm_safetensors(tmp_path: Path, prefix: str) -> None:
    size = (write_safetensors(tmp_path, prefix) / "model.safetensors").stat().st_size
    files = [("model.safetensors", size)]
    digest = glm_checkpoint.open_glm_checkpoint(tmp_path).headers.digest
    assert inspect_checkpoint(tmp_path) == Inspection(
        "safetensors", 1, None, "fp16", PARAMETER_COUNT, size, files, DIMENSIONS, [], digest
    )


def test_inspection_of_an_incomplete_glm(tmp_path: Path) -> None:
    """Dimensions that the tensors give are listed, and what is wrong is a note."""
    without_positions = {
        name: tensor
        for name, tensor in make_weights().items()
        if "position" not in name and "layers.1.mlp" not in name
    }
    inspection = inspect_checkpoint(write_glm_checkpoint(tmp_path / "a", without_positions))
    assert inspection.shape == DIMENSIONS | {"positions": None}
    assert inspection.parameters == sum(tensor.numel() for tensor in without_positions.values())
    assert inspection.notes[-1].endswith(golden("does-not-tell-positions-of-its"))
    without_mlp = {
        name: tensor for name, tensor in make_weights().items() if "layers.1.mlp" not in name
    }
    assert (
        "dense_4h_to_h.bias' [32] is missing, 4 in all; "
        in inspect_checkpoint(write_glm_checkpoint(tmp_path / "b", without_mlp)).notes[-1]
    )
    misshapen = make_weights() | {
        "word_embeddings.weight": torch.zeros(61),
        "transformer.position_embeddings.weight": torch.zeros(0, 32),
    }
    assert inspect_checkpoint(
        write_glm_checkpoint(tmp_path / "c", misshapen)
    ).shape == DIMENSIONS | dict.fromkeys(("hidden", "vocab", "positions"))


def test_a_glm_above_the_size_limit_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size from a file is checked before anything is allocated by it."""
    monkeypatch.setattr(glm_checkpoint, "MAX_SIZE", 60)
    assert (
        "vocab is 61, allowed: up to 60; "
        in inspect_checkpoint(write_glm_checkpoint(tmp_path, make_weights())).notes[-1]
    )


def test_expected_shapes_are_those_of_the_model() -> None:
    model = make_random_model()
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert glm_checkpoint.get_parameter_shapes(model.shape) == expected


def test_converting_a_glm_is_refused(tmp_path: Path) -> None:
    for number, source in enumerate(
        (write_glm_checkpoint(tmp_path / "a", make_weights()), write_safetensors(tmp_path / "b"))
    ):
        target = tmp_path / str(number)
        reason = f"{source}: holds a glm checkpoint; a llama checkpoint is needed; "
        assert_refused(
            lambda source=source, target=target: convert.convert_checkpoint(
                source, target, "hf", 1
            ),
            reason,
        )
        assert not target.exists()
