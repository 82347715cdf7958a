"""Rows of model families: parameter counts against the modules, and references that can be
imported.
"""

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, count_padded_vocab_rows, count_vocab_rows
from steelyard.plan import flops

FAMILIES = families.load_families()
SHAPES = {
    "llama": LlamaModel(
        family="llama",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=48,
        vocab=61,
        positions=24,
        qkv_bias=True,
    ),
    "glm": GlmModel(family="glm", layers=2, hidden=32, heads=4, ffn=48, vocab=61, positions=24),
}
COUNTED_MODEL = AutoModel(
    family="auto",
    model_type="gpt2",
    layers=2,
    hidden=32,
    heads=4,
    vocab=61,
    positions=24,
    parameters=99_000,
    token_flops=50_000,
    pair_flops=256,
    logit_flops=3904,
    config={"n_layer": 2},
)
REFERENCES = ("build", "random_init", "placements", "holds", "checkpoint", "check_folder")


def test_every_family_has_a_shape_in_this_file() -> None:
    assert {*SHAPES, "auto"} == set(FAMILIES)
    shapes = {**SHAPES, "auto": COUNTED_MODEL}
    assert all(
        name == row.name and isinstance(shapes[name], row.shape) for name, row in FAMILIES.items()
    )


def test_a_counted_model_costs_what_was_counted() -> None:
    counts = {"tokens": 10, "pairs": 55, "square": 100, "logits": 3}
    assert flops.count_causal_flops(COUNTED_MODEL, counts) == 10 * 50_000 + 55 * 256 + 3 * 3904
    assert flops.count_profiled_flops(COUNTED_MODEL, counts) == 10 * 50_000 + 100 * 256 + 3 * 3904
    assert flops.count_model_parameters(COUNTED_MODEL) == 99_000
    assert flops.count_nominal_flops(COUNTED_MODEL, counts) is None


@pytest.mark.parametrize(
    "key",
    [
        "auto_map",
        "_attn_implementation",
        "attn_implementation",
        "quantization_config",
        "kernel_config",
    ],
)
def test_a_counted_model_has_no_key_that_names_code(key: str) -> None:
    """A case may come from a stranger, and transformers fetches and runs what some config keys
    name.
    """
    for config in ({key: "x"}, {"text_config": {key: {"a": 1}}}):
        with pytest.raises(ValidationError, match=f"{key} does not belong in a case"):
            AutoModel.model_validate(COUNTED_MODEL.model_dump() | {"config": config})
    with pytest.raises(ValidationError, match="does not belong in a case"):
        AutoModel.model_validate(COUNTED_MODEL.model_dump() | {"null": [key]})


@pytest.mark.parametrize("name", SHAPES)
def test_built_models_have_seeded_weights_and_the_counted_parameters(name: str) -> None:
    row, shape = families.find_family(name), SHAPES[name]
    assert row.build is not None
    assert row.random_init is not None
    model, second_model = (
        plugins.load_reference(row.build)(shape, torch.device("cpu"), torch.float32)
        for _ in range(2)
    )
    for built in (model, second_model):
        plugins.load_reference(row.random_init)(built, 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), second_model.parameters(), strict=True)
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == shape.layers * row.count_layer_parameters(shape) + row.other_parameters(shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_references_of_a_family_can_be_imported(name: str) -> None:
    for field in REFERENCES:
        reference = getattr(FAMILIES[name], field)
        assert reference is None or plugins.load_reference(reference) is not None
    assert (FAMILIES[name].placements is None) == (name in ("glm", "auto"))


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(RequestError, match="no family 'bert'; known: llama, glm, auto"):
        families.find_family("bert")


@pytest.mark.process
def test_families_are_imported_without_torch() -> None:
    code = "import sys, steelyard.models.families; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@pytest.mark.parametrize(
    "vocab, tp, rows, padded",
    [(61, 1, 61, 64), (61, 2, 64, 64), (129, 2, 128, 128), (32000, 8, 4032, 4032)],
)
def test_vocabulary_rows_of_a_tensor_parallel_rank(
    vocab: int, tp: int, rows: int, padded: int
) -> None:
    assert (count_vocab_rows(vocab, tp), count_padded_vocab_rows(vocab, tp)) == (rows, padded)
