"""The two divisions of a case, closed and open, and the names of what a step counts."""

from typing import Literal, get_args

# closed: every prompt or candidate is computed whole, on its own; open: a beginning that several
# share is computed once
Division = Literal["closed", "open"]

COUNT_NAMES = ("tokens", "samples", "logits", "pairs", "square")  # keys of a step's counts


def check_division(division: str) -> None:
    """Raise ValueError if this is not the name of a division."""
    if division not in get_args(Division):
        raise ValueError(
            f"division {division!r} is not known; allowed: {', '.join(get_args(Division))}"
        )
