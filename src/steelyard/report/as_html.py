"""Render a page as one HTML file that loads nothing from elsewhere.

The template engine escapes every string. The content security policy allows only the one style
sheet and the one script in the file, by their hashes. Without scripts everything can still be read
and opened.
"""

import base64
import hashlib
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steelyard.report import chart_geometry, point_geometry
from steelyard.report.document import Fold, Page, PageElement
from steelyard.report.plain_text import clean_lines
from steelyard.words import PageWords


def render_html(page: Page) -> str:
    """Return the page as one complete HTML document with style sheet and script inside it, which
    loads nothing from elsewhere.

    Every text is escaped and loses its control characters. The script, which opens the fold that a
    link points at, is included only if the page has a fold at its top level.
    """
    environment = Environment(
        loader=PackageLoader("steelyard.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "kind_of": _element_kind,
        "plot": chart_geometry,
        "points_plot": point_geometry,
        "say": PageWords(page.lang),
    }
    has_folds = any(
        isinstance(element, Fold) for element in page.elements
    )  # only they need the script
    style, script = (
        _read_template_file("style.css"),
        _read_template_file("page.js") if has_folds else "",
    )
    allowed = {"style": _policy_hash(style), "script": _policy_hash(script)}
    return environment.get_template("page.html").render(
        page=page,
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        allowed=allowed,
    )


def _read_template_file(name: str) -> str:
    """Return the text of a file in the package's templates folder."""
    return resources.files("steelyard.report").joinpath("templates", name).read_text("utf-8")


def _policy_hash(text: str) -> str:
    """Return the SHA-256 of a style or script as a content security policy writes it: `sha256-` and
    base64.
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _element_kind(element: PageElement) -> str:
    """Return an element's class name in lower case, by which the template chooses its macro."""
    return type(element).__name__.lower()


def _clean_value(value: Any) -> Any:
    """Remove control characters and terminal escapes from a string that a template prints; return
    markup and other values unchanged.
    """
    return clean_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value
