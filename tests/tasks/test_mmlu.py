"""Test MMLU: reading every file layout, prompts byte for byte, sampling, generated questions, and
refusals of invalid files.
"""

import csv
import gzip
import io
import lzma
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.files import gunzip
from fixtures.golden import golden
from steelyard.data.seeded_draws import choose_items
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.errors import RequestError
from steelyard.tasks import questions
from steelyard.tasks.mmlu import data as mmlu
from steelyard.tasks.mmlu.task import MmluData
from steelyard.tasks.questions import GeneratedQuestionsConfig, McqRow, Subject

ASTRONOMY: tuple[list[McqRow], list[McqRow]] = (
    [
        ("Which is a star?", "Sun", "Moon", "Mars", "Io", "A"),
        ("Which is a moon?", "Sun", "Venus", "Mars", "Io", "D"),
    ],
    [
        ("Which is\na planet?", 'The "Sun"', "Venus, say", "Io", "Ceres", "B"),
        ("What is red?", "1", "2", "Mars", "4", "C"),
    ],
)
WORLD_HISTORY: tuple[list[McqRow], list[McqRow]] = (
    [
        ("Who fell?", "Rome", "Oslo", "Bern", "Riga", "A"),
        ("Where?", "Here", "Thère", "Nowhere", "West", "D"),
    ],
    [(" When?", "476", "1066", "1492", "1789", "A")],
)
SUBJECTS = [
    Subject("astronomy", tuple(ASTRONOMY[0]), tuple(ASTRONOMY[1])),
    Subject("world_history", tuple(WORLD_HISTORY[0]), tuple(WORLD_HISTORY[1])),
]
DATA = MmluData(kind="mmlu", shots=2, context=512, subjects=2)


def as_csv(rows: tuple[tuple[str, ...], ...]) -> bytes:
    """Return questions as the bytes of a CSV file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def format_subject_files(subjects: list[Subject]) -> dict[str, bytes]:
    """Return the files of MMLU for these subjects by name, with two files that no reader opens."""
    files = {f"data/dev/{subject.name}_dev.csv": as_csv(subject.dev) for subject in subjects}
    files |= {f"data/test/{subject.name}_test.csv": as_csv(subject.test) for subject in subjects}
    return files | {"data/val/astronomy_val.csv": b"not read", "data/README.txt": b"not read"}


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    """Write files as members of a tar and return its path."""
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def load_refusal(source: Path, data: MmluData = DATA) -> str:
    """Return the message with which loading `source` is refused, after checking that it is one line
    and that no file was unpacked.
    """
    paths_before = sorted(source.parent.rglob("*"))
    with pytest.raises(RequestError) as error:
        mmlu.load_subjects(data, source)
    assert sorted(source.parent.rglob("*")) == paths_before
    line = str(error.value)
    assert "\n" not in line
    return line


def change_subject_files(**files: bytes | None) -> dict[str, bytes]:
    """Return the files of SUBJECTS with some replaced: `dev_astronomy` is
    data/dev/astronomy_dev.csv, and None removes a file.
    """
    changed_files: dict[str, bytes | None] = {**format_subject_files(SUBJECTS)}
    for key, content in files.items():
        split, _, name = key.partition("_")
        changed_files[f"data/{split}/{name}_{split}.csv"] = content
    return {name: content for name, content in changed_files.items() if content is not None}


def test_every_file_layout_gives_the_same_subjects(tmp_path: Path) -> None:
    files = format_subject_files(SUBJECTS)
    (tmp_path / "tars").mkdir()
    sources = {
        "folder with data/": write_folder(tmp_path / "one", files),
        "folder data itself": tmp_path / "one" / "data",
        "tar": write_tar(tmp_path / "x.tar", files),
        "tar.gz": write_tar(tmp_path / "x.tar.gz", files, "w:gz"),
        "tar.xz": write_tar(tmp_path / "x.tar.xz", files, "w:xz"),
        "no suffix": write_tar(tmp_path / "x", files, "w:gz"),
        "other order": write_tar(tmp_path / "y.tar", dict(reversed(files.items()))),
        "folder with one tar": write_tar(tmp_path / "tars" / "mmlu.tgz", files, "w:gz").parent,
    }
    for name, source in sources.items():
        assert mmlu.read_subjects(source) == SUBJECTS, name
        assert mmlu.load_subjects(DATA, source) == (SUBJECTS, source.name)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            change_subject_files(dev_astronomy=None),
            "{}: dev/astronomy_dev.csv is missing; every subject has a dev and a test file",
        ),
        (
            change_subject_files(test_world_history=None),
            "{}: test/world_history_test.csv is missing; every subject has a dev and a test file",
        ),
        (
            change_subject_files(test_astronomy=as_csv((ASTRONOMY[1][0], ASTRONOMY[1][1][:5]))),
            (
                "test/astronomy_test.csv: row 2 has 5 columns; a question has 6 (question, A, B, C,"
                " D, answer)"
            ),
        ),
        (
            change_subject_files(dev_world_history=as_csv(((*WORLD_HISTORY[0][0], "more"),))),
            (
                "dev/world_history_dev.csv: row 1 has 7 columns; a question has 6 (question, A, B,"
                " C, D, answer)"
            ),
        ),
        (
            change_subject_files(
                test_astronomy=as_csv((ASTRONOMY[1][0], (*ASTRONOMY[1][1][:5], "E")))
            ),
            "test/astronomy_test.csv: row 2 has the answer 'E'; allowed: A, B, C, D",
        ),
        (
            change_subject_files(test_astronomy=as_csv(((*ASTRONOMY[1][0][:5], "BC"),))),
            "test/astronomy_test.csv: row 1 has the answer 'BC'; allowed: A, B, C, D",
        ),
        (
            change_subject_files(test_astronomy=as_csv(((*ASTRONOMY[1][0][:5], ""),))),
            "test/astronomy_test.csv: row 1 has the answer ''; allowed: A, B, C, D",
        ),
        (change_subject_files(test_world_history=b""), "test/world_history_test.csv: no rows"),
        (
            change_subject_files(dev_astronomy="é,1,2,3,4,A\n".encode("latin-1")),
            (
                "dev/astronomy_dev.csv: not CSV in UTF-8: 'utf-8' codec can't decode byte 0xe9 in"
                " position 0: invalid continuation byte"
            ),
        ),
        (
            change_subject_files(dev_astronomy=b'"a,1,2,3,4,A\n'),
            "dev/astronomy_dev.csv: not CSV in UTF-8: unexpected end of data",
        ),
        (
            change_subject_files(dev_world_history=as_csv((WORLD_HISTORY[0][0],))),
            "{}: dev/world_history_dev.csv has 1 rows; the case asks after 2 examples",
        ),
        (
            {"data/README.txt": b"x", "data/dev/astronomy_dev.csv": as_csv(SUBJECTS[0].dev)},
            (
                "{}: no test/*_test.csv in it; give the folder or tar that holds data/dev and"
                " data/test"
            ),
        ),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "tar.gz"])
def test_wrong_files_are_refused_in_one_line(
    files: dict[str, bytes], line: str, kind: str, tmp_path: Path
) -> None:
    folder, packed = tmp_path / "mmlu", tmp_path / "mmlu.tar.gz"
    source = write_folder(folder, files) if kind == "folder" else write_tar(packed, files, "w:gz")
    assert load_refusal(source) == line.format(source)


def test_a_row_number_counts_rows_and_not_lines(tmp_path: Path) -> None:
    rows = (ASTRONOMY[1][0], ASTRONOMY[1][1][:5])
    assert b"Which is\na planet?" in as_csv(rows)  # row 1 takes two lines
    assert "row 2 has 5" in load_refusal(
        write_folder(tmp_path / "x", change_subject_files(test_astronomy=as_csv(rows)))
    )


def test_another_number_of_subjects_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "x", format_subject_files(SUBJECTS))
    error_line = load_refusal(source, DATA.model_copy(update={"subjects": 57}))
    assert error_line == golden("2-subjects-the-case-has-57", source)


def test_a_case_of_real_data_without_a_source_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        mmlu.load_subjects(DATA, None)
    assert str(error.value) == (golden("this-size-needs-mmlu-give-its"))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "nowhere"
    assert (
        load_refusal(source)
        == f"data {str(source)!r} does not exist; give MMLU's folder or its .tar with --data"
    )


INVALID_TARS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "not a tar": (lambda made: b"name,size\n" * 100, "invalid header"),
    "empty": (lambda made: b"", "empty file"),
    "truncated gz": (
        lambda made: made.read_bytes()[:-200],
        "Compressed file ended before the end-of-stream marker was reached",
    ),
    "truncated tar": (lambda made: gunzip(made)[:900], "unexpected end of data"),
    "broken gz": (
        lambda made: invert_middle_bytes(gzip.compress(make_long_tar(), mtime=0)),
        "CRC check failed ",
    ),
    "garbled gz": (
        lambda made: overwrite_second_half(gzip.compress(make_long_tar(), mtime=0)),
        "Error -3 while decompressing data: ",
    ),
    "broken xz": (
        lambda made: invert_middle_bytes(lzma.compress(make_long_tar())),
        "Corrupt input data",
    ),
}


def overwrite_second_half(content: bytes) -> bytes:
    """Return the content with its second half replaced by 500 bytes 0xff."""
    return content[: len(content) // 2] + b"\xff" * 500


def make_long_tar() -> bytes:
    """Return a tar so long that its middle lies inside a CSV file."""
    rng = random.Random(0)
    text = "".join(f"{rng.random()},1,2,3,4,A\n" for _ in range(10_000)).encode()
    member = tarfile.TarInfo("data/test/astronomy_test.csv")
    member.size = len(text)
    return member.tobuf() + text + b"\0" * (-len(text) % 512 + 1024)


def invert_middle_bytes(content: bytes) -> bytes:
    """Return the content with 16 bytes in its middle inverted."""
    middle = len(content) // 2
    return (
        content[:middle]
        + bytes(255 - byte for byte in content[middle : middle + 16])
        + content[middle + 16 :]
    )


@pytest.mark.parametrize("name", INVALID_TARS)
def test_an_invalid_tar_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make_content, reason = INVALID_TARS[name]
    valid_tar = write_tar(tmp_path / "good.tar.gz", format_subject_files(SUBJECTS), "w:gz")
    source = tmp_path / "bad.tar"
    source.write_bytes(make_content(valid_tar))
    assert load_refusal(source).startswith(f"{source}: not a readable tar: {reason}")


def test_a_huge_member_is_refused_before_it_is_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("data/test/astronomy_test.csv")
    member.size = 1 << 40
    source = tmp_path / "x.tar"
    source.write_bytes(member.tobuf() + b"\0" * 1024)
    assert (
        load_refusal(source)
        == f"{source}: data/test/astronomy_test.csv is larger than 67108864 bytes"
    )


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "x", format_subject_files(SUBJECTS))
    path = source / "data" / "test" / "astronomy_test.csv"
    with path.open("r+b") as file:
        file.truncate((64 << 20) + 1)
    assert load_refusal(source) == f"{path}: larger than 67108864 bytes"


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_all_files_together_have_a_limit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = format_subject_files(SUBJECTS)
    source = (
        write_folder(tmp_path / "x", files)
        if kind == "folder"
        else write_tar(tmp_path / "x.tar", files)
    )
    size = sum(
        len(content) for name, content in files.items() if name.endswith(("_dev.csv", "_test.csv"))
    )
    monkeypatch.setattr(mmlu, "MAX_ALL_BYTES", size)
    assert mmlu.read_subjects(source) == SUBJECTS
    monkeypatch.setattr(mmlu, "MAX_ALL_BYTES", size - 1)
    assert (
        load_refusal(source)
        == f"{source}: its files are larger than {size - 1} bytes in all; MMLU has 7 MB"
    )


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tar(tmp_path / "x.tar", format_subject_files(SUBJECTS))
    monkeypatch.setattr(mmlu, "MAX_MEMBERS", 6)
    assert mmlu.read_subjects(source) == SUBJECTS
    monkeypatch.setattr(mmlu, "MAX_MEMBERS", 5)
    assert load_refusal(source) == f"{source}: more than 5 members; MMLU has 173"


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_members_that_are_not_files_are_ignored(kind: bytes, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_bytes(as_csv(SUBJECTS[0].test))
    source = tmp_path / "x.tar"
    write_tar(source, change_subject_files(test_astronomy=None))
    with tarfile.open(source, "a") as tar:
        member = tarfile.TarInfo("data/test/astronomy_test.csv")
        member.type, member.linkname = kind, str(secret)
        tar.addfile(member)
    assert load_refusal(source) == golden("test-astronomy_test-csv-is-missing-every", source)


def test_a_member_name_with_parent_folders_writes_nothing_outside(tmp_path: Path) -> None:
    files = {f"../../{name}": content for name, content in format_subject_files(SUBJECTS).items()}
    (tmp_path / "in").mkdir()
    assert mmlu.read_subjects(write_tar(tmp_path / "in" / "x.tar", files)) == SUBJECTS
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in", "x.tar"]


def test_prompts_equal_the_stored_texts() -> None:
    assert questions.format_prompt(SUBJECTS[1], SUBJECTS[1].test[0], 2) == (
        golden("the-following-are-multiple-choice-questions-3")
    )
    assert questions.format_prompt(SUBJECTS[0], SUBJECTS[0].test[1], 2, dropped=1) == (
        golden("the-following-are-multiple-choice-questions-2")
    )
    assert questions.format_prompt(SUBJECTS[0], SUBJECTS[0].test[1], 0) == (
        golden("the-following-are-multiple-choice-questions")
    )


def test_leading_shots_are_dropped_until_a_prompt_fits() -> None:
    tokenizer = WordHashTokenizer(512)
    subject, row = SUBJECTS[0], SUBJECTS[0].test[0]
    sizes = [
        len(tokenizer.encode([questions.format_prompt(subject, row, 2, dropped)])[0])
        for dropped in (0, 1, 2)
    ]
    assert sizes[0] > sizes[1] > sizes[2] > 16
    for dropped, size in enumerate(sizes):
        data = DATA.model_copy(update={"context": size})
        prompts = questions.encode_questions(
            [Subject("astronomy", subject.dev, (row,))], data, tokenizer, None, 0
        )
        assert prompts.rows == tokenizer.encode([questions.format_prompt(subject, row, 2, dropped)])
        assert prompts.shortened == (dropped > 0)
    data = DATA.model_copy(update={"context": sizes[2] - 1})
    with pytest.raises(RequestError) as error:
        questions.encode_questions(SUBJECTS, data, tokenizer, None, 0, location=mmlu.TEST_FILE)
    expected = (
        f"test/astronomy_test.csv: row 1 alone has {sizes[2]} tokens; the context is {sizes[2] - 1}"
    )
    assert str(error.value) == expected


def test_prompts_with_different_shots_are_in_different_groups() -> None:
    tokenizer = WordHashTokenizer(512)
    long, short = SUBJECTS[0].test
    size = len(tokenizer.encode([questions.format_prompt(SUBJECTS[0], short, 2)])[0])
    assert size < len(tokenizer.encode([questions.format_prompt(SUBJECTS[0], long, 2)])[0])
    prompts = questions.encode_questions(
        SUBJECTS, DATA.model_copy(update={"context": size}), tokenizer, None, 0
    )
    assert prompts.groups == [0, 1, 2]
    assert (prompts.shortened, prompts.index, prompts.gold, prompts.subject_of) == (
        1,
        [0, 1, 2],
        [1, 2, 0],
        [0, 0, 1],
    )
    assert prompts.subjects == ["astronomy", "world_history"]
    assert prompts.letters == [2, 3, 4, 5]
    assert questions.encode_questions(SUBJECTS, DATA, tokenizer, None, 0).groups == [0, 0, 1]


def test_a_sample_has_the_prompts_of_the_full_set() -> None:
    tokenizer, data = (
        WordHashTokenizer(512),
        MmluData(kind="mmlu", shots=3, context=512, subjects=3),
    )
    subjects = questions.generate_questions(
        "mmlu", GeneratedQuestionsConfig(subjects=3, questions=9, seed=4), 3
    )
    full_set = questions.encode_questions(subjects, data, tokenizer, None, 0)
    sample = questions.encode_questions(subjects, data, tokenizer, 11, 5)
    assert sample.index == choose_items(27, 11, 5)
    assert sample.rows == [full_set.rows[i] for i in sample.index]
    assert sample.gold == [full_set.gold[i] for i in sample.index]
    assert sample.subject_of == [full_set.subject_of[i] for i in sample.index]


def test_sampling_is_seeded_sorted_and_bounded() -> None:
    assert choose_items(14042, 8, 0) == [1246, 1972, 8014, 9551, 10137, 10491, 11834, 13462]
    assert choose_items(14042, 8, 0) == choose_items(14042, 8, 0)
    assert choose_items(14042, 8, 1) == [2427, 2888, 3597, 4339, 6201, 8132, 8906, 12811]
    assert choose_items(5, None, 3) == choose_items(5, 5, 3) == [0, 1, 2, 3, 4]
    for sample in (0, -1, 6):
        with pytest.raises(RequestError) as error:
            choose_items(5, sample, 0)
        assert str(error.value) == f"--sample {sample}: the data has 5 questions; allowed: 1 to 5"


def test_generated_questions_are_answerable_and_seeded() -> None:
    settings = GeneratedQuestionsConfig(subjects=8, questions=7, seed=2)
    subjects = questions.generate_questions("mmlu", settings, 5)
    assert subjects == questions.generate_questions("mmlu", settings, 5)
    assert subjects != questions.generate_questions(
        "mmlu", GeneratedQuestionsConfig(subjects=8, questions=7, seed=3), 5
    )
    names = [subject.name for subject in subjects]
    assert names == sorted(set(names))
    assert len(names) == 8
    letters: Counter[str] = Counter()
    for subject in subjects:
        assert (len(subject.dev), len(subject.test)) == (5, 7)
        for row in (*subject.dev, *subject.test):
            answer = row[1 + "ABCD".index(row[5])]
            assert f" the {answer} near " in row[0]
            assert len(set(row[1:5])) == 4
            letters[row[5]] += 1
    assert set(letters) == set("ABCD")


def test_generated_data_needs_no_source() -> None:
    data = DATA.model_copy(update={"made": GeneratedQuestionsConfig(subjects=2, questions=3)})
    assert mmlu.load_subjects(data, None) == (
        questions.generate_questions("mmlu", GeneratedQuestionsConfig(subjects=2, questions=3), 2),
        "made",
    )


def test_a_fingerprint_depends_on_every_field() -> None:
    tokenizer = WordHashTokenizer(512)
    fingerprints = {
        questions.fingerprint_questions(SUBJECTS, tokenizer),
        questions.fingerprint_questions(SUBJECTS, WordHashTokenizer(513)),
        questions.fingerprint_questions(SUBJECTS[:1], tokenizer),
    }
    for i in range(6):
        row = SUBJECTS[0].test[1]
        changed_row: McqRow = (*row[:i], "A" if i == 5 else "other", *row[i + 1 :])  # type: ignore[assignment]
        fingerprints.add(
            questions.fingerprint_questions(
                [
                    Subject("astronomy", SUBJECTS[0].dev, (SUBJECTS[0].test[0], changed_row)),
                    SUBJECTS[1],
                ],
                tokenizer,
            )
        )
    fingerprints.add(
        questions.fingerprint_questions(
            [Subject("anatomy", SUBJECTS[0].dev, SUBJECTS[0].test), SUBJECTS[1]], tokenizer
        )
    )
    fingerprints.add(
        questions.fingerprint_questions(
            [Subject("astronomy", SUBJECTS[0].test, SUBJECTS[0].dev), SUBJECTS[1]], tokenizer
        )
    )
    assert len(fingerprints) == 11
    assert questions.fingerprint_questions(list(SUBJECTS), tokenizer) in fingerprints


def test_an_answer_of_two_tokens_is_refused() -> None:
    class LetterTokenizer(WordHashTokenizer):
        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[ord(letter) for letter in text] for text in texts]

    with pytest.raises(RequestError) as error:
        questions.find_answer_tokens(LetterTokenizer(512))
    assert str(error.value) == golden("tokenizer-made-the-answer-is-not")


# Tests with the real set are in tests/real/test_mmlu_data.py.
