"""Pages as plain text."""

import pytest

from steelyard.report.as_text import render_text
from steelyard.report.document import Fact, Facts, Page
from steelyard.report.plain_text import wrap_text


def test_long_labels_do_not_touch_their_values() -> None:
    for length in range(30, 60):
        rendered = render_text(Page("", "en", (Facts((Fact("x" * length, "/"), Fact("y", "z"))),)))
        assert f"{'x' * length}: " in rendered, rendered


@pytest.mark.parametrize("columns", [1, 0, -80])
def test_wrapping_keeps_at_least_one_character(columns: int) -> None:
    assert wrap_text("ab 题", columns) == ["a", "b", "题"]
