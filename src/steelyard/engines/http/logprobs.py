"""How far generated tokens are from the likeliest ones, by the log-probabilities that a server
reports.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class DistanceSum:
    """The distances of the tokens of one answer: tokens `compared`, those that are the likeliest
    (`exact`), and the `largest` distance in nats, infinite if a token had no probability, or one
    that is no number.
    """

    compared: int = 0
    exact: int = 0
    largest: float = 0.0

    def add_chunk(self, logprobs: Any) -> None:
        """Add the tokens of a chunk by its log-probabilities, as either interface spells them. What
        is not of either form is ignored.
        """
        if not isinstance(logprobs, dict):
            return
        content = logprobs.get("content")
        for token in content if isinstance(content, list) else []:
            if isinstance(token, dict):
                tops = token.get("top_logprobs")
                likeliest = tops if isinstance(tops, list) else []
                values = [top.get("logprob") for top in likeliest if isinstance(top, dict)]
                self._add_token(token.get("logprob"), values)
        chosen, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
        if isinstance(chosen, list) and isinstance(tops, list):
            for value, top in zip(chosen, tops, strict=False):
                self._add_token(value, list(top.values()) if isinstance(top, dict) else [])

    def _add_token(self, chosen: Any, likeliest: list[Any]) -> None:
        """Add a token by its log-probability and those of the likeliest ones."""
        values = (chosen, *likeliest)
        numbers = [_as_number(value) for value in values if isinstance(value, int | float)]
        if len(numbers) < 2 or not isinstance(chosen, int | float):
            return
        is_finite = all(map(math.isfinite, numbers))
        distance = max(0.0, max(numbers[1:]) - numbers[0]) if is_finite else math.inf
        self.compared += 1
        self.exact += distance == 0
        self.largest = max(self.largest, distance)


def _as_number(value: float) -> float:
    """Return a number of JSON as a float, NaN for an integer that is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.nan
