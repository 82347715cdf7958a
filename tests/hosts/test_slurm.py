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

from fixtures.commands import finish, wait_for
from fixtures.golden import golden
from hosts import recipes
from hosts.runs import STEELYARD, Runs
from hosts.slurm import Slurm

SMOKE = ("run", "llama2-7b-mmlu", "--size", "smoke", "--accelerator", "cpu", "--nodes", "2")
PATH = f"{recipes.BIN}:{os.environ['PATH']}"


@pytest.fixture
def runs(slurm: Slurm, tmp_path: Path) -> Iterator[Runs]:
    """The command line on the login host, with the site file for Slurm of docs/clusters.md."""
    one = Runs(slurm.cluster, tmp_path)
    recipes.write_site(one, "slurm")
    yield one
    one.clean()


def recipe(runs: Runs, *texts: str) -> "subprocess.Popen[str]":
    """Start a code block of the page in a shell, as a user pastes it."""
    return runs.command(["sh", "-e", "-c", recipes.block("sh", *texts)], PATH=PATH)


def queue(slurm: Slurm) -> list[str]:
    """Return the states of all jobs in the queue."""
    return slurm("squeue", "--noheader", "--format=%T").split()


def sole_record(runs: Runs, slurm: Slurm) -> dict[str, Any]:
    """Return the only record, which must be valid; its hosts must be free again and no job in the
    queue.
    """
    [record] = runs.records()
    assert record["status"] == "valid"
    assert [one["name"] for one in record["hosts"]] == list(slurm.cluster.hosts)
    assert record["plan"]["launcher"] == "slurm"
    assert runs.left() == []
    assert wait_for(lambda: queue(slurm) == [], 10), queue(slurm)
    return record


def occupy(slurm: Slurm) -> None:
    """Allocate all hosts for another user of the queue, until `release_hosts`."""
    slurm("salloc", "--no-shell", "--nodes=2", "--exclusive")
    assert queue(slurm) == ["RUNNING"]


def release(slurm: Slurm) -> None:
    """Cancel the allocations that run."""
    slurm("scancel", "--state=RUNNING", "--user=root")


def waiting(runs: Runs, slurm: Slurm, process: "subprocess.Popen[str]") -> None:
    """Wait until the command has printed that it waits for hosts, and its job is pending in the
    queue.
    """
    assert process.stderr is not None
    assert process.stderr.readline() == f"site: {runs.site_file}\n"
    assert process.stderr.readline() == "waiting for 2 host(s) from Slurm: 0 s\n"
    assert wait_for(lambda: sorted(queue(slurm)) == ["PENDING", "RUNNING"], 10)


@pytest.mark.full
def test_an_allocation_is_asked_for_and_given_back(runs: Runs, slurm: Slurm) -> None:
    """The wait in the queue is printed, and is not part of the run's time."""
    occupy(slurm)
    process = recipe(runs, "--launcher slurm --nodes 2\n")
    waiting(runs, slurm, process)
    time.sleep(2)
    released_s = time.monotonic()
    release(slurm)
    done = finish(process)
    over_s = time.monotonic()
    assert done.code == 0, done.err
    record = sole_record(runs, slurm)
    assert 0 < record["metrics"]["e2e_time"]["value"] < over_s - released_s


@pytest.mark.process
def test_a_wait_in_the_queue_can_be_interrupted(runs: Runs, slurm: Slurm) -> None:
    occupy(slurm)
    process = runs.start(*SMOKE)
    waiting(runs, slurm, process)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.lines) == (1, ["interrupted"])
    assert wait_for(lambda: queue(slurm) == ["RUNNING"], 10)
    assert (runs.records(), runs.left()) == ([], [])


@pytest.mark.full
def test_the_allocation_around_a_command_is_used(runs: Runs, slurm: Slurm) -> None:
    done = finish(recipe(runs, "salloc"))
    assert done.code == 0, done.err
    assert "waiting for" not in done.err  # it has requested no allocation
    sole_record(runs, slurm)


@pytest.mark.full
def test_a_batch_script(runs: Runs, slurm: Slurm) -> None:
    script = runs.folder / "job.sh"
    script.write_text(recipes.block("sh", "#SBATCH"))
    done = finish(runs.command(["sbatch", "--wait", script]))
    [out] = runs.folder.glob("steelyard-*.out")
    assert done.code == 0, out.read_text()
    assert "valid: records/" in out.read_text()
    record = sole_record(runs, slurm)
    assert (runs.out / record["checkpoints"]).is_dir()


@pytest.mark.process
def test_more_hosts_than_the_allocation_has(runs: Runs, slurm: Slurm) -> None:
    done = finish(runs.command(["salloc", "--quiet", "--nodes=1", *STEELYARD, *SMOKE]))
    assert done.code == 2
    assert done.lines[-1].endswith(" has 1 host(s); allowed: 1 to 1")
    assert (runs.records(), runs.left()) == ([], [])


@pytest.mark.process
def test_a_partition_that_is_not_there(runs: Runs, slurm: Slurm) -> None:
    site = runs.site_file
    site.write_text(site.read_text().replace("debug", "nowhere"))
    done = runs(*SMOKE)
    assert (done.code, done.out) == (2, "")
    assert done.lines[-1].startswith(golden("error-salloc-gave-no-hosts-exit"))
    assert "nvalid partition" in done.lines[-1]
    assert done.lines[-1].endswith("; see [slurm] in the site file")
    assert (runs.records(), runs.left(), queue(slurm)) == ([], [], [])


@pytest.mark.process
def test_a_python_that_is_not_there(runs: Runs, slurm: Slurm) -> None:
    site = runs.site_file
    site.write_text(
        site.read_text() + f"\n[host.node2]\npython = {json.dumps('/no/such/python')}\n"
    )
    done = runs(*SMOKE)
    assert (done.code, done.out) == (2, "")
    # the error between them comes from slurmstepd or from srun
    assert done.lines[-1].startswith(golden("error-host-node-2-the-agent"))
    assert done.lines[-1].endswith(golden("no-such-python-there-name-one"))
    assert (runs.records(), runs.left()) == ([], [])
    assert wait_for(lambda: queue(slurm) == [], 10)
