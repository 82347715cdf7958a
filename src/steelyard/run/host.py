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
from dataclasses import asdict
from math import isfinite
from pathlib import Path

import psutil

from steelyard import __version__, accelerators
from steelyard.accelerators import cpu_bounds
from steelyard.accelerators.row import Accelerator, DetectedDevice, TelemetrySource
from steelyard.errors import RequestError
from steelyard.record.run_facts import DeviceState, Environment, HostState, Software
from steelyard.run import cpu_load, environment, processes
from steelyard.run.engine_identity import EngineIdentity
from steelyard.run.environment import InterpreterFacts
from steelyard.run.messages import PROTOCOL, FoundDevice, HelloMessage, OpenMessage
from steelyard.run.processes import AGENT_CLAIM

LOOPBACK = "lo"
# Variables that workers do not inherit: other launchers tell their ranks by them who they are, and
# our workers would wait for ranks that do not exist.
SCRUBBED_NAMES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "RANK_TABLE_FILE"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS"),
    )
)
SCRUBBED_PREFIXES = (
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
CPU_FOLDER, NUMA_FOLDER = "sys/devices/system/cpu", "sys/devices/system/node"
CLOCK_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"
KIB = 1024


class Host:
    """What the parent's `open` message asked for, looked up on this host by its node agent:
    `make_hello` returns the answer, `make_worker_environment` the variables that workers get.
    `accelerator` and its `devices`, network `interface`, `listener` (a listening socket; None on a
    single host), `python` of the workers, `lacking` modules.

    Creating it sets the site's variables in this process's environment, claims the run's name (see
    run/processes.py), creates cache folders, finds devices, and listens on a port if the run has
    other hosts. The first thing that is wrong is stored as one line in `problem` (None: nothing),
    not raised.
    """

    def __init__(self, open_message: OpenMessage) -> None:
        """Set the site's variables in os.environ, claim the run's name, create caches, find
        devices, choose the interface and, for several hosts, listen on a port; look for the needed
        modules in the workers' Python. The first RequestError is stored as text in `problem`, and
        what comes after it is not looked up.
        """
        self.open_message = open_message
        os.environ.update(open_message.environment)
        self.claims: list[socket.socket] = []
        # by this claim the agent is found if it is suspended
        processes.claim_name(AGENT_CLAIM.format(open_message.mark), self.claims)
        self.accelerator: Accelerator | None = None
        self.devices: list[DetectedDevice] = []
        self.interface: str | None = None
        self.listener: socket.socket | None = None
        self.problem: str | None = None
        self.cache_variables: dict[str, str] = {}
        self.python = sys.executable if open_message.python is None else open_message.python
        # None: workers use the agent's own Python
        self.interpreter: InterpreterFacts | None = None
        self.lacking: list[str] = []
        try:
            processes.check_working_directory()
            self.cache_variables = environment.make_cache_folders(os.environ)
            self.accelerator = (
                accelerators.find_accelerator(open_message.accelerator)
                if open_message.accelerator
                else accelerators.detect_accelerator()
            )
            self.devices = self.accelerator.find()
            self.interface = _choose_interface(open_message)
            self.listener = (
                None if open_message.peer is None else _listen_on_interface(self.interface)
            )
            if open_message.python is None:
                self.lacking = environment.find_missing_modules(open_message.needs)
            else:
                self.interpreter = environment.inspect_interpreter(
                    open_message.python, open_message.needs, self.make_worker_environment()
                )
        except RequestError as error:
            self.problem = str(error)

    @property
    def used_devices(self) -> list[DetectedDevice]:
        """The devices of this host that the run uses: as many as the `open` message asks for, the
        first of those found.
        """
        return self.devices[: self.open_message.devices]

    def make_telemetry_sources(self) -> list[TelemetrySource]:
        """Return the telemetry sources of the devices of this host that the run uses; empty without
        an accelerator.
        """
        return [] if self.accelerator is None else self.accelerator.sources(self.used_devices)

    @property
    def severity(self) -> dict[str, str]:
        """What each slowdown reason of this host's accelerator means for a run (nothing, note or
        invalidates), by reason; empty without an accelerator.
        """
        return {} if self.accelerator is None else dict(self.accelerator.severity)

    def make_worker_environment(self) -> dict[str, str]:
        """Return the whole environment of a worker process on this host: inherited variables
        without those of other launchers, then those of the accelerators, the network interface (not
        those that the site sets) and the caches, and last the run's own; later ones win. os.environ
        is not changed.
        """
        inherited = {name: value for name, value in os.environ.items() if not is_scrubbed(name)}
        required = accelerators.collect_settings(lambda row: row.worker_variables)
        required |= (
            self.accelerator.environment(self.open_message.matmul)
            if self.accelerator is not None
            else {}
        )
        templates = (
            {}
            if self.interface is None
            else accelerators.collect_settings(lambda row: row.interface_variables)
        )
        interface_values = {name: text.format(self.interface) for name, text in templates.items()}
        network = {
            name: value
            for name, value in interface_values.items()
            if name not in self.open_message.environment
        }
        return {
            **inherited,
            **required,
            **network,
            **self.cache_variables,
            **self.open_message.variables,
        }

    def make_hello(self) -> HelloMessage:
        """Return the `hello` message, which describes this host to the parent: devices, software,
        state, missing modules and paths (as indices of `open`'s paths), and the listening address.
        It claims each used device for this run; a device that another run has claimed is marked
        `busy`.
        """
        row, listener = self.accelerator or accelerators.CPU, self.listener
        return HelloMessage(
            token=self.open_message.token,
            protocol=PROTOCOL,
            host=socket.gethostname(),
            machine=_identify_machine(),
            version=__version__,
            package=environment.hash_package(),
            folder=str(environment.PACKAGE_FOLDER),
            python=sys.executable,
            accelerator=row.name,
            divisible=row.divisible,
            most=row.count_workers(self.devices),
            devices=self._describe_devices(row),
            environment=self._describe_environment(row),
            providers=environment.find_host_providers(row, self.used_devices),
            state=read_host_state(row, self.used_devices),
            lacking=self.lacking,
            missing=[
                i
                for i, names in enumerate(self.open_message.paths)
                if not any(Path(name).exists() for name in names)
            ],
            address=None if listener is None else listener.getsockname()[0],
            interface=self.interface,
            port=None if listener is None else listener.getsockname()[1],
            problem=self.problem,
            engine_identity=self._identify_engine(),
        )

    def _identify_engine(self) -> EngineIdentity | None:
        """Return the identity of the engine in the workers' Python; None if the `open` message does
        not ask for it, or this host cannot take part.
        """
        modules = self.open_message.engine_modules
        if modules is None or self.problem is not None:
            return None
        return environment.identify_engine(self.python, modules, self.make_worker_environment())

    def _describe_environment(self, row: Accelerator) -> Environment:
        """Return this host's hardware, software and package revision for the record; if workers run
        in another Python (`engine.python`), with the version and packages of that one, and the
        agent's own Python as `agent_python`.
        """
        host_environment = environment.describe_host(
            row, self.used_devices, self.make_worker_environment()
        )
        if self.interpreter is None:
            return host_environment
        software = host_environment.software.model_dump()
        software |= {"python": self.interpreter.python, "packages": self.interpreter.packages}
        return host_environment.model_copy(
            update={"software": Software(**software, agent_python=host_environment.software.python)}
        )

    def _describe_devices(self, row: Accelerator) -> list[FoundDevice]:
        """Return all devices found on this host with their total and free memory, and claim the
        used ones for this run (nothing on other systems than Linux); `busy` says who else has
        claimed a used device. Empty if an earlier problem prevented the search.
        """
        # no devices if a problem came before the search
        free = row.free(self.devices) if self.devices else []
        return [
            FoundDevice(
                name=device.name,
                uuid=device.uuid,
                memory_bytes=device.memory_bytes,
                free_bytes=bytes_,
                busy=(
                    processes.claim_name(
                        f"device/{device.uuid or f'{row.name}:{device.index}'}", self.claims
                    )
                    if device in self.used_devices
                    else None
                ),
            )
            for device, bytes_ in zip(self.devices, free, strict=True)
        ]


def is_scrubbed(name: str) -> bool:
    """Return whether workers do not inherit this environment variable, because it tells another
    launcher's ranks who they are.
    """
    ignored = SCRUBBED_NAMES | accelerators.collect_names(lambda row: row.ignored_variables)
    return name in ignored or name.startswith(SCRUBBED_PREFIXES)


def _identify_machine() -> str:
    """Return a text that identifies this machine, the same for two names of one: boot id, network
    namespace and host name. Containers with their own network count as hosts of their own.
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        parts = [boot.read_text().strip(), str(network.readlink())]
    except OSError:  # missing, or hidden from this user
        parts = []
    return " ".join([*parts, socket.gethostname()])


def _choose_interface(open_message: OpenMessage) -> str:
    """Return the name of the network interface over which ranks communicate: `lo` on a single host,
    else the one the site names, else that of the route to another host of the run; raise
    RequestError if it does not exist, there is no route, or no interface has the address.
    """
    if open_message.peer is None:
        return LOOPBACK
    interfaces = psutil.net_if_addrs()
    if open_message.interface is not None:
        if open_message.interface not in interfaces:
            raise RequestError(
                f"no interface {open_message.interface!r}; there are: {', '.join(interfaces)}"
            )
        return open_message.interface
    own_address = _find_own_address(open_message.peer)
    for name, addresses in interfaces.items():
        if any(candidate.address.partition("%")[0] == own_address for candidate in addresses):
            return name
    raise RequestError(
        f"no interface has the address {own_address}, which leads to {open_message.peer}; name one"
        " in the site"
        " file"
    )


def _find_own_address(peer: str) -> str:
    """Return this host's own IP address on the route to another host (`peer`), without sending it
    anything; its name may be looked up. Raise RequestError if the name is unknown or there is no
    route.
    """
    try:
        kind, *_, peer_address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(peer_address)
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise RequestError(
            f"no route to host {peer}: {error}; name the interface in the site file"
        ) from error


def _listen_on_interface(interface: str) -> socket.socket:
    """Return a TCP socket that listens on a free port of the interface's first IPv4 address, else
    of its first IPv6 address, where rank 0 will be met; raise RequestError if the interface has no
    IP address, OSError if it cannot listen.
    """
    addresses = psutil.net_if_addrs().get(interface, [])
    for kind in FAMILIES:
        for candidate in addresses:
            if candidate.family == kind:
                listener = socket.socket(kind, socket.SOCK_STREAM)
                listener.bind((candidate.address, 0))
                listener.listen(4096)
                return listener
    raise RequestError(f"interface {interface!r} has no address; name another in the site file")


def read_host_state(
    accelerator: Accelerator, devices: list[DetectedDevice], root: Path = ROOT
) -> HostState:
    """Return load average, cores, memory and swap in bytes, CPU governors, clock source, CPU quota,
    NUMA nodes and what a core can compute at most of this host, and the state of the given devices
    as the accelerator tells it; what is unknown is left out. `root` is the root of the file system
    below which files of /proc and /sys are read. Nothing is changed.
    """
    memory, group = _read_meminfo(root), cpu_load.find_tightest_cgroup(root)
    core_bound = cpu_bounds.read_core_bound(root / "proc", root / CPU_FOLDER)
    fields = {
        "load_1m": _read_load_average(root),
        "cores": _count_listed(environment.read_system_file(root / CPU_FOLDER / "online"))
        or os.cpu_count(),
        "allowed": len(cpu_load.read_allowed_cores()),
        "quota": None if group is None else group.quota,
        "memory_bytes": memory.get("MemTotal"),
        "available_bytes": memory.get("MemAvailable"),
        "swap_bytes": memory.get("SwapTotal"),
        "swap_used_bytes": (
            max(0, memory["SwapTotal"] - memory["SwapFree"])
            if {"SwapTotal", "SwapFree"} <= {*memory}
            else None
        ),
        "governors": _read_governors(root),
        "clock_source": environment.read_system_file(root / CLOCK_SOURCE) or None,
        "numa_nodes": _count_listed(environment.read_system_file(root / NUMA_FOLDER / "online"))
        or None,
        "core_bound": None if core_bound is None else asdict(core_bound),
        "devices": [
            DeviceState.model_validate(_drop_unknown(device_state))
            for device_state in accelerator.states(devices)
        ],
    }
    return HostState.model_validate(_drop_unknown(fields))


def _drop_unknown(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the mapping without its None values."""
    return {name: value for name, value in fields.items() if value is not None}


def _read_meminfo(root: Path) -> dict[str, int]:
    """Return the lines of /proc/meminfo below `root` by name, such as MemTotal, times 1024, which
    is bytes for sizes in kB; lines without a number are left out, empty if it cannot be read.
    """
    sizes = {}
    for line in environment.read_system_file(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        with suppress(ValueError, IndexError):
            sizes[name] = int(value.split()[0]) * KIB
    return sizes


def _read_load_average(root: Path) -> float | None:
    """Return the load average of the last minute from /proc/loadavg, or None if it is unknown or
    not finite.
    """
    with suppress(ValueError, IndexError):
        load_average = float(environment.read_system_file(root / "proc/loadavg").split()[0])
        return load_average if isfinite(load_average) else None
    return None


def _read_governors(root: Path) -> list[str] | None:
    """Return the frequency governors of all cores, each once and sorted, or None where the kernel
    has none, as in most virtual machines.
    """
    policies = sorted((root / CPU_FOLDER / "cpufreq").glob("policy*/scaling_governor"))
    names = {
        environment.read_system_file(path)
        for path in policies or (root / CPU_FOLDER).glob("cpu[0-9]*/cpufreq/scaling_governor")
    }
    return sorted(name for name in names if name) or None


def _count_listed(ranges: str) -> int:
    """Return how many numbers a kernel list such as `0-3,8` has (here 5); an empty text gives 0,
    and counting ends at the first part that is no number or range.
    """
    count = 0
    with suppress(ValueError):
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count
