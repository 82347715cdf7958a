"""Check the hosts of a run before a worker is started: do they agree, and can they do what is
asked?

Called by run/parent.py with the `hello` messages of all hosts; each check raises RequestError with
one line on the first host that cannot take part.
"""

import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from steelyard import __version__
from steelyard.case.case import Case
from steelyard.data.corpus import IDS
from steelyard.errors import MORE_MEMORY, RequestError
from steelyard.plan import memory
from steelyard.plan.degrees import Plan
from steelyard.run.environment import PACKAGE
from steelyard.run.messages import PROTOCOL, Hello
from steelyard.run.ready import Ready

SCARCE = 0.9  # share of a device's memory; if less is free, warn

# Texts in the output of ssh, srun or Python, and the hint for each; the first match is used.
HINTS = (
    ("No module named 'steelyard'", "that Python has no steelyard; install it there: {install}"),
    (
        "No module named",
        "that Python has not all that steelyard needs; install it there: {install}",
    ),
    ("MemoryError", MORE_MEMORY),
    (
        "does not understand a message",
        "another steelyard is there; install this one there: {install}",
    ),
    (
        "Unknown option: -P",
        "that Python is older than 3.11; name another with python = in the site file",
    ),
    (
        "Host key verification failed",
        "its host key is not known: ssh {host} once by hand and check it",
    ),
    (
        "Permission denied (",
        "ssh has no key that it takes: try ssh {host} true, which must not ask for anything",
    ),
    ("Could not resolve hostname", "the name leads nowhere; see hosts in the site file"),
    (
        "ssh: connect to host",
        "it does not answer; see that it is up, or leave it out of hosts in the site file",
    ),
    ("not found", "no such Python there; name one with python = in the site file"),
    ("No such file or directory", "no such Python there; name one with python = in the site file"),
)


# names of a path, one of which every host must have, and the message for a host without it
Needed = tuple[list[str], str]


def files(ready: Ready) -> list[Needed]:
    """Return the paths that every host must have, by `--weights`, `--data`, `--tokenizer`,
    `--resume` and `engine.checkout`: each with its alternative names and the message for a host
    without it. Token files may also be named by their common prefix.
    """
    request = ready.request
    named = {"--weights": request.weights, "--data": request.data, "--tokenizer": request.tokenizer}
    named["--resume"] = ready.resume.path if ready.resume else None
    named["engine.checkout"] = request.engine_settings.checkout
    found = {option: path.resolve() for option, path in named.items() if path is not None}
    return [
        (
            [str(path), str(path.with_name(f"{path.name}{IDS}"))],
            (
                f"{option} {str(path)!r} does not exist there; hosts of a run need the same files"
                " in the same place"
            ),
        )
        for option, path in found.items()
    ]


@contextmanager
def shared_probe(ready: Ready, kept: str | None) -> Iterator[list[Needed]]:
    """Create a temporary file in the output folder for a `with` block and yield it as a path that
    every host must have, because each rank writes its part of a checkpoint there; delete it at the
    end.

    Yields an empty list, and creates nothing, for a run without checkpoints (`checkpoints_folder`
    is None) or with a local launcher.
    """
    if kept is None or not ready.launcher.remote:
        yield []
        return
    out = ready.request.out.resolve()
    probe = out / f".shared-{secrets.token_hex(8)}"
    probe.touch(exist_ok=False)
    try:
        yield [
            (
                [str(probe)],
                (
                    f"--out {str(out)!r} is another folder there; checkpoints need one that all"
                    " hosts share"
                ),
            )
        ]
    finally:
        probe.unlink()


def not_started(host: str, python: str, command: list[str], code: int | None, said: str) -> str:
    """Return the message on why an agent did not start, with a hint from `HINTS` if its output is
    known; `python` is the host's Python, `code` the exit code of `command`, `output` what it
    printed.
    """
    hint = next((hint for text, hint in HINTS if text in said), "")
    why = said.splitlines()[-1].strip() if said else f"{command[0]} ended"
    told = "" if code is None else f" (exit code {code})"
    return f"host {host}: the agent did not start{told}: {why}" + (
        f"; {hint.format(host=host, install=_install(python))}" if hint else ""
    )


def _install(python: str) -> str:
    """Return the shell command that installs this version of steelyard into a Python."""
    return shlex.join([python, "-m", "pip", "install", f"steelyard=={__version__}"])


def check(
    hosts: dict[str, Hello], case: Case, plan: Plan, needed: list[Needed], package: str
) -> list[str]:
    """Check all hosts and return warnings, each once; raise RequestError for the first host that
    cannot take part or differs from the first host.

    `hosts` are the `hello` messages by host, `needed` the paths that were asked for in `open`,
    `package` the hash of this package.
    """
    warnings: list[str] = []
    first_name, first = next(iter(hosts.items()))
    machines: dict[str, str] = {}
    for name, hello in hosts.items():
        if machines.setdefault(hello.machine, name) != name:
            raise RequestError(
                f"hosts {machines[hello.machine]} and {name} are one machine ({hello.host}); name"
                " it once"
            )
        _same_package(name, hello, package)
        able(name, hello, plan, needed)
        _same_software(name, hello, first_name, first)
        _same_devices(name, hello, first_name, first, plan)
        warnings += _memory(name, hello, case, plan)
    return list(dict.fromkeys(warnings))


def _same_package(name: str, hello: Hello, package: str) -> None:
    """Raise RequestError if the host has another version of steelyard, or other files in it."""
    if hello.protocol != PROTOCOL or hello.version != __version__:
        raise RequestError(
            f"host {name} has steelyard {hello.version}, here is {__version__}; "
            f"install this version there: {_install(hello.python)}"
        )
    if hello.package != package:
        raise RequestError(
            f"host {name} has another steelyard {hello.version} (files {hello.package}, here"
            f" {package}): copy this one:"
            f" {shlex.join(['rsync', '-a', '--delete', f'{PACKAGE}/', f'{name}:{hello.folder}/'])}"
        )


def able(name: str, hello: Hello, plan: Plan, needed: list[Needed]) -> None:
    """Raise RequestError for the first thing that a host lacks to take part in a run: a module, a
    path, a device, or enough of them, or one that is not in use by another run.
    """
    if hello.problem is not None:
        raise RequestError(f"host {name}: {hello.problem}")
    if hello.lacking:
        raise RequestError(
            f"host {name}: {hello.lacking[0]} is not installed there, and the engine needs it"
        )
    for index in hello.missing:
        raise RequestError(f"host {name}: {needed[index][1]}")
    if not hello.devices:
        raise RequestError(
            f"host {name}: no {hello.accelerator} device was found; see steelyard list there"
        )
    if plan.devices > hello.most:
        there = f"host {name} has {len(hello.devices)} {hello.accelerator} device(s)"
        if hello.divisible:
            there = f"ranks share the {hello.accelerator} of host {name}"
        raise RequestError(f"--devices {plan.devices}: {there}; allowed: 1 to {hello.most}")
    for device in hello.devices[: plan.devices]:
        if device.busy is not None and not hello.divisible:
            raise RequestError(
                f"host {name}: {device.name} ({device.uuid}) is in use by {device.busy}; wait for"
                " it to end"
            )


def _same_software(name: str, hello: Hello, first_name: str, first: Hello) -> None:
    """Raise RequestError if Python, driver or a package version differs from the first host's."""
    both = (first.environment.software, hello.environment.software)
    mine, theirs = ({"python": one.python, "driver": one.driver, **one.packages} for one in both)
    for what in sorted({*mine, *theirs}):
        if mine.get(what) != theirs.get(what):
            raise RequestError(
                f"host {name} has {what} {theirs.get(what) or 'not at all'}, and {first_name} has "
                f"{mine.get(what) or 'it not at all'}; hosts of a run must have the same"
            )


def _same_devices(name: str, hello: Hello, first_name: str, first: Hello, plan: Plan) -> None:
    """Raise RequestError if the accelerator, or names or memory of the used devices, differ from
    the first host's.
    """
    used = (one.devices[: plan.devices] for one in (first, hello))
    mine, theirs = ([(device.name, device.memory_bytes) for device in devices] for devices in used)
    if first.accelerator != hello.accelerator:
        raise RequestError(
            f"host {name} has {hello.accelerator}, and {first_name} {first.accelerator}; name one:"
            " --accelerator"
        )
    if mine != theirs and not hello.divisible:
        raise RequestError(
            f"host {name} has {_listed(theirs)}, and {first_name} {_listed(mine)}; run on hosts"
            " that are alike"
        )


def _listed(devices: list[tuple[str, int | None]]) -> str:
    """Format devices for a message: each distinct name once with its memory in GiB."""
    return ", ".join(
        sorted({f"{name} ({(size or 0) / (1 << 30):.0f} GiB)" for name, size in devices})
    )


def least_bytes(hosts: dict[str, Hello], plan: Plan) -> int | None:
    """Return the bytes of device memory that every rank can have, or None if they are unknown for
    one device.

    It is that of the smallest device, divided by the ranks that share it; where less than
    `SCARCE_SHARE` of a device is free, its free memory counts.
    """
    least: list[int] = []
    for hello in hosts.values():
        if not hello.devices:
            return None
        sharing = -(-plan.devices // len(hello.devices))
        for device in hello.devices[: plan.devices]:
            if device.memory_bytes is None:
                return None
            free = device.memory_bytes if device.free_bytes is None else device.free_bytes
            least.append(
                (free if free < SCARCE * device.memory_bytes else device.memory_bytes) // sharing
            )
    return min(least, default=None)


def _memory(name: str, hello: Hello, case: Case, plan: Plan) -> list[str]:
    """Return warnings about a host's memory: a tight fit, a device used by another run, little free
    memory; raise RequestError if the model does not fit the whole memory of a device.
    """
    out = []
    # ranks that share a device's memory
    sharing = -(-plan.devices // len(hello.devices))
    size = hello.devices[0].memory_bytes
    tight = memory.check_fits(case, plan, size // sharing if size is not None else None)
    if tight is not None:
        out.append(tight)
    for device in hello.devices[: plan.devices]:
        if device.busy is not None and case.size != "smoke":  # smoke measures nothing
            out.append(
                f"host {name}: {device.name} is also used by {device.busy}: neither will show what"
                " it can do"
            )
        if not hello.divisible and device.free_bytes is not None and device.memory_bytes:
            share = device.free_bytes / device.memory_bytes
            if share < SCARCE:
                out.append(f"host {name}: only {share:.0%} of the memory of {device.name} is free")
    return out
