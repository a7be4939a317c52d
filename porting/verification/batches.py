"""The inputs of a verification, from a table and a checkpoint."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault, VerifyError
from porting.notation.field import spellings
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.plan.config import arguments
from porting.printable import text_of
from porting.target import signature_parameters
from porting.trials.derived_inputs import LENGTHS
from porting.trials.inputs import Case, Maker, named_inputs, positions_of, special_tokens, withheld
from porting.trials.modalities import (
    DECODER,
    IDS,
    SEGMENTS,
    SIGNALS,
    completed,
    parameters_of,
    special_places,
    takes_signals,
    text_fields,
)
from porting.trials.padding import DECODER_MASK, MASK
from porting.verification.accepted_inputs import ENDED, Asked, ask, cases_with, reads_the_end, that_run
from porting.verification.reference import TYPES, silent_fields, usual_fields
from porting.verification.references import LiveReference

POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches that both sides are run on.

    Attributes:
        cases: as the reference takes them.
        fields: the config's fields under their usual names.
        withheld: arguments that neither side is given, since [inputs] does not name them.
        more: makes another batch with rows of these lengths; None where the cases were given.
        longest: no row that is made is longer; 0 where the cases were given.
        whole: the reference fails on longer rows, though its config names more positions.
        special: token ids that have a meaning of their own.
    """

    cases: tuple[Case, ...]
    fields: Mapping[str, object]
    withheld: tuple[str, ...] = ()
    more: Callable[[str, Sequence[int]], Case] | None = None
    longest: int = 0
    whole: bool = False
    special: tuple[int, ...] = ()


TOO_LONG = re.compile(
    r"out of (range|bounds)|too long|exceed|longer than|max_position|at most \d+|must match the size", re.IGNORECASE
)
"""Errors of models about a row that is too long."""


def that_fits(reference: LiveReference, batch: Batches, make: Callable[[int], Batches]) -> Batches:
    """The batches, with a shorter longest row where the reference has no place for it.

    A family may count its positions from a number that no config tells, and a table may keep all rows of the position
    table; then the config promises positions that do not exist.

    Args:
        make: makes it with another longest row.

    Returns:
        The batches; those that were given where the reference fails for another reason, or however short rows are.
    """
    most, fitting = batch.longest, batch
    for shorter in dict.fromkeys(one for one in (*(most - less for less in range(1, 5)), *_halves(most)) if one > 0):
        longest = [case for case in fitting.cases if _width(case) == fitting.longest][:1]
        side = reference.as_it_is(longest)
        try:
            for number in range(len(longest)):
                side.run(number, lambda point, value: None)
        except VerifyError as error:
            if not TOO_LONG.search(text_of(error)):
                return batch
            fitting = replace(make(shorter), whole=shorter == fitting.longest - 1)
        else:
            return fitting
    return batch


def _halves(most: int) -> list[int]:
    """Half as many, and so on, down to what is short for any model."""
    found = []
    while most > SHORT:
        most //= 2
        found.append(most)
    return found


SHORT = 16
"""Rows of so many tokens or less are not made shorter."""


ROWS = (11, 13, 2, 4)
"""Tokens in each row of a case that is drawn to confirm what other cases suggest.

The first is padded, too, and the last is not the shortest: a mask of another row shows.
"""


def another(case: Case, batch: Batches, seed: int) -> Case:
    """One more case: drawn like the others, or a given one with its contents in another order.

    Args:
        case: one of those that both sides take.
    """
    if batch.more is not None:
        return batch.more("to confirm a cause", [min(length, batch.longest) for length in ROWS])
    generator = torch.Generator().manual_seed(seed + 1)
    return Case("to confirm a cause", {name: _mixed(value, generator) for name, value in case.inputs.items()})


SIMPLE: tuple[tuple[int, ...], ...] = ((3, 3), (1,), (5, 2))
"""Tokens in each row of small batches, among which a port may be right that is wrong on larger ones."""


def simple_batches(case: Case, batch: Batches) -> list[Case]:
    """Return batches in which less happens than in a case: short rows, one long row; of a given case, its rows alone.

    Args:
        case: one of those that both sides take.
    """
    if batch.more is not None:
        lengths = [*SIMPLE, (batch.longest,)]
        return [batch.more("in which both may agree", [min(one, batch.longest) for one in row]) for row in lengths]
    count = min((len(value) for value in case.inputs.values() if value.ndim), default=0)
    if count < 2 or any(not value.ndim or len(value) != count for value in case.inputs.values()):
        return []
    rows = dict.fromkeys((0, count - 1))
    return [
        Case("in which both may agree", {name: v[row : row + 1] for name, v in case.inputs.items()}) for row in rows
    ]


def padded_in_front(case: Case, rules: Sequence[Rule]) -> Case:
    """The batch with its padding in front of the rows: there what counts tokens and what counts places differ.

    So are a decoder's rows.  The first place is padding in every row: a mask that is ignored, and one that hides what
    is padding in all rows, differ there.  As it is where the port takes the lengths of rows, by the table's [inputs]:
    it cannot be told so.
    """
    if any(str(rule.sources[0].key).endswith(LENGTHS) for rule in rules):
        return case
    rolled: dict[str, Tensor] = {}
    for masked in (MASK, DECODER_MASK):
        mask = case.inputs.get(masked)
        if mask is None or mask.ndim != 2:
            continue
        shifts = (mask == 0).sum(1).tolist()
        most = max(range(len(shifts)), key=shifts.__getitem__)
        for name, value in case.inputs.items():
            if value.shape == mask.shape and name.startswith(DECODER) == masked.startswith(DECODER):
                rolled[name] = torch.stack([row.roll(shift) for row, shift in zip(value, shifts, strict=True)])
                if max(shifts) and mask.shape[1] - min(shifts) > 1:
                    rolled[name][:, 0] = rolled[name][most, 0]
    return Case(case.name, {**case.inputs, **rolled}) if rolled else case


def _mixed(value: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers of the same kind: ids that occur, or as they are where there are two values, as in a mask."""
    if value.is_floating_point():
        drawn = torch.randn(value.shape, dtype=torch.float64, generator=generator).to(value.dtype)
        return value.mean() + drawn * value.std() if value.numel() > 1 else value
    if torch.unique(value).numel() <= 2:  # a mask or segments: which of these belong together, nobody knows
        return value
    flat = value.flatten(0, 1) if value.ndim > 2 else value.flatten()  # the four numbers of a box belong together
    return flat[torch.randperm(len(flat), generator=generator)].view_as(value)


def _width(case: Case) -> int:
    return max((one.shape[-1] for one in case.inputs.values() if one.ndim), default=0)


def make_batches(
    table: Table,
    checkpoint: Checkpoint,
    config: Mapping[str, object],
    own: Sequence[Case] | None,
    longest: int,
    *,
    seed: int,
    choices: int | None,
    reference: LiveReference | None = None,
    masks: Collection[str] = (),
    full: bool = False,
    padded: bool = True,
    port: nn.Module | None = None,
) -> Batches:
    """The cases that were given, or such as show as much as they can.

    Args:
        table: what a family calls the usual fields; its [inputs].
        checkpoint: its config, its special tokens.
        config: the config, the table's defaults filled in.
        longest, seed, choices: as in :class:`porting.trials.inputs.Maker`.
        reference: what the batches are made for, if it can be asked: it may take pictures, sound or series.
        masks: the reference is given these although [inputs] does not name them: the port hides padding by itself.
        full: every row is padded to the longest length.
        padded: rows of a batch have different lengths.
        port: what it takes is made where the reference has a default for it.

    Raises:
        VerifyError: the config does not say what is needed, or the reference runs with nothing that can be made.
    """
    # The table says what a family calls the usual fields: those of the target's config are the usual ones.
    ours = arguments(table, checkpoint.config)
    fields = {**config, **ours, **config}  # its own parts come first: they have fields that the target has no word for
    if POSITIONS not in fields:
        fields = {**usual_fields(config), **fields}
    # As many positions belong to nobody: the reference counts around padding.
    shifted = ((shift, table.config[field]) for field, shift in table.shifts.items() if POSITIONS in spellings(field))
    skips, counted = next(shifted, (0, ""))
    if skips:
        fields[POSITIONS] = ours[counted]
    if own is not None:
        _refuse_others(own)
    if own:
        return Batches(cases=tuple(own), fields=fields)
    fields = text_fields({**silent_fields(config), **fields})
    if POSITIONS not in fields:
        known = positions_of(fields)
        fields |= {POSITIONS: known} if known is not None else {}

    if TYPES not in fields and any(str(rule.sources[0].key) == SEGMENTS for rule in table.inputs):
        taken = parameters_of(reference.module) if reference is not None else {}
        words = fields.get(WORDS)
        fields |= {TYPES: words} if SEGMENTS in taken and words else {}  # as in GPT-2, whose segments are token ids
    special = tuple(dict.fromkeys(special_tokens(checkpoint.home, fields)))

    def maker(ending: int | None = None) -> Maker:
        return Maker(
            fields,
            seed=seed,
            longest=longest,
            special=special,
            never=special_places(fields),
            choices=choices,
            padding_words=not skips,
            padding_kept=not masks,
            full=full,
            padded=padded,
            ending=ending,
        )

    named = {str(rule.sources[0].key) for rule in table.inputs} or set(parameters_of(port) if port is not None else ())
    asked = Asked(alone=True)
    reads = fields.get(WORDS) is not None
    if reference is not None and takes_signals(reference.module, fields):
        asked = _asked(reference, fields, maker if reads else None)
        if asked.refused is not None and (not reads or _main(reference.module) in SIGNALS):
            raise asked.refused
    ending = _ending(reference, fields, asked, maker() if reads else None)
    beside = {name for one in asked.signals for name in one.arguments(1, torch.Generator().manual_seed(0))}
    needed = beside & {str(rule.sources[0].key) for rule in table.inputs}  # the port is never called without these
    if reference is not None and asked.signals and (needed or not asked.alone):
        given = cases_with(asked, maker(ending) if reads else None, seed, reference.module, fields, named)
        made = that_run(reference, list(given))
        kinds = {name for one in asked.signals for name in (*one.extra, *one.zeros)}  # they go with the pictures
        cases = tuple(named_inputs(table.inputs, one, masks={*masks, *kinds}) for one in made)
        return Batches(cases=cases, fields=fields, withheld=withheld(made, cases))
    return replace(_reading(table, fields, reference, asked, maker(ending), seed, named, masks=masks), special=special)


def _ending(
    reference: LiveReference | None, fields: Mapping[str, object], asked: Asked, maker: Maker | None
) -> int | None:
    """The token that ends each row, if the reference looks for it; None else."""
    end = fields.get("eos_token_id")
    if reference is None or maker is None or not isinstance(end, int) or isinstance(end, bool):
        return None
    if not 0 <= end < int(str(fields.get(WORDS))) or end == fields.get("pad_token_id"):
        return None
    alone = [maker.case("", [2 * ENDED] * 3)]
    given = chain(alone, cases_with(asked, maker, 0, reference.module, fields))
    batches = (completed(case.inputs, reference.module, fields) for case in given)
    return end if any(reads_the_end(reference, one, end) for one in batches) else None


def _reading(
    table: Table,
    fields: Mapping[str, object],
    reference: LiveReference | None,
    asked: Asked,
    maker: Maker,
    seed: int,
    named: Collection[str],
    *,
    masks: Collection[str],
) -> Batches:
    """Batches of tokens, and after them those of what else the reference takes."""
    renamed = _lone(reference.module) if reference is not None and not table.inputs else ""

    def whole(case: Case) -> Case:
        if renamed:
            return Case(case.name, {renamed: case.inputs[IDS]})
        if reference is not None and (asked.more or not {"bbox", "inputs_embeds"}.isdisjoint(named)):
            return Case(case.name, completed(case.inputs, reference.module, fields, named))
        return case

    made = [whole(one) for one in maker.first()]
    if reference is not None and asked.signals:
        made += that_run(reference, list(cases_with(asked, maker, seed, reference.module, fields, named)))
    cases = tuple(named_inputs(table.inputs, one, masks=masks) for one in made)
    return Batches(
        cases=cases,
        fields=fields,
        withheld=withheld(made, cases),
        more=lambda name, rows: named_inputs(table.inputs, whole(maker.case(name, rows)), masks=masks),
        longest=maker.longest,
    )


WORDS = "vocab_size"

_ASKED: weakref.WeakKeyDictionary[nn.Module, Asked] = weakref.WeakKeyDictionary()
"""The inputs that each reference accepts: it is asked once, however often batches are made."""


def _asked(reference: LiveReference, fields: Mapping[str, object], maker: Callable[[], Maker] | None) -> Asked:
    if reference.module not in _ASKED:
        _ASKED[reference.module] = ask(reference, fields, maker() if maker is not None else None)
    return _ASKED[reference.module]


def _main(module: nn.Module) -> str:
    return str(getattr(module, "main_input_name", IDS))


def _lone(module: nn.Module) -> str:
    """The name of a forward's argument for tokens, if that is its only one and has an unusual name; else empty."""
    every = list(signature_parameters(module.forward).values())
    required = [one for one in every if one.default is one.empty]
    if len(required) != 1 or required[0].kind is not required[0].POSITIONAL_OR_KEYWORD or IDS in parameters_of(module):
        return ""
    return "0" if required[0] is every[0] and not any(one.kind is one.VAR_KEYWORD for one in every) else ""


def _refuse_others(own: object) -> None:
    """Refuse what is not a list of cases: a path, a tensor, or a batch as it is."""
    if not isinstance(own, list | tuple) or not all(isinstance(one, Case) for one in own):
        message = f"inputs are of type {type(own).__name__}, expected a batch by the names of its arguments, or a list"
        hint = "inputs={'input_ids': ids}, or [Case('what it shows', {'input_ids': ids})] of porting.verification.Case"
        raise VerifyError(Fault(code=Code.NO_INPUTS, message=message, hint=hint))
