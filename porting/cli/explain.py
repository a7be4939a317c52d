"""``explain``: what the code of an error means."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Annotated

import typer

from porting.cli import options
from porting.cli.output import Screen
from porting.errors import Code, nearest


def explain(
    codes: Annotated[
        list[str] | None, typer.Argument(metavar="CODE", help="The code of a fault.", show_default="list all")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Explain what an error means, why it is one, and how to fix it.

    The code is in square brackets at the end of the error. Without a code, all codes are listed.

    \b
    Examples:
      porting explain unread-tensor
      porting explain missing-member no-target
      porting explain
    """
    with Screen("explain", as_json=as_json) as screen:
        known = [one.value for one in Code]
        for one in codes or ():
            if one not in known:
                raise typer.BadParameter(f"no fault has the code {one!r}. {nearest(one, known).capitalize()}".strip())
        found = {code: explanation(Code(code)) for code in codes or known}
        screen.document(found)
        if not codes:
            first = {code: _plain(text.partition("\n")[0]).partition(". ")[0] for code, text in found.items()}
            screen.rows(["", ""], [(code, sentence.removesuffix(".")) for code, sentence in first.items()])
            screen.next("explain", known[0])
            return
        for code, text in found.items():
            screen.line((code, "bold"))
            for line in _plain(text).splitlines():
                screen.line(f"  {line}" if line else "")
            screen.line()
        screen.next("--help")


def explanation(code: Code) -> str:
    """The page's section on an error code, in Markdown: what it means, why it is an error, an example and the fix.

    >>> print(explanation(Code.UNREAD_TENSOR).splitlines()[0])
    **What** — No rule reads a tensor of the checkpoint, and `[drop]` does not list it.
    """
    page = (files("porting") / "errors.md").read_text(encoding="utf-8")
    _, _, section = page.partition(f"\n## {code.value}\n")
    return re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0].strip()


def _plain(markdown: str) -> str:
    """A section without its marks."""
    words = markdown.replace("```\n", "").replace("```", "").replace("`", "").replace("**", "")
    return words.removeprefix("What \u2014 ").replace(" \u2014 ", ": ", 3)
