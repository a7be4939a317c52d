"""The result of a suggestion: the table, the verdict, and the reasons for it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from porting.atomic import check_destination, new_file, write_all
from porting.notation.table import Table, parse_table
from porting.suggesting.draft.unmapped import Near, Unmapped, listed
from porting.suggesting.subjects.questions import Decision


class Verdict(StrEnum):
    """How much of the checkpoint can live in the module, as far as it was shown."""

    EXACT = "exact"
    SOME_INPUTS = "exact on some inputs"
    APPROXIMATE = "approximate"
    TRUNK = "trunk only"
    IMPOSSIBLE = "impossible"
    NOT_FOUND = "not found"


MEANINGS = {
    Verdict.EXACT: "The table loads the whole checkpoint, and your module then computes what its model computes.",
    Verdict.TRUNK: "The table loads what both sides have, and that part computes what the checkpoint's model computes.",
    Verdict.SOME_INPUTS: (
        "The table loads the whole checkpoint. Your module computes what its model computes on some inputs, and "
        "something else on those that are named below: change the module, or do without them."
    ),
    Verdict.APPROXIMATE: "The table loads the checkpoint, and your module's results differ a little, as said below.",
    Verdict.IMPOSSIBLE: "No table can make your module compute what the checkpoint's model does: change the module.",
    Verdict.NOT_FOUND: "No table was found, and nothing shows that there is none: the table holds what was found.",
}
"""The meaning of each verdict for whoever wants to load the checkpoint."""

PARTLY_APPROXIMATE = "The table loads what both sides have, and that part's results differ a little, as said below."
"""The same for *approximate*, where parameters of the module stay as they are."""

PARTLY_SOME_INPUTS = (
    "The table loads what both sides have. That part computes what the checkpoint's model computes on some inputs, and "
    "something else on those that are named below: change the module, or do without them."
)
"""The same for *exact on some inputs*, where the module lacks a part of the checkpoint's."""

MOST = 5
"""How many reasons are printed by default."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a verdict is not *exact*.

    Attributes:
        kind: what it is about: ``"bias"``, ``"missing norm"``, ``"mask"`` ..., or the theme of the catalogue of causes
            that names it: ``"norms"``, ``"activations"``, ``"structure"`` ...
        size: the difference that it makes, relative to the activation's scale; None where none was measured.
        shown: it was shown, and no table can do anything about it.
        cause: the entry of the catalogue of causes that names it; empty where none does.
        places: the tensors or modules that it is about, and what distinguishes it from another at the same places. Of
            reasons whose places differ in the number of the layer alone, the first is reported.
    """

    kind: str
    said: str
    size: float | None = None
    shown: bool = False
    cause: str = ""
    places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence for a line of the table.

    Attributes:
        decided: ``"its place"`` when nothing else was possible there, ``"what it computes"`` when several were tried,
            or that it is a guess.
        said: in words, a line each: its place, what the names say, what was tried and by how much the nearest others
            lost, and what was proven.
    """

    line: str
    decided: str
    said: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The point to which a search came that found no table.

    Attributes:
        proven, places: so many activations in a row are the reference's own, of how many that were compared.
        behind: the last of them, a module's path; empty where there is none.
        at: the tensor of the module where it went no further; empty where all was mapped.
        near: what of the reference's comes nearest there.
    """

    proven: int
    places: int
    behind: str = ""
    at: str = ""
    near: tuple[Near, ...] = ()

    @property
    def said(self) -> str:
        """In words."""
        count = f"{self.proven} of {self.places} activations compared"
        until = f"everything up to {self.behind} is proven ({count})" if self.behind else "nothing could be proven"
        at = f"; then nothing fits {self.at}" if self.at else ""
        near = f", nearest there: {', '.join(map(str, self.near))}" if self.near else ""
        return f"{until}{at}{near}."


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The result of :func:`porting.suggest`.

    Attributes:
        verdict: how much of the checkpoint can live in the module.
        text: the table, as TOML.
        reasons: why the verdict is not *exact*.
        missing: parts of the reference that the module does not have.
        unmapped: tensors of either side that have no counterpart.
        limits: what the proof did not see, in words.
        stop: how far it came, where nothing was found.
        evidence: what speaks for each line.
        proof: the sentence of the float64 proof; empty when there was none.
        difference: the largest difference in the proof, relative to the activation's scale; None without a proof.
        proven_on: ``"the checkpoint"`` or ``"a small twin"``.
        shown: how many of the module's tensors the proof saw at work, of how many.
        decisions: what was the user's to decide, with the answers or the defaults.
        trials: how many candidates were run.
        seconds: how long it all took.
    """

    verdict: Verdict
    text: str
    reasons: tuple[Reason, ...] = ()
    missing: tuple[str, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    limits: tuple[str, ...] = ()
    stop: Stop | None = None
    evidence: tuple[Evidence, ...] = ()
    proof: str = ""
    difference: float | None = None
    proven_on: str = ""
    shown: tuple[int, int] = (0, 0)
    decisions: tuple[Decision, ...] = ()
    trials: int = 0
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether all of what was mapped is proven, and nothing of the module's is left."""
        return self.verdict is Verdict.EXACT

    @property
    def proven(self) -> bool:
        """Whether what the table maps was proven in float64: so for *exact*, and for *trunk only*."""
        return self.verdict in {Verdict.EXACT, Verdict.TRUNK}

    @property
    def table(self) -> Table:
        """The table, parsed."""
        return parse_table(self.text, where="suggested")

    @property
    def meaning(self) -> str:
        """The meaning of the verdict for whoever wants to load the checkpoint, in one sentence."""
        if self.verdict is Verdict.SOME_INPUTS and self.missing:
            return PARTLY_SOME_INPUTS
        unfilled = self.verdict is Verdict.APPROXIMATE and any(one.side == "module" for one in self.unmapped)
        return PARTLY_APPROXIMATE if unfilled else MEANINGS[self.verdict]

    def details(self) -> list[str]:
        """The reasons, what is missing, what was not shown, and what has no counterpart, a line each."""
        lacked = tuple(f"{part}." for part in self.missing)  # a line says of each that the module has none
        unmapped = [one for one in self.unmapped if one.side == "module" or not one.name.startswith(lacked)]
        return [
            *(reason.said for reason in self.reasons),
            *(f"your module has no {part}" for part in self.missing),
            *(f"not shown: {limit}" for limit in self.limits),
            *listed(unmapped),
        ]

    def brief(self) -> tuple[list[str], int]:
        """The first of the details, and how many more there are: a single one more is among the first."""
        details = self.details()
        shown = details if len(details) == MOST + 1 else details[:MOST]
        return shown, len(details) - len(shown)

    def write(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table to a file, whole or not at all.

        Args:
            path: the file.
            overwrite: whether it may take the place of what stands there.

        Raises:
            CheckpointError: something stands there, there is no such directory, or it cannot be written.
        """
        path, content = Path(path), self.text.encode()
        check_destination(path, overwrite=overwrite, file=True)
        with new_file(path, size=len(content), overwrite=overwrite) as descriptor:
            write_all(descriptor, content)
        return path

    def explain(self, wanted: str = "") -> str:
        """The evidence for the lines that contain ``wanted``, in words; for all lines if nothing is wanted."""
        some: Sequence[Evidence] = [evidence for evidence in self.evidence if wanted in evidence.line]
        folded = ("\n".join(_folded(part) for part in evidence.said.splitlines()) for evidence in some)
        return "\n".join(f"{evidence.line}\n{said}" for evidence, said in zip(some, folded, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {"proven": self.proven, "meaning": self.meaning, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.verdict.upper()}  {self.proof}".rstrip(), self.meaning]
        shown, more = self.brief()
        lines += [f"  {line}" for line in shown]
        if more:
            lines.append(f"  and {more} more, in details()")
        return "\n".join(lines)


def _folded(line: str) -> str:
    return textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="      ")
