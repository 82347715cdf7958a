"""Pages as plain text."""

from steelyard.report.as_text import text
from steelyard.report.document import Fact, Facts, Page


def test_long_labels_do_not_touch_their_values() -> None:
    for length in range(30, 60):
        said = text(Page("", "en", (Facts((Fact("x" * length, "/"), Fact("y", "z"))),)))
        assert f"{'x' * length}: " in said, said
