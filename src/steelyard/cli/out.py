"""The only functions that print: answers on stdout, progress and errors on stderr."""

import json
import os
import sys
from typing import Any

from steelyard.errors import LostError


def answer(text: str) -> None:
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise LostError(f"stdout cannot be written: {error.strerror}") from error


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def dump(value: Any) -> None:
    answer(json.dumps(value, indent=2, ensure_ascii=False))


def one_line(text: object) -> str:
    """Names and values in a text come from files and command lines, and may hold anything."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def plain(value: Any) -> str:
    """A value as a reader meets it in a list: what is not known is a slash."""
    return "/" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
