"""Compare what an engine computes with what engine torch computes, on cases at size smoke.

The command `conform` (`cli/run.py`) calls `compare_with_torch`; `metrics/conform.py` compares two
records, `run/conformity.py` stores the result.
"""

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
    """Run cases (None: all that the engine runs) at size smoke with engine torch and with `engine`,
    print the comparison, and return the exit code: 0 if the engine conforms, otherwise 1.

    The result is stored in the user's cache for later records, unless a run failed, or only some
    cases were run and all agree. Records go to a temporary folder and are deleted. Raise
    RequestError for settings other than engine.KEY, for engine torch itself, and for engines that
    cannot be compared; KeyboardInterrupt if a run is interrupted.
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
    # some of the cases can show that an engine does not conform, never that it does
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
    """Return the cases (None: all shipped ones that the engine runs), resolved at size smoke in
    division closed, with dropout 0: engines draw random numbers in different orders.

    Raise RequestError if the engine refuses a case that was named, or runs none.
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
    """Run a case once and return its record, which is written to `folder`; training runs for two
    steps. Print a line on stderr before, and raise KeyboardInterrupt if the run was interrupted.
    """
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
    """Format the comparison as aligned lines, one per quantity, and a last line that says whether
    the engine conforms.
    """
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
    """Return `ok`, or `WRONG` if a quantity differs by more than its tolerance."""
    return "ok" if row.ok else "WRONG"


def _cell(value: float | str | None) -> str:
    """Format a value for the table: numbers with six digits, `/` for None."""
    return "/" if value is None else value if isinstance(value, str) else f"{value:.6g}"
