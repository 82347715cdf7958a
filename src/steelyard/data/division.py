"""Divisions of a case, how much of the work that samples have in common may be done once, and what
a step of it counts.
"""

from typing import Literal

Division = Literal["closed", "open"]
"""Closed: every prompt or candidate is computed whole, on its own. Open: what several begin with is computed once."""

COUNTED = ("tokens", "samples", "logits", "pairs", "square")  # what every working step counts
