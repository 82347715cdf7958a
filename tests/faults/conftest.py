"""The hosts of tests/hosts, and the table of what was seen."""

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
    """What was seen of each fault; written into the file that FAULTS_TABLE names."""
    seen = Table()
    yield seen
    if "FAULTS_TABLE" in os.environ:
        seen.write(Path(os.environ["FAULTS_TABLE"]))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """Where the parameter says. Whatever is done to hosts, the next test finds them whole."""
    one = _place(request, request.param, tmp_path)
    yield one
    one.stage.clean()
    if one.cluster is not None:
        one.cluster.mend_all()
    if one.slurm is not None:
        # its daemon would first try for long to tell of the steps that ended meanwhile
        for host in one.were_cut:
            one.slurm.kill_slurmd(host)
        one.slurm.tidy()


def _place(request: pytest.FixtureRequest, where: str, folder: Path) -> Scene:
    if where == LOCAL:
        return Scene(where, Here(Shell(folder, (INSIDE, LONE))))
    hosts = request.getfixturevalue("cluster")
    if where == SLURM:
        queue = request.getfixturevalue("slurm")
        return Scene(where, Elsewhere(Runs(hosts, folder, "slurm", {"hosts": None})), hosts, queue)
    return Scene(where, Elsewhere(Runs(hosts, folder)), hosts)
