"""The inputs and the result of a search: the two models, the activations in between, and the tensors found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import CandidateRule, Shapes
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit
from porting.suggesting.subjects.traced_model import TracedModel

SAME = 1e-10
"""Two activations that are no further from each other, relative to their scale, are one: bugs are above 1e-7."""

CLOSE = 0.02
"""And no further than this, one that is computed a little differently."""

HABITUAL = 4.0
"""A way that was the nearest in an earlier layer may leave so many times as much in a later one."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class DifferingPlace:
    """A place where the module computes something else than the reference, with the reference's own weights.

    Attributes:
        what: ``"activation"``, ``"bias"``, ``"norm"``, ``"extra"``, ``"missing"``, ``"second"``, ``"unloadable"`` ...
        port: the module's weight at the place, or after it.
        reference: the reference's.
        size: the difference, relative to the activation's scale; nan where none can be said.
        before: the module's weights in front of the place.
        cause: what it comes from, in words, where the search itself made use of it; else empty.
        near: what of the reference's comes nearest there, each with its difference.
        at: the number of the module's operation; -1 where none is known.
    """

    what: str
    port: str
    reference: str
    size: float = float("nan")
    before: tuple[str, ...] = ()
    cause: str = ""
    near: tuple[tuple[str, float], ...] = ()
    at: int = -1

    @property
    def ends(self) -> bool:
        """Whether what stands behind such a place is a guess."""
        return self.what in {"extra", "shape"} or (self.what in {"activation", "norm"} and not self.size <= CLOSE)


def _copied(move: CandidateRule, shapes: Shapes, ours: Shapes) -> CandidateRule:
    """A guess of one tensor into one of the same shape as a copy; another rule as it is."""
    if move.why != GUESS or len(move.reads) != 1 or len(move.writes) != 1:
        return move
    if move.fold or move.fill is not None or move.constants or shapes[move.reads[0]] != ours[move.writes[0]]:
        return move
    return move.along("", "")


GUESS = "a guess, which nothing behind it confirms"
"""Said of a rule with which what comes behind is not the reference's activation."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The alternatives that were tried at a place.

    Attributes:
        far: with it, how far what comes behind is from the reference's activation.
        behind: the module's weight that meets what comes behind; empty for what is returned.
        tried: how many were tried.
        rivals: the nearest of the others, each with its difference.
    """

    moves: Sequence[CandidateRule]
    far: float
    behind: str = ""
    tried: int = 1
    rivals: Sequence[tuple[Sequence[CandidateRule], float]] = ()


@dataclass
class SearchResult:
    """The result of the search.

    Attributes:
        moves: in order of execution.
        divergences: where the module is another.
        lacking: units of the reference that the module does not have.
        open: names of the module's tensors that nothing fills.
        trials: how many candidates were run.
        exhausted: whether the bound on trials or seconds was met.
        trace: the module's last run, with all that was found.
        reference: the reference's run.
        outputs: what the module returns with all that was found, and nothing forced on it.
        mates: the module's unit number -> the reference's unit.
        basis: the order of the residual stream's features.
        choices: what was tried, place after place.
        ignored_biases: biases of the reference's that the module has not, and that softmax does not see.
        made: tensors of the module's that the reference has not, with the content that makes them do nothing.
        rounded: how far the module's positions are from the reference's, in whose place they were during the search.
        seconds: the module's tensors that need the values of another one, for which the checkpoint has one tensor.
        models: the module with all that was found, and the reference, to be run again.
    """

    moves: list[CandidateRule] = field(default_factory=list)
    divergences: list[DifferingPlace] = field(default_factory=list)
    lacking: list[Unit] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    trials: int = 0
    exhausted: bool = False
    trace: OperationTrace = field(default_factory=OperationTrace)
    reference: OperationTrace = field(default_factory=OperationTrace)
    outputs: list[Tensor] = field(default_factory=list)
    mates: dict[int, Unit] = field(default_factory=dict)
    basis: FeatureOrder = field(default_factory=FeatureOrder)
    choices: list[Choice] = field(default_factory=list)
    ignored_biases: list[str] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)
    rounded: float = 0.0
    seconds: dict[str, str] = field(default_factory=dict)
    models: tuple[TracedModel, TracedModel] | None = None

    def in_stored_order(self, shapes: Shapes, ours: Shapes) -> SearchResult | None:
        """The same with each guess of one tensor into one of the same shape replaced by a copy; None if all are copies.

        Args:
            shapes: of the checkpoint's tensors.
            ours: of the module's.
        """
        moves = [_copied(move, shapes, ours) for move in self.moves]
        return None if [*map(str, moves)] == [*map(str, self.moves)] else replace(self, moves=moves)

    @property
    def sure(self) -> list[CandidateRule]:
        """The moves in front of the first place behind which all is a guess."""
        first = next((one for one in self.divergences if one.ends), None)
        if first is None:
            return list(self.moves)
        last = [number for number, move in enumerate(self.moves) if not {*first.before}.isdisjoint(move.writes)]
        return [move for move in self.moves[: max(last, default=-1) + 1] if move.why != GUESS]
