"""Test glm-large-record from the command line: it trains until its target, reports a target that is
not reached, and resumes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC, Shell
from fixtures.real_runs import sound
from fixtures.records import sentence

CASE = "glm-large-record"
RUN = ("run", CASE, "--size", "smoke", "--accelerator", "cpu")


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder in the order of their file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def ran(shell: Shell, *more: str | Path, code: int = 0) -> dict[str, Any]:
    """Run a command that must end with exit status `code` and return the last record it wrote."""
    done = shell(*more, "--out", shell.out)
    assert done.code == code, done.err
    return records(shell.out)[-1]


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the record of a run that stopped at its target, by division."""
    out = {}
    for division in ("closed", "open"):
        shell = Shell(tmp_path_factory.mktemp(division))
        out[division] = ran(shell, *RUN, "--division", division)
    return out


@pytest.mark.full
@pytest.mark.parametrize("division", ["closed", "open"])
def test_the_target_is_reached_from_scratch(
    reached: dict[str, dict[str, Any]], division: str
) -> None:
    record = reached[division]
    assert (record["status"], record["reasons"]) == ("valid", [])
    values = {name: one["value"] for name, one in record["metrics"].items()}
    assert values["acc"] >= 0.9 > 0.6 > values["acc_before"]
    assert record["quality"] == {
        "metric": "acc",
        "value": values["acc"],
        "gate": {"metric": "acc", "reach": 0.9},
        "evaluated": True,
        "note": None,
    }
    assert {record["metrics"][name]["unit"] for name in ("p_whole", "p_train", "p_core")} == {
        "samples/s"
    }
    assert values["p_train"] > values["p_whole"]  # p_whole includes the time of evaluations
    assert values["p_core"] > 0  # of the steady window, which a busy machine slows down
    assert values["e2e_time"] > 0
    assert values["f1"] >= values["em"] >= values["acc"]
    assert values["mem_predicted"] is None


@pytest.mark.full
@pytest.mark.parametrize("division", ["closed", "open"])
def test_it_stops_where_the_target_is_reached_and_not_before(
    reached: dict[str, dict[str, Any]], division: str
) -> None:
    record = reached[division]
    found = record["outputs"]["passes"]["train"]
    right = record["outputs"]["right"]
    shares = [
        sum(choice in right[item] for item, choice in one["choices"]) / 96
        for one in found["evaluations"]
    ]
    assert all(share < 0.9 for share in shares[:-1])
    assert shares[-1] >= 0.9
    steps = [one["step"] for one in found["evaluations"]]
    assert steps == [25 * (i + 1) for i in range(len(steps))]  # an epoch: 800 samples / 32
    assert [one["samples"] for one in found["evaluations"]] == [32 * step for step in steps]
    assert found["stopped"] == {"step": steps[-1], "why": "target"}
    trained = [s for s in record["samples"] if s["pass"] == "train" and s["counts"]]
    assert len(trained) == steps[-1] < 300
    assert sum(s["counts"]["samples"] for s in trained) == 32 * steps[-1]
    apart = [s for s in record["samples"] if s["pass"] == "train" and not s["counts"]]
    assert {tuple(s["phases"]) for s in apart} == {("evaluate",)}


@pytest.mark.full
def test_the_page_shows_the_way_to_the_target(
    shell: Shell, reached: dict[str, dict[str, Any]]
) -> None:
    path = shell.folder / "one.json"
    path.write_text(json.dumps(reached["open"], separators=(",", ":"), ensure_ascii=False) + "\n")
    done = shell("report", path, "--full")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line == ["Evaluations"])
    found = [line for line in lines[begin:] if len(line) == 3 and line[2].endswith("%")]
    acc = f"{reached['open']['metrics']['acc']['value']:.1%}"
    assert found[0][:2] == ["0", "0"]
    assert found[1][:2] == ["25", "800"]
    assert found[-1][2] == acc
    # the note on how the published MFU was counted, 8 times over the two tables
    assert done.out.count("nominal, one sequence a sample") == 8


@pytest.mark.full
def test_open_computes_less_of_the_same(reached: dict[str, dict[str, Any]]) -> None:
    tokens = {}
    for division, record in reached.items():
        trained = [s["counts"] for s in record["samples"] if s["pass"] == "train" and s["counts"]]
        tokens[division] = sum(one["tokens"] for one in trained) / sum(
            one["samples"] for one in trained
        )
        assert sum(one["padded"] for one in trained) == 0
    assert tokens["closed"] > 2.5 * tokens["open"]
    assert reached["closed"]["case"]["key"] != reached["open"]["case"]["key"]


@pytest.mark.full
def test_two_devices(shell: Shell, reached: dict[str, dict[str, Any]]) -> None:
    """Before training, and so before dropout, two devices choose the same candidates as one; after
    it every question is answered once.
    """
    record = ran(shell, *RUN, "--devices", "2")
    assert (record["status"], record["plan"]["dp"]) == ("valid", 2)
    one, two = (
        r["outputs"]["passes"]["before"]["evaluations"][0] for r in (reached["closed"], record)
    )
    assert one["choices"] == two["choices"]
    assert [
        item for item, _ in record["outputs"]["passes"]["train"]["evaluations"][-1]["choices"]
    ] == list(range(96))
    halves = [
        s["counts"]["samples"] for s in record["samples"] if s["pass"] == "train" and s["counts"]
    ]
    assert set(halves) == {16}


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    """Write the case with 30 steps instead of 300 as a file and return its path; set on the command
    line, it would be another question.
    """
    text = (
        (SRC / "steelyard" / "cases" / f"{CASE}.toml")
        .read_text()
        .replace("steps = 300", "steps = 30")
    )
    path = tmp_path / "hard.toml"
    path.write_text(text)
    return path


@pytest.mark.full
def test_a_target_that_is_not_reached(shell: Shell, hard: Path) -> None:
    record = ran(
        shell, "run", hard, "--size", "smoke", "--accelerator", "cpu", "--division", "open", code=1
    )
    assert record["status"] == "invalid"
    [reason] = record["reasons"]
    assert reason["code"] == "target_not_reached"
    assert reason["text"]["code"] == "check.gate_reach.bad"
    assert 0 < reason["text"]["values"]["value"] < reason["text"]["values"]["target"]
    # evaluated after the epoch of 25 steps and at the last of 30 steps
    assert [one["step"] for one in record["outputs"]["passes"]["train"]["evaluations"]] == [25, 30]
    assert shell("verify", next(shell.out.glob("*.json"))).code == 0


@pytest.mark.full
def test_it_goes_on_with_the_same_losses_and_dropout(
    shell: Shell, reached: dict[str, dict[str, Any]]
) -> None:
    ran(shell, *RUN, "--division", "open", "--steps", "40", "--checkpoint-every", "30")
    path = next(shell.out.glob("*.json"))
    record = ran(shell, *RUN, "--division", "open", "--resume", path)
    assert record["restarts"][0]["step"] == 30
    assert record["metrics"]["acc"] == reached["open"]["metrics"]["acc"]
    assert record["metrics"]["acc_before"] == reached["open"]["metrics"]["acc_before"]
    for one, other in zip(
        reversed(record["samples"]), reversed(reached["open"]["samples"]), strict=False
    ):
        assert one["values"].get("loss") == other["values"].get("loss")
        if one["step"] == 0:
            break


@pytest.mark.full
def test_a_run_that_reached_its_target_has_nothing_left_to_do(shell: Shell) -> None:
    ran(shell, *RUN, "--division", "open", "--checkpoint-every", "25")
    [path] = shell.out.glob("*.json")
    for source in (path, next((shell.out / "checkpoints").iterdir())):
        done = shell(
            *RUN, "--division", "open", "--resume", source, "--out", shell.folder / "again"
        )
        assert (done.code, "reached" in done.lines[-1]) == (2, True)


@pytest.mark.full
def test_a_target_that_is_met_before_the_first_step_is_looked_at_where_it_is_due(
    shell: Shell,
) -> None:
    record = ran(shell, *RUN, "--division", "open", "--set=gate.reach=0.2")
    assert record["metrics"]["acc_before"]["value"] > 0.2
    found = record["outputs"]["passes"]["train"]
    assert (found["stopped"], len(found["evaluations"])) == ({"step": 25, "why": "target"}, 1)
    assert record["metrics"]["acc"]["value"] >= 0.2


@pytest.mark.full
def test_a_device_without_a_sample_waits_for_the_others(shell: Shell) -> None:
    record = ran(
        shell, *RUN, "--sample", "1", "--devices", "2", "--steps", "2", "--passes", "train"
    )
    assert record["status"] == "valid"
    counts = [s["counts"]["samples"] for s in record["samples"] if s["pass"] == "train"]
    assert sorted(counts) == [0, 0, 1, 1]
    assert record["metrics"]["acc"]["note"] == {
        "code": "metric.not_evaluated",
        "values": {"pass": "train"},
    }


@pytest.mark.full
def test_the_published_way_gives_the_same_answers(
    shell: Shell, reached: dict[str, dict[str, Any]]
) -> None:
    record = ran(
        shell, *RUN, "--engine", "reference", "--steps", "2", "--set=question.model.dropout=0"
    )
    beside = Shell(shell.folder / "beside")
    beside.folder.mkdir()
    other = ran(beside, *RUN, "--steps", "2", "--set=question.model.dropout=0")
    for one, two in zip(record["samples"], other["samples"], strict=False):
        for name in ("loss", "grad_norm"):
            if name in one["values"]:
                assert one["values"][name] == pytest.approx(two["values"][name], rel=1e-4)
    assert record["metrics"]["padded_share"]["value"] > 0.4
    assert other["metrics"]["padded_share"]["value"] == 0.0
    choices = [
        r["outputs"]["passes"]["before"]["evaluations"][0]["choices"] for r in (record, other)
    ]
    assert choices[0] == choices[1]
    trained = [
        [s["counts"]["tokens"] for s in r["samples"] if s["pass"] == "train"]
        for r in (record, other)
    ]
    assert trained[0] == trained[1]  # padding does not count as tokens


@pytest.mark.full
def test_real_rows_are_evaluated(shell: Shell, data_dir: Path, tmp_path: Path) -> None:
    """A small GLM with random weights answers every one of the real queries, no better than by
    chance.
    """
    folder = tmp_path / "record"
    folder.mkdir()
    for name, source in (("train", "record_train32"), ("val", "record_dev32")):
        (folder / f"{name}.jsonl").write_bytes(
            (data_dir / "record" / f"{source}.jsonl").read_bytes()
        )
    small = [
        f"--set=question.model.{key}" for key in ("layers=2", "hidden=64", "heads=4", "ffn=128")
    ]
    words = data_dir / "tokenizers" / "bert-large-uncased"
    more = (
        "--precision",
        "fp32",
        "--steps",
        "2",
        "--sample",
        "4",
        "--set=tune.compile=false",
        "--division",
        "open",
    )
    shell(
        "run",
        CASE,
        "--accelerator",
        "cpu",
        "--data",
        folder,
        "--tokenizer",
        words,
        *more,
        *small,
        "--out",
        shell.out,
    )
    (record,) = records(shell.out)
    assert sound(record), record["reasons"]
    assert record["quality"]["evaluated"] is False
    assert "the weights are random" in sentence(record["quality"]["note"])
    choices = record["outputs"]["passes"]["before"]["evaluations"][0]["choices"]
    assert [item for item, _ in choices] == list(range(32))
    assert 0 <= record["metrics"]["acc_before"]["value"] < 0.6
    assert record["data"]["rows"] == 32
    assert record["data"]["samples"] == 44


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--parallel", "TP2", "--devices", "2"), "cannot be divided; allowed: TP1PP1"),
        (("--set=tune.sharding=2", "--devices", "2"), "cannot be divided; allowed: TP1PP1"),
        (("--set=tune.recompute=selective",), "allowed: none, full"),
        (("--engine", "transformers"), "does not run glm-large-record; allowed: torch, reference"),
        (
            ("--engine", "reference", "--division", "open"),
            "has no division 'open' with engine reference",
        ),
        (("--set=question.model.vocab=20",), "vocab"),
        (("--set=question.data.made.entities=40",), "allowed: 2 to 12"),
    ],
)
def test_what_a_glm_cannot_do_gets_one_line(shell: Shell, more: tuple[str, ...], said: str) -> None:
    done = shell(*RUN, *more, "--out", shell.out)
    assert (done.code, done.out) == (2, "")
    assert said in done.lines[-1]
    assert not shell.out.exists() or not list(shell.out.iterdir())
