"""The proof: the suggested table through :func:`porting.verify`, on the twin and, where it is small, the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from porting.build import bounded, bounds
from porting.checkpoint import Checkpoint
from porting.errors import PortingError
from porting.notation.table import Table
from porting.reporting.report import Report
from porting.suggesting.subjects.argument_names import VISUAL
from porting.suggesting.subjects.building import Builder, build_for
from porting.suggesting.subjects.config_fields import Role, config_number
from porting.suggesting.subjects.model_pair import ModelPair, completed_config
from porting.suggesting.subjects.sampler import LENGTH, end_token, row_length
from porting.tracing.measure import MEANING
from porting.tracing.trace import ARROW, INNER
from porting.trials.inputs import Case, lengthened
from porting.trials.modalities import (
    DECODER_IDS,
    EMBEDDED,
    IDS,
    POSITIONS,
    SEGMENTS,
    embedded,
    embedding_width,
    text_fields,
)
from porting.trials.padding import DECODER_MASK, IN_DECODER, MASK, USUAL_MASKS
from porting.trials.scope import Status
from porting.verification import verify
from porting.verification.compare import Progress

LARGE = 160_000_000
"""A checkpoint with fewer numbers than this is proven itself, besides its twin: two models in float64 take 16 bytes for
each, and what runs on them a little more."""

TRIED = 30_000_000
"""One with fewer numbers than this is proven with all the trials of ``verify`` as well."""

LENGTHS = (24, 21, 17, 13, 9, 6, 4, 3)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of a proof.

    Attributes:
        report: verify's; None when it could not be run.
        refused: why it could not.
        late: there was no time to end it.
        whole: it is what ``verify`` does by default: its own batches, its trials and float32.
    """

    report: Report | None
    refused: str = ""
    late: bool = False
    whole: bool = False

    @property
    def agrees(self) -> bool:
        """Whether float64 holds at every activation that was compared, with every weight as it was loaded."""
        found = self.report
        if found is None or not found.probes:
            return False
        bounded = all(probe.meaning.worst <= max(probe.bound.worst, MEANING) for probe in found.probes)
        return bounded and not (found.guilty or found.first_difference or found.shown.differing)

    @property
    def exact(self) -> bool:
        """Whether it agrees, and so it does on the trials, if there were any."""
        return self.agrees and not self.differs_on_trials

    @property
    def differs_on_trials(self) -> bool:
        """Whether all that differs was found by the trials, which say by themselves on what."""
        return self.report is not None and bool(self.report.scope.differing or self.report.scope.impure)

    @property
    def mostly_same(self) -> bool:
        """Whether most of the trials were the same, where some differ."""
        results = () if self.report is None else self.report.scope.results
        return 2 * sum(one.status is Status.SAME for one in results) > len(results)

    @property
    def usually_same(self) -> bool:
        """Whether the trials were the same whose rows are padded at their ends, or not at all."""
        results = () if self.report is None else self.report.scope.results
        usual = [one.status for one in results if one.what.removesuffix(IN_DECODER) in USUAL_MASKS]
        return bool(usual) and all(one is Status.SAME for one in usual)

    @property
    def difference(self) -> float | None:
        """The largest difference end to end."""
        if self.report is None or not self.report.probes:
            return None
        worst = max(probe.meaning.worst for probe in self.report.probes)
        return worst if math.isfinite(worst) else float("inf")


def probed(report: Report | None) -> set[str]:
    """The modules whose outputs a report compares; scores and probabilities within them are not outputs."""
    points = [] if report is None else [probe.port.partition(ARROW) for probe in report.probes]
    return {path for path, _, output in points if output not in INNER}


def differing(proof: Proof) -> tuple[str, ...]:
    """The port's points at which something differs by itself, given the reference's own activations."""
    return () if proof.report is None else tuple(one.port for one in proof.report.guilty)


def prove(
    checkpoint: Checkpoint,
    into: Builder,
    table: Table,
    subjects: ModelPair,
    *,
    seed: int,
    fresh: bool,
    small: bool,
    causes: float = 0.0,
    tell: Progress | None = None,
    batches: Sequence[Case] | None = None,
    trials: bool = False,
    whole: bool = False,
) -> Proof:
    """Run the proof.

    Args:
        checkpoint: the twin's, or the source itself.
        into: the user's module or builder.
        fresh: some of the module's parameters have no source.
        small: the checkpoint is the twin, and the longest row is the one that was tried.
        causes: how many seconds the catalogue of causes may take, where something differs.
        tell: called with what is done, how many steps are done and how many there are.
        batches: others than the usual ones.
        trials: run the trials of :mod:`porting.trials` as well, as ``verify`` does, with float32 as its measure of
            what rounding explains.
        whole: do what ``verify`` does by default, on its own batches, so that its verdict is the same.
    """
    config = checkpoint.config
    made = batches
    if made is None and not whole and not subjects.twin.sampler.asked:
        made = cases(subjects, config, seed=seed, longest=longest_row(subjects, config, small=small))
    module = into if isinstance(into, nn.Module) else None
    arguments = {
        "architecture": subjects.twin.architecture,
        "inputs": made,
        "fresh": fresh,
        "seed": seed,
        "causes": causes,
        "dtypes": (torch.float32,) if trials or whole else (),
        "trials": None if whole else trials,
        "progress": tell,
    }
    try:
        report = verify(checkpoint, module or into, table, **arguments)  # type: ignore[arg-type]  # by name
        return Proof(report=report, whole=whole)
    except PortingError as error:
        first = str(error)
    if module is not None:
        return Proof(report=None, refused=first)
    full = completed_config(config, subjects.twin.architecture)
    try:
        with bounded(bounds(checkpoint.tensors, checkpoint.config)):
            built = build_for(into, full).module
        report = verify(checkpoint, subjects.readied(built), table, **arguments)  # type: ignore[arg-type]  # as above
        return Proof(report=report, whole=whole)
    except PortingError:
        return Proof(report=None, refused=first)


def longest_row(subjects: ModelPair, config: Mapping[str, object], *, small: bool) -> int:
    """The longest row; the checkpoint's tables have as many rows that are nobody's position as its twin's."""
    if row_length() != LENGTH:  # the only one that the module takes, which may be the model's number of positions
        sizes = [config_number(text_fields(one), Role.POSITIONS) for one in (subjects.twin.config, config)]
        return sizes[1] if sizes[0] == row_length() else row_length()
    most = 64 if not subjects.full else config_number(config, Role.POSITIONS, 64)
    spare = config_number(subjects.twin.config, Role.POSITIONS, 64) - subjects.longest
    return subjects.longest if small else max(min(config_number(config, Role.POSITIONS, 64) - max(spare, 0), most), 4)


def cases(subjects: ModelPair, config: Mapping[str, object], *, seed: int, longest: int) -> list[Case]:
    """Batches for the proof: padded rows of different lengths in two segments, and one row of the longest length.

    Where nothing tells the module what is padded, no row is.  No word is the padding's except where it is padding.
    """
    way, fields = subjects.way, {**subjects.drawn, **config}
    if IDS not in subjects.available:
        made = _signals(subjects, fields, 4, seed)
        if DECODER_IDS in subjects.available:
            vocabulary, padding = (config_number(fields, role) for role in (Role.VOCABULARY, Role.PADDING))
            generator = torch.Generator().manual_seed(seed)
            made[DECODER_IDS] = _words([9, 7, 5, 3], vocabulary, padding, generator, end_token(fields))
        return [Case("4 images" if not {*VISUAL}.isdisjoint(made) else "4 sounds", made)]
    padded = MASK in way.named or way.internal or DECODER_MASK in way.named
    short = [min(length, longest) for length in LENGTHS]
    found = [_case(subjects, fields, short if padded else [short[0]] * 4, seed, padded=padded)]
    if longest > short[0]:
        found.append(_case(subjects, fields, [longest], seed + 1, padded=False))
    if subjects.full:
        padding = config_number(fields, Role.PADDING, 0)
        found = [Case(one.name, lengthened(one.inputs, longest, padding)) for one in found]
    return found


def _signals(subjects: ModelPair, config: Mapping[str, object], rows: int, seed: int) -> dict[str, Tensor]:
    """Images or sounds, where the reference takes them."""
    made = subjects.twin.sampler.for_config(config).batch(subjects.available, seed=seed, rows=rows)
    return {name: value.float() for name, value in made.items() if value.is_floating_point()}


def _case(subjects: ModelPair, config: dict[str, object], lengths: Sequence[int], seed: int, *, padded: bool) -> Case:
    way, text = subjects.way, text_fields(config)
    vocabulary = config_number(text, Role.VOCABULARY, 97)
    padding = config_number(text, Role.PADDING, NONE)
    types = config_number(text, Role.SEGMENTS, 0)
    generator = torch.Generator().manual_seed(seed)
    words = _words(lengths, vocabulary, padding, generator, end_token(config))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    segments = torch.zeros_like(words)
    for row, length in enumerate(lengths):
        for kind in range(1, min(types, length)):
            segments[row, kind * length // types : length] = kind
    if way.internal:
        words[mask == 0] = padding
    made = {IDS: words, SEGMENTS: segments, **_signals(subjects, config, len(lengths), seed)}
    if padded or MASK in way.named:
        made[MASK] = mask
    if POSITIONS in way.named:
        made[POSITIONS] = torch.arange(max(lengths)).expand(len(lengths), -1).clone()
    if DECODER_IDS in subjects.available:
        others = [max(3 * length // 4, 1) for length in reversed(lengths)]
        made[DECODER_IDS] = _words(others, vocabulary, padding, generator, end_token(config))
        if DECODER_MASK in way.named:
            made[DECODER_MASK] = (torch.arange(max(others)) < torch.tensor(others)[:, None]).long()
    known = {name: value for name, value in made.items() if name in subjects.available}
    if SEGMENTS not in way.named:
        known.pop(SEGMENTS, None)
    if way.takes_embeddings:
        known[EMBEDDED] = embedded(known.pop(IDS), embedding_width(config))
    name = (
        f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens"
        if len(lengths) > 1
        else f"1 row of {lengths[0]}"
    )
    return Case(name + (", padded" if padded else ""), known)


NONE = -1
"""In place of a padding token where the config has none."""


def _words(
    lengths: Sequence[int], vocabulary: int, padding: int, generator: torch.Generator, end: int | None
) -> Tensor:
    """Words that are not the padding's, each as often as the others; a row ends with the word that ends one.

    The last word is left to the trials, which name the batches that a difference shows on.
    """
    known = [one for one in range(vocabulary - 1) if one != padding] or [max(vocabulary - 1, 0)]
    count = len(lengths) * max(lengths)
    dealt = [torch.randperm(len(known), generator=generator) for _ in range(-(-count // len(known)))]
    drawn = torch.tensor(known)[torch.cat(dealt)[:count]].view(len(lengths), max(lengths))
    if end is not None:
        drawn[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = end
    return drawn
