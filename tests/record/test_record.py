"""Tests of records: they are written whole or not at all, never overwritten, and every change is
detected.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from fixtures.commands import Shell
from fixtures.golden import golden
from steelyard import cli
from steelyard.case import case
from steelyard.errors import LostError, RequestError
from steelyard.metrics.verify import verify_record
from steelyard.record import record, record_file
from steelyard.record.record import (
    Record,
    make_record_file_name,
    read_record,
    record_to_json,
    seal_record,
    to_canonical_bytes,
    write_record,
)
from steelyard.record.run_facts import EngineDetails

FLIPS = 200


@pytest.fixture(scope="session")
def made(smoke: dict[str, Path]) -> Record:
    """Return the record of a real smoke run in the closed division."""
    return read_record(smoke["closed"])


def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Run a command in this process, which is fast enough for hundreds of runs; return exit code,
    stdout and stderr.
    """
    handler_before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["steelyard", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    signal.signal(signal.SIGTERM, handler_before)
    out, err = capsys.readouterr()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, out, err


RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Return a function that runs a command in this process and returns exit code, stdout and
    stderr.
    """
    return lambda *arguments: run_command(capsys, monkeypatch, *map(str, arguments))


def test_bytes_are_canonical(smoke: dict[str, Path], made: Record) -> None:
    raw = smoke["closed"].read_bytes()
    assert raw == to_canonical_bytes(record_to_json(made))
    assert raw.endswith(b"}\n")
    assert raw.count(b"\n") == 1
    # fields of some runs
    optional_fields = ("checkpoints", "profile", "providers", "requests", "stepped_down")
    required_fields = [name for name in Record.model_fields if name not in optional_fields]
    assert list(json.loads(raw)) == ["schema", *required_fields[1:]]
    assert to_canonical_bytes({"b": 1.0, "a": ["ü", None]}) == '{"b":1.0,"a":["ü",null]}\n'.encode()
    for not_finite in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            to_canonical_bytes({"value": not_finite})


def test_file_name_describes_the_record(smoke: dict[str, Path], made: Record) -> None:
    pattern = rf"\d{{8}}T\d{{6}}-llama2-7b-mmlu-smoke-closed-fp32-torch-{made.id[:8]}\.json"
    assert re.fullmatch(pattern, make_record_file_name(made))
    assert smoke["closed"].name == make_record_file_name(made)


@pytest.mark.parametrize("name", ["../../../etc/x", "a/b", "", "a\nb", "ü" * 300, "x" * 300, "."])
def test_file_name_stays_in_its_folder(made: Record, tmp_path: Path, name: str) -> None:
    hostile_record = made.model_copy(
        update={"case": made.case.model_copy(update={"precision": name})}
    )
    path = write_record(seal_record(hostile_record), tmp_path)
    assert path.parent == tmp_path
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,250}", path.name)


def test_record_is_never_overwritten(made: Record, tmp_path: Path) -> None:
    path = write_record(made, tmp_path)
    first = path.read_bytes()
    other = seal_record(made.model_copy(update={"notes": ["another"]}))
    assert make_record_file_name(other) == path.name
    with pytest.raises(LostError, match="File exists"):
        write_record(other, tmp_path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_folder_without_hard_links_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    record_file.prove_writable(tmp_path / "new" / "folder")
    monkeypatch.setattr(os, "link", refuse_link)
    with pytest.raises(RequestError, match="Operation not permitted; choose another with --out"):
        record_file.prove_writable(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


KILLED_WRITER_PROGRAM = """
import os, signal, sys
from pathlib import Path
from steelyard.record import record, record_file
place, name, call = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
found, calls, real = record.read_record(Path(sys.argv[1])), 0, getattr(os, name)
def patched(*arguments):
    global calls
    calls += 1
    if calls == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(os, name, patched)
record.write_record(found, place)
"""


@pytest.mark.parametrize("name,call,visible", [("fsync", 1, 0), ("link", 1, 0), ("fsync", 2, 1)])
def test_kill_while_writing_leaves_a_whole_record_or_none(
    shell: Shell, smoke: dict[str, Path], name: str, call: int, visible: int
) -> None:
    """Before the file is linked no record is visible; after it the whole record is."""
    shell.out.mkdir()
    command = [
        sys.executable,
        "-c",
        KILLED_WRITER_PROGRAM,
        str(smoke["closed"]),
        str(shell.out),
        name,
        str(call),
    ]
    assert subprocess.run(command, env=shell.env(), check=False).returncode == -signal.SIGKILL
    visible_files = list(shell.out.glob("[!.]*"))
    assert len(visible_files) == visible
    assert all(path.read_bytes() == smoke["closed"].read_bytes() for path in visible_files)
    assert [path for path in shell.out.glob("*.json") if verify_record(path)] == []


@pytest.mark.full
def test_kill_at_any_time_leaves_only_whole_records(shell: Shell, smoke: dict[str, Path]) -> None:
    shell.out.mkdir()
    code = (
        "import sys\nfrom pathlib import Path\nfrom steelyard.record import record\nfound ="
        " record.read(Path(sys.argv[1]))\n"
    )
    code += "print('ready', flush=True)\nfor i in range(10**9):\n"
    code += "    record.write(found.model_copy(update={'id': f'{i:08}'}), Path(sys.argv[2]))\n"
    rng = random.Random("kill")
    for _ in range(12):
        command = [sys.executable, "-c", code, str(smoke["closed"]), str(shell.out)]
        process = subprocess.Popen(command, env=shell.env(), stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(timeout=rng.uniform(0.0, 0.05))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        process.stdout.close()
        size = smoke["closed"].stat().st_size
        for path in shell.out.glob("[!.]*"):
            assert abs(path.stat().st_size - size) < 64
            json.loads(path.read_bytes())
            path.unlink()


def test_fresh_records_verify(smoke: dict[str, Path], run: RunCommand) -> None:
    code, out, err = run("verify", *smoke.values())
    assert (code, err) == (0, "")
    assert out == "".join(f"ok  {path}\n  not signed\n" for path in smoke.values())
    code, out, _ = run("verify", smoke["open"].parent, "--json")
    signature = {
        "state": "none",
        "name": None,
        "key_type": None,
        "fingerprint": None,
        "detail": None,
    }
    expected = {
        "path": str(smoke["open"]),
        "ok": True,
        "wrong": [],
        "remarks": [],
        "signature": signature,
    }
    assert json.loads(out) == {"records": [expected]}


def test_every_changed_byte_is_detected(
    smoke: dict[str, Path], tmp_path: Path, run: RunCommand
) -> None:
    raw = smoke["closed"].read_bytes()
    rng = random.Random("flips")
    path = tmp_path / "record.json"
    exit_codes = set()
    positions = [0, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(FLIPS))]
    for position in positions:
        changed = bytearray(raw)
        changed[position] ^= rng.randrange(1, 256)
        path.write_bytes(changed)
        code, out, err = run("verify", path)
        assert code in (1, 2), (position, raw[position - 20 : position + 20])
        assert (code == 1 and out.startswith("WRONG") and not err) or (
            code == 2 and not out and len(err.splitlines()) == 1
        )
        exit_codes.add(code)
    assert exit_codes == {1, 2}


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b" ",
        lambda raw: raw + b"\n",
        lambda raw: raw[:4000],
        lambda raw: b"",
    ],
)
def test_added_or_missing_bytes_are_detected(
    smoke: dict[str, Path], tmp_path: Path, run: RunCommand, change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(change(smoke["closed"].read_bytes()))
    assert run("verify", path)[0] in (1, 2)


def test_other_spellings_of_the_same_values_are_detected(made: Record, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    table = record_to_json(made)
    for text in (
        json.dumps(table) + "\n",
        json.dumps(table, separators=(",", ":"), sort_keys=True) + "\n",
        to_canonical_bytes(table).decode().replace('"schema":1,', '"schema":1,"schema":1,', 1),
    ):
        path.write_text(text)
        assert verify_record(path)[0] == golden("the-bytes-are-not-those-that")


def verify_forgery(
    made: Record, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Return the problems that verification finds in a changed record whose hashes are correct
    again.
    """
    document = json.loads(to_canonical_bytes(record_to_json(made)))
    change(document)
    path = tmp_path / "forged.json"
    path.write_bytes(
        to_canonical_bytes(record_to_json(seal_record(Record.model_validate(document))))
    )
    problems = verify_record(path)
    assert not any("hash" in line or "bytes" in line for line in problems)
    return problems


def make_change(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets the value at this path of keys in a record's JSON document."""

    def change(table: dict[str, Any]) -> None:
        node: Any = table
        for part in keys[:-1]:
            node = node[part]
        node[keys[-1]] = value

    return change


def answer_all_rightly(table: dict[str, Any]) -> None:
    """Change the record's outputs as if every question had been answered rightly."""
    gold = table["outputs"]["gold"]
    table["outputs"]["passes"]["infer"] |= {"hits": "1" * len(gold), "argmax": gold, "others": []}


FAKE_FAILURE = {"rank": 0, "exit_code": 1, "error": "x", "stderr_tail": ""}


@pytest.mark.parametrize(
    "change,said",
    [
        (
            make_change("metrics", "p_infer_whole", "value", value=1e9),
            "metric p_infer_whole is 1000000000.0; recomputed",
        ),
        (make_change("metrics", "p_infer_whole", "unit", value="tokens/h"), "metric p_infer_whole"),
        (
            make_change("metrics", "mfu", "value", value=0.9),
            "metric mfu is 0.9; recomputed from the samples: None",
        ),
        (
            make_change(
                "metrics", "glory", value={"value": 1.0, "unit": "", "interval": None, "note": None}
            ),
            "metric 'glory' cannot be derived",
        ),
        (make_change("samples", 0, "counts", "tokens", value=10**6), "metric"),
        (make_change("passes", 0, "wall_s", value=1e-6), "metric"),
        (answer_all_rightly, "metric acc"),
        (
            make_change("scope", "rows", value=["0-47"]),
            "the scope is full, but names subjects or rows",
        ),
        (
            make_change("scope", value={"kind": "window", "rows": ["0-46"]}),
            "48 questions, which are not the selected rows",
        ),
        (
            make_change("scope", value={"kind": "window", "subjects": ["law"]}),
            "do not match the subjects or rows of the scope: subjects law",
        ),
        (make_change("budget", "weights", value=0.0), "metric e2e_time"),
        (make_change("quality", "evaluated", value=True), "quality"),
        (make_change("checks", 0, "ok", value=False), "check 'finite_val' does not follow"),
        (make_change("checks", 0, "name", value="glory"), "check 'glory' does not follow"),
        (make_change("notes", value=["certified"]), "notes"),
        (make_change("reasons", value=[{"code": "kind", "text": "x"}]), "reasons"),
        (
            make_change("status", value="invalid"),
            "the status is invalid; recomputed from the samples: valid",
        ),
        (
            make_change("status", value="failed"),
            "the status is failed; recomputed from the samples: valid",
        ),
        (
            make_change("failure", value=FAKE_FAILURE),
            "the status is valid; recomputed from the samples: failed",
        ),
        (make_change("case", "question", "model", "layers", value=64), "key"),
        (make_change("case", "key", value="0" * 16), "key"),
        (make_change("case", "precision", value="bf16"), "precision"),
        (make_change("data", "fingerprint", value="0" * 64), "key"),
    ],
)
def test_forgeries_with_correct_hashes_are_detected(
    made: Record, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    problems = verify_forgery(made, tmp_path, change)
    assert any(said in line for line in problems), problems


def test_unchanged_copy_verifies(made: Record, tmp_path: Path) -> None:
    assert verify_forgery(made, tmp_path, lambda table: None) == []


def test_published_schema_is_current_and_strict(smoke: dict[str, Path], shell: Shell) -> None:
    text = (resources.files("steelyard.record") / "record.schema.json").read_text()
    assert json.loads(text) == record.make_record_schema(), (
        "make it again: steelyard schema > src/steelyard/record/record.schema.json"
    )
    assert shell("schema").out == text
    jsonschema.Draft202012Validator.check_schema(record.make_record_schema())
    validator = jsonschema.Draft202012Validator(record.make_record_schema())
    for path in smoke.values():
        document = json.loads(path.read_bytes())
        assert list(validator.iter_errors(document)) == []
        assert list(validator.iter_errors({**document, "extra": 1}))
        assert list(validator.iter_errors({**document, "status": "splendid"}))
        assert list(
            validator.iter_errors(
                {key: value for key, value in document.items() if key != "samples"}
            )
        )


def make_nested_list(depth: int) -> str:
    """Return the JSON text of a list nested this deep."""
    return "[" * depth + "]" * depth


def make_text_with(made: Record, key: str, value: str) -> str:
    """Return a record's JSON text with the value of one key replaced by this text."""
    document = record_to_json(made)
    return json.dumps({**document, key: "@@"}).replace('"@@"', value)


HOSTILE: dict[str, tuple[str, str]] = {  # key to replace ("" for the whole file), its new text
    "not json": ("", "hello"),
    "a list": ("", "[]"),
    "a number": ("", "7"),
    "null": ("", "null"),
    "empty table": ("", "{}"),
    "binary": ("", "\x00\x01\x02"),
    "deep file": ("", make_nested_list(200_000)),
    "deep table": ("", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "deep part": ("environment", '{"a":' + make_nested_list(100_000) + "}"),
    "deep enough to be read": ("environment", '{"a":' + make_nested_list(400) + "}"),
    "nan": ("budget", '{"start": NaN}'),
    "infinity": ("budget", '{"start": Infinity}'),
    "infinity in digits": ("budget", '{"start": 1e999}'),
    "infinity in a free table": ("tune", '{"x": -1e999}'),
    "long number": ("budget", '{"start": ' + "9" * 5000 + "}"),
    "large number": ("budget", '{"start": ' + "9" * 400 + "}"),
    "half a character": ("notes", '["\\ud800"]'),
    "schema 99": ("schema", "99"),
    "schema text": ("schema", '"1"'),
    "schema true": ("schema", "true"),
    "schema list": ("schema", "[1]"),
    "status": ("status", '"splendid"'),
    "samples text": ("samples", '"many"'),
    "samples of text": ("samples", '["one"]'),
    "samples of nothing": ("samples", "[{}]"),
    "outputs passes": ("outputs", '{"passes": 5}'),
    "outputs short": ("outputs", '{"passes": {"infer": {}}}'),
    "environment empty": ("environment", "{}"),
    "environment list": ("environment", '{"hardware": []}'),
    "telemetry empty": ("telemetry", "[{}]"),
    "telemetry text": ("telemetry", '[{"columns": "x", "device": 1}]'),
    "ranks of text": ("ranks", '[{"rank": "x", "matmul_flops_per_s": "fast"}]'),
    "weights null": ("weights", "null"),
    "case null": ("case", "null"),
    "hashes null": ("hashes", "null"),
    "escapes in a key": ("\\u001b[31mred\\nline", "1"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize(
    "verb", [("verify",), ("report",), ("report", "--format", "html", "--lang", "zh")], ids="".join
)
def test_hostile_records_get_one_line(
    made: Record, tmp_path: Path, run: RunCommand, what: str, verb: tuple[str, ...]
) -> None:
    key, value = HOSTILE[what]
    path = tmp_path / "record.json"
    path.write_text(
        make_text_with(made, key.encode().decode("unicode_escape"), value) if key else value
    )
    code, out, err = run(*verb, path)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: {path}: ")
    assert len(err) < 1000
    assert err.rstrip("\n").isprintable()


def test_oversized_file_is_refused(tmp_path: Path, run: RunCommand) -> None:
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        file.truncate(300 << 20)  # a sparse file: it takes no space and is never read
    for verb in ("verify", "report"):
        code, out, err = run(verb, path)
        assert (code, out) == (2, "")
        assert err == golden("error-bytes-the-limit-for-record", path, 300 << 20, 48 << 20)


def test_special_and_missing_files_are_refused(tmp_path: Path, run: RunCommand) -> None:
    fifo = tmp_path / "record.json"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path / "none.json"):
        code, out, err = run("verify", path)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err


def list_paths(value_at_path: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside a JSON document; of a list only its first two
    elements.
    """
    items = (
        value_at_path.items()
        if isinstance(value_at_path, dict)
        else enumerate(value_at_path[:2])
        if isinstance(value_at_path, list)
        else ()
    )
    return [
        nested_path
        for key, value in items
        for nested_path in [(*path, key), *list_paths(value, (*path, key))]
    ]


@pytest.mark.full
def test_values_of_wrong_type_cause_no_traceback(
    made: Record, tmp_path: Path, run: RunCommand
) -> None:
    """A random sample of values is replaced in turn: the answer is a page, a list of problems, or
    one line.
    """
    rng = random.Random("types")
    original = json.loads(to_canonical_bytes(record_to_json(made)))
    key_paths = list_paths(original)
    path = tmp_path / "record.json"
    for key_path in rng.sample(key_paths, FLIPS // 2):
        document = json.loads(to_canonical_bytes(original))
        make_change(
            *key_path,
            value=rng.choice([None, -1, 0, 1e308, "x", "", [], [1], {}, {"x": None}, True]),
        )(document)
        path.write_bytes(to_canonical_bytes(document))
        for verb in ("verify", "report"):
            code, out, err = run(verb, path)
            assert code in (0, 1, 2), key_path
            assert (len(err.splitlines()) == 1 and not out) if code == 2 else (out and not err), (
                key_path
            )
            assert not (verb == "verify" and code == 0 and document != original), key_path


def test_record_models_have_all_fields_of_gates_and_published_rows() -> None:
    kinds = (case.AccuracyGate, case.FallingLossGate, case.TargetGate)
    assert set(record.GateFacts.model_fields) == {
        name for kind in kinds for name in kind.model_fields
    }
    assert list(record.PublishedFacts.model_fields) == list(case.PublishedReference.model_fields)
    row = {
        "source": "a page",
        "config": "1x1",
        "published_as": "fp16",
        "ran_as": "bf16",
        "values": {},
        "more": 1,
    }
    assert record.PublishedFacts.model_validate(row).model_dump() == row


def test_engine_details_used_by_formulas_are_typed() -> None:
    fields = {"library": "x 1", "block": "fused", "parameters": 7, "attention": "flash"}
    details = EngineDetails.model_validate(fields)
    assert (details.block, details.attention, details.exchange) == ("fused", "flash", None)
    # fields stay in the engine's order, with those that it adds
    assert list(details.model_dump().items()) == list(fields.items())
    assert EngineDetails().model_dump() == {}
    with pytest.raises(ValidationError, match="block"):
        EngineDetails.model_validate({"block": 3})
