"""Compare what an engine computes with what engine torch computes, on every case at size smoke."""

import tempfile
from dataclasses import asdict
from pathlib import Path

from steelyard.case import resolve
from steelyard.case.request import DEFAULT_ENGINE as YARDSTICK
from steelyard.case.request import EngineSettings, Request, engine_settings
from steelyard.case.resolve import Resolved
from steelyard.cli.out import aligned, answer, dump, say
from steelyard.cli.runs import interrupted
from steelyard.engine import rows as engine_rows
from steelyard.engine.rows import EngineRow
from steelyard.errors import RequestError
from steelyard.metrics.conform import Compared, compare
from steelyard.record.record import Record
from steelyard.run import conformity
from steelyard.run.parent import run_case
from steelyard.run.ready import ready

STEPS = 2


def compare_with_torch(
    engine: str, cases: list[str] | None, accelerator: str, settings: list[str], as_json: bool
) -> int:
    """Run the cases with both engines, print each comparison, keep the result, and return 0 where
    the engine conforms.
    """
    row = engine_rows.row(engine)
    of_engine, others = engine_settings(settings)
    if others:
        raise RequestError(
            f"--set {others[0]!r}: conform takes only engine.KEY=VALUE, such as"
            " engine.python=venv/bin/python"
        )
    if engine == YARDSTICK:
        raise RequestError(f"engine {YARDSTICK!r} is the reference; name another engine")
    if row.checkout:
        raise RequestError(
            f"engine {engine!r} has its own weights and rows, so its steps cannot be compared"
        )
    rows: list[Compared] = []
    finished = True
    packages: dict[str, str] | None = None
    chosen = _cases(row, cases)
    with tempfile.TemporaryDirectory(prefix="steelyard-conform-") as folder:
        for one in chosen:
            ours = _run(one, YARDSTICK, EngineSettings(), accelerator, Path(folder))
            theirs = _run(one, engine, of_engine, accelerator, Path(folder))
            rows += compare(ours, theirs)
            finished &= "failed" not in (ours.status, theirs.status)
            packages = (
                theirs.environment.software.packages if of_engine.python is not None else None
            )
    sound = all(one.ok for one in rows)
    if not finished:
        say("not kept: a run failed, which may be the machine's fault; mend it and run again")
    # a part of the cases can show that it does not, never that it does
    elif cases is None or not sound:
        say(f"kept: {conformity.keep(row, [one.case.name for one in chosen], sound, packages)}")
    if as_json:
        told = [{**asdict(row), "ok": row.ok} for row in rows]
        dump(
            {
                "engine": engine,
                "version": conformity.engine_version(row, packages),
                "conforms": sound,
                "rows": told,
            }
        )
    else:
        answer(_table(engine, rows, sound))
    return 0 if sound else 1


def _cases(row: EngineRow, names: list[str] | None) -> list[Resolved]:
    """Every case that the engine runs, without what is drawn at random in a step: engines draw in
    their own order.
    """
    out: list[Resolved] = []
    for name in names or resolve.names():
        found = resolve.resolve(name, "smoke", None, "closed").case
        refusal = row.refusal(found)
        if refusal is not None and names:
            raise RequestError(refusal)
        if refusal is None:
            random = [
                f"question.model.{key}=0"
                for key in ("dropout",)
                if hasattr(found.question.model, key)
            ]
            out.append(resolve.resolve(name, "smoke", None, "closed", random))
    if not out:
        raise RequestError(f"engine {row.name!r} runs none of the cases; see steelyard list")
    return out


def _run(
    resolved: Resolved, engine: str, of_engine: EngineSettings, accelerator: str, folder: Path
) -> Record:
    steps = STEPS if resolved.case.question.train is not None else None
    say(f"{resolved.case.name} {engine}")
    request = Request(
        resolved=resolved,
        engine=engine,
        engine_settings=of_engine,
        accelerator=accelerator,
        steps=steps,
        out=folder,
    )
    made = run_case(ready(request))[0]
    if interrupted(made):
        raise KeyboardInterrupt
    return made


def _table(engine: str, rows: list[Compared], sound: bool) -> str:
    head = ("case", "what", YARDSTICK, engine, "apart", "allowed", "")
    cells = [
        head,
        *(
            (
                r.case,
                r.what,
                _cell(r.ours),
                _cell(r.theirs),
                _cell(r.apart),
                _cell(r.allowed),
                _word(r),
            )
            for r in rows
        ),
    ]
    return "\n".join(
        [*aligned(cells), f"engine {engine} {'conforms' if sound else 'does not conform'}"]
    )


def _word(row: Compared) -> str:
    return "ok" if row.ok else "WRONG"


def _cell(value: float | str | None) -> str:
    return "/" if value is None else value if isinstance(value, str) else f"{value:.6g}"
