"""The catalogue of texts: each code that the source uses has a text in both languages, each text is
used, and both languages have the same placeholders.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import resources
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import get_args

import pytest

from fixtures.golden import golden
from steelyard import tasks, words
from steelyard.case import resolve
from steelyard.errors import RequestError
from steelyard.metrics import metric_table
from steelyard.plan.memory import MemoryParts
from steelyard.run.worker_files import RankStatus
from steelyard.words import Message, chinese, english, version_1

SRC = Path(words.__file__).parents[1]
FILES = [path for path in sorted(SRC.rglob("*.py")) if "words" not in path.parts]
TREES = {path: ast.parse(path.read_text()) for path in FILES}
CODES = set(words.SHIPPED_TEXTS)
MESSAGE_CODES = {
    code
    for part in (english.checks, english.notes, english.metrics, english.machine)
    for code in part.TEXTS
}
# Prefixes of codes that are formatted strings, with the names that may follow (None: any).
NO_TEXTS = {"__init__", "meanings", "cases"}
HAN = re.compile(r"[\u3001\u3002\u4e00-\u9fff]")
FAMILIES = {
    "part.": {one.name for one in fields(MemoryParts)},
    "failure.": None,
    "unit.": None,
    "items.": None,
}
CODE_ARGUMENT = {
    "make_check": 3,
    "make_failed_check": 2,
}  # position of the code among the arguments


def find_placeholders(template: str) -> set[str]:
    """Return the names of the placeholders of a template."""
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def find_calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Yield each call of the function `name` in the source, with the path of its file."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == name
            ):
                yield path, node


def get_string_constants(node: ast.expr) -> list[str]:
    """Return the strings that an argument may be: a literal, or both branches of a conditional;
    none otherwise.
    """
    if isinstance(node, ast.IfExp):
        return get_string_constants(node.body) + get_string_constants(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def get_literal_keys(node: ast.expr) -> set[str] | None:
    """Return the keys of a dict that is written out; None where it comes from elsewhere."""
    if not isinstance(node, ast.Dict) or not all(
        isinstance(key, ast.Constant) for key in node.keys
    ):
        return None
    return {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}


MESSAGE_CALLS = list(find_calls("Message"))
CHECK_CALLS = [(name, call) for name in CODE_ARGUMENT for _, call in find_calls(name)]


@pytest.mark.parametrize("code", sorted(CODES))
def test_both_languages_say_the_same_values(code: str) -> None:
    en, zh = words.get_text_pair(code)
    assert (en and zh) or code not in MESSAGE_CODES
    assert find_placeholders(en) == find_placeholders(zh)


@pytest.mark.parametrize("one", [english, chinese])
def test_every_code_stands_once_in_every_language(one: ModuleType) -> None:
    parts = [
        path.stem
        for path in Path(str(one.__file__)).parent.glob("*.py")
        if path.stem not in NO_TEXTS
    ]
    codes = [code for part in parts for code in getattr(one, part).TEXTS]
    assert len(codes) == len(set(codes))
    assert set(codes) == CODES
    assert set(one.MEANINGS) == set(english.MEANINGS)
    assert all(title and about for title, about in one.MEANINGS.values())


def test_chinese_text_is_only_in_the_words_package() -> None:
    assert [path for path in FILES if HAN.search(path.read_text())] == []
    texts = [
        *english.TEXTS.values(),
        *(text for pair in english.MEANINGS.values() for text in pair),
    ]
    # An address of FlagPerf's has a Chinese anchor.
    assert [text for text in texts if HAN.search(text) and "](../" not in text] == []


def test_placeholders_and_calls_are_found() -> None:
    assert find_placeholders("{a} of {b:.1f}") == {"a", "b"} != find_placeholders("{a}")
    assert len(MESSAGE_CALLS) > 150
    assert len(CHECK_CALLS) > 25


def test_every_code_in_the_source_has_a_text() -> None:
    used = {code for _, call in MESSAGE_CALLS for code in get_string_constants(call.args[0])}
    assert used - CODES == set()


def test_literal_values_match_the_placeholders_of_the_text() -> None:
    for path, call in MESSAGE_CALLS:
        keys = get_literal_keys(call.args[1]) if len(call.args) > 1 else set()
        for code in get_string_constants(call.args[0]):
            if keys is not None:
                assert find_placeholders(words.SHIPPED_TEXTS[code].en) == keys, (path, code)


def test_only_codes_of_known_families_are_formatted_strings() -> None:
    """A code that is a variable comes from a table of codes; one that is a formatted string begins
    with a known prefix.
    """
    for path, call in MESSAGE_CALLS:
        # result.py forms codes from the result of a check
        if isinstance(call.args[0], ast.JoinedStr) and path != SRC / "metrics" / "result.py":
            start = call.args[0].values[0]
            assert isinstance(start, ast.Constant), path
            assert start.value in FAMILIES, path


def test_every_text_is_used() -> None:
    trees = [*TREES.values(), ast.parse((SRC / "words" / "__init__.py").read_text())]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    literals = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    ends = {f"{code}.{end}" for code in literals for end in ("ok", "bad")}
    patterns = [regex for regex in map(make_code_pattern, nodes) if regex is not None]
    unused = {code for code in CODES - literals - ends if not code.startswith(tuple(FAMILIES))}
    assert unused & MESSAGE_CODES == set()
    assert {
        code for code in unused if not any(re.fullmatch(regex, code) for regex in patterns)
    } == set()


def make_code_pattern(node: ast.AST) -> str | None:
    """Return a regular expression for the values of a formatted string that can be a code, which
    has a literal dot; None for other nodes.
    """
    if not isinstance(node, ast.JoinedStr):
        return None
    regex = "".join(
        re.escape(str(piece.value)) if isinstance(piece, ast.Constant) else ".+"
        for piece in node.values
    )
    return regex if "\\." in regex else None


def test_every_check_has_a_text_for_each_result() -> None:
    """A check that is only made where something is wrong has no text for ok."""
    pairs = {
        code
        for name, call in CHECK_CALLS
        if name == "make_check"
        for code in get_string_constants(call.args[CODE_ARGUMENT[name]])
    }
    for_wrong = {
        code
        for name, call in CHECK_CALLS
        if name == "make_failed_check"
        for code in get_string_constants(call.args[CODE_ARGUMENT[name]])
    }
    # In one place each the code is a variable, chosen between two of these.
    pairs |= {"check.covered", "check.covered_part", "check.accounted", "check.accounted_short"}
    for_ok = {"check.reported_few", "check.accounted_short"}  # these cannot fail
    check_codes = {code for code in CODES if code.startswith("check.")}
    assert check_codes == {
        *(f"{code}.ok" for code in pairs),
        *(f"{code}.bad" for code in (pairs | for_wrong) - for_ok),
    }


@pytest.mark.parametrize("code", sorted(code for code in CODES if code.endswith(".ok")))
def test_the_text_of_a_check_agrees_with_its_result(code: str) -> None:
    good = words.SHIPPED_TEXTS[code]
    bad = words.SHIPPED_TEXTS.get(code.removesuffix("ok") + "bad")
    assert not re.search(r"without|\bnot\b|\bonly\b|above|exceed|more than|must|missing", good.en)
    assert not re.search("未通过|仅覆盖|(?<!未)超过|不是|须低于", good.zh)
    assert bad is None or (bad.en != good.en and bad.zh != good.zh)


def test_questions_outside_the_window_are_not_missing() -> None:
    """An earlier text was "ok: 904 questions without an answer"."""
    values = {
        "pass": "infer",
        "items": 1000,
        "answered": 96,
        "nouns": words.name_items("question"),
        "missing": 904,
        "repeated": 0,
    }
    expected = (
        "infer: 96 of 1,000 questions have an answer, none has two; the window (--steps) leaves out"
        " the others"
    )
    assert words.render_text(Message("check.covered_part.ok", values)) == expected
    assert words.render_text(Message("check.covered_part.ok", values), "zh").startswith(
        "infer：1,000 道题中有 96 道题有答案"
    )


def test_version_1_has_every_note_and_its_parts() -> None:
    # codes that only later wordings use
    later = {"note.stepped_down", "note.emulated", "note.selected", "note.own_case", "note.counted"}
    later |= {"note.borders_unseen", "note.not_timed_before", "note.not_timed_after"}
    later |= english.generation.TEXTS.keys()
    notes = {code for code in CODES if code.startswith("note.")} - later
    assert notes == {code for code in version_1.NOTES if code.startswith("note.")}
    for code, template in version_1.NOTES.items():
        assert find_placeholders(template) == find_placeholders(words.SHIPPED_TEXTS[code].en), code


def test_every_unit_of_every_metric_has_a_text() -> None:
    # units of columns that are no metric
    units = {"TFLOP/s", "GB/s", "MHz", "W", "output tokens/s"}
    for task in tasks.load_tasks().values():
        for metric in metric_table.list_task_metrics(task):
            units |= {metric.unit} if isinstance(metric.unit, str) else set()
            units |= {metric.base_unit}
        units |= {f"{task.noun}s/s", f"{task.noun}s/J", f"J/{task.noun}"}
        assert f"items.{task.noun}" in CODES
    assert {f"unit.{unit}" for unit in units if unit} == {
        code for code in CODES if code.startswith("unit.")
    }


def test_every_failure_has_a_sentence() -> None:
    run = "".join(path.read_text() for path in (SRC / "run").glob("*.py"))
    raised = {*re.findall(r'Failure\(\s*"(\w+)"', run), *get_args(RankStatus), "not_started"}
    raised -= {"running", "done", "request", "ended"}
    described = {code.removeprefix("failure.") for code in CODES if code.startswith("failure.")}
    assert raised - described == set()
    docs = (SRC.parents[1] / "docs" / "metrics.md").read_text()
    assert [code for code in described - {"other"} if f"| `{code}` |" not in docs] == []


@pytest.mark.parametrize("name", resolve.list_shipped_cases())
def test_every_text_of_a_shipped_case_has_a_translation(name: str) -> None:
    case = tomllib.loads((resources.files("steelyard") / "cases" / f"{name}.toml").read_text())
    texts = [case["title"], case["about"]]
    texts += [
        row[key] for row in case.get("reference", []) for key in ("source", "note") if key in row
    ]
    for text in texts:
        assert text in chinese.CASES, text
        assert words.translate_case_text(text, "en") == text
        assert re.search(r"[\u4e00-\u9fff]", words.translate_case_text(text, "zh"))


def test_a_text_of_a_users_case_is_not_translated() -> None:
    assert words.translate_case_text("My model", "zh") == "My model"


def install_texts(folder: Path, *lines: str) -> None:
    """Write a package of texts into the folder: a module, and metadata with entry points."""
    names = [f"text_{number}" for number in range(len(lines))]
    body = [f"{name} = Text({line})" for name, line in zip(names, lines, strict=True)]
    (folder / "rhyme_texts.py").write_text("\n".join(["from steelyard.words import Text", *body]))
    info = folder / "rhyme_texts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rhyme_texts\nVersion: 1.0\n")
    entries = [f"{name} = rhyme_texts:{name}" for name in names]
    (info / "entry_points.txt").write_text("\n".join([f"[{words.ENTRY_POINT_GROUP}]", *entries]))


def test_a_package_brings_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_texts(
        tmp_path,
        '"rhyme.no_pair", "no word rhymes with {word}", "没有词与 {word} 押韵"',
        '"unit.rhymes/s", "rhymes/s", "韵/s"',
        '"items.rhyme", "rhymes", "韵"',
    )
    monkeypatch.delitem(sys.modules, "rhyme_texts", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    message = Message("rhyme.no_pair", {"word": "month"})
    assert (words.render_text(message), words.render_text(message, "zh")) == (
        "no word rhymes with month",
        "没有词与 month 押韵",
    )
    assert (
        words.translate_unit("rhymes/s", "en"),
        words.translate_unit("rhymes/s", "zh"),
        words.translate_unit("odes/s", "zh"),
    ) == ("rhymes/s", "韵/s", "odes/s")
    assert (words.name_items("rhyme"), words.name_items("ode")) == (Message("items.rhyme"), "odes")


def test_a_duplicate_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_texts(tmp_path, '"quality.random", "other words", "别的话"')
    monkeypatch.delitem(sys.modules, "rhyme_texts", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match=r"text 'quality\.random' is defined twice"):
        words.load_texts()
    assert words.render_text(Message("quality.random")) == "the weights are random"


def test_a_text_of_an_uninstalled_package_is_its_code_and_values() -> None:
    assert (
        words.render_text(Message("rhyme.no_pair", {"word": "month"}), "zh")
        == "rhyme.no_pair month"
    )


def test_lists_and_nested_messages() -> None:
    keys = Message("note.question", {"keys": ("a", "b")})
    assert words.render_text(keys) == golden("different-question-changed-on-the-command")
    assert words.render_text(keys, "zh") == "题目与用例不同：命令行修改了 a、b"
    combined = words.join_messages(Message("quality.random"), None, Message("quality.window"))
    assert combined is not None
    assert words.render_text(combined) == golden("the-weights-are-random-the-scope")
    assert words.render_text(combined, "zh") == "权重为随机值；范围为窗口"
    assert words.join_messages(None, None) is None


def test_values_are_never_templates() -> None:
    assert (
        words.render_text(Message("quality.no_base", {"metric": "{0.__class__}"}))
        == "{0.__class__} is unknown"
    )
