"""The site file: facts of a cluster that belong to no case, such as its hosts and network. See
docs/clusters.md.

A site file starts programs (`python`, `prologue`) and sets variables on every host, so it is read
only where the user names it, or from the user's own configuration folder. run/checked_request.py
reads it before anything starts.
"""

import hashlib
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator

from steelyard import accelerators, files
from steelyard.errors import RequestError
from steelyard.run.messages import SILENCE_S
from steelyard.schema import FrozenModel, describe_first_problem

SITE_FILE = "site.toml"
MAX_BYTES = 256 << 10  # 4,096 hosts of 60 characters

TEMPORARY = "TMPDIR"  # the folder for temporary files, which belongs to no accelerator

# Host names that ssh, srun and the resolver accept; none can be read as an option.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:-]*$", max_length=255)]
Line = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


def allowed_variables() -> frozenset[str]:
    """Return the names of the environment variables that a site file may set: those of tune.env, of
    networks, and TMPDIR. None of them names a program, a library or a plug-in to load.
    """
    networks = accelerators.collect_names(lambda row: row.site_variables)
    return accelerators.list_tune_variables() | networks | {TEMPORARY}


class HostSettings(FrozenModel):
    """Settings of one host that differ from the site's, table `host.NAME` of a site file: `python`,
    the Python that has steelyard, and `prologue`, shell lines to run before the agent. None: the
    site's is used.
    """

    python: Line | None = Field(
        None, description="the Python that has steelyard; default: the site's"
    )
    prologue: Line | None = Field(
        None, description="shell lines to run before it, such as module load; default: the site's"
    )


class SlurmSettings(FrozenModel):
    """Options with which salloc is asked for an allocation, table `slurm` of a site file:
    `partition`, `account`, `time` (such as 01:30:00) and `gpus_per_node`, each left out if None,
    and `options`, further ones as texts that begin with `--`.
    """

    partition: Line | None = None
    account: Line | None = None
    time: Line | None = Field(None, description="value of salloc --time, such as 01:30:00")
    gpus_per_node: int | None = Field(None, ge=1, le=1024)
    options: list[Annotated[str, Field(pattern=r"^--[a-z][^\x00]*$")]] = Field(
        default_factory=list, description="further options of salloc, such as --exclusive"
    )


class Site(FrozenModel):
    """The content of a site file (facts of a cluster), created by `read_site`; without a file, all
    defaults. `hosts`, `launcher`, `devices` per host, `python`, `prologue` (shell lines before the
    agent) and network `interface` say how agents are started; None: not given. `silence_s` is the
    seconds without a message after which a host counts as lost, `environment` variables of agents
    and ranks, `slurm` options of salloc; `machine`, `network` and `note` are texts for the record.

    `host` holds settings of single hosts, which `choose_python` and `choose_prologue` prefer;
    `describe` returns what a record states, name and hash of the file included.
    """

    machine: Line | None = Field(
        None, description="text on the machine that its firmware does not report, shown on the page"
    )
    network: Line | None = Field(
        None, description="text on the network between hosts, shown on the page"
    )
    note: Line | None = None
    launcher: str | None = None
    hosts: list[HostName] = Field(default_factory=list, max_length=4096)
    devices: int | None = Field(
        None, ge=1, le=1024, description="devices per host, if --devices is not given"
    )
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@:-]{1,15}$")] | None = None
    python: Line | None = Field(
        None, description="the Python that has steelyard on the hosts; default: python3"
    )
    prologue: Line | None = None
    silence_s: float = Field(
        SILENCE_S,
        ge=2,
        le=3600,
        description="seconds without a message after which a host counts as lost",
    )
    environment: dict[str, Line | Literal[""]] = Field(
        default_factory=dict,
        description="variables of agents and ranks; only names in `allowed_variables`",
    )
    host: dict[HostName, HostSettings] = Field(default_factory=dict)
    slurm: SlurmSettings = SlurmSettings()
    # name and hash of the file, not keys in it
    _file: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("environment")
    @classmethod
    def _check_variable_names(cls, environment: dict[str, str]) -> dict[str, str]:
        """Return the environment of a site file unchanged; raise ValueError for the first variable
        that is not among `allowed_variables`, with the nearest allowed name if there is one.
        """
        allowed = allowed_variables() if environment else frozenset()
        for name in environment:
            if name not in allowed:
                near = get_close_matches(name, allowed, 1, 0.85)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{name[:100]!r} is not a variable that a site file may set; {hint}allowed:"
                    " those of tune.env and of networks (docs/clusters.md); export others in the"
                    " prologue"
                )
        return environment

    def describe(self) -> dict[str, str]:
        """Return what a record states of this site: `machine`, `network` and `note` as far as
        given, and `file` and `file_sha256`, name and hash of the site file; empty for a site
        without all of them.
        """
        stated = {"machine": self.machine, "network": self.network, "note": self.note}
        return {key: value for key, value in stated.items() if value is not None} | self._file

    def choose_python(self, host: str) -> str:
        """Return the Python that has steelyard on a host: the host's own setting, else the site's,
        else `python3`.
        """
        return self.host.get(host, HostSettings()).python or self.python or "python3"

    def choose_prologue(self, host: str) -> str | None:
        """Return the shell lines to run before the agent on a host: the host's own, else the
        site's, else None.
        """
        return self.host.get(host, HostSettings()).prologue or self.prologue


def find_site_file(named_path: Path | None) -> Path | None:
    """Return the path of the site file that the user named (`named_path`, not looked at), else that
    of site.toml in the user's configuration folder if it exists, else None.

    Raises RequestError if the configuration folder cannot be read, or if its file or folder belongs
    to another user (but root) or can be written by others.
    """
    if named_path is not None:
        return named_path
    path = _find_user_site_path()
    if path is None:
        return None
    try:
        statuses = {"its folder": path.parent.stat(), "it": path.stat()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RequestError(
            f"the site file {str(path)!r} cannot be read: {error.strerror}; name one with --site, "
            "or set XDG_CONFIG_HOME to a folder of yours"
        ) from error
    for subject, status in statuses.items():
        if status.st_uid not in (0, os.geteuid()):
            raise RequestError(
                f"the site file {str(path)!r}: {subject} belongs to user {status.st_uid}; "
                "remove it, or name it with --site if you trust it"
            )
        if status.st_mode & 0o022:
            writable_path = path if subject == "it" else path.parent
            raise RequestError(
                f"the site file {str(path)!r}: {subject} can be written by other users; run: chmod"
                f" go-w {str(writable_path)!r}"
            )
    return path


def _find_user_site_path() -> Path | None:
    """Return where the user's own site file would be, `steelyard/site.toml` in XDG_CONFIG_HOME or
    ~/.config, whether it exists or not; None if no home folder is known.

    A relative XDG_CONFIG_HOME is ignored, as its specification demands, and a relative HOME gives
    None: either would be a folder of the working directory.
    """
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    if not config.is_absolute():
        try:
            config = Path.home() / ".config"
        except RuntimeError:
            return None
    return config / "steelyard" / SITE_FILE if config.is_absolute() else None


def find_unused_site_file(used_path: Path | None) -> Path | None:
    """Return the relative path of a site.toml in the working directory that is not the one in use
    (`used_path`, None: none is), so that the user can be told that it has no effect; None if there
    is none or it cannot be read.
    """
    local_path = Path(SITE_FILE)
    try:
        return (
            local_path
            if local_path.is_file() and (used_path is None or not local_path.samefile(used_path))
            else None
        )
    except OSError:
        return None


def read_site(path: Path | None) -> Site:
    """Read and validate a site file (TOML), and remember its name and SHA-256 for the record;
    return a site of defaults for None. Raise RequestError with one line if the file cannot be read,
    is larger than `MAX_BYTES`, no TOML, or has a wrong key or value.
    """
    if path is None:
        return Site()
    try:
        raw = files.read_file(path, MAX_BYTES, unpack=False)
        site = Site.model_validate(files.parse_toml(raw))
    except ValidationError as error:
        unknown = error.errors()[0]["type"] == "extra_forbidden"
        allowed = f"; known keys: {', '.join(Site.model_fields)}" if unknown else ""
        raise RequestError(
            f"--site {str(path)!r}: {describe_first_problem(error)}{allowed}"
        ) from error
    except OSError as error:
        raise RequestError(
            f"--site {str(path)!r} cannot be read: {error.strerror}; check the path"
        ) from error
    except (ValueError, files.TooLargeError) as error:
        raise RequestError(
            f"--site {str(path)!r} is not a site file: {error}; see docs/clusters.md"
        ) from error
    site._file.update(file=path.name, file_sha256=hashlib.sha256(raw).hexdigest())
    return site
