"""Another Python for the workers of an engine (`engine.python`): what it has, as its host's agent sees it.

The agent starts it as `python -P -m steelyard.run.interpreter MODULE...`, which answers with one line of JSON. Nothing of a
framework is imported: modules are looked for, not loaded.
"""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from steelyard import __version__, plugins
from steelyard.errors import MORE_MEMORY, OUT_OF_MEMORY_LINE, RequestError
from steelyard.run import environment
from steelyard.schema import Frozen

LOOK_S = 60.0  # a first import over a network file system takes its time
REFUSED = 65  # EX_DATAERR of sysexits.h: what is wrong is the last line of stderr, whole
MODULE = ["-P", "-m", "steelyard.run.interpreter"]


class Interpreter(Frozen):
    """A Python that workers run in: its version, its packages, its steelyard, and which of the asked modules it lacks."""

    python: str
    packages: dict[str, str]
    version: str
    package: str
    lacking: list[str]


def own(needs: Sequence[str]) -> Interpreter:
    """This one."""
    return Interpreter(
        python=platform.python_version(),
        packages=environment.packages(),
        version=__version__,
        package=environment.package_hash(),
        lacking=lacking(needs),
    )


def lacking(needs: Sequence[str]) -> list[str]:
    """Return the modules that this Python does not have; raise RequestError if one is there but cannot be imported."""
    return [name for name in needs if not plugins.installed(name)]


def look(path: str, needs: Sequence[str], variables: Mapping[str, str]) -> Interpreter:
    """The Python at a path, if workers of an engine that needs these modules can run in it; else RequestError, one line."""
    named = f"engine.python {path!r}"
    install = shlex.join([path, "-m", "pip", "install", f"steelyard=={__version__}"])
    try:
        done = subprocess.run(
            [path, *MODULE, *needs], capture_output=True, text=True, timeout=LOOK_S, env=dict(variables), check=False
        )
    except OSError as error:
        why = error.strerror or str(error)
        raise RequestError(f"{named} cannot be started: {why}; name a Python that has steelyard and the engine") from error
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"{named} does not answer within {LOOK_S:g} s; name another Python") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        if done.returncode == REFUSED:
            raise RequestError(f"{named}: {why}")
        if OUT_OF_MEMORY_LINE.match(why):
            raise RequestError(f"{named} ran out of memory: {why}; {MORE_MEMORY}, then run again")
        raise RequestError(f"{named} ended with exit code {done.returncode}: {why}; steelyard is installed there by: {install}")
    try:
        found = Interpreter.model_validate_json(done.stdout)
    except ValidationError as error:
        raise RequestError(f"{named} has another steelyard; install this one there: {install}") from error
    _check(found, named, install)
    return found


def _check(found: Interpreter, named: str, install: str) -> None:
    if found.version != __version__:
        raise RequestError(
            f"{named} has steelyard {found.version}, here is {__version__}; install this version there: {install}"
        )
    if found.package != environment.package_hash():
        here = environment.package_hash()
        raise RequestError(
            f"{named} has another steelyard {found.version} (files {found.package}, here {here}); install this one there"
        )
    if found.lacking:
        raise RequestError(f"{named} has no {found.lacking[0]}, and the engine needs it; install it there")


def main() -> None:
    try:
        found = own(sys.argv[1:])
    except RequestError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
    os.write(1, found.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main()
