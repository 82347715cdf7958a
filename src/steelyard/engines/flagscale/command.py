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

from steelyard.engines.flagscale.config import LOOPBACK, NAME
from steelyard.errors import RequestError

DRYRUN_S = 300.0  # first imports over a network file system take their time
SCRIPT = "host_*_run.sh"
COMMAND = re.compile(r'^cmd="(.*)"$', re.MULTILINE)
PATHS = re.compile(r"^export PYTHONPATH=(.*)$", re.MULTILINE)
SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
OPERATORS = set("();<>|&")
EXPANDED = set('$`\\"')  # what a shell would put something else for
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
LEFT_OUT = ("--save", "--load", "--tensorboard-dir", "--wandb-save-dir")
# of this process, and not the program's
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONSAFEPATH")


@dataclass(frozen=True)
class Command:
    """A program to start: its argument list, its whole environment, and its working directory."""

    words: list[str]
    variables: dict[str, str]
    folder: Path


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment for a program in the checkout: this process's without rank variables,
    and with the checkout first in PYTHONPATH.
    """
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), kept.get("PYTHONPATH")))),
    }


def dry_run(checkout: Path, config: Path, output: Path) -> str:
    """Run FlagScale's dry run in a subprocess and return the text of the launch script that it
    wrote below `output`; the script is not run.

    Raises RequestError if it takes longer than 300 s, exits with an error, or writes not exactly
    one script.
    """
    words = ["run.py", "--config-path", str(config.parent), "--config-name", NAME, "action=dryrun"]
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=checkout,
            env=environment(checkout),
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
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["it says nothing"])[-1]
        raise RequestError(
            f"engine.checkout {checkout.name}: its dry run ended with exit code {done.returncode}:"
            f" {last}; try it by hand, in the Python that engine.python names"
        )
    found = sorted(output.rglob(SCRIPT))
    if len(found) != 1:
        raise RequestError(
            f"engine.checkout {checkout.name}: its dry run wrote {len(found)} scripts {SCRIPT}; one"
            " is asked"
        )
    return found[0].read_text("utf-8", "replace")


def parse(script: str, checkout: Path, wanted: Mapping[str, str], devices: int) -> Command:
    """Return the command in a launch script. `required` maps arguments of the program to the values
    they must have, `devices` is the number of processes it must start.

    Raises RequestError if there is no single plain torchrun command, it would leave this host, or
    its program is not in the checkout. Arguments that make it save or log files are removed.
    """
    words = _words(script)
    variables = dict(word.split("=", 1) for word in _settings(words))
    rest = words[len(variables) :]
    launcher = next((one for one in LAUNCHERS if tuple(rest[: len(one)]) == one), None)
    if launcher is None:
        raise _refused(f"it begins with {' '.join(rest[:1]) or 'nothing'!r}, and not with torchrun")
    options, program = _options(rest[len(launcher) :])
    _check_launch(options, devices)
    _check_program(program, checkout, wanted)
    arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
    return Command(
        words=[
            sys.executable,
            "-m",
            "torch.distributed.run",
            *arguments,
            *_without(program, LEFT_OUT),
        ],
        variables={**environment(checkout), "PYTHONPATH": _paths(script, checkout), **variables},
        folder=checkout,
    )


def _refused(why: str) -> RequestError:
    """Return, without raising it, a RequestError that says why the script's command is refused."""
    return RequestError(
        f"engine.checkout: the dry run's script has no plain torchrun command: {why}; nothing was"
        " started"
    )


def _words(script: str) -> list[str]:
    """Return the words of the script's only line cmd="..."; raise RequestError if there are
    several, or a shell would expand or operate on something in it.
    """
    found = COMMAND.findall(script)
    if len(found) != 1:
        raise _refused(f'{len(found)} lines cmd="…"')
    if EXPANDED & set(found[0]):
        raise _refused("a shell would put something else for a part of it")
    lexer = shlex.shlex(found[0], posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise _refused(str(error)) from error
    operator = next((word for word in words if word and not set(word) - OPERATORS), None)
    if operator is not None:
        raise _refused(f"there is {operator!r} in it")
    return words


def _settings(words: list[str]) -> Iterator[str]:
    """Yield the leading words of the form NAME=value."""
    for word in words:
        if not SETTING.match(word):
            return
        yield word


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words after the launcher into its options (by name with underscores, each with a
    value) and the program with its arguments. Raises RequestError for an option that is not in
    `OPTIONS`.
    """
    out: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        key, sign, value = left.pop(0).removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if key not in OPTIONS or (not sign and not left):
            raise _refused(f"torchrun's option --{key} is none that is known here")
        out[key] = value if sign else left.pop(0)
    return out, left


def _check_launch(options: Mapping[str, str], devices: int) -> None:
    """Raise RequestError unless the launch is one node, one process per device, with its rendezvous
    on loopback.
    """
    address = options.get("rdzv_endpoint", "").rpartition(":")[0]
    found = {
        "nnodes": options.get("nnodes"),
        "nproc_per_node": options.get("nproc_per_node"),
        "rdzv_endpoint": address,
    }
    asked = {"nnodes": "1", "nproc_per_node": str(devices), "rdzv_endpoint": LOOPBACK}
    for key, value in asked.items():
        if found[key] != value:
            raise _refused(f"--{key} is {found[key]!r}, and {value!r} was asked")


def _check_program(program: list[str], checkout: Path, wanted: Mapping[str, str]) -> None:
    """Raise RequestError unless the program is a Python file inside the checkout and has every
    argument in `required` with its value.
    """
    script = (checkout / program[0]).resolve() if program else checkout
    if (
        not script.is_relative_to(checkout.resolve())
        or script.suffix != ".py"
        or not script.is_file()
    ):
        raise _refused(f"{program[0] if program else 'nothing'!r} is no program of the checkout")
    for key, value in wanted.items():
        at = program.index(key) + 1 if key in program else len(program)
        found = program[at] if at < len(program) else None
        if found != value:
            raise _refused(f"{key} is {found!r}, and {value!r} was asked")


def _without(program: list[str], names: tuple[str, ...]) -> list[str]:
    """Return the words without these arguments and the value after each."""
    out: list[str] = []
    left = iter(program)
    for word in left:
        if word in names:
            next(left, None)
        else:
            out.append(word)
    return out


def _paths(script: str, checkout: Path) -> str:
    """Return the PYTHONPATH of the program: the script's own folders, the checkout, then this
    process's. Raises RequestError if the script names a folder outside the checkout.
    """
    found = PATHS.findall(script)
    named = (
        [one for one in found[-1].split(":") if one and one not in ("$PYTHONPATH", "${PYTHONPATH}")]
        if found
        else []
    )
    for one in named:
        if EXPANDED & set(one) or not Path(one).resolve().is_relative_to(checkout.resolve()):
            raise _refused(f"its PYTHONPATH leads out of the checkout, to {one!r}")
    return os.pathsep.join(
        dict.fromkeys(filter(None, (*named, str(checkout), os.environ.get("PYTHONPATH"))))
    )
