"""Tests of the identity of an engine: every change of what its Python can import changes it, and
nothing else does.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.installs import (
    MODULE,
    WHEEL,
    install_editable,
    install_wheel,
    make_environment,
)
from steelyard.run import engine_identity, environment, installed_distributions
from steelyard.run.engine_identity import EngineIdentity, IdentityLimits, identify


@pytest.fixture
def search_path(tmp_path: Path) -> list[Path]:
    """The module search path of a small environment below `tmp_path`."""
    return make_environment(tmp_path)


def hash_code(search_path: list[Path], *modules: str) -> str:
    """Return the hash of the engine `MODULE`, or of these modules, on a module search path."""
    identity = identify(modules or (MODULE,), [str(folder) for folder in search_path])
    assert identity.hash is not None, identity.problem
    assert identity.problem is None
    return identity.hash


def upgrade_dependency(folder: Path) -> None:
    """Install another version of the dependency with the same files."""
    shutil.rmtree(folder / "site/dep-2.0.dist-info")
    install_wheel(folder / "site", "dep", "2.1", {"dep/__init__.py": b"rate = 1\n"})


def install_new_distribution(folder: Path) -> None:
    """Install a distribution that has metadata alone."""
    install_wheel(folder / "more", "new", "1.0", {})


def write(path: str, text: str) -> Callable[[Path], None]:
    """Return a change of the environment that writes a file, with the folders around it."""

    def change(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "module of the engine": write("site/mine/engine.py", "class Mine: fast = True\n"),
    "data of the engine": write("site/mine/kernel.cu", "// two\n"),
    "new file in the engine": write("site/mine/patch.bin", "x"),
    "data of the engine's wheel beside it": write("site/mine_tables/sizes.json", "[2]"),
    "shared library": write("site/_mine_native.so", "\x7fELF two"),
    "dependency, as many bytes": write("site/dep/__init__.py", "rate = 2\n"),
    "upgraded dependency": upgrade_dependency,
    "new module in a dependency": write("site/dep/patch.py", ""),
    "RECORD of a dependency": write("site/dep-2.0.dist-info/RECORD", "dep/notes.txt,sha256=x,1\n"),
    "entry points of a dependency": write("site/dep-2.0.dist-info/entry_points.txt", "[a]\nb=c\n"),
    "new distribution": install_new_distribution,
    "module of no distribution": write("site/loose.py", "one = 2\n"),
    "module before the engine": write("site/mine.py", ""),
    "part of a namespace package": write("more/shared/second.py", "part = 3\n"),
    "new part of a namespace package": write("more/shared/deep/third.py", ""),
    ".pth": write("site/hooks.pth", "import other\n"),
    "new .pth": write("more/new.pth", "import loose\n"),
    "sitecustomize": write("more/sitecustomize.py", "import loose\n"),
    "sitecustomize as a package": write("site/sitecustomize/__init__.py", ""),
    "usercustomize": write("more/usercustomize.py", "import loose\n"),
    "bytecode without source": write("more/compiled.pyc", "x"),
    "hidden data of the engine": write("site/mine/.answers.json", "{}"),
    "source beside bytecode": write("site/dep/__pycache__/hidden.py", "rate = 3\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_code_changes_the_identity(
    tmp_path: Path, search_path: list[Path], change: Callable[[Path], None]
) -> None:
    before = hash_code(search_path)
    assert hash_code(search_path) == before
    change(tmp_path)
    assert hash_code(search_path) != before


def touch_all(folder: Path) -> None:
    """Give every file another modification time."""
    for path in folder.rglob("*"):
        os.utime(path, ns=(1, 1))


def remove_installer(folder: Path) -> None:
    """Remove the file that names the program that installed a wheel, as another one would."""
    info = folder / "site/dep-2.0.dist-info"
    (info / "INSTALLER").unlink()
    lines = (info / "RECORD").read_text().splitlines()
    kept = [line for line in reversed(lines) if "INSTALLER" not in line]
    (info / "RECORD").write_text(
        "\n".join([*kept, "../../bin/dep,sha256=x,1", "dep/__pycache__/__init__.pyc,,"])
    )


OTHER_CHANGES: dict[str, Callable[[Path], None]] = {
    "times": touch_all,
    "bytecode": write("site/mine/__pycache__/engine.cpython-311.pyc", "x"),
    "bytecode of a dependency": write("site/dep/__pycache__/__init__.cpython-311.pyc", "x"),
    "hidden file of a dependency": write("site/dep/.core.py.swp", "x"),
    "hidden folder": write("more/.git/hooks/commit.py", "x"),
    "file that is no code": write("more/notes/readme.txt", "still no code\n"),
    "records": write("more/records/run.json", "{}"),
    "code that no import reaches": write("more/python3.11/site-packages/x.py", ""),
    "installer": remove_installer,
}


@pytest.mark.parametrize("change", OTHER_CHANGES.values(), ids=OTHER_CHANGES)
def test_other_changes_keep_the_identity(
    tmp_path: Path, search_path: list[Path], change: Callable[[Path], None]
) -> None:
    before = hash_code(search_path)
    change(tmp_path)
    assert hash_code(search_path) == before


def test_moved_environment_keeps_its_identity(tmp_path: Path, search_path: list[Path]) -> None:
    shutil.copytree(tmp_path / "site", tmp_path / "elsewhere/site")
    shutil.copytree(tmp_path / "more", tmp_path / "elsewhere/more")
    moved = [tmp_path / "elsewhere" / folder.name for folder in search_path]
    assert hash_code(moved) == hash_code(search_path)


def test_order_of_the_search_path_counts_and_repeated_entries_do_not(
    tmp_path: Path, search_path: list[Path]
) -> None:
    before = hash_code(search_path)
    assert hash_code(search_path[::-1]) != before
    (tmp_path / "link").symlink_to(search_path[0])
    repeated = [*search_path, tmp_path / "link", search_path[0], tmp_path / "missing"]
    assert hash_code(repeated) == before
    archive = tmp_path / "code.zip"
    archive.write_bytes(b"PK one")
    with_archive = hash_code([*search_path, archive])
    assert with_archive != before
    archive.write_bytes(b"PK two")
    assert hash_code([*search_path, archive]) != with_archive


def test_linked_folders_count_and_loops_end(tmp_path: Path, search_path: list[Path]) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "code.py").write_text("one = 1\n")
    (project / "loop").symlink_to(project)
    (search_path[1] / "linked").symlink_to(project)
    (search_path[1] / "broken.py").symlink_to(tmp_path / "missing")
    before = hash_code(search_path)
    (project / "code.py").write_text("one = 2\n")
    assert hash_code(search_path) != before


def test_counts_are_those_of_importable_files_and_the_engine(search_path: list[Path]) -> None:
    """Counted are six files of the wheel with its METADATA, one of the dependency, and five others;
    `dep/notes.txt` and `notes/readme.txt` are not.
    """
    texts = ["rate = 1\n", "one = 1\n", "import loose\n", "part = 1\n", "part = 2\n", ""]
    metadata = (search_path[0] / "mine-1.0.dist-info/METADATA").read_bytes()
    size_bytes = sum(map(len, [*WHEEL.values(), metadata, *texts]))
    identity = identify([MODULE], [str(folder) for folder in search_path])
    assert (identity.files, identity.size_bytes) == (12, size_bytes)


def test_large_library_of_a_wheel_counts_by_size(
    search_path: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RECORD has its hash. Libraries of the engine, or of no wheel, count by content."""
    monkeypatch.setattr(engine_identity, "LARGE_BYTES", 4)
    site = search_path[0]
    install_wheel(site, "big", "1.0", {"big/lib.so.1": b"large 1"})
    (site / "big/more.so").write_bytes(b"large 1")
    before = hash_code(search_path)
    (site / "big/lib.so.1").write_bytes(b"large 2")
    assert hash_code(search_path) == before
    for path in ("big/lib.so.1", "big/more.so", "_mine_native.so"):
        content = (site / path).read_bytes()
        (site / path).write_bytes(content + b"!" if path == "big/lib.so.1" else content[::-1])
        assert hash_code(search_path) != before, path
        (site / path).write_bytes(content)
    assert hash_code(search_path) == before


def test_engine_in_a_namespace_package_counts_without_its_neighbours(tmp_path: Path) -> None:
    """Data beside the engine's own package, in the same namespace, is not part of it."""
    for path in ("company/mine/__init__.py", "company/mine/data.bin", "company/other/data.bin"):
        write(path, "1")(tmp_path)
    before = hash_code([tmp_path], "company.mine.engine")
    write("company/other/data.bin", "2")(tmp_path)
    assert hash_code([tmp_path], "company.mine.engine") == before
    write("company/mine/data.bin", "2")(tmp_path)
    assert hash_code([tmp_path], "company.mine.engine") != before


class ProjectFinder:
    """An import hook that finds the package `hooked` in a project, as editable installs have it."""

    def __init__(self, project: Path) -> None:
        self.project = project

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where the package is, or None for another module."""
        if name != "hooked":
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.project / "hooked")]
        return spec


@pytest.mark.parametrize(
    ("top_level", "changed", "counts"),
    [
        ("hooked", "hooked/code.py", True),
        ("hooked", "tests/test_code.py", False),
        ("", "hooked/code.py", True),
        ("", "tests/test_code.py", True),
        ("unknown", "hooked/code.py", True),
    ],
)
def test_editable_install_counts_by_content(
    tmp_path: Path,
    search_path: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    top_level: str,
    changed: str,
    counts: bool,
) -> None:
    project = tmp_path / "a project"
    for path in ("hooked/code.py", "hooked/data.bin", "tests/test_code.py"):
        write(path, "1")(project)
    install_editable(search_path[0], "hooked", project, top_level)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, ProjectFinder(project)])
    before = hash_code(search_path)
    write(changed, "2")(project)
    assert (hash_code(search_path) != before) is counts
    before = hash_code(search_path)
    write("hooked/data.bin", "2")(project)
    assert hash_code(search_path) == before


def test_every_file_of_an_editable_engine_counts(
    tmp_path: Path, search_path: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    write("hooked/data.bin", "1")(project)
    install_editable(search_path[0], "hooked", project, "hooked")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, ProjectFinder(project)])
    before = hash_code(search_path, "hooked.engine")
    write("hooked/data.bin", "2")(project)
    assert hash_code(search_path, "hooked.engine") != before


def test_editable_install_on_the_search_path_counts_once(
    tmp_path: Path, search_path: list[Path]
) -> None:
    """Its `.pth` names the folder; the project around it, with its environment, is not read."""
    project = tmp_path / "project"
    write("src/code.py", "1")(project)
    info = install_wheel(
        search_path[0], "code", "1", {"__editable__.code.pth": os.fsencode(project / "src")}
    )
    table = {"dir_info": {"editable": True}, "url": project.as_uri()}
    (info / "direct_url.json").write_text(json.dumps(table))
    path = [*search_path, project / "src"]
    before = hash_code(path)
    write("tests/test_code.py", "")(project)
    assert hash_code(path) == before
    write("src/code.py", "2")(project)
    assert hash_code(path) != before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"dir_info": 3}', "[" * 100_000])
def test_damaged_metadata_is_no_error(search_path: list[Path], text: str) -> None:
    before = hash_code(search_path)
    (search_path[0] / "dep-2.0.dist-info/direct_url.json").write_text(text)
    assert hash_code(search_path) == before
    (search_path[0] / "dep-2.0.dist-info/RECORD").write_bytes(b"\xff,,,\n\n,\n" + text.encode())
    assert hash_code(search_path) != before


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (IdentityLimits(files=11), "Python can import 12 files, more than 11"),
        (
            IdentityLimits(size_bytes=100),
            "the files that Python can import have 0 MiB, more than 0 MiB",
        ),
        (
            IdentityLimits(entries=3),
            "the folders that Python imports from have more than 3 entries, the last in ",
        ),
    ],
)
def test_beyond_a_limit_there_is_no_identity(
    search_path: list[Path], limits: IdentityLimits, problem: str
) -> None:
    identity = identify([MODULE], [str(folder) for folder in search_path], limits)
    assert identity.hash is None
    assert str(identity.problem).startswith(problem)


def test_huge_metadata_gives_no_identity(
    search_path: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_distributions, "MAX_METADATA_BYTES", 10)
    identity = identify([MODULE], [str(folder) for folder in search_path])
    assert identity == EngineIdentity(problem="metadata of a distribution is larger than 10 bytes")


def write_fake_python(folder: Path, text: str) -> str:
    """Write an executable shell script and return its path."""
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.process
def test_another_python_that_fails_has_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_problem(path: str) -> str | None:
        identity = environment.identify_engine(path, [MODULE], os.environ)
        assert identity.hash is None
        return identity.problem

    missing = str(tmp_path / "missing")
    assert find_problem(missing) == f"{missing!r} cannot be started: No such file or directory"
    failing = write_fake_python(tmp_path, "echo first >&2; echo last >&2; exit 3")
    assert find_problem(failing) == "reading the files ended with exit code 3: last"
    silent = write_fake_python(tmp_path, "exit 0")
    assert find_problem(silent) == f"{silent!r} gave no answer"
    monkeypatch.setattr(environment, "IDENTIFY_S", 0.1)
    slow = write_fake_python(tmp_path, "exec sleep 60")
    assert find_problem(slow) == "reading the files took more than 0.1 s"


@pytest.mark.process
def test_python_of_the_workers_answers_for_its_own_search_path(shell: Shell) -> None:
    """Modules on PYTHONPATH count, code that runs as Python starts may print, and what is written
    to `__pycache__` meanwhile does not count.
    """
    make_environment(shell.folder)
    write("site/sitecustomize.py", "print('a line')\n")(shell.folder)
    shell = Shell(shell.folder, (shell.folder / "site", shell.folder / "more"))
    variables = shell.env(PYTHONDONTWRITEBYTECODE="")
    before, again = (
        environment.identify_engine(sys.executable, [MODULE], variables) for _ in range(2)
    )
    assert (before.problem, again) == (None, before)
    assert list(shell.folder.rglob("__pycache__"))
    write("more/shared/second.py", "part = 3\n")(shell.folder)
    assert environment.identify_engine(sys.executable, [MODULE], variables).hash != before.hash


def test_archive_counts_also_if_only_a_folder_in_it_is_on_the_search_path(
    tmp_path: Path, search_path: list[Path]
) -> None:
    archive = tmp_path / "code.zip"
    archive.write_bytes(b"one")
    in_archive = [*search_path, archive / "sub"]
    before = hash_code(in_archive)
    assert before == hash_code([*search_path, archive])
    archive.write_bytes(b"two")
    assert hash_code(in_archive) != before


def test_links_to_folders_give_one_identity_in_any_order(tmp_path: Path) -> None:
    """Folders list their entries in the order in which they were made, on some file systems."""
    hashes = set()
    for number, names in enumerate((("a", "b"), ("b", "a"))):
        site = tmp_path / str(number) / "site"
        (site / "real").mkdir(parents=True)
        (site / "real" / "one.py").write_text("one = 1\n")
        for name in names:
            (site / name).symlink_to(site / "real")
        hashes.add(hash_code([site]))
    assert len(hashes) == 1


def test_link_to_itself_is_noted_and_not_followed(tmp_path: Path, search_path: list[Path]) -> None:
    before = hash_code(search_path)
    (search_path[0] / "loop").symlink_to(search_path[0] / "loop")
    assert hash_code(search_path) != before
