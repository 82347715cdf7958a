"""Test the real MMLU set with the real Llama tokenizer: the published counts, exactly."""

import tarfile
from collections import Counter
from pathlib import Path

import pytest

from fixtures.files import gunzip
from steelyard.case import resolve
from steelyard.data import prompt_batches, tokenizer
from steelyard.data.tokenizer import Tokenizer
from steelyard.tasks import questions
from steelyard.tasks.mmlu import data
from steelyard.tasks.questions import Prompts, Subject

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def real(data_dir: Path) -> list[Subject]:
    """Return the 57 real subjects."""
    return data.read_subjects(data_dir / "mmlu" / "mmlu_data.tar.gz")


@pytest.fixture(scope="module")
def llama(data_dir: Path) -> Tokenizer:
    """Return the Llama tokenizer."""
    return tokenizer.load_tokenizer([data_dir / "tokenizers" / "llama"])


@pytest.fixture(scope="module")
def real_prompts(real: list[Subject], llama: Tokenizer) -> Prompts:
    """Return the prompts of llama2-7b-mmlu over the full set."""
    return questions.encode_questions(
        real, resolve.resolve_case("llama2-7b-mmlu").case.question.data, llama, None, 0
    )


def test_the_real_set_has_the_known_counts(real: list[Subject]) -> None:
    assert len(real) == 57
    assert sum(len(subject.test) for subject in real) == 14_042
    assert {len(subject.dev) for subject in real} == {5}
    answers = Counter(row[5] for subject in real for row in subject.test)
    assert answers == {"A": 3222, "B": 3462, "C": 3582, "D": 3776}


def test_every_layout_of_the_real_set_gives_the_same_subjects(
    real: list[Subject], data_dir: Path, tmp_path: Path
) -> None:
    packed = data_dir / "mmlu" / "mmlu_data.tar.gz"
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path / "mmlu")
    (tmp_path / "mmlu.tar").write_bytes(gunzip(packed))
    for source in (
        tmp_path / "mmlu",
        tmp_path / "mmlu" / "data",
        tmp_path / "mmlu.tar",
        packed.parent,
    ):
        assert data.read_subjects(source) == real


# 71st question of world_religions; some of its texts begin with a space in the published files.
REAL_PROMPT = """\
The following are multiple choice questions (with answers) about  world religions.

 What is the sign of the covenant for Jewish males?
A. The rainbow
B. Circumcision
C. A son
D. Bar mitzvah
Answer: B

What is the Second Gem in Buddhism?
A. The Dharma
B. The Sangha
C. The Buddha
D. The Bodhisattva
Answer: A

 In which dynasty was the "Mandate of Heaven" developed to legitimatize the new rulers?
A. Shang
B. Zhou
C. Han
D. Xia
Answer: B

 Which Japanese government promoted a kind of national cult based on the emperor and his associations with kami?
A. Honen
B. Tanaka
C. Tokugawa
D. Meiji
Answer: D

How can the Upanishads be characterized?
A. Ritual texts
B. Philosophical texts
C. Hymns
D. Origin stories
Answer: B

 How many books are in the New Testament?
A. 30
B. 29
C. 27
D. 47
Answer:"""  # noqa: E501


def test_real_prompt_byte_for_byte(
    real: list[Subject], llama: Tokenizer, real_prompts: Prompts
) -> None:
    subject = next(candidate for candidate in real if candidate.name == "world_religions")
    assert questions.format_prompt(subject, subject.test[70], 5).encode() == REAL_PROMPT.encode()
    first = real_prompts.subject_of.index(real.index(subject))
    assert real_prompts.rows[first + 70] == llama.encode([REAL_PROMPT])[0]
    assert real_prompts.rows[first + 70][:8] == [1, 450, 1494, 526, 2999, 7348, 5155, 313]
    assert real_prompts.gold[first + 70] == 2


def test_real_set_has_the_published_tokens(real_prompts: Prompts) -> None:
    assert len(real_prompts.rows) == 14_042
    assert sum(len(row) for row in real_prompts.rows) == 10_854_627
    assert real_prompts.shortened == 524
    assert max(len(row) for row in real_prompts.rows) <= 2048
    assert real_prompts.letters == [319, 350, 315, 360]
    assert real_prompts.index == list(range(14_042))


def test_shared_shots_save_most_tokens_of_the_real_set(real_prompts: Prompts) -> None:
    shared_lengths = prompt_batches.measure_prefixes(real_prompts.rows, real_prompts.groups)
    own_tokens = sum(
        len(row) - shared_lengths[group]
        for row, group in zip(real_prompts.rows, real_prompts.groups, strict=True)
    )
    assert sum(shared_lengths) + own_tokens == 1_709_858
    bins = prompt_batches.plan_open_bins(real_prompts.rows, real_prompts.groups, 32768, 0)[0]
    assert sum(piece.length for pieces in bins for piece in pieces) == 1_709_858
    assert sorted(
        prompt_piece.item
        for pieces in bins
        for prompt_piece in pieces
        if prompt_piece.item is not None
    ) == list(range(14_042))


def test_the_real_fingerprint_equals_that_of_the_case(
    real: list[Subject], llama: Tokenizer
) -> None:
    assert (
        questions.fingerprint_questions(real, llama)
        == resolve.resolve_case("llama2-7b-mmlu").case.question.data.fingerprint
    )


# Scores worked out by hand are in tests/tasks/test_mmlu_score.py.
