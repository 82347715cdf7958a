"""Numbers as readers see them. The only place where a number becomes text."""

import math
from collections.abc import Callable
from typing import Any

UNKNOWN = "/"  # as in FlagPerf's published tables

_SIGNIFICANT = 4
_LARGEST_PLAIN = 1e9
_SMALLEST_PLAIN = 1e-4
_MAX_DEPTH = 8  # a stranger's record may nest without end


def number(value: float) -> str:
    """Format four significant digits, but never fewer than all digits before the point."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= _LARGEST_PLAIN or size < _SMALLEST_PLAIN:
        mantissa, exponent = f"{value:.{_SIGNIFICANT - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, _SIGNIFICANT - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def percent(value: float) -> str:
    """Format one decimal; more below 1 %, and if rounding would make an almost empty share 0 or an
    almost full one 100."""
    if value in (0.0, 1.0):
        return f"{value:.1%}"
    for decimals in (1, 2, 3):
        text = f"{value:.{decimals}%}"
        if text.strip("-0.%") and float(text[:-1]) != 100 and (decimals > 1 or abs(value) >= 0.01):
            return text
    return text


def seconds(value: float) -> str:
    """Format thousandths, hundredths, tenths, then whole seconds: finer digits of a long time say
    nothing."""
    size = abs(value)
    decimals = next(
        (places for least, places in ((1000, 0), (100, 1), (0.1, 2), (0.001, 3)) if size >= least),
        None,
    )
    return number(value) if decimals is None else f"{value:,.{decimals}f}"


_FORMS: dict[str, Callable[[float], str]] = {
    "number": number,
    "percent": percent,
    "gib": lambda value: f"{value:,.1f}",
    "seconds": seconds,
    "decimals": lambda value: f"{value:,.4f}",  # as losses are published
}


def formed(form: str, value: Any, scale: float = 1.0) -> str:
    """Return a number over its scale in one of the forms; what is no finite number is unknown."""
    known = real(value)
    return UNKNOWN if known is None else _FORMS[form](known / scale)


def ends(interval: tuple[float, float] | None, form: str = "number", scale: float = 1.0) -> str:
    """Format both ends of an interval; an empty text where there is none."""
    return "" if interval is None else " – ".join(formed(form, end, scale) for end in interval)


def bare(form: str, value: Any) -> str:
    """Format a number without marks for thousands, as FlagPerf's pages have it."""
    return formed(form, value).replace(",", "")


def joined(texts: list[str]) -> str:
    """Join numbers of one cell by a slash; UNKNOWN where none is known."""
    known = ("-" if text == UNKNOWN else text for text in texts)
    return UNKNOWN if set(texts) == {UNKNOWN} else "/".join(known)


def real(value: Any) -> float | None:
    """Return a finite number, or None: a record's open tables may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) else None


def gib_of_bytes(value: Any) -> str:
    text = formed("gib", value, 2**30)
    return text if text == UNKNOWN else f"{text} GiB"


def counted(value: Any) -> str:
    """Format a count with thousands marked; anything else as `spelled` does."""
    return (
        f"{value:,d}" if isinstance(value, int) and not isinstance(value, bool) else spelled(value)
    )


def spelled(value: Any, depth: int = 0) -> str:
    """Format a setting as its author would type it, without marks for thousands."""
    if value is None or value == "" or value == {} or value == []:
        return UNKNOWN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, dict | list | tuple) and depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        listed = ", ".join(
            f"{key}={spelled(item, depth + 1)}" for key, item in value.items() if item is not None
        )
        return f"{{{listed}}}" if depth else listed
    if isinstance(value, list | tuple):
        listed = ", ".join(spelled(item, depth + 1) for item in value)
        return f"[{listed}]" if depth else listed
    return str(value)
