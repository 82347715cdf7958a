"""Rules of the design that code can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "steelyard"
FILES = sorted(SRC.rglob("*.py"))

CLOCKS = {
    "time": {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "process_time", "sleep"},
    "datetime": {"now", "utcnow", "today"},
}
PARENT = (
    *("cli", "run.parent", "run.assemble", "record.record", "metrics.table", "metrics.validity", "metrics.verify"),
    *("case.case", "run.environment", "run.telemetry", "report"),
)
UNPICKLERS = {"pickle", "_pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
HEAVY = ("torch", "transformers", "tokenizers", "sentencepiece", "safetensors")


def names(path: Path) -> set[str]:
    """Every dotted name that a file calls or reads, and every module it imports."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            out.add(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.ImportFrom):
            out |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            out.add(f"{node.func.id}()")
    return out


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_the_clock_is_read_in_measure_alone(path):
    found = names(path)
    read = {f"{module}.{name}" for module, every in CLOCKS.items() for name in every} & found
    assert read == set() or path.name == "measure.py"
    assert "time" not in found or path.name == "measure.py"


def test_the_rule_on_clocks_can_fail():
    assert {"time.monotonic", "time.sleep"} <= names(SRC / "run" / "measure.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_read_is_ever_run(path):
    found = names(path)
    assert not found & {"eval()", "exec()", "compile()", "__import__()", "os.system", "os.popen"}
    # It splits a pickle into its opcodes, and can neither import nor call what they name.
    splits = {"pickletools", "pickletools.genops"} if path == SRC / "weights" / "torch_files.py" else set()
    assert unpicklers(found) <= splits
    text = path.read_text()
    assert "shell=True" not in text
    assert "weights_only=False" not in text


def unpicklers(found: set[str]) -> set[str]:
    return {name for name in found if name.split(".")[0] in UNPICKLERS}


@pytest.mark.parametrize("code", ["import pickle", "import pickle as p", "from pickle import loads", "pickle.Unpickler(file)"])
def test_the_rule_on_pickles_can_fail(code, tmp_path):
    (tmp_path / "file.py").write_text(code)
    assert unpicklers(names(tmp_path / "file.py"))
    assert unpicklers(names(SRC / "weights" / "torch_files.py")) == {"pickletools", "pickletools.genops"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != SRC / "cli"], ids=lambda path: str(path.relative_to(SRC)))
def test_only_the_command_line_prints(path):
    assert "print()" not in names(path)
    assert "sys.stdout" not in names(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_can_be_read_in_a_sitting(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("name", PARENT)
def test_the_parent_stays_free_of_torch(name):
    code = f"import sys, steelyard.{name}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_vendors_are_named_in_accelerators_alone():
    """No branch on a vendor elsewhere: comparing a device's kind with the CPU, where nothing is asynchronous, is all."""
    for path in FILES:
        if "accelerators" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                said = {c.value for c in [node.left, *node.comparators] if isinstance(c, ast.Constant)}
                assert not said & {"cuda", "nvidia", "rocm", "npu", "hpu"}, (path, node.lineno)


def test_models_know_no_ranks():
    for path in (SRC / "models").glob("*.py"):
        assert not {name for name in names(path) if "distributed" in name or name.endswith((".rank", ".world_size"))}
