"""Causes on a terminal: the name of each, where it was found, what is left when it is undone, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from porting.causes.finding import Finding, Suspicion

LEAST = 0.1
"""What would explain less of a difference is no lead."""

WHOLE = 0.995
"""What would explain more than this reproduces the probe."""


def cause_lines(causes: Sequence[Finding], listed: Callable[[Sequence[str]], str]) -> Iterator[Text]:
    """What is known of each cause.

    Args:
        causes: of a report.
        listed: makes one line of many names.
    """
    for one in causes:
        if one.name:
            yield from _named(one, listed)
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for one in causes:
        if not one.name:
            alike.setdefault(tuple(near.name for near in _telling(one)), []).append(one)
    for group in alike.values():
        yield from _unknown(group, listed)


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


def _unknown(group: Sequence[Finding], listed: Callable[[Sequence[str]], str]) -> Iterator[Text]:
    """One block for all probes that stay unknown with the same nearest entries, such as those of every layer."""
    probes = [point for one in group for point in one.probes]
    yield Text.assemble(("cause: ", "bold"), ("unknown", "yellow"), f", at {listed(probes)}")
    for number, near in enumerate(_telling(group[0])):
        said = f"{near.name} ({near.detail})" if near.detail else near.name
        shares = sorted({round(100 * _telling(one)[number].share) for one in group})
        span = f"{shares[0]}" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
        whole = all(_telling(one)[number].share > WHOLE for one in group)
        more = ", and does not reproduce the other batches or the output" if whole else ""
        yield Text(f"  nearest: {said} would explain {span} % of it{more}")


def _telling(one: Finding) -> list[Suspicion]:
    """The nearest entries without those that would explain next to nothing."""
    return [near for near in one.nearest if near.share >= LEAST]
