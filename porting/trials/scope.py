"""The scope of a verdict, as data: what was run and compared, with which results, and what was not run and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from porting.tracing.trace import Point

OTHERWISE = "equal to the reference with sdpa attention, from which its eager attention differs on this batch"
"""The note on a trial where the reference's own implementations of attention disagree."""


class Kind(StrEnum):
    """The property that a trial varies."""

    LENGTH = "length"
    BATCH = "batch"
    MASK = "mask"
    SEGMENTS = "segments"
    POSITIONS = "positions"
    TOKENS = "token ids"
    ARGUMENTS = "arguments"
    VALUES = "values"
    SIZES = "sizes of pictures"
    COMBINED = "several at a time"


class Status(StrEnum):
    """The outcome of a trial."""

    SAME = "same"
    DIFFERS = "differs"
    PORT_FAILED = "your model failed"
    REFERENCE_FAILED = "the reference failed"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one trial.

    Attributes:
        difference: the largest difference of an output, relative to its scale; None where nothing was compared.
        said: why a side failed, in one line; empty where none did.
        written: the port's arguments that its forward changed in place.
    """

    kind: Kind
    what: str
    batch: str
    status: Status
    difference: float | None = None
    rows: int = 0
    length: int = 0
    said: str = ""
    written: tuple[str, ...] = ()


KEPT = "the padding token where the mask keeps it"
"""The name of a trial with padding tokens whose mask hides nothing."""


class ImpurityKind(StrEnum):
    """The ways in which a port is not a pure function of its inputs."""

    WRITES_INPUTS = "writes to its inputs"
    WRITES_WEIGHTS = "changes its weights or buffers"
    WRITES_SCRATCH = "keeps numbers in buffers, on which no output depends"
    STATE = "gives other numbers after other calls"
    REPEATED = "gives other numbers in the same call"
    FRESH = "gives other numbers in a fresh copy"
    HELD = "changes outputs that it returned before"
    GRADIENTS = "gives other numbers with gradients on"
    INFERENCE = "gives other numbers in inference mode"
    PLAIN = "gives other numbers when nothing looks into it, as in torch's fast paths"
    FAILS = "fails in a way of running it"
    RANDOM = "draws random numbers"


KEPT_BETWEEN_CALLS = (ImpurityKind.STATE, ImpurityKind.FRESH, ImpurityKind.REPEATED)
"""The ways that show that a port keeps something from one call to the next."""

_HARMLESS = frozenset({ImpurityKind.FAILS, ImpurityKind.WRITES_SCRATCH})


@dataclass(frozen=True, kw_only=True)
class Impurity:
    """One way in which a port is impure.

    Attributes:
        detail: the argument, the weight or the generator; empty where there is nothing to name.
        size: by how much the outputs are apart, relative to their scale; None where that is not the point.
    """

    kind: ImpurityKind
    detail: str = ""
    size: float | None = None

    @property
    def differs(self) -> bool:
        """Whether it takes the verdict away: draws that change no number do not, nor does a way that is refused."""
        return self.kind not in _HARMLESS and (self.kind is not ImpurityKind.RANDOM or bool(self.size))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The place where a port ends that returns none of the reference's outputs: a module's output in the reference.

    Attributes:
        point: the last of the reference's points that the port returns.
        weighed: the modules with weights that the reference runs behind it; without any the port leaves out a step of
            its own and not a part that it does not have.
    """

    point: Point
    weighed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Returned:
    """How the outputs of the two forwards were paired.

    Attributes:
        pairs: the port's output -> the reference's point that it is compared with.  The port's lone tensor is "output".
        alone: outputs of the port that nothing of the reference's has the shape and the value of.
        missing: outputs of the reference that the port does not return.
        given: outputs of the port that the table's own probes compare.
        stop: where the port ends, if nothing that it returns is an output of the reference; None otherwise.
    """

    pairs: Mapping[str, Point]
    alone: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    stop: Stop | None = None

    @property
    def compared(self) -> bool:
        """Whether anything that the port returns is compared."""
        return bool(self.pairs or self.given)


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """Something that a user may do and that was not compared.

    Attributes:
        what: in words.
        why: in words.
    """

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The inputs and outputs that were run and compared.

    Attributes:
        mode: ``"eval"``, and with gradients ``"eval, gradients"``.
        dtypes: ``"float64"`` and the working dtypes.
        lengths: of the rows, in tokens, ascending.
        rows: batch sizes, ascending.
        shapes: the pairs of a batch size and a length that ran, ascending; not every size runs with every length.
        pictures: their heights and widths, the smallest first.
        places: how many places sounds and series have, ascending.
        masks, segments, positions, arguments, values: the kinds of them that ran with equal results.
        tokens: how many different token ids occurred, of how many.
        lacking: arguments of the reference with which it returns other numbers, and which the port does not take.
        ways: how the model was called: ``"no_grad"``, ``"inference_mode"``, ``"gradients on"``, ``"twice"``.
        returned: how the outputs were paired.
        impurities: in which ways the port is not a pure function of its inputs.
    """

    mode: str = "eval"
    dtypes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    pictures: tuple[tuple[int, int], ...] = ()
    places: tuple[int, ...] = ()
    masks: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    ways: tuple[str, ...] = ()
    returned: Returned | None = None
    not_run: tuple[NotRun, ...] = ()
    lacking: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    impurities: tuple[Impurity, ...] = ()

    @property
    def differing(self) -> tuple[Result, ...]:
        """The trials on which what is returned differs."""
        return tuple(one for one in self.results if one.status is Status.DIFFERS)

    @property
    def failed(self) -> tuple[Result, ...]:
        """The trials that the port fails on and the reference does not."""
        return tuple(one for one in self.results if one.status is Status.PORT_FAILED)

    @property
    def impure(self) -> tuple[Impurity, ...]:
        """The impurities that change what is computed, or what others see."""
        return tuple(one for one in self.impurities if one.differs)


def of_kind(results: Sequence[Result], kind: Kind) -> tuple[str, ...]:
    """The names of the trials of one kind that ran with equal results."""
    return tuple(dict.fromkeys(one.what for one in results if one.kind is kind and one.status is Status.SAME))
