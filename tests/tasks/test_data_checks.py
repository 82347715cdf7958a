"""Test that data files of another task or format are refused by the parent, in one line, before a
worker starts.
"""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fixtures.commands import Shell
from steelyard import tasks
from steelyard.errors import RequestError
from steelyard.tasks.alpaca import conversations

QUESTION_ROW = b"Which?,one,two,three,four,A\n"
CONVERSATION_LINE = {
    "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
}
RECORD_LINE = {
    "passage": {"text": "Ada met Bo.", "entities": [{"start": 0, "end": 2}]},
    "qas": [{"query": "@placeholder met Bo.", "answers": [{"text": "Ada"}]}],
}


def write_mmlu_folder(folder: Path, row: bytes = QUESTION_ROW) -> Path:
    """Write a folder of MMLU with one subject and return it."""
    for split in ("dev", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / f"anatomy_{split}.csv").write_bytes(row)
    return folder


def write_tar(path: Path, name: str, content: bytes = QUESTION_ROW) -> Path:
    """Write a gzipped tar with one member and return its path."""
    with tarfile.open(path, "w:gz") as file:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    return path


def write_file(path: Path, content: object) -> Path:
    """Write bytes, or any other value as JSON, to a file, make its folder, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def write_token_files(folder: Path, **index: object) -> Path:
    """Write a pair of token files with four tokens, `index` replacing the arrays of its index, and
    return the prefix of the pair.
    """
    folder.mkdir(exist_ok=True)
    np.save(folder / "owt_ids.npy", np.arange(4, dtype=np.int32))
    np.savez(folder / "owt_idx.npz", **(index or {"lens": np.array([4]), "docs": np.array([0, 1])}))
    return folder / "owt"


def write_record_folder(folder: Path, train: object, val: object) -> Path:
    """Write train.jsonl and val.jsonl of ReCoRD and return their folder."""
    write_file(folder / "train.jsonl", train)
    return write_file(folder / "val.jsonl", val).parent


VALID_DATA: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a folder of MMLU": ("mmlu", lambda path: write_mmlu_folder(path / "mmlu")),
    "a tar of MMLU": (
        "mmlu",
        lambda path: write_tar(path / "mmlu.tgz", "data/test/anatomy_test.csv"),
    ),
    "LAMBADA": (
        "lambada",
        lambda path: write_file(path / "lambada_test.jsonl", {"text": "two words"}),
    ),
    "alpaca": (
        "alpaca",
        lambda path: write_file(
            path / "a.json", [{"instruction": "a", "input": "", "output": "b"}] * 2
        ),
    ),
    "conversations": (
        "alpaca",
        lambda path: write_file(
            path / "a.jsonl.gz", gzip.compress(json.dumps(CONVERSATION_LINE).encode())
        ),
    ),
    "token files": ("openwebtext", lambda path: write_token_files(path / "owt")),
    "ReCoRD": (
        "superglue_record",
        lambda path: write_record_folder(path / "record", RECORD_LINE, RECORD_LINE),
    ),
}
INVALID_DATA: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "no tar": ("mmlu", lambda path: write_file(path / "x.tar", b"no tar"), "not a readable tar: "),
    "another tar": (
        "mmlu",
        lambda path: write_tar(path / "x.tgz", "a.txt"),
        "no test/*_test.csv in it; give the folder or tar",
    ),
    "another folder": (
        "mmlu",
        lambda path: path,
        "no test/*_test.csv in it; give the folder or tar",
    ),
    "five columns": (
        "mmlu",
        lambda path: write_mmlu_folder(path / "m", b"a,b,c,d,A\n"),
        "row 1 has 5 columns; a question has 6",
    ),
    "no JSON lines": (
        "lambada",
        lambda path: write_file(path / "x", b"text\n"),
        "line 1 is not JSON in UTF-8",
    ),
    "another key": ("lambada", lambda path: write_file(path / "x", {"words": ""}), "line 1 is "),
    "an empty file": (
        "lambada",
        lambda path: write_file(path / "x", b""),
        "no lines; LAMBADA's test set has 5153",
    ),
    "no passages": ("lambada", lambda path: path, "no lambada_test.jsonl in it"),
    "no JSON": (
        "alpaca",
        lambda path: write_file(path / "x", b"%PDF"),
        "begins with b'%'; allowed: alpaca's JSON",
    ),
    "no instruction": (
        "alpaca",
        lambda path: write_file(path / "x", [{"output": "b"}]),
        "element 1 has no instruction",
    ),
    "no turns": (
        "alpaca",
        lambda path: write_file(path / "x", {"a": 1}),
        "line 1 is {'a': 1}; a line is ",
    ),
    "no token file": (
        "openwebtext",
        lambda path: write_file(path / "x.txt", b"text"),
        "not a token file; allowed: NAME_ids.npy",
    ),
    "no .npy": (
        "openwebtext",
        lambda path: (
            write_file(path / "x_ids.npy", b"text") and write_file(path / "x_idx.npz", b"text")
        ),
        "not a .npy array: ",
    ),
    "another index": (
        "openwebtext",
        lambda path: write_token_files(path / "owt", lens=np.array([4])),
        "no docs in it",
    ),
    "one file of a pair": (
        "openwebtext",
        lambda path: write_file(path / "x_ids.npy", b""),
        "is missing; a pair needs both files",
    ),
    "a file of ReCoRD": (
        "superglue_record",
        lambda path: write_file(path / "train.jsonl", b""),
        "is not a folder",
    ),
    "no queries": (
        "superglue_record",
        lambda path: write_record_folder(path / "r", RECORD_LINE, {"a": 1}),
        "val.jsonl: line 1 is ",
    ),
    "an empty set": (
        "superglue_record",
        lambda path: write_record_folder(path / "r", b"", RECORD_LINE),
        "train.jsonl: no queries",
    ),
}


@pytest.mark.parametrize("name", VALID_DATA)
def test_a_task_accepts_its_own_data(name: str, tmp_path: Path) -> None:
    task, make = VALID_DATA[name]
    tasks.find_task(task).check_data(make(tmp_path))


@pytest.mark.parametrize("name", INVALID_DATA)
def test_a_task_refuses_other_data(name: str, tmp_path: Path) -> None:
    task, make, fragment = INVALID_DATA[name]
    with pytest.raises(RequestError) as error:
        tasks.find_task(task).check_data(make(tmp_path))
    assert fragment in str(error.value)


def test_a_data_check_reads_only_the_beginning_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors beyond the first BEGIN_BYTES are left to the worker, and a first element longer than
    these is accepted.
    """
    monkeypatch.setattr(conversations, "BEGIN_BYTES", 64)
    element, row = {"instruction": "é" * 10, "output": "b"}, tasks.find_task("alpaca")
    row.check_data(
        write_file(tmp_path / "1.json", json.dumps([element, 1], ensure_ascii=False).encode())
    )
    row.check_data(
        write_file(
            tmp_path / "2.json",
            json.dumps([{**element, "output": "é" * 99}], ensure_ascii=False).encode(),
        )
    )
    row.check_data(write_file(tmp_path / "3.jsonl", {**CONVERSATION_LINE, "instruction": "a" * 99}))


def test_every_shipped_task_has_a_data_check() -> None:
    assert [row.name for row in tasks.load_tasks().values() if not row.data_check] == []


def test_no_run_starts_with_another_tasks_data(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "steelyard.run.parent.run_case", lambda *_: pytest.fail("a run was started")
    )
    path = write_file(shell.folder / "lambada.jsonl", {"text": "two words"})
    result = shell.run_in_process(
        "run", "llama1-7b-openwebtext", "--data", path, "--accelerator", "cpu", "--out", shell.out
    )
    assert (result.code, result.out, len(result.lines)) == (2, "", 1)
    assert result.lines[0].startswith(f"error: {path}: not a token file; ")
