"""Tests of checkpoints with real processes and real kills: a killed run resumes with the losses of
an uninterrupted one.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import LlamaForCausalLM

from fixtures.commands import SMOKE, CommandResult, Shell, send_sigkill, wait_for, wait_for_result
from fixtures.golden import golden
from fixtures.records import format_sentence
from steelyard.case.request import Request
from steelyard.case.resolve import ResolvedCase, resolve_case
from steelyard.engines.transformers.score import make_transformers_config
from steelyard.errors import RequestError
from steelyard.run.checked_request import check_request, find_checkpoint
from steelyard.run.host import Host
from steelyard.run.messages import OpenMessage
from steelyard.run.parent import CaseRun
from steelyard.training import checkpoint_folders

CASE = "llama1-7b-openwebtext"
CHECKPOINT_INTERVAL, STEPS = 3, 10
# Large enough that a step and a checkpoint take long enough for the worker to be killed in them.
WIDE_MODEL = [
    f"--set=question.model.{key}" for key in ("hidden=192", "ffn=768", "vocab=2048", "layers=4")
]
RUN = ("run", CASE, "--size", "smoke", "--accelerator", "cpu", "--steps", str(STEPS), *WIDE_MODEL)
CHECKPOINT_OPTIONS = ("--checkpoint-every", str(CHECKPOINT_INTERVAL))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a folder as JSON documents, ordered by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def all_losses(record: dict[str, Any]) -> list[float]:
    """Return the training losses of a record's rank 0, with those of the run that it resumed
    first.
    """
    losses_of_this_run = [
        s["values"]["loss"]
        for s in record["samples"]
        if s["pass"] == "train" and s["rank"] == 0 and s["counts"]
    ]
    return [*(record["restarts"][0]["losses"] if record["restarts"] else []), *losses_of_this_run]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the record of the same run without any interruption."""
    shell = Shell(tmp_path_factory.mktemp("unbroken"))
    result = shell(*RUN, "--out", shell.out)
    assert result.code == 0, result.err
    return read_records(shell.out)[0]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a finished run with checkpoints after 6 and 9 of its 10 steps;
    tests copy it.
    """
    shell = Shell(tmp_path_factory.mktemp("kept"))
    result = shell(*RUN, *CHECKPOINT_OPTIONS, "--out", shell.out)
    assert result.code == 0, result.err
    return shell.out


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run's folder, for a test to damage."""
    return Path(shutil.copytree(kept, tmp_path / "copy"))


def find_checkpoint_folder(out: Path) -> Path:
    """Return the folder of checkpoints of the run in an output folder."""
    return next((out / "checkpoints").iterdir())


def find_record(out: Path) -> Path:
    """Return the path of the first record in an output folder."""
    return next(out.glob("*.json"))


def make_resume_command(shell: Shell, out: Path, *options: str) -> tuple[str | Path, ...]:
    """Return the command that resumes the run in an output folder."""
    return (*RUN, "--out", shell.folder / "again", "--resume", find_record(out), *options)


def resume_run(shell: Shell, out: Path, *options: str) -> CommandResult:
    """Resume the run in an output folder and return the result."""
    return shell(*make_resume_command(shell, out, *options))


def run_and_kill_worker(shell: Shell, when: Callable[[Path], bool]) -> Path:
    """Start a run, suspend its worker once `when` holds for the folder of checkpoints, kill it with
    SIGKILL, and return that folder.
    """
    process = shell.start(*RUN, *CHECKPOINT_OPTIONS, "--out", shell.out)
    assert wait_for(
        lambda: (shell.out / "checkpoints").is_dir() and any((shell.out / "checkpoints").iterdir())
    )
    folder = find_checkpoint_folder(shell.out)
    worker = next(
        process_of_run
        for process_of_run in shell.processes()
        if "steelyard.run.worker" in " ".join(process_of_run.cmdline())
    )
    _suspend_when(worker, lambda: when(folder))
    worker.send_signal(signal.SIGKILL)
    result = wait_for_result(process)
    assert result.code == 1
    assert "killed" in result.err
    return folder


def _suspend_when(worker: psutil.Process, condition: Callable[[], bool]) -> None:
    """Suspend a process while the condition holds; fail if that does not happen within 300 s."""
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        if condition():
            worker.send_signal(signal.SIGSTOP)
            assert wait_for(lambda: worker.status() == psutil.STATUS_STOPPED, 5)
            if condition():
                return
            worker.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("the moment to kill did not come")


def in_a_step(folder: Path) -> bool:
    """Return whether the first checkpoint is complete and none is being written."""
    return (
        folder / checkpoint_folders.format_step_folder(CHECKPOINT_INTERVAL)
    ).is_dir() and not list(folder.glob("*.part"))


def in_a_write(folder: Path) -> bool:
    """Return whether the second checkpoint is half written."""
    part = (
        folder
        / f"{checkpoint_folders.format_step_folder(2 * CHECKPOINT_INTERVAL)}.part"
        / "rank-0.bin"
    )
    return part.is_file() and not (part.parent / checkpoint_folders.INDEX_FILE).is_file()


@pytest.mark.full
@pytest.mark.parametrize("when", [in_a_step, in_a_write])
def test_killed_run_resumes_with_equal_losses(
    shell: Shell, unbroken: dict[str, Any], when: Callable[[Path], bool]
) -> None:
    folder = run_and_kill_worker(shell, when)
    [failed_record] = read_records(shell.out)
    assert (failed_record["status"], failed_record["reasons"][0]["code"]) == ("failed", "killed")
    assert (shell.out / failed_record["checkpoints"]).resolve() == folder.resolve()
    assert [path.name for path in checkpoint_folders.list_finished_checkpoints(folder)] == [
        checkpoint_folders.format_step_folder(CHECKPOINT_INTERVAL)
    ]
    assert bool(list(folder.glob("*.part"))) == (when is in_a_write)
    result = resume_run(shell, shell.out)
    assert result.code == 0, result.err
    [resumed_record] = read_records(shell.folder / "again")
    assert all_losses(resumed_record) == all_losses(unbroken)
    assert resumed_record["restarts"][0] | {"losses": []} == {
        "record": failed_record["id"],
        "checkpoints": os.path.relpath(folder, shell.folder / "again"),
        "step": CHECKPOINT_INTERVAL,
        "plan": "TP1PP1DP1",
        "passed_over": [],
        "losses": [],
    }
    for name in ("loss", "loss_first", "loss_before", "loss_after"):
        assert resumed_record["metrics"][name]["value"] == unbroken["metrics"][name]["value"]
    assert (
        len([s for s in resumed_record["samples"] if s["pass"] == "train" and s["counts"]])
        == STEPS - CHECKPOINT_INTERVAL
    )
    assert "resumed from record" in " ".join(map(format_sentence, resumed_record["notes"]))
    verified = shell("verify", next((shell.folder / "again").glob("*.json")))
    assert (verified.code, "the record lacks" in verified.out) == (0, False)


def _resolve_wide_case() -> ResolvedCase:
    """Return the resolved smoke case with the wide model and checkpoints."""
    settings = [option.removeprefix("--set=") for option in WIDE_MODEL]
    return resolve_case(
        CASE, "smoke", settings=[*settings, f"tune.checkpoint_every={CHECKPOINT_INTERVAL}"]
    )


@pytest.fixture
def draft(tmp_path: Path) -> tuple[Path, Path]:
    """Return the path of the record that a run writes before its first step, and the folder for its
    checkpoints.
    """
    fields = {
        "token": "t" * 32,
        "mark": "resume",
        "accelerator": "cpu",
        "devices": 1,
        "matmul": "fp32",
        "interface": None,
    }
    fields |= {
        "peer": None,
        "environment": {},
        "variables": {},
        "needs": [],
        "paths": [],
        "silence_s": 60.0,
    }
    run = CaseRun(
        check_request(
            Request(_resolve_wide_case(), engine="torch", accelerator="cpu", out=tmp_path)
        ),
        None,
        None,
    )
    run.hellos = {"localhost": Host(OpenMessage.model_validate(fields)).make_hello()}
    assert run.checkpoints_folder is not None
    return run._write_draft(), tmp_path / run.checkpoints_folder


@pytest.mark.process
def test_an_unfinished_record_names_its_checkpoints(draft: tuple[Path, Path], kept: Path) -> None:
    """The record is written at the start and stays as it is when the parent is killed later."""
    path, folder = draft
    assert (path.parent / json.loads(path.read_bytes())["checkpoints"]) == folder
    shutil.copytree(find_checkpoint_folder(kept), folder)
    resume_point = find_checkpoint(Request(_resolve_wide_case(), steps=STEPS, resume=path))
    assert resume_point is not None
    assert (resume_point.path, resume_point.state.step) == (
        folder / checkpoint_folders.format_step_folder(9),
        9,
    )
    assert resume_point.record_id == json.loads(path.read_bytes())["id"]


@pytest.mark.process
def test_a_run_killed_before_it_made_its_folder_has_nothing_to_resume(
    draft: tuple[Path, Path],
) -> None:
    with pytest.raises(RequestError) as refused:
        find_checkpoint(Request(_resolve_wide_case(), steps=STEPS, resume=draft[0]))
    assert (
        str(refused.value)
        == f"--resume: {draft[0]} names the folder {str(draft[1])!r}, which does not"
        " exist; if the record was moved, give that folder itself, else the run ended before its"
        " first checkpoint: run it again without --resume"
    )


@pytest.mark.full
def test_run_whose_parent_was_killed_resumes(shell: Shell, unbroken: dict[str, Any]) -> None:
    process = shell.start(*RUN, *CHECKPOINT_OPTIONS, "--out", shell.out, pipes=False)
    assert wait_for(lambda: list(shell.out.glob("checkpoints/*/step-*[0-9]")), 120)
    send_sigkill(process)
    process.wait()
    assert shell.wait_until_ended(within_s=15.0)
    path = find_record(shell.out)
    assert path.name.endswith("-unfinished.json")
    failed_record = json.loads(path.read_bytes())
    step = int(
        checkpoint_folders.list_finished_checkpoints(find_checkpoint_folder(shell.out))[
            0
        ].name.removeprefix("step-")
    )
    result = resume_run(shell, shell.out)
    assert result.code == 0, result.err
    [resumed_record] = read_records(shell.folder / "again")
    assert (resumed_record["restarts"][0]["record"], resumed_record["restarts"][0]["step"]) == (
        failed_record["id"],
        step,
    )
    assert all_losses(resumed_record) == all_losses(unbroken)
    for name in ("loss", "loss_first", "loss_before", "loss_after"):
        assert resumed_record["metrics"][name]["value"] == unbroken["metrics"][name]["value"]


@pytest.mark.full
@pytest.mark.long
def test_killed_run_resumes_with_another_plan(shell: Shell, unbroken: dict[str, Any]) -> None:
    """The checkpoint is written with TP2 and PP2 and loaded by four data-parallel replicas."""
    plan_options = ("--devices", "4", "--parallel", "TP2PP2", "--set=question.train.batch=8")
    process = shell.start(*RUN, *CHECKPOINT_OPTIONS, *plan_options, "--out", shell.out)
    assert wait_for(lambda: list(shell.out.glob("checkpoints/*/step-*[0-9]")), 120)
    ranks = [one for one in shell.processes() if "steelyard.run.worker" in " ".join(one.cmdline())]
    max(ranks, key=lambda one: one.pid).kill()
    assert wait_for_result(process).code == 1
    reference_shell = Shell(shell.folder / "whole")
    reference_shell.folder.mkdir()
    assert (
        reference_shell(*RUN, "--set=question.train.batch=8", "--out", reference_shell.out).code
        == 0
    )
    other_plan_options = (
        "--devices",
        "4",
        "--parallel",
        "DP4",
        "--set=question.train.batch=8",
        "--set=tune.sharding=2",
    )
    result = resume_run(shell, shell.out, *other_plan_options)
    assert result.code == 0, result.err
    [resumed_record], [one] = (
        read_records(shell.folder / "again"),
        read_records(reference_shell.out),
    )
    assert resumed_record["restarts"][0]["plan"] == "TP2PP2DP1"
    assert all_losses(resumed_record) == pytest.approx(
        all_losses(one), abs=1e-4
    )  # other order of sums


@pytest.mark.process
def test_checkpoints_are_stored_beside_the_record(kept: Path) -> None:
    record = read_records(kept)[0]
    folder = kept / record["checkpoints"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "before-0.json",
        "run.json",
        "step-00000006",
        "step-00000009",
    ]
    state = checkpoint_folders.read_checkpoint_json(
        folder / "step-00000006" / checkpoint_folders.STATE_FILE, checkpoint_folders.CheckpointState
    )
    assert state.losses == all_losses(record)[:6]
    train_samples = [s for s in record["samples"] if s["pass"] == "train"]
    # Checkpoints after steps 3, 6 and 9 are samples of their own, without counts.
    assert [i for i, s in enumerate(train_samples) if not s["counts"]] == [3, 7, 11]
    assert all(tuple(s["phases"]) == ("checkpoint",) for s in train_samples if not s["counts"])
    assert record["metrics"]["p_train"]["value"] > record["metrics"]["p_whole"]["value"]


def test_run_resumes_from_a_checkpoint_folder_without_a_record(
    shell: Shell, copy: Path, unbroken: dict[str, Any]
) -> None:
    """A parent that was killed as well may leave no record."""
    result = shell(*RUN, "--out", shell.out, "--resume", find_checkpoint_folder(copy))
    assert result.code == 0, result.err
    [resumed_record] = read_records(shell.out)
    assert all_losses(resumed_record) == all_losses(unbroken)
    assert resumed_record["restarts"][0]["record"] is None
    assert resumed_record["metrics"]["loss_before"] == unbroken["metrics"]["loss_before"]


@pytest.mark.full
def test_truncated_checkpoint_is_passed_over(
    shell: Shell, copy: Path, unbroken: dict[str, Any]
) -> None:
    truncated = (
        find_checkpoint_folder(copy) / checkpoint_folders.format_step_folder(9) / "rank-0.bin"
    )
    os.truncate(truncated, truncated.stat().st_size - 1)
    result = resume_run(shell, copy)
    assert result.code == 0, result.err
    [resumed_record] = read_records(shell.folder / "again")
    assert (resumed_record["restarts"][0]["step"], all_losses(resumed_record)) == (
        6,
        all_losses(unbroken),
    )
    assert resumed_record["restarts"][0]["passed_over"] == [
        checkpoint_folders.format_step_folder(9)
    ]
    assert resumed_record["notes"][-1]["code"] == "note.resumed_past"
    assert resumed_record["notes"][-1]["values"]["damaged"] == [
        checkpoint_folders.format_step_folder(9)
    ]


@pytest.mark.full
@pytest.mark.long
def test_run_killed_before_its_first_checkpoint_resumes_from_the_earlier_ones(
    shell: Shell, copy: Path, unbroken: dict[str, Any]
) -> None:
    """The run is killed and resumed twice; the report says where each part began."""
    process = shell.start(
        *RUN, *CHECKPOINT_OPTIONS[:1], "50", "--out", shell.out, "--resume", find_record(copy)
    )
    assert wait_for(lambda: (shell.out / "checkpoints").is_dir())
    next(
        process_of_run
        for process_of_run in shell.processes()
        if "steelyard.run.worker" in " ".join(process_of_run.cmdline())
    ).kill()
    assert wait_for_result(process).code == 1
    result = resume_run(shell, shell.out)
    assert result.code == 0, result.err
    [resumed_record] = read_records(shell.folder / "again")
    assert (resumed_record["restarts"][0]["step"], all_losses(resumed_record)) == (
        9,
        all_losses(unbroken),
    )
    assert "resumed after step 9" in shell("report", shell.folder / "again", "--full", "--wide").out


def _flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _make_json_edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that changes the JSON files of this name in a folder of checkpoints and
    corrects their checksums.
    """

    def edit(folder: Path) -> None:
        for path in (
            folder.glob(f"step-*/{name}")
            if name != checkpoint_folders.RUN_FILE
            else [folder / name]
        ):
            table = json.loads(path.read_text())
            del table[checkpoint_folders.CHECKSUM_KEY]
            change(table)
            path.write_text(
                json.dumps(
                    table
                    | {checkpoint_folders.CHECKSUM_KEY: checkpoint_folders._compute_checksum(table)}
                )
            )

    return edit


def _split_into_chunks(stored: dict[str, Any], second: int) -> None:
    """Replace the chunk of a tensor by two of 1024 rows each, of which the second begins at row
    `second`.
    """
    chunk = stored["chunks"][0] | {"sizes": [1024, 192], "length": 1024 * 192 * 4}
    stored["chunks"] = [chunk, chunk | {"offset": [second, 0]}]


def _transpose_shape(stored: dict[str, Any]) -> None:
    """Swap the two dimensions of a stored tensor and of its chunk."""
    stored["size"] = stored["chunks"][0]["sizes"] = [192, 2048]


def _replace_with_fifo(path: Path) -> None:
    """Replace a file by a named pipe."""
    path.unlink()
    os.mkfifo(path)


def _replace_with_device(path: Path) -> None:
    """Replace a file by a link to /dev/zero."""
    path.unlink()
    path.symlink_to("/dev/zero")


def _embedding_of(table: dict[str, Any]) -> Any:
    """Return the entry of the embedding weights in the list of tensors."""
    return table["tensors"]["weights.embed.weight"]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (
        lambda folder: _flip_bit(folder / "step-00000009" / "rank-0.bin"),
        "are damaged; move this checkpoint away",
    ),
    "nothing whole": (
        lambda folder: [shutil.rmtree(path) for path in folder.glob("step-*")],
        ": no complete checkpoint",
    ),
    "only a part": (
        lambda folder: [path.rename(f"{path}.part") for path in folder.glob("step-*")],
        ": no complete checkpoint",
    ),
    "no run": (
        lambda folder: (folder / "run.json").unlink(),
        "not a folder of checkpoints (it has no run.json)",
    ),
    "no folder": (lambda folder: shutil.rmtree(folder), "not a folder of checkpoints"),
    "a pipe": (
        lambda folder: [_replace_with_fifo(path / "state.json") for path in folder.glob("step-*")],
        "not a file",
    ),
    "a device": (
        lambda folder: [
            _replace_with_device(path / "tensors.json") for path in folder.glob("step-*")
        ],
        "not a file",
    ),
    "not JSON": (
        lambda folder: [(p / "state.json").write_text("{") for p in folder.glob("step-*")],
        "not a JSON file of a checkpoint",
    ),
    "deep": (
        lambda folder: (folder / "run.json").write_text("[" * 100_000),
        "not a JSON file of a checkpoint",
    ),
    "a path": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(file="../../x"),
        ),
        "not a JSON file of a checkpoint",
    ),
    "beyond": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE, lambda t: _embedding_of(t)["chunks"][0].update(at=10**12)
        ),
        "lies beyond the end",
    ),
    "another size": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE, lambda t: _transpose_shape(_embedding_of(t))
        ),
        "the model has float32 [2048, 192]",
    ),
    "another type": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE, lambda t: _embedding_of(t).update(dtype="float64")
        ),
        "is float64 [2048, 192]",
    ),
    "one missing": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE, lambda t: t["tensors"].pop("exp_avg.embed.weight")
        ),
        "is missing; the model has",
    ),
    "a hole": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(sizes=[1, 192]),
        ),
        "do not cover it exactly once",
    ),
    "twice": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE, lambda t: _split_into_chunks(_embedding_of(t), 0)
        ),
        "do not cover it exactly once",
    ),
    "before it": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(offset=[-5, 0]),
        ),
        "do not cover it exactly once",
    ),
    "behind it": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(offset=[2**70, 0]),
        ),
        "do not cover it exactly once",
    ),
    "turned": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(sizes=[192, 2048]),
        ),
        "do not cover it exactly once",
    ),
    "less than none": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(sizes=[-2048, -192]),
        ),
        "do not cover it exactly once",
    ),
    "flat": (
        _make_json_edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _embedding_of(t)["chunks"][0].update(offset=[0], sizes=[393216]),
        ),
        "do not cover it exactly once",
    ),
    "huge losses": (
        _make_json_edit(checkpoint_folders.STATE_FILE, lambda t: t.update(losses=[1e308] * 9)),
        "not a JSON file of a checkpoint: losses",
    ),
    "no numbers": (
        _make_json_edit(checkpoint_folders.STATE_FILE, lambda t: t.update(numbers={})),
        "not a JSON file of a checkpoint: numbers.updates",
    ),
    "fewer than no updates": (
        _make_json_edit(checkpoint_folders.STATE_FILE, lambda t: t["numbers"].update(updates=-7)),
        "numbers.updates",
    ),
    "too many updates": (
        _make_json_edit(
            checkpoint_folders.STATE_FILE, lambda t: t["numbers"].update(updates=1e300)
        ),
        "numbers.updates",
    ),
    "fewer losses": (
        _make_json_edit(checkpoint_folders.STATE_FILE, lambda t: t["losses"].pop()),
        "losses of",
    ),
    "no step": (
        _make_json_edit(checkpoint_folders.STATE_FILE, lambda t: t.update(step=0)),
        "not a JSON file of a checkpoint: step",
    ),
    "other data": (
        _make_json_edit(checkpoint_folders.RUN_FILE, lambda t: t.update(key="0" * 16)),
        "the data or their tokens differ",
    ),
    "other weights": (
        _make_json_edit(checkpoint_folders.RUN_FILE, lambda t: t["question"].update(seed=5)),
        "with seed=5, this run is llama1-7b-openwebtext with seed=0",
    ),
}


@pytest.mark.parametrize("bad", DAMAGES)
def test_bad_checkpoint_is_refused_with_one_line(shell: Shell, copy: Path, bad: str) -> None:
    damage, expected = DAMAGES[bad]
    damage(find_checkpoint_folder(copy))
    result = shell.run_in_process(*make_resume_command(shell, copy))
    assert (result.code, result.out) == (2, "")
    assert expected in result.lines[-1]
    assert not list((shell.folder / "again").glob("*.json"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set=question.train.lr=0.5",), "with train.lr="),
        (("--precision", "bf16"), "this run is llama1-7b-openwebtext with precision."),
        (("--sample", "2"), "was written without --sample"),
        (("--steps", "9"), "nothing is left to train"),
        (
            ("--weights", "WEIGHTS"),
            "the checkpoint's run started from other weights; give the same, or leave --weights"
            " out",
        ),
        (("--passes", "before,train"), "a resumed run has no pass before"),
        (("--engine", "transformers"), "of engine torch, this run is of transformers"),
    ],
)
def test_resuming_with_another_question_is_refused(
    shell: Shell, kept: Path, more: tuple[str, ...], said: str
) -> None:
    if "WEIGHTS" in more:
        model_shape = resolve_case(
            CASE, "smoke", settings=[option.removeprefix("--set=") for option in WIDE_MODEL]
        ).case.question.model
        LlamaForCausalLM(make_transformers_config(model_shape)).save_pretrained(shell.folder / "hf")
        more = ("--weights", str(shell.folder / "hf"))
    result = resume_run(shell, kept, *more)
    assert (result.code, result.out) == (2, "")
    assert said in result.lines[-1]


@pytest.mark.full
@pytest.mark.parametrize("small_disk", ["20m"], indirect=True)
def test_a_full_disk_leaves_a_record(shell: Shell, small_disk: Path) -> None:
    """A checkpoint has 38 MB and the disk 20 MB; the part that was written is removed, which makes
    room for the record.
    """
    result = shell(*RUN, *CHECKPOINT_OPTIONS, "--out", small_disk)
    assert result.code == 1, result.err
    [record] = read_records(small_disk)
    assert (record["status"], record["reasons"][0]["code"]) == ("failed", "disk_full")
    assert golden("errno-28-the-checkpoint-after-step") in record["reasons"][0]["text"]
    assert not list(small_disk.glob("checkpoints/*/step-*"))


def test_resuming_from_a_changed_record_is_refused(shell: Shell, copy: Path) -> None:
    path = find_record(copy)
    path.write_text(
        path.read_text().replace(
            '"checkpoints":"checkpoints/', '"checkpoints":"../copy/checkpoints/'
        )
    )
    result = resume_run(shell, copy)
    assert (result.code, "does not verify" in result.lines[-1]) == (2, True)


def test_impossible_checkpoints_are_refused_before_the_run(shell: Shell) -> None:
    result = shell(*SMOKE, "--checkpoint-every", "5", "--out", shell.out)
    assert (
        result.code,
        golden("is-an-inference-case-without-checkpoints") in result.lines[-1],
    ) == (2, True)
    shell.out.mkdir()
    (shell.out / "checkpoints").write_text("in the way")
    result = shell(*RUN, *CHECKPOINT_OPTIONS, "--out", shell.out)
    assert (result.code, "is a file, not a folder for checkpoints" in result.lines[-1]) == (2, True)


def test_resuming_without_checkpoints_is_refused(
    shell: Shell, kept: Path, unbroken: dict[str, Any]
) -> None:
    path = shell.folder / "unbroken.json"
    path.write_text(json.dumps(unbroken, separators=(",", ":"), ensure_ascii=False) + "\n")
    result = shell(*RUN, "--out", shell.out, "--resume", path)
    assert (
        result.code,
        "has no checkpoints; train with --checkpoint-every" in result.lines[-1],
    ) == (2, True)
    result = shell(*SMOKE, "--out", shell.out, "--resume", find_record(kept))
    assert (result.code, golden("is-an-inference-case-which-cannot") in result.lines[-1]) == (
        2,
        True,
    )
