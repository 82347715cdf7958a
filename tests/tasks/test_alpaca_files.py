"""Test reading instruction data: every file layout gives the same conversations, and invalid files
are refused in one line.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from fixtures.alpaca import Words
from fixtures.golden import golden
from steelyard.errors import RequestError
from steelyard.tasks.alpaca import conversations, data
from steelyard.tasks.alpaca.data import Conversation
from steelyard.tasks.alpaca.task import GeneratedConversationsConfig

ELEMENTS = [
    {"instruction": "Name a cat.", "input": "", "output": "Tom"},
    {"instruction": "Count.", "input": "naïve “dogs”\n", "output": ""},
    {"instruction": "Go", "output": "no\nyes", "id": 7},
]
SAID = [
    Conversation((("human", "Name a cat."), ("assistant", "Tom"))),
    Conversation((("human", "Count.\nnaïve “dogs”\n"), ("assistant", ""))),
    Conversation((("human", "Go"), ("assistant", "no\nyes"))),
]
LONG = Conversation((("human", "a"), ("assistant", "b"), ("human", "c")), "Be kind.")


def line(*turns: tuple[object, object], **more: object) -> bytes:
    """Return one JSON line with a conversation of (speaker, text) turns and further keys."""
    return (
        json.dumps(
            {"id": "x", "conversations": [{"from": a, "value": b} for a, b in turns], **more}
        ).encode()
        + b"\n"
    )


LINES = (
    line(("human", "Name a cat."), ("gpt", "Tom"), instruction="")
    + line(("user", "Count.\nnaïve “dogs”\n"), ("assistant", ""))
    + line(("human", "Go"), ("gpt", "no\nyes"))
)


def refusal(source: Path) -> str:
    """Return the message with which reading `source` is refused, after checking that it is one
    line.
    """
    with pytest.raises(RequestError) as caught:
        data.read_conversations(source)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_every_layout_reads_the_same(tmp_path: Path) -> None:
    files = {
        "one/alpaca_data.json": json.dumps(ELEMENTS).encode(),
        "two/x.json": (
            b" \r\n" + json.dumps(ELEMENTS, indent=4, ensure_ascii=False).encode() + b"\n\n"
        ),
        "three/x.json.gz": gzip.compress(json.dumps(ELEMENTS).encode(), mtime=0),
        "four/x.jsonl": LINES,
        "five/x.jsonl": LINES[:-1].replace(b"\n", b"\r\n"),
        "six/x.jsonl.gz": gzip.compress(LINES[:40], mtime=0) + gzip.compress(LINES[40:], mtime=0),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(content)
        (path.parent / "README.md").touch()
        (path.parent / "tokenizer.json").touch()
        (path.parent / "more.json").mkdir()
        assert (
            data.read_conversations(path)
            == data.read_conversations(path.parent)
            == (SAID, path.name)
        ), name
    other = tmp_path / "no suffix"
    other.write_bytes(gzip.compress(LINES, mtime=0))
    assert data.read_conversations(other) == (SAID, "no suffix")


def test_the_joint_stands_between_an_instruction_and_its_input_alone(tmp_path: Path) -> None:
    """The separator applies to alpaca's JSON only: lines of conversations, such as FlagAI's file,
    hold the joined text already.
    """
    elements, lines = tmp_path / "x.json", tmp_path / "x.jsonl"
    elements.write_text(json.dumps(ELEMENTS))
    joined = Conversation((("human", "Count.\n\n\nnaïve “dogs”\n"), ("assistant", "")))
    assert data.read_conversations(elements, "\n\n\n")[0] == [SAID[0], joined, SAID[2]]
    lines.write_bytes(LINES.replace(b"Count.\\n", b"Count.\\n\\n\\n"))
    assert (
        data.read_conversations(lines)[0]
        == data.read_conversations(lines, "\n\n\n")[0]
        == [SAID[0], joined, SAID[2]]
    )
    assert data.fingerprint_conversations(
        data.read_conversations(lines)[0], Words()
    ) == data.fingerprint_conversations(data.read_conversations(elements, "\n\n\n")[0], Words())
    assert data.fingerprint_conversations(
        data.read_conversations(elements)[0], Words()
    ) != data.fingerprint_conversations(data.read_conversations(lines)[0], Words())


def test_turns_and_an_instruction(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line(("human", "a"), ("gpt", "b"), ("user", "c"), instruction="Be kind."))
    assert data.read_conversations(path) == ([LONG], "x.jsonl")


def test_a_folder_holds_one(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert (
        refusal(nowhere)
        == f"data {str(nowhere)!r} does not exist; give alpaca_data.json or the folder that holds"
        " it with --data"
    )
    next_step = "give a folder with one .json or .jsonl (.gz), or that file, with --data"
    assert refusal(tmp_path) == f"{tmp_path}: no .json or .jsonl in it; {next_step}"
    for name in "dbca":
        (tmp_path / f"{name}.json").touch()
    assert refusal(tmp_path) == f"{tmp_path}: a.json, b.json, c.json, … in it; {next_step}"


ALPACA = 'an element is {"instruction": "…", "input": "…", "output": "…"}'
LINE = (
    'a line is {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}],'
    ' "instruction": "…"}'
)
GOOD = b'{"instruction": "a", "output": "b"}'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b"",
            (
                "is empty; allowed: alpaca's JSON, which is a list, or conversations, one object a"
                " line"
            ),
        ),
        (
            b" \n",
            (
                "is empty; allowed: alpaca's JSON, which is a list, or conversations, one object a"
                " line"
            ),
        ),
        (
            b"\xef\xbb\xbf[]",
            (
                "begins with b'\\xef'; allowed: alpaca's JSON, which is a list, or conversations,"
                " one object a line"
            ),
        ),
        (
            b'"a"',
            (
                "begins with b'\"'; allowed: alpaca's JSON, which is a list, or conversations, one"
                " object a line"
            ),
        ),
        (b"[ ]", "an empty list; alpaca's data has 52002 elements"),
        (b"[", f"element 1 is not JSON: Expecting value (column 2); {ALPACA}"),
        (
            b"[" + GOOD + b",\n]",
            f"element 2 is not JSON: Expecting value (line 2, column 1); {ALPACA}",
        ),
        (b"[" + GOOD, "'' behind element 1; the file is one JSON list"),
        (b"[" + GOOD + b" " + GOOD + b"]", "'{' behind element 1; the file is one JSON list"),
        (b"[" + GOOD + b"] []", "'[]' behind the list; the file is one JSON list"),
        (
            b'["\xe9"]',
            (
                "not UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 2: invalid"
                " continuation byte"
            ),
        ),
        (b'[{"x": NaN}]', f"element 1 is not JSON: NaN is no number; {ALPACA}"),
        (b'[{"x": -Infinity}]', f"element 1 is not JSON: -Infinity is no number; {ALPACA}"),
        (b'[{"x": 1, "x": 1}]', f"element 1 is not JSON: a key stands twice; {ALPACA}"),
        (b"[" + GOOD + b", 5]", f"element 2 is 5; {ALPACA}"),
        (b'[{"instruction": "a", "input": ""}]', f"element 1 has no output; {ALPACA}"),
        (b'[{"output": "a", "input": ""}]', f"element 1 has no instruction; {ALPACA}"),
        (b'[{"instruction": "a", "output": null}]', "element 1: output is None; allowed: a string"),
        (b'[{"instruction": 5, "output": "a"}]', "element 1: instruction is 5; allowed: a string"),
        (
            b'[{"instruction": "a", "input": null, "output": "a"}]',
            "element 1: input is None; allowed: a string",
        ),
        (
            b'[{"instruction": "a", "output": "\\ud800"}]',
            "element 1: output is '\\ud800'; a text must be valid Unicode",
        ),
        (b"{}", f"line 1 is {{}}; {LINE}"),
        (GOOD, f"line 1 is {{'instruction': 'a', 'output': 'b'}}; {LINE}"),
        (LINES + b"\n", f"line 4 is not JSON in UTF-8: Expecting value (column 1); {LINE}"),
        (LINES + b"[]", f"line 4 is []; {LINE}"),
        (
            LINES + b'{"conversations": []',
            f"line 4 is not JSON in UTF-8: Expecting ',' delimiter (column 21); {LINE}",
        ),
        (LINES + b'{"conversations": {}}', f"line 4 is {{'conversations': {{}}}}; {LINE}"),
        (b'{"x": NaN}', f"line 1 is not JSON in UTF-8: NaN is no number; {LINE}"),
        (
            b'{"x": "\xe9"}',
            "line 1 is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 7:"
            " invalid continuation byte; " + LINE,
        ),
        (b'{"conversations": []}', "line 1: no turn of the assistant; it has nothing to train on"),
        (line(("human", "a")), "line 1: no turn of the assistant; it has nothing to train on"),
        (
            line(("gpt", "a")),
            "line 1: turn 1 is the assistant's; turns alternate, and the human begins",
        ),
        (
            line(("human", "a"), ("user", "b")),
            "line 1: turn 2 is the human's; turns alternate, and the human begins",
        ),
        (
            line(("human", "a"), ("gpt", "b"), ("gpt", "c")),
            "line 1: turn 3 is the assistant's; turns alternate, and the human begins",
        ),
        (
            LINES + line(("bot", "a")),
            "line 4: turn 1 is from 'bot'; allowed: human, user, gpt, assistant",
        ),
        (
            line((["human"], "a")),
            "line 1: turn 1 is from ['human']; allowed: human, user, gpt, assistant",
        ),
        (line(("human", 5)), "line 1: the value of turn 1 is 5; allowed: a string"),
        (
            line(("human", "a"), ("gpt", "\ud800")),
            "line 1: the value of turn 2 is '\\ud800'; a text must be valid Unicode",
        ),
        (
            line(("human", "a"), ("gpt", "b"), instruction=None),
            "line 1: instruction is None; allowed: a string",
        ),
        (
            b'{"conversations": [{"from": "human"}]}',
            'line 1: turn 1 is {\'from\': \'human\'}; a turn is {"from": "human", "value": "…"}',
        ),
        (
            b'{"conversations": ["a"]}',
            'line 1: turn 1 is \'a\'; a turn is {"from": "human", "value": "…"}',
        ),
        (
            gzip.compress(LINES, mtime=0)[:-9],
            "cannot be read: Compressed file ended before the end-of-stream marker was reached",
        ),
        (
            b"\x1f\x8b\x08\x00" + b"\xff" * 40,
            "cannot be read: Error -3 while decompressing data: invalid block type",
        ),
    ],
)
def test_files_that_are_none(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert refusal(path) == f"{path}: {reason}"


@pytest.mark.parametrize("opening", [b"[", b'{"x":'])
def test_nesting_without_end_is_refused(opening: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(opening * 200_000)
    assert re.match(rf"{re.escape(str(path))}: (element|line) 1 is not JSON", refusal(path))


def test_a_long_value_is_shown_short(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(json.dumps([["a\n" * 10_000] * 100]).encode())
    assert len(refusal(path)) < len(str(path)) + 400


def test_files_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = tmp_path / "x.jsonl", tmp_path / "x.jsonl.gz"
    plain.write_bytes(LINES)
    packed.write_bytes(gzip.compress(LINES, mtime=0))
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", len(LINES))
    monkeypatch.setattr(conversations, "MAX_GZIP_BYTES", packed.stat().st_size)
    assert data.read_conversations(plain)[0] == data.read_conversations(packed)[0] == SAID
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", len(LINES) - 1)
    for path in (plain, packed):
        assert (
            refusal(path) == f"{path}: larger than {len(LINES) - 1} bytes; alpaca's data has 23 MB"
        )
    monkeypatch.setattr(conversations, "MAX_GZIP_BYTES", packed.stat().st_size - 1)
    assert refusal(packed).startswith(
        f"{packed}: larger than {packed.stat().st_size - 1} bytes, the limit for a compressed file"
    )


def test_a_file_that_unpacks_without_end_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", 4 << 20)
    path = tmp_path / "x.json"
    path.write_bytes(gzip.compress(b" " * (64 << 20), 1, mtime=0))
    assert refusal(path) == golden("larger-than-4194304-bytes-alpaca-data", path)


def test_made_conversations_can_be_written_and_read(tmp_path: Path) -> None:
    made = data.generate_conversations(GeneratedConversationsConfig(conversations=20))
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(line(*one.turns, instruction=one.instruction) for one in made))
    assert data.read_conversations(path) == (made, "x.jsonl")
