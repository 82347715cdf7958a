"""Faults in every phase, on one host and on several: each is detected in time, and leaves its own
reason, one record that verifies, and nothing else.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from faults.faults import CHECKED, FAULTS, Fault
from faults.scenes import COMPILER_CACHE, Scene, read
from faults.table import NO_RECORD, REFUSED, WHOLE, Seen, Table
from fixtures.commands import Done, wait_for
from steelyard.metrics.verify import verify_record

DISKS = {"out": "2500k", "tmp": "16k"}


def options(fault: Fault) -> list[str]:
    """Return the options of `steelyard run` for a fault."""
    launcher, _, size = fault.where.partition(" ")
    nodes, devices = size.split("x")
    asked = ["--accelerator", "cpu", "--devices", devices, *fault.options]
    asked += ["--nodes", nodes] if launcher != "local" else []
    return [*asked, "--set", "tune.compile=true"] if fault.phase.startswith("compile") else asked


@contextmanager
def small_disk(scene: Scene, which: str | None) -> Iterator[None]:
    """Mount a small file system over the folder for records (`out`), or over the temporary files of
    the last host (`tmp`), while the block runs.

    Temporary files must be gone at its end. None mounts nothing.
    """
    if which is None:
        yield
        return
    folder = {"out": scene.stage.out, "tmp": scene.stage.temporary}[which]
    folder.mkdir(exist_ok=True)
    here = partial(subprocess.run, capture_output=True, text=True, check=False)
    run = here if scene.cluster is None else partial(scene.cluster.run, scene.cluster.hosts[-1])
    assert (
        run(["mount", "-t", "tmpfs", "-o", f"size={DISKS[which]}", "none", str(folder)]).returncode
        == 0
    )
    try:
        yield
        found = run(["find", str(folder), "-mindepth", "1", "-not", "-name", f"{COMPILER_CACHE}*"])
        assert which == "out" or found.stdout == ""
    finally:
        assert run(["umount", str(folder)]).returncode == 0


def params() -> list[object]:
    """Return the test parameters of all faults; those outside the quick part are marked `long`."""
    mark = {True: pytest.mark.full, False: pytest.mark.long}
    return [pytest.param(one.where, one, id=one.name, marks=mark[one.quick]) for one in FAULTS]


@pytest.mark.parametrize("scene,fault", params(), indirect=["scene"])
def test_fault(scene: Scene, fault: Fault, table: Table) -> None:
    with small_disk(scene, fault.disk):
        scene.start(fault.who, fault.phase, fault.act, fault.case, *options(fault))
        assert scene.reached(), scene.ended(10).err
        began = time.monotonic()
        fault.deed(scene)
        done = scene.ended(fault.bound_s + 60)
        after_s = time.monotonic() - began
        gone = wait_for(lambda: not scene.left(), fault.left_s or CHECKED)
        left_s = time.monotonic() - began
        assert gone, scene.left()
        assert done.code == fault.exit, done.err
        assert "Traceback" not in done.err, done.err
        record = made(scene, fault, done)
    seen_s = left_s if fault.exit < 0 else after_s  # a killed parent ends at once, its ranks later
    table.rows.append(
        Seen(
            fault.what,
            fault.phase,
            fault.where,
            seen_s,
            fault.bound_s,
            reason(fault, done),
            "none",
            record,
        )
    )
    assert seen_s <= fault.bound_s


def made(scene: Scene, fault: Fault, done: Done) -> str:
    """Check the record of a fault, or that there is none, and return what the table says of it."""
    paths = scene.records()
    if fault.code is None:
        assert paths == []
        assert len(done.lines) <= 2, done.err
        return NO_RECORD
    (path,) = paths
    assert verify_record(path) == []
    record = read(path)
    assert (record["status"], record["reasons"][0]["code"]) == (fault.status, fault.code), (
        record["reasons"],
        done.err,
    )
    assert path.stem.endswith("-unfinished") == (fault.code == "unfinished")
    if fault.code == "unfinished":  # --resume accepts such a record
        assert record["checkpoints"].startswith("checkpoints/")
    if fault.rank is not None:
        host = record["hosts"][fault.rank // record["plan"]["devices"]]["name"]
        assert (record["failure"]["rank"], record["failure"]["host"]) == (fault.rank, host), record[
            "failure"
        ]
    if fault.stacks:
        stacks = record["failure"]["stacks"]
        assert sorted(map(int, stacks)) == list(
            range(record["plan"]["nodes"] * record["plan"]["devices"])
        )
        for text in stacks.values():
            assert "(most recent call first):" in text
            assert "worker.py" in text
    return f"{WHOLE}, as unfinished" if fault.code == "unfinished" else WHOLE


def reason(fault: Fault, done: Done) -> str:
    """Return what the table says of the reason: its code, or that the run was refused or never
    existed.
    """
    return f"`{fault.code}`" if fault.code is not None else REFUSED if done.code == 2 else "no run"
