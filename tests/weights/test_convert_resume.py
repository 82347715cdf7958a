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

from fixtures.conversions import assert_refused, hash_files, make_odd_tensors, write_odd_hf_folder
from fixtures.megatron import CPU, FILE, SHAPE, SHAPES, write_megatron
from steelyard.errors import LostError, RequestError
from steelyard.weights import checkpoint_writer, convert, llama_weights
from steelyard.weights.inspection import inspect_checkpoint


class ConversionStopped(Exception):  # noqa: N818
    """The interruption that a test raises from a progress call."""


def stop_after(calls: int) -> Callable[[int, int], None]:
    """Return a progress function that raises ConversionStopped at its given call."""
    progress_calls: list[int] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        progress_calls.append(done_bytes)
        if len(progress_calls) == calls:
            raise ConversionStopped

    return progress


# (layout, tensors written before the interruption). A Megatron shard has 15 tensors, and there are
# 4; a Hugging Face folder has 21: the first, the last of a file, the one after it, the very last.
INTERRUPTION_POINTS = [
    ("megatron", 1),
    ("megatron", 15),
    ("megatron", 16),
    ("megatron", 40),
    ("megatron", 60),
]
INTERRUPTION_POINTS += [("hf", 1), ("hf", 2), ("hf", 9), ("hf", 20), ("hf", 21)]


@pytest.mark.parametrize("to, calls", INTERRUPTION_POINTS)
def test_an_interrupted_conversion_continues_at_its_last_complete_file(
    to: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "MAX_FILE_BYTES", 16_000)
    source = write_odd_hf_folder(tmp_path / "first")
    convert.convert_checkpoint(source, tmp_path / "whole", to, 4 if to == "megatron" else 1)
    source_hashes, target = hash_files(source), tmp_path / "to"
    with pytest.raises(ConversionStopped):
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
            assert_refused(
                lambda action=action, folder=folder: action(folder),
                "conversion.json: the conversion into this folder is not finished; ",
            )
    modified_times = {name: (target / name).stat().st_mtime_ns for name in complete}
    progress: list[tuple[int, int]] = []
    conversion = convert.convert_checkpoint(
        source,
        target,
        to,
        4 if to == "megatron" else 1,
        None,
        lambda *report: progress.append(report),
    )
    assert conversion.reused == len(complete)
    assert {name: (target / name).stat().st_mtime_ns for name in complete} == modified_times
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]
    data_bytes = sum(
        size for name, size in conversion.files if name.endswith((".pt", ".safetensors"))
    )
    assert 0.7 * data_bytes < progress[-1][1] <= data_bytes
    assert hash_files(target) == hash_files(tmp_path / "whole")
    assert hash_files(source) == source_hashes


def test_some_interruptions_come_after_a_complete_file(tmp_path: Path) -> None:
    with pytest.raises(ConversionStopped):
        convert.convert_checkpoint(
            write_odd_hf_folder(tmp_path / "first"),
            tmp_path / "to",
            "megatron",
            4,
            None,
            stop_after(40),
        )
    assert len(json.loads((tmp_path / "to" / "conversion.json").read_text())["files"]) == 2


def test_leftovers_of_an_interrupted_conversion_are_replaced(tmp_path: Path) -> None:
    """Files under temporary names are overwritten, and complete files that were damaged or removed
    are written again.
    """
    source, target = write_odd_hf_folder(tmp_path / "first"), tmp_path / "to"
    convert.convert_checkpoint(source, tmp_path / "whole", "megatron", 4)
    with pytest.raises(ConversionStopped):
        convert.convert_checkpoint(source, target, "megatron", 4, None, stop_after(50))
    for name in (f"release/mp_rank_02/{FILE}", f"release/mp_rank_03/{FILE}", "conversion.json"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / f"{name}.part").write_bytes(b"rubbish" * 99999)
    first = target / "release" / "mp_rank_00" / FILE
    first.write_bytes(first.read_bytes()[:-1])
    (target / "release" / "mp_rank_01" / FILE).unlink()
    assert convert.convert_checkpoint(source, target, "megatron", 4).reused == 1
    assert hash_files(target) == hash_files(tmp_path / "whole")


def test_a_conversion_killed_at_its_beginning_starts_anew(tmp_path: Path) -> None:
    """It leaves a lock and an incomplete journal, which count as nothing and are removed."""
    target = tmp_path / "to"
    target.mkdir()
    (target / "conversion.lock").touch()
    (target / ".conversion.json.0a1b2c3d.part").write_bytes(b"{")
    convert.convert_checkpoint(write_odd_hf_folder(tmp_path / "first"), target, "hf", 1)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]


def test_a_keyboard_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    def interrupt(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.convert_checkpoint(
            write_odd_hf_folder(tmp_path / "first"), tmp_path / "to", "hf", 1, None, interrupt
        )


def test_a_target_inside_the_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = write_odd_hf_folder(tmp_path / "a" / "hf")
    megatron = write_megatron(tmp_path / "m" / "ckpts").parent
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path / "a")
    hashes_before = hash_files(tmp_path)
    for target in (
        source,
        source / "new",
        tmp_path / "a",
        tmp_path / "link",
        tmp_path / "link" / "x",
        tmp_path / "up",
    ):
        assert_refused(
            lambda target=target: convert.convert_checkpoint(source, target, "hf", 1),
            f"target '{target}' is the source ",
        )
    for target in (
        megatron / "ckpts" / "iter_0135000",
        megatron / "x",
        megatron / "ckpts" / "iter_0135000" / "mp_rank_00",
    ):
        assert_refused(
            lambda target=target: convert.convert_checkpoint(megatron, target, "hf", 1),
            f"target '{target}' is the source ",
        )
    (tmp_path / "elsewhere").symlink_to(megatron / "ckpts" / "iter_0135000")
    inside = megatron / "ckpts" / "iter_0135000" / "y"
    assert_refused(
        lambda: convert.convert_checkpoint(tmp_path / "elsewhere", inside, "hf", 1),
        f"target '{inside}' is the source ",
    )
    (tmp_path / "elsewhere").unlink()
    assert hash_files(tmp_path) == hashes_before


def test_a_target_with_other_contents_is_refused(tmp_path: Path) -> None:
    source = write_odd_hf_folder(tmp_path / "first")
    target = tmp_path / "to"
    target.write_text("a file")
    assert_refused(
        lambda: convert.convert_checkpoint(source, target, "hf", 1),
        f"target '{target}' cannot be read (Not a directory); ",
    )
    target.unlink()
    target.mkdir()
    (target / "x").write_text("mine")
    assert_refused(
        lambda: convert.convert_checkpoint(source, target, "hf", 1),
        f"target '{target}' is not empty; ",
    )
    (target / "x").unlink()
    with pytest.raises(ConversionStopped):
        convert.convert_checkpoint(source, target, "megatron", 4, None, stop_after(1))
    other_source = write_odd_hf_folder(tmp_path / "other", SHAPES["bias"])
    for action, differences in (
        (lambda: convert.convert_checkpoint(source, target, "hf", 1), "to, tp"),
        (lambda: convert.convert_checkpoint(source, target, "megatron", 2), "tp"),
        (lambda: convert.convert_checkpoint(other_source, target, "megatron", 4), "shape, source"),
    ):
        assert_refused(
            action,
            f"{target}/conversion.json: belongs to another conversion ({differences} differ); ",
        )
    for text in ("", "[]", "{}", '{"files": 3}', '{"files": {"x": "y"}}', "[" * 99999):
        (target / "conversion.json").write_text(text)
        assert_refused(
            lambda: convert.convert_checkpoint(source, target, "hf", 1),
            f"{target}/conversion.json: is not the journal of a conv",
        )


def write_negated_source(folder: Path) -> Path:
    """Write a Hugging Face folder with all values negated and return it."""
    return write_odd_hf_folder(
        folder, tensors={name: -tensor for name, tensor in make_odd_tensors(SHAPE).items()}
    )


def write_two_sources(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write two checkpoints with equal headers and sizes and different values, and return their
    folders.
    """
    if kind == "hf":
        return write_odd_hf_folder(folder / "first"), write_negated_source(folder / "other")
    tensors = make_odd_tensors(SHAPE)
    source = write_megatron(folder / "first", tensors=tensors)
    return source, write_megatron(
        folder / "other", tensors={name: -tensor for name, tensor in tensors.items()}
    )


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_a_source_with_other_values_does_not_continue_a_conversion(
    kind: str, tmp_path: Path
) -> None:
    source, other_source = write_two_sources(kind, tmp_path)
    target = tmp_path / "to"
    with pytest.raises(ConversionStopped):
        convert.convert_checkpoint(source, target, "megatron", 4, None, stop_after(40))
    other_conversion = f"{target}/conversion.json: belongs to another conversion (source differ); "
    assert_refused(
        lambda: convert.convert_checkpoint(other_source, target, "megatron", 4), other_conversion
    )
    # Equal modification times do not make another source the same; a changed time makes the same
    # file another source.
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for file in files:
        shutil.copystat(source / file, other_source / file)
    assert_refused(
        lambda: convert.convert_checkpoint(other_source, target, "megatron", 4), other_conversion
    )
    copied = shutil.copytree(source, tmp_path / "copied")
    assert convert.convert_checkpoint(copied, target, "megatron", 4).reused == 2
    os.utime(
        source / next(file for file in files if file.suffix in (".pt", ".safetensors")), ns=(7, 7)
    )
    assert convert.convert_checkpoint(copied, target, "megatron", 4).reused == 5
    assert_refused(
        lambda: convert.convert_checkpoint(source, target, "megatron", 4),
        f"target '{target}' is not empty; ",
    )


@pytest.mark.parametrize("to, tp", [("hf", 1), ("megatron", 2)])
def test_a_finished_conversion_is_not_repeated(to: str, tp: int, tmp_path: Path) -> None:
    source, target = write_odd_hf_folder(tmp_path / "first"), tmp_path / "to"
    conversion = convert.convert_checkpoint(source, target, to, tp)
    assert conversion.reused == 0
    modified_times = {path: path.stat().st_mtime_ns for path in (target, *target.rglob("*"))}
    repeated = convert.convert_checkpoint(source, target, to, tp)
    assert (repeated.files, repeated.size_bytes, repeated.reused) == (
        conversion.files,
        conversion.size_bytes,
        len(conversion.files),
    )
    assert {
        path: path.stat().st_mtime_ns for path in (target, *target.rglob("*"))
    } == modified_times
    assert inspect_checkpoint(target).notes[1:] == []
    not_empty = f"target '{target}' is not empty; "
    assert_refused(lambda: convert.convert_checkpoint(source, target, "megatron", 4), not_empty)
    assert_refused(
        lambda: convert.convert_checkpoint(
            write_negated_source(tmp_path / "other"), target, to, tp
        ),
        not_empty,
    )
    last_file = target / conversion.files[-1][0]
    last_file.write_bytes(last_file.read_bytes() + b" ")
    changed = (
        f"{target}/conversion.json: the conversion was complete, but {last_file.name} has"
        " changed since; "
    )
    assert_refused(lambda: convert.convert_checkpoint(source, target, to, tp), changed)
    last_file.unlink()
    assert_refused(lambda: convert.convert_checkpoint(source, target, to, tp), changed)


def test_a_second_conversion_into_the_same_target_is_refused(tmp_path: Path) -> None:
    source, target = write_odd_hf_folder(tmp_path / "first"), tmp_path / "to"
    (target).mkdir()
    (target / "conversion.lock").touch()  # left by a conversion that was killed
    progress_calls: list[int] = []

    def convert_again(done_bytes: int, total_bytes: int) -> None:
        """Try the same conversion while the first is running, at each of its progress calls."""
        progress_calls.append(done_bytes)
        assert_refused(
            lambda: convert.convert_checkpoint(source, target, "hf", 1),
            f"target '{target}': another conversion is writing there; ",
        )

    convert.convert_checkpoint(source, target, "hf", 1, None, convert_again)
    assert len(progress_calls) == 21
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]


def test_a_file_system_without_locks_is_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", fail)
    assert (
        convert.convert_checkpoint(
            write_odd_hf_folder(tmp_path / "first"), tmp_path / "to", "hf", 1
        ).reused
        == 0
    )


def test_a_lock_on_a_removed_file_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier conversion removes its lock file between our opening it and locking it."""
    real_flock, calls = fcntl.flock, list[int]()

    def remove_then_lock(handle: int, operation: int) -> None:
        """Remove the lock file before the first call locks it."""
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / "to" / "conversion.lock").unlink()
        real_flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", remove_then_lock)
    convert.convert_checkpoint(write_odd_hf_folder(tmp_path / "first"), tmp_path / "to", "hf", 1)
    assert len(calls) == 2


def test_impossible_layouts_and_degrees_are_refused(tmp_path: Path) -> None:
    source = write_odd_hf_folder(tmp_path / "first")
    for to, tp, fragment in (
        ("gguf", 1, "layout 'gguf' is not known; allowed: hf, megatron"),
        ("hf", 2, "tensor parallel size 2 is not possible for hf; "),
        ("megatron", 0, "tensor parallel size 0 is not possible for megatron; "),
        ("megatron", 16, "kv_heads 8 cannot be divided by 16; "),
        ("megatron", 3, "kv_heads 8 cannot be divided by 3; "),
    ):
        with pytest.raises(RequestError, match=re.escape(fragment)):
            convert.convert_checkpoint(source, tmp_path / "to", to, tp)
    assert_refused(
        lambda: convert.convert_checkpoint(tmp_path / "no", tmp_path / "to", "hf", 1),
        "does not exist; ",
    )
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_full_disk_is_reported_before_and_during_a_conversion(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write_odd_hf_folder(tmp_path / "first"), tmp_path / "to"
    nine_bytes_free = shutil.disk_usage(tmp_path)._replace(free=9)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: nine_bytes_free)
        assert_refused(
            lambda: convert.convert_checkpoint(source, target, to, 1), "bytes and 9 are free; "
        )
    assert not target.exists()

    def fail_write(file: Any, tensor: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_write_values", fail_write)
        assert_refused(
            lambda: convert.convert_checkpoint(source, target, to, 1),
            "(No space left on device); ",
            "are kept",
            kind=LostError,
        )
    convert.convert_checkpoint(source, target, to, 1)
    assert not list(target.rglob("*.part"))


def test_a_target_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "to"
    source = write_odd_hf_folder(tmp_path / "first")
    assert_refused(
        lambda: convert.convert_checkpoint(source, target, "hf", 1),
        f"target '{target}' cannot be written (Not a directory); ",
    )
