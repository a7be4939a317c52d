"""The command that helps after an error: it can be typed as it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from porting.cli.options import again, given
from porting.errors import Code, Fault

MOST = 3
"""So many kinds of fault are explained at once."""


def after(command: str, typed: Mapping[str, object], faults: Sequence[Fault]) -> list[str]:
    """The words that follow ``porting``.

    Args:
        command: the one that failed.
        typed: its arguments and options.
        faults: what is wrong; none where the system refused something.
    """
    codes = list(dict.fromkeys(fault.code for fault in faults))
    source, into = typed.get("source"), typed.get("into")
    if {Code.NO_TABLE, Code.UNKNOWN_ARCHITECTURE} & set(codes) and into is not None and typed.get("table") is None:
        return ["suggest", *again(source if isinstance(source, str) else None), *given(into=into)]
    if Code.UNKNOWN_ARCHITECTURE in codes or Code.NO_TABLE in codes:
        return ["tables"]
    return ["explain", *codes[:MOST]] if codes else [command, "--help"]
