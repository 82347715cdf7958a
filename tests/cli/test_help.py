"""Tests of help, shell completion and the first line that a command prints."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from fixtures.commands import Shell
from fixtures.golden import golden
from steelyard.case import resolve
from steelyard.cli import COMMANDS, app, printing
from steelyard.cli.options import GroupedCommand

GROUPS = {
    "case": ("new",),
    "weights": ("get", "list", "inspect", "convert"),
    "data": ("get", "list", "pack", "inspect"),
}
ALL_COMMANDS = (
    (),
    *((verb,) for verb in COMMANDS),
    *((group,) for group in GROUPS),
    *((g, v) for g, verbs in GROUPS.items() for v in verbs),
)
MOST_USED_OPTIONS = ("--data", "--weights", "--size", "--engine", "--devices", "--model", "--task")


def find_examples(text: str) -> list[str]:
    """Return the commands in the examples of a help text."""
    return re.findall(
        r"steelyard (?:[^\n]*\\\n)*[^\n]*", text.split("Example", 1)[1].split("\n\n")[0]
    )


def list_options(application: typer.Typer) -> "list[tuple[str, typer.models.OptionInfo]]":
    """Return each option of all commands of a typer application: the parameter's name and its
    declaration.
    """
    verbs = [entry.callback for entry in application.registered_commands if entry.callback]
    hints = [hint for verb in verbs for hint in get_type_hints(verb, include_extras=True).items()]
    annotated = [(name, info) for name, hint in hints for info in getattr(hint, "__metadata__", ())]
    groups = [
        entry
        for group in application.registered_groups
        for entry in list_options(group.typer_instance or typer.Typer())
    ]
    return [entry for entry in annotated if isinstance(entry[1], typer.models.OptionInfo)] + groups


def test_placeholder_never_becomes_an_option_name() -> None:
    """typer 0.27 names an option `--SIZE` where its placeholder is the parameter's name in capitals
    and no other name is declared.
    """
    all_options = list_options(app)
    assert len(all_options) > 100
    same_name_options = {
        name: info for name, info in all_options if (info.metavar or "").lower() == name
    }
    assert len(same_name_options) > 5
    # the default of an OptionInfo is the first declared name
    assert {name: info.default for name, info in same_name_options.items()} == {
        name: f"--{name}" for name in same_name_options
    }


@pytest.mark.parametrize("verb", ALL_COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_has_an_example(shell: Shell, verb: tuple[str, ...]) -> None:
    result = shell.run_in_process(*verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert shell.run_in_process(*verb, "-h").out == result.out
    assert max(map(len, result.out.splitlines())) <= 80
    example_commands = find_examples(result.out)
    assert example_commands[0].startswith(" ".join(("steelyard", *verb)))
    assert result.out.startswith(" ".join(("Usage: steelyard", *verb)))
    if len(verb) == 1 and verb[0] in COMMANDS:
        assert "--json" in result.out


@pytest.mark.parametrize(
    "verb", [verb for verb in ALL_COMMANDS if verb and verb[-1] not in GROUPS], ids=" ".join
)
def test_examples_in_help_parse(shell: Shell, verb: tuple[str, ...]) -> None:
    """Options and arguments of every example parse; the files that they name need not exist."""
    command: Any = _find_command(verb)
    for line in find_examples(shell.run_in_process(*verb, "-h").out):
        words = shlex.split(line.replace("\\\n", " ").partition(" > ")[0])
        if words[1] == verb[0]:  # an example may also show another command
            assert words[: len(verb) + 1] == ["steelyard", *verb]
            command.make_context("steelyard", words[len(verb) + 1 :])


def _find_command(verb: tuple[str, ...]) -> Any:
    """Return the click command of these words, such as ("data", "get")."""
    import typer

    command: Any = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]
    return command


def test_help_names_every_command_and_a_first_one(shell: Shell) -> None:
    result = shell("--help")
    assert (result.code, result.err) == (0, "")
    assert "steelyard run smoke" in result.out
    commands = result.out.split("Commands:")[1]
    assert re.findall(r"^  ([a-z]+)  ", commands, re.MULTILINE) == [*COMMANDS, *GROUPS]
    assert "..." not in commands
    assert shell().out == result.out
    assert shell("--version").out == "0.1.0\n"


def test_help_of_run_lists_the_most_used_options_first(shell: Shell) -> None:
    help_text = shell.run_in_process("run", "-h").out
    titles = re.findall(r"^([A-Z][a-z ]+):$", help_text, re.MULTILINE)
    assert titles == [
        *("Arguments", "Most used", "What is measured", "How much of it", "Devices and hosts"),
        *("Several runs", "Training", "Detail", "Output", "Options"),
    ]
    first = help_text.split("Most used:")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^  (--[a-z-]+)", first, re.MULTILINE)) == MOST_USED_OPTIONS


def test_help_of_a_command_with_few_options_has_no_groups(shell: Shell) -> None:
    titles = re.findall(r"^([A-Z][a-z ]+):$", shell.run_in_process("show", "-h").out, re.MULTILINE)
    assert titles == ["Arguments", "Options"]
    assert isinstance(_find_command(("show",)), GroupedCommand)


COMPLETIONS = [
    ("steelyard ru", ["run"]),
    ("steelyard run llama2", ["llama2-7b-generate", "llama2-7b-mmlu"]),
    ("steelyard run sm", ["smoke"]),
    ("steelyard show sm", ["smoke"]),
    ("steelyard run smoke --size ", ["full", "smoke"]),
    ("steelyard run smoke --division ", ["closed", "open"]),
    ("steelyard run smoke --precision bf", ["bf16", "bf16-pure", "bf16-o2"]),
    ("steelyard run smoke --engine t", ["torch", "transformers", "transformers-serve"]),
    ("steelyard run smoke --engine a", ["all"]),
    ("steelyard conform --case glm", ["glm-large-record"]),
    ("steelyard run smoke --accelerator c", ["cuda", "cpu"]),
    ("steelyard run smoke --launcher s", ["ssh", "slurm"]),
    ("steelyard report --format ", ["text", "md", "html", "csv"]),
]

COMPLETION_PROGRAM = """
import sys
from steelyard.cli import main
try:
    main()
finally:
    sys.stderr.write(" ".join(sorted({"torch", "transformers", "numpy", "rich.live"} & sys.modules.keys())))
"""  # noqa: E501


@pytest.mark.parametrize(("typed", "offered"), COMPLETIONS, ids=[typed for typed, _ in COMPLETIONS])
def test_bash_completes_names_and_imports_nothing_heavy(
    shell: Shell, typed: str, offered: list[str]
) -> None:
    words = typed.split(" ")
    variables = {
        "_STEELYARD_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-c", COMPLETION_PROGRAM]
    result = subprocess.run(
        command, env=shell.env(**variables), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == offered


def test_completion_script_is_for_steelyard(shell: Shell) -> None:
    result = shell("--show-completion", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert result.code == 2  # without detection a shell must be named
    result = shell("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (result.code, result.err) == (0, "")
    assert "_STEELYARD_COMPLETE=complete_bash" in result.out
    assert result.out.rstrip().endswith("steelyard")


FIRST_OUTPUT_PROGRAM = """
import sys

class Terminal:
    encoding = "utf-8"
    closed = False

    def isatty(self):
        return True

    def write(self, text):
        heavy = ("torch", "transformers", "numpy", "rich", "jinja2", "psutil", "steelyard.case", "steelyard.report")
        sys.__stdout__.write(repr((text, [name for name in heavy if name in sys.modules], len(sys.modules) < 600)))
        sys.__stdout__.flush()
        import os
        os._exit(0)

    def flush(self):
        pass

sys.stderr = Terminal()
from steelyard.cli import main
main()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "smoke"), "preparing"),
        (("spec", "--quick"), "preparing"),
        (("check",), "checking"),
        (("conform", "transformers"), "preparing"),
        (("reproduce", "record.json"), "preparing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_first_line_is_printed_before_heavy_imports(
    shell: Shell, command: tuple[str, ...], said: str
) -> None:
    env = shell.env(TERM="dumb")
    result = subprocess.run(
        [sys.executable, "-c", FIRST_OUTPUT_PROGRAM, *command],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == repr((f"steelyard 0.1.0: {said} …\n", [], True))


@pytest.mark.parametrize(
    ("wide", "told", "columns"),
    [
        (False, None, 80),
        (True, None, None),
        (False, "120", 120),
        (True, "120", None),
        (False, "9", 40),
        (False, "x", 80),
    ],
)
def test_line_width_depends_on_terminal_and_columns(
    monkeypatch: pytest.MonkeyPatch, wide: bool, told: str | None, columns: int | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if told is not None:
        monkeypatch.setenv("COLUMNS", told)
    assert printing.find_width(wide) == columns  # in tests stdout is no terminal


def test_show_smoke_lists_what_run_smoke_runs(shell: Shell) -> None:
    result = shell("show", "smoke", "--json")
    assert (result.code, result.err) == (0, "")
    runs = result.json()["runs"]
    assert {run["case"] for run in runs} == set(resolve.list_shipped_cases())
    assert {run["precision"] for run in runs} == {"fp32"}
    lines = shell("show", "smoke").out.splitlines()
    assert lines[0] == golden("runs-every-case-at-size-smoke", len(runs))
    assert [line.split()[0] for line in lines[2:-1]] == [run["case"] for run in runs]
    assert lines[-1] == "run them: steelyard run smoke"


@pytest.mark.parametrize(
    "verb",
    [
        ("list",),
        ("show", "smoke"),
        ("check", "--accelerator", "cpu"),
        ("data", "list"),
        ("weights", "list"),
    ],
    ids=" ".join,
)
def test_answers_fit_80_columns(shell: Shell, verb: tuple[str, ...]) -> None:
    result = shell(*verb)
    assert (
        max(len(line) for line in result.out.splitlines() if not line.startswith("folder: ")) <= 80
    )


def test_report_fits_a_screen_and_full_prints_everything(
    shell: Shell, smoke: dict[str, Path]
) -> None:
    short = shell("report", smoke["closed"], smoke["open"])
    assert (short.code, short.err) == (0, "")
    assert len(short.out.splitlines()) <= 24
    assert max(map(len, short.out.splitlines())) <= 80
    assert "Checks" not in short.out
    assert "--full" in short.out
    full = shell("report", smoke["closed"], smoke["open"], "--full").out
    assert "Checks" in full
    assert "--wide" not in full
    assert max(map(len, full.splitlines())) <= 80
    wide = shell("report", smoke["closed"], smoke["open"], "--full", "--wide").out
    assert max(map(len, wide.splitlines())) > 120
