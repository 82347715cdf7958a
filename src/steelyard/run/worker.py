"""A worker: one rank of a run, on one device. It reads a spec and leaves a rank file, whatever
happens in between.

Started by the node agent as `python -m steelyard.run.worker SPEC`, with RANK, LOCAL_RANK and
WORLD_SIZE in its environment. It ends when its stdin is closed, because then its agent is gone. It
imports no framework itself: its engine's row names one. `RankProcess` is the part that the worker
of `steelyard spec` shares (run/ceilings_worker.py).
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from steelyard import accelerators, files, plugins
from steelyard.data.counting import Counter
from steelyard.engine import rows as engine_rows
from steelyard.engine.framework import Framework
from steelyard.engine.job import Engine, Job, Keep
from steelyard.engine.work import Work
from steelyard.errors import ExchangeError, RequestError, lacks_memory
from steelyard.plan import degrees, matmuls
from steelyard.record.facts import EngineDetails, Weights
from steelyard.record.record import Sample, Window
from steelyard.run import messages, processes
from steelyard.run.boundary import RankFile, RankStatus, WorkerSpec, plain
from steelyard.run.calibrate import calibrate, calibrate_after
from steelyard.run.clock import busy, every, now
from steelyard.run.explain import explain, steps_of
from steelyard.run.failure import DISK_FULL
from steelyard.run.measure import Budget, Trace, bare, time_calls
from steelyard.run.messages import HostSpec, Progress
from steelyard.schema import Frozen
from steelyard.tasks.task import Prepared, Sources
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Before, CheckpointRun, State

PROGRESS_S = 0.1
CHILDREN_S = 1.0  # for a compiler to delete its temporary files
EXCHANGES = 3


def serve(make: Callable[[int], "RankProcess"], place: Path) -> NoReturn:
    """Create the rank's process object with `make_process(rank)`, run it, write its final rank file
    and exit this process: code 0 if it is done, else 1, or 74 if the disk is full.

    Errors go into the rank file as a status and a text, and to stderr. `folder` is the folder that
    is shared with the agent. Installs a SIGTERM handler, writes stack traces on SIGUSR1, and ends
    the process when stdin is closed. Libraries are not shut down, because some of them abort in it.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        # read by the agent if the run hangs
        stacks = (place / messages.stack_name(rank)).open("w")
    except OSError as failure:
        _end_without_result(failure)
    processes.wake_with_parent()
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    threading.Thread(target=_end_with_agent, daemon=True).start()
    worker = make(rank)
    signal.signal(signal.SIGTERM, worker.ended)
    status: RankStatus = "done"
    error = None
    try:
        worker.run()
    except RequestError as failure:
        status, error = "request", str(failure)
    except Exception as failure:  # noqa: BLE001  whatever it was goes into the rank file, and on to stderr
        status, error = (
            _kind(failure),
            " ".join("".join(traceback.format_exception_only(failure)).split()),
        )
        traceback.print_exc()
    try:
        status = worker.leave(status, error)
    except OSError as failure:
        _end_without_result(failure)
    if status == "done" and worker.framework is not None:
        worker.framework.leave()
    # The results are written: libraries are not shut down, because some of them abort in it now and
    # then.
    os._exit(0 if status == "done" else 1)


def _end_without_result(failure: OSError) -> NoReturn:
    """Print the traceback and exit the process where no rank file can be written: code 74 for a
    full disk, else 1.
    """
    traceback.print_exc()
    os._exit(DISK_FULL if failure.errno in files.FULL else 1)


def _kind(failure: BaseException) -> RankStatus:
    """Return the status for the rank file that names an error: `out_of_memory`, `disk_full`,
    `network`, else `raised`.
    """
    if lacks_memory(failure):
        return "out_of_memory"
    if isinstance(failure, OSError) and failure.errno in files.FULL:
        return "disk_full"
    return "network" if isinstance(failure, ExchangeError) else "raised"


def _end_with_agent() -> None:
    """Wait until stdin is closed, which means that the agent is gone; then end all descendants of
    this process and exit with code 3.
    """
    while os.read(0, 1 << 10):
        pass
    processes.end(lambda: processes.children(os.getpid()), CHILDREN_S)
    os._exit(3)


class RankProcess(ABC):
    """The common part of all workers: the rank file, which grows and is written repeatedly, the
    time budget and the progress file. Subclasses implement `run`.
    """

    def __init__(self, rank: int, accelerator: str, host: HostSpec) -> None:
        """Read world size and local rank from WORLD_SIZE and LOCAL_RANK, start the budget, and
        begin a rank file with status `running`, which is not written yet.
        """
        self.rank, self.host = rank, host
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.budget = Budget()
        self.framework: Framework | None = None
        device = f"{accelerator}:{self.local_rank}"
        self.file = RankFile(
            rank=rank, device=device, status="running", error=None, ended_s=0.0, budget={}
        )
        self._told = 0.0
        self._clocks = every()

    @abstractmethod
    def run(self) -> None:
        """Do the work of this rank; results go into the rank file. A raised error becomes its
        status.
        """

    def _add(self, **facts: Any) -> None:
        """Replace these fields of the rank file in memory; nothing is written."""
        self.file = self.file.model_copy(update=facts)

    def tell(self, phase: str, done: int, total: int) -> None:
        """Write the progress file, on rank 0 alone: at the beginning and end of a phase, else at
        most every `PROGRESS_S` seconds.
        """
        at = now()
        if self.rank == 0 and (done in (0, total) or at - self._told > PROGRESS_S):
            self._told = at
            self._replace(messages.PROGRESS, Progress(phase=phase, done=done, total=total))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block as a part of the budget, and report it as progress:
        loading and compiling take minutes.
        """
        self.tell(name.replace("_", " "), 0, 0)
        with self.budget.part(name):
            yield

    def write(self, status: RankStatus, error: str | None) -> None:
        """Write the rank file with this status and error, the time, the budget and the clocks so
        far, replacing the one before.
        """
        clocks = {
            name: at - self._clocks[name] for name, at in every().items() if name in self._clocks
        }
        self._add(
            status=status,
            error=error,
            ended_s=now() - self.host.origin_s,
            budget=self.budget.parts(),
            clocks=clocks,
        )
        self._replace(messages.rank_name(self.rank), self.file)

    def leave(self, status: RankStatus, error: str | None) -> RankStatus:
        """Write the final rank file and return its status.

        If what an engine or a plug-in reported cannot be written as JSON, write one that says only
        that, with status `raised`.
        """
        try:
            self.write(status, error)
        except ValueError as failure:  # PydanticSerializationError is one
            traceback.print_exc()
            self.file = RankFile(
                rank=self.rank,
                device=self.file.device,
                status="raised",
                error=None,
                ended_s=0.0,
                budget={},
            )
            status = "raised"
            self.write(status, error or f"its result cannot be written as JSON: {failure}")
        return status

    def _replace(self, name: str, table: Frozen) -> None:
        """Write a file into the shared folder so that readers see the old or the new content, never
        a part; it is not synced to disk.
        """
        files.write(
            self.host.folder / name, table.model_dump_json(by_alias=True).encode(), durable=False
        )

    def ended(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: write the rank file with status `ended`, then die by the same signal."""
        self.write("ended", None)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def main() -> None:
    """Read the spec file named in the first argument, run it as one rank, and exit the process."""
    spec = WorkerSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    serve(partial(Worker, spec), spec.host.folder)


class Worker(RankProcess):
    """One rank of a case's run: loads engine and framework, runs the passes, and collects what is
    measured in the rank file.
    """

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        """Take case, task and kind from the spec, and this rank's coordinates in the plan."""
        super().__init__(rank, spec.run.accelerator, spec.host)
        self.spec = spec.run
        self.case = spec.run.case
        self.task = self.case.question.row
        self.kind = self.task.kind_row
        self.place = degrees.place(spec.run.plan, rank)
        self.outputs: Frozen | None = None  # the part of the outputs that no pass changes
        self._counter: Counter | None = None

    def run(self) -> None:
        """Load, join the other ranks, prepare the data, and run all passes, then the calibration
        after them and the profile.

        Data are read in a thread while engine and framework are imported. The rank file is written
        after each pass.
        """
        self.tell("imports", 0, 0)
        # reading needs no framework, and tokenizers use other cores
        reading = ThreadPoolExecutor(1).submit(self._read)
        framework, make_engine = self._load()
        self.framework = framework
        group = self._join(framework)
        with self._phase("data"):
            prepared = self._prepare(*reading.result())
            keep = self._keep_checkpoints(prepared.facts.fingerprint)
        with self._phase("engine"):
            engine = make_engine(self._job(prepared.inputs, framework, group, keep))
        for name in self.spec.passes:
            self.tell(f"prepare {name}", 0, 0)
            engine.prepare(name, self._phase)
            if self.file.matmul_flops_per_s is None:
                with self._phase("calibrate"):
                    self._add(**self._calibrate(framework))
            self._pass(engine, name, framework)
        self._calibrate_after(framework)
        if self.spec.explain:
            self._explain(engine, framework)
        self._add(compile_cache=framework.compile_cache())
        details = EngineDetails.model_validate(plain("details", engine.details()))
        self._add(details=details, weights=Weights(**plain("weights", dict(engine.weights))))

    def _load(self) -> tuple[Framework, Any]:
        """Return the framework, set up on this rank's device, and the function that creates the
        engine; adds device, versions and threads to the rank file.
        """
        with self.budget.part("imports"):
            row = engine_rows.row(self.spec.engine)
            make_engine = engine_rows.load(row.name, self.task.work)
            make_framework = engine_rows.load_framework(row.framework)
        with self.budget.part("device"):
            device = accelerators.named(self.spec.accelerator).devices.get(row.framework)
            framework = make_framework(device, self.local_rank, now)
            framework.set_precision(self.case.question.precision.matmul)
            if self.case.tune.deterministic:
                framework.make_deterministic()
            self._add(
                identity=framework.identity(),
                versions=framework.versions(),
                threads=framework.threads(),
            )
        return framework, make_engine

    def _join(self, framework: Framework) -> Any:
        """Join the other ranks and return the process group of those that hold one model with this
        one; with several ranks, also test and time an all-reduce.
        """
        if self.world == 1:
            return framework.join(self.spec.plan, self.rank, self.world, None)
        with self._phase("join"):
            group = framework.join(self.spec.plan, self.rank, self.world, self.host.rendezvous)
            self._add(all_reduce_bytes_per_s=self._try_exchange(framework))
        return group

    def _try_exchange(self, framework: Framework) -> float:
        """Check a small all-reduce before anything depends on one, and return its rate in bytes per
        second; raise ExchangeError if its sum is wrong.
        """
        work, size_bytes, check = framework.all_reduce()
        time_calls(work, framework, 1)  # the first call sets up connections
        time_s = time_calls(work, framework, EXCHANGES) / EXCHANGES
        wrong = check()
        if wrong is not None:
            raise ExchangeError(f"an all-reduce over {self.world} ranks gave {wrong}")
        return size_bytes / time_s

    def _read(self) -> tuple[Prepared, float]:
        """Read and tokenize the task's data, and return them with the seconds that it took."""
        begin_s = now()
        sources = Sources(self.spec.data, self.spec.tokenizer, self.spec.weights)
        scope, case = self.spec.scope, self.case
        asked = case.question.asked(sources, scope.sample, case.tune.pack, case.published)
        return (
            self.task.prepare(replace(asked, subjects=scope.subjects, rows=scope.rows)),
            now() - begin_s,
        )

    def _prepare(self, prepared: Prepared, time_s: float) -> Prepared:
        """Keep outputs and counter of the data for later, add their facts and reading time to the
        rank file, and return the data unchanged.
        """
        self.outputs = prepared.outputs
        window = getattr(self.case.question.model, "window", None)  # some families have it
        self._counter = plugins.load(self.kind.works[self.task.work])(
            prepared.inputs, self.case.question.division, window
        )
        common = prepared.outputs.model_dump(mode="json") if self.rank == 0 else {}
        self._add(data=prepared.facts, common=common, beside={"data": time_s})
        return prepared

    def _keep_checkpoints(self, fingerprint: str) -> Keep | None:
        """Return where and how often checkpoints are saved, or None if none are; rank 0 creates the
        folder and describes the run in it.

        Raises RequestError if the run resumes from a checkpoint with other data, which is known
        only now.
        """
        spec, key = self.spec, self.case.key(fingerprint)
        if (
            spec.resume is not None
            and checkpoints.read(spec.resume.parent / checkpoints.RUN, CheckpointRun).key != key
        ):
            raise RequestError(
                "--resume: the data or their tokens differ from those of the checkpoint; use the"
                " same"
            )
        if spec.checkpoints is None or self.case.tune.checkpoint_every is None:
            return None
        if self.rank == 0:
            asked = self.case.question.model_dump(mode="json")
            run = CheckpointRun(
                name=self.case.name,
                question=asked,
                key=key,
                sample=spec.scope.sample,
                engine=spec.engine,
            )
            spec.checkpoints.mkdir(parents=True)
            checkpoints.write(spec.checkpoints / checkpoints.RUN, run)
        return Keep(spec.checkpoints, self.case.tune.checkpoint_every)

    def _job(self, inputs: Any, framework: Framework, group: Any, keep: Keep | None) -> Job:
        """Return all that the engine is told."""
        return Job(
            case=self.case,
            work=self.task.work,
            inputs=inputs,
            weights=self.spec.weights,
            device=framework.device,
            rank=self.rank,
            world=self.world,
            plan=self.spec.plan,
            place=self.place,
            group=group,
            steps=self.spec.scope.steps,
            loading=lambda done, total: self.tell("weights", done, total),
            keep=keep,
            resume=self.spec.resume,
            folder=self.host.folder,
            checkout=self.spec.checkout,
        )

    def _calibrate(self, framework: Framework) -> dict[str, Any]:
        """Return the measured rates of matmuls on random numbers, in the case's precision and the
        shapes of its real batches, as fields of the rank file.
        """
        steps = range(1) if self.kind.headline[0] in self.kind.stepped else None
        # counts of the whole pass, or of its first step
        held = None if self._counter is None else self._counter.wanted(steps)[0]
        shapes_of = partial(matmuls.of_case, self.case, self.spec.plan.tp, held)
        return calibrate(framework, self.case.question.precision.matmul, shapes_of)

    def _calibrate_after(self, framework: Framework) -> None:
        """Time the square matmul again after the passes and add its rates to the rank file, if it
        was timed over CPU time before: a host that was busy before the passes may be idle after
        them.
        """
        rates, rate = self.file.matmul_cpu_rates, self.file.matmul_flops_per_s
        if rates and rate:
            with self._phase("calibrate"):
                after = calibrate_after(framework, self.case.question.precision.matmul, rate)
            self._add(matmul_cpu_rates={**rates, "after": after})

    def _pass(self, engine: Engine, name: str, framework: Framework) -> None:
        """Run one pass in the measured loop, and add its window, samples and answers to the rank
        file, which is written at the end.

        A bare pass has no samples and no answers. Only the first rank of each replica asks the
        engine for answers, which the task checks; those of an initial pass are also saved beside
        the checkpoints.
        """
        framework.barrier()
        framework.reset_memory()
        with self.budget.part(f"total_{name}"):
            total = engine.total(name)
            framework.synchronize()

        def step_done(done: int) -> None:
            """Report the progress after a step but the last: what follows the last mark is time
            that no step accounts for.
            """
            # the last is reported below: after its mark comes time that no step accounts for
            if done < total:
                self.tell(name, done, total)

        self.tell(name, 0, total)
        with self.budget.part(name):
            if name in self.kind.bare:
                trace = bare(engine.work(name), framework)
            else:
                trace = plugins.load(self.kind.loop)(
                    engine.work(name), framework, step_done=step_done, busy=busy
                )
        self.tell(name, total, total)
        samples: list[Sample] = []
        if name not in self.kind.bare:
            with self.budget.part(f"count_{name}"):
                samples = trace.samples(name, self.rank, partial(self._count, name))
        self._keep(name, trace, samples, framework)
        self._draw(name, trace, samples)
        # ranks that hold one model have the same answers
        if name not in self.kind.bare and self.place.tp == self.place.pp == 0:
            with self.budget.part(f"outputs_{name}"):
                told = engine.outputs(name)
                framework.synchronize()
            answers = self.task.check(told, self.outputs)
            self._add(outputs={**self.file.outputs, name: answers})
            if name in self.kind.initial and self.spec.checkpoints is not None:
                path = self.spec.checkpoints / checkpoints.BEFORE.format(self.place.dp)
                checkpoints.write(path, Before(table=answers))
        self.write("running", None)  # remains if the worker is killed later

    def _explain(self, engine: Engine, framework: Framework) -> None:
        """Profile some more steps of the headline pass and add the profile to the rank file; the
        first tensor- and data-parallel rank of every pipeline stage profiles, all ranks run the
        steps. Does nothing if the run has no headline pass.
        """
        name = next((one for one in self.kind.headline if one in self.spec.passes), None)
        if name is None:
            return
        with self._phase("explain"):
            framework.barrier()
            steps = steps_of(self.case, self.spec.plan, self.spec.scope.sample)
            count, watch = partial(self._count, name), self.place.tp == self.place.dp == 0
            trace = self.spec.trace if self.rank == 0 else None
            self._add(
                profile=explain(engine, name, framework, count, steps, self.rank, watch, trace)
            )

    def _count(self, name: str, item: Work) -> dict[str, int]:
        """Return the counts of a step: for rows that the engine names, what the data say, with the
        engine's own padding; else what the engine counts.
        """
        if item.rows is None or self._counter is None:
            return item.counts
        counted = self._counter.of(item.rows, item.prefixes, held_out=name not in self.kind.stepped)
        return counted | {"padded": item.counts.get("padded", 0)}

    def _draw(self, name: str, trace: Trace, samples: list[Sample]) -> None:
        """Add to the rank file what the rows of a pass must count by the data alone, whatever the
        engine said.

        Only rank 0 does it, and not for bare passes, for programs that do not say what they drew,
        or where `--steps` cuts a pass short, as it is unknown which rows were used.
        """
        if (
            self._counter is None
            or self.rank
            or name in self.kind.bare
            or trace.clock == "reported"  # an external program does not report its rows
            or (self.spec.scope.steps is not None and self.kind.cut_by_steps)
        ):
            return
        with self.budget.part(f"count_{name}"):
            steps = None
            if name in self.kind.stepped:
                begin = (
                    checkpoints.read(self.spec.resume / checkpoints.STATE, State).step
                    if self.spec.resume
                    else 0
                )
                steps = range(begin, begin + sum(1 for sample in samples if sample.counts))
            self._add(drawn={**self.file.drawn, name: self._counter.wanted(steps)})

    def _keep(self, name: str, trace: Trace, samples: list[Sample], framework: Framework) -> None:
        """Add the window of a pass (start, wall time, memory peaks) and its samples to the rank
        file in memory.
        """
        memory = framework.memory()
        window = Window(
            pass_name=name,
            rank=self.rank,
            start_s=trace.start_at - self.host.origin_s,
            wall_s=trace.wall_s,
            allocated_bytes=memory.get("allocated_bytes"),
            reserved_bytes=memory.get("reserved_bytes"),
            device_s=trace.device_s,
            cpu_s=trace.cpu_s,
        )
        self._add(
            windows=[*self.file.windows, window],
            in_use_bytes={**self.file.in_use_bytes, name: memory.get("in_use_bytes")},
            samples=[*self.file.samples, *samples],
            clock=self.file.clock if name in self.kind.bare else trace.clock,
        )


if __name__ == "__main__":
    main()
