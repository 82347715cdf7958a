"""Rows of families: counts against the modules, and references that lead somewhere."""

import subprocess
import sys

import pytest
import torch

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.models.shapes import GlmModel, LlamaModel, padded_vocab_rows, vocab_rows

FAMILIES = families.table()
SHAPES = {
    "llama": LlamaModel(
        family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, positions=24, qkv_bias=True
    ),
    "glm": GlmModel(family="glm", layers=2, hidden=32, heads=4, ffn=48, vocab=61, positions=24),
}
REFERENCES = ("build", "random_init", "placements", "holds", "checkpoint")


def test_every_family_is_here() -> None:
    assert set(SHAPES) == set(FAMILIES)
    assert all(name == row.name and isinstance(SHAPES[name], row.shape) for name, row in FAMILIES.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_build_and_random_init(name: str) -> None:
    row, shape = families.row(name), SHAPES[name]
    model, again = (plugins.load(row.build)(shape, torch.device("cpu"), torch.float32) for _ in range(2))
    for made in (model, again):
        plugins.load(row.random_init)(made, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == shape.layers * row.layer_parameters(shape) + row.other_parameters(shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_references(name: str) -> None:
    for field in REFERENCES:
        reference = getattr(FAMILIES[name], field)
        assert reference is None or plugins.load(reference) is not None
    assert (FAMILIES[name].placements is None) == (name == "glm")


def test_unknown() -> None:
    with pytest.raises(RequestError, match="no family 'bert'; known: llama, glm"):
        families.row("bert")


def test_no_torch() -> None:
    code = "import sys, steelyard.models.families; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    "vocab, tp, rows, padded", [(61, 1, 61, 64), (61, 2, 64, 64), (129, 2, 128, 128), (32000, 8, 4032, 4032)]
)
def test_rows_of_a_vocabulary(vocab: int, tp: int, rows: int, padded: int) -> None:
    assert (vocab_rows(vocab, tp), padded_vocab_rows(vocab, tp)) == (rows, padded)
