"""Tests of records that cannot be written to their folder: they are saved in the temporary folder
or printed.
"""

import json
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.commands import SMOKE, Shell, wait_for, wait_for_result
from fixtures.golden import golden
from fixtures.records import copy_published_record
from steelyard import cli
from steelyard.errors import LostError
from steelyard.metrics import verify
from steelyard.record import record


@contextmanager
def file_size_limit(most_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process can write, inside a `with` block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> record.Record:
    """Return a sealed record; temporary files go to a folder of this test."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return record.seal_record(
        record.read_record(copy_published_record("mmlu-smoke-closed", tmp_path / "from"))
    )


def test_record_is_written_to_a_writable_folder(made: record.Record, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert record.read_record(record.write_or_rescue_record(made, tmp_path / "out")) == made
    assert list((tmp_path / "tmp").iterdir()) == []


def test_record_is_saved_in_the_temporary_folder(made: record.Record, tmp_path: Path) -> None:
    out = tmp_path / "gone"
    with pytest.raises(LostError) as caught:
        record.write_or_rescue_record(made, out)
    text, separator = str(caught.value), "; it is saved as "
    assert text.startswith(
        f"the record cannot be written to {str(out)!r}: No such file or"
        f" directory{separator}{tmp_path / 'tmp'}/"
    )
    assert verify.read_verified_record(Path(text.partition(separator)[2])) == made
    assert caught.value.unsaved is None


def test_record_is_printed_when_it_cannot_be_saved(
    made: record.Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "out").mkdir()

    def fail_to_write(**_: object) -> None:
        with file_size_limit(1000):
            record.write_or_rescue_record(made, tmp_path / "out")

    monkeypatch.setattr(cli, "app", fail_to_write)
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    printed, line = capsys.readouterr().err.splitlines()
    assert (exit_info.value.code, json.loads(printed)) == (1, record.record_to_json(made))
    expected = (
        f"error: the record cannot be written to {str(tmp_path / 'out')!r}: File too large; nor to"
        f" {str(tmp_path / 'tmp')!r}"
    )
    assert line == golden("file-too-large-it-stands-above", expected)


@pytest.mark.full
def test_record_is_saved_when_the_output_folder_vanishes(
    tmp_path: Path, faulty_package: Path
) -> None:
    shell = Shell(tmp_path, (faulty_package,))
    command = (*SMOKE, "--engine", "faulty", "--passes", "val", "--out", str(shell.out))
    process = shell.start(*command, FAULTY_STEP_S="0.5")
    try:
        assert wait_for(lambda: shell.out.is_dir() and any(shell.out.glob("*-unfinished.json")))
        shell.out.rename(tmp_path / "moved")
        result = wait_for_result(process)
    finally:
        shell.clean()
    assert result.code == 1
    line = next(
        line
        for line in result.err.splitlines()
        if line.startswith("error: the record cannot be written to ")
    )
    saved = Path(line.partition("it is saved as ")[2])
    assert json.loads(saved.read_bytes())["status"] == "valid"
