"""The log messages of another package that reads a stranger's files: collected, and never printed as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

MOST_LOGGED = 5
"""Messages that are kept; the others are counted."""


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages
        self._more = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message on one line."""
        if len(self._messages) < MOST_LOGGED:
            self._messages.append(" ".join(record.getMessage().split()))
            return
        self._more += 1
        self._messages[MOST_LOGGED:] = [f"and {self._more} more messages"]


@contextmanager
def logged(package: str) -> Iterator[list[str]]:
    """Collect the warnings of a package, which may quote texts of the files that it reads."""
    logger, messages = logging.getLogger(package), list[str]()
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Collector(messages)], False
    try:
        yield messages
    finally:
        logger.handlers, logger.propagate = before
