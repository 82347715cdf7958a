"""Tests that printed text cannot steer a terminal: titles, file names, error texts and progress of
workers are escaped.
"""

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from fixtures.commands import Shell
from steelyard.cli import printing
from steelyard.cli.progress import ProgressDisplay
from steelyard.run.session import PhaseProgress

HOSTILE = "a\x1b]0;owned\x07b\x9b31mc\x7f\u202ed\u2066e\ud800f\rg"
ESCAPED = "a\\u001b]0;owned\\u0007b\\u009b31mc\\u007f\\u202ed\\u2066e\\ud800f\\rg"
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]"
)


def test_answers_and_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_stdout(f"{HOSTILE}\n\tsecond line, é 中 ━")
    printing.print_stderr(HOSTILE)
    captured = capsys.readouterr()
    assert captured.out == f"{ESCAPED}\n\tsecond line, é 中 ━\n"
    assert captured.err == f"{ESCAPED}\n"


def test_one_line_escapes_control_characters() -> None:
    assert printing.to_one_line("a\x1b[2J\n\tb\u202ec\u2028d") == "a\\u001b[2J b\\u202ec d"


def test_json_output_is_escaped_and_keeps_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: [f'{HOSTILE}\n\t\U000e0041 中 \\ "']}
    printing.print_json(value)
    text = capsys.readouterr().out
    assert not STEERING.search(text)
    assert json.loads(text) == value
    assert "中" in text


def test_progress_is_escaped() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=200, color_system=None)
    with ProgressDisplay(console, HOSTILE) as display:
        display.show(PhaseProgress(f"infer\n{HOSTILE}", 1, 2, 1.0))
    text = re.sub("\x1b\\[[0-9?]*[A-Za-z]|\r", "", output.getvalue())  # remove escapes of rich
    line = ESCAPED.replace("\\r", " ")
    assert f"infer {line}" in text
    assert not STEERING.search(text)


def test_titles_and_file_names_are_escaped(shell: Shell, tmp_path: Path) -> None:
    from importlib import resources

    name = os.fsdecode(b"x\x1b[31m\x9b\xe2\x80\xae.toml")
    case = (resources.files("steelyard") / "cases/llama2-7b-mmlu.toml").read_text()
    path = tmp_path / name
    path.write_text(
        re.sub(r"(?m)^title = .*$", 'title = "red \\\\u001b[31m \\\\u202e title"', case, count=1)
    )
    result = shell("show", path)
    assert "red \\u001b[31m \\u202e title" in result.out
    assert not STEERING.search(result.out + result.err)
    result = shell("verify", tmp_path / f"{name}.absent")
    assert result.code == 2
    assert "x\\u001b[31m" in result.err
    assert not STEERING.search(result.out + result.err)
