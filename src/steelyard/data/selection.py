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
from steelyard.errors import RequestError, suggest_name

MAX_FILE_BYTES = 16 << 20
MAX_LINE_BYTES = 512
MAX_LINES = 500_000
MAX_ITEMS = 10_000_000  # that all ranges together may name
MAX_SUGGESTIONS = 5

ID_PATTERN = (
    r"^(?:([^/\x00-\x1f\x7f]{1,200})/)?([0-9]{1,9})(?:-([0-9]{1,9}))?$"  # group, first, last
)
_LINE_FORMAT = (
    "a line is an id, such as 12, or a range, such as 12-20; for a set with groups also NAME/12"
)
_ID_REGEX = re.compile(ID_PATTERN)


@dataclass(frozen=True, order=True)
class IdRange:
    """A range of positions, `first` to `last`, counted from 0 and both included, in the whole set
    (`group` is "") or in the group of that name. Ranges sort by group, then by position; `str()` is
    the canonical spelling, `len()` the number of positions.
    """

    group: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return the canonical spelling: `12`, `12-20`, `group/12` or `group/12-20`."""
        positions = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.group}/{positions}" if self.group else positions

    def __len__(self) -> int:
        """Return the number of positions in the range."""
        return self.last - self.first + 1


def read_ids(path: Path) -> tuple[str, ...]:
    """Read ids and ranges from a file, one per line, and return them sorted by group and position,
    with adjacent ones merged, in canonical spelling (`str(IdRange)`).

    Empty lines and lines that begin with # are skipped. Raises RequestError if the file is
    unreadable or above a limit (bytes, lines, items named), holds no ids, a line that is no id, or
    names an item twice with the same group. Whether the items exist is not checked.
    """
    numbered_ranges: list[tuple[IdRange, int]] = []
    with jsonl.refuse_unreadable(path, ", the limit for a file of ids"):
        for number, raw in files.read_lines(path, MAX_LINE_BYTES, MAX_FILE_BYTES):
            if number > MAX_LINES:
                raise RequestError(
                    f"{path}: more than {MAX_LINES} lines, the limit for a file of ids; use ranges"
                    " such as 0-99"
                )
            text = _decode_line(raw, f"{path}: line {number}")
            if text and not text.startswith("#"):
                numbered_ranges.append((_parse_range(text, f"{path}: line {number}"), number))
    if not numbered_ranges:
        raise RequestError(f"{path}: no ids; {_LINE_FORMAT}")
    if sum(len(id_range) for id_range, _ in numbered_ranges) > MAX_ITEMS:
        raise RequestError(f"{path}: its ranges name more than {MAX_ITEMS} ids, the limit")
    numbered_ranges.sort()
    for (earlier, earlier_line), (following, following_line) in pairwise(numbered_ranges):
        if earlier.group == following.group and following.first <= earlier.last:
            repeated = IdRange(earlier.group, following.first, following.first)
            first, second = sorted((earlier_line, following_line))
            raise RequestError(
                f"{path}: line {second} names {repeated} again, after line {first}; name it once"
            )
    return tuple(
        str(id_range) for id_range in _merge_adjacent([id_range for id_range, _ in numbered_ranges])
    )


def _decode_line(raw: bytes, location: str) -> str:
    """Return a line of a file of ids as text, without white space around it and a byte-order mark.
    Raises RequestError, which begins with `location`, if it has more than `MAX_LINE_BYTES` or is
    not UTF-8.
    """
    if len(raw) > MAX_LINE_BYTES:
        raise RequestError(f"{location} has more than {MAX_LINE_BYTES} bytes; {_LINE_FORMAT}")
    try:
        return raw.decode("utf-8-sig").strip()  # with or without a byte-order mark
    except UnicodeDecodeError as error:
        raise RequestError(f"{location} is not UTF-8; {_LINE_FORMAT}") from error


def _parse_range(text: str, location: str) -> IdRange:
    """Parse `12`, `12-20`, `group/12` or `group/12-20`. Raises RequestError, which begins with
    `location`, if it is none of these or the range ends before it begins.
    """
    match = _ID_REGEX.match(text)
    if match is None:
        raise RequestError(f"{location} is {text[:80]!r}; {_LINE_FORMAT}")
    group, first, last = match.groups()
    id_range = IdRange(group or "", int(first), int(last or first))
    if id_range.last < id_range.first:
        raise RequestError(f"{location} is {text!r}; a range ends where it begins, or later")
    return id_range


def _merge_adjacent(ranges: list[IdRange]) -> list[IdRange]:
    """Return the ranges with those joined that follow each other without a gap in one group;
    `ranges` is sorted and has no overlaps.
    """
    merged: list[IdRange] = []
    for id_range in ranges:
        if merged and merged[-1].group == id_range.group and merged[-1].last + 1 == id_range.first:
            merged[-1] = IdRange(id_range.group, merged[-1].first, id_range.last)
        else:
            merged.append(id_range)
    return merged


def parse_ids(ids: Sequence[str]) -> list[IdRange]:
    """Return the range that each id or range spells, in the same order. Raises RequestError if one
    is malformed.
    """
    return [_parse_range(text, "an id") for text in ids]


def normalize_id(text: str) -> str:
    """Return the canonical spelling of an id or range read from a record. Raises ValueError, as
    pydantic validators must, if it is malformed.
    """
    try:
        return str(_parse_range(text, "an id"))
    except RequestError as error:
        raise ValueError(str(error)) from error


def count_ids(ids: Sequence[str]) -> int:
    """Return how many items these ids and ranges name; one named twice counts twice. Raises
    RequestError if one is malformed.
    """
    return sum(map(len, parse_ids(ids)))


def find_positions(
    ids: Sequence[str], total: int, noun: str, groups: Mapping[str, range] | None = None
) -> list[int]:
    """Return the positions of the items named by ids, counted from 0 in a set of `total` items,
    sorted.

    `groups` maps each group to the positions of its items; None if the set has no groups. `noun`
    names an item in messages. Raises RequestError, which names `--rows`, if an id is beyond the set
    or its group, the group does not exist, or two ids name the same item; also if an id is
    malformed.
    """
    range_by_position: dict[int, IdRange] = {}
    for id_range in parse_ids(ids):
        positions = range(total) if not id_range.group else _find_group(id_range, groups)
        if id_range.last >= len(positions):
            subject = f"{id_range.group} has" if id_range.group else "the data has"
            allowed = (
                f"{id_range.group}/0 to {id_range.group}/{len(positions) - 1}"
                if id_range.group
                else f"0 to {total - 1}"
            )
            raise RequestError(
                f"--rows: no {noun} {id_range}; {subject} {len(positions)} {noun}s; allowed:"
                f" {allowed}"
            )
        for position in positions[id_range.first : id_range.last + 1]:
            if position in range_by_position:
                raise RequestError(
                    f"--rows: {id_range} and {range_by_position[position]} name the same {noun};"
                    " name it once"
                )
            range_by_position[position] = id_range
    return sorted(range_by_position)


def _find_group(id_range: IdRange, groups: Mapping[str, range] | None) -> range:
    """Return the positions, in the whole set, of the group that a range names. Raises RequestError
    if the set has no groups (`groups` is None), or not this one.
    """
    if groups is None:
        raise RequestError(
            f"--rows: {id_range}: the data has no groups; allowed: places counted from 0, such as"
            " 12 or 12-20"
        )
    if id_range.group not in groups:
        raise RequestError(
            f"--rows: {id_range}: no such subject; {suggest_names(id_range.group, groups)}"
        )
    return groups[id_range.group]


def suggest_names(name: str, names: Mapping[str, range]) -> str:
    """Return the end of an error message for an unknown name: "nearest: " and at most five names
    that are similar or contain it (ignoring case, a space equal to "_"); if there are none, all
    known names.
    """
    spelled = name[:200].lower().replace(" ", "_")
    near = get_close_matches(spelled, list(names), MAX_SUGGESTIONS)
    near += [
        candidate
        for candidate in names
        if spelled and spelled in candidate and candidate not in near
    ]
    return f"nearest: {', '.join(near[:MAX_SUGGESTIONS])}" if near else suggest_name(spelled, names)


def find_group_positions(names: Sequence[str], groups: Mapping[str, range]) -> list[int]:
    """Return the positions, in the whole set, of all items of the groups named with `--subjects`,
    sorted; `groups` maps each group to its positions. Raises RequestError if there is no such
    group.
    """
    for name in names:
        if name not in groups:
            raise RequestError(
                f"--subjects {name!r}: no such subject; {suggest_names(name, groups)}"
            )
    return sorted(position for name in names for position in groups[name])


def parse_subjects(text: str) -> tuple[str, ...]:
    """Split the text of `--subjects`, names with commas between, into sorted names without space
    around them. Raises RequestError if a name is empty or given twice. Whether the subjects exist
    is not checked.
    """
    subjects = [name.strip() for name in text.split(",")]
    if not all(subjects):
        raise RequestError(
            f"--subjects {text!r}: names subjects with commas between, such as anatomy,virology"
        )
    repeated = next((name for name in subjects if subjects.count(name) > 1), None)
    if repeated is not None:
        raise RequestError(f"--subjects {text!r}: {repeated} is there twice; name each once")
    return tuple(sorted(subjects))
