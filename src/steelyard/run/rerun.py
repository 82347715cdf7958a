"""Rerun recorded runs: make a request from a record, check that it can be repeated here, and find
records that already answer a request.

Used by `steelyard reproduce` (cli/reproduce.py) and by sweeps that skip runs they already have
(cli/execute_runs.py).
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steelyard.case import resolve
from steelyard.case.case import Case
from steelyard.case.request import Request
from steelyard.case.resolve import ResolvedCase
from steelyard.errors import RequestError
from steelyard.metrics import record_fields, shipped_cases, standing, verify
from steelyard.metrics.record_fields import FieldDifference
from steelyard.record import record, record_file
from steelyard.record.record import GateFacts, NoDataFacts, Record
from steelyard.run import environment
from steelyard.run.checked_request import CheckedRequest
from steelyard.schema import describe_first_problem
from steelyard.words import render_text

# fields not compared if workers run in another Python
WORKER_FIELDS = ("environment.software.packages.", "environment.software.python")
WEIGHTS_FIELDS = (
    "weights.source",
    "weights.seed",
    "weights.header_sha256",
)  # equal for equal weights

GENERATED = "made"  # `source` of data that the task generates


def make_request(earlier_record: Record) -> Request:
    """Return the request that repeats a record's run on the record's own question, engine,
    accelerator, plan, scope, passes and tune. The launcher is the record's only if it had several
    nodes.

    Paths of data and weights are not in a record: the caller adds them and calls `check_sources`.
    Values that were `auto` are fixed at what the record's run chose. Raises RequestError if the run
    failed or read no data, had resumed from a checkpoint, or its case is not valid in this version.
    """
    if earlier_record.status == "failed" or isinstance(earlier_record.data, NoDataFacts):
        raise RequestError(
            f"record {earlier_record.id} is of a failed run, so there is nothing to reproduce; see"
            " steelyard"
            " report"
        )
    if earlier_record.restarts:
        raise RequestError(
            f"record {earlier_record.id} resumed from a checkpoint; reproduce the run that wrote it"
        )
    plan, scope = earlier_record.plan, earlier_record.scope
    # Sizes chosen automatically in the record's run are fixed in the new one.
    origins = {
        **earlier_record.case.origins,
        **{f"tune.{name}": "record" for name in earlier_record.auto_tunes},
    }
    return Request(
        resolved=ResolvedCase(rebuild_case(earlier_record), origins, f"record {earlier_record.id}"),
        engine=earlier_record.engine.name,
        accelerator=earlier_record.environment.hardware.accelerator,
        launcher=plan.launcher if plan.nodes > 1 else None,
        nodes=plan.nodes,
        devices=plan.devices,
        passes=tuple(dict.fromkeys(window.pass_name for window in earlier_record.passes)),
        sample=scope.sample,
        steps=scope.steps,
        subjects=scope.subjects,
        rows=scope.rows,
    )


def rebuild_case(earlier_record: Record) -> Case:
    """Return the case of a record: its own question, size, tune, gate, `max_interval`, published
    rows, numbers of requests and limits of goodput; the rest (title, text, divisions, device
    counts) comes from the shipped case of the same name if there is one, else name and defaults are
    used.

    The record's division is added to the allowed ones. Raises RequestError if the result is no
    valid case in this version.
    """
    case_facts = earlier_record.case
    fields_of_case: dict[str, Any] = {
        "name": case_facts.name,
        "title": case_facts.name,
        "about": f"as stored in record {earlier_record.id}",
    }
    if case_facts.name in resolve.list_shipped_cases():
        fields_of_case = resolve.resolve_case(case_facts.name).case.model_dump(mode="json")
    gate = (
        None
        if case_facts.gate is None
        else {n: v for n, v in case_facts.gate.model_dump(mode="json").items() if v is not None}
    )
    fields_of_case |= {
        "size": case_facts.size,
        "divisions": list(
            dict.fromkeys([*fields_of_case.get("divisions", []), case_facts.division])
        ),
        "question": case_facts.question,
        "tune": earlier_record.tune.model_dump(mode="json"),
        "gate": gate,
        "max_interval": case_facts.max_interval,
        **_list_generation_fields(earlier_record),
        "reference": [row.model_dump(mode="json") for row in case_facts.reference],
    }
    try:
        return Case.model_validate(fields_of_case)
    except ValidationError as error:
        raise RequestError(
            f"record {earlier_record.id}: its case cannot be run again:"
            f" {describe_first_problem(error)}"
        ) from error


def _list_generation_fields(earlier_record: Record) -> dict[str, Any]:
    """Return the fields of a case of generation that are no part of the question: how many requests
    the record's run sent at least, for how long, and its limits of goodput; all None for other
    kinds of work. A run with `--sample` needs no number of requests from its case.
    """
    scope, slo = earlier_record.scope, earlier_record.case.slo
    return {
        "requests": scope.requests if scope.sample is None else None,
        "min_time_s": scope.min_time_s,
        "slo": None if slo is None else slo.model_dump(mode="json"),
    }


def describe_case_differences(earlier_record: Record) -> list[str]:
    """Return lines for the user on a record's case: one that no case of its name is shipped, or up
    to two on how it differs from the shipped one (parts that were modified; question fields that
    are newer than the record); empty if it does not differ.
    """
    if earlier_record.case.name not in resolve.list_shipped_cases():
        return [
            f"no case {earlier_record.case.name!r} comes with this version: the question is the"
            " record's own"
        ]
    return [
        f"{render_text(message)}: the question is the record's own"
        for message in shipped_cases.list_case_differences(earlier_record)
    ]


def check_sources(earlier_record: Record, new_request: Request) -> None:
    """Raise RequestError if the new request has no `--weights` or `--data` although the record's
    run had trained weights or data files, or has one although the run had random weights or
    generated data. Contents are not compared.
    """
    source = earlier_record.data.model_dump().get("source")
    rules = (
        (
            "--weights",
            new_request.weights,
            earlier_record.weights.is_trained,
            f"weights of source {earlier_record.weights.source!r}",
            "random weights",
        ),
        (
            "--data",
            new_request.data,
            source != GENERATED,
            f"data of source {source!r}",
            "data generated by its task",
        ),
    )
    for option, path, needed, used_text, unused_text in rules:
        if needed and path is None:
            raise RequestError(
                f"record {earlier_record.id} was made with {used_text}; give them with {option}"
            )
        if not needed and path is not None:
            raise RequestError(
                f"record {earlier_record.id} was made with {unused_text}: leave {option} out"
            )


def check_weights(earlier_record: Record, header_sha256: str) -> None:
    """Raise RequestError if `header_sha256`, the header hash of the weights here, is another than
    the record's; a record without one accepts any.
    """
    recorded_sha256 = earlier_record.weights.model_dump().get("header_sha256")
    if recorded_sha256 is not None and recorded_sha256 != header_sha256:
        raise RequestError(
            f"other weights: weights.header_sha256: {recorded_sha256} / {header_sha256}; use the"
            " weights of the record"
        )


def find_host_differences(
    earlier_record: Record, checked: CheckedRequest
) -> tuple[FieldDifference, ...]:
    """Return the fields in which this host differs from the record's environment (machine, CPU,
    memory, devices by number, name and UUID, datasheet, OS, driver, Python, packages, revision of
    this package), as far as known before a worker runs.

    Left out are library versions and variables that only a worker reports, and Python and packages
    if workers run in another Python (`engine.python`). Empty for a remote launcher or without an
    accelerator.
    """
    row = checked.accelerator
    if row is None or checked.launcher.remote:
        return ()
    host_environment = environment.describe_host(row, row.find()[: checked.plan.devices], {})
    recorded = record_fields.flatten_fields(
        record_fields.summarize_environment(earlier_record.environment), "environment."
    )
    current = record_fields.flatten_fields(
        record_fields.summarize_environment(host_environment), "environment."
    )
    # Fields that only a worker or the run itself can know.
    known_later = tuple(
        f"environment.software.{name}"
        for name in (
            "variables.",
            *host_environment.software.libraries,
            *host_environment.software.collectives,
        )
    )
    skipped = (*known_later, *(WORKER_FIELDS if checked.request.engine_settings.python else ()))
    return tuple(
        field
        for field in record_fields.find_differences([recorded], [current])
        if not field.name.startswith(skipped)
    )


def find_rerun_differences(
    earlier_record: Record, new_record: Record
) -> tuple[FieldDifference, ...]:
    """Return the fields in which a finished run did not repeat the record: those of the question
    with the data's fingerprint, and source, seed and header hash of the weights; empty if it did,
    or if the new run failed.
    """
    if new_record.status == "failed":
        return ()
    ours, theirs = (record_fields.list_setting_fields(one) for one in (earlier_record, new_record))
    weights = record_fields.find_differences([ours], [theirs])
    return (
        *record_fields.find_question_differences([earlier_record], [new_record]),
        *(one for one in weights if one.name in WEIGHTS_FIELDS),
    )


def find_answering_records(
    folder: Path, requests: list[CheckedRequest]
) -> tuple[list[list[tuple[Path, Record]]], list[str]]:
    """Return, for each request in order, its valid and unproven records directly in a folder
    (`*.json`) as (path, record), oldest first; and a warning line for each run record that cannot
    be read or, if it matches, does not verify.

    A match is decided by `is_run_of`, and then its metrics must follow from its samples. A record
    that answers several equal requests counts for the first. Records of other kinds are skipped.
    """
    matches: list[list[tuple[Path, Record]]] = [[] for _ in requests]
    warnings = []
    for path in sorted(folder.glob("*.json")):
        if record_file.read_record_kind(path) != "run":
            continue
        try:
            earlier_record = record.read_record(path)
            index = next(
                (i for i, one in enumerate(requests) if is_run_of(earlier_record, one)), None
            )
            if index is not None:
                # its metrics must follow from its samples
                matches[index].append((path, verify.read_verified_record(path)))
        except RequestError as error:
            warnings.append(f"{error}; it is not counted as a run")
    return [
        sorted(request_matches, key=lambda one: one[1].created) for request_matches in matches
    ], warnings


def is_run_of(earlier_record: Record, checked: CheckedRequest) -> bool:
    """Return whether a record is a valid or unproven run of this request: same case name, size,
    quality gate and `max_interval`, question, tune (except values that were `auto` in both), plan
    (launcher included), scope, set of passes, engine and accelerator by name (any accelerator, if
    the request has none yet), and the address of the user's server. Versions and hosts are not
    compared.

    A record does not name the folders of data and weights, so only their kind is compared:
    generated or read, random or trained. Runs that resumed from a checkpoint do not count.
    """
    case, request = checked.case, checked.request
    gate = None if case.gate is None else GateFacts(**case.gate.model_dump(mode="json"))
    case_identity = (case.name, case.size, gate, case.max_interval)
    has_generated_data = (
        not isinstance(earlier_record.data, NoDataFacts) and earlier_record.data.source == GENERATED
    )
    return (
        standing.is_answer_right(earlier_record)
        and not earlier_record.restarts
        and (
            earlier_record.case.name,
            earlier_record.case.size,
            earlier_record.case.gate,
            earlier_record.case.max_interval,
        )
        == case_identity
        and earlier_record.question == case.question
        and earlier_record.auto_tunes == request.resolved.auto
        and earlier_record.tune
        == case.tune.model_copy(
            update={name: getattr(earlier_record.tune, name) for name in earlier_record.auto_tunes}
        )
        and (earlier_record.plan, earlier_record.scope) == (checked.plan, checked.scope)
        and {window.pass_name for window in earlier_record.passes} == set(checked.passes)
        and earlier_record.engine.name == checked.engine.name
        and _is_same_server(earlier_record, checked)
        and (
            checked.accelerator is None
            or checked.accelerator.name == earlier_record.environment.hardware.accelerator
        )
        and (has_generated_data, earlier_record.weights.is_trained)
        == (request.data is None, request.weights is not None)
    )


def _is_same_server(earlier_record: Record, checked: CheckedRequest) -> bool:
    """Return whether a record's run asked the server that the request names, on what the user says
    is the same device; True for engines that are not given the address of one.
    """
    if not checked.engine.endpoint:
        return True
    settings, details = checked.request.engine_settings, earlier_record.engine.details
    recorded = (getattr(details, "endpoint", None), details.device, details.devices or 1)
    return recorded == (settings.endpoint, settings.device, settings.devices)
