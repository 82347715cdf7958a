"""A stranger's pickle in every store and into every port that a run of two ranks opens: none is
loaded.
"""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from faults import planting
from faults.faults import LOCAL, SSH
from faults.scenes import ClusterStage, Scene
from fixtures.attacks import Attacks
from fixtures.commands import wait_for
from fixtures.sockets import find_listening_sockets
from hosts.host import network_of

PLANTING_PROGRAM = Path(planting.__file__)
OPTIONS = {LOCAL: ("--devices", "2"), SSH: ("--nodes", "2")}


def test_loading_the_pickle_creates_the_canary(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(planting.EvilPickle(str(tmp_path / "canary"))))
    assert (tmp_path / "canary").exists()


def find_ports(scene: Scene) -> dict[str, list[str]]:
    """Return the TCP addresses that the run's processes listen on, by host; this host is the empty
    name.
    """
    if not isinstance(scene.stage, ClusterStage):
        pids, names = [process.pid for process in scene.stage.shell.processes()], {}
    else:
        pids, names = (
            scene.stage.runs.processes(),
            {network_of(k.pid): name for name, k in scene.cluster.keepers.items()},
        )
    addresses: dict[str, list[str]] = {}
    for pid in pids:
        for kind, address, port in find_listening_sockets(pid):
            assert kind == "tcp"
            addresses.setdefault(names.get(network_of(pid), ""), []).append(f"{address}:{port}")
    return addresses


def find_stores(scene: Scene) -> list[str]:
    """Return the paths of the run's FileStores."""
    return [str(path) for path in scene.stage.temporary.glob("steelyard-*/store")]


def plant_pickles(scene: Scene, canary: Path) -> list[tuple[str, int]]:
    """Plant the pickle in every store and port, from the port's own host; return how many times for
    each.
    """
    sent = []
    files = find_stores(scene)  # first: the run may end after a stranger has talked to a rank
    for host, targets in {
        **({"": files} if files else {}),
        **_add_files(files, find_ports(scene)),
    }.items():
        command = [sys.executable, str(PLANTING_PROGRAM), str(canary), *targets]
        if host:
            result = scene.cluster.run(host, command)
        else:
            result = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=300
            )
        assert result.returncode == 0, result.stderr
        sent += [
            (target, int(times))
            for target, _, times in (line.rpartition(" ") for line in result.stdout.splitlines())
        ]
    return sent


def _add_files(files: list[str], addresses: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the targets by host, with the store files first on this host."""
    return {
        host: [*([] if host else files), *host_addresses]
        for host, host_addresses in addresses.items()
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("scene", "phase", "kinds"),
    [
        (LOCAL, "join", {"file"}),
        pytest.param(LOCAL, "pass", {"file", "port"}, marks=pytest.mark.long),
        pytest.param(SSH, "join", {"port"}, marks=pytest.mark.long),
        (SSH, "pass", {"port"}),
    ],
    indirect=["scene"],
)
def test_planted_pickles_are_not_loaded(
    scene: Scene, phase: str, kinds: set[str], tmp_path: Path, attacks: Attacks
) -> None:
    """In `join` one rank waits for the other; in `pass` all have met. The run itself may fail, with
    a record, because a stranger has overwritten what it needs.
    """
    canary = tmp_path / "canary"
    scene.start(
        "1",
        phase,
        "pause",
        "score",
        "--accelerator",
        "cpu",
        "--hang-after",
        "10",
        *OPTIONS[scene.where],
    )
    assert scene.wait_until_reached(), scene.wait_for_end(10).err
    assert wait_for(
        lambda: find_stores(scene) or find_ports(scene), 30
    )  # the other rank may be slower
    sent = plant_pickles(scene, canary)
    scene.mark.with_suffix(".go").touch()
    result = scene.wait_for_end(90)
    assert {"port" if ":" in target else "file" for target, _ in sent} >= kinds, sent
    assert all(times for _, times in sent), sent
    assert not canary.exists()
    assert result.code in (0, 1), result.err
    assert "Traceback" not in result.err
    assert len(scene.records()) == 1
    attacks.add(
        f"pickles into stores and ports: {scene.where}, {phase}",
        len(sent),
        "loaded by the rendezvous",
        "none loaded",
    )
