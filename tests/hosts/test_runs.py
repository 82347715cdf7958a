"""Runs over two hosts by ssh: the recipe of docs/clusters.md, a run that dies and is resumed
elsewhere, a slow rank, and listening ports.
"""

import hashlib
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC, wait_for, wait_for_result
from fixtures.sockets import find_listening_sockets
from hosts import recipes
from hosts.cluster import Cluster
from hosts.host import network_of
from hosts.runs import LoginShell
from steelyard.metrics import stragglers, verify
from steelyard.words import Message

PACKAGES = Path(__file__).parents[1] / "fixtures" / "packages"
TRAIN = ("llama1-7b-openwebtext", "--size", "smoke", "--accelerator", "cpu")
TOKEN = re.compile(r"[0-9a-f]{32}")

Record = dict[str, Any]


def use_engine_package(runs: LoginShell, package: str) -> dict[str, str]:
    """Put an engine of fixtures/packages on the path of all hosts; return the variables with which
    the command finds it.
    """
    path = os.pathsep.join((str(PACKAGES / package), str(SRC)))
    runs.write_site(prologue=f"export PYTHONPATH={shlex.quote(path)}")
    return {"PYTHONPATH": path}


@pytest.mark.full
def test_ssh_recipe_of_the_docs_runs_a_sweep(runs: LoginShell) -> None:
    """Check that the hosts answer without a password, then run a sweep over one and two of them."""
    recipes.write_recipe_site(runs, "ssh")
    login_check = wait_for_result(
        runs.start_command(["sh", "-e", "-c", recipes.read_recipe("sh", "ssh north")])
    )
    assert (login_check.code, login_check.out, login_check.err) == (0, "", "")
    path = f"{recipes.PYTHON_FOLDER}:{os.environ['PATH']}"
    result = wait_for_result(
        runs.start_command(
            ["sh", "-e", "-c", recipes.read_recipe("sh", "--sweep nodes=1,2")], PATH=path
        )
    )
    assert result.code == 0, result.err
    rows = [
        line.split()[:3]
        for line in result.out[result.out.index("Scaling: ") :].splitlines()
        if re.match(r"\dx\d ", line)
    ]
    assert rows == [["1x1", "TP1PP1DP1", "1"], ["2x1", "TP1PP1DP2", "1"]]
    one_host, two_hosts = runs.records()
    assert [[host["name"] for host in record["hosts"]] for record in (one_host, two_hosts)] == [
        ["node1"],
        ["node1", "node2"],
    ]
    sha256 = hashlib.sha256(runs.site_file.read_bytes()).hexdigest()
    about = {"machine": "2x NVIDIA HGX H200", "network": "8x 400 Gb/s InfiniBand"}
    assert two_hosts["site"] == {**about, "file": "site.toml", "file_sha256": sha256}
    assert runs.find_leftovers() == []


def read_losses(record: Record) -> list[float]:
    """Return the losses of all training steps, those before a restart too."""
    last_losses = [
        s["values"]["loss"]
        for s in record["samples"]
        if s["pass"] == "train" and s["rank"] == 0 and s["counts"]
    ]
    return [*(record["restarts"][0]["losses"] if record["restarts"] else []), *last_losses]


@pytest.mark.full
def test_a_run_that_died_on_two_hosts_resumes_on_one(runs: LoginShell) -> None:
    """A rank on node2 of a pipeline over both hosts is killed after a checkpoint; one process
    resumes the run. Computed in float64.
    """
    path = use_engine_package(runs, "double_engine")
    options = (*TRAIN, "--engine", "double")
    # 20 of 40 steps are enough: the run on two hosts is killed long before step 20
    one_process_options = (*options, "--launcher", "local", "--steps", "20")
    unbroken = runs.run_valid(*one_process_options, **path)

    process = runs.start(
        "run", *options, "--nodes", "2", "--parallel", "PP2", "--checkpoint-every", "3", **path
    )
    assert wait_for(lambda: list(runs.out.glob("checkpoints/*/step-*[0-9]")), 120)
    [rank] = runs.find_workers("node2")
    os.kill(rank, signal.SIGKILL)
    assert wait_for_result(process).code == 1
    assert runs.find_leftovers() == []
    [died] = runs.records()
    assert died["reasons"][0]["code"] == "killed"
    assert died["reasons"][0]["text"].startswith("rank 1 on node2 was ended by SIGKILL")
    assert (died["failure"]["rank"], died["failure"]["host"]) == (1, "node2")

    [path_of_died] = runs.out.glob("*.json")
    resumed = runs.run_valid(*one_process_options, "--resume", path_of_died, **path)
    [restart] = resumed["restarts"]
    assert (restart["record"], restart["plan"]) == (died["id"], "TP1PP2DP1")
    assert 3 <= restart["step"] < 20
    assert read_losses(resumed) == pytest.approx(read_losses(unbroken), abs=0, rel=1e-8)
    for name in ("loss_before", "loss_after"):
        assert resumed["metrics"][name]["value"] == pytest.approx(
            unbroken["metrics"][name]["value"], rel=1e-8
        )


@pytest.mark.process
def test_ranks_of_several_hosts_listen_only_on_the_interface(
    cluster: Cluster, runs: LoginShell
) -> None:
    """Looks at all processes of the run on any host, once the ranks train. None has the token on
    its command line.
    """
    process = runs.start(
        "run", *TRAIN, "--nodes", "2", "--parallel", "PP2", "--set=question.train.steps=1000000"
    )
    assert wait_for(lambda: runs.read_phase() == "train", 120)
    hosts = {network_of(cluster.keepers[host].pid): host for host in cluster.names}
    sockets = [
        (hosts[network_of(pid)], kind, address)
        for pid in runs.processes()
        for kind, address, _ in find_listening_sockets(pid)
    ]
    allowed = {(host, "tcp", cluster.address(host)) for host in cluster.hosts}
    assert set(sockets) == allowed
    for host in cluster.hosts:
        [rank] = runs.find_workers(host)
        assert find_listening_sockets(rank)
    assert (
        len({_read_run_mark(rank) for host in cluster.hosts for rank in runs.find_workers(host)})
        == 2
    )
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in runs.processes()]
    # at least two node agents and the two ssh commands that start them
    assert sum("steelyard.run.node" in command for command in commands) >= 4
    assert [command for command in commands if TOKEN.search(command)] == []
    process.send_signal(signal.SIGINT)
    assert wait_for_result(process).code == 1
    assert runs.find_leftovers() == []
    assert runs.records()[0]["reasons"][0]["code"] == "interrupted"


def _read_run_mark(pid: int) -> str:
    """Return the text by which a worker and all that it starts is found (STEELYARD_RUN)."""
    [mark] = re.findall(r"STEELYARD_RUN=([^\0]+)", Path(f"/proc/{pid}/environ").read_text())
    return str(mark)


@pytest.mark.long
def test_a_slow_rank_is_named_with_its_host(runs: LoginShell) -> None:
    """The engine of slow_engine.py sleeps 1.2 s per step on rank 1 and 1.0 s on rank 0."""
    path = use_engine_package(runs, "slow_engine")
    small = (
        "--set=question.model.layers=1",
        "--set=question.train.batch=2",
        "--set=question.train.length=16",
    )
    result = runs(
        "run", *TRAIN, *small, "--engine", "slowed", "--nodes", "2", "--steps", "6", **path
    )
    assert result.code == 0, result.err
    record = verify.read_verified_record(next(runs.out.glob("*.json")))
    [note] = [
        candidate
        for candidate in record.notes
        if isinstance(candidate, Message) and candidate.code == "note.slow"
    ]
    assert note.values["who"] == Message("slow.rank_at", {"rank": 1, "host": "node2"})
    slowest = stragglers.find_stragglers(record)
    assert isinstance(slowest, stragglers.Stragglers)
    assert (slowest.rank, slowest.is_slow) == (1, True)
    assert slowest.cost_s == pytest.approx(0.2, rel=0.1)
    assert slowest.share == pytest.approx(0.2 / 1.2, rel=0.1)
    assert "Slowest: rank 1 on host node2" in runs("report", runs.out, "--full").out
