"""Faults around a run: another run on its devices, a queue in which it waits, an allocation whose
salloc is dead.
"""

import signal
import time
from collections.abc import Callable

import pytest

from faults import deeds
from faults.faults import CHECKED, END_S, INT, KILL, LOCAL, SLURM, SSH
from faults.scenes import Scene, read
from faults.table import NO_RECORD, REFUSED, Seen, Table
from fixtures.commands import wait_for
from fixtures.golden import golden
from hosts.cluster import kill

LONE = ("--accelerator", "lone")
TWO = ("--accelerator", "cpu", "--nodes", "2")
long = pytest.mark.long


@pytest.mark.parametrize(
    "scene,options,host",
    [
        pytest.param(LOCAL, ("--devices", "2"), "localhost", id=LOCAL, marks=pytest.mark.full),
        pytest.param(SSH, ("--nodes", "2"), "node1", id=SSH, marks=long),
        pytest.param(SLURM, ("--nodes", "2"), "node1", id=SLURM, marks=long),
    ],
    indirect=["scene"],
)
def test_two_runs_on_the_same_devices(
    scene: Scene, options: tuple[str, ...], host: str, table: Table
) -> None:
    """The second run is refused before it has started anything, and the first continues."""
    scene.start("1", "pass", "wait", "train", *LONE, *options)
    assert scene.reached(), scene.ended(10).err
    began = time.monotonic()
    done = scene.again(*LONE, *options)
    after_s = time.monotonic() - began
    assert (done.code, done.out) == (2, "")
    assert done.lines[-1].startswith(golden("error-host-lone-lone-0-is", host))
    assert not list((scene.stage.folder / "other").glob("*"))
    assert scene.command.poll() is None
    scene.command.send_signal(signal.SIGINT)
    assert scene.ended(END_S).code == 1
    assert wait_for(lambda: not scene.left(), CHECKED), scene.left()
    table.rows.append(
        Seen(
            "two runs on the same devices",
            "preflight",
            scene.where,
            after_s,
            END_S,
            REFUSED,
            "none",
            NO_RECORD,
        )
    )
    assert after_s <= END_S


@long
@pytest.mark.parametrize("scene", [SLURM], indirect=True)
@pytest.mark.parametrize(
    "what,deed,code",
    [
        ("Ctrl-C", deeds.command(INT), 1),
        ("Ctrl-C twice", deeds.command(INT, INT), 1),
        ("parent: SIGKILL", deeds.command(KILL), -KILL),
    ],
)
def test_waiting_in_the_queue(
    scene: Scene, table: Table, what: str, deed: Callable[[Scene], object], code: int
) -> None:
    busy = scene.slurm(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300"
    )
    assert wait_for(lambda: scene.slurm.job_state(busy) == "RUNNING", 20)
    scene.start("1", "pass", "wait", "train", *TWO)
    assert wait_for(lambda: len(scene.jobs()) == 2, 30)
    began = time.monotonic()
    deed(scene)
    done = scene.ended(END_S)
    assert wait_for(lambda: scene.jobs() == [busy] and not scene.stage.left(), END_S), (
        scene.jobs(),
        scene.stage.left(),
    )
    after_s = time.monotonic() - began
    assert done.code == code
    assert "Traceback" not in done.err
    assert scene.records() == []
    table.rows.append(Seen(what, "queue", scene.where, after_s, END_S, "no run", "none", NO_RECORD))
    assert after_s <= END_S


@long
@pytest.mark.parametrize("scene", [SLURM], indirect=True)
def test_salloc_killed(scene: Scene) -> None:
    """The run keeps its hosts and continues; at its end it releases them itself, since salloc
    cannot any more.
    """
    scene.start("1", "data", "wait", "score", *TWO)
    assert scene.reached(), scene.ended(10).err
    kill(scene.started_by_command("salloc"))
    scene.command.send_signal(signal.SIGINT)
    assert scene.ended(END_S).code == 1
    (path,) = scene.records()
    assert read(path)["reasons"][0]["code"] == "interrupted"
    assert wait_for(lambda: not scene.left(), CHECKED), scene.left()
