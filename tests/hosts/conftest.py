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

from hosts.runs import LoginShell  # noqa: E402  only now its assertions say what they found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster of two compute hosts and a login host."""
    with ExitStack() as stack:
        try:
            packages.install_missing(packages.HOST_PROGRAMS)
            yield stack.enter_context(running_cluster())
        except packages.UnavailableError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def slurm(cluster: Cluster) -> Slurm:
    """A running Slurm on the cluster."""
    try:
        packages.install_missing(packages.SLURM_PROGRAMS)
    except packages.UnavailableError as error:
        pytest.skip(str(error))
    started = Slurm(cluster)
    started.start()
    return started


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[LoginShell]:
    """The command line on the login host, which reaches the other hosts through ssh."""
    login_shell = LoginShell(cluster, tmp_path)
    yield login_shell
    login_shell.clean()


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
        cluster.restore_links()
    if slurm is not None:
        slurm.tidy()
