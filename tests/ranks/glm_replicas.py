"""Two processes over gloo train a GLM together, and each trains it alone. torchrun starts it for
engines/test_torch_glm.py.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fixtures.glm import CPU, job, packed, samples, trainer
from steelyard.models import tensors
from steelyard.training.glm_trainer import send_cloze_batch

DEALT = (((0, 3), (4,)), ((1, 2),))  # sample indices: replica, micro-batch


def train(dp: int, rank: int, groups: tuple[tuple[int, ...], ...]) -> tuple[dict, float]:
    """Train three steps on one micro-batch per group of sample indices; return losses, norms and
    sums of squared weights, and the number of samples of all replicas.
    """
    some = samples(5)
    made = trainer(job(dp=dp, rank=rank))
    micros = [send_cloze_batch(packed("closed", [some[i] for i in group]), CPU) for group in groups]
    made.warm_up(micros[0])
    count = made.sum_over_replicas(sum(map(len, groups)))
    losses, norms = [], []
    for step in range(3):
        losses.append(float(made.compute_gradients(micros, count)))
        norms.append(float(made.update(1e-2 / (step + 1))))
    weights = [float(p.double().square().sum()) for p in made.optimizer.master]
    return {"losses": losses, "norms": norms, "weights": weights}, float(count)


def main() -> None:
    """Train in float64 and write this rank's results as JSON."""
    torch.set_num_threads(1)
    tensors.DTYPES["fp32"] = torch.float64
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    both, count = train(2, rank, DEALT[rank])
    alone, _ = train(1, 0, (*DEALT[0], *DEALT[1]))
    (Path(sys.argv[1]) / f"rank-{rank}.json").write_text(
        json.dumps({"both": both, "alone": alone, "samples": count})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
