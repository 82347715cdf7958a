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
from fixtures.records import sentence
from steelyard.run import site

pytestmark = pytest.mark.process

CASE = "llama2-7b-mmlu"
SMOKE = ["--size", "smoke", "--accelerator", "cpu"]


def steelyard(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
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
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    # Tests run in parallel on one CPU, so runs at full size may warn that another run uses it.
    said = [
        line
        for line in done.stderr.splitlines(keepends=True)
        if "is also used by another run" not in line
    ]
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, "".join(said))


def refused(done: subprocess.CompletedProcess[str], folder: Path, *fragments: str) -> None:
    """Check that a command was refused: exit code 2, one line on stderr that holds every fragment,
    and no record.
    """
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for fragment in fragments:
        assert fragment in done.stderr
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
    done = steelyard(tmp_path, *SMOKE, "--weights", str(copy))
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "records").glob("*.json")
    found = json.loads(path.read_text())
    assert found["weights"]["source"] == "huggingface"
    assert sentence(found["quality"]["note"]) == golden("the-size-is-smoke-the-data")


def test_a_planted_nan_makes_the_result_invalid(copy, tmp_path):
    from safetensors.torch import load_file, save_file

    name = next(
        path for path in copy.glob("*.safetensors") if "model.norm.weight" in load_file(path)
    )
    tensors = load_file(name)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, name, metadata={"format": "pt"})
    done = steelyard(tmp_path, *SMOKE, "--weights", str(copy))
    assert done.returncode == 1
    (path,) = (tmp_path / "records").glob("*.json")
    found = json.loads(path.read_text())
    assert found["status"] == "invalid"
    assert {reason["code"] for reason in found["reasons"]} == {"nan"}
    told = found["reasons"][0]["text"]
    assert (told["code"], told["values"]["bad"], told["values"]["items"]) == (
        "check.finite.bad",
        48,
        48,
    )


def test_a_truncated_shard(copy, tmp_path):
    name = sorted(copy.glob("*.safetensors"))[1]
    name.write_bytes(name.read_bytes()[:-100])
    refused(
        steelyard(tmp_path, *SMOKE, "--weights", str(copy)),
        tmp_path,
        name.name,
        "is not a whole safetensors file",
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_a_checkpoint_of_another_shape(copy, tmp_path, engine):
    done = steelyard(
        tmp_path,
        *SMOKE,
        "--weights",
        str(copy),
        "--engine",
        engine,
        "--set",
        "question.model.ffn=192",
    )
    refused(done, tmp_path, "intermediate_size is 160, the case's ffn is 192")


def test_a_missing_folder_of_weights(tmp_path):
    refused(
        steelyard(tmp_path, *SMOKE, "--weights", str(tmp_path / "no")),
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


def full(data: Path, tokenizer: Path) -> list[str]:
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


def test_a_missing_subject_file(mmlu, data_dir, tmp_path):
    (mmlu / "data/dev/anatomy_dev.csv").unlink()
    done = steelyard(tmp_path, *full(mmlu, data_dir / "tokenizers/llama/tokenizer.model"))
    refused(done, tmp_path, "dev/anatomy_dev.csv is missing")


def test_a_row_of_five_columns(mmlu, data_dir, tmp_path):
    with (mmlu / "data/test/virology_test.csv").open("a") as out:
        out.write("question,a,b,c,d\n")
    done = steelyard(tmp_path, *full(mmlu, data_dir / "tokenizers/llama/tokenizer.model"))
    refused(done, tmp_path, "test/virology_test.csv: row 167 has 5 columns; a question has 6")


def test_a_tokenizer_of_another_vocabulary(data_dir, tmp_path):
    done = steelyard(
        tmp_path,
        *full(
            data_dir / "mmlu" / "mmlu_data.tar.gz", data_dir / "tokenizers/llama/tokenizer.model"
        ),
        "--set",
        "question.model.vocab=50257",
    )
    refused(done, tmp_path, "has 32000 tokens and the model 50257")


def test_no_tokenizer(data_dir, tmp_path):
    done = steelyard(
        tmp_path, "--data", str(data_dir / "mmlu"), "--accelerator", "cpu", "--sample", "5"
    )
    refused(done, tmp_path, "no tokenizer found", "--tokenizer")


def test_full_size_without_data(tmp_path):
    refused(
        steelyard(tmp_path, "--accelerator", "cpu"),
        tmp_path,
        "needs its data",
        "--data",
        "--size smoke",
    )


def test_weights_larger_than_the_device(data_dir, tmp_path):
    done = steelyard(
        tmp_path,
        "--data",
        str(data_dir / "mmlu"),
        "--accelerator",
        "cpu",
        "--set",
        "question.model.layers=9000",
    )
    refused(done, tmp_path, "GiB a device by its shapes", "and one has")


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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    refused(done, tmp_path, "needs its data")


def test_smoke_is_no_name_for_another_size(tmp_path):
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
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    refused(done, tmp_path, "smoke runs every case at size smoke")


def test_an_accelerator_that_is_not_there(tmp_path):
    done = steelyard(tmp_path, "--size", "smoke", "--accelerator", "cuda")
    if done.returncode == 0:
        pytest.skip("this machine has a CUDA device")
    refused(done, tmp_path, "no cuda device was found here", "steelyard list")


@pytest.mark.full
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
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert all("-closed-" in path.name for path in tmp_path.glob("*.json"))
    assert list(tmp_path.glob("*-llama2-7b-mmlu-*.json"))


def test_no_page_of_a_record_that_does_not_verify(smoke, tmp_path):
    table = json.loads(smoke["closed"].read_text())
    table["metrics"]["p_infer_whole"]["value"] *= 2
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(table))
    done = subprocess.run(
        [sys.executable, "-m", "steelyard", "report", str(forged)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not verify" in done.stderr


def test_one_bad_file_does_not_hide_the_others(smoke, tmp_path):
    shutil.copy(smoke["closed"], tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(smoke["closed"].read_bytes()[:1000])
    done = subprocess.run(
        [sys.executable, "-m", "steelyard", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "ok",
        "not",
        "WRONG",
        f"{tmp_path}/b.json:",
    ]


def test_a_changed_question_stands_apart(smoke, tmp_path):
    done = steelyard(
        tmp_path, "--size", "smoke", "--accelerator", "cpu", "--set", "question.model.layers=1"
    )
    assert done.returncode == 0, done.stderr
    assert "valid, changed question" in done.stdout
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


def test_an_interrupt_is_said_before_a_run_too(
    monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    """Ctrl-C while a request is checked or waits in a queue starts nothing and leaves no record."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(site, "find_site_file", interrupted)
    done = shell.ask("run", "llama2-7b-mmlu")
    assert (done.code, done.lines) == (1, ["interrupted"])
