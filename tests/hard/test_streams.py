"""Tests that the streams of a run change nothing: neither its records nor its exit code nor its
repeats.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell, wait_for, wait_for_result
from fixtures.golden import golden
from steelyard.cli import printing

RUN = (*SMOKE, "--engine", "faulty", "--passes", "val", "--set", "tune.parallel=DP")
Stream = int | IO[Any]


def full() -> Iterator[Stream]:
    """Yield a stream to a full device."""
    with Path("/dev/full").open("w") as file:
        yield file


def nobody_reads() -> Iterator[Stream]:
    """Yield the write end of a pipe whose read end is closed."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def stopped() -> Iterator[Stream]:
    """Yield the write end of a full pipe that nobody reads, as a terminal after Ctrl-S."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    yield write
    os.close(write)
    os.close(read)


@pytest.mark.full
@pytest.mark.parametrize("stderr", [full, nobody_reads, stopped], ids=lambda one: one.__name__)
def test_run_succeeds_when_stdout_and_stderr_fail(
    faulty: Shell, stderr: Callable[[], Iterator[Stream]], attacks: Attacks
) -> None:
    """The run is repeated, so it must go on after the first. Its final output is lost too.

    A suspended terminal is replaced for stdout: there the command would wait, as any does, with its
    records on disk.
    """
    with (
        contextmanager(stderr)() as err,
        contextmanager(full if stderr is stopped else stderr)() as out,
    ):
        command = [
            sys.executable,
            "-P",
            "-m",
            "steelyard",
            *RUN,
            "--repeat",
            "2",
            "--out",
            str(faulty.out),
        ]
        result = subprocess.run(
            command,
            cwd=faulty.folder,
            env=faulty.env(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            timeout=300,
            check=False,
        )
    assert result.returncode == 0
    assert [record["status"] for record in faulty.records()] == ["valid", "valid"]
    name = stderr.__name__.replace("_", " ")
    attacks.add(
        f"stdout and stderr: {name}",
        1,
        "/" if stderr is stopped else "exit code 1, `--repeat` ends",
        "exit code 0, both records",
    )


@pytest.mark.full
def test_run_succeeds_with_closed_streams(faulty: Shell, attacks: Attacks) -> None:
    """With stdin, stdout and stderr closed, no file of the run may get their descriptors."""
    shell_line = " ".join(
        [
            "exec",
            sys.executable,
            "-P",
            "-m",
            "steelyard",
            *RUN,
            "--out",
            "records",
            "<&-",
            ">&-",
            "2>&-",
        ]
    )
    result = subprocess.run(
        ["sh", "-c", shell_line], cwd=faulty.folder, env=faulty.env(), timeout=300, check=False
    )
    assert result.returncode == 0
    assert [record["status"] for record in faulty.records()] == ["valid"]
    attacks.add("stdin, stdout and stderr: closed", 1, "exit code 1", "exit code 0, a record")


@pytest.mark.parametrize(("arguments", "code"), [(("list",), 1), (("run", "no-such-case"), 2)])
def test_unwritable_stdout_fails_a_command_that_only_prints(
    shell: Shell, arguments: tuple[str, ...], code: int
) -> None:
    """An answer that nobody received is no success; a wrong request keeps exit code 2."""
    with Path("/dev/full").open("w") as out:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "steelyard", *arguments],
            env=shell.env(),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    assert result.returncode == code
    assert result.stderr.startswith(
        golden("error-stdout-cannot-be-written-no-2") if code == 1 else "error: no case"
    )


def test_unencodable_characters_are_escaped_as_in_json(shell: Shell) -> None:
    value = {"é": "…", "a": "\U0001f600"}
    program = (
        "from steelyard.cli import printing\nwith printing.protect_streams():"
        f" printing.print_json({value!a})"
    )
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(
        command,
        env=shell.env(PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert result.stdout.isascii()
    assert json.loads(result.stdout) == value


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "told"),
    [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "SIGTERM")],
    ids=["ssh", "nohup"],
)
def test_hangup_leaves_a_record_except_under_nohup(
    faulty: Shell, before: signal.Handlers, told: str
) -> None:
    """Under nohup, SIGHUP is ignored."""
    mark = faulty.folder / "there"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "steelyard", *RUN, "--out", str(faulty.out)],
        env=faulty.env(FAULTY="waits@work", FAULTY_MARK=str(mark)),
        cwd=faulty.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, before),
    )
    assert wait_for(mark.exists)
    process.send_signal(signal.SIGHUP)
    if told == "SIGTERM":
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.send_signal(signal.SIGTERM)
    assert wait_for_result(process).code == 1
    (record,) = faulty.records()
    assert record["reasons"][0]["code"] == "interrupted"
    assert record["reasons"][0]["text"].startswith(f"interrupted by {told}, in phase ")
    assert faulty.wait_until_ended(1.0)


def test_stderr_never_blocks_on_a_full_pipe() -> None:
    """Pieces beyond the backlog are dropped, and the end does not wait for ever."""
    finished = threading.Event()

    def write_twice_the_backlog(stream: printing.BackgroundStderr) -> None:
        for _ in range(printing.MAX_WAITING * 2):
            stream.write("é")
        stream.finish(0.05)
        finished.set()

    with contextmanager(stopped)() as write:
        assert isinstance(write, int)
        stream = printing.BackgroundStderr(write, "utf-8")
        threading.Thread(target=write_twice_the_backlog, args=(stream,), daemon=True).start()
        assert finished.wait(30)
        assert stream._pieces.qsize() <= printing.MAX_WAITING + 1
