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
from fixtures.damage import damage_text, damage_value
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

TRIES = 600


@dataclass
class FinishedRun:
    """A finished run of two ranks, and the texts of their last rank files."""

    run: CaseRun
    texts: dict[int, str]

    def again(self, rank: int, text: str) -> Record:
        """Return the record that the run would have if this rank had written this text as its rank
        file.
        """
        session = self.run.session
        files = {
            other_rank: parse_rank_file(other_text, other_rank)
            for other_rank, other_text in self.texts.items()
            if other_rank != rank
        }
        session.results = replace(session.results, rank_files=files, unreadable={})
        session._store_rank_file(messages.make_rank_file_message(session.token, rank, text))
        return self.run._assemble_sound_record(find_failure(session.results, len(self.texts)))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Run the smoke case on two CPU ranks in this process, and return it with the rank files it
    received.
    """
    texts: dict[int, str] = {}

    def record_text(text: str, rank: int) -> Any:
        texts[rank] = text
        return parse_rank_file(text, rank)

    out = tmp_path_factory.mktemp("records")
    request = Request(
        resolve.resolve_case(CASE, "smoke"),
        accelerator="cpu",
        devices=2,
        passes=("val",),
        out=out,
        hang_s=120.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "parse_rank_file", record_text)
        run = CaseRun(check_request(request), None, None)
        run_record, _ = run.run_and_record(None)
    assert (run_record.status, sorted(texts)) == ("valid", [0, 1])
    return FinishedRun(run, texts)


def test_unchanged_rank_files_make_a_valid_record(ended: FinishedRun) -> None:
    run_record = ended.again(1, ended.texts[1])
    assert (run_record.status, run_record.failure, len(run_record.ranks)) == ("valid", None, 2)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_randomly_changed_rank_file_still_gives_a_record(
    ended: FinishedRun, rank: int, tmp_path: Path, attacks: Attacks
) -> None:
    """A changed file may still be well formed; then the checks of the record judge it."""
    rng = random.Random(rank)
    outcomes: Counter[str] = Counter()
    for number in range(TRIES // 2):
        change = damage_text if number % 3 == 0 else damage_value
        run_record = ended.again(rank, change(ended.texts[rank], rng))
        path = record.write_record(run_record, tmp_path)
        assert verify_record(path) == [], number
        path.unlink()
        outcomes[run_record.reasons[0].code if run_record.reasons else run_record.status] += 1
    assert outcomes["malformed"] > TRIES // 10, outcomes
    assert set(outcomes) - {"valid", "malformed"} <= OTHER_REASON_CODES, outcomes
    summary = ", ".join(f"{count} `{code}`" for code, count in sorted(outcomes.items()))
    attacks.add(
        f"file of rank {rank}, changed at random",
        TRIES // 2,
        "333 of 600: traceback, no record",
        f"whole records: {summary}",
    )


# Other reasons that a changed rank file can cause: it claims that the rank did not end or failed,
# or its counts and times do not add up.
OTHER_REASON_CODES = {
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
def test_malformed_rank_file_is_reported(ended: FinishedRun, text: str, why: str) -> None:
    run_record = ended.again(1, text)
    assert run_record.status == "failed"
    assert run_record.reasons[0].code == "malformed"
    assert run_record.reasons[0].text.startswith(golden("rank-1-left-result-that-cannot"))
    assert why in run_record.reasons[0].text
    assert run_record.failure is not None
    assert (run_record.failure.rank, run_record.failure.host) == (1, "localhost")
    assert [rank.rank for rank in run_record.ranks] == [0]


def test_file_of_another_rank_is_reported(ended: FinishedRun) -> None:
    assert (
        ended.again(1, ended.texts[0])
        .reasons[0]
        .text.endswith("cannot be read: it is the file of rank 0")
    )


def test_truncated_rank_file_message_is_reported(ended: FinishedRun) -> None:
    message = messages.make_rank_file_message(ended.run.session.token, 1, ended.texts[1])
    ended.run.session._store_rank_file(message.model_copy(update={"text": message.text[:-1]}))
    assert ended.run.session.results.unreadable == {
        1: "its checksum differs from the one sent with it"
    }


def test_contradictory_rank_files_are_malformed(ended: FinishedRun) -> None:
    """Each file is a valid rank file but together they make no record, so nothing that was measured
    is used.
    """
    document = json.loads(ended.texts[1])
    document["outputs"]["val"] = {"items": "all of them"}
    run_record = ended.again(1, json.dumps(document))
    assert (run_record.status, run_record.ranks, run_record.reasons[0].code) == (
        "failed",
        [],
        "malformed",
    )
    assert run_record.reasons[0].text.startswith(golden("what-the-ranks-left-cannot-be"))
    assert run_record.failure is not None
    assert "Traceback" in run_record.failure.stderr_tail
