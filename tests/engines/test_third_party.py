"""An engine of another package, from its entry point to its record: the example of
docs/engines.md.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import CASE, Shell

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "plain_engine"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell with the example package installed."""
    new_shell = Shell(tmp_path, (PACKAGE,))
    yield new_shell
    new_shell.clean()


def test_the_example_is_short() -> None:
    lines = [
        line
        for path in PACKAGE.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
        for line in path.open()
    ]
    assert len(lines) <= 105


@pytest.mark.full
def test_the_example_conforms_and_is_recorded(shell: Shell) -> None:
    cache = {"XDG_CACHE_HOME": str(shell.folder / "cache")}
    done = shell("conform", "plain", "--json", **cache)
    assert done.code == 0, done.out
    assert {row["case"] for row in done.json()["rows"]} == {CASE, "aquila2-34b-lambada"}
    done = shell(
        "run",
        CASE,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--engine",
        "plain",
        "--out",
        shell.out,
        **cache,
    )
    assert done.code == 0, done.err
    [record] = shell.records()
    assert (record["status"], record["engine"]["name"], record["engine"]["conforms"]) == (
        "valid",
        "plain",
        True,
    )
    assert record["engine"]["details"] == {"parameters": record["engine"]["details"]["parameters"]}


@pytest.mark.full
def test_replicas_share_the_work_of_the_example_engine(shell: Shell) -> None:
    run = (
        "run",
        CASE,
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--engine",
        "plain",
        "--devices",
        "2",
    )
    done = shell(*run, "--out", shell.out, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    [record] = shell.records()
    assert (record["status"], str(record["plan"]["dp"])) == ("valid", "2")
