"""Tests of `case new` and `run --model`, which take a user's model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.own_models import save_random_model
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.cli.printing import OutputOptions


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a tiny GPT-2."""
    return save_random_model("gpt2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a tiny Qwen2."""
    return save_random_model("qwen2", tmp_path_factory.mktemp("models"))


def test_case_new_writes_a_file_that_can_be_read(shell: Shell, qwen2: Path, tmp_path: Path) -> None:
    result = shell.run_in_process(
        "case", "new", "mine", "--from", qwen2, "--task", "openwebtext", "--out", tmp_path
    )
    assert (result.code, result.err) == (0, "")
    path = tmp_path / "mine.toml"
    assert result.out.splitlines()[:2] == [f"{path}: mine, sizes full and smoke", "assumed:"]
    assert f"run it:  steelyard run {path} --data PATH" in result.out
    assert resolve.resolve_case(str(path)).case.question.model.qkv_bias
    second = shell.run_in_process(
        "case", "new", "mine", "--from", qwen2, "--task", "openwebtext", "--out", tmp_path
    )
    assert (second.code, second.err) == (2, golden("error-exists-give-another-name-or", path))
    forced = shell.run_in_process(
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
    answer = json.loads(forced.out)
    assert (answer["name"], answer["sizes"]) == ("mine", ["full", "smoke"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--task", "mmlu", "llama2-7b-mmlu"),
            "--task mmlu: only with --model DIR; a case has its task",
        ),
        (("--model", "x"), "--model needs --task: alpaca, generate, lambada, mmlu, openwebtext"),
        (
            ("--model", "x", "--task", "mmlu", "smoke"),
            "--model and 'smoke': the case of a model is made from its folder",
        ),
        (
            ("--model", "x", "--task", "gsm8k"),
            "--task 'gsm8k': allowed: alpaca, generate, lambada, mmlu, openwebtext",
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
def test_wrong_requests_for_a_model_get_one_line(
    arguments: tuple[str, ...], line: str, shell: Shell
) -> None:
    result = shell.run_in_process("run", *arguments)
    assert result.code == 2
    assert result.err.startswith(f"error: {line}")
    assert result.err.count("\n") == 1


def test_problems_of_a_case_file_are_shown_one_a_line(
    shell: Shell, qwen2: Path, tmp_path: Path
) -> None:
    shell.run_in_process(
        "case", "new", "mine", "--from", qwen2, "--task", "openwebtext", "--out", tmp_path
    )
    path = tmp_path / "mine.toml"
    text = path.read_text().replace("\nlayers = 2 ", "\nnum_hidden_layers = 2 ")
    path.write_text(text.replace("\nheads = 4 ", "\nheads = 0 "))
    result = shell.run_in_process("run", path, "--data", "x")
    lines = path.read_text().splitlines()
    first_line_number = 1 + next(
        i for i, line in enumerate(lines) if line.startswith("num_hidden_layers")
    )
    assert (result.code, result.err.splitlines()) == (
        2,
        [
            f"error: case {str(path)!r}: 2 problems; see docs/cases.md",
            golden("line-unknown-key-question-model-num_hidden_layers", first_line_number),
            golden("line-question-model-heads-must-be", first_line_number + 2),
        ],
    )


def test_weights_of_another_model_are_refused_before_memory_is_checked(
    shell: Shell, qwen2: Path, gpt2: Path
) -> None:
    """A Qwen2 with biases and a type that is no Llama are named as the cause, although the case's
    model would not fit into any memory.
    """
    huge_model_options = ("--set", "question.model.layers=1000000", "--data", str(qwen2))
    for folder, model_type in ((qwen2, "qwen2"), (gpt2, "gpt2")):
        result = shell.run_in_process(
            "run", "llama2-7b-mmlu", "--weights", folder, *huge_model_options
        )
        assert result.code == 2
        assert result.err.startswith(
            f"error: not the case's model (model_type '{model_type}'): {folder}/config.json: "
        )
        assert result.err.endswith(golden("to-run-them-steelyard-run-model"))


@pytest.mark.full
def test_model_of_another_type_runs_with_engine_transformers(shell: Shell, gpt2: Path) -> None:
    command = (
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
    refused = shell(*command, "--engine", "torch")
    assert refused.code == 2
    last_line = refused.err.splitlines()[-1]
    assert last_line == golden("error-engine-torch-does-not-run")
    trained = shell("run", "--model", gpt2, "--task", "alpaca", "--size", "smoke")
    assert trained.err == (golden("error-task-alpaca-model-of-type"))
    result = shell(*command, "--json")
    assert result.code in (0, 1), result.err
    (record,) = json.loads(result.out)["records"]
    assert record["engine"]["name"] == "transformers"
    assert any(note.startswith("case made in memory") for note in record["notes"])
    assert any(note.startswith(golden("model-type-gpt-2-run-by")) for note in record["notes"])
    assert record["case"]["origins"]["question.model.config.n_layer"] == "case, size smoke"
    rerun = shell(
        "reproduce",
        next(shell.out.glob("*.json")),
        "--accelerator",
        "cpu",
        "--out",
        shell.out,
        "--json",
    )
    assert rerun.code in (0, 1), rerun.err
    (rerun_record,) = json.loads(rerun.out)["records"]
    assert rerun_record["case"]["key"] == record["case"]["key"]
    assert rerun_record["outputs"] == record["outputs"]
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
    requested: list[Request] = []

    def collect_requests(requests: list[Request], output: OutputOptions) -> int:
        requested.extend(requests)
        return 0

    monkeypatch.setattr("steelyard.cli.execute_runs.run_each", collect_requests)
    return requested


def test_a_config_is_enough_to_train_from_random_weights(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    result = shell.run_in_process(
        "run", "--model", config_only, "--task", "openwebtext", "--data", "owt"
    )
    assert result.code == 0, result.err
    [request] = requests
    assert (request.weights, request.tokenizer, request.resolved.case.question.model.qkv_bias) == (
        None,
        None,
        True,
    )


def test_a_config_is_enough_with_random_weights_and_a_tokenizer(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    command = (
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
    assert shell.run_in_process(*command, "--tokenizer", "tokenizer.json").code == 0
    (config_only / "tokenizer.json").write_text("{}")
    assert shell.run_in_process(*command).code == 0
    data_folder = shell.folder / "mmlu"
    data_folder.mkdir()
    (config_only / "tokenizer.json").rename(data_folder / "tokenizer.json")
    assert shell.run_in_process(*command).code == 0
    assert [(request.weights, request.tokenizer) for request in requests] == [
        (None, Path("tokenizer.json")),
        (None, config_only),
        (None, None),
    ]


def test_config_alone_is_refused_for_real_weights_or_a_missing_tokenizer(
    shell: Shell, config_only: Path
) -> None:
    (shell.folder / "mmlu").mkdir()
    command = ("run", "--model", config_only, "--task", "mmlu", "--data", "mmlu")
    for options, line in (
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
        result = shell.run_in_process(*command, *options)
        assert (result.code, result.out, result.lines) == (2, "", [f"error: {line}"])
    result = shell.run_in_process(
        "case", "new", "mine", "--from", config_only, "--task", "openwebtext"
    )
    assert (result.code, result.lines[0].endswith("; give a complete Hugging Face folder")) == (
        2,
        True,
    )


def test_smoke_size_needs_no_tokenizer(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    assert (
        shell.run_in_process(
            "run", "--model", config_only, "--task", "mmlu", "--size", "smoke"
        ).code
        == 0
    )
    assert [(request.weights, request.tokenizer) for request in requests] == [(None, None)]


@pytest.mark.full
def test_run_of_a_config_alone_records_random_weights(shell: Shell, config_only: Path) -> None:
    ids = np.random.default_rng(0).integers(3, 512, 20_000, dtype=np.int32)
    np.save(shell.folder / "owt_ids.npy", ids)
    np.savez(shell.folder / "owt_idx.npz", lens=np.full(20, 1000), docs=np.arange(21))
    scope_options = (
        "--sample",
        "2",
        "--steps",
        "3",
        "--passes",
        "train",
        "--set",
        "tune.compile=false",
    )
    command = (
        "run",
        "--model",
        config_only,
        "--task",
        "openwebtext",
        "--data",
        shell.folder / "owt",
        *scope_options,
    )
    result = shell(
        *command, "--precision", "fp32", "--accelerator", "cpu", "--out", shell.out, "--json"
    )
    assert result.code in (0, 1), result.err
    [record] = result.json()["records"]
    assert (record["status"] == "failed", record["weights"]["source"]) == (False, "random")
    assert (
        record["quality"]["evaluated"],
        record["metrics"]["tokens_per_device_s"]["value"] > 0,
    ) == (False, True)


GENERATE = ("--task", "generate", "--weights", "random")


def test_prompts_are_texts_with_data_and_ids_without(
    shell: Shell, config_only: Path, requests: list[Request]
) -> None:
    """Texts need a tokenizer, beside the model or named; token files and ids need none."""
    run = ("run", "--model", config_only, *GENERATE)
    texts = shell.folder / "texts.jsonl"
    texts.write_text('{"text": "a b c"}\n')
    refused = shell.run_in_process(*run, "--data", texts)
    assert (refused.code, refused.lines) == (
        2,
        [
            f"error: --model {str(config_only)!r}: no tokenizer in it nor beside the data, and"
            " task generate needs one; name it with --tokenizer"
        ],
    )
    np.save(shell.folder / "owt_ids.npy", np.arange(2000, dtype=np.int32) % 500)
    np.savez(shell.folder / "owt_idx.npz", lens=np.full(2, 1000), docs=np.arange(3))
    assert shell.run_in_process(*run).code == 0
    assert shell.run_in_process(*run, "--data", shell.folder / "owt").code == 0
    assert shell.run_in_process(*run, "--data", texts, "--tokenizer", "t.json").code == 0
    assert [
        (request.resolved.case.question.data.source, request.tokenizer, request.engine)
        for request in requests
    ] == [
        ("ids", None, "torch"),
        ("texts", None, "torch"),
        ("texts", Path("t.json"), "torch"),
    ]
    question = requests[0].resolved.case.question
    assert (question.data.prompt_tokens, question.data.output_tokens) == (410, 102)
    assert question.load is not None
    assert question.load.name == "C16"


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_model_of_ones_own_generates(
    shell: Shell, model_type: str, request: pytest.FixtureRequest
) -> None:
    """Its trained weights answer, and the reference engine finds each token the likeliest: `torch`
    for a type that it knows, `transformers` for others.
    """
    sizes = ("prompt_tokens=24", "output_tokens=4")
    settings = [part for size in sizes for part in ("--set", f"question.data.{size}")]
    folder = request.getfixturevalue(model_type)
    run = ("run", "--model", folder, "--task", "generate", *settings)
    limits = ("--set", "load.concurrency=2", "--sample", "4", "--accelerator", "cpu")
    result = shell(*run, *limits, "--out", shell.out, "--json")
    assert result.code in (0, 1), result.err
    [record] = result.json()["records"]
    assert (record["status"] == "failed", record["weights"]["source"]) == (False, "huggingface")
    assert record["case"]["question"]["data"]["source"] == "ids"
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
    assert (values["exact_tokens"], values["checked_requests"]) == (1.0, 1.0)
    assert record["outputs"]["passes"]["check"]["compared"] == [4]
