"""Engine `paddle`, training a Llama: on one device, or as fleet divides it over all of a plan."""

from steelyard.engine.job import Job
from steelyard.engines.paddle.batches import PaddleBatches
from steelyard.engines.paddle.trainer import PaddleTrainer
from steelyard.training.loop import HeldOutLoss, Loop


class PaddleTrain(Loop):
    def __init__(self, job: Job) -> None:
        trainer = PaddleTrainer(job)
        # On one device rows laid end to end need no padding; others must have micro-batches of one size.
        padded = not job.case.tune.pack or job.world > 1
        batches = PaddleBatches(job, trainer.train.length, padded)
        super().__init__(job, trainer, batches, HeldOutLoss(job, trainer, batches))
