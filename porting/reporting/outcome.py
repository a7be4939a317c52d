"""The results of a verification, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from porting.causes.diverging import Divergence
from porting.causes.finding import Finding
from porting.notation.table import Approximation
from porting.printable import first_few
from porting.reporting.gradient_results import GradientResults
from porting.tracing.code_coverage import INPUTS, Branch
from porting.tracing.float64 import ITSELF
from porting.tracing.measure import MEANING, ROUNDING, ErrorProfile, luck
from porting.tracing.trace import ARROW, ROOT, is_returned, output_of
from porting.trials.scope import Scope

FAITHFUL, DIFFERENT, IMPRECISE, APPROXIMATE = "faithful", "different", "imprecise", "approximate"
UNPROVEN = "unproven"


@dataclass(frozen=True)
class Unseen:
    """Something that a verification could not show.

    Attributes:
        what: it, ``"the attention mask"``.
        why: what it would have taken, ``"no row is padded"``.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class View:
    """One number in two views.

    Attributes:
        end_to_end: with the port's own activations all the way.
        isolated: with the reference's activations at every probe before it; None when it was not measured.
    """

    end_to_end: float
    isolated: float | None = None

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.end_to_end, self.isolated or 0.0)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One activation, compared.

    Attributes:
        reference, port: the points on both sides.
        meaning: largest difference in float64, relative to the activation's scale.
        bound: what of it rounding explains; above it the port means something else.
        rounding: dtype -> the port's rounding error over the reference's.
        off: how far the port is apart in a working dtype, relative to scale: 0 where rounding may come to it, and None
            where that was not looked at.
        count: how many numbers these ratios rest on.
        span: the port's modules that made this activation out of those at the points before, in order: whose own code
            ran on the way, or which gave it on.
        lowered: operations among them that compute with less than float64 in a float64 run.
        leak: if either side computes with less than float64 here, by how much one rounding of that moves the
            activation, measured; None where it does not or was not measured.
        random: whether random numbers were drawn there, as by dropout that is left on.
        spreads: where its isolated difference lies, for each case, if it is among the first guilty ones.
        rules: if it is guilty, where the table's rules stand that write the weights of its span.
    """

    reference: str
    port: str
    meaning: View
    bound: View = View(end_to_end=MEANING, isolated=MEANING)
    rounding: Mapping[str, View] = field(default_factory=dict)
    off: View | None = None
    count: int = 0
    span: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()
    leak: View | None = None
    random: bool = False
    spreads: tuple[ErrorProfile, ...] = ()
    rules: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the activation differs end to end, for whatever reason."""
        return self.meaning.end_to_end > self.bound.end_to_end

    @property
    def guilty(self) -> bool:
        """Whether the port computes something else here from the reference's own inputs."""
        return (self.meaning.isolated or 0.0) > (self.bound.isolated or 0.0)

    @property
    def imprecise(self) -> bool:
        """Whether it computes the same from the reference's own inputs, with larger rounding errors."""
        return not self.guilty and any((view.isolated or 0.0) > luck(self.count) for view in self.rounding.values())

    @property
    def breaks(self) -> bool:
        """Whether it is right in float64, and off by more than rounding comes to in a working dtype."""
        return not self.guilty and self.off is not None and self.off.worst > 0

    @property
    def drifts(self) -> bool:
        """Whether its rounding errors are larger end to end, for whatever reason."""
        return any(view.end_to_end > luck(self.count) for view in self.rounding.values())


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How much of the weights the inputs reached.

    Attributes:
        activation: parameters that a float64 gradient of a compared probe reaches, and the share of their elements.
        copy: the rest of those that are bit-equal to the checkpoint's through the table.
        differing: those whose values are not the checkpoint's.
        parts: those that were shown by activation in part, and whose rest nothing showed.
        rows: of those that were shown in part, the rows of which nothing was shown, where these are few.
        made: those that no checkpoint has and that hold a constant of the table's, with the constant.
    """

    activation: Mapping[str, float]
    copy: tuple[str, ...]
    nothing: tuple[str, ...]
    differing: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many parameters and persistent buffers there are."""
        return len({*self.activation, *self.copy, *self.nothing, *self.differing})


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The time that each part took, in seconds.

    Attributes:
        loading: in opening and reading both models' weights, importing transformers included.
        forwards: in the forward passes alone, without what is done to see into them.
        total: in everything after loading.
        passes: how many forward passes there were.
        memory: the largest resident size that the process had so far, in bytes; mapped files are part of it.
    """

    loading: float
    forwards: float
    total: float
    passes: int
    memory: int

    @property
    def ratio(self) -> float:
        """Everything after loading, over the forward passes that it needs."""
        return self.total / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of :func:`porting.verification.verify`, without a word on how it is shown.

    Attributes:
        source, reference, port, table: what was compared with what, through which table.
        probes: every activation that was compared, in the reference's order of execution.
        skipped: points on one side whose counterpart does not exist or was not reached.
        shown: what the inputs could see of the weights.
        noise: working dtype -> the reference's own largest rounding error, relative to the activation's scale.
        cases: the inputs, in words.
        unseen: what the inputs could not show.
        seed: of the inputs.
        environment: versions.
        warnings: what is allowed and should be known.
        cost: seconds and bytes.
        approximate: what the table says of a port that is not exact by intent.
        idle: modules of the port with weights that never ran.
        learned: gradients and training; None when they were not asked for.
        call: the call or the command that does the same again.
        branches: code of the port's own that never ran, in any pass.
        search: what was done to find inputs that show more, in words.
        scope: what was run and compared, and what was not.
        padded: the port's points that differ at padded places alone, and by how much.
        notes: what computes in less than float64 in the float64 runs, on either side.
        no_numbers: what was not compared since the reference returns NaN or infinite values, and where such values are;
            empty where all is compared.
        random: new parameters of the port that the reference does not have: they hold what was drawn, and what is made
            of them is compared with nothing.
        causes: why the guilty probes differ, and the imprecise ones round worse, as far as it is known.
        divergence: the first step of the port whose result the reference does not have, on the way to the first guilty
            probe; None where nothing is guilty, or where that cannot be told.
    """

    source: str
    reference: str
    port: str
    table: str
    probes: tuple[Probe, ...]
    skipped: tuple[str, ...]
    shown: Shown
    noise: Mapping[str, float]
    cases: tuple[str, ...]
    unseen: tuple[Unseen, ...]
    seed: int
    environment: Mapping[str, str]
    warnings: tuple[str, ...]
    cost: Cost
    approximate: Approximation | None = None
    idle: tuple[str, ...] = ()
    learned: GradientResults | None = None
    call: str = ""
    causes: tuple[Finding, ...] = ()
    divergence: Divergence | None = None
    branches: tuple[Branch, ...] = ()
    search: str = ""
    scope: Scope = Scope()  # noqa: RUF009  # it is frozen
    padded: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    no_numbers: str = ""

    @property
    def guilty(self) -> tuple[Probe, ...]:
        """The probes whose modules compute something else from the reference's own inputs, the first one first."""
        return tuple(probe for probe in self.probes if probe.guilty)

    @property
    def imprecise(self) -> tuple[Probe, ...]:
        """The probes whose modules compute the same with larger rounding errors."""
        return tuple(probe for probe in self.probes if probe.imprecise)

    @property
    def broken(self) -> tuple[Probe, ...]:
        """The probes that are right in float64, and in a working dtype off by more than rounding comes to.

        Of a model that is so end to end these are the ones that are so from the reference's own inputs, if any are.
        """
        off = [probe for probe in self.probes if probe.breaks]
        return tuple([probe for probe in off if probe.off and probe.off.isolated] or off)

    @property
    def first_difference(self) -> Probe | None:
        """The first probe, end to end, that differs by more than rounding."""
        return next((probe for probe in self.probes if probe.differs), None)

    @property
    def verdict(self) -> str:
        """How the port stands to the reference.

        ``"different"``: another meaning, or it learns otherwise; ``"approximate"``: another meaning, within the bound
        that the table declares; ``"imprecise"``: the same meaning with larger rounding errors; ``"unproven"``: every
        probe agrees, and nothing that the port returns could be compared, or the reference returns NaN or
        infinity, or it ends before the reference does, or parts of it hold random values that are compared with
        nothing; ``"faithful"``.
        """
        if self.shown.differing or self.scope.impure:
            return DIFFERENT
        trials = [math.inf if trial.difference is None else trial.difference for trial in self.scope.differing]
        if self.guilty or self.first_difference or trials:
            worst = max([*trials, *(probe.meaning.worst for probe in self.probes)])
            return APPROXIMATE if self.approximate and worst <= self.approximate.within else DIFFERENT
        if self.broken or (self.learned and self.learned.differs):
            return DIFFERENT
        worse = any(probe.imprecise or probe.drifts for probe in self.probes)
        if worse or (self.learned and self.learned.imprecise):
            return IMPRECISE
        returned = self.scope.returned
        compared = (returned is None or returned.compared) and not self.no_numbers
        return FAITHFUL if compared and not self.random and not self.short else UNPROVEN

    @property
    def short(self) -> bool:
        """Whether the port returns what the reference computes before its last steps, and has all that they need.

        A port of a part of the reference ends at the first weights that it does not have.
        """
        stop = self.scope.returned.stop if self.scope.returned is not None else None
        return stop is not None and (not stop.weighed or bool(self.idle))

    @property
    def computes_otherwise(self) -> bool:
        """Whether the forward pass differs in meaning, or the weights are not the checkpoint's."""
        scope = self.scope
        wrong = self.guilty or self.broken or self.first_difference
        return bool(wrong or self.shown.differing or scope.differing or scope.impure)

    @property
    def faithful(self) -> bool:
        """Whether the port means the same and rounds as well as the reference, as far as was shown."""
        return self.verdict == FAITHFUL

    @property
    def as_claimed(self) -> bool:
        """Whether the port is what its table says: faithful, or approximate within the bound declared there."""
        return self.verdict in (FAITHFUL, APPROXIMATE)

    @property
    def complete(self) -> bool:
        """Whether every parameter was seen at work, every probe was compared, and nothing was left out."""
        shown = self.shown
        return not (shown.copy or shown.nothing or shown.parts or self.unseen or self.skipped or self.not_taken)

    @property
    def not_taken(self) -> tuple[Branch, ...]:
        """The branches of the port's code that other inputs might have taken."""
        return tuple(branch for branch in self.branches if branch.why == INPUTS)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON; a number that is not finite is a text, as JSON has none."""
        plain = {
            "verdict": self.verdict,
            "faithful": self.faithful,
            "guilty": [probe.port for probe in self.guilty],
            "imprecise": [probe.port for probe in self.imprecise],
            "bounds": {"meaning": MEANING, "rounding": ROUNDING},
            **asdict(self),
        }
        found = _finite(plain)
        return found if isinstance(found, dict) else {}


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


OUTPUT = "output"
"""The column of probes whose name is that of the row alone: the output of a layer, or of a module outside of them."""

_NUMBERED = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)(?=\.|$| )")


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """The probes of one layer, or one probe outside of the layers.

    Attributes:
        label: ``layer 3``; ``decoder 3`` where there are several stacks of layers; the point of a lone probe.
        columns: what each probe is within the layer, ``attention.query`` or ``output``.
        probes: in the reference's order of execution.
    """

    label: str
    columns: tuple[str, ...]
    probes: tuple[Probe, ...]


def rows_of(probes: Iterable[Probe]) -> list[ReportRow]:
    """The rows, in the reference's order of execution.

    A layer is identified by the first number in its module's name and by what precedes it, so that the layers of an
    encoder and those of a decoder are separate rows.
    """
    groups: dict[tuple[str | None, str], list[tuple[str, Probe]]] = {}
    for probe in probes:
        found = _NUMBERED.match(probe.port)
        key = (found["stack"] or "", found["number"]) if found else (None, probe.port)
        within = probe.port[found.end() :].lstrip(". ") if found else ""
        within = f".{within}" if within == OUTPUT else within  # a part of that name is not the layer's own output
        if is_returned(probe.port):  # what the model itself returns
            key = (None, f"{OUTPUT} {output_of(probe.port)}".rstrip())
        groups.setdefault(key, []).append((within or OUTPUT, probe))
    names = _stack_names(list(dict.fromkeys(stack for stack, _ in groups if stack is not None)))
    return [
        ReportRow(
            label=name if stack is None else f"{names[stack]} {name}",
            columns=tuple(column for column, _ in members),
            probes=tuple(probe for _, probe in members),
        )
        for (stack, name), members in groups.items()
    ]


def _stack_names(stacks: Sequence[str]) -> dict[str, str]:
    """A name for each stack of layers: the parts of its path that the others do not have."""
    if len(stacks) == 1:
        return {stacks[0]: "layer"}
    paths = {stack: stack.split(".") for stack in stacks}
    before = _shared(list(paths.values()))
    after = _shared([path[before:][::-1] for path in paths.values()])
    return {stack: ".".join(path[before : len(path) - after]) or stack or "layer" for stack, path in paths.items()}


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """How many parts all of them begin with."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count


MOST_NAMED = 8
"""Names are listed up to this many; the rest is counted."""

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$| )")


def listed(names: Sequence[str]) -> str:
    """List names; those that differ in one number only, or in the output of one module, as one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("{}", name, count=1), []).append(name)
    outputs: dict[str, list[str]] = {}
    for pattern, members in groups.items():
        numbers = [int(number.group()) for name in members if (number := _NUMBER.search(name))]
        name = pattern.replace("{}", f"{{{ranges(numbers)}}}", 1) if len(numbers) > 1 else members[0]
        path, _, output = name.partition(ARROW)
        outputs.setdefault(path, []).append(output)
    short: list[str] = []
    for path, of_path in outputs.items():
        inner = "/".join(output for output in of_path if output)
        short += [ITSELF if path == ROOT else path] if "" in of_path else []
        short += [f"{path}{ARROW}{inner}"] if inner else []
    return first_few(short, MOST_NAMED)


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as ranges: ``0-2,5``."""
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in stretches(numbers))


def stretches(numbers: Iterable[int]) -> list[range]:
    """Whole numbers in order, as ranges without gaps."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        first = found.pop().start if found and number == found[-1].stop else number
        found.append(range(first, number + 1))
    return found
