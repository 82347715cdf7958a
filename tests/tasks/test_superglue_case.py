"""Test glm-large-record from the command line: it trains until its target, reports a target that is
not reached, and resumes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC, Shell
from fixtures.real_runs import is_sound
from fixtures.records import format_sentence

CASE = "glm-large-record"
RUN = ("run", CASE, "--size", "smoke", "--accelerator", "cpu")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder in the order of their file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def run_and_read_record(shell: Shell, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Run a command that must end with exit status `code` and return the last record it wrote."""
    result = shell(*arguments, "--out", shell.out)
    assert result.code == code, result.err
    return read_records(shell.out)[-1]


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the record of a run that stopped at its target, by division."""
    records_by_division = {}
    for division in ("closed", "open"):
        shell = Shell(tmp_path_factory.mktemp(division))
        records_by_division[division] = run_and_read_record(shell, *RUN, "--division", division)
    return records_by_division


@pytest.mark.full
@pytest.mark.parametrize("division", ["closed", "open"])
def test_the_target_is_reached_from_scratch(
    reached: dict[str, dict[str, Any]], division: str
) -> None:
    record = reached[division]
    assert (record["status"], record["reasons"]) == ("valid", [])
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
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
def test_training_stops_at_the_first_evaluation_that_reaches_the_target(
    reached: dict[str, dict[str, Any]], division: str
) -> None:
    record = reached[division]
    train_pass = record["outputs"]["passes"]["train"]
    right_candidates = record["outputs"]["right"]
    accuracies = [
        sum(choice in right_candidates[item] for item, choice in evaluation["choices"]) / 96
        for evaluation in train_pass["evaluations"]
    ]
    assert all(accuracy < 0.9 for accuracy in accuracies[:-1])
    assert accuracies[-1] >= 0.9
    steps = [evaluation["step"] for evaluation in train_pass["evaluations"]]
    assert steps == [25 * (i + 1) for i in range(len(steps))]  # an epoch: 800 samples / 32
    assert [evaluation["samples"] for evaluation in train_pass["evaluations"]] == [
        32 * step for step in steps
    ]
    assert train_pass["stopped"] == {"step": steps[-1], "why": "target"}
    trained = [
        sample for sample in record["samples"] if sample["pass"] == "train" and sample["counts"]
    ]
    assert len(trained) == steps[-1] < 300
    assert sum(sample["counts"]["samples"] for sample in trained) == 32 * steps[-1]
    without_counts = [
        sample for sample in record["samples"] if sample["pass"] == "train" and not sample["counts"]
    ]
    assert {tuple(sample["phases"]) for sample in without_counts} == {("evaluate",)}


@pytest.mark.full
def test_the_report_lists_the_evaluations(shell: Shell, reached: dict[str, dict[str, Any]]) -> None:
    path = shell.folder / "one.json"
    path.write_text(json.dumps(reached["open"], separators=(",", ":"), ensure_ascii=False) + "\n")
    result = shell("report", path, "--full", "--wide")
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.splitlines()]
    heading = next(i for i, line in enumerate(lines) if line == ["Evaluations"])
    evaluation_rows = [line for line in lines[heading:] if len(line) == 3 and line[2].endswith("%")]
    acc = f"{reached['open']['metrics']['acc']['value']:.1%}"
    assert evaluation_rows[0][:2] == ["0", "0"]
    assert evaluation_rows[1][:2] == ["25", "800"]
    assert evaluation_rows[-1][2] == acc
    # the note on how the published MFU was counted, 8 times over the two tables
    assert result.out.count("nominal, one sequence a sample") == 8


@pytest.mark.full
def test_division_open_computes_fewer_tokens_per_sample(reached: dict[str, dict[str, Any]]) -> None:
    tokens_per_sample = {}
    for division, record in reached.items():
        step_counts = [
            sample["counts"]
            for sample in record["samples"]
            if sample["pass"] == "train" and sample["counts"]
        ]
        tokens_per_sample[division] = sum(counts["tokens"] for counts in step_counts) / sum(
            counts["samples"] for counts in step_counts
        )
        assert sum(counts["padded"] for counts in step_counts) == 0
    assert tokens_per_sample["closed"] > 2.5 * tokens_per_sample["open"]
    assert reached["closed"]["case"]["key"] != reached["open"]["case"]["key"]


@pytest.mark.full
@pytest.mark.long
def test_two_devices_answer_like_one_before_training(
    shell: Shell, reached: dict[str, dict[str, Any]]
) -> None:
    """Before training, and so before dropout, two devices choose the same candidates as one; after
    it every question is answered once.
    """
    record = run_and_read_record(shell, *RUN, "--devices", "2")
    assert (record["status"], record["plan"]["dp"]) == ("valid", 2)
    one_device, two_devices = (
        run_record["outputs"]["passes"]["before"]["evaluations"][0]
        for run_record in (reached["closed"], record)
    )
    assert one_device["choices"] == two_devices["choices"]
    assert [
        item for item, _ in record["outputs"]["passes"]["train"]["evaluations"][-1]["choices"]
    ] == list(range(96))
    samples_per_device = [
        sample["counts"]["samples"]
        for sample in record["samples"]
        if sample["pass"] == "train" and sample["counts"]
    ]
    assert set(samples_per_device) == {16}


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
def test_a_target_that_is_not_reached_makes_a_record_invalid(shell: Shell, hard: Path) -> None:
    record = run_and_read_record(
        shell, "run", hard, "--size", "smoke", "--accelerator", "cpu", "--division", "open", code=1
    )
    assert record["status"] == "invalid"
    [reason] = record["reasons"]
    assert reason["code"] == "target_not_reached"
    assert reason["text"]["code"] == "check.gate_reach.bad"
    assert 0 < reason["text"]["values"]["value"] < reason["text"]["values"]["target"]
    # evaluated after the epoch of 25 steps and at the last of 30 steps
    assert [
        evaluation["step"] for evaluation in record["outputs"]["passes"]["train"]["evaluations"]
    ] == [25, 30]
    assert shell("verify", next(shell.out.glob("*.json"))).code == 0


@pytest.mark.full
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(
    shell: Shell, reached: dict[str, dict[str, Any]]
) -> None:
    run_and_read_record(
        shell, *RUN, "--division", "open", "--steps", "40", "--checkpoint-every", "30"
    )
    path = next(shell.out.glob("*.json"))
    record = run_and_read_record(shell, *RUN, "--division", "open", "--resume", path)
    assert record["restarts"][0]["step"] == 30
    assert record["metrics"]["acc"] == reached["open"]["metrics"]["acc"]
    assert record["metrics"]["acc_before"] == reached["open"]["metrics"]["acc_before"]
    for resumed, unbroken in zip(
        reversed(record["samples"]), reversed(reached["open"]["samples"]), strict=False
    ):
        assert resumed["values"].get("loss") == unbroken["values"].get("loss")
        if resumed["step"] == 0:
            break


@pytest.mark.full
@pytest.mark.long
def test_a_run_that_reached_its_target_cannot_be_resumed(shell: Shell) -> None:
    run_and_read_record(shell, *RUN, "--division", "open", "--checkpoint-every", "25")
    [path] = shell.out.glob("*.json")
    for source in (path, next((shell.out / "checkpoints").iterdir())):
        result = shell(
            *RUN, "--division", "open", "--resume", source, "--out", shell.folder / "again"
        )
        assert (result.code, "reached" in result.lines[-1]) == (2, True)


@pytest.mark.full
def test_a_target_met_before_training_stops_at_the_first_due_evaluation(shell: Shell) -> None:
    record = run_and_read_record(shell, *RUN, "--division", "open", "--set=gate.reach=0.2")
    assert record["metrics"]["acc_before"]["value"] > 0.2
    train_pass = record["outputs"]["passes"]["train"]
    assert (train_pass["stopped"], len(train_pass["evaluations"])) == (
        {"step": 25, "why": "target"},
        1,
    )
    assert record["metrics"]["acc"]["value"] >= 0.2


@pytest.mark.full
def test_a_device_without_a_sample_waits_for_the_others(shell: Shell) -> None:
    record = run_and_read_record(
        shell, *RUN, "--sample", "1", "--devices", "2", "--steps", "2", "--passes", "train"
    )
    assert record["status"] == "valid"
    counts = [
        sample["counts"]["samples"] for sample in record["samples"] if sample["pass"] == "train"
    ]
    assert sorted(counts) == [0, 0, 1, 1]
    assert record["metrics"]["acc"]["note"] == {
        "code": "metric.not_evaluated",
        "values": {"pass": "train"},
    }


@pytest.mark.full
def test_the_reference_engine_gives_the_answers_of_the_torch_engine(
    shell: Shell, reached: dict[str, dict[str, Any]]
) -> None:
    record = run_and_read_record(
        shell, *RUN, "--engine", "reference", "--steps", "2", "--set=question.model.dropout=0"
    )
    torch_shell = Shell(shell.folder / "beside")
    torch_shell.folder.mkdir()
    torch_record = run_and_read_record(
        torch_shell, *RUN, "--steps", "2", "--set=question.model.dropout=0"
    )
    for reference_sample, torch_sample in zip(
        record["samples"], torch_record["samples"], strict=False
    ):
        for name in ("loss", "grad_norm"):
            if name in reference_sample["values"]:
                assert reference_sample["values"][name] == pytest.approx(
                    torch_sample["values"][name], rel=1e-4
                )
    assert record["metrics"]["padded_share"]["value"] > 0.4
    assert torch_record["metrics"]["padded_share"]["value"] == 0.0
    choices = [
        run_record["outputs"]["passes"]["before"]["evaluations"][0]["choices"]
        for run_record in (record, torch_record)
    ]
    assert choices[0] == choices[1]
    token_counts = [
        [
            sample["counts"]["tokens"]
            for sample in run_record["samples"]
            if sample["pass"] == "train"
        ]
        for run_record in (record, torch_record)
    ]
    assert token_counts[0] == token_counts[1]  # padding does not count as tokens


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
    model_settings = [
        f"--set=question.model.{key}" for key in ("layers=2", "hidden=64", "heads=4", "ffn=128")
    ]
    vocabulary = data_dir / "tokenizers" / "bert-large-uncased"
    options = (
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
        vocabulary,
        *options,
        *model_settings,
        "--out",
        shell.out,
    )
    (record,) = read_records(shell.out)
    assert is_sound(record), record["reasons"]
    assert record["quality"]["evaluated"] is False
    assert "the weights are random" in format_sentence(record["quality"]["note"])
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
def test_options_that_glm_does_not_support_are_refused_in_one_line(
    shell: Shell, more: tuple[str, ...], said: str
) -> None:
    result = shell(*RUN, *more, "--out", shell.out)
    assert (result.code, result.out) == (2, "")
    assert said in result.lines[-1]
    assert not shell.out.exists() or not list(shell.out.iterdir())
