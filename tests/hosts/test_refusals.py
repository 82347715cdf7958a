"""Hosts that cannot take part in a run: one line names the host and what helps, no rank is started,
and nothing is left on any host.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC
from fixtures.golden import golden
from hosts.cluster import Cluster, make_key
from hosts.runs import LoginShell
from steelyard import __version__
from steelyard.run.environment import hash_package

pytestmark = pytest.mark.process

SMOKE = ("--size", "smoke", "--accelerator", "cpu", "--nodes", "2")
SCORE = ("llama2-7b-mmlu", *SMOKE)
TRAIN = ("llama1-7b-openwebtext", *SMOKE)
SYSTEM_PYTHON = "/usr/bin/python3"
INSTALL = f"-m pip install steelyard=={__version__}"


def make_node2_table(**keys: str) -> str:
    """Return the table of node2 for the site file, as TOML."""
    return "\n".join(
        ["[host.node2]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    )


def make_node2_path_table(*folders: Path) -> str:
    """Return a table for the site file that sets PYTHONPATH on node2."""
    return make_node2_table(prologue=f"export PYTHONPATH={':'.join(map(str, folders))}")


def test_an_unreachable_host_is_refused(cluster: Cluster, runs: LoginShell) -> None:
    cluster.cut_link("node2")
    line = runs.run_refused(*SCORE)
    assert line.startswith(golden("host-node-2-the-agent-did-3"))
    assert line.endswith(golden("it-does-not-answer-see-that"))


@pytest.fixture
def unknown_key(cluster: Cluster) -> Iterator[None]:
    """The login host does not know the key of node2."""
    known = cluster.known_hosts.read_text()
    cluster.known_hosts.write_text(
        "".join(line for line in known.splitlines(True) if not line.startswith("node2,"))
    )
    yield
    cluster.known_hosts.write_text(known)


@pytest.fixture
def other_key(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """The login host knows another key of node2."""
    known = cluster.known_hosts.read_text()
    others = [line for line in known.splitlines(True) if not line.startswith("node2,")]
    cluster.known_hosts.write_text("".join([*others, f"node2 {make_key(tmp_path / 'other.key')}"]))
    yield
    cluster.known_hosts.write_text(known)


@pytest.mark.parametrize("key", ["unknown_key", "other_key"])
def test_a_host_with_an_unknown_key_is_refused(
    runs: LoginShell, key: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(key)
    assert runs.run_refused(*SCORE) == (golden("host-node-2-the-agent-did-2"))


@pytest.fixture
def no_user_key(cluster: Cluster) -> Iterator[None]:
    """node2 accepts another key than the user's."""
    path = cluster.folder / "node2.sshd_config"
    before = path.read_text()
    path.write_text(
        before.replace(f"{cluster.folder}/user.key.pub", f"{cluster.folder}/node1.key.pub")
    )
    with cluster.clock_offset("node2", 0):  # restarts sshd, which then reads its configuration
        yield
        path.write_text(before)


@pytest.mark.usefixtures("no_user_key")
def test_a_host_that_does_not_take_the_users_key(runs: LoginShell) -> None:
    line = runs.run_refused(*SCORE)
    assert line.startswith(golden("host-node-2-the-agent-did"))
    assert line.endswith(golden("ssh-has-no-key-that-it"))


# Keys of the site file, options of the run, and beginning and end of the error line.
REFUSED_SITES: dict[str, tuple[dict[str, Any], tuple[str, ...], str, str]] = {
    "a name that leads nowhere": (
        {"hosts": ["node1", "nowhere"]},
        (),
        (
            "host nowhere: the agent did not start (exit code 255): ssh: Could not resolve hostname"
            " nowhere: "
        ),
        "; the name cannot be resolved; see hosts in the site file",
    ),
    "no such Python": (
        {"more": make_node2_table(python="/no/such/python")},
        (),
        "host node2: the agent did not start (exit code 127): ",
        "; no such Python there; name one with python = in the site file",
    ),
    "a Python without steelyard": (
        {"more": make_node2_table(python=SYSTEM_PYTHON, prologue="unset PYTHONPATH")},
        (),
        "host node2: the agent did not start (exit code 1): ",
        f"; that Python has no steelyard; install it there: {SYSTEM_PYTHON} {INSTALL}",
    ),
    "a Python without what steelyard needs": (
        {"more": make_node2_table(python=SYSTEM_PYTHON)},
        (),
        "host node2: the agent did not start (exit code 1): ModuleNotFoundError: No module named ",
        (
            f"; that Python lacks a package that steelyard needs; install it there: {SYSTEM_PYTHON}"
            f" {INSTALL}"
        ),
    ),
    "a prologue that fails": (
        {
            "more": make_node2_table(
                prologue="module() { echo no module $2 >&2; exit 4; }; module load cuda"
            )
        },
        (),
        "host node2: the agent did not start (exit code 4): no module cuda",
        "no module cuda",
    ),
    "an interface that is not there": (
        {"interface": "ib0"},
        (),
        "host node1: no interface 'ib0'; there are: ",
        "eth0",
    ),
    "more devices than a host has": (
        {},
        ("--devices", "99"),
        "--devices 99: ranks share the cpu of host node1; allowed: 1 to ",
        "",
    ),
    "more hosts than there are": (
        {},
        ("--nodes", "3"),
        "--nodes 3: the site file names 2 host(s); allowed: 1 to 2",
        "",
    ),
    "two names of one machine": (
        {"hosts": ["node1", "10.213.0.1"]},
        (),
        "hosts node1 and 10.213.0.1 are one machine (node1); name it once",
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED_SITES)
def test_a_wrong_site_file_is_refused(runs: LoginShell, name: str) -> None:
    site, options, begin, end = REFUSED_SITES[name]
    runs.write_site(**site)
    line = runs.run_refused(*SCORE, *options)
    assert (line[: len(begin)], line[len(line) - len(end) :]) == (begin, end)


def copy_package_with_change(folder: Path, name: str, old: str, new: str) -> Path:
    """Copy this package into a folder with the first `old` in one of its files replaced by `new`;
    return the folder.
    """
    shutil.copytree(
        SRC / "steelyard", folder / "steelyard", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = folder / "steelyard" / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    return folder


def test_a_host_with_changed_package_files_is_refused(runs: LoginShell, tmp_path: Path) -> None:
    copy = copy_package_with_change(tmp_path / "copy", "errors.py", '"""', '"""And ')
    runs.write_site(make_node2_path_table(copy))
    assert (
        runs.run_refused(*SCORE) == f"host node2 has another steelyard {__version__} (files"
        f" {hash_package(copy / 'steelyard')}, here {hash_package()}): copy this one: rsync -a"
        f" --delete {SRC}/steelyard/ node2:{copy}/steelyard/"
    )


def test_a_host_with_another_package_version_is_refused(runs: LoginShell, tmp_path: Path) -> None:
    runs.write_site(
        make_node2_path_table(
            copy_package_with_change(tmp_path / "copy", "__init__.py", __version__, "0.0.1")
        )
    )
    assert runs.run_refused(*SCORE) == (
        golden("host-node-2-has-steelyard-0", __version__, sys.executable, INSTALL)
    )


@pytest.mark.parametrize("old", ["    needs: list[str]", "    lacking: list[str]"])
def test_a_host_with_other_messages_is_refused(runs: LoginShell, tmp_path: Path, old: str) -> None:
    """One side does not understand what the other writes: the agent an `open` message, the parent a
    `hello` message.
    """
    new = old.replace(": ", "_now: ", 1)
    copy = copy_package_with_change(tmp_path / "copy", "run/messages.py", old, new)
    if "lacking" in old:
        path = copy / "steelyard" / "run" / "host.py"
        path.write_text(path.read_text().replace("lacking=", "lacking_now="))
    runs.write_site(make_node2_path_table(copy))
    line = runs.run_refused(*SCORE)
    assert line.startswith("host node2: the agent did not start")
    assert f"steelyard {__version__} does not understand a message: " in line
    assert line.endswith(golden("another-steelyard-is-there-install-this", sys.executable, INSTALL))


def test_a_host_with_another_numpy_is_refused(runs: LoginShell, tmp_path: Path) -> None:
    info = tmp_path / "other" / "numpy-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9\n")
    runs.write_site(make_node2_path_table(info.parent, SRC))
    line = runs.run_refused(*SCORE)
    assert line.startswith(golden("host-node-2-has-numpy-9"))
    assert line.endswith("; install the same version on all hosts of a run")


def test_data_missing_on_one_host_is_refused(
    cluster: Cluster, runs: LoginShell, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with cluster.hide_folder("node2", data):
        (data / "questions.csv").touch()
        line = runs.run_refused(*SCORE, "--data", data / "questions.csv")
    assert line.startswith(f"host node2: --data '{data}/questions.csv' does not exist there; ")


def test_a_checkpoint_folder_that_is_not_shared_is_refused(
    cluster: Cluster, runs: LoginShell
) -> None:
    runs.out.mkdir()
    with cluster.hide_folder("node2", runs.out):
        line = runs.run_refused(*TRAIN, "--checkpoint-every", "3")
    assert line == golden("host-node-2-out-is-another", runs.out)
