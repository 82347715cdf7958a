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
PASSAGE_ROWS = [[1, 5, 9, 200, 7, 0], [1, 250, 0], [1, 3, 3, 3, 17, 99, 100, 0], [1, 4, 0]]
LAST_WORD_LENGTHS = [2, 1, 3, 1]
TEXTS = LambadaTexts(
    rows=PASSAGE_ROWS, groups=[0, 1, 2, 3], index=[0, 1, 2, 3], last=LAST_WORD_LENGTHS
)


class RecordedGroup(TensorParallelGroup):
    """A tensor-parallel group of several ranks in one process: `gather` records what this rank
    sends and returns what `others` hold.
    """

    def __init__(self, share: Shard, other_parts: list[torch.Tensor] | None = None) -> None:
        super().__init__(share)
        object.__setattr__(self, "others", other_parts)
        object.__setattr__(self, "sent", [])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Record the part of this rank; return the parts of all ranks, or its own alone if no
        others are given.
        """
        self.sent.append(part)
        return part[None] if self.others is None else torch.stack(self.others)


def draw_hidden_and_output(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random hidden states of all tokens of all rows, and a random output matrix."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(map(len, PASSAGE_ROWS)), HIDDEN, generator=generator)
    return hidden, torch.randn(VOCAB, HIDDEN, generator=generator)


def score_token_by_token(
    hidden: torch.Tensor, output: torch.Tensor
) -> list[tuple[float, float, int]]:
    """Return for each passage its loss, the loss of its last word, and whether greedy decoding
    finds that word, computed token by token in fp64.
    """
    scores, start = [], 0
    for row, last_length in zip(PASSAGE_ROWS, LAST_WORD_LENGTHS, strict=True):
        logits = hidden[start : start + len(row)].double() @ output.double().T
        losses = [
            float(F.cross_entropy(logits[position], torch.tensor(row[position + 1])))
            for position in range(len(row) - 1)
        ]
        word = range(len(row) - 2 - last_length, len(row) - 2)
        is_hit = all(int(logits[position].argmax()) == row[position + 1] for position in word)
        scores.append((sum(losses), sum(losses[position] for position in word), int(is_hit)))
        start += len(row)
    return scores


def find_likeliest_tokens(hidden: torch.Tensor, output: torch.Tensor) -> list[list[int]]:
    """Return for each passage the likeliest token at each position of its last word."""
    tokens, start = [], 0
    for row, last_length in zip(PASSAGE_ROWS, LAST_WORD_LENGTHS, strict=True):
        best = (hidden[start : start + len(row)].double() @ output.double().T).argmax(-1).tolist()
        tokens.append(best[len(row) - 2 - last_length : len(row) - 2])
        start += len(row)
    return tokens


def find_row_ends() -> np.ndarray:
    """Return the position of each row's last token among all tokens."""
    return np.cumsum([len(row) for row in PASSAGE_ROWS]) - 1


def read_answers(
    group: TensorParallelGroup, hidden: torch.Tensor, output: torch.Tensor, compiled: bool = False
) -> dict:
    """Return the columns of answers that a LossReader gives for all passages on one rank."""
    reader = LossReader(TEXTS, VOCAB, group.share, group.gather, CPU)
    items = [0, 1, 2, 3]
    picked: AnswerRequest = reader.ask(items, find_row_ends(), partial(send_array, device=CPU))
    assert len(picked.pick) == sum(len(row) - 1 for row in PASSAGE_ROWS)
    answers = reader.answer(lambda rows: rows @ output.T, hidden[picked.pick], picked, compiled)
    return reader.to_lists(items, answers)


@pytest.mark.parametrize("chunk", [1, 3, 4096])
def test_losses_equal_a_loop_over_tokens(chunk, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK_TOKENS", chunk)
    hidden, output = draw_hidden_and_output()
    answers = read_answers(TensorParallelGroup(), hidden, output)
    for passage, (nll, last_nll, hit) in enumerate(score_token_by_token(hidden, output)):
        assert answers["nll"][passage] == pytest.approx(nll, abs=1e-5)
        assert answers["last_nll"][passage] == pytest.approx(last_nll, abs=1e-5)
        assert answers["hit"][passage] == hit
    assert answers["argmax"] == find_likeliest_tokens(hidden, output)
    assert answers["items"] == [0, 1, 2, 3]


def test_a_last_word_is_hit_only_if_all_its_tokens_are():
    """The likeliest next token is right everywhere, then wrong at one token of a last word of
    three.
    """
    hidden = torch.zeros(sum(map(len, PASSAGE_ROWS)), VOCAB)
    start = 0
    for row in PASSAGE_ROWS:
        for position in range(len(row) - 1):
            hidden[start + position, row[position + 1]] = 5.0
        start += len(row)
    output = torch.eye(VOCAB)
    assert read_answers(TensorParallelGroup(), hidden, output)["hit"] == [1, 1, 1, 1]
    third_row = len(PASSAGE_ROWS[0]) + len(PASSAGE_ROWS[1])
    for offset, hits in (
        (2, [1, 1, 1, 1]),
        (3, [1, 1, 0, 1]),
        (5, [1, 1, 0, 1]),
        (6, [1, 1, 1, 1]),
    ):
        changed = hidden.clone()
        changed[third_row + offset, 8] = 6.0  # positions 3 to 5 predict the last word, 6 ends
        assert read_answers(TensorParallelGroup(), changed, output)["hit"] == hits, offset


def test_of_equal_logits_the_first_token_is_likeliest():
    hidden = torch.ones(sum(map(len, PASSAGE_ROWS)), HIDDEN)
    output = torch.ones(VOCAB, HIDDEN)
    assert read_answers(TensorParallelGroup(), hidden, output)["hit"] == [0, 0, 0, 0]


def test_likeliest_tokens_of_very_long_words_are_left_out(monkeypatch):
    monkeypatch.setattr(readers, "MAX_WORD_TOKENS", max(LAST_WORD_LENGTHS) - 1)
    hidden, output = draw_hidden_and_output()
    without_tokens = read_answers(TensorParallelGroup(), hidden, output)
    assert list(without_tokens) == ["items", "nll", "last_nll", "hit"]
    monkeypatch.setattr(readers, "MAX_WORD_TOKENS", max(LAST_WORD_LENGTHS))
    with_tokens = read_answers(TensorParallelGroup(), hidden, output)
    assert {
        name: column for name, column in with_tokens.items() if name != "argmax"
    } == without_tokens
    assert with_tokens["argmax"] == find_likeliest_tokens(hidden, output)


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
def test_a_vocabulary_divided_over_ranks_gives_the_same_answers(count):
    hidden, output = draw_hidden_and_output(1)
    expected = read_answers(TensorParallelGroup(), hidden, output)
    rows = count_vocab_rows(VOCAB, count)
    assert rows * count > VOCAB  # the last rank's rows are padded
    # padding rows whose logits would be the highest if they counted
    padded = torch.full((rows * count, HIDDEN), 100.0)
    padded[:VOCAB] = output
    gathered = []
    for rank in range(count):
        group = RecordedGroup(Shard(rank, count))
        read_answers(group, hidden, padded[rank * rows : (rank + 1) * rows])
        gathered += group.sent
    for rank in range(count):
        answers = read_answers(
            RecordedGroup(Shard(rank, count), gathered),
            hidden,
            padded[rank * rows : (rank + 1) * rows],
        )
        assert (answers["hit"], answers["argmax"]) == (expected["hit"], expected["argmax"])
        assert answers["nll"] == pytest.approx(expected["nll"], abs=1e-5)
        assert answers["last_nll"] == pytest.approx(expected["last_nll"], abs=1e-5)


def test_a_logit_that_is_not_finite_affects_only_its_passage():
    hidden, output = draw_hidden_and_output(2)
    hidden[7] = torch.nan  # a token of the second passage
    answers = read_answers(TensorParallelGroup(), hidden, output)
    assert [value == value for value in answers["nll"]] == [True, False, True, True]
    assert all(0 <= token < VOCAB for word in answers["argmax"] for token in word)


def test_choices_are_over_the_full_vocabulary_without_padding():
    from steelyard.tasks.questions import Prompts

    texts = Prompts([[1], [1]], [0, 0], [0, 1], [0, 0], [0, 0], ["s"], [5, 6, 7, 8], 0)
    hidden, output = draw_hidden_and_output(3)
    hidden = hidden[:2]
    full_reader = readers.ChoiceReader(texts, VOCAB, Shard(), TensorParallelGroup().gather, CPU)
    picked = full_reader.ask([0, 1], np.array([0, 1]), partial(send_array, device=CPU))
    expected = full_reader.answer(lambda rows: rows @ output.T, hidden, picked, False)
    rows = count_vocab_rows(VOCAB, 2)
    padded = torch.full((rows * 2, HIDDEN), 100.0)
    padded[:VOCAB] = output
    rank_logits = [hidden @ padded[rank * rows : (rank + 1) * rows].T for rank in range(2)]
    for rank in range(2):
        rank_reader = readers.ChoiceReader(
            texts, VOCAB, Shard(rank, 2), RecordedGroup(Shard(rank, 2), rank_logits).gather, CPU
        )
        answers = rank_reader.answer(
            lambda x, rank=rank: x @ padded[rank * rows : (rank + 1) * rows].T,
            hidden,
            picked,
            False,
        )
        assert torch.equal(answers, expected)
    assert expected[:, 0].tolist() == (hidden @ output.T).argmax(-1).tolist()


@pytest.mark.full
def test_compiled_losses_equal_eager_ones(one_thread):
    hidden, output = draw_hidden_and_output(4)
    eager, compiled_answers = (
        read_answers(TensorParallelGroup(), hidden, output, compiled) for compiled in (False, True)
    )
    assert compiled_answers["hit"] == eager["hit"]
    assert compiled_answers["nll"] == pytest.approx(eager["nll"], abs=1e-5)
