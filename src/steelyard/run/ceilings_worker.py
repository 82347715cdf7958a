"""A worker of `steelyard spec`: one device, every row that its framework has for it. A spec in, one rank file out.

Started by its host's agent as `python -m steelyard.run.ceilings_worker SPEC`.
"""

import sys
from functools import partial
from pathlib import Path

from steelyard import accelerators
from steelyard.engine import rows as engine_rows
from steelyard.engine.bench import Ceilings, Row
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.record.spec import Limits
from steelyard.run.boundary import Rendezvous
from steelyard.run.ceilings import Holder
from steelyard.run.clock import now
from steelyard.run.rank import RankProcess, serve
from steelyard.schema import Frozen

FRAMEWORK = "torch"


class CeilingsSpec(Frozen):
    """What such a worker is told. Paths are absolute; `origin_s` is the start of the command on the host's monotonic clock."""

    accelerator: str
    plan: Plan
    quick: bool
    limits: Limits
    folder: Path
    origin_s: float
    rendezvous: Rendezvous | None = None


def main() -> None:
    spec = CeilingsSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    serve(partial(CeilingsWorker, spec), spec.folder)


class CeilingsWorker(RankProcess):
    def __init__(self, spec: CeilingsSpec, rank: int) -> None:
        super().__init__(rank, spec.accelerator, spec.folder, spec.origin_s)
        self.spec = spec

    def run(self) -> None:
        self.tell("imports", 0, 0)
        with self.budget.part("imports"):
            shown = self._load()
        rows = list(shown.rows(self.spec.quick))
        with self.budget.part("rows"):
            self._rows(shown, rows)
        if self.framework is not None:
            self.framework.barrier()

    def _load(self) -> Ceilings:
        spec = self.spec
        device = accelerators.named(spec.accelerator).devices.get(FRAMEWORK)
        if device is None:
            raise RequestError(f"accelerator {spec.accelerator!r} has no device class for {FRAMEWORK}; see steelyard list")
        framework = engine_rows.load_framework(FRAMEWORK)(device, self.local_rank, now)
        self._add(identity=framework.identity(), versions=framework.versions(), threads=framework.threads())
        framework.join(spec.plan, self.rank, self.world, spec.rendezvous)
        self.framework = framework
        return engine_rows.load_ceilings(FRAMEWORK)(framework)

    def _rows(self, shown: Ceilings, rows: list[Row]) -> None:
        """What is done is told after each, so that whoever is killed later leaves this much."""
        if self.framework is None:
            raise RuntimeError("no framework was loaded")
        holder = Holder(self.framework, self.rank, self.spec.limits, now, self.origin_s, shown.agree)
        for done, row in enumerate(rows):
            named = " ".join(filter(None, (row.group, row.name, row.precision)))
            self.tell(named, done, len(rows))
            self._add(benches=[*self.file.benches, holder.take(row)])
            shown.release()
            self.write("running", None)


if __name__ == "__main__":
    main()
