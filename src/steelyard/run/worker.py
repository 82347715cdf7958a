"""A worker: one device's share of a run. One JSON spec in, one rank file out, whatever happens in between.

Started by the parent as `python -m steelyard.run.worker SPEC`, alone or by torchrun, which sets RANK, LOCAL_RANK, WORLD_SIZE.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import psutil

from steelyard import accelerators, engines
from steelyard.case.case import Case
from steelyard.engines.job import Engine, Job, Keep
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.record.record import Plan
from steelyard.run.measure import Budget, Trace, bare, mean_time_s, measure, now, sleep
from steelyard.tasks.table import TASKS, Sources
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Before, Run

CALIBRATE_S = 0.4
PROGRESS_S = 0.1
COUNTS = ("tokens", "samples", "logits", "pairs", "square")


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK", "0"))
    threading.Thread(target=_end_with_parent, args=(spec["parent_pid"],), daemon=True).start()
    worker = Worker(spec, rank)
    signal.signal(signal.SIGTERM, worker.ended)
    try:
        worker.run()
        status, error = "done", None
    except RequestError as failure:
        status, error = "request", str(failure)
    except Exception as failure:  # noqa: BLE001  whatever it was goes into the rank file, and on to stderr
        status, error = _kind(failure), " ".join("".join(traceback.format_exception_only(failure)).split())
        traceback.print_exc()
    worker.write(status, error)
    worker.leave()
    sys.exit(0 if status == "done" else 1)


def _kind(failure: BaseException) -> str:
    """`out_of_memory`, or `raised`. A CPU's allocator has no type of its own for it, only a text."""
    text = str(failure)
    starved = type(failure).__name__ == "OutOfMemoryError" or isinstance(failure, MemoryError)
    return "out_of_memory" if starved or "can't allocate memory" in text else "raised"


def _end_with_parent(pid: int) -> None:
    """A worker outlives nobody: without its parent there is no one to write the record. What it started ends with it."""
    while _lives(pid):
        sleep(1.0)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(3)


def _lives(pid: int) -> bool:
    """A killed parent may stay a zombie for ever, in a container whose first process waits for nobody."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Worker:
    def __init__(self, spec: dict[str, Any], rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.folder = Path(spec["folder"])
        self.case = Case.model_validate(spec["case"])
        self.plan = Plan.model_validate(spec["plan"])
        self.place = degrees.place(self.plan, rank)
        self.budget = Budget()
        device = f"{spec['accelerator']}:{self.local_rank}"
        self.out: dict[str, Any] = {"rank": rank, "device": device, "windows": [], "samples": [], "outputs": {}}
        self.task = TASKS[self.case.question.task]
        self.common: dict[str, Any] = {}
        self._told = 0.0
        self.device: Any = None

    def run(self) -> None:
        with self.budget.part("imports"):
            make_engine = engines.load(self.spec["engine"], self.case.question.kind, self.case.question.task)
            self.device = accelerators.load_device(self.spec["accelerator"], self.local_rank)
            self.device.set_precision(self.case.question.precision.matmul)
            if self.case.tune.deterministic:
                _always_the_same()
            self.out |= {"identity": self.device.identity(), "versions": self.device.versions(), "threads": _threads()}
        team = self._join()
        with self.budget.part("data"):
            self.tell("data", 0, 0)
            prepared = self.task.prepare(self.case.question, self._sources(), self.spec["scope"]["sample"])
            keep = self._keep_checkpoints(prepared.facts["fingerprint"])
            self.common = prepared.common
            self.out |= {"data": prepared.facts} | ({"common": prepared.common} if self.rank == 0 else {})
        with self.budget.part("engine"):
            engine = make_engine(self._job(prepared.texts, team, keep))
        for name in self.spec["passes"]:
            self.tell(f"prepare {name}", 0, 0)
            engine.prepare(name, self.budget.part)
            if "matmul_flops_per_s" not in self.out:
                with self.budget.part("calibrate"):
                    self.out["matmul_flops_per_s"] = self._calibrate()
            self._pass(engine, name)
        self.out["details"] = _plain("details", engine.details())

    def _join(self) -> Any:
        """Meet the other ranks; returns the team that holds a model together with this one."""
        from steelyard.engines.torch import tensor_parallel as team

        if self.world > 1:
            import torch.distributed as dist

            with self.budget.part("join"):
                dist.init_process_group(self.device.backend)
                return team.form(self.plan, self.rank, self.device.torch_device)
        return team.Team()

    def _sources(self) -> Sources:
        data, tokenizer, weights = (
            Path(self.spec[key]) if self.spec[key] else None for key in ("data", "tokenizer", "weights")
        )
        return Sources(data, tokenizer, weights, self.case.tune.pack)

    def _keep_checkpoints(self, fingerprint: str) -> Keep | None:
        """Where checkpoints go; the data, known only now, must be those of the checkpoint that is gone on from."""
        key, resume, folder = self.case.key(fingerprint), self.spec["resume"], self.spec["checkpoints"]
        if resume and checkpoints.read(Path(resume).parent / checkpoints.RUN, Run).key != key:
            raise RequestError(
                "--resume: the data or their tokens are others than those the checkpoint was trained on; give the same"
            )
        if not folder or self.case.tune.checkpoint_every is None:
            return None
        if self.rank == 0:
            asked, sample = self.case.question.model_dump(mode="json"), self.spec["scope"]["sample"]
            run = Run(name=self.case.name, question=asked, key=key, sample=sample, engine=self.spec["engine"])
            Path(folder).mkdir(parents=True)
            checkpoints.write(Path(folder) / checkpoints.RUN, run)
        return Keep(Path(folder), self.case.tune.checkpoint_every)

    def _job(self, texts: Any, team: Any, keep: Keep | None) -> Job:
        return Job(
            case=self.case,
            texts=texts,
            weights=self._sources().weights,
            device=self.device,
            rank=self.rank,
            world=self.world,
            plan=self.plan,
            place=self.place,
            team=team,
            steps=self.spec["scope"]["steps"],
            loading=lambda done, total: self.tell("weights", done, total),
            keep=keep,
            resume=Path(self.spec["resume"]) if self.spec["resume"] else None,
        )

    def _calibrate(self) -> float:
        """Rate of one large square matmul on random numbers, at the case's precision."""
        import torch

        dtypes = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        size, dtype = self.device.matmul_shape, dtypes[self.case.question.precision.matmul]
        a, b = (torch.randn(size, size, device=self.device.torch_device, dtype=dtype) for _ in range(2))
        time_s = mean_time_s(lambda: torch.mm(a, b), self.device, CALIBRATE_S)
        return float(2 * size**3 / time_s)

    def _pass(self, engine: Engine, name: str) -> None:
        self._barrier()
        self.device.reset_memory()
        total = engine.total(name)
        self.tell(name, 0, total)
        with self.budget.part(name):
            if name == "bare":
                trace = bare(engine.work(name), self.device)
            else:
                trace = measure(name, engine.work(name), self.device, self.rank, step_done=lambda n: self._step(name, n, total))
        self.tell(name, total, total)
        self._keep(name, trace)
        if name != "bare" and self.place.tp == self.place.pp == 0:  # a team and a pipeline have one answer
            self.out["outputs"][name] = self.task.check(engine.outputs(name), self.common)
            if name == "before" and self.spec["checkpoints"]:
                path = Path(self.spec["checkpoints"]) / checkpoints.BEFORE.format(self.place.dp)
                checkpoints.write(path, Before(table=self.out["outputs"][name]))
        self.write("running", None)  # whoever is killed later leaves this much

    def _step(self, name: str, done: int, total: int) -> None:
        """The last step is told after the pass: whatever follows its mark counts as time that no step accounts for."""
        if done < total:
            self.tell(name, done, total)

    def _barrier(self) -> None:
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def _keep(self, name: str, trace: Trace) -> None:
        window = {"pass": name, "rank": self.rank, "start_s": trace.start_at - self.spec["origin_s"], "wall_s": trace.wall_s}
        memory = self.device.memory()
        window |= {key: memory.get(key) for key in ("allocated_bytes", "reserved_bytes")}
        for sample in trace.samples:
            missing = [key for key in COUNTS if sample.counts and key not in sample.counts]
            if missing:
                raise ValueError(f"the engine's Work of step {sample.step} does not count {', '.join(missing)}")
        self.out["windows"].append(window)
        self.out.setdefault("in_use_bytes", {})[name] = memory.get("in_use_bytes")
        self.out["samples"] += [sample.model_dump(mode="json", by_alias=True) for sample in trace.samples]

    def tell(self, phase: str, done: int, total: int) -> None:
        """How far this is, for whoever watches: rank 0 alone, and not too often."""
        at = now()
        if self.rank == 0 and (done in (0, total) or at - self._told > PROGRESS_S):
            self._told = at
            _replace(self.folder / "progress.json", {"phase": phase, "done": done, "total": total})

    def write(self, status: str, error: str | None) -> None:
        self.out |= {"status": status, "error": error, "ended_s": now(), "budget": self.budget.parts()}
        _replace(self.folder / f"rank-{self.rank}.json", self.out)

    def ended(self, number: int, frame: Any) -> None:
        """Told to end: leave what there is, then go the way the signal says."""
        self.write("ended", None)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def leave(self) -> None:
        if self.world > 1 and self.out["status"] == "done":
            import torch.distributed as dist

            dist.destroy_process_group()


def _always_the_same() -> None:
    """Torch's kernels in their deterministic variants; one that has none raises. Our own add in a fixed order."""
    import torch

    torch.use_deterministic_algorithms(True)
    # Otherwise it costs a pass over memory; nothing here reads any of that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _plain(what: str, value: Any) -> Any:
    """What an engine says, if it can go into a file."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the engine's {what} are not plain values: {error}") from error
    return value


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Readers see the old file or the new one, never half of one."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
