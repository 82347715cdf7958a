"""Ways in: a site file that lies in the working directory, variables that load code, files that never end."""

import os

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.records import published


def test_a_site_file_in_the_working_directory_runs_nothing(shell: Shell, attacks: Attacks) -> None:
    """It would have every process of the run import a module that leaves a mark."""
    mark, code = shell.folder / "mark", shell.folder / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()")
    (shell.folder / "site.toml").write_text(f'environment.PYTHONPATH = "{code}"')
    done = shell(*SMOKE, "--out", shell.out)
    assert done.code == 0, done.err
    assert "warning: site.toml in this folder is not used; to use it: --site site.toml" in done.lines
    assert not mark.exists()
    (record,) = shell.records()
    assert record["site"] == {}
    refused = shell(*SMOKE, "--out", shell.out, "--site", "site.toml")
    assert refused.code == 2
    assert refused.lines[-1].startswith(
        "error: --site 'site.toml': environment: 'PYTHONPATH' is not a variable that a site file may set; allowed: "
    )
    assert not mark.exists()
    attacks.add("site.toml in the working directory that sets PYTHONPATH", 1, "its code runs in every process", "not taken")


@pytest.mark.parametrize(
    "verb",
    [("verify",), ("history", "--json"), ("report",), ("verify", "--signers")],
    ids=["verify", "history", "report", "signers"],
)
@pytest.mark.parametrize("what", ["fifo", "device"])
def test_a_file_that_never_ends_is_refused(verb: tuple[str, ...], what: str, shell: Shell, attacks: Attacks) -> None:
    folder = shell.folder / "records"
    folder.mkdir()
    path = folder / "endless.json"
    os.mkfifo(path) if what == "fifo" else path.symlink_to("/dev/zero")
    record = published("lambada-smoke-closed-fp32-torch-a4264c79", shell.folder / "one")
    done = shell(*verb, *([path, record] if "--signers" in verb else [folder]))
    assert "not a regular file" in done.err + done.out
    assert "Traceback" not in done.err
    attacks.add(f"{what} named like a record, given to {' '.join(verb)}", 1, "hangs", "refused")
