"""Going on from a checkpoint: what a record or a folder offers, and whether it is of the same question."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard import checkpoints, record
from steelyard.case import Resolved
from steelyard.checkpoints import Run, State
from steelyard.errors import RequestError


@dataclass(frozen=True)
class Resume:
    path: Path  # of the checkpoint
    run: Run
    state: State
    record: str | None  # the id of the record that named it
    before: dict[str, Any] | None  # what was found on held-out data before the first step

    def restart(self) -> dict[str, Any]:
        """For the record of the run that goes on."""
        plan = self.state.plan
        return {
            "record": self.record,
            "step": self.state.step,
            "plan": f"TP{plan.tp}PP{plan.pp}DP{plan.dp}",
            "losses": self.state.losses,
        }


def find(source: Path, resolved: Resolved, sample: int | None, steps: int | None, engine: str) -> Resume:
    """The last whole checkpoint of a run, named by its record or by its folder."""
    train = resolved.case.question.train
    if train is None:
        raise RequestError(f"--resume: {resolved.case.name} scores, which begins anew every time; leave --resume out")
    folder, name, before = _named(source)
    path, state = checkpoints.last(folder)
    run = checkpoints.read(folder / checkpoints.RUN, Run)
    checkpoints.check_same(run, resolved.case.name, resolved.case.question.model_dump(mode="json"), sample, engine)
    wanted = train.steps if steps is None else steps
    if state.step >= wanted:
        raise RequestError(f"--resume: {path} is after {state.step} steps and {wanted} are asked; nothing is left to do")
    if len(state.losses) != state.step:
        raise RequestError(f"{path / checkpoints.STATE}: {len(state.losses)} losses of {state.step} steps")
    return Resume(path, run, state, name, before)


def _named(source: Path) -> tuple[Path, str | None, dict[str, Any] | None]:
    if source.is_dir():
        return source, None, None
    found = record.read(source)
    if found.checkpoints is None:
        raise RequestError(f"--resume: the run of {source} kept no checkpoints; train with --checkpoint-every N to have some")
    before = found.outputs.get("passes", {}).get("before")
    return source.parent / found.checkpoints, found.id, before if isinstance(before, dict) else None
