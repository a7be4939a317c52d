"""The inputs of a verification, from a table and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from porting.checkpoint import Checkpoint
from porting.notation.table import Table
from porting.plan.config import arguments
from porting.verification.inputs import Case, heard, make_cases, special_tokens, withheld
from porting.verification.reference import usual_fields

POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """What both sides are given.

    Attributes:
        cases: as the reference takes them.
        fields: the config's fields under their usual names.
        silent: what was left out, in words.
    """

    cases: tuple[Case, ...]
    fields: Mapping[str, object]
    silent: tuple[str, ...] = ()


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
        return Batches(cases=tuple(own), fields=fields)
    made = make_cases(
        fields,
        seed=seed,
        longest=longest,
        special=special_tokens(checkpoint.path, fields),
        choices=choices,
        padding_words=not skips,
    )
    cases = tuple(heard(table.inputs, one) for one in made)
    return Batches(cases=cases, fields=fields, silent=withheld(made, cases))
