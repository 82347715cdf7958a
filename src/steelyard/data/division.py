"""The two divisions of a case, closed and open, and the names of what a step counts."""

from typing import Literal

Division = Literal["closed", "open"]
(
    "Closed: every prompt or candidate is computed whole, on its own."
    " Open: what several begin with is computed once."
)

COUNT_NAMES = ("tokens", "samples", "logits", "pairs", "square")  # keys of a step's counts
