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
QUICK = "mmlu-smoke-open"  # the only record of the fast tests
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
ODD: tuple[Any, ...] = (None, "x", 10**400, 1e308, 5e-324, -1, 0, [], {}, REMOVED, SHORTENED)
EACH = 220  # mutations of a record
Place = tuple[str | int, ...]
Table = dict[str, Any]


def smallest(name: str) -> Path:
    """Return the smallest published record whose file name holds this text."""
    return min(RESULTS.rglob(f"*{name}*.json"), key=lambda path: path.stat().st_size)


def read(name: str) -> Table:
    """Return the JSON document of the smallest published record of this name."""
    table: Table = json.loads(smallest(name).read_bytes())
    return table


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield the path of every value inside a JSON document; of a list its first, second and last
    element.
    """
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(i, value[i]) for i in sorted({0, 1, len(value) - 1}) if 0 <= i < len(value)]
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def changed(table: Table, place: Place, odd: Any) -> Table:
    """Return a copy of the document with the value at this path replaced, removed or shortened."""
    out = copy.deepcopy(table)
    node: Any = out
    for part in place[:-1]:
        node = node[part]
    if odd == REMOVED:
        del node[place[-1]]
    elif odd == SHORTENED:
        node[place[-1]] = node[place[-1]][:-1] if isinstance(node[place[-1]], list | str) else "x"
    else:
        node[place[-1]] = odd
    return out


def resealed(table: Table) -> Table:
    """Return the document with correct hashes; without samples there is nothing to hash and it is
    returned as it is.
    """
    if "samples" not in table:
        return table
    return {**table, "hashes": record_file.compute_hashes(table, record.RAW_KEY)}


def judged(path: Path, table: Table) -> bool:
    """Write and verify the record; return whether it could be read. Anything but a list of lines or
    one line is a failed test.
    """
    path.write_bytes(record.to_canonical_bytes(table))
    try:
        found = verify.verify_record(path)
    except RequestError as error:
        found = str(error).splitlines()
        assert (len(found), found[0].startswith(f"{path}: ")) == (1, True), found
        return False
    assert all(isinstance(line, str) for line in found)
    assert all(isinstance(line, str) for line in verify.list_remarks(path))
    return True


def shown(path: Path) -> None:
    """Check that an HTML report can be made of the record."""
    assert report.render([record.read_record(path)], "html", "en").startswith("<!doctype html>")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == QUICK else pytest.mark.full) for one in NAMES]
)
def test_one_odd_value(name: str, tmp_path: Path) -> None:
    table, path = read(name), tmp_path / "record.json"
    every = [(place, odd) for place in places(table) for odd in ODD]
    rng = random.Random(name)
    kept = 0
    for number, (place, odd) in enumerate(rng.sample(every, EACH)):
        one = changed(table, place, odd)
        if judged(path, resealed(one) if number % 2 else one):
            kept += 1
            if kept % 8 == 0:
                shown(path)
    assert kept >= 8


def every_sample(**values: Any) -> Any:
    """Return a change that sets these fields of every sample."""

    def change(table: Table) -> None:
        for sample in table["samples"]:
            sample.update(values)

    return change


def every_window(**values: Any) -> Any:
    """Return a change that sets these fields of every pass window."""

    def change(table: Table) -> None:
        for window in table["passes"]:
            window.update(values)

    return change


def model(**values: Any) -> Any:
    """Return a change that sets these fields of the question's model."""

    def change(table: Table) -> None:
        table["case"]["question"]["model"].update(values)

    return change


def question(**values: Any) -> Any:
    """Return a change that sets these fields of the question."""

    def change(table: Table) -> None:
        table["case"]["question"].update(values)

    return change


def part(of: str, /, **values: Any) -> Any:
    """Return a change that sets these fields of one top-level section."""

    def change(table: Table) -> None:
        table[of].update(values)

    return change


def whole(**values: Any) -> Any:
    """Return a change that sets these top-level values."""

    def change(table: Table) -> None:
        table.update(values)

    return change


def counts(of: Any) -> Any:
    """Return a change that replaces every count of every step by what `transform` makes of it."""

    def change(table: Table) -> None:
        for sample in table["samples"]:
            sample["counts"] = {name: of(count) for name, count in sample["counts"].items()}

    return change


def without_pairs(table: Table) -> None:
    """Remove the count of attention pairs from every step."""
    for sample in table["samples"]:
        sample["counts"].pop("pairs", None)


def tiny_steps(table: Table) -> None:
    """Give every step and window the smallest positive duration."""
    for number, sample in enumerate(table["samples"]):
        sample["start_s"], sample["end_s"] = 0.0, 5e-324 * (number % 2 + 1)
        sample["phases"] = dict.fromkeys(sample["phases"], 5e-324)
    every_window(wall_s=5e-324)(table)


def backwards(table: Table) -> None:
    """Swap start and end of every step."""
    for sample in table["samples"]:
        sample["start_s"], sample["end_s"] = sample["end_s"], sample["start_s"]


def huge_model(table: Table) -> None:
    """Give the model a billion of everything."""
    shape = table["case"]["question"]["model"]
    shape |= dict.fromkeys(("hidden", "ffn", "vocab", "positions", "layers"), 10**9)
    shape |= {name: 1 for name in ("heads", "kv_heads") if name in shape} | {
        "nominal_parameters": 1e18
    }


def odd_readings(table: Table) -> None:
    """Give every device telemetry with unordered times, huge and missing values."""
    columns: Table = {"t_s": [3.0, 1.0, 1.0, 2.0, 1e30], "energy_j": [1e30, -1e30, None, 1e30, 0.0]}
    columns |= {
        "memory_bytes": [10**18, None, 0, 1, 2],
        "reasons": [["a"], None, [], ["a", "a"], ["b"]],
    }
    columns |= {"processes": [10**400, None, -1, 0, 5], "power_w": [1e30, -1e30, None, 0.0, 1.0]}
    table["telemetry"] = [
        {"device": one["device"], "period_s": -1e30, "columns": columns} for one in table["ranks"]
    ]


READ = {  # absurd values of the right types
    "ranks that no plan has": every_sample(rank=10**400),
    "ranks below zero": every_sample(rank=-7),
    "no windows": whole(passes=[]),
    "no samples": whole(samples=[]),
    "no outputs": whole(outputs={}),
    "no ranks": whole(ranks=[]),
    "no budget": whole(budget={}),
    "a budget that is nothing": whole(budget={"a": 1e9, "b": -1e9}),
    "a tiny budget": whole(budget={"a": 5e-324, "b": 5e-324}),
    "a budget of nine": whole(budget={str(i): 1e9 * (-1) ** i + 1e-300 for i in range(9)}),
    "huge times": every_sample(start_s=-1e9, end_s=1e9),
    "steps that end before they begin": backwards,
    "tiny times": tiny_steps,
    "no times": every_sample(start_s=0.0, end_s=0.0, phases={}),
    "windows below zero": every_window(wall_s=-1e9, start_s=-1e9),
    "empty windows": every_window(wall_s=0.0),
    "windows of another rank": every_window(rank=10**400),
    "windows of another pass": every_window(**{"pass": "bare"}),
    "samples of another pass": every_sample(**{"pass": "val"}),
    "huge counts": counts(lambda count: 10**18),
    "no counts": counts(lambda count: 0),
    "huge values": every_sample(values={"loss": 1e300, "grad_norm": -1e300}),
    "a huge model": huge_model,
    "a long pipeline": lambda table: [
        model(layers=10**9)(table),
        part("plan", pp=1024, tp=10**6, dp=10**6)(table),
    ],
    "a longer pipeline": lambda table: [
        model(layers=10**9)(table),
        part("plan", pp=10**6, nodes=10**6)(table),
    ],
    "many devices": part("plan", nodes=10**6, devices=10**6),
    "odd readings": odd_readings,
    "no readings": whole(telemetry=[]),
    "a gate of nothing": part("case", gate={"metric": "glory", "below": "fame"}),
    "a huge gate": part(
        "case", gate={"metric": "acc", "target": -1e308, "within": 1e308, "agree_within": -1e308}
    ),
    "a gate that is reached": part("case", gate={"metric": "mfu", "reach": -1e308}),
    "no limits": part("case", max_interval=-1e308),
    "another size": part("case", size="huge"),
    "another case": part("case", name="../../x"),
    "another division": part("case", division="wide"),
    "another precision": part("case", precision="fp4"),
    "huge scope": whole(scope={"kind": "window", "sample": 10**400, "steps": -(10**400)}),
    "huge restart": whole(
        restarts=[{"record": None, "step": 10**400, "plan": "", "losses": [None, 1e30]}]
    ),
}
REFUSED = {
    "counts without pairs": (without_pairs, "does not count pairs"),
    "counts that no run has": (counts(lambda count: 10**400), "counts"),
    "a plan of no devices": (part("plan", tp=0), "plan.tp: "),
    "a plan of too many": (part("plan", pp=10**400), "plan.pp: "),
    "times that no run has": (every_sample(end_s=1e308), "end_s: "),
    "values that no engine gives": (every_sample(values={"loss": 1e308}), "values.loss: "),
    "an unknown task": (question(task="cooking"), "its question: task: no task 'cooking'; known: "),
    "a task of another kind": (question(task=["mmlu"]), "its question: task: "),
    "an unknown family": (model(family="wheel"), "its question: model: no family 'wheel'; known: "),
    "a model that no machine holds": (model(vocab=10**400), "its question: model.vocab: "),
    "a size that nobody names": (model(nominal_parameters=1e308), "model.nominal_parameters: "),
    "a column that is none": (
        lambda table: table["telemetry"].append(
            {"device": "a", "period_s": 1.0, "columns": {"t_s": [], "odd": 3}}
        ),
        "column odd is no list of as many readings as t_s, which has 0",
    ),
    "outputs of nobody": (whole(outputs={"passes": {}}), "its answers: "),
}


@pytest.mark.parametrize("what", READ)
@pytest.mark.parametrize("name", ["mmlu-smoke-open", "alpaca-full", "record-full"])
def test_absurd_records_are_judged_and_shown(name: str, what: str, tmp_path: Path) -> None:
    table, path = read(name), tmp_path / "record.json"
    READ[what](table)
    assert judged(path, resealed(table))
    shown(path)


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("name", ["mmlu-smoke-open", "alpaca-full", "record-full"])
def test_what_no_formula_can_read_is_refused(name: str, what: str, tmp_path: Path) -> None:
    table, path = read(name), tmp_path / "record.json"
    change, said = REFUSED[what]
    change(table)
    path.write_bytes(record.to_canonical_bytes(resealed(table)))
    with pytest.raises(RequestError, match="not a record: ") as caught:
        verify.verify_record(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_of_another_task_are_refused(tmp_path: Path) -> None:
    tables, path = (
        {
            name: read(name)
            for name in ("mmlu-smoke-open", "lambada-smoke", "alpaca-full", "record-full")
        },
        tmp_path / "x",
    )
    for name, table in tables.items():
        for other in tables.values():
            if other is table:
                continue
            path.write_bytes(
                record.to_canonical_bytes(resealed({**table, "outputs": other["outputs"]}))
            )
            with pytest.raises(RequestError, match="not a record: its answers: "):
                verify.verify_record(path)
        assert judged(path, table), name
