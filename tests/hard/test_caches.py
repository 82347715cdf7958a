"""Tests of the caches for compiled code: nothing is loaded from a cache that another user owns or
can write.
"""

import os
import stat
from pathlib import Path

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.host import Host
from steelyard.run.messages import OpenMessage

CACHE_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def make_open_message(**changes: object) -> OpenMessage:
    """Return the open message of a run on one CPU device, with these fields changed."""
    fields = {
        "token": "t" * 32,
        "mark": "m",
        "accelerator": "cpu",
        "devices": 1,
        "matmul": "fp32",
        "interface": None,
    }
    fields |= {
        "peer": None,
        "environment": {},
        "variables": {},
        "needs": [],
        "paths": [],
        "silence_s": 60.0,
    }
    return OpenMessage.model_validate(fields | changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's cache folder of steelyard, in a folder of this test; it does not exist
    yet.
    """
    for name in CACHE_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "steelyard"


def test_workers_get_private_cache_folders(cache: Path) -> None:
    variables = Host(make_open_message()).make_worker_environment()
    for name, folder in CACHE_FOLDERS.items():
        assert variables[name] == str(cache / folder)
        assert stat.S_IMODE((cache / folder).stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_caches_are_reused_across_runs(cache: Path) -> None:
    first = environment.make_cache_folders(os.environ)
    (cache / "inductor" / "kept").write_text("")
    assert environment.make_cache_folders(os.environ) == first
    assert (cache / "inductor" / "kept").exists()


def test_site_and_tune_may_name_other_cache_folders(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # restored after the test: the agent adds the site's variables to this process's environment
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    site_folder = str(tmp_path / "site")
    variables = Host(
        make_open_message(
            environment={"TRITON_CACHE_DIR": site_folder},
            variables={"TORCHINDUCTOR_CACHE_DIR": "tuned"},
        )
    ).make_worker_environment()
    assert (variables["TRITON_CACHE_DIR"], variables["TORCHINDUCTOR_CACHE_DIR"]) == (
        site_folder,
        "tuned",
    )


@pytest.mark.parametrize("planted", ["", "inductor", "triton"])
def test_cache_of_another_user_is_refused(cache: Path, planted: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    (cache / planted).mkdir(parents=True)
    os.chown(cache / planted, 12345, 12345)
    with pytest.raises(RequestError, match=r"belongs to user 12345.*XDG_CACHE_HOME") as refused:
        environment.make_cache_folders(os.environ)
    assert "\n" not in str(refused.value)
    assert "belongs to user 12345" in str(Host(make_open_message()).problem)


def test_cache_that_is_a_link_is_refused(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (cache / "triton").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="is a link"):
        environment.make_cache_folders(os.environ)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_cache_that_others_can_write_is_refused(cache: Path, mode: int) -> None:
    (cache / "inductor").mkdir(parents=True)
    cache.chmod(0o700)
    (cache / "inductor").chmod(mode)
    with pytest.raises(RequestError, match="can be written by other users"):
        environment.make_cache_folders(os.environ)


@pytest.mark.process
def test_hello_reports_why_a_cache_is_refused(cache: Path, attacks: Attacks) -> None:
    """The hello arrives with the reason, before any device was looked for."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    hello = Host(make_open_message()).make_hello()
    assert (
        hello.problem
        == f"the cache {str(cache)!r} can be written by other users: other users could change what"
        " is in it; remove it, or set XDG_CACHE_HOME to a folder of yours"
    )
    assert hello.devices == []
    attacks.add(
        "cache that other users can write",
        1,
        "`zip() argument 2 is longer`",
        "refused, the folder named",
    )


def test_caches_fall_back_to_the_runs_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert environment.make_cache_folders({"XDG_CACHE_HOME": str(tmp_path / "file")}) == {}
    assert environment.name_run_cache_folders(tmp_path) == {
        name: str(tmp_path / "cache" / folder) for name, folder in CACHE_FOLDERS.items()
    }


@pytest.mark.full
def test_run_works_with_an_unwritable_home(shell: Shell) -> None:
    result = shell(
        *SMOKE, "--passes", "val", "--out", shell.out, HOME="/dev/null", XDG_CACHE_HOME=""
    )
    assert result.code == 0, result.err
