"""Test packing of prompts: exact arrays of an example worked out by hand, bins of equal size, and
sorted batches.
"""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from steelyard.data import prompt_batches
from steelyard.data.prompt_batches import PromptBatch, PromptPiece

# Group 0 shares [1, 2, 3], group 1 is one prompt alone, group 2 shares [9].
ROWS = [[1, 2, 3, 10], [1, 2, 3, 20, 21], [7, 8], [1, 2, 3, 30], [9, 4], [9, 5, 6]]
GROUPS = [0, 0, 1, 0, 2, 2]
SHARED_LENGTHS = [3, 0, 1]
# Seeds with which three groups are drawn in the order 0, 1, 2 and 2, 0, 1.
SEED_012, SEED_201 = 2, 1


def convert_to_lists(batch: PromptBatch) -> dict[str, Any]:
    """Return every field of a batch with arrays as lists, so that a comparison shows what
    differs.
    """
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


def test_closed_batch_by_hand() -> None:
    batch = prompt_batches.make_closed_batch(ROWS, [5, 0, 2])
    assert convert_to_lists(batch) == {
        "tokens": [9, 5, 6, 1, 2, 3, 10, 7, 8],
        "positions": [0, 1, 2, 0, 1, 2, 3, 0, 1],
        "q_lens": [3, 4, 2],
        "k_lens": None,
        "gather": None,
        "keep": None,
        "pick": [2, 6, 8],
        "items": [5, 0, 2],
        "prefixes": (),
        "counts": {
            "tokens": 9,
            "samples": 3,
            "padded": 0,
            "logits": 3,
            "pairs": 6 + 10 + 3,
            "square": 9 + 16 + 4,
        },
    }
    assert {array.dtype for array in (batch.tokens, batch.positions, batch.pick)} == {
        np.dtype(np.int64)
    }


def test_shared_prefix_lengths_by_hand() -> None:
    assert prompt_batches.measure_prefixes(ROWS, GROUPS) == SHARED_LENGTHS
    assert prompt_batches.measure_prefixes([], []) == []
    assert prompt_batches.measure_prefixes([[1, 2, 3]], [0]) == [0]  # a group of one shares nothing
    # equal prompts: the last token of each is not shared
    assert prompt_batches.measure_prefixes([[1, 2], [1, 2]], [0, 0]) == [1]
    # one prompt is the beginning of the other: its last token is not shared
    assert prompt_batches.measure_prefixes([[1, 2, 3, 4], [1, 2, 3]], [0, 0]) == [2]
    assert prompt_batches.measure_prefixes([[5, 1], [6, 1], [5, 1]], [0, 0, 0]) == [0]
    assert prompt_batches.measure_prefixes(
        [[1, 2, 9, 4], [1, 2, 3, 4], [1, 2, 9, 5]], [0, 0, 0]
    ) == [2]


# Three bins by hand: group 0 spills from the first into the second, group 2 from the second into
# the third.
BINS = [
    [PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2)],
    [PromptPiece(0, 3, 1), PromptPiece(1, 2, 2), PromptPiece(2, None, 1), PromptPiece(2, 4, 1)],
    [PromptPiece(2, 5, 2)],
]


def test_open_batches_by_hand() -> None:
    cache_rows = 3
    first, second, third = (
        convert_to_lists(
            prompt_batches.make_open_batch(ROWS, pieces, next_pieces, SHARED_LENGTHS, cache_rows)
        )
        for pieces, next_pieces in zip(BINS, [*BINS[1:], None], strict=True)
    )
    assert first == {
        "tokens": [1, 2, 3, 10, 20, 21],
        "positions": [0, 1, 2, 3, 3, 4],
        "q_lens": [3, 1, 2],
        "k_lens": [3, 4, 5],
        "gather": [3, 4, 5, *[3, 4, 5, 6], *[3, 4, 5, 7, 8]],
        "keep": (0, 3),
        "pick": [3, 5],
        "items": [0, 1],
        "prefixes": (0,),
        "counts": {
            "tokens": 6,
            "samples": 2,
            "padded": 0,
            "logits": 2,
            "pairs": 6 + 4 + 9,
            "square": 9 + 4 + 10,
        },
    }
    assert second == {
        "tokens": [30, 7, 8, 9, 4],
        "positions": [3, 0, 1, 0, 1],
        "q_lens": [1, 2, 1, 1],
        "k_lens": [4, 2, 1, 2],
        "gather": [0, 1, 2, 3, *[4, 5], *[6], *[6, 7]],
        "keep": (3, 4),
        "pick": [0, 2, 4],
        "items": [3, 2, 4],
        "prefixes": (2,),
        "counts": {
            "tokens": 5,
            "samples": 3,
            "padded": 0,
            "logits": 3,
            "pairs": 4 + 3 + 1 + 2,
            "square": 4 + 4 + 1 + 2,
        },
    }
    assert third == {
        "tokens": [5, 6],
        "positions": [1, 2],
        "q_lens": [2],
        "k_lens": [3],
        "gather": [0, 3, 4],
        "keep": None,
        "pick": [1],
        "items": [5],
        "prefixes": (),
        "counts": {"tokens": 2, "samples": 1, "padded": 0, "logits": 1, "pairs": 5, "square": 6},
    }


def test_a_prefix_is_kept_only_for_a_group_that_continues_in_the_next_bin() -> None:
    other_group = [PromptPiece(1, 2, 2)]
    assert (
        prompt_batches.make_open_batch(ROWS, BINS[0], other_group, SHARED_LENGTHS, 3).keep is None
    )
    assert (
        prompt_batches.make_open_batch(
            ROWS, BINS[0], [PromptPiece(2, None, 1), PromptPiece(2, 4, 1)], SHARED_LENGTHS, 3
        ).keep
        is None
    )
    assert prompt_batches.make_open_batch(ROWS, BINS[0], None, SHARED_LENGTHS, 3).keep is None
    # A prefix that the first bin kept stays in the cache for a third bin and is not kept again.
    assert (
        prompt_batches.make_open_batch(
            ROWS, [PromptPiece(0, 1, 2)], [PromptPiece(0, 3, 1)], SHARED_LENGTHS, 3
        ).keep
        is None
    )


def test_open_bins_by_hand() -> None:
    """13 tokens in bins of at most 5 make three bins of about 4.33; group 0 continues in the second
    bin.
    """
    assert prompt_batches.plan_open_bins(ROWS, GROUPS, 5, SEED_012) == [
        [
            [PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2)],
            [PromptPiece(0, 3, 1), PromptPiece(1, 2, 2)],
            [PromptPiece(2, None, 1), PromptPiece(2, 4, 1), PromptPiece(2, 5, 2)],
        ]
    ]
    one_bin = [
        piece
        for pieces in prompt_batches.plan_open_bins(ROWS, GROUPS, 5, SEED_012)[0]
        for piece in pieces
    ]
    assert prompt_batches.plan_open_bins(ROWS, GROUPS, 13, SEED_012) == [[one_bin]]


def test_open_bins_over_ranks_by_hand() -> None:
    """A group divided between ranks has its prefix on both. The ranks' shares of 13 tokens end at
    6.5, or at 4.33 and 8.67.
    """
    assert prompt_batches.plan_open_bins(ROWS, GROUPS, 100, SEED_012, replicas=2) == [
        [
            [
                PromptPiece(0, None, 3),
                PromptPiece(0, 0, 1),
                PromptPiece(0, 1, 2),
                PromptPiece(0, 3, 1),
            ]
        ],
        [
            [
                PromptPiece(1, 2, 2),
                PromptPiece(2, None, 1),
                PromptPiece(2, 4, 1),
                PromptPiece(2, 5, 2),
            ]
        ],
    ]
    assert prompt_batches.plan_open_bins(ROWS, GROUPS, 100, SEED_201, replicas=2) == [
        [
            [
                PromptPiece(2, None, 1),
                PromptPiece(2, 4, 1),
                PromptPiece(2, 5, 2),
                PromptPiece(0, None, 3),
                PromptPiece(0, 0, 1),
            ]
        ],
        [
            [
                PromptPiece(0, None, 3),
                PromptPiece(0, 1, 2),
                PromptPiece(0, 3, 1),
                PromptPiece(1, 2, 2),
            ]
        ],
    ]
    assert prompt_batches.plan_open_bins(ROWS, GROUPS, 100, SEED_012, replicas=3) == [
        [[PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2)]],
        [[PromptPiece(0, None, 3), PromptPiece(0, 3, 1), PromptPiece(1, 2, 2)]],
        [[PromptPiece(2, None, 1), PromptPiece(2, 4, 1), PromptPiece(2, 5, 2)]],
    ]


def test_more_ranks_than_prompts_leave_ranks_without_bins() -> None:
    ranks = prompt_batches.plan_open_bins(ROWS[:2], [0, 0], 100, 0, replicas=4)
    assert sorted(
        piece.item
        for bins in ranks
        for pieces in bins
        for piece in pieces
        if piece.item is not None
    ) == [0, 1]
    assert [
        [sum(piece.item is not None for piece in pieces) for pieces in bins] for bins in ranks
    ].count([]) == 2
    assert sorted(prompt_batches.deal_equal_bins([4, 5], 100, 0, multiple=4)) == [[0], [1]]


@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [([3, 4, 2], [3, 4, 2]), ([1], [1]), ([5, 2, 7], [5, 11, 8]), ([3, 1], [103, 1])],
)
def test_counts_by_brute_force(q_lens: list[int], k_lens: list[int]) -> None:
    """A query attends to every key that is not after it, with queries and keys aligned at the end
    of their row.
    """
    pairs = square = 0
    for q, k in zip(q_lens, k_lens, strict=True):
        for i, j in product(range(q), range(k)):
            square += 1
            pairs += j <= i + (k - q)
    counts = prompt_batches.count_batch(q_lens, k_lens, 2, padded=9)
    assert counts == {
        "tokens": sum(q_lens),
        "samples": 2,
        "padded": 9,
        "logits": 2,
        "pairs": pairs,
        "square": square,
    }


def test_equal_bins_by_hand() -> None:
    """32 tokens with a budget of 16 make two bins; prompts go longest first into the emptiest bin:
    9, 5 and 3 into one, 7, 7 and 1 into the other.
    """
    lengths = [5, 3, 9, 1, 7, 7]
    for seed in range(5):
        bins = prompt_batches.deal_equal_bins(lengths, 16, seed)
        assert sorted(sorted(items) for items in bins) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_bins_differ_by_two_percent_of_the_budget_at_most(multiple: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(200, 2049) for _ in range(500)]
    budget = 16384
    bins = prompt_batches.deal_equal_bins(lengths, budget, seed, multiple)
    assert sorted(item for items in bins for item in items) == list(range(500))
    fewest = -(-sum(lengths) // budget)
    assert len(bins) == -(-fewest // multiple) * multiple
    sizes = [sum(lengths[item] for item in items) for items in bins]
    assert max(sizes) - min(sizes) <= 0.02 * budget
    assert max(sizes) <= budget * 1.02
    assert bins == prompt_batches.deal_equal_bins(lengths, budget, seed, multiple)
    assert bins != prompt_batches.deal_equal_bins(lengths, budget, seed + 1, multiple)


def test_any_prefix_of_the_bins_is_a_fair_sample() -> None:
    """Neither the bins nor the prompts in them are sorted by length: the mean length of the bins'
    first prompts is that of all prompts.
    """
    rng = random.Random(0)
    lengths = [rng.randrange(200, 2049) for _ in range(2000)]
    bins = prompt_batches.deal_equal_bins(lengths, 16384, 0)
    mean = sum(lengths) / len(lengths)
    first_lengths = [lengths[items[0]] for items in bins]
    # 150 tokens are 3 standard errors of the mean; with the longest first it would be 1900
    assert abs(sum(first_lengths) / len(first_lengths) - mean) < 150
    half_lengths = [lengths[item] for items in bins[: len(bins) // 2] for item in items]
    assert abs(sum(half_lengths) / len(half_lengths) - mean) < 50


def test_a_prompt_longer_than_the_budget_gets_its_own_bin() -> None:
    assert sorted(prompt_batches.deal_equal_bins([50, 40], 16, 0)) == [[0], [1]]


def test_sorted_batches_by_hand() -> None:
    """30 and 17 are padded to 32 each, which fills a batch of 64 tokens; 16, 5 and 3 are padded to
    16.
    """
    for seed in range(4):
        assert sorted(prompt_batches.make_sorted_batches([5, 17, 16, 3, 30], 64, 16, seed)) == [
            [2, 0, 3],
            [4, 1],
        ]
    assert sorted(prompt_batches.make_sorted_batches([5, 17, 16, 3, 30], 63, 16, 0)) == [
        [1],
        [2, 0, 3],
        [4],
    ]
    assert sorted(prompt_batches.make_sorted_batches([3, 3, 2], 1, 1, 0)) == [[0], [1], [2]]
    assert prompt_batches.make_sorted_batches([], 64, 16, 0) == []


def test_sorted_batches_merge_a_last_batch_of_one() -> None:
    """Two prompts padded to 32 fill 64 tokens; the prompt of 16 that is left joins them instead of
    being a batch with a shape of its own.
    """
    assert prompt_batches.make_sorted_batches([30, 17, 16], 64, 16, 0) == [[0, 1, 2]]


@pytest.mark.parametrize("seed", [0, 1])
def test_sorted_batches_fit_the_budget_and_come_in_random_order(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(200, 2049) for _ in range(300)]
    bins = prompt_batches.make_sorted_batches(lengths, 8192, 16, seed)
    assert sorted(item for items in bins for item in items) == list(range(300))
    for items in bins:
        width = -(-max(lengths[item] for item in items) // 16) * 16
        assert (len(items) - 1) * width <= 8192  # it may have taken in a last prompt
    longest = [max(lengths[item] for item in items) for items in bins]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)
    assert bins == prompt_batches.make_sorted_batches(lengths, 8192, 16, seed)
    assert bins != prompt_batches.make_sorted_batches(lengths, 8192, 16, seed + 1)
