"""Test a real model on real MMLU questions, from the command line, against a plain loop over
transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.real_runs import make_set_options, read_model_settings, run_shipped_case
from steelyard.data.seeded_draws import choose_items
from steelyard.tasks import choices
from steelyard.tasks.mmlu import data
from steelyard.tasks.questions import Subject

pytestmark = pytest.mark.long

SAMPLE = 16
SEED = 33  # draws a sample in which every question fits the context
CONTEXT = 320  # tokens; short for a CPU, so most prompts lose examples

RunCase = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def real_run(smollm2: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """Return a function that runs the case with further options on the sampled questions, selected
    by --rows or --sample, and returns the record.
    """
    settings = [
        *read_model_settings(smollm2),
        f"question.data.context={CONTEXT}",
        "tune.compile=false",
        "tune.warmup=0",
    ]
    settings += ["tune.batch_tokens=2048", f"question.seed={SEED}"]
    # a shared CPU is not steady, and this test is about answers, not speed
    settings += ["max_interval=100"]
    paths = ["--weights", str(smollm2), "--data", str(data_dir / "mmlu" / "mmlu_data.tar.gz")]
    scope = ["--precision", "fp32", "--passes", "infer"]
    ids = tmp_path_factory.mktemp("ids") / "rows"
    ids.write_text("\n".join(map(str, choose_items(14_042, SAMPLE, SEED))))

    def run_case(*arguments: str) -> dict[str, Any]:
        item_options = [str(ids)] if "--rows" in arguments else ["--sample", str(SAMPLE)]
        return run_shipped_case(
            tmp_path_factory.mktemp("records"),
            *paths,
            *scope,
            *make_set_options(settings),
            *arguments,
            *item_options,
        )

    return run_case


@dataclass(frozen=True)
class ExpectedAnswers:
    """The answers of the plain loop, and the tokens and shortened prompts it counted."""

    choices: str
    hits: str
    argmax: list[int]
    tokens: int
    shortened: int
    margin: float  # smallest distance between the highest and the second letter logit


def format_prompt(subject: Subject, question: int, dropped: int) -> str:
    """Return the prompt of a question, written independently of the package, without the first
    `dropped` examples.
    """

    def format_question(row: tuple[str, ...]) -> str:
        return f"{row[0]}\nA. {row[1]}\nB. {row[2]}\nC. {row[3]}\nD. {row[4]}\nAnswer:"

    name = " " + " ".join(subject.name.split("_"))
    shots = [f"{format_question(row)} {row[5]}\n\n" for row in subject.dev]
    header = f"The following are multiple choice questions (with answers) about {name}.\n\n"
    return header + "".join(shots[dropped:]) + format_question(subject.test[question])


def answer_with_transformers(
    folder: Path, subjects: list[Subject], index: list[int]
) -> ExpectedAnswers:
    """Return the likeliest token and letter of each question, computed one prompt at a time with
    transformers; examples are dropped until a prompt fits CONTEXT.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    letters = [tokenizer.encode(f" {letter}", add_special_tokens=False) for letter in "ABCD"]
    assert all(len(ids) == 1 for ids in letters)
    questions = [
        (subject, question) for subject in subjects for question in range(len(subject.test))
    ]
    choices, hits, argmax, tokens, shortened, margins = "", "", [], 0, 0, []
    for subject, question in (questions[number] for number in index):
        dropped = 0
        while (
            len(ids := tokenizer(format_prompt(subject, question, dropped))["input_ids"]) > CONTEXT
        ):
            assert dropped < len(subject.dev), (
                f"question {question} of {subject.name} is too long for this test"
            )
            dropped += 1
        tokens += len(ids)
        shortened += dropped > 0
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        letter_logits = logits[[letter_id for (letter_id,) in letters]]
        choices += "ABCD"[int(letter_logits.argmax())]
        argmax.append(int(logits.argmax()))
        hits += str(int(argmax[-1] == letters["ABCD".index(subject.test[question][5])][0]))
        best_logit, next_logit = letter_logits.topk(2).values.tolist()
        margins.append(best_logit - next_logit)
    return ExpectedAnswers(choices, hits, argmax, tokens, shortened, min(margins))


@pytest.fixture(scope="module")
def expected(smollm2: Path, data_dir: Path) -> ExpectedAnswers:
    """Return the plain loop's answers to the sampled questions."""
    index = choose_items(14_042, SAMPLE, SEED)
    return answer_with_transformers(
        smollm2, data.read_subjects(data_dir / "mmlu" / "mmlu_data.tar.gz"), index
    )


def test_the_expected_answers_vary_and_have_a_margin(expected: ExpectedAnswers) -> None:
    """The expected answers have several letters, right and wrong, and no two letters so near that
    rounding could decide.
    """
    assert min(expected.choices.count(letter) for letter in set(expected.choices)) >= 3
    assert len(set(expected.choices)) >= 2
    assert set(expected.hits) == {"0", "1"}
    assert expected.margin > 1e-3


@pytest.mark.parametrize(
    "arguments",
    [(), ("--division", "open"), ("--engine", "transformers"), ("--rows",)],
    ids=["closed", "open", "transformers", "rows"],
)
def test_real_answers_equal_a_plain_loop(
    arguments: tuple[str, ...], real_run: RunCase, expected: ExpectedAnswers
) -> None:
    record = real_run(*arguments)
    outputs = record["outputs"]
    assert outputs["index"] == choose_items(14_042, SAMPLE, SEED)
    infer_answers = outputs["passes"]["infer"]
    assert (infer_answers["choices"], infer_answers["hits"]) == (expected.choices, expected.hits)
    assert (infer_answers["not_finite"], infer_answers["repeated"]) == (0, 0)
    assert (
        choices.list_likeliest_tokens(choices.ChoiceOutputs.model_validate(outputs), "infer")
        == expected.argmax
    )
    assert record["data"]["tokens"] == expected.tokens
    assert record["data"]["shortened"] == expected.shortened
    assert record["quality"]["value"] == expected.hits.count("1") / SAMPLE
    computed = sum(sample["counts"].get("tokens", 0) for sample in record["samples"])
    assert computed < expected.tokens if "open" in arguments else computed == expected.tokens


def test_compiled_answers_equal_eager_ones(tmp_path: Path) -> None:
    """With the smoke size, in both divisions: the pass val is never compiled and infer is; their
    answers equal each other and those of an eager run.
    """
    for division in ("closed", "open"):
        arguments = ("--size", "smoke", "--division", division)
        eager = run_shipped_case(tmp_path / "eager", *arguments)
        compiled = run_shipped_case(tmp_path / "compiled", *arguments, "--set", "tune.compile=true")
        assert "compile_infer" in compiled["budget"]
        assert "compile_infer" not in eager["budget"]
        passes = compiled["outputs"]["passes"]
        assert passes["val"] == passes["infer"]
        assert passes["infer"]["choices"] == eager["outputs"]["passes"]["infer"]["choices"]
        assert passes == eager["outputs"]["passes"]
        assert len(set(passes["infer"]["choices"])) >= 2
        assert compiled["case"]["key"] == eager["case"]["key"]
