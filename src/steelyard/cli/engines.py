"""Runs of all engines: those that can do the case, one after the other with everything else equal, then side by side."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from steelyard.cli import explained, repeats
from steelyard.cli.out import Output, dump, one_line, paged, say, tell
from steelyard.cli.run import ALL, carry_out, hint, hosts, interrupted
from steelyard.errors import EngineError, RequestError

if TYPE_CHECKING:
    from steelyard.case.request import EngineSettings, Request
    from steelyard.record.record import Record
    from steelyard.run.ready import Ready


@dataclass(frozen=True)
class LeftOut:
    """An engine that does not take part, and why."""

    engine: str
    case: str
    reason: str


def check_all(engine: str, sweeps: bool, resumes: bool) -> None:
    if engine == ALL and sweeps:
        raise RequestError("--engine all and --sweep cannot be combined; name one engine, or drop --sweep")
    if engine == ALL and resumes:
        raise RequestError("--engine all and --resume cannot be combined; name the engine of the checkpoint")


def chosen(engine: str, settings: list[str]) -> "tuple[list[tuple[str, EngineSettings]], list[str]]":
    """The engines of a command line, each with where it lives, and the settings that are not about engines."""
    from steelyard.case.request import EngineSettings, engine_settings, settings_by_engine
    from steelyard.engine import rows as engine_rows

    if engine != ALL:
        of_engine, others = engine_settings(settings)
        return [(engine, of_engine)], others
    names = [*engine_rows.table()]
    by_name, others = settings_by_engine(settings, names)
    return [(name, by_name.get(name, EngineSettings())) for name in names], others


def run_engines(requests: "list[Request]", times: int, output: Output) -> int:
    """Every engine once, then every engine again, `times` times: what changes on the machine meanwhile meets all alike. Exit
    code 0 where all runs are valid; an engine that cannot do the case is no error while one can."""
    runs, left_out = _able(requests)
    for line in dict.fromkeys(map(_line, left_out)):  # of several cases the reason may be the same
        say(line)
    done, late = _carry_out(runs, times, output)
    if not done:
        raise RequestError(_none(late))
    if output.json:
        _dump(done, [*left_out, *late])
    else:
        _print(done, output.wide)
        if requests[0].explain:
            explained.show(done, requests[0].out, output)
        hint(requests[0].out, output)
    whole = len(done) == times * (len(runs) - len(late))
    return 0 if whole and all(made.status == "valid" for made in done) else 1


def _carry_out(runs: "list[Ready]", times: int, output: Output) -> "tuple[list[Record], list[LeftOut]]":
    """The records, and the engines that only their hosts or workers found unable, which are not asked again: weights in a
    layout that one does not read, say, or another Python that lacks a module."""
    done: list[Record] = []
    lost: dict[int, LeftOut] = {}
    every = [numbered for _ in range(times) for numbered in enumerate(runs)]
    with hosts(runs, output) as allocation:
        for place, (number, one) in enumerate(every, 1):
            if number in lost:
                continue
            try:
                done.append(carry_out(one, output, allocation, (place, len(every))))
            except RequestError as error:
                lost[number] = LeftOut(one.request.engine, one.case.name, str(error))
                say(_line(lost[number]))
                continue
            if interrupted(done[-1]):
                break
    return done, list(lost.values())


def _line(one: LeftOut) -> str:
    return f"left out: {one.engine}: {one_line(one.reason)}"


def _able(requests: "list[Request]") -> "tuple[list[Ready], list[LeftOut]]":
    """The runs that can start, and why others cannot. What no engine can is a wrong request, and so is what is wrong whatever
    the engine."""
    from steelyard.run.ready import ready

    runs: list[Ready] = []
    left_out: list[LeftOut] = []
    for request in requests:
        try:
            runs.append(ready(request))
        except EngineError as error:
            left_out.append(LeftOut(request.engine, request.resolved.case.name, str(error)))
    lost = [one for one in left_out if one.case not in {run.case.name for run in runs}]
    if lost or not runs:
        raise RequestError(_none(lost))
    return runs, left_out


def _none(lost: list[LeftOut]) -> str:
    """What is wrong where no engine is left for a case."""
    if not lost:
        return "--engine all: no engine runs any of the cases; see steelyard list"
    ours = [one for one in lost if one.case == lost[0].case]
    return f"{ours[0].case}: no engine can do it: " + "; ".join(f"{one.engine}: {one.reason}" for one in ours)


def _print(done: "list[Record]", wide: bool) -> None:
    from steelyard import report
    from steelyard.metrics import engines

    page = report.engines(done)
    compared = [record for group in engines.groups(done) for record in group.records]
    if page is None or len(compared) < len(done):
        tell(paged(report.table(done), wide))
    if page is not None:
        tell(paged(page, wide))
    else:
        say("no engine table: it needs finished runs of two engines")
    repeats.show(done, wide)


def _dump(done: "list[Record]", left_out: list[LeftOut]) -> None:
    from steelyard.record import record
    from steelyard.report import groups

    told = [group.model_dump(mode="json") for group in groups.engines(done)]
    lost = [asdict(one) for one in left_out]
    tables = [record.printed(made) for made in done]
    engines_told = {"left_out": lost, "groups": told}
    dump({"records": tables, "repeats": repeats.as_json(done), "engines": engines_told}, tell)
