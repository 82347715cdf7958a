"""The table in docs/faults.md contains the faults of the list, each within its bound."""

from pathlib import Path

from faults.faults import FAULTS, PHASES, QUICK
from faults.table import Seen, Table, cells

DOCS = Path(__file__).parents[2] / "docs"
BESIDE = {
    *(
        ("two runs on the same devices", "preflight", where)
        for where in ("local 1x2", "ssh 2x1", "slurm 2x1")
    ),
    *((what, "queue", "slurm 2x1") for what in ("Ctrl-C", "Ctrl-C twice", "parent: SIGKILL")),
}


def test_every_fault_was_seen_or_is_named_as_not_seen() -> None:
    seen = {row[:3]: row for row in cells(DOCS / "faults.md")}
    every = {(one.what, one.phase, one.where) for one in FAULTS} | BESIDE
    lacking = {
        one
        for one in every
        if f"- {one[2]}, {one[1]}: {one[0]}\n" in (DOCS / "faults.md").read_text()
    }
    assert set(seen) | lacking == every
    assert not set(seen) & lacking
    assert len(seen) >= 100
    for one in [one for one in FAULTS if (one.what, one.phase, one.where) in seen]:
        row = seen[one.what, one.phase, one.where]
        assert row[4] == f"{one.bound_s:.0f} s"
        assert one.code is None or row[5] == f"`{one.code}`"
    for row in seen.values():
        after_s, bound_s = (float(cell.removesuffix(" s")) for cell in row[3:5])
        assert after_s <= bound_s
        assert row[6] == "none"


def test_every_reason_is_explained() -> None:
    for code in {one.code for one in FAULTS if one.code is not None}:
        assert f"`{code}`" in (DOCS / "faults.md").read_text().partition("## What was seen")[0], (
            code
        )
        assert f"| `{code}` |" in (DOCS / "metrics.md").read_text(), code


def test_every_phase_has_every_fault() -> None:
    """The signals go to each rank and to the agent; the faults marked quick are those of QUICK, and
    names are unique.
    """
    found = {(one.what, one.phase) for one in FAULTS if one.where == "local 1x2"}
    for phase in PHASES:
        for who in ("rank 0", "rank 1", "agent"):
            assert {(f"{who}: SIGKILL", phase), (f"{who}: SIGSTOP", phase)} <= found
    assert {one.name for one in FAULTS if one.quick} == QUICK
    assert len({one.name for one in FAULTS}) == len(FAULTS)


def test_a_table_goes_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "faults.md"
    path.write_text("before\n<!-- what was seen -->\nold\n<!-- end -->\nafter\n")
    there = Seen("a", "pass", "ssh 2x1", 1.26, 15.0, "`killed`", "none", "whole")
    here = Seen("b", "join", "local 1x2", 0.0, 15.0, "`killed`", "none", "whole")
    Table([there, here]).write(path)
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert cells(path) == [
        ("b", "join", "local 1x2", "0.0 s", "15 s", "`killed`", "none", "whole"),
        ("a", "pass", "ssh 2x1", "1.3 s", "15 s", "`killed`", "none", "whole"),
    ]
