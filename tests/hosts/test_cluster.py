"""The hosts that other tests run on: they are separate, they can be broken, and ssh and Slurm
behave as the launchers expect.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.commands import SRC, wait_for, wait_for_result
from fixtures.golden import golden
from hosts import packages
from hosts.cluster import MARK_VARIABLE, Cluster, make_key
from hosts.host import processes_in
from hosts.slurm import Slurm

pytestmark = pytest.mark.process

HOLD_ALLOCATION = ["sh", "-c", "echo $SLURM_JOB_ID; exec cat"]
PRINT_PACKAGE = "import steelyard; print(steelyard.__file__)"
PACKAGE = str(SRC / "steelyard" / "__init__.py")
ECHO = [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"]
CLUSTER_PROGRAM = """
import sys
from hosts.cluster import running_cluster
from hosts.host import network_of
from hosts.slurm import Slurm

with running_cluster() as cluster:
    Slurm(cluster).start()
    print(cluster.folder, *(network_of(keeper.pid) for keeper in cluster.keepers.values()), flush=True)
    sys.stdin.read()
"""  # noqa: E501

Process = subprocess.Popen[str]


def start_piped(cluster: Cluster, argv: list[str], **variables: str) -> Process:
    """Start a command on the login host with pipes for stdin, stdout and stderr."""
    pipe = subprocess.PIPE
    return cluster.start_command(
        cluster.login, argv, variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def send_line(process: Process, line: str) -> None:
    """Write a line to the stdin of a process."""
    process.stdin.write(line)
    process.stdin.flush()


def wait_for_end(process: Process) -> tuple[int, str]:
    """Return the exit code of a process that ends while its stdin is open, and its stderr."""
    code = process.wait(timeout=300)
    return code, process.stderr.read()


def allocate(slurm: Slurm, *options: str) -> tuple[Process, str]:
    """Allocate both hosts; return the process that holds the allocation while its stdin is open,
    and the job's id.
    """
    process = start_piped(
        slurm.cluster, ["salloc", "--nodes=2", "--exclusive", *options, *HOLD_ALLOCATION]
    )
    return process, process.stdout.readline().strip()


def start_step(slurm: Slurm, job: str, host: str, *argv: str, **variables: str) -> Process:
    """Start a step on one host, from outside the process that holds the allocation."""
    options = [f"--jobid={job}", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"]
    return start_piped(slurm.cluster, ["srun", *options, *argv], **variables)


def start_echo_step(slurm: Slurm, job: str, host: str, mark: str = "") -> Process:
    """Start a step that echoes lines, and wait for the first echo, so that it is known to run."""
    process = start_step(slurm, job, host, *ECHO, **{MARK_VARIABLE: mark})
    send_line(process, "ready\n")
    assert process.stdout.readline() == "ready\n"
    return process


def is_released(slurm: Slurm, job: str) -> bool:
    """Return whether a job leaves the queue within 20 s."""
    return wait_for(lambda: slurm.job_state(job) is None, 20)


def test_hosts_have_names_addresses_and_links_of_their_own(cluster: Cluster):
    assert (cluster.hosts, cluster.login) == (("node1", "node2"), "login")
    for host in cluster.names:
        assert cluster.run(host, ["uname", "-n"]).stdout == f"{host}\n"
        assert (
            f"inet {cluster.address(host)}/24" in cluster.run(host, ["ip", "-4", "address"]).stdout
        )
        assert cluster.run(host, ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    assert os.uname().nodename not in cluster.names


def test_a_command_runs_in_its_folder_with_its_environment(cluster: Cluster, tmp_path: Path):
    code = f"import os; print(os.getcwd(), os.environ['COLOUR']); {PRINT_PACKAGE}"
    process = cluster.start_command(
        "node1",
        [sys.executable, "-c", code],
        {"COLOUR": "red"},
        tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.communicate(timeout=300)[0].split() == [str(tmp_path), "red", PACKAGE]
    process = cluster.start_command("node1", ["sleep", "60"])
    assert wait_for(lambda: cluster.find_pids("node1", "sleep") == [process.pid])
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_ssh_reaches_a_host_that_has_the_package(cluster: Cluster, host: str):
    result = cluster.run(
        "login", cluster.ssh(host, f"uname -n; {sys.executable} -c '{PRINT_PACKAGE}'")
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == [host, PACKAGE]


def test_ssh_refuses_a_host_with_another_key(cluster: Cluster, tmp_path: Path):
    known = tmp_path / "known_hosts"
    known.write_text(f"node1 {make_key(tmp_path / 'other.key')}")
    result = cluster.run(
        "login", cluster.ssh("node1", "uname -n", options=["-o", f"UserKnownHostsFile={known}"])
    )
    assert (result.returncode, result.stdout) == (255, "")
    assert result.stderr.splitlines()[-1] == "Host key verification failed."


def test_a_host_with_a_cut_link_cannot_be_reached(cluster: Cluster):
    cluster.cut_link("node1")
    result = cluster.run(
        "login", cluster.ssh("node1", "uname -n", options=["-o", "ConnectTimeout=1"])
    )
    assert (result.returncode, result.stdout) == (255, "")
    assert result.stderr.strip() == golden("ssh-connect-to-host-node-1")
    assert cluster.run("login", cluster.ssh("node2", "uname -n")).stdout == "node2\n"
    cluster.restore_link("node1")
    assert cluster.run("login", cluster.ssh("node1", "uname -n")).stdout == "node1\n"


def test_a_cut_link_ends_a_connection_with_keepalive(cluster: Cluster):
    alive = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"]
    process = start_piped(
        cluster, cluster.ssh("node1", "cat", options=alive), TEST_MARK="mark-of-a-cut"
    )
    send_line(process, "ready\n")
    assert process.stdout.readline() == "ready\n"
    cluster.cut_link("node1")
    assert wait_for_end(process) == (255, "Timeout, server node1 not responding.\n")
    # the host has not noticed yet: its process still runs
    assert cluster.find_pids("node1", "cat") == cluster.processes("mark-of-a-cut")
    cluster.kill_sshd_sessions("node1")
    assert wait_for(lambda: not cluster.find_pids("node1", "cat"), 10)


def test_killed_sshd_sessions_end_connections_and_not_the_host(cluster: Cluster):
    process = start_piped(cluster, cluster.ssh("node2", "cat"), TEST_MARK="mark-of-a-session")
    send_line(process, "ready\n")
    assert process.stdout.readline() == "ready\n"
    assert cluster.find_pids("node2", "cat")[0] in cluster.processes("mark-of-a-session")
    cluster.kill_sshd_sessions("node2")
    assert wait_for_end(process) == (255, golden("connection-to-node-2-closed-by"))
    assert wait_for(lambda: not cluster.processes("mark-of-a-session"), 10)
    assert cluster.run("login", cluster.ssh("node2", "uname -n")).stdout == "node2\n"


@pytest.mark.parametrize("seconds", [5, -5])
def test_a_host_can_have_a_clock_offset(cluster: Cluster, seconds: int):
    command = cluster.ssh(
        "node2",
        f"{sys.executable} -c 'import time; print(time.monotonic(), time.clock_gettime(7))'",
    )
    with cluster.clock_offset("node2", seconds):
        before = time.monotonic()
        host_times = [
            float(value) - seconds for value in cluster.run("login", command).stdout.split()
        ]
        assert before < host_times[0] < time.monotonic()
        assert host_times[1] < time.clock_gettime(time.CLOCK_BOOTTIME)
    before = time.monotonic()
    assert before < float(cluster.run("login", command).stdout.split()[0]) < time.monotonic()


def test_slurm_runs_on_both_hosts_with_their_devices(slurm: Slurm):
    show = ["sh", "-c", "echo $(uname -n) $CUDA_VISIBLE_DEVICES"]
    lines = slurm("srun", "--nodes=2", "--ntasks=2", "--gpus-per-node=2", *show).splitlines()
    assert sorted(lines) == ["node1 0,1", "node2 0,1"]


def test_closing_the_pipe_releases_an_allocation(slurm: Slurm):
    process, job = allocate(slurm)
    assert slurm.job_state(job) == "RUNNING"
    process.stdin.close()
    code, error = wait_for_end(process)
    assert code == 0
    assert error.splitlines()[:2] == [
        f"salloc: Granted job allocation {job}",
        f"salloc: Relinquishing job allocation {job}",
    ]
    assert is_released(slurm, job)


def test_death_of_the_pipe_holder_releases_an_allocation(slurm: Slurm):
    command = ["salloc", "--nodes=2", "--exclusive", *HOLD_ALLOCATION]
    code = f"import subprocess; subprocess.Popen({command}, stdin=subprocess.PIPE).wait()"
    holder = start_piped(slurm.cluster, [sys.executable, "-c", code])
    job = holder.stdout.readline().strip()
    assert slurm.job_state(job) == "RUNNING"
    holder.kill()
    assert is_released(slurm, job)
    assert slurm.cluster.find_pids("login", "salloc", "cat") == []


def test_the_death_of_salloc_does_not_release_an_allocation(slurm: Slurm):
    process, job = allocate(slurm)
    process.kill()
    process.wait()
    process.stdin.close()
    assert wait_for(lambda: not slurm.cluster.find_pids("login", "cat"), 10)
    assert slurm.job_state(job) == "RUNNING"
    slurm("scancel", job)
    assert is_released(slurm, job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_allocation_can_be_interrupted(slurm: Slurm, number: signal.Signals):
    allocate(slurm)
    pending = start_piped(slurm.cluster, ["salloc", "--nodes=2", "--exclusive", *HOLD_ALLOCATION])
    job = pending.stderr.readline().split()[-1]
    assert wait_for(lambda: slurm.job_state(job) == "PENDING")
    assert pending.stderr.readline() == f"salloc: job {job} queued and waiting for resources\n"
    pending.send_signal(number)
    code, error = wait_for_end(pending)
    assert code == 1
    # often, but not always, there is also a line that the allocation has been revoked
    assert "salloc: Job aborted due to signal" in error.splitlines()
    assert pending.stdout.read() == ""
    assert slurm.job_state(job) is None


def test_each_step_has_its_own_pipe(slurm: Slurm):
    _, job = allocate(slurm)
    steps = [start_echo_step(slurm, job, host) for host in slurm.cluster.hosts]
    lines = [letter * (1 << 20) + "\n" for letter in "ab"]
    for process, line in zip(steps, lines, strict=True):
        send_line(process, line)
    assert [process.stdout.readline() for process in steps] == lines
    for process in steps:
        assert wait_for_result(process).code == 0


def test_a_cancelled_job_ends_its_steps_and_not_salloc(slurm: Slurm):
    process, job = allocate(slurm)
    steps = [start_echo_step(slurm, job, host) for host in slurm.cluster.hosts]
    slurm("scancel", job)
    for host, (code, error) in zip(slurm.cluster.hosts, map(wait_for_end, steps), strict=True):
        assert code == 128 + signal.SIGTERM
        assert f"srun: error: {host}: task 0: Terminated\n" in error
    assert process.stderr.readline() == f"salloc: Granted job allocation {job}\n"
    assert process.stderr.readline() == f"salloc: Job allocation {job} has been revoked.\n"
    assert process.poll() is None
    process.stdin.close()
    assert wait_for_end(process) == (0, "")


def test_salloc_with_kill_command_ends_with_its_job(slurm: Slurm):
    process, job = allocate(slurm, "--kill-command")
    slurm("scancel", job)
    revoked = (
        f"salloc: Granted job allocation {job}\nsalloc: Job allocation {job} has been revoked.\n"
    )
    assert wait_for_end(process) == (1, revoked)


def test_srun_reports_how_its_process_ended(slurm: Slurm):
    _, job = allocate(slurm)
    killed = start_echo_step(slurm, job, "node1", "mark-of-a-step")
    (pid,) = slurm.cluster.find_pids("node1", "python")
    assert pid in slurm.cluster.processes("mark-of-a-step")
    os.kill(pid, signal.SIGKILL)
    code, error = wait_for_end(killed)
    assert code == 128 + signal.SIGKILL
    assert error.startswith(golden("srun-error-node-1-task-0"))
    code, error = wait_for_end(start_step(slurm, job, "node2", "sh", "-c", "exit 3"))
    assert (code, error) == (3, golden("srun-error-node-2-task-0"))


def test_the_death_of_srun_ends_its_step(slurm: Slurm):
    _, job = allocate(slurm)
    process = start_step(slurm, job, "node1", "sleep", "300")
    assert wait_for(lambda: slurm.cluster.find_pids("node1", "sleep"), 10)
    process.kill()
    assert wait_for(lambda: not slurm.cluster.find_pids("node1", "sleep"), 10)


def test_srun_does_not_notice_a_killed_slurmd(slurm: Slurm):
    allocation, job = allocate(slurm)
    lost, other = (start_echo_step(slurm, job, host) for host in slurm.cluster.hosts)
    assert len(slurm.kill_slurmd("node1")) >= 2
    assert wait_for(
        lambda: not slurm.cluster.find_pids("node1", "python"), 10
    )  # its stdin has closed
    send_line(other, "still there\n")
    assert other.stdout.readline() == "still there\n"
    assert lost.poll() is None
    assert slurm.job_state(job) == "RUNNING"
    allocation.stdin.close()
    code, error = wait_for_end(lost)
    assert code == 0  # an exit code of srun is no proof that all went well
    assert error.splitlines()[-1] == golden("srun-error-timed-out-waiting-for")
    assert slurm.job_state(job) == "COMPLETING"
    slurm.start_slurmd("node1")
    assert is_released(slurm, job)


def test_a_killed_test_process_leaves_nothing_running(slurm: Slurm):
    path = os.pathsep.join((str(Path(__file__).parents[1]), str(SRC)))
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER_PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        stdin=pipe,
        stdout=pipe,
        text=True,
    )
    folder, *networks = process.stdout.readline().split()
    assert len(networks) == 4
    assert all(processes_in(network) for network in networks)
    process.kill()
    process.wait()
    assert wait_for(lambda: not any(processes_in(network) for network in networks), 20)
    subprocess.run(["rm", "-r", folder], check=True)


def test_unavailable_hosts_are_explained(monkeypatch: pytest.MonkeyPatch):
    unknown = {"no-such-program": "no-such-package"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(packages.UnavailableError, match=r"^hosts on one machine need root$"):
            packages.install_missing(packages.HOST_PROGRAMS)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        packages.UnavailableError,
        match=r"^missing here, and no apt-get to install them: no-such-program$",
    ):
        packages.install_missing(unknown)
