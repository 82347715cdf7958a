"""Faults around a run: another run on its devices, a queue in which it waits, an allocation whose
salloc is dead.
"""

import signal
import time
from collections.abc import Callable

import pytest

from faults import deeds
from faults.faults import END_S, INT, KILL, LOCAL, SETTLE_S, SLURM, SSH
from faults.scenes import Scene, read_record
from faults.table import NO_RECORD, REFUSED, FaultResult, FaultTable
from fixtures.commands import wait_for
from fixtures.golden import golden
from hosts.cluster import kill_and_wait

LONE_OPTIONS = ("--accelerator", "lone")
TWO_NODES = ("--accelerator", "cpu", "--nodes", "2")
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
def test_a_second_run_on_the_same_devices_is_refused(
    scene: Scene, options: tuple[str, ...], host: str, table: FaultTable
) -> None:
    """The second run is refused before it has started anything, and the first continues."""
    scene.start("1", "pass", "wait", "train", *LONE_OPTIONS, *options)
    assert scene.wait_until_reached(), scene.wait_for_end(10).err
    began = time.monotonic()
    result = scene.run_second(*LONE_OPTIONS, *options)
    after_s = time.monotonic() - began
    assert (result.code, result.out) == (2, "")
    assert result.lines[-1].startswith(golden("error-host-lone-lone-0-is", host))
    assert not list((scene.stage.folder / "other").glob("*"))
    assert scene.command.poll() is None
    scene.command.send_signal(signal.SIGINT)
    assert scene.wait_for_end(END_S).code == 1
    assert wait_for(lambda: not scene.find_leftovers(), SETTLE_S), scene.find_leftovers()
    table.rows.append(
        FaultResult(
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
        ("Ctrl-C", deeds.signal_command(INT), 1),
        ("Ctrl-C twice", deeds.signal_command(INT, INT), 1),
        ("parent: SIGKILL", deeds.signal_command(KILL), -KILL),
    ],
)
def test_ending_a_run_that_waits_in_the_queue_cancels_its_job(
    scene: Scene, table: FaultTable, what: str, deed: Callable[[Scene], object], code: int
) -> None:
    running_job = scene.slurm(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300"
    )
    assert wait_for(lambda: scene.slurm.job_state(running_job) == "RUNNING", 20)
    scene.start("1", "pass", "wait", "train", *TWO_NODES)
    assert wait_for(lambda: len(scene.jobs()) == 2, 30)
    began = time.monotonic()
    deed(scene)
    result = scene.wait_for_end(END_S)
    assert wait_for(
        lambda: scene.jobs() == [running_job] and not scene.stage.find_leftovers(), END_S
    ), (scene.jobs(), scene.stage.find_leftovers())
    after_s = time.monotonic() - began
    assert result.code == code
    assert "Traceback" not in result.err
    assert scene.records() == []
    table.rows.append(
        FaultResult(what, "queue", scene.where, after_s, END_S, "no run", "none", NO_RECORD)
    )
    assert after_s <= END_S


@long
@pytest.mark.parametrize("scene", [SLURM], indirect=True)
def test_a_run_whose_salloc_was_killed_releases_its_hosts(scene: Scene) -> None:
    """The run keeps its hosts and continues; at its end it releases them itself, since salloc
    cannot any more.
    """
    scene.start("1", "data", "wait", "score", *TWO_NODES)
    assert scene.wait_until_reached(), scene.wait_for_end(10).err
    kill_and_wait(scene.find_children("salloc"))
    scene.command.send_signal(signal.SIGINT)
    assert scene.wait_for_end(END_S).code == 1
    (path,) = scene.records()
    assert read_record(path)["reasons"][0]["code"] == "interrupted"
    assert wait_for(lambda: not scene.find_leftovers(), SETTLE_S), scene.find_leftovers()
