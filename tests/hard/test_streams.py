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
from fixtures.commands import SMOKE, Shell, finish, wait_for
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
def test_a_run_ends_as_it_would(
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
        done = subprocess.run(
            command,
            cwd=faulty.folder,
            env=faulty.env(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0
    assert [one["status"] for one in faulty.records()] == ["valid", "valid"]
    name = stderr.__name__.replace("_", " ")
    attacks.add(
        f"stdout and stderr: {name}",
        1,
        "/" if stderr is stopped else "exit code 1, `--repeat` ends",
        "exit code 0, both records",
    )


@pytest.mark.full
def test_nothing_is_open(faulty: Shell, attacks: Attacks) -> None:
    """With stdin, stdout and stderr closed, no file of the run may get their descriptors."""
    words = " ".join(
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
    done = subprocess.run(
        ["sh", "-c", words], cwd=faulty.folder, env=faulty.env(), timeout=300, check=False
    )
    assert done.returncode == 0
    assert [one["status"] for one in faulty.records()] == ["valid"]
    attacks.add("stdin, stdout and stderr: closed", 1, "exit code 1", "exit code 0, a record")


@pytest.mark.parametrize(("arguments", "code"), [(("list",), 1), (("run", "no-such-case"), 2)])
def test_an_answer_that_is_all_there_is_must_arrive(
    shell: Shell, arguments: tuple[str, ...], code: int
) -> None:
    """An answer that nobody received is no success; a wrong request keeps exit code 2."""
    with Path("/dev/full").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "steelyard", *arguments],
            env=shell.env(),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == code
    assert done.stderr.startswith(
        golden("error-stdout-cannot-be-written-no-2") if code == 1 else "error: no case"
    )


def test_a_character_that_a_terminal_lacks_is_spelled_as_json_does(shell: Shell) -> None:
    told = {"é": "…", "a": "\U0001f600"}
    program = f"from steelyard.cli import printing\nwith printing.protect_streams(): printing.print_json({told!a})"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(
        command,
        env=shell.env(PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.isascii()
    assert json.loads(done.stdout) == told


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "told"),
    [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "SIGTERM")],
    ids=["ssh", "nohup"],
)
def test_a_connection_that_drops_leaves_a_record(
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
    assert finish(process).code == 1
    (record,) = faulty.records()
    assert record["reasons"][0]["code"] == "interrupted"
    assert record["reasons"][0]["text"].startswith(f"interrupted by {told}, in phase ")
    assert faulty.nothing_left(1.0)


def test_what_is_said_waits_for_nobody() -> None:
    """Pieces beyond the backlog are dropped, and the end does not wait for ever."""
    ended = threading.Event()

    def say(stream: printing.BackgroundStderr) -> None:
        for _ in range(printing.MAX_WAITING * 2):
            stream.write("é")
        stream.finish(0.05)
        ended.set()

    with contextmanager(stopped)() as write:
        assert isinstance(write, int)
        stream = printing.BackgroundStderr(write, "utf-8")
        threading.Thread(target=say, args=(stream,), daemon=True).start()
        assert ended.wait(30)
        assert stream._pieces.qsize() <= printing.MAX_WAITING + 1
