"""The counts of a step, from the data alone. An engine only says which rows it computed.

`of` counts rows of a pass, `wanted` what a pass must come to: one table for all of it, or one for
each step that takes a global batch. A kind of work (tasks/kind.py) names what makes its counter,
from inputs, division and the model's window.
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
    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the counts of rows of a pass. `prefixes` are groups whose common beginning was
        computed with them, once; `held_out` says that the rows are none of a step's global batch.
        """

    def wanted(self, steps: range | None) -> list[Counts]:
        """Return the counts of each of these steps; None: those of a pass without steps of a global
        batch.
        """


class TextCounts:
    """Of texts that are scored: in division closed every token of each, in open the tokens behind
    what its group shares.
    """

    def __init__(
        self,
        texts: Texts,
        division: Division,
        logits: Callable[[int], int],
        window: int | None = None,
    ) -> None:
        self.texts, self.division, self.logits, self.window = texts, division, logits, window

    @cached_property
    def shared(self) -> list[int]:
        return prefixes(self.texts.rows, self.texts.groups)

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        lens = [len(self.texts.rows[i]) for i in rows]
        common = [self.shared[group] for group in prefixes]
        before = [
            0 if self.division == "closed" else self.shared[self.texts.groups[i]] for i in rows
        ]
        own = [length - known for length, known in zip(lens, before, strict=True)]
        made = counts([*common, *own], [*common, *lens], len(rows), window=self.window)
        return made | {"logits": sum(map(self.logits, lens))}

    def wanted(self, steps: range | None) -> list[Counts]:
        """As if nothing were shared, which in division open is the most that there can be."""
        whole = TextCounts(self.texts, "closed", self.logits, self.window)
        return [whole.of(range(len(self.texts.rows)))]


class RowCounts:
    """Of rows to train on."""

    def __init__(self, rows: Rows, division: Division, window: int | None = None) -> None:
        self.rows, self.window = rows, window

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        return _sum(of_row(self.rows.row(key), self.window) for key in rows)

    def wanted(self, steps: range | None) -> list[Counts]:
        return [self.of(keys) for keys in _drawn(self.rows, steps)]


class ClozeCounts:
    """Of contexts with candidates."""

    def __init__(self, rows: ClozeRows, division: Division, window: int | None = None) -> None:
        self.rows = rows

    def of(
        self, rows: Sequence[Key], prefixes: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        return _sum([self.rows.pack(list(rows), held=held_out).counts] if rows else [])

    def wanted(self, steps: range | None) -> list[Counts]:
        held_out = steps is None
        return [
            _sum(self.of([key], held_out=held_out) for key in keys)
            for keys in _drawn(self.rows, steps)
        ]


def _drawn(rows: Rows | ClozeRows, steps: range | None) -> list[Sequence[Key]]:
    """Return the rows of each step, or those held out."""
    return [rows.held_out()] if steps is None else [rows.batch(step) for step in steps]


def of_row(row: Row, window: int | None = None) -> Counts:
    """Padding, a last segment of its own, is no work."""
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
    out = dict.fromkeys((*COUNTED, "padded"), 0)
    for one in every:
        for key in COUNTED:
            out[key] += one[key]
    return out


def count_choices(texts: Texts, division: Division, window: int | None) -> TextCounts:
    """Return the counter of texts of which only the token after the last is looked at."""
    return TextCounts(texts, division, lambda length: 1, window)


def count_texts(texts: Texts, division: Division, window: int | None) -> TextCounts:
    """Return the counter of texts whose losses are read: each needs the logits of the token before."""
    return TextCounts(texts, division, lambda length: length - 1, window)
