"""The passes of generation in a worker: drive the requests of a pass through an engine's port, and
make the reference engine that scores the answers again.

run/worker.py calls `run_requests` for the pass with requests and `make_checker` for the pass that
checks them; the loop itself is in run/requests.py. Nothing here writes a rank file.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from steelyard.accelerators.events import get_clock_name
from steelyard.case.case import Case
from steelyard.data.prompts import PromptRequests
from steelyard.engine import engine_rows
from steelyard.engine.framework import Framework
from steelyard.engine.generation import GenerationEngine, RequestEnd
from steelyard.engine.work import Work
from steelyard.plan import degrees
from steelyard.record.request_samples import RequestSamples
from steelyard.run.answer_check import (
    AnsweredTexts,
    add_client_facts,
    choose_answers,
    choose_checker,
    collect_answers,
)
from steelyard.run.clock import now, read_cpu_time_s
from steelyard.run.measure import Mark, PassTrace
from steelyard.run.messages import WorkerEvent
from steelyard.run.rank_process import RankProcess
from steelyard.run.requests import RequestLoop, RequestTrace


@dataclass(frozen=True)
class Checker:
    """The reference engine of a check pass: `name`, `make_engine`, which makes it from a Job;
    `framework` and `group` are those that it computes with, on the same device.
    """

    name: str
    make_engine: Callable[..., Any]
    framework: Framework
    group: Any


@dataclass(frozen=True)
class RequestResults:
    """What a pass of requests left on one rank: its borders with the marks of the engine's steps,
    the request samples (None beside the first rank of a group, which has them), and the answers
    that are to be checked.
    """

    steps: PassTrace
    samples: RequestSamples | None
    answers: AnsweredTexts


def run_requests(
    process: RankProcess,
    case: Case,
    engine: Any,
    pass_name: str,
    framework: Framework,
    requests: PromptRequests,
    min_time_s: float | None,
    leads: bool,
) -> RequestResults:
    """Run a pass of requests and return what it left: on the first rank of a tensor-parallel group
    (`leads`), which has the schedule, through the engine's port; on the others by the steps that
    this one plans. Raises ValueError if the case has no load.
    """
    if not leads:
        answers, steps = follow_requests(process, case, engine, pass_name, framework, requests)
        return RequestResults(steps, None, answers)
    loop, steps = drive_requests(process, case, engine, pass_name, framework, requests, min_time_s)
    with process.budget.part(f"outputs_{pass_name}"):
        trace = loop.make_trace(steps, pass_name, process.rank)
        samples, answers = collect_results(trace, case, requests, engine)
    return RequestResults(steps, samples, answers)


def _begin_pass(process: RankProcess, framework: Framework, pass_name: str, count: int) -> None:
    """Wait for all ranks, reset the memory peaks, and report that none of `count` requests has
    ended.
    """
    framework.barrier()
    framework.reset_memory()
    process.write_progress(pass_name, 0, count)


def drive_requests(
    process: RankProcess,
    case: Case,
    engine: GenerationEngine,
    pass_name: str,
    framework: Framework,
    requests: PromptRequests,
    min_time_s: float | None,
) -> tuple[RequestLoop, PassTrace]:
    """Send the requests of a pass through the engine's port under the case's load, and return the
    loop with all stamps and the borders of the pass.

    All ranks wait for one another first, and the memory peaks are reset. The agent is told when the
    pass begins and ends; opening and closing the port are outside of it. Raises ValueError if the
    case has no load.
    """
    load, count = case.question.load, requests.count
    if load is None:
        raise ValueError(f"{case.name} has no load")
    _begin_pass(process, framework, pass_name, count)
    loop = RequestLoop(
        requests,
        load,
        framework,
        min_time_s=min_time_s,
        request_done=lambda done: process.write_progress(pass_name, min(done, count - 1), count),
        busy=read_cpu_time_s,
    )
    with ExitStack() as port_stack:
        with process.budget.part(f"open_{pass_name}"):
            loop.plan()
            port = port_stack.enter_context(engine.open_port(pass_name, loop, now))
        process.events.send(WorkerEvent(event="begin", pass_name=pass_name))
        with process.budget.part(pass_name):
            trace = loop.run(port)
        process.events.send(WorkerEvent(event="end", pass_name=pass_name))
        with process.budget.part(f"close_{pass_name}"):
            port_stack.close()
    process.write_progress(pass_name, count, count)
    return loop, trace


class FollowedRequests:
    """What a rank beside the first one of its group computes of a pass (a `RequestSink`): the ids
    of each request, and the marks of its steps. It holds no schedule and no stamps of requests.
    """

    def __init__(self, framework: Framework, request_done: Callable[[int], None]) -> None:
        self._framework, self._request_done = framework, request_done
        self._start_s = 0.0
        self._ended = 0
        self.ids: dict[int, list[int]] = {}
        self.marks: list[Mark] = []

    def run(self, engine: Any, pass_name: str) -> PassTrace:
        """Compute the steps that the group's first rank plans until its pass is over, and return
        the borders of the pass on this rank with the marks of the steps.
        """
        self._framework.synchronize()
        busy_s, self._start_s = read_cpu_time_s(), now()
        first = self._framework.event()
        engine.follow(pass_name, self)
        last = self._framework.event()
        self._framework.synchronize()
        wall_s, clock_name = now() - self._start_s, get_clock_name(last)
        device_s = first.elapsed_s(last) if clock_name == "device" else None
        cpu_s = read_cpu_time_s() - busy_s
        return PassTrace(self._start_s, wall_s, device_s, cpu_s, clock_name, first, self.marks)

    def mark_sent(self, number: int) -> None:
        """Ignore when a request is sent."""

    def add_chunk(self, number: int, tokens: int, ids: Sequence[int] = ()) -> None:
        """Keep the ids of a request."""
        self.ids.setdefault(number, []).extend(ids)

    def end_request(self, number: int, end: RequestEnd) -> None:
        """Count a request as ended."""
        self._ended += 1
        self._request_done(self._ended)

    def add_step(self, work: Work) -> None:
        """Stamp the end of a step."""
        self.marks.append((work, now() - self._start_s, self._framework.event()))


def follow_requests(
    process: RankProcess,
    case: Case,
    engine: Any,
    pass_name: str,
    framework: Framework,
    requests: PromptRequests,
) -> tuple[AnsweredTexts, PassTrace]:
    """Compute a pass beside the first rank of a tensor-parallel group, which has its schedule, and
    return the answers that are to be checked, which are those of that rank, and the borders of the
    pass. All ranks wait for one another first, and the memory peaks are reset.
    """
    _begin_pass(process, framework, pass_name, requests.count)
    followed = FollowedRequests(
        framework,
        lambda done: process.write_progress(
            pass_name, min(done, requests.count - 1), requests.count
        ),
    )
    process.events.send(WorkerEvent(event="begin", pass_name=pass_name))
    with process.budget.part(pass_name):
        trace = followed.run(engine, pass_name)
    process.events.send(WorkerEvent(event="end", pass_name=pass_name))
    process.write_progress(pass_name, requests.count, requests.count)
    return choose_answers(followed.ids, requests, case.size == "smoke"), trace


def collect_results(
    trace: RequestTrace, case: Case, requests: PromptRequests, engine: GenerationEngine
) -> tuple[RequestSamples, AnsweredTexts]:
    """Return the request samples of a pass, with what the engine found out about its client, and
    the answers that are to be checked: of all requests at size smoke.
    """
    details = engine.details()
    samples = add_client_facts(trace.samples, details)
    sent_as = "chat" if details.get("api") == "chat" else details.get("prompts", "ids")
    return samples, collect_answers(trace, requests, case.size == "smoke", sent_as)


def make_checker(
    case: Case,
    engine_name: str,
    work: str,
    framework: Framework,
    group: Any,
    make_framework: Callable[[str], Framework],
) -> Checker:
    """Import the reference engine that checks answers of a case, and return it with the framework
    of the run, or with one of its own (`make_framework(name)`) if the engine that answered,
    `engine_name`, has another.
    """
    name = choose_checker(case)
    make_engine = engine_rows.load_engine(name, work)
    framework_name = engine_rows.find_engine(name).framework
    if engine_rows.find_engine(engine_name).framework != framework_name:
        framework = make_framework(framework_name)
        group = framework.join_ranks(degrees.make_single_plan(), 0, 1, None)
    return Checker(name, make_engine, framework, group)
