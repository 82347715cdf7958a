"""The command that FlagScale would start, taken from its dry run and parsed without a shell.

Refused with RequestError if it is anything but one `torchrun` with environment settings before it,
on this host, with the arguments asked for. train.py starts the `ProgramCommand`.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.engines.flagscale.config import CONFIG_NAME, LOOPBACK
from steelyard.errors import RequestError

DRYRUN_S = 300.0  # first imports over a network file system take their time
SCRIPT = "host_*_run.sh"
COMMAND = re.compile(r'^cmd="(.*)"$', re.MULTILINE)
PATHS = re.compile(r"^export PYTHONPATH=(.*)$", re.MULTILINE)
SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
OPERATORS = set("();<>|&")
EXPANDED_CHARS = set('$`\\"')  # what a shell would put something else for
LAUNCHERS = (
    ("torchrun",),
    ("python", "-m", "torch.distributed.run"),
    ("python3", "-m", "torch.distributed.run"),
)
# Of the launcher; each takes a value.
OPTIONS = {
    *(
        "nnodes",
        "node_rank",
        "nproc_per_node",
        "master_addr",
        "master_port",
        "max_restarts",
        "monitor_interval",
    ),
    *("rdzv_id", "rdzv_backend", "rdzv_endpoint", "log_dir", "redirects", "tee"),
}
# Of the program: a run writes nothing that it does not need, above all no checkpoint after its last
# step.
REMOVED_ARGUMENTS = ("--save", "--load", "--tensorboard-dir", "--wandb-save-dir")
# variables of this process that the program must not inherit
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONSAFEPATH")


@dataclass(frozen=True)
class ProgramCommand:
    """A program to start: `arguments`, the list with this Python first, `environment`, all
    variables that it gets, and `folder`, its working directory (the checkout). Made by
    `parse_script`, which checks it; `ExternalProgram` starts it.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: Path


def program_environment(checkout: Path) -> dict[str, str]:
    """Return the environment for a program in the checkout: this process's without RANK,
    LOCAL_RANK, WORLD_SIZE and PYTHONSAFEPATH, and with the checkout first in PYTHONPATH.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), inherited.get("PYTHONPATH")))),
    }


def run_dry(checkout: Path, config: Path, output: Path) -> str:
    """Run FlagScale's dry run (`run.py` of the checkout) in a subprocess with the configuration
    `config` (the path of a `train.yaml`), and return the text of the launch script `host_*_run.sh`
    that it wrote anywhere below `output`; the script is not run.

    Raises RequestError if it takes longer than 300 s, exits with an error (with its last line), or
    there is not exactly one script.
    """
    words = [
        "run.py",
        "--config-path",
        str(config.parent),
        "--config-name",
        CONFIG_NAME,
        "action=dryrun",
    ]
    try:
        completed = subprocess.run(
            [sys.executable, *words],
            cwd=checkout,
            env=program_environment(checkout),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DRYRUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"engine.checkout {checkout.name}: its dry run does not end within {DRYRUN_S:.0f} s"
        ) from error
    if completed.returncode:
        last = (completed.stdout.strip().splitlines() or ["no output"])[-1]
        raise RequestError(
            f"engine.checkout {checkout.name}: its dry run ended with exit code"
            f" {completed.returncode}:"
            f" {last}; try it by hand, in the Python that engine.python names"
        )
    scripts = sorted(output.rglob(SCRIPT))
    if len(scripts) != 1:
        raise RequestError(
            f"engine.checkout {checkout.name}: its dry run wrote {len(scripts)} scripts {SCRIPT};"
            " expected one"
        )
    return scripts[0].read_text("utf-8", "replace")


def parse_script(
    script: str, checkout: Path, required: Mapping[str, str], devices: int
) -> ProgramCommand:
    """Return the command in a launch script; nothing is started. `required` maps arguments of the
    program to the values they must have, `devices` is the number of processes it must start.

    Raises RequestError if there is no single plain torchrun command, it has unknown options, would
    leave this host, its program or PYTHONPATH is not in the checkout, or a required argument
    differs. torchrun becomes this Python's `-m torch.distributed.run`; arguments that make the
    program save, load or log files are removed with their values.
    """
    words = _split_command(script)
    variables = dict(word.split("=", 1) for word in _leading_settings(words))
    command_words = words[len(variables) :]
    launcher = next(
        (prefix for prefix in LAUNCHERS if tuple(command_words[: len(prefix)]) == prefix), None
    )
    if launcher is None:
        raise _refusal(
            f"it begins with {' '.join(command_words[:1]) or 'nothing'!r}, and not with torchrun"
        )
    options, program = _split_options(command_words[len(launcher) :])
    _check_launch(options, devices)
    _check_program(program, checkout, required)
    arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
    return ProgramCommand(
        arguments=[
            sys.executable,
            "-m",
            "torch.distributed.run",
            *arguments,
            *_remove_arguments(program, REMOVED_ARGUMENTS),
        ],
        environment={
            **program_environment(checkout),
            "PYTHONPATH": _python_path(script, checkout),
            **variables,
        },
        folder=checkout,
    )


def _refusal(why: str) -> RequestError:
    """Return, without raising it, a RequestError that says why the script's command is refused."""
    return RequestError(
        f"engine.checkout: the dry run's script has no plain torchrun command: {why}; nothing was"
        " started"
    )


def _split_command(script: str) -> list[str]:
    """Return the words of the script's only line cmd="...", split as a shell would. Raises
    RequestError if there is not exactly one such line, quotes do not match, or a shell would expand
    ($, backquotes, backslashes) or operate (such as |, ;, &) on something in it.
    """
    commands = COMMAND.findall(script)
    if len(commands) != 1:
        raise _refusal(f'{len(commands)} lines cmd="…"')
    if EXPANDED_CHARS & set(commands[0]):
        raise _refusal("it contains characters that a shell would expand")
    lexer = shlex.shlex(commands[0], posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise _refusal(str(error)) from error
    operator = next((word for word in words if word and not set(word) - OPERATORS), None)
    if operator is not None:
        raise _refusal(f"it contains {operator!r}")
    return words


def _leading_settings(words: list[str]) -> Iterator[str]:
    """Yield the words of the form NAME=value that stand before the first other word: a command's
    environment settings.
    """
    for word in words:
        if not SETTING.match(word):
            return
        yield word


def _split_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words after the launcher and return (its options, the program with its arguments).
    Options are by name with underscores, each with a value, `--a b` or `--a=b`; the first word
    without a dash is the program. Raises RequestError for an option that is not in `OPTIONS` or has
    no value.
    """
    out: dict[str, str] = {}
    remaining = list(words)
    while remaining and remaining[0].startswith("-"):
        key, sign, value = remaining.pop(0).removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if key not in OPTIONS or (not sign and not remaining):
            raise _refusal(f"torchrun's option --{key} is not supported")
        out[key] = value if sign else remaining.pop(0)
    return out, remaining


def _check_launch(options: Mapping[str, str], devices: int) -> None:
    """Raise RequestError unless torchrun's options say one node, `devices` processes, and a
    rendezvous on loopback; a missing option is refused too.
    """
    address = options.get("rdzv_endpoint", "").rpartition(":")[0]
    actual = {
        "nnodes": options.get("nnodes"),
        "nproc_per_node": options.get("nproc_per_node"),
        "rdzv_endpoint": address,
    }
    expected = {"nnodes": "1", "nproc_per_node": str(devices), "rdzv_endpoint": LOOPBACK}
    for key, value in expected.items():
        if actual[key] != value:
            raise _refusal(f"--{key} is {actual[key]!r}, expected {value!r}")


def _check_program(program: list[str], checkout: Path, required: Mapping[str, str]) -> None:
    """Raise RequestError unless the first word of `program` is an existing Python file inside the
    checkout, and each argument in `required` is there with its value as the next word.
    """
    script = (checkout / program[0]).resolve() if program else checkout
    if (
        not script.is_relative_to(checkout.resolve())
        or script.suffix != ".py"
        or not script.is_file()
    ):
        raise _refusal(f"{program[0] if program else 'nothing'!r} is not a program of the checkout")
    for key, value in required.items():
        value_index = program.index(key) + 1 if key in program else len(program)
        actual = program[value_index] if value_index < len(program) else None
        if actual != value:
            raise _refusal(f"{key} is {actual!r}, expected {value!r}")


def _remove_arguments(program: list[str], names: tuple[str, ...]) -> list[str]:
    """Return the words of a program without those in `names` and the word after each, its value."""
    out: list[str] = []
    remaining = iter(program)
    for word in remaining:
        if word in names:
            next(remaining, None)
        else:
            out.append(word)
    return out


def _python_path(script: str, checkout: Path) -> str:
    """Return the PYTHONPATH of the program, without repetitions: the folders of the script's last
    `export PYTHONPATH=`, the checkout, then this process's. Raises RequestError if the script names
    a folder outside the checkout or one that a shell would expand.
    """
    exports = PATHS.findall(script)
    folders = (
        [
            folder
            for folder in exports[-1].split(":")
            if folder and folder not in ("$PYTHONPATH", "${PYTHONPATH}")
        ]
        if exports
        else []
    )
    for folder in folders:
        if EXPANDED_CHARS & set(folder) or not Path(folder).resolve().is_relative_to(
            checkout.resolve()
        ):
            raise _refusal(f"its PYTHONPATH leads out of the checkout, to {folder!r}")
    return os.pathsep.join(
        dict.fromkeys(filter(None, (*folders, str(checkout), os.environ.get("PYTHONPATH"))))
    )
