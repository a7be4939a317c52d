"""Text that came with a file, made fit to be shown."""

from __future__ import annotations


def safe(text: str) -> str:
    r"""A text for a terminal or a page: what a file put into a name can neither move the cursor nor turn the line.

    Whatever Python does not call printable is spelled out: control characters, line breaks, and the marks that set
    text from right to left.

    >>> safe("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
