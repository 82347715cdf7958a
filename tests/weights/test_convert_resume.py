"""Test that interrupted conversions continue where they stopped, and that none is written over
other files.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.conversions import hashes, hf, odd_tensors, refused
from fixtures.megatron import CPU, FILE, SHAPE, SHAPES, write_megatron
from steelyard.errors import LostError, RequestError
from steelyard.weights import checkpoint_writer, convert, llama_weights
from steelyard.weights.inspection import inspect_checkpoint


class Stopped(Exception):  # noqa: N818
    """The interruption that a test raises from a progress call."""

    pass


def stop_after(calls: int) -> Callable[[int, int], None]:
    """Return a progress function that raises ConversionStopped at its given call."""
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == calls:
            raise Stopped

    return progress


# (layout, tensors written before the interruption). A Megatron shard has 15 tensors, and there are
# 4; a Hugging Face folder has 21: the first, the last of a file, the one after it, the very last.
POINTS = [("megatron", 1), ("megatron", 15), ("megatron", 16), ("megatron", 40), ("megatron", 60)]
POINTS += [("hf", 1), ("hf", 2), ("hf", 9), ("hf", 20), ("hf", 21)]


@pytest.mark.parametrize("to, calls", POINTS)
def test_interrupted(to: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "MAX_FILE_BYTES", 16_000)
    source = hf(tmp_path / "first")
    convert.convert_checkpoint(source, tmp_path / "whole", to, 4 if to == "megatron" else 1)
    before, target = hashes(source), tmp_path / "to"
    with pytest.raises(Stopped):
        convert.convert_checkpoint(
            source, target, to, 4 if to == "megatron" else 1, None, stop_after(calls)
        )
    complete = json.loads((target / "conversion.json").read_text())["files"]
    assert len(list(target.rglob("*.part"))) == 1
    for folder in (target, *target.glob("release")):
        for action in (
            inspect_checkpoint,
            lambda f: llama_weights.load_llama(
                llama_weights.build_llama(SHAPE, CPU, torch.float32), f, SHAPE
            ),
        ):
            refused(
                lambda action=action, folder=folder: action(folder),
                "conversion.json: says that its folder is not complete; ",
            )
    kept = {name: (target / name).stat().st_mtime_ns for name in complete}
    told: list[tuple[int, int]] = []
    done = convert.convert_checkpoint(
        source, target, to, 4 if to == "megatron" else 1, None, lambda *it: told.append(it)
    )
    assert done.reused == len(complete)
    assert {name: (target / name).stat().st_mtime_ns for name in complete} == kept
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    data = sum(size for name, size in done.files if name.endswith((".pt", ".safetensors")))
    assert 0.7 * data < told[-1][1] <= data
    assert hashes(target) == hashes(tmp_path / "whole")
    assert hashes(source) == before


def test_some_interruptions_come_after_a_complete_file(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        convert.convert_checkpoint(
            hf(tmp_path / "first"), tmp_path / "to", "megatron", 4, None, stop_after(40)
        )
    assert len(json.loads((tmp_path / "to" / "conversion.json").read_text())["files"]) == 2


def test_what_is_left_behind(tmp_path: Path) -> None:
    """Files under temporary names are overwritten, and complete files that were damaged or removed
    are written again.
    """
    source, target = hf(tmp_path / "first"), tmp_path / "to"
    convert.convert_checkpoint(source, tmp_path / "whole", "megatron", 4)
    with pytest.raises(Stopped):
        convert.convert_checkpoint(source, target, "megatron", 4, None, stop_after(50))
    for name in (f"release/mp_rank_02/{FILE}", f"release/mp_rank_03/{FILE}", "conversion.json"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / f"{name}.part").write_bytes(b"rubbish" * 99999)
    first = target / "release" / "mp_rank_00" / FILE
    first.write_bytes(first.read_bytes()[:-1])
    (target / "release" / "mp_rank_01" / FILE).unlink()
    assert convert.convert_checkpoint(source, target, "megatron", 4).reused == 1
    assert hashes(target) == hashes(tmp_path / "whole")


def test_a_run_that_was_killed_at_its_beginning(tmp_path: Path) -> None:
    """It leaves a lock and an incomplete journal, which count as nothing and are removed."""
    target = tmp_path / "to"
    target.mkdir()
    (target / "conversion.lock").touch()
    (target / ".conversion.json.0a1b2c3d.part").write_bytes(b"{")
    convert.convert_checkpoint(hf(tmp_path / "first"), target, "hf", 1)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]


def test_keyboard_interrupt_passes(tmp_path: Path) -> None:
    def press(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.convert_checkpoint(hf(tmp_path / "first"), tmp_path / "to", "hf", 1, None, press)


def test_never_into_the_source(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = hf(tmp_path / "a" / "hf")
    megatron = write_megatron(tmp_path / "m" / "ckpts").parent
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path / "a")
    before = hashes(tmp_path)
    for target in (
        source,
        source / "new",
        tmp_path / "a",
        tmp_path / "link",
        tmp_path / "link" / "x",
        tmp_path / "up",
    ):
        refused(
            lambda target=target: convert.convert_checkpoint(source, target, "hf", 1),
            f"target '{target}' is the source ",
        )
    for target in (
        megatron / "ckpts" / "iter_0135000",
        megatron / "x",
        megatron / "ckpts" / "iter_0135000" / "mp_rank_00",
    ):
        refused(
            lambda target=target: convert.convert_checkpoint(megatron, target, "hf", 1),
            f"target '{target}' is the source ",
        )
    (tmp_path / "elsewhere").symlink_to(megatron / "ckpts" / "iter_0135000")
    inside = megatron / "ckpts" / "iter_0135000" / "y"
    refused(
        lambda: convert.convert_checkpoint(tmp_path / "elsewhere", inside, "hf", 1),
        f"target '{inside}' is the source ",
    )
    (tmp_path / "elsewhere").unlink()
    assert hashes(tmp_path) == before


def test_targets_of_others(tmp_path: Path) -> None:
    source = hf(tmp_path / "first")
    target = tmp_path / "to"
    target.write_text("a file")
    refused(
        lambda: convert.convert_checkpoint(source, target, "hf", 1),
        f"target '{target}' cannot be read (Not a directory); ",
    )
    target.unlink()
    target.mkdir()
    (target / "x").write_text("mine")
    refused(
        lambda: convert.convert_checkpoint(source, target, "hf", 1),
        f"target '{target}' is not empty; ",
    )
    (target / "x").unlink()
    with pytest.raises(Stopped):
        convert.convert_checkpoint(source, target, "megatron", 4, None, stop_after(1))
    other = hf(tmp_path / "other", SHAPES["bias"])
    for action, what in (
        (lambda: convert.convert_checkpoint(source, target, "hf", 1), "to, tp"),
        (lambda: convert.convert_checkpoint(source, target, "megatron", 2), "tp"),
        (lambda: convert.convert_checkpoint(other, target, "megatron", 4), "shape, source"),
    ):
        refused(action, f"{target}/conversion.json: is of another conversion ({what} differ); ")
    for text in ("", "[]", "{}", '{"files": 3}', '{"files": {"x": "y"}}', "[" * 99999):
        (target / "conversion.json").write_text(text)
        refused(
            lambda: convert.convert_checkpoint(source, target, "hf", 1),
            f"{target}/conversion.json: is not the journal of a conv",
        )


def other_values(folder: Path) -> Path:
    """Write a Hugging Face folder with all values negated and return it."""
    return hf(folder, tensors={name: -tensor for name, tensor in odd_tensors(SHAPE).items()})


def sources(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write two checkpoints with equal headers and sizes and different values, and return their
    folders.
    """
    if kind == "hf":
        return hf(folder / "first"), other_values(folder / "other")
    tensors = odd_tensors(SHAPE)
    first = write_megatron(folder / "first", tensors=tensors)
    return first, write_megatron(
        folder / "other", tensors={name: -tensor for name, tensor in tensors.items()}
    )


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_other_values_of_the_same_shapes(kind: str, tmp_path: Path) -> None:
    first, other = sources(kind, tmp_path)
    target = tmp_path / "to"
    with pytest.raises(Stopped):
        convert.convert_checkpoint(first, target, "megatron", 4, None, stop_after(40))
    mixed = f"{target}/conversion.json: is of another conversion (source differ); "
    refused(lambda: convert.convert_checkpoint(other, target, "megatron", 4), mixed)
    # Equal modification times do not make another source the same; a changed time makes the same
    # file another source.
    files = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    for file in files:
        shutil.copystat(first / file, other / file)
    refused(lambda: convert.convert_checkpoint(other, target, "megatron", 4), mixed)
    copied = shutil.copytree(first, tmp_path / "copied")
    assert convert.convert_checkpoint(copied, target, "megatron", 4).reused == 2
    os.utime(
        first / next(file for file in files if file.suffix in (".pt", ".safetensors")), ns=(7, 7)
    )
    assert convert.convert_checkpoint(copied, target, "megatron", 4).reused == 5
    refused(
        lambda: convert.convert_checkpoint(first, target, "megatron", 4),
        f"target '{target}' is not empty; ",
    )


@pytest.mark.parametrize("to, tp", [("hf", 1), ("megatron", 2)])
def test_finished_already(to: str, tp: int, tmp_path: Path) -> None:
    source, target = hf(tmp_path / "first"), tmp_path / "to"
    done = convert.convert_checkpoint(source, target, to, tp)
    assert done.reused == 0
    before = {path: path.stat().st_mtime_ns for path in (target, *target.rglob("*"))}
    again = convert.convert_checkpoint(source, target, to, tp)
    assert (again.files, again.size_bytes, again.reused) == (
        done.files,
        done.size_bytes,
        len(done.files),
    )
    assert {path: path.stat().st_mtime_ns for path in (target, *target.rglob("*"))} == before
    assert inspect_checkpoint(target).notes[1:] == []
    empty = f"target '{target}' is not empty; "
    refused(lambda: convert.convert_checkpoint(source, target, "megatron", 4), empty)
    refused(
        lambda: convert.convert_checkpoint(other_values(tmp_path / "other"), target, to, tp), empty
    )
    last = target / done.files[-1][0]
    last.write_bytes(last.read_bytes() + b" ")
    changed = (
        f"{target}/conversion.json: says that its folder is complete, and {last.name} is not as it"
        " was written; "
    )
    refused(lambda: convert.convert_checkpoint(source, target, to, tp), changed)
    last.unlink()
    refused(lambda: convert.convert_checkpoint(source, target, to, tp), changed)


def test_two_at_once(tmp_path: Path) -> None:
    source, target = hf(tmp_path / "first"), tmp_path / "to"
    (target).mkdir()
    (target / "conversion.lock").touch()  # left by a conversion that was killed
    seen: list[int] = []

    def second(done: int, total: int) -> None:
        """Try the same conversion while the first is running, at each of its progress calls."""
        seen.append(done)
        refused(
            lambda: convert.convert_checkpoint(source, target, "hf", 1),
            f"target '{target}': another conversion is writing there; ",
        )

    convert.convert_checkpoint(source, target, "hf", 1, None, second)
    assert len(seen) == 21
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no)
    assert convert.convert_checkpoint(hf(tmp_path / "first"), tmp_path / "to", "hf", 1).reused == 0


def test_a_lock_of_a_file_that_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier conversion removes its lock file between our opening it and locking it."""
    real, calls = fcntl.flock, list[int]()

    def late(handle: int, how: int) -> None:
        """Remove the lock file before the first call locks it."""
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / "to" / "conversion.lock").unlink()
        real(handle, how)

    monkeypatch.setattr("fcntl.flock", late)
    convert.convert_checkpoint(hf(tmp_path / "first"), tmp_path / "to", "hf", 1)
    assert len(calls) == 2


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    source = hf(tmp_path / "first")
    for to, tp, fragment in (
        ("gguf", 1, "layout 'gguf' is not known; allowed: hf, megatron"),
        ("hf", 2, "tensor parallel size 2 is not possible for hf; "),
        ("megatron", 0, "tensor parallel size 0 is not possible for megatron; "),
        ("megatron", 16, "kv_heads 8 cannot be divided by 16; "),
        ("megatron", 3, "kv_heads 8 cannot be divided by 3; "),
    ):
        with pytest.raises(RequestError, match=re.escape(fragment)):
            convert.convert_checkpoint(source, tmp_path / "to", to, tp)
    refused(
        lambda: convert.convert_checkpoint(tmp_path / "no", tmp_path / "to", "hf", 1),
        "does not exist; ",
    )
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_full_disk(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = hf(tmp_path / "first"), tmp_path / "to"
    free = shutil.disk_usage(tmp_path)._replace(free=9)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: free)
        refused(lambda: convert.convert_checkpoint(source, target, to, 1), "bytes and 9 are free; ")
    assert not target.exists()

    def full(file: Any, tensor: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_write_values", full)
        refused(
            lambda: convert.convert_checkpoint(source, target, to, 1),
            "(No space left on device); ",
            "are kept",
            kind=LostError,
        )
    convert.convert_checkpoint(source, target, to, 1)
    assert not list(target.rglob("*.part"))


def test_target_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "to"
    source = hf(tmp_path / "first")
    refused(
        lambda: convert.convert_checkpoint(source, target, "hf", 1),
        f"target '{target}' cannot be written (Not a directory); ",
    )
