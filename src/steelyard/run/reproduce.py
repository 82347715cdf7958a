"""Rerun recorded runs: make a request from a record, check that it can be repeated here, and find
records that already answer a request.

Used by `steelyard reproduce` (cli/reproduce.py) and by sweeps that skip runs they already have
(cli/runs.py).
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steelyard.case import resolve
from steelyard.case.case import Case
from steelyard.case.request import Request
from steelyard.case.resolve import Resolved
from steelyard.errors import RequestError
from steelyard.metrics import fields, shipped, verify
from steelyard.metrics.fields import Field
from steelyard.record import record, sealed
from steelyard.record.record import GateFacts, Nothing, Record
from steelyard.run import environment
from steelyard.run.ready import Ready
from steelyard.schema import first_problem
from steelyard.words import text

# fields not compared if workers run in another Python
OF_WORKERS = ("environment.software.packages.", "environment.software.python")
WEIGHTS = ("weights.source", "weights.seed", "weights.header_sha256")  # equal for equal weights

MADE = "made"  # `source` of data that the task generates


def request(found: Record) -> Request:
    """Return the request that repeats a record's run on the record's own question, engine, plan,
    scope and tune.

    Paths of data and weights are not in a record: the caller adds them and calls `check_sources`.
    Values that were `auto` are those that the record's run chose. Raises RequestError if the run
    failed, had resumed from a checkpoint, or its case is not valid in this version.
    """
    if found.status == "failed" or isinstance(found.data, Nothing):
        raise RequestError(
            f"record {found.id} is of a failed run, so there is nothing to reproduce; see steelyard"
            " report"
        )
    if found.restarts:
        raise RequestError(
            f"record {found.id} resumed from a checkpoint; reproduce the run that wrote it"
        )
    plan, scope = found.plan, found.scope
    # Sizes chosen automatically in the record's run are fixed in the new one.
    origins = {**found.case.origins, **{f"tune.{name}": "record" for name in found.auto}}
    return Request(
        resolved=Resolved(case(found), origins, f"record {found.id}"),
        engine=found.engine.name,
        accelerator=found.environment.hardware.accelerator,
        launcher=plan.launcher if plan.nodes > 1 else None,
        nodes=plan.nodes,
        devices=plan.devices,
        passes=tuple(dict.fromkeys(window.pass_name for window in found.passes)),
        sample=scope.sample,
        steps=scope.steps,
        subjects=scope.subjects,
        rows=scope.rows,
    )


def case(found: Record) -> Case:
    """Return the case of a record: its own question, tune, gate and limits, completed from the
    shipped case of the same name if there is one.

    Raises RequestError if the result is no valid case in this version.
    """
    told = found.case
    table: dict[str, Any] = {
        "name": told.name,
        "title": told.name,
        "about": f"as record {found.id} tells it",
    }
    if told.name in resolve.names():
        table = resolve.resolve(told.name).case.model_dump(mode="json")
    gate = (
        None
        if told.gate is None
        else {n: v for n, v in told.gate.model_dump(mode="json").items() if v is not None}
    )
    table |= {
        "size": told.size,
        "divisions": list(dict.fromkeys([*table.get("divisions", []), told.division])),
        "question": told.question,
        "tune": found.tune.model_dump(mode="json"),
        "gate": gate,
        "max_interval": told.max_interval,
        "reference": [row.model_dump(mode="json") for row in told.reference],
    }
    try:
        return Case.model_validate(table)
    except ValidationError as error:
        raise RequestError(
            f"record {found.id}: its case cannot be run again: {first_problem(error)}"
        ) from error


def remarks(found: Record) -> list[str]:
    """Return lines for the user on how the record's case differs from the shipped case of its name,
    or that there is none; empty if they are the same.
    """
    if found.case.name not in resolve.names():
        return [
            f"no case {found.case.name!r} comes with this version: the question is the record's own"
        ]
    return [f"{text(said)}: the question is the record's own" for said in shipped.apart(found)]


def check_sources(found: Record, asked: Request) -> None:
    """Raise RequestError if `--weights` or `--data` is missing although the record's run had
    trained weights or data files, or is given although it had random weights or generated data.
    """
    source = found.data.model_dump().get("source")
    wanted = (
        (
            "--weights",
            asked.weights,
            found.weights.trained,
            f"weights of source {found.weights.source!r}",
            "random weights",
        ),
        (
            "--data",
            asked.data,
            source != MADE,
            f"data of source {source!r}",
            "data that its task makes",
        ),
    )
    for option, given, needed, what, instead in wanted:
        if needed and given is None:
            raise RequestError(f"record {found.id} was made with {what}; give them with {option}")
        if not needed and given is not None:
            raise RequestError(f"record {found.id} was made with {instead}: leave {option} out")


def check_weights(found: Record, header_sha256: str) -> None:
    """Raise RequestError if the weights here have another header hash than the record's; a record
    without one accepts any.
    """
    told = found.weights.model_dump().get("header_sha256")
    if told is not None and told != header_sha256:
        raise RequestError(
            f"other weights: weights.header_sha256: {told} / {header_sha256}; give those of the"
            " record"
        )


def here(found: Record, ready: Ready) -> tuple[Field, ...]:
    """Return the fields in which the environment of this host differs from the record's, as far as
    known before a worker runs.

    Left out are library versions and variables that only a worker reports, and packages if workers
    run in another Python. Empty for a remote launcher or without an accelerator.
    """
    row = ready.accelerator
    if row is None or ready.launcher.remote:
        return ()
    now = environment.of_host(row, row.find()[: ready.plan.devices], {})
    ours = fields.flat(fields.environment(found.environment), "environment.")
    theirs = fields.flat(fields.environment(now), "environment.")
    # Fields that only a worker or the run itself can know.
    later = tuple(
        f"environment.software.{name}"
        for name in ("variables.", *now.software.libraries, *now.software.collectives)
    )
    skipped = (*later, *(OF_WORKERS if ready.request.engine_settings.python else ()))
    return tuple(
        one for one in fields.differing([ours], [theirs]) if not one.name.startswith(skipped)
    )


def differs(found: Record, made: Record) -> tuple[Field, ...]:
    """Return the fields that show that a finished run did not repeat the record: another question
    or data, or other weights; empty for a failed run.
    """
    if made.status == "failed":
        return ()
    ours, theirs = (fields.setting(one) for one in (found, made))
    weights = fields.differing([ours], [theirs])
    return (*fields.questions([found], [made]), *(one for one in weights if one.name in WEIGHTS))


def find_earlier(
    folder: Path, wanted: list[Ready]
) -> tuple[list[list[tuple[Path, Record]]], list[str]]:
    """Return, for each request, its valid records in a folder with their paths, oldest first; and a
    warning line for each file that is no sound record.

    Every match is also verified: its metrics must follow from its samples. A record that answers
    several equal requests counts for the first.
    """
    out: list[list[tuple[Path, Record]]] = [[] for _ in wanted]
    warnings = []
    for path in sorted(folder.glob("*.json")):
        if sealed.kind(path) != "run":
            continue
        try:
            found = record.read(path)
            place = next((i for i, one in enumerate(wanted) if answers(found, one)), None)
            if place is not None:
                # its metrics must follow from its samples
                out[place].append((path, verify.read(path)))
        except RequestError as error:
            warnings.append(f"{error}; it is not counted as a run")
    return [sorted(of, key=lambda one: one[1].created) for of in out], warnings


def answers(found: Record, ready: Ready) -> bool:
    """Return whether a record is a valid run of this request: same case, question, tune (except
    values that were `auto`), plan, scope, passes, engine and accelerator.

    A record does not name the folders of data and weights, so only their kind is compared:
    generated or read, random or trained. Runs that resumed from a checkpoint do not count.
    """
    case, request = ready.case, ready.request
    gate = None if case.gate is None else GateFacts(**case.gate.model_dump(mode="json"))
    asked = (case.name, case.size, gate, case.max_interval)
    made = not isinstance(found.data, Nothing) and found.data.source == MADE
    return (
        found.status == "valid"
        and not found.restarts
        and (found.case.name, found.case.size, found.case.gate, found.case.max_interval) == asked
        and found.question == case.question
        and found.auto == request.resolved.auto
        and found.tune
        == case.tune.model_copy(update={name: getattr(found.tune, name) for name in found.auto})
        and (found.plan, found.scope) == (ready.plan, ready.scope)
        and {window.pass_name for window in found.passes} == set(ready.passes)
        and found.engine.name == ready.engine.name
        and (
            ready.accelerator is None
            or ready.accelerator.name == found.environment.hardware.accelerator
        )
        and (made, found.weights.trained) == (request.data is None, request.weights is not None)
    )
