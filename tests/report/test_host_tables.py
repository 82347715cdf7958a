"""The sections of a page on hosts and ranks."""

from typing import Any

from fixtures.report import GIB, make_training_record
from steelyard.record.record import Record
from steelyard.report import run_details
from steelyard.report.document import Code, Table
from steelyard.report.host_tables import build_hosts_table, build_ranks_table
from steelyard.words import PageWords

EN = PageWords("en")


def make_host(name: str, *numbers: int, **clock: float) -> dict[str, Any]:
    """Return the facts of a host that runs the ranks `numbers`, with a device for each; `clock`
    gives its clock offset.
    """
    devices = [{"name": "chip", "uuid": None, "memory_bytes": 80 * GIB} for _ in numbers]
    return {"name": name, "ranks": list(numbers), "devices": devices, "cpu": "a CPU", **clock}


def make_readings(host_name: str, device: str, used_gib: int, joules: float) -> dict[str, Any]:
    """Return a reading a second for 1000 s of a device that uses constant memory and `joules` in
    all.
    """
    times = [float(second) for second in range(1001)]
    columns = {
        "t_s": times,
        "memory_bytes": [used_gib * GIB] * 1001,
        "energy_j": [joules * t / 1000 for t in times],
    }
    return {"device": device, "host": host_name, "period_s": 1.0, "columns": columns}


def make_run(**changes: Any) -> Record:
    """Return a training record of two hosts with two ranks each, whose devices have the same
    names.
    """
    devices = [("north", "cuda:0"), ("north", "cuda:1"), ("south", "cuda:0"), ("south", "cuda:1")]
    rank_facts = [
        {"rank": r, "host": host_name, "device": name, "all_reduce_bytes_per_s": 1e9 * (r + 1)}
        for r, (host_name, name) in enumerate(devices)
    ]
    base: dict[str, Any] = {
        "plan__nodes": 2,
        "plan__devices": 2,
        "hosts": [
            make_host("north", 0, 1, clock_offset_s=0.0, clock_uncertainty_s=0.0001),
            make_host("south", 2, 3, clock_offset_s=5.25, clock_uncertainty_s=0.0005),
        ],
        "ranks": rank_facts,
        "telemetry": [
            make_readings(host_name, name, 10 + r, 1000.0 * (r + 1))
            for r, (host_name, name) in enumerate(devices)
        ],
    }
    return make_training_record([[2.0] * 3] * 4, **(base | changes))


def list_cell_texts(blocks: list[Any]) -> list[list[str]]:
    """Return the texts of the cells of the only block, a table, by row."""
    (table,) = blocks
    assert isinstance(table, Table)
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_hosts_section() -> None:
    first, second = list_cell_texts(build_hosts_table(make_run(), EN))
    assert first[:5] == ["north", "0 – 1", "2x chip (80.0 GiB)", "a CPU", "0.000000 ± 0.000100"]
    assert second[:5] == ["south", "2 – 3", "2x chip (80.0 GiB)", "a CPU", "5.250000 ± 0.000500"]


def test_devices_of_the_same_name_are_distinguished_by_host() -> None:
    record = make_run()
    assert [row[1] for row in list_cell_texts(build_ranks_table(record, EN))] == [
        "north cuda:0",
        "north cuda:1",
        "south cuda:0",
        "south cuda:1",
    ]
    assert [row[-1] for row in list_cell_texts(build_ranks_table(record, EN))] == [
        "1.000",
        "2.000",
        "3.000",
        "4.000",
    ]
    # The devices of the four ranks use 1000, 2000, 3000 and 4000 J: 3 of 10 parts on host north.
    a, b = (
        float(row[6].replace(",", "")) for row in list_cell_texts(build_hosts_table(record, EN))
    )
    assert (round(a / (a + b), 6), round(b / (a + b), 6)) == (0.3, 0.7)
    energy = record.metrics["energy"].value
    assert energy is not None
    assert round(a + b, 3) == round(energy, 3)


def test_one_host_has_no_section() -> None:
    assert build_hosts_table(make_run(hosts=[make_host("localhost", 0, 1, 2, 3)]), EN) == []


def test_where_ranks_hung_is_on_the_page() -> None:
    failure = {"rank": None, "exit_code": None, "error": "nothing was heard", "stderr_tail": ""}
    failure |= {"stacks": {"1": "Thread 1: in all_reduce"}}
    blocks = run_details.build_run_details(make_run(failure=failure), 2, EN)
    assert Code("Thread 1: in all_reduce") in blocks


def test_ranks_that_are_not_consecutive_are_listed() -> None:
    record = make_run(hosts=[make_host("north", 0, 2), make_host("south", 1, 3)])
    assert [row[1] for row in list_cell_texts(build_hosts_table(record, EN))] == ["0, 2", "1, 3"]
