"""Runs over several hosts, through real ssh and real Slurm."""

from pathlib import Path

from hosts.runs import Runs
from hosts.slurm import Slurm

SMOKE = ("--size", "smoke", "--accelerator", "cpu", "--nodes", "2")


def test_slurm(slurm: Slurm, tmp_path: Path) -> None:
    runs = Runs(slurm.cluster, tmp_path, "slurm", {"hosts": None})
    done = runs("run", "llama2-7b-mmlu", *SMOKE)
    assert done.code == 0, done.err
    (record,) = runs.records()
    assert [one["name"] for one in record["hosts"]] == list(slurm.cluster.hosts)
    assert runs.nothing_left(5), runs.processes()
