"""The training loop and what training engines share: batches, optimizer, placements, checkpoints.

An engine (engines/*/train.py) subclasses `TrainingLoop` of training_loop.py and gives it a learner,
a maker of micro-batches and an evaluation.
"""
