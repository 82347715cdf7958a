"""Two processes over gloo train a GLM together, and each trains it alone. torchrun starts it for
engines/test_torch_glm.py.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fixtures.glm import CPU, make_job, make_samples, make_trainer, pack_samples
from steelyard.models import tensors
from steelyard.training.glm_trainer import send_cloze_batch

SAMPLES_OF_RANKS = (((0, 3), (4,)), ((1, 2),))  # sample indices: replica, micro-batch


def train_glm(dp: int, rank: int, sample_groups: tuple[tuple[int, ...], ...]) -> tuple[dict, float]:
    """Train three steps on one micro-batch per group of sample indices; return losses, norms and
    sums of squared weights, and the number of samples of all replicas.
    """
    clozes = make_samples(5)
    glm_trainer = make_trainer(make_job(dp=dp, rank=rank))
    micros = [
        send_cloze_batch(pack_samples("closed", [clozes[i] for i in group]), CPU)
        for group in sample_groups
    ]
    glm_trainer.warm_up(micros[0])
    count = glm_trainer.sum_over_replicas(sum(map(len, sample_groups)))
    losses, norms = [], []
    for step in range(3):
        losses.append(float(glm_trainer.compute_gradients(micros, count)))
        norms.append(float(glm_trainer.update(1e-2 / (step + 1))))
    weights = [float(p.double().square().sum()) for p in glm_trainer.optimizer.master]
    return {"losses": losses, "norms": norms, "weights": weights}, float(count)


def main() -> None:
    """Train in float64 and write this rank's results as JSON."""
    torch.set_num_threads(1)
    tensors.DTYPES["fp32"] = torch.float64
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    replicated, count = train_glm(2, rank, SAMPLES_OF_RANKS[rank])
    single, _ = train_glm(1, 0, (*SAMPLES_OF_RANKS[0], *SAMPLES_OF_RANKS[1]))
    (Path(sys.argv[1]) / f"rank-{rank}.json").write_text(
        json.dumps({"both": replicated, "alone": single, "samples": count})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
