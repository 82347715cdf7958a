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
from steelyard.engine import engine_rows as engine_rows
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.host import Host, is_scrubbed
from steelyard.run.messages import OpenMessage

CORPUS = "llama1-7b-openwebtext"


def script(folder: Path, text: str) -> str:
    """Write an executable shell script named `python` and return its path."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def answer(folder: Path, **other: Any) -> str:
    """Write a fake Python that describes itself as JSON, with these facts changed, and return its
    path.
    """
    told = {"python": "3.12.1", "packages": {"numpy": "2.0"}, "version": __version__, "lacking": []}
    return script(
        folder, f"echo '{json.dumps({**told, 'package': environment.hash_package(), **other})}'"
    )


def refusal(path: str) -> str:
    """Return the one-line error with which the Python at this path is refused."""
    with pytest.raises(RequestError) as caught:
        environment.inspect_interpreter(path, ["paddle"], os.environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.process
def test_one_that_fits(tmp_path: Path) -> None:
    found = environment.inspect_interpreter(answer(tmp_path), ["paddle"], os.environ)
    assert (found.python, found.packages) == ("3.12.1", {"numpy": "2.0"})


@pytest.mark.process
def test_this_one_is_seen_from_outside_as_from_inside() -> None:
    found = environment.inspect_interpreter(
        sys.executable,
        ["json"],
        {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert found == environment.describe_this_interpreter(["json"])
    assert found.python == platform.python_version()


@pytest.mark.process
def test_those_that_do_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "python")
    named = f"engine.python '{path}'"
    install = f"{path} -m pip install steelyard=={__version__}"
    assert refusal(path) == golden("cannot-be-started-no-such-file", named)
    said = refusal(script(tmp_path, "echo 'No module named steelyard' >&2; exit 3"))
    assert said == golden("ended-with-exit-code-3-no", named, install)
    assert refusal(script(tmp_path, "echo hello")) == golden(
        "has-another-steelyard-install-this-one", named, install
    )
    said = refusal(answer(tmp_path, version="0.0.1"))
    assert (
        said == f"{named} has steelyard 0.0.1, here is {__version__}; install this version there:"
        f" {install}"
    )
    said = refusal(answer(tmp_path, package="0123"))
    here = environment.hash_package()
    assert (
        said
        == f"{named} has another steelyard {__version__} (files 0123, here {here}); install this"
        " one there"
    )
    assert refusal(answer(tmp_path, lacking=["paddle"])) == golden(
        "has-no-paddle-and-the-engine", named
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the module search path; packages that a test writes there can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def package(folder: Path, name: str, source: str) -> None:
    """Write a package whose `__init__.py` holds this source, with an empty submodule `part`."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)
    (folder / name / "part.py").write_text("")


def test_a_part_of_a_package_that_is_not_there_is_lacking(packages: Path) -> None:
    package(packages, "whole_package", "")
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
def test_a_package_that_cannot_be_imported_is_not_told_as_missing(
    packages: Path, source: str, said: str
) -> None:
    package(packages, "broken_package", source)
    needs = ("broken_package.part",)
    for look in (
        lambda: environment.find_missing_modules(needs),
        replace(engine_rows.TORCH, needs=needs).find_missing_module,
    ):
        with pytest.raises(RequestError) as caught:
            look()
        assert str(caught.value) == f"broken_package is installed, but {said}"


@pytest.mark.process
def test_a_host_says_so(packages: Path) -> None:
    package(packages, "starved_package", "raise MemoryError")
    asked = {
        "token": "t" * 32,
        "mark": "m",
        "accelerator": "cpu",
        "devices": 1,
        "matmul": "fp32",
        "interface": None,
    }
    asked |= {
        "peer": None,
        "environment": {},
        "variables": {},
        "needs": ["starved_package.part"],
        "paths": [],
    }
    hello = Host(OpenMessage.model_validate(asked)).make_hello()
    assert str(hello.problem).startswith(golden("starved_package-is-installed-but-importing-it"))


@pytest.mark.process
def test_another_python_that_ran_out_of_memory(tmp_path: Path) -> None:
    path = script(tmp_path, "echo MemoryError >&2; exit 1")
    said = (
        f"engine.python '{path}' ran out of memory: MemoryError; free memory, or raise its limit"
        " (ulimit -v), then run again"
    )
    assert refusal(path) == said


@pytest.mark.process
def test_another_python_whose_package_cannot_be_imported(tmp_path: Path) -> None:
    package(tmp_path, "starved_package", "raise MemoryError")
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
def test_one_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "INSPECT_S", 0.2)
    path = script(tmp_path, "exec sleep 60")
    assert refusal(path) == golden("engine-python-does-not-answer-within", path)


def test_settings_of_an_engine_are_no_settings_of_a_case() -> None:
    found, others = split_engine_settings(["tune.compile=false", "engine.python=/a/python"])
    assert (found.python, others) == ("/a/python", ["tune.compile=false"])
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
    ],
)
def test_settings_that_are_wrong(setting: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        split_engine_settings([setting])
    assert str(caught.value) == said


def test_a_launchers_words_to_paddle_are_not_inherited() -> None:
    assert all(map(is_scrubbed, ("PADDLE_TRAINER_ID", "PADDLE_MASTER", "PADDLE_DISTRI_BACKEND")))


def test_a_run_in_another_python(shell: Shell, tmp_path: Path) -> None:
    """A script that starts this Python counts as another one. The record holds its version but not
    its path.
    """
    words = ("run", CORPUS, "--size", "smoke", "--accelerator", "cpu", "--steps", "2")
    refused = shell(*words, "--set", f"engine.python={tmp_path / 'none'}", "--out", shell.out)
    assert refused.code == 2
    assert f"engine.python '{tmp_path / 'none'}' cannot be started" in refused.err
    path = script(tmp_path, f'exec {sys.executable} "$@"')
    done = shell(*words, "--set", f"engine.python={path}", "--out", shell.out)
    assert done.code == 0, done.err
    (record,) = shell.records()
    software = record["environment"]["software"]
    assert software["python"] == software["agent_python"] == platform.python_version()
    assert software["packages"] == environment.list_package_versions()
    assert path not in json.dumps(record)
