"""Shell completion: functions that typer calls with what has been typed, and that return matching
names.

Names are looked up when the shell asks, and nothing slow is imported.
"""

from collections.abc import Callable
from typing import Any, get_args

from steelyard import plugins

CASES_REFERENCE, ENGINES_REFERENCE = (
    "steelyard.case.resolve:list_shipped_cases",
    "steelyard.engine.engine_rows:load_engine_rows",
)


def _make_completer(*names: str, reference: str | None = None) -> Callable[[str], list[str]]:
    """Return a completion function for the given names and those at `reference`, loaded when it is
    called.

    `reference` is a `module:name` of a dict, of rows with names, of a Literal, or of a function
    that returns names.
    """

    def complete(incomplete: str) -> list[str]:
        """Return the names that begin with the text typed so far; those at the reference come
        first. Imports the module of the reference.
        """
        loaded: Any = () if reference is None else plugins.load_reference(reference)
        loaded = get_args(loaded) or (loaded() if callable(loaded) else loaded)
        candidates = [*(getattr(item, "name", item) for item in loaded), *names]
        return [name for name in candidates if name.startswith(incomplete)]

    return complete


cases = _make_completer("smoke", reference=CASES_REFERENCE)
shipped_cases = _make_completer(reference=CASES_REFERENCE)
data = _make_completer(reference="steelyard.sources.catalog:DATA_SOURCES")
weights = _make_completer(reference="steelyard.sources.catalog:WEIGHT_SOURCES")
engines = _make_completer(reference=ENGINES_REFERENCE)
engines_or_all = _make_completer("all", reference=ENGINES_REFERENCE)
sizes = _make_completer("full", "smoke")
divisions = _make_completer(reference="steelyard.data.division:Division")
accelerators = _make_completer(reference="steelyard.accelerators:load_accelerators")
launchers = _make_completer(reference="steelyard.run.launch:load_launchers")
formats = _make_completer("text", "md", "html")
report_formats = _make_completer("text", "md", "html", "csv")
langs = _make_completer("en", "zh")


def precisions(incomplete: str) -> list[str]:
    """Return the precision names of all kinds of work that begin with what has been typed, each
    once.
    """
    from steelyard.case.precision import load_presets

    names = dict.fromkeys(name for rows in load_presets().values() for name in rows)
    return [name for name in names if name.startswith(incomplete)]
