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
HOST_PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
SLURM_PROGRAMS = {
    "munged": "munge",
    **dict.fromkeys(
        ("slurmctld", "slurmd", "srun", "salloc", "sinfo", "squeue", "scancel"), "slurm-wlm"
    ),
}
APT_LOCK = Path(tempfile.gettempdir()) / "steelyard-tests-apt.lock"
APT_COMMAND = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]


class UnavailableError(Exception):
    """The hosts cannot be made on this machine; the message says why in one line."""


def find_program(program: str) -> str | None:
    """Return the path of a program, also from the folders for administrators; None if there is
    none.
    """
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def require_program(program: str) -> str:
    """Return the path of a program. Raises UnavailableError if there is none."""
    path = find_program(program)
    if path is None:
        raise UnavailableError(f"there is no {program} here")
    return path


def find_missing(programs: Mapping[str, str]) -> dict[str, str]:
    """Return the programs that are not installed, with their packages."""
    return {
        program: package for program, package in programs.items() if find_program(program) is None
    }


def install_missing(programs: Mapping[str, str]) -> None:
    """Install the packages of missing programs with apt-get. Raises UnavailableError without root
    or apt-get, or if that fails.
    """
    if os.geteuid():
        raise UnavailableError("hosts on one machine need root")
    if not find_missing(programs):
        return
    if shutil.which("apt-get") is None:
        raise UnavailableError(
            f"missing here, and no apt-get to install them: {', '.join(find_missing(programs))}"
        )
    with _hold_apt_lock():  # another test process may be installing the same
        if package_names := sorted(set(find_missing(programs).values())):
            _run_apt("update")
            _run_apt("install", "--no-install-recommends", *package_names)
    if still_missing := find_missing(programs):
        raise UnavailableError(f"still missing after apt-get install: {', '.join(still_missing)}")


def _run_apt(*arguments: str) -> None:
    """Run apt-get. Raises UnavailableError with the end of its errors."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(
        [*APT_COMMAND, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise UnavailableError(f"apt-get {' '.join(arguments)}: {result.stderr.strip()[-300:]}")


@contextmanager
def _hold_apt_lock() -> Iterator[None]:
    """Hold a lock over all test processes of the machine while the block runs."""
    with APT_LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
