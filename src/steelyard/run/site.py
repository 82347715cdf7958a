"""The site: what is true of a cluster and never of a case. A small TOML file, see docs/clusters.md."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from steelyard import files
from steelyard.errors import RequestError
from steelyard.run.messages import SILENCE_S
from steelyard.schema import Frozen, first_problem

NAME = "site.toml"
MAX_BYTES = 1 << 20

# What ssh, srun and the resolver take as a host; above all, never an option.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:-]*$", max_length=255)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class HostSettings(Frozen):
    """What is different on one host."""

    python: Line | None = Field(None, description="the Python that has steelyard; default: the site's")
    prologue: Line | None = Field(None, description="shell lines before it, such as module load; default: the site's")


class SlurmSettings(Frozen):
    """What an allocation is asked for with."""

    partition: Line | None = None
    account: Line | None = None
    time: Line | None = Field(None, description="as salloc --time takes it, such as 01:30:00")
    gpus_per_node: int | None = Field(None, ge=1, le=1024)
    options: list[Annotated[str, Field(pattern=r"^--[a-z][^\x00]*$")]] = Field(
        default_factory=list, description="more of salloc's options, such as --exclusive"
    )


class Site(Frozen):
    machine: Line | None = Field(None, description="what the firmware does not tell, for the page")
    network: Line | None = Field(None, description="between hosts, for the page")
    note: Line | None = None
    launcher: str | None = None
    hosts: list[HostName] = Field(default_factory=list, max_length=4096)
    devices: int | None = Field(None, ge=1, le=1024, description="of a host, where --devices does not say")
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:-]{1,15}$")] | None = None
    python: Line | None = Field(None, description="the Python that has steelyard on the hosts; default: python3")
    prologue: Line | None = None
    silence_s: float = Field(SILENCE_S, ge=2, le=3600, description="a host that is not heard of for so long is lost")
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Line | Literal[""]] = Field(
        default_factory=dict
    )
    host: dict[HostName, HostSettings] = Field(default_factory=dict)
    slurm: SlurmSettings = SlurmSettings()

    def about(self) -> dict[str, str]:
        """What a record keeps of it."""
        told = {"machine": self.machine, "network": self.network, "note": self.note}
        return {key: value for key, value in told.items() if value is not None}

    def python_on(self, host: str) -> str:
        own = self.host.get(host, HostSettings())
        return own.python or self.python or "python3"

    def prologue_on(self, host: str) -> str | None:
        own = self.host.get(host, HostSettings())
        return own.prologue or self.prologue


def find(named: Path | None) -> Path | None:
    """The file that was named, else one in the working directory, else the user's own."""
    if named is not None:
        return named
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return next((path for path in (Path(NAME), config / "steelyard" / NAME) if path.is_file()), None)


def read(path: Path | None) -> Site:
    """The site of a file; an empty one without."""
    if path is None:
        return Site()
    try:
        return Site.model_validate(tomllib.loads(files.read(path, MAX_BYTES).decode("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, files.TooLargeError) as error:
        raise RequestError(f"--site {str(path)!r} cannot be read: {error}") from error
    except ValidationError as error:
        allowed = ", ".join(Site.model_fields)
        raise RequestError(f"--site {str(path)!r}: {first_problem(error)}; known keys: {allowed}") from error
