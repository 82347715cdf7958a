"""Train in eight processes over gloo, one plan after the other in one launch. torchrun starts it
for test_train_parallel.py.
"""

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.engine.job import CheckpointSchedule, Job
from steelyard.engine.work import Phase, Work
from steelyard.engines.torch import collectives, pipeline
from steelyard.engines.torch import train as torch_train
from steelyard.engines.torch.train import TorchTrain
from steelyard.models import tensors
from steelyard.plan import degrees
from steelyard.tasks.task import Sources
from steelyard.training import adamw, checkpoint_folders
from steelyard.training.packing import TOKEN_MULTIPLE

STEPS = 5
KEEP_EVERY = 3  # one checkpoint in five steps
SETTINGS = [
    "question.model.vocab=251",
    "question.model.layers=4",
    "question.model.heads=8",
    "question.model.kv_heads=8",
    "question.train.batch=16",
    "question.train.clip=2.0",
    "question.data.held_out=3",
]
CASE_SETTINGS = {
    "llama1-7b-openwebtext": [
        "question.train.length=64",
        f"question.train.steps={STEPS}",
        "question.data.made.documents=900",
    ],
    "aquila2-7b-alpaca": ["question.train.steps=3"],  # its rows end in padding
}


def build_engine(run: dict, rank: int, world: int) -> TorchTrain:
    """Resolve a run's case and plan, prepare its inputs and return engine torch for this rank."""
    name = run.get("case", "llama1-7b-openwebtext")
    settings = [
        *SETTINGS,
        *CASE_SETTINGS[name],
        *[f"{key}={value}" for key, value in run["settings"].items()],
    ]
    resolved = resolve.resolve_case(name, "smoke", run.get("precision"), settings=settings).case
    layout = degrees.make_plan(resolved, 1, world)
    prepared = resolved.question.task_row.prepare(
        resolved.question.describe_for_task(Sources(None, None, None), None, True, {})
    )
    return TorchTrain(
        Job(
            case=resolved,
            work=resolved.question.task_row.work,
            inputs=prepared.inputs,
            weights=Path(run["weights"]) if run.get("weights") else None,
            device=CpuTorchDevice(0, monotonic),
            rank=rank,
            world=world,
            plan=layout,
            place=degrees.find_position(layout, rank),
            group=None,
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


@contextmanager
def count_collectives(groups: collectives.PlanGroups) -> Iterator[Counter]:
    """Count collectives while the block runs: yields a counter by dimension of the plan and kind,
    and of tensors exchanged with neighbouring stages.
    """
    counts: Counter = Counter()
    names = {id(getattr(groups, name)): name for name in collectives.DIMS}
    originals = {
        kind: getattr(collectives.PlanGroup, kind)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    original_batch = pipeline.dist.batch_isend_irecv

    def counted_collective(kind: str):
        def call(group: collectives.PlanGroup, *args):
            counts[f"{names[id(group)]} {kind}"] += 1
            return originals[kind](group, *args)

        return call

    def counted_batch(ops: list):
        counts["stages sent or received"] += len(ops)
        return original_batch(ops)

    try:
        for kind in originals:
            setattr(collectives.PlanGroup, kind, counted_collective(kind))
        pipeline.dist.batch_isend_irecv = counted_batch
        yield counts
    finally:
        for kind, call in originals.items():
            setattr(collectives.PlanGroup, kind, call)
        pipeline.dist.batch_isend_irecv = original_batch


def run_training(engine: TorchTrain) -> dict:
    """Run all passes and return losses, norms, counts and collectives per step, the held-out losses
    before and after, and what this rank holds.
    """
    out: dict = {"place": [engine.job.place.tp, engine.job.place.pp, engine.job.place.dp]}
    for name in ("before", "train", "after") if engine.job.resume is None else ("train", "after"):
        engine.prepare(name, lambda part: nullcontext())
        with count_collectives(engine.trainer.placement.groups) as issued:
            items = list(engine.work(name))
        works = [item for item in items if isinstance(item, Work) and item.counts]
        out[name] = engine.outputs(name)
        if name == "train":
            out["phases"] = [
                item.name for item in items[: items.index(works[0])] if isinstance(item, Phase)
            ]
            out["issued"] = {key: number / len(works) for key, number in sorted(issued.items())}
            out["counts"] = [work.counts for work in works]
            out["losses"] = [float(work.values["loss"]) for work in works]
            out["curve"] = [float(loss) for loss in engine.losses]
            out["norms"] = [float(work.values["grad_norm"]) for work in works]
    details = engine.details()
    out["block"], out["states"], out["parameters"] = (
        details["block"],
        details["optimizer_states"],
        details["parameters"],
    )
    out["dtypes"] = details["dtypes"]
    return out


def gather_stage_weights(engine: TorchTrain) -> dict[str, torch.Tensor]:
    """Return the weights of this rank's pipeline stage by name, assembled from the shards of all
    ranks. All ranks must call it.
    """
    model = engine.trainer.model
    shards = model.as_model_parts(
        {f"weights.{name}": shard for name, shard in model.named_parameters()}
    )
    parts = [
        (name.partition(".")[2], part.whole_shape, part.offset, part.as_subclass(torch.Tensor))
        for name, part in shards.items()
    ]
    parts_of_ranks = [parts]
    if engine.job.world > 1:
        parts_of_ranks = [None] * engine.job.world
        dist.all_gather_object(parts_of_ranks, parts)
    names = {name for name, *_ in parts}
    out: dict[str, torch.Tensor] = {}
    for name, whole, offset, tensor in (
        part for rank_parts in parts_of_ranks for part in rank_parts if part[0] in names
    ):
        target = out.setdefault(name, torch.full(whole, torch.nan, dtype=tensor.dtype))
        target[
            tuple(
                slice(begin, begin + size) for begin, size in zip(offset, tensor.shape, strict=True)
            )
        ] = tensor
    return out


def main() -> None:
    """Train all runs of the JSON file; write this rank's results as JSON, and weights from the
    first rank of each stage.
    """
    torch.set_num_threads(1)
    store, rank, world = next(dist.rendezvous("env://"))
    runs = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    out = {}
    for number, run in enumerate(runs):
        torch_train.TOKEN_MULTIPLE = run.get("grain", TOKEN_MULTIPLE)
        adamw.FIRST_SCALE = run.get("scale", 65536.0)
        tensors.DTYPES["fp32"] = torch.float32 if run.get("precision") else torch.float64
        began = monotonic()
        # Each gloo group has a thread that wakes 100 times a second, so the groups of a plan are
        # destroyed with it.
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world
        )
        engine = build_engine(run, rank, world)
        out[run["name"]] = run_training(engine) | {"seconds": monotonic() - began}
        weights = gather_stage_weights(engine)
        if engine.job.place.tp == engine.job.place.dp == 0:
            torch.save(weights, folder / f"weights-{number}-{rank}.pt")
        engine.executor.shutdown()
        for parameter in engine.trainer.model.exchange.parameters:
            # hooks refer to the groups in a cycle that is never collected
            parameter.parameter._post_accumulate_grad_hooks.clear()
        del engine, weights, parameter
        gc.collect()  # now, not during the next plan
        dist.destroy_process_group()
        (folder / f"rank-{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
