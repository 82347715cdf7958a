"""Precisions by name, and the origin of each value of a case."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.cases import NAME, OWN_CASE, get_resolve_error, write_own_case
from steelyard.case.precision import load_presets
from steelyard.case.resolve import ResolvedCase, resolve_case


@pytest.mark.parametrize(
    "key", ["question.precision.matmul", "question.precision.weights", "question.precision.name"]
)
def test_a_precision_is_set_by_its_name_alone(key: str) -> None:
    """A precision with one part changed but the old name would label every number wrongly."""
    assert get_resolve_error(NAME, "full", f"{key}=fp32").startswith(f"--set: no key {key!r}; ")


@pytest.mark.parametrize("name", load_presets()["score"])
def test_scoring_precisions(name: str) -> None:
    expected = {
        "fp32": ("fp32", "fp32", None, None), "tf32": ("tf32", "fp32", None, None),
        "fp16": ("fp16", "fp16", None, None), "bf16": ("bf16", "bf16", None, None),
        "fp8": ("fp8", "bf16", None, None),
    }[name]  # fmt: skip
    for resolved in (
        resolve_case(NAME, precision=name),
        resolve_case(NAME, settings=[f"question.precision={name}"]),
    ):
        precision = resolved.case.question.precision
        assert precision.name == name
        assert (
            precision.matmul,
            precision.weights,
            precision.gradients,
            precision.states,
        ) == expected
        assert resolved.origins["question.precision.matmul"] == f"preset {name} (command line)"


def test_training_precisions() -> None:
    assert {
        name: (p.matmul, p.weights, p.gradients, p.states)
        for name, p in load_presets()["train"].items()
    } == {
        "fp32": ("fp32", "fp32", "fp32", "fp32"),
        "tf32": ("tf32", "fp32", "fp32", "fp32"),
        "fp16": ("fp16", "fp32", "fp32", "fp32"),
        "bf16": ("bf16", "fp32", "fp32", "fp32"),
        "bf16-pure": ("bf16", "bf16", "bf16", "bf16"),
        "fp8": ("fp8", "fp32", "fp32", "fp32"),
        "fp8-pure": ("fp8", "bf16", "bf16", "bf16"),
        "fp16-o2": ("fp16", "fp32", "fp16", "fp32"),
        "bf16-o2": ("bf16", "fp32", "bf16", "fp32"),
    }


def test_unknown_precisions_are_refused() -> None:
    line = "precision 'fp4' is not known; allowed for score: fp32, tf32, fp16, bf16, fp8"
    assert (
        get_resolve_error(NAME, precision="fp4")
        == get_resolve_error(NAME, "full", "question.precision=fp4")
        == line
    )
    assert get_resolve_error(NAME, precision="bf16-pure") == line.replace("fp4", "bf16-pure")


def test_a_precision_spelled_out(tmp_path: Path) -> None:
    table = '\n[question.precision]\nname = "mine"\nmatmul = "tf32"\nweights = "bf16"\n'
    path = write_own_case(tmp_path, OWN_CASE + table, ('precision = "fp16"\n', ""))
    precision = resolve_case(path).case.question.precision
    assert (precision.name, precision.matmul, precision.weights) == (
        "matmul tf32, weights bf16",
        "tf32",
        "bf16",
    )
    assert resolve_case(path).origins["question.precision.matmul"] == "case"


def test_origins_of_full_smoke_and_command_line_values() -> None:
    def picked(resolved: ResolvedCase) -> dict[str, str]:
        keys = (
            "name",
            "question.model.layers",
            "question.model.norm_eps",
            "question.model.rope_base",
            "question.division",
            "question.precision.matmul",
            "question.data.shots",
            "question.data.context",
            "tune.batch_tokens",
            "tune.pad_to",
            "tune.warmup",
            "gate.target",
            "question.seed",
        )
        return {key: resolved.origins[key] for key in keys}

    full = {
        "name": "case",
        "question.model.layers": "case",
        "question.model.norm_eps": "case",
        "question.model.rope_base": "default",
        "question.division": "case",
        "question.precision.matmul": "preset bf16 (case)",
        "question.data.shots": "case",
        "question.data.context": "case",
        "tune.batch_tokens": "auto (case)",
        "tune.pad_to": "default",
        "tune.warmup": "default",
        "gate.target": "case",
        "question.seed": "default",
    }
    assert picked(resolve_case(NAME)) == full
    smoke = "case, size smoke"
    assert picked(resolve_case(NAME, "smoke")) == full | {
        "question.model.layers": smoke,
        "question.precision.matmul": f"preset fp32 ({smoke})",
        "question.data.context": smoke,
        "tune.batch_tokens": smoke,
        "tune.warmup": smoke,
    }
    changed = resolve_case(NAME, "full", "fp16", "open", ["tune.pad_to=8", "question.seed=1"])
    assert picked(changed) == full | {
        "question.division": "command line",
        "question.precision.matmul": "preset fp16 (command line)",
        "tune.pad_to": "command line",
        "question.seed": "command line",
    }


def test_every_value_has_an_origin() -> None:
    resolved = resolve_case(NAME, "smoke", settings=["tune.env.NCCL_ALGO=Ring"])

    def leaves(table: dict[str, Any], prefix: str = "") -> list[str]:
        keys = []
        for key, value in table.items():
            keys += (
                leaves(value, f"{prefix}{key}.")
                if isinstance(value, dict) and value
                else [f"{prefix}{key}"]
            )
        return keys

    assert set(leaves(resolved.case.model_dump(mode="json"))) <= set(resolved.origins)


# The key: equal where results can be compared, and only there.
