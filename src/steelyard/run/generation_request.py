"""Check what concerns requests of generation, and servers, before anything starts.

Called by run/checked_request.py, which checks all else.
"""

from steelyard.case.request import ENGINE_PREFIX, EngineSettings, Request
from steelyard.engine.engine_rows import EngineRow, load_engine_rows
from steelyard.errors import EngineError, RequestError

# Settings that only some engines read: those that send requests to a server, to one whose address
# they are given, or to one that they start.
CLIENT_SETTINGS = ("api", "prompts", "logprobs", "timeout_s")
ENDPOINT_SETTINGS = ("endpoint", "model", "key_variable", "device", "devices")
SERVER_SETTINGS = ("arguments",)


def check_engine_settings(request: Request, engine: EngineRow) -> None:
    """Raise RequestError for the first setting of the engine (`--set engine.KEY`) that it does not
    read, EngineError if it needs one that is not given, such as the address of a server, or starts
    a server that cannot answer the question. `checkout` is not looked at.
    """
    settings = request.engine_settings
    given = [name for name in EngineSettings.model_fields if name in settings.model_fields_set]
    for name in given:
        if not _reads_setting(engine, name):
            readers = [row.name for row in load_engine_rows().values() if _reads_setting(row, name)]
            raise RequestError(
                f"{ENGINE_PREFIX}{name}: engine {engine.name} does not read it; leave it out, or"
                f" use --engine {' or '.join(sorted(readers))}"
            )
    missing = engine.explain_missing_setting(request.resolved.case, settings)
    if missing is not None:
        raise EngineError(missing)


def _reads_setting(engine: EngineRow, name: str) -> bool:
    """Return whether an engine reads a setting of `--set engine.NAME`."""
    if name in CLIENT_SETTINGS:
        return engine.endpoint or bool(engine.server)
    if name in ENDPOINT_SETTINGS:
        return engine.endpoint
    if name in SERVER_SETTINGS:
        return bool(engine.server)
    return True


def check_request_options(request: Request, engine: EngineRow) -> None:
    """Raise RequestError for an option that has no meaning where requests are answered under a
    load: `--steps`, `--explain` and `--trace`; EngineError for a type of the KV cache other than
    that of the activations, which no engine has. Nothing is checked for other kinds of work.
    """
    question = request.resolved.case.question
    if not question.kind_row.has_load:
        return
    noun = question.kind_row.noun
    if request.steps is not None:
        raise RequestError(
            f"--steps {request.steps}: {noun} is limited by requests, not by steps; use --sample N"
            " for a window of N requests"
        )
    if request.explain:
        option = "--trace" if request.trace else "--explain"
        raise RequestError(
            f"{option}: engine {engine.name} has no steps of {noun} to profile; leave it out"
        )
    kv = question.precision.kv
    if kv is not None and kv != question.precision.matmul:
        raise EngineError(
            f"question.precision: engine {engine.name} keeps keys and values in the type of the"
            f" activations, not in {kv}; leave kv out"
        )
