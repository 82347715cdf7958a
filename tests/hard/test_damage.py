"""Tests of damaged and hostile input: it ends in one line and exit code 2, never in a traceback."""

import io
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fixtures.attacks import Attacks
from fixtures.cases import OWN_CASE
from fixtures.commands import Shell
from steelyard.data import corpus
from steelyard.errors import RequestError

CASE = "llama2-7b-mmlu"

TRIES = 3000


def check_one_line_refusal(result: object, *fragments: str) -> None:
    """Check that a command was refused with one line of less than 8000 characters that holds every
    fragment.
    """
    code, out, err = result.code, result.out, result.err  # type: ignore[attr-defined]
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1
    assert len(err) < 8000
    assert all(fragment in err for fragment in fragments), err


def make_npy_bytes() -> bytes:
    """Return the bytes of a .npy file with five int32 numbers."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(5, dtype=np.int32))
    return buffer.getvalue()


def test_damaged_npy_headers_are_refused(attacks: Attacks) -> None:
    original, rng = make_npy_bytes(), random.Random(0)
    for _ in range(TRIES):
        raw = bytearray(original)
        for _ in range(rng.choice((1, 2, 4))):
            raw[rng.randrange(90)] = rng.choice([rng.randrange(256), *b"()[]{}'\"\\,: \n\t0L#"])
        with suppress(RequestError):  # anything else would be a traceback
            corpus._read_header(io.BytesIO(raw), "x_ids.npy")
    attacks.add(
        "`.npy` header, changed at random", TRIES, "1,800 of 6,000: traceback", "no traceback"
    )


def test_unparsable_npy_header_gets_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "x_ids.npy").write_bytes(make_npy_bytes().replace(b"}", b"(", 1))
    np.savez(tmp_path / "x_idx.npz", lens=np.array([5]), docs=np.array([0, 1]))
    check_one_line_refusal(
        shell.run_in_process("data", "inspect", tmp_path / "x"), "x_ids.npy: not a .npy array: "
    )


@pytest.mark.parametrize("size", [10_001, 1 << 31])
def test_oversized_npy_header_is_not_read(size: int) -> None:
    file = io.BytesIO(b"\x93NUMPY\x02\x00" + size.to_bytes(4, "little") + b"{" * 20_000)
    with pytest.raises(RequestError, match=f"a header of {size} bytes; at most 10000 are read"):
        corpus._read_header(file, "x")
    assert file.tell() == 12


@pytest.mark.parametrize("depth", [40, 300, 900, 2000])
@pytest.mark.parametrize("where", ["question", "tune.env", "smoke", "reference"])
def test_deep_dotted_keys_in_a_case_get_one_line(
    depth: int, where: str, shell: Shell, tmp_path: Path
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f"{where}{'.a' * depth} = 1\n{OWN_CASE if where == 'smoke' else ''}")
    check_one_line_refusal(
        shell.run_in_process("show", path),
        "own.toml': tables nested more than 16 deep; a case has tables four deep",
    )


@pytest.mark.parametrize("depth", [40, 300, 900, 2000, 50_000])
def test_deep_dotted_keys_on_the_command_line_get_one_line(depth: int, shell: Shell) -> None:
    key = "tune.env" + ".a" * depth
    check_one_line_refusal(
        shell.run_in_process("show", CASE, "--set", f"{key}=1"),
        "--set ",
        "nested more than 16 deep; a case has tables four deep",
    )
    check_one_line_refusal(
        shell.run_in_process("show", CASE, "--set", f"question{'.a' * depth}=1"), "--set: no key "
    )
    nested = "{a=" * min(depth, 300) + "1" + "}" * min(depth, 300)
    check_one_line_refusal(shell.run_in_process("show", CASE, "--set", f"tune.env={nested}"))
