"""The line of a case file on which each key stands."""

import tomllib

import pytest

from steelyard.case import resolve
from steelyard.case.toml_lines import find_line_numbers

TOML_TEXT = """\
a = 1 # [not.a.table]
"b.c" = "x = 1" # a quoted key
d.e = {f = 1, g = [
  2]}

text = \'\'\'
[neither]
k = 1
\'\'\'
more = \"\"\"
\\\"\"\"
z = 1 \"\"\"\"
[t."u.v"] # with a comment
k = ["]", \'[\', # ]
  3]
[[rows]]
name = 1
[rows.inner]
x = 2
[[rows]]
name = 2
[[rows.deep]]
y = 3
[last]
"""


def test_every_key_has_its_line() -> None:
    tomllib.loads(TOML_TEXT)
    assert find_line_numbers(TOML_TEXT) == {
        ("a",): 1,
        ("b.c",): 2,
        ("d",): 3,
        ("d", "e"): 3,
        ("text",): 6,
        ("more",): 10,
        ("t", "u.v"): 13,
        ("t", "u.v", "k"): 14,
        ("rows",): 16,
        ("rows", 0): 16,
        ("rows", 0, "name"): 17,
        ("rows", 0, "inner"): 18,
        ("rows", 0, "inner", "x"): 19,
        ("rows", 1): 20,
        ("rows", 1, "name"): 21,
        ("rows", 1, "deep"): 22,
        ("rows", 1, "deep", 0): 22,
        ("rows", 1, "deep", 0, "y"): 23,
        ("last",): 24,
    }
    assert find_line_numbers(TOML_TEXT.replace("\n", "\r\n")) == find_line_numbers(TOML_TEXT)


@pytest.mark.parametrize("name", resolve.list_shipped_cases())
def test_shipped_cases_have_a_line_for_every_value(name: str) -> None:
    source = resolve.read_case(name)
    line_numbers = find_line_numbers(source.text)
    lines = source.text.splitlines()

    def check_value(value: object, path: tuple[str | int, ...]) -> None:
        """Check the lines of a value, or of all values of a table or of a list of tables."""
        tables = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        if isinstance(value, dict) or tables:
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                check_value(inner, (*path, key))
        else:
            assert lines[line_numbers[path] - 1].startswith(f"{path[-1]} = "), path

    check_value(source.table, ())
