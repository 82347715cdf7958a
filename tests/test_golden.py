"""Every expected sentence of fixtures/golden is used by a test, and every sentence that a test
names exists there.
"""

import re
import tomllib
from pathlib import Path

TESTS = Path(__file__).parent
GOLDEN_CALL = re.compile(r'golden\(\s*"([^"]+)"')


def test_golden_sentences_are_exactly_those_that_tests_use() -> None:
    used = {
        key
        for path in TESTS.rglob("test_*.py")
        for key in GOLDEN_CALL.findall(path.read_text("utf-8"))
    }
    stored = [
        tomllib.loads(path.read_text("utf-8"))
        for path in sorted((TESTS / "fixtures" / "golden").glob("*.toml"))
    ]
    assert {key for language in stored for key in language} == used
