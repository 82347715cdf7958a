"""What JSON of a stranger may not hold, though Python reads it: a key twice, NaN and infinities. Hooks for its decoder."""

from typing import Any


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice")
    return out


def no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
