"""The time that all of it may take: past it, the next module that is run, of either side, is not run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from torch.nn.modules.module import register_module_forward_pre_hook


class OutOfTime(BaseException):
    """The time is over.  No error: code that catches those, the user's included, is not to catch this."""


@contextmanager
def bounded(until: float) -> Iterator[None]:
    """End what is inside when the time is over.

    Args:
        until: when that is, as :func:`time.monotonic` has it.

    Raises:
        OutOfTime: it is over.
    """
    thread = get_ident()

    def look(*_: object) -> None:
        if time.monotonic() > until and get_ident() == thread:
            raise OutOfTime

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
