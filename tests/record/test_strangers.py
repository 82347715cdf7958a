"""Tests of hostile records: verification answers with a list of problems or one line, and a report
shows what could be read.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import report
from steelyard.errors import RequestError
from steelyard.metrics import verify
from steelyard.record import record, record_file

pytestmark = pytest.mark.process  # these tests take seconds

RESULTS = Path(__file__).resolve().parents[2] / "results"
QUICK_NAME = "mmlu-smoke-open"  # the only record of the fast tests
NAMES = (
    "mmlu-smoke-open",
    "mmlu-full-closed",
    "lambada-smoke",
    "openwebtext-smoke",
    "alpaca-full",
    "record-full",
    "record-smoke",
)
REMOVED, SHORTENED = "removed", "shortened"
ODD_VALUES: tuple[Any, ...] = (None, "x", 10**400, 1e308, 5e-324, -1, 0, [], {}, REMOVED, SHORTENED)
MUTATIONS_PER_RECORD = 220  # mutations of a record
KeyPath = tuple[str | int, ...]
Document = dict[str, Any]


def find_smallest_record(name: str) -> Path:
    """Return the smallest published record whose file name holds this text."""
    return min(RESULTS.rglob(f"*{name}*.json"), key=lambda path: path.stat().st_size)


def read_document(name: str) -> Document:
    """Return the JSON document of the smallest published record of this name."""
    document: Document = json.loads(find_smallest_record(name).read_bytes())
    return document


def list_key_paths(value: Any, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every value inside a JSON document; of a list its first, second and last
    element.
    """
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(i, value[i]) for i in sorted({0, 1, len(value) - 1}) if 0 <= i < len(value)]
    for key, inner in items:
        yield (*prefix, key)
        yield from list_key_paths(inner, (*prefix, key))


def change_value(document: Document, key_path: KeyPath, odd: Any) -> Document:
    """Return a copy of the document with the value at this path replaced, removed or shortened."""
    copied = copy.deepcopy(document)
    node: Any = copied
    for part in key_path[:-1]:
        node = node[part]
    if odd == REMOVED:
        del node[key_path[-1]]
    elif odd == SHORTENED:
        node[key_path[-1]] = (
            node[key_path[-1]][:-1] if isinstance(node[key_path[-1]], list | str) else "x"
        )
    else:
        node[key_path[-1]] = odd
    return copied


def reseal(document: Document) -> Document:
    """Return the document with correct hashes; without samples there is nothing to hash and it is
    returned as it is.
    """
    if "samples" not in document:
        return document
    return {**document, "hashes": record_file.compute_hashes(document, record.RAW_KEY)}


def verify_without_traceback(path: Path, document: Document) -> bool:
    """Write and verify the record; return whether it could be read. Anything but a list of lines or
    one line is a failed test.
    """
    path.write_bytes(record.to_canonical_bytes(document))
    try:
        lines = verify.verify_record(path)
    except RequestError as error:
        lines = str(error).splitlines()
        assert (len(lines), lines[0].startswith(f"{path}: ")) == (1, True), lines
        return False
    assert all(isinstance(line, str) for line in lines)
    assert all(isinstance(line, str) for line in verify.list_remarks(path))
    return True


def check_page(path: Path) -> None:
    """Check that an HTML report can be made of the record."""
    assert report.render([record.read_record(path)], "html", "en").startswith("<!doctype html>")


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == QUICK_NAME else pytest.mark.full) for one in NAMES],
)
def test_one_odd_value_causes_no_traceback(name: str, tmp_path: Path) -> None:
    document, path = read_document(name), tmp_path / "record.json"
    mutations = [(key_path, odd) for key_path in list_key_paths(document) for odd in ODD_VALUES]
    rng = random.Random(name)
    readable = 0
    for number, (key_path, odd) in enumerate(rng.sample(mutations, MUTATIONS_PER_RECORD)):
        mutated = change_value(document, key_path, odd)
        if verify_without_traceback(path, reseal(mutated) if number % 2 else mutated):
            readable += 1
            if readable % 8 == 0:
                check_page(path)
    assert readable >= 8


def change_samples(**values: Any) -> Any:
    """Return a change that sets these fields of every sample."""

    def change(document: Document) -> None:
        for sample in document["samples"]:
            sample.update(values)

    return change


def change_windows(**values: Any) -> Any:
    """Return a change that sets these fields of every pass window."""

    def change(document: Document) -> None:
        for window in document["passes"]:
            window.update(values)

    return change


def change_model(**values: Any) -> Any:
    """Return a change that sets these fields of the question's model."""

    def change(document: Document) -> None:
        document["case"]["question"]["model"].update(values)

    return change


def change_question(**values: Any) -> Any:
    """Return a change that sets these fields of the question."""

    def change(document: Document) -> None:
        document["case"]["question"].update(values)

    return change


def change_section(section: str, /, **values: Any) -> Any:
    """Return a change that sets these fields of one top-level section."""

    def change(document: Document) -> None:
        document[section].update(values)

    return change


def change_top_level(**values: Any) -> Any:
    """Return a change that sets these top-level values."""

    def change(document: Document) -> None:
        document.update(values)

    return change


def change_counts(transform: Any) -> Any:
    """Return a change that replaces every count of every step by what `transform` makes of it."""

    def change(document: Document) -> None:
        for sample in document["samples"]:
            sample["counts"] = {name: transform(count) for name, count in sample["counts"].items()}

    return change


def remove_pairs(document: Document) -> None:
    """Remove the count of attention pairs from every step."""
    for sample in document["samples"]:
        sample["counts"].pop("pairs", None)


def make_tiny_steps(document: Document) -> None:
    """Give every step and window the smallest positive duration."""
    for number, sample in enumerate(document["samples"]):
        sample["start_s"], sample["end_s"] = 0.0, 5e-324 * (number % 2 + 1)
        sample["phases"] = dict.fromkeys(sample["phases"], 5e-324)
    change_windows(wall_s=5e-324)(document)


def swap_start_and_end(document: Document) -> None:
    """Swap start and end of every step."""
    for sample in document["samples"]:
        sample["start_s"], sample["end_s"] = sample["end_s"], sample["start_s"]


def make_huge_model(document: Document) -> None:
    """Give the model a billion of everything."""
    shape = document["case"]["question"]["model"]
    shape |= dict.fromkeys(("hidden", "ffn", "vocab", "positions", "layers"), 10**9)
    shape |= {name: 1 for name in ("heads", "kv_heads") if name in shape} | {
        "nominal_parameters": 1e18
    }


def add_odd_readings(document: Document) -> None:
    """Give every device telemetry with unordered times, huge and missing values."""
    columns: Document = {
        "t_s": [3.0, 1.0, 1.0, 2.0, 1e30],
        "energy_j": [1e30, -1e30, None, 1e30, 0.0],
    }
    columns |= {
        "memory_bytes": [10**18, None, 0, 1, 2],
        "reasons": [["a"], None, [], ["a", "a"], ["b"]],
    }
    columns |= {"processes": [10**400, None, -1, 0, 5], "power_w": [1e30, -1e30, None, 0.0, 1.0]}
    document["telemetry"] = [
        {"device": rank["device"], "period_s": -1e30, "columns": columns}
        for rank in document["ranks"]
    ]


READABLE_CHANGES = {  # absurd values of the right types
    "ranks that no plan has": change_samples(rank=10**400),
    "ranks below zero": change_samples(rank=-7),
    "no windows": change_top_level(passes=[]),
    "no samples": change_top_level(samples=[]),
    "no outputs": change_top_level(outputs={}),
    "no ranks": change_top_level(ranks=[]),
    "no budget": change_top_level(budget={}),
    "a budget that is nothing": change_top_level(budget={"a": 1e9, "b": -1e9}),
    "a tiny budget": change_top_level(budget={"a": 5e-324, "b": 5e-324}),
    "a budget of nine": change_top_level(
        budget={str(i): 1e9 * (-1) ** i + 1e-300 for i in range(9)}
    ),
    "huge times": change_samples(start_s=-1e9, end_s=1e9),
    "steps that end before they begin": swap_start_and_end,
    "tiny times": make_tiny_steps,
    "no times": change_samples(start_s=0.0, end_s=0.0, phases={}),
    "windows below zero": change_windows(wall_s=-1e9, start_s=-1e9),
    "empty windows": change_windows(wall_s=0.0),
    "windows of another rank": change_windows(rank=10**400),
    "windows of another pass": change_windows(**{"pass": "bare"}),
    "samples of another pass": change_samples(**{"pass": "val"}),
    "huge counts": change_counts(lambda count: 10**18),
    "no counts": change_counts(lambda count: 0),
    "huge values": change_samples(values={"loss": 1e300, "grad_norm": -1e300}),
    "a huge model": make_huge_model,
    "a long pipeline": lambda table: [
        change_model(layers=10**9)(table),
        change_section("plan", pp=1024, tp=10**6, dp=10**6)(table),
    ],
    "a longer pipeline": lambda table: [
        change_model(layers=10**9)(table),
        change_section("plan", pp=10**6, nodes=10**6)(table),
    ],
    "many devices": change_section("plan", nodes=10**6, devices=10**6),
    "odd readings": add_odd_readings,
    "no readings": change_top_level(telemetry=[]),
    "a gate of nothing": change_section("case", gate={"metric": "glory", "below": "fame"}),
    "a huge gate": change_section(
        "case", gate={"metric": "acc", "target": -1e308, "within": 1e308, "agree_within": -1e308}
    ),
    "a gate that is reached": change_section("case", gate={"metric": "mfu", "reach": -1e308}),
    "no limits": change_section("case", max_interval=-1e308),
    "another size": change_section("case", size="huge"),
    "another case": change_section("case", name="../../x"),
    "another division": change_section("case", division="wide"),
    "another precision": change_section("case", precision="fp4"),
    "huge scope": change_top_level(
        scope={"kind": "window", "sample": 10**400, "steps": -(10**400)}
    ),
    "huge restart": change_top_level(
        restarts=[{"record": None, "step": 10**400, "plan": "", "losses": [None, 1e30]}]
    ),
}
REFUSED_CHANGES = {
    "counts without pairs": (remove_pairs, "does not count pairs"),
    "counts that no run has": (change_counts(lambda count: 10**400), "counts"),
    "a plan of no devices": (change_section("plan", tp=0), "plan.tp: "),
    "a plan of too many": (change_section("plan", pp=10**400), "plan.pp: "),
    "times that no run has": (change_samples(end_s=1e308), "end_s: "),
    "values that no engine gives": (change_samples(values={"loss": 1e308}), "values.loss: "),
    "an unknown task": (
        change_question(task="cooking"),
        "its question: task: no task 'cooking'; known: ",
    ),
    "a task of another kind": (change_question(task=["mmlu"]), "its question: task: "),
    "an unknown family": (
        change_model(family="wheel"),
        "its question: model: no family 'wheel'; known: ",
    ),
    "a model that no machine holds": (change_model(vocab=10**400), "its question: model.vocab: "),
    "a size that nobody names": (
        change_model(nominal_parameters=1e308),
        "model.nominal_parameters: ",
    ),
    "a column that is none": (
        lambda table: table["telemetry"].append(
            {"device": "a", "period_s": 1.0, "columns": {"t_s": [], "odd": 3}}
        ),
        "column odd must be a list of as many readings as t_s: 0",
    ),
    "outputs of nobody": (change_top_level(outputs={"passes": {}}), "its answers: "),
}


@pytest.mark.parametrize("what", READABLE_CHANGES)
@pytest.mark.parametrize("name", ["mmlu-smoke-open", "alpaca-full", "record-full"])
def test_absurd_but_typed_records_are_verified_and_shown(
    name: str, what: str, tmp_path: Path
) -> None:
    document, path = read_document(name), tmp_path / "record.json"
    READABLE_CHANGES[what](document)
    assert verify_without_traceback(path, reseal(document))
    check_page(path)


@pytest.mark.parametrize("what", REFUSED_CHANGES)
@pytest.mark.parametrize("name", ["mmlu-smoke-open", "alpaca-full", "record-full"])
def test_records_that_formulas_cannot_read_are_refused(
    name: str, what: str, tmp_path: Path
) -> None:
    document, path = read_document(name), tmp_path / "record.json"
    change, expected = REFUSED_CHANGES[what]
    change(document)
    path.write_bytes(record.to_canonical_bytes(reseal(document)))
    with pytest.raises(RequestError, match="not a record: ") as caught:
        verify.verify_record(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_of_another_task_are_refused(tmp_path: Path) -> None:
    documents, path = (
        {
            name: read_document(name)
            for name in ("mmlu-smoke-open", "lambada-smoke", "alpaca-full", "record-full")
        },
        tmp_path / "x",
    )
    for name, document in documents.items():
        for other in documents.values():
            if other is document:
                continue
            path.write_bytes(
                record.to_canonical_bytes(reseal({**document, "outputs": other["outputs"]}))
            )
            with pytest.raises(RequestError, match="not a record: its answers: "):
                verify.verify_record(path)
        assert verify_without_traceback(path, document), name
