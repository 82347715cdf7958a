"""Dimensions of a Llama and its variants: one model has one spelling, and impossible shapes are
refused.
"""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from steelyard.models.shapes import LlamaModel

BASE: dict[str, Any] = {
    "family": "llama",
    "layers": 1,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 8,
    "vocab": 9,
    "positions": 32,
}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "low": 1.0, "high": 4.0, "original_positions": 24}


def made(**changes: Any) -> LlamaModel:
    """Return the base model with changed fields."""
    return LlamaModel.model_validate(BASE | changes)


def test_what_says_nothing_is_left_out() -> None:
    assert made(head_dim=16) == made(window=32) == made(window=10**6, head_dim=16) == made()
    assert (made().dim, made().variants) == (16, ())


def test_what_says_something_is_not() -> None:
    model = made(head_dim=24, window=31, qk_norm=True, rope_scaling=LLAMA3)
    assert (model.dim, model.head_dim, model.window) == (24, 24, 31)
    assert model.variants == ("head_dim", "qk_norm", "window", "rope_scaling")
    assert LlamaModel.model_validate(model.model_dump(mode="json")) == model


def test_heads_need_not_divide_a_model_that_tells_their_size() -> None:
    assert made(hidden=60, heads=8, kv_heads=4, head_dim=10).dim == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 66}, "hidden 66 must be an even multiple of heads 4, and heads of kv_heads 2"),
        ({"head_dim": 15}, "head_dim 15 must be even, and heads 4 a multiple of kv_heads 2"),
        (
            {"head_dim": 24, "kv_heads": 3},
            "head_dim 24 must be even, and heads 4 a multiple of kv_heads 3",
        ),
        ({"window": 0}, "greater than or equal to 1"),
        ({"rope_scaling": {"kind": "dynamic", "factor": 2.0}}, "'linear', 'llama3'"),
        ({"rope_scaling": {"kind": "linear"}}, "Field required"),
        ({"rope_scaling": {"kind": "linear", "factor": 0.0}}, "greater than 0"),
        ({"rope_scaling": LLAMA3 | {"low": 4.0}}, "low 4.0 must be less than high 4.0"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        made(**changes)
