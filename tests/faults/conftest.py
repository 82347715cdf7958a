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
from faults.scenes import INSIDE, LONE, Elsewhere, Here, Scene
from faults.table import Table
from fixtures.commands import Shell
from hosts.runs import Runs


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """The outcomes of this test session; written into the file that FAULTS_TABLE names, if set."""
    seen = Table()
    yield seen
    if "FAULTS_TABLE" in os.environ:
        seen.write(Path(os.environ["FAULTS_TABLE"]))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """A scene on the hosts that the parameter names. Afterwards processes are killed, and links and
    daemons restored.
    """
    one = _place(request, request.param, tmp_path)
    yield one
    one.stage.clean()
    if one.cluster is not None:
        one.cluster.mend_all()
    if one.slurm is not None:
        # slurmd of a host that was cut off would try for long to report steps that have ended
        for host in one.were_cut:
            one.slurm.kill_slurmd(host)
        one.slurm.tidy()


def _place(request: pytest.FixtureRequest, where: str, folder: Path) -> Scene:
    """Return a scene on one host, or on the cluster's hosts through ssh or Slurm."""
    if where == LOCAL:
        return Scene(where, Here(Shell(folder, (INSIDE, LONE))))
    hosts = request.getfixturevalue("cluster")
    if where == SLURM:
        queue = request.getfixturevalue("slurm")
        return Scene(where, Elsewhere(Runs(hosts, folder, "slurm", {"hosts": None})), hosts, queue)
    return Scene(where, Elsewhere(Runs(hosts, folder)), hosts)
