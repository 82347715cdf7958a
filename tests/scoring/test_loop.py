"""Test the scoring loop with a fake scorer, whose logits always predict the token after the current
one.
"""

import re
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fixtures.commands import Shell
from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.engine.job import Job
from steelyard.engine.work import Phase, Work
from steelyard.engines.torch import tensor_parallel
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.plan.degrees import Plan, RankPosition
from steelyard.scoring.batches import ScoringBatches, plan_packed_batches, plan_padded_batches
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.tasks.task import Sources

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "short_engine"
QUESTIONS_CASE, PASSAGES_CASE = "llama2-7b-mmlu", "aquila2-34b-lambada"


class FakeScorer(Scorer):
    """A scorer that predicts token + 1 everywhere and records the loop's calls in `calls`."""

    def __init__(self, vocab: int, compiles: bool = False) -> None:
        self.vocab, self.compiles, self.calls = vocab, compiles, []

    def load(self) -> dict[str, Any]:
        self.calls.append("load")
        return {"source": "fake"}

    def use(self, compiled: bool) -> None:
        self.calls.append(f"use {compiled}")

    def to_device(self, batch: Any) -> Tensor:
        self.calls.append("to_device")
        return torch.from_numpy(batch.tokens).flatten()

    def hidden(self, inputs: Tensor, pick: Tensor) -> Tensor:
        self.calls.append("hidden")
        assert torch.is_inference_mode_enabled()
        return F.one_hot((inputs[pick] + 1) % self.vocab, self.vocab).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def tensors(self) -> list[Tensor]:
        return [torch.zeros(3, dtype=torch.bfloat16)]

    def details(self) -> dict[str, Any]:
        return {"attention": "none"}


def make_job(
    case: str = QUESTIONS_CASE,
    settings: tuple[str, ...] = (),
    replica: int = 0,
    dp: int = 1,
    steps: int | None = None,
) -> Job:
    """Return the job of one data-parallel replica with the smoke data of a case."""
    resolved = resolve.resolve_case(case, "smoke", settings=list(settings)).case
    plan = Plan(nodes=1, devices=dp, tp=1, pp=1, dp=dp, launcher="local")
    prepared = resolved.question.task_row.prepare(
        resolved.question.describe_for_task(Sources(None, None, None), None, True, {})
    )
    group = tensor_parallel.create_tensor_parallel_group(
        degrees.make_plan(resolved, 1, 1), 0, torch.device("cpu")
    )
    place = RankPosition(tp=0, pp=0, dp=replica)
    rank_fields = {
        "weights": None,
        "device": CpuTorchDevice(0, monotonic),
        "rank": replica,
        "world": dp,
        "plan": plan,
        "place": place,
    }
    return Job(
        case=resolved,
        work=resolved.question.task_row.work,
        inputs=prepared.inputs,
        group=group,
        steps=steps,
        **rank_fields,
    )


def make_loop(
    score_job: Job, batches: ScoringBatches | None = None, compiles: bool = False
) -> ScoringLoop:
    """Return a scoring loop with a fake scorer, over packed batches unless others are given."""
    return ScoringLoop(
        score_job,
        FakeScorer(score_job.case.question.model.vocab, compiles),
        batches or plan_packed_batches(score_job, "fake"),
    )


def run_pass(engine: ScoringLoop, name: str = "val") -> list[Phase | Work]:
    """Prepare a pass, run it, and return the phases and work it yielded."""
    engine.prepare(name, lambda part: nullcontext())
    return list(engine.work(name))


@pytest.mark.parametrize("plan", [plan_packed_batches, plan_padded_batches])
def test_answers_are_those_of_the_model(plan: Any) -> None:
    score_job = make_job()
    engine = make_loop(score_job, plan(score_job, "fake"))
    run_pass(engine)
    outputs, vocab = engine.outputs("val"), score_job.case.question.model.vocab
    assert sorted(outputs["items"]) == list(range(len(score_job.inputs.rows)))
    assert outputs["best"] == [
        (score_job.inputs.rows[item][-1] + 1) % vocab for item in outputs["items"]
    ]
    assert set(outputs["finite"]) == {1}


@pytest.mark.parametrize("plan", [plan_packed_batches, plan_padded_batches])
def test_losses_are_those_of_the_model(plan: Any) -> None:
    score_job = make_job(PASSAGES_CASE)
    engine = make_loop(score_job, plan(score_job, "fake"))
    run_pass(engine)
    outputs, vocab = engine.outputs("val"), score_job.case.question.model.vocab
    # the loss of a target with logit 0 when one other token has logit 1; a hit's is 1 less
    miss_loss = torch.tensor(float(vocab - 1 + torch.e)).log()
    hits = [
        sum((token + 1) % vocab == target for token, target in pairwise(row))
        for row in score_job.inputs.rows
    ]
    expected = [
        (len(score_job.inputs.rows[item]) - 1) * miss_loss - hits[item] for item in outputs["items"]
    ]
    assert outputs["nll"] == pytest.approx([float(value) for value in expected], rel=1e-5)


def test_a_pass_yields_its_phases_and_the_rows_of_each_step() -> None:
    engine = make_loop(make_job())
    items = run_pass(engine)
    steps = len(engine.batches.in_pass)
    marks = [item.name if isinstance(item, Phase) else "work" for item in items]
    assert marks == ["data", "compute", "work"] * steps + ["score", "work"]
    assert engine.total("val") == sum(isinstance(item, Work) for item in items) == steps + 1
    rows = [row for item in items if isinstance(item, Work) for row in item.rows or ()]
    assert sorted(rows) == list(range(len(engine.job.inputs.rows)))


def test_padded_tokens_are_counted_in_every_step() -> None:
    score_job = make_job(settings=("tune.pad_to=16",))
    works = [
        item
        for item in run_pass(make_loop(score_job, plan_padded_batches(score_job, "fake")))
        if isinstance(item, Work) and item.rows
    ]
    lens = [
        [len(score_job.inputs.rows[item_index]) for item_index in work.rows or ()] for work in works
    ]
    expected = [len(row) * -(-max(row) // 16) * 16 - sum(row) for row in lens]
    assert [work.counts["padded"] for work in works] == expected
    assert sum(expected) > 0


def test_a_pass_computes_a_shared_prefix_once() -> None:
    score_job = make_job(settings=("question.division=open",))
    engine = make_loop(score_job)
    works = [item for item in run_pass(engine) if isinstance(item, Work)]
    assert sorted(group for work in works for group in work.prefixes) == sorted(
        set(score_job.inputs.groups)
    )
    assert engine.batches.prefix_rows > 0


def test_replicas_divide_the_batches_and_steps_limit_a_pass() -> None:
    loops = [make_loop(make_job(replica=replica, dp=2)) for replica in range(2)]
    for engine in loops:
        run_pass(engine)
    scored_items = sorted(item for engine in loops for item in engine.outputs("val")["items"])
    assert scored_items == list(range(len(loops[0].job.inputs.rows)))
    assert make_loop(make_job(steps=2)).total("val") == 3


@pytest.mark.parametrize(
    ("settings", "compiles", "parts", "uses", "warmed"),
    [
        (
            ("tune.compile=true", "tune.warmup=2"),
            True,
            ("warmup_val", "compile_infer", "warmup_bare"),
            3,
            (2, 2, 2),
        ),
        (
            ("tune.compile=true", "tune.warmup=0"),
            True,
            ("warmup_val", "compile_infer", "warmup_bare"),
            3,
            (0, 1, 1),
        ),
        (
            ("tune.compile=true", "tune.warmup=2"),
            False,
            ("warmup_val", "warmup_infer", "warmup_bare"),
            0,
            (2, 2, 2),
        ),
        (
            ("tune.compile=false", "tune.warmup=0"),
            True,
            ("warmup_val", "warmup_infer", "warmup_bare"),
            3,
            (0, 0, 0),
        ),
    ],
)
def test_a_model_is_loaded_once_and_compiled_for_all_passes_but_val(
    settings: tuple[str, ...],
    compiles: bool,
    parts: tuple[str, ...],
    uses: int,
    warmed: tuple[int, ...],
) -> None:
    engine, part_names, counts = make_loop(make_job(settings=settings), compiles=compiles), [], []

    @contextmanager
    def part(name: str):
        part_names.append(name)
        yield

    calls = engine.scorer.calls
    for name in ("val", "infer", "bare"):
        calls_before = calls.count("hidden")
        engine.prepare(name, part)
        counts.append(calls.count("hidden") - calls_before)
    assert (tuple(part_names), tuple(counts)) == (("weights", *parts), warmed)
    assert calls.count("load") == 1
    compiles_passes = "tune.compile=true" in settings
    assert [call for call in calls if call.startswith("use")] == [
        f"use {compiles_passes and number > 0}" for number in range(uses)
    ]


def test_compilation_warms_up_the_smallest_and_largest_shapes() -> None:
    score_job = make_job(PASSAGES_CASE, settings=("tune.warmup=1", "tune.batch_tokens=200"))
    score_batches = plan_padded_batches(score_job, "fake")
    shapes = [make_batch().tokens.shape for make_batch in score_batches.in_pass]
    rows = score_job.inputs.rows
    warmed_longest_rows = [
        max(len(rows[item]) for item in make_batch().items)
        for make_batch in score_batches.compile_warmup
    ]
    longest_rows = [
        max(len(rows[item]) for item in make_batch().items) for make_batch in score_batches.in_pass
    ]
    warmed_sizes = [make_batch().tokens.shape[0] for make_batch in score_batches.compile_warmup]
    assert {min(shapes)[0], max(shapes)[0]} <= set(warmed_sizes)
    assert {min(longest_rows), max(longest_rows)} <= set(warmed_longest_rows)
    assert score_batches.compile_warmup[4:] == score_batches.warmup == score_batches.in_pass[:1]


def test_details_count_batches_and_parameters_of_the_rank() -> None:
    engine = make_loop(make_job())
    counts = {
        "batches": len(engine.batches.in_pass),
        "parameters": 3,
        "dtypes": {"parameters": "bf16"},
    }
    assert engine.details() == {"attention": "none", **counts}


def test_unsupported_batching_is_refused() -> None:
    with pytest.raises(RequestError, match=r"engine fake packs sequences; tune.batching='sorted'"):
        plan_packed_batches(make_job(settings=("tune.batching=sorted",)), "fake")
    with pytest.raises(RequestError, match=r"engine fake pads sequences; allowed"):
        plan_padded_batches(make_job(settings=("tune.batching=packed",)), "fake")
    with pytest.raises(RequestError, match=r"engine fake computes every token of every prompt"):
        plan_padded_batches(make_job(settings=("question.division=open",)), "fake")


def test_the_example_engine_has_at_most_50_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")) <= 50


def test_the_docs_show_the_example_engine() -> None:
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    documented = re.sub(
        r" +#.*", "", text[text.index("class Short(Scorer):") :].partition("```")[0]
    )
    source = (PACKAGE / "short_torch.py").read_text()
    assert documented.split() == source[source.index("class Short(Scorer):") :].split()


@pytest.mark.full
@pytest.mark.long
def test_the_example_engine_conforms(tmp_path: Path) -> None:
    shell = Shell(tmp_path, (PACKAGE,))
    result = shell("conform", "short", "--json", XDG_CACHE_HOME=str(tmp_path / "cache"))
    shell.clean()
    assert (result.code, result.json()["conforms"]) == (0, True), result.out
    assert {row["case"] for row in result.json()["rows"]} == {QUESTIONS_CASE, PASSAGES_CASE}
