"""The inputs of a verification, from a table and a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault
from porting.notation.table import Table
from porting.plan.config import arguments
from porting.tracing.faults import VerifyError
from porting.tracing.running import Side
from porting.verification.inputs import Case, Maker, heard, special_tokens, withheld
from porting.verification.reference import silent_fields, usual_fields
from porting.verification.references import Living, floating, stored

POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """What both sides are given.

    Attributes:
        cases: as the reference takes them.
        fields: the config's fields under their usual names.
        withheld: arguments that neither side is given, since [inputs] does not name them.
        more: makes another batch with rows of these lengths; None where the cases were given.
        longest: no row that is made is longer; 0 where the cases were given.
    """

    cases: tuple[Case, ...]
    fields: Mapping[str, object]
    withheld: tuple[str, ...] = ()
    more: Callable[[str, Sequence[int]], Case] | None = None
    longest: int = 0


TOO_LONG = re.compile(r"out of (range|bounds)|too long|exceed|longer than|max_position|at most \d+", re.IGNORECASE)
"""What models say of a row that is too long for them."""


def that_fits(reference: Living, batch: Batches, make: Callable[[int], Batches]) -> Batches:
    """The batches, with a shorter longest row where the reference has no place for it.

    A family may count its positions from a number that no config tells, and a table may keep all rows of the position
    table; then the config promises positions that do not exist.

    Args:
        reference: the reference.
        batch: what was made.
        make: makes it with another longest row.

    Returns:
        The batches; those that were given where the reference fails for another reason.
    """
    dtype, most, fitting = stored(reference.module), batch.longest, batch
    for shorter in dict.fromkeys(one for one in (most - 1, most - 2, most - 3, most - 4, most // 2) if one > 0):
        longest = [case for case in fitting.cases if _width(case) == fitting.longest][:1]
        arguments = [floating(reference.taken(case).inputs, dtype) for case in longest]
        side = Side(title="the reference", module=reference.module, arguments=arguments, wanted=[])
        try:
            for number in range(len(longest)):
                side.run(number, lambda point, value: None)
        except VerifyError as error:
            if not TOO_LONG.search(str(error)):
                return batch
            fitting = make(shorter)
        else:
            return fitting
    return fitting


def _width(case: Case) -> int:
    return max((one.shape[-1] for one in case.inputs.values() if one.ndim), default=0)


def make_batches(
    table: Table,
    checkpoint: Checkpoint,
    config: Mapping[str, object],
    own: Sequence[Case] | None,
    *,
    seed: int,
    longest: int,
    choices: int | None,
) -> Batches:
    """The cases that were given, or such as show as much as they can.

    Args:
        table: what a family calls the usual fields; its [inputs].
        checkpoint: its config, its special tokens.
        config: the config, the table's defaults filled in.
        own: cases that somebody gave.
        seed, longest, choices: as in :func:`porting.verification.inputs.make_cases`.

    Raises:
        VerifyError: the config does not say what is needed.
    """
    # The table says what a family calls the usual fields: those of the target's config are the usual ones.
    ours = arguments(table, checkpoint.config)
    fields = {**ours, **config}
    if POSITIONS not in fields:
        fields = {**usual_fields(config), **fields}
    # As many positions belong to nobody: the reference counts around padding.
    shifted = ((shift, table.config[field]) for field, shift in table.shifts.items() if POSITIONS in field.split("/"))
    skips, counted = next(shifted, (0, ""))
    if skips:
        fields[POSITIONS] = ours[counted]
    if own:
        _refuse_others(own)
        return Batches(cases=tuple(own), fields=fields)
    fields = {**silent_fields(config), **fields}
    maker = Maker(
        fields,
        seed=seed,
        longest=longest,
        special=special_tokens(checkpoint.path, fields),
        choices=choices,
        padding_words=not skips,
    )
    made = maker.first()
    cases = tuple(heard(table.inputs, one) for one in made)
    return Batches(
        cases=cases,
        fields=fields,
        withheld=withheld(made, cases),
        more=lambda name, rows: heard(table.inputs, maker.case(name, rows)),
        longest=maker.longest,
    )


def _refuse_others(own: Sequence[object]) -> None:
    """Refuse what is no list of cases: a path, or a batch as it is."""
    if isinstance(own, str | Mapping) or not all(isinstance(one, Case) for one in own):
        message = f"inputs are of type {type(own).__name__}, expected a list of cases"
        hint = "from porting.verification import Case; a case is Case('what it shows', {'input_ids': ids})"
        raise VerifyError(Fault(code=Code.NO_INPUTS, message=message, hint=hint))
