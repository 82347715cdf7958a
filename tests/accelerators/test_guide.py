"""Test docs/accelerators.md to the letter: the package it shows, written as shown, runs a case."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import CASE, Shell
from fixtures.golden import golden
from steelyard.accelerators.row import Accelerator, FrameworkDevice, TorchDevice

GUIDE = (Path(__file__).parents[2] / "docs" / "accelerators.md").read_text()


def read_guide_files() -> dict[str, str]:
    """Return the files that the guide shows, by name: a name in backquotes, followed by a code
    block.
    """
    return dict(
        re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Yield a command line with the guide's package on its path, with the metadata that pip would
    make from its pyproject.toml.
    """
    package = tmp_path / "package"
    package.mkdir()
    for name, text in read_guide_files().items():
        (package / name).write_text(text)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    command_line = Shell(tmp_path, (package,))
    yield command_line
    command_line.clean()


def test_the_guide_names_every_field_and_member() -> None:
    assert set(read_guide_files()) == {"abacus.py", "abacus_torch.py", "pyproject.toml"}
    for field in Accelerator.__dataclass_fields__:
        assert f"| `{field}` |" in GUIDE
    members = {
        name
        for protocol in (FrameworkDevice, TorchDevice)
        for name in vars(protocol)
        if not name.startswith("_")
    }
    for member in members:
        assert re.search(rf"`{member}(\(|`)", GUIDE), member
        assert re.search(rf"(def |    ){member}\b", read_guide_files()["abacus_torch.py"]), member


def test_the_package_of_the_guide_runs_a_case(shell: Shell) -> None:
    options = ("--size", "smoke", "--accelerator", "abacus", "--out", shell.out)
    site = shell.folder / "abacus.toml"
    site.write_text('[environment]\nABACUS_WIRE = "steel"\n')
    result = shell(
        "run",
        CASE,
        *options,
        "--site",
        site,
        "--set",
        "tune.env.ABACUS_FRAME=oak",
        ABACUS_BEADS="91",
    )
    assert result.code == 0, result.err
    (record,) = shell.records()
    assert record["status"] == "valid"
    hardware, software = record["environment"]["hardware"], record["environment"]["software"]
    assert (hardware["accelerator"], hardware["devices"][0]["name"]) == ("abacus", "Abacus 13")
    assert (hardware["peak"]["name"], hardware["peak"]["flops_per_s"]) == (
        "Abacus 13",
        {"fp32": 1e12},
    )
    assert record["metrics"]["mfu"]["value"] > 0
    abacus_variables = {
        name: value for name, value in software["variables"].items() if name.startswith("ABACUS_")
    }
    set_by_others = {"ABACUS_FRAME": "oak", "ABACUS_WIRE": "steel"}
    assert abacus_variables == {
        "ABACUS_BEADS": "91",
        "ABACUS_MODE": "fp32",
        "ABACUS_ORDER": "left",
        **set_by_others,
    }
    assert (software["driver"], software["abacus"], software["packages"]["abacus"]) == (
        "1.0",
        "1.0",
        "1.0",
    )
    (series,) = record["telemetry"]
    assert (series["device"], series["severity"]) == ("abacus:0", {"stuck_bead": "invalidates"})
    assert set(series["columns"]["beads_per_s"]) == {3.5}
    assert record["ranks"][0]["identity"]["multiprocessors"] == 13
    verified = shell("verify", shell.out)
    assert (verified.code, [line for line in verified.out.splitlines() if "remark:" in line]) == (
        0,
        [f"  remark: {golden('the-datasheet-peak-does-not-come', 'Abacus 13')}"],
    )
    listed = shell("list", "--json").json()["accelerators"]
    assert {"accelerator": "abacus", "index": 0, "device": "Abacus 13"}.items() <= listed[0].items()


@pytest.mark.full
def test_the_package_of_the_guide_refuses_precision_and_devices(shell: Shell) -> None:
    options = (
        "--size",
        "smoke",
        "--accelerator",
        "abacus",
        "--precision",
        "fp16",
        "--out",
        shell.out,
    )
    result = shell("run", CASE, *options)
    assert (result.code, result.lines) == (2, [golden("error-an-abacus-has-no-precision")])
    result = shell(
        "run",
        CASE,
        "--size",
        "smoke",
        "--accelerator",
        "abacus",
        "--devices",
        "2",
        "--out",
        shell.out,
    )
    assert result.lines == ["error: --devices 2: 1 abacus device(s) here; allowed: 1 to 1"]
