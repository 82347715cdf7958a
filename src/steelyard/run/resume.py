"""Going on from a checkpoint: what a record or a folder offers, and whether it is of the same question."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.case.resolve import Resolved
from steelyard.errors import RequestError
from steelyard.metrics import verify
from steelyard.record.facts import Restart
from steelyard.run.failure import UNFINISHED
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Before, CheckpointRun, State


@dataclass(frozen=True)
class Resume:
    path: Path  # of the checkpoint
    run: CheckpointRun
    state: State
    record: str | None  # the id of the record that named it
    before: list[dict[str, Any]]  # what each replica found on held-out data before the first step
    passed_over: list[str]  # later checkpoints, which are damaged

    def restart(self, out: Path) -> Restart:
        """For the record of the run that goes on, which lies in `out`."""
        plan = self.state.plan
        return Restart(
            record=self.record,
            checkpoints=os.path.relpath(self.path.parent, out.resolve()),
            step=self.state.step,
            plan=str(plan),
            passed_over=self.passed_over,
            losses=self.state.losses,
        )


def find(source: Path, resolved: Resolved, sample: int | None, steps: int | None, engine: str) -> Resume:
    """The last whole checkpoint of a run, named by its record or by its folder."""
    train = resolved.case.question.train
    if train is None:
        raise RequestError(f"--resume: {resolved.case.name} is an inference case, which cannot resume; leave --resume out")
    folder, name = (source, None) if source.is_dir() else _named(source)
    path, state, passed_over = checkpoints.last(folder)
    run = checkpoints.read(folder / checkpoints.RUN, CheckpointRun)
    checkpoints.check_same(run, resolved.case.name, resolved.case.question.model_dump(mode="json"), sample, engine)
    wanted = train.steps if steps is None else steps
    if state.reached:
        raise RequestError(f"--resume: the target was reached after step {state.step}; nothing is left to do")
    if state.step >= wanted:
        raise RequestError(f"--resume: {path} is after step {state.step} of {wanted}; nothing is left to do")
    if len(state.losses) != state.step:
        raise RequestError(f"{path / checkpoints.STATE}: {len(state.losses)} losses of {state.step} steps")
    return Resume(path, run, state, name, _before(folder), passed_over)


def _before(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.glob(checkpoints.BEFORE.format("*")))
    return [checkpoints.read(path, Before).table for path in found]


def _named(source: Path) -> tuple[Path, str]:
    """The folder of a record's checkpoints; where its run died before the first of its own, that which it went on from."""
    found = verify.read(source)
    stopped = None if found.answers is None else found.task.stopped(found.answers)
    if stopped is not None and stopped.why == "target":
        raise RequestError(f"--resume: the run of {source} reached its target; nothing is left to do")
    places = [found.checkpoints, *(one.checkpoints for one in reversed(found.restarts))]
    folders = [source.parent / place for place in places if isinstance(place, str)]
    if not folders:
        raise RequestError(f"--resume: the run of {source} has no checkpoints; train with --checkpoint-every N to save some")
    unfinished = any(reason.code == UNFINISHED.code for reason in found.reasons)
    if unfinished and not any(folder.is_dir() for folder in folders):
        raise RequestError(
            f"--resume: {source} names the folder {str(folders[0])!r}, which is not there; if the record was moved, give "
            "that folder itself, else the run did not get to its first checkpoint: run it again without --resume"
        )
    return next((folder for folder in folders if checkpoints.whole(folder)), folders[0]), found.id
