"""Find the arguments of a forward by the effect of the values that it is given.

No name tells whether a mask is True where it hides.  What does: with the right one, words that are masked change
nothing where words are not.  And rows of a batch do not depend on each other, which tells [b s] from [s b].
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from porting.duplicate import duplicate
from porting.errors import Code, Fault, VerifyError
from porting.frames import place_of, users_line
from porting.printable import text_of
from porting.suggesting.subjects.argument_names import (
    ArgumentMapping,
    MaskArguments,
    Unmasked,
    argument_mappings,
    layouts,
    optional_masks,
    roles,
    row_mappings,
    square_mask_mappings,
    takes_tensor,
    unexplained,
    unnamed_indices,
    unnamed_masks,
    without_optional_masks,
)
from porting.suggesting.subjects.forward_effects import (
    AHEAD,
    ALONE,
    GAP,
    IGNORES_TOKENS,
    NONE,
    PADDED,
    ROWS,
    excused_faults,
    faults_seen,
    hides_padding,
    is_index,
    is_steady,
    outputs_of,
)
from porting.suggesting.subjects.grouped_arguments import grouped_roles
from porting.suggesting.subjects.guarded_run import STAY
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import BATCH, Sampler
from porting.target import with_arguments
from porting.tracing.devices import is_device_error
from porting.tracing.torch_modes import DispatchMode
from porting.trials.derived_inputs import LENGTHS
from porting.trials.modalities import EMBEDDED, IDS, PIXELS, POSITIONS, SEGMENTS
from porting.trials.padding import DECODER_MASK, MASK


class OperationCounter(DispatchMode):
    """Counts torch's operations: how far a forward came before it failed, whatever it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """Count one that has an end."""
        result = func(*args, **kwargs)
        self.operations += 1
        return result


UNSET = (None, 0, 1)
"""The values that an argument of unknown meaning is given until the forward runs."""


def find_argument_mapping(module: nn.Module, sampler: Sampler, *, causal: bool, ask: Asker) -> ArgumentMapping:
    """How the module's forward is to be given the reference's inputs.

    Args:
        module: the model, in float64, with weights that show something.
        sampler: makes batches of the reference's inputs.
        causal: the reference's positions see none behind them, so that padding at the end need not be masked.
        ask: what nothing tells.

    Raises:
        VerifyError: no way works; carries what the forward said to the most usual one.
    """
    search = _Search(module=module, sampler=sampler, causal=causal, ask=ask)
    try:
        found, loose = roles(module, sampler.offered, ask)
    except VerifyError as error:
        way = search.with_constants()
        if not isinstance(way, ArgumentMapping) or search.faults_of(way):
            masked = search.with_unnamed_masks()
            if masked is not None:
                return masked
        if not isinstance(way, ArgumentMapping) or None in way.constants.values():
            indices = search.with_unnamed_indices()
            if indices is not None:
                return indices
        if isinstance(way, VerifyError):
            raise way from error
        if way is None:
            raise
        return way
    if PIXELS in found.values():
        return search.with_pictures(found, loose)
    try:
        return search.best(found, loose)
    except VerifyError as error:
        if not _may_take_embeddings(module, sampler) or IDS not in found.values():
            raise
        floats = {name: EMBEDDED if role == IDS else role for name, role in found.items()}
        try:
            return search.best(floats, loose)
        except VerifyError:
            raise error from error.__cause__


def _may_take_embeddings(module: nn.Module, sampler: Sampler) -> bool:
    """Whether a module may take embeddings where its argument's name says token ids: a decoder without its embeddings.

    Nothing may stand between the embeddings of tokens and the reference's layers, such as those of positions: a stack
    of layers may lack that, and is not a wrong model for it.
    """
    if EMBEDDED not in sampler.offered or any(isinstance(one, nn.Embedding) for one in module.modules()):
        return False
    inner = [one for one in (sampler.reference or nn.Module()).modules() if isinstance(one, nn.Embedding)]
    return len({id(one) for one in inner if one.embedding_dim == sampler.width}) == 1


@dataclass(kw_only=True)
class _Search:
    """The ways in which a forward can be called, tried from the usual ones to the rare ones.

    Attributes:
        module, sampler, causal, ask: as of :func:`find_argument_mapping`.
    """

    module: nn.Module
    sampler: Sampler
    causal: bool
    ask: Asker

    def __post_init__(self) -> None:
        self._again = _copies(self.module)

    @cached_property
    def _excused(self) -> frozenset[str]:
        return excused_faults(self.sampler, causal=self.causal)

    def with_pictures(self, found: Mapping[str, str], loose: tuple[str, ...]) -> ArgumentMapping:
        """The first way that runs, of those with the axes of pictures in each order; else the usual one."""
        ways = [
            ArgumentMapping(rules=one, loose=loose)
            for one in layouts(next(argument_mappings(found)), self.sampler.shapes)
        ]
        for way in ways:
            with suppress(Exception):  # the user's own forward may raise anything
                outputs_of(self._again(), way, self.sampler.batch(way.named))
                return way
        return self.by_rows(found, loose) or ways[0]

    def by_rows(self, found: Mapping[str, str], loose: tuple[str, ...]) -> ArgumentMapping | None:
        """The way of a module that takes one row, or one picture, without an axis for the batch; None if it does not.

        Where it runs with a mask and without, the mask is left at its default.
        """
        ways: list[ArgumentMapping] = []
        left = {name: role for name, role in found.items() if name not in optional_masks(self.module, found)}
        for some in (found, *([left] if left != dict(found) else [])):
            for rules in row_mappings(some, self.sampler.shapes, causal=self.causal):
                way = ArgumentMapping(rules=rules, loose=loose, width=self.sampler.width)
                if IDS in found.values():
                    ways.append(way)
                    continue
                with suppress(Exception):  # the user's own forward may raise anything
                    outputs_of(self._again(), way, self.sampler.batch(way.named))
                    return way
        tried = _Tried.of(ways, self._again, self.sampler, causal=self.causal, excused=lambda: self._excused)
        if not tried.ways or tried.mixing():
            return None
        with suppress(VerifyError):
            return self._least_wrong(tried, found)
        return None

    def with_unnamed_masks(self) -> ArgumentMapping | None:
        """The way in which arguments whose names tell nothing are masks: padding changes no other token then.

        Returns:
            None where no argument may be one, or where padding changes other tokens whatever it is given; or where
            somebody was asked what the arguments are.
        """
        if self.ask.present:
            return None
        for found, loose in unnamed_masks(self.module, self.sampler.offered):
            tried = self._usual(found, loose)
            for way in tried.with_fault() + ([] if self.causal else tried.with_fault(AHEAD)):
                if MASK not in way.named or _reads_mask(self._again, way, self.sampler):
                    return way
        return None

    def with_unnamed_indices(self) -> ArgumentMapping | None:
        """The way in which arguments whose names tell nothing are segments or positions.

        Returns:
            None where no argument is one, or where somebody was asked what the arguments are.
        """
        if self.ask.present:
            return None
        for found, loose in unnamed_indices(self.module, self.sampler.offered):
            tried = self._usual(found, loose)
            with suppress(VerifyError):
                way = self._least_wrong(tried, found)
                shown = [role for name, role in found.items() if role in {SEGMENTS, POSITIONS} and name in way.sources]
                if not way.mixes_rows and all(is_index(self._again, way, role, self.sampler) for role in shown):
                    return way
        return None

    def faults_of(self, way: ArgumentMapping) -> set[str]:
        """The faults of a way that runs, without those that the reference has too."""
        module = with_arguments(self.module, way.constants)
        seen = faults_seen(_itself(module), way, self.sampler, causal=self.causal)
        return seen - self._excused if {PADDED, GAP} & seen else seen

    def with_constants(self) -> ArgumentMapping | VerifyError | None:
        """The way in which arguments that no name explains are no batch's.

        Returns:
            What the forward said where it fails with each value; None where there are no such arguments.
        """
        failed: VerifyError | None = None
        for value in UNSET:
            constants = dict.fromkeys(unexplained(self.module, self.sampler.offered), value)
            if not constants:
                return None
            try:
                bound = with_arguments(self.module, constants)
                way = find_argument_mapping(bound, self.sampler, causal=self.causal, ask=self.ask)
            except VerifyError as error:
                failed = failed or error
                continue
            if not way.mixes_rows:
                return replace(way, constants=constants)
        return failed

    def best(self, found: Mapping[str, str], loose: tuple[str, ...]) -> ArgumentMapping:
        """The way that is least wrong, of those that give each argument what its name means.

        Raises:
            VerifyError: none works.
        """
        tried = self._usual(found, loose)
        if not tried.ways and POSITIONS in (needed := self._roles_with_positions()).values():
            given = self._usual(needed, loose)  # its positions' default makes it fail
            tried = given if given.ways else tried
        if not tried.ways and not self.causal:  # its masks are of a shape of their own
            loose = (*loose, *optional_masks(self.module, found))
            without = self._tried(without_optional_masks(self.module, found), loose)
            tried = without if without.ways else tried
        if tried.fewest():
            several = self._several_masks(found, loose)
            tried = several if several is not None and several.fewest() < tried.fewest() else tried
        if tried.fewest() > len({PADDED, AHEAD}):
            tried, found = self._grouped(tried, found, loose)
        if not tried.ways and (way := self.with_unnamed_indices()):
            return way
        if not tried.ways and (way := self.by_rows(found, loose)):  # one that runs on batches is called with these
            return way
        return self._least_wrong(tried, found)

    def _least_wrong(self, tried: _Tried, found: Mapping[str, str]) -> ArgumentMapping:
        """The way of those that were tried that is least wrong.

        Raises:
            VerifyError: none works.
        """
        # A mask that does not do all that it should is given rather than left out.  Where each way lets a word see what
        # stands behind it, the module is not causal.
        right = sorted(tried.with_fault(), key=lambda way: {MASK, DECODER_MASK}.isdisjoint(way.named))
        masked = {MASK, DECODER_MASK} & {*(right[0].named if right else ())}
        right = [*right, *tried.with_fault(GAP)] if masked else [*tried.with_fault(GAP), *right]
        right += [*tried.with_fault(AHEAD), *tried.with_fault(AHEAD, GAP)]
        if right:
            return right[0]
        working = [*tried.with_fault(PADDED), *tried.with_fault(PADDED, AHEAD)]
        # A module without attention, as embeddings are; or one whose tokens see those behind them alone.
        alone = [*tried.with_fault(ALONE), *tried.with_fault(ALONE, AHEAD)]
        if not working and not alone:
            if mixing := tried.mixing():
                return replace(mixing[0], mixes_rows=True)
            cause = None if tried.faults else _usual(tried.errors)
            raise refusal(self.module, next(argument_mappings(found)), tried.faults, cause) from cause
        return self._without_mask(working, alone, masked=MASK in found.values())

    def _without_mask(
        self, working: Sequence[ArgumentMapping], alone: Sequence[ArgumentMapping], *, masked: bool
    ) -> ArgumentMapping:
        """The first way, and why padding changes what is computed for the other tokens."""
        chosen = [*working, *alone][0]
        if not working or (self.causal and not masked):
            return chosen
        if hides_padding(self.module, chosen, self.sampler):
            return replace(chosen, internal=True)
        chosen, why = _unmasked(working, self._again, self.sampler)
        if why is Unmasked.ABSENT and (unnamed := self.with_unnamed_masks()):
            return unnamed
        return replace(chosen, unmasked=why)

    def _usual(self, found: Mapping[str, str], loose: tuple[str, ...]) -> _Tried:
        rules = chain(
            argument_mappings(found),
            without_optional_masks(self.module, found) if self.causal else (),
            square_mask_mappings(found, causal=self.causal),
        )
        return self._tried(rules, loose)

    def _roles_with_positions(self) -> dict[str, str]:
        return roles(self.module, self.sampler.offered, self.ask, positions=True)[0]

    def _several_masks(self, found: Mapping[str, str], loose: tuple[str, ...]) -> _Tried | None:
        """The ways of a forward that takes several masks for the same tokens; None where it does not."""
        masks = MaskArguments.of(self.module, self.sampler.available)
        if masks is None:
            return None
        bound = replace(self, module=with_arguments(self.module, dict.fromkeys(masks.required)))
        tried = bound._tried(masks.mappings(found), loose)
        for number, way in enumerate(tried.ways):
            tried.ways[number] = replace(
                way,
                loose=tuple(name for name in loose if name not in {*way.sources, *masks.required}),
                constants={name: None for name in masks.required if name not in way.sources},
            )
        return tried

    def _grouped(
        self, tried: _Tried, found: Mapping[str, str], loose: tuple[str, ...]
    ) -> tuple[_Tried, Mapping[str, str]]:
        """The same if an argument holds several tensors, where that is better; with what they mean."""
        batch = self.sampler.batch()
        for grouped in grouped_roles(self.module, found, batch):
            given = self._tried(argument_mappings(grouped), loose)
            if given.fewest() < tried.fewest():
                tried, found = given, grouped
            if not given.fewest():
                break
        return tried, found

    def _tried(self, rules: Iterable[tuple[tuple[str, str], ...]], loose: tuple[str, ...]) -> _Tried:
        ways = [ArgumentMapping(rules=one, loose=loose, width=self.sampler.width) for one in rules]
        return _Tried.of(ways, self._again, self.sampler, causal=self.causal, excused=lambda: self._excused)


@dataclass
class _Tried:
    """The results of the ways in which a forward was called.

    Attributes:
        faults: what is wrong with each; nothing for the last, where one is right.
        errors: what the others raised, and after how many operations.
    """

    ways: list[ArgumentMapping] = field(default_factory=list)
    faults: list[set[str]] = field(default_factory=list)
    errors: list[tuple[Exception, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        ways: Sequence[ArgumentMapping],
        again: Callable[[], nn.Module],
        sampler: Sampler,
        *,
        causal: bool,
        excused: Callable[[], frozenset[str]],
    ) -> _Tried:
        """Try one after the other until one is right, or until the module turns out to draw random numbers.

        Args:
            excused: returns the faults that the reference has as well.
        """
        tried = cls()
        for way in ways:
            count = OperationCounter()
            one = again()  # what is kept of a call that was made on trial must not spoil the next
            try:
                with count:
                    steady = is_steady(one, way, sampler)
                # What is random is reported of the run; no way is better than another there.
                with count:
                    seen = faults_seen(_itself(one), way, sampler, causal=causal) if steady else set()
            except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
                tried.errors.append((error, count.operations))
                continue
            tried.ways.append(way)
            seen -= excused() if {PADDED, GAP} & seen else set()
            tried.faults.append(seen)
            if not seen:
                break
        return tried

    def with_fault(self, *faults: str) -> list[ArgumentMapping]:
        """The ways with these faults and no other."""
        return [way for way, seen in zip(self.ways, self.faults, strict=True) if seen == {*faults}]

    def fewest(self) -> int:
        """How many faults the best way has, of those that use the tokens and keep rows apart; many if there is none."""
        no_way = {NONE, IGNORES_TOKENS, ROWS}
        return min((len(seen) for seen in self.faults if no_way.isdisjoint(seen)), default=len(no_way) * 2)

    def mixing(self) -> list[ArgumentMapping]:
        """The ways in which rows depend on each other, those with the fewest other faults first."""
        no_way = {NONE, IGNORES_TOKENS}
        some = [one for one in zip(self.faults, self.ways, strict=True) if ROWS in one[0] and no_way.isdisjoint(one[0])]
        return [way for _, way in sorted(some, key=lambda one: len(one[0]))]


def _copies(module: nn.Module) -> Callable[[], nn.Module]:
    """A function that copies a module as it is now: with its weights, and without what later calls leave behind."""
    shared: dict[int, object] = {id(one): one for one in (*module.parameters(), *module.buffers())}
    kept = duplicate(module, dict(shared))
    return lambda: duplicate(kept, dict(shared))


def _itself(module: nn.Module) -> Callable[[], nn.Module]:
    return lambda: module


def _unmasked(
    working: Sequence[ArgumentMapping], again: Callable[[], nn.Module], sampler: Sampler
) -> tuple[ArgumentMapping, Unmasked]:
    """The way in which the mask is given, and why masked tokens change the others in each way."""
    first = working[0]
    if MASK not in first.named:
        return first, Unmasked.ABSENT
    for way in working:
        if not faults_seen(again, way, sampler):
            return way, Unmasked.STALE
    for way in working:
        if _reads_mask(again, way, sampler):
            return way, Unmasked.PARTLY
    return first, Unmasked.IGNORED


def _reads_mask(again: Callable[[], nn.Module], way: ArgumentMapping, sampler: Sampler) -> bool:
    """Whether another mask of the reference's changes what a module returns."""
    if MASK not in way.named:
        return False
    inputs = sampler.batch(way.named)
    given = [outputs_of(again(), way, {**inputs, MASK: one}) for one in (inputs[MASK], _other_mask(way, sampler))]
    return not all(map(torch.equal, *given))


def _other_mask(way: ArgumentMapping, sampler: Sampler) -> Tensor:
    """A mask [b s] that hides some tokens: at the end of rows, and elsewhere too where the module can be told so."""
    mask = torch.ones(BATCH, sampler.length, dtype=torch.long)
    mask[:, -1] = 0
    if not any(theirs.startswith(LENGTHS) for theirs, _ in way.rules):
        mask[:, sampler.front + 2] = 0
    return mask


def optional(module: nn.Module, way: ArgumentMapping, reference: nn.Module) -> tuple[tuple[str, str], ...]:
    """Lines of [inputs] for what both forwards take by one name and may be called without: the search does so.

    A mask with a name of its own that changes nothing is left out of them: it is the loss's, say.
    """
    given = {way.argument(name) for name in way.named}
    ours, theirs = (inspect.signature(one.forward).parameters for one in (module, reference))
    return tuple(
        (name, name)
        for name, one in ours.items()
        if name in {POSITIONS, SEGMENTS, MASK} and name in theirs and name not in given and one.default is not one.empty
        if takes_tensor(module, name)
    )


def _usual(errors: Sequence[tuple[Exception, int]]) -> Exception:
    """The error of the run that came furthest: the others failed at values that were given on trial."""
    said = Counter(f"{type(one).__name__}: {text_of(one)}" for one, _ in errors)

    def rank(raised: tuple[Exception, int]) -> tuple[bool, int, int]:
        error, operations = raised
        return isinstance(error, VerifyError), operations, said[f"{type(error).__name__}: {text_of(error)}"]

    return max(errors, key=rank)[0]


def refusal(
    module: nn.Module, rules: Sequence[tuple[str, str]], wrong: Sequence[set[str]], error: Exception | None
) -> VerifyError:
    """The message about a forward that runs in no way: what it raised, or what is wrong with its result."""
    if isinstance(error, VerifyError):
        return error
    given = ", ".join(ours for _, ours in rules)
    title, where = f"{type(module).__name__}.forward", place_of(module.forward)
    if error is None:
        said, hint = "mixes the rows of a batch", "a row must not depend on another"
        if any(NONE in one for one in wrong):
            said, hint = "gives numbers that are none", "look for the first NaN or infinity"
        elif all(IGNORES_TOKENS in one for one in wrong):
            said, hint = "gives the same whatever words it is given", "is the embedding used?"
            if any(theirs.startswith((MASK, DECODER_MASK)) for theirs, _ in rules):
                hint += " Or the mask has another shape or meaning than those that were tried: name it in the inputs"
        message = f"{title} {said}, whichever way it is given {given}"
        return VerifyError(Fault(code=Code.FORWARD_FAILED, where=where, message=message, hint=hint))
    said, hint = f"{type(error).__name__}: {' '.join(text_of(error).split())}", f"at {users_line(error)}"
    message = f"{title} failed on {given}: {said}"
    if is_device_error(error):
        message, hint = f"{title} moves data to another device: {said}", f"{hint}; {STAY}"
    return VerifyError(Fault(code=Code.FORWARD_FAILED, where=where, message=message, hint=hint))


def without_ignored_mask(module: nn.Module, way: ArgumentMapping, sampler: Sampler) -> ArgumentMapping:
    """The way without a mask that need not be given and changes nothing: it is the loss's, say."""
    if MASK not in way.named:
        return way
    inputs = sampler.batch(way.named)
    rules = tuple(rule for rule in way.rules if rule not in way.rules_of(MASK))
    without = replace(way, rules=rules)
    try:
        given = [outputs_of(module, way, {**inputs, MASK: one}) for one in (inputs[MASK], _other_mask(way, sampler))]
        given.append(outputs_of(module, without, inputs))
    except Exception:  # noqa: BLE001  # a mask of another kind, or one that must be given
        return way
    deaf = all(len(one) == len(given[0]) and all(map(torch.equal, one, given[0])) for one in given[1:])
    return without if deaf else way
