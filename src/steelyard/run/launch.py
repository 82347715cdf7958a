"""Launchers: from a plan to the command line of its processes. Pure functions; `run` starts what they return."""

import sys
from collections.abc import Callable
from pathlib import Path

from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan


def local(spec: str, plan: Plan) -> list[str]:
    """Processes on this host: one worker alone, several through torchrun."""
    if plan.nodes > 1:
        raise RequestError(f"--nodes {plan.nodes}: launcher local starts processes on this host only; allowed: 1")
    worker = ["-m", "steelyard.run.worker", spec]
    if plan.devices == 1:
        return [sys.executable, *worker]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", f"--nproc-per-node={plan.devices}"]
    logs = f"--log-dir={Path(spec).parent}"  # else it leaves a folder of its own behind
    return [sys.executable, *torchrun, logs, *worker]


LAUNCHERS: dict[str, Callable[[str, Plan], list[str]]] = {"local": local}
