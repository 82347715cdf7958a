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


def make_model(**changes: Any) -> LlamaModel:
    """Return the base model with changed fields."""
    return LlamaModel.model_validate(BASE | changes)


def test_fields_that_equal_the_default_are_dropped() -> None:
    assert (
        make_model(head_dim=16)
        == make_model(window=32)
        == make_model(window=10**6, head_dim=16)
        == make_model()
    )
    assert (make_model().dim, make_model().variants) == (16, ())


def test_fields_that_differ_from_the_default_are_stored() -> None:
    model = make_model(head_dim=24, window=31, qk_norm=True, rope_scaling=LLAMA3)
    assert (model.dim, model.head_dim, model.window) == (24, 24, 31)
    assert model.variants == ("head_dim", "qk_norm", "window", "rope_scaling")
    assert LlamaModel.model_validate(model.model_dump(mode="json")) == model


def test_heads_need_not_divide_hidden_if_head_dim_is_given() -> None:
    assert make_model(hidden=60, heads=8, kv_heads=4, head_dim=10).dim == 10


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
def test_impossible_shapes_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        make_model(**changes)
