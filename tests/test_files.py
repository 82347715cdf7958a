"""Bounded reading of files: only regular files are opened, without waiting; TOML is parsed within
limits of depth and length.
"""

import os
import socket
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from steelyard import files


def test_a_regular_file_is_opened_through_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with files.open_regular(tmp_path / name) as file:
            assert file.read() == b"content"


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        files.open_regular(tmp_path / "fifo")


def test_a_fifo_that_replaces_a_file_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced between the first stat and the opening."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    before = (tmp_path / "file").stat()
    monkeypatch.setattr(Path, "stat", lambda path: before)
    with pytest.raises(OSError, match="not a regular file"):
        files.open_regular(tmp_path / "fifo")


def test_devices_sockets_and_folders_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        # the path of a socket has 108 characters at most
        socket_path = os.path.relpath(tmp_path / "socket")
        bound.bind(
            socket_path
            if len(socket_path) < len(str(tmp_path / "socket"))
            else str(tmp_path / "socket")
        )
        for path in (Path("/dev/zero"), tmp_path / "socket"):
            with pytest.raises(OSError, match="not a regular file"):
                files.open_regular(path)
    with pytest.raises(IsADirectoryError):
        files.open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.open_regular(tmp_path / "nothing")


def test_shipped_cases_are_parsed_as_tomllib_does() -> None:
    shipped = [
        path
        for path in (resources.files("steelyard") / "cases").iterdir()
        if path.name.endswith(".toml")
    ]
    assert len(shipped) == 8
    for path in shipped:
        assert files.parse_toml(path.read_bytes()) == tomllib.loads(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        ".".join("a" * 16) + " = 1",
        "x = " + "[" * 16 + "]" * 16,
        f"x = '{'.a' * 300}'  # {'a.' * 300} " + "[" * 300,
        f'x = """\n{"a." * 300}\n{"[" * 300} \\" """"',
        (
            "x = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5,"
            " 8.5, 9.5]"
        ),
        "x = 1979-05-27T07:32:00.999999-07:00",
        f"x = {'9' * 255}",
    ],
)
def test_toml_within_the_limits_is_parsed(text: str) -> None:
    assert files.parse_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 17) + " = 1",
        " . ".join("a" * 17) + " = 1",
        ".".join(["'a'", '"b"'] * 9) + " = 1",
        "[" + ".".join("a" * 17) + "]",
        "x = " + "[" * 17 + "]" * 17,
        "x = " + "{a=" * 17 + "1" + "}" * 17,
    ],
)
def test_toml_nested_too_deep_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested more than 16 deep"):
        files.parse_toml(text)


@pytest.mark.parametrize("text", [f"x = {'9' * 256}", f"x = 0x{'f' * 5000}", f"{'a' * 256} = 1"])
def test_toml_with_a_too_long_key_or_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a key or a number has more than 255 characters"):
        files.parse_toml(text)


@pytest.mark.parametrize(
    "text",
    [
        'x = "' + '\\"' * 30_000,
        'x = """' + '\\"' * 30_000,
        "x = '''" + "''a" * 20_000,
        '"""\\' * 16_000,
        '"' * 64_000,
        "'\n" * 32_000,
        '"\\' * 32_000,
    ],
    ids=range(7),
)
def test_unterminated_strings_are_refused_in_linear_time(text: str) -> None:
    """Each of these texts took time quadratic in its length, or would with a careless pattern:
    nearly a minute.
    """
    with pytest.raises(ValueError):
        files.parse_toml(text)


def test_a_new_file_must_be_durable(tmp_path: Path) -> None:
    """Only the durable way refuses to replace a file, so the other one must not be asked to."""
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="new=True needs durable=True"):
        files.write_file(path, b"", new=True, durable=False)
    assert not path.exists()
