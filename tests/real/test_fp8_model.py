"""Test a small real model in emulated fp8 beside bf16: how far losses and chosen letters differ.
docs/results.md has the figures of larger samples.
"""

from pathlib import Path
from typing import Any

import pytest

from fixtures.real_runs import make_set_options, read_model_settings, run_shipped_case

pytestmark = pytest.mark.long

QUICK_SETTINGS = [
    "tune.compile=false",
    "tune.warmup=0",
    "tune.batch_tokens=2048",
    "max_interval=100",
]


def run_bf16_and_fp8(
    folder: Path, model: Path, data: Path, case: str, sample: int, settings: list[str]
) -> list[dict[str, Any]]:
    """Run a case in bf16 and in fp8 and return both records."""
    paths_and_scope = [
        "--weights",
        str(model),
        "--data",
        str(data),
        "--sample",
        str(sample),
        "--passes",
        "infer",
    ]
    set_options = make_set_options([*read_model_settings(model), *QUICK_SETTINGS, *settings])
    return [
        run_shipped_case(
            folder, *paths_and_scope, *set_options, "--precision", precision, case=case
        )
        for precision in ("bf16", "fp8")
    ]


def test_fp8_losses_of_passages_are_near_bf16(
    smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    data = data_dir / "lambada" / "lambada_test.jsonl"
    bf16, fp8 = run_bf16_and_fp8(
        tmp_path, smollm2, data, "aquila2-34b-lambada", 40, ["question.seed=33"]
    )
    losses = [record["metrics"]["loss"]["value"] for record in (bf16, fp8)]
    assert 0.005 < abs(losses[1] - losses[0]) < 0.1  # fp8 rounds differently, the model is the same
    differences = [
        abs(bf16_nll - fp8_nll) / targets
        for bf16_nll, fp8_nll, targets in zip(
            bf16["outputs"]["passes"]["infer"]["nll"],
            fp8["outputs"]["passes"]["infer"]["nll"],
            bf16["outputs"]["targets"],
            strict=True,
        )
    ]
    assert max(differences) < 0.25


def test_fp8_changes_few_letters_of_questions(
    smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    """A model of this size often has two letters with nearly equal logits, so some choices
    change.
    """
    data = data_dir / "mmlu" / "mmlu_data.tar.gz"
    settings = ["question.seed=33", "question.data.context=320"]
    bf16, fp8 = (
        record["outputs"]
        for record in run_bf16_and_fp8(tmp_path, smollm2, data, "llama2-7b-mmlu", 16, settings)
    )
    letters = [record["passes"]["infer"]["choices"] for record in (bf16, fp8)]
    assert len(letters[0]) == 16
    assert (
        sum(bf16_letter != fp8_letter for bf16_letter, fp8_letter in zip(*letters, strict=True))
        <= 5
    )
