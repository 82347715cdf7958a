"""Find the installed packages, other than this one, that bring a part of a run: engine, framework,
task, kind of work, model family, accelerator, datasheet peak, launcher, metrics.

A record states them, so that pages can say who vouches for its numbers. The node agent looks up the
accelerator, which only its host knows (`environment.find_host_providers`); the parent, which
assembles the record, all else.
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard import plugins
from steelyard.engine import engine_rows
from steelyard.metrics import metric_table
from steelyard.plugins import Provider
from steelyard.run import launch
from steelyard.run.checked_request import CheckedRequest
from steelyard.run.messages import HelloMessage


def find_providers(checked: CheckedRequest, hellos: Sequence[HelloMessage]) -> dict[str, str]:
    """Return the packages of all parts of a run that are not this package's own, as `name version`
    by the part's name, for the record; empty if all are. `hellos` are the messages of its hosts.
    """
    question = checked.case.question
    metrics = {
        f"metrics.{metric.name}": plugins.find_provider(metric_table.GROUP, metric.name)
        for metric in metric_table.list_task_metrics(question.task_row)
    }
    launcher = plugins.find_provider(launch.ENTRY_POINT_GROUP, checked.launcher.name)
    found = _find_engine_providers(checked) | question.find_providers()
    found |= {"launcher": launcher, **metrics}
    stated = {part: str(provider) for part, provider in found.items() if provider is not None}
    return stated | {part: text for hello in hellos for part, text in hello.providers.items()}


def _find_engine_providers(checked: CheckedRequest) -> dict[str, Provider | None]:
    """Return the packages that bring the engine's row and its framework's, None for this package.

    With `engine.python` the workers load both in another Python, whose versions are not known here:
    then the packages have none.
    """
    found = {
        "engine": plugins.find_provider(engine_rows.ENGINES_GROUP, checked.engine.name),
        "framework": plugins.find_provider(engine_rows.FRAMEWORKS_GROUP, checked.engine.framework),
    }
    if checked.request.engine_settings.python is None:
        return found
    return {
        part: None if provider is None else replace(provider, version=None)
        for part, provider in found.items()
    }
