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
CASE, PASSAGES = "llama2-7b-mmlu", "aquila2-34b-lambada"


class Fake(Scorer):
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


def job(
    case: str = CASE,
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
    given = {
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
        **given,
    )


def loop(one: Job, batches: ScoringBatches | None = None, compiles: bool = False) -> ScoringLoop:
    """Return a scoring loop with a fake scorer, over packed batches unless others are given."""
    return ScoringLoop(
        one,
        Fake(one.case.question.model.vocab, compiles),
        batches or plan_packed_batches(one, "fake"),
    )


def scored(engine: ScoringLoop, name: str = "val") -> list[Phase | Work]:
    """Prepare a pass, run it, and return the phases and work it yielded."""
    engine.prepare(name, lambda part: nullcontext())
    return list(engine.work(name))


@pytest.mark.parametrize("plan", [plan_packed_batches, plan_padded_batches])
def test_answers_are_those_of_the_model(plan: Any) -> None:
    one = job()
    engine = loop(one, plan(one, "fake"))
    scored(engine)
    out, vocab = engine.outputs("val"), one.case.question.model.vocab
    assert sorted(out["items"]) == list(range(len(one.inputs.rows)))
    assert out["best"] == [(one.inputs.rows[item][-1] + 1) % vocab for item in out["items"]]
    assert set(out["finite"]) == {1}


@pytest.mark.parametrize("plan", [plan_packed_batches, plan_padded_batches])
def test_losses_are_those_of_the_model(plan: Any) -> None:
    one = job(PASSAGES)
    engine = loop(one, plan(one, "fake"))
    scored(engine)
    out, vocab = engine.outputs("val"), one.case.question.model.vocab
    # the loss of a target with logit 0 when one other token has logit 1; a hit's is 1 less
    all_wrong = torch.tensor(float(vocab - 1 + torch.e)).log()
    hits = [sum((a + 1) % vocab == b for a, b in pairwise(row)) for row in one.inputs.rows]
    wanted = [(len(one.inputs.rows[item]) - 1) * all_wrong - hits[item] for item in out["items"]]
    assert out["nll"] == pytest.approx([float(value) for value in wanted], rel=1e-5)


def test_a_pass_marks_its_phases_and_names_its_rows() -> None:
    engine = loop(job())
    items = scored(engine)
    steps = len(engine.batches.in_pass)
    marks = [item.name if isinstance(item, Phase) else "work" for item in items]
    assert marks == ["data", "compute", "work"] * steps + ["score", "work"]
    assert engine.total("val") == sum(isinstance(item, Work) for item in items) == steps + 1
    rows = [row for item in items if isinstance(item, Work) for row in item.rows or ()]
    assert sorted(rows) == list(range(len(engine.job.inputs.rows)))


def test_padding_is_said_in_every_step() -> None:
    one = job(settings=("tune.pad_to=16",))
    works = [
        item
        for item in scored(loop(one, plan_padded_batches(one, "fake")))
        if isinstance(item, Work) and item.rows
    ]
    lens = [[len(one.inputs.rows[i]) for i in work.rows or ()] for work in works]
    wanted = [len(row) * -(-max(row) // 16) * 16 - sum(row) for row in lens]
    assert [work.counts["padded"] for work in works] == wanted
    assert sum(wanted) > 0


def test_a_pass_computes_a_shared_prefix_once() -> None:
    one = job(settings=("question.division=open",))
    engine = loop(one)
    works = [item for item in scored(engine) if isinstance(item, Work)]
    assert sorted(group for work in works for group in work.prefixes) == sorted(
        set(one.inputs.groups)
    )
    assert engine.batches.prefix_rows > 0


def test_replicas_share_the_batches_and_steps_end_a_pass() -> None:
    parts = [loop(job(replica=replica, dp=2)) for replica in range(2)]
    for engine in parts:
        scored(engine)
    every = sorted(item for engine in parts for item in engine.outputs("val")["items"])
    assert every == list(range(len(parts[0].job.inputs.rows)))
    assert loop(job(steps=2)).total("val") == 3


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
    engine, named, counts = loop(job(settings=settings), compiles=compiles), [], []

    @contextmanager
    def part(name: str):
        named.append(name)
        yield

    calls = engine.scorer.calls
    for name in ("val", "infer", "bare"):
        before = calls.count("hidden")
        engine.prepare(name, part)
        counts.append(calls.count("hidden") - before)
    assert (tuple(named), tuple(counts)) == (("weights", *parts), warmed)
    assert calls.count("load") == 1
    fast = "tune.compile=true" in settings
    assert [call for call in calls if call.startswith("use")] == [
        f"use {fast and i > 0}" for i in range(uses)
    ]


def test_a_compiler_meets_every_extreme_shape_before_the_pass() -> None:
    one = job(PASSAGES, settings=("tune.warmup=1", "tune.batch_tokens=200"))
    plan = plan_padded_batches(one, "fake")
    shapes = [make().tokens.shape for make in plan.in_pass]
    rows = one.inputs.rows
    longest = [max(len(rows[i]) for i in make().items) for make in plan.compile_warmup]
    every = [max(len(rows[i]) for i in make().items) for make in plan.in_pass]
    warmed = [make().tokens.shape[0] for make in plan.compile_warmup]
    assert {min(shapes)[0], max(shapes)[0]} <= set(warmed)
    assert {min(every), max(every)} <= set(longest)
    assert plan.compile_warmup[4:] == plan.warmup == plan.in_pass[:1]


def test_details_count_what_the_rank_holds() -> None:
    engine = loop(job())
    counts = {
        "batches": len(engine.batches.in_pass),
        "parameters": 3,
        "dtypes": {"parameters": "bf16"},
    }
    assert engine.details() == {"attention": "none", **counts}


def test_what_batches_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match=r"engine fake packs sequences; tune.batching='sorted'"):
        plan_packed_batches(job(settings=("tune.batching=sorted",)), "fake")
    with pytest.raises(RequestError, match=r"engine fake pads sequences; allowed"):
        plan_padded_batches(job(settings=("tune.batching=packed",)), "fake")
    with pytest.raises(RequestError, match=r"engine fake computes every token of every prompt"):
        plan_padded_batches(job(settings=("question.division=open",)), "fake")


def test_the_example_has_50_lines_at_most() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")) <= 50


def test_the_docs_show_the_example() -> None:
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    shown = re.sub(r" +#.*", "", text[text.index("class Short(Scorer):") :].partition("```")[0])
    source = (PACKAGE / "short_torch.py").read_text()
    assert shown.split() == source[source.index("class Short(Scorer):") :].split()


@pytest.mark.full
def test_the_example_conforms(tmp_path: Path) -> None:
    shell = Shell(tmp_path, (PACKAGE,))
    done = shell("conform", "short", "--json", XDG_CACHE_HOME=str(tmp_path / "cache"))
    shell.clean()
    assert (done.code, done.json()["conforms"]) == (0, True), done.out
    assert {row["case"] for row in done.json()["rows"]} == {CASE, PASSAGES}
