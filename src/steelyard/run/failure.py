"""Decide how a run failed, and which rank caused it.

Input is what the ranks left: rank files, exits, and the end of their stderr. Output is a `Failure`,
or None for a run that went well. It is produced once, by the agent that ended, by the session that
lost a host or by `find_failure`, and carried as it is into the record. Nothing here reads a file or
a clock.
"""

import os
import re
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from steelyard import accelerators, files
from steelyard.errors import OUT_OF_MEMORY_LINE

if TYPE_CHECKING:
    from steelyard.run.messages import BorderMessage, CalibrationMessage, WorkerEnded
    from steelyard.run.worker_files import RankFile

# A rank that lost its peer fails with one of these, or names the library for collectives of an
# accelerator.
PEER_LOST = (
    "gloo",
    "connection (reset|closed|refused)",
    "TCPStore",
    "DistNetworkError",
    "DistBackendError",
)
TAIL_CHARS, WHY_CHARS = 4000, 500
# EX_IOERR of sysexits.h: the exit code of a worker that cannot even write its rank file
DISK_FULL = 74
NO_SPACE = tuple(os.strerror(number) for number in files.DISK_FULL_ERRNOS)
ILLEGAL_HINT = (
    "the CPU does not run an instruction that it advertises, as some virtual machines do not run"
    " AMX; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and run again"
)


@dataclass(frozen=True)
class Failure:
    """Why a run failed: a reason `code` (such as `out_of_memory` or `hang`), a sentence for the
    user (`text`), and the `rank` that caused it, None if no rank did. It becomes the first reason
    of the record.
    """

    code: str
    text: str
    rank: int | None = None


UNFINISHED = Failure(
    "unfinished", "the run has not ended, or its parent was killed before it could say how it ended"
)


@dataclass
class RankResults:
    """What all ranks left behind, by rank: the last readable rank file (`rank_files`), why a later
    one cannot be read (`unreadable`), exits and suspensions that the parent did not ask for
    (`exits`), the end of the output (`stderr_tails`), and the stack traces of a run that hung
    (`stacks`). `borders` are what agents saw of the begin and end of each pass, by (rank, pass,
    event), `calibrations` the matmul rates of each device, by (rank, stage); `agent_output` is what
    agents, ssh or srun printed beside messages.

    The session adds to it as messages arrive; `find_failure` judges it. `get_stderr_tail` and
    `get_exit_code` look up one rank.
    """

    rank_files: "dict[int, RankFile]" = field(default_factory=dict)
    exits: "dict[int, WorkerEnded]" = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    stderr_tails: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    borders: "dict[tuple[int, str, str], BorderMessage]" = field(default_factory=dict)
    calibrations: "dict[tuple[int, str], CalibrationMessage]" = field(default_factory=dict)
    agent_output: str = ""  # what agents, ssh or srun printed beside messages

    @property
    def ordered_rank_files(self) -> "list[RankFile]":
        """The rank files in the order of their ranks."""
        return [self.rank_files[rank] for rank in sorted(self.rank_files)]

    def get_stderr_tail(self, rank: int | None) -> str:
        """Return the end of a rank's output, or of all ranks' joined for None, at most `TAIL_CHARS`
        characters; if there is none, what the agents printed, which may be empty.
        """
        text = (
            "\n".join(filter(None, self.stderr_tails.values()))
            if rank is None
            else self.stderr_tails.get(rank, "")
        )
        return (text or self.agent_output)[-TAIL_CHARS:]

    def get_exit_code(self, rank: int | None) -> int | None:
        """Return the exit code (negative: the signal) of a rank that ended without being asked to;
        None for a rank that did not or is suspended, and for `rank` None.
        """
        ended = None if rank is None else self.exits.get(rank)
        return None if ended is None else ended.code

    def add_border(self, message: "BorderMessage") -> None:
        """Store what an agent saw of a pass's begin or end. Of several the first begin and the last
        end count: a rank that reports more than there are does not make its pass shorter.
        """
        border = (message.rank, message.pass_name, message.event)
        if message.event == "end" or border not in self.borders:
            self.borders[border] = message

    def without_rank_files(self, error: Exception) -> "RankResults":
        """Return a copy of these results without the rank files, from which no record can be made
        because of `error`; if `agent_output` is empty, it is the traceback of `error` in the copy.
        """
        output = self.agent_output or "".join(traceback.format_exception(error))
        return replace(self, rank_files={}, agent_output=output)


def find_failure(
    results: RankResults, world_size: int, format_rank: Callable[[int], str] = "rank {}".format
) -> Failure | None:
    """Return the failure that came first, or None if every rank finished. `format_rank` formats a
    rank for the text.

    Later failures are usually consequences: a rank that loses its peer raises a connection error,
    and ranks that we end report `ended`. Rules, in this order; the first that applies decides, and
    within one the earliest rank, or the lowest where no time is known:

    1. A worker is suspended by a signal: `stopped`.
    2. A rank raised, and not because a peer died: the status in its rank file.
    3. A rank file cannot be read: `malformed`.
    4. All ranks finished and exited with code 0: None, or `data_differ` if they read different
       data.
    5. A process died, or left no result: `killed`, `disk_full`, `out_of_memory` or
       `illegal_instruction`.
    """
    rank_files, exits = results.ordered_rank_files, results.exits
    suspended = [ended for ended in exits.values() if ended.suspended]
    if suspended:
        rank = min(suspended, key=lambda ended: ended.time_s).rank
        return Failure(
            "stopped",
            f"{format_rank(rank)} was suspended by a signal and not resumed",
            rank,
        )

    reported = {
        rank_file.rank
        for rank_file in rank_files
        if rank_file.status != "running"
        and not (rank_file.status == "ended" and rank_file.rank in exits)
    }
    silent = [
        rank
        for rank in range(world_size)
        if rank not in reported and rank not in results.unreadable
    ]
    dead = sorted(
        (ended for ended in exits.values() if ended.rank in silent), key=lambda ended: ended.time_s
    )
    raised = [
        rank_file
        for rank_file in rank_files
        if rank_file.status not in ("done", "running", "ended")
    ]
    first_raised = min(raised, key=lambda rank_file: rank_file.ended_s, default=None)
    if first_raised is not None and not (dead and _is_peer_lost(str(first_raised.error))):
        return Failure(
            first_raised.status,
            f"{format_rank(first_raised.rank)}: {first_raised.error}",
            first_raised.rank,
        )

    if results.unreadable:
        rank, why = min(results.unreadable.items())
        return Failure(
            "malformed", f"{format_rank(rank)} wrote a rank file that cannot be read: {why}", rank
        )

    finished = {rank_file.rank for rank_file in rank_files if rank_file.status == "done"}
    failed_exits = sorted(
        (ended for ended in exits.values() if ended.code), key=lambda ended: ended.time_s
    )
    if len(finished) == world_size and not failed_exits:
        return _find_differing_data(rank_files)
    if dead or failed_exits:
        ended = (dead or failed_exits)[0]
        return _explain_exit(
            ended, format_rank(ended.rank), results.stderr_tails.get(ended.rank, "")
        )
    rank = (silent or sorted(set(range(world_size)) - finished) or [0])[0]
    return Failure("killed", f"{format_rank(rank)} wrote no result; exit code 0", rank)


def _is_peer_lost(error: str) -> bool:
    """Return whether an error text shows that a peer was lost, which is a consequence and not the
    cause: it names a connection error or a library for collectives, in any case of letters.
    """
    libraries = accelerators.collect_names(lambda row: filter(None, [row.collectives]))
    return (
        re.search("|".join([*PEER_LOST, *map(re.escape, libraries)]), error, re.IGNORECASE)
        is not None
    )


def _explain_exit(ended: "WorkerEnded", rank_name: str, stderr_tail: str) -> Failure:
    """Return the failure of a worker that died, from its exit code and the end of its stderr,
    without guessing who sent a signal.

    The first that holds: exit code 74, `disk_full`; SIGILL, `illegal_instruction`; stderr names a
    full disk, and no signal, `disk_full`; its last line is about memory, and no signal but SIGABRT,
    `out_of_memory`; else `killed`, after SIGKILL with the kernel's OOM kills in the text.
    `rank_name` is for the text.
    """
    code, by_signal = ended.code, ended.code is not None and ended.code < 0
    no_space_text = next((text for text in NO_SPACE if text in stderr_tail), None)
    last_line = " ".join((stderr_tail.strip().splitlines() or [""])[-1].split())
    no_memory = OUT_OF_MEMORY_LINE.match(last_line) is not None
    how = (
        f"{rank_name} was ended by {format_signal(-(code or 0))}"
        if by_signal
        else f"{rank_name} wrote no result; exit code {code}"
    )
    says = f"{how}, and its stderr says: "
    for_memory = (
        f"the kernel killed {ended.oom_kills} process(es) of its control group because memory ran"
        " out"
    )
    rules = (
        (
            code == DISK_FULL,
            "disk_full",
            f"{rank_name} could not write its result: the disk is full; set TMPDIR to a folder on"
            " another disk",
        ),
        (code == -signal.SIGILL, "illegal_instruction", f"{how}: {ILLEGAL_HINT}"),
        (no_space_text is not None and not by_signal, "disk_full", f"{says}{no_space_text}"),
        (
            no_memory and (not by_signal or code == -signal.SIGABRT),
            "out_of_memory",
            f"{says}{last_line[:WHY_CHARS]}",
        ),
        (code == -signal.SIGKILL and ended.oom_kills, "killed", f"{how}; meanwhile {for_memory}"),
    )
    return next(
        (Failure(reason, text, ended.rank) for holds, reason, text in rules if holds),
        Failure("killed", how, ended.rank),
    )


def _find_differing_data(rank_files: "list[RankFile]") -> Failure | None:
    """Return the failure `data_differ` for the first rank whose data's fingerprint is another than
    that of the lowest rank that read any, as with hosts that have their own files; None if all read
    the same. Rank files are in the order of ranks.
    """
    fingerprints = [
        (rank_file.rank, rank_file.data.fingerprint)
        for rank_file in rank_files
        if rank_file.data is not None
    ]
    for rank, fingerprint in fingerprints:
        if fingerprint != fingerprints[0][1]:
            text = (
                f"rank {rank} read other data than rank {fingerprints[0][0]}; give all hosts the"
                " same"
                " files"
            )
            return Failure("data_differ", text, rank)
    return None


def explain_assembly_error(failure: Failure | None, error: Exception) -> Failure:
    """Return the failure of a run from whose rank files no record can be made because of `error`:
    `malformed` with the error's text (cut to `WHY_CHARS`) if the run had not failed, else `failure`
    with its code and rank and that text added.
    """
    why = " ".join("".join(traceback.format_exception_only(error)).split())
    text = f"no record can be assembled from the rank files: {why[:WHY_CHARS]}"
    return (
        Failure("malformed", text)
        if failure is None
        else replace(failure, text=f"{failure.text}; {text}")
    )


def format_signal(number: int) -> str:
    """Return the name of a signal number, such as SIGTERM, or `signal N` for one that Python does
    not know.
    """
    names = {known_signal.value: known_signal.name for known_signal in signal.Signals}
    return names.get(number, f"signal {number}")
