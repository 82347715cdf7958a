"""Make untrusted text harmless for a terminal, and pad and wrap it by its width in terminal
columns.
"""

import re
import unicodedata
from typing import Literal

# Terminal escapes: CSI, then strings such as OSC up to their end, then two-character ones. No part
# scans past the next ESC, so hostile text costs linear time.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\-~]"
)
_BREAKS = re.compile(r"\r\n?|[\u2028\u2029\x85\x0b\x0c]")
# Unicode categories control, format (bidi overrides, zero-width) and surrogate: such characters are
# invisible but can change how others look.
_DROPPED = {"Cc", "Cf", "Cs"}


def clean_lines(text: str) -> str:
    """Return the text with its line breaks, without terminal escapes, control characters and
    invisible formatting characters.

    Every kind of line break becomes a newline, and a tab four spaces.
    """
    text = _BREAKS.sub("\n", _ESCAPES.sub("", text)).replace("\t", "    ")
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in _DROPPED)


def clean_line(text: str) -> str:
    """Return the text on one line, without escapes and control characters; runs of white space
    become one space.
    """
    return " ".join(clean_lines(text).split())


def display_width(text: str) -> int:
    """Return how many terminal columns a text takes: East Asian wide characters take two, combining
    ones none.
    """
    if text.isascii():
        return len(text)
    return sum(_char_width(c) for c in text)


def _char_width(char: str) -> int:
    """Return how many terminal columns a character takes: 0, 1 or 2."""
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def pad_to_width(text: str, columns: int, align: Literal["left", "right"] = "left") -> str:
    """Fill a text with spaces up to `columns` terminal columns; a longer one is returned as it is.

    The spaces come before the text if `align` is "right", after it if "left"; another value raises
    ValueError.
    """
    if align not in ("left", "right"):
        raise ValueError(f"align {align!r} is not known; allowed: left, right")
    gap = " " * max(0, columns - display_width(text))
    return gap + text if align == "right" else text + gap


def shorten_to_width(text: str, columns: int) -> str:
    """Return a text on one cleaned line of at most `columns` terminal columns (at least 2); a
    longer one is cut and ends with `…`.
    """
    line = clean_line(text)
    if display_width(line) <= columns:
        return line
    return _fitting_prefix(line, columns - 1).rstrip() + "…"


# A line may break at spaces and between wide characters, but not before closing punctuation.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
)
_CLOSING = "\u3001\u3002\u300b\u300d\u300f\u3011\uff01\uff09\uff0c\uff1a\uff1b\uff1f\u201d\u2019"
_PIECES = re.compile(rf"\s+|[{_WIDE}][{_CLOSING}]*|[^\s{_WIDE}]+[{_CLOSING}]*")


def wrap_text(text: str, columns: int) -> list[str]:
    """Split a text into lines of at most `columns` terminal columns; at least one line, which may
    be empty.

    Lines break at spaces and between wide characters, but not before closing punctuation; only a
    word longer than a line is broken. Leading and trailing spaces of lines are dropped.
    """
    columns = max(1, columns)
    out, line = [], ""
    for piece in _PIECES.findall(text):
        if display_width(line) + display_width(piece.rstrip()) > columns and line.strip():
            out.append(line.rstrip())
            line = ""
        if not line and piece.isspace():
            continue
        while display_width(piece) > columns:
            head = _fitting_prefix(piece, columns)
            out.append(head)
            piece = piece[len(head) :]
        line += piece
    return [*out, line.rstrip()] if line.strip() or not out else out


def break_line(text: str, columns: int) -> list[str]:
    """Split a text into pieces of at most `columns` terminal columns, wherever that is, and keep
    its spaces; at least one piece, which may be empty.
    """
    columns, out = max(1, columns), []
    while display_width(text) > columns:
        out.append(_fitting_prefix(text, columns))
        text = text[len(out[-1]) :]
    return [*out, text]


def _fitting_prefix(text: str, columns: int) -> str:
    """Return the longest beginning of a text that fits into `columns` terminal columns; at least
    one character.
    """
    used = 0
    for index, char in enumerate(text):
        used += _char_width(char)
        if used > columns:
            return text[: max(index, 1)]
    return text
