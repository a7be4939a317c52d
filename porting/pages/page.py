"""A template, filled in, as one HTML file: its styles and scripts are in it, and it can reach no network.

The files beside this one are the templates (``*.html``), styles (``*.css``) and scripts (``*.js``).  A template begins
with ``{% extends "base.html" %}`` and fills the blocks ``title`` and ``main``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from porting.printable import safe

STYLE = "style.css"
"""The style of every page."""


def render_page(
    template: str, values: Mapping[str, object], *, styles: Sequence[str] = (), scripts: Sequence[str] = ()
) -> str:
    """A whole page.

    Every value is escaped where it is printed, and characters that cannot be seen are spelled out, unless it is
    ``markupsafe.Markup`` already.  The page's Content-Security-Policy lets nothing in but its own scripts, by their
    digest, styles, and pictures in ``data:`` addresses: what would slip through the escaping could neither run nor
    send anything.  So handlers go into a script file: an ``onclick`` in a template does nothing.

    Args:
        styles, scripts: more files of ``porting/pages``, put in after ``style.css`` and at the end of the page.
    """
    inlined = [read(name) for name in scripts]
    return (
        _environment()
        .get_template(template)
        .render(
            {
                **values,
                "page_policy": _policy(inlined),
                "page_styles": [Markup(read(name)) for name in (STYLE, *styles)],  # noqa: S704  # the package's own
                "page_scripts": [Markup(one) for one in inlined],  # noqa: S704  # as above
            }
        )
    )


def in_frame(page: str, *, title: str, height: int) -> str:
    """A page in a frame, for a notebook: neither's styles reach the other.

    Args:
        height: of the frame, in CSS pixels; the reader may change it.
    """
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{height}px;border:0;resize:vertical"></iframe>'
    )


def render_part(template: str, values: Mapping[str, object]) -> str:
    """A template that is a part of a page, such as what a notebook shows of a value; escaped as in a page."""
    return _environment().get_template(template).render(values)


def read(name: str) -> str:
    """The text of a file of this package."""
    return (files("porting.pages") / name).read_text(encoding="utf-8")


def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(read),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _seen(value: object) -> object:
    """The printed form of a value: jinja2 escapes its tags, and this what cannot be seen."""
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _policy(scripts: Sequence[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
