"""Faults in every phase, on one host and on several: each is detected in time, and leaves its own
reason, one record that verifies, and nothing else.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from faults.faults import FAULTS, SETTLE_S, Fault
from faults.scenes import COMPILER_CACHE, Scene, read_record
from faults.table import NO_RECORD, REFUSED, WHOLE, FaultResult, FaultTable
from fixtures.commands import CommandResult, wait_for
from steelyard.metrics.verify import verify_with_remarks

DISK_SIZES = {"out": "2500k", "tmp": "16k"}


def make_options(fault: Fault) -> list[str]:
    """Return the options of `steelyard run` for a fault."""
    launcher, _, size = fault.where.partition(" ")
    nodes, devices = size.split("x")
    arguments = ["--accelerator", "cpu", "--devices", devices, *fault.options]
    arguments += ["--nodes", nodes] if launcher != "local" else []
    return (
        [*arguments, "--set", "tune.compile=true"]
        if fault.phase.startswith("compile")
        else arguments
    )


@contextmanager
def small_disk(scene: Scene, folder_name: str | None) -> Iterator[None]:
    """Mount a small file system over the folder for records (`out`), or over the temporary files of
    the last host (`tmp`), while the block runs.

    Temporary files must be gone at its end. None mounts nothing.
    """
    if folder_name is None:
        yield
        return
    folder = {"out": scene.stage.out, "tmp": scene.stage.temporary}[folder_name]
    folder.mkdir(exist_ok=True)
    run_local = partial(subprocess.run, capture_output=True, text=True, check=False)
    run = (
        run_local if scene.cluster is None else partial(scene.cluster.run, scene.cluster.hosts[-1])
    )
    assert (
        run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZES[folder_name]}", "none", str(folder)]
        ).returncode
        == 0
    )
    try:
        yield
        listing = run(
            ["find", str(folder), "-mindepth", "1", "-not", "-name", f"{COMPILER_CACHE}*"]
        )
        assert folder_name == "out" or listing.stdout == ""
    finally:
        assert run(["umount", str(folder)]).returncode == 0


def make_params() -> list[object]:
    """Return the test parameters of all faults; those outside the quick part are marked `long`."""
    mark = {True: pytest.mark.full, False: pytest.mark.long}
    return [
        pytest.param(fault.where, fault, id=fault.name, marks=mark[fault.quick]) for fault in FAULTS
    ]


@pytest.mark.parametrize("scene,fault", make_params(), indirect=["scene"])
def test_fault_is_detected_in_time_and_leaves_one_record(
    scene: Scene, fault: Fault, table: FaultTable
) -> None:
    with small_disk(scene, fault.disk):
        scene.start(fault.who, fault.phase, fault.act, fault.case, *make_options(fault))
        assert scene.wait_until_reached(), scene.wait_for_end(10).err
        began = time.monotonic()
        fault.action(scene)
        result = scene.wait_for_end(fault.bound_s + 60)
        after_s = time.monotonic() - began
        all_ended = wait_for(lambda: not scene.find_leftovers(), fault.left_s or SETTLE_S)
        left_s = time.monotonic() - began
        assert all_ended, scene.find_leftovers()
        assert result.code == fault.exit, result.err
        assert "Traceback" not in result.err, result.err
        record = check_record(scene, fault, result)
    seen_s = left_s if fault.exit < 0 else after_s  # a killed parent ends at once, its ranks later
    table.rows.append(
        FaultResult(
            fault.what,
            fault.phase,
            fault.where,
            seen_s,
            fault.bound_s,
            format_reason(fault, result),
            "none",
            record,
        )
    )
    assert seen_s <= fault.bound_s


def check_record(scene: Scene, fault: Fault, result: CommandResult) -> str:
    """Check the record of a fault, or that there is none, and return what the table says of it."""
    paths = scene.records()
    if fault.code is None:
        assert paths == []
        assert len(result.lines) <= 2, result.err
        return NO_RECORD
    (path,) = paths
    problems, remarks = verify_with_remarks(path)
    assert (problems, [text for text in remarks if "lacks" in text]) == ([], [])
    record = read_record(path)
    assert (record["status"], record["reasons"][0]["code"]) == (fault.status, fault.code), (
        record["reasons"],
        result.err,
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


def format_reason(fault: Fault, result: CommandResult) -> str:
    """Return what the table says of the reason: its code, or that the run was refused or never
    existed.
    """
    return (
        f"`{fault.code}`" if fault.code is not None else REFUSED if result.code == 2 else "no run"
    )
