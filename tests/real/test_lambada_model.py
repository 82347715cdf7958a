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

from fixtures.real_runs import model_settings, run, sets

pytestmark = pytest.mark.long

PASSAGES = 24
Expected = tuple[float, float, int, list[int], int]


def first_passages(data_dir: Path) -> list[str]:
    """Return the texts of the first PASSAGE_COUNT passages."""
    lines = (data_dir / "lambada" / "lambada_test.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines[:PASSAGES]]


@pytest.fixture(scope="module")
def expected(smollm2: Path, data_dir: Path) -> list[Expected]:
    """Return for each passage, computed one at a time with transformers: mean loss, loss of the
    last word, whether greedy decoding finds it, its likeliest tokens, and the number of tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    out = []
    for text in first_passages(data_dir):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        context = tokenizer(text.rpartition(" ")[0])["input_ids"]
        batch = torch.tensor([ids])
        with torch.inference_mode():
            found = model(input_ids=batch, labels=batch)
        logits = found.logits[0].double().log_softmax(-1)
        word = range(len(context), len(ids) - 1)
        loss = -sum(float(logits[i - 1, ids[i]]) for i in word)
        best = [int(logits[i - 1].argmax()) for i in word]
        out.append((float(found.loss), loss, int(best == [ids[i] for i in word]), best, len(ids)))
    return out


@pytest.fixture(scope="module")
def arguments(smollm2: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options of a run over the first passages."""
    data = tmp_path_factory.mktemp("lambada") / "lambada_test.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in first_passages(data_dir)))
    settings = [
        *model_settings(smollm2),
        f"question.data.rows={PASSAGES}",
        "tune.compile=false",
        "tune.warmup=0",
    ]
    settings += ["tune.batch_tokens=2048", "max_interval=100"]
    places = [
        "--weights",
        str(smollm2),
        "--data",
        str(data),
        "--precision",
        "fp32",
        "--passes",
        "infer",
    ]
    return [*places, *sets(settings)]


def test_the_loop_tells_passages_apart(expected: list[Expected]) -> None:
    """Otherwise comparing a run with these values would show nothing."""
    assert len({round(loss, 4) for loss, *_ in expected}) > 0.95 * PASSAGES
    assert 4 < sum(hit for _, _, hit, *_ in expected) < 20


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_real_losses_equal_a_plain_loop(
    engine: str, arguments: list[str], expected: list[Expected], tmp_path: Path
) -> None:
    record = run(tmp_path, *arguments, "--engine", engine, case="aquila2-34b-lambada")
    outputs = record["outputs"]
    found = outputs["passes"]["infer"]
    assert record["data"]["tokens"] == sum(tokens for *_, tokens in expected)
    for i, (mean, last, _, _, tokens) in enumerate(expected):
        assert outputs["targets"][i] == tokens - 1
        assert found["nll"][i] / (tokens - 1) == pytest.approx(mean, abs=1e-4), i
        assert found["last_nll"][i] == pytest.approx(last, abs=1e-3), i
    assert found["argmax"] == [token for _, _, _, best, _ in expected for token in best]
    assert found["hits"] == "".join(str(hit) for _, _, hit, *_ in expected)
    metrics = record["metrics"]
    assert metrics["loss"]["value"] == pytest.approx(
        sum(mean for mean, *_ in expected) / PASSAGES, abs=1e-4
    )
    assert metrics["acc"]["value"] == sum(hit for _, _, hit, *_ in expected) / PASSAGES
    mean_last = sum(last for _, last, *_ in expected) / PASSAGES
    assert metrics["perplexity_last"]["value"] == pytest.approx(math.exp(mean_last), rel=1e-4)
