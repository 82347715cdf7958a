"""Tests of how the cause of a failed run is found from rank files, exit codes and the tails of
stderr.
"""

import signal

import pytest

from steelyard.run.failure import DISK_FULL, ILLEGAL_HINT, Failure, RankResults, find_failure
from steelyard.run.messages import WorkerEnded
from steelyard.run.worker_files import RankFile, RankStatus, fill_program_rank_files
from steelyard.tasks.task import DataFacts

WORLD = 2
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def rank(number: int, status: RankStatus, ended_s: float, error: str | None = None) -> RankFile:
    """Return a rank file on the CPU that ended at `ended_s`; an error text is made up unless one is
    given or the rank is done.
    """
    told = None if status == "done" else error or f"error {number}"
    return RankFile(
        rank=number, device=f"cpu:{number}", status=status, error=told, ended_s=ended_s, budget={}
    )


def exits(*ended: tuple[int, int | None, float]) -> dict[int, WorkerEnded]:
    """Return the exits of workers by rank, each given as rank, exit code (None for a suspended
    worker) and time in seconds.
    """
    return {
        who: WorkerEnded(token="t", rank=who, code=code, time_s=time_s, suspended=code is None)
        for who, code, time_s in ended
    }


def results(ranks: list[RankFile], ended: dict[int, WorkerEnded] | None = None) -> RankResults:
    """Return the results of ranks with these rank files and exits."""
    return RankResults({one.rank: one for one in ranks}, ended or {})


DONE = [rank(0, "done", 1.0), rank(1, "done", 2.0)]


@pytest.mark.parametrize(
    "ranks,ended,expected",
    [
        (DONE, exits((0, 0, 1.0), (1, 0, 2.0)), None),
        (
            [rank(0, "raised", 2.0), rank(1, "out_of_memory", 1.0)],
            exits((0, 1, 2.0)),
            ("out_of_memory", "rank 1: error 1", 1),
        ),
        (
            [rank(0, "raised", 1.0), rank(1, "out_of_memory", 2.0)],
            exits((0, 1, 1.0)),
            ("raised", "rank 0: error 0", 0),
        ),
        (
            [rank(0, "done", 1.0)],
            exits((1, 1, 3.0)),
            ("killed", "rank 1 left no result; exit code 1", 1),
        ),
        (
            [rank(0, "done", 1.0)],
            exits((0, 0, 3.0), (1, 0, 3.0)),
            ("killed", "rank 1 left no result; exit code 0", 1),
        ),
        (DONE, exits((0, 0, 1.0), (1, -11, 2.0)), ("killed", "rank 1 was ended by SIGSEGV", 1)),
        (
            [],
            exits((0, -40, 2.0), (1, 1, 1.0)),
            ("killed", "rank 1 left no result; exit code 1", 1),
        ),
        # A rank that lost its peer is not the cause; the rank that ended without a result is.
        (
            [rank(0, "raised", 1.0, GLOO), rank(1, "running", 0.5)],
            exits((0, 1, 1.0), (1, -9, 0.9)),
            ("killed", "rank 1 was ended by SIGKILL", 1),
        ),
        (
            [rank(1, "raised", 1.0, GLOO)],
            exits((0, -9, 1.5)),
            ("killed", "rank 0 was ended by SIGKILL", 0),
        ),
        (
            [rank(0, "raised", 1.0), rank(1, "running", 0.5)],
            exits((0, 1, 1.0)),
            ("raised", "rank 0: error 0", 0),
        ),
        (
            [rank(0, "raised", 1.0, GLOO), rank(1, "ended", 1.5)],
            exits((0, 1, 1.0)),
            ("raised", f"rank 0: {GLOO}", 0),
        ),
        (
            [rank(0, "raised", 1.0, GLOO), rank(1, "running", 0.5)],
            exits((0, 1, 1.0), (1, 0, 0.9)),
            ("killed", "rank 1 left no result; exit code 0", 1),
        ),
        # Where no other rank has ended, the lost connection is the only known error.
        (
            [rank(0, "raised", 1.0, GLOO), rank(1, "running", 0.5)],
            exits((0, 1, 1.0)),
            ("raised", f"rank 0: {GLOO}", 0),
        ),
        # A rank that was ended by a signal from outside is a cause.
        (
            [rank(0, "raised", 1.2, GLOO), rank(1, "ended", 1.0)],
            exits((1, -15, 1.0), (0, 1, 1.2)),
            ("killed", "rank 1 was ended by SIGTERM", 1),
        ),
        (
            [rank(0, "done", 1.0)],
            exits((1, -4, 1.0)),
            ("illegal_instruction", f"rank 1 was ended by SIGILL: {ILLEGAL_HINT}", 1),
        ),
        (
            [rank(0, "done", 1.0), rank(1, "raised", 2.0)],
            exits((1, 1, 2.0)),
            ("raised", "rank 1: error 1", 1),
        ),
        (
            [rank(0, "running", 1.0)],
            exits((1, None, 4.0)),
            ("stopped", "rank 1 was stopped by a signal, and nothing let it go on", 1),
        ),
        (
            [],
            exits((0, DISK_FULL, 4.0)),
            (
                "disk_full",
                "rank 0 could write no result: no space is left on its disk; TMPDIR names another",
                0,
            ),
        ),
    ],
)
def test_the_first_failure(
    ranks: list[RankFile], ended: dict[int, WorkerEnded], expected: tuple[str, str, int] | None
) -> None:
    assert find_failure(results(ranks, ended), WORLD) == (
        None if expected is None else Failure(*expected)
    )


def test_on_several_hosts_the_host_is_named() -> None:
    found = find_failure(
        results([], exits((3, -signal.SIGSEGV, 1.0))), 4, lambda rank: f"rank {rank} on south"
    )
    assert found is not None
    assert found.text == "rank 3 on south was ended by SIGSEGV"


def test_hosts_with_other_data() -> None:
    def read(number: int, fingerprint: str) -> RankFile:
        facts = DataFacts(source="made", rows=4, fingerprint=fingerprint, published=None)
        return rank(number, "done", 1.0).model_copy(update={"data": facts})

    assert find_failure(results([read(0, "a"), read(1, "a"), rank(2, "done", 1.0)]), 3) is None
    found = find_failure(results([read(0, "a"), read(1, "b")]), 2)
    assert found is not None
    assert (found.code, found.rank) == ("data_differ", 1)


def test_one_worker_speaks_for_all_ranks_of_its_program():
    found = fill_program_rank_files({0: rank(0, "done", 1.5)}, 3)
    assert [(one.rank, one.device, one.status, one.ended_s) for one in found.values()] == [
        (0, "cpu:0", "done", 1.5), (1, "cpu:1", "done", 1.5), (2, "cpu:2", "done", 1.5),
    ]  # fmt: skip
    assert find_failure(RankResults(found, exits((0, 0, 2.0))), 3) is None
    raised = {0: rank(0, "raised", 1.5)}
    assert fill_program_rank_files(raised, 3) == raised
    assert find_failure(RankResults(raised, exits((0, 1, 2.0))), 3) == Failure(
        "raised", "rank 0: error 0", 0
    )


@pytest.mark.parametrize(
    "code,tail,expected",
    [
        (
            1,
            "  File x\nMemoryError\n",
            (
                "out_of_memory",
                "rank 0 left no result; exit code 1, and its stderr says: MemoryError",
            ),
        ),
        (
            1,
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB\n",
            (
                "out_of_memory",
                (
                    "rank 0 left no result; exit code 1, and its stderr says:"
                    " numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB"
                ),
            ),
        ),
        (
            -6,
            (
                "terminate called after throwing an instance of 'std::bad_alloc'\n  what(): "
                " std::bad_alloc\n"
            ),
            (
                "out_of_memory",
                "rank 0 was ended by SIGABRT, and its stderr says: what(): std::bad_alloc",
            ),
        ),
        # Only the last line of stderr counts: the rank survived earlier errors. After SIGKILL the
        # sender is unknown, so stderr is not used.
        (
            1,
            "torch.OutOfMemoryError: no more\nonce more with less\n",
            ("killed", "rank 0 left no result; exit code 1"),
        ),
        (-9, "MemoryError\n", ("killed", "rank 0 was ended by SIGKILL")),
    ],
)
def test_a_rank_that_died_for_lack_of_memory(
    code: int, tail: str, expected: tuple[str, str]
) -> None:
    found = find_failure(RankResults(exits=exits((0, code, 1.0)), stderr_tails={0: tail}), WORLD)
    assert found == Failure(*expected, 0)
