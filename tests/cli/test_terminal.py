"""Tests of a run's progress: its line, a line every 30 seconds without a terminal, and what a
terminal shows.
"""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fixtures.commands import CASE, SMOKE, Shell
from steelyard.cli.progress import ProgressDisplay, format_duration, format_progress
from steelyard.run.session import PhaseProgress


@pytest.mark.parametrize(
    "progress,text",
    [
        (PhaseProgress("data", 0, 0, 3.9), "data  0:03"),
        (PhaseProgress("val", 0, 48, 0.0), f"val  {'╌' * 24}  0/48  0:00"),
        (
            PhaseProgress("val", 12, 48, 6.0),
            f"val  {'━' * 6}{'╌' * 18}  12/48  2.00/s  0:06, 0:18 left",
        ),
        (
            PhaseProgress("infer", 48, 48, 24.0),
            f"infer  {'━' * 24}  48/48  2.00/s  0:24, 0:00 left",
        ),
        (
            PhaseProgress("weights", 1, 1000, 10.0),
            f"weights  {'╌' * 24}  1/1000  0.10/s  0:10, 2:46:30 left",
        ),
        (PhaseProgress("val", 5, 4, 10.0), f"val  {'━' * 24}  5/4  0.50/s  0:10, 0:00 left"),
    ],
)
def test_progress_line(progress: PhaseProgress, text: str) -> None:
    assert format_progress(progress) == text


def test_progress_line_fits_the_terminal() -> None:
    """The bar is shortened first; the terminal cuts what is still too long."""
    progress = PhaseProgress("a phase with a rather long name", 14042, 140420, 3600.0)
    counts_text = "14042/140420  3.90/s  1:00:00, 9:00:00 left"
    assert format_progress(progress) == f"a phase with a rather long name  {counts_text}"
    assert (
        format_progress(progress, 100)
        == f"a phase with a rather long name  {'━━' + '╌' * 19}  {counts_text}"
    )
    assert len(format_progress(progress, 100)) == 99
    assert (
        format_progress(progress, 200, bar=False)
        == f"a phase with a rather long name  {counts_text}"
    )


def test_durations_are_formatted_as_hours_minutes_seconds() -> None:
    assert [format_duration(s) for s in (0.0, 59.99, 60.0, 3599.0, 3600.0, 36061.0)] == [
        "0:00",
        "0:59",
        "1:00",
        "59:59",
        "1:00:00",
        "10:01:01",
    ]


class FakeClock:
    """A clock that moves only when a test sets `now_s`, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_without_a_terminal_is_a_line_every_30_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_clock = FakeClock()
    with ProgressDisplay(
        Console(file=io.StringIO()), "[1/2] a case", alone=False, clock=fake_clock
    ) as display:
        for half in range(4):
            for second in (0, 15, 29.9):
                fake_clock.now_s = 30.0 * half + second
                display.show(PhaseProgress("infer", 10 * half + 1, 100, fake_clock.now_s))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[1/2] a case",
        "  infer  11/100  0.37/s  0:30, 4:02 left",
        "  infer  21/100  0.35/s  1:00, 3:45 left",
        "  infer  31/100  0.34/s  1:30, 3:20 left",
    ]
    with ProgressDisplay(
        Console(file=io.StringIO(), quiet=True), "a case", clock=fake_clock
    ) as display:
        fake_clock.now_s = 1000.0
        display.show(PhaseProgress("infer", 1, 100, 1.0))
    assert capsys.readouterr().err == ""


def test_phase_without_counts_shows_its_elapsed_time(capsys: pytest.CaptureFixture[str]) -> None:
    fake_clock = FakeClock()
    with ProgressDisplay(Console(file=io.StringIO()), "a case", clock=fake_clock) as display:
        for second in range(130):
            fake_clock.now_s = float(second)
            phase, began_s = (
                ("starting", 0)
                if second < 5
                else ("weights", 5)
                if second < 62
                else ("compile infer", 62)
            )
            display.show(PhaseProgress(phase, 0, 0, fake_clock.now_s - began_s))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "  weights  0:25",
        "  weights  0:55",
        "  compile infer  0:28",
        "  compile infer  0:58",
    ]


def run_on_terminal(shell: Shell, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run a command with a pseudo-terminal as its stderr; return exit code, stdout, and what the
    terminal received.
    """
    test_side, command_side = pty.openpty()
    command = [sys.executable, "-m", "steelyard", *arguments]
    env = shell.env(**{"TERM": "xterm-256color", "COLUMNS": "80", **variables})
    process = subprocess.Popen(
        command, cwd=shell.folder, stdout=subprocess.PIPE, stderr=command_side, env=env, text=True
    )
    os.close(command_side)
    output = b""
    while True:
        if select.select([test_side], [], [], 0.1)[0]:
            try:
                output += os.read(test_side, 65536)
            except OSError:  # Linux: the other side is closed
                break
        elif process.poll() is not None:
            break
    out = process.communicate()[0]
    os.close(test_side)
    return process.returncode, out, output.decode()


@pytest.mark.process
def test_progress_on_a_terminal(tmp_path: Path, faulty_package: Path) -> None:
    shell = Shell(tmp_path, (faulty_package,))
    command = (*SMOKE, "--engine", "faulty", "--out", str(shell.out))
    code, out, terminal_output = run_on_terminal(shell, *command, FAULTY_STEP_S="0.4")
    assert code == 0, terminal_output
    assert terminal_output.startswith(
        "steelyard 0.1.0: preparing …\r\n" + f"{CASE} closed fp32 faulty\r\n"
    )
    assert re.search(r"starting  0:0\d", terminal_output)
    assert re.search(r"(data|engine|prepare val|calibrate)  0:0\d", terminal_output)
    assert re.search(r"val  ━{6}╌{18}  1/4  \d\.\d\d/s  0:0\d, 0:0\d left", terminal_output)
    assert re.search(r"infer  ━{18}╌{6}  3/4  \d\.\d\d/s  0:0\d, 0:0\d left", terminal_output)
    assert f"\x1b[32mvalid\x1b[0m: {shell.out}" in terminal_output.replace("\r\n", "")
    assert "\x1b" not in out


@pytest.mark.full
@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_dumb_or_no_color_terminal_gets_no_colours(shell: Shell, variables: dict[str, str]) -> None:
    code, _, terminal_output = run_on_terminal(
        shell, *SMOKE, "--passes", "val", "--out", str(shell.out), **variables
    )
    assert code == 0, terminal_output
    assert f"valid: {shell.out}" in terminal_output
    assert not re.search(r"\x1b\[[0-9;]*m", terminal_output)
    assert ("\x1b" in terminal_output) == ("NO_COLOR" in variables)  # rewriting a line is no colour


def test_quiet_prints_nothing_on_the_terminal(shell: Shell) -> None:
    code, out, terminal_output = run_on_terminal(
        shell, *SMOKE, "--passes", "val", "--out", str(shell.out), "--quiet"
    )
    assert (code, terminal_output) == (0, "")
    assert "valid" in out


def test_json_prints_nothing_on_the_terminal(shell: Shell) -> None:
    code, out, terminal_output = run_on_terminal(
        shell, *SMOKE, "--passes", "val", "--out", str(shell.out), "--json"
    )
    assert (code, terminal_output) == (0, "")
    assert json.loads(out)["records"][0]["status"] == "valid"
