"""What speaks for a line of the table, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from porting.reporting.outcome import Probe
from porting.reporting.report import Report
from porting.suggesting.generalise import Line
from porting.suggesting.proving import Proof
from porting.suggesting.suggestion import Evidence
from porting.suggesting.writing import quoted

_PLACE = "It is given the reference's own activation there, and was the first that was tried."
_TRIED = "Several were possible here; with this one, what comes behind is the reference's own activation."


def evidence(lines: Sequence[Line], proof: Proof) -> Iterator[Evidence]:
    """What speaks for each line.

    Args:
        lines: of the table.
        proof: the table's, on the twin.
    """
    for line in lines:
        left = " + ".join(f"{name} [{axes}]" if axes else name for name, axes in line.sources)
        right = " + ".join(f"{name} [{axes}]" if axes else name for name, axes in line.targets)
        said = [_TRIED if line.proven else _PLACE, _count(line)]
        if proof.report is not None:
            said += _proven(line, proof.report)
        yield Evidence(line=f"{quoted(left)} = {quoted(right)}", decided=line.why, said=" ".join(said))


def _count(line: Line) -> str:
    first = f"the first {line.reads[0]} into {line.writes[0]}" if line.reads and line.writes else ""
    many = f"{len(line.reads)} of the twin's tensors" if len(line.reads) != 1 else "one of the twin's tensors"
    return f"It stands for {many}, {first}."


def _proven(line: Line, report: Report) -> Iterator[str]:
    """Where what these weights make was compared, and how far it was off; and how much of them that showed."""
    paths = {name.rpartition(".")[0] for name in line.writes}
    here = [probe for probe in report.probes if probe.port in paths]
    here = here or [probe for probe in report.probes if paths & set(probe.span)]
    if here:
        worst = max(here, key=_off)
        yield f"What it makes is compared at {_places(here)}: off by {_off(worst):.0e} of the activation's scale."
    shown = [report.shown.activation[name] for name in line.writes if name in report.shown.activation]
    if len(shown) == len(line.writes):
        yield f"The inputs showed {100 * min(shown):.0f} % of their elements at work."


def _off(probe: Probe) -> float:
    return probe.meaning.isolated if probe.meaning.isolated is not None else probe.meaning.end_to_end


def _places(probes: Sequence[Probe]) -> str:
    more = f" and {len(probes) - 1} more" if len(probes) > 1 else ""
    return f"{probes[0].port}{more}"
