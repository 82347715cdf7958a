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
OF_CASE = {
    "llama1-7b-openwebtext": [
        "question.train.length=64",
        f"question.train.steps={STEPS}",
        "question.data.made.documents=900",
    ],
    "aquila2-7b-alpaca": ["question.train.steps=3"],  # its rows end in padding
}


def build(one: dict, rank: int, world: int) -> TorchTrain:
    """Resolve a run's case and plan, prepare its inputs and return engine torch for this rank."""
    name = one.get("case", "llama1-7b-openwebtext")
    settings = [
        *SETTINGS,
        *OF_CASE[name],
        *[f"{key}={value}" for key, value in one["settings"].items()],
    ]
    resolved = resolve.resolve_case(name, "smoke", one.get("precision"), settings=settings).case
    layout = degrees.make_plan(resolved, 1, world)
    prepared = resolved.question.task_row.prepare(
        resolved.question.describe_for_task(Sources(None, None, None), None, True, {})
    )
    return TorchTrain(
        Job(
            case=resolved,
            work=resolved.question.task_row.work,
            inputs=prepared.inputs,
            weights=Path(one["weights"]) if one.get("weights") else None,
            device=CpuTorchDevice(0, monotonic),
            rank=rank,
            world=world,
            plan=layout,
            place=degrees.find_position(layout, rank),
            group=None,
            steps=None,
            checkpoint_schedule=CheckpointSchedule(Path(one["keep"]), KEEP_EVERY)
            if one.get("keep")
            else None,
            resume=(
                Path(one["resume"]) / checkpoint_folders.format_step_folder(KEEP_EVERY)
                if one.get("resume")
                else None
            ),
        )
    )


@contextmanager
def counting(groups: collectives.PlanGroups) -> Iterator[Counter]:
    """Count collectives while the block runs: yields a counter by dimension of the plan and kind,
    and of tensors exchanged with neighbouring stages.
    """
    found: Counter = Counter()
    names = {id(getattr(groups, name)): name for name in collectives.DIMS}
    kept = {
        kind: getattr(collectives.PlanGroup, kind)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    batch = pipeline.dist.batch_isend_irecv

    def counted(kind: str):
        def call(group: collectives.PlanGroup, *given):
            found[f"{names[id(group)]} {kind}"] += 1
            return kept[kind](group, *given)

        return call

    def counted_batch(ops: list):
        found["stages sent or received"] += len(ops)
        return batch(ops)

    try:
        for kind in kept:
            setattr(collectives.PlanGroup, kind, counted(kind))
        pipeline.dist.batch_isend_irecv = counted_batch
        yield found
    finally:
        for kind, call in kept.items():
            setattr(collectives.PlanGroup, kind, call)
        pipeline.dist.batch_isend_irecv = batch


def train(engine: TorchTrain) -> dict:
    """Run all passes and return losses, norms, counts and collectives per step, the held-out losses
    before and after, and what this rank holds.
    """
    out: dict = {"place": [engine.job.place.tp, engine.job.place.pp, engine.job.place.dp]}
    for name in ("before", "train", "after") if engine.job.resume is None else ("train", "after"):
        engine.prepare(name, lambda part: nullcontext())
        with counting(engine.trainer.placement.groups) as issued:
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


def whole_weights(engine: TorchTrain) -> dict[str, torch.Tensor]:
    """Return the weights of this rank's pipeline stage by name, assembled from the shards of all
    ranks. All ranks must call it.
    """
    model = engine.trainer.model
    held = model.as_model_parts(
        {f"weights.{name}": shard for name, shard in model.named_parameters()}
    )
    parts = [
        (name.partition(".")[2], one.whole_shape, one.offset, one.as_subclass(torch.Tensor))
        for name, one in held.items()
    ]
    of_ranks = [parts]
    if engine.job.world > 1:
        of_ranks = [None] * engine.job.world
        dist.all_gather_object(of_ranks, parts)
    names = {name for name, *_ in parts}
    out: dict[str, torch.Tensor] = {}
    for name, whole, offset, tensor in (
        one for each in of_ranks for one in each if one[0] in names
    ):
        place = out.setdefault(name, torch.full(whole, torch.nan, dtype=tensor.dtype))
        place[
            tuple(slice(at, at + size) for at, size in zip(offset, tensor.shape, strict=True))
        ] = tensor
    return out


def main() -> None:
    """Train all runs of the JSON file; write this rank's results as JSON, and weights from the
    first rank of each stage.
    """
    torch.set_num_threads(1)
    store, rank, world = next(dist.rendezvous("env://"))
    asked = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    out = {}
    for number, one in enumerate(asked):
        torch_train.TOKEN_MULTIPLE = one.get("grain", TOKEN_MULTIPLE)
        adamw.FIRST_SCALE = one.get("scale", 65536.0)
        tensors.DTYPES["fp32"] = torch.float32 if one.get("precision") else torch.float64
        began = monotonic()
        # Each gloo group has a thread that wakes 100 times a second, so the groups of a plan are
        # destroyed with it.
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world
        )
        engine = build(one, rank, world)
        out[one["name"]] = train(engine) | {"seconds": monotonic() - began}
        found = whole_weights(engine)
        if engine.job.place.tp == engine.job.place.dp == 0:
            torch.save(found, folder / f"weights-{number}-{rank}.pt")
        engine.executor.shutdown()
        for held in engine.trainer.model.exchange.parameters:
            # hooks refer to the groups in a cycle that is never collected
            held.parameter._post_accumulate_grad_hooks.clear()
        del engine, found, held
        gc.collect()  # now, not during the next plan
        dist.destroy_process_group()
        (folder / f"rank-{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
