"""Compare what an engine computes with what engine torch computes, on cases at size smoke.

The command `conform` (`cli/run.py`) calls `compare_with_torch`; `metrics/conform_checks.py`
compares two records, `run/conformity.py` stores the result.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path

from steelyard.case import resolve
from steelyard.case.request import DEFAULT_ENGINE as YARDSTICK
from steelyard.case.request import EngineSettings, Request, split_engine_settings
from steelyard.case.resolve import ResolvedCase
from steelyard.cli.execute_runs import is_interrupted
from steelyard.cli.printing import align_columns, print_json, print_stderr, print_stdout
from steelyard.engine import engine_rows
from steelyard.engine.engine_rows import EngineRow
from steelyard.errors import RequestError
from steelyard.metrics.conform_checks import ConformCheck, check_conformity
from steelyard.record.record import Record
from steelyard.run import conformity
from steelyard.run.checked_request import check_request
from steelyard.run.parent import run_case

TRAINING_STEPS = 2


def compare_with_torch(
    engine: str, cases: list[str] | None, accelerator: str, settings: list[str], as_json: bool
) -> int:
    """Run cases (None: all that the engine runs) at size smoke with engine torch and with `engine`,
    print the comparison on stdout, and return the exit code: 0 if the engine conforms, otherwise 1.

    The result is stored in the user's cache for later records, unless a run failed, or only some
    cases were run and all agree. Records go to a temporary folder and are deleted. Raise
    RequestError for settings other than engine.KEY, for an unknown engine, engine torch itself, and
    engines that run a program of their own (`checkout`); KeyboardInterrupt if a run is interrupted.
    """
    row = engine_rows.find_engine(engine)
    engine_paths, others = split_engine_settings(settings)
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
    rows: list[ConformCheck] = []
    finished = True
    packages: dict[str, str] | None = None
    chosen = _resolve_cases(row, cases)
    with tempfile.TemporaryDirectory(prefix="steelyard-conform-") as folder:
        for item in chosen:
            torch_record = _run_smoke(item, YARDSTICK, EngineSettings(), accelerator, Path(folder))
            engine_record = _run_smoke(item, engine, engine_paths, accelerator, Path(folder))
            rows += check_conformity(torch_record, engine_record)
            finished &= "failed" not in (torch_record.status, engine_record.status)
            packages = (
                engine_record.environment.software.packages
                if engine_paths.python is not None
                else None
            )
    conforms = all(item.ok for item in rows)
    if not finished:
        print_stderr(
            "result not stored: a run failed, perhaps because of this machine; fix the cause and"
            " run again"
        )
    # some of the cases can show that an engine does not conform, never that it does
    elif cases is None or not conforms:
        names = [item.case.name for item in chosen]
        path = conformity.write_conformity(row, names, conforms, packages)
        print_stderr(f"result stored: {path}")
    if as_json:
        entries = [{**asdict(row), "ok": row.ok} for row in rows]
        print_json(
            {
                "engine": engine,
                "version": conformity.hash_engine(row, packages),
                "conforms": conforms,
                "rows": entries,
            }
        )
    else:
        print_stdout(_format_comparison(engine, rows, conforms))
    return 0 if conforms else 1


def _resolve_cases(row: EngineRow, names: list[str] | None) -> list[ResolvedCase]:
    """Return the cases (None: all shipped ones that the engine runs), resolved at size smoke in
    division closed, with dropout 0 where the model has any: engines draw random numbers in
    different orders.

    Raise RequestError if the engine refuses a case that was named, or runs none.
    """
    resolved: list[ResolvedCase] = []
    for name in names or resolve.list_shipped_cases():
        case = resolve.resolve_case(name, "smoke", None, "closed").case
        refusal = row.refusal(case)
        if refusal is not None and names:
            raise RequestError(refusal)
        if refusal is None:
            without_dropout = [
                f"question.model.{key}=0"
                for key in ("dropout",)
                if hasattr(case.question.model, key)
            ]
            resolved.append(resolve.resolve_case(name, "smoke", None, "closed", without_dropout))
    if not resolved:
        raise RequestError(f"engine {row.name!r} runs none of the cases; see steelyard list")
    return resolved


def _run_smoke(
    resolved: ResolvedCase,
    engine: str,
    engine_paths: EngineSettings,
    accelerator: str,
    folder: Path,
) -> Record:
    """Run a case once on one device and return its record, also of a failed run, which is written
    to `folder`; training runs for two steps. Print case and engine on stderr before, and raise
    KeyboardInterrupt if the run was interrupted, RequestError if it is refused.
    """
    steps = TRAINING_STEPS if resolved.case.question.train is not None else None
    print_stderr(f"{resolved.case.name} {engine}")
    request = Request(
        resolved=resolved,
        engine=engine,
        engine_settings=engine_paths,
        accelerator=accelerator,
        steps=steps,
        out=folder,
    )
    record = run_case(check_request(request))[0]
    if is_interrupted(record):
        raise KeyboardInterrupt
    return record


def _format_comparison(engine: str, rows: list[ConformCheck], conforms: bool) -> str:
    """Return the comparison as aligned lines: a head, one per case and quantity with both values,
    their difference, what is allowed and `ok` or `WRONG`, and a last line that says whether the
    engine conforms.
    """
    head = ("case", "quantity", YARDSTICK, engine, "difference", "allowed", "")
    cells = [
        head,
        *(
            (
                row.case,
                row.what,
                _format_cell(row.ours),
                _format_cell(row.theirs),
                _format_cell(row.apart),
                _format_cell(row.allowed),
                _format_verdict(row),
            )
            for row in rows
        ),
    ]
    return "\n".join(
        [*align_columns(cells), f"engine {engine} {'conforms' if conforms else 'does not conform'}"]
    )


def _format_verdict(row: ConformCheck) -> str:
    """Return `ok`, or `WRONG` if a quantity differs by more than its tolerance."""
    return "ok" if row.ok else "WRONG"


def _format_cell(value: float | str | None) -> str:
    """Format a value for the table: numbers with six digits, `/` for None."""
    return "/" if value is None else value if isinstance(value, str) else f"{value:.6g}"
