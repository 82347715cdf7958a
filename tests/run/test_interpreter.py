"""Tests of workers in another Python: what is checked before a run starts, and what the record
stores about it.
"""

import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC, Shell
from fixtures.golden import golden
from steelyard import __version__
from steelyard.case.request import split_engine_settings
from steelyard.engine import engine_rows
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.host import Host, is_scrubbed
from steelyard.run.messages import OpenMessage

CORPUS = "llama1-7b-openwebtext"


def write_fake_python(folder: Path, text: str) -> str:
    """Write an executable shell script named `python` and return its path."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def write_python_that_answers(folder: Path, **changes: Any) -> str:
    """Write a fake Python that describes itself as JSON, with these facts changed, and return its
    path.
    """
    facts = {
        "python": "3.12.1",
        "packages": {"numpy": "2.0"},
        "version": __version__,
        "lacking": [],
    }
    return write_fake_python(
        folder, f"echo '{json.dumps({**facts, 'package': environment.hash_package(), **changes})}'"
    )


def refusal_of_python(path: str) -> str:
    """Return the one-line error with which the Python at this path is refused."""
    with pytest.raises(RequestError) as caught:
        environment.inspect_interpreter(path, ["paddle"], os.environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.process
def test_python_with_the_same_steelyard_is_accepted(tmp_path: Path) -> None:
    interpreter = environment.inspect_interpreter(
        write_python_that_answers(tmp_path), ["paddle"], os.environ
    )
    assert (interpreter.python, interpreter.packages) == ("3.12.1", {"numpy": "2.0"})


@pytest.mark.process
def test_this_python_looks_the_same_from_outside_and_inside() -> None:
    interpreter = environment.inspect_interpreter(
        sys.executable,
        ["json"],
        {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert interpreter == environment.describe_this_interpreter(["json"])
    assert interpreter.python == platform.python_version()


@pytest.mark.process
def test_python_without_the_same_steelyard_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "python")
    setting = f"engine.python '{path}'"
    install = f"{path} -m pip install steelyard=={__version__}"
    assert refusal_of_python(path) == golden("cannot-be-started-no-such-file", setting)
    error = refusal_of_python(
        write_fake_python(tmp_path, "echo 'No module named steelyard' >&2; exit 3")
    )
    assert error == golden("ended-with-exit-code-3-no", setting, install)
    assert refusal_of_python(write_fake_python(tmp_path, "echo hello")) == golden(
        "has-another-steelyard-install-this-one", setting, install
    )
    error = refusal_of_python(write_python_that_answers(tmp_path, version="0.0.1"))
    assert (
        error
        == f"{setting} has steelyard 0.0.1, here is {__version__}; install this version there:"
        f" {install}"
    )
    error = refusal_of_python(write_python_that_answers(tmp_path, package="0123"))
    package_hash = environment.hash_package()
    assert (
        error == f"{setting} has another steelyard {__version__} (files 0123, here {package_hash});"
        " install this one there"
    )
    assert refusal_of_python(write_python_that_answers(tmp_path, lacking=["paddle"])) == golden(
        "has-no-paddle-and-the-engine", setting
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the module search path; packages that a test writes there can be
    imported.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_package(folder: Path, name: str, source: str) -> None:
    """Write a package whose `__init__.py` holds this source, with an empty submodule `part`."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)
    (folder / name / "part.py").write_text("")


def test_missing_submodule_counts_as_lacking(packages: Path) -> None:
    write_package(packages, "whole_package", "")
    assert environment.find_missing_modules(
        ["json", "whole_package.part", "no_such_package.part"]
    ) == ["no_such_package.part"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "raise MemoryError",
            (
                "importing it ran out of memory (MemoryError); free memory, or raise its limit"
                " (ulimit -v), then run again"
            ),
        ),
        (
            "raise ImportError('libx.so: failed to map segment from shared object')",
            (
                "importing it ran out of memory (libx.so: failed to map segment from shared"
                " object); free memory, or raise its limit (ulimit -v), then run again"
            ),
        ),
        (
            "raise ImportError('libx.so: undefined symbol: f')",
            "it cannot be imported (libx.so: undefined symbol: f); install it again",
        ),
    ],
)
def test_package_that_fails_to_import_is_not_reported_as_missing(
    packages: Path, source: str, said: str
) -> None:
    write_package(packages, "broken_package", source)
    needs = ("broken_package.part",)
    for look in (
        lambda: environment.find_missing_modules(needs),
        replace(engine_rows.TORCH, needs=needs).find_missing_module,
    ):
        with pytest.raises(RequestError) as caught:
            look()
        assert str(caught.value) == f"broken_package is installed, but {said}"


@pytest.mark.process
def test_hello_of_a_host_reports_a_failing_import(packages: Path) -> None:
    write_package(packages, "starved_package", "raise MemoryError")
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
        "needs": ["starved_package.part"],
        "paths": [],
    }
    hello = Host(OpenMessage.model_validate(fields)).make_hello()
    assert str(hello.problem).startswith(golden("starved_package-is-installed-but-importing-it"))


@pytest.mark.process
def test_python_that_runs_out_of_memory_is_refused(tmp_path: Path) -> None:
    path = write_fake_python(tmp_path, "echo MemoryError >&2; exit 1")
    expected = (
        f"engine.python '{path}' ran out of memory: MemoryError; free memory, or raise its limit"
        " (ulimit -v), then run again"
    )
    assert refusal_of_python(path) == expected


@pytest.mark.process
def test_python_whose_package_fails_to_import_is_refused(tmp_path: Path) -> None:
    write_package(tmp_path, "starved_package", "raise MemoryError")
    with pytest.raises(RequestError) as caught:
        environment.inspect_interpreter(
            sys.executable,
            ["starved_package.part"],
            {**os.environ, "PYTHONPATH": f"{tmp_path}:{SRC}"},
        )
    assert (
        str(caught.value)
        == f"engine.python {sys.executable!r}: starved_package is installed, but importing it ran"
        " out of memory (MemoryError); free memory, or raise its limit (ulimit -v), then run"
        " again"
    )


@pytest.mark.process
def test_python_that_does_not_answer_in_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "INSPECT_S", 0.2)
    path = write_fake_python(tmp_path, "exec sleep 60")
    assert refusal_of_python(path) == golden("engine-python-does-not-answer-within", path)


def test_engine_settings_are_split_from_case_settings() -> None:
    settings, others = split_engine_settings(["tune.compile=false", "engine.python=/a/python"])
    assert (settings.python, others) == ("/a/python", ["tune.compile=false"])
    assert split_engine_settings([])[0].python is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.pyton=x", "--set: no key 'engine.pyton'; did you mean 'engine.python'?"),
        (
            "engine.python",
            (
                "--set 'engine.python' is not of the form key=value, such as"
                " engine.python=venv/bin/python"
            ),
        ),
        ("engine.python=", "--set engine.python: String should have at least 1 character"),
        *(
            (
                f"engine.endpoint={address}",
                f"--set engine.endpoint: {address!r} is no address with a host and a port from 1"
                " to 65535, such as http://127.0.0.1:8000/v1",
            )
            for address in (
                *("http://127.0.0.1:99999/v1", "http://host:0/v1", "http://host:x/v1"),
                *("http://[::1/v1", "http:///v1", "http://:80/v1"),
            )
        ),
    ],
)
def test_wrong_engine_settings_are_refused(setting: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        split_engine_settings([setting])
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:65535/v1", "https://host/v1", "http://[::1]:18102/v1"]
)
def test_addresses_of_servers_are_taken(address: str) -> None:
    assert split_engine_settings([f"engine.endpoint={address}"])[0].endpoint == address


def test_paddle_launcher_variables_are_not_inherited() -> None:
    assert all(map(is_scrubbed, ("PADDLE_TRAINER_ID", "PADDLE_MASTER", "PADDLE_DISTRI_BACKEND")))


def test_a_run_in_another_python(shell: Shell, tmp_path: Path) -> None:
    """A script that starts this Python counts as another one. The record holds its version but not
    its path.
    """
    command = ("run", CORPUS, "--size", "smoke", "--accelerator", "cpu", "--steps", "2")
    refused = shell(*command, "--set", f"engine.python={tmp_path / 'none'}", "--out", shell.out)
    assert refused.code == 2
    assert f"engine.python '{tmp_path / 'none'}' cannot be started" in refused.err
    path = write_fake_python(tmp_path, f'exec {sys.executable} "$@"')
    result = shell(*command, "--set", f"engine.python={path}", "--out", shell.out)
    assert result.code == 0, result.err
    (record,) = shell.records()
    software = record["environment"]["software"]
    assert software["python"] == software["agent_python"] == platform.python_version()
    assert software["packages"] == environment.list_package_versions()
    assert path not in json.dumps(record)
