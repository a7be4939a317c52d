"""One batch that both forwards are run on, and what is known of a model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from porting.trials.derived_inputs import is_right_padded
from porting.trials.inputs import Case
from porting.trials.optional_arguments import Found
from porting.trials.scope import Kind


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One batch that both forwards are run on.

    Attributes:
        case: the batch, as the reference takes it.
        what: in words, ``"left padding"``.
        past: it is longer than the model's own limit, so that an error on both sides is as right as equal numbers.
    """

    case: Case
    kind: Kind
    what: str
    past: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """The facts about the model and its inputs.

    Attributes:
        config: its fields under their usual names.
        base: a batch that both sides take.
        longest: the longest row that is made.
        limit: the model's own limit; None where it has none.
        optional: arguments that both sides may be called without.
        positions: both sides take ``position_ids``.
        segments: both sides take ``token_type_ids``.
        embedded: how wide the embeddings are that both sides take in place of token ids; 0 where one does not.
        internal: the port finds out by itself what is padding, from the token ids.
        special: token ids that have a meaning.
        mask_kinds: the mask may also be given as bool or as float: the port takes the reference's own.
        given: the batches are somebody's own: only rows of them are tried, since nothing says what else is legal.
        numbers: what the port's code compares tensors with.
        likely: token ids that the port's code or the config may treat otherwise than others.
        never: token ids that no row holds, since they stand for something else, as for a part of a picture.
        full: the port takes no other rows than the longest.
        right_padded: the masks whose padding has to be at the end of rows: the port takes their lengths.
        further: optional arguments that the first batch does not have.
    """

    config: Mapping[str, object]
    base: Mapping[str, Tensor]
    longest: int
    limit: int | None = None
    optional: Collection[str] = ()
    positions: bool = False
    segments: bool = False
    embedded: int = 0
    internal: bool = False
    special: Sequence[int] = ()
    mask_kinds: bool = True
    given: bool = False
    numbers: Sequence[int] = ()
    likely: Sequence[int] = ()
    never: Collection[int] = ()
    full: bool = False
    right_padded: Collection[str] = ()
    further: Found = field(default_factory=Found)

    def accepts(self, case: Case) -> bool:
        """Whether the port can be told where the padding of a batch is."""
        return all(is_right_padded(case.inputs[name]) for name in self.right_padded if name in case.inputs)


def field_number(config: Mapping[str, object], name: str, default: int) -> int:
    """A field of a config that is a number of something; ``default`` where it is none."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
