"""Which packages brought the parts of a run: found by entry points, stated in records, and no
package takes the name of a shipped row.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.commands import SMOKE, Shell
from steelyard import accelerators, plugins, tasks
from steelyard.case.request import EngineSettings, Request
from steelyard.case.resolve import resolve_case
from steelyard.engine import engine_rows
from steelyard.errors import RequestError
from steelyard.metrics import metric_table
from steelyard.plugins import Provider
from steelyard.run import environment
from steelyard.run.checked_request import CheckedRequest, check_request
from steelyard.run.host import Host
from steelyard.run.messages import OpenMessage
from steelyard.run.providers import find_providers

PACKAGES = Path(__file__).parents[1] / "fixtures" / "packages"

# A row whose code is Steelyard's own: harmless, and still another package's.
ENGINE = """from dataclasses import replace
from steelyard.engine.engine_rows import TORCH
ROW = replace(TORCH, name={name!r})
"""
ACCELERATOR = """from steelyard.accelerators.peaks import Peak
from steelyard.accelerators.row import Accelerator, DetectedDevice
ROW = Accelerator(
    name="abc",
    find=lambda: [DetectedDevice({device!r}, "ABC-0", 1 << 34, 0, None)],
    sources=lambda found: [],
    devices={{"torch": "steelyard.accelerators.cpu_torch:CpuTorchDevice"}},
    peaks=(
        Peak(
            name="ABC One",
            accelerator="abc",
            match=("ABC One",),
            flops_per_s={{"fp32": 1e15}},
            source="a data sheet",
        ),
    ),
)
"""
METRIC = """from steelyard.metrics.metric import Metric
from steelyard.metrics.result import Result
ROW = Metric("mfu", "fraction", "higher", lambda record: Result(0.99), ("MFU", ""), ("MFU", ""))
"""
TASK = """from dataclasses import replace
from steelyard.tasks.mmlu.task import TASK
ROW = replace(TASK, name={name!r})
"""


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    room: str,
    module: str,
    source: str,
    metadata: str = "Metadata-Version: 2.1\nName: acme-pack\nVersion: 1.2\n",
) -> None:
    """Install a module with one row as another package would, and put it on the search path.
    `room` is the last part of the entry-point group.
    """
    info = folder / "acme_pack-1.2.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    if metadata:
        (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(f"[steelyard.{room}]\nany = {module}:ROW\n")
    monkeypatch.syspath_prepend(folder)


def check_smoke(engine: str, case: str = "llama2-7b-mmlu") -> CheckedRequest:
    """Return the checked request of a smoke run on the CPU with this engine."""
    resolved = resolve_case(case, "smoke", None, None, [])
    return check_request(Request(resolved, engine=engine, accelerator="cpu"))


def test_a_run_of_shipped_parts_names_no_package() -> None:
    assert find_providers(check_smoke("torch"), []) == {}
    assert environment.find_host_providers(accelerators.CPU, accelerators.CPU.find()) == {}


def test_a_row_of_another_package_is_its_own_wherever_its_code_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "engines", "providers_a", ENGINE.format(name="acme"))
    assert plugins.find_provider(engine_rows.ENGINES_GROUP, "acme") == Provider("acme-pack", "1.2")
    assert plugins.find_provider(engine_rows.ENGINES_GROUP, "torch") is None
    assert find_providers(check_smoke("acme"), []) == {"engine": "acme-pack 1.2"}


def test_the_version_of_a_package_in_another_python_is_not_stated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "engines", "providers_b", ENGINE.format(name="acme"))
    checked = check_smoke("acme")
    settings = EngineSettings(python="/opt/venv/bin/python")
    in_other_python = replace(checked, request=replace(checked.request, engine_settings=settings))
    assert find_providers(in_other_python, []) == {"engine": "acme-pack"}


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ("", "providers_c"),
        ("Metadata-Version: 2.1\nName: acme-pack\n", "acme-pack"),
        (f"Metadata-Version: 2.1\nName: a\n  b\nVersion: {'9' * 500}\n", f"a b {'9' * 100}"),
    ],
    ids=["no metadata", "no version", "odd metadata"],
)
def test_incomplete_metadata_still_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metadata: str, text: str
) -> None:
    install(monkeypatch, tmp_path, "engines", "providers_c", ENGINE.format(name="acme"), metadata)
    assert str(plugins.find_provider(engine_rows.ENGINES_GROUP, "acme")) == text


@pytest.mark.parametrize("row", engine_rows.SHIPPED_ENGINES, ids=lambda row: row.name)
def test_no_package_takes_the_name_of_a_shipped_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: engine_rows.EngineRow
) -> None:
    install(
        monkeypatch,
        tmp_path,
        "engines",
        f"taken_{row.name.replace('-', '_')}",
        ENGINE.format(name=row.name),
    )
    with pytest.raises(RequestError, match=f"engine '{row.name}' is defined twice"):
        engine_rows.find_engine("torch")


@pytest.mark.parametrize("name", ["mmlu", "record", "superglue_record"])
def test_no_package_takes_the_name_or_spelling_of_a_shipped_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    install(monkeypatch, tmp_path, "tasks", f"task_{name}", TASK.format(name=name))
    with pytest.raises(RequestError, match=f"task '{name}' is defined twice"):
        tasks.find_task("lambada")


def test_no_package_replaces_the_formula_of_a_shipped_metric(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "metrics", "providers_mfu", METRIC)
    with pytest.raises(RequestError, match="metric 'mfu' is defined twice"):
        metric_table.list_task_metrics(tasks.find_task("mmlu"))


@pytest.mark.parametrize(
    ("device", "parts"),
    [("ABC One", ["accelerator", "peak"]), ("NVIDIA A100-SXM4-40GB", ["accelerator"])],
    ids=["its own peak", "no peak of its own"],
)
def test_a_host_names_the_package_of_its_accelerator_and_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, parts: list[str]
) -> None:
    module = f"providers_{device.replace(' ', '_').replace('-', '_').lower()}"
    install(monkeypatch, tmp_path, "accelerators", module, ACCELERATOR.format(device=device))
    message = OpenMessage.model_validate(
        {
            "token": "t" * 32,
            "mark": "m",
            "accelerator": "abc",
            "devices": 1,
            "matmul": "fp32",
            "interface": None,
            "peer": None,
            "environment": {},
            "variables": {},
            "needs": [],
            "paths": [],
        }
    )
    hello = Host(message).make_hello()
    assert hello.providers == dict.fromkeys(parts, "acme-pack 1.2")
    assert find_providers(check_smoke("torch"), [hello]) == hello.providers


def test_a_question_names_the_packages_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGES / "recite_kind")
    monkeypatch.syspath_prepend(PACKAGES / "fake_framework")
    case = str(PACKAGES / "recite_kind" / "counting.toml")
    assert find_providers(check_smoke("recite", case), []) == {
        "engine": "recite-kind 1.0",
        "framework": "fake-framework 1.0",
        "task": "recite-kind 1.0",
        "kind": "recite-kind 1.0",
        "metrics.p_recite": "recite-kind 1.0",
    }


@pytest.mark.full
def test_records_state_other_packages_alone(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert shell(*SMOKE, "--passes", "val", "--out", shell.out).code == 0
    assert "providers" not in shell.records()[0]
    packages = ("plain_engine", "lone_device", "kwh_metric")
    other = Shell(tmp_path / "other", tuple(PACKAGES / name for name in packages))
    other.folder.mkdir()
    options = ("--engine", "plain", "--accelerator", "lone", "--passes", "val")
    done = other("run", "llama2-7b-mmlu", "--size", "smoke", *options, "--out", other.out)
    assert done.code == 0, done.err
    [record] = other.records()
    assert record["providers"] == {
        "engine": "plain-engine 1.0",
        "metrics.energy_kwh": "kwh-metric 1.0",
        "accelerator": "lone-device 1.0",
    }
    assert other("verify", other.out).code == 0


@pytest.mark.process
def test_list_names_the_packages_of_others(tmp_path: Path) -> None:
    shell = Shell(tmp_path, (PACKAGES / "plain_engine", PACKAGES / "lone_device"))
    answer = shell("list", "--json").json()
    engines = {row["name"]: row["package"] for row in answer["engines"] if row["package"]}
    assert engines == {"plain": "plain-engine 1.0"}
    devices = {row["accelerator"]: row["package"] for row in answer["accelerators"]}
    assert (devices["lone"], devices["cpu"]) == ("lone-device 1.0", None)
    assert "Lone, 16 GiB, from lone-device 1.0" in shell("list").out
