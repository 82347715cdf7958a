"""Rules of the design that code can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "steelyard"
FILES = sorted(SRC.rglob("*.py"))

CLOCKS = {
    "time": {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "process_time", "sleep"}
    | {"clock_gettime", "clock_gettime_ns"},
    "datetime": {"now", "utcnow", "today"},
}
PARENT = (
    *("cli", "run.parent", "run.assemble", "record.record", "metrics.table", "metrics.validity", "metrics.verify"),
    *("case.case", "case.resolve", "run.environment", "run.telemetry", "run.ready", "run.worker", "run.spec", "report"),
    *("run.node", "run.session", "run.scheduler", "run.fitness", "record.signature"),
    *("cli.sweep", "run.earlier", "metrics.scaling", "cli.engines", "metrics.engines", "cli.repeats", "metrics.repeats"),
    *("metrics.compare", "metrics.history", "run.reproduce"),
    *("run.ceilings_run", "run.ceilings_worker", "cli.spec", "metrics.ceilings"),
    *("sources.get", "sources.hub", "cli.get"),
    *("plan.memory", "tasks", "engine.rows", "accelerators", "models.families"),
    *("training.checkpoints", "training.loop", "weights.hf_config", "engines.paddle.modes", "engines.paddle.weights"),
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
def test_the_clock_is_read_in_one_place(path):
    found = names(path)
    read = {f"{module}.{name}" for module, every in CLOCKS.items() for name in every} & found
    assert read == set() or path == SRC / "run" / "clock.py"
    assert "time" not in found or path == SRC / "run" / "clock.py"


def test_the_rule_on_clocks_can_fail():
    assert {"time.monotonic", "time.sleep"} <= names(SRC / "run" / "clock.py")


# Modules that read files without `files.open_regular`: the kernel's, the package's, and what this program wrote itself.
OWN_FILES = {"accelerators", "run", "files.py", "case/resolve.py", "cli/own.py"}
OWN_FILES |= {"engines/flagscale/command.py", "engines/torch/profile.py", "report/as_html.py"}


def plain_reads(path: Path) -> list[int]:
    """The lines that open a file for reading without looking what it is."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    reads = ("read_bytes", "read_text")
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and (
            (call.func.attr in reads and ast.unparse(call.func.value) != "sealed")
            or (call.func.attr == "open" and any(getattr(mode, "value", None) in ("r", "rb") for mode in call.args))
        )
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_of_a_user_are_opened_in_one_place(path):
    """A FIFO or a device in the place of a file would be waited for."""
    place = str(path.relative_to(SRC))
    assert plain_reads(path) == [] or place in OWN_FILES or place.partition("/")[0] in OWN_FILES


def test_the_rule_on_opening_can_fail(tmp_path):
    (tmp_path / "a.py").write_text('path.open("rb")\npath.read_bytes()\npath.read_text("utf-8")\npath.open("wb")\nx.open()\n')
    assert plain_reads(tmp_path / "a.py") == [1, 2, 3]


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
    assert len(path.read_text().splitlines()) <= 400


# Room → rooms that it may import. A room is a folder; of engines each one's own. What stands
# beside the rooms any room may import.
BESIDE = {"errors", "files", "schema", "plugins", "words"}
WORK = {"case", "data", "engine", "kernels", "models", "plan", "training", "weights"}
ROOMS: dict[str, set[str]] = {
    "cli": {
        *("accelerators", "case", "data", "engine", "metrics", "models", "plan", "record", "report", "run", "sources"),
        "weights",
    },
    "run": {"accelerators", "case", "data", "engine", "metrics", "plan", "record", "sources", "tasks", "training"},
    "report": {"case", "metrics", "plan", "record", "tasks"},
    "metrics": {"accelerators", "case", "models", "plan", "record", "tasks"},
    "record": {"accelerators", "case", "plan", "tasks"},
    "plan": {"case", "models"},
    "case": {"accelerators", "data", "models", "tasks"},
    "tasks": {"data"},
    "engine": {"accelerators", "case", "models", "plan"},
    "engines": set(),
    "engines.torch": {*WORK, "accelerators"},
    "engines.transformers": WORK,
    "engines.reference": WORK,
    "engines.megatron": WORK,
    "engines.paddle": {*WORK, "accelerators"},
    "engines.flagscale": {*WORK, "accelerators"},
    "training": {"case", "data", "engine", "kernels", "models", "plan", "weights"},
    "weights": {"models"},
    "models": {"data", "kernels"},
    "kernels": set(),
    "sources": {"data"},
    "data": set(),
    "accelerators": set(),
}
FRAMEWORKS = {"torch", "transformers", "paddle", "megatron", "triton", "safetensors"}
# Where a framework may be imported; of models only what workers load, and of accelerators their device classes.
ENGINE_ROOMS = {f"engines.{name}" for name in ("torch", "transformers", "reference", "megatron", "paddle")}
FRAMEWORK_ROOMS = {*ENGINE_ROOMS, "models", "kernels", "weights", "training"}
TORCH_FREE = {
    *("models/__init__.py", "models/families.py", "models/shapes.py"),
    *("training/__init__.py", "training/checkpoints.py", "training/loop.py", "training/packing.py"),
    *("weights/__init__.py", "weights/hf_config.py", "weights/hf_families.py", "weights/settings.py", "kernels/__init__.py"),
}


def module_of(path: Path) -> str:
    return ".".join(("steelyard", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of a module; empty for what stands at the top."""
    parts = module.split(".")[1:]
    named = ".".join(parts[:2])
    return named if named in ROOMS else parts[0] if parts else ""


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, and whether inside a function. What only a type checker reads is left out."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    unread = {id(inner) for one in checked for statement in one.body for inner in ast.walk(statement)}
    out = []
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            out += [(alias.name, id(node) in inside) for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            out += [(_submodule(node.module, alias.name), id(node) in inside) for alias in node.names]
    return out


def _submodule(module: str, name: str) -> str:
    whole = f"{module}.{name}"
    place = SRC.parent.joinpath(*whole.split("."))
    return whole if place.is_dir() or place.with_suffix(".py").exists() else module


def strangers(path: Path) -> list[str]:
    """The rooms that a file imports and may not."""
    room = room_of(module_of(path))
    wanted = {room_of(module) for module, _ in imports(path) if module.startswith("steelyard.")}
    if room == "words":  # it stands beside the rooms, so it may import none of them
        return sorted(wanted - {room, ""} - BESIDE)
    return sorted(wanted - {room, "", "__main__"} - BESIDE - ROOMS[room]) if room in ROOMS else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_a_room_imports_only_rooms_it_may(path):
    assert strangers(path) == []


def test_every_folder_is_a_room():
    folders = {path.name for path in SRC.iterdir() if path.is_dir() and path.name not in ("__pycache__", "cases")}
    assert folders == {room.partition(".")[0] for room in ROOMS} | {"words"}
    engines = {f"engines.{path.name}" for path in (SRC / "engines").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert engines == {room for room in ROOMS if room.startswith("engines.")}


def test_rooms_do_not_import_each_other_in_a_circle():
    left = {room: set(others) for room, others in ROOMS.items()}
    while left:
        free = {room for room, others in left.items() if not others & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {room: others for room, others in left.items() if room not in free}


def test_the_rules_on_rooms_can_fail(tmp_path, monkeypatch):
    source = tmp_path / "steelyard"
    (source / "tasks").mkdir(parents=True)
    (source / "tasks" / "new.py").write_text("from steelyard.case import case\n\ndef f():\n    import torch\n")
    monkeypatch.setitem(globals(), "SRC", source)
    assert strangers(source / "tasks" / "new.py") == ["case"]
    assert ("torch", True) in imports(source / "tasks" / "new.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_rooms_are_not_imported_inside_functions(path):
    """But for the command line, whose verbs import what they need, so that `--help` answers at once."""
    inside = [module for module, within in imports(path) if within and module.startswith("steelyard")]
    assert inside == [] or path.is_relative_to(SRC / "cli")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_frameworks_are_imported_where_workers_load_them(path):
    found = {module.partition(".")[0] for module, _ in imports(path)} & FRAMEWORKS
    name = path.relative_to(SRC).as_posix()
    device = name.startswith("accelerators/") and name.endswith(("_torch.py", "_paddle.py"))
    allowed = device or (room_of(module_of(path)) in FRAMEWORK_ROOMS and name not in TORCH_FREE)
    assert not found or allowed, (name, found)


@pytest.mark.parametrize("name", sorted({"record", "mmlu", "lambada", "openwebtext", "alpaca", "superglue_record"}))
def test_tasks_are_named_in_tasks_alone(name):
    """No branch on a task elsewhere: what differs is in its row."""
    for path in FILES:
        if path.is_relative_to(SRC / "tasks"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Dict | ast.Subscript):
                said = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
                told = {
                    ast.dump(inner) for inner in ast.walk(node) if isinstance(inner, ast.Attribute) and inner.attr == "task"
                }
                assert not (name in said and told), (path, node.lineno)


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
