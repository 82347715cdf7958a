"""Answers: what is read off the model's last hidden states, the same for every scoring engine. One
reader a kind of work.

A reader is told, for every item of a batch, where its last token stands. It says at which tokens
logits are needed, and makes the answers of them on the device, where they stay until the pass is
over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steelyard.data.texts import Choices, Passages
from steelyard.kernels import jit
from steelyard.kernels.token_loss import read_logits, triton_read_logits
from steelyard.models.placements import Shard

Ids = NDArray[np.int64]
Head = Callable[[Tensor], Tensor]  # hidden states to logits: those of this share of the vocabulary
Send = Callable[[Ids], Tensor]
Gather = Callable[[Tensor], Tensor]  # what every share of a model has, stacked in their order

CHUNK = 4096  # tokens whose logits are there at one time
# tokens of a last word: of longer ones, which no language has, the likeliest tokens are not kept
MOST_WORD = 64


@dataclass(frozen=True)
class Picked:
    """What is asked of a batch, on the device: where logits are needed, and what the answers are
    made with.
    """

    pick: Tensor
    extra: tuple[Tensor, ...] = ()


class Reader(Protocol):
    def ask(self, items: list[int], ends: Ids, send: Send) -> Picked:
        """The question to a batch in which the last token of each item stands at `ends`."""

    def answer(self, head: Head, hidden: Tensor, asked: Picked, compiled: bool) -> Tensor:
        """One row an item, made of the hidden states at the picked tokens."""

    def table(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        """The answers of a pass as plain lists."""


class ChoiceReader:
    """Multiple choice: the likeliest token of all, the likeliest of the four answers, and whether
    every logit is finite.
    """

    def __init__(
        self, texts: Choices, vocab: int, share: Shard, gather: Gather, device: torch.device
    ) -> None:
        self.letters = torch.tensor(texts.letters, device=device)
        self.vocab = vocab
        self.gather = gather

    def ask(self, items: list[int], ends: Ids, send: Send) -> Picked:
        return Picked(send(ends))

    def answer(self, head: Head, hidden: Tensor, asked: Picked, compiled: bool) -> Tensor:
        logits = torch.cat(self.gather(head(hidden)).unbind(0), dim=-1)[:, : self.vocab]
        best = logits.argmax(-1)
        choice = logits[:, self.letters].argmax(-1)
        finite = torch.isfinite(logits).all(-1)
        return torch.stack((best, choice, finite.to(best.dtype)), dim=1)

    def table(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        best, choice, finite = answers.reshape(-1, 3).long().unbind(1)
        return {
            "items": items,
            "best": best.tolist(),
            "choice": choice.tolist(),
            "finite": finite.tolist(),
        }


class LossReader:
    """Passages: the negative log-likelihood of every token after the first, of the last word's
    among them, whether each of these is the likeliest, and which tokens are. Logits stay divided
    over the shares of a model; only four numbers a token are gathered."""

    def __init__(
        self, texts: Passages, vocab: int, share: Shard, gather: Gather, device: torch.device
    ) -> None:
        self.texts = texts
        self.vocab = vocab
        self.share, self.gather = share, gather
        longest = max(texts.last, default=1)  # of the last words, in tokens
        self.kept = longest if longest <= MOST_WORD else 0  # columns of likeliest tokens
        self.fast: Callable[..., Tensor] | None = None

    def ask(self, items: list[int], ends: Ids, send: Send) -> Picked:
        rows = [self.texts.rows[i] for i in items]
        sizes = np.array([len(row) - 1 for row in rows], dtype=np.int64)
        pick = np.concatenate(
            [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        )
        targets = np.concatenate([np.asarray(row[1:], dtype=np.int64) for row in rows])
        # The last target is what ends the text, and no part of the last word.
        word = np.concatenate(
            [
                np.arange(size) >= size - 1 - self.texts.last[i]
                for i, size in zip(items, sizes, strict=True)
            ]
        ).astype(np.int64)
        word[np.cumsum(sizes) - 1] = 0
        # Where the tokens of the last words stand among the targets; a word that is shorter ends
        # with its first again.
        last = np.array([self.texts.last[i] for i in items], dtype=np.int64)[:, None]
        begins = (np.cumsum(sizes) - 1)[:, None] - last
        places = np.arange(self.kept, dtype=np.int64)[None, :]
        return Picked(
            send(pick),
            (
                send(targets),
                send(word),
                send(sizes),
                send(begins + np.where(places < last, places, 0)),
            ),
        )

    def answer(self, head: Head, hidden: Tensor, asked: Picked, compiled: bool) -> Tensor:
        targets, word, sizes, places = asked.extra
        local = self._fast(hidden.device) if compiled else read_logits
        parts = []
        chunks = -(-len(targets) // CHUNK)
        for rows, wanted in zip(
            hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True
        ):
            logits = head(rows)
            first = self.share.index * logits.shape[-1]
            own = max(0, min(logits.shape[-1], self.vocab - first))
            parts.append(local(logits[:, :own], wanted - first) if own else _nothing(wanted))
        nll, hit, best = _merged(self.gather(torch.cat(parts, dim=1)), targets)
        columns = (nll, torch.where(word > 0, nll, 0.0), torch.where(word > 0, hit, 1.0))
        ways = ("sum", "sum", "min")
        made = [
            torch.segment_reduce(c, way, lengths=sizes)
            for c, way in zip(columns, ways, strict=True)
        ]
        return torch.cat((torch.stack(made, dim=1), best[places]), dim=1)

    def _fast(self, device: torch.device) -> Callable[..., Tensor]:
        """A kernel where the device runs one. Compiled where it is first used: loading a compiler
        takes seconds, and they belong to compiling."""
        if self.fast is None:
            self.fast = (
                triton_read_logits
                if jit.serve(device)
                else torch.compile(read_logits, dynamic=True)
            )
        return self.fast

    def table(self, items: list[int], answers: Tensor) -> dict[str, Any]:
        table = answers.reshape(-1, 3 + self.kept)
        nll, last, hit = table[:, :3].unbind(1)
        out = {
            "items": items,
            "nll": nll.tolist(),
            "last_nll": last.tolist(),
            "hit": hit.long().tolist(),
        }
        if self.kept:
            out["argmax"] = [
                best[: self.texts.last[i]]
                for i, best in zip(items, table[:, 3:].long().tolist(), strict=True)
            ]
        return out


def _nothing(targets: Tensor) -> Tensor:
    """The part of a share that holds padding alone."""
    return torch.full((4, len(targets)), -torch.inf, device=targets.device)


def _merged(parts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, hit and likeliest token of every token from all shares' parts, [shares, 4, tokens], in
    fp64. Of equal logits the first wins."""
    total, target, top, distance = parts.double().unbind(1)
    nll = total.logsumexp(0) - target.max(0).values
    winner = top.argmax(0)  # the first of equal ones: shares stand in the order of the vocabulary
    apart = distance.gather(0, winner[None])[0]
    # where no share has a highest logit there is none
    best = torch.where(torch.isfinite(apart), targets + apart, 0.0)
    return nll, (apart == 0).double(), best


READERS: dict[str, Callable[..., Reader]] = {
    "score_choices": ChoiceReader,
    "score_texts": LossReader,
}


class Answers:
    """Answers of one pass. They stay on the device until the pass is over, so that reading them
    stops nothing.
    """

    def __init__(self) -> None:
        self.items: list[int] = []
        self._parts: list[Tensor] = []
        self._read: Tensor | None = None

    def add(self, items: list[int], answers: Tensor) -> None:
        self.items += items
        self._parts.append(answers)

    def read(self) -> None:
        """Copy to the host; waits for the device."""
        self._read = torch.cat(self._parts).cpu() if self._parts else torch.zeros(0)
        self._parts = []

    def table(self, reader: Reader) -> dict[str, Any]:
        if self._read is None:
            raise RuntimeError("answers were not read; the pass did not end")
        return reader.table(self.items, self._read)
