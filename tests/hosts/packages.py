"""The programs that test hosts need, and the Debian packages that contain them."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Program → Debian package.
HOSTS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
SLURM = {
    "munged": "munge",
    **dict.fromkeys(
        ("slurmctld", "slurmd", "srun", "salloc", "sinfo", "squeue", "scancel"), "slurm-wlm"
    ),
}
LOCK = Path(tempfile.gettempdir()) / "steelyard-tests-apt.lock"
APT = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]


class UnavailableError(Exception):
    """The hosts cannot be made on this machine; the message says why in one line."""


def find(program: str) -> str | None:
    """Return the path of a program, also from the folders for administrators; None if there is
    none.
    """
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def tool(program: str) -> str:
    """Return the path of a program. Raises UnavailableError if there is none."""
    found = find(program)
    if found is None:
        raise UnavailableError(f"there is no {program} here")
    return found


def missing(programs: Mapping[str, str]) -> dict[str, str]:
    """Return the programs that are not installed, with their packages."""
    return {program: package for program, package in programs.items() if find(program) is None}


def provide(programs: Mapping[str, str]) -> None:
    """Install the packages of missing programs with apt-get. Raises UnavailableError without root
    or apt-get, or if that fails.
    """
    if os.geteuid():
        raise UnavailableError("hosts on one machine need root")
    if not missing(programs):
        return
    if shutil.which("apt-get") is None:
        raise UnavailableError(
            f"missing here, and no apt-get to install them: {', '.join(missing(programs))}"
        )
    with _locked():  # another test process may be installing the same
        if wanted := sorted(set(missing(programs).values())):
            _apt("update")
            _apt("install", "--no-install-recommends", *wanted)
    if left := missing(programs):
        raise UnavailableError(f"still missing after apt-get install: {', '.join(left)}")


def _apt(*arguments: str) -> None:
    """Run apt-get. Raises UnavailableError with the end of its errors."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        [*APT, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnavailableError(f"apt-get {' '.join(arguments)}: {done.stderr.strip()[-300:]}")


@contextmanager
def _locked() -> Iterator[None]:
    """Hold a lock over all test processes of the machine while the block runs."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
