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

from fixtures.commands import SMOKE, Done, Shell, finish, kill_hard, wait_for
from fixtures.golden import golden
from fixtures.records import sentence
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
EVERY, STEPS = 3, 10
# Large enough that a step and a checkpoint take long enough for the worker to be killed in them.
WIDE = [
    f"--set=question.model.{key}" for key in ("hidden=192", "ffn=768", "vocab=2048", "layers=4")
]
RUN = ("run", CASE, "--size", "smoke", "--accelerator", "cpu", "--steps", str(STEPS), *WIDE)
KEEP = ("--checkpoint-every", str(EVERY))


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a folder as JSON documents, ordered by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def losses(record: dict[str, Any]) -> list[float]:
    """Return the training losses of a record's rank 0, with those of the run that it resumed first."""
    own = [
        s["values"]["loss"]
        for s in record["samples"]
        if s["pass"] == "train" and s["rank"] == 0 and s["counts"]
    ]
    return [*(record["restarts"][0]["losses"] if record["restarts"] else []), *own]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the record of the same run without any interruption."""
    shell = Shell(tmp_path_factory.mktemp("unbroken"))
    done = shell(*RUN, "--out", shell.out)
    assert done.code == 0, done.err
    return records(shell.out)[0]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a finished run with checkpoints after 6 and 9 of its 10 steps;
    tests copy it.
    """
    shell = Shell(tmp_path_factory.mktemp("kept"))
    done = shell(*RUN, *KEEP, "--out", shell.out)
    assert done.code == 0, done.err
    return shell.out


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run's folder, for a test to damage."""
    return Path(shutil.copytree(kept, tmp_path / "copy"))


def folder_of(out: Path) -> Path:
    """Return the folder of checkpoints of the run in an output folder."""
    return next((out / "checkpoints").iterdir())


def record_of(out: Path) -> Path:
    """Return the path of the first record in an output folder."""
    return next(out.glob("*.json"))


def resumed(shell: Shell, out: Path, *more: str) -> tuple[str | Path, ...]:
    """Return the command that resumes the run in an output folder."""
    return (*RUN, "--out", shell.folder / "again", "--resume", record_of(out), *more)


def resume(shell: Shell, out: Path, *more: str) -> Done:
    """Resume the run in an output folder and return the result."""
    return shell(*resumed(shell, out, *more))


def killed(shell: Shell, when: Callable[[Path], bool]) -> Path:
    """Start a run, suspend its worker once `when` holds for the folder of checkpoints, kill it with
    SIGKILL, and return that folder.
    """
    process = shell.start(*RUN, *KEEP, "--out", shell.out)
    assert wait_for(
        lambda: (shell.out / "checkpoints").is_dir() and any((shell.out / "checkpoints").iterdir())
    )
    folder = folder_of(shell.out)
    worker = next(
        one for one in shell.processes() if "steelyard.run.worker" in " ".join(one.cmdline())
    )
    _stop_when(worker, lambda: when(folder))
    worker.send_signal(signal.SIGKILL)
    done = finish(process)
    assert done.code == 1
    assert "killed" in done.err
    return folder


def _stop_when(worker: psutil.Process, condition: Callable[[], bool]) -> None:
    """Suspend a process while the condition holds; fail if that does not happen within 300 s."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
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
    return (folder / checkpoint_folders.format_step_folder(EVERY)).is_dir() and not list(
        folder.glob("*.part")
    )


def in_a_write(folder: Path) -> bool:
    """Return whether the second checkpoint is half written."""
    part = folder / f"{checkpoint_folders.format_step_folder(2 * EVERY)}.part" / "rank-0.bin"
    return part.is_file() and not (part.parent / checkpoint_folders.INDEX_FILE).is_file()


@pytest.mark.full
@pytest.mark.parametrize("when", [in_a_step, in_a_write])
def test_a_killed_run_goes_on(
    shell: Shell, unbroken: dict[str, Any], when: Callable[[Path], bool]
) -> None:
    folder = killed(shell, when)
    [died] = records(shell.out)
    assert (died["status"], died["reasons"][0]["code"]) == ("failed", "killed")
    assert (shell.out / died["checkpoints"]).resolve() == folder.resolve()
    assert [path.name for path in checkpoint_folders.list_finished_checkpoints(folder)] == [
        checkpoint_folders.format_step_folder(EVERY)
    ]
    assert bool(list(folder.glob("*.part"))) == (when is in_a_write)
    done = resume(shell, shell.out)
    assert done.code == 0, done.err
    [again] = records(shell.folder / "again")
    assert losses(again) == losses(unbroken)
    assert again["restarts"][0] | {"losses": []} == {
        "record": died["id"],
        "checkpoints": os.path.relpath(folder, shell.folder / "again"),
        "step": EVERY,
        "plan": "TP1PP1DP1",
        "passed_over": [],
        "losses": [],
    }
    for name in ("loss", "loss_first", "loss_before", "loss_after"):
        assert again["metrics"][name]["value"] == unbroken["metrics"][name]["value"]
    assert (
        len([s for s in again["samples"] if s["pass"] == "train" and s["counts"]]) == STEPS - EVERY
    )
    assert "resumed from record" in " ".join(map(sentence, again["notes"]))
    assert shell("verify", next((shell.folder / "again").glob("*.json"))).code == 0


def _resolved() -> ResolvedCase:
    """Return the resolved smoke case with the wide model and checkpoints."""
    wide = [one.removeprefix("--set=") for one in WIDE]
    return resolve_case(CASE, "smoke", settings=[*wide, f"tune.checkpoint_every={EVERY}"])


@pytest.fixture
def draft(tmp_path: Path) -> tuple[Path, Path]:
    """Return the path of the record that a run writes before its first step, and the folder for its
    checkpoints.
    """
    asked = {
        "token": "t" * 32,
        "mark": "resume",
        "accelerator": "cpu",
        "devices": 1,
        "matmul": "fp32",
        "interface": None,
    }
    asked |= {
        "peer": None,
        "environment": {},
        "variables": {},
        "needs": [],
        "paths": [],
        "silence_s": 60.0,
    }
    run = CaseRun(
        check_request(Request(_resolved(), engine="torch", accelerator="cpu", out=tmp_path)),
        None,
        None,
    )
    run.hellos = {"localhost": Host(OpenMessage.model_validate(asked)).make_hello()}
    assert run.checkpoints_folder is not None
    return run._write_draft(), tmp_path / run.checkpoints_folder


@pytest.mark.process
def test_an_unfinished_record_names_its_checkpoints(draft: tuple[Path, Path], kept: Path) -> None:
    """The record is written at the start and stays as it is when the parent is killed later."""
    path, folder = draft
    assert (path.parent / json.loads(path.read_bytes())["checkpoints"]) == folder
    shutil.copytree(folder_of(kept), folder)
    found = find_checkpoint(Request(_resolved(), steps=STEPS, resume=path))
    assert found is not None
    assert (found.path, found.state.step) == (folder / checkpoint_folders.format_step_folder(9), 9)
    assert found.record_id == json.loads(path.read_bytes())["id"]


@pytest.mark.process
def test_a_run_killed_before_it_made_its_folder_has_nothing_to_resume(
    draft: tuple[Path, Path],
) -> None:
    with pytest.raises(RequestError) as refused:
        find_checkpoint(Request(_resolved(), steps=STEPS, resume=draft[0]))
    assert (
        str(refused.value)
        == f"--resume: {draft[0]} names the folder {str(draft[1])!r}, which is not there; if the"
        " record was moved, give that folder itself, else the run did not get to its first"
        " checkpoint: run it again without --resume"
    )


@pytest.mark.full
def test_a_run_whose_parent_was_killed_goes_on(shell: Shell, unbroken: dict[str, Any]) -> None:
    process = shell.start(*RUN, *KEEP, "--out", shell.out, pipes=False)
    assert wait_for(lambda: list(shell.out.glob("checkpoints/*/step-*[0-9]")), 120)
    kill_hard(process)
    process.wait()
    assert shell.nothing_left(within_s=15.0)
    path = record_of(shell.out)
    assert path.name.endswith("-unfinished.json")
    died = json.loads(path.read_bytes())
    step = int(
        checkpoint_folders.list_finished_checkpoints(folder_of(shell.out))[0].name.removeprefix(
            "step-"
        )
    )
    done = resume(shell, shell.out)
    assert done.code == 0, done.err
    [again] = records(shell.folder / "again")
    assert (again["restarts"][0]["record"], again["restarts"][0]["step"]) == (died["id"], step)
    assert losses(again) == losses(unbroken)
    for name in ("loss", "loss_first", "loss_before", "loss_after"):
        assert again["metrics"][name]["value"] == unbroken["metrics"][name]["value"]


@pytest.mark.full
def test_another_plan_goes_on_from_a_killed_one(shell: Shell, unbroken: dict[str, Any]) -> None:
    """The checkpoint is written with TP2 and PP2 and loaded by four data-parallel replicas."""
    laid = ("--devices", "4", "--parallel", "TP2PP2", "--set=question.train.batch=8")
    process = shell.start(*RUN, *KEEP, *laid, "--out", shell.out)
    assert wait_for(lambda: list(shell.out.glob("checkpoints/*/step-*[0-9]")), 120)
    ranks = [one for one in shell.processes() if "steelyard.run.worker" in " ".join(one.cmdline())]
    max(ranks, key=lambda one: one.pid).kill()
    assert finish(process).code == 1
    whole = Shell(shell.folder / "whole")
    whole.folder.mkdir()
    assert whole(*RUN, "--set=question.train.batch=8", "--out", whole.out).code == 0
    changed = (
        "--devices",
        "4",
        "--parallel",
        "DP4",
        "--set=question.train.batch=8",
        "--set=tune.sharding=2",
    )
    done = resume(shell, shell.out, *changed)
    assert done.code == 0, done.err
    [again], [one] = records(shell.folder / "again"), records(whole.out)
    assert again["restarts"][0]["plan"] == "TP2PP2DP1"
    assert losses(again) == pytest.approx(losses(one), abs=1e-4)  # other order of sums


@pytest.mark.process
def test_what_is_kept_lies_beside_the_record(kept: Path) -> None:
    record = records(kept)[0]
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
    assert state.losses == losses(record)[:6]
    passed = [s for s in record["samples"] if s["pass"] == "train"]
    # Checkpoints after steps 3, 6 and 9 are samples of their own, without counts.
    assert [i for i, s in enumerate(passed) if not s["counts"]] == [3, 7, 11]
    assert all(tuple(s["phases"]) == ("checkpoint",) for s in passed if not s["counts"])
    assert record["metrics"]["p_train"]["value"] > record["metrics"]["p_whole"]["value"]


def test_a_folder_is_enough(shell: Shell, copy: Path, unbroken: dict[str, Any]) -> None:
    """A parent that was killed as well may leave no record."""
    done = shell(*RUN, "--out", shell.out, "--resume", folder_of(copy))
    assert done.code == 0, done.err
    [again] = records(shell.out)
    assert losses(again) == losses(unbroken)
    assert again["restarts"][0]["record"] is None
    assert again["metrics"]["loss_before"] == unbroken["metrics"]["loss_before"]


@pytest.mark.full
def test_a_torn_one_is_passed_over(shell: Shell, copy: Path, unbroken: dict[str, Any]) -> None:
    torn = folder_of(copy) / checkpoint_folders.format_step_folder(9) / "rank-0.bin"
    os.truncate(torn, torn.stat().st_size - 1)
    done = resume(shell, copy)
    assert done.code == 0, done.err
    [again] = records(shell.folder / "again")
    assert (again["restarts"][0]["step"], losses(again)) == (6, losses(unbroken))
    assert again["restarts"][0]["passed_over"] == [checkpoint_folders.format_step_folder(9)]
    assert again["notes"][-1]["code"] == "note.resumed_past"
    assert again["notes"][-1]["values"]["damaged"] == [checkpoint_folders.format_step_folder(9)]


@pytest.mark.full
def test_a_run_that_died_before_its_first_checkpoint_has_the_ones_it_went_on_from(
    shell: Shell, copy: Path, unbroken: dict[str, Any]
) -> None:
    """The run is killed and resumed twice; the report says where each part began."""
    process = shell.start(*RUN, *KEEP[:1], "50", "--out", shell.out, "--resume", record_of(copy))
    assert wait_for(lambda: (shell.out / "checkpoints").is_dir())
    next(
        one for one in shell.processes() if "steelyard.run.worker" in " ".join(one.cmdline())
    ).kill()
    assert finish(process).code == 1
    done = resume(shell, shell.out)
    assert done.code == 0, done.err
    [again] = records(shell.folder / "again")
    assert (again["restarts"][0]["step"], losses(again)) == (9, losses(unbroken))
    assert "resumed after step 9" in shell("report", shell.folder / "again", "--full").out


def _flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
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


def _halves(stored: dict[str, Any], second: int) -> None:
    """Replace the chunk of a tensor by two of 1024 rows each, of which the second begins at row
    `second`.
    """
    chunk = stored["chunks"][0] | {"sizes": [1024, 192], "length": 1024 * 192 * 4}
    stored["chunks"] = [chunk, chunk | {"offset": [second, 0]}]


def _turn(stored: dict[str, Any]) -> None:
    """Swap the two dimensions of a stored tensor and of its chunk."""
    stored["size"] = stored["chunks"][0]["sizes"] = [192, 2048]


def _pipe(path: Path) -> None:
    """Replace a file by a named pipe."""
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    """Replace a file by a link to /dev/zero."""
    path.unlink()
    path.symlink_to("/dev/zero")


def _first(table: dict[str, Any]) -> Any:
    """Return the entry of the embedding weights in the list of tensors."""
    return table["tensors"]["weights.embed.weight"]


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (
        lambda folder: _flip(folder / "step-00000009" / "rank-0.bin"),
        "are damaged; move this checkpoint away",
    ),
    "nothing whole": (
        lambda folder: [shutil.rmtree(path) for path in folder.glob("step-*")],
        "holds no whole checkpoint",
    ),
    "only a part": (
        lambda folder: [path.rename(f"{path}.part") for path in folder.glob("step-*")],
        "holds no whole checkpoint",
    ),
    "no run": (
        lambda folder: (folder / "run.json").unlink(),
        "no folder of checkpoints (no run.json in it)",
    ),
    "no folder": (lambda folder: shutil.rmtree(folder), "no folder of checkpoints"),
    "a pipe": (
        lambda folder: [_pipe(path / "state.json") for path in folder.glob("step-*")],
        "not a file",
    ),
    "a device": (
        lambda folder: [_device(path / "tensors.json") for path in folder.glob("step-*")],
        "not a file",
    ),
    "not JSON": (
        lambda folder: [(p / "state.json").write_text("{") for p in folder.glob("step-*")],
        "not a checkpoint's table",
    ),
    "deep": (
        lambda folder: (folder / "run.json").write_text("[" * 100_000),
        "not a checkpoint's table",
    ),
    "a path": (
        _edit(
            checkpoint_folders.INDEX_FILE, lambda t: _first(t)["chunks"][0].update(file="../../x")
        ),
        "not a checkpoint's table",
    ),
    "beyond": (
        _edit(checkpoint_folders.INDEX_FILE, lambda t: _first(t)["chunks"][0].update(at=10**12)),
        "lies beyond the end",
    ),
    "another size": (
        _edit(checkpoint_folders.INDEX_FILE, lambda t: _turn(_first(t))),
        "the model has float32 of [2048, 192]",
    ),
    "another type": (
        _edit(checkpoint_folders.INDEX_FILE, lambda t: _first(t).update(dtype="float64")),
        "is float64 of [2048, 192]",
    ),
    "one missing": (
        _edit(checkpoint_folders.INDEX_FILE, lambda t: t["tensors"].pop("exp_avg.embed.weight")),
        "is missing; the model has",
    ),
    "a hole": (
        _edit(
            checkpoint_folders.INDEX_FILE, lambda t: _first(t)["chunks"][0].update(sizes=[1, 192])
        ),
        "do not add up to it",
    ),
    "twice": (
        _edit(checkpoint_folders.INDEX_FILE, lambda t: _halves(_first(t), 0)),
        "do not add up to it",
    ),
    "before it": (
        _edit(
            checkpoint_folders.INDEX_FILE, lambda t: _first(t)["chunks"][0].update(offset=[-5, 0])
        ),
        "do not add up to it",
    ),
    "behind it": (
        _edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _first(t)["chunks"][0].update(offset=[2**70, 0]),
        ),
        "do not add up to it",
    ),
    "turned": (
        _edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _first(t)["chunks"][0].update(sizes=[192, 2048]),
        ),
        "do not add up to it",
    ),
    "less than none": (
        _edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _first(t)["chunks"][0].update(sizes=[-2048, -192]),
        ),
        "do not add up to it",
    ),
    "flat": (
        _edit(
            checkpoint_folders.INDEX_FILE,
            lambda t: _first(t)["chunks"][0].update(offset=[0], sizes=[393216]),
        ),
        "do not add up",
    ),
    "huge losses": (
        _edit(checkpoint_folders.STATE_FILE, lambda t: t.update(losses=[1e308] * 9)),
        "not a checkpoint's table: losses",
    ),
    "no numbers": (
        _edit(checkpoint_folders.STATE_FILE, lambda t: t.update(numbers={})),
        "not a checkpoint's table: numbers.updates",
    ),
    "fewer than no updates": (
        _edit(checkpoint_folders.STATE_FILE, lambda t: t["numbers"].update(updates=-7)),
        "numbers.updates",
    ),
    "too many updates": (
        _edit(checkpoint_folders.STATE_FILE, lambda t: t["numbers"].update(updates=1e300)),
        "numbers.updates",
    ),
    "fewer losses": (
        _edit(checkpoint_folders.STATE_FILE, lambda t: t["losses"].pop()),
        "losses of",
    ),
    "no step": (
        _edit(checkpoint_folders.STATE_FILE, lambda t: t.update(step=0)),
        "not a checkpoint's table: step",
    ),
    "other data": (
        _edit(checkpoint_folders.RUN_FILE, lambda t: t.update(key="0" * 16)),
        "the data or their tokens differ",
    ),
    "other weights": (
        _edit(checkpoint_folders.RUN_FILE, lambda t: t["question"].update(seed=5)),
        "with seed=5, asked is llama1-7b-openwebtext with seed=0",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_checkpoint_gets_one_line(shell: Shell, copy: Path, bad: str) -> None:
    spoil, said = BAD[bad]
    spoil(folder_of(copy))
    done = shell.ask(*resumed(shell, copy))
    assert (done.code, done.out) == (2, "")
    assert said in done.lines[-1]
    assert not list((shell.folder / "again").glob("*.json"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set=question.train.lr=0.5",), "with train.lr="),
        (("--precision", "bf16"), "asked is llama1-7b-openwebtext with precision."),
        (("--sample", "2"), "was made without --sample"),
        (("--steps", "9"), "nothing is left to do"),
        (
            ("--weights", "WEIGHTS"),
            "the checkpoint began with other weights; give the same, or leave --weights out",
        ),
        (("--passes", "before,train"), "a resumed run has no pass before"),
        (("--engine", "transformers"), "of engine torch, asked is transformers"),
    ],
)
def test_another_question_is_refused(
    shell: Shell, kept: Path, more: tuple[str, ...], said: str
) -> None:
    if "WEIGHTS" in more:
        shape = resolve_case(
            CASE, "smoke", settings=[one.removeprefix("--set=") for one in WIDE]
        ).case.question.model
        LlamaForCausalLM(make_transformers_config(shape)).save_pretrained(shell.folder / "hf")
        more = ("--weights", str(shell.folder / "hf"))
    done = resume(shell, kept, *more)
    assert (done.code, done.out) == (2, "")
    assert said in done.lines[-1]


@pytest.mark.full
@pytest.mark.parametrize("small_disk", ["20m"], indirect=True)
def test_a_full_disk_leaves_a_record(shell: Shell, small_disk: Path) -> None:
    """A checkpoint has 38 MB and the disk 20 MB; the part that was written is removed, which makes
    room for the record.
    """
    done = shell(*RUN, *KEEP, "--out", small_disk)
    assert done.code == 1, done.err
    [record] = records(small_disk)
    assert (record["status"], record["reasons"][0]["code"]) == ("failed", "disk_full")
    assert golden("errno-28-the-checkpoint-after-step") in record["reasons"][0]["text"]
    assert not list(small_disk.glob("checkpoints/*/step-*"))


def test_a_record_that_was_changed_is_refused(shell: Shell, copy: Path) -> None:
    path = record_of(copy)
    path.write_text(
        path.read_text().replace(
            '"checkpoints":"checkpoints/', '"checkpoints":"../copy/checkpoints/'
        )
    )
    done = resume(shell, copy)
    assert (done.code, "does not verify" in done.lines[-1]) == (2, True)


def test_where_checkpoints_cannot_be_is_said_before_anything_runs(shell: Shell) -> None:
    done = shell(*SMOKE, "--checkpoint-every", "5", "--out", shell.out)
    assert (done.code, golden("is-an-inference-case-without-checkpoints") in done.lines[-1]) == (
        2,
        True,
    )
    shell.out.mkdir()
    (shell.out / "checkpoints").write_text("in the way")
    done = shell(*RUN, *KEEP, "--out", shell.out)
    assert (done.code, "is a file, not a folder for checkpoints" in done.lines[-1]) == (2, True)


def test_what_has_no_checkpoint_is_refused(
    shell: Shell, kept: Path, unbroken: dict[str, Any]
) -> None:
    path = shell.folder / "unbroken.json"
    path.write_text(json.dumps(unbroken, separators=(",", ":"), ensure_ascii=False) + "\n")
    done = shell(*RUN, "--out", shell.out, "--resume", path)
    assert (done.code, "has no checkpoints; train with --checkpoint-every" in done.lines[-1]) == (
        2,
        True,
    )
    done = shell(*SMOKE, "--out", shell.out, "--resume", record_of(kept))
    assert (done.code, golden("is-an-inference-case-which-cannot") in done.lines[-1]) == (2, True)
