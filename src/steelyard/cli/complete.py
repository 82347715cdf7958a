"""Shell completion: functions that typer calls with what has been typed, and that return matching
names.

Names are looked up when the shell asks, and nothing slow is imported.
"""

from collections.abc import Callable
from typing import Any, get_args

from steelyard import plugins

CASES, ENGINES = "steelyard.case.resolve:names", "steelyard.engine.rows:table"


def _offer(*names: str, reference: str | None = None) -> Callable[[str], list[str]]:
    """Return a completion function for the given names and those at `reference`, loaded when it is
    called.

    `reference` is a `module:name` of a dict, of rows with names, of a Literal, or of a function
    that returns names.
    """

    def complete(incomplete: str) -> list[str]:
        """Return the names that begin with the text typed; those at the reference come first."""
        known: Any = () if reference is None else plugins.load(reference)
        known = get_args(known) or (known() if callable(known) else known)
        every = [*(getattr(one, "name", one) for one in known), *names]
        return [name for name in every if name.startswith(incomplete)]

    return complete


cases = _offer("smoke", reference=CASES)
shipped_cases = _offer(reference=CASES)
data = _offer(reference="steelyard.sources.table:DATA")
weights = _offer(reference="steelyard.sources.table:WEIGHTS")
engines = _offer(reference=ENGINES)
engines_or_all = _offer("all", reference=ENGINES)
sizes = _offer("full", "smoke")
divisions = _offer(reference="steelyard.data.division:Division")
accelerators = _offer(reference="steelyard.accelerators:table")
launchers = _offer(reference="steelyard.run.launch:table")
formats = _offer("text", "md", "html")
report_formats = _offer("text", "md", "html", "csv")
langs = _offer("en", "zh")


def precisions(incomplete: str) -> list[str]:
    """Return the precision names of all kinds of work that begin with what has been typed."""
    from steelyard.case.precision import presets

    names = dict.fromkeys(name for rows in presets().values() for name in rows)
    return [name for name in names if name.startswith(incomplete)]
