"""Engine `flagscale`, training: FlagScale as an external program, controlled by its configuration
and followed by its log lines.

One process stands for all ranks. The time of a step is what the program prints; nothing is measured
here.
"""

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.data.corpus import CorpusRows
from steelyard.data.counting import TrainingRowCounter
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.engines.flagscale import command, config, indexed_dataset, log_lines
from steelyard.engines.flagscale.framework import ReportedClock
from steelyard.engines.flagscale.log_lines import Iteration
from steelyard.engines.flagscale.program import ExternalProgram
from steelyard.errors import RequestError
from steelyard.files import run_git
from steelyard.training.training_loop import LossWatch


class FlagScaleTrain:
    """The engine for work `train_rows` by FlagScale (an `Engine`), in one process for all ranks:
    `prepare` writes dataset and configuration and starts the program, `work` reads its log lines,
    one `Work` for each iteration, and adds the times that it prints to `clock` (the job's device).
    `outputs` says whether a bad loss ended the run, `details` describes the program. It has pass
    `train` only, no evaluation and no checkpoints; weights are the program's own random ones.

    `rows` is the global batch, `steps` the number of iterations, `folder` the subfolder `flagscale`
    of the run's. Constructing it raises RequestError for rows that are not packed documents and for
    settings that FlagScale cannot do, ValueError without training, folder or checkout.
    """

    def __init__(self, job: Job) -> None:
        """Store the job and check it; nothing is written or started. Raises RequestError and
        ValueError as the class says.
        """
        train = job.case.question.train
        if train is None or job.folder is None or job.checkout is None:
            raise ValueError("needs a training case, a run folder and a checkout")
        if not isinstance(job.inputs, CorpusRows):
            raise RequestError(
                "engine flagscale trains on documents packed end to end; choose another engine for"
                " other rows"
            )
        self.job, self.inputs, self.folder, self.checkout = (
            job,
            job.inputs,
            job.folder / "flagscale",
            job.checkout,
        )
        self.rows = len(self.inputs.batch(0))
        self.steps = job.steps if job.steps is not None else train.steps
        self.clock: ReportedClock = job.device
        self.watch = LossWatch(train.bound)
        self.weights = {"source": "random", "seed": job.case.question.seed + 1, "by": "the program"}
        self.program: ExternalProgram | None = None
        self.output_lines: Iterator[str] = iter(())
        self.parameters: int | None = None
        self.skipped = self.steps_done = 0
        self.counts: list[dict[str, int]] = []  # of every step
        config.check_flagscale(job, self.rows)

    def prepare(self, name: str, part: Part) -> None:
        """Write dataset and configuration into the new folder `flagscale` of the run's folder
        (FileExistsError if it exists), count the tokens of every step, do FlagScale's dry run,
        start the program, and wait until it begins to train. Each is timed as a part: `data_files`,
        `counts`, `dry_run`, `program`. Raises RequestError if documents or the command are refused,
        ProgramError or MemoryError if the program fails. `name` is not used.
        """
        self.folder.mkdir()
        prefix, output = self.folder / "documents", self.folder / "output"
        with part("data_files"):
            indexed_dataset.write_indexed_dataset(
                self.inputs, self.job.case.question.model.vocab, prefix
            )
        with part("counts"):
            self.counts = TrainingRowCounter(
                self.inputs, self.job.case.question.division
            ).count_expected(range(self.steps))
        with part("dry_run"):
            program_config = config.make_config(
                self.job, self.rows, self.steps, prefix, output, _free_port()
            )
            script = command.run_dry(
                self.checkout, config.write_config(program_config, self.folder), output
            )
            program_command = command.parse_script(
                script, self.checkout, self._required_arguments(prefix), self.job.plan.devices
            )
        with part("program"):
            self.program = ExternalProgram(program_command)
            self.output_lines = self.program.lines()
            self._wait_for_training(self.program)

    def _required_arguments(self, prefix: Path) -> dict[str, str]:
        """Return those arguments of the program, with values, without which it would answer another
        question: steps, batch sizes, length, TP, PP and the dataset's `prefix`.
        """
        plan, train = self.job.plan, self.job.case.question.train
        return {
            "--train-iters": str(self.steps),
            "--global-batch-size": str(self.rows),
            "--micro-batch-size": str(self.job.case.tune.micro_batch),
            "--seq-length": str(train.length if train else 0),
            "--tensor-model-parallel-size": str(plan.tp),
            "--pipeline-model-parallel-size": str(plan.pp),
            "--data-path": str(prefix),
        }

    def _wait_for_training(self, program: ExternalProgram) -> None:
        """Read output up to the mark before the first iteration, where the program's clock starts;
        notes the number of parameters. If the program ends before it, raises ProgramError or
        MemoryError; an iteration line before it ends the program and raises ProgramError.
        """
        for text in self.output_lines:
            self._note_parameters(text)
            if log_lines.TRAINING_BEGINS in text:
                return
            if log_lines.parse_iteration(text) is not None:
                program.end()
                raise log_lines.ProgramError(
                    f"an iteration was reported before {log_lines.TRAINING_BEGINS!r}: its start is"
                    " unknown"
                )
        raise program.explain_early_end("before it began to train")

    def _note_parameters(self, text: str) -> None:
        """Set `self.parameters` to the number of parameters on the first rank, if this line of
        output gives it.
        """
        match = log_lines.PARAMETERS_LINE.search(text)
        if match is not None:
            self.parameters = int(match[1])

    def total(self, name: str) -> int:
        """Return how many `Work` items the pass yields if no loss ends it early: the number of
        training steps. `name` is not used.
        """
        return self.steps

    def work(self, name: str) -> Iterator[Phase | Work]:
        """Yield one `Work` for each iteration line, after advancing the reported clock by its time.
        Counts are those of the rows that the case prescribes for the step; the program does not say
        which it drew. Ends the program if a loss is not finite or above `train.bound`, or on any
        exception; after the last step it is left to exit. Raises RuntimeError before `prepare`,
        ProgramError or MemoryError if the program fails.
        """
        program = self.program
        if program is None:
            raise RuntimeError("work before prepare")
        try:
            for step in range(self.steps):
                iteration = self._read_iteration(program, step)
                self.clock.time_s += iteration.elapsed_s
                self.steps_done += 1
                yield self._end_step(step, iteration)
                if self.watch.has_bad_loss():
                    program.end()
                    return
        except BaseException:
            program.end()
            raise

    def _read_iteration(self, program: ExternalProgram, step: int) -> Iteration:
        """Read output up to the next iteration line, check that it is step `step` (counted from 0)
        with the right batch, and return it. Raises ProgramError if it is not, ProgramError or
        MemoryError if the program ends before.
        """
        for text in self.output_lines:
            iteration = log_lines.parse_iteration(text)
            if iteration is not None:
                log_lines.check_iteration(iteration, step, self.steps, self.rows)
                return iteration
        raise program.explain_early_end(f"after {step} of {self.steps} iterations")

    def _end_step(self, step: int, iteration: Iteration) -> Work:
        """Return the `Work` of a finished iteration: counts of step `step`, and the values
        `grad_norm` (NaN if not printed), `lr` if printed, and `loss`. Adds to `skipped`, and gives
        the loss to `watch`.

        A skipped iteration changed no weights and has no loss. In fp16 it still counts its rows, as
        in every engine (the search for the loss scale); in other precisions it counts nothing. A
        loss that is not printed becomes NaN.
        """
        values = {"grad_norm": math.nan if iteration.grad_norm is None else iteration.grad_norm}
        values |= {} if iteration.lr is None else {"lr": iteration.lr}
        self.skipped += iteration.skipped
        if iteration.has_updated:
            loss = math.nan if iteration.loss is None or iteration.nan else iteration.loss
            self.watch.add(step, loss)
            values["loss"] = loss
        elif self.job.case.question.precision.matmul != "fp16":
            return Work({}, values)
        return Work(self.counts[step], values)

    def outputs(self, name: str) -> dict[str, Any]:
        """Return `stopped`: None, or a dict with `step` (from 0), `why` ("nan" or "bound") and
        `value` (None if not finite) of the loss that ended the run early. `name` is not used.
        """
        return {"stopped": self.watch.stop}

    def details(self) -> dict[str, Any]:
        """Return what is known of the program, for the record: checkout, exit code, skipped
        iterations, parameters of the first rank, micro-batches per step; what it does not say is
        None. After a complete run waits up to 60 s for the program's end and then ends it;
        otherwise the exit code is None.
        """
        ended = (
            self.program is not None and self.steps_done == self.steps and self.watch.stop is None
        )
        return {
            "program": describe_checkout(self.checkout),
            "exit_code": self.program.finish() if ended and self.program is not None else None,
            "counts": "of the configuration: the program does not say which rows it drew",
            "skipped_iterations": self.skipped,
            "parameters": self.parameters,
            "optimizer_states": None,
            "dtypes": None,
            "micro_batches": self.rows // (self.job.plan.dp * self.job.case.tune.micro_batch),
        }


def _free_port() -> int:
    """Return a loopback TCP port that is free now; it is not held."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((config.LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def describe_checkout(folder: Path) -> dict[str, Any]:
    """Return which program a checkout is, for a record: `name` of its folder, git `commit`, and
    `dirty`, whether tracked files are changed; both None if the folder is not the top of a git
    repository or git fails. Its path is not included.
    """
    commit = (
        run_git(folder, "rev-parse", "--verify", "HEAD") if _is_repository_top(folder) else None
    )
    changes = run_git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "name": folder.name,
        "commit": commit,
        "dirty": None if changes is None else changes != "",
    }


def _is_repository_top(folder: Path) -> bool:
    """Return whether the folder is the top of a git repository, not a folder inside one; False if
    git is missing or fails.
    """
    top = run_git(folder, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == folder.resolve()
