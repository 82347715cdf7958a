"""Test checkpoints of a GLM: a round trip exact to the bit, every layout, and one line for each way
in which a checkpoint is wrong.
"""

import argparse
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fixtures.glm import CPU, SHAPE, make_job
from fixtures.golden import golden
from steelyard.engines.torch import train_cloze as fused
from steelyard.errors import RequestError
from steelyard.models import glm
from steelyard.weights import glm_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "mp_rank_00_model_states.pt"
WORD_EMBEDDINGS = "word_embeddings.weight"
QKV = "transformer.layers.1.attention.query_key_value.weight"


def make_model(seed: int = 4, dtype: torch.dtype = torch.float32) -> glm.Glm:
    """Return a model with random values in every parameter, so that a norm or bias taken for
    another would show.
    """
    model = glm.build_glm(SHAPE, CPU, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def make_weights() -> dict[str, Tensor]:
    """Return copies of the parameters of make_model with its default seed, by name."""
    return {name: parameter.detach().clone() for name, parameter in make_model().named_parameters()}


def write_checkpoint(folder: Path, module: object, name: str = "500", **extra: object) -> Path:
    """Write a checkpoint in the layout of GLM's authors, with further entries beside the weights,
    and return its folder.
    """
    (folder / name).mkdir(parents=True)
    torch.save({"module": module, **extra}, folder / name / FILE)
    (folder / TRACKER).write_text(name)
    return folder


def has_seed_4_weights(model: glm.Glm) -> bool:
    """Return whether a model's parameters equal make_weights."""
    expected = make_weights()
    return all(
        torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters()
    )


def load_refusal(folder: Path) -> str:
    """Return the message with which loading is refused, after checking that it is one line and that
    no parameter changed.
    """
    model = make_model(9)
    parameters_before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RequestError) as error:
        glm_checkpoint.load_glm(model, folder)
    assert "\n" not in str(error.value)
    # no parameter was changed
    assert all(
        torch.equal(before, after)
        for before, after in zip(parameters_before, model.parameters(), strict=True)
    )
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_round_trip_keeps_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model, loaded = make_model(4, dtype), make_model(9, dtype)
    glm_checkpoint.write_glm_checkpoint(model, tmp_path, 1200)
    assert (tmp_path / TRACKER).read_text().strip() == "1200"
    progress: list[tuple[int, int]] = []
    facts = glm_checkpoint.load_glm(
        loaded, tmp_path, lambda done_bytes, total: progress.append((done_bytes, total))
    )
    assert all(
        torch.equal(expected, actual)
        for expected, actual in zip(model.parameters(), loaded.parameters(), strict=True)
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (facts["source"], facts["iteration"], facts["parameters"]) == ("glm", "1200", count)
    size = (tmp_path / "1200" / FILE).stat().st_size
    assert facts["files"] == [{"name": f"1200/{FILE}", "bytes": size}]
    assert len(facts["header_sha256"]) == 64
    assert progress[-1] == (count * dtype.itemsize,) * 2
    assert [done_bytes for done_bytes, _ in progress] == sorted(
        {done_bytes for done_bytes, _ in progress}
    )
    saved = torch.load(tmp_path / "1200" / FILE, weights_only=True)
    assert list(saved["module"]) == [name for name, _ in model.named_parameters()]
    assert all(tensor.is_contiguous() for tensor in saved["module"].values())


def test_a_checkpoint_of_the_authors_program(tmp_path: Path) -> None:
    """The file holds an optimizer state, arguments and other entries beside the weights, which are
    fp16 for a model in fp32.
    """
    halves = {name: tensor.half() for name, tensor in make_weights().items()}
    arguments = argparse.Namespace(layers=2)
    folder = write_checkpoint(
        tmp_path,
        halves,
        "release",
        optimizer={"state": [torch.ones(3)]},
        args=arguments,
        rng=b"x",
        dp_world_size=8,
    )
    model = make_model(9)
    assert glm_checkpoint.load_glm(model, folder)["iteration"] == "release"
    assert all(
        torch.equal(parameter, halves[name].float()) for name, parameter in model.named_parameters()
    )
    facts = glm_checkpoint.load_glm(make_model(9), folder / "release")  # the iteration's own folder
    assert (facts["iteration"], facts["files"][0]["name"]) == ("release", FILE)


@pytest.mark.parametrize("prefix", ["", "glm."])
def test_safetensors_in_one_file_and_in_many(tmp_path: Path, prefix: str) -> None:
    tensors = {prefix + name: tensor for name, tensor in make_weights().items()}
    one_file, two_files = tmp_path / "one", tmp_path / "many"
    one_file.mkdir()
    two_files.mkdir()
    save_file(tensors, one_file / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for number, shard_names in enumerate((names[:9], names[9:])):
        save_file(
            {name: tensors[name] for name in shard_names}, two_files / f"part-{number}.safetensors"
        )
        weight_map |= dict.fromkeys(shard_names, f"part-{number}.safetensors")
    (two_files / "model.safetensors.index.json").write_text(
        __import__("json").dumps({"weight_map": weight_map})
    )
    for folder, count in ((one_file, 1), (two_files, 2)):
        model = make_model(9)
        facts = glm_checkpoint.load_glm(model, folder)
        assert has_seed_4_weights(model)
        assert (facts["source"], len(facts["files"]), "iteration" in facts) == (
            "safetensors",
            count,
            False,
        )


def test_digests_depend_on_the_dtype_and_not_on_the_folder(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", make_weights())
    same_weights = write_checkpoint(tmp_path / "b", make_weights())
    half_weights = write_checkpoint(
        tmp_path / "c", {name: tensor.half() for name, tensor in make_weights().items()}
    )
    digests = [
        glm_checkpoint.open_glm_checkpoint(folder).headers.digest
        for folder in (first, same_weights, half_weights)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_trainer_starts_from_a_checkpoint(tmp_path: Path) -> None:
    from contextlib import nullcontext

    train_job = make_job()
    train_job.weights = write_checkpoint(tmp_path, make_weights())
    trainer = fused.make_cloze_trainer(train_job)
    trainer.prepare(lambda name: nullcontext())
    assert has_seed_4_weights(trainer.model.module)
    assert trainer.model.weights["source"] == "glm"


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    for number, rows in enumerate((60, 62)):
        tensors = make_weights() | {WORD_EMBEDDINGS: torch.zeros(rows, 32)}
        error_line = load_refusal(write_checkpoint(tmp_path / str(number), tensors))
        assert golden("has-rows-the-case-vocab-is", WORD_EMBEDDINGS, rows) in error_line


def test_missing_extra_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    tensors = make_weights()
    missing = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    assert load_refusal(write_checkpoint(tmp_path / "a", missing)).endswith(
        golden("transformer-layers-1-mlp-dense_-4")
    )
    assert "'transformer.layers.2.mlp.bias' F32 [3]: this model has no" in load_refusal(
        write_checkpoint(tmp_path / "b", tensors | {"transformer.layers.2.mlp.bias": torch.ones(3)})
    )
    assert "the shape must be [96, 32]" in load_refusal(
        write_checkpoint(tmp_path / "c", tensors | {QKV: torch.ones(32, 96)})
    )
    assert "int8 [96, 32]: allowed dtypes are" in load_refusal(
        write_checkpoint(tmp_path / "d", tensors | {QKV: torch.ones(96, 32, dtype=torch.int8)})
    )
    assert f"{QKV!r} is not a tensor" in load_refusal(
        write_checkpoint(tmp_path / "e", tensors | {QKV: 5})
    )
    assert golden("holds-no-weights-table-module-is") in load_refusal(
        write_checkpoint(tmp_path / "f", {})
    )
    assert "holds no weights" in load_refusal(write_checkpoint(tmp_path / "g", [1, 2]))
    mixed_prefixes = {
        ("glm." if "mlp" in name else "") + name: tensor for name, tensor in tensors.items()
    }
    (tmp_path / "h").mkdir()
    save_file(mixed_prefixes, tmp_path / "h" / "model.safetensors")
    assert "this model has no such tensor" in load_refusal(tmp_path / "h")


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    assert "does not exist; give the folder" in load_refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file, a folder is expected" in load_refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint, neither GLM's own" in load_refusal(tmp_path / "empty")
    without_file = write_checkpoint(tmp_path / "gone", make_weights())
    (without_file / "500" / FILE).unlink()
    assert f"500/{FILE}: is missing, and {TRACKER} names its folder" in load_refusal(without_file)
    two_layouts = write_checkpoint(tmp_path / "both", make_weights())
    save_file(make_weights(), two_layouts / "model.safetensors")
    assert golden("holds-glm-own-checkpoint-and-one") in load_refusal(two_layouts)


def test_a_checkpoint_divided_over_ranks_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_weights())
    shutil.copy(folder / "500" / FILE, folder / "500" / "mp_rank_01_model_states.pt")
    assert golden("mp_rank_-01-model_states-pt-model-divided") in load_refusal(folder)


@pytest.mark.parametrize("text", ["", "../500", "/etc", "..", "a\\b", "5\n00", "\x00", "é"])
def test_a_tracker_that_names_another_place_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path, make_weights())
    (folder / TRACKER).write_text(text)
    assert f"{TRACKER}: names " in load_refusal(folder)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, keep: float) -> None:
    folder = write_checkpoint(tmp_path, make_weights())
    path = folder / "500" / FILE
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    assert golden("is-not-whole-file-written-by") in load_refusal(folder)


class FolderMakingPickle:
    """An object whose unpickling would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


def test_no_pickled_object_is_executed(tmp_path: Path) -> None:
    """An unknown object beside the weights is ignored, and in place of weights it is refused. The
    last lines show that unpickling would execute it.
    """
    marker = tmp_path / "told"
    folder = write_checkpoint(tmp_path / "a", make_weights(), extra=FolderMakingPickle(marker))
    model = make_model(9)
    glm_checkpoint.load_glm(model, folder)
    assert has_seed_4_weights(model)
    in_weights = write_checkpoint(
        tmp_path / "b", make_weights() | {QKV: FolderMakingPickle(marker)}
    )
    assert "is not a tensor" in load_refusal(in_weights)
    in_place_of_weights = write_checkpoint(tmp_path / "c", FolderMakingPickle(marker))
    assert "holds no weights" in load_refusal(in_place_of_weights)
    assert not marker.exists()
    with pytest.raises((RuntimeError, pickle.UnpicklingError, FileExistsError, OSError)):
        torch.load(folder / "500" / FILE, weights_only=True)
    torch.load(folder / "500" / FILE, weights_only=False)
    assert marker.exists()
