"""Engine transformers trains as engine torch does: equal losses and norms, and segments that do not
see each other.
"""

from contextlib import nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from fixtures.commands import Shell
from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.data.training_rows import IGNORED, TrainingRow
from steelyard.engine import engine_rows as engine_rows
from steelyard.engine.job import Job
from steelyard.engine.work import Work
from steelyard.engines.torch.tensor_parallel import TensorParallelGroup
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.plan.degrees import Plan
from steelyard.tasks.task import Sources
from steelyard.training.packing import pack_rows

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = ("llama1-7b-openwebtext", "aquila2-7b-alpaca")
STEPS = 10


def engine(
    name: str,
    of: str = CASES[0],
    precision: str | None = None,
    dp: int = 1,
    settings: tuple[str, ...] = (),
) -> Any:
    """Build an engine for rank 0 of `dp` replicas of a case at size smoke, on a CPU."""
    layout = Plan(nodes=1, devices=dp, tp=1, pp=1, dp=dp, launcher="local")
    resolved = resolve.resolve_case(of, "smoke", precision, settings=list(settings)).case
    question = resolved.question
    job = Job(
        case=resolved,
        work=resolved.question.task_row.work,
        inputs=question.task_row.prepare(
            question.describe_for_task(Sources(None, None, None), None, True, {})
        ).inputs,
        weights=None,
        device=CpuTorchDevice(0, monotonic),
        rank=0,
        world=dp,
        plan=layout,
        place=degrees.find_position(layout, 0),
        group=TensorParallelGroup(),
        steps=STEPS,
    )
    return engine_rows.load_engine(name, question.task_row.work)(job)


def trained(one: Any) -> dict[str, list[float]]:
    """Train and return `loss` and `grad_norm` of every step, and the mean held-out loss `before`
    and `after`.
    """
    out = {}
    for name in ("before", "train", "after"):
        one.prepare(name, lambda part: nullcontext())
        works = [item for item in one.work(name) if isinstance(item, Work)]
        assert len(works) == one.total(name)
        if name == "train":
            out |= {
                key: [float(work.values[key]) for work in works] for key in ("loss", "grad_norm")
            }
        else:
            found = one.outputs(name)
            out[name] = [found["nll"] / found["targets"]]
    return out


def same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Assert that losses agree to 1e-5 and gradient norms to 1e-4 of their size."""
    for key in ("loss", "before", "after"):
        assert found[key] == pytest.approx(expected[key], abs=1e-5, rel=0), key
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def torch_trained() -> dict[str, dict[str, list[float]]]:
    """Losses and norms of engine torch, by case."""
    return {of: trained(engine("torch", of)) for of in CASES}


@pytest.mark.parametrize("attention", ["auto", "rows"])
@pytest.mark.parametrize("of", CASES)
def test_ten_steps_as_engine_torch(of: str, attention: str, torch_trained: dict[str, Any]) -> None:
    one = engine("transformers", of, settings=(f"tune.attention={attention}",))
    same(trained(one), torch_trained[of])
    details = one.details()
    assert details["attention"] == {"auto": "sdpa"}.get(attention, attention)
    assert one.weights["source"] == "random"
    if attention == "auto":
        assert 0 < details["masked"] <= details["batches"]


@pytest.mark.parametrize(
    "settings", [("tune.recompute=full",), ("tune.micro_batch=1",), ("tune.micro_batch=3",)]
)
def test_how_it_is_computed_changes_nothing(
    settings: tuple[str, ...], torch_trained: dict[str, Any]
) -> None:
    same(trained(engine("transformers", settings=settings)), torch_trained[CASES[0]])


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_other_precisions(precision: str) -> None:
    ours, theirs = (
        trained(engine(name, precision=precision)) for name in ("torch", "transformers")
    )
    assert theirs["loss"][0] == pytest.approx(ours["loss"][0], rel=0.01)
    assert theirs["loss"][-1] == pytest.approx(ours["loss"][-1], rel=0.05)
    assert theirs["after"][0] < theirs["before"][0]


def test_biases_are_those_of_the_three_projections_and_learn() -> None:
    settings = ("question.model.qkv_bias=true",)
    one = engine("transformers", settings=settings)
    same(trained(one), trained(engine("torch", settings=settings)))
    biases = {
        name: p for name, p in one.trainer.model.module.named_parameters() if name.endswith("bias")
    }
    assert all(bool((p != 0).any()) for p in biases.values())
    assert len(biases) == 2 * 3  # 2 layers; q, k and v, as in Qwen2


def test_tied_tables() -> None:
    settings = ("question.model.tied=true",)
    same(
        trained(engine("transformers", settings=settings)),
        trained(engine("torch", settings=settings)),
    )


# Segments of a row do not see each other.


def row(lens: tuple[int, ...], padding: int, seed: int) -> TrainingRow:
    """Return a row of segments of random tokens, then padding. The last token of a segment has no
    target.
    """
    rng = np.random.default_rng(seed)
    real = sum(lens)
    tokens = np.concatenate((rng.integers(0, 256, real), np.zeros(padding, dtype=np.int64)))
    targets = np.append(tokens[1:], IGNORED)
    targets[np.cumsum(lens) - 1] = IGNORED
    targets[real:] = IGNORED
    return TrainingRow(tokens, targets, (*lens, padding) if padding else lens, real, len(lens))


def by_segment(one: Any, rows: list[TrainingRow]) -> list[float]:
    """Return the loss of each segment that has targets, always computed with a mask."""
    pack = pack_rows(rows)
    out, begin = [], 0
    for size in pack.segment_lengths:
        inside = (begin <= pack.pick) & (pack.pick < begin + size)
        begin += size
        if inside.any():
            micro = one.batches.to_device(
                replace(pack, pick=pack.pick[inside], targets=pack.targets[inside])
            )
            with torch.no_grad():
                out.append(float(one.trainer.evaluate(replace(micro, begins_rows=False))))
    return out


@pytest.fixture(scope="module", params=["auto", "rows"])
def ready(request: pytest.FixtureRequest) -> Any:
    """Engine transformers prepared for the train pass, with each kind of attention."""
    one = engine("transformers", settings=("tune.micro_batch=2", f"tune.attention={request.param}"))
    one.prepare("train", lambda part: nullcontext())
    return one


def test_segments_do_not_see_each_other(ready: Any) -> None:
    rows = [row((40, 1, 50), 37, 0), row((2, 2, 124), 0, 1)]
    before = by_segment(ready, rows)
    # (row, first token) of each segment with targets; a segment of one token has none
    learning = [(0, 0), (0, 41), (1, 0), (1, 2), (1, 4)]
    assert len(before) == len(learning)
    for changed, (which, first) in enumerate(learning):
        tokens = [one.tokens.copy() for one in rows]
        tokens[which][first] ^= 1
        after = by_segment(
            ready, [replace(one, tokens=new) for one, new in zip(rows, tokens, strict=True)]
        )
        differs = [abs(a - b) > 1e-5 for a, b in zip(after, before, strict=True)]
        assert differs == [i == changed for i in range(len(before))]


def test_no_mask_where_it_would_change_nothing() -> None:
    one = engine("transformers", settings=("tune.micro_batch=2",))
    one.prepare("train", lambda part: nullcontext())
    whole, padded, two = row((128,), 0, 2), row((60,), 68, 3), row((60, 60), 8, 4)
    for rows, alone in (((whole, padded), True), ((whole, two), False), ((two, two), False)):
        micro = one.batches.to_device(pack_rows(list(rows)))
        assert micro.begins_rows is alone
        with torch.no_grad():
            masked, unmasked = (
                float(one.trainer.evaluate(replace(micro, begins_rows=how)))
                for how in (False, True)
            )
        assert (abs(masked - unmasked) <= 1e-3) is alone  # sums over 100 tokens and more
    assert one.details()["masked"] == 3
    assert one.details()["batches"] == 6


@pytest.mark.parametrize("segments", [((128,), 0), ((60, 60), 8)])
def test_warming_up_meets_both_graphs(segments: tuple[tuple[int, ...], int]) -> None:
    one = engine("transformers", settings=("tune.micro_batch=1",))
    one.prepare("train", lambda part: nullcontext())
    seen = set()

    def look(module: Any, given: Any, named: dict[str, Any]) -> None:
        seen.add((named["attention_mask"] is not None, torch.is_grad_enabled()))

    one.trainer.model.module.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    one.trainer.warm_up(one.batches.to_device(pack_rows([row(*segments, 5)])))
    assert seen == {(True, True), (True, False), (False, True), (False, False)}
    assert one.details()["batches"] == 0
    assert all(p.grad is None for p in one.trainer.model.module.parameters())


# Compilation, refusals, and a run from the command line.


@pytest.mark.full
@pytest.mark.parametrize("settings", [(), ("tune.recompute=full",)])
def test_compiled(settings: tuple[str, ...], torch_trained: dict[str, Any]) -> None:
    """Neither with a mask nor without."""
    torch._dynamo.reset()
    counters.clear()
    one = engine("transformers", settings=("tune.compile=true", *settings))
    one.prepare("train", lambda part: nullcontext())
    graphs = counters["stats"]["unique_graphs"]
    same(trained(one), torch_trained[CASES[0]])
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("settings", "dp", "words"),
    [
        (("tune.recompute=selective",), 1, "whole layers; allowed: tune.recompute=none or full"),
        (("tune.attention=magic",), 1, "allowed: auto, sdpa, efficient, flash, packed, rows"),
        ((), 2, "add --set tune.sharding=3"),
    ],
)
def test_refusals(settings: tuple[str, ...], dp: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as failure:
        engine("transformers", dp=dp, settings=settings)
    assert "\n" not in str(failure.value)


@pytest.mark.full
def test_command_line(shell: Shell) -> None:
    done = shell(
        "run",
        CASES[0],
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--engine",
        "transformers",
        "--out",
        shell.out,
        "--json",
    )
    assert done.code == 0, done.err
    (record,) = shell.records()
    assert record["engine"]["name"] == "transformers"
    assert record["engine"]["details"]["attention"] == "sdpa"
    assert record["status"] == "valid", record["reasons"]
