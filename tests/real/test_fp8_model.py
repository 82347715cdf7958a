"""Test a small real model in emulated fp8 beside bf16: how far losses and chosen letters differ.
docs/results.md has the figures of larger samples.
"""

from pathlib import Path
from typing import Any

import pytest

from fixtures.real_runs import model_settings, run, sets

pytestmark = pytest.mark.long

LOOSE = ["tune.compile=false", "tune.warmup=0", "tune.batch_tokens=2048", "max_interval=100"]


def both(
    folder: Path, model: Path, data: Path, case: str, sample: int, settings: list[str]
) -> list[dict[str, Any]]:
    """Run a case in bf16 and in fp8 and return both records."""
    places = [
        "--weights",
        str(model),
        "--data",
        str(data),
        "--sample",
        str(sample),
        "--passes",
        "infer",
    ]
    more = sets([*model_settings(model), *LOOSE, *settings])
    return [
        run(folder, *places, *more, "--precision", precision, case=case)
        for precision in ("bf16", "fp8")
    ]


def test_losses_of_passages(smollm2: Path, data_dir: Path, tmp_path: Path) -> None:
    data = data_dir / "lambada" / "lambada_test.jsonl"
    wide, narrow = both(tmp_path, smollm2, data, "aquila2-34b-lambada", 40, ["question.seed=33"])
    loss = [one["metrics"]["loss"]["value"] for one in (wide, narrow)]
    assert 0.005 < abs(loss[1] - loss[0]) < 0.1  # fp8 rounds differently, the model is the same
    each = [
        abs(a - b) / targets
        for a, b, targets in zip(
            wide["outputs"]["passes"]["infer"]["nll"],
            narrow["outputs"]["passes"]["infer"]["nll"],
            wide["outputs"]["targets"],
            strict=True,
        )
    ]
    assert max(each) < 0.25


def test_letters_of_questions(smollm2: Path, data_dir: Path, tmp_path: Path) -> None:
    """A model of this size often has two letters with nearly equal logits, so some choices change."""
    data = data_dir / "mmlu" / "mmlu_data.tar.gz"
    settings = ["question.seed=33", "question.data.context=320"]
    wide, narrow = (
        one["outputs"] for one in both(tmp_path, smollm2, data, "llama2-7b-mmlu", 16, settings)
    )
    letters = [one["passes"]["infer"]["choices"] for one in (wide, narrow)]
    assert len(letters[0]) == 16
    assert sum(a != b for a, b in zip(*letters, strict=True)) <= 5
