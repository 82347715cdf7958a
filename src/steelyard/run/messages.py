"""The messages between the parent and a node agent, and the files that an agent shares with its
workers.

Messages are JSON lines over the agent's stdin and stdout, each with the run's token:

    parent → agent   open · reach · start · ping · stop · sweep
    agent → parent   hello · reached · started · pong · progress · telemetry · load · rank ·
                     exit · bye

`open` comes first and brings the token; a line without it is no message. A heartbeat goes both
ways: the parent pings every second and the agent answers, which also tells how far apart their
clocks are. Whoever hears nothing for `silence_s` seconds takes the other side for gone.
"""

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Field, TypeAdapter, ValidationError

from steelyard import __version__
from steelyard.record.run_facts import Environment, HostState
from steelyard.run.failure import Failure
from steelyard.schema import FrozenModel, describe_first_problem

PROTOCOL = 2
HEARTBEAT_S = 1.0
SILENCE_S = 20.0
MAX_LINE_BYTES = 256 << 20
# Files in the folder that an agent shares with its workers, and the most that is read of them:
# 100,000 steps of a rank take 40 MB.
SPEC_FILE, PROGRESS_FILE, STORE_FILE = "spec.json", "progress.json", "store"
MAX_RANK_FILE_BYTES, MAX_PROGRESS_BYTES = 100 << 20, 64 << 10
MARK_VARIABLE = "STEELYARD_RUN"  # set for all processes of a run, which are found by it


class WorkerProgress(FrozenModel):
    """How far rank 0 is: `done` of `total` steps in a phase, both 0 where nothing is counted. Also
    the content of the progress file.
    """

    phase: str
    done: int
    total: int


class Rendezvous(FrozenModel):
    """Where ranks meet: a `file` on one host, an `address` with `port` on several. Rank 0 serves
    the socket `listen_fd`, which is already bound to the interface of the site.
    """

    file: Path | None = None
    address: str | None = None
    port: int | None = None
    listen_fd: int | None = None


class HostSpec(FrozenModel):
    """What the node agent of a host adds to the spec of its workers."""

    folder: Path = Field(description="where workers leave their rank files; absolute")
    origin_s: float = Field(description="the start of the run on this host's monotonic clock")
    rendezvous: Rendezvous | None = Field(None, description="None: the only rank")


class ProtocolMessage(FrozenModel):
    """A message of the protocol: `kind` says which, `token` of which run."""

    token: str


class OpenMessage(ProtocolMessage):
    """The first message: what the run will need of this host, which the agent checks and answers
    with `hello`. The session sets `token`, `mark` and `peer`.
    """

    kind: Literal["open"] = "open"
    token: str = ""
    protocol: int = PROTOCOL
    mark: str = Field("", description="of all that is started on this host")
    accelerator: str | None
    devices: int
    matmul: str
    interface: str | None = Field(
        description="for what ranks send each other; None: that of the route to `peer`"
    )
    peer: str | None = Field(
        None, description="another host of the run; None where this is the only one"
    )
    environment: dict[str, str] = Field(description="of the site, for the agent and its workers")
    variables: dict[str, str] = Field(description="of the run, for its workers")
    needs: list[str] = Field(description="modules that must be installed")
    python: str | None = Field(
        None, description="the interpreter of the workers; None: the agent's own"
    )
    paths: list[list[str]] = Field(description="what must be there, each under one of its names")
    silence_s: float = SILENCE_S


class ReachMessage(ProtocolMessage):
    """Asks the agent to try a connection to this address, where rank 0 will be met; answered by
    `reached`.
    """

    kind: Literal["reach"] = "reach"
    address: str
    port: int


class StartMessage(ProtocolMessage):
    """Asks the agent to start the ranks of its host. The session sets all but `run`, `worker`,
    `world` and `workers`.
    """

    kind: Literal["start"] = "start"
    token: str = ""
    run: dict[str, Any] = Field(
        description="of a worker's spec; the agent passes it on as it is, and the workers read it"
    )
    first_rank: int = 0
    world: int
    workers: int = Field(
        1, description="of each host: one a device, or one for a program that drives them all"
    )
    worker: Literal["steelyard.run.worker", "steelyard.run.ceilings_worker"] = Field(
        "steelyard.run.worker", description="the module of the workers; it reads `run`"
    )
    origin_s: float = Field(0.0, description="the start of the run on this host's clock")
    address: str | None = None
    port: int | None = None


class PingMessage(ProtocolMessage):
    """The parent's heartbeat, sent at `sent_s` on its monotonic clock; answered by `pong`."""

    kind: Literal["ping"] = "ping"
    sent_s: float


class StopMessage(ProtocolMessage):
    """Asks the agent to end its workers; with `stacks`, after each has written where it is."""

    kind: Literal["stop"] = "stop"
    stacks: bool = False


class SweepMessage(ProtocolMessage):
    """Asks a new agent to end the processes and remove the folder that an agent that died left
    behind, found by `mark`.
    """

    kind: Literal["sweep"] = "sweep"
    mark: str
    environment: dict[str, str]


class FoundDevice(FrozenModel):
    """A device as its driver shows it; `busy` says which other run uses it, None if none does."""

    name: str
    uuid: str | None
    memory_bytes: int | None
    free_bytes: int | None = None
    busy: str | None = None


class HelloMessage(ProtocolMessage):
    """The agent's answer to `open`: what this host has, or in `problem` why it cannot take part."""

    kind: Literal["hello"] = "hello"
    protocol: int
    host: str
    machine: str = Field(description="the same for two names of one machine")
    version: str
    package: str = Field(description="hash of this package's files")
    folder: str = Field(description="where the package lies")
    python: str = Field(description="the interpreter")
    accelerator: str
    divisible: bool = Field(description="several ranks may share a device")
    most: int = Field(description="ranks that the devices can serve")
    devices: list[FoundDevice] = Field(description="all that were found, those in use first")
    environment: Environment
    state: HostState | None = None
    lacking: list[str] = Field(description="of the modules that are needed")
    missing: list[int] = Field(description="which of the paths are not there")
    address: str | None
    interface: str | None
    port: int | None
    problem: str | None = Field(None, description="why this host cannot take part, in one line")


class ReachedMessage(ProtocolMessage):
    """The agent's answer to `reach`: None, or why the address cannot be reached."""

    kind: Literal["reached"] = "reached"
    problem: str | None


class StartedMessage(ProtocolMessage):
    """Says that the ranks of the host were started, with their process ids."""

    kind: Literal["started"] = "started"
    pids: list[int]


class PongMessage(ProtocolMessage):
    """The agent's answer to a ping, with its own monotonic clock."""

    kind: Literal["pong"] = "pong"
    sent_s: float = Field(description="as the ping said")
    at_s: float = Field(description="this host's clock")


class ProgressMessage(ProtocolMessage, WorkerProgress):
    """New progress of rank 0, which is on this host."""

    kind: Literal["progress"] = "progress"


class TelemetryMessage(ProtocolMessage):
    """New telemetry readings of one device, as columns. A longer period than before says that the
    sampler slowed down, and that every second row so far is to be dropped.
    """

    kind: Literal["telemetry"] = "telemetry"
    device: str
    period_s: float
    severity: dict[str, str]
    columns: dict[str, list[Any]]


class LoadMessage(ProtocolMessage):
    """One reading of a host's CPU time, in seconds since a start that the kernel chooses."""

    kind: Literal["load"] = "load"
    allowed: int = Field(description="cores, by affinity")
    quota: float | None = Field(description="cores that the control group allows; None: no limit")
    t_s: float = Field(description="since the start of the run")
    busy_s: float | None = Field(description="of the allowed cores, by whomever")
    own_s: float = Field(description="of the run's processes on this host")
    agent_s: float = Field(description="of these, the agent's")
    group_s: float | None = Field(description="of the control group with the quota")


class RankFileMessage(ProtocolMessage):
    """The text of a rank file, finished or not, with its SHA-256; or in `problem` why it cannot be
    read.
    """

    kind: Literal["rank"] = "rank"
    rank: int
    sha256: str
    text: str
    problem: str | None = None


class WorkerEnded(ProtocolMessage):
    """Says that a worker exited, or that a signal such as SIGSTOP has suspended it for several
    seconds.
    """

    kind: Literal["exit"] = "exit"
    rank: int
    code: int | None
    time_s: float = Field(description="since the start of the run")
    suspended: bool = False
    oom_kills: int | None = Field(
        None, description="processes of its control group that the kernel ended for lack of memory"
    )


class ByeMessage(ProtocolMessage):
    """The agent's last message: exit codes, stderr tails and stacks by rank."""

    kind: Literal["bye"] = "bye"
    exits: dict[int, int | None]
    stderr_tails: dict[int, str]
    stacks: dict[int, str] = Field(default_factory=dict)
    ended: int = Field(0, description="processes that had to be ended")
    failure: Failure | None = Field(
        None,
        description="why the agent ended by itself; None: all workers ended, or the parent said so",
    )


ToAgent = Annotated[
    Union[  # noqa: UP007
        OpenMessage, ReachMessage, StartMessage, PingMessage, StopMessage, SweepMessage
    ],
    Field(discriminator="kind"),
]
ToParent = Annotated[
    Union[  # noqa: UP007
        HelloMessage,
        ReachedMessage,
        StartedMessage,
        PongMessage,
        ProgressMessage,
        TelemetryMessage,
        LoadMessage,
        RankFileMessage,
        WorkerEnded,
        ByeMessage,
    ],
    Field(discriminator="kind"),
]
TO_AGENT: TypeAdapter[
    OpenMessage | ReachMessage | StartMessage | PingMessage | StopMessage | SweepMessage
] = TypeAdapter(ToAgent)
TO_PARENT: TypeAdapter[
    HelloMessage
    | ReachedMessage
    | StartedMessage
    | PongMessage
    | ProgressMessage
    | TelemetryMessage
    | LoadMessage
    | RankFileMessage
    | WorkerEnded
    | ByeMessage
] = TypeAdapter(ToParent)


class MessageError(Exception):
    """A line that is no message of this run."""


class UnknownMessageError(MessageError):
    """A message with this run's token that does not validate, because another version of steelyard
    wrote it.
    """


def format_rank_file_name(rank: int) -> str:
    """Return the file name of a rank's rank file."""
    return f"rank-{rank}.json"


def format_stack_file_name(rank: int) -> str:
    """Return the file name of a rank's stack traces."""
    return f"stack-{rank}.txt"


def make_token() -> str:
    """Return a new random token for a run, 32 hex digits."""
    return secrets.token_hex(16)


def encode_message(message: ProtocolMessage) -> bytes:
    """Return the message as one line of JSON."""
    return message.model_dump_json(by_alias=True).encode() + b"\n"


def make_rank_file_message(
    token: str, rank: int, text: str, problem: str | None = None
) -> RankFileMessage:
    """Return the message that carries the text of a rank file with its SHA-256, or the `problem`
    why it cannot be read.
    """
    return RankFileMessage(
        token=token,
        rank=rank,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        text=text,
        problem=problem,
    )


def is_intact(message: RankFileMessage) -> bool:
    """Return whether the text of a rank file arrived as it was sent, by its SHA-256."""
    return hashlib.sha256(message.text.encode()).hexdigest() == message.sha256


def decode_message(line: bytes, adapter: TypeAdapter[Any], token: str | None) -> Any:
    """Parse a line and return its message, of the types that `adapter` allows.

    Raises MessageError if the line is too long, no JSON, or has no token or another than `token`
    (None accepts any: the first message brings it), and UnknownMessageError if the message does not
    validate.
    """
    if len(line) > MAX_LINE_BYTES:
        raise MessageError(f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON: {error}") from error
    line_token = fields.get("token") if isinstance(fields, dict) else None
    if not isinstance(line_token, str) or (
        token is not None and not hmac.compare_digest(line_token, token)
    ):
        raise MessageError("no message of this run: another token, or none")
    try:
        return adapter.validate_python(fields)
    except ValidationError as error:
        raise UnknownMessageError(
            f"steelyard {__version__} does not understand a message: {describe_first_problem(error)}"
        ) from error
