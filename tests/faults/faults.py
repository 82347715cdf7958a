"""The list of faults: what goes wrong, in which phase, on which hosts, and what must come of it."""

import signal
from dataclasses import dataclass, replace

from faults import deeds
from faults.deeds import FaultAction
from hosts.runs import SILENCE_S

PHASES = (
    "imports",
    "join",
    "data",
    "weights",
    "compile",
    "warm-up",
    "pass",
    "evaluation",
    "checkpoint",
    "record",
)
LOCAL, SSH, SSH4, SLURM = "local 1x2", "ssh 2x1", "ssh 2x2", "slurm 2x1"
KILL, STOP, TERM, INT = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT
HANG_AFTER_S = 12.0
LIMIT_S = 15.0

# Bounds in seconds from a fault until the command has ended; docs/faults.md explains each.
END_S = 15.0
SUSPENDED_S = END_S + 5.0
SWEEP_S = END_S + 10.0
SILENT_S = SILENCE_S + 30.0
HANG_S = HANG_AFTER_S + 20.0
SETTLE_S = 0.5  # seconds in which an ended process may still be listed
CUT_OFF_S = SILENCE_S + 15.0  # until a host that is cut off has ended its processes


@dataclass(frozen=True)
class Fault:
    """A fault and its expected outcome: `who` (a rank, `agent` or `parent`) does `act` in the
    phase, by default waits; then `action` is done to the run.

    `where` is launcher, hosts and devices per host; `code` the reason of the record; `bound_s` the
    seconds from the fault until the command has ended.
    """

    what: str
    phase: str
    where: str
    code: str | None  # reason of the record; None: there is no record
    action: FaultAction = deeds.do_nothing
    bound_s: float = END_S
    who: str = "1"
    act: str = "wait"
    case: str = "train"
    options: tuple[str, ...] = ()
    rank: int | None = None  # rank that the record names as the cause
    status: str = "failed"
    exit: int = 1
    left_s: float = 0.0  # seconds after the command in which processes may still run
    stacks: bool = False  # whether the record has the stacks of every rank
    # small file system for the records (`out`) or the temporary files of the last host (`tmp`)
    disk: str | None = None
    quick: bool = False  # whether it is run with all other tests

    @property
    def name(self) -> str:
        return f"{self.where}, {self.phase}: {self.what}"


def _make_signal_faults() -> list[Fault]:
    """Return SIGKILL and SIGSTOP of every rank and of the agent, in every phase, on one host."""
    rows = []
    for phase in PHASES:
        for rank in (0, 1):
            killed = Fault(
                f"rank {rank}: SIGKILL",
                phase,
                LOCAL,
                "killed",
                deeds.signal_rank(KILL),
                who=str(rank),
                rank=rank,
            )
            suspended = replace(
                killed,
                what=f"rank {rank}: SIGSTOP",
                code="stopped",
                action=deeds.signal_rank(STOP),
                bound_s=SUSPENDED_S,
            )
            rows += [killed, suspended]
        rows += [
            Fault(
                "agent: SIGKILL", phase, LOCAL, "agent_killed", deeds.signal_agent(KILL), SWEEP_S
            ),
            Fault(
                "agent: SIGSTOP", phase, LOCAL, "host_silent", deeds.signal_agent(STOP), SILENT_S
            ),
        ]
    return rows


PARENT_KILLED = {"exit": -KILL, "left_s": END_S}
AGENT_ALONE = {"exit": -KILL, "bound_s": 40.0, "left_s": 40.0}
HANGS = {"bound_s": HANG_S, "options": ("--hang-after", f"{HANG_AFTER_S:g}"), "stacks": True}
CAUSE_RANK_1 = {"rank": 1}

ON_ONE_HOST = [
    Fault("agent: SIGKILL", "preflight", LOCAL, None, deeds.signal_rank(KILL), who="agent", exit=2),
    Fault(
        "agent: SIGSTOP",
        "preflight",
        LOCAL,
        None,
        deeds.signal_rank(STOP),
        bound_s=100.0,
        who="agent",
        exit=2,
    ),
    Fault("Ctrl-C", "preflight", LOCAL, None, deeds.signal_command(INT), who="agent"),
    Fault(
        "parent: SIGKILL, the agent hangs",
        "preflight",
        LOCAL,
        None,
        deeds.signal_command(KILL),
        who="agent",
        **AGENT_ALONE,
    ),
    Fault("rank 1: SIGTERM", "pass", LOCAL, "killed", deeds.signal_rank(TERM), **CAUSE_RANK_1),
    Fault("rank 1: segmentation fault", "pass", LOCAL, "killed", act="segfault", **CAUSE_RANK_1),
    Fault(
        "rank 1: illegal instruction",
        "pass",
        LOCAL,
        "illegal_instruction",
        act="illegal",
        **CAUSE_RANK_1,
    ),
    Fault("rank 1: ends without a result", "pass", LOCAL, "killed", act="exit", **CAUSE_RANK_1),
    Fault(
        "rank 1: SIGKILL, its compiler runs",
        "compiler",
        LOCAL,
        "killed",
        deeds.signal_rank(KILL),
        **CAUSE_RANK_1,
    ),
    Fault(
        "agent: SIGKILL, compilers run",
        "compiler",
        LOCAL,
        "agent_killed",
        deeds.signal_agent(KILL),
        SWEEP_S,
    ),
    Fault("agent: SIGTERM", "pass", LOCAL, "agent_ended", deeds.signal_agent(TERM)),
    Fault("agent: out of memory", "pass", LOCAL, "out_of_memory", act="memory", who="agent"),
    Fault("rank 1 hangs", "join", LOCAL, "hang", **HANGS),
    Fault("rank 0 hangs", "pass", LOCAL, "hang", who="0", **HANGS),
    Fault("rank 1 hangs, and ignores SIGTERM", "pass", LOCAL, "hang", act="stubborn", **HANGS),
    Fault(
        "--time-limit",
        "pass",
        LOCAL,
        "time_limit",
        bound_s=LIMIT_S + END_S,
        options=("--time-limit", f"{LIMIT_S:g}"),
    ),
    Fault(
        "rank 1: out of host memory",
        "weights",
        LOCAL,
        "out_of_memory",
        act="memory",
        **CAUSE_RANK_1,
    ),
    Fault(
        "rank 1: out of device memory",
        "pass",
        LOCAL,
        "out_of_memory",
        act="device_memory",
        case="score",
        **CAUSE_RANK_1,
    ),
    Fault(
        "rank 1: the allocator refuses",
        "evaluation",
        LOCAL,
        "out_of_memory",
        act="allocate",
        **CAUSE_RANK_1,
    ),
    Fault("rank 1: NaN", "pass", LOCAL, "nan", act="nan", status="invalid"),
    Fault("rank 1: NaN, scoring", "pass", LOCAL, "nan", act="nan", case="score", status="invalid"),
    Fault("rank 1: wrong sums of all ranks", "join", LOCAL, "network", act="wrong_sum"),
    Fault("rank 1: disk full", "pass", LOCAL, "disk_full", act="full_disk", **CAUSE_RANK_1),
    Fault("disk of the records full", "checkpoint", LOCAL, "disk_full", act="go_on", disk="out"),
    *(
        Fault("Ctrl-C", phase, LOCAL, "interrupted", deeds.signal_command(INT))
        for phase in ("imports", "pass", "checkpoint")
    ),
    Fault(
        "Ctrl-C twice, a rank ignores SIGTERM",
        "pass",
        LOCAL,
        "interrupted",
        deeds.signal_command(INT, INT),
        act="stubborn",
    ),
    Fault("parent: SIGTERM", "pass", LOCAL, "interrupted", deeds.signal_command(TERM)),
    *(
        Fault(
            "parent: SIGKILL",
            phase,
            LOCAL,
            "unfinished",
            deeds.signal_command(KILL),
            **PARENT_KILLED,
        )
        for phase in ("imports", "join", "pass", "checkpoint")
    ),
    Fault(
        "parent: SIGKILL",
        "record",
        LOCAL,
        "unfinished",
        deeds.signal_command(KILL),
        who="parent",
        **PARENT_KILLED,
    ),
    Fault(
        "parent: stopped for long, goes on",
        "pass",
        LOCAL,
        "parent_silent",
        deeds.suspend_command,
        SILENT_S,
    ),
]

CUT_OFF = {"bound_s": SILENT_S, "left_s": CUT_OFF_S}

THROUGH_SSH = [
    Fault("rank 0: SIGKILL", "pass", SSH, "killed", deeds.signal_rank(KILL), who="0", rank=0),
    Fault("rank 1: SIGKILL", "pass", SSH, "killed", deeds.signal_rank(KILL), **CAUSE_RANK_1),
    Fault(
        "rank 1: SIGSTOP",
        "join",
        SSH,
        "stopped",
        deeds.signal_rank(STOP),
        SUSPENDED_S,
        **CAUSE_RANK_1,
    ),
    Fault(
        "rank 1: SIGSTOP",
        "checkpoint",
        SSH,
        "stopped",
        deeds.signal_rank(STOP),
        SUSPENDED_S,
        **CAUSE_RANK_1,
    ),
    Fault(
        "agent on node1: SIGKILL",
        "pass",
        SSH,
        "connection_lost",
        deeds.signal_agent(KILL),
        SWEEP_S,
        who="0",
    ),
    Fault(
        "agent on node2: SIGKILL", "join", SSH, "connection_lost", deeds.signal_agent(KILL), SWEEP_S
    ),
    Fault(
        "agent on node2: SIGKILL", "pass", SSH, "connection_lost", deeds.signal_agent(KILL), SWEEP_S
    ),
    Fault(
        "agent on node2: SIGKILL",
        "checkpoint",
        SSH,
        "connection_lost",
        deeds.signal_agent(KILL),
        SWEEP_S,
    ),
    Fault(
        "agent on node1: SIGSTOP",
        "pass",
        SSH,
        "host_silent",
        deeds.signal_agent(STOP),
        SILENT_S,
        who="0",
    ),
    Fault(
        "agent on node2: SIGSTOP", "pass", SSH, "host_silent", deeds.signal_agent(STOP), SILENT_S
    ),
    Fault(
        "agent on node2: SIGKILL",
        "preflight",
        SSH,
        None,
        deeds.signal_rank(KILL),
        who="agent",
        exit=2,
    ),
    Fault("network of node2 cut", "join", SSH, "host_silent", deeds.cut_link("node2"), **CUT_OFF),
    Fault("network of node1 cut", "pass", SSH, "host_silent", deeds.cut_link("node1"), **CUT_OFF),
    Fault("network of node2 cut", "pass", SSH, "host_silent", deeds.cut_link("node2"), **CUT_OFF),
    Fault(
        "network of the parent's host cut",
        "pass",
        SSH,
        "host_silent",
        deeds.cut_link("login"),
        **CUT_OFF,
    ),
    Fault(
        "sshd session on node1 killed",
        "join",
        SSH,
        "connection_lost",
        deeds.kill_sshd("node1"),
        SWEEP_S,
    ),
    Fault(
        "sshd session on node2 killed",
        "pass",
        SSH,
        "connection_lost",
        deeds.kill_sshd("node2"),
        SWEEP_S,
    ),
    Fault("ssh client killed", "pass", SSH, "connection_lost", deeds.kill_client("ssh"), SWEEP_S),
    Fault(
        "disk full on node2",
        "pass",
        SSH,
        "disk_full",
        act="go_on",
        case="score",
        disk="tmp",
        **CAUSE_RANK_1,
    ),
    Fault("rank 3 hangs", "pass", SSH4, "hang", who="3", **HANGS),
    Fault("rank 3: SIGKILL", "pass", SSH4, "killed", deeds.signal_rank(KILL), who="3", rank=3),
    Fault(
        "rank 1: out of device memory",
        "pass",
        SSH,
        "out_of_memory",
        act="device_memory",
        **CAUSE_RANK_1,
    ),
    Fault("rank 1: NaN", "pass", SSH, "nan", act="nan", status="invalid"),
    Fault("Ctrl-C", "pass", SSH, "interrupted", deeds.signal_command(INT)),
    Fault(
        "Ctrl-C twice, a rank ignores SIGTERM",
        "pass",
        SSH,
        "interrupted",
        deeds.signal_command(INT, INT),
        act="stubborn",
    ),
    Fault(
        "parent: SIGKILL", "join", SSH, "unfinished", deeds.signal_command(KILL), **PARENT_KILLED
    ),
    Fault(
        "parent: SIGKILL", "pass", SSH, "unfinished", deeds.signal_command(KILL), **PARENT_KILLED
    ),
    Fault(
        "parent: stopped for long, goes on",
        "pass",
        SSH,
        "parent_silent",
        deeds.suspend_command,
        SILENT_S,
    ),
]

THROUGH_SLURM = [
    Fault("rank 1: SIGKILL", "pass", SLURM, "killed", deeds.signal_rank(KILL), **CAUSE_RANK_1),
    Fault(
        "agent on node2: SIGKILL",
        "pass",
        SLURM,
        "connection_lost",
        deeds.signal_agent(KILL),
        SWEEP_S,
    ),
    Fault(
        "agent on node2: SIGSTOP", "pass", SLURM, "host_silent", deeds.signal_agent(STOP), SILENT_S
    ),
    Fault("scancel", "imports", SLURM, "cancelled", deeds.cancel_job, SWEEP_S),
    Fault("scancel", "pass", SLURM, "cancelled", deeds.cancel_job, SWEEP_S),
    Fault(
        "slurmd and its steps on node1 killed",
        "pass",
        SLURM,
        "host_silent",
        deeds.kill_slurmd("node1"),
        SILENT_S,
    ),
    Fault(
        "slurmd and its steps on node2 killed",
        "pass",
        SLURM,
        "host_silent",
        deeds.kill_slurmd("node2"),
        SILENT_S,
    ),
    Fault("network of node2 cut", "pass", SLURM, "host_silent", deeds.cut_link("node2"), **CUT_OFF),
    Fault("srun killed", "pass", SLURM, "connection_lost", deeds.kill_client("srun"), SWEEP_S),
    Fault("Ctrl-C", "pass", SLURM, "interrupted", deeds.signal_command(INT)),
    Fault(
        "parent: SIGKILL", "pass", SLURM, "unfinished", deeds.signal_command(KILL), **PARENT_KILLED
    ),
]

# Names of the faults that are run with all other tests: every kind once, spread over the phases.
QUICK = {
    "local 1x2, preflight: Ctrl-C",
    "local 1x2, imports: rank 0: SIGKILL",
    "local 1x2, join: rank 1: SIGSTOP",
    "local 1x2, data: agent: SIGKILL",
    "local 1x2, weights: rank 1: out of host memory",
    "local 1x2, compile: rank 0: SIGKILL",
    "local 1x2, warm-up: rank 1: SIGKILL",
    "local 1x2, pass: agent: SIGSTOP",
    "local 1x2, pass: rank 0 hangs",
    "local 1x2, pass: rank 1: NaN",
    "local 1x2, pass: Ctrl-C twice, a rank ignores SIGTERM",
    "local 1x2, evaluation: rank 1: SIGKILL",
    "local 1x2, checkpoint: disk of the records full",
    "local 1x2, checkpoint: parent: SIGKILL",
    "local 1x2, record: rank 1: SIGKILL",
    "ssh 2x1, pass: agent on node2: SIGKILL",
    "ssh 2x1, pass: network of node2 cut",
    "ssh 2x1, pass: sshd session on node2 killed",
    "ssh 2x1, pass: disk full on node2",
    "slurm 2x1, pass: scancel",
    "slurm 2x1, pass: parent: SIGKILL",
}

_ALL_FAULTS = (*_make_signal_faults(), *ON_ONE_HOST, *THROUGH_SSH, *THROUGH_SLURM)
FAULTS = [replace(one, quick=one.name in QUICK) for one in _ALL_FAULTS]
if unknown := QUICK - {one.name for one in FAULTS}:
    raise ValueError(f"no such faults: {sorted(unknown)}")
