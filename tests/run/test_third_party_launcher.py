"""Tests of a launcher from another package, which is one function and one row."""

import hashlib
import sys
from pathlib import Path

import pytest

from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden

pytestmark = pytest.mark.process

PACKAGE = Path(__file__).parent.parent / "fixtures" / "packages" / "shell_launcher"


def test_run_with_a_launcher_from_another_package(tmp_path: Path) -> None:
    shell = Shell(tmp_path, (PACKAGE,))
    (tmp_path / "site.toml").write_text(
        f'launcher = "shell"\nhosts = ["attic"]\npython = "{sys.executable}"\n'
    )
    result = shell(*SMOKE, "--out", shell.out, "--site", "site.toml")
    assert result.code == 0, result.err
    (record,) = shell.records()
    sha256 = hashlib.sha256((tmp_path / "site.toml").read_bytes()).hexdigest()
    assert record["site"] == {"file": "site.toml", "file_sha256": sha256}
    assert record["plan"]["launcher"] == "shell"
    assert record["providers"] == {"launcher": "shell-launcher 1.0"}
    assert [host["name"] for host in record["hosts"]] == ["attic"]
    assert {rank["host"] for rank in record["ranks"]} == {"attic"}
    assert shell.wait_until_ended(2)


def test_error_for_an_unknown_launcher_names_the_third_partys(tmp_path: Path) -> None:
    result = Shell(tmp_path, (PACKAGE,))(*SMOKE, "--launcher", "rocket")
    assert (result.code, result.lines) == (2, [golden("error-launcher-rocket-is-not-known")])
