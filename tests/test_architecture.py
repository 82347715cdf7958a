"""Rules of the design that can be checked on the source code: imports between rooms, clocks,
opening of files, names of vendors, tasks and engines.

Each rule has a test that the source keeps it, and one that the check itself detects a violation.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from steelyard import accelerators, tasks
from steelyard.engine import engine_rows

SRC = Path(__file__).parent.parent / "src" / "steelyard"
FILES = sorted(SRC.rglob("*.py"))

CLOCKS = {
    "time": (
        {
            "time",
            "monotonic",
            "perf_counter",
            "time_ns",
            "monotonic_ns",
            "perf_counter_ns",
            "process_time",
            "sleep",
        }
        | {"clock_gettime", "clock_gettime_ns"}
    ),
    "datetime": {"now", "utcnow", "today"},
}
PARENT_MODULES = (
    *(
        "cli",
        "run.parent",
        "run.assemble",
        "record.record",
        "metrics.metric_table",
        "metrics.validity",
        "metrics.verify",
    ),
    *(
        "case.case",
        "case.resolve",
        "run.environment",
        "run.telemetry",
        "run.checked_request",
        "run.worker",
        "run.worker_files",
        "report",
    ),
    *("run.node", "run.session", "run.launch", "run.machine_inspection", "record.signature"),
    *(
        "cli.requests",
        "cli.execute_runs",
        "run.rerun",
        "metrics.scaling_groups",
        "metrics.engine_groups",
        "metrics.repeat_groups",
        "metrics.verdict",
    ),
    *("metrics.side_comparison", "metrics.rate_history"),
    *("run.ceilings_parent", "run.ceilings_worker", "cli.check_and_spec", "metrics.ceiling_rates"),
    *("sources.fetch", "sources.huggingface", "cli.get"),
    *("plan.memory", "tasks", "engine.engine_rows", "accelerators", "models.families"),
    *(
        "training.checkpoint_folders",
        "training.training_loop",
        "weights.hf_config",
        "engines.paddle.modes",
        "engines.paddle.host_weights",
    ),
)
UNPICKLERS = {
    "pickle",
    "_pickle",
    "pickletools",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
HEAVY_PACKAGES = ("torch", "transformers", "tokenizers", "sentencepiece", "safetensors")


Answer = TypeVar("Answer")


def cache_by_text(analyse: Callable[[Path], Answer]) -> Callable[[Path], Answer]:
    """Cache the analysis of a file by its path and text, for all rules that need the same."""
    cached = cache(lambda path, text: analyse(path))
    return lambda path: cached(path, path.read_text())


@cache_by_text
def find_names(path: Path) -> set[str]:
    """Return every dotted name that a file uses, every module it imports, and every function it
    calls as `name()`.
    """
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


def test_the_clock_is_read_in_one_place():
    for path in FILES:
        used_names = find_names(path)
        read = {
            f"{module}.{name}" for module, functions in CLOCKS.items() for name in functions
        } & used_names
        assert read == set() or path == SRC / "run" / "clock.py", path
        assert "time" not in used_names or path == SRC / "run" / "clock.py", path


def test_clock_check_detects_clock_reads():
    assert {"time.monotonic", "time.sleep"} <= find_names(SRC / "run" / "clock.py")


# Modules and rooms that may read files without `files.open_regular`: files of the kernel (/proc,
# /sys), of the package, and those that this program wrote itself.
PLAIN_READS_ALLOWED = {"accelerators", "run", "files.py", "case/resolve.py", "cli/model_case.py"}
PLAIN_READS_ALLOWED |= {
    "engines/flagscale/command.py",
    "engines/torch/profiler.py",
    "report/as_html.py",
}


@cache_by_text
def find_plain_reads(path: Path) -> list[int]:
    """Return the lines that open a file for reading without checking that it is a regular file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    reads = ("read_bytes", "read_text")
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and (
            (call.func.attr in reads and ast.unparse(call.func.value) != "sealed")
            or (
                call.func.attr == "open"
                and any(getattr(mode, "value", None) in ("r", "rb") for mode in call.args)
            )
        )
    ]


def test_user_files_are_opened_only_by_open_regular():
    """Opening a FIFO or a device in place of a file would wait without end."""
    for path in FILES:
        relative = str(path.relative_to(SRC))
        assert (
            find_plain_reads(path) == []
            or relative in PLAIN_READS_ALLOWED
            or relative.partition("/")[0] in PLAIN_READS_ALLOWED
        ), path


def test_plain_read_check_detects_plain_reads(tmp_path):
    (tmp_path / "a.py").write_text(
        'path.open("rb")\npath.read_bytes()\npath.read_text("utf-8")\npath.open("wb")\nx.open()\n'
    )
    assert find_plain_reads(tmp_path / "a.py") == [1, 2, 3]


def test_no_module_evaluates_or_unpickles_data():
    for path in FILES:
        used_names = find_names(path)
        assert not used_names & {
            "eval()",
            "exec()",
            "compile()",
            "__import__()",
            "os.system",
            "os.popen",
        }, path
        # pickletools splits a pickle into opcodes, and neither imports nor calls what they name.
        splits = (
            {"pickletools", "pickletools.genops"}
            if path == SRC / "weights" / "torch_files.py"
            else set()
        )
        assert find_unpicklers(used_names) <= splits, path
        text = path.read_text()
        assert "shell=True" not in text, path
        assert "weights_only=False" not in text, path


def find_unpicklers(used_names: set[str]) -> set[str]:
    """Return the names that belong to modules which unpickle."""
    return {name for name in used_names if name.split(".")[0] in UNPICKLERS}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "import pickle as p", "from pickle import loads", "pickle.Unpickler(file)"],
)
def test_pickle_check_detects_imports_and_calls(code, tmp_path):
    (tmp_path / "file.py").write_text(code)
    assert find_unpicklers(find_names(tmp_path / "file.py"))
    assert find_unpicklers(find_names(SRC / "weights" / "torch_files.py")) == {
        "pickletools",
        "pickletools.genops",
    }


def test_only_the_command_line_prints():
    for path in [p for p in FILES if p.parent != SRC / "cli"]:
        assert "print()" not in find_names(path), path
        assert "sys.stdout" not in find_names(path), path


# About 400 lines of code. Statements are counted, since neither the width of a line nor the length
# of docstrings changes their number.
MAX_STATEMENTS = 250


def test_files_have_at_most_250_statements_beside_their_docstrings():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in FILES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = [
            node for node in nodes if isinstance(node, documented) and ast.get_docstring(node)
        ]
        statements = sum(isinstance(node, ast.stmt) for node in nodes) - len(docstrings)
        assert statements <= MAX_STATEMENTS, (path, statements)


# Room → rooms that it may import. A room is a folder of the package; every engine's folder is one.
# SHARED_MODULES are at the top of the package, and every room may import them.
SHARED_MODULES = {"errors", "files", "schema", "plugins", "words"}
WORK_ROOMS = {
    "case",
    "data",
    "engine",
    "kernels",
    "models",
    "plan",
    "scoring",
    "training",
    "weights",
}
ROOMS: dict[str, set[str]] = {
    "cli": {
        *(
            "accelerators",
            "case",
            "data",
            "engine",
            "metrics",
            "models",
            "plan",
            "record",
            "report",
            "run",
            "sources",
        ),
        *("tasks", "weights"),
    },
    "run": {
        "accelerators",
        "case",
        "data",
        "engine",
        "metrics",
        "plan",
        "record",
        "sources",
        "tasks",
        "training",
    },
    "report": {"case", "metrics", "plan", "record", "tasks"},
    "metrics": {"accelerators", "case", "data", "engine", "models", "plan", "record", "tasks"},
    "record": {"accelerators", "case", "data", "plan", "tasks"},
    "plan": {"case", "models"},
    "case": {"accelerators", "data", "models", "tasks"},
    "tasks": {"data"},
    "engine": {"accelerators", "case", "data", "models", "plan"},
    "engines": set(),
    "engines.torch": {*WORK_ROOMS, "accelerators"},
    "engines.transformers": WORK_ROOMS,
    "engines.reference": WORK_ROOMS,
    "engines.megatron": WORK_ROOMS,
    "engines.paddle": {*WORK_ROOMS, "accelerators"},
    "engines.flagscale": {*WORK_ROOMS, "accelerators"},
    "engines.http": {*WORK_ROOMS, "accelerators", "record"},
    "scoring": {"data", "engine", "kernels", "models"},
    "training": {"case", "data", "engine", "kernels", "models", "plan", "weights"},
    "weights": {"models"},
    "models": {"data", "kernels"},
    "kernels": set(),
    "sources": {"data"},
    "data": set(),
    "accelerators": set(),
}
FRAMEWORKS = {"torch", "transformers", "paddle", "megatron", "triton", "safetensors"}
# Rooms in which a framework may be imported, except in the files of TORCH_FREE, which the parent
# loads too. In accelerators only the device classes (NAME_torch.py, NAME_paddle.py) may.
ENGINE_ROOMS = {
    f"engines.{name}" for name in ("torch", "transformers", "reference", "megatron", "paddle")
}
FRAMEWORK_ROOMS = {*ENGINE_ROOMS, "models", "kernels", "weights", "training", "scoring"}
TORCH_FREE = {
    *("models/__init__.py", "models/families.py", "models/shapes.py"),
    *(
        "training/__init__.py",
        "training/checkpoint_folders.py",
        "training/training_loop.py",
        "training/packing.py",
    ),
    *("scoring/__init__.py", "scoring/batches.py"),
    *(
        "weights/__init__.py",
        "weights/hf_config.py",
        "weights/hf_families.py",
        "weights/setting_checks.py",
        "kernels/__init__.py",
    ),
}


def module_name(path: Path) -> str:
    """Return the dotted module name of a source file."""
    return ".".join(("steelyard", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def find_room(module: str) -> str:
    """Return the room of a module: its folder, or for engines `engines.NAME`; empty for the package
    itself.
    """
    parts = module.split(".")[1:]
    named = ".".join(parts[:2])
    return named if named in ROOMS else parts[0] if parts else ""


@cache_by_text
def find_imports(path: Path) -> list[tuple[str, bool]]:
    """Return every module that a file imports, and whether inside a function. Imports for type
    checkers alone are left out.
    """
    tree = ast.parse(path.read_text())
    inside = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for n in ast.walk(f)
    }
    type_checking_statements = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    type_only = {
        id(inner)
        for condition in type_checking_statements
        for statement in condition.body
        for inner in ast.walk(statement)
    }
    out = []
    for node in ast.walk(tree):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            out += [(alias.name, id(node) in inside) for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            out += [
                (_resolve_import(node.module, alias.name), id(node) in inside)
                for alias in node.names
            ]
    return out


def _resolve_import(module: str, name: str) -> str:
    """Return the module that `from module import name` imports: the submodule if there is one, else
    the module.
    """
    dotted = f"{module}.{name}"
    path = SRC.parent.joinpath(*dotted.split("."))
    return dotted if path.is_dir() or path.with_suffix(".py").exists() else module


def find_forbidden_rooms(path: Path) -> list[str]:
    """Return the rooms that a file imports and may not, sorted."""
    room = find_room(module_name(path))
    imported_rooms = {
        find_room(module) for module, _ in find_imports(path) if module.startswith("steelyard.")
    }
    if room == "words":  # every room may import it, so it may import none
        return sorted(imported_rooms - {room, ""} - SHARED_MODULES)
    return (
        sorted(imported_rooms - {room, "", "__main__"} - SHARED_MODULES - ROOMS[room])
        if room in ROOMS
        else []
    )


def test_rooms_import_only_allowed_rooms():
    for path in FILES:
        assert find_forbidden_rooms(path) == [], path


def test_every_folder_is_a_room():
    folders = {
        path.name
        for path in SRC.iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "cases")
    }
    assert folders == {room.partition(".")[0] for room in ROOMS} | {"words"}
    engines = {
        f"engines.{path.name}"
        for path in (SRC / "engines").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert engines == {room for room in ROOMS if room.startswith("engines.")}


def test_allowed_imports_between_rooms_have_no_cycle():
    remaining = {room: set(others) for room, others in ROOMS.items()}
    while remaining:
        free = {room for room, others in remaining.items() if not others & remaining.keys()}
        assert free, f"a circle among {sorted(remaining)}"
        remaining = {room: others for room, others in remaining.items() if room not in free}


def test_room_check_detects_forbidden_imports(tmp_path, monkeypatch):
    source = tmp_path / "steelyard"
    (source / "tasks").mkdir(parents=True)
    (source / "tasks" / "new.py").write_text(
        "from steelyard.case import case\n\ndef f():\n    import torch\n"
    )
    monkeypatch.setitem(globals(), "SRC", source)
    assert find_forbidden_rooms(source / "tasks" / "new.py") == ["case"]
    assert ("torch", True) in find_imports(source / "tasks" / "new.py")


def test_rooms_are_not_imported_inside_functions():
    """The command line is the exception: its verbs import what they need, so that `--help` answers
    at once.
    """
    for path in FILES:
        inside = [
            module
            for module, within in find_imports(path)
            if within and module.startswith("steelyard")
        ]
        assert inside == [] or path.is_relative_to(SRC / "cli"), path


def test_frameworks_are_imported_only_in_worker_modules():
    for path in FILES:
        frameworks = {module.partition(".")[0] for module, _ in find_imports(path)} & FRAMEWORKS
        name = path.relative_to(SRC).as_posix()
        device = name.startswith("accelerators/") and name.endswith(("_torch.py", "_paddle.py"))
        allowed = device or (
            find_room(module_name(path)) in FRAMEWORK_ROOMS and name not in TORCH_FREE
        )
        assert not frameworks or allowed, (name, frameworks)


# Names of vendors, tasks and engines may stand only in their tables of rows: what differs between
# them is a field there. A vendor's name counts as any part of a string constant, a task's or an
# engine's only as the whole of it; constants with spaces are sentences and do not count.
VENDORS = frozenset(
    (
        "ascend",
        "cublas",
        "cuda",
        "cudnn",
        "hccl",
        "hip",
        "hpu",
        "nccl",
        "npu",
        "nvidia",
        "nvml",
        "rccl",
        "rocm",
    )
)
TASKS = frozenset(path.parent.name for path in (SRC / "tasks").glob("*/task.py"))
SERVERS = frozenset(("transformers-serve", "vllm"))  # engines that are rows of engines/http
ENGINES = SERVERS | {
    path.name for path in (SRC / "engines").iterdir() if (path / "__init__.py").exists()
}
# Engines that are also the key of a case with published rows, and a protocol; a task that is also a
# kind of work, a pass and a method of transformers.
HOMONYMS = {"engine": {"reference", "http"}, "task": {"generate"}}
ROW_FILES = {"vendor": "accelerators/", "task": "tasks/", "engine": "engine/engine_rows.py"}
# Kind of name → room → names that may stand there nevertheless, and why.
ALLOWED: dict[str, dict[str, tuple[set[str], str]]] = {
    "vendor": {
        "engines.flagscale": (
            {"cuda"},
            "Megatron-LM does not start without CUDA_DEVICE_MAX_CONNECTIONS",
        ),
        "engines.paddle": (
            {"cudnn"},
            "a flag of Paddle's for deterministic kernels has it in its name",
        ),
        "engines.torch": (
            {"cublas", "cudnn", "nccl"},
            "torch's names of attention kernels, and of kernels in its traces",
        ),
        "engines.transformers": ({"cudnn"}, "torch's names of attention kernels"),
        "models": ({"cudnn"}, "torch's names of attention kernels"),
        "words": ({"nvidia"}, "keys of texts of a row in accelerators"),
    },
    "task": {
        "report": (set(TASKS), "forms of the published pages, one for each task"),
        "sources": (
            set(TASKS),
            "the data sets that can be downloaded, and the task that each is for",
        ),
    },
    "engine": {
        "accelerators": (
            {"paddle", "torch"},
            "frameworks for which an accelerator has a device class",
        ),
        "case": ({"torch"}, "the default engine"),
        "cli": (
            {"megatron", "torch", "transformers"},
            "the default engines, packages, and a format of checkpoints",
        ),
        "engines.flagscale": ({"megatron", "torch"}, "FlagScale trains with Megatron, on torch"),
        "engines.http": (
            {"transformers", *SERVERS},
            "the servers that it starts, and their packages",
        ),
        "metrics": ({"torch"}, "a package that `steelyard check` looks for"),
        "report": ({"torch"}, "packages that are frameworks"),
        "run": ({"torch", "transformers"}, "packages, and the framework of `steelyard spec`"),
        "weights": ({"megatron"}, "a format of checkpoints"),
    },
}


@cache_by_text
def find_constants(path: Path) -> list[tuple[int, str]]:
    """Return every string constant without white space, and its line; docstrings do not count."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    return [
        (node_found.lineno, node_found.value)
        for node_found in nodes
        if isinstance(node_found.value, str) and not re.search(r"\s", node_found.value)
    ]


def find_listed_names(kind: str, text: str) -> frozenset[str]:
    """Return the vendors, tasks or engines that a constant names."""
    if kind == "vendor":
        return VENDORS & set(re.split(r"[^a-z0-9]+", text.lower()))
    return ((TASKS if kind == "task" else ENGINES) - HOMONYMS[kind]) & {text}


def find_misplaced_names(path: Path, kind: str) -> list[tuple[int, str]]:
    """Return the constants of a file that name what its room must not name, with their lines."""
    if path.relative_to(SRC).as_posix().startswith(ROW_FILES[kind]):
        return []
    room = find_room(module_name(path))
    allowed, _ = ALLOWED[kind].get(room, (set(), ""))
    if kind == "engine":  # it may name itself, as a package or a folder
        allowed = {*allowed, room.removeprefix("engines.")}
    return [
        (line, text)
        for line, text in find_constants(path)
        if find_listed_names(kind, text) - allowed
    ]


@pytest.mark.parametrize("kind", list(ALLOWED))
def test_vendor_task_and_engine_names_stand_only_in_their_rooms(kind):
    for path in FILES:
        assert find_misplaced_names(path, kind) == [], path


def test_name_lists_match_the_registered_rows():
    assert set(tasks.load_tasks()) == TASKS
    assert set(engine_rows.load_engine_rows()) == ENGINES
    assert {name for name in accelerators.load_accelerators() if name != "cpu"} <= VENDORS


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("vendor", 'x = device.type == "cuda"'),
        ("vendor", 'VARIABLES = ("NCCL_ALGO",)'),
        ("vendor", 'x = {"CUBLAS_WORKSPACE_CONFIG": 1}'),
        ("vendor", 'set_device(f"npu:{rank}")'),
        ("task", 'LAYOUTS = {"mmlu": 1}'),
        ("task", 'x = record.task == "lambada"'),
        ("engine", 'run("megatron")'),
    ],
)
def test_name_check_detects_misplaced_names(kind, code, tmp_path, monkeypatch):
    (tmp_path / "steelyard" / "data").mkdir(parents=True)
    path = tmp_path / "steelyard" / "data" / "new.py"
    path.write_text(
        f'"""The cuda of megatron for mmlu."""\n{code}\nraise ValueError("no cuda for mmlu")\n'
    )
    monkeypatch.setitem(globals(), "SRC", tmp_path / "steelyard")
    assert [line for line, _ in find_misplaced_names(path, kind)] == [2]


@cache_by_text
def find_kind_comparisons(path: Path) -> list[int]:
    """Return the lines that decide by the name of a kind of work, or of the training pass:
    comparisons, and tables by kind.
    """
    shipped = {"score", "train"}
    out = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            compared = {
                inner.value
                for side in sides
                for inner in ast.walk(side)
                if isinstance(inner, ast.Constant)
            }
            if "train" in compared or (compared & shipped and "kind" in ast.unparse(node)):
                out.append(node.lineno)
        if (
            isinstance(node, ast.Dict)
            and {getattr(key, "value", None) for key in node.keys} >= shipped
        ):
            out.append(node.lineno)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).isupper():
            by_kind = ast.unparse(node.slice).endswith(("task.kind", "question.kind", "row.kind"))
            out += [node.lineno] if by_kind else []
    return out


def test_only_training_code_compares_kinds_of_work():
    """What differs between kinds is a field of a row in the table of kinds. The training loop knows
    its own passes.
    """
    for path in FILES:
        assert find_kind_comparisons(path) == [] or path.is_relative_to(SRC / "training"), path


def test_kind_check_detects_comparisons_and_tables(tmp_path):
    code = (
        'record.task.kind == "train"\n"score" != kind\nname == "train"\n{"score": 1, "train": 3}\n'
        'TABLE[question.kind]\nphase == "score"\nscope.kind == "full"\n'
    )
    (tmp_path / "a.py").write_text(code)
    assert sorted(find_kind_comparisons(tmp_path / "a.py")) == [1, 2, 3, 4, 5]
    assert find_kind_comparisons(SRC / "training" / "training_loop.py")


@pytest.mark.process
@pytest.mark.parametrize("name", PARENT_MODULES)
def test_parent_modules_do_not_import_heavy_packages(name):
    code = (
        f"import sys, steelyard.{name}; print([m for m in {HEAVY_PACKAGES!r} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.process
def test_node_agent_imports_at_most_30_modules():
    """An agent starts on every host of a run: cases, tasks, plans and models are for workers and
    the parent.
    """
    code = (
        "import sys, steelyard.run.node; print(*(m for m in sys.modules if"
        " m.startswith('steelyard.')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = result.stdout.split()
    assert {find_room(module) for module in modules} & {
        "case",
        "data",
        "models",
        "plan",
        "tasks",
    } == set()
    assert len([module for module in modules if find_room(module) != "words"]) <= 30


def test_models_do_not_use_ranks():
    for path in (SRC / "models").glob("*.py"):
        assert not {
            name
            for name in find_names(path)
            if "distributed" in name or name.endswith((".rank", ".world_size"))
        }
