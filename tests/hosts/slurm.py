"""A real Slurm on the hosts of a cluster: slurmctld and munged on the login host, a slurmd on each
of the others.
"""

import os
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fixtures.commands import wait_for
from hosts.cluster import Cluster, kill_and_wait
from hosts.packages import require_program

GPUS = 2
NULL_DEVICE = os.makedev(1, 3)

# With config_overrides Slurm takes a node's CPUs, memory and GPUs from this file and not from the
# machine. AuthInfo names the cluster's own munged.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={login}({login_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Without this, slurmd detects the version of cgroups and needs those of a booted system. With v1 it
# needs none as long as no plugin uses them.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"
NODE = (
    "NodeName={host} NodeAddr={address} CPUs=2 RealMemory=8000 Gres=gpu:fake:{gpus} State=UNKNOWN"
)


@dataclass
class Slurm:
    """Slurm on a cluster. Calling it runs a command on the login host."""

    cluster: Cluster
    _killed: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.cluster.folder

    def __call__(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the login host, which must succeed, and return its stdout without
        surrounding space.
        """
        result = self.cluster.run(self.cluster.login, argv, env)
        assert result.returncode == 0, (argv, result.stdout, result.stderr)
        return result.stdout.strip()

    def job_state(self, job: str) -> str | None:
        """Return the state of a job as squeue prints it (`RUNNING`, `PENDING`, …); None for a job
        that has ended.
        """
        return dict(
            line.split() for line in self("squeue", "--noheader", "--format=%i %T").splitlines()
        ).get(job)

    def kill_slurmd(self, host: str) -> list[int]:
        """Kill slurmd and the slurmstepd of each step, as when a host crashes; the steps' own
        processes stay. Returns the killed ids.
        """
        self._killed.add(host)
        return kill_and_wait(self.cluster.find_pids(host, "slurmd", "slurmstepd"))

    def start_slurmd(self, host: str) -> None:
        """Start slurmd again and wait until the node is idle."""
        self._start_daemon(host, "slurmd")
        self._killed.discard(host)
        self._await_idle(host)

    def tidy(self) -> None:
        """Cancel all jobs, start daemons that a test killed, and wait until all nodes are idle."""
        self("scancel", "--user=root")
        for host in tuple(self._killed):
            self._start_daemon(host, "slurmd")
        self._killed.clear()
        self._await_idle(*self.cluster.hosts)

    def start(self) -> None:
        """Write the configuration, start all daemons and wait until all nodes are idle."""
        cluster = self.cluster
        self._write_config()
        self._start_munged()
        self._start_daemon(cluster.login, "slurmctld", "-c")
        for host in cluster.hosts:
            self._start_daemon(host, "slurmd")
        self._await_idle(*self.cluster.hosts)

    def _write_config(self) -> None:
        """Write slurm.conf, cgroup.conf and gres.conf, and make device files for GPUs that do not
        exist.
        """
        cluster, folder = self.cluster, self.folder
        for name in ("state", *(f"spool.{host}" for host in cluster.hosts)):
            (folder / name).mkdir()
        for number in range(GPUS):  # gres.conf needs character devices; any will do
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, NULL_DEVICE)
        nodes = "\n".join(
            NODE.format(host=host, address=cluster.address(host), gpus=GPUS)
            for host in cluster.hosts
        )
        address = cluster.address(cluster.login)
        text = SLURM_CONF.format(
            folder=folder, login=cluster.login, login_address=address, nodes=nodes
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text(CGROUP_CONF)
        devices = f"{folder}/gpu[0-{GPUS - 1}]"
        (folder / "gres.conf").write_text(
            f"NodeName={','.join(cluster.hosts)} Name=gpu Type=fake File={devices}\n"
        )

    def _start_munged(self) -> None:
        """Start munged with a key and a socket of the cluster's own; the machine's munged, if there
        is one, is left alone.
        """
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {
            "key-file": key,
            **{f"{name}-file": self.folder / f"munge.{name}" for name in ("pid", "log", "seed")},
        }
        options = [f"--{name}={path}" for name, path in files.items()]
        self._start_daemon(
            self.cluster.login, "munged", f"--socket={self.folder}/munge.socket", *options
        )

    def _start_daemon(self, host: str, name: str, *options: str) -> None:
        """Start a daemon on a host and wait until it is in the background. Raises RuntimeError if
        it fails.
        """
        error = self.folder / f"{host}.{name}.err"
        with error.open("w") as file:
            process = self.cluster.start_command(
                host,
                [require_program(name), *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
            code = process.wait(timeout=300)
        if code:
            raise RuntimeError(
                f"{name} on {host} ends with {code}: {error.read_text().strip()[-300:]}"
            )

    def _await_idle(self, *hosts: str) -> None:
        """Wait until these nodes are idle. Raises RuntimeError with the end of Slurm's logs if they
        are not.
        """
        states: list[str] = []

        def all_idle() -> bool:
            states[:] = self(
                "sinfo", "--noheader", "--Node", "--format=%T", f"--nodes={','.join(hosts)}"
            ).split()
            return states == ["idle"] * len(hosts)

        if not wait_for(all_idle):
            raise RuntimeError(f"Slurm's nodes {hosts} are {states}, not idle: {self._log_tail()}")

    def _log_tail(self) -> str:
        return " | ".join(
            path.read_text()[-300:] for path in sorted(self.folder.glob("slurm*.log"))
        )
