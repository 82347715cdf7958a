"""Count the work of scoring batches and training steps from the data alone: tokens, samples, logits
and attention pairs.

An engine only reports which rows it computed. A counter's `count` gives the counts of these rows,
its `count_expected` those that a complete pass or step must reach, so that
`metrics/plausibility.py` can compare the two. A kind of work (tasks/kind.py) names the function
that makes its counter from inputs, division and the model's attention window.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from steelyard.data.cloze_samples import ClozeDataset
from steelyard.data.division import COUNT_NAMES, Division, check_division
from steelyard.data.prompt_batches import count_batch, count_causal_pairs, measure_prefixes
from steelyard.data.texts import TokenizedTexts
from steelyard.data.training_rows import IGNORED, RowKey, TrainingRow, TrainingRows

Counts = dict[str, int]


class StepCounter(Protocol):
    """What counts the work of a task's data, implemented by `TextCounter`, `TrainingRowCounter` and
    `ClozeCounter`: `count` for rows that were computed, `count_expected` for a whole step or pass.

    Counts are a dict with the keys of `COUNT_NAMES` (tokens, samples, logits, visible query-key
    `pairs`, and `square`, the pairs without a mask) and `padded`.
    """

    def count(
        self, keys: Sequence[RowKey], prefix_groups: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the rows with these keys.

        `prefix_groups` are the groups whose shared prefix was computed together with the rows, once
        each. `held_out` says that the keys are those of held-out rows, not of a step's global
        batch.
        """

    def count_expected(self, steps: range | None) -> list[Counts]:
        """Return one table of counts for each of these steps: what its global batch must have. With
        None, return a list of one table: the counts of a whole pass that is not made of global
        batches.
        """


class TextCounter:
    """Counts texts that are scored; a `StepCounter` whose keys are text indices. In division closed
    all tokens of each text count, in open only those behind the prefix that its group shares.

    `count` returns the counts of some texts and shared prefixes, `count_expected` those of all
    texts unshared. `count_logits` gives the number of logits that a text of some length needs;
    `window` is the model's sliding attention window in tokens, None: full attention.
    """

    def __init__(
        self,
        texts: TokenizedTexts,
        division: Division,
        count_logits: Callable[[int], int],
        window: int | None = None,
    ) -> None:
        """Keep the texts, the division, the number of logits as a function of a text's length, and
        the model's attention window (None: full attention). Raise ValueError for an unknown
        division.
        """
        check_division(division)
        self.texts, self.division, self.count_logits, self.window = (
            texts,
            division,
            count_logits,
            window,
        )

    @cached_property
    def prefix_lens(self) -> list[int]:
        """The number of leading tokens that each group's texts share, by group number; computed
        once and cached.
        """
        return measure_prefixes(self.texts.rows, self.texts.groups)

    def count(
        self, keys: Sequence[RowKey], prefix_groups: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the texts with these indices, and of the shared prefixes of
        the groups numbered in `prefix_groups`, each as one more row but no sample. Queries attend
        to the shared prefix too. `padded` is 0; `held_out` is ignored.
        """
        lens = [len(self.texts.rows[i]) for i in keys]
        common = [self.prefix_lens[group] for group in prefix_groups]
        prefix_lens = [
            0 if self.division == "closed" else self.prefix_lens[self.texts.groups[i]] for i in keys
        ]
        computed = [length - prefix for length, prefix in zip(lens, prefix_lens, strict=True)]
        totals = count_batch([*common, *computed], [*common, *lens], len(keys), window=self.window)
        return totals | {"logits": sum(map(self.count_logits, lens))}

    def count_expected(self, steps: range | None) -> list[Counts]:
        """Return a list of one table: the counts of all texts to score as if nothing were shared,
        which in division open is an upper bound. `steps` is ignored.
        """
        unshared = TextCounter(self.texts, "closed", self.count_logits, self.window)
        return [unshared.count(range(len(self.texts.rows)))]


class TrainingRowCounter:
    """Counts rows of tokens to train on, each segment with causal attention of its own (within
    `window` tokens, None: full) and without padding. A `StepCounter`: `count` for rows by their
    keys, `count_expected` per step's global batch, or for all held-out rows. `division` has no
    effect.
    """

    def __init__(self, rows: TrainingRows, division: Division, window: int | None = None) -> None:
        """Keep the rows and the model's attention window (None: full attention); `division` is
        ignored.
        """
        self.rows, self.window = rows, window

    def count(
        self, keys: Sequence[RowKey], prefix_groups: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the training rows with these keys, without padding
        (`count_row`). The other arguments are ignored.
        """
        return _add_counts(count_row(self.rows.row(row_key), self.window) for row_key in keys)

    def count_expected(self, steps: range | None) -> list[Counts]:
        """Return a list with one table of counts for each step's global batch of training rows, or
        with None a list of one table for all held-out rows. Every row is built to be counted.
        """
        return [self.count(keys) for keys in _draw_keys(self.rows, steps)]


class ClozeCounter:
    """Counts cloze samples: contexts with candidate spans, nothing padded. A `StepCounter`: `count`
    for samples by index, `count_expected` per step's global batch, or for the whole evaluation set.
    The division is that of the data set; `division` and `window` have no effect.
    """

    def __init__(self, rows: ClozeDataset, division: Division, window: int | None = None) -> None:
        """Keep the data set; `division` and `window` are ignored."""
        self.rows = rows

    def count(
        self, keys: Sequence[RowKey], prefix_groups: Sequence[int] = (), held_out: bool = False
    ) -> Counts:
        """Return the summed counts of the cloze samples with these indices, of the evaluation set
        if `held_out`; zeros if there are none. `prefix_groups` is ignored.
        """
        return _add_counts([self.rows.pack(list(keys), held_out=held_out).counts] if keys else [])

    def count_expected(self, steps: range | None) -> list[Counts]:
        """Return one table of counts for each step's global batch of cloze samples, or with None a
        list of one table for the whole evaluation set. Samples are counted one by one and added up;
        `padded` is 0.
        """
        held_out = steps is None
        return [
            _add_counts(self.count([key], held_out=held_out) for key in keys)
            for keys in _draw_keys(self.rows, steps)
        ]


def _draw_keys(rows: TrainingRows | ClozeDataset, steps: range | None) -> list[Sequence[RowKey]]:
    """Return one list of row keys for each step's global batch, or with None a list of one: the
    keys of all held-out rows.
    """
    return [rows.held_out()] if steps is None else [rows.batch(step) for step in steps]


def count_row(row: TrainingRow, window: int | None = None) -> Counts:
    """Return the counts of one training row: `tokens` without the padding, `logits` (targets that
    are learned), and `pairs` and `square` summed over its segments, each attending causally to
    itself within `window`. `padded` is 0.
    """
    real = row.lens if row.real == len(row.tokens) else row.lens[:-1]
    return {
        "tokens": sum(real),
        "samples": row.samples,
        "padded": 0,
        "logits": int(np.count_nonzero(row.targets != IGNORED)),
        "pairs": sum(count_causal_pairs(length, window) for length in real),
        "square": sum(length * length for length in real),
    }


def _add_counts(tables: Iterable[Counts]) -> Counts:
    """Add up tables of counts key by key and return a new one with `COUNT_NAMES` and `padded`,
    which is 0 whatever the tables say. No tables give zeros.
    """
    total = dict.fromkeys((*COUNT_NAMES, "padded"), 0)
    for counts_table in tables:
        for key in COUNT_NAMES:
            total[key] += counts_table[key]
    return total


def make_choice_counter(
    texts: TokenizedTexts, division: Division, window: int | None
) -> TextCounter:
    """Return the counter for multiple-choice prompts, which need the logits of one token each.
    `window` is the model's attention window, None: full attention.
    """
    return TextCounter(texts, division, lambda length: 1, window)


def make_text_counter(texts: TokenizedTexts, division: Division, window: int | None) -> TextCounter:
    """Return the counter for texts whose every token has a loss, which need logits for all tokens
    but the last. `window` is the model's attention window, None: full attention.
    """
    return TextCounter(texts, division, lambda length: length - 1, window)
