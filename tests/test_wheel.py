"""The package as it is installed: a wheel in an empty environment, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "cpu"


def run_command(
    *command: str | Path, cwd: Path, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end (400 s at most) and return the completed process."""
    return subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, check=check, timeout=400
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a virtual environment with the wheel and its dependencies alone; skips
    without a package index.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = run_command(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        folder,
        ROOT,
        cwd=folder,
        check=False,
    )
    wheels = list(folder.glob("steelyard-*.whl"))
    if build.returncode or not wheels:
        pytest.skip(f"pip cannot build a wheel here: {build.stderr.strip()[-200:]}")
    run_command(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    programs = folder / "env" / "bin"
    install = run_command(
        programs / "python", "-m", "pip", "install", "--quiet", wheels[0], cwd=folder, check=False
    )
    if install.returncode:
        pytest.skip(f"pip cannot install what the wheel needs: {install.stderr.strip()[-200:]}")
    return programs


@pytest.mark.full
def test_commands_without_a_framework_work_without_torch(installed: Path, tmp_path: Path) -> None:
    def steelyard(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        return run_command(installed / "steelyard", *arguments, cwd=tmp_path, check=False)

    assert (
        run_command(
            installed / "python", "-c", "import torch", cwd=tmp_path, check=False
        ).returncode
        == 1
    )
    listed = json.loads(steelyard("list", "--json").stdout)
    missing = {row["name"]: row["missing"] for row in listed["engines"]}
    on_torch = ("torch", "transformers", "reference", "megatron", "flagscale")
    on_aiohttp = ("http", "transformers-serve", "vllm")
    assert missing == {
        **dict.fromkeys(on_torch, "torch"),
        **dict.fromkeys(on_aiohttp, "aiohttp"),
        "paddle": "paddle",
    }
    assert len(listed["cases"]) == 8
    shown = steelyard("show", "glm-large-record", "--size", "smoke")
    assert shown.returncode == 0
    assert "question.task" in shown.stdout
    record = next(RECORDS.glob("*glm-large-record-smoke-open*.json"))
    assert steelyard("verify", record).stdout == f"ok  {record}\n  not signed\n"
    page = steelyard("report", record, "--format", "html")
    assert page.returncode == 0
    assert "glm-large-record" in page.stdout
    for schema_name in ("record", "worker", "rank"):
        assert json.loads(steelyard("schema", schema_name).stdout)["type"] == "object"
    refused = steelyard("run", "smoke")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert (
        "torch is not installed, and engine torch needs it; pip install 'steelyard[torch]'"
        in refused.stderr
    )
