"""Tests of `weights inspect` and `weights convert` as commands; stand-ins replace the modules that
do the work.
"""

import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rich.console

from fixtures import glm_checkpoints
from fixtures.commands import CASE
from fixtures.golden import golden
from steelyard import cli
from steelyard.case import resolve
from steelyard.errors import RequestError

MODULES_BY_VERB = {
    "inspect_checkpoint": "steelyard.weights.inspection",
    "convert_checkpoint": "steelyard.weights.convert",
}
MODEL_SHAPE = {
    "layers": 32,
    "hidden": 4096,
    "kv_heads": 32,
    "positions": None,
    "rope_base": 10000.0,
    "norm_eps": 1e-5,
    "tied": False,
}

RunCommand = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class FakeInspection:
    """The facts of a checkpoint, with the fields of the real inspection."""

    layout: str = "megatron"
    tp: int = 2
    iteration: str | None = "0135000"
    dtype: str = "bf16"
    parameters: int = 6738415616
    size_bytes: int = 13476831232
    files: list[tuple[str, int]] = field(
        default_factory=lambda: [("mp_rank_00/m.pt", 6 << 30), ("mp_rank_01/m.pt", 700)]
    )
    shape: dict[str, Any] = field(default_factory=lambda: dict(MODEL_SHAPE))
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FakeConversion:
    """The result of a conversion, with the fields of the real one; `kept` counts files that were
    complete before.
    """

    files: list[tuple[str, int]]
    size_bytes: int
    reused: int


class FakeWeightsModule:
    """A stand-in for the inspection and conversion modules: it stores its calls, and returns
    `found` or `made` or raises `error`.
    """

    def __init__(self) -> None:
        self.found = FakeInspection()
        self.made = FakeConversion(
            [("config.json", 600), ("model.safetensors", 3 << 29)], (3 << 29) + 600, 0
        )
        self.error: BaseException | None = None
        self.asked: list[tuple[Any, ...]] = []

    def inspect_checkpoint(self, folder: Path) -> FakeInspection:
        self.asked.append((folder,))
        if self.error is not None:
            raise self.error
        return self.found

    def convert_checkpoint(
        self, source: Path, target: Path, to: str, tp: int, model: Any, progress: Any
    ) -> FakeConversion:
        self.asked.append((source, target, to, tp, model))
        progress(512 << 20, 2048 << 20)
        if self.error is not None:
            raise self.error
        return self.made


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWeightsModule:
    """Replace both modules by stand-ins and return them."""
    fake_module = FakeWeightsModule()
    for verb, name in MODULES_BY_VERB.items():
        module = ModuleType(name)
        setattr(module, verb, getattr(fake_module, verb))
        monkeypatch.setitem(sys.modules, name, module)
    return fake_module


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RunCommand:
    """Return a function that runs a `weights` command in this process, in a folder with an empty
    checkpoint `src`.
    """
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        handler_before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["steelyard", "weights", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        signal.signal(signal.SIGTERM, handler_before)
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, *capsys.readouterr()

    return run_command


def test_help_shows_examples_and_commands(run: RunCommand) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "steelyard weights get" in out.split("Example:")[1]
    assert [line.split()[0] for line in out.split("Commands:")[1].split("\n") if line] == [
        "get",
        "list",
        "inspect",
        "convert",
    ]
    assert run()[0::2] == (2, "")
    for verb in ("inspect", "convert"):
        code, out, err = run(verb, "--help")
        assert (code, err) == (0, "")
        assert f"steelyard weights {verb}" in out.split("Example", 1)[1]
        assert "--json" in out


def test_inspect_prints_facts_files_and_notes(run: RunCommand, worker: FakeWeightsModule) -> None:
    worker.found = FakeInspection(
        notes=["values are stored for an interleaved\nrotary patch", "one more"]
    )
    code, out, err = run("inspect", "src")
    assert (code, err) == (0, "")
    assert worker.asked == [(Path("src"),)]
    assert out.splitlines() == [
        "layout      megatron",
        "shards      2 (tensor parallel)",
        "iteration   0135000",
        "dtype       bf16",
        "parameters  6738415616",
        "size        12.55 GiB (13476831232 bytes)",
        "layers      32",
        "hidden      4096",
        "kv_heads    32",
        "positions   /",
        "rope_base   10000.0",
        "norm_eps    1e-05",
        "tied        false",
        "files       mp_rank_00/m.pt  6.00 GiB",
        "            mp_rank_01/m.pt  700 bytes",
        golden("note-values-are-stored-for-an"),
        "note        one more",
    ]


def test_inspect_abbreviates_long_lists_of_files(
    run: RunCommand, worker: FakeWeightsModule
) -> None:
    files = [(f"model-{i:05}.safetensors", 3 << 20) for i in range(11)]
    worker.found = FakeInspection("huggingface", 1, None, "fp16+fp32", files=files)
    lines = run("inspect", "src")[1].splitlines()
    assert lines[1:4] == ["shards      1", "iteration   /", "dtype       fp16+fp32"]
    assert lines[-9:-1] == [
        f"{'' if i else 'files':<12}model-{i:05}.safetensors  3.00 MiB" for i in range(8)
    ]
    assert lines[-1].strip() == "… and 3 more"
    worker.found = FakeInspection(files=files[:8])
    assert "more" not in run("inspect", "src")[1]


@pytest.mark.parametrize(
    "size_bytes, said",
    [
        (0, "0 bytes"),
        (700, "700 bytes"),
        (3 << 19, "1.50 MiB (1572864 bytes)"),
        (5 << 10, "5.00 KiB (5120 bytes)"),
    ],
)
def test_inspect_prints_small_sizes(
    size_bytes: int, said: str, run: RunCommand, worker: FakeWeightsModule
) -> None:
    worker.found = FakeInspection(size_bytes=size_bytes)
    assert run("inspect", "src")[1].splitlines()[5] == f"size        {said}"


def test_inspect_json(run: RunCommand, worker: FakeWeightsModule) -> None:
    code, out, err = run("inspect", "src", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "path": "src",
        "layout": "megatron",
        "tp": 2,
        "iteration": "0135000",
        "dtype": "bf16",
        "parameters": 6738415616,
        "size_bytes": 13476831232,
        "files": [
            {"name": "mp_rank_00/m.pt", "size_bytes": 6 << 30},
            {"name": "mp_rank_01/m.pt", "size_bytes": 700},
        ],
        "shape": MODEL_SHAPE,
        "notes": [],
    }


def test_inspect_a_glm_checkpoint(run: RunCommand, tmp_path: Path) -> None:
    """The real module is used, in text and in JSON; converting such a checkpoint is refused."""
    glm_checkpoints.write_glm_checkpoint(tmp_path / "glm", glm_checkpoints.make_weights())
    code, out, err = run("inspect", "glm")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    size = lines.pop("size")
    assert lines.pop("files").startswith("500/mp_rank_00_model_states.pt  ")
    expected_rows = {
        "layout": "glm",
        "shards": "1",
        "iteration": "500",
        "dtype": "fp32",
        "parameters": "18624",
    }
    assert lines == expected_rows | {
        "layers": "2",
        "hidden": "32",
        "heads": "/",
        "ffn": "48",
        "vocab": "61",
        "positions": "24",
    }
    answer = json.loads(run("inspect", "glm", "--json")[1])
    assert (answer["layout"], answer["iteration"], answer["parameters"]) == ("glm", "500", 18624)
    assert answer["shape"] == {
        "layers": 2,
        "hidden": 32,
        "heads": None,
        "ffn": 48,
        "vocab": 61,
        "positions": 24,
    }
    assert str(answer["size_bytes"]) in size
    code, out, err = run("convert", "glm", "dst", "--to", "hf")
    expected_error = (
        "error: glm: holds a glm checkpoint; a llama checkpoint is needed; give weights of that"
        " family\n"
    )
    assert (code, out, err) == (2, "", expected_error)


def test_convert_prints_the_written_files(run: RunCommand, worker: FakeWeightsModule) -> None:
    code, out, err = run("convert", "src", "dst", "--to", "hf")
    assert (code, err) == (0, "")
    assert worker.asked == [(Path("src"), Path("dst"), "hf", 1, None)]
    assert out.splitlines() == [
        "dst/config.json        600 bytes",
        "dst/model.safetensors  1.50 GiB",
        "huggingface: 2 file(s), 1.50 GiB, in dst",
    ]


def test_resumed_conversion_is_reported(run: RunCommand, worker: FakeWeightsModule) -> None:
    worker.made = FakeConversion(
        [("mp_rank_00/m.pt", 5 << 10), ("mp_rank_01/m.pt", 5 << 10)], 10 << 10, 1
    )
    out = run("convert", "src", "dst", "--to", "megatron", "--tp", "2", "--case", CASE)[1]
    assert worker.asked == [
        (Path("src"), Path("dst"), "megatron", 2, resolve.resolve_case(CASE).case.question.model)
    ]
    assert out.splitlines()[-1] == golden("megatron-tp-2-2-file-10")


def test_complete_conversion_is_reported(run: RunCommand, worker: FakeWeightsModule) -> None:
    worker.made = replace(worker.made, reused=2)
    code, out, err = run("convert", "src", "dst", "--to", "hf")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "huggingface: already complete, 2 file(s), 1.50 GiB, in dst"


def test_convert_json(run: RunCommand, worker: FakeWeightsModule, terminal: io.StringIO) -> None:
    code, out, err = run("convert", "src", "dst", "--to", "hf", "--json")
    assert (code, err, terminal.getvalue()) == (0, "", "")
    files = [
        {"name": "config.json", "size_bytes": 600},
        {"name": "model.safetensors", "size_bytes": 3 << 29},
    ]
    assert json.loads(out) == {
        "path": "dst",
        "layout": "huggingface",
        "tp": 1,
        "files": files,
        "size_bytes": (3 << 29) + 600,
        "kept": 0,
    }


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the text that a terminal on stderr would receive of the progress."""
    output, console = io.StringIO(), rich.console.Console

    def make_console(stderr: bool, quiet: bool) -> rich.console.Console:
        assert stderr
        return console(file=output, force_terminal=True, width=120, quiet=quiet)

    monkeypatch.setattr(rich.console, "Console", make_console)
    return output


def test_convert_shows_progress(
    run: RunCommand,
    worker: FakeWeightsModule,
    terminal: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter((100.0, 104.0))
    monkeypatch.setattr("steelyard.run.clock.now", lambda: next(clock))
    code, out, err = run("convert", "src", "dst", "--to", "hf")
    assert (code, err) == (0, "dst hf\n")
    assert f"MiB  {'━' * 6}{'╌' * 18}  512/2048  128.00/s  0:04, 0:12 left" in terminal.getvalue()
    assert "\x1b" not in out


def test_interrupted_conversion_says_how_to_resume(
    run: RunCommand, worker: FakeWeightsModule
) -> None:
    worker.error = KeyboardInterrupt()
    expected = "interrupted; run the same command again to continue\n"
    assert run("convert", "src", "dst", "--to", "hf") == (1, "", expected)
    assert run("convert", "src", "dst", "--to", "hf", "--json") == (1, "", expected)


@pytest.mark.parametrize(
    "arguments,said",
    [
        (("inspect",), "Missing argument"),
        (
            ("inspect", "none"),
            "'none' is not a folder; give a Hugging Face folder or a Megatron checkpoint",
        ),
        (("look", "src"), "No such command 'look'"),
        (("convert", "src", "dst"), "Missing option '--to'"),
        (("convert", "src", "--to", "hf"), "Missing argument"),
        (("convert", "src", "dst", "--to", "gguf"), "--to 'gguf': allowed: hf, megatron"),
        (("convert", "src", "dst", "--to", "megatron", "--tp", "0"), "--tp 0: must be at least 1"),
        (("convert", "src", "dst", "--to", "hf", "--tp", "-1"), "--tp -1: must be at least 1"),
        (("convert", "src", "dst", "--to", "megatron", "--tp", "two"), "--tp"),
        (
            ("convert", "src", "dst", "--to", "hf", "--tp", "2"),
            "--tp 2 --to hf: a Hugging Face folder is not sharded",
        ),
        (
            ("convert", "src", "dst", "--to", "hf", "--case", "lama2-7b-mmlu"),
            "did you mean 'llama2-7b-mmlu'?",
        ),
        (("convert", "none", "dst", "--to", "hf"), "'none' is not a folder"),
    ],
    ids=lambda value: "_".join(value)[-40:] if isinstance(value, tuple) else "",
)
def test_mistakes_get_one_line(
    run: RunCommand, worker: FakeWeightsModule, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert said in err
    assert worker.asked == []


@pytest.mark.parametrize(
    "arguments",
    [("inspect", "src"), ("convert", "src", "dst", "--to", "hf")],
    ids=lambda one: one[0],
)
def test_refusals_of_the_weights_modules_get_one_line(
    run: RunCommand, worker: FakeWeightsModule, arguments: tuple[str, ...]
) -> None:
    worker.error = RequestError("'src' holds no weights;\nlook elsewhere")
    assert run(*arguments) == (2, "", golden("error-src-holds-no-weights-look"))


@pytest.mark.parametrize(
    "arguments",
    [("inspect", "src"), ("convert", "src", "dst", "--to", "hf")],
    ids=lambda one: one[0],
)
def test_weights_commands_need_torch(
    run: RunCommand,
    worker: FakeWeightsModule,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.setattr("steelyard.cli.weights.find_spec", lambda name: None)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == golden("error-torch-is-not-installed-which")
    assert worker.asked == []
