"""One host as its node agent sees it: devices, files, network, the environment that workers get,
and settings that can change results.

`Host` is created when the parent's `open` message arrives, and answers it with `hello`.
`read_host_state` is also used by `steelyard check`. Settings are read from /proc, /sys and the
driver; nothing is set.
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
# Variables that workers do not inherit: other launchers tell their ranks by them who they are, and
# our workers would wait for ranks that do not exist.
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
    """What the parent's `open` message asked for, looked up on this host.

    Creating it sets the site's variables in this process's environment, claims the run's name (see
    run/processes.py), creates cache folders, finds devices, and listens on a port if the run has
    other hosts. Anything wrong is stored as one line in `problem`, not raised.
    """

    def __init__(self, asked: Open) -> None:
        """Set the site's variables in os.environ, claim the run's name, create caches, find devices
        and, for several hosts, listen on a port; store a RequestError as text in `problem`.
        """
        self.asked = asked
        os.environ.update(asked.environment)
        self.claims: list[socket.socket] = []
        # by this claim the agent is found if it is suspended
        processes.claim(AGENT_CLAIM.format(asked.mark), self.claims)
        self.accelerator: Accelerator | None = None
        self.found: list[Found] = []
        self.interface: str | None = None
        self.listening: socket.socket | None = None
        self.problem: str | None = None
        self.caches: dict[str, str] = {}
        self.python = sys.executable if asked.python is None else asked.python
        # None: workers use the agent's own Python
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
        """The devices that the run uses: the first of those found."""
        return self.found[: self.asked.devices]

    def sources(self) -> list[Source]:
        """Return the telemetry sources of the used devices."""
        return [] if self.accelerator is None else self.accelerator.sources(self.used)

    @property
    def severity(self) -> dict[str, str]:
        """How much each slowdown reason of the accelerator matters, by reason; empty without an
        accelerator.
        """
        return {} if self.accelerator is None else dict(self.accelerator.severity)

    def variables(self) -> dict[str, str]:
        """Return the whole environment of a worker process: inherited variables without those of
        other launchers, then those of the accelerator, the network interface and the caches, and
        last the run's own, which win.
        """
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
        """Return the `hello` message, which describes this host to the parent. It claims each used
        device for this run; a device that another run has claimed is marked `busy`.
        """
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
        """Return this host's environment; if workers run in another Python, with the version and
        packages of that one, and the agent's own Python besides.
        """
        made = environment.of_host(row, self.used, self.variables())
        if self.interpreter is None:
            return made
        software = made.software.model_dump()
        software |= {"python": self.interpreter.python, "packages": self.interpreter.packages}
        return made.model_copy(
            update={"software": Software(**software, agent_python=made.software.python)}
        )

    def _devices(self, row: Accelerator) -> list[FoundDevice]:
        """Return all devices with their free memory, and claim the used ones; `busy` says who else
        has a device. Empty if an earlier problem prevented the search.
        """
        # no devices if a problem came before the search
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
    """Return whether workers do not inherit this environment variable, because it tells another
    launcher's ranks who they are.
    """
    ignored = SCRUBBED | accelerators.names(lambda row: row.ignored_variables)
    return name in ignored or name.startswith(SCRUBBED_BEGIN)


def _machine() -> str:
    """Return a text that identifies this machine, the same for two names of one: boot id, network
    namespace and host name. Containers with their own network count as hosts of their own.
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    parts = (
        [boot.read_text().strip(), str(network.readlink())]
        if boot.exists() and network.exists()
        else []
    )
    return " ".join([*parts, socket.gethostname()])


def _interface(asked: Open) -> str:
    """Return the network interface over which ranks communicate: loopback on one host, else the one
    the site names, else that of the route to another host; raise RequestError if there is none.
    """
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
    """Return our own address on the route to a host, without sending anything; raise RequestError
    if there is no route.
    """
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
    """Return a socket that listens on a free port of the interface, where rank 0 will be met; raise
    RequestError if the interface has no IP address.
    """
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
    """Return load, memory, swap, CPU governors, clock source, CPU quota and NUMA nodes of this
    host, and the state of the given devices; what is unknown is left out.
    """
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
    """Return the mapping without its None values."""
    return {name: value for name, value in table.items() if value is not None}


def _memory(root: Path) -> dict[str, int]:
    """Return the lines of /proc/meminfo by name, in bytes; empty if it cannot be read."""
    out = {}
    for line in environment.system_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        with suppress(ValueError, IndexError):
            out[name] = int(value.split()[0]) * KIB
    return out


def _load_1m(root: Path) -> float | None:
    """Return the load average of the last minute, or None if it is unknown."""
    with suppress(ValueError, IndexError):
        found = float(environment.system_text(root / "proc/loadavg").split()[0])
        return found if isfinite(found) else None
    return None


def _governors(root: Path) -> list[str] | None:
    """Return the frequency governors of all cores, each once and sorted, or None where the kernel
    has none, as in most virtual machines.
    """
    policies = sorted((root / CPUS / "cpufreq").glob("policy*/scaling_governor"))
    names = {
        environment.system_text(path)
        for path in policies or (root / CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor")
    }
    return sorted(name for name in names if name) or None


def _count(ranges: str) -> int:
    """Return how many numbers a kernel list such as `0-3,8` has (here 5); an empty text gives 0,
    and counting ends at the first part that is no number.
    """
    count = 0
    with suppress(ValueError):
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count
