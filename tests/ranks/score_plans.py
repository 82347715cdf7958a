"""Score in eight processes over gloo, one plan after the other in one launch. torchrun starts it
for test_tensor_parallel.py.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

from steelyard.accelerators.cpu_torch import CpuTorchDevice
from steelyard.case import resolve
from steelyard.engine.job import Job
from steelyard.engine.work import Work
from steelyard.engines.torch import tensor_parallel
from steelyard.engines.torch.score import TorchScore
from steelyard.plan import degrees
from steelyard.tasks.task import Sources


def main() -> None:
    """Score all runs of the JSON file and write this rank's answers, rows and number of
    parameters.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    request = json.loads(Path(sys.argv[1]).read_text())
    out = {}
    for run in request["runs"]:
        resolved = resolve.resolve_case(
            run["case"],
            "smoke",
            settings=[
                *request["settings"][run["case"]],
                *run.get("more", []),
                f"tune.parallel={run['parallel']}",
            ],
        ).case
        layout = degrees.make_plan(resolved, 1, world)
        prepared = resolved.question.task_row.prepare(
            resolved.question.describe_for_task(Sources(None, None, None), None, True, {})
        )
        position = degrees.find_position(layout, rank)
        engine = TorchScore(
            Job(
                case=resolved,
                work=resolved.question.task_row.work,
                inputs=prepared.inputs,
                weights=Path(run["weights"]) if run["weights"] else None,
                device=CpuTorchDevice(0, monotonic),
                rank=rank,
                world=world,
                plan=layout,
                place=position,
                group=tensor_parallel.create_tensor_parallel_group(
                    layout, rank, torch.device("cpu")
                ),
                steps=None,
            )
        )
        engine.prepare("val", lambda part: nullcontext())
        works = [item for item in engine.work("val") if isinstance(item, Work)]
        parameters = sum(p.numel() for p in engine.scorer.model.parameters())
        out[run["name"]] = {
            "place": [position.tp, position.dp],
            "answers": engine.outputs("val"),
            "rows": sorted(row for work in works for row in work.rows or ()),
            "parameters": parameters,
        }
        del engine
    (Path(sys.argv[2]) / f"rank-{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
