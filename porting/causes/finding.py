"""What a search for a cause is about: marks, candidates, and what is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from porting.causes.cause import Cause
from porting.causes.replay import Alteration, Rewrite


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A cause that was tried, and what it leaves.

    Attributes:
        name: the catalogue's entry.
        detail: the parameter that fits, ``"eps is 1e-05 where the reference has 1e-12"``.
        residual: what the port still differs by, relative to the activation's scale.
        share: how much of the difference that explains, from 0 to 1.
    """

    name: str
    detail: str
    residual: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why some probes of the port differ.

    Attributes:
        name: the catalogue's entry that reproduces the port, ``""`` when none does.
        detail: with which parameter.
        where: the modules of the reference that were altered.
        probes: the points of the port that it explains; one that stays unknown stands by itself.
        difference: what they differ by, relative to the activation's scale, at most.
        residual: what is left of it when the reference is altered.
        what, fix: the catalogue's words.
        ties: other entries that reproduce the same values just as well.
        nearest: when none does, those that leave least.
    """

    name: str = ""
    detail: str = ""
    where: tuple[str, ...] = ()
    probes: tuple[str, ...]
    difference: float
    residual: float
    what: str = ""
    fix: str = ""
    ties: tuple[str, ...] = ()
    nearest: tuple[Suspicion, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The entry and those that are tied with it."""
        return (self.name, *self.ties) if self.name else ()


@dataclass(frozen=True, kw_only=True)
class Place:
    """An alteration by what it says, so that it is found again on the tape of another case.

    Attributes:
        cause: the entry of the catalogue.
        where, detail, value: as of :class:`~porting.causes.replay.Alteration`.
    """

    cause: Cause
    where: str
    detail: str
    value: float | None


@dataclass(frozen=True, eq=False)
class Candidate:
    """A cause at one place, or at several at once."""

    causes: tuple[Cause, ...]
    alterations: tuple[Alteration, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What is reported as one when it is found in several places."""
        names = dict.fromkeys(cause.name for cause in self.causes)
        details = dict.fromkeys(alteration.detail for alteration in self.alterations if alteration.detail)
        return " + ".join(names), "; ".join(details)

    @property
    def places(self) -> tuple[Place, ...]:
        """What it alters."""
        causes = self.causes if len(self.causes) == len(self.alterations) else self.causes * len(self.alterations)
        return tuple(
            Place(cause=cause, where=alteration.where, detail=alteration.detail, value=alteration.value)
            for cause, alteration in zip(causes, self.alterations, strict=False)
        )

    @property
    def rough(self) -> bool:
        """Whether one of them reproduces a rounding error, which it does up to luck."""
        return any(cause.rough for cause in self.causes)

    @property
    def pinned(self) -> bool:
        """Whether it says what a part computes from the reference's values, and makes up no whole model."""
        return any(cause.pinned for cause in self.causes) or any(alteration.pinned for alteration in self.alterations)

    @property
    def rewrites(self) -> dict[int, Rewrite]:
        """All that is rewritten."""
        return {number: rewrite for alteration in self.alterations for number, rewrite in alteration.rewrites.items()}


@dataclass(frozen=True)
class Gap:
    """How far two values are apart, relative to the activation's scale: at most, and in the root mean square."""

    largest: float
    rms: float

    def of(self, candidate: Candidate) -> float:
        """What counts for a candidate: a rounding error is reproduced but for a few digits that fell the other way."""
        return self.rms if candidate.rough else self.largest


APART = Gap(float("inf"), float("inf"))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place where the port differs.

    Attributes:
        name: the port's point.
        sources: the marks on the reference's tape that make up its counterpart.
        gap: how far the port is off.
        bound: what rounding explains.
    """

    name: str
    sources: tuple[str, ...]
    gap: Gap
    bound: float

    @property
    def difference(self) -> float:
        """How far the port is off at most."""
        return self.gap.largest


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """A finding, with the alterations that reproduce the port.

    Attributes:
        finding: what is reported.
        chosen: by mark, the alterations that reproduce it; empty where none does.
        instead: the same marks by other entries that reproduce them as well.
    """

    finding: Finding
    chosen: Mapping[str, Candidate] = field(default_factory=dict)
    instead: tuple[Explained, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether what was chosen makes up no whole model."""
        return any(candidate.pinned for candidate in self.chosen.values())

    @property
    def rough(self) -> bool:
        """Whether what was chosen reproduces rounding errors."""
        return any(candidate.rough for candidate in self.chosen.values())

    @property
    def alterations(self) -> tuple[Alteration, ...]:
        """What was chosen, once each."""
        every = {id(alteration): alteration for chosen in self.chosen.values() for alteration in chosen.alterations}
        return tuple(every.values())

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Their entries of the catalogue."""
        every = {
            id(alteration): place.cause
            for chosen in self.chosen.values()
            for alteration, place in zip(chosen.alterations, chosen.places, strict=True)
        }
        return tuple(every.values())

    @property
    def rewrites(self) -> dict[int, Rewrite]:
        """All that is rewritten."""
        return {number: rewrite for chosen in self.chosen.values() for number, rewrite in chosen.rewrites.items()}
