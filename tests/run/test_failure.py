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


def make_rank_file(
    number: int, status: RankStatus, ended_s: float, error: str | None = None
) -> RankFile:
    """Return a rank file on the CPU that ended at `ended_s`; an error text is made up unless one is
    given or the rank is done.
    """
    error_text = None if status == "done" else error or f"error {number}"
    return RankFile(
        rank=number,
        device=f"cpu:{number}",
        status=status,
        error=error_text,
        ended_s=ended_s,
        budget={},
    )


def make_exits(*ended: tuple[int, int | None, float]) -> dict[int, WorkerEnded]:
    """Return the exits of workers by rank, each given as rank, exit code (None for a suspended
    worker) and time in seconds.
    """
    return {
        rank_number: WorkerEnded(
            token="t", rank=rank_number, code=code, time_s=time_s, suspended=code is None
        )
        for rank_number, code, time_s in ended
    }


def make_results(ranks: list[RankFile], ended: dict[int, WorkerEnded] | None = None) -> RankResults:
    """Return the results of ranks with these rank files and exits."""
    return RankResults({rank_file.rank: rank_file for rank_file in ranks}, ended or {})


ALL_DONE = [make_rank_file(0, "done", 1.0), make_rank_file(1, "done", 2.0)]


@pytest.mark.parametrize(
    "ranks,ended,expected",
    [
        (ALL_DONE, make_exits((0, 0, 1.0), (1, 0, 2.0)), None),
        (
            [make_rank_file(0, "raised", 2.0), make_rank_file(1, "out_of_memory", 1.0)],
            make_exits((0, 1, 2.0)),
            ("out_of_memory", "rank 1: error 1", 1),
        ),
        (
            [make_rank_file(0, "raised", 1.0), make_rank_file(1, "out_of_memory", 2.0)],
            make_exits((0, 1, 1.0)),
            ("raised", "rank 0: error 0", 0),
        ),
        (
            [make_rank_file(0, "done", 1.0)],
            make_exits((1, 1, 3.0)),
            ("killed", "rank 1 wrote no result; exit code 1", 1),
        ),
        (
            [make_rank_file(0, "done", 1.0)],
            make_exits((0, 0, 3.0), (1, 0, 3.0)),
            ("killed", "rank 1 wrote no result; exit code 0", 1),
        ),
        (
            ALL_DONE,
            make_exits((0, 0, 1.0), (1, -11, 2.0)),
            ("killed", "rank 1 was ended by SIGSEGV", 1),
        ),
        (
            [],
            make_exits((0, -40, 2.0), (1, 1, 1.0)),
            ("killed", "rank 1 wrote no result; exit code 1", 1),
        ),
        # A rank that lost its peer is not the cause; the rank that ended without a result is.
        (
            [make_rank_file(0, "raised", 1.0, GLOO), make_rank_file(1, "running", 0.5)],
            make_exits((0, 1, 1.0), (1, -9, 0.9)),
            ("killed", "rank 1 was ended by SIGKILL", 1),
        ),
        (
            [make_rank_file(1, "raised", 1.0, GLOO)],
            make_exits((0, -9, 1.5)),
            ("killed", "rank 0 was ended by SIGKILL", 0),
        ),
        (
            [make_rank_file(0, "raised", 1.0), make_rank_file(1, "running", 0.5)],
            make_exits((0, 1, 1.0)),
            ("raised", "rank 0: error 0", 0),
        ),
        (
            [make_rank_file(0, "raised", 1.0, GLOO), make_rank_file(1, "ended", 1.5)],
            make_exits((0, 1, 1.0)),
            ("raised", f"rank 0: {GLOO}", 0),
        ),
        (
            [make_rank_file(0, "raised", 1.0, GLOO), make_rank_file(1, "running", 0.5)],
            make_exits((0, 1, 1.0), (1, 0, 0.9)),
            ("killed", "rank 1 wrote no result; exit code 0", 1),
        ),
        # Where no other rank has ended, the lost connection is the only known error.
        (
            [make_rank_file(0, "raised", 1.0, GLOO), make_rank_file(1, "running", 0.5)],
            make_exits((0, 1, 1.0)),
            ("raised", f"rank 0: {GLOO}", 0),
        ),
        # A rank that was ended by a signal from outside is a cause.
        (
            [make_rank_file(0, "raised", 1.2, GLOO), make_rank_file(1, "ended", 1.0)],
            make_exits((1, -15, 1.0), (0, 1, 1.2)),
            ("killed", "rank 1 was ended by SIGTERM", 1),
        ),
        (
            [make_rank_file(0, "done", 1.0)],
            make_exits((1, -4, 1.0)),
            ("illegal_instruction", f"rank 1 was ended by SIGILL: {ILLEGAL_HINT}", 1),
        ),
        (
            [make_rank_file(0, "done", 1.0), make_rank_file(1, "raised", 2.0)],
            make_exits((1, 1, 2.0)),
            ("raised", "rank 1: error 1", 1),
        ),
        (
            [make_rank_file(0, "running", 1.0)],
            make_exits((1, None, 4.0)),
            ("stopped", "rank 1 was suspended by a signal and not resumed", 1),
        ),
        (
            [],
            make_exits((0, DISK_FULL, 4.0)),
            (
                "disk_full",
                "rank 0 could not write its result: the disk is full; set TMPDIR to a folder on"
                " another disk",
                0,
            ),
        ),
    ],
)
def test_cause_of_a_failed_run(
    ranks: list[RankFile], ended: dict[int, WorkerEnded], expected: tuple[str, str, int] | None
) -> None:
    assert find_failure(make_results(ranks, ended), WORLD) == (
        None if expected is None else Failure(*expected)
    )


def test_on_several_hosts_the_host_is_named() -> None:
    failure = find_failure(
        make_results([], make_exits((3, -signal.SIGSEGV, 1.0))),
        4,
        lambda rank: f"rank {rank} on south",
    )
    assert failure is not None
    assert failure.text == "rank 3 on south was ended by SIGSEGV"


def test_hosts_that_read_different_data_fail() -> None:
    def make_reader(number: int, fingerprint: str) -> RankFile:
        facts = DataFacts(source="made", rows=4, fingerprint=fingerprint, published=None)
        return make_rank_file(number, "done", 1.0).model_copy(update={"data": facts})

    assert (
        find_failure(
            make_results(
                [make_reader(0, "a"), make_reader(1, "a"), make_rank_file(2, "done", 1.0)]
            ),
            3,
        )
        is None
    )
    failure = find_failure(make_results([make_reader(0, "a"), make_reader(1, "b")]), 2)
    assert failure is not None
    assert (failure.code, failure.rank) == ("data_differ", 1)


def test_worker_of_a_program_stands_for_all_its_ranks():
    rank_files = fill_program_rank_files({0: make_rank_file(0, "done", 1.5)}, 3)
    assert [
        (rank_file.rank, rank_file.device, rank_file.status, rank_file.ended_s)
        for rank_file in rank_files.values()
    ] == [
        (0, "cpu:0", "done", 1.5),
        (1, "cpu:1", "done", 1.5),
        (2, "cpu:2", "done", 1.5),
    ]
    assert find_failure(RankResults(rank_files, make_exits((0, 0, 2.0))), 3) is None
    raised = {0: make_rank_file(0, "raised", 1.5)}
    assert fill_program_rank_files(raised, 3) == raised
    assert find_failure(RankResults(raised, make_exits((0, 1, 2.0))), 3) == Failure(
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
                "rank 0 wrote no result; exit code 1, and its stderr says: MemoryError",
            ),
        ),
        (
            1,
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB\n",
            (
                "out_of_memory",
                (
                    "rank 0 wrote no result; exit code 1, and its stderr says:"
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
            ("killed", "rank 0 wrote no result; exit code 1"),
        ),
        (-9, "MemoryError\n", ("killed", "rank 0 was ended by SIGKILL")),
    ],
)
def test_out_of_memory_is_read_from_the_stderr_tail(
    code: int, tail: str, expected: tuple[str, str]
) -> None:
    failure = find_failure(
        RankResults(exits=make_exits((0, code, 1.0)), stderr_tails={0: tail}), WORLD
    )
    assert failure == Failure(*expected, 0)
