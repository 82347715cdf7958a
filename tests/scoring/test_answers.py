"""Test the answers read from hidden states against the same scores computed token by token."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.models.llama_placements import Shard, count_vocab_rows
from steelyard.models.tensors import send_array
from steelyard.scoring import answers as readers
from steelyard.scoring.answers import AnswerRequest, LossReader
from steelyard.tasks.lambada.data import LambadaTexts

CPU = torch.device("cpu")
VOCAB, HIDDEN = 251, 16
ROWS = [[1, 5, 9, 200, 7, 0], [1, 250, 0], [1, 3, 3, 3, 17, 99, 100, 0], [1, 4, 0]]
LAST = [2, 1, 3, 1]
TEXTS = LambadaTexts(rows=ROWS, groups=[0, 1, 2, 3], index=[0, 1, 2, 3], last=LAST)


class Recorded(TensorParallelGroup):
    """A tensor-parallel group of several ranks in one process: `gather` records what this rank
    sends and returns what `others` hold.
    """

    def __init__(self, share: Shard, others: list[torch.Tensor] | None = None) -> None:
        super().__init__(share)
        object.__setattr__(self, "others", others)
        object.__setattr__(self, "sent", [])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Record the part of this rank; return the parts of all ranks, or its own alone if no
        others are given.
        """
        self.sent.append(part)
        return part[None] if self.others is None else torch.stack(self.others)


def logits_of(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random hidden states of all tokens of all rows, and a random output matrix."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(map(len, ROWS)), HIDDEN, generator=generator)
    return hidden, torch.randn(VOCAB, HIDDEN, generator=generator)


def literal(hidden: torch.Tensor, output: torch.Tensor) -> list[tuple[float, float, int]]:
    """Return for each passage its loss, the loss of its last word, and whether greedy decoding
    finds that word, computed token by token in fp64.
    """
    out, at = [], 0
    for row, last in zip(ROWS, LAST, strict=True):
        logits = hidden[at : at + len(row)].double() @ output.double().T
        losses = [
            float(F.cross_entropy(logits[i], torch.tensor(row[i + 1]))) for i in range(len(row) - 1)
        ]
        word = range(len(row) - 2 - last, len(row) - 2)
        right = all(int(logits[i].argmax()) == row[i + 1] for i in word)
        out.append((sum(losses), sum(losses[i] for i in word), int(right)))
        at += len(row)
    return out


def likeliest(hidden: torch.Tensor, output: torch.Tensor) -> list[list[int]]:
    """Return for each passage the likeliest token at each position of its last word."""
    out, at = [], 0
    for row, last in zip(ROWS, LAST, strict=True):
        best = (hidden[at : at + len(row)].double() @ output.double().T).argmax(-1).tolist()
        out.append(best[len(row) - 2 - last : len(row) - 2])
        at += len(row)
    return out


def ends() -> np.ndarray:
    """Return the position of each row's last token among all tokens."""
    return np.cumsum([len(row) for row in ROWS]) - 1


def answered(
    group: TensorParallelGroup, hidden: torch.Tensor, output: torch.Tensor, compiled: bool = False
) -> dict:
    """Return the columns of answers that a LossReader gives for all passages on one rank."""
    reader = LossReader(TEXTS, VOCAB, group.share, group.gather, CPU)
    items = [0, 1, 2, 3]
    asked: AnswerRequest = reader.ask(items, ends(), partial(send_array, device=CPU))
    assert len(asked.pick) == sum(len(row) - 1 for row in ROWS)
    answers = reader.answer(lambda rows: rows @ output.T, hidden[asked.pick], asked, compiled)
    return reader.to_lists(items, answers)


@pytest.mark.parametrize("chunk", [1, 3, 4096])
def test_losses_equal_the_long_way(chunk, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_TOKENS", chunk)
    hidden, output = logits_of()
    found = answered(TensorParallelGroup(), hidden, output)
    for i, (nll, last, hit) in enumerate(literal(hidden, output)):
        assert found["nll"][i] == pytest.approx(nll, abs=1e-5)
        assert found["last_nll"][i] == pytest.approx(last, abs=1e-5)
        assert found["hit"][i] == hit
    assert found["argmax"] == likeliest(hidden, output)
    assert found["items"] == [0, 1, 2, 3]


def test_a_word_is_hit_only_whole():
    """The likeliest next token is right everywhere, then wrong at one token of a last word of
    three.
    """
    hidden = torch.zeros(sum(map(len, ROWS)), VOCAB)
    at = 0
    for row in ROWS:
        for i in range(len(row) - 1):
            hidden[at + i, row[i + 1]] = 5.0
        at += len(row)
    output = torch.eye(VOCAB)
    assert answered(TensorParallelGroup(), hidden, output)["hit"] == [1, 1, 1, 1]
    begin = len(ROWS[0]) + len(ROWS[1])
    for place, hits in ((2, [1, 1, 1, 1]), (3, [1, 1, 0, 1]), (5, [1, 1, 0, 1]), (6, [1, 1, 1, 1])):
        wrong = hidden.clone()
        wrong[begin + place, 8] = 6.0  # positions 3 to 5 predict the last word, 6 ends
        assert answered(TensorParallelGroup(), wrong, output)["hit"] == hits, place


def test_of_equal_logits_the_first_wins_as_argmax_has_it():
    hidden = torch.ones(sum(map(len, ROWS)), HIDDEN)
    output = torch.ones(VOCAB, HIDDEN)
    assert answered(TensorParallelGroup(), hidden, output)["hit"] == [0, 0, 0, 0]


def test_likeliest_tokens_of_very_long_words_are_not_kept(monkeypatch):
    monkeypatch.setattr(readers, "MAX_WORD_TOKENS", max(LAST) - 1)
    hidden, output = logits_of()
    found = answered(TensorParallelGroup(), hidden, output)
    assert list(found) == ["items", "nll", "last_nll", "hit"]
    monkeypatch.setattr(readers, "MAX_WORD_TOKENS", max(LAST))
    kept = answered(TensorParallelGroup(), hidden, output)
    assert {name: column for name, column in kept.items() if name != "argmax"} == found
    assert kept["argmax"] == likeliest(hidden, output)


def test_a_rank_without_passages_has_no_answers():
    reader = LossReader(
        TEXTS, VOCAB, TensorParallelGroup().share, TensorParallelGroup().gather, CPU
    )
    assert reader.to_lists([], torch.zeros(0)) == {
        "items": [],
        "nll": [],
        "last_nll": [],
        "hit": [],
        "argmax": [],
    }


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_divided_vocabulary_gives_the_same(count):
    hidden, output = logits_of(1)
    whole = answered(TensorParallelGroup(), hidden, output)
    rows = count_vocab_rows(VOCAB, count)
    assert rows * count > VOCAB  # the last rank's rows are padded
    # padding rows whose logits would be the highest if they counted
    padded = torch.full((rows * count, HIDDEN), 100.0)
    padded[:VOCAB] = output
    parts = []
    for i in range(count):
        group = Recorded(Shard(i, count))
        answered(group, hidden, padded[i * rows : (i + 1) * rows])
        parts += group.sent
    for i in range(count):
        found = answered(
            Recorded(Shard(i, count), parts), hidden, padded[i * rows : (i + 1) * rows]
        )
        assert (found["hit"], found["argmax"]) == (whole["hit"], whole["argmax"])
        assert found["nll"] == pytest.approx(whole["nll"], abs=1e-5)
        assert found["last_nll"] == pytest.approx(whole["last_nll"], abs=1e-5)


def test_a_logit_that_is_not_finite_spoils_its_own_passage_alone():
    hidden, output = logits_of(2)
    hidden[7] = torch.nan  # a token of the second passage
    found = answered(TensorParallelGroup(), hidden, output)
    assert [value == value for value in found["nll"]] == [True, False, True, True]
    assert all(0 <= token < VOCAB for word in found["argmax"] for token in word)


def test_choices_see_the_whole_vocabulary_and_no_padding():
    from steelyard.tasks.questions import Prompts

    texts = Prompts([[1], [1]], [0, 0], [0, 1], [0, 0], [0, 0], ["s"], [5, 6, 7, 8], 0)
    hidden, output = logits_of(3)
    hidden = hidden[:2]
    whole = readers.ChoiceReader(texts, VOCAB, Shard(), TensorParallelGroup().gather, CPU)
    asked = whole.ask([0, 1], np.array([0, 1]), partial(send_array, device=CPU))
    alone = whole.answer(lambda rows: rows @ output.T, hidden, asked, False)
    rows = count_vocab_rows(VOCAB, 2)
    padded = torch.full((rows * 2, HIDDEN), 100.0)
    padded[:VOCAB] = output
    parts = [hidden @ padded[i * rows : (i + 1) * rows].T for i in range(2)]
    for i in range(2):
        shared = readers.ChoiceReader(
            texts, VOCAB, Shard(i, 2), Recorded(Shard(i, 2), parts).gather, CPU
        )
        again = shared.answer(
            lambda x, i=i: x @ padded[i * rows : (i + 1) * rows].T, hidden, asked, False
        )
        assert torch.equal(again, alone)
    assert alone[:, 0].tolist() == (hidden @ output.T).argmax(-1).tolist()


@pytest.mark.full
def test_compiled_losses_are_the_same(one_thread):
    hidden, output = logits_of(4)
    plain, fused = (
        answered(TensorParallelGroup(), hidden, output, compiled) for compiled in (False, True)
    )
    assert fused["hit"] == plain["hit"]
    assert fused["nll"] == pytest.approx(plain["nll"], abs=1e-5)
