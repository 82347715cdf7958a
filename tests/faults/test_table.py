"""The table in docs/faults.md contains the faults of the list, each within its bound."""

from pathlib import Path

from faults.faults import FAULTS, PHASES, QUICK
from faults.table import FaultResult, FaultTable, read_cells

DOCS = Path(__file__).parents[2] / "docs"
FAULTS_BESIDE = {
    *(
        ("two runs on the same devices", "preflight", where)
        for where in ("local 1x2", "ssh 2x1", "slurm 2x1")
    ),
    *((what, "queue", "slurm 2x1") for what in ("Ctrl-C", "Ctrl-C twice", "parent: SIGKILL")),
}


def test_every_fault_is_in_the_table_or_listed_as_untested() -> None:
    seen = {row[:3]: row for row in read_cells(DOCS / "faults.md")}
    all_faults = {(fault.what, fault.phase, fault.where) for fault in FAULTS} | FAULTS_BESIDE
    untested = {
        fault
        for fault in all_faults
        if f"- {fault[2]}, {fault[1]}: {fault[0]}\n" in (DOCS / "faults.md").read_text()
    }
    assert set(seen) | untested == all_faults
    assert not set(seen) & untested
    assert len(seen) >= 100
    for fault in [fault for fault in FAULTS if (fault.what, fault.phase, fault.where) in seen]:
        row = seen[fault.what, fault.phase, fault.where]
        assert row[4] == f"{fault.bound_s:.0f} s"
        assert fault.code is None or row[5] == f"`{fault.code}`"
    for row in seen.values():
        after_s, bound_s = (float(cell.removesuffix(" s")) for cell in row[3:5])
        assert after_s <= bound_s
        assert row[6] == "none"


def test_every_reason_is_explained() -> None:
    for code in {fault.code for fault in FAULTS if fault.code is not None}:
        assert f"`{code}`" in (DOCS / "faults.md").read_text().partition("## What was seen")[0], (
            code
        )
        assert f"| `{code}` |" in (DOCS / "metrics.md").read_text(), code


def test_every_phase_has_sigkill_and_sigstop_of_every_process() -> None:
    """The signals go to each rank and to the agent; the faults marked quick are those of QUICK, and
    names are unique.
    """
    local_faults = {(fault.what, fault.phase) for fault in FAULTS if fault.where == "local 1x2"}
    for phase in PHASES:
        for who in ("rank 0", "rank 1", "agent"):
            assert {(f"{who}: SIGKILL", phase), (f"{who}: SIGSTOP", phase)} <= local_faults
    assert {fault.name for fault in FAULTS if fault.quick} == QUICK
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_table_is_written_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "faults.md"
    path.write_text("before\n<!-- what was seen -->\nold\n<!-- end -->\nafter\n")
    ssh_result = FaultResult("a", "pass", "ssh 2x1", 1.26, 15.0, "`killed`", "none", "whole")
    local_result = FaultResult("b", "join", "local 1x2", 0.0, 15.0, "`killed`", "none", "whole")
    FaultTable([ssh_result, local_result]).write(path)
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert read_cells(path) == [
        ("b", "join", "local 1x2", "0.0 s", "15 s", "`killed`", "none", "whole"),
        ("a", "pass", "ssh 2x1", "1.3 s", "15 s", "`killed`", "none", "whole"),
    ]
