"""A host as its agent sees it: devices, files, network, the environment that workers get, and
settings that can change results.

Settings are read from /proc, /sys and the driver; nothing is set.
"""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

import psutil

from steelyard import __version__, accelerators
from steelyard.accelerators.row import Accelerator, Found, Source
from steelyard.errors import RequestError
from steelyard.record.facts import DeviceState, Environment, HostState, Software
from steelyard.run import environment, load, processes
from steelyard.run.environment import Interpreter
from steelyard.run.messages import PROTOCOL, FoundDevice, Hello, Open
from steelyard.run.processes import AGENT_CLAIM

LOOPBACK = "lo"
# What workers do not inherit: what launchers tell the ranks that they start. Ours are told by their
# agent; a stranger's words would have them wait for a world that is not there.
SCRUBBED = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "RANK_TABLE_FILE"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS"),
    )
)
SCRUBBED_BEGIN = (
    "TORCHELASTIC_",
    "SLURM_",
    "SLURMD_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PADDLE_",
    "ACCELERATE_",
)
FAMILIES = (socket.AF_INET, socket.AF_INET6)

ROOT = Path("/")
CPUS, NODES = "sys/devices/system/cpu", "sys/devices/system/node"
CLOCK_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"
KIB = 1024


class Host:
    """What `open` asked of this host."""

    def __init__(self, asked: Open) -> None:
        self.asked = asked
        os.environ.update(asked.environment)
        self.claims: list[socket.socket] = []
        # how this agent is found, should it stop
        processes.claim(AGENT_CLAIM.format(asked.mark), self.claims)
        self.accelerator: Accelerator | None = None
        self.found: list[Found] = []
        self.interface: str | None = None
        self.listening: socket.socket | None = None
        self.problem: str | None = None
        self.caches: dict[str, str] = {}
        self.python = sys.executable if asked.python is None else asked.python
        # of the workers, where it is another than this one
        self.interpreter: Interpreter | None = None
        self.lacking: list[str] = []
        try:
            processes.check_working_directory()
            self.caches = environment.cache_variables(os.environ)
            self.accelerator = (
                accelerators.named(asked.accelerator)
                if asked.accelerator
                else accelerators.detect()
            )
            self.found = self.accelerator.find()
            self.interface = _interface(asked)
            self.listening = None if asked.peer is None else _listen(self.interface)
            if asked.python is None:
                self.lacking = environment.lacking_modules(asked.needs)
            else:
                self.interpreter = environment.look_at_interpreter(
                    asked.python, asked.needs, self.variables()
                )
        except RequestError as error:
            self.problem = str(error)

    @property
    def used(self) -> list[Found]:
        return self.found[: self.asked.devices]

    def sources(self) -> list[Source]:
        return [] if self.accelerator is None else self.accelerator.sources(self.used)

    @property
    def severity(self) -> dict[str, str]:
        return {} if self.accelerator is None else dict(self.accelerator.severity)

    def variables(self) -> dict[str, str]:
        """The environment of workers: inherited, then what the accelerator needs, the network,
        caches, and what the run says."""
        inherited = {name: value for name, value in os.environ.items() if not scrubbed(name)}
        needed = accelerators.settings(lambda row: row.worker_variables)
        needed |= (
            self.accelerator.environment(self.asked.matmul) if self.accelerator is not None else {}
        )
        listening = (
            {}
            if self.interface is None
            else accelerators.settings(lambda row: row.interface_variables)
        )
        wanted = {name: text.format(self.interface) for name, text in listening.items()}
        network = {
            name: value for name, value in wanted.items() if name not in self.asked.environment
        }
        return {**inherited, **needed, **network, **self.caches, **self.asked.variables}

    def hello(self) -> Hello:
        row, listening = self.accelerator or accelerators.CPU, self.listening
        return Hello(
            token=self.asked.token,
            protocol=PROTOCOL,
            host=socket.gethostname(),
            machine=_machine(),
            version=__version__,
            package=environment.package_hash(),
            folder=str(environment.PACKAGE),
            python=sys.executable,
            accelerator=row.name,
            divisible=row.divisible,
            most=row.most(self.found),
            devices=self._devices(row),
            environment=self._environment(row),
            state=state_of(row, self.used),
            lacking=self.lacking,
            missing=[
                i
                for i, names in enumerate(self.asked.paths)
                if not any(Path(name).exists() for name in names)
            ],
            address=None if listening is None else listening.getsockname()[0],
            interface=self.interface,
            port=None if listening is None else listening.getsockname()[1],
            problem=self.problem,
        )

    def _environment(self, row: Accelerator) -> Environment:
        """With the Python and the packages of the workers, and then also the agent's own Python."""
        made = environment.of_host(row, self.used, self.variables())
        if self.interpreter is None:
            return made
        software = made.software.model_dump()
        software |= {"python": self.interpreter.python, "packages": self.interpreter.packages}
        return made.model_copy(
            update={"software": Software(**software, agent_python=made.software.python)}
        )

    def _devices(self, row: Accelerator) -> list[FoundDevice]:
        # none where something was wrong before they were looked for
        free = row.free(self.found) if self.found else []
        return [
            FoundDevice(
                name=device.name,
                uuid=device.uuid,
                memory_bytes=device.memory_bytes,
                free_bytes=bytes_,
                busy=(
                    processes.claim(
                        f"device/{device.uuid or f'{row.name}:{device.index}'}", self.claims
                    )
                    if device in self.used
                    else None
                ),
            )
            for device, bytes_ in zip(self.found, free, strict=True)
        ]


def scrubbed(name: str) -> bool:
    ignored = SCRUBBED | accelerators.names(lambda row: row.ignored_variables)
    return name in ignored or name.startswith(SCRUBBED_BEGIN)


def _machine() -> str:
    """The boot of its kernel, its network and its name: containers with a network of their own are
    hosts of their own.
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    parts = (
        [boot.read_text().strip(), str(network.readlink())]
        if boot.exists() and network.exists()
        else []
    )
    return " ".join([*parts, socket.gethostname()])


def _interface(asked: Open) -> str:
    """The network interface for what ranks send each other: loopback on one host, else the named
    one, else that of the route to another host of the run."""
    if asked.peer is None:
        return LOOPBACK
    known = psutil.net_if_addrs()
    if asked.interface is not None:
        if asked.interface not in known:
            raise RequestError(f"no interface {asked.interface!r}; there are: {', '.join(known)}")
        return asked.interface
    ours = _route(asked.peer)
    for name, addresses in known.items():
        if any(one.address.partition("%")[0] == ours for one in addresses):
            return name
    raise RequestError(
        f"no interface has the address {ours}, which leads to {asked.peer}; name one in the site"
        " file"
    )


def _route(peer: str) -> str:
    """Our address on the way to a host; a datagram socket that is connected sends nothing."""
    try:
        kind, *_, there = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as asking:
            asking.connect(there)
            address: str = asking.getsockname()[0]
            return address
    except OSError as error:
        raise RequestError(
            f"no route to host {peer}: {error}; name the interface in the site file"
        ) from error


def _listen(interface: str) -> socket.socket:
    """A free port on the interface, where rank 0 is met."""
    addresses = psutil.net_if_addrs().get(interface, [])
    for kind in FAMILIES:
        for one in addresses:
            if one.family == kind:
                listening = socket.socket(kind, socket.SOCK_STREAM)
                listening.bind((one.address, 0))
                listening.listen(4096)
                return listening
    raise RequestError(f"interface {interface!r} has no address; name another in the site file")


def state_of(accelerator: Accelerator, found: list[Found], root: Path = ROOT) -> HostState:
    """The host, and its devices that are used."""
    memory, group = _memory(root), load.tightest_group(root)
    told = {
        "load_1m": _load_1m(root),
        "cores": _count(environment.system_text(root / CPUS / "online")) or os.cpu_count(),
        "allowed": len(load.affinity()),
        "quota": None if group is None else group.quota,
        "memory_bytes": memory.get("MemTotal"),
        "available_bytes": memory.get("MemAvailable"),
        "swap_bytes": memory.get("SwapTotal"),
        "swap_used_bytes": (
            max(0, memory["SwapTotal"] - memory["SwapFree"])
            if {"SwapTotal", "SwapFree"} <= {*memory}
            else None
        ),
        "governors": _governors(root),
        "clock_source": environment.system_text(root / CLOCK_SOURCE) or None,
        "numa_nodes": _count(environment.system_text(root / NODES / "online")) or None,
        "devices": [DeviceState.model_validate(_known(one)) for one in accelerator.states(found)],
    }
    return HostState.model_validate(_known(told))


def _known(table: Mapping[str, object]) -> dict[str, object]:
    """What is not known is left out."""
    return {name: value for name, value in table.items() if value is not None}


def _memory(root: Path) -> dict[str, int]:
    """The lines of /proc/meminfo, in bytes."""
    out = {}
    for line in environment.system_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        with suppress(ValueError, IndexError):
            out[name] = int(value.split()[0]) * KIB
    return out


def _load_1m(root: Path) -> float | None:
    with suppress(ValueError, IndexError):
        found = float(environment.system_text(root / "proc/loadavg").split()[0])
        return found if isfinite(found) else None
    return None


def _governors(root: Path) -> list[str] | None:
    """The frequency governors of all cores, each once; None where the kernel has none, as in most
    virtual machines.
    """
    policies = sorted((root / CPUS / "cpufreq").glob("policy*/scaling_governor"))
    names = {
        environment.system_text(path)
        for path in policies or (root / CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor")
    }
    return sorted(name for name in names if name) or None


def _count(ranges: str) -> int:
    """How many numbers a list such as 0-3,8 has; 0 where it is none."""
    count = 0
    with suppress(ValueError):
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count
