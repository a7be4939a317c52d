"""What each kind of fault means, from the page ``docs/errors.md``, which is installed with the library."""

from __future__ import annotations

import re
from importlib.resources import files

from porting.errors import Code


def explanation(code: Code) -> str:
    """What a fault of this code means, why it is one, how it looks and how to mend it: the page's section in Markdown.

    >>> print(explanation(Code.UNREAD_TENSOR).splitlines()[0])
    **What** — No rule reads a tensor of the checkpoint, and `[drop]` does not list it.
    """
    page = (files("porting") / "errors.md").read_text(encoding="utf-8")
    _, _, section = page.partition(f"\n## {code.value}\n")
    return re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0].strip()
