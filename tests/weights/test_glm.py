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

from fixtures.glm import CPU, SHAPE, job
from fixtures.golden import golden
from steelyard.engines.torch import train_cloze as fused
from steelyard.errors import RequestError
from steelyard.models import glm
from steelyard.weights import glm_checkpoint as glm_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "mp_rank_00_model_states.pt"
WORDS = "word_embeddings.weight"
QKV = "transformer.layers.1.attention.query_key_value.weight"


def made(seed: int = 4, dtype: torch.dtype = torch.float32) -> glm.Glm:
    """Return a model with random values in every parameter, so that a norm or bias taken for
    another would show.
    """
    model = glm.build_glm(SHAPE, CPU, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def weights() -> dict[str, Tensor]:
    """Return copies of the parameters of make_model with its default seed, by name."""
    return {name: parameter.detach().clone() for name, parameter in made().named_parameters()}


def put(folder: Path, module: object, name: str = "500", **beside: object) -> Path:
    """Write a checkpoint in the layout of GLM's authors, with further entries beside the weights,
    and return its folder.
    """
    (folder / name).mkdir(parents=True)
    torch.save({"module": module, **beside}, folder / name / FILE)
    (folder / TRACKER).write_text(name)
    return folder


def same(model: glm.Glm) -> bool:
    """Return whether a model's parameters equal make_weights."""
    wanted = weights()
    return all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


def refused(folder: Path) -> str:
    """Return the message with which loading is refused, after checking that it is one line and that
    no parameter changed.
    """
    model = made(9)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RequestError) as caught:
        glm_checkpoint.load_glm(model, folder)
    assert "\n" not in str(caught.value)
    # no parameter was changed
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_round_trip_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = made(4, dtype), made(9, dtype)
    glm_checkpoint.write_glm_checkpoint(model, tmp_path, 1200)
    assert (tmp_path / TRACKER).read_text().strip() == "1200"
    told: list[tuple[int, int]] = []
    facts = glm_checkpoint.load_glm(other, tmp_path, lambda done, total: told.append((done, total)))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (facts["source"], facts["iteration"], facts["parameters"]) == ("glm", "1200", count)
    size = (tmp_path / "1200" / FILE).stat().st_size
    assert facts["files"] == [{"name": f"1200/{FILE}", "bytes": size}]
    assert len(facts["header_sha256"]) == 64
    assert told[-1] == (count * dtype.itemsize,) * 2
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    saved = torch.load(tmp_path / "1200" / FILE, weights_only=True)
    assert list(saved["module"]) == [name for name, _ in model.named_parameters()]
    assert all(tensor.is_contiguous() for tensor in saved["module"].values())


def test_a_checkpoint_of_the_authors_program(tmp_path: Path) -> None:
    """The file holds an optimizer state, arguments and other entries beside the weights, which are
    fp16 for a model in fp32.
    """
    halves = {name: tensor.half() for name, tensor in weights().items()}
    args = argparse.Namespace(layers=2)
    folder = put(
        tmp_path,
        halves,
        "release",
        optimizer={"state": [torch.ones(3)]},
        args=args,
        rng=b"x",
        dp_world_size=8,
    )
    model = made(9)
    assert glm_checkpoint.load_glm(model, folder)["iteration"] == "release"
    assert all(
        torch.equal(parameter, halves[name].float()) for name, parameter in model.named_parameters()
    )
    facts = glm_checkpoint.load_glm(made(9), folder / "release")  # the iteration's own folder
    assert (facts["iteration"], facts["files"][0]["name"]) == ("release", FILE)


@pytest.mark.parametrize("prefix", ["", "glm."])
def test_safetensors_in_one_file_and_in_many(tmp_path: Path, prefix: str) -> None:
    tensors = {prefix + name: tensor for name, tensor in weights().items()}
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    save_file(tensors, one / "model.safetensors")
    names, where = sorted(tensors), {}
    for i, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, many / f"part-{i}.safetensors")
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    (many / "model.safetensors.index.json").write_text(
        __import__("json").dumps({"weight_map": where})
    )
    for folder, count in ((one, 1), (many, 2)):
        model = made(9)
        facts = glm_checkpoint.load_glm(model, folder)
        assert same(model)
        assert (facts["source"], len(facts["files"]), "iteration" in facts) == (
            "safetensors",
            count,
            False,
        )


def test_digests_tell_checkpoints_apart(tmp_path: Path) -> None:
    first = put(tmp_path / "a", weights())
    again = put(tmp_path / "b", weights())
    half = put(tmp_path / "c", {name: tensor.half() for name, tensor in weights().items()})
    digests = [
        glm_checkpoint.open_glm_checkpoint(folder).headers.digest for folder in (first, again, half)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_trainer_begins_with_them(tmp_path: Path) -> None:
    from contextlib import nullcontext

    asked = job()
    asked.weights = put(tmp_path, weights())
    trainer = fused.make_cloze_trainer(asked)
    trainer.prepare(lambda name: nullcontext())
    assert same(trainer.model.module)
    assert trainer.model.weights["source"] == "glm"


def test_vocabulary_of_another_size(tmp_path: Path) -> None:
    for i, rows in enumerate((60, 62)):
        table = weights() | {WORDS: torch.zeros(rows, 32)}
        said = refused(put(tmp_path / str(i), table))
        assert golden("has-rows-the-case-vocab-is", WORDS, rows) in said


def test_tensors_that_are_not_the_models(tmp_path: Path) -> None:
    table = weights()
    missing = {name: tensor for name, tensor in table.items() if "layers.1.mlp" not in name}
    assert refused(put(tmp_path / "a", missing)).endswith(
        golden("transformer-layers-1-mlp-dense_-4")
    )
    assert "'transformer.layers.2.mlp.bias' F32 [3] has no place" in refused(
        put(tmp_path / "b", table | {"transformer.layers.2.mlp.bias": torch.ones(3)})
    )
    assert "the shape must be [96, 32]" in refused(
        put(tmp_path / "c", table | {QKV: torch.ones(32, 96)})
    )
    assert "int8 [96, 32]: allowed dtypes are" in refused(
        put(tmp_path / "d", table | {QKV: torch.ones(96, 32, dtype=torch.int8)})
    )
    assert f"{QKV!r} is no tensor" in refused(put(tmp_path / "e", table | {QKV: 5}))
    assert golden("holds-no-weights-table-module-is") in refused(put(tmp_path / "f", {}))
    assert "holds no weights" in refused(put(tmp_path / "g", [1, 2]))
    mixed = {("glm." if "mlp" in name else "") + name: tensor for name, tensor in table.items()}
    (tmp_path / "h").mkdir()
    save_file(mixed, tmp_path / "h" / "model.safetensors")
    assert "has no place in this model" in refused(tmp_path / "h")


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    assert "does not exist; give the folder" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file, a folder is expected" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint, neither GLM's own" in refused(tmp_path / "empty")
    gone = put(tmp_path / "gone", weights())
    (gone / "500" / FILE).unlink()
    assert f"500/{FILE}: is missing, and {TRACKER} names its folder" in refused(gone)
    both = put(tmp_path / "both", weights())
    save_file(weights(), both / "model.safetensors")
    assert golden("holds-glm-own-checkpoint-and-one") in refused(both)


def test_a_model_divided_over_ranks(tmp_path: Path) -> None:
    folder = put(tmp_path, weights())
    shutil.copy(folder / "500" / FILE, folder / "500" / "mp_rank_01_model_states.pt")
    assert golden("mp_rank_-01-model_states-pt-model-divided") in refused(folder)


@pytest.mark.parametrize("text", ["", "../500", "/etc", "..", "a\\b", "5\n00", "\x00", "é"])
def test_a_tracker_names_a_folder_beside_it(tmp_path: Path, text: str) -> None:
    folder = put(tmp_path, weights())
    (folder / TRACKER).write_text(text)
    assert f"{TRACKER}: names " in refused(folder)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_cut_files(tmp_path: Path, keep: float) -> None:
    folder = put(tmp_path, weights())
    path = folder / "500" / FILE
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    assert golden("is-not-whole-file-written-by") in refused(folder)


class Hostile:
    """An object whose unpickling would make a folder."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.told),)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    """An unknown object beside the weights is ignored, and in place of weights it is refused. The
    last lines show that unpickling would execute it.
    """
    told = tmp_path / "told"
    folder = put(tmp_path / "a", weights(), beside=Hostile(told))
    model = made(9)
    glm_checkpoint.load_glm(model, folder)
    assert same(model)
    inside = put(tmp_path / "b", weights() | {QKV: Hostile(told)})
    assert "is no tensor" in refused(inside)
    whole = put(tmp_path / "c", Hostile(told))
    assert "holds no weights" in refused(whole)
    assert not told.exists()
    with pytest.raises((RuntimeError, pickle.UnpicklingError, FileExistsError, OSError)):
        torch.load(folder / "500" / FILE, weights_only=True)
    torch.load(folder / "500" / FILE, weights_only=False)
    assert told.exists()
