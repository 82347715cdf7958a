"""A page as one html file: no script, nothing loaded from anywhere, every string escaped by the template engine."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steelyard.report.document import Block, Page
from steelyard.report.plain import lines
from steelyard.report.plot import plot


def html(page: Page) -> str:
    environment = Environment(
        loader=PackageLoader("steelyard.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    blocks = [(_kind(block), block) for block in page.blocks]
    return environment.get_template("page.html").render(page=page, blocks=blocks, plot=plot)


def _kind(block: Block) -> str:
    return type(block).__name__.lower()


def _visible(value: Any) -> Any:
    """Strips control characters off text; what a macro of ours has made is text no longer."""
    return lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value
