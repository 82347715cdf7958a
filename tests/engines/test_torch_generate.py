"""Engine torch generates: its tokens equal those of transformers' `generate`, whatever the order in
which requests are admitted, the size of chunks, and whether sequences are preempted.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.generation_jobs import REQUESTS, make_job, make_loop, run_pass
from steelyard.engine import engine_rows
from steelyard.engine.job import Job
from steelyard.engines.transformers.score import TransformersScorer
from steelyard.models.shapes import LinearRope
from steelyard.run.clock import now
from steelyard.run.requests import RequestTrace

pytestmark = pytest.mark.usefixtures("one_thread")


def generate_plainly(job: Job, trace: RequestTrace) -> list[list[int]]:
    """Return what transformers' `generate` answers to each request."""
    scorer = TransformersScorer(job)
    scorer.load()
    model: Any = scorer.model.model
    answers = []
    for state in trace.states:
        prompt = torch.tensor([list(state.request.prompt)])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=state.request.output_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )
        answers.append(out[0, prompt.shape[1] :].tolist())
    return answers


LOADS = {
    "one by one": ("load.concurrency=1",),
    "closed loop": ("load.concurrency=4",),
    "offline": ("load.mode=offline",),
    "open loop": ("load.rate=1000",),
    "chunks of 7": ("tune.batch_tokens=7", "load.mode=offline"),
    "preempted": (
        "tune.kv_blocks=3",
        "tune.kv_admission=prompts",
        "load.mode=offline",
        "question.data.prompt_tokens=60",
        "question.data.output_tokens=20",
    ),
    "every head its key": ("question.model.kv_heads=4",),
    "qk norm": ("question.model.qk_norm=true",),
    "bias": ("question.model.qkv_bias=true",),
    "window": ("question.model.window=16",),
    "tied": ("question.model.tied=true",),
}


@pytest.mark.parametrize("settings", LOADS.values(), ids=LOADS)
def test_tokens_are_those_of_transformers(settings: tuple[str, ...]) -> None:
    job = make_job(*settings)
    engine = engine_rows.load_engine("torch", "generate")(job)
    trace = run_pass(engine, job)
    assert [state.end.outcome for state in trace.states] == ["ok"] * REQUESTS
    answers = [trace.get_output_ids(number, job.inputs) for number in range(REQUESTS)]
    assert answers == generate_plainly(job, trace)
    if "tune.kv_admission=prompts" in settings:
        assert engine.details()["preemptions"] > 0


@pytest.mark.parametrize("scaling", [None, LinearRope(kind="linear", factor=4.0)])
def test_tokens_under_every_scaling_of_rotary_positions(scaling: LinearRope | None) -> None:
    """That of Llama 3 is the case's own."""
    job = make_job("load.mode=offline")
    question = job.case.question
    model = question.model.model_copy(update={"rope_scaling": scaling})
    question = question.model_copy(update={"model": model})
    job = replace(job, case=job.case.model_copy(update={"question": question}))
    trace = run_pass(engine_rows.load_engine("torch", "generate")(job), job)
    answers = [trace.get_output_ids(number, job.inputs) for number in range(REQUESTS)]
    assert answers == generate_plainly(job, trace)


def test_a_text_ends_at_the_token_that_ends_it() -> None:
    """What was launched behind the end is dropped, and its blocks are free again."""
    job = make_job("load.mode=offline", "question.data.output_tokens=12")
    whole = run_pass(engine_rows.load_engine("torch", "generate")(job), job)
    answers = [whole.get_output_ids(number, job.inputs) for number in range(REQUESTS)]
    assert answers[0] is not None
    end = answers[0][4]
    engine: Any = engine_rows.load_engine("torch", "generate")(job)
    engine.prepare("generate", lambda name: nullcontext())
    loop = make_loop(job)
    with engine.open_port("generate", loop, now) as port:
        port._end_token = end
        loop.run(port)
    found = [list(state.ids) for state in loop._states]
    cut = [one[: one.index(end) + 1] if end in one else one for one in map(list, answers)]
    assert found == cut
    assert len(found[0]) < 12
    assert port._scheduler.free_blocks == port._scheduler.blocks


def test_a_request_that_the_cache_has_no_room_for_is_refused() -> None:
    job = make_job("tune.kv_blocks=1", "question.data.prompt_tokens=60", "load.mode=offline")
    job = replace(job, inputs=replace(job.inputs, output_rule=(3, 9)))
    engine = engine_rows.load_engine("torch", "generate")(job)
    trace = run_pass(
        engine,
        replace(
            job,
            case=job.case.model_copy(
                update={"tune": job.case.tune.model_copy(update={"warmup": 0})}
            ),
        ),
    )
    outcomes = {state.request.output_tokens <= 5: state.end.outcome for state in trace.states}
    assert outcomes == {True: "ok", False: "refused"}
    refused = next(state for state in trace.states if state.end.outcome == "refused")
    assert "needs 2 blocks of the cache, which has 1; raise tune.kv_blocks" in str(
        refused.end.error
    )


def test_steps_are_marked_with_what_they_computed() -> None:
    job = make_job("tune.batch_tokens=30", "load.concurrency=2")
    engine = engine_rows.load_engine("torch", "generate")(job)
    trace = run_pass(engine, job)
    steps = [work.counts for work, _, _ in trace.steps.marks]
    prompts = sum(len(state.request.prompt) for state in trace.states)
    outputs = sum(len(state.ids) for state in trace.states)
    assert sum(step.get("prefill_tokens", 0) for step in steps) == prompts
    assert sum(step["tokens"] for step in steps) == prompts + outputs - REQUESTS
    assert sum(step["logits"] for step in steps) == outputs
    assert all(step["tokens"] <= 30 for step in steps if step.get("prefill_tokens"))
    lengths = [(len(state.request.prompt), state.request.output_tokens) for state in trace.states]
    seen = sum(prompt + i for prompt, output in lengths for i in range(1, output))
    assert sum(step.get("context_tokens", 0) for step in steps) == seen
    pairs = sum(length * (length + 1) // 2 for length in (p + n - 1 for p, n in lengths))
    assert sum(step["pairs"] for step in steps) == pairs
