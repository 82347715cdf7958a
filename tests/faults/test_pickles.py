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
from faults.scenes import Elsewhere, Scene
from fixtures.attacks import Attacks
from fixtures.commands import wait_for
from fixtures.sockets import listening
from hosts.host import network_of

PROGRAM = Path(planting.__file__)
OPTIONS = {LOCAL: ("--devices", "2"), SSH: ("--nodes", "2")}


def test_the_pickle_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(planting.Evil(str(tmp_path / "canary"))))
    assert (tmp_path / "canary").exists()


def ports(scene: Scene) -> dict[str, list[str]]:
    """Return the TCP addresses that the run's processes listen on, by host; this host is the empty
    name.
    """
    if not isinstance(scene.stage, Elsewhere):
        pids, names = [one.pid for one in scene.stage.shell.processes()], {}
    else:
        pids, names = (
            scene.stage.runs.processes(),
            {network_of(k.pid): name for name, k in scene.cluster.keepers.items()},
        )
    found: dict[str, list[str]] = {}
    for pid in pids:
        for kind, address, port in listening(pid):
            assert kind == "tcp"
            found.setdefault(names.get(network_of(pid), ""), []).append(f"{address}:{port}")
    return found


def stores(scene: Scene) -> list[str]:
    """Return the paths of the run's FileStores."""
    return [str(path) for path in scene.stage.temporary.glob("steelyard-*/store")]


def plant(scene: Scene, canary: Path) -> list[tuple[str, int]]:
    """Plant the pickle in every store and port, from the port's own host; return how many times for
    each.
    """
    sent = []
    files = stores(scene)  # first: the run may end after a stranger has talked to a rank
    for host, places in {**({"": files} if files else {}), **_after(files, ports(scene))}.items():
        command = [sys.executable, str(PROGRAM), str(canary), *places]
        if host:
            done = scene.cluster.run(host, command)
        else:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        sent += [
            (place, int(times))
            for place, _, times in (line.rpartition(" ") for line in done.stdout.splitlines())
        ]
    return sent


def _after(files: list[str], found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the targets by host, with the store files first on this host."""
    return {host: [*([] if host else files), *places] for host, places in found.items()}


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
def test_none_is_loaded(
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
    assert scene.reached(), scene.ended(10).err
    assert wait_for(lambda: stores(scene) or ports(scene), 30)  # the other rank may be slower
    sent = plant(scene, canary)
    scene.mark.with_suffix(".go").touch()
    done = scene.ended(90)
    assert {"port" if ":" in place else "file" for place, _ in sent} >= kinds, sent
    assert all(times for _, times in sent), sent
    assert not canary.exists()
    assert done.code in (0, 1), done.err
    assert "Traceback" not in done.err
    assert len(scene.records()) == 1
    attacks.add(
        f"pickles into stores and ports: {scene.where}, {phase}",
        len(sent),
        "loaded by the rendezvous",
        "none loaded",
    )
