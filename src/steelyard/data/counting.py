"""Count the work of scoring batches and training steps from the data alone: tokens, samples, logits
and attention pairs.

An engine only reports which rows it computed. A counter's `count` gives the counts of these rows,
its `count_expected` those that a complete pass or step must reach, so that `metrics/plausible.py`
can compare the two. A kind of work (tasks/kind.py) names the function that makes its counter from
inputs, division and the model's attention window.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from steelyard.data.batches import counts, prefixes, seen
from steelyard.data.cloze import ClozeRows
from steelyard.data.division import COUNTED, Division
from steelyard.data.rows import IGNORED, Key, Row, Rows
from steelyard.data.texts import Texts

Counts = dict[str, int]


class Counter(Protocol):
    """What counts the work of a kind of work. Each returned table holds the keys of `COUNT_NAMES`
    and `padded`.
    """

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the rows with these keys.

        `prefix_groups` are the groups whose shared prefix was computed together with the rows, once
        each. `held_out` says that the keys are those of held-out rows, not of a step's global
        batch.
        """

    def wanted(self, steps: range | None) -> list[Counts]:
        """Return the counts that each of these steps must have. With None, return one table: the
        counts of a whole pass that is not made of global batches.
        """


class TextCounts:
    """Counts texts that are scored: in division closed all tokens of each, in open only those
    behind the prefix that its group shares.

    `logits` gives the number of logits that a text of some length needs; `window` is the model's
    sliding attention window in tokens, if any.
    """

    def __init__(
        self,
        texts: Texts,
        division: Division,
        logits: Callable[[int], int],
        window: int | None = None,
    ) -> None:
        """Keep the texts, the division, the number of logits as a function of a text's length, and
        the model's attention window (None: full attention).
        """
        self.texts, self.division, self.logits, self.window = texts, division, logits, window

    @cached_property
    def shared(self) -> list[int]:
        """The number of leading tokens that each group's texts share, by group number; computed
        once and cached.
        """
        return prefixes(self.texts.rows, self.texts.groups)

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the texts with these indices, and of the shared prefixes of
        `prefix_groups`. `held_out` is ignored.
        """
        lens = [len(self.texts.rows[i]) for i in rows]
        common = [self.shared[group] for group in prefixes]
        before = [
            0 if self.division == "closed" else self.shared[self.texts.groups[i]] for i in rows
        ]
        own = [length - known for length, known in zip(lens, before, strict=True)]
        made = counts([*common, *own], [*common, *lens], len(rows), window=self.window)
        return made | {"logits": sum(map(self.logits, lens))}

    def wanted(self, steps: range | None) -> list[Counts]:
        """Return one table: the counts of all texts as if nothing were shared, which in division
        open is an upper bound. `steps` is ignored.
        """
        whole = TextCounts(self.texts, "closed", self.logits, self.window)
        return [whole.of(range(len(self.texts.rows)))]


class RowCounts:
    """Counts rows of tokens to train on. `division` has no effect."""

    def __init__(self, rows: Rows, division: Division, window: int | None = None) -> None:
        """Keep the rows and the model's attention window (None: full attention); `division` is
        ignored.
        """
        self.rows, self.window = rows, window

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the rows with these keys, without padding. The other
        arguments are ignored.
        """
        return _sum(of_row(self.rows.row(key), self.window) for key in rows)

    def wanted(self, steps: range | None) -> list[Counts]:
        """Return the counts of each step's global batch, or with None one table for all held-out
        rows.
        """
        return [self.of(keys) for keys in _drawn(self.rows, steps)]


class ClozeCounts:
    """Counts cloze samples: contexts with candidate spans. The division is that of the data set;
    `division` and `window` have no effect.
    """

    def __init__(self, rows: ClozeRows, division: Division, window: int | None = None) -> None:
        """Keep the data set; `division` and `window` are ignored."""
        self.rows = rows

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the samples with these indices, of the evaluation set if
        `held_out`; zeros if there are none.
        """
        return _sum([self.rows.pack(list(rows), held=held_out).counts] if rows else [])

    def wanted(self, steps: range | None) -> list[Counts]:
        """Return the counts of each step's global batch, or with None one table for the whole
        evaluation set.
        """
        held_out = steps is None
        return [
            _sum(self.of([key], held_out=held_out) for key in keys)
            for keys in _drawn(self.rows, steps)
        ]


def _drawn(rows: Rows | ClozeRows, steps: range | None) -> list[Sequence[Key]]:
    """Return the keys of each step's global batch, or with None one list with the held-out rows."""
    return [rows.held_out()] if steps is None else [rows.batch(step) for step in steps]


def of_row(row: Row, window: int | None = None) -> Counts:
    """Return the counts of one training row. Its last segment is left out if it is padding;
    `logits` counts targets that are learned.
    """
    real = row.lens if row.real == len(row.tokens) else row.lens[:-1]
    return {
        "tokens": sum(real),
        "samples": row.samples,
        "padded": 0,
        "logits": int(np.count_nonzero(row.targets != IGNORED)),
        "pairs": sum(seen(n, window) for n in real),
        "square": sum(n * n for n in real),
    }


def _sum(every: Iterable[Counts]) -> Counts:
    """Add up tables of counts key by key. `padded` is 0 in the result whatever the tables say."""
    out = dict.fromkeys((*COUNTED, "padded"), 0)
    for one in every:
        for key in COUNTED:
            out[key] += one[key]
    return out


def count_choices(texts: Texts, division: Division, window: int | None) -> TextCounts:
    """Return the counter for multiple-choice prompts, which need the logits of one token each."""
    return TextCounts(texts, division, lambda length: 1, window)


def count_texts(texts: Texts, division: Division, window: int | None) -> TextCounts:
    """Return the counter for texts whose every token has a loss, which need logits for all tokens
    but the last.
    """
    return TextCounts(texts, division, lambda length: length - 1, window)
