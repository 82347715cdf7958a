"""Tests of how far generated tokens are from the likeliest ones: by hand, over shards, and of what
transformers itself generated.
"""

from contextlib import nullcontext
from functools import partial
from math import inf, nan
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.engine import engine_rows
from steelyard.engine.job import Job
from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.models.llama_placements import Shard
from steelyard.models.tensors import send_array
from steelyard.plan import degrees
from steelyard.run.answer_check import AnsweredTexts, make_check_job
from steelyard.scoring import answers as readers
from steelyard.scoring.answers import DistanceReader
from steelyard.tasks.generate.answers import GenerateOutputs, check_answers, merge_answers

CPU = torch.device("cpu")
VOCAB = 5
# Two prompts, of two tokens and of one, with three and two generated behind them.
TEXTS = AnsweredTexts(numbers=[7, 3], rows=[[0, 1, 2, 3, 4], [4, 0, 1]], prompt_lens=[2, 1])
# The logits at each token of both rows. Those before a generated token, with its own marked:
LOGITS = [
    [9.0, 9.0, 9.0, 9.0, 9.0],
    [0.5, 1.0, 3.0, 2.0, -1.0],  # 2: the likeliest
    [0.5, 1.0, 3.0, 2.25, -1.0],  # 3: 0.75 below
    [0.5, 4.0, 3.0, 2.0, 2.5],  # 4: 1.5 below
    [9.0, 9.0, 9.0, 9.0, 9.0],
    [6.0, 6.0, -2.0, 1.0, 0.0],  # 0: as likely as another
    [0.0, -3.0, -5.0, -6.0, -3.5],  # 1: 3 below
    [9.0, 9.0, 9.0, 9.0, 9.0],
]
ENDS = np.array([4, 7])
BY_HAND = {"numbers": [3, 7], "compared": [2, 3], "exact": [1, 1], "largest": [3.0, 1.5]}


def read(
    logits: torch.Tensor,
    texts: AnsweredTexts = TEXTS,
    shard: Shard | None = None,
    gather: Any = None,
    ends: np.ndarray = ENDS,
) -> dict[str, Any]:
    """Return what a reader says of the rows whose logits are given: hidden states that are the
    logits themselves.
    """
    group = TensorParallelGroup()
    reader = DistanceReader(texts, VOCAB, shard or group.share, gather or group.gather, CPU)
    items = list(range(len(texts.rows)))
    request = reader.ask(items, ends, partial(send_array, device=CPU))
    answers = reader.answer(lambda rows: rows, logits[request.pick], request, False)
    return reader.to_lists(items, answers)


@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_distances_are_those_by_hand(chunk, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_TOKENS", chunk)
    assert read(torch.tensor(LOGITS)) == BY_HAND


def test_low_precision_logits_are_compared_as_they_are():
    assert read(torch.tensor(LOGITS, dtype=torch.bfloat16)) == BY_HAND


def test_padding_of_the_vocabulary_is_no_token():
    padded = torch.full((len(LOGITS), 8), 100.0)
    padded[:, :VOCAB] = torch.tensor(LOGITS)
    assert read(padded) == BY_HAND


@pytest.mark.parametrize(
    ("token", "value", "exact", "largest"),
    [
        # the row of number 7: its second generated token
        (3, nan, 1, None),  # that of the generated token
        (0, nan, 1, None),  # another
        (1, inf, 1, None),
        (3, inf, 1, None),  # inf less inf is no number
        (3, -inf, 1, None),
        (0, -inf, 1, 1.5),  # an impossible token that was not generated
    ],
)
def test_logits_that_are_not_finite_affect_only_their_row(token, value, exact, largest):
    logits = torch.tensor(LOGITS)
    logits[2, token] = value
    expected = BY_HAND | {"exact": [1, exact], "largest": [3.0, largest]}
    assert read(logits) == expected


def test_a_row_without_any_finite_logit_is_not_exact():
    logits = torch.full((len(LOGITS), VOCAB), nan)
    expected = {"numbers": [3, 7], "compared": [2, 3], "exact": [0, 0], "largest": [None, None]}
    assert read(logits) == expected
    logits = torch.full((len(LOGITS), VOCAB), -inf)
    assert read(logits) == expected


def test_a_token_beyond_the_vocabulary_is_infinitely_far():
    texts = AnsweredTexts(numbers=[1], rows=[[0, 1, 4]], prompt_lens=[1])
    reader_vocab = torch.tensor(LOGITS)[:, :4]  # four real tokens: 4 is none
    group = TensorParallelGroup()
    reader = DistanceReader(texts, 4, group.share, group.gather, CPU)
    request = reader.ask([0], np.array([2]), partial(send_array, device=CPU))
    answers = reader.answer(lambda rows: rows, reader_vocab[request.pick], request, False)
    assert reader.to_lists([0], answers)["largest"] == [None]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_vocabulary_divided_over_ranks_gives_the_same_distances(count):
    """Even where the last ranks have no real column at all."""
    rows = -(-VOCAB // count)
    padded = torch.full((len(LOGITS), rows * count), 100.0)
    padded[:, :VOCAB] = torch.tensor(LOGITS)
    parts: list[torch.Tensor] = []

    def send(part: torch.Tensor) -> torch.Tensor:
        parts.append(part)
        return part[None]

    for rank in range(count):
        read(padded[:, rank * rows : (rank + 1) * rows], shard=Shard(rank, count), gather=send)
    assert {part.shape for part in parts} == {(4, 5)}  # four numbers a token, never the logits
    for rank in range(count):
        columns = read(
            padded[:, rank * rows : (rank + 1) * rows],
            shard=Shard(rank, count),
            gather=lambda part: torch.stack(parts),
        )
        assert columns == BY_HAND


def test_a_nan_in_any_shard_is_seen():
    for rank in range(2):
        parts = [torch.zeros(4, 5), torch.zeros(4, 5)]
        parts[rank][2, 0] = nan  # the highest logit of this shard
        columns = read(
            torch.tensor(LOGITS)[:, :3],
            shard=Shard(0, 2),
            gather=lambda part, parts=parts: torch.stack(parts),
        )
        assert columns["largest"] == [0.0, None]
        assert columns["exact"] == [2, 2]


def test_distances_are_what_the_task_keeps():
    columns = check_answers(read(torch.tensor(LOGITS)), GenerateOutputs())
    assert columns == BY_HAND
    outputs = merge_answers(GenerateOutputs(), "check", [columns])
    assert outputs.passes["check"].model_dump() == BY_HAND


# What transformers generates is what it finds likeliest.


def make_job(settings: list[str]) -> Job:
    """Return the job of a tiny model that generates, on one CPU."""
    case = resolve.resolve_case("llama3-8b-generate", "smoke", settings=settings).case
    plan = degrees.make_single_plan()
    return Job(
        case=case,
        work="generate",
        inputs=None,
        weights=None,
        device=CpuTorchDevice(0, monotonic),
        rank=0,
        world=1,
        plan=plan,
        place=degrees.find_position(plan, 0),
        group=TensorParallelGroup(),
        steps=None,
    )


def score_again(job: Job, texts: AnsweredTexts, engine: str) -> dict[str, Any]:
    """Return how far answers are from the likeliest tokens, as a reference engine finds."""
    job = make_check_job(job, "check_answers")
    job = Job(**(vars(job) | {"inputs": texts}))
    checker: Any = engine_rows.load_engine(engine, "check_answers")(job)
    checker.prepare("check", lambda part: nullcontext())
    for _ in checker.work("check"):
        pass
    return checker.outputs("check")


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_tokens_of_generate_are_all_exact(engine, kv_heads, one_thread):
    """In fp32, greedily, from prompts of different lengths; one changed token is found."""
    from steelyard.engines.transformers.score import TransformersScorer

    job = make_job([f"question.model.kv_heads={kv_heads}"])
    scorer = TransformersScorer(job)
    scorer.load()
    model = scorer.model.model
    generator = torch.Generator().manual_seed(5)
    texts = AnsweredTexts()
    for number, length in enumerate((9, 17, 30)):
        prompt = torch.randint(10, 512, (1, length), generator=generator)
        row = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12,
            eos_token_id=-1, pad_token_id=0,
        )[0].tolist()  # fmt: skip
        assert len(row) == length + 12
        texts.numbers.append(number)
        texts.rows.append(row)
        texts.prompt_lens.append(length)
    columns = score_again(job, texts, engine)
    expected = {"numbers": [0, 1, 2], "compared": [12] * 3, "exact": [12] * 3, "largest": [0.0] * 3}
    assert columns == expected
    texts.rows[1][-1] = (texts.rows[1][-1] + 1) % 512
    columns = score_again(job, texts, engine)
    assert columns["exact"] == [12, 11, 12]
    assert columns["largest"][1] > 0
    assert columns["largest"][0] == columns["largest"][2] == 0
