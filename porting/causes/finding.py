"""The data of the search for a cause: marks, candidates, and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from porting.causes.cause import Cause
from porting.causes.replay import Alteration, Rewrite

TOGETHER = " + "
"""The separator between the names of entries that only explain a difference together."""


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A cause that was tried and does not explain a difference altogether.

    Attributes:
        name: the entry of the catalogue.
        detail: the value that fits best, ``"eps is 1e-05 where the reference has 1e-12"``.
        residual: the remaining difference, relative to the activation's scale.
        share: the share of the difference that is explained, from 0 to 1.
    """

    name: str
    detail: str
    residual: float
    share: float

    @property
    def parts(self) -> tuple[str, ...]:
        """The entries that it consists of, where several mistakes come together."""
        return tuple(self.name.split(TOGETHER))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why some probes of the port differ.

    Attributes:
        name: the entry that reproduces the port, ``""`` where none does.
        detail: its parameters, ``"eps is 1e-05 where the reference has 1e-12"``.
        where: the modules of the reference that were altered.
        probes: the probes of the port that the entry explains.
        difference: the largest difference at these probes, relative to the activation's scale.
        residual: the difference that is left when the reference is altered.
        what, fix: the entry's texts.
        ties: other entries that reproduce the same values equally well.
        nearest: where no entry fits, those that leave the least difference.
        beyond_weights: the share of a step's result that other weights cannot make up for; 0 where nothing is known.
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
    beyond_weights: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The entry and those that are tied with it; empty where none fits."""
        return (self.name, *self.ties) if self.name else ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The entries that the name consists of, where several mistakes come together; none where it has no name."""
        return tuple(self.name.split(TOGETHER)) if self.name else ()


@dataclass(frozen=True, kw_only=True)
class Place:
    """An alteration by its description, so that it can be found again on the tape of another case.

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
    """A cause at one place or at several, or a pair of causes."""

    causes: tuple[Cause, ...]
    alterations: tuple[Alteration, ...]

    @property
    def key(self) -> tuple[str, str]:
        """The name and details under which the same mistake in several places is reported once."""
        names = dict.fromkeys(cause.name for cause in self.causes)
        details = dict.fromkeys(alteration.detail for alteration in self.alterations if alteration.detail)
        return TOGETHER.join(names), "; ".join(details)

    @property
    def places(self) -> tuple[Place, ...]:
        """The places that are altered."""
        causes = self.causes if len(self.causes) == len(self.alterations) else self.causes * len(self.alterations)
        return tuple(
            Place(cause=cause, where=alteration.where, detail=alteration.detail, value=alteration.value)
            for cause, alteration in zip(causes, self.alterations, strict=False)
        )

    @property
    def rough(self) -> bool:
        """Whether one of the causes only changes rounding."""
        return any(cause.rough for cause in self.causes)

    @property
    def pinned(self) -> bool:
        """Whether the alterations compute parts from recorded values, and do not add up to a model."""
        return any(alteration.pinned for alteration in self.alterations)

    @property
    def rewrites(self) -> dict[int, Rewrite]:
        """All rewritten calls, by number."""
        return {number: rewrite for alteration in self.alterations for number, rewrite in alteration.rewrites.items()}


@dataclass(frozen=True)
class Gap:
    """The distance between two values, relative to the activation's scale.

    Attributes:
        largest: the largest difference of an element.
        rms: the root mean square of the differences.
    """

    largest: float
    rms: float

    def of(self, candidate: Candidate) -> float:
        """Return the distance that counts for a candidate: the RMS for rounding, since last digits are luck."""
        return self.rms if candidate.rough else self.largest


APART = Gap(float("inf"), float("inf"))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A probe at which the port is compared with the reference.

    Attributes:
        sources: the marks on the reference's tape that make up its counterpart.
        gap: the distance between port and reference.
        bound: the largest distance that rounding explains.
    """

    name: str
    sources: tuple[str, ...]
    gap: Gap
    bound: float

    @property
    def difference(self) -> float:
        """The largest difference between port and reference."""
        return self.gap.largest


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """A finding, with the alterations that reproduce the port.

    Attributes:
        chosen: for each mark the candidate that reproduces it; empty where none does.
        instead: other explanations of the same marks that fit equally well.
    """

    finding: Finding
    chosen: Mapping[str, Candidate] = field(default_factory=dict)
    instead: tuple[Explained, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether the chosen alterations compute parts from recorded values, and do not add up to a model."""
        return any(candidate.pinned for candidate in self.chosen.values())

    @property
    def rough(self) -> bool:
        """Whether the chosen candidates only change rounding."""
        return any(candidate.rough for candidate in self.chosen.values())

    @property
    def alterations(self) -> tuple[Alteration, ...]:
        """The chosen alterations, each once."""
        by_id = {id(alteration): alteration for chosen in self.chosen.values() for alteration in chosen.alterations}
        return tuple(by_id.values())

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the chosen alterations, in the same order."""
        by_id = {
            id(alteration): place.cause
            for chosen in self.chosen.values()
            for alteration, place in zip(chosen.alterations, chosen.places, strict=True)
        }
        return tuple(by_id.values())

    @property
    def rewrites(self) -> dict[int, Rewrite]:
        """All rewritten calls, by number."""
        return {number: rewrite for chosen in self.chosen.values() for number, rewrite in chosen.rewrites.items()}
