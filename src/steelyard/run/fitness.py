"""Read what `steelyard check` shows of this machine: devices, host settings, load by other
processes, free disk space and versions.

Called by cli/machine.py; metrics/fit.py judges the result. Nothing on the machine is changed, and
no framework is imported.
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
from steelyard.metrics import busy
from steelyard.metrics.busy import Share
from steelyard.metrics.fit import Machine
from steelyard.run import environment, host, load
from steelyard.run.clock import now, sleep
from steelyard.words import Message

WATCH_S = 1.0  # how long CPU time is counted
PACKAGES = ("torch", "transformers")


def machine(accelerator: str | None, records: Path) -> Machine:
    """Return the state of this machine with the named accelerator, or with the first that has
    devices; takes about `WATCH_S` seconds, in which CPU time is counted.

    `records_folder` is the folder whose free space is read. A driver that does not answer is
    reported in `problem`; an unknown accelerator raises RequestError.
    """
    row, problem = _row(accelerator)
    found = [] if problem is not None else row.find()
    installed = environment.packages()
    return Machine(
        accelerator=row.name,
        devices=tuple(device.name for device in found),
        driver=found[0].driver if found else None,
        needs_driver=bool(row.steps),
        problem=problem,
        host=host.state_of(row, found),
        others=others(),
        bounds=busy.bounds_of(row.name),
        free_bytes={
            "records": free_bytes(records),
            "temporary": free_bytes(Path(tempfile.gettempdir())),
        },
        versions={
            "Python": platform.python_version(),
            **{name: installed.get(name) for name in PACKAGES},
        },
        torch_build=row.torch_build(),
        amx=cpu.amx(),
        steps=row.steps,
    )


def _row(accelerator: str | None) -> tuple[Accelerator, str | None]:
    """Return the accelerator's row and what is wrong with its driver, or None.

    Without a name it is the first row that has devices or whose driver fails, else the CPU's. A
    failing driver is a finding to report, not a wrong request.
    """
    for row in (
        accelerators.table().values() if accelerator is None else [accelerators.named(accelerator)]
    ):
        try:
            if row.find() or accelerator is not None:
                return row, None
        except RequestError as error:
            return row, str(error)
    return accelerators.CPU, None


def others(watch_s: float = WATCH_S) -> Share:
    """Count CPU time for `watch_s` seconds and return the share of the cores that processes other
    than this one and its parent took; unknown, with a reason, if the host does not count it.
    """
    reader, kept = load.Reader(""), load.LoadReadings()
    for _ in range(2):
        kept.add(reader.read(now()))
        if len(kept.rows) < 2:
            sleep(watch_s)
    found = kept.load()
    if found is None:
        return Share(None, why=Message("busy.not_counted"))
    return busy.share(found, found.t_s[0], found.t_s[-1])


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the disk that holds the folder or, if it does not exist yet, its
    nearest existing ancestor; None if that cannot be read.
    """
    with suppress(OSError):
        place = next(
            (one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir()), None
        )
        return None if place is None else shutil.disk_usage(place).free
    return None
