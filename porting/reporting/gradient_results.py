"""The results on gradients and training, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from porting.tracing.dropout import DropoutMask
from porting.tracing.measure import MEANING, luck


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of one parameter, compared: the port's, through the table, with the reference's.

    Attributes:
        meaning: largest difference in float64, relative to the gradient's largest element.
        bound: what of it rounding explains.
        rounding: dtype -> the port's rounding error over the reference's.
        count: how many numbers these ratios rest on.
        zero: it is mathematically zero on both sides: what is there is rounding, and was not compared.
        buffer: it has no gradient in the port, where it is a buffer, and was not compared; with ``zero`` it has none in
            the reference either, else the reference trains what stays as it is in the port.
        wrong: what else sets the two apart, in words; empty for most.
    """

    reference: str
    port: tuple[str, ...]
    meaning: float = 0.0
    bound: float = MEANING
    rounding: Mapping[str, float] = field(default_factory=dict)
    count: int = 0
    zero: bool = False
    buffer: bool = False
    wrong: str = ""

    @property
    def differs(self) -> bool:
        """Whether the port would be trained otherwise."""
        return bool(self.wrong) or not self.meaning <= self.bound

    @property
    def imprecise(self) -> bool:
        """Whether it is the same gradient with larger rounding errors."""
        return not self.differs and any(ratio > luck(self.count) for ratio in self.rounding.values())


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A number of steps of one optimiser on both sides, and the comparison of the weights afterwards.

    Attributes:
        optimiser: as it was made, ``"AdamW(lr=0.001)"``.
        differing: step, from 1 -> parameters of the port that had moved otherwise after it; the first and the last.
        meaning: largest difference in float64, relative to how far the parameter moved.
        bound: what of that rounding explains.
        rounding: dtype -> the port's largest rounding error over the reference's, by root mean square.
        undetermined: parameter -> the share of its elements that were not compared, since their gradient is lost in
            rounding and the optimiser divides by its size.
        fixed: parameters that were held fixed on both sides, since the table sums or scales them, or they are buffers
            of the port.
    """

    optimiser: str
    taken: int
    differing: Mapping[int, tuple[str, ...]]
    meaning: float
    bound: float
    rounding: Mapping[str, float]
    undetermined: Mapping[str, float]
    fixed: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether some weights moved otherwise."""
        return any(self.differing.values())


@dataclass(frozen=True, kw_only=True)
class TrainMode:
    """Both models in training mode, in float64, with the same dropout masks.

    Attributes:
        sites: at how many places the reference drops values, in one pass.
        missing, added: places of the reference at which the port does not drop as many values at this rate, and places
            of the port at which the reference does not; nothing else was compared then.
        difference: largest difference at a probe, relative to scale.
        bound: what of that rounding explains.
        where: the first probe at which they differ by more; empty where none does.
        refused: why they could not be compared; empty where they were.
    """

    sites: int = 0
    missing: tuple[DropoutMask, ...] = ()
    added: tuple[DropoutMask, ...] = ()
    difference: float = 0.0
    bound: float = MEANING
    where: str = ""
    refused: str = ""

    @property
    def same_masks(self) -> bool:
        """Whether both drop the same values."""
        return not (self.missing or self.added or self.refused)

    @property
    def differs(self) -> bool:
        """Whether the port computes something else in training mode."""
        return bool(self.missing or self.added or self.where)


@dataclass(frozen=True, kw_only=True)
class GradientResults:
    """Gradients, and the steps that were taken along them.

    Attributes:
        outputs: the probes whose random linear function was differentiated.
        gradients: one for each parameter of the reference that the port has.
        alone: parameters of the port without a counterpart in the reference: not compared.
        padding: embeddings whose padding word takes no gradient on one side (``padding_idx``), and does on the other;
            here it takes one on both.
        failed: why the port's backward pass failed, and where; empty when it did not.
        arrives, leaves: going back from the outputs, the last probe at which the gradient is right, and the first at
            which it is wrong; both empty when it is right everywhere or wrong from the start.
        dropout: modules of the port that would drop something in training, and did not here.
        training: what was found in training mode; None where that was not asked for.
        steps: the optimisers.
    """

    outputs: tuple[str, ...]
    gradients: tuple[Gradient, ...] = ()
    alone: tuple[str, ...] = ()
    padding: tuple[str, ...] = ()
    failed: str = ""
    arrives: str = ""
    leaves: str = ""
    dropout: tuple[str, ...] = ()
    training: TrainMode | None = None
    steps: tuple[Steps, ...] = ()

    @property
    def differing(self) -> tuple[Gradient, ...]:
        """The gradients that differ in meaning."""
        return tuple(gradient for gradient in self.gradients if gradient.differs)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Buffers of the port that stand for what the reference trains: training leaves them as they are."""
        return tuple(
            name for gradient in self.gradients if gradient.buffer and not gradient.zero for name in gradient.port
        )

    @property
    def differs(self) -> bool:
        """Whether the port trains otherwise."""
        train = self.training is not None and self.training.differs
        return bool(self.failed or self.differing or train or any(step.differs for step in self.steps))

    @property
    def imprecise(self) -> bool:
        """Whether a gradient rounds worse than the reference's."""
        return any(gradient.imprecise for gradient in self.gradients)
