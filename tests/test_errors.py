"""Values of someone else's file in error messages."""

from typing import Any

import pytest

from steelyard.errors import short_repr


class Unprintable:
    """A value whose text must not be made: it is inside a long or nested container."""

    def __repr__(self) -> str:
        raise AssertionError("the text of what is in a long or nested container is not made")


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "None"),
        (1.5, "1.5"),
        ("a\nb", "'a\\nb'"),
        ({"kind": "linear", "factor": 2.0}, "{'kind': 'linear', 'factor': 2.0}"),
        ((4, 8), "(4, 8)"),
        (2**128, "a number of over 128 bits"),
        ("x" * 10**6, "'" + "x" * 96 + "..."),
        (b"x" * 10**6, "b'" + "x" * 95 + "..."),
        ([10**5000], "a list"),
        ({"x" * 101: 1}, "a dict"),
        ({1: "x" * 101}, "a dict"),
        (["x" * 10**6] * 20, "a list"),
        ([[Unprintable()]], "a list"),
        ([Unprintable()] * 21, "a list"),
        ({i: Unprintable() for i in range(21)}, "a dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_in_error_messages_are_shortened(value: Any, text: str) -> None:
    assert short_repr(value) == text
