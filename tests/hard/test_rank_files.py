"""Tests of damaged rank files: a worker may write anything, and the run still ends in a whole
record.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import CASE
from fixtures.damage import changed_bytes, changed_value
from fixtures.golden import golden
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.metrics.verify import verify_record
from steelyard.record import record
from steelyard.record.record import Record
from steelyard.run import messages, session
from steelyard.run.checked_request import check_request
from steelyard.run.failure import find_failure
from steelyard.run.parent import CaseRun
from steelyard.run.worker_files import parse_rank_file

pytestmark = pytest.mark.process

TRIED = 600


@dataclass
class Ended:
    """A finished run of two ranks, and the texts of their last rank files."""

    run: CaseRun
    texts: dict[int, str]

    def again(self, rank: int, text: str) -> Record:
        """Return the record that the run would have if this rank had written this text as its rank
        file.
        """
        session = self.run.session
        files = {one: parse_rank_file(said, one) for one, said in self.texts.items() if one != rank}
        session.results = replace(session.results, rank_files=files, unreadable={})
        session._store_rank_file(messages.make_rank_file_message(session.token, rank, text))
        return self.run._assemble_sound_record(find_failure(session.results, len(self.texts)))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run the smoke case on two CPU ranks in this process, and return it with the rank files it
    received.
    """
    texts: dict[int, str] = {}

    def keep(text: str, rank: int) -> Any:
        texts[rank] = text
        return parse_rank_file(text, rank)

    out = tmp_path_factory.mktemp("records")
    asked = Request(
        resolve.resolve_case(CASE, "smoke"),
        accelerator="cpu",
        devices=2,
        passes=("val",),
        out=out,
        hang_s=120.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "parse_rank_file", keep)
        run = CaseRun(check_request(asked), None, None)
        made, _ = run.run_and_record(None)
    assert (made.status, sorted(texts)) == ("valid", [0, 1])
    return Ended(run, texts)


def test_the_same_files_make_the_same_record(ended: Ended) -> None:
    made = ended.again(1, ended.texts[1])
    assert (made.status, made.failure, len(made.ranks)) == ("valid", None, 2)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_any_change_of_a_rank_file_ends_in_a_record(
    ended: Ended, rank: int, tmp_path: Path, attacks: Attacks
) -> None:
    """A changed file may still be well formed; then the checks of the record judge it."""
    draw = random.Random(rank)
    seen: Counter[str] = Counter()
    for number in range(TRIED // 2):
        change = changed_bytes if number % 3 == 0 else changed_value
        made = ended.again(rank, change(ended.texts[rank], draw))
        path = record.write_record(made, tmp_path)
        assert verify_record(path) == [], number
        path.unlink()
        seen[made.reasons[0].code if made.reasons else made.status] += 1
    assert seen["malformed"] > TRIED // 10, seen
    assert set(seen) - {"valid", "malformed"} <= CODES, seen
    told = ", ".join(f"{count} `{code}`" for code, count in sorted(seen.items()))
    attacks.add(
        f"file of rank {rank}, changed at random",
        TRIED // 2,
        "333 of 600: traceback, no record",
        f"whole records: {told}",
    )


# Other reasons that a changed rank file can cause: it claims that the rank did not end or failed,
# or its counts and times do not add up.
CODES = {
    "killed",
    "raised",
    "contradiction",
    "data_differ",
    "coverage",
    "tokens",
    "unaccounted",
    "nan",
    "clock",
    "hidden",
}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "EOF while parsing a value"),
        ("{", "EOF while parsing an object"),
        ("[]", "Input should be an object"),
        ("[" * 100_000, "recursion limit exceeded"),
        ('"\\ud800"', "unexpected end of hex escape"),
        ("null", ""),
    ],
    ids=["empty", "cut", "a list", "deep", "half a character", "nothing"],
)
def test_what_is_no_rank_file_is_named_so(ended: Ended, text: str, why: str) -> None:
    made = ended.again(1, text)
    assert made.status == "failed"
    assert made.reasons[0].code == "malformed"
    assert made.reasons[0].text.startswith(golden("rank-1-left-result-that-cannot"))
    assert why in made.reasons[0].text
    assert made.failure is not None
    assert (made.failure.rank, made.failure.host) == (1, "localhost")
    assert [one.rank for one in made.ranks] == [0]


def test_the_file_of_another_rank(ended: Ended) -> None:
    assert (
        ended.again(1, ended.texts[0])
        .reasons[0]
        .text.endswith("cannot be read: it is that of rank 0")
    )


def test_a_file_that_did_not_arrive_whole(ended: Ended) -> None:
    said = messages.make_rank_file_message(ended.run.session.token, 1, ended.texts[1])
    ended.run.session._store_rank_file(said.model_copy(update={"text": said.text[:-1]}))
    assert ended.run.session.results.unreadable == {1: "it did not arrive as it was sent"}


def test_results_that_do_not_fit_together(ended: Ended) -> None:
    """Each file is a valid rank file but together they make no record, so nothing that was measured
    is used.
    """
    table = json.loads(ended.texts[1])
    table["outputs"]["val"] = {"items": "all of them"}
    made = ended.again(1, json.dumps(table))
    assert (made.status, made.ranks, made.reasons[0].code) == ("failed", [], "malformed")
    assert made.reasons[0].text.startswith(golden("what-the-ranks-left-cannot-be"))
    assert made.failure is not None
    assert "Traceback" in made.failure.stderr_tail
