"""A page as one html file: nothing loaded from anywhere, every string escaped by the template
engine, no script but ours.

The page's policy allows the one style and the one script that are in it, by their hashes, and
nothing else. Without scripts all of it can be read and opened.
"""

import base64
import hashlib
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steelyard.report import plot
from steelyard.report.document import Block, Fold, Page
from steelyard.report.plain import lines
from steelyard.words import Words


def html(page: Page) -> str:
    environment = Environment(
        loader=PackageLoader("steelyard.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"kind_of": _kind, "plot": plot, "say": Words(page.lang)}
    folded = any(isinstance(block, Fold) for block in page.blocks)  # nothing else needs the script
    style, script = _own("style.css"), _own("page.js") if folded else ""
    allowed = {"style": _hash(style), "script": _hash(script)}
    return environment.get_template("page.html").render(
        page=page,
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        allowed=allowed,
    )


def _own(name: str) -> str:
    return resources.files("steelyard.report").joinpath("templates", name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return the hash of what stands between the tags, as a browser counts it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _kind(block: Block) -> str:
    return type(block).__name__.lower()


def _visible(value: Any) -> Any:
    """Strip control characters off text; what a macro of ours has made is text no longer."""
    return lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value
