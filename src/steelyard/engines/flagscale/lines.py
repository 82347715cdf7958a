"""Parses what FlagScale prints while it trains: Megatron's line for each iteration, which the last
rank prints, and a few others.
"""

import math
import re
from dataclasses import dataclass

BEGIN = "[before the start of training step]"
ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(.*)")
PARAMETERS = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): (\d+)"
)
NEEDED = {
    "elapsed time per iteration (ms)": "elapsed",
    "consumed samples": "consumed",
    "global batch size": "batch",
    "number of skipped iterations": "skipped",
}


class ProgramError(Exception):
    """Raised if the program fails, or does something other than it was asked for."""


@dataclass(frozen=True)
class Iteration:
    """One iteration as Megatron's log line gives it. Times have a resolution of 0.1 ms. `loss`,
    `grad_norm` and `lr` are None if not printed: Megatron prints no loss that is 0 or less, or not
    a number. `skipped` and `nan` count iterations since the last line.
    """

    number: int  # from 1
    of: int
    consumed: int  # rows so far
    batch: int  # rows of this one
    elapsed_s: float
    loss: float | None
    grad_norm: float | None
    lr: float | None
    skipped: int
    nan: int

    @property
    def learned(self) -> bool:
        """Return whether weights were updated in it."""
        return self.skipped == 0


def parse(text: str) -> Iteration | None:
    """Return the iteration that a line of output reports, or None if it reports none. Raises
    ProgramError if a needed field is missing or no number.
    """
    found = ITERATION.search(text)
    if found is None:
        return None
    told = {
        name.strip(): value.strip()
        for name, sign, value in (one.rpartition(":") for one in found[3].split("|"))
        if sign
    }
    missing = next((name for name in NEEDED if name not in told), None)
    if missing is not None:
        raise ProgramError(f"a line on iteration {found[1]} does not say {missing!r}")
    try:
        return Iteration(
            number=int(found[1]),
            of=int(found[2]),
            consumed=int(told["consumed samples"]),
            batch=int(told["global batch size"]),
            elapsed_s=float(told["elapsed time per iteration (ms)"]) / 1000,
            loss=_number(told.get("lm loss")),
            grad_norm=_number(told.get("grad norm")),
            lr=_number(told.get("learning rate")),
            skipped=int(told["number of skipped iterations"]),
            nan=int(told.get("number of nan iterations", 0)),
        )
    except ValueError as error:
        raise ProgramError(f"a line on iteration {found[1]} cannot be read: {error}") from error


def _number(text: str | None) -> float | None:
    """Return the text as a float; None stays None."""
    return None if text is None else float(text)


def check(line: Iteration, step: int, steps: int, batch: int) -> None:
    """Raise ProgramError unless the iteration is number `step` + 1 (`step` counts from 0) of
    `steps`, with the asked batch, the right sum of rows so far, and a positive finite time.
    """
    if (line.number, line.of) != (step + 1, steps):
        raise ProgramError(
            f"iteration {line.number} of {line.of} was told where {step + 1} of {steps} was due"
        )
    if (line.batch, line.consumed) != (batch, (step + 1) * batch):
        raise ProgramError(
            f"iteration {line.number}: a batch of {line.batch} rows and {line.consumed} in all;"
            f" asked: {batch} and {(step + 1) * batch}"
        )
    if not (math.isfinite(line.elapsed_s) and line.elapsed_s > 0):
        raise ProgramError(f"iteration {line.number} took {line.elapsed_s} s, as the program says")
