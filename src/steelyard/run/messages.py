"""The messages between the parent and a node agent, and the files that an agent shares with its
workers.

Messages are JSON lines over the agent's stdin and stdout, each with the run's token:

    parent → agent   open · reach · start · ping · stop · sweep
    agent → parent   hello · reached · started · pong · progress · telemetry · load · rank ·
                     border · calibration · exit · bye

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
from steelyard.run.engine_identity import EngineIdentity
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
# the file descriptor to which a worker writes its events, a pipe to its agent
EVENTS_VARIABLE = "STEELYARD_EVENTS_FD"


class WorkerProgress(FrozenModel):
    """How far rank 0 is: `done` of `total` steps in `phase`, which is the name of a pass or a part
    of the preparation; both numbers are 0 where nothing is counted. Rank 0 writes it as the
    progress file, and the agent sends it as the message `progress`.
    """

    phase: str
    done: int
    total: int


class WorkerEvent(FrozenModel):
    """What a worker tells its agent through the pipe of `EVENTS_VARIABLE`, as one line of JSON:
    that the pass `pass_name` begins or ends now, or that it is `ready` to import its engine, and
    which `batch` of matmuls its case has (a `BatchMatmuls`, which the agent passes on). The agent
    notes on its own clock when it came; a worker that is ready waits for a byte on its stdin.
    """

    event: Literal["ready", "begin", "end"]
    pass_name: str = ""
    batch: dict[str, Any] | None = None


class CalibrationSpec(FrozenModel):
    """What the processes that time matmuls beside the workers are told, in plain values, so that
    they load nothing of other packages: references `module:Class` of the `framework` and of its
    `device` class (None: it has none), the `matmul` precision, whether matmuls are to be
    `deterministic`, and whether the framework `forks`: a process that has imported it may fork
    before it uses a device. `is_shipped`: both classes are of this package.
    """

    framework: str
    device: str | None
    matmul: str
    deterministic: bool = False
    forks: bool = False

    @property
    def is_shipped(self) -> bool:
        """Whether framework and device class are of this package, and not of another one."""
        return all(is_shipped(name) for name in (self.framework, self.device) if name is not None)


CalibrationStage = Literal["before", "after"]


class CalibrationOrder(FrozenModel):
    """A line of JSON to a process that times matmuls: time those of the `stage` `before` the first
    pass, in the shapes of `batch` too, or `after` the last, where `rates` are the FLOP/s of the
    square matmul before, by local rank.
    """

    stage: CalibrationStage
    batch: dict[str, Any] | None = None
    rates: dict[int, float] = Field(default_factory=dict)


class CalibrationAnswer(FrozenModel):
    """A line of JSON from a process that times matmuls: the `rates` of the device of `local_rank`
    (a `CalibratedRates`, which the agent passes on), or in `problem` why there are none.
    """

    local_rank: int
    stage: CalibrationStage
    rates: dict[str, Any] = Field(default_factory=dict)
    problem: str | None = None


class Rendezvous(FrozenModel):
    """Where the ranks of a run meet to form their process group: a `file` if all are on one host,
    else rank 0's `address` and `port`; the others are None. Only rank 0 has `listen_fd`, the
    descriptor of an inherited socket that already listens there, on the interface of the site. Made
    by the node agent (run/ranks.py).
    """

    file: Path | None = None
    address: str | None = None
    port: int | None = None
    listen_fd: int | None = None


class HostSpec(FrozenModel):
    """What the node agent of a host adds to the spec file of its workers: `folder`, the absolute
    path into which they write rank files and progress; `origin_s`, the start of the run on this
    host's monotonic clock; and `rendezvous`, where ranks meet (None: there is one rank). It is the
    same for all workers of the host, so the rank is not in it.
    """

    folder: Path = Field(description="folder into which workers write their rank files; absolute")
    origin_s: float = Field(description="the start of the run on this host's monotonic clock")
    rendezvous: Rendezvous | None = Field(
        None, description="where ranks meet; None: there is one rank"
    )


class ProtocolMessage(FrozenModel):
    """The base of all messages between parent and node agent: `token` says of which run it is; each
    subclass has a `kind`, its name in the JSON line.
    """

    token: str


class OpenMessage(ProtocolMessage):
    """The parent's first message to an agent, answered by `hello`: what the run will need of the
    host. `accelerator` (None: detect one), number of `devices`, `matmul` precision, `needs`
    (modules that must be installed), `paths` (each a list of alternative names of which one must
    exist), network `interface` (None: that of the route to `peer`), `python` of the workers (None:
    the agent's own), and `engine_modules`, whose code is to be identified (None: not asked for).

    `environment` are the site's variables for agent and workers, `variables` the run's for its
    workers. The session sets `token`, `mark`, which marks every process of the run, and `peer`,
    another host of the run (None: there is one host). After `silence_s` seconds without a message
    the agent takes the parent for gone.
    """

    kind: Literal["open"] = "open"
    token: str = ""
    protocol: int = PROTOCOL
    mark: str = Field(
        "", description="value of the variable that marks every process of the run on this host"
    )
    accelerator: str | None
    devices: int
    matmul: str
    interface: str | None = Field(
        description="network interface between ranks; None: that of the route to `peer`"
    )
    peer: str | None = Field(
        None, description="name of another host of the run; None: there is one host"
    )
    environment: dict[str, str] = Field(
        description="variables of the site file, for the agent and its workers"
    )
    variables: dict[str, str] = Field(description="variables of the run, for its workers")
    needs: list[str] = Field(description="modules that must be installed")
    python: str | None = Field(
        None, description="the interpreter of the workers; None: the agent's own"
    )
    engine_modules: list[str] | None = Field(
        None, description="modules of the engine to identify; None: do not identify it"
    )
    paths: list[list[str]] = Field(
        description="files or folders that must exist, each under one of its alternative paths"
    )
    silence_s: float = SILENCE_S


class ReachMessage(ProtocolMessage):
    """Asks the agent to try a connection to this address, where rank 0 will be met; answered by
    `reached`.
    """

    kind: Literal["reach"] = "reach"
    address: str
    port: int


class StartMessage(ProtocolMessage):
    """Asks the agent to start the ranks of its host: `workers` processes of the module `worker`,
    from rank `first_rank` on, of `world` in the run, each with `run`, the parent's part of the
    spec, as it is. Answered by `started`. The session sets `token`, `first_rank`, `origin_s` (the
    start of the run on this host's clock), and `address` and `port`, where rank 0 is met (None on a
    single host).
    """

    kind: Literal["start"] = "start"
    token: str = ""
    run: dict[str, Any] = Field(
        description="part `run` of the workers' spec file; the agent passes it on unchanged"
    )
    first_rank: int = 0
    world: int
    workers: int = Field(
        1,
        description="processes per host: one per device, or one that drives all devices",
    )
    worker: Literal["steelyard.run.worker", "steelyard.run.ceilings_worker"] = Field(
        "steelyard.run.worker", description="the module of the workers; it reads `run`"
    )
    calibration: CalibrationSpec | None = Field(
        None, description="what times matmuls before and after the passes; None: nothing does"
    )
    origin_s: float = Field(0.0, description="the start of the run on this host's clock")
    address: str | None = None
    port: int | None = None


class PingMessage(ProtocolMessage):
    """The parent's heartbeat, sent at `sent_s` on its monotonic clock; answered by `pong`."""

    kind: Literal["ping"] = "ping"
    sent_s: float


class StopMessage(ProtocolMessage):
    """Asks the agent to end its workers and itself; with `stacks`, after each worker has written
    its stack traces. Answered by `bye`.
    """

    kind: Literal["stop"] = "stop"
    stacks: bool = False


class SweepMessage(ProtocolMessage):
    """Asks a new agent, as its first message, to end the processes and remove the folders that a
    lost agent left behind on this host, found by `mark`, after setting the variables of
    `environment` (the site's); answered by `bye`, whose `ended` counts the processes.
    """

    kind: Literal["sweep"] = "sweep"
    mark: str
    environment: dict[str, str]


class FoundDevice(FrozenModel):
    """A device of a host as its driver shows it, part of `hello`: `name`, `uuid`, total memory
    (`memory_bytes`) and free memory (`free_bytes`) in bytes; None is unknown. `busy` says as text
    which other run uses it, None if none does or this run does not need it.
    """

    name: str
    uuid: str | None
    memory_bytes: int | None
    free_bytes: int | None = None
    busy: str | None = None


class HelloMessage(ProtocolMessage):
    """The agent's answer to `open`, judged by the parent in run/preflight.py. What this host has:
    `accelerator`, all its `devices`, `most` (the highest number of ranks that they allow),
    `divisible` (ranks may share a device), `environment`, `providers` and `state` for the record,
    `version` and `package` (hash of the files) of steelyard in `folder`, `python`; `machine` is the
    same for two names of one machine.

    What it lacks: `lacking` modules, `missing` (indices of `paths` that do not exist), and in
    `problem` why it cannot take part, None if nothing is wrong. `address` and `port` are where its
    socket listens, on `interface`; None on a single host. `engine_identity` is
    that of the engine's code in the workers' Python, if `open` asked for it.
    """

    kind: Literal["hello"] = "hello"
    protocol: int
    host: str
    machine: str = Field(description="the same for two names of one machine")
    version: str
    package: str = Field(description="hash of this package's files")
    folder: str = Field(description="folder of the package")
    python: str = Field(description="path of the interpreter")
    accelerator: str
    divisible: bool = Field(description="several ranks may share a device")
    most: int = Field(description="highest number of ranks that the devices allow")
    devices: list[FoundDevice] = Field(
        description="all devices of the host, those that the run uses first"
    )
    environment: Environment
    providers: dict[str, str] = Field(
        default_factory=dict,
        description="the packages of the accelerator and its peak, if they are not Steelyard's own",
    )
    state: HostState | None = None
    lacking: list[str] = Field(description="modules of `needs` that are not installed")
    missing: list[int] = Field(description="indices of `paths` that do not exist")
    address: str | None
    interface: str | None
    port: int | None
    problem: str | None = Field(None, description="why this host cannot take part, in one line")
    engine_identity: EngineIdentity | None = Field(
        None, description="identity of the engine in the workers' Python; None: not asked for"
    )


class ReachedMessage(ProtocolMessage):
    """The agent's answer to `reach`: `problem` is None if the address was reached, else the error's
    text.
    """

    kind: Literal["reached"] = "reached"
    problem: str | None


class StartedMessage(ProtocolMessage):
    """Says that the workers of the host were started, with their process ids in the order of their
    ranks.
    """

    kind: Literal["started"] = "started"
    pids: list[int]


class PongMessage(ProtocolMessage):
    """The agent's answer to a ping: `sent_s` is that of the ping, on the parent's clock, `at_s` the
    agent's own monotonic clock, in seconds. From both the parent estimates how far apart the clocks
    are.
    """

    kind: Literal["pong"] = "pong"
    sent_s: float = Field(description="`sent_s` of the ping")
    at_s: float = Field(description="this host's clock")


class ProgressMessage(ProtocolMessage, WorkerProgress):
    """New progress of rank 0, which is on this agent's host: `done` of `total` steps in `phase`."""

    kind: Literal["progress"] = "progress"


class TelemetryMessage(ProtocolMessage):
    """New telemetry readings of one `device` since the last message, as equally long `columns` by
    name, with `t_s` in seconds since the start of the run on the agent's clock. A longer `period_s`
    (seconds between samples) than before says that the sampler slowed down, and that every second
    row so far is to be dropped. `severity` says for each slowdown reason what it means for a run.
    """

    kind: Literal["telemetry"] = "telemetry"
    device: str
    period_s: float
    severity: dict[str, str]
    columns: dict[str, list[Any]]


class LoadMessage(ProtocolMessage):
    """One reading of a host's CPU time, `t_s` seconds after the start of the run: `busy_s` of all
    processes on the allowed cores (None: unknown), `own_s` of the run's processes, `agent_s` of the
    agent alone, `group_s` of the control group with the quota (None: unknown, or no quota). They
    are running totals in CPU seconds since a start that the kernel chooses, so only differences
    between two readings mean something. `allowed` is the cores by affinity, `quota` by the control
    group (None: no limit).
    """

    kind: Literal["load"] = "load"
    allowed: int = Field(description="cores that the affinity mask allows")
    quota: float | None = Field(description="cores that the control group allows; None: no limit")
    t_s: float = Field(description="seconds since the start of the run")
    busy_s: float | None = Field(description="busy time of the allowed cores, by any process")
    own_s: float = Field(description="CPU time of the run's processes on this host")
    agent_s: float = Field(description="CPU time of the agent, a part of `own_s`")
    group_s: float | None = Field(description="CPU time of the control group with the quota")


class BorderMessage(ProtocolMessage):
    """Says that `rank` reported the begin or end (`event`) of the pass `pass_name`, and that the
    agent saw it at `t_s`, seconds since the start of the run on the agent's own clock, at most
    `within_s` seconds after it was reported.
    """

    kind: Literal["border"] = "border"
    rank: int
    event: Literal["begin", "end"]
    pass_name: str
    t_s: float
    within_s: float


class CalibrationMessage(ProtocolMessage):
    """The matmul `rates` of the device of `rank` (a `CalibratedRates`), timed in a process of its
    own at this `stage`, or in `problem` why there are none; `is_shipped` says whether that process
    loaded only this package's classes, `time_s` how long all devices of this host took.
    """

    kind: Literal["calibration"] = "calibration"
    rank: int
    stage: CalibrationStage
    rates: dict[str, Any]
    problem: str | None
    is_shipped: bool
    time_s: float


class RankFileMessage(ProtocolMessage):
    """The `text` of the rank file of `rank` as it is now, finished or not, with its SHA-256; or in
    `problem` why it cannot be read, with an empty text. `problem` is None if it was read.
    """

    kind: Literal["rank"] = "rank"
    rank: int
    sha256: str
    text: str
    problem: str | None = None


class WorkerEnded(ProtocolMessage):
    """Says that the worker of `rank` exited (`code`, negative for a signal), or that a signal such
    as SIGSTOP has suspended it for several seconds (`suspended`; `code` is then None), at `time_s`
    seconds since the start of the run. `oom_kills` is how many processes of its control group the
    kernel killed because memory ran out since the run began (None: unknown).
    """

    kind: Literal["exit"] = "exit"
    rank: int
    code: int | None
    time_s: float = Field(description="seconds since the start of the run")
    suspended: bool = False
    oom_kills: int | None = Field(
        None,
        description="processes of its control group that the kernel killed because memory ran out",
    )


class ByeMessage(ProtocolMessage):
    """The agent's last message: by rank the exit codes (`exits`; None: still running), the ends of
    the workers' output (`stderr_tails`) and, if asked for, their `stacks`; `ended`, how many
    processes had to be ended; and `failure`, why the agent ended by itself (None: its workers
    ended, or the parent stopped it). Also the answer to `sweep`, where only `ended` is filled.
    """

    kind: Literal["bye"] = "bye"
    exits: dict[int, int | None]
    stderr_tails: dict[int, str]
    stacks: dict[int, str] = Field(default_factory=dict)
    ended: int = Field(0, description="number of processes that had to be ended")
    failure: Failure | None = Field(
        None,
        description="why the agent ended by itself; None: workers ended, or the parent stopped it",
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
        BorderMessage,
        CalibrationMessage,
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
    | BorderMessage
    | CalibrationMessage
    | RankFileMessage
    | WorkerEnded
    | ByeMessage
] = TypeAdapter(ToParent)


class MessageError(Exception):
    """Raised for a line that is no message of this run: too long, no JSON, without the token, or of
    a kind that is not expected now.
    """


class UnknownMessageError(MessageError):
    """A message with this run's token that does not validate, because another version of steelyard
    wrote it.
    """


def is_shipped(reference: str) -> bool:
    """Return whether a reference `module:name` is to a module of this package."""
    return reference.startswith(f"{__name__.partition('.')[0]}.")


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
    """Return the message as one line of JSON in UTF-8, with a line feed at its end."""
    return message.model_dump_json(by_alias=True).encode() + b"\n"


def make_rank_file_message(
    token: str, rank: int, text: str, problem: str | None = None
) -> RankFileMessage:
    """Return the message that carries the text of a rank file with the SHA-256 of its UTF-8 bytes,
    or the `problem` why it cannot be read (`text` is then empty).
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
    """Parse a JSON line and return its message, of the types that `adapter` (TO_AGENT or TO_PARENT)
    allows.

    Raises MessageError if the line is longer than `MAX_LINE_BYTES`, no JSON, or has no token or
    another than `token` (None accepts any: the first message brings it), and UnknownMessageError if
    the message does not validate, as one of another version.
    """
    if len(line) > MAX_LINE_BYTES:
        raise MessageError(f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from error
    line_token = fields.get("token") if isinstance(fields, dict) else None
    if not isinstance(line_token, str) or (
        token is not None and not hmac.compare_digest(line_token, token)
    ):
        raise MessageError("not a message of this run: the token is wrong or missing")
    try:
        return adapter.validate_python(fields)
    except ValidationError as error:
        raise UnknownMessageError(
            f"steelyard {__version__} does not understand a message:"
            f" {describe_first_problem(error)}"
        ) from error
