"""Fixtures of the fault suite: the hosts of tests/hosts, a scene to run in, and the table of
outcomes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts.conftest import cluster, slurm  # noqa: F401  first: it prepares what others import

# isort: split
from faults.faults import LOCAL, SLURM
from faults.scenes import FAULT_PATH, LONE_DEVICE_PATH, ClusterStage, LocalStage, Scene
from faults.table import FaultTable
from fixtures.commands import Shell
from hosts.runs import LoginShell


@pytest.fixture(scope="session")
def table() -> Iterator[FaultTable]:
    """The outcomes of this test session; written into the file that FAULTS_TABLE names, if set."""
    results = FaultTable()
    yield results
    if "FAULTS_TABLE" in os.environ:
        results.write(Path(os.environ["FAULTS_TABLE"]))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """A scene on the hosts that the parameter names. Afterwards processes are killed, and links and
    daemons restored.
    """
    prepared = _make_scene(request, request.param, tmp_path)
    yield prepared
    prepared.stage.clean()
    if prepared.cluster is not None:
        prepared.cluster.restore_links()
    if prepared.slurm is not None:
        # slurmd of a host that was cut off would try for long to report steps that have ended
        for host in prepared.cut_hosts:
            prepared.slurm.kill_slurmd(host)
        prepared.slurm.tidy()


def _make_scene(request: pytest.FixtureRequest, where: str, folder: Path) -> Scene:
    """Return a scene on one host, or on the cluster's hosts through ssh or Slurm."""
    if where == LOCAL:
        return Scene(where, LocalStage(Shell(folder, (FAULT_PATH, LONE_DEVICE_PATH))))
    hosts = request.getfixturevalue("cluster")
    if where == SLURM:
        queue = request.getfixturevalue("slurm")
        return Scene(
            where, ClusterStage(LoginShell(hosts, folder, "slurm", {"hosts": None})), hosts, queue
        )
    return Scene(where, ClusterStage(LoginShell(hosts, folder)), hosts)
