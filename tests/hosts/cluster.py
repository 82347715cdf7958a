"""Three hosts on one machine, each with its own network, host name and sshd; they share the file
system and the CPU.

A host is a set of namespaces (network, host name, mounts) kept alive by one process (`host.py`);
one more, the hub, holds the bridge that connects them. None has a name on the machine, so any
number of clusters can run at once, at the same addresses.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixtures.commands import SRC, wait_for
from hosts.host import network_of, processes_in
from hosts.packages import UnavailableError, require_program

COMPUTE_HOSTS = ("node1", "node2")
LOGIN_HOST = "login"
HUB = "hub"
ADDRESSES = {"node1": "10.213.0.1", "node2": "10.213.0.2", "login": "10.213.0.3"}
HOST_PROGRAM = Path(__file__).with_name("host.py")
# The variable with the mark of a test's processes; ssh is configured to pass it on, srun does so
# by itself.
MARK_VARIABLE = "TEST_MARK"
# Variables of the test process that begin like this are not passed to commands on the hosts.
FOREIGN_PREFIXES = ("FAULTY", "STEELYARD_", "PYTEST", "SLURM")
BRIDGE_FORWARDS = "3"  # BR_STATE_FORWARDING in linux/if_bridge.h

SSHD_CONFIG = """\
ListenAddress {address}
PidFile {folder}/{host}.sshd.pid
HostKey {folder}/{host}.key
AuthorizedKeysFile {folder}/user.key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
AcceptEnv {mark}
SetEnv {variables}
"""
SSH_CONFIG = """\
Host *
  User root
  BatchMode yes
  IdentityFile {folder}/user.key
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  SendEnv {mark}
"""


@dataclass
class Cluster:
    """Two compute hosts and a login host, each with an sshd, from `start` to `end`.

    `keepers` are the processes that keep the namespaces of each host and of the hub alive.
    """

    folder: Path
    hosts: tuple[str, str] = COMPUTE_HOSTS
    login: str = LOGIN_HOST
    keepers: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    _cut_hosts: set[str] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, str, str]:
        return (*self.hosts, self.login)

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def address(self, host: str) -> str:
        return ADDRESSES[host]

    def env(self, **variables: str) -> dict[str, str]:
        """Return the environment of a command on a host: this process's without variables of tests
        and Slurm, those of the site, and `variables`.
        """
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_PREFIXES)
        }
        return {**inherited, **self.site_variables, **variables}

    @property
    def site_variables(self) -> dict[str, str]:
        """Return the variables that are set on every host, for commands through ssh too."""
        return {"PYTHONPATH": str(SRC), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start_command(
        self,
        host: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **popen: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command on a host, in the cluster's folder unless `cwd` is given, and return its
        process.

        `env` is added to `Cluster.env`. The programs that enter the namespaces are replaced by the
        command (exec), so the process returned is the command itself.
        """
        # nsenter changes the working directory when it enters the mounts, so env changes it back.
        # A test runner in the background hands down that SIGINT is ignored, so env resets it.
        command = ["env", f"--chdir={cwd or self.folder}", "--default-signal=INT", *map(str, argv)]
        return subprocess.Popen(
            [*self._make_enter_command(host), *command], env=self.env(**(env or {})), **popen
        )

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        *,
        input: str | None = None,
        timeout_s: float = 300.0,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host and return its result; it is killed after `timeout_s`."""
        pipe = subprocess.PIPE
        stdin = subprocess.DEVNULL if input is None else pipe
        with self.start_command(
            host, argv, env, cwd, stdin=stdin, stdout=pipe, stderr=pipe, text=True
        ) as process:
            try:
                out, err = process.communicate(input, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ssh(self, host: str, *command: str, options: Sequence[str] = ()) -> list[str]:
        """Return the command line of `ssh host command`."""
        return ["ssh", "-F", str(self.ssh_config), *options, host, *command]

    def cut_link(self, host: str) -> None:
        """Cut a host off: set its link in the hub down."""
        self._run_ip(HUB, f"link set {host} down")
        self._cut_hosts.add(host)

    def restore_link(self, host: str) -> None:
        """Set the link of a host up again and wait until it carries traffic."""
        self._run_ip(HUB, f"link set {host} up")
        self._await_link(host)
        self._cut_hosts.discard(host)

    def restore_links(self) -> None:
        """Restore the links of all hosts that were cut off."""
        for host in tuple(self._cut_hosts):
            self.restore_link(host)

    @contextmanager
    def hide_folder(self, host: str, folder: Path) -> Iterator[None]:
        """Hide a folder on one host behind an empty file system while the block runs."""
        self.run(host, ["mount", "-t", "tmpfs", "none", folder]).check_returncode()
        try:
            yield
        finally:
            self.run(host, ["umount", folder]).check_returncode()

    def processes(self, mark: str) -> list[int]:
        """Return the ids of all processes of the machine that have a text in their environment."""
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
            except OSError:  # the process has ended meanwhile
                continue
        return pids

    def find_pids(self, host: str, *programs: str) -> list[int]:
        """Return the ids of the processes on a host that run one of these programs, without the
        host's keeper.
        """
        network = network_of(self.keepers[host].pid)
        assert network is not None, f"{host} is not up"
        keeper = self.keepers[host].pid
        return [
            pid
            for pid in processes_in(network)
            if pid != keeper and _read_program_name(pid) in programs
        ]

    def kill_sshd_sessions(self, host: str) -> list[int]:
        """Kill the sshd of every connection to a host, but not the one that listens; return the
        killed process ids.
        """
        listener = self._read_sshd_pid(host)
        sessions = [pid for pid in self.find_pids(host, "sshd", "sshd-session") if pid != listener]
        return kill_and_wait(sessions)

    @contextmanager
    def clock_offset(self, host: str, seconds: int) -> Iterator[None]:
        """While the block runs, the monotonic clocks of all that ssh starts on a host are so many
        seconds ahead (or behind). Restarts the sshd.
        """
        self._restart_sshd(host, seconds)
        try:
            yield
        finally:
            self._restart_sshd(host, 0)

    def start(self) -> None:
        """Start all hosts, connect them and start an sshd on each. Raises UnavailableError where
        namespaces are not allowed.
        """
        entries = "".join(f"{ADDRESSES[host]} {host}\n" for host in self.names)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{entries}")
        for name in (HUB, *self.names):
            self.keepers[name] = self._start_keeper(name)
        for name, keeper in self.keepers.items():
            assert keeper.stdout is not None
            assert keeper.stderr is not None
            if keeper.stdout.readline() != "ready\n":
                raise UnavailableError(
                    f"no namespaces for {name}: {keeper.stderr.read().strip()[-300:]}"
                )
        self._join_networks()
        self._write_ssh_files()
        # Our configuration replaces the system's on the login host: ssh there knows the hosts
        # without options.
        self.run(
            self.login, ["mount", "--bind", self.ssh_config, "/etc/ssh/ssh_config"]
        ).check_returncode()
        # sshd needs this folder, which a container that never booted does not have
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in self.names:
            self._start_sshd(host)
        for host in self.names:
            self._await_sshd(host)

    def end(self) -> None:
        """Kill every process on the hosts; the namespaces end with the last process of each."""
        for keeper in self.keepers.values():
            assert keeper.stdin is not None
            keeper.stdin.close()
        for keeper in self.keepers.values():
            keeper.wait(timeout=300)
        self.keepers.clear()

    def _start_keeper(self, name: str) -> "subprocess.Popen[str]":
        """Start the process that keeps the namespaces of a host alive."""
        program = [
            sys.executable,
            "-I",
            str(HOST_PROGRAM),
            name,
            str(self.folder / "hosts"),
            str(network_of("self")),
        ]
        pipe = subprocess.PIPE
        command = [require_program("unshare"), "--net", "--uts", "--mount", *program]
        # In a session of its own, so that Ctrl-C in the terminal reaches only pytest, which then
        # ends the hosts.
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def _make_enter_command(self, host: str) -> list[str]:
        """Return the beginning of a command line that enters a host's namespaces."""
        return [
            require_program("nsenter"),
            "--target",
            str(self.keepers[host].pid),
            "--net",
            "--uts",
            "--mount",
        ]

    def _run_ip(self, host: str, *lines: str) -> None:
        """Run lines of `ip -batch` on a host. Raises UnavailableError with ip's first error."""
        command = [*self._make_enter_command(host), require_program("ip"), "-batch", "-"]
        result = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise UnavailableError(f"ip on {host}: {result.stderr.splitlines()[0]}")

    def _join_networks(self) -> None:
        """Make a bridge in the hub, and to each host a virtual cable whose end in the hub has the
        host's name.
        """
        lines = ["link add bridge type bridge", "link set bridge up"]
        for host in self.names:
            lines.append(f"link add {host} type veth peer name eth0 netns {self.keepers[host].pid}")
            lines.append(f"link set {host} master bridge up")
        self._run_ip(HUB, *lines)
        for host in self.names:
            self._run_ip(
                host,
                "link set lo up",
                f"addr add {ADDRESSES[host]}/24 dev eth0",
                "link set eth0 up",
            )
        for host in self.names:
            self._await_link(host)

    def _await_link(self, host: str) -> None:
        """Wait until the link of a host carries traffic, which takes the kernel up to a second
        after it is up.
        """

        def is_up() -> bool:
            host_state = self._read_link_attribute(host, "eth0/operstate")
            return (host_state, self._read_link_attribute(HUB, f"{host}/brport/state")) == (
                "up",
                BRIDGE_FORWARDS,
            )

        if not wait_for(is_up):
            raise RuntimeError(f"the link of {host} does not come up")

    def _read_link_attribute(self, host: str, name: str) -> str:
        """Return an attribute of a network link from a host's /sys/class/net."""
        return Path(f"/proc/{self.keepers[host].pid}/root/sys/class/net/{name}").read_text().strip()

    def _write_ssh_files(self) -> None:
        """Write the keys and the configuration of ssh and of each host's sshd."""
        variables = " ".join(f"{key}={value}" for key, value in self.site_variables.items())
        make_key(self.folder / "user.key")
        known_host_lines = []
        for host in self.names:
            kind, value = make_key(self.folder / f"{host}.key").split()[:2]
            known_host_lines.append(f"{host},{ADDRESSES[host]} {kind} {value}\n")
            text = SSHD_CONFIG.format(
                folder=self.folder,
                host=host,
                address=ADDRESSES[host],
                mark=MARK_VARIABLE,
                variables=variables,
            )
            (self.folder / f"{host}.sshd_config").write_text(text)
        self.known_hosts.write_text("".join(known_host_lines))
        self.ssh_config.write_text(SSH_CONFIG.format(folder=self.folder, mark=MARK_VARIABLE))

    def _start_sshd(self, host: str, offset_s: int = 0) -> None:
        """Start the sshd of a host, with its monotonic clock shifted by so many seconds."""
        clock = (
            [
                require_program("unshare"),
                "--time",
                f"--monotonic={offset_s}",
                f"--boottime={offset_s}",
                "--fork",
            ]
            if offset_s
            else []
        )
        sshd = [
            require_program("sshd"),
            "-f",
            self.folder / f"{host}.sshd_config",
            "-E",
            self.folder / f"{host}.sshd.log",
        ]
        self.start_command(
            host, [*clock, *sshd], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ).wait(timeout=300)

    def _await_sshd(self, host: str) -> None:
        """Wait until the sshd of a host listens: it then writes its process id."""
        log = self.folder / f"{host}.sshd.log"
        if not wait_for(lambda: self._read_sshd_pid(host) is not None, 30):
            raise RuntimeError(f"sshd on {host} does not start: {log.read_text()[-300:]}")

    def _read_sshd_pid(self, host: str) -> int | None:
        """Return the process id of the listening sshd; None if it has not written it yet."""
        path = self.folder / f"{host}.sshd.pid"
        return int(path.read_text()) if path.exists() and path.read_text() else None

    def _restart_sshd(self, host: str, offset_s: int) -> None:
        """Kill the listening sshd of a host and start it again, with another clock offset."""
        listener = self._read_sshd_pid(host)
        assert listener is not None
        kill_and_wait([listener])
        (self.folder / f"{host}.sshd.pid").unlink()
        self._start_sshd(host, offset_s)
        self._await_sshd(host)


def kill_and_wait(pids: Sequence[int]) -> list[int]:
    """Kill processes, wait until they are gone, and return their ids."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not any(_read_program_name(pid) for pid in pids), 10), pids
    return list(pids)


def make_key(path: Path) -> str:
    """Make a key pair at `path` and return its public half."""
    subprocess.run(
        [
            require_program("ssh-keygen"),
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            "test",
            "-f",
            str(path),
        ],
        check=True,
    )
    return path.with_name(f"{path.name}.pub").read_text()


def _read_program_name(pid: int) -> str | None:
    """Return the name by which a process was started (for Slurm on Debian the name of a link); None
    once it has ended.
    """
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() if network_of(pid) else None
    except OSError:
        return None


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster in a temporary folder; end it and delete the folder after the block."""
    folder = Path(tempfile.mkdtemp(prefix="steelyard-hosts-"))
    folder.chmod(0o755)  # munged insists that all may reach its socket
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder)
