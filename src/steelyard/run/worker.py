"""A worker: one rank of a run, on one device. It reads a spec and leaves a rank file, whatever
happens in between.

Started by the node agent as `python -m steelyard.run.worker SPEC`, with RANK, LOCAL_RANK and
WORLD_SIZE in its environment. It ends when its stdin is closed, because then its agent is gone. It
imports no framework itself: its engine's row names one.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from steelyard import accelerators, plugins
from steelyard.data.counting import StepCounter
from steelyard.data.prompts import PromptRequests
from steelyard.engine import engine_rows
from steelyard.engine.framework import Framework
from steelyard.engine.job import CheckpointSchedule, Engine, Job
from steelyard.engine.work import Work
from steelyard.errors import RequestError
from steelyard.plan import degrees, matmuls
from steelyard.plan.matmuls import BatchMatmuls
from steelyard.record.record import PassFacts, Sample, Scope
from steelyard.record.run_facts import EngineDetails, WeightsFacts
from steelyard.run.answer_check import (
    OWN_LOGPROBS,
    UNKNOWN_WEIGHTS,
    AnsweredTexts,
    make_check_job,
)
from steelyard.run.clock import now, read_cpu_time_s
from steelyard.run.exchange_check import check_all_reduce
from steelyard.run.explain import count_profiled_steps, profile_steps
from steelyard.run.generation_pass import make_checker, run_requests
from steelyard.run.measure import PassTrace, measure_bare
from steelyard.run.messages import WorkerEvent
from steelyard.run.rank_process import RankProcess, run_rank_process
from steelyard.run.worker_files import WorkerSpec, check_json_value
from steelyard.schema import FrozenModel
from steelyard.tasks.task import PreparedData, Sources
from steelyard.training import checkpoint_folders
from steelyard.training.checkpoint_folders import BeforePassOutputs, CheckpointRun, CheckpointState


class Worker(RankProcess):
    """One rank of a case's run, created by `main` in the worker's process: `run` loads engine and
    framework, prepares the data, runs the passes in order, and collects what is measured in
    `rank_file`; the base class `RankProcess` writes it.

    `spec` is the parent's part of the spec, `case` its case, `task` and `kind` the rows of its task
    and kind of task, `place` this rank's position in the plan, `outputs` the part of the task's
    outputs that no pass changes (None before the data are read).
    """

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        """Take case, task and kind of task from the spec, and find this rank's position in the plan
        (`place`); begin its rank file. Nothing is loaded or written.
        """
        super().__init__(rank, spec.run.accelerator, spec.host)
        self.spec = spec.run
        self.case = spec.run.case
        self.task = self.case.question.task_row
        self.kind = self.task.kind_row
        self.place = degrees.find_position(spec.run.plan, rank)
        self.outputs: FrozenModel | None = None  # the part of the outputs that no pass changes
        self._counter: StepCounter | None = None
        self._answers = AnsweredTexts()  # of generation: what is checked after its pass
        self._check_facts: dict[str, str] = {}  # details on what checked them

    def run(self) -> None:
        """Do all that this rank does: prepare the data, wait until matmuls were timed on its
        device, load engine and framework (stored in `self.framework`), join the other ranks, run
        all passes in order and, with `explain`, the profile.

        Data are read in a thread while the framework is imported. The rank file is written after
        each pass; engine details and weights are added to it in memory at the end. Errors of
        engine, task and framework are passed on.
        """
        self.write_progress("imports", 0, 0)
        # reading needs no framework, and tokenizers use other cores
        reading = ThreadPoolExecutor(1).submit(self._read_data)
        self._import_framework()
        with self._time_and_report("data"):
            prepared = self._store_data(*reading.result())
        self._wait_for_calibration()
        framework, make_engine = self._load_framework_and_engine()
        self.framework = framework
        group = self._join_ranks(framework)
        if self.spec.rehearsed_rows is not None:
            self._rehearse(make_engine, framework, group)
        with self._time_and_report("engine"):
            keep = self._start_checkpoints(prepared.facts.fingerprint)
            engine = make_engine(self._make_job(prepared.inputs, framework, group, keep))
        for name in self.spec.passes:
            if name in self.kind.check_passes:
                self._check_answers(engine, name, framework, group)
                continue
            self.write_progress(f"prepare {name}", 0, 0)
            engine.prepare(name, self._time_and_report)
            if name in self.kind.request_passes:
                self._run_requests(engine, name, framework, prepared.inputs)
            else:
                self._run_pass(engine, name, framework)
        if self.spec.explain:
            self._profile_steps(engine, framework)
        self._update_rank_file(compile_cache=framework.compile_cache())
        details = EngineDetails.model_validate(
            check_json_value("details", {**engine.details(), **self._check_facts})
        )
        self._update_rank_file(
            details=details,
            weights=WeightsFacts(**check_json_value("weights", dict(engine.weights))),
        )

    def _import_framework(self) -> None:
        """Import the framework that the spec names, if it names one, while nothing of the engine is
        imported. If that fails, nothing is raised: loading the engine fails too, and says why.
        """
        if self.spec.framework is not None:
            with self.budget.part("imports"), suppress(ImportError):
                plugins.load_reference(self.spec.framework)

    def _wait_for_calibration(self) -> None:
        """Tell the agent that this rank is ready to import its engine, and which matmuls its case
        has, and wait until the agent lets it go on: meanwhile other processes time matmuls on the
        devices of this host. Returns at once without an agent.
        """
        if self.events.has_agent:
            batch = self._describe_batch().model_dump(mode="json")
            with self._time_and_report("calibrate"):
                self.events.send(WorkerEvent(event="ready", batch=batch))
                self.agent_spoke.wait()

    def _load_framework_and_engine(self) -> tuple[Framework, Any]:
        """Import the engine of this rank's spec, construct its framework on this rank's device in
        the case's matmul precision (deterministic if the tune says so), and return the framework
        and the function that makes the engine from a Job.

        Adds device identity, library versions and threads to the rank file.
        """
        with self.budget.part("imports"):
            row = engine_rows.find_engine(self.spec.engine)
            make_engine = engine_rows.load_engine(row.name, self.task.work)
            engine_rows.load_framework(row.framework)
        with self.budget.part("device"):
            framework = self._make_framework(row.framework)
            self._update_rank_file(
                identity=framework.identity(),
                versions=framework.versions(),
                threads=framework.threads(),
            )
        return framework, make_engine

    def _make_framework(self, name: str) -> Framework:
        """Construct a framework by its name on this rank's device, in the case's matmul precision,
        deterministic if the tune says so.
        """
        device = accelerators.find_accelerator(self.spec.accelerator).devices.get(name)
        framework = engine_rows.load_framework(name)(device, self.local_rank, now)
        framework.set_precision(self.case.question.precision.matmul)
        if self.case.tune.deterministic:
            framework.make_deterministic()
        return framework

    def _join_ranks(self, framework: Framework) -> Any:
        """Join the other ranks (a collective call) and return the process group of the ranks that
        hold one model with this one, in the framework's type; with several ranks, also test an
        all-reduce and add its rate to the rank file. Raises ExchangeError if its sum is wrong.
        """
        if self.world_size == 1:
            return framework.join_ranks(self.spec.plan, self.rank, self.world_size, None)
        with self._time_and_report("join"):
            group = framework.join_ranks(
                self.spec.plan, self.rank, self.world_size, self.host.rendezvous
            )
            rate = check_all_reduce(framework, self.world_size)
            self._update_rank_file(all_reduce_bytes_per_s=rate)
        return group

    def _read_data(self) -> tuple[PreparedData, float]:
        """Read and tokenize the task's data for this rank's case and scope, and return them with
        the seconds that it took; runs in a thread. Raises RequestError if data are missing or
        wrong.
        """
        begin_s = now()
        return self._prepare_data(self.spec.scope), now() - begin_s

    def _prepare_data(self, scope: Scope) -> PreparedData:
        """Read and tokenize the task's data for this rank's case in a scope and return them. Raises
        RequestError if data are missing or wrong.
        """
        sources, case = Sources(self.spec.data, self.spec.tokenizer, self.spec.weights), self.case
        data_request = case.question.describe_for_task(
            sources, scope.sample, case.tune.pack, case.published
        )
        return self.task.prepare(
            replace(
                data_request,
                subjects=scope.subjects,
                rows=scope.rows,
                requests=scope.requests or 0,
                salt=self.spec.salt,
            )
        )

    def _rehearse(self, make_engine: Any, framework: Framework, group: Any) -> None:
        """Run the passes of this run in reverse order over `spec.rehearsed_rows`, with an engine
        object of their own, and drop its answers; nothing is measured or added to the rank file but
        time in the budget.

        An engine that answers a pass from the one before it then has answers to other rows.
        """
        scope = Scope(kind="window", rows=self.spec.rehearsed_rows)
        with self._time_and_report("rehearsal"):
            prepared = self._prepare_data(scope)
            engine = make_engine(self._make_job(prepared.inputs, framework, group, None))
        for name in reversed(self.spec.passes):
            engine.prepare(name, self._time_and_report)
            with self._time_and_report("rehearsal"):
                for _ in engine.work(name):
                    pass
                framework.synchronize()
                if self.place.tp == self.place.pp == 0:
                    engine.outputs(name)

    def _store_data(self, prepared: PreparedData, time_s: float) -> PreparedData:
        """Store the outputs of the read data as `self.outputs` and create the counter of steps, add
        facts, reading time (`beside`) and, on rank 0, the common outputs to the rank file, and
        return the data unchanged.
        """
        self.outputs = prepared.outputs
        window = getattr(self.case.question.model, "window", None)  # some families have it
        self._counter = plugins.load_reference(self.kind.works[self.task.work])(
            prepared.inputs, self.case.question.division, window
        )
        common = prepared.outputs.model_dump(mode="json") if self.rank == 0 else {}
        self._update_rank_file(data=prepared.facts, common=common, beside={"data": time_s})
        return prepared

    def _start_checkpoints(self, fingerprint: str) -> CheckpointSchedule | None:
        """Check the data of a resumed run, then return where and after how many steps checkpoints
        are saved, or None if none are. Rank 0 creates the folder (FileExistsError if it exists) and
        writes run.json into it: the run's name, question, key, sample and engine (`CheckpointRun`).

        The check comes first, also if no checkpoints are saved: RequestError if the checkpoint that
        this run resumes from was made with other data, which only the `fingerprint` of the data
        that were read shows.
        """
        spec, key = self.spec, self.case.compute_key(fingerprint)
        if (
            spec.resume is not None
            and checkpoint_folders.read_checkpoint_json(
                spec.resume.parent / checkpoint_folders.RUN_FILE, CheckpointRun
            ).key
            != key
        ):
            raise RequestError(
                "--resume: the data or their tokens differ from those of the checkpoint; use the"
                " same --data and --tokenizer"
            )
        if spec.checkpoints is None or self.case.tune.checkpoint_every is None:
            return None
        if self.rank == 0:
            question = self.case.question.model_dump(mode="json")
            run = CheckpointRun(
                name=self.case.name,
                question=question,
                key=key,
                sample=spec.scope.sample,
                engine=spec.engine,
            )
            spec.checkpoints.mkdir(parents=True)
            checkpoint_folders.write_checkpoint_json(
                spec.checkpoints / checkpoint_folders.RUN_FILE, run
            )
        return CheckpointSchedule(spec.checkpoints, self.case.tune.checkpoint_every)

    def _make_job(
        self, inputs: Any, framework: Framework, group: Any, keep: CheckpointSchedule | None
    ) -> Job:
        """Return the engine's Job for this rank: case, work, inputs, weights, device, rank and
        position in the plan, process group, `--steps`, checkpoints to write (`keep`; None: none)
        and to resume from, shared folder and checkout. Loading of weights is reported as progress
        `weights`.
        """
        return Job(
            case=self.case,
            work=self.task.work,
            inputs=inputs,
            weights=self.spec.weights,
            device=framework.device,
            rank=self.rank,
            world=self.world_size,
            plan=self.spec.plan,
            place=self.place,
            group=group,
            steps=self.spec.scope.steps,
            report_loading=lambda done, total: self.write_progress("weights", done, total),
            checkpoint_schedule=keep,
            resume=self.spec.resume,
            folder=self.host.folder,
            checkout=self.spec.checkout,
            settings=self.spec.settings,
            engine=self.spec.engine,
            accelerator=self.spec.accelerator,
        )

    def _describe_batch(self) -> BatchMatmuls:
        """Return the matmuls of one of the case's real batches on this rank's device.

        The batch is that of the first step if the headline pass has steps with global batches, else
        it is derived from the whole pass.
        """
        steps = range(1) if self.kind.headline[0] in self.kind.stepped else None
        # counts of the whole pass, or of its first step
        batch_counts = None if self._counter is None else self._counter.count_expected(steps)[0]
        return matmuls.describe_case_batch(self.case, self.spec.plan.tp, batch_counts)

    def _run_pass(self, engine: Engine, pass_name: str, framework: Framework) -> None:
        """Run one pass on this rank in the measured loop, and add its window, samples and answers
        to the rank file, which is written at the end with status `running`.

        All ranks wait for one another first, and the memory peaks are reset. The agent is told when
        the pass begins and ends, to compare its own clock. A bare pass (timed
        without marks) has no samples and no answers. Only the first rank of each replica asks the
        engine for answers, which the task checks (TypeError or ValueError if they do not fit);
        those of an initial pass are also written beside the checkpoints.
        """
        framework.barrier()
        framework.reset_memory()
        with self.budget.part(f"total_{pass_name}"):
            total = engine.total(pass_name)
            framework.synchronize()

        def step_done(done: int) -> None:
            """Report the progress after a step, but not after the last of the pass: what follows
            the last mark is time that no step accounts for.
            """
            # the last is reported below: after its mark comes time that no step accounts for
            if done < total:
                self.write_progress(pass_name, done, total)

        self.write_progress(pass_name, 0, total)
        self.events.send(WorkerEvent(event="begin", pass_name=pass_name))
        with self.budget.part(pass_name):
            if pass_name in self.kind.bare:
                trace = measure_bare(engine.work(pass_name), framework)
            else:
                trace = plugins.load_reference(self.kind.loop)(
                    engine.work(pass_name), framework, step_done=step_done, busy=read_cpu_time_s
                )
        self.events.send(WorkerEvent(event="end", pass_name=pass_name))
        self.write_progress(pass_name, total, total)
        samples: list[Sample] = []
        if pass_name not in self.kind.bare:
            with self.budget.part(f"count_{pass_name}"):
                samples = trace.make_samples(
                    pass_name, self.rank, partial(self._count_step, pass_name)
                )
        self._store_pass(pass_name, trace, samples, framework)
        self._store_drawn_counts(pass_name, trace, samples)
        # ranks that hold one model have the same answers
        if pass_name not in self.kind.bare and self.place.tp == self.place.pp == 0:
            with self.budget.part(f"outputs_{pass_name}"):
                engine_outputs = engine.outputs(pass_name)
                framework.synchronize()
            answers = self.task.check(engine_outputs, self.outputs)
            self._update_rank_file(outputs={**self.rank_file.outputs, pass_name: answers})
            if pass_name in self.kind.initial and self.spec.checkpoints is not None:
                path = self.spec.checkpoints / checkpoint_folders.BEFORE_FILE.format(self.place.dp)
                checkpoint_folders.write_checkpoint_json(path, BeforePassOutputs(table=answers))
        self.write_rank_file("running", None)  # remains if the worker is killed later

    def _run_requests(
        self, engine: Any, pass_name: str, framework: Framework, requests: PromptRequests
    ) -> None:
        """Run one pass of requests in its loop, and add its window, the steps of the engine, the
        request samples and the answers that are to be checked to the rank file, which is written at
        the end with status `running`. The other ranks of a tensor-parallel group compute the steps
        that their first one plans, and have no request samples.
        """
        results = run_requests(
            self,
            self.case,
            engine,
            pass_name,
            framework,
            requests,
            self.spec.scope.min_time_s,
            leads=self.place.tp == 0,
        )
        self._answers, steps = results.answers, results.steps
        self._store_pass(pass_name, steps, steps.make_samples(pass_name, self.rank), framework)
        if results.samples is not None:
            answers = self.task.check(self._answers.to_outputs(), self.outputs)
            self._update_rank_file(
                requests=[*self.rank_file.requests, results.samples],
                outputs={**self.rank_file.outputs, pass_name: answers},
            )
        self.write_rank_file("running", None)

    def _check_answers(self, engine: Any, pass_name: str, framework: Framework, group: Any) -> None:
        """Score the answers that the pass before left, by a reference engine on the same device,
        after the engine that gave them has freed it. If the weights are not known here, the
        distances that the engine itself reports are stored, or nothing.
        """
        own_distances = engine.report_distances() if hasattr(engine, "report_distances") else None
        with self._time_and_report("close"):
            engine.close()
        if own_distances is not None:
            answers = self.task.check(own_distances, self.outputs)
            self._check_facts = {"checked_by": OWN_LOGPROBS}
            self._update_rank_file(outputs={**self.rank_file.outputs, pass_name: answers})
            return
        if engine.weights.get("source") == UNKNOWN_WEIGHTS or not self._answers.rows:
            return
        with self._time_and_report("imports_check"):
            checker = make_checker(
                self.case,
                self.spec.engine,
                self.kind.check_work,
                framework,
                group,
                self._make_framework,
            )
        self._check_facts = {"checked_by": checker.name}
        job = self._make_job(self._answers, checker.framework, checker.group, None)
        # random weights as a server was given them
        job = replace(job, weights=getattr(engine, "written_weights", None) or job.weights)
        reference = checker.make_engine(make_check_job(job, self.kind.check_work))
        self.write_progress(f"prepare {pass_name}", 0, 0)
        reference.prepare(pass_name, self._time_and_report)
        self._counter = self._answers.make_counter(self.case)
        self._run_pass(reference, pass_name, checker.framework)

    def _profile_steps(self, engine: Engine, framework: Framework) -> None:
        """Run some more steps of the best headline pass of the run, and add their profile to the
        rank file; does nothing if the run has no headline pass.

        All ranks run the steps together; the first tensor- and data-parallel rank of every pipeline
        stage uses the profiler, the others get the profile None. Rank 0 also writes the trace, if
        one was asked for.
        """
        pass_name = next(
            (candidate for candidate in self.kind.headline if candidate in self.spec.passes), None
        )
        if pass_name is None:
            return
        with self._time_and_report("explain"):
            framework.barrier()
            steps = count_profiled_steps(self.case, self.spec.plan, self.spec.scope.sample)
            count, use_profiler = (
                partial(self._count_step, pass_name),
                self.place.tp == self.place.dp == 0,
            )
            trace = self.spec.trace if self.rank == 0 else None
            self._update_rank_file(
                profile=profile_steps(
                    engine, pass_name, framework, count, steps, self.rank, use_profiler, trace
                )
            )

    def _count_step(self, pass_name: str, item: Work) -> dict[str, int]:
        """Return the counts of a step (`tokens`, `logits`, ... and `padded`): for rows that the
        engine names, what the data say, with the engine's own `padded`; else the counts as the
        engine gave them.
        """
        if item.rows is None or self._counter is None:
            return item.counts
        counted = self._counter.count(
            item.rows, item.prefixes, held_out=pass_name not in self.kind.stepped
        )
        return counted | {"padded": item.counts.get("padded", 0)}

    def _store_drawn_counts(self, pass_name: str, trace: PassTrace, samples: list[Sample]) -> None:
        """Add to the rank file, as `drawn`, what the rows of a pass must count by the data alone:
        one table for each step that ran (from the checkpoint's step for a resumed run), or one for
        the whole pass.

        Only rank 0 does it, and not for bare passes, for programs that do not report their rows, or
        where `--steps` cuts a pass short, as it is unknown which rows were used.
        """
        if (
            self._counter is None
            or self.rank
            or pass_name in self.kind.bare
            or trace.clock == "reported"  # an external program does not report its rows
            or (self.spec.scope.steps is not None and self.kind.cut_by_steps)
        ):
            return
        with self.budget.part(f"count_{pass_name}"):
            steps = None
            if pass_name in self.kind.stepped:
                begin = (
                    checkpoint_folders.read_checkpoint_json(
                        self.spec.resume / checkpoint_folders.STATE_FILE, CheckpointState
                    ).step
                    if self.spec.resume
                    else 0
                )
                steps = range(begin, begin + sum(1 for sample in samples if sample.counts))
            self._update_rank_file(
                drawn={**self.rank_file.drawn, pass_name: self._counter.count_expected(steps)}
            )

    def _store_pass(
        self, pass_name: str, trace: PassTrace, samples: list[Sample], framework: Framework
    ) -> None:
        """Add the window of a pass on this rank (start since the start of the run, wall, device and
        CPU time, memory peaks), its memory in use and its samples to the rank file in memory;
        nothing is written. `clock` of the rank file is that of the last pass that was not bare.
        """
        memory = framework.memory()
        window = PassFacts(
            pass_name=pass_name,
            rank=self.rank,
            start_s=trace.start_clock_s - self.host.origin_s,
            wall_s=trace.wall_s,
            allocated_bytes=memory.get("allocated_bytes"),
            reserved_bytes=memory.get("reserved_bytes"),
            device_s=trace.device_s,
            cpu_s=trace.cpu_s,
        )
        self._update_rank_file(
            windows=[*self.rank_file.windows, window],
            in_use_bytes={**self.rank_file.in_use_bytes, pass_name: memory.get("in_use_bytes")},
            samples=[*self.rank_file.samples, *samples],
            clock=self.rank_file.clock if pass_name in self.kind.bare else trace.clock,
        )


def main() -> None:
    """Read the spec file named in the first argument, run it as the rank in RANK, and exit the
    process with the code of `run_rank_process`.
    """
    spec = WorkerSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    run_rank_process(partial(Worker, spec), spec.host.folder)


if __name__ == "__main__":
    main()
