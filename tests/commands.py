"""The command line as a user starts it, in processes of its own, and an engine from a third party that misbehaves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SRC = Path(__file__).resolve().parents[1] / "src"
CASE = "llama2-7b-mmlu"
SMOKE = ("run", CASE, "--size", "smoke", "--accelerator", "cpu")

ENGINE = '''
import os, signal, subprocess, sys, time
from steelyard.data.packing import counts
from steelyard.measure import Phase, Work

STEP_S = float(os.environ.get("FAULTY_STEP_S", "0.02"))


class Faulty:
    """Answers everything with A. $FAULTY says what goes wrong, on $FAULTY_RANK only where that is set."""

    def __init__(self, job):
        self.job = job
        self.rows = job.texts.rows
        self.items = list(range(len(self.rows)))[job.rank :: job.world]
        only = os.environ.get("FAULTY_RANK")
        self.fault = os.environ.get("FAULTY", "") if only in (None, str(job.rank)) else ""
        if os.environ.get("FAULTY_CHILDREN"):
            subprocess.Popen(["sleep", "300"])
            subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"], start_new_session=True)
        self._fail("init")

    def _fail(self, where):
        fault, _, place = self.fault.partition("@")
        if place == where:
            getattr(self, fault)()

    def raises(self):
        print("a line before the end", file=sys.stderr, flush=True)
        raise ArithmeticError("the engine broke")

    def kills(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kills_parent(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(120)

    def memory(self):
        raise MemoryError("no more of it")

    def torch_memory(self):
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def allocates(self):
        import torch
        torch.empty(1 << 50, dtype=torch.uint8)

    def waits(self):
        open(os.environ["FAULTY_MARK"], "w").close()
        time.sleep(120)

    def stubborn(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.waits()

    def exits(self):
        sys.exit(0)

    def floods(self):
        for _ in range(64):
            sys.stderr.write("x" * (1 << 20))
        sys.stderr.write("\\nthe last line\\n")
        raise ArithmeticError("the engine broke")

    def prepare(self, name, part):
        with part(f"warmup_{name}"):
            self._fail("prepare")

    def total(self, name):
        return 4

    def work(self, name):
        for step in range(4):
            items = self.items[step::4]
            yield Phase("compute")
            time.sleep(STEP_S)
            if step == 2:
                self._fail("work")
            lens = [len(self.rows[i]) for i in items]
            made = counts(lens, lens, len(items))
            if self.fault == "tokens" and step == 1:
                made["tokens"] += 1
            if self.fault == "few_counts":
                made = {"tokens": made["tokens"]}
            yield Work(made, {"loss": float("nan") if self.fault == "nan_value" and step == 3 else 1.0})
        if self.fault == "hides":
            time.sleep(STEP_S * 2)

    def outputs(self, name):
        items, n = list(self.items), len(self.items)
        out = {"items": items, "best": [2] * n, "choice": [0] * n, "finite": [1] * n}
        if self.fault == "nan":
            out["finite"][5] = 0
        if self.fault == "twice":
            items[0] = items[1]
        if self.fault == "leaves_out":
            out = {key: values[1:] for key, values in out.items()}
        if self.fault == "no_such_question":
            items[0] = 10_000
        if self.fault == "no_such_letter":
            out["choice"][0] = 4
        if self.fault == "lengths":
            out["best"] = out["best"][1:]
        if self.fault == "no_table":
            out = {"items": items}
        if self.fault == "no_numbers":
            out["best"][0] = float("nan")
        return out

    def details(self):
        if self.fault == "nan_detail":
            return {"speed": float("nan")}
        if self.fault == "odd_detail":
            return {"speed": object()}
        return {"weights": {"source": "random"}, "fault": self.fault}
'''


def faulty_engine(folder: Path) -> Path:
    """Install engine `faulty` as another package would: a module, and metadata with an entry point."""
    info = folder / "faulty_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "faulty_engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[steelyard.engines]\nfaulty = faulty_engine:Faulty\n")
    return folder


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Shell:
    """A place to run commands in: its own temporary folder, and a mark in the environment of all that it starts."""

    folder: Path
    extra: tuple[Path, ...] = ()

    @property
    def out(self) -> Path:
        return self.folder / "records"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def mark(self) -> str:
        return f"test:{self.folder}"

    def env(self, **variables: str) -> dict[str, str]:
        self.tmp.mkdir(exist_ok=True)
        keep = {key: value for key, value in os.environ.items() if not key.startswith(("FAULTY", "STEELYARD_", "PYTEST"))}
        path = os.pathsep.join(str(place) for place in (*self.extra, SRC))
        mine = {"PYTHONPATH": path, "TMPDIR": str(self.tmp), "TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"}
        return {**keep, **mine, **variables}

    def start(self, *arguments: str | Path, pipes: bool = True, **variables: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "steelyard", *map(str, arguments)]
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env(**variables),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            preexec_fn=_listen,
        )

    def __call__(self, *arguments: str | Path, **variables: str) -> Done:
        return finish(self.start(*arguments, **variables))

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.iterdir())] if self.out.is_dir() else []

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark and still live."""
        return [one for one in psutil.process_iter() if _carries(one, self.mark)]

    def nothing_left(self, within_s: float = 0.0) -> bool:
        return wait_for(lambda: not self.processes(), within_s)

    def clean(self) -> None:
        """End what a failed test left behind: the processes that carry this shell's own mark."""
        for one in self.processes():
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue


def _listen() -> None:
    """As from a terminal: a test runner in the background hands down that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: "subprocess.Popen[str]", timeout_s: float = 120.0) -> Done:
    out, err = process.communicate(timeout=timeout_s)
    return Done(process.returncode, out or "", err or "")


def wait_for(condition: Any, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def kill_hard(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
