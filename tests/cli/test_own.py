"""Tests of `case new` and `run --model`, which take a user's model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.own_models import folder_of
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.cli.printing import OutputOptions


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a tiny GPT-2."""
    return folder_of("gpt2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a tiny Qwen2."""
    return folder_of("qwen2", tmp_path_factory.mktemp("models"))


def test_case_new_writes_a_file_that_can_be_read(shell: Shell, qwen2: Path, tmp_path: Path) -> None:
    done = shell.ask(
        "case", "new", "mine", "--from", qwen2, "--task", "openwebtext", "--out", tmp_path
    )
    assert (done.code, done.err) == (0, "")
    path = tmp_path / "mine.toml"
    assert done.out.splitlines()[:2] == [f"{path}: mine, sizes full and smoke", "assumed:"]
    assert f"run it:  steelyard run {path} --data PATH" in done.out
    assert resolve.resolve_case(str(path)).case.question.model.qkv_bias
    again = shell.ask(
        "case", "new", "mine", "--from", qwen2, "--task", "openwebtext", "--out", tmp_path
    )
    assert (again.code, again.err) == (2, golden("error-exists-give-another-name-or", path))
    forced = shell.ask(
        "case",
        "new",
        "mine",
        "--from",
        qwen2,
        "--task",
        "openwebtext",
        "--out",
        tmp_path,
        "--force",
        "--json",
    )
    told = json.loads(forced.out)
    assert (told["name"], told["sizes"]) == ("mine", ["full", "smoke"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--task", "mmlu", "llama2-7b-mmlu"),
            "--task mmlu: only with --model DIR; a case has its task",
        ),
        (("--model", "x"), "--model needs --task: alpaca, lambada, mmlu, openwebtext"),
        (
            ("--model", "x", "--task", "mmlu", "smoke"),
            "--model and 'smoke': a model's case is made of its folder",
        ),
        (
            ("--model", "x", "--task", "gsm8k"),
            "--task 'gsm8k': allowed: alpaca, lambada, mmlu, openwebtext",
        ),
        (
            ("--model", "absent", "--task", "mmlu"),
            "'absent' is not a folder; give a Hugging Face folder",
        ),
        (
            ("--model", "Qwen/Qwen2.5-0.5B", "--task", "mmlu"),
            (
                "'Qwen/Qwen2.5-0.5B' is not a folder here; if it is a model of the Hugging Face"
                " hub, download it first: steelyard weights get Qwen/Qwen2.5-0.5B"
            ),
        ),
        (
            ("--model", "a/b/c", "--task", "mmlu"),
            "'a/b/c' is not a folder; give a Hugging Face folder",
        ),
    ],
)
def test_wrong_requests(arguments: tuple[str, ...], line: str, shell: Shell) -> None:
    done = shell.ask("run", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"error: {line}")
    assert done.err.count("\n") == 1


def test_problems_of_a_file_are_shown_one_a_line(shell: Shell, qwen2: Path, tmp_path: Path) -> None:
    shell.ask("case", "new", "mine", "--from", qwen2, "--task", "openwebtext", "--out", tmp_path)
    path = tmp_path / "mine.toml"
    text = path.read_text().replace("\nlayers = 2 ", "\nnum_hidden_layers = 2 ")
    path.write_text(text.replace("\nheads = 4 ", "\nheads = 0 "))
    done = shell.ask("run", path, "--data", "x")
    lines = path.read_text().splitlines()
    first = 1 + next(i for i, line in enumerate(lines) if line.startswith("num_hidden_layers"))
    assert (done.code, done.err.splitlines()) == (
        2,
        [
            f"error: case {str(path)!r}: 2 problems; see docs/cases.md",
            golden("line-unknown-key-question-model-num_hidden_layers", first),
            golden("line-question-model-heads-must-be", first + 2),
        ],
    )


def test_weights_of_another_model_are_named_before_memory(
    shell: Shell, qwen2: Path, gpt2: Path
) -> None:
    """A Qwen2 with biases and a type that is no Llama are named as the cause, although the case's
    model would not fit into any memory.
    """
    huge = ("--set", "question.model.layers=1000000", "--data", str(qwen2))
    for folder, model_type in ((qwen2, "qwen2"), (gpt2, "gpt2")):
        done = shell.ask("run", "llama2-7b-mmlu", "--weights", folder, *huge)
        assert done.code == 2
        assert done.err.startswith(
            f"error: other weights, of model_type '{model_type}': {folder}/config.json: "
        )
        assert done.err.endswith(golden("to-run-them-steelyard-run-model"))


@pytest.mark.full
def test_a_model_of_another_type_runs_by_engine_transformers(shell: Shell, gpt2: Path) -> None:
    asked = (
        "run",
        "--model",
        gpt2,
        "--task",
        "mmlu",
        "--size",
        "smoke",
        "--accelerator",
        "cpu",
        "--out",
        shell.out,
    )
    refused = shell(*asked, "--engine", "torch")
    assert refused.code == 2
    last = refused.err.splitlines()[-1]
    assert last == golden("error-engine-torch-does-not-run")
    trained = shell("run", "--model", gpt2, "--task", "alpaca", "--size", "smoke")
    assert trained.err == (golden("error-task-alpaca-model-of-type"))
    done = shell(*asked, "--json")
    assert done.code in (0, 1), done.err
    (record,) = json.loads(done.out)["records"]
    assert record["engine"]["name"] == "transformers"
    assert any(note.startswith("case made in memory") for note in record["notes"])
    assert any(note.startswith(golden("model-type-gpt-2-run-by")) for note in record["notes"])
    assert record["case"]["origins"]["question.model.config.n_layer"] == "case, size smoke"
    again = shell(
        "reproduce",
        next(shell.out.glob("*.json")),
        "--accelerator",
        "cpu",
        "--out",
        shell.out,
        "--json",
    )
    assert again.code in (0, 1), again.err
    (second,) = json.loads(again.out)["records"]
    assert second["case"]["key"] == record["case"]["key"]
    assert second["outputs"] == record["outputs"]
    verified = shell("verify", shell.out)
    assert verified.code == 0, verified.out


@pytest.fixture
def config_only(qwen2: Path, tmp_path: Path) -> Path:
    """Return the folder of a model whose weights are not downloaded yet."""
    folder = tmp_path / "tiny-qwen2"
    folder.mkdir()
    shutil.copy(qwen2 / "config.json", folder)
    return folder


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Collect the requests of command lines instead of running them."""
    made: list[Request] = []

    def keep(requests: list[Request], output: OutputOptions) -> int:
        made.extend(requests)
        return 0

    monkeypatch.setattr("steelyard.cli.execute_runs.run_each", keep)
    return made


def test_a_config_is_enough_to_train_from_random_weights(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    done = shell.ask("run", "--model", config_only, "--task", "openwebtext", "--data", "owt")
    assert done.code == 0, done.err
    [one] = requests
    assert (one.weights, one.tokenizer, one.resolved.case.question.model.qkv_bias) == (
        None,
        None,
        True,
    )


def test_a_config_is_enough_with_random_weights_and_a_tokenizer(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    asked = (
        "run",
        "--model",
        config_only,
        "--task",
        "mmlu",
        "--data",
        "mmlu",
        "--weights",
        "random",
    )
    assert shell.ask(*asked, "--tokenizer", "tokenizer.json").code == 0
    (config_only / "tokenizer.json").write_text("{}")
    assert shell.ask(*asked).code == 0
    beside = shell.folder / "mmlu"
    beside.mkdir()
    (config_only / "tokenizer.json").rename(beside / "tokenizer.json")
    assert shell.ask(*asked).code == 0
    assert [(one.weights, one.tokenizer) for one in requests] == [
        (None, Path("tokenizer.json")),
        (None, config_only),
        (None, None),
    ]


def test_what_a_config_alone_is_not_enough_for(shell: Shell, config_only: Path) -> None:
    (shell.folder / "mmlu").mkdir()
    asked = ("run", "--model", config_only, "--task", "mmlu", "--data", "mmlu")
    for more, line in (
        (
            (),
            (
                f"{str(config_only)!r} has neither model.safetensors nor"
                " model.safetensors.index.json; give a complete Hugging Face folder, or measure"
                " speed alone with --weights random"
            ),
        ),
        (
            ("--weights", "random"),
            (
                f"--model {str(config_only)!r}: no tokenizer in it nor beside the data, "
                "and task mmlu needs one; name it with --tokenizer"
            ),
        ),
    ):
        done = shell.ask(*asked, *more)
        assert (done.code, done.out, done.lines) == (2, "", [f"error: {line}"])
    done = shell.ask("case", "new", "mine", "--from", config_only, "--task", "openwebtext")
    assert (done.code, done.lines[0].endswith("; give a complete Hugging Face folder")) == (2, True)


def test_a_tiny_model_needs_no_tokenizer(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    assert shell.ask("run", "--model", config_only, "--task", "mmlu", "--size", "smoke").code == 0
    assert [(one.weights, one.tokenizer) for one in requests] == [(None, None)]


@pytest.mark.full
def test_a_run_of_a_config_alone_says_that_weights_are_random(
    shell: Shell, config_only: Path
) -> None:
    ids = np.random.default_rng(0).integers(3, 512, 20_000, dtype=np.int32)
    np.save(shell.folder / "owt_ids.npy", ids)
    np.savez(shell.folder / "owt_idx.npz", lens=np.full(20, 1000), docs=np.arange(21))
    part = ("--sample", "2", "--steps", "3", "--passes", "train", "--set", "tune.compile=false")
    asked = (
        "run",
        "--model",
        config_only,
        "--task",
        "openwebtext",
        "--data",
        shell.folder / "owt",
        *part,
    )
    done = shell(
        *asked, "--precision", "fp32", "--accelerator", "cpu", "--out", shell.out, "--json"
    )
    assert done.code in (0, 1), done.err
    [record] = done.json()["records"]
    assert (record["status"] == "failed", record["weights"]["source"]) == (False, "random")
    assert (
        record["quality"]["evaluated"],
        record["metrics"]["tokens_per_device_s"]["value"] > 0,
    ) == (False, True)
