"""Tests of records from which evidence was deleted before everything was derived and sealed again:
they verify, with a remark on what is missing.

That no published record has such a remark is tested in test_forgeries.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.records import RUNS, SPECS, is_on_shipped_tables, rewrite_record
from steelyard.metrics import ceiling_rates, missing_evidence, verify
from steelyard.record import record

Change = Callable[[dict[str, Any]], None]

SCORED_ON_H200, TRAINED_ON_H200 = "c855c4f7", "2a651bf6"  # formulas version 4
SCORED_ON_CPU, IMPLAUSIBLE_ON_CPU = "f7343539", "fd558c53"  # formulas version 3
OF_VERSION_1_WITHOUT_CLOCKS = "be7b3028"


def copy_run(id_start: str, folder: Path) -> Path:
    """Copy the published record whose file name ends with this beginning of its id, and return the
    path of the copy.
    """
    [path] = [path for path in RUNS if path.stem.endswith(id_start)]
    return Path(shutil.copy(path, folder))


def describe_missing(what: str, version: int, exception: str = "") -> str:
    """Return the sentence on missing evidence: `what` with its place, first version, exception."""
    return golden("the-record-lacks-evidence", what, version, exception)


NO_LOAD = ", unless a host does not count its CPU time"
NO_TELEMETRY = ", unless an accelerator of another package reads none"
NO_MATMUL = ", unless a framework of another package times no matmul"


def test_published_spec_records_have_shipped_peaks() -> None:
    assert [ceiling_rates.list_spec_remarks(path) for path in SPECS] == [[]] * len(SPECS)


@pytest.mark.process
@pytest.mark.parametrize("division", ["closed", "open"])
def test_new_record_has_all_evidence(division: str, smoke: dict[str, Path]) -> None:
    assert record.read_record(smoke[division]).formulas == record.FORMULAS_VERSION
    assert verify.verify_with_remarks(smoke[division]) == ([], [])


def drop_asked_weights(table: dict[str, Any]) -> None:
    """Delete whether a checkpoint was named."""
    del table["asked_weights"]


def drop_borders(table: dict[str, Any]) -> None:
    """Delete when the node agent saw the passes begin and end, and the check on that."""
    for window in table["passes"]:
        for name in ("seen_start_s", "seen_end_s", "seen_within_s"):
            del window[name]


def drop_calibration(table: dict[str, Any]) -> None:
    """Delete where matmuls were timed."""
    for rank in table["ranks"]:
        del rank["calibration"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (drop_asked_weights, "which weights were asked for"),
        (drop_borders, "the times at which the node agent saw its passes"),
        (drop_calibration, "where its matmuls were timed"),
    ],
)
def test_evidence_of_new_records_is_remarked_on_when_it_is_deleted(
    change: Change, name: str, smoke: dict[str, Path], tmp_path: Path
) -> None:
    path = rewrite_record(Path(shutil.copy(smoke["closed"], tmp_path)), change)
    remarks = [remark for remark in verify.list_remarks(path) if is_on_shipped_tables(remark)]
    assert any(remark.startswith(f"the record lacks {name} (") for remark in remarks), remarks


def drop_load(table: dict[str, Any]) -> None:
    """Delete the readings of CPU load of every host."""
    for host in table["hosts"]:
        del host["load"]


def drop_hosts(table: dict[str, Any]) -> None:
    """Delete every host, and so its load."""
    table["hosts"] = []


def drop_telemetry(table: dict[str, Any]) -> None:
    """Delete all telemetry."""
    table["telemetry"] = []


def drop_clocks(table: dict[str, Any]) -> None:
    """Delete the clocks of every rank."""
    for rank in table["ranks"]:
        del rank["clocks"]


def drop_uptime(table: dict[str, Any]) -> None:
    """Delete the one clock that a preloaded library cannot change."""
    for rank in table["ranks"]:
        del rank["clocks"]["uptime"]


def drop_device_times(table: dict[str, Any]) -> None:
    """Delete the device's own time of every pass."""
    for window in table["passes"]:
        window["device_s"] = None


def drop_cpu_times(table: dict[str, Any]) -> None:
    """Delete the CPU time of every pass."""
    for window in table["passes"]:
        window["cpu_s"] = None


def drop_drawn(table: dict[str, Any]) -> None:
    """Delete the counts of the rows drawn."""
    del table["drawn"]


def drop_last_drawn(table: dict[str, Any]) -> None:
    """Delete the counts of the rows drawn for the last step of training."""
    table["drawn"]["train"].pop()


def drop_matmuls(table: dict[str, Any]) -> None:
    """Delete all measured rates of matmuls."""
    for rank in table["ranks"]:
        for name in [name for name in rank if name.startswith("matmul")]:
            del rank[name]


def drop_cpu_matmuls(table: dict[str, Any]) -> None:
    """Delete the rates of matmuls per second of CPU time, which a CPU's rate is judged by."""
    for rank in table["ranks"]:
        rank.pop("matmul_cpu_rates", None)
        del rank["matmul_flops_per_cpu_s"]


HOST_OF_H200, HOST_OF_CPU = (
    json.loads(next(path for path in RUNS if path.stem.endswith(end)).read_bytes())["hosts"][0][
        "name"
    ]
    for end in (SCORED_ON_H200, SCORED_ON_CPU)
)


@pytest.mark.parametrize(
    ("id_start", "change", "remarks"),
    [
        (
            SCORED_ON_H200,
            drop_load,
            [describe_missing(f"readings of CPU load (host {HOST_OF_H200})", 3, NO_LOAD)],
        ),
        (
            SCORED_ON_CPU,
            drop_load,
            [describe_missing(f"readings of CPU load (host {HOST_OF_CPU})", 3, NO_LOAD)],
        ),
        (
            SCORED_ON_CPU,
            drop_hosts,
            [describe_missing("readings of CPU load (rank 0)", 3, NO_LOAD)],
        ),
        (
            SCORED_ON_H200,
            drop_telemetry,
            [describe_missing(f"telemetry of its devices (host {HOST_OF_H200})", 2, NO_TELEMETRY)],
        ),
        (SCORED_ON_H200, drop_clocks, [describe_missing("the clocks of its ranks (rank 0)", 2)]),
        (SCORED_ON_H200, drop_uptime, [describe_missing("the clocks of its ranks (rank 0)", 2)]),
        (
            TRAINED_ON_H200,
            drop_device_times,
            [
                describe_missing(
                    "the device's own time of its passes (pass before on rank 0, pass train on"
                    " rank 0, pass after on rank 0)",
                    2,
                )
            ],
        ),
        (
            SCORED_ON_CPU,
            drop_cpu_times,
            [describe_missing("the CPU time of its passes (pass infer on rank 0)", 2)],
        ),
        (
            SCORED_ON_H200,
            drop_drawn,
            [describe_missing("counts of the rows drawn (pass infer)", 2)],
        ),
        (
            TRAINED_ON_H200,
            drop_drawn,
            [describe_missing("counts of the rows drawn (pass before, pass train, pass after)", 2)],
        ),
        (
            TRAINED_ON_H200,
            drop_last_drawn,
            [describe_missing("counts of the rows drawn (pass train)", 2)],
        ),
        (SCORED_ON_H200, drop_matmuls, [describe_missing("matmul rates (rank 0)", 2, NO_MATMUL)]),
        (
            SCORED_ON_CPU,
            drop_cpu_matmuls,
            [describe_missing("matmul rates (rank 0)", 2, NO_MATMUL)],
        ),
        # per CPU second is no limit where another device computes
        (SCORED_ON_H200, drop_cpu_matmuls, []),
        # a record of version 1 may rightly lack it
        (OF_VERSION_1_WITHOUT_CLOCKS, drop_matmuls, []),
        (SCORED_ON_H200, lambda table: None, []),
        (TRAINED_ON_H200, lambda table: None, []),
        (SCORED_ON_CPU, lambda table: None, []),
    ],
)
def test_stripped_record_verifies_with_a_remark(
    id_start: str, change: Change, remarks: list[str], tmp_path: Path
) -> None:
    path = rewrite_record(copy_run(id_start, tmp_path), change)
    assert verify.verify_record(path) == []
    assert [remark for remark in verify.list_remarks(path) if is_on_shipped_tables(remark)] == (
        remarks
    )


def reseal(path: Path, change: Change) -> Path:
    """Apply `change` to the JSON of a record and seal it again, with nothing derived anew."""
    contents = json.loads(path.read_bytes())
    change(contents)
    sealed = record.seal_record(record.Record.model_validate(contents))
    path.write_bytes(record.to_canonical_bytes(record.record_to_json(sealed)))
    return path


def drop_results(*names: str) -> Change:
    """Return a change that deletes the checks with these names."""

    def change(table: dict[str, Any]) -> None:
        table["checks"] = [check for check in table["checks"] if check["name"] not in names]

    return change


def drop_notes(table: dict[str, Any]) -> None:
    """Delete all notes."""
    table["notes"] = []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (drop_results("quiet"), "checks that follow from its samples (quiet)"),
        (
            drop_results("quiet", "alone", "plausible", "clocks_agree"),
            "checks that follow from its samples (plausible, clocks_agree, alone, 1 more)",
        ),
        (drop_notes, "notes that follow from its samples (note.slowdown)"),
    ],
)
def test_missing_checks_and_notes_are_remarked(change: Change, what: str, tmp_path: Path) -> None:
    path = reseal(copy_run(SCORED_ON_H200, tmp_path), change)
    assert (verify.verify_record(path), verify.list_remarks(path)) == (
        [],
        [describe_missing(what, 3)],
    )


def test_a_reason_does_not_vanish_with_its_evidence_unnoticed(tmp_path: Path) -> None:
    path = copy_run(IMPLAUSIBLE_ON_CPU, tmp_path)
    assert [reason.code for reason in record.read_record(path).reasons] == [
        "implausible",
        "interval",
    ]
    rewrite_record(path, drop_cpu_matmuls)
    assert [reason.code for reason in record.read_record(path).reasons] == ["interval"]
    assert verify.verify_record(path) == []
    assert describe_missing("matmul rates (rank 0)", 2, NO_MATMUL) in verify.list_remarks(path)


def test_slowed_clock_is_invalid_and_its_deletion_is_remarked(tmp_path: Path) -> None:
    def slow_clock(table: dict[str, Any]) -> None:
        table["ranks"][0]["clocks"]["uptime"] *= 2

    path = rewrite_record(copy_run(SCORED_ON_H200, tmp_path), slow_clock)
    assert record.read_record(path).status == "invalid"
    rewrite_record(path, drop_uptime)
    assert record.read_record(path).status == "valid"
    assert verify.list_remarks(path) == [describe_missing("the clocks of its ranks (rank 0)", 2)]


def test_stating_an_earlier_version_does_not_hide_missing_evidence(tmp_path: Path) -> None:
    def claim_version_1(table: dict[str, Any]) -> None:
        drop_clocks(table)
        del table["formulas"]

    path = rewrite_record(copy_run(SCORED_ON_H200, tmp_path), claim_version_1)
    assert record.read_record(path).formulas is None
    assert verify.verify_record(path) == []
    assert verify.list_remarks(path) == [describe_missing("the clocks of its ranks (rank 0)", 2)]


def strip_all(table: dict[str, Any]) -> None:
    """Delete evidence of every kind that is stored apart from checks and notes."""
    stored = (drop_load, drop_telemetry, drop_clocks, drop_device_times, drop_drawn, drop_matmuls)
    for change in stored:
        change(table)


def use_macos(table: dict[str, Any]) -> None:
    """Change the record as if the run was made on macOS, which has no /proc and fewer clocks."""
    drop_load(table)
    table["environment"]["software"]["os"] = "macOS-15.1-arm64-arm-64bit"
    table["ranks"][0]["clocks"] = {"monotonic": 1.0, "raw": 1.0}


def fail(table: dict[str, Any]) -> None:
    """Change the record as if the run had failed, with nothing measured."""
    strip_all(table)
    table["failure"] = {"rank": 0, "exit_code": 1, "error": "it broke", "stderr_tail": ""}
    table["reasons"] = [{"code": "failed", "text": "it broke"}]


def report_times(table: dict[str, Any]) -> None:
    """Change the record as if an external program had reported the times of the steps."""
    drop_drawn(table)
    drop_matmuls(table)
    drop_device_times(table)
    drop_cpu_times(table)
    table["clock"] = "reported"


def cut_by_steps(table: dict[str, Any]) -> None:
    """Change the record as if `--steps` had ended its passes early."""
    drop_drawn(table)
    table["scope"] |= {"kind": "window", "steps": len(table["samples"])}


@pytest.mark.parametrize("change", [use_macos, fail, report_times, cut_by_steps])
def test_run_that_rightly_lacks_evidence_is_not_remarked_on(change: Change, tmp_path: Path) -> None:
    path = rewrite_record(copy_run(SCORED_ON_H200, tmp_path), change)
    assert [remark for remark in verify.list_remarks(path) if is_on_shipped_tables(remark)] == []


def test_every_kind_of_stored_evidence_is_remarked_on_when_all_is_deleted(tmp_path: Path) -> None:
    path = rewrite_record(copy_run(SCORED_ON_H200, tmp_path), strip_all)
    remarks = verify.list_remarks(path)
    derived = ("checks that follow", "notes that follow", "the CPU time of")
    names = [
        row.name
        for row in missing_evidence.EVIDENCE
        if row.first_version < 5 and not row.name.startswith(derived)
    ]
    assert len(remarks) == len(names) == 6
    assert all(
        remark.startswith(f"the record lacks {name} (")
        for remark, name in zip(remarks, names, strict=True)
    )


def test_only_rank_0_of_an_external_program_is_asked_for_clocks(tmp_path: Path) -> None:
    """The program starts its other ranks itself."""
    run_record = record.read_record(copy_run(SCORED_ON_H200, tmp_path))
    with_clocks = run_record.ranks[0]
    without = with_clocks.model_copy(update={"rank": 1, "clocks": None})
    ranks = [with_clocks, without]
    for clock, gaps in (("reported", []), ("device", ["rank 1"])):
        changed = run_record.model_copy(update={"clock": clock, "ranks": ranks})
        judgement = verify._derive(changed)[1]
        assert missing_evidence._find_missing_rank_clocks(changed, judgement) == gaps
