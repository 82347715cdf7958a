"""Read what `steelyard check` shows of this machine: devices, host settings, load by other
processes, free disk space and versions.

Called by cli/check_and_spec.py; metrics/fitness_rules.py judges the result. Nothing on the machine
is changed, and no framework is imported.
"""

import platform
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from steelyard import accelerators
from steelyard.accelerators import cpu
from steelyard.accelerators.row import Accelerator
from steelyard.errors import RequestError
from steelyard.metrics import cpu_contention
from steelyard.metrics.cpu_contention import ContentionShare
from steelyard.metrics.fitness_rules import MachineFacts
from steelyard.run import cpu_load, environment, host
from steelyard.run.clock import now, sleep
from steelyard.words import Message

WATCH_S = 1.0  # how long CPU time is counted
PACKAGES = ("torch", "transformers")


def inspect_machine(accelerator: str | None, records_folder: Path) -> MachineFacts:
    """Return the state of this machine with the named accelerator or, with None, the first that has
    devices or whose driver fails, else the CPU; takes about `WATCH_S` seconds, in which CPU time is
    counted.

    `records_folder` is the folder whose free space is read, beside that of the temporary folder. A
    driver that does not answer is reported in `problem`, without devices; an unknown accelerator
    raises RequestError.
    """
    row, problem = _choose_accelerator(accelerator)
    devices = [] if problem is not None else row.find()
    installed = environment.list_package_versions()
    return MachineFacts(
        accelerator=row.name,
        devices=tuple(device.name for device in devices),
        driver=devices[0].driver if devices else None,
        needs_driver=bool(row.steps),
        problem=problem,
        host=host.read_host_state(row, devices),
        others=measure_other_load(),
        contention_limits=cpu_contention.find_contention_limits(row.name),
        free_bytes={
            "records": measure_free_bytes(records_folder),
            "temporary": measure_free_bytes(Path(tempfile.gettempdir())),
        },
        versions={
            "Python": platform.python_version(),
            **{name: installed.get(name) for name in PACKAGES},
        },
        torch_build=row.torch_build(),
        amx=cpu.has_working_amx(),
        steps=row.steps,
    )


def _choose_accelerator(accelerator: str | None) -> tuple[Accelerator, str | None]:
    """Return the accelerator's row and the text on what is wrong with its driver, or None.

    Without a name it is the first row that has devices or whose driver fails, else the CPU's; a
    named one is returned even without devices. A failing driver is a finding to report; an unknown
    name raises RequestError.
    """
    for row in (
        accelerators.load_accelerators().values()
        if accelerator is None
        else [accelerators.find_accelerator(accelerator)]
    ):
        try:
            if row.find() or accelerator is not None:
                return row, None
        except RequestError as error:
            return row, str(error)
    return accelerators.CPU, None


def measure_other_load(watch_s: float = WATCH_S) -> ContentionShare:
    """Count CPU time for `watch_s` seconds, sleeping, and return the share (0 to 1) of the allowed
    cores that processes other than this one and its parent took; a value of None, with a message in
    `why`, if the host does not count it.
    """
    reader, readings = cpu_load.CpuLoadReader(""), cpu_load.LoadReadings()
    for _ in range(2):
        readings.add(reader.read(now()))
        if len(readings.rows) < 2:
            sleep(watch_s)
    counted = readings.to_load()
    if counted is None:
        return ContentionShare(None, why=Message("busy.not_counted"))
    return cpu_contention.measure_contention(counted, counted.t_s[0], counted.t_s[-1])


def measure_free_bytes(folder: Path) -> int | None:
    """Return the free bytes (for any user without privileges) of the disk that holds the folder or,
    if it does not exist yet, its nearest existing ancestor; None if that cannot be read.
    """
    with suppress(OSError):
        existing = next(
            (path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()),
            None,
        )
        return None if existing is None else shutil.disk_usage(existing).free
    return None
