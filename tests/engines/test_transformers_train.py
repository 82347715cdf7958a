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
from steelyard.engine import engine_rows
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


def build_engine(
    engine_name: str,
    case_name: str = CASES[0],
    precision: str | None = None,
    dp: int = 1,
    settings: tuple[str, ...] = (),
) -> Any:
    """Build an engine for rank 0 of `dp` replicas of a case at size smoke, on a CPU."""
    layout = Plan(nodes=1, devices=dp, tp=1, pp=1, dp=dp, launcher="local")
    resolved = resolve.resolve_case(case_name, "smoke", precision, settings=list(settings)).case
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
    return engine_rows.load_engine(engine_name, question.task_row.work)(job)


def run_training(engine: Any) -> dict[str, list[float]]:
    """Train and return `loss` and `grad_norm` of every step, and the mean held-out loss `before`
    and `after`.
    """
    out = {}
    for name in ("before", "train", "after"):
        engine.prepare(name, lambda part: nullcontext())
        works = [item for item in engine.work(name) if isinstance(item, Work)]
        assert len(works) == engine.total(name)
        if name == "train":
            out |= {
                key: [float(work.values[key]) for work in works] for key in ("loss", "grad_norm")
            }
        else:
            outputs = engine.outputs(name)
            out[name] = [outputs["nll"] / outputs["targets"]]
    return out


def assert_same_training(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Assert that losses agree to 1e-5 and gradient norms to 1e-4 of their size."""
    for key in ("loss", "before", "after"):
        assert actual[key] == pytest.approx(expected[key], abs=1e-5, rel=0), key
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def torch_trained() -> dict[str, dict[str, list[float]]]:
    """Losses and norms of engine torch, by case."""
    return {case_name: run_training(build_engine("torch", case_name)) for case_name in CASES}


@pytest.mark.parametrize("attention", ["auto", "rows"])
@pytest.mark.parametrize("of", CASES)
def test_ten_steps_equal_engine_torch(
    of: str, attention: str, torch_trained: dict[str, Any]
) -> None:
    training_engine = build_engine("transformers", of, settings=(f"tune.attention={attention}",))
    assert_same_training(run_training(training_engine), torch_trained[of])
    details = training_engine.details()
    assert details["attention"] == {"auto": "sdpa"}.get(attention, attention)
    assert training_engine.weights["source"] == "random"
    if attention == "auto":
        assert 0 < details["masked"] <= details["batches"]


@pytest.mark.parametrize(
    "settings", [("tune.recompute=full",), ("tune.micro_batch=1",), ("tune.micro_batch=3",)]
)
def test_recomputation_and_micro_batch_size_do_not_change_results(
    settings: tuple[str, ...], torch_trained: dict[str, Any]
) -> None:
    assert_same_training(
        run_training(build_engine("transformers", settings=settings)), torch_trained[CASES[0]]
    )


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_16_bit_precisions_stay_near_engine_torch(precision: str) -> None:
    by_torch, by_transformers = (
        run_training(build_engine(name, precision=precision)) for name in ("torch", "transformers")
    )
    assert by_transformers["loss"][0] == pytest.approx(by_torch["loss"][0], rel=0.01)
    assert by_transformers["loss"][-1] == pytest.approx(by_torch["loss"][-1], rel=0.05)
    assert by_transformers["after"][0] < by_transformers["before"][0]


def test_biases_are_those_of_the_three_projections_and_learn() -> None:
    settings = ("question.model.qkv_bias=true",)
    training_engine = build_engine("transformers", settings=settings)
    assert_same_training(
        run_training(training_engine), run_training(build_engine("torch", settings=settings))
    )
    biases = {
        name: p
        for name, p in training_engine.trainer.model.module.named_parameters()
        if name.endswith("bias")
    }
    assert all(bool((p != 0).any()) for p in biases.values())
    assert len(biases) == 2 * 3  # 2 layers; q, k and v, as in Qwen2


def test_tied_embeddings_train_as_in_engine_torch() -> None:
    settings = ("question.model.tied=true",)
    assert_same_training(
        run_training(build_engine("transformers", settings=settings)),
        run_training(build_engine("torch", settings=settings)),
    )


# Segments of a row do not see each other.


def make_row(lens: tuple[int, ...], padding: int, seed: int) -> TrainingRow:
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


def segment_losses(engine: Any, rows: list[TrainingRow]) -> list[float]:
    """Return the loss of each segment that has targets, always computed with a mask."""
    pack = pack_rows(rows)
    out, begin = [], 0
    for size in pack.segment_lengths:
        inside = (begin <= pack.pick) & (pack.pick < begin + size)
        begin += size
        if inside.any():
            micro = engine.batches.to_device(
                replace(pack, pick=pack.pick[inside], targets=pack.targets[inside])
            )
            with torch.no_grad():
                out.append(float(engine.trainer.evaluate(replace(micro, begins_rows=False))))
    return out


@pytest.fixture(scope="module", params=["auto", "rows"])
def ready(request: pytest.FixtureRequest) -> Any:
    """Engine transformers prepared for the train pass, with each kind of attention."""
    training_engine = build_engine(
        "transformers", settings=("tune.micro_batch=2", f"tune.attention={request.param}")
    )
    training_engine.prepare("train", lambda part: nullcontext())
    return training_engine


def test_segments_do_not_see_each_other(ready: Any) -> None:
    rows = [make_row((40, 1, 50), 37, 0), make_row((2, 2, 124), 0, 1)]
    before = segment_losses(ready, rows)
    # (row, first token) of each segment with targets; a segment of one token has none
    learning = [(0, 0), (0, 41), (1, 0), (1, 2), (1, 4)]
    assert len(before) == len(learning)
    for changed, (row_index, first) in enumerate(learning):
        tokens = [segmented_row.tokens.copy() for segmented_row in rows]
        tokens[row_index][first] ^= 1
        after = segment_losses(
            ready,
            [
                replace(segmented_row, tokens=new)
                for segmented_row, new in zip(rows, tokens, strict=True)
            ],
        )
        differs = [abs(a - b) > 1e-5 for a, b in zip(after, before, strict=True)]
        assert differs == [i == changed for i in range(len(before))]


def test_the_mask_is_left_out_where_it_would_change_nothing() -> None:
    training_engine = build_engine("transformers", settings=("tune.micro_batch=2",))
    training_engine.prepare("train", lambda part: nullcontext())
    whole, padded, two_segments = (
        make_row((128,), 0, 2),
        make_row((60,), 68, 3),
        make_row((60, 60), 8, 4),
    )
    for rows, alone in (
        ((whole, padded), True),
        ((whole, two_segments), False),
        ((two_segments, two_segments), False),
    ):
        micro = training_engine.batches.to_device(pack_rows(list(rows)))
        assert micro.begins_rows is alone
        with torch.no_grad():
            masked, unmasked = (
                float(training_engine.trainer.evaluate(replace(micro, begins_rows=without_mask)))
                for without_mask in (False, True)
            )
        assert (abs(masked - unmasked) <= 1e-3) is alone  # sums over 100 tokens and more
    assert training_engine.details()["masked"] == 3
    assert training_engine.details()["batches"] == 6


@pytest.mark.parametrize("segments", [((128,), 0), ((60, 60), 8)])
def test_warming_up_runs_forward_with_and_without_mask_and_gradient(
    segments: tuple[tuple[int, ...], int],
) -> None:
    training_engine = build_engine("transformers", settings=("tune.micro_batch=1",))
    training_engine.prepare("train", lambda part: nullcontext())
    mask_and_grad = set()

    def record_call(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask_and_grad.add((kwargs["attention_mask"] is not None, torch.is_grad_enabled()))

    training_engine.trainer.model.module.model.layers[0].register_forward_pre_hook(
        record_call, with_kwargs=True
    )
    training_engine.trainer.warm_up(
        training_engine.batches.to_device(pack_rows([make_row(*segments, 5)]))
    )
    assert mask_and_grad == {(True, True), (True, False), (False, True), (False, False)}
    assert training_engine.details()["batches"] == 0
    assert all(p.grad is None for p in training_engine.trainer.model.module.parameters())


# Compilation, refusals, and a run from the command line.


@pytest.mark.full
@pytest.mark.parametrize("settings", [(), ("tune.recompute=full",)])
def test_nothing_is_compiled_after_prepare(
    settings: tuple[str, ...], torch_trained: dict[str, Any]
) -> None:
    """Neither with a mask nor without."""
    torch._dynamo.reset()
    counters.clear()
    training_engine = build_engine("transformers", settings=("tune.compile=true", *settings))
    training_engine.prepare("train", lambda part: nullcontext())
    graphs = counters["stats"]["unique_graphs"]
    assert_same_training(run_training(training_engine), torch_trained[CASES[0]])
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
def test_unsupported_settings_are_refused_in_one_line(
    settings: tuple[str, ...], dp: int, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as failure:
        build_engine("transformers", dp=dp, settings=settings)
    assert "\n" not in str(failure.value)


@pytest.mark.full
def test_a_smoke_run_from_the_command_line_is_valid(shell: Shell) -> None:
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
