"""Runs in allocations of a real Slurm: an existing one, one that the launcher requests, and a batch
script. Each allocation is released.

The commands, the site file and the script are those of docs/clusters.md.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import wait_for, wait_for_result
from fixtures.golden import golden
from hosts import recipes
from hosts.runs import STEELYARD, LoginShell
from hosts.slurm import Slurm

SMOKE = ("run", "llama2-7b-mmlu", "--size", "smoke", "--accelerator", "cpu", "--nodes", "2")
PATH = f"{recipes.PYTHON_FOLDER}:{os.environ['PATH']}"


@pytest.fixture
def runs(slurm: Slurm, tmp_path: Path) -> Iterator[LoginShell]:
    """The command line on the login host, with the site file for Slurm of docs/clusters.md."""
    login_shell = LoginShell(slurm.cluster, tmp_path)
    recipes.write_recipe_site(login_shell, "slurm")
    yield login_shell
    login_shell.clean()


def start_recipe(runs: LoginShell, *texts: str) -> "subprocess.Popen[str]":
    """Start a code block of the page in a shell, as a user pastes it."""
    return runs.start_command(["sh", "-e", "-c", recipes.read_recipe("sh", *texts)], PATH=PATH)


def list_job_states(slurm: Slurm) -> list[str]:
    """Return the states of all jobs in the queue."""
    return slurm("squeue", "--noheader", "--format=%T").split()


def read_sole_record(runs: LoginShell, slurm: Slurm) -> dict[str, Any]:
    """Return the only record, which must be valid; its hosts must be free again and no job in the
    queue.
    """
    [record] = runs.records()
    assert record["status"] == "valid"
    assert [host["name"] for host in record["hosts"]] == list(slurm.cluster.hosts)
    assert record["plan"]["launcher"] == "slurm"
    assert runs.find_leftovers() == []
    assert wait_for(lambda: list_job_states(slurm) == [], 10), list_job_states(slurm)
    return record


def occupy_hosts(slurm: Slurm) -> None:
    """Allocate all hosts for another user of the queue, until `release_hosts`."""
    slurm("salloc", "--no-shell", "--nodes=2", "--exclusive")
    assert list_job_states(slurm) == ["RUNNING"]


def release_hosts(slurm: Slurm) -> None:
    """Cancel the allocations that run."""
    slurm("scancel", "--state=RUNNING", "--user=root")


def await_queue(runs: LoginShell, slurm: Slurm, process: "subprocess.Popen[str]") -> None:
    """Wait until the command has printed that it waits for hosts, and its job is pending in the
    queue.
    """
    assert process.stderr is not None
    assert process.stderr.readline() == f"site: {runs.site_file}\n"
    assert process.stderr.readline() == "waiting for 2 host(s) from Slurm: 0 s\n"
    assert wait_for(lambda: sorted(list_job_states(slurm)) == ["PENDING", "RUNNING"], 10)


@pytest.mark.full
def test_the_launcher_requests_and_releases_an_allocation(runs: LoginShell, slurm: Slurm) -> None:
    """The wait in the queue is printed, and is not part of the run's time."""
    occupy_hosts(slurm)
    process = start_recipe(runs, "--launcher slurm --nodes 2\n")
    await_queue(runs, slurm, process)
    time.sleep(2)
    released_s = time.monotonic()
    release_hosts(slurm)
    result = wait_for_result(process)
    ended_s = time.monotonic()
    assert result.code == 0, result.err
    record = read_sole_record(runs, slurm)
    assert 0 < record["metrics"]["e2e_time"]["value"] < ended_s - released_s


@pytest.mark.process
def test_a_wait_in_the_queue_can_be_interrupted(runs: LoginShell, slurm: Slurm) -> None:
    occupy_hosts(slurm)
    process = runs.start(*SMOKE)
    await_queue(runs, slurm, process)
    process.send_signal(signal.SIGINT)
    result = wait_for_result(process)
    assert (result.code, result.lines) == (1, ["interrupted"])
    assert wait_for(lambda: list_job_states(slurm) == ["RUNNING"], 10)
    assert (runs.records(), runs.find_leftovers()) == ([], [])


@pytest.mark.full
def test_an_existing_allocation_is_used(runs: LoginShell, slurm: Slurm) -> None:
    result = wait_for_result(start_recipe(runs, "salloc"))
    assert result.code == 0, result.err
    assert "waiting for" not in result.err  # it has requested no allocation
    read_sole_record(runs, slurm)


@pytest.mark.full
def test_a_batch_script_runs_and_keeps_checkpoints(runs: LoginShell, slurm: Slurm) -> None:
    script = runs.folder / "job.sh"
    script.write_text(recipes.read_recipe("sh", "#SBATCH"))
    result = wait_for_result(runs.start_command(["sbatch", "--wait", script]))
    [out] = runs.folder.glob("steelyard-*.out")
    assert result.code == 0, out.read_text()
    assert "valid: records/" in out.read_text()
    record = read_sole_record(runs, slurm)
    assert (runs.out / record["checkpoints"]).is_dir()


@pytest.mark.process
def test_more_hosts_than_the_allocation_has_are_refused(runs: LoginShell, slurm: Slurm) -> None:
    result = wait_for_result(
        runs.start_command(["salloc", "--quiet", "--nodes=1", *STEELYARD, *SMOKE])
    )
    assert result.code == 2
    assert result.lines[-1].endswith(" has 1 host(s); allowed: 1 to 1")
    assert (runs.records(), runs.find_leftovers()) == ([], [])


@pytest.mark.process
def test_an_unknown_partition_is_refused(runs: LoginShell, slurm: Slurm) -> None:
    site = runs.site_file
    site.write_text(site.read_text().replace("debug", "nowhere"))
    result = runs(*SMOKE)
    assert (result.code, result.out) == (2, "")
    assert result.lines[-1].startswith(golden("error-salloc-gave-no-hosts-exit"))
    assert "nvalid partition" in result.lines[-1]
    assert result.lines[-1].endswith("; see [slurm] in the site file")
    assert (runs.records(), runs.find_leftovers(), list_job_states(slurm)) == ([], [], [])


@pytest.mark.process
def test_a_missing_python_on_a_host_is_refused(runs: LoginShell, slurm: Slurm) -> None:
    site = runs.site_file
    site.write_text(
        site.read_text() + f"\n[host.node2]\npython = {json.dumps('/no/such/python')}\n"
    )
    result = runs(*SMOKE)
    assert (result.code, result.out) == (2, "")
    # the error between them comes from slurmstepd or from srun
    assert result.lines[-1].startswith(golden("error-host-node-2-the-agent"))
    assert result.lines[-1].endswith(golden("no-such-python-there-name-one"))
    assert (runs.records(), runs.find_leftovers()) == ([], [])
    assert wait_for(lambda: list_job_states(slurm) == [], 10)
