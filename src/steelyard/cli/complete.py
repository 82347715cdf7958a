"""What a shell offers to complete. Names alone: nothing that takes time is imported."""

from collections.abc import Iterable
from typing import get_args


def cases(incomplete: str) -> list[str]:
    from steelyard.case import resolve

    return _begin([*resolve.names(), "smoke"], incomplete)


def shipped_cases(incomplete: str) -> list[str]:
    from steelyard.case import resolve

    return _begin(resolve.names(), incomplete)


def data(incomplete: str) -> list[str]:
    from steelyard.sources import table

    return _begin([one.name for one in table.DATA], incomplete)


def weights(incomplete: str) -> list[str]:
    from steelyard.sources import table

    return _begin([one.name for one in table.WEIGHTS], incomplete)


def engines(incomplete: str) -> list[str]:
    from steelyard.engine import rows as engine_rows

    return _begin(sorted(engine_rows.table()), incomplete)


def engines_or_all(incomplete: str) -> list[str]:
    return [*engines(incomplete), *_begin(["all"], incomplete)]


def sizes(incomplete: str) -> list[str]:
    return _begin(["full", "smoke"], incomplete)


def divisions(incomplete: str) -> list[str]:
    from steelyard.data.division import Division

    return _begin(get_args(Division), incomplete)


def precisions(incomplete: str) -> list[str]:
    from steelyard.case.precision import presets

    return _begin(dict.fromkeys(name for rows in presets().values() for name in rows), incomplete)


def accelerators(incomplete: str) -> list[str]:
    from steelyard import accelerators

    return _begin(accelerators.table(), incomplete)


def launchers(incomplete: str) -> list[str]:
    from steelyard.run import launch

    return _begin(launch.table(), incomplete)


def formats(incomplete: str) -> list[str]:
    return _begin(["text", "md", "html"], incomplete)


def report_formats(incomplete: str) -> list[str]:
    return _begin(["text", "md", "html", "csv"], incomplete)


def langs(incomplete: str) -> list[str]:
    return _begin(["en", "zh"], incomplete)


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
