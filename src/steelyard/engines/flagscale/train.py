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
from steelyard.data.counting import RowCounts
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.engines.flagscale import command, config, data, lines
from steelyard.engines.flagscale.framework import Reported
from steelyard.engines.flagscale.lines import Iteration
from steelyard.engines.flagscale.program import Program
from steelyard.errors import RequestError
from steelyard.files import git
from steelyard.training.loop import LossWatch


class FlagScaleTrain:
    """The engine for work `train_rows` by FlagScale. Constructing it raises RequestError for rows
    that are not packed documents and for settings that FlagScale cannot do, ValueError without
    training, folder or checkout.
    """

    def __init__(self, job: Job) -> None:
        train = job.case.question.train
        if train is None or job.folder is None or job.checkout is None:
            raise ValueError("no training, or nowhere to start it")
        if not isinstance(job.inputs, CorpusRows):
            raise RequestError(
                "engine flagscale trains on documents packed end to end; take another engine for"
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
        self.clock: Reported = job.device
        self.watch = LossWatch(train.bound)
        self.weights = {"source": "random", "seed": job.case.question.seed + 1, "by": "the program"}
        self.program: Program | None = None
        self.heard: Iterator[str] = iter(())
        self.parameters: int | None = None
        self.skipped = self.taken = 0
        self.counts: list[dict[str, int]] = []  # of every step
        config.check(job, self.rows)

    def prepare(self, name: str, part: Part) -> None:
        """Write the dataset and configuration into the run's folder, do FlagScale's dry run, start
        the program, and wait until it begins to train. Raises RequestError if the command is
        refused, ProgramError or MemoryError if the program fails.
        """
        self.folder.mkdir()
        prefix, output = self.folder / "documents", self.folder / "output"
        with part("data_files"):
            data.write(self.inputs, self.job.case.question.model.vocab, prefix)
        with part("counts"):
            self.counts = RowCounts(self.inputs, self.job.case.question.division).wanted(
                range(self.steps)
            )
        with part("dry_run"):
            made = config.make(self.job, self.rows, self.steps, prefix, output, _free_port())
            script = command.dry_run(self.checkout, config.write(made, self.folder), output)
            found = command.parse(
                script, self.checkout, self._wanted(prefix), self.job.plan.devices
            )
        with part("program"):
            self.program = Program(found)
            self.heard = self.program.lines()
            self._begin(self.program)

    def _wanted(self, prefix: Path) -> dict[str, str]:
        """Return the program's arguments, with values, without which it would answer another
        question. `prefix` is that of the dataset.
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

    def _begin(self, program: Program) -> None:
        """Read output up to the mark before the first iteration, where the program's clock starts.
        Raises if the program ends before it; an iteration before it ends the program and raises
        ProgramError.
        """
        for text in self.heard:
            self._note(text)
            if lines.BEGIN in text:
                return
            if lines.parse(text) is not None:
                program.end()
                raise lines.ProgramError(
                    f"an iteration was told before {lines.BEGIN!r}: nobody knows when it began"
                )
        raise program.gone("before it began to train")

    def _note(self, text: str) -> None:
        """Remember the number of parameters on the first rank if this line gives it."""
        found = lines.PARAMETERS.search(text)
        if found is not None:
            self.parameters = int(found[1])

    def total(self, name: str) -> int:
        """Return the number of training steps."""
        return self.steps

    def work(self, name: str) -> Iterator[Phase | Work]:
        """Yield one `Work` for each iteration line, after advancing the reported clock by its time.
        Counts are those of the rows that the case prescribes for the step; the program does not say
        which it drew. Ends the program if a loss ends the run, or on any exception.
        """
        program = self.program
        if program is None:
            raise RuntimeError("work before prepare")
        try:
            for step in range(self.steps):
                line = self._next(program, step)
                self.clock.at_s += line.elapsed_s
                self.taken += 1
                yield self._step(step, line)
                if self.watch.seen():
                    program.end()
                    return
        except BaseException:
            program.end()
            raise

    def _next(self, program: Program, step: int) -> Iteration:
        """Read output up to the next iteration line, check that it is step `step` (counted from 0),
        and return it. Raises ProgramError or MemoryError if the program ends.
        """
        for text in self.heard:
            line = lines.parse(text)
            if line is not None:
                lines.check(line, step, self.steps, self.rows)
                return line
        raise program.gone(f"after {step} of {self.steps} iterations")

    def _step(self, step: int, line: Iteration) -> Work:
        """Return the mark of a finished iteration, with loss, grad_norm and lr.

        A skipped iteration changed no weights and has no loss. In fp16 it still counts its rows, as
        in every engine (the search for the loss scale); in other precisions it counts nothing. A
        loss that is not printed becomes NaN.
        """
        values = {"grad_norm": math.nan if line.grad_norm is None else line.grad_norm}
        values |= {} if line.lr is None else {"lr": line.lr}
        self.skipped += line.skipped
        if line.learned:
            loss = math.nan if line.loss is None or line.nan else line.loss
            self.watch.add(step, loss)
            values["loss"] = loss
        elif self.job.case.question.precision.matmul != "fp16":
            return Work({}, values)
        return Work(self.counts[step], values)

    def outputs(self, name: str) -> dict[str, Any]:
        """Return under `stopped` the loss that ended the run early, or None."""
        return {"stopped": self.watch.found}

    def details(self) -> dict[str, Any]:
        """Return what is known of the program, for the record; what it does not say is None. After
        a complete run waits for the program's end, for its exit code.
        """
        ended = self.program is not None and self.taken == self.steps and self.watch.found is None
        return {
            "program": about(self.checkout),
            "exit_code": self.program.finish() if ended and self.program is not None else None,
            "counts": "of the configuration: the program does not say which rows it drew",
            "skipped_iterations": self.skipped,
            "parameters": self.parameters,
            "optimizer_states": None,
            "dtypes": None,
            "micro_batches": self.rows // (self.job.plan.dp * self.job.case.tune.micro_batch),
        }


def _free_port() -> int:
    """Return a loopback TCP port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind((config.LOOPBACK, 0))
        port: int = one.getsockname()[1]
        return port


def about(folder: Path) -> dict[str, Any]:
    """Return which program a checkout is, for a record: folder name, git commit, and whether it is
    dirty; both None if the folder is not the top of a git repository. Its path is not included.
    """
    commit = git(folder, "rev-parse", "--verify", "HEAD") if _top(folder) else None
    changes = git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "name": folder.name,
        "commit": commit,
        "dirty": None if changes is None else changes != "",
    }


def _top(folder: Path) -> bool:
    """Return whether the folder is the top of a git repository, not a folder inside one."""
    top = git(folder, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == folder.resolve()
