"""Answers: what is read off the model's last hidden states, the same for every scoring engine, with
one reader per kind of work.

For every batch a reader is told where the last token of each item is. It says at which tokens
logits are needed, and computes the answers from them on the device, where they stay until the pass
is over. `ScoringLoop` (loop.py) calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steelyard.data.texts import ChoicePrompts, GeneratedTexts, PassageTexts
from steelyard.kernels import jit
from steelyard.kernels.token_loss import reduce_logits, triton_reduce_logits
from steelyard.models.llama_placements import Shard

Ids = NDArray[np.int64]
ComputeLogits = Callable[[Tensor], Tensor]  # hidden states to logits of this vocabulary shard
SendArray = Callable[[Ids], Tensor]
GatherShards = Callable[[Tensor], Tensor]  # the tensors of all shards of a model, stacked

CHUNK_TOKENS = 4096  # tokens whose logits are in memory at one time
# tokens of a last word: for longer ones, which no language has, no likeliest tokens are recorded
MAX_WORD_TOKENS = 64


@dataclass(frozen=True)
class AnswerRequest:
    """Where in a batch logits are needed, and what the answers are computed with; all on the
    device. `pick` are indices of tokens in the batch's rows laid end to end; `reader_inputs` are
    tensors that only the reader that made the request understands (none for multiple choice). Made
    by a reader's `ask`, passed to its `answer`.
    """

    pick: Tensor
    reader_inputs: tuple[Tensor, ...] = ()


class AnswerReader(Protocol):
    """Computes the answers to a kind of work from hidden states (a protocol); an `item` is the
    index of a prompt or passage. `READERS` has a class by kind of work: `ChoiceReader`,
    `LossReader` and `DistanceReader`.

    `ask(items, ends, send)` returns an `AnswerRequest`, where logits are needed in a batch;
    `answer(compute_logits, hidden, request, compiled)` returns a tensor on the device with one row
    per item, and ranks of all shards call it together; `to_lists(items, answers)` turns a pass's
    answers on the host into lists by column name, as the record stores them.
    """

    def ask(self, items: list[int], ends: Ids, send: SendArray) -> AnswerRequest:
        """Return where logits are needed in a batch in which the last token of each item is at
        index `ends`. `send` copies an array to the device.
        """

    def answer(
        self, compute_logits: ComputeLogits, hidden: Tensor, request: AnswerRequest, compiled: bool
    ) -> Tensor:
        """Return the answers, one row per item, on the device. `hidden` are the hidden states at
        the picked tokens, `compute_logits` turns them into logits of this rank's part of the
        vocabulary. All ranks that hold one model call it together.
        """

    def to_lists(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        """Return the answers of a pass as lists by column name, as they stand in the record;
        `answers` is on the host.
        """


class ChoiceReader:
    """Reads multiple choice (an `AnswerReader` for work `score_choices`) at each prompt's last
    token: `answer` returns int64 [items, 3]: the likeliest token of the vocabulary, the likeliest
    of the answer letters as its index in `letters` (from 0, not a token id), and 1 if all logits
    are finite, else 0. Ranks of all shards of a model call it together. `to_lists` returns the
    columns `items`, `best`, `choice` and `finite`.

    `letters` are the answers' token ids on the device, `gather` stacks the logits of all shards of
    the vocabulary; `shard` is not used.
    """

    def __init__(
        self,
        texts: ChoicePrompts,
        vocab: int,
        shard: Shard,
        gather: GatherShards,
        device: torch.device,
    ) -> None:
        self.letters = torch.tensor(texts.letters, device=device)
        self.vocab = vocab
        self.gather = gather

    def ask(self, items: list[int], ends: Ids, send: SendArray) -> AnswerRequest:
        """Return a request for the logits of each prompt's last token (`ends`, copied by `send`),
        without further inputs. `items` is not used.
        """
        return AnswerRequest(send(ends))

    def answer(
        self, compute_logits: ComputeLogits, hidden: Tensor, request: AnswerRequest, compiled: bool
    ) -> Tensor:
        """Return int64 [items, 3]: likeliest token, likeliest letter (index from 0, as in
        `letters`), 1 if all logits are finite, else 0. Logits are gathered from all shards of the
        vocabulary, whose ranks call it together. `compiled` has no effect.
        """
        logits = torch.cat(self.gather(compute_logits(hidden)).unbind(0), dim=-1)[:, : self.vocab]
        best = logits.argmax(-1)
        choice = logits[:, self.letters].argmax(-1)
        finite = torch.isfinite(logits).all(-1)
        return torch.stack((best, choice, finite.to(best.dtype)), dim=1)

    def to_lists(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        """Return the columns `items`, `best` (token), `choice` (index of the letter) and `finite`
        (1 or 0) as lists, from answers [items, 3].
        """
        best, choice, finite = answers.reshape(-1, 3).long().unbind(1)
        return {
            "items": items,
            "best": best.tolist(),
            "choice": choice.tolist(),
            "finite": finite.tolist(),
        }


class LossReader:
    """Reads passages (an `AnswerReader` for work `score_texts`): `answer` returns fp64 [items, 3 +
    argmax_columns]: the negative log-likelihood in nats of all tokens after the first, and of the
    last word's; 1 if each token of the last word is the likeliest, else 0; and which tokens are
    likeliest there. `to_lists` returns the columns `items`, `nll`, `last_nll`, `hit` and `argmax`,
    this last not if `argmax_columns` is 0 (a last word of more than 64 tokens).

    Logits stay divided over the shards of a model; only four numbers a token (`reduce_logits`) are
    gathered by `gather`. `shard` is this rank's part of the vocabulary.
    """

    def __init__(
        self,
        texts: PassageTexts,
        vocab: int,
        shard: Shard,
        gather: GatherShards,
        device: torch.device,
    ) -> None:
        """Store the arguments. The likeliest tokens of last words are returned, in `argmax_columns`
        columns, only if none of these words has more than `MAX_WORD_TOKENS` tokens.
        """
        self.texts = texts
        self.vocab = vocab
        self.shard, self.gather = shard, gather
        longest = max(texts.last, default=1)  # of the last words, in tokens
        self.argmax_columns = (
            longest if longest <= MAX_WORD_TOKENS else 0
        )  # columns of likeliest tokens
        self.fast_reduce: Callable[..., Tensor] | None = None

    def ask(self, items: list[int], ends: Ids, send: SendArray) -> AnswerRequest:
        """Ask for the logits of all tokens of each passage but the last. `reader_inputs` are the
        targets (next tokens); 1 for targets in the last word, else 0; the number of targets of each
        passage; and [items, argmax_columns] indices of last words' tokens among the targets, a
        shorter word repeating its first. The last target, which ends the text, is no part of the
        last word.
        """
        rows = [self.texts.rows[i] for i in items]
        sizes = np.array([len(row) - 1 for row in rows], dtype=np.int64)
        pick = np.concatenate(
            [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        )
        targets = np.concatenate([np.asarray(row[1:], dtype=np.int64) for row in rows])
        # The last target is what ends the text, and no part of the last word.
        in_last_word = np.concatenate(
            [
                np.arange(size) >= size - 1 - self.texts.last[i]
                for i, size in zip(items, sizes, strict=True)
            ]
        ).astype(np.int64)
        in_last_word[np.cumsum(sizes) - 1] = 0
        # Indices of the last words' tokens among the targets; a shorter word repeats its first
        # token at the end.
        word_lengths = np.array([self.texts.last[i] for i in items], dtype=np.int64)[:, None]
        word_starts = (np.cumsum(sizes) - 1)[:, None] - word_lengths
        offsets = np.arange(self.argmax_columns, dtype=np.int64)[None, :]
        return AnswerRequest(
            send(pick),
            (
                send(targets),
                send(in_last_word),
                send(sizes),
                send(word_starts + np.where(offsets < word_lengths, offsets, 0)),
            ),
        )

    def answer(
        self, compute_logits: ComputeLogits, hidden: Tensor, request: AnswerRequest, compiled: bool
    ) -> Tensor:
        """Return fp64 [items, 3 + argmax_columns]: negative log-likelihood in nats of all targets,
        of the last word's; 1 if every token of the last word is the likeliest, else 0; and the
        likeliest tokens at the last word's places. Logits are computed for at most `CHUNK_TOKENS`
        tokens at a time; with `compiled` they are reduced by a kernel. All ranks that hold one
        model call it together.
        """
        targets, in_last_word, sizes, word_indices = request.reader_inputs
        reduce_shard = self._get_fast_reduce(hidden.device) if compiled else reduce_logits
        parts = _reduce_in_chunks(
            compute_logits, hidden, targets, self.vocab, self.shard, reduce_shard
        )
        nll, hit, best = _merge_shards(self.gather(parts), targets)
        columns = (
            nll,
            torch.where(in_last_word > 0, nll, 0.0),
            torch.where(in_last_word > 0, hit, 1.0),
        )
        reductions = ("sum", "sum", "min")
        per_item = [
            torch.segment_reduce(c, reduction, lengths=sizes)
            for c, reduction in zip(columns, reductions, strict=True)
        ]
        return torch.cat((torch.stack(per_item, dim=1), best[word_indices]), dim=1)

    def _get_fast_reduce(self, device: torch.device) -> Callable[..., Tensor]:
        """Return the fast form of `reduce_logits`, made when first used and kept: the Triton kernel
        if it runs on the device, else torch.compile's. Loading a compiler takes seconds that belong
        to the time of compiling.
        """
        if self.fast_reduce is None:
            self.fast_reduce = (
                triton_reduce_logits
                if jit.has_triton(device)
                else torch.compile(reduce_logits, dynamic=True)
            )
        return self.fast_reduce

    def to_lists(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        """Return as lists the columns `items`, `nll`, `last_nll`, `hit` (1 or 0) and, unless a last
        word is too long, `argmax`: for each item the likeliest tokens at the places of its last
        word, as many as that has.
        """
        rows = answers.reshape(-1, 3 + self.argmax_columns)
        nll, last, hit = rows[:, :3].unbind(1)
        out = {
            "items": items,
            "nll": nll.tolist(),
            "last_nll": last.tolist(),
            "hit": hit.long().tolist(),
        }
        if self.argmax_columns:
            out["argmax"] = [
                best[: self.texts.last[i]]
                for i, best in zip(items, rows[:, 3:].long().tolist(), strict=True)
            ]
        return out


def _reduce_in_chunks(
    compute_logits: ComputeLogits,
    hidden: Tensor,
    targets: Tensor,
    vocab: int,
    shard: Shard,
    reduce_shard: Callable[..., Tensor],
) -> Tensor:
    """Return the four numbers a token (`reduce_logits`) of this rank's part of the vocabulary, fp32
    [4, tokens]. Logits are computed for at most `CHUNK_TOKENS` tokens at a time, and padding of the
    vocabulary is left out.
    """
    parts = []
    chunks = -(-len(targets) // CHUNK_TOKENS)
    for rows, chunk_targets in zip(
        hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True
    ):
        logits = compute_logits(rows)
        first_token = shard.index * logits.shape[-1]
        real_columns = max(0, min(logits.shape[-1], vocab - first_token))
        parts.append(
            reduce_shard(logits[:, :real_columns], chunk_targets - first_token)
            if real_columns
            else _make_empty_part(chunk_targets)
        )
    return torch.cat(parts, dim=1)


def _make_empty_part(targets: Tensor) -> Tensor:
    """Return the four numbers a token (`reduce_logits`), fp32 [4, tokens], of a shard whose part of
    the vocabulary is padding only: all -inf.
    """
    return torch.full((4, len(targets)), -torch.inf, device=targets.device)


def _merge_shards(parts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every target token and in fp64, (its negative log-likelihood, 1.0 if it is the
    likeliest else 0.0, the likeliest token), from all shards' numbers of `reduce_logits` [shards,
    4, tokens]. Of equal logits the first in the vocabulary wins; the token is 0 if no shard has a
    finite highest logit.
    """
    total, target, top, distance = parts.double().unbind(1)
    nll = total.logsumexp(0) - target.max(0).values
    winner = top.argmax(0)  # the first of equal ones: shards are in the vocabulary's order
    offset = distance.gather(0, winner[None])[0]
    # if no shard has a finite highest logit, there is none
    best = torch.where(torch.isfinite(offset), targets + offset, 0.0)
    return nll, (offset == 0).double(), best


class DistanceReader:
    """Reads how far generated tokens are from the likeliest ones: `answer` returns fp64 [items, 3]:
    how many generated tokens an item has, how many of these have the highest logit, and the
    largest difference of a highest logit and that of the generated token, in nats (NaN if a logit
    is not finite). `to_lists` returns the columns `numbers`, `compared`, `exact` and `largest`.

    Logits stay divided over the shards of a model; only four numbers a token are gathered.
    """

    def __init__(
        self,
        texts: GeneratedTexts,
        vocab: int,
        shard: Shard,
        gather: GatherShards,
        device: torch.device,
    ) -> None:
        self.texts, self.vocab, self.shard, self.gather = texts, vocab, shard, gather

    def ask(self, items: list[int], ends: Ids, send: SendArray) -> AnswerRequest:
        """Ask for the logits of the tokens before each generated one; `reader_inputs` are the
        generated tokens and how many of them each item has.
        """
        sizes = [len(self.texts.rows[i]) - self.texts.prompt_lens[i] for i in items]
        pick = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        targets = [
            np.asarray(self.texts.rows[i][self.texts.prompt_lens[i] :], np.int64) for i in items
        ]
        return AnswerRequest(
            send(np.concatenate(pick)),
            (send(np.concatenate(targets)), send(np.array(sizes, np.int64))),
        )

    def answer(
        self, compute_logits: ComputeLogits, hidden: Tensor, request: AnswerRequest, compiled: bool
    ) -> Tensor:
        """Return fp64 [items, 3]: generated tokens, those with the highest logit, and the largest
        distance in nats. Logits are computed for at most `CHUNK_TOKENS` tokens at a time. All ranks
        that hold one model call it together; `compiled` has no effect.
        """
        targets, sizes = request.reader_inputs
        parts = _reduce_in_chunks(
            compute_logits, hidden, targets, self.vocab, self.shard, reduce_logits
        )
        _, target, top, _ = self.gather(parts).double().unbind(1)
        distance = top.max(0).values - target.max(0).values
        columns = (torch.ones_like(distance), (distance == 0).double(), distance)
        per_item = [
            torch.segment_reduce(column, reduction, lengths=sizes)
            for column, reduction in zip(columns, ("sum", "sum", "max"), strict=True)
        ]
        return torch.stack(per_item, dim=1)

    def to_lists(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        """Return the columns `numbers`, `compared`, `exact` and `largest` (None: not finite) as
        lists, in the order of the requests' numbers.
        """
        rows = answers.reshape(-1, 3).tolist()
        table = sorted(zip((self.texts.numbers[i] for i in items), rows, strict=True))
        return {
            "numbers": [number for number, _ in table],
            "compared": [int(row[0]) for _, row in table],
            "exact": [int(row[1]) for _, row in table],
            "largest": [
                row[2] if np.isfinite(row[2]) and row[2] >= 0 else None for _, row in table
            ],
        }


READERS: dict[str, Callable[..., AnswerReader]] = {
    "score_choices": ChoiceReader,
    "score_texts": LossReader,
    "check_answers": DistanceReader,
}


class PassAnswers:
    """The answers of one pass, which stay on the device until it is over, so that reading them
    delays nothing. `add(items, answers)` appends a batch's, `read()` copies all to the host,
    `to_lists(reader)` returns them as lists by column name (RuntimeError before `read`). `items`
    are the prompts or passages answered, in order. Made by `ScoringLoop.work`, once for each pass.
    """

    def __init__(self) -> None:
        self.items: list[int] = []
        self._parts: list[Tensor] = []
        self._read: Tensor | None = None

    def add(self, items: list[int], answers: Tensor) -> None:
        """Append the answers of a batch, one row per item, without copying them to the host."""
        self.items += items
        self._parts.append(answers)

    def read(self) -> None:
        """Copy all answers of the pass to the host for `to_lists`, and let go of those on the
        device; waits for the device. A pass without batches gets an empty tensor.
        """
        self._read = torch.cat(self._parts).cpu() if self._parts else torch.zeros(0)
        self._parts = []

    def to_lists(self, reader: AnswerReader) -> dict[str, Any]:
        """Return the pass's answers as lists by column name, as the reader makes them. Raises
        RuntimeError before `read`.
        """
        if self._read is None:
            raise RuntimeError("answers are missing: the pass did not end")
        return reader.to_lists(self.items, self._read)
