"""Test reading instruction data: every file layout gives the same conversations, and invalid files
are refused in one line.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from fixtures.alpaca import TableTokenizer
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
CONVERSATIONS = [
    Conversation((("human", "Name a cat."), ("assistant", "Tom"))),
    Conversation((("human", "Count.\nnaïve “dogs”\n"), ("assistant", ""))),
    Conversation((("human", "Go"), ("assistant", "no\nyes"))),
]
THREE_TURNS = Conversation((("human", "a"), ("assistant", "b"), ("human", "c")), "Be kind.")


def conversation_line(*turns: tuple[object, object], **more: object) -> bytes:
    """Return one JSON line with a conversation of (speaker, text) turns and further keys."""
    return (
        json.dumps(
            {
                "id": "x",
                "conversations": [{"from": speaker, "value": text} for speaker, text in turns],
                **more,
            }
        ).encode()
        + b"\n"
    )


LINES = (
    conversation_line(("human", "Name a cat."), ("gpt", "Tom"), instruction="")
    + conversation_line(("user", "Count.\nnaïve “dogs”\n"), ("assistant", ""))
    + conversation_line(("human", "Go"), ("gpt", "no\nyes"))
)


def read_refusal(source: Path) -> str:
    """Return the message with which reading `source` is refused, after checking that it is one
    line.
    """
    with pytest.raises(RequestError) as error:
        data.read_conversations(source)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_every_file_layout_gives_the_same_conversations(tmp_path: Path) -> None:
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
            == (CONVERSATIONS, path.name)
        ), name
    unnamed = tmp_path / "no suffix"
    unnamed.write_bytes(gzip.compress(LINES, mtime=0))
    assert data.read_conversations(unnamed) == (CONVERSATIONS, "no suffix")


def test_the_separator_joins_an_instruction_and_its_input_only(tmp_path: Path) -> None:
    """The separator applies to alpaca's JSON only: lines of conversations, such as FlagAI's file,
    hold the joined text already.
    """
    elements, lines = tmp_path / "x.json", tmp_path / "x.jsonl"
    elements.write_text(json.dumps(ELEMENTS))
    joined = Conversation((("human", "Count.\n\n\nnaïve “dogs”\n"), ("assistant", "")))
    assert data.read_conversations(elements, "\n\n\n")[0] == [
        CONVERSATIONS[0],
        joined,
        CONVERSATIONS[2],
    ]
    lines.write_bytes(LINES.replace(b"Count.\\n", b"Count.\\n\\n\\n"))
    assert (
        data.read_conversations(lines)[0]
        == data.read_conversations(lines, "\n\n\n")[0]
        == [CONVERSATIONS[0], joined, CONVERSATIONS[2]]
    )
    assert data.fingerprint_conversations(
        data.read_conversations(lines)[0], TableTokenizer()
    ) == data.fingerprint_conversations(
        data.read_conversations(elements, "\n\n\n")[0], TableTokenizer()
    )
    assert data.fingerprint_conversations(
        data.read_conversations(elements)[0], TableTokenizer()
    ) != data.fingerprint_conversations(data.read_conversations(lines)[0], TableTokenizer())


def test_a_line_may_have_three_turns_and_an_instruction(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        conversation_line(("human", "a"), ("gpt", "b"), ("user", "c"), instruction="Be kind.")
    )
    assert data.read_conversations(path) == ([THREE_TURNS], "x.jsonl")


def test_a_folder_must_hold_exactly_one_data_file(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert (
        read_refusal(missing)
        == f"data {str(missing)!r} does not exist; give alpaca_data.json or the folder that holds"
        " it with --data"
    )
    next_step = "give a folder with one .json or .jsonl (.gz), or that file, with --data"
    assert read_refusal(tmp_path) == f"{tmp_path}: no .json or .jsonl in it; {next_step}"
    for name in "dbca":
        (tmp_path / f"{name}.json").touch()
    assert read_refusal(tmp_path) == f"{tmp_path}: a.json, b.json, c.json, … in it; {next_step}"


ELEMENT_FORMAT = 'an element is {"instruction": "…", "input": "…", "output": "…"}'
LINE_FORMAT = (
    'a line is {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}],'
    ' "instruction": "…"}'
)
VALID_ELEMENT = b'{"instruction": "a", "output": "b"}'


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
        (b"[", f"element 1 is not JSON: Expecting value (column 2); {ELEMENT_FORMAT}"),
        (
            b"[" + VALID_ELEMENT + b",\n]",
            f"element 2 is not JSON: Expecting value (line 2, column 1); {ELEMENT_FORMAT}",
        ),
        (b"[" + VALID_ELEMENT, "'' behind element 1; the file is one JSON list"),
        (
            b"[" + VALID_ELEMENT + b" " + VALID_ELEMENT + b"]",
            "'{' behind element 1; the file is one JSON list",
        ),
        (b"[" + VALID_ELEMENT + b"] []", "'[]' behind the list; the file is one JSON list"),
        (
            b'["\xe9"]',
            (
                "not UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 2: invalid"
                " continuation byte"
            ),
        ),
        (b'[{"x": NaN}]', f"element 1 is not JSON: NaN is not allowed in JSON; {ELEMENT_FORMAT}"),
        (
            b'[{"x": -Infinity}]',
            f"element 1 is not JSON: -Infinity is not allowed in JSON; {ELEMENT_FORMAT}",
        ),
        (b'[{"x": 1, "x": 1}]', f"element 1 is not JSON: a key is repeated; {ELEMENT_FORMAT}"),
        (b"[" + VALID_ELEMENT + b", 5]", f"element 2 is 5; {ELEMENT_FORMAT}"),
        (b'[{"instruction": "a", "input": ""}]', f"element 1 has no output; {ELEMENT_FORMAT}"),
        (b'[{"output": "a", "input": ""}]', f"element 1 has no instruction; {ELEMENT_FORMAT}"),
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
        (b"{}", f"line 1 is {{}}; {LINE_FORMAT}"),
        (VALID_ELEMENT, f"line 1 is {{'instruction': 'a', 'output': 'b'}}; {LINE_FORMAT}"),
        (LINES + b"\n", f"line 4 is not JSON in UTF-8: Expecting value (column 1); {LINE_FORMAT}"),
        (LINES + b"[]", f"line 4 is []; {LINE_FORMAT}"),
        (
            LINES + b'{"conversations": []',
            f"line 4 is not JSON in UTF-8: Expecting ',' delimiter (column 21); {LINE_FORMAT}",
        ),
        (LINES + b'{"conversations": {}}', f"line 4 is {{'conversations': {{}}}}; {LINE_FORMAT}"),
        (b'{"x": NaN}', f"line 1 is not JSON in UTF-8: NaN is not allowed in JSON; {LINE_FORMAT}"),
        (
            b'{"x": "\xe9"}',
            "line 1 is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 7:"
            " invalid continuation byte; " + LINE_FORMAT,
        ),
        (b'{"conversations": []}', "line 1: no turn of the assistant; it has nothing to train on"),
        (
            conversation_line(("human", "a")),
            "line 1: no turn of the assistant; it has nothing to train on",
        ),
        (
            conversation_line(("gpt", "a")),
            "line 1: turn 1 is the assistant's; turns alternate, and the human begins",
        ),
        (
            conversation_line(("human", "a"), ("user", "b")),
            "line 1: turn 2 is the human's; turns alternate, and the human begins",
        ),
        (
            conversation_line(("human", "a"), ("gpt", "b"), ("gpt", "c")),
            "line 1: turn 3 is the assistant's; turns alternate, and the human begins",
        ),
        (
            LINES + conversation_line(("bot", "a")),
            "line 4: turn 1 is from 'bot'; allowed: human, user, gpt, assistant",
        ),
        (
            conversation_line((["human"], "a")),
            "line 1: turn 1 is from ['human']; allowed: human, user, gpt, assistant",
        ),
        (conversation_line(("human", 5)), "line 1: the value of turn 1 is 5; allowed: a string"),
        (
            conversation_line(("human", "a"), ("gpt", "\ud800")),
            "line 1: the value of turn 2 is '\\ud800'; a text must be valid Unicode",
        ),
        (
            conversation_line(("human", "a"), ("gpt", "b"), instruction=None),
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
def test_invalid_files_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert read_refusal(path) == f"{path}: {reason}"


@pytest.mark.parametrize("opening", [b"[", b'{"x":'])
def test_very_deep_nesting_is_refused(opening: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(opening * 200_000)
    assert re.match(rf"{re.escape(str(path))}: (element|line) 1 is not JSON", read_refusal(path))


def test_a_refusal_abbreviates_a_long_value(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(json.dumps([["a\n" * 10_000] * 100]).encode())
    assert len(read_refusal(path)) < len(str(path)) + 400


def test_plain_and_compressed_files_have_size_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = tmp_path / "x.jsonl", tmp_path / "x.jsonl.gz"
    plain.write_bytes(LINES)
    packed.write_bytes(gzip.compress(LINES, mtime=0))
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", len(LINES))
    monkeypatch.setattr(conversations, "MAX_GZIP_BYTES", packed.stat().st_size)
    assert data.read_conversations(plain)[0] == data.read_conversations(packed)[0] == CONVERSATIONS
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", len(LINES) - 1)
    for path in (plain, packed):
        assert (
            read_refusal(path)
            == f"{path}: larger than {len(LINES) - 1} bytes; alpaca's data has 23 MB"
        )
    monkeypatch.setattr(conversations, "MAX_GZIP_BYTES", packed.stat().st_size - 1)
    assert read_refusal(packed).startswith(
        f"{packed}: larger than {packed.stat().st_size - 1} bytes, the limit for a compressed file"
    )


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_FILE_BYTES", 4 << 20)
    path = tmp_path / "x.json"
    path.write_bytes(gzip.compress(b" " * (64 << 20), 1, mtime=0))
    assert read_refusal(path) == golden("larger-than-4194304-bytes-alpaca-data", path)


def test_generated_conversations_can_be_written_and_read(tmp_path: Path) -> None:
    generated = data.generate_conversations(GeneratedConversationsConfig(conversations=20))
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b"".join(
            conversation_line(*conversation.turns, instruction=conversation.instruction)
            for conversation in generated
        )
    )
    assert data.read_conversations(path) == (generated, "x.jsonl")
