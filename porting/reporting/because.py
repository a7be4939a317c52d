"""Causes on a terminal: the name of each, where it was found, what is left when it is undone, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from porting.causes.naming import Finding


def cause_lines(causes: Sequence[Finding], listed: Callable[[Sequence[str]], str]) -> Iterator[Text]:
    """What is known of each cause.

    Args:
        causes: of a report.
        listed: makes one line of many names.
    """
    for one in causes:
        yield from _named(one, listed) if one.name else _unknown(one, listed)


def _named(one: Finding, listed: Callable[[Sequence[str]], str]) -> Iterator[Text]:
    said = f"{one.name} ({one.detail})" if one.detail else one.name
    yield Text.assemble(
        ("cause: ", "bold"), (said, "bold red"), f", residual {one.residual:.0e} of {one.difference:.0e}"
    )
    for tie in one.ties:
        yield Text(f"  or {tie}: these inputs do not tell them apart")
    yield Text(f"  explains: {listed(one.probes)}")
    if one.where:
        yield Text(f"  as if in the reference's {listed(one.where)}")
    yield Text(f"  {one.what}")
    yield Text(f"  fix: {one.fix}")


def _unknown(one: Finding, listed: Callable[[Sequence[str]], str]) -> Iterator[Text]:
    yield Text.assemble(("cause: ", "bold"), ("unknown", "yellow"), f", at {listed(one.probes)}")
    for near in one.nearest:
        said = f"{near.name} ({near.detail})" if near.detail else near.name
        yield Text(f"  nearest: {said} would explain {100 * near.share:.0f} % of it")
