"""Tests of attacks from outside: a site file in the working directory, variables that load code,
and files without an end.
"""

import os

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.records import copy_published_record


def test_a_site_file_in_the_working_directory_runs_nothing(shell: Shell, attacks: Attacks) -> None:
    """The site file would make every process of the run import a module that writes a mark file."""
    mark_file, code = shell.folder / "mark", shell.folder / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(f"open({str(mark_file)!r}, 'w').close()")
    (shell.folder / "site.toml").write_text(f'environment.PYTHONPATH = "{code}"')
    result = shell(*SMOKE, "--out", shell.out)
    assert result.code == 0, result.err
    assert golden("warning-site-toml-in-this-folder") in result.lines
    assert not mark_file.exists()
    (record,) = shell.records()
    assert record["site"] == {}
    refused = shell(*SMOKE, "--out", shell.out, "--site", "site.toml")
    assert refused.code == 2
    assert refused.lines[-1].startswith(golden("error-site-site-toml-environment-pythonpath"))
    assert not mark_file.exists()
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
def test_file_without_an_end_is_refused(
    verb: tuple[str, ...], what: str, shell: Shell, attacks: Attacks
) -> None:
    folder = shell.folder / "records"
    folder.mkdir()
    path = folder / "endless.json"
    os.mkfifo(path) if what == "fifo" else path.symlink_to("/dev/zero")
    record = copy_published_record("lambada-smoke-closed-fp32-torch-a4264c79", shell.folder / "one")
    result = shell(*verb, *([path, record] if "--signers" in verb else [folder]))
    assert "not a regular file" in result.err + result.out
    assert "Traceback" not in result.err
    # only these combinations hung before; the others were refused already
    if (what, *verb[-1:]) in {("fifo", "--json"), ("device", "--json"), ("fifo", "--signers")}:
        attacks.add(
            f"{what} in the place of a file, given to {' '.join(verb).removesuffix(' --json')}",
            1,
            "hangs",
            "refused",
        )


LONG_NAME = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        ("show", f"{LONG_NAME}.toml"),
        ("verify", LONG_NAME),
        ("report", LONG_NAME),
        ("history", LONG_NAME),
        ("compare", LONG_NAME, LONG_NAME),
        ("weights", "inspect", LONG_NAME),
        ("data", "inspect", LONG_NAME),
        (*SMOKE, "--data", LONG_NAME),
        (*SMOKE, "--tokenizer", LONG_NAME),
        ("run", "--model", LONG_NAME, "--task", "mmlu"),
    ],
    ids=lambda command: " ".join(command)[:40],
)
def test_a_path_that_is_too_long_gets_one_line(command: tuple[str, ...], shell: Shell) -> None:
    result = shell.run_in_process(*command)
    assert (result.code, len(result.err.splitlines())) == (2, 1), result.err
    assert "File name too long" in result.err


def test_a_command_without_memory_gets_one_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_memory_error(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("steelyard.case.resolve.read_case", raise_memory_error)
    result = shell.run_in_process("show", "llama2-7b-mmlu")
    assert result.code == 1
    assert result.lines == [golden("error-this-command-ran-out-of")]


def test_oversized_numbers_get_one_line(shell: Shell) -> None:
    for command, line in (
        (
            ("run", "smoke", "--repeat", "99999999999"),
            "error: --repeat 99999999999: must be 1 to 10,000",
        ),
        (("spec", "--devices", "9" * 20), f"error: --devices {'9' * 20}: must be 1 to 1000000"),
    ):
        result = shell.run_in_process(*command)
        assert (result.code, result.lines[-1]) == (2, line)
