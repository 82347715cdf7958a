"""The scheduler of generation: every request ends, blocks never leak, the order is fair, and
sequences that run out of blocks are computed again.
"""

import random

import pytest

from steelyard.engines.torch.generate.scheduler import GeneratedSequence, Scheduler, Step
from steelyard.errors import RequestError


def describe(step: Step | None) -> tuple[str, list[tuple[int, int, int]]] | None:
    """Return a step as (phase, [(number, begin, end) of each chunk])."""
    if step is None:
        return None
    return step.phase, [(one.sequence.number, one.begin, one.end) for one in step.chunks]


def test_prompts_are_computed_in_chunks_between_steps_that_decode():
    scheduler = Scheduler(blocks=8, block_tokens=4, slots=2, batch_tokens=6)
    scheduler.add(0, prompt_tokens=4, output_tokens=3)
    scheduler.add(1, prompt_tokens=7, output_tokens=2)
    scheduler.add(2, prompt_tokens=3, output_tokens=1)
    assert [describe(scheduler.plan_step()) for _ in range(8)] == [
        ("prefill", [(0, 0, 4), (1, 0, 2)]),
        ("decode", [(0, 4, 5)]),
        ("prefill", [(1, 2, 7)]),
        ("decode", [(0, 5, 6), (1, 7, 8)]),
        ("prefill", [(2, 0, 3)]),  # once a slot is free
        None,
        None,
        None,
    ]
    assert scheduler.free_blocks == 8


def test_a_request_begins_once_all_outputs_to_come_fit():
    """Two blocks of four tokens: each request needs two, in the end."""
    for admission, begun in (("outputs", [0]), ("prompts", [0, 1])):
        scheduler = Scheduler(2, 4, 2, 64, admission)
        for number in range(2):
            scheduler.add(number, prompt_tokens=4, output_tokens=4)
        assert describe(scheduler.plan_step()) == ("prefill", [(number, 0, 4) for number in begun])


def test_a_cache_for_two_requests_runs_two_at_any_time():
    """Each needs one block to its end: a new one does not wait for the end of the other."""
    scheduler = Scheduler(blocks=2, block_tokens=64, slots=2, batch_tokens=64)
    scheduler.add(0, prompt_tokens=48, output_tokens=8)
    assert describe(scheduler.plan_step()) == ("prefill", [(0, 0, 48)])
    assert describe(scheduler.plan_step()) == ("decode", [(0, 48, 49)])
    scheduler.add(1, prompt_tokens=48, output_tokens=8)
    assert describe(scheduler.plan_step()) == ("prefill", [(1, 0, 48)])


def test_what_fits_is_counted_block_by_block():
    """Against a count of every block in every step, with all bounds left out."""
    draw = random.Random(3)
    for _ in range(2000):
        blocks, block_tokens = draw.randint(1, 12), draw.choice((1, 3, 8))
        scheduler = Scheduler(blocks, block_tokens, 8, 8)
        sequences = []
        for number in range(draw.randint(1, 6)):
            prompt, output = draw.randint(1, 20), draw.randint(1, 12)
            known = prompt + draw.randint(0, output - 1)
            sequences.append(GeneratedSequence(number, prompt, prompt + output, known))
        most = max(
            sum(
                -(-(one.tokens + step) // block_tokens)
                for one in sequences
                if one.tokens + step < one.limit
            )
            for step in range(12)
        )
        assert scheduler._fit_together(sequences) == (most <= blocks)


def test_the_sequence_admitted_last_is_preempted_and_computed_again_with_its_tokens():
    scheduler = Scheduler(blocks=3, block_tokens=4, slots=2, batch_tokens=64, admission="prompts")
    for number in range(2):
        scheduler.add(number, prompt_tokens=4, output_tokens=6)
    steps = []
    while (step := scheduler.plan_step()) is not None:
        steps.append(describe(step))
    assert steps == [
        ("prefill", [(0, 0, 4), (1, 0, 4)]),
        ("decode", [(0, 4, 5)]),  # the third block is for the first
        *[("decode", [(0, i, i + 1)]) for i in range(5, 8)],
        ("decode", [(0, 8, 9)]),
        ("prefill", [(1, 0, 5)]),
        *[("decode", [(1, i, i + 1)]) for i in range(5, 9)],
    ]
    assert scheduler.preemptions == 1
    assert scheduler.free_blocks == 3


def test_a_request_that_never_fits_is_refused():
    scheduler = Scheduler(2, 4, 1, 64)
    scheduler.add(0, prompt_tokens=4, output_tokens=5)  # the last token needs no room
    with pytest.raises(RequestError, match=r"4 \+ 6 tokens needs 3 blocks .* which has 2"):
        scheduler.add(1, prompt_tokens=4, output_tokens=6)


def test_a_text_that_ends_early_frees_its_blocks():
    scheduler = Scheduler(4, 4, 2, 64)
    sequence = scheduler.add(0, prompt_tokens=5, output_tokens=8)
    scheduler.plan_step()
    scheduler.plan_step()
    scheduler.finish(sequence)
    scheduler.finish(sequence)
    assert scheduler.free_blocks == 4
    assert scheduler.plan_step() is None


@pytest.mark.parametrize("seed", range(100))
def test_random_requests(seed: int) -> None:
    """A hundred schedules a seed: requests arrive in any step, and some texts end early."""
    draw = random.Random(seed)
    for _ in range(100):
        check_random_schedule(draw)


def check_random_schedule(draw: random.Random) -> None:
    """Run one schedule of random requests to its end, and check each of its steps."""
    block_tokens, blocks = draw.choice((1, 2, 5, 16)), draw.randint(8, 40)
    slots, batch_tokens = draw.randint(1, 8), draw.randint(1, 40)
    scheduler = Scheduler(
        blocks, block_tokens, slots, batch_tokens, draw.choice(("outputs", "prompts"))
    )
    room = blocks * block_tokens
    to_come = []
    for number in range(draw.randint(1, 12)):
        prompt = draw.randint(1, max(1, min(40, room - 1)))
        to_come.append((number, prompt, draw.randint(1, max(1, min(20, room + 1 - prompt)))))
    limits = {number: prompt + output for number, prompt, output in to_come}
    sampled = dict.fromkeys(limits, 0)
    begun: list[int] = []
    open_sequences: dict[int, GeneratedSequence] = {}
    steps, last_phase = 0, ""
    while to_come or open_sequences:
        while to_come and draw.random() < 0.5:
            number, prompt, output = to_come.pop(0)
            open_sequences[number] = scheduler.add(number, prompt, output)
        could_decode = any(one.is_decoding for one in scheduler.running)
        preemptions = scheduler.preemptions
        step = scheduler.plan_step()
        steps += 1
        assert steps < 20_000, "a schedule that does not end"
        if step is None:
            assert not open_sequences, "requests are left, and nothing is planned"
            continue
        check_step(step, scheduler)
        if step.phase == last_phase == "prefill":
            assert not could_decode or scheduler.preemptions > preemptions
        last_phase = step.phase
        begun += [
            chunk.sequence.number
            for chunk in step.chunks
            if chunk.begin == 0 and chunk.sequence.number not in begun
        ]
        for chunk in step.chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            sampled[sequence.number] += 1
            assert chunk.end + 1 == sequence.tokens
            if sequence.tokens == sequence.limit:
                del open_sequences[sequence.number]
            elif draw.random() < 0.02:
                scheduler.finish(sequence)
                del open_sequences[sequence.number]
                limits[sequence.number] = 0
    assert begun == sorted(begun), "requests began in another order than they arrived"
    for number, limit in limits.items():
        assert limit == 0 or sampled[number] > 0
    assert scheduler.free_blocks == blocks
    assert not scheduler.running
    assert not scheduler.waiting


def check_step(step: Step, scheduler: Scheduler) -> None:
    """Check that a step keeps to the limits, and that no block has two owners."""
    tokens = [chunk.end - chunk.begin for chunk in step.chunks]
    assert min(tokens) > 0
    if step.phase == "prefill":
        assert sum(tokens) <= scheduler.batch_tokens
    else:
        assert set(tokens) == {1}
        assert all(chunk.samples for chunk in step.chunks)
    owned = [block for one in scheduler.running for block in one.blocks]
    assert len(owned) == len(set(owned))
    assert len(owned) + scheduler.free_blocks == scheduler.blocks
    used = [block for chunk in step.chunks for block in chunk.blocks]
    assert len(used) == len(set(used))
    for chunk in step.chunks:
        assert len(chunk.blocks) * scheduler.block_tokens >= chunk.end
    slots = [one.slot for one in (*scheduler.running, *scheduler.waiting) if one.slot is not None]
    assert len(slots) == len(set(slots))
