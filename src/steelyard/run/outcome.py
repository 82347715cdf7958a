"""How a run ended, and why: from rank files, exit codes and what hosts said. Pure."""

import os
import re
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from steelyard import files
from steelyard.errors import OUT_OF_MEMORY_LINE
from steelyard.plan.degrees import Plan
from steelyard.run.messages import Exit
from steelyard.run.processes import signal_name
from steelyard.run.spec import DISK_FULL, RankFile

PEER_LOST = re.compile(r"gloo|nccl|connection (reset|closed|refused)|TCPStore|DistNetworkError|DistBackendError", re.IGNORECASE)
TAIL_CHARS, WHY_CHARS = 4000, 500
NO_SPACE = tuple(os.strerror(number) for number in files.FULL)
ILLEGAL_HINT = (
    "the CPU does not run an instruction that it advertises, as some virtual machines do not run AMX; set "
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and run again"
)


@dataclass(frozen=True)
class Outcome:
    """How the processes ended. `code` is None where all went as it should."""

    code: str | None
    text: str
    exit_code: int | None
    stderr_tail: str
    ranks: list[RankFile]
    rank: int | None = None  # the cause, where it is one
    host: str | None = None
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def first(self) -> RankFile | None:
        """Rank 0, which has what ranks have in common."""
        return next((rank for rank in self.ranks if rank.rank == 0), None)


@dataclass(frozen=True)
class Verdict:
    code: str | None
    text: str = ""
    rank: int | None = None


UNFINISHED = Verdict("unfinished", "the run has not ended, or its parent was killed before it could say how it ended")


@dataclass(frozen=True)
class Left:
    """What is there of the ranks after their end: the last file of each that can be read, why a later one cannot be, ends
    that nobody asked for, and their last words."""

    ranks: list[RankFile]
    exits: dict[int, Exit]
    unreadable: dict[int, str] = field(default_factory=dict)
    tails: dict[int, str] = field(default_factory=dict)


def judge(left: Left, plan: Plan, hosts: list[str]) -> Verdict:
    """The first to fail is the cause: others fail for want of a peer, or because they were told to end, which they say. One
    that says nothing was killed, as was one that was told to end by somebody else."""
    ranks, exits = left.ranks, left.exits

    def named(rank: int) -> str:
        return f"rank {rank}" if len(hosts) == 1 else f"rank {rank} on {hosts[rank // plan.devices]}"

    stopped = [one for one in exits.values() if one.stopped]
    if stopped:
        rank = min(stopped, key=lambda one: one.at_s).rank
        return Verdict("stopped", f"{named(rank)} was stopped by a signal, and nothing let it go on", rank)
    broken = [rank for rank in ranks if rank.status not in ("done", "running", "ended")]
    told = {rank.rank for rank in ranks if rank.status != "running" and not (rank.status == "ended" and rank.rank in exits)}
    silent = [one for one in range(plan.world) if one not in told and one not in left.unreadable]
    cause = min(broken, key=lambda rank: rank.ended_s, default=None)
    lost = sorted((one for one in exits.values() if one.rank in silent), key=lambda one: one.at_s)
    if cause is not None and not (lost and PEER_LOST.search(str(cause.error))):
        return Verdict(cause.status, f"{named(cause.rank)}: {cause.error}", cause.rank)
    for rank, why in sorted(left.unreadable.items()):
        return Verdict("malformed", f"{named(rank)} left a result that cannot be read: {why}", rank)
    done = {rank.rank for rank in ranks if rank.status == "done"}
    if len(done) == plan.world and not any(one.code for one in exits.values()):
        return Verdict(None)
    dead = lost or sorted((one for one in exits.values() if one.code), key=lambda one: one.at_s)
    if not dead:
        rank = (silent or sorted(set(range(plan.world)) - done) or [0])[0]
        return Verdict("killed", f"{named(rank)} left no result; exit code 0", rank)
    return _death(dead[0], named(dead[0].rank), left.tails.get(dead[0].rank, ""))


def of_program(ranks: list[RankFile], world: int) -> list[RankFile]:
    """One worker speaks for all ranks of the program that it started: of the others it is known that they ended, and on which
    devices they were."""
    first = next((one for one in ranks if one.rank == 0 and one.status == "done"), None)
    if first is None:
        return ranks
    kind = first.device.partition(":")[0]
    others = [
        RankFile(rank=rank, device=f"{kind}:{rank}", status="done", error=None, ended_s=first.ended_s, budget=first.budget)
        for rank in range(1, world)
    ]
    return [first, *others]


def _death(last: Exit, who: str, tail: str) -> Verdict:
    """What is known of it, and no guess: many things send SIGKILL."""
    code = last.code
    full = next((text for text in NO_SPACE if text in tail), None)
    end = " ".join((tail.strip().splitlines() or [""])[-1].split())
    starved = OUT_OF_MEMORY_LINE.match(end) is not None
    if code == DISK_FULL:
        text = f"{who} could write no result: no space is left on its disk; TMPDIR names another"
        return Verdict("disk_full", text, last.rank)
    if code == -signal.SIGILL:
        return Verdict("illegal_instruction", f"{who} was ended by SIGILL: {ILLEGAL_HINT}", last.rank)
    if code == -signal.SIGABRT and starved:
        return Verdict("out_of_memory", f"{who} was ended by SIGABRT, and its stderr says: {end[:WHY_CHARS]}", last.rank)
    if code is not None and code < 0:
        text = f"{who} was ended by {signal_name(-code)}"
        if code == -signal.SIGKILL and last.starved:
            text += f"; meanwhile the kernel ended {last.starved} process(es) of its control group for lack of memory"
        return Verdict("killed", text, last.rank)
    if full is not None:
        return Verdict("disk_full", f"{who} left no result; exit code {code}, and its stderr says: {full}", last.rank)
    if starved:
        text = f"{who} left no result; exit code {code}, and its stderr says: {end[:WHY_CHARS]}"
        return Verdict("out_of_memory", text, last.rank)
    return Verdict("killed", f"{who} left no result; exit code {code}", last.rank)


def differing(ranks: Iterable[RankFile]) -> Verdict | None:
    """Whether ranks read other data than rank 0, as hosts with files of their own may."""
    known = [rank for rank in ranks if rank.data is not None]
    for rank in known:
        if rank.data is not None and known[0].data is not None and rank.data.fingerprint != known[0].data.fingerprint:
            text = f"rank {rank.rank} read other data than rank {known[0].rank}; give all hosts the same files"
            return Verdict("data_differ", text, rank.rank)
    return None


def without_ranks(made: Outcome, error: Exception) -> Outcome:
    """The same, where what the ranks left cannot be put together to a record."""
    why = " ".join("".join(traceback.format_exception_only(error)).split())
    text = f"what the ranks left cannot be put together: {why[:WHY_CHARS]}"
    return replace(
        made,
        code=made.code or "malformed",
        text=f"{made.text}; {text}" if made.code else text,
        stderr_tail=made.stderr_tail or "".join(traceback.format_exception(error))[-TAIL_CHARS:],
        ranks=[],
    )
