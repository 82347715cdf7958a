"""Test that every packing of prompts gives the same answers, from the model and from engines that
distribute batches over ranks.
"""

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.data import prompt_batches
from steelyard.data.prompt_batches import PromptBatch
from steelyard.engine import engine_rows
from steelyard.engine.job import Job
from steelyard.engine.work import Work
from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.models.attention import PrefixCache, make_packed_layout
from steelyard.models.llama import Llama, LlamaShape
from steelyard.plan import degrees
from steelyard.plan.degrees import Plan
from steelyard.run.clock import now
from steelyard.tasks.questions import Prompts
from steelyard.weights import llama_weights

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHAPE = LlamaShape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, positions=64
)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Return a small Llama with random fp32 weights."""
    built = llama_weights.build_llama(SHAPE, CPU, torch.float32)
    llama_weights.fill_random_llama_weights(built, 3)
    return built


def draw_prompts(seed: int) -> tuple[list[list[int]], list[int]]:
    """Return random prompts and their groups, shuffled. Prompts of group 0 share nothing, group 1
    has one prompt, and group 2 holds one prompt twice.
    """
    rng = random.Random(f"prompts:{seed}")
    pairs: list[tuple[list[int], int]] = []
    for group in range(rng.randrange(4, 8)):
        head = [rng.randrange(SHAPE.vocab) for _ in range(rng.randrange(1, 17))]
        members = 1 if group == 1 else rng.randrange(2, 8)
        for member in range(members):
            tail = [rng.randrange(SHAPE.vocab) for _ in range(rng.randrange(1, 9))]
            pairs.append(([member, *tail] if group == 0 else head + tail, group))
    pairs.append(next(pair for pair in pairs if pair[1] == 2))
    rng.shuffle(pairs)
    return [row for row, _ in pairs], [group for _, group in pairs]


def score_alone(model: Llama, rows: list[list[int]]) -> Tensor:
    """Return the logits of each prompt computed in a batch of its own."""
    return torch.cat(
        [
            compute_logits(model, prompt_batches.make_closed_batch(rows, [item]), None)
            for item in range(len(rows))
        ]
    )


def compute_logits(model: Llama, batch: PromptBatch, prefix: list[PrefixCache] | None) -> Tensor:
    """Return the logits of one batch, in the order of its items; `prefix` is the cache of shared
    prefixes, which the batch may fill.
    """
    gather = None if batch.gather is None else torch.from_numpy(batch.gather)
    attention_layout = make_packed_layout(batch.q_lens, batch.k_lens, CPU, gather)
    keep = None if batch.keep is None else slice(*batch.keep)
    tokens, positions, pick = (
        torch.from_numpy(array) for array in (batch.tokens, batch.positions, batch.pick)
    )
    with torch.no_grad():
        logits: Tensor = model(tokens, positions, attention_layout, "rows", pick, prefix, keep)
    return logits


def pack_closed_ranks(
    rows: list[list[int]], budget: int, seed: int, world: int
) -> list[list[PromptBatch]]:
    """Return the batches of each rank in division closed."""
    bins = prompt_batches.deal_equal_bins([len(row) for row in rows], budget, seed, world)
    return [
        [prompt_batches.make_closed_batch(rows, items) for items in bins[rank::world]]
        for rank in range(world)
    ]


def pack_open_ranks(
    rows: list[list[int]], groups: list[int], budget: int, seed: int, world: int
) -> list[list[PromptBatch]]:
    """Return the batches of each rank in division open, where shared prefixes are computed once."""
    shared_lengths = prompt_batches.measure_prefixes(rows, groups)
    return [
        [
            prompt_batches.make_open_batch(
                rows, pieces, next_pieces, shared_lengths, max(shared_lengths)
            )
            for pieces, next_pieces in zip(bins, [*bins[1:], None], strict=False)
        ]
        for bins in prompt_batches.plan_open_bins(rows, groups, budget, seed, world)
    ]


def collect_logits(model: Llama, ranks: list[list[PromptBatch]], cache: int | None) -> Tensor:
    """Return the logits of all prompts in their order, after checking that every prompt is answered
    once. The prefix cache holds NaN until a batch fills it, so that an unfilled one would show.
    """
    logits_by_item: dict[int, Tensor] = {}
    for rank_batches in ranks:
        prefix = None if cache is None else model.make_empty_prefix(cache)
        for layer_prefix in prefix or []:
            for cache_tensor in layer_prefix:
                cache_tensor.fill_(float("nan"))
        for batch in rank_batches:
            logits = compute_logits(model, batch, prefix)
            assert len(logits) == len(batch.items)
            for item, row in zip(batch.items, logits, strict=True):
                assert item not in logits_by_item
                logits_by_item[item] = row
    return torch.stack([logits_by_item[item] for item in range(len(logits_by_item))])


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [1, 23, 60, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_every_packing_gives_the_same_logits(
    model: Llama, seed: int, budget: int, world: int
) -> None:
    rows, groups = draw_prompts(seed)
    expected = score_alone(model, rows)
    shared_lengths = prompt_batches.measure_prefixes(rows, groups)
    assert 0 in shared_lengths
    assert max(shared_lengths) > 0
    closed = pack_closed_ranks(rows, budget, seed, world)
    opened = pack_open_ranks(rows, groups, budget, seed, world)
    for ranks, cache in ((closed, None), (opened, max(shared_lengths))):
        assert sum(batch.counts["samples"] for batches in ranks for batch in batches) == len(rows)
        logits = collect_logits(model, ranks, cache)
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) <= 1e-5
    assert sum(batch.counts["tokens"] for batches in closed for batch in batches) == sum(
        map(len, rows)
    )
    computed = sum(batch.counts["tokens"] for batches in opened for batch in batches)
    without_repeats = sum(shared_lengths) + sum(
        len(row) - shared_lengths[group] for row, group in zip(rows, groups, strict=True)
    )
    assert without_repeats <= computed <= without_repeats + (world - 1) * max(shared_lengths)
    assert world > 1 or computed == without_repeats


def test_different_prompts_have_different_logits(model: Llama) -> None:
    rows, _ = draw_prompts(0)
    logits = score_alone(model, rows)
    equal_pairs = [
        (first, second)
        for first in range(len(rows))
        for second in range(first)
        if float((logits[first] - logits[second]).abs().max()) <= 1e-3
    ]
    assert [(rows[first], first) for first, second in equal_pairs] == [
        (rows[second], first) for first, second in equal_pairs
    ]
    assert len(equal_pairs) == 1  # the prompt that draw_prompts repeats


# The same comparison with engines, which distribute the batches over ranks themselves.

LETTERS = [6, 22, 10, 24]  # token ids chosen so that each letter is some prompt's likeliest


def make_job(
    rows: list[list[int]], groups: list[int], division: str, rank: int, world: int, **tune: Any
) -> Job:
    """Return the scoring job of one rank with these prompts."""
    settings = ["question.model.vocab=61", *(f"tune.{key}={value}" for key, value in tune.items())]
    count = len(rows)
    plan = Plan(nodes=1, devices=world, tp=1, pp=1, dp=world, launcher="local")
    return Job(
        case=resolve.resolve_case(
            "llama2-7b-mmlu", "smoke", division=division, settings=settings
        ).case,
        work="score_choices",
        inputs=Prompts(
            rows, groups, list(range(count)), [0] * count, [0] * count, ["one"], LETTERS, 0
        ),
        weights=None,
        device=CpuTorchDevice(0, now),
        rank=rank,
        world=world,
        plan=plan,
        place=degrees.find_position(plan, rank),
        group=TensorParallelGroup(),
        steps=None,
    )


def run_engine(
    name: str, division: str, world: int, **tune: Any
) -> list[tuple[int, int, int, int]]:
    """Return (prompt, likeliest token, likeliest letter, finite) of all ranks, sorted by prompt."""
    rows, groups = draw_prompts(5)
    all_answers: list[tuple[int, int, int, int]] = []
    for rank in range(world):
        engine = engine_rows.load_engine(name, "score_choices")(
            make_job(rows, groups, division, rank, world, **tune)
        )
        engine.prepare("val", lambda part: nullcontext())
        works = [item for item in engine.work("val") if isinstance(item, Work)]
        assert len(works) == engine.total("val")
        outputs = engine.outputs("val")
        assert sorted(row for work in works for row in work.rows or ()) == sorted(outputs["items"])
        all_answers += zip(
            outputs["items"], outputs["best"], outputs["choice"], outputs["finite"], strict=True
        )
    return sorted(all_answers)


@pytest.mark.parametrize("world", [1, 3, 40])  # with 40 ranks, some have no prompts
def test_engines_give_the_same_answers(world: int) -> None:
    assert len(draw_prompts(5)[0]) < 40
    expected = run_engine("transformers", "closed", 1, batching="single")
    assert [item for item, *_ in expected] == list(range(len(draw_prompts(5)[0])))
    assert len({token for _, token, _, _ in expected}) >= 8
    assert {choice for _, _, choice, _ in expected} == {0, 1, 2, 3}
    assert run_engine("torch", "closed", world, batch_tokens=50) == expected
    assert run_engine("torch", "open", world, batch_tokens=50) == expected
    assert run_engine("transformers", "closed", world, batch_tokens=50) == expected
