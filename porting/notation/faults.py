"""Faults of notation: raised while one string is parsed, gathered with their place in the table."""

from __future__ import annotations

from porting.errors import Code, PortingError


class TableError(PortingError):
    """A mapping table cannot be read; carries every fault with file, line and column."""


class NotationError(ValueError):
    """An error inside a string, and its position there.

    Attributes:
        offset: index of the character of the string at which it was found; None when it concerns the whole.
        hint: what to do about it; may be empty.
    """

    def __init__(self, code: Code, message: str, offset: int | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.offset = offset
        self.hint = hint
