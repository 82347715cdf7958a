"""Items of a data set that a user names with `--rows FILE` or `--subjects`: ids, ranges of ids, and
names of groups.

An id is the position of an item in the whole set, counted from 0, as in a record's `outputs.index`.
In a set with groups it may also be `group/position`, the position inside that group. `first-last`
is a range that includes both ends. Ids are stored sorted and merged into ranges, so that the same
items always have the same spelling.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from steelyard import files
from steelyard.data import jsonl
from steelyard.errors import RequestError, known

MAX_FILE_BYTES = 16 << 20
MAX_LINE_BYTES = 512
MAX_LINES = 500_000
MAX_ITEMS = 10_000_000  # that all ranges together may name
NEAREST = 5

ID = r"^(?:([^/\x00-\x1f\x7f]{1,200})/)?([0-9]{1,9})(?:-([0-9]{1,9}))?$"  # group, first, last
_FORM = "a line is an id, such as 12, or a range, such as 12-20; for a set with groups also NAME/12"
_ID = re.compile(ID)


@dataclass(frozen=True, order=True)
class Span:
    """A range of positions, both ends included, in the whole set (`group` is empty) or in one
    group.
    """

    group: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return the canonical spelling: `12`, `12-20`, `group/12` or `group/12-20`."""
        places = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.group}/{places}" if self.group else places

    def __len__(self) -> int:
        """Return the number of positions in the range."""
        return self.last - self.first + 1


def read(path: Path) -> tuple[str, ...]:
    """Read ids and ranges from a file, one per line, and return them sorted, with adjacent ones
    merged, in canonical spelling.

    Empty lines and lines that begin with # are skipped. Raises RequestError if the file is
    unreadable or too large, holds no ids, a line that is no id, or names an item twice.
    """
    found: list[tuple[Span, int]] = []
    with jsonl.refusals(path, ", the limit for a file of ids"):
        for number, raw in files.lines(path, MAX_LINE_BYTES, MAX_FILE_BYTES):
            if number > MAX_LINES:
                raise RequestError(
                    f"{path}: more than {MAX_LINES} lines, the limit for a file of ids; use ranges"
                    " such as 0-99"
                )
            text = _line(raw, f"{path}: line {number}")
            if text and not text.startswith("#"):
                found.append((_span(text, f"{path}: line {number}"), number))
    if not found:
        raise RequestError(f"{path}: no ids; {_FORM}")
    if sum(len(span) for span, _ in found) > MAX_ITEMS:
        raise RequestError(f"{path}: its ranges name more than {MAX_ITEMS} ids, the limit")
    found.sort()
    for (one, line), (other, later) in pairwise(found):
        if one.group == other.group and other.first <= one.last:
            twice = Span(one.group, other.first, other.first)
            first, second = sorted((line, later))
            raise RequestError(
                f"{path}: line {second} names {twice} again, after line {first}; name it once"
            )
    return tuple(str(span) for span in _joined([span for span, _ in found]))


def _line(raw: bytes, where: str) -> str:
    """Decode a line and strip white space and a byte-order mark. Raises RequestError if it is too
    long or not UTF-8.
    """
    if len(raw) > MAX_LINE_BYTES:
        raise RequestError(f"{where} has more than {MAX_LINE_BYTES} bytes; {_FORM}")
    try:
        return raw.decode("utf-8-sig").strip()  # with or without a byte-order mark
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8; {_FORM}") from error


def _span(text: str, where: str) -> Span:
    """Parse `12`, `12-20` or `group/12-20`. Raises RequestError, which begins with `location`, if
    it is none of these or the range ends before it begins.
    """
    found = _ID.match(text)
    if found is None:
        raise RequestError(f"{where} is {text[:80]!r}; {_FORM}")
    group, first, last = found.groups()
    span = Span(group or "", int(first), int(last or first))
    if span.last < span.first:
        raise RequestError(f"{where} is {text!r}; a range ends where it begins, or later")
    return span


def _joined(spans: list[Span]) -> list[Span]:
    """Merge adjacent ranges of one group; the input is sorted."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].group == span.group and out[-1].last + 1 == span.first:
            out[-1] = Span(span.group, out[-1].first, span.last)
        else:
            out.append(span)
    return out


def spans(ids: Sequence[str]) -> list[Span]:
    """Parse ids and ranges. Raises RequestError if one is malformed."""
    return [_span(one, "an id") for one in ids]


def checked(text: str) -> str:
    """Return the canonical spelling of an id or range read from a record. Raises ValueError, as
    pydantic validators must, if it is malformed.
    """
    try:
        return str(_span(text, "an id"))
    except RequestError as error:
        raise ValueError(str(error)) from error


def size(ids: Sequence[str]) -> int:
    """Return how many items these ids and ranges name."""
    return sum(map(len, spans(ids)))


def places(
    ids: Sequence[str], total: int, noun: str, groups: Mapping[str, range] | None = None
) -> list[int]:
    """Return the positions of the named items in a set of `total` items, sorted.

    `groups` maps each group to the positions of its items; None if the set has no groups. `noun`
    names an item in messages. Raises RequestError if an id is beyond the set, its group does not
    exist, or two ids name the same item.
    """
    named: dict[int, Span] = {}
    for span in spans(ids):
        every = range(total) if not span.group else _group(span, groups)
        if span.last >= len(every):
            whose = f"{span.group} has" if span.group else "the data has"
            allowed = (
                f"{span.group}/0 to {span.group}/{len(every) - 1}"
                if span.group
                else f"0 to {total - 1}"
            )
            raise RequestError(
                f"--rows: no {noun} {span}; {whose} {len(every)} {noun}s; allowed: {allowed}"
            )
        for place in every[span.first : span.last + 1]:
            if place in named:
                raise RequestError(
                    f"--rows: {span} and {named[place]} name the same {noun}; name it once"
                )
            named[place] = span
    return sorted(named)


def _group(span: Span, groups: Mapping[str, range] | None) -> range:
    """Return the positions of the group that a range names. Raises RequestError if the set has no
    groups, or not this one.
    """
    if groups is None:
        raise RequestError(
            f"--rows: {span}: the data has no groups; allowed: places counted from 0, such as 12 or"
            " 12-20"
        )
    if span.group not in groups:
        raise RequestError(f"--rows: {span}: no such subject; {nearest(span.group, groups)}")
    return groups[span.group]


def nearest(name: str, names: Mapping[str, range]) -> str:
    """Return the end of an error message for an unknown name: the names that are similar or contain
    it, at most five; else all known names.
    """
    wanted = name[:200].lower().replace(" ", "_")
    near = get_close_matches(wanted, list(names), NEAREST)
    near += [one for one in names if wanted and wanted in one and one not in near]
    return f"nearest: {', '.join(near[:NEAREST])}" if near else known(wanted, names)


def of_groups(wanted: Sequence[str], groups: Mapping[str, range]) -> list[int]:
    """Return the positions of all items of the groups named with `--subjects`, sorted. Raises
    RequestError if there is no such group.
    """
    for name in wanted:
        if name not in groups:
            raise RequestError(f"--subjects {name!r}: no such subject; {nearest(name, groups)}")
    return sorted(place for name in wanted for place in groups[name])


def names(text: str) -> tuple[str, ...]:
    """Split `--subjects a,b` into sorted names. Raises RequestError if a name is empty or given
    twice.
    """
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise RequestError(
            f"--subjects {text!r}: names subjects with commas between, such as anatomy,virology"
        )
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"--subjects {text!r}: {twice} is there twice; name each once")
    return tuple(sorted(found))
