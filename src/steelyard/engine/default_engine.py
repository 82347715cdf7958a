"""The engine of a run that names none: the first that can run the case by itself."""

from steelyard.case.case import Case
from steelyard.case.request import DEFAULT_ENGINE
from steelyard.engine import engine_rows


def choose_default_engine(case: Case) -> str:
    """Return the name of the engine that runs a case if none is named: `torch` or, if it cannot,
    the first other in the table of engines that can without a server; `torch` again if none can, so
    that checking the request says why.
    """
    rows = engine_rows.load_engine_rows()
    able = [
        name
        for name, row in rows.items()
        if row.refusal(case) is None and not row.endpoint and not row.server
    ]
    return DEFAULT_ENGINE if DEFAULT_ENGINE in able else next(iter(able), DEFAULT_ENGINE)
