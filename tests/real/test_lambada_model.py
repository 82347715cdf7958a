"""Test a real model on LAMBADA's first passages, from the command line, against a plain loop over
transformers.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.real_runs import make_set_options, read_model_settings, run_shipped_case

pytestmark = pytest.mark.long

PASSAGE_COUNT = 24
PassageScores = tuple[float, float, int, list[int], int]


def read_first_passages(data_dir: Path) -> list[str]:
    """Return the texts of the first PASSAGE_COUNT passages."""
    lines = (data_dir / "lambada" / "lambada_test.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines[:PASSAGE_COUNT]]


@pytest.fixture(scope="module")
def expected(smollm2: Path, data_dir: Path) -> list[PassageScores]:
    """Return for each passage, computed one at a time with transformers: mean loss, loss of the
    last word, whether greedy decoding finds it, its likeliest tokens, and the number of tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    scores = []
    for text in read_first_passages(data_dir):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        context = tokenizer(text.rpartition(" ")[0])["input_ids"]
        batch = torch.tensor([ids])
        with torch.inference_mode():
            output = model(input_ids=batch, labels=batch)
        logits = output.logits[0].double().log_softmax(-1)
        word_positions = range(len(context), len(ids) - 1)
        loss = -sum(float(logits[position - 1, ids[position]]) for position in word_positions)
        best = [int(logits[position - 1].argmax()) for position in word_positions]
        scores.append(
            (
                float(output.loss),
                loss,
                int(best == [ids[position] for position in word_positions]),
                best,
                len(ids),
            )
        )
    return scores


@pytest.fixture(scope="module")
def arguments(smollm2: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options of a run over the first passages."""
    data = tmp_path_factory.mktemp("lambada") / "lambada_test.jsonl"
    data.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in read_first_passages(data_dir))
    )
    settings = [
        *read_model_settings(smollm2),
        f"question.data.rows={PASSAGE_COUNT}",
        "tune.compile=false",
        "tune.warmup=0",
    ]
    settings += ["tune.batch_tokens=2048", "max_interval=100"]
    paths_and_scope = [
        "--weights",
        str(smollm2),
        "--data",
        str(data),
        "--precision",
        "fp32",
        "--passes",
        "infer",
    ]
    return [*paths_and_scope, *make_set_options(settings)]


def test_the_expected_losses_and_hits_vary(expected: list[PassageScores]) -> None:
    """Otherwise comparing a run with these values would show nothing."""
    assert len({round(loss, 4) for loss, *_ in expected}) > 0.95 * PASSAGE_COUNT
    assert 4 < sum(hit for _, _, hit, *_ in expected) < 20


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_real_losses_equal_a_plain_loop(
    engine: str, arguments: list[str], expected: list[PassageScores], tmp_path: Path
) -> None:
    record = run_shipped_case(tmp_path, *arguments, "--engine", engine, case="aquila2-34b-lambada")
    outputs = record["outputs"]
    answers = outputs["passes"]["infer"]
    assert record["data"]["tokens"] == sum(tokens for *_, tokens in expected)
    for passage, (mean, last, _, _, tokens) in enumerate(expected):
        assert outputs["targets"][passage] == tokens - 1
        assert answers["nll"][passage] / (tokens - 1) == pytest.approx(mean, abs=1e-4), passage
        assert answers["last_nll"][passage] == pytest.approx(last, abs=1e-3), passage
    assert answers["argmax"] == [token for _, _, _, best, _ in expected for token in best]
    assert answers["hits"] == "".join(str(hit) for _, _, hit, *_ in expected)
    metrics = record["metrics"]
    assert metrics["loss"]["value"] == pytest.approx(
        sum(mean for mean, *_ in expected) / PASSAGE_COUNT, abs=1e-4
    )
    assert metrics["acc"]["value"] == sum(hit for _, _, hit, *_ in expected) / PASSAGE_COUNT
    mean_last = sum(last for _, last, *_ in expected) / PASSAGE_COUNT
    assert metrics["perplexity_last"]["value"] == pytest.approx(math.exp(mean_last), rel=1e-4)
