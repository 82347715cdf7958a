"""Parses what FlagScale prints while it trains: Megatron's line for each iteration, which the last
rank prints, and a few others.
"""

import math
import re
from dataclasses import dataclass

TRAINING_BEGINS = "[before the start of training step]"
ITERATION_LINE = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(.*)")
PARAMETERS_LINE = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): (\d+)"
)
NEEDED_FIELDS = {
    "elapsed time per iteration (ms)": "elapsed",
    "consumed samples": "consumed",
    "global batch size": "batch",
    "number of skipped iterations": "skipped",
}


class ProgramError(Exception):
    """Raised if the external program (FlagScale) ends early, or prints something other than what it
    was asked to do: an iteration of another number, batch or row count, an invalid time, or a log
    line that lacks a field or cannot be read. The text says which.
    """


@dataclass(frozen=True)
class Iteration:
    """One training iteration as Megatron's log line gives it; made by `parse_iteration`. `number`
    is counted from 1, `total` is how many the program will run, `consumed` the rows so far, `batch`
    the rows of this one, `elapsed_s` its time in seconds (to 0.1 ms). `loss`, `grad_norm` and `lr`
    are None if not printed: Megatron prints no loss that is 0 or less, or not a number. `skipped`
    and `nan` count iterations since the last line without an update, and with a loss that is not a
    number; `has_updated` is true if `skipped` is 0.
    """

    number: int  # from 1
    total: int
    consumed: int  # rows so far
    batch: int  # rows of this one
    elapsed_s: float
    loss: float | None
    grad_norm: float | None
    lr: float | None
    skipped: int
    nan: int

    @property
    def has_updated(self) -> bool:
        """Return whether weights were updated in this iteration: it was not skipped, as fp16 does
        after an overflow.
        """
        return self.skipped == 0


def parse_iteration(text: str) -> Iteration | None:
    """Return the iteration that a line of output reports, or None if it reports none. Raises
    ProgramError if elapsed time, consumed samples, batch size or skipped iterations are missing, or
    a field that is used is no number.
    """
    match = ITERATION_LINE.search(text)
    if match is None:
        return None
    fields = {
        name.strip(): value.strip()
        for name, sign, value in (field.rpartition(":") for field in match[3].split("|"))
        if sign
    }
    missing = next((name for name in NEEDED_FIELDS if name not in fields), None)
    if missing is not None:
        raise ProgramError(f"the log line of iteration {match[1]} lacks {missing!r}")
    try:
        return Iteration(
            number=int(match[1]),
            total=int(match[2]),
            consumed=int(fields["consumed samples"]),
            batch=int(fields["global batch size"]),
            elapsed_s=float(fields["elapsed time per iteration (ms)"]) / 1000,
            loss=_parse_number(fields.get("lm loss")),
            grad_norm=_parse_number(fields.get("grad norm")),
            lr=_parse_number(fields.get("learning rate")),
            skipped=int(fields["number of skipped iterations"]),
            nan=int(fields.get("number of nan iterations", 0)),
        )
    except ValueError as error:
        raise ProgramError(
            f"the log line of iteration {match[1]} cannot be read: {error}"
        ) from error


def _parse_number(text: str | None) -> float | None:
    """Return the text as a float; None stays None."""
    return None if text is None else float(text)


def check_iteration(iteration: Iteration, step: int, steps: int, batch: int) -> None:
    """Raise ProgramError unless the iteration is number `step` + 1 (`step` counts from 0) of
    `steps`, with a global batch of `batch` rows, (`step` + 1) x `batch` rows so far, and a positive
    finite time.
    """
    if (iteration.number, iteration.total) != (step + 1, steps):
        raise ProgramError(
            f"the program reported iteration {iteration.number} of {iteration.total}, expected"
            f" {step + 1} of {steps}"
        )
    if (iteration.batch, iteration.consumed) != (batch, (step + 1) * batch):
        raise ProgramError(
            f"iteration {iteration.number}: a batch of {iteration.batch} rows and"
            f" {iteration.consumed} in all; expected: {batch} and {(step + 1) * batch}"
        )
    if not (math.isfinite(iteration.elapsed_s) and iteration.elapsed_s > 0):
        raise ProgramError(
            f"iteration {iteration.number} has an invalid time: {iteration.elapsed_s} s"
        )
