"""Format numbers and settings for readers. Only here does a number become text on a page."""

import math
from collections.abc import Callable, Sequence
from typing import Any

UNKNOWN = "/"  # as in FlagPerf's published tables

_SIGNIFICANT = 4
_LARGEST_PLAIN = 1e9
_SMALLEST_PLAIN = 1e-4
_MAX_DEPTH = 8  # an untrusted record may be nested without end


def format_significant(value: float) -> str:
    """Format a number with four significant digits, and never fewer than all digits before the
    point: 0.01235, 12.35, 123,457.

    Below 1e-4 and from 1e9 on it is written with an exponent.
    """
    size = abs(value)
    if size == 0:
        return "0"
    if size >= _LARGEST_PLAIN or size < _SMALLEST_PLAIN:
        mantissa, exponent = f"{value:.{_SIGNIFICANT - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, _SIGNIFICANT - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def format_percent(value: float) -> str:
    """Format a share (1.0 is 100 %) as a percentage with one decimal, such as `45.2%`; with two, or
    at most three, below 1 % and where rounding would make it 0 or 100. 0 and 1 have one decimal, 1
    also with the rounding error of a quotient.
    """
    if value == 0 or math.isclose(value, 1.0, rel_tol=1e-12):
        return f"{value:.1%}"
    for decimals in (1, 2, 3):
        text = f"{value:.{decimals}%}"
        if text.strip("-0.%") and float(text[:-1]) != 100 and (decimals > 1 or abs(value) >= 0.01):
            return text
    return text


def format_seconds(value: float) -> str:
    """Format a time with fewer decimals the longer it is: three from 0.001 s, two from 0.1 s, one
    from 100 s, none from 1,000 s; shorter ones with four significant digits.
    """
    size = abs(value)
    decimals = next(
        (
            digits
            for minimum_s, digits in ((1000, 0), (100, 1), (0.1, 2), (0.001, 3))
            if size >= minimum_s
        ),
        None,
    )
    return format_significant(value) if decimals is None else f"{value:,.{decimals}f}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "number": format_significant,
    "percent": format_percent,
    "gib": lambda value: f"{value:,.1f}",
    "seconds": format_seconds,
    "decimals": lambda value: f"{value:,.4f}",  # as FlagPerf publishes losses
}
# where two numbers are compared; by `_FORMATS` times of 3.1 and 3.4 ms would look the same
_COMPARED_FORMATS: dict[str, Callable[[float], str]] = {
    "percent": lambda value: f"{format_significant(100 * value)}%",
    "gib": format_significant,
    "seconds": format_significant,
}


def format_number(form: str, value: Any, scale: float = 1.0) -> str:
    """Format `value / scale` in one of the number formats (number, percent, gib, seconds,
    decimals), without a unit except the percent sign; UNKNOWN for a value that is no finite number.
    Raises KeyError for another format.
    """
    number = finite_or_none(value)
    return UNKNOWN if number is None else _FORMATS[form](number / scale)


def format_compared_number(form: str, value: Any) -> str:
    """Format a number that stands beside another of the same kind, so that a reader sees how far
    they are apart: as `format_number` does, but times, sizes and percentages with four significant
    digits too. Raises KeyError for an unknown format.
    """
    number = finite_or_none(value)
    return UNKNOWN if number is None else {**_FORMATS, **_COMPARED_FORMATS}[form](number)


def format_interval(
    interval: tuple[float, float] | None, form: str = "number", scale: float = 1.0
) -> str:
    """Format both ends of an interval with ` – ` between them, each by `format_number`; an empty
    string for None.
    """
    return (
        "" if interval is None else " – ".join(format_number(form, end, scale) for end in interval)
    )


def format_without_separators(form: str, value: Any) -> str:
    """Format a number without thousands separators, as FlagPerf's pages do; UNKNOWN for what is no
    finite number.
    """
    return format_number(form, value).replace(",", "")


def join_by_slash(texts: list[str]) -> str:
    """Join the formatted numbers of one cell by slashes; an unknown one is `-`, and the whole is
    UNKNOWN where none is known.
    """
    shown = ("-" if text == UNKNOWN else text for text in texts)
    return UNKNOWN if set(texts) == {UNKNOWN} else "/".join(shown)


_FIRST_IN_SECONDS = 0.9995  # rounds to 1.00 s


def format_times(times_s: Sequence[float | None]) -> str:
    """Format the times of one cell with three significant digits and their common unit, joined by
    slashes: `123/180/210 ms` if all are below a second, else `0.123/1.80 s`. An unknown one is `-`,
    and the whole is UNKNOWN where none is known.
    """
    known = [time_s for time_s in map(finite_or_none, times_s) if time_s is not None]
    in_seconds = any(abs(time_s) >= _FIRST_IN_SECONDS for time_s in known)
    factor, unit = (1.0, "s") if in_seconds else (1000.0, "ms")
    texts = [
        UNKNOWN
        if (time_s := finite_or_none(value)) is None
        else _format_three_digits(time_s * factor)
        for value in times_s
    ]
    text = join_by_slash(texts)
    return text if text == UNKNOWN else f"{text} {unit}"


def _format_three_digits(value: float) -> str:
    """Format a number with three significant digits, never fewer than all before the point and at
    most six decimals: 0.123, 12.3, 1,234.
    """
    rounded = float(f"{value:.3g}") if abs(value) < 1000 else value
    if rounded == 0:
        return "0"
    decimals = min(6, max(0, 2 - math.floor(math.log10(abs(rounded)))))
    return f"{rounded:,.{decimals}f}"


def finite_or_none(value: Any) -> float | None:
    """Return a finite int or float as a float; None for anything else, also for booleans and for
    integers too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def format_bytes_in_gib(value: Any) -> str:
    """Format a number of bytes in GiB with one decimal and the unit; UNKNOWN for what is no finite
    number.
    """
    text = format_number("gib", value, 2**30)
    return text if text == UNKNOWN else f"{text} GiB"


def format_count(value: Any) -> str:
    """Format an integer with thousands separators; anything else as `format_setting` does."""
    return (
        f"{value:,d}"
        if isinstance(value, int) and not isinstance(value, bool)
        else format_setting(value)
    )


def format_setting(value: Any, depth: int = 0) -> str:
    """Format a setting as its author would type it: no thousands separators, floats with up to 12
    significant digits, `true` and `false`, a dict as `key=value` and a list as its items, joined by
    commas.

    None, empty text, empty dicts and lists are UNKNOWN; items of a dict that are None are left out.
    From `depth` 1 on dicts and lists get brackets, and from depth 8 on they become `…`.
    """
    if value is None or value == "" or value == {} or value == [] or value == ():
        return UNKNOWN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, dict | list | tuple) and depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        listed = ", ".join(
            f"{key}={format_setting(item, depth + 1)}"
            for key, item in value.items()
            if item is not None
        )
        return f"{{{listed}}}" if depth else listed
    if isinstance(value, list | tuple):
        listed = ", ".join(format_setting(item, depth + 1) for item in value)
        return f"[{listed}]" if depth else listed
    return str(value)
