"""Tests of attacks from outside: a site file in the working directory, variables that load code,
and files without an end.
"""

import os

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.records import published


def test_a_site_file_in_the_working_directory_runs_nothing(shell: Shell, attacks: Attacks) -> None:
    """The site file would make every process of the run import a module that writes a mark file."""
    mark, code = shell.folder / "mark", shell.folder / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()")
    (shell.folder / "site.toml").write_text(f'environment.PYTHONPATH = "{code}"')
    done = shell(*SMOKE, "--out", shell.out)
    assert done.code == 0, done.err
    assert golden("warning-site-toml-in-this-folder") in done.lines
    assert not mark.exists()
    (record,) = shell.records()
    assert record["site"] == {}
    refused = shell(*SMOKE, "--out", shell.out, "--site", "site.toml")
    assert refused.code == 2
    assert refused.lines[-1].startswith(golden("error-site-site-toml-environment-pythonpath"))
    assert not mark.exists()
    attacks.add(
        "site.toml in the working directory that sets PYTHONPATH",
        1,
        "its code runs in every process",
        "not taken",
    )


@pytest.mark.parametrize(
    "verb",
    [("verify",), ("history", "--json"), ("report",), ("verify", "--signers")],
    ids=["verify", "history", "report", "signers"],
)
@pytest.mark.parametrize("what", ["fifo", "device"])
def test_a_file_that_never_ends_is_refused(
    verb: tuple[str, ...], what: str, shell: Shell, attacks: Attacks
) -> None:
    folder = shell.folder / "records"
    folder.mkdir()
    path = folder / "endless.json"
    os.mkfifo(path) if what == "fifo" else path.symlink_to("/dev/zero")
    record = published("lambada-smoke-closed-fp32-torch-a4264c79", shell.folder / "one")
    done = shell(*verb, *([path, record] if "--signers" in verb else [folder]))
    assert "not a regular file" in done.err + done.out
    assert "Traceback" not in done.err
    # only these combinations hung before; the others were refused already
    if (what, *verb[-1:]) in {("fifo", "--json"), ("device", "--json"), ("fifo", "--signers")}:
        attacks.add(
            f"{what} in the place of a file, given to {' '.join(verb).removesuffix(' --json')}",
            1,
            "hangs",
            "refused",
        )


LONG = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        ("show", f"{LONG}.toml"),
        ("verify", LONG),
        ("report", LONG),
        ("history", LONG),
        ("compare", LONG, LONG),
        ("weights", "inspect", LONG),
        ("data", "inspect", LONG),
        (*SMOKE, "--data", LONG),
        (*SMOKE, "--tokenizer", LONG),
        ("run", "--model", LONG, "--task", "mmlu"),
    ],
    ids=lambda command: " ".join(command)[:40],
)
def test_a_path_that_is_too_long_gets_one_line(command: tuple[str, ...], shell: Shell) -> None:
    done = shell.ask(*command)
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert "File name too long" in done.err


def test_a_command_without_memory_gets_one_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("steelyard.case.resolve.read_case", starved)
    done = shell.ask("show", "llama2-7b-mmlu")
    assert done.code == 1
    assert done.lines == [golden("error-this-command-ran-out-of")]


def test_numbers_that_no_machine_has_get_one_line(shell: Shell) -> None:
    for command, line in (
        (
            ("run", "smoke", "--repeat", "99999999999"),
            "error: --repeat 99999999999: must be 1 to 10,000",
        ),
        (("spec", "--devices", "9" * 20), f"error: --devices {'9' * 20}: must be 1 to 1000000"),
    ):
        done = shell.ask(*command)
        assert (done.code, done.lines[-1]) == (2, line)
