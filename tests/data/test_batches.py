"""Packing: exact arrays on an example worked out by hand, and the same logits however prompts are packed."""

import random
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard import engines
from steelyard.accelerators.cpu_torch import Device
from steelyard.case import resolve
from steelyard.data import batches
from steelyard.data.batches import Batch, PromptPiece
from steelyard.engines.job import Job
from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.engines.work import Work
from steelyard.models.attention import Prefix, layout
from steelyard.models.llama import Llama, LlamaShape
from steelyard.plan import degrees
from steelyard.plan.degrees import Plan
from steelyard.run.clock import now
from steelyard.tasks.mmlu.data import Prompts
from steelyard.weights import load

CPU = torch.device("cpu")

# Group 0 shares [1, 2, 3], group 1 is one prompt alone, group 2 shares [9].
ROWS = [[1, 2, 3, 10], [1, 2, 3, 20, 21], [7, 8], [1, 2, 3, 30], [9, 4], [9, 5, 6]]
GROUPS = [0, 0, 1, 0, 2, 2]
SHARED = [3, 0, 1]
# Seeds whose random order of three groups is the one named.
SEED_012, SEED_201 = 2, 1


pytestmark = pytest.mark.usefixtures("one_thread")


def arrays(batch: Batch) -> dict[str, Any]:
    """Every field as plain values, so that a comparison shows what differs."""
    out = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in out.items()}


def test_closed_batch_by_hand() -> None:
    batch = batches.closed_batch(ROWS, [5, 0, 2])
    assert arrays(batch) == {
        "tokens": [9, 5, 6, 1, 2, 3, 10, 7, 8],
        "positions": [0, 1, 2, 0, 1, 2, 3, 0, 1],
        "q_lens": [3, 4, 2],
        "k_lens": None,
        "gather": None,
        "keep": None,
        "pick": [2, 6, 8],
        "items": [5, 0, 2],
        "prefixes": (),
        "counts": {"tokens": 9, "samples": 3, "padded": 0, "logits": 3, "pairs": 6 + 10 + 3, "square": 9 + 16 + 4},
    }
    assert {array.dtype for array in (batch.tokens, batch.positions, batch.pick)} == {np.dtype(np.int64)}


def test_prefixes() -> None:
    assert batches.prefixes(ROWS, GROUPS) == SHARED
    assert batches.prefixes([], []) == []
    assert batches.prefixes([[1, 2, 3]], [0]) == [0]  # nobody to share with
    assert batches.prefixes([[1, 2], [1, 2]], [0, 0]) == [1]  # equal prompts: one token is left to each
    assert batches.prefixes([[1, 2, 3, 4], [1, 2, 3]], [0, 0]) == [2]  # one is the beginning of the other
    assert batches.prefixes([[5, 1], [6, 1], [5, 1]], [0, 0, 0]) == [0]
    assert batches.prefixes([[1, 2, 9, 4], [1, 2, 3, 4], [1, 2, 9, 5]], [0, 0, 0]) == [2]


# Three bins by hand: group 0 spills from the first into the second, group 2 from the second into the third.
BINS = [
    [PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2)],
    [PromptPiece(0, 3, 1), PromptPiece(1, 2, 2), PromptPiece(2, None, 1), PromptPiece(2, 4, 1)],
    [PromptPiece(2, 5, 2)],
]


def test_open_batches_by_hand() -> None:
    cache = 3
    first, second, third = (
        arrays(batches.open_batch(ROWS, pieces, after, SHARED, cache))
        for pieces, after in zip(BINS, [*BINS[1:], None], strict=True)
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
        "counts": {"tokens": 6, "samples": 2, "padded": 0, "logits": 2, "pairs": 6 + 4 + 9, "square": 9 + 4 + 10},
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
        "counts": {"tokens": 5, "samples": 3, "padded": 0, "logits": 3, "pairs": 4 + 3 + 1 + 2, "square": 4 + 4 + 1 + 2},
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


def test_a_prefix_is_kept_only_for_a_group_that_goes_on() -> None:
    other = [PromptPiece(1, 2, 2)]
    assert batches.open_batch(ROWS, BINS[0], other, SHARED, 3).keep is None
    assert batches.open_batch(ROWS, BINS[0], [PromptPiece(2, None, 1), PromptPiece(2, 4, 1)], SHARED, 3).keep is None
    assert batches.open_batch(ROWS, BINS[0], None, SHARED, 3).keep is None
    # A group that goes on over a third bin stays where the first bin left it.
    assert batches.open_batch(ROWS, [PromptPiece(0, 1, 2)], [PromptPiece(0, 3, 1)], SHARED, 3).keep is None


def test_open_bins_by_hand() -> None:
    """13 tokens in bins of about 5: three bins of 4.33. Group 0 spills over."""
    assert batches.open_bins(ROWS, GROUPS, 5, SEED_012) == [
        [
            [PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2)],
            [PromptPiece(0, 3, 1), PromptPiece(1, 2, 2)],
            [PromptPiece(2, None, 1), PromptPiece(2, 4, 1), PromptPiece(2, 5, 2)],
        ]
    ]
    one_bin = [piece for one in batches.open_bins(ROWS, GROUPS, 5, SEED_012)[0] for piece in one]
    assert batches.open_bins(ROWS, GROUPS, 13, SEED_012) == [[one_bin]]


def test_open_bins_over_ranks_by_hand() -> None:
    """A group cut between ranks has its prefix on both; the ranks' ends are at 6.5, or at 4.33 and 8.67 of 13 tokens."""
    assert batches.open_bins(ROWS, GROUPS, 100, SEED_012, world=2) == [
        [[PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2), PromptPiece(0, 3, 1)]],
        [[PromptPiece(1, 2, 2), PromptPiece(2, None, 1), PromptPiece(2, 4, 1), PromptPiece(2, 5, 2)]],
    ]
    assert batches.open_bins(ROWS, GROUPS, 100, SEED_201, world=2) == [
        [[PromptPiece(2, None, 1), PromptPiece(2, 4, 1), PromptPiece(2, 5, 2), PromptPiece(0, None, 3), PromptPiece(0, 0, 1)]],
        [[PromptPiece(0, None, 3), PromptPiece(0, 1, 2), PromptPiece(0, 3, 1), PromptPiece(1, 2, 2)]],
    ]
    assert batches.open_bins(ROWS, GROUPS, 100, SEED_012, world=3) == [
        [[PromptPiece(0, None, 3), PromptPiece(0, 0, 1), PromptPiece(0, 1, 2)]],
        [[PromptPiece(0, None, 3), PromptPiece(0, 3, 1), PromptPiece(1, 2, 2)]],
        [[PromptPiece(2, None, 1), PromptPiece(2, 4, 1), PromptPiece(2, 5, 2)]],
    ]


def test_more_ranks_than_prompts() -> None:
    ranks = batches.open_bins(ROWS[:2], [0, 0], 100, 0, world=4)
    assert sorted(p.item for bins in ranks for one in bins for p in one if p.item is not None) == [0, 1]
    assert [[sum(p.item is not None for p in one) for one in bins] for bins in ranks].count([]) == 2
    assert sorted(batches.equal_bins([4, 5], 100, 0, multiple=4)) == [[0], [1]]


@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [([3, 4, 2], [3, 4, 2]), ([1], [1]), ([5, 2, 7], [5, 11, 8]), ([3, 1], [103, 1])]
)
def test_counts_by_brute_force(q_lens: list[int], k_lens: list[int]) -> None:
    """A query sees every key that is not after it, with both aligned at their row's end."""
    pairs = square = 0
    for q, k in zip(q_lens, k_lens, strict=True):
        for i, j in product(range(q), range(k)):
            square += 1
            pairs += j <= i + (k - q)
    found = batches.counts(q_lens, k_lens, 2, padded=9)
    assert found == {
        "tokens": sum(q_lens), "samples": 2, "padded": 9, "logits": 2, "pairs": pairs, "square": square,
    }  # fmt: skip


def test_equal_bins_by_hand() -> None:
    """32 tokens, budget 16, longest first into the emptiest: 9 | 7, 7 then 5, 3 to the first and 1 to the second."""
    lengths = [5, 3, 9, 1, 7, 7]
    for seed in range(5):
        bins = batches.equal_bins(lengths, 16, seed)
        assert sorted(sorted(one) for one in bins) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_bins(multiple: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(200, 2049) for _ in range(500)]
    budget = 16384
    bins = batches.equal_bins(lengths, budget, seed, multiple)
    assert sorted(i for one in bins for i in one) == list(range(500))
    fewest = -(-sum(lengths) // budget)
    assert len(bins) == -(-fewest // multiple) * multiple
    sizes = [sum(lengths[i] for i in one) for one in bins]
    assert max(sizes) - min(sizes) <= 0.02 * budget
    assert max(sizes) <= budget * 1.02
    assert bins == batches.equal_bins(lengths, budget, seed, multiple)
    assert bins != batches.equal_bins(lengths, budget, seed + 1, multiple)


def test_any_prefix_of_the_bins_is_a_fair_sample() -> None:
    """Neither bins nor the prompts in them come sorted: the mean length of a bin's first prompts is that of all."""
    rng = random.Random(0)
    lengths = [rng.randrange(200, 2049) for _ in range(2000)]
    bins = batches.equal_bins(lengths, 16384, 0)
    mean = sum(lengths) / len(lengths)
    firsts = [lengths[one[0]] for one in bins]
    assert abs(sum(firsts) / len(firsts) - mean) < 150  # 3 standard errors; longest first would give 1900
    half = [lengths[i] for one in bins[: len(bins) // 2] for i in one]
    assert abs(sum(half) / len(half) - mean) < 50


def test_a_prompt_longer_than_the_budget_is_a_bin() -> None:
    assert sorted(batches.equal_bins([50, 40], 16, 0)) == [[0], [1]]


def test_sorted_batches_by_hand() -> None:
    """30 and 17 pad to 32 each, which fills 64; 16, 5 and 3 pad to 16."""
    for seed in range(4):
        assert sorted(batches.sorted_batches([5, 17, 16, 3, 30], 64, 16, seed)) == [[2, 0, 3], [4, 1]]
    assert sorted(batches.sorted_batches([5, 17, 16, 3, 30], 63, 16, 0)) == [[1], [2, 0, 3], [4]]
    assert sorted(batches.sorted_batches([3, 3, 2], 1, 1, 0)) == [[0], [1], [2]]
    assert batches.sorted_batches([], 64, 16, 0) == []


def test_sorted_batches_leave_no_batch_of_one_behind() -> None:
    """Two of 32 fill 64; the 16 that is left over joins them rather than being a shape of its own."""
    assert batches.sorted_batches([30, 17, 16], 64, 16, 0) == [[0, 1, 2]]


@pytest.mark.parametrize("seed", [0, 1])
def test_sorted_batches(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(200, 2049) for _ in range(300)]
    bins = batches.sorted_batches(lengths, 8192, 16, seed)
    assert sorted(i for one in bins for i in one) == list(range(300))
    for one in bins:
        width = -(-max(lengths[i] for i in one) // 16) * 16
        assert (len(one) - 1) * width <= 8192  # one may have taken in a last batch of one
    longest = [max(lengths[i] for i in one) for one in bins]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)
    assert bins == batches.sorted_batches(lengths, 8192, 16, seed)
    assert bins != batches.sorted_batches(lengths, 8192, 16, seed + 1)


# The same answers, however prompts are packed.

SHAPE = LlamaShape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, positions=64)


@pytest.fixture(scope="module")
def model() -> Llama:
    made = load.build(SHAPE, CPU, torch.float32)
    load.fill_random(made, 3)
    return made


def prompts(seed: int) -> tuple[list[list[int]], list[int]]:
    """Groups of random prompts, in mixed order. Group 0 shares nothing, group 1 is one prompt, group 2 holds one twice."""
    rng = random.Random(f"prompts:{seed}")
    pairs: list[tuple[list[int], int]] = []
    for group in range(rng.randrange(4, 8)):
        head = [rng.randrange(SHAPE.vocab) for _ in range(rng.randrange(1, 17))]
        members = 1 if group == 1 else rng.randrange(2, 8)
        for i in range(members):
            tail = [rng.randrange(SHAPE.vocab) for _ in range(rng.randrange(1, 9))]
            pairs.append(([i, *tail] if group == 0 else head + tail, group))
    pairs.append(next(pair for pair in pairs if pair[1] == 2))
    rng.shuffle(pairs)
    return [row for row, _ in pairs], [group for _, group in pairs]


def alone(model: Llama, rows: list[list[int]]) -> Tensor:
    """Each prompt by itself."""
    return torch.cat([run(model, batches.closed_batch(rows, [i]), None) for i in range(len(rows))])


def run(model: Llama, batch: Batch, prefix: list[Prefix] | None) -> Tensor:
    gather = None if batch.gather is None else torch.from_numpy(batch.gather)
    rows = layout(batch.q_lens, batch.k_lens, CPU, gather)
    keep = None if batch.keep is None else slice(*batch.keep)
    tokens, positions, pick = (torch.from_numpy(array) for array in (batch.tokens, batch.positions, batch.pick))
    with torch.no_grad():
        out: Tensor = model(tokens, positions, rows, "rows", pick, prefix, keep)
    return out


def closed_ranks(rows: list[list[int]], budget: int, seed: int, world: int) -> list[list[Batch]]:
    bins = batches.equal_bins([len(row) for row in rows], budget, seed, world)
    return [[batches.closed_batch(rows, one) for one in bins[rank::world]] for rank in range(world)]


def open_ranks(rows: list[list[int]], groups: list[int], budget: int, seed: int, world: int) -> list[list[Batch]]:
    shared = batches.prefixes(rows, groups)
    return [
        [batches.open_batch(rows, one, after, shared, max(shared)) for one, after in zip(bins, [*bins[1:], None], strict=False)]
        for bins in batches.open_bins(rows, groups, budget, seed, world)
    ]


def answered(model: Llama, ranks: list[list[Batch]], cache: int | None) -> Tensor:
    """Logits by prompt. Every prompt is answered once; room for a cached prefix holds NaN until one is kept in it."""
    found: dict[int, Tensor] = {}
    for own in ranks:
        prefix = None if cache is None else model.empty_prefix(cache)
        for pair in prefix or []:
            for part in pair:
                part.fill_(float("nan"))
        for batch in own:
            logits = run(model, batch, prefix)
            assert len(logits) == len(batch.items)
            for item, row in zip(batch.items, logits, strict=True):
                assert item not in found
                found[item] = row
    return torch.stack([found[item] for item in range(len(found))])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [1, 23, 60, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_every_packing_gives_the_same_logits(model: Llama, seed: int, budget: int, world: int) -> None:
    rows, groups = prompts(seed)
    expected = alone(model, rows)
    shared = batches.prefixes(rows, groups)
    assert 0 in shared
    assert max(shared) > 0
    closed = closed_ranks(rows, budget, seed, world)
    opened = open_ranks(rows, groups, budget, seed, world)
    for ranks, cache in ((closed, None), (opened, max(shared))):
        assert sum(batch.counts["samples"] for batches in ranks for batch in batches) == len(rows)
        found = answered(model, ranks, cache)
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= 1e-5
    assert sum(batch.counts["tokens"] for batches in closed for batch in batches) == sum(map(len, rows))
    computed = sum(batch.counts["tokens"] for batches in opened for batch in batches)
    once = sum(shared) + sum(len(row) - shared[group] for row, group in zip(rows, groups, strict=True))
    assert once <= computed <= once + (world - 1) * max(shared)
    assert world > 1 or computed == once


def test_the_comparison_sees_swapped_prompts(model: Llama) -> None:
    rows, _ = prompts(0)
    found = alone(model, rows)
    near = [(a, b) for a in range(len(rows)) for b in range(a) if float((found[a] - found[b]).abs().max()) <= 1e-3]
    assert [(rows[a], a) for a, b in near] == [(rows[b], a) for a, b in near]
    assert len(near) == 1  # the prompt that is there twice


# The engines, which lay the batches over ranks.


LETTERS = [6, 22, 10, 24]  # tokens that are likely somewhere, so that every letter is chosen


def job(rows: list[list[int]], groups: list[int], division: str, rank: int, world: int, **tune: Any) -> Job:
    settings = ["question.model.vocab=61", *(f"tune.{key}={value}" for key, value in tune.items())]
    count = len(rows)
    shared = Plan(nodes=1, devices=world, tp=1, pp=1, dp=world, launcher="local")
    return Job(
        case=resolve.resolve("llama2-7b-mmlu", "smoke", division=division, settings=settings).case,
        work="score_choices",
        inputs=Prompts(rows, groups, list(range(count)), [0] * count, [0] * count, ["one"], LETTERS, 0),
        weights=None,
        device=Device(0, now),
        rank=rank,
        world=world,
        plan=shared,
        place=degrees.place(shared, rank),
        group=TensorParallelGroup(),
        steps=None,
    )


def answers(name: str, division: str, world: int, **tune: Any) -> list[tuple[int, int, int, int]]:
    """(prompt, likeliest token, likeliest letter, finite) of all ranks."""
    rows, groups = prompts(5)
    out: list[tuple[int, int, int, int]] = []
    for rank in range(world):
        engine = engines.load(name, "score_choices")(job(rows, groups, division, rank, world, **tune))
        engine.prepare("val", lambda part: nullcontext())
        works = [item for item in engine.work("val") if isinstance(item, Work)]
        assert len(works) == engine.total("val")
        table = engine.outputs("val")
        assert sorted(row for work in works for row in work.rows or ()) == sorted(table["items"])
        out += zip(table["items"], table["best"], table["choice"], table["finite"], strict=True)
    return sorted(out)


@pytest.mark.parametrize("world", [1, 3, 40])  # with 40 ranks, some get nothing to do
def test_engines_answer_alike(world: int) -> None:
    assert len(prompts(5)[0]) < 40
    expected = answers("transformers", "closed", 1, batching="single")
    assert [item for item, *_ in expected] == list(range(len(prompts(5)[0])))
    assert len({best for _, best, _, _ in expected}) >= 8
    assert {choice for _, _, choice, _ in expected} == {0, 1, 2, 3}
    assert answers("torch", "closed", world, batch_tokens=50) == expected
    assert answers("torch", "open", world, batch_tokens=50) == expected
    assert answers("transformers", "closed", world, batch_tokens=50) == expected
