"""A run as it was asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from steelyard.case import resolve
from steelyard.case.resolve import Resolved
from steelyard.case.sweep import Point
from steelyard.errors import RequestError
from steelyard.schema import Frozen, first_problem

DEFAULT_ENGINE = "torch"  # of a run that names none; others are compared with it
ENGINE = "engine."  # what a key of EngineSettings begins with


class EngineSettings(Frozen):
    """What `--set engine.KEY=VALUE` says: where an engine lives. It is a fact on a host, and no
    part of a case.
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


def engine_settings(settings: list[str]) -> tuple[EngineSettings, list[str]]:
    """What the settings of a command line say of the engine, and the others."""
    given: dict[str, str] = {}
    for setting in (one for one in settings if one.startswith(ENGINE)):
        key, sign, text = setting.partition("=")
        resolve.check_key(key, [f"{ENGINE}{name}" for name in EngineSettings.model_fields], "--set")
        if not sign:
            raise RequestError(
                f"--set {setting!r} is not of the form key=value, such as"
                " engine.python=venv/bin/python"
            )
        given[key.removeprefix(ENGINE)] = text
    try:
        return EngineSettings.model_validate(given), [
            one for one in settings if not one.startswith(ENGINE)
        ]
    except ValidationError as error:
        raise RequestError(f"--set {ENGINE}{first_problem(error)}") from error


def settings_by_engine(
    settings: list[str], names: list[str]
) -> tuple[dict[str, EngineSettings], list[str]]:
    """The same where several engines run: each setting names its engine, as in
    `engine.python=megatron:venv/bin/python`.
    """
    by_name: dict[str, list[str]] = {}
    for setting in (one for one in settings if one.startswith(ENGINE)):
        key, _, text = setting.partition("=")
        name, sign, value = text.partition(":")
        if not sign or name not in names:
            raise RequestError(
                f"--set {setting!r}: with --engine all a setting names its engine, such as"
                f" {key}=megatron:venv/bin/python; known: {', '.join(names)}"
            )
        by_name.setdefault(name, []).append(f"{key}={value}")
    found = {name: engine_settings(own)[0] for name, own in by_name.items()}
    return found, [one for one in settings if not one.startswith(ENGINE)]


@dataclass(frozen=True)
class Request:
    """What a command line says of one run."""

    resolved: Resolved
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
    rows: tuple[str, ...] | None = None  # ids, as data.selection spells them
    resume: Path | None = None
    weights: Path | None = None
    data: Path | None = None
    tokenizer: Path | None = None
    site: Path | None = None
    out: Path = Path("records")
    hang_s: float = 1800.0
    limit_s: float | None = None
    explain: bool = False  # profile a stretch after the passes
    trace: bool = False  # and keep its trace
    point: Point = ()  # of a sweep
    sign: Path | None = None  # the key that signs its record
