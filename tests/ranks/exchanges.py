"""One rank of two: measure every exchange ceiling of `steelyard spec` at a small size and print the
results as JSON.

test_exchanges.py starts it with the rank and the path of the rendezvous store.
"""

import json
import sys
from pathlib import Path

from steelyard.engines.torch import exchange_ceilings
from steelyard.engines.torch.device_ceilings import TorchCeilings
from steelyard.engines.torch.framework import TorchFramework
from steelyard.plan.degrees import Plan
from steelyard.record.ceilings_record import BenchLimits
from steelyard.run.ceilings_worker import CeilingBenchmarker
from steelyard.run.clock import now
from steelyard.run.messages import Rendezvous

LIMITS = BenchLimits(stretch_s=0.001, limit_s=0.01, total_s=300.0, within=0.05, last=2)


def main() -> None:
    """Join the other rank, measure the rows and print them on one line."""
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    exchange_ceilings.QUICK_COLLECTIVE_BYTES = (1 << 20,)
    framework = TorchFramework("steelyard.accelerators.cpu_torch:CpuTorchDevice", 0, now)
    plan = Plan(nodes=1, devices=2, tp=1, pp=1, dp=2, launcher="local")
    framework.join_ranks(plan, rank, 2, Rendezvous(file=store))
    torch_ceilings = TorchCeilings(framework)
    holder = CeilingBenchmarker(framework, rank, LIMITS, now, now(), torch_ceilings.all_reduce_max)
    rows = exchange_ceilings.exchange_rows(framework, torch_ceilings.lacks, quick=True)
    print(json.dumps([holder.run_row(row).model_dump(mode="json") for row in rows]))
    framework.leave()


if __name__ == "__main__":
    main()
