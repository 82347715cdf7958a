"""Tests of runs with wrong or damaged files: one line and exit code 2, or a record that says what
is wrong.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from fixtures.records import format_sentence
from steelyard.run import site

pytestmark = pytest.mark.process

CASE = "llama2-7b-mmlu"
SMOKE = ["--size", "smoke", "--accelerator", "cpu"]


def run_steelyard(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the MMLU case with its records in `folder` and return the finished process, without the
    warning that another run uses the CPU.
    """
    command = [
        sys.executable,
        "-m",
        "steelyard",
        "run",
        CASE,
        "--out",
        str(folder / "records"),
        *arguments,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    # Tests run in parallel on one CPU, so runs at full size may warn that another run uses it.
    stderr_lines = [
        line
        for line in result.stderr.splitlines(keepends=True)
        if "is also used by another run" not in line
    ]
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout, "".join(stderr_lines)
    )


def check_refusal(result: subprocess.CompletedProcess[str], folder: Path, *fragments: str) -> None:
    """Check that a command was refused: exit code 2, one line on stderr that holds every fragment,
    and no record.
    """
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for fragment in fragments:
        assert fragment in result.stderr
    assert list((folder / "records").glob("*")) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a Hugging Face folder of the smoke model, in several shards."""
    import transformers

    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    """Return a copy of the checkpoint, for a test to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "weights"))


def test_real_weights_are_loaded_and_named(copy, tmp_path):
    result = run_steelyard(tmp_path, *SMOKE, "--weights", str(copy))
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "records").glob("*.json")
    record = json.loads(path.read_text())
    assert record["weights"]["source"] == "huggingface"
    assert format_sentence(record["quality"]["note"]) == golden("the-size-is-smoke-the-data")


def test_a_planted_nan_makes_the_result_invalid(copy, tmp_path):
    from safetensors.torch import load_file, save_file

    shard = next(
        path for path in copy.glob("*.safetensors") if "model.norm.weight" in load_file(path)
    )
    tensors = load_file(shard)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    result = run_steelyard(tmp_path, *SMOKE, "--weights", str(copy))
    assert result.returncode == 1
    (path,) = (tmp_path / "records").glob("*.json")
    record = json.loads(path.read_text())
    assert record["status"] == "invalid"
    assert {reason["code"] for reason in record["reasons"]} == {"nan"}
    reason_text = record["reasons"][0]["text"]
    assert (reason_text["code"], reason_text["values"]["bad"], reason_text["values"]["items"]) == (
        "check.finite.bad",
        48,
        48,
    )


def test_truncated_shard_is_refused(copy, tmp_path):
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    check_refusal(
        run_steelyard(tmp_path, *SMOKE, "--weights", str(copy)),
        tmp_path,
        shard.name,
        "is not a whole safetensors file",
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_checkpoint_of_another_shape_is_refused(copy, tmp_path, engine):
    result = run_steelyard(
        tmp_path,
        *SMOKE,
        "--weights",
        str(copy),
        "--engine",
        engine,
        "--set",
        "question.model.ffn=192",
    )
    check_refusal(result, tmp_path, "intermediate_size is 160, the case's ffn is 192")


def test_missing_weights_folder_is_refused(tmp_path):
    check_refusal(
        run_steelyard(tmp_path, *SMOKE, "--weights", str(tmp_path / "no")),
        tmp_path,
        "--weights",
        "does not exist",
    )


@pytest.fixture
def mmlu(data_dir, tmp_path):
    """Unpack the real MMLU data into a folder that a test may damage, and return it."""
    with tarfile.open(data_dir / "mmlu" / "mmlu_data.tar.gz") as tar:
        tar.extractall(tmp_path / "mmlu")
    return tmp_path / "mmlu"


def make_full_size_options(data: Path, tokenizer: Path) -> list[str]:
    """Return the options of a full-size run on the CPU with five questions of this data."""
    return [
        "--data",
        str(data),
        "--tokenizer",
        str(tokenizer),
        "--accelerator",
        "cpu",
        "--sample",
        "5",
    ]


def test_missing_subject_file_is_refused(mmlu, data_dir, tmp_path):
    (mmlu / "data/dev/anatomy_dev.csv").unlink()
    result = run_steelyard(
        tmp_path, *make_full_size_options(mmlu, data_dir / "tokenizers/llama/tokenizer.model")
    )
    check_refusal(result, tmp_path, "dev/anatomy_dev.csv is missing")


def test_question_row_of_five_columns_is_refused(mmlu, data_dir, tmp_path):
    with (mmlu / "data/test/virology_test.csv").open("a") as out:
        out.write("question,a,b,c,d\n")
    result = run_steelyard(
        tmp_path, *make_full_size_options(mmlu, data_dir / "tokenizers/llama/tokenizer.model")
    )
    check_refusal(
        result, tmp_path, "test/virology_test.csv: row 167 has 5 columns; a question has 6"
    )


def test_tokenizer_with_another_vocabulary_size_is_refused(data_dir, tmp_path):
    result = run_steelyard(
        tmp_path,
        *make_full_size_options(
            data_dir / "mmlu" / "mmlu_data.tar.gz", data_dir / "tokenizers/llama/tokenizer.model"
        ),
        "--set",
        "question.model.vocab=50257",
    )
    check_refusal(result, tmp_path, "has 32000 tokens and the model 50257")


def test_missing_tokenizer_is_refused(data_dir, tmp_path):
    result = run_steelyard(
        tmp_path, "--data", str(data_dir / "mmlu"), "--accelerator", "cpu", "--sample", "5"
    )
    check_refusal(result, tmp_path, "no tokenizer found", "--tokenizer")


def test_full_size_without_data_is_refused(tmp_path):
    check_refusal(
        run_steelyard(tmp_path, "--accelerator", "cpu"),
        tmp_path,
        "needs its data",
        "--data",
        "--size smoke",
    )


def test_weights_larger_than_the_device_are_refused(data_dir, tmp_path):
    result = run_steelyard(
        tmp_path,
        "--data",
        str(data_dir / "mmlu"),
        "--accelerator",
        "cpu",
        "--set",
        "question.model.layers=9000",
    )
    check_refusal(result, tmp_path, "GiB per device by its shapes", "and a device has")


def test_all_requests_are_checked_before_the_first_is_run(tmp_path):
    command = [
        sys.executable,
        "-m",
        "steelyard",
        "run",
        "smoke",
        CASE,
        "--accelerator",
        "cpu",
        "--out",
        str(tmp_path / "records"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    check_refusal(result, tmp_path, "needs its data")


def test_smoke_with_another_size_is_refused(tmp_path):
    command = [
        sys.executable,
        "-m",
        "steelyard",
        "run",
        "smoke",
        "--size",
        "full",
        "--out",
        str(tmp_path / "records"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    check_refusal(result, tmp_path, "smoke runs every case at size smoke")


def test_absent_accelerator_is_refused(tmp_path):
    result = run_steelyard(tmp_path, "--size", "smoke", "--accelerator", "cuda")
    if result.returncode == 0:
        pytest.skip("this machine has a CUDA device")
    check_refusal(result, tmp_path, "no cuda device was found here", "steelyard list")


@pytest.mark.full
@pytest.mark.long
def test_smoke_with_an_engine_runs_the_divisions_that_it_has(tmp_path):
    command = [
        sys.executable,
        "-m",
        "steelyard",
        "run",
        "smoke",
        "--engine",
        "transformers",
        "--accelerator",
        "cpu",
    ]
    result = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert all("-closed-" in path.name for path in tmp_path.glob("*.json"))
    assert list(tmp_path.glob("*-llama2-7b-mmlu-*.json"))


def test_no_page_of_a_record_that_does_not_verify(smoke, tmp_path):
    document = json.loads(smoke["closed"].read_text())
    document["metrics"]["p_infer_whole"]["value"] *= 2
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(document))
    result = subprocess.run(
        [sys.executable, "-m", "steelyard", "report", str(forged)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "does not verify" in result.stderr


def test_one_bad_file_does_not_hide_the_others(smoke, tmp_path):
    shutil.copy(smoke["closed"], tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(smoke["closed"].read_bytes()[:1000])
    result = subprocess.run(
        [sys.executable, "-m", "steelyard", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "ok",
        "not",
        "WRONG",
        f"{tmp_path}/b.json:",
    ]


def test_changed_question_is_reported_as_its_own_case(smoke, tmp_path):
    result = run_steelyard(
        tmp_path, "--size", "smoke", "--accelerator", "cpu", "--set", "question.model.layers=1"
    )
    assert result.returncode == 0, result.stderr
    assert "valid, changed question" in result.stdout
    (path,) = (tmp_path / "records").glob("*.json")
    assert json.loads(path.read_text())["metrics"]["flops_nominal"]["value"] is None
    page = subprocess.run(
        [sys.executable, "-m", "steelyard", "report", str(smoke["closed"]), str(path), "--full"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "llama2-7b-mmlu · smoke · changed question\n" in page
    assert "\nquestion.model.layers=1\n" in page
    assert golden("different-question-question-model-layers-changed") in " ".join(page.split())


def test_interrupt_before_a_run_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    """Ctrl-C while a request is checked or waits in a queue starts nothing and leaves no record."""

    def raise_interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(site, "find_site_file", raise_interrupt)
    result = shell.run_in_process("run", "llama2-7b-mmlu")
    assert (result.code, result.lines) == (1, ["interrupted"])
