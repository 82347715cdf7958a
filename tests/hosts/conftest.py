"""Hosts for tests, made once per test process: `cluster` has three with an sshd each, `slurm` adds
Slurm.

Where they cannot be made, the tests that need them are skipped with the reason.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hosts import packages
from hosts.cluster import Cluster, running_cluster
from hosts.slurm import Slurm

pytest.register_assert_rewrite("hosts.runs")

from hosts.runs import Runs  # noqa: E402  only now its assertions say what they found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster of two compute hosts and a login host."""
    with ExitStack() as until_the_end:
        try:
            packages.provide(packages.HOSTS)
            yield until_the_end.enter_context(running_cluster())
        except packages.UnavailableError as why:
            pytest.skip(str(why))


@pytest.fixture(scope="session")
def slurm(cluster: Cluster) -> Slurm:
    """A running Slurm on the cluster."""
    try:
        packages.provide(packages.SLURM)
    except packages.UnavailableError as why:
        pytest.skip(str(why))
    one = Slurm(cluster)
    one.start()
    return one


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    """The command line on the login host, which reaches the other hosts through ssh."""
    one = Runs(cluster, tmp_path)
    yield one
    one.clean()


@pytest.fixture(autouse=True)
def as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, restore links, daemons and an empty queue on the hosts that it used."""
    cluster: Cluster | None = (
        request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    )
    slurm: Slurm | None = (
        request.getfixturevalue("slurm") if "slurm" in request.fixturenames else None
    )
    yield
    if cluster is not None:
        cluster.mend_all()
    if slurm is not None:
        slurm.tidy()
