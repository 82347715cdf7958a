"""A run as it was requested: a resolved case with engine, devices, paths and limits.

`cli/requests.py` and `run/rerun.py` make a `Request`; `run/checked_request.py` checks it before
anything is started.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from steelyard.case import resolve
from steelyard.case.resolve import ResolvedCase
from steelyard.case.sweep import SweepPoint
from steelyard.errors import RequestError
from steelyard.schema import FrozenModel, describe_first_problem

DEFAULT_ENGINE = "torch"  # if a run names none; other engines are compared with it
ENGINE_PREFIX = "engine."  # prefix of the keys of EngineSettings


class EngineSettings(FrozenModel):
    """The values of `--set engine.KEY=VALUE`, from `split_engine_settings`: `python`, the
    interpreter of the engine's workers or of the server that it starts, and `checkout`, the folder
    of the program that the engine starts; None where none was given. They are facts about a host,
    and no part of a case.

    The others are for engines that send requests to a server: `endpoint`, its address; `model`, the
    name it knows the model by (None: the first that it lists); `api` and `prompts`, how it is
    asked; `key_variable`, the environment variable that holds its key (its value is in no record);
    `device` and `devices`, what the user says it runs on, and how many of it; `logprobs`, whether
    answers are checked by what it reports; `timeout_s`, for how long it may be silent; `arguments`,
    more of the command line of a server that is started here.
    """

    python: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")] | None = (
        Field(
            None,
            description=(
                "the Python that workers run in, where the engine is installed in another virtual"
                " environment"
            ),
        )
    )
    checkout: Path | None = Field(
        None, description="the folder of the program that the engine starts"
    )
    endpoint: Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s@]+$")] | None = Field(
        None, description="address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"
    )
    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="name of the model at the server; default: the first that it lists"
    )
    api: Literal["completions", "chat"] = Field(
        "completions", description="which of a server's interfaces is used"
    )
    prompts: Literal["auto", "ids", "text"] = Field(
        "auto", description="send prompts as token ids or as text; auto: as the server takes them"
    )
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = Field(
        None, description="name of the environment variable that holds the server's key"
    )
    device: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="what a server that was not started here runs on, in your words"
    )
    devices: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        1, description="how many devices a server that was not started here runs on"
    )
    logprobs: bool = Field(
        False, description="check answers by the log-probabilities that the server reports"
    )
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = Field(
        300.0, description="seconds of silence after which a request has failed"
    )
    arguments: Annotated[str, Field(max_length=4096)] = Field(
        "", description="more arguments of a server that is started here"
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        """Return the address. Raise ValueError if it has no host, or a port that cannot be one."""
        if endpoint is not None and not _is_address(endpoint):
            raise ValueError(
                f"{endpoint!r} is no address with a host and a port from 1 to 65535, such as"
                " http://127.0.0.1:8000/v1"
            )
        return endpoint


def _is_address(address: str) -> bool:
    """Return whether an address has a host, and no port or one that can be connected to."""
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, or a bracket that is not closed
        return False


def split_engine_settings(settings: list[str]) -> tuple[EngineSettings, list[str]]:
    """Split the values of `--set` into the engine's settings (`engine.KEY=VALUE`) and the other
    texts, unchanged and in order. Of a repeated key the last value counts.

    Raise RequestError for an unknown `engine.` key, one without `=`, or a value that is not
    allowed.
    """
    values: dict[str, str] = {}
    for setting in (
        text_setting for text_setting in settings if text_setting.startswith(ENGINE_PREFIX)
    ):
        key, sign, text = setting.partition("=")
        resolve.check_option_key(
            key, [f"{ENGINE_PREFIX}{name}" for name in EngineSettings.model_fields], "--set"
        )
        if not sign:
            raise RequestError(
                f"--set {setting!r} is not of the form key=value, such as"
                " engine.python=venv/bin/python"
            )
        values[key.removeprefix(ENGINE_PREFIX)] = text
    try:
        return EngineSettings.model_validate(values), [
            text_setting for text_setting in settings if not text_setting.startswith(ENGINE_PREFIX)
        ]
    except ValidationError as error:
        raise RequestError(f"--set {ENGINE_PREFIX}{describe_first_problem(error)}") from error


def split_settings_by_engine(
    settings: list[str], engine_names: list[str]
) -> tuple[dict[str, EngineSettings], list[str]]:
    """Split the values of `--set` for `--engine all` into the settings of each engine, by its name,
    and the other texts, unchanged and in order. Engines without settings are not in the dict.

    Each engine setting names its engine, as in `engine.python=megatron:venv/bin/python`. Raise
    RequestError if one does not, names an engine that is not in `engine_names`, or has an unknown
    key or a value that is not allowed.
    """
    texts_by_engine: dict[str, list[str]] = {}
    for setting in (
        text_setting for text_setting in settings if text_setting.startswith(ENGINE_PREFIX)
    ):
        key, _, text = setting.partition("=")
        name, sign, value = text.partition(":")
        if not sign or name not in engine_names:
            raise RequestError(
                f"--set {setting!r}: with --engine all a setting names its engine, such as"
                f" {key}=megatron:venv/bin/python; known: {', '.join(engine_names)}"
            )
        texts_by_engine.setdefault(name, []).append(f"{key}={value}")
    parsed = {name: split_engine_settings(texts)[0] for name, texts in texts_by_engine.items()}
    return parsed, [
        text_setting for text_setting in settings if not text_setting.startswith(ENGINE_PREFIX)
    ]


@dataclass(frozen=True)
class Request:
    """One run as a command line requests it: `resolved` case, `engine` and its settings, `nodes`
    (hosts), `devices` per host, and what follows. Nothing is checked here beyond the case.

    None means the default: `passes` those of the task; `sample`, `steps`, `subjects` and `rows`
    (ids) all; `weights` random; `data` generated (size smoke); `tokenizer` beside weights or data;
    `accelerator` the one found; `launcher` that of the `site` file, else local; `resume` (a record
    or a folder of checkpoints) from the beginning. `out` is the folder of records. A run ends when
    workers show no progress for `hang_s` seconds, or after `limit_s` (None: no limit). `explain`
    profiles some steps after the passes, `trace` also stores their trace; `point` is that of a
    sweep, () without one; `signing_key` the SSH key to sign the record with (None: unsigned);
    `identify` identifies the engine's code also if no result of `conform` is known for it.
    `salt` and `rehearsed_rows` are for `conform` alone: prompts of another run, and ids that the
    worker computes before (None: none).
    """

    resolved: ResolvedCase
    engine: str = DEFAULT_ENGINE
    engine_settings: EngineSettings = field(default_factory=EngineSettings)
    accelerator: str | None = None
    launcher: str | None = None
    nodes: int = 1
    devices: int = 1
    passes: tuple[str, ...] | None = None
    sample: int | None = None
    steps: int | None = None
    subjects: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None  # ids of items, as data/selection.py spells them
    resume: Path | None = None
    weights: Path | None = None
    data: Path | None = None
    tokenizer: Path | None = None
    site: Path | None = None
    out: Path = Path("records")
    hang_s: float = 1800.0
    limit_s: float | None = None
    explain: bool = False  # profile some steps after the passes
    trace: bool = False  # also store the trace of the profiled steps
    point: SweepPoint = ()  # the point of a sweep; empty without one
    signing_key: Path | None = None  # SSH key to sign the record with
    identify: bool = False  # identify the engine's code even if it was never tested
    salt: str | None = None  # generation: instead of one drawn for the run, for `conform`
    # of `conform`: rows over which another engine object runs the passes first, in reverse order
    rehearsed_rows: tuple[str, ...] | None = None
