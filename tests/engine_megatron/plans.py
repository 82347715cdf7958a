"""Train and score with engine megatron in real processes over gloo, one run after the other in one
launch.

torchrun starts it for test_parity.py with a JSON file of runs. A run is a dict: its name, case,
settings, and options such as `precision`, `weights` or `bug`. In the test process the same dicts
make the runs of engine torch that results are compared with.
"""

import gc
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.engine.job import CheckpointSchedule, Job
from steelyard.engine.work import Phase, Work
from steelyard.engines.torch import tensor_parallel
from steelyard.plan import degrees
from steelyard.tasks.task import Sources
from steelyard.training import adamw, checkpoint_folders

KEEP_EVERY = 6  # one checkpoint in ten steps
CORPUS, ALPACA = "llama1-7b-openwebtext", "aquila2-7b-alpaca"
LAMBADA, MMLU = "aquila2-34b-lambada", "llama2-7b-mmlu"
# a vocabulary that a tensor-parallel degree of 2 must pad, and grouped-query attention
MODEL_SETTINGS = ("layers=2", "heads=8", "kv_heads=4", "vocab=251")
TRAIN_SETTINGS = ("steps=10", "clip=2.0", "weight_decay=0.5")
SETTINGS = {
    CORPUS: (
        *(f"question.model.{one}" for one in MODEL_SETTINGS),
        *(f"question.train.{one}" for one in (*TRAIN_SETTINGS, "length=64", "batch=8")),
        *("question.data.made.documents=900", "question.data.held_out=3", "tune.micro_batch=2"),
    ),
    ALPACA: (
        *(f"question.model.{one}" for one in MODEL_SETTINGS[:-1]),
        *(f"question.train.{one}" for one in TRAIN_SETTINGS),
        *("question.data.made.conversations=300", "question.data.held_out=3", "tune.micro_batch=2"),
    ),
    LAMBADA: ("question.model.vocab=251", "tune.batch_tokens=300"),
    MMLU: ("question.model.vocab=251", "question.model.heads=16", "question.model.kv_heads=8"),
}


def build_engine(run: dict, rank: int, world: int, make_engine: Callable[[Job], Any]) -> Any:
    """Resolve a run's case and plan, prepare its inputs and return the engine that `make_engine`
    makes of the job.
    """
    name = run.get("case", CORPUS)
    settings = [
        *SETTINGS[name],
        *[f"{key}={value}" for key, value in run.get("settings", {}).items()],
    ]
    case = resolve.resolve_case(name, "smoke", run.get("precision"), settings=settings).case
    plan = degrees.make_plan(case, 1, world)
    prepared = case.question.task_row.prepare(
        case.question.describe_for_task(Sources(None, None, None), None, True, {})
    )
    return make_engine(
        Job(
            case=case,
            work=case.question.task_row.work,
            inputs=prepared.inputs,
            weights=Path(run["weights"]) if run.get("weights") else None,
            device=CpuTorchDevice(0, monotonic),
            rank=rank,
            world=world,
            plan=plan,
            place=degrees.find_position(plan, rank),
            group=tensor_parallel.create_tensor_parallel_group(plan, rank, torch.device("cpu")),
            steps=None,
            checkpoint_schedule=(
                CheckpointSchedule(Path(run["keep"]), KEEP_EVERY) if run.get("keep") else None
            ),
            resume=(
                Path(run["resume"]) / checkpoint_folders.format_step_folder(KEEP_EVERY)
                if run.get("resume")
                else None
            ),
        )
    )


def run_training(engine: Any) -> dict:
    """Run all passes of a training and return losses, gradient norms, rows and phases of the steps,
    and the held-out losses before and after.
    """
    out: dict = {"place": [engine.job.place.tp, engine.job.place.pp, engine.job.place.dp]}
    for name in ("before", "train", "after") if engine.job.resume is None else ("train", "after"):
        engine.prepare(name, lambda part: nullcontext())
        items = list(engine.work(name))
        works = [item for item in items if isinstance(item, Work) and item.counts]
        out[name] = engine.outputs(name)
        if name == "train":
            out["phases"] = [
                item.name for item in items[: items.index(works[0])] if isinstance(item, Phase)
            ]
            out["losses"] = [float(work.values["loss"]) for work in works]
            out["norms"] = [float(work.values["grad_norm"]) for work in works]
            out["rows"] = [list(map(str, work.rows)) for work in works]
    engine.executor.shutdown()
    return out | {"details": engine.details(), "source": engine.weights}


def run_scoring(engine: Any) -> dict:
    """Run the passes val and infer and return their answers and the rows that this rank scored."""
    position = engine.job.place
    out: dict = {"place": [position.tp, position.pp, position.dp]}
    for name in ("val", "infer"):
        engine.prepare(name, lambda part: nullcontext())
        out["rows"] = [
            row for item in engine.work(name) if isinstance(item, Work) for row in item.rows or ()
        ]
        out[name] = engine.outputs(name)
    return out | {"details": engine.details(), "source": engine.weights}


def run_engine(
    run: dict, rank: int, world: int, engine_classes: dict[str, Callable[[Job], Any]]
) -> tuple[dict, Any]:
    """Execute a run with the engine class for its work (`train` or `score`); return its results and
    the engine. Sets the first loss scale of fp16.
    """
    work = "score" if run.get("case") in (LAMBADA, MMLU) else "train"
    for module in (adamw, sys.modules.get("steelyard.engines.megatron.optimizer")):
        if module is not None:
            module.FIRST_SCALE = run.get("scale", 65536.0)
    engine = build_engine(run, rank, world, engine_classes[work])
    return (run_scoring if work == "score" else run_training)(engine), engine


def plant_bug(bug: str | None) -> Callable[[], None]:
    """Put one silent trap of Megatron back into our code; return the function that removes it. None
    plants nothing.
    """
    from steelyard.engines.megatron import config
    from steelyard.engines.megatron.optimizer import MegatronAdam

    original_config, step, begin = (
        config.TransformerConfig,
        MegatronAdam.step,
        MegatronAdam.start_from_gradient_buffers,
    )

    def change_config(**values: Any) -> None:
        config.TransformerConfig = lambda **named: original_config(**(named | values))

    def decay_everything(self: Any, lr: float) -> float:
        for group in self.inner.param_groups:
            group["wd_mult"] = 1.0
        return step(self, lr)

    def begin_rounded(self: Any, parameters: list) -> None:
        begin(self, parameters)
        self.part.reload_model_params()

    if bug == "no_initialization":
        change_config(perform_initialization=False)
    elif bug == "fused_loss":
        change_config(cross_entropy_loss_fusion=True)
        torch.compiler.set_stance("force_eager")  # it rounds without compilation too
    elif bug == "schedule_divides":
        change_config(calculate_per_token_loss=False)
    elif bug == "no_scheduler":
        MegatronAdam.step = decay_everything
    elif bug == "rounded_weights":
        MegatronAdam.start_from_gradient_buffers = begin_rounded

    def undo() -> None:
        torch.compiler.set_stance("default")
        config.TransformerConfig, MegatronAdam.step, MegatronAdam.start_from_gradient_buffers = (
            original_config,
            step,
            begin,
        )

    return undo


def read_megatron_state(engine: Any) -> dict:
    """Return what only Megatron's objects say: parameters marked as tensor parallel, weight decay
    of each group, how many weights this rank updates (`held`), and how many of those bf16
    represents exactly (`rounded`), such as a norm's 1.0.
    """
    stage = engine.trainer.model.stage
    marked = [
        name
        for name, tensor in stage.named_parameters()
        if getattr(tensor, "tensor_model_parallel", False)
    ]
    groups, main_weights = (
        engine.trainer.optimizer.inner.param_groups,
        engine.trainer.optimizer.updated_tensors(),
    )
    return {
        "marked": marked,
        "decay": [[group["wd_mult"], group["weight_decay"]] for group in groups],
        "held": sum(tensor.numel() for tensor in main_weights),
        "rounded": sum(int((tensor == tensor.bfloat16().float()).sum()) for tensor in main_weights),
    }


def main() -> None:
    """Execute all runs of the JSON file and write this rank's results after each."""
    from megatron.core import parallel_state

    from steelyard.engines.megatron.score import MegatronScore
    from steelyard.engines.megatron.train import MegatronTrain

    torch.set_num_threads(1)
    world = int(sys.argv[3])
    store, rank, _ = next(dist.rendezvous("env://")) if world > 1 else (None, 0, 1)
    out = {}
    for number, run in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        began = monotonic()
        # new groups for each run: each gloo group has a thread that wakes 100 times a second
        if world > 1:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world
            )
        undo = plant_bug(run.get("bug"))
        results, engine = run_engine(
            run, rank, world, {"train": MegatronTrain, "score": MegatronScore}
        )
        undo()
        megatron_state = read_megatron_state(engine) if "losses" in results else {}
        out[run["name"]] = results | megatron_state | {"seconds": monotonic() - began}
        del engine
        parallel_state.destroy_model_parallel()
        gc.collect()  # now, not during the next run
        if world > 1:
            dist.destroy_process_group()
        (Path(sys.argv[2]) / f"rank-{rank}-of-{world}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
