"""Values of someone else's file and errors of other libraries in messages."""

from typing import Any

import pytest

from steelyard.errors import ERROR_LINE_CHARS, clean_error_line, names_exception, short_repr


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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("\n  no kernel\tfor it\nTraceback", "no kernel for it"),
        ("fail at alloc_cpu.cpp:127] err == 0", "fail at …] err == 0"),
        ("in ../aten/src/ATen/Blas.cpp:12: x", "in …: x"),
        ("cannot map /usr/lib/x/libfoo.so.1", "cannot map …"),
        ("visit https://example.com/fixes for it", "visit … for it"),
        ("at 0x7f3A00 and 12x14", "at … and 12x14"),
        ("1.5 TFLOP/s, 2 GB/s", "1.5 TFLOP/s, 2 GB/s"),
        ("a\x1b[31mb", "a [31mb"),
    ],
)
def test_error_of_a_library_becomes_one_clean_line(text: str, line: str) -> None:
    assert clean_error_line(text) == line


def test_long_error_line_is_cut() -> None:
    assert clean_error_line("x" * ERROR_LINE_CHARS) == "x" * ERROR_LINE_CHARS
    assert clean_error_line("x" * 10**6) == "x" * (ERROR_LINE_CHARS - 1) + "…"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("RuntimeError: x", True),
        ("rank 0: torch.AcceleratorError", True),
        ("CUDA error: an illegal memory access", True),
        ("the device reported an error", False),
        ("its result is wrong: 0.5 from fp64", False),
    ],
)
def test_name_of_an_exception_is_found(text: str, found: bool) -> None:
    assert names_exception(text) is found
