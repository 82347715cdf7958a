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
from steelyard.data.corpus import IDS_SUFFIX
from steelyard.errors import MORE_MEMORY_HINT, RequestError
from steelyard.plan import memory
from steelyard.plan.degrees import Plan
from steelyard.run.checked_request import CheckedRequest
from steelyard.run.environment import PACKAGE_FOLDER
from steelyard.run.messages import PROTOCOL, HelloMessage

SCARCE_SHARE = 0.9  # share of a device's memory; if less is free, warn

# Texts in the output of ssh, srun or Python, and the hint for each; the first match is used.
HINTS = (
    ("No module named 'steelyard'", "that Python has no steelyard; install it there: {install}"),
    (
        "No module named",
        "that Python lacks a package that steelyard needs; install it there: {install}",
    ),
    ("MemoryError", MORE_MEMORY_HINT),
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
        "ssh has no key that the host accepts: try ssh {host} true, which must not ask for"
        " anything",
    ),
    ("Could not resolve hostname", "the name cannot be resolved; see hosts in the site file"),
    (
        "ssh: connect to host",
        "it does not answer; start it, or remove it from hosts in the site file",
    ),
    ("not found", "no such Python there; name one with python = in the site file"),
    ("No such file or directory", "no such Python there; name one with python = in the site file"),
)


# names of a path, one of which every host must have, and the message for a host without it
NeededPath = tuple[list[str], str]


def list_needed_paths(checked: CheckedRequest) -> list[NeededPath]:
    """Return the paths that every host must have, by `--weights`, `--data`, `--tokenizer`,
    `--resume` and `engine.checkout` as far as given: each as (absolute names of which one must
    exist, message for a host without it). The second name is the first plus the suffix of token
    files, which may be named by their common prefix.
    """
    request = checked.request
    options = {
        "--weights": request.weights,
        "--data": request.data,
        "--tokenizer": request.tokenizer,
    }
    options["--resume"] = checked.resume.path if checked.resume else None
    options["engine.checkout"] = request.engine_settings.checkout
    paths = {option: path.resolve() for option, path in options.items() if path is not None}
    return [
        (
            [str(path), str(path.with_name(f"{path.name}{IDS_SUFFIX}"))],
            (
                f"{option} {str(path)!r} does not exist there; hosts of a run need the same files"
                " in the same place"
            ),
        )
        for option, path in paths.items()
    ]


@contextmanager
def probe_shared_folder(
    checked: CheckedRequest, checkpoints_folder: str | None
) -> Iterator[list[NeededPath]]:
    """Create an empty hidden file in the output folder for a `with` block and yield it as the one
    path that every host must have, because each rank writes its part of a checkpoint there; delete
    it at the end.

    Yields an empty list, and creates nothing, for a run without checkpoints (`checkpoints_folder`
    is None) or with a local launcher. Raises OSError if it cannot be created.
    """
    if checkpoints_folder is None or not checked.launcher.remote:
        yield []
        return
    out = checked.request.out.resolve()
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


def explain_agent_not_started(
    host: str, python: str, command: list[str], code: int | None, output: str
) -> str:
    """Return the message on why an agent did not start: host, exit code `code` of `command` (None:
    it runs), the last line of its `output`, and the first hint of `HINTS` whose text occurs in the
    output. `python` is the host's Python, for a hint on how to install this package there.
    """
    hint = next((hint for text, hint in HINTS if text in output), "")
    why = output.splitlines()[-1].strip() if output else f"{command[0]} ended"
    code_text = "" if code is None else f" (exit code {code})"
    return f"host {host}: the agent did not start{code_text}: {why}" + (
        f"; {hint.format(host=host, install=_format_install_command(python))}" if hint else ""
    )


def _format_install_command(python: str) -> str:
    """Return the shell command that installs this version of steelyard into a Python."""
    return shlex.join([python, "-m", "pip", "install", f"steelyard=={__version__}"])


def check_hosts(
    hosts: dict[str, HelloMessage],
    case: Case,
    plan: Plan,
    needed: list[NeededPath],
    package: str,
    is_elsewhere: bool = False,
) -> list[str]:
    """Check all hosts of a run and return warnings about memory, shared devices and an engine that
    cannot be identified, each once; raise RequestError for the first host that cannot take part, is
    the same machine as another, has another steelyard, or differs from the first host in software
    or devices.

    `hosts` are the `hello` messages by host; `needed` are the paths that were asked for in `open`,
    in its order, as pairs of alternative names and the message for a host that has none of them;
    `package` is the hash of this package's files. With `is_elsewhere` no host holds the model, and
    memory is not looked at.
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
        _check_package(name, hello, package)
        check_host(name, hello, plan, needed)
        _check_software(name, hello, first_name, first)
        _check_devices(name, hello, first_name, first, plan)
        if not is_elsewhere:
            warnings += _check_memory(name, hello, case, plan)
        warnings += _check_engine_identity(name, hello)
    return list(dict.fromkeys(warnings))


def _check_package(name: str, hello: HelloMessage, package: str) -> None:
    """Raise RequestError if the host has another version of steelyard or of the protocol, or other
    files in it (another hash than `package`); the message says how to install or copy this one
    there.
    """
    if hello.protocol != PROTOCOL or hello.version != __version__:
        raise RequestError(
            f"host {name} has steelyard {hello.version}, here is {__version__}; "
            f"install this version there: {_format_install_command(hello.python)}"
        )
    if hello.package != package:
        target = f"{name}:{hello.folder}/"
        copy_command = ["rsync", "-a", "--delete", f"{PACKAGE_FOLDER}/", target]
        raise RequestError(
            f"host {name} has another steelyard {hello.version} (files {hello.package}, here"
            f" {package}): copy this one:"
            f" {shlex.join(copy_command)}"
        )


def check_host(name: str, hello: HelloMessage, plan: Plan, needed: list[NeededPath]) -> None:
    """Raise RequestError for the first thing that a host lacks to take part in a run: the problem
    that it reports itself, a module, a path of `needed` (pairs of alternative names and the message
    for a host that has none of them), any device, enough devices for `plan.devices` ranks, or a
    used device that another run has claimed (unless ranks may share devices).
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
        available = f"host {name} has {len(hello.devices)} {hello.accelerator} device(s)"
        if hello.divisible:
            available = f"ranks share the {hello.accelerator} of host {name}"
        raise RequestError(f"--devices {plan.devices}: {available}; allowed: 1 to {hello.most}")
    for device in hello.devices[: plan.devices]:
        if device.busy is not None and not hello.divisible:
            raise RequestError(
                f"host {name}: {device.name} ({device.uuid}) is in use by {device.busy}; wait for"
                " it to end"
            )


def _check_software(name: str, hello: HelloMessage, first_name: str, first: HelloMessage) -> None:
    """Raise RequestError if Python, driver or the version of a recorded package, or its presence,
    differs from the first host's; names the alphabetically first difference.
    """
    software_pair = (first.environment.software, hello.environment.software)
    first_versions, versions = (
        {"python": software.python, "driver": software.driver, **software.packages}
        for software in software_pair
    )
    for component in sorted({*first_versions, *versions}):
        if first_versions.get(component) != versions.get(component):
            here, there = (
                f"{component} {version}" if version else f"no {component}"
                for version in (versions.get(component), first_versions.get(component))
            )
            raise RequestError(
                f"host {name} has {here}, and {first_name} has {there}; install the same version on"
                " all hosts of a run"
            )


def _check_devices(
    name: str, hello: HelloMessage, first_name: str, first: HelloMessage, plan: Plan
) -> None:
    """Raise RequestError if the accelerator differs from the first host's, or names or memory sizes
    of the first `plan.devices` devices do, in order; the latter not where ranks may share devices.
    """
    used = (one.devices[: plan.devices] for one in (first, hello))
    first_devices, host_devices = (
        [(device.name, device.memory_bytes) for device in devices] for devices in used
    )
    if first.accelerator != hello.accelerator:
        raise RequestError(
            f"host {name} has {hello.accelerator}, and {first_name} {first.accelerator}; choose one"
            " with --accelerator"
        )
    if first_devices != host_devices and not hello.divisible:
        raise RequestError(
            f"host {name} has {_format_devices(host_devices)}, and {first_name}"
            f" {_format_devices(first_devices)}; run on hosts"
            " that are alike"
        )


def _check_engine_identity(name: str, hello: HelloMessage) -> list[str]:
    """Return a warning if a host was asked for the identity of the engine and has none to give."""
    identity = hello.engine_identity
    if identity is None or identity.problem is None:
        return []
    return [
        f"host {name}: whether this version of the engine conforms cannot be known:"
        f" {identity.problem}"
    ]


def _format_devices(devices: list[tuple[str, int | None]]) -> str:
    """Format devices for a message: each distinct name once with its memory in GiB."""
    return ", ".join(
        sorted({f"{name} ({(size or 0) / (1 << 30):.0f} GiB)" for name, size in devices})
    )


def find_least_memory(hosts: dict[str, HelloMessage], plan: Plan) -> int | None:
    """Return the bytes of device memory that every rank of a run can have, or None if a host has no
    devices or the memory of a used one is unknown.

    It is the least over all used devices of all hosts, each divided by the ranks that share it;
    where less than `SCARCE_SHARE` of a device is free, its free memory counts. `hosts` are the
    `hello` messages by host.
    """
    sizes: list[int] = []
    for hello in hosts.values():
        if not hello.devices:
            return None
        ranks_per_device = -(-plan.devices // len(hello.devices))
        for device in hello.devices[: plan.devices]:
            if device.memory_bytes is None:
                return None
            free = device.memory_bytes if device.free_bytes is None else device.free_bytes
            sizes.append(
                (free if free < SCARCE_SHARE * device.memory_bytes else device.memory_bytes)
                // ranks_per_device
            )
    return min(sizes, default=None)


def _check_memory(name: str, hello: HelloMessage, case: Case, plan: Plan) -> list[str]:
    """Return warnings about a host's memory: a tight fit, a used device that another run has
    claimed (not at size smoke), less than `SCARCE_SHARE` of a device free (not where ranks share
    devices).

    Raises RequestError if the case certainly does not fit the whole memory of the smallest used
    device, divided among the ranks that share it.
    """
    warnings = []
    # ranks that share a device's memory
    ranks_per_device = -(-plan.devices // len(hello.devices))
    sizes = [device.memory_bytes for device in hello.devices[: plan.devices]]
    size = min((known for known in sizes if known is not None), default=None)
    tight_fit = memory.check_memory(
        case, plan, size // ranks_per_device if size is not None else None
    )
    if tight_fit is not None:
        warnings.append(tight_fit)
    for device in hello.devices[: plan.devices]:
        if device.busy is not None and case.size != "smoke":  # smoke measures nothing
            warnings.append(
                f"host {name}: {device.name} is also used by {device.busy}; both will be slower"
                " than alone"
            )
        if not hello.divisible and device.free_bytes is not None and device.memory_bytes:
            share = device.free_bytes / device.memory_bytes
            if share < SCARCE_SHARE:
                warnings.append(
                    f"host {name}: only {share:.0%} of the memory of {device.name} is free"
                )
    return warnings
