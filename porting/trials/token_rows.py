"""Trials of token ids: rows of every length, mask, segment, position and kind of token, and several at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from porting.printable import dtype_name
from porting.trials.combinations import covering, de_bruijn
from porting.trials.inputs import Case, integers
from porting.trials.modalities import DECODER, DECODER_IDS, EMBEDDED, IDS, POSITIONS, SEGMENTS, embedded
from porting.trials.padding import (
    DECODER_MASK,
    EVERY_MASK,
    FEW_TOKENS,
    IN_DECODER,
    MASK,
    NO_PADDING,
    RIGHT_PADDING,
    SAME_COUNT,
    alike,
    every_mask,
    masks,
)
from porting.trials.scope import KEPT, Kind
from porting.trials.trial import Model, Trial, field_number

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 63, 64, 65)
"""Short, odd, prime, and around powers of two."""

EACH, EACH_PADDED = 21, 50
"""Each length below this is tried, in one row and in two of which one is padded in front."""

BATCHES = (1, 2, 3, 9, 17)

EACH_ROWS = 17
"""Each number of rows below this is tried with a mask."""

LENGTH, SHORT = 9, 5
"""Tokens in the rows of a batch that is there for another property than its length."""

COMBINED = (2, 5, 8, 13, 48)
"""Tokens in the rows of the batches that vary several properties at a time."""

GIVEN, RANDOM, LEFT_OUT = "as usual", "random", "left out"
LIKELY = "token ids that your code or the config names"
COUNTING, EQUAL_ROWS, SOURCE = "token ids that count upwards", "rows of the same token ids", "the encoder's tokens"
RUNS, LONGER = "token ids three at a time", "more tokens than in the encoder"
"""Values of such properties."""

MOST_PARTS = 256
"""A part of a batch that is larger is not looked for."""

NAMED_SIZES = 4
"""How many lengths and numbers of rows that the port's code may treat otherwise are tried with other properties."""

WIDTH = 64
"""Tokens in the rows that go through the vocabulary, at most."""

LONG_ROWS = {RIGHT_PADDING: (2, 1), "left padding": (2, 1), "gaps": (3, 0)}
"""The rows of a mask, see :func:`masks`, that hide about half of their places, and those that hide few."""

SQUARES = (2, 3, 4, 5, 8)
"""Batches of as many rows as tokens."""

MOST_ROWS = 32
"""Batches of as many rows as a number of the config says have no more."""

ACROSS = 16
"""Tokens in the rows of a batch of which all tokens but one are kept: with its rows more than a hundred in all."""

WIDEST = 96
"""Tokens in the longest rows of the batches that vary several properties at a time."""

MOST_NAMED = 8
"""How many token ids that the port's code names are tried as the first of a row."""

MOST_LIKELY = 24
"""The number of token ids, of those that may be special, that are tried together with other properties."""

MOST_WORDS = 256
"""How many sequences of such token ids are tried: those of three, or of two, or each by itself."""

POOL = 4096
"""How many token ids are tried at most: the lowest, the highest, those around powers of two, and random ones."""


@dataclass
class TokenRows:
    """Batches of token ids."""

    model: Model
    seed: int
    _generator: torch.Generator = field(init=False)
    _next: int = field(init=False, default=0)
    _own: set[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        config = self.model.config
        self._vocabulary = max(field_number(config, "vocab_size", int(self.model.base[IDS].max()) + 1), 2)
        self._padding = min(field_number(config, "pad_token_id", 0), self._vocabulary - 1)
        self._types = field_number(config, "type_vocab_size", 0)
        self._start = field_number(config, "decoder_start_token_id", self._padding)
        self._choices = self.model.base[IDS].shape[1] if self.model.base[IDS].ndim > 2 else 0  # [b c s]
        self._end = self._ending()
        self._masked = MASK in self.model.base
        self._own = {self._padding, self._end, *self.model.never}
        self._likely = self._ordinary(self.model.likely)[:MOST_LIKELY]
        self._pool = torch.tensor(self._ordinary(range(self._vocabulary)) or [0])

    def _ordinary(self, tokens: Iterable[int]) -> list[int]:
        """The tokens that are in the vocabulary and have no special use, each once."""
        return [one for one in dict.fromkeys(tokens) if 0 <= one < self._vocabulary and one not in self._own]

    def trials(self) -> Iterator[Trial]:
        """All of them, those that differ most from one another first."""
        longest = self.model.longest
        usual, short = min(LENGTH, longest), min(SHORT, longest)
        yield self._trial(Kind.ARGUMENTS, "arguments at their defaults", self._bare(self._ids(2, usual)))
        yield from self._masks(usual)
        yield from self._segments(usual)
        yield from self._positions(usual)
        for rows in BATCHES:
            lengths = [max(short - place % short, 1) for place in range(rows)]
            what = f"{rows} row{'s' if rows > 1 else ''}"
            yield self._trial(Kind.BATCH, what, self._padded(lengths))
            if rows == 3:
                yield self._trial(Kind.BATCH, f"{rows} rows of one token", self._given(self._ids(rows, 1)))
            if self._masked and rows > 2:  # padded in front too: a causal model hides what is behind anyway
                yield self._trial(Kind.BATCH, f"{what} padded in front", self._hidden(_kept_places(lengths).flip(1)))
        for rows in range(1, EACH_ROWS) if self._masked else ():  # a part of a batch may lose its mask
            drawn = torch.randint(0, 2, (rows, short), generator=self._generator)
            drawn[torch.arange(rows), torch.arange(rows) % short] = 1
            yield self._trial(Kind.BATCH, f"{rows} row{'s' if rows > 1 else ''} with gaps", self._hidden(drawn))
        yield from self._many_rows(short)
        yield from self._values(usual)
        yield from self._tokens(usual)
        yield from self._ends(usual)
        yield from self._named()
        yield from self._special(usual)
        yield from self._arguments(usual)
        yield from self._combined(longest)
        yield from self._lengths()

    def _many_rows(self, width: int) -> Iterator[Trial]:
        """A few rows more than the port's code may take at once."""
        for number in self._own_sizes(MOST_PARTS):
            for more in (1, 3):
                lengths = [width, *(self._drawn(1, width) for _ in range(number - 1)), *range(1, more + 1)]
                lengths = [min(one, width) for one in lengths]
                what = f"{more} row{'s' if more > 1 else ''} more than a number in your code"
                yield self._trial(Kind.BATCH, what, self._padded(lengths))
                if self._masked:  # a causal model hides what is behind anyway
                    yield self._trial(
                        Kind.BATCH, f"{what}, padded in front", self._hidden(_kept_places(lengths).flip(1))
                    )

    def _own_sizes(self, most: int) -> list[int]:
        """The numbers of the port's code that may be sizes of its parts, the largest first."""
        return sorted({one for one in self.model.likely if 1 < one <= most}, reverse=True)[:NAMED_SIZES]

    def _ending(self) -> int | None:
        """The token that each row of the base batch ends with, where that is its meaning."""
        end = self.model.config.get("eos_token_id")
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < self._vocabulary:
            return None
        ids = self.model.base[IDS].reshape(-1, self.model.base[IDS].shape[-1])
        return end if bool(((ids == end).sum(1) == 1).all()) else None

    def _trial(self, kind: Kind, what: str, inputs: Mapping[str, Tensor], *, past: bool = False) -> Trial:
        shaped = {name: self._with_choices(one) for name, one in inputs.items()}
        rows, width = inputs[IDS if IDS in inputs else EMBEDDED].shape[:2]
        name = f"{rows} row{'s' if rows > 1 else ''} of {width} token{'s' if width > 1 else ''}, {what}"
        return Trial(case=Case(name, shaped), kind=kind, what=what, past=past)

    def _with_choices(self, value: Tensor) -> Tensor:
        if not self._choices:
            return value
        places = torch.arange(len(value) * self._choices) % len(value)
        return value[places].view(len(value), self._choices, value.shape[-1])

    def _ids(self, rows: int, width: int) -> Tensor:
        """Random tokens, none of them the padding's."""
        drawn = self._pool[torch.randint(0, len(self._pool), (rows, width), generator=self._generator)]
        return self._ended(drawn)

    def _ended(self, ids: Tensor) -> Tensor:
        if self._end is not None:
            ids[:, -1] = self._end
        return ids

    def _bare(self, ids: Tensor) -> dict[str, Tensor]:
        """The required inputs alone."""
        return {name: one for name, one in self._given(ids).items() if name == IDS or name not in self.model.optional}

    def _given(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """The arguments of the base batch for rows of these tokens."""
        rows, width = ids.shape
        made = {IDS: ids}
        base = self.model.base
        if self._masked:
            made[MASK] = torch.ones_like(ids) if mask is None else mask
        if SEGMENTS in base:
            kinds = torch.arange(width)[None] * max(self._types, 1) // width
            made[SEGMENTS] = kinds.expand(rows, -1).clone() * made.get(MASK, torch.ones_like(ids))
        if POSITIONS in base:
            made[POSITIONS] = torch.arange(width).expand(rows, -1).clone()
        for name in self._of_each_token():  # any that the first batch has
            own = base[name].flatten(0, 1)
            made[name] = own[torch.randint(len(own), (rows, width), generator=self._generator)]
        if DECODER_IDS in base:
            length = min(max(3 * width // 4, 1), self.model.longest)
            made |= self._decoded(rows, length)
        return made

    def _decoded(self, rows: int, length: int, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Rows for a decoder, which begin with its start token."""
        ids = self._pool[torch.randint(0, len(self._pool), (rows, length), generator=self._generator)]
        ids[:, 0] = min(self._start, self._vocabulary - 1)
        if DECODER_MASK not in self.model.base:
            return {DECODER_IDS: ids}
        mask = torch.ones_like(ids) if mask is None else mask
        return {DECODER_IDS: torch.where(mask == 0, self._padding, ids), DECODER_MASK: mask}

    def _padded(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Rows of these lengths, padded at their ends if the model takes a mask or finds padding by itself."""
        width = max(lengths)
        if not self._masked and not self.model.internal:
            return self._given(self._ids(len(lengths), width))
        return self._hidden(_kept_places(lengths))

    def _hidden(self, mask: Tensor) -> dict[str, Tensor]:
        """Rows whose masked places hold the padding's token."""
        ids = torch.where(mask == 0, self._padding, self._ids(*mask.shape))
        if self._end is not None:
            last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
            ids[torch.arange(len(ids)), last] = self._end
        return self._given(ids, mask)

    def _masks(self, width: int) -> Iterator[Trial]:
        if not self._masked:
            return
        kinds = dict(masks(width, self._generator))
        for what, mask in kinds.items():
            yield self._trial(Kind.MASK, what, self._hidden(mask))
        short = [self._hidden(every_mask(one)) for one in FEW_TOKENS if one < width]
        yield from (self._trial(Kind.MASK, EVERY_MASK, one) for one in short)
        if width > max(FEW_TOKENS):
            yield self._trial(Kind.MASK, SAME_COUNT, self._hidden(alike(width)))
        for long in dict.fromkeys(min(one, self.model.longest) for one in (WIDTH, self.model.longest)):
            for what, mask in masks(long, self._generator) if long > width else ():
                if what in LONG_ROWS:
                    half, few = LONG_ROWS[what]
                    rows = mask[[half, few, half] if long <= WIDTH else [half, few]]
                    yield self._trial(Kind.MASK, f"{what} in rows of {long}", self._hidden(rows))
        yield from self._of_equal_sizes(width)
        if not self.model.internal:
            yield from self._kept(width, kinds.get(RIGHT_PADDING))

    def _of_equal_sizes(self, width: int) -> Iterator[Trial]:
        """Masks where two sizes are equal by chance, and where nearly all tokens of a batch are kept, or none are.

        As many rows as tokens, or as the config has heads or layers: an axis that is taken for another one shows only
        where sizes differ, and a case for one shape of a mask only where they do not.
        """
        for size in dict.fromkeys(min(one, self.model.longest) for one in SQUARES):
            drawn = torch.randint(0, 2, (size, size), generator=self._generator)
            drawn[torch.arange(size), torch.arange(size).flip(0)] = 1
            yield self._trial(Kind.MASK, "as many rows as tokens", self._hidden(drawn))
        for rows in sorted({one for one in integers(self.model.config) if 1 < one <= MOST_ROWS} - {*BATCHES}):
            drawn = torch.randint(0, 2, (rows, min(SHORT, width)), generator=self._generator)
            drawn[torch.arange(rows), torch.arange(rows) % drawn.shape[1]] = 1
            yield self._trial(Kind.MASK, "as many rows as a number of the config says", self._hidden(drawn))
        across = min(ACROSS, self.model.longest)
        if across > 1:
            one_hidden = torch.ones(max(BATCHES), across, dtype=torch.long)
            one_hidden[len(one_hidden) // 2, across // 2] = 0
            yield self._trial(Kind.MASK, "one hidden token in a large batch", self._hidden(one_hidden))
            one_kept = torch.zeros(3, across, dtype=torch.long)
            one_kept[torch.arange(3), torch.tensor([0, across // 2, across - 1])] = 1
            yield self._trial(Kind.MASK, "rows of one token that is kept", self._hidden(one_kept))

    def _kept(self, width: int, right: Tensor | None) -> Iterator[Trial]:
        """The padding's token where the mask keeps it, other tokens where it does not, and masks of other dtypes.

        Args:
            right: a mask of rows that are padded on the right; None where they are too short.
        """
        if right is not None:
            ids = self._ids(*right.shape)
            for mask in (torch.ones_like(right), right, right.flip(1)):  # the same ids in each
                yield self._trial(Kind.MASK, "masked places that hold ordinary tokens", self._given(ids, mask))
            for mask in (right, right.flip(1)) if self._likely else ():
                hidden = self._given(self._ids(*mask.shape), mask)
                places = torch.arange(int((mask == 0).sum())) % len(self._likely)
                hidden[IDS][mask == 0] = torch.tensor(self._likely)[places]
                kept_too = mask.cumsum(1) == 2  # the second token that is kept, in some of the rows
                hidden[IDS][1::2][kept_too[1::2]] = self._likely[0]
                yield self._trial(Kind.MASK, "masked places that hold special tokens", hidden)
        for long in dict.fromkeys((width, min(WIDTH, self.model.longest))):
            kept = self._ids(3, long)
            kept[0, -3:-2] = kept[1, long // 2] = kept[2, 0] = self._padding
            yield self._trial(Kind.MASK, KEPT, self._given(kept))
            if MASK in self.model.optional:
                given = {name: one for name, one in self._given(kept).items() if name != MASK}
                yield self._trial(Kind.MASK, f"the padding token without {MASK}", given)
        if not self.model.mask_kinds or right is None:
            return
        sides = torch.cat([right[1:3], right[1:3].flip(1)])  # what a causal model hides anyway shows nothing
        for dtype in (torch.bool, torch.float64, torch.uint8, torch.int32):
            given = self._hidden(sides)
            given |= {MASK: given[MASK].to(dtype)}
            yield self._trial(Kind.MASK, f"a mask of {dtype_name(dtype)}", given)

    def _segments(self, width: int) -> Iterator[Trial]:
        if SEGMENTS not in self.model.base:
            yield from self._untyped(width)
        if SEGMENTS not in self.model.base or not self._types:
            return
        third = torch.arange(width) * 3 // width
        last = self._types - 1
        kinds = {
            "all of segment 0": torch.zeros(width, dtype=torch.long),
            f"all of segment {last}": torch.full((width,), last),
            f"segments 0 {last} 0": (third == 1).long() * last,
            f"segments {last} 0": (third == 0).long() * last,
            "random segments": torch.randint(0, self._types, (width,), generator=self._generator),
        }
        ids = self._ids(2, width)  # the same for all: what is kept from a call with these ids would show
        for what, kind in kinds.items():
            given = self._given(ids) | {SEGMENTS: kind.expand(2, -1).clone()}
            yield self._trial(Kind.SEGMENTS, what, given)

    def _untyped(self, width: int) -> Iterator[Trial]:
        """Segments where the config has no number of them: GPT-2 looks them up in the table of its token ids."""
        if not self.model.segments or self._types:
            return
        ids = self._ids(2, width)
        kinds = {"segments of 0": torch.zeros_like(ids), "segments that are token ids": self._ids(2, width)}
        for what, kind in kinds.items():
            yield self._trial(Kind.SEGMENTS, what, self._given(ids) | {SEGMENTS: kind})

    def _positions(self, width: int) -> Iterator[Trial]:
        if not self.model.positions:
            return
        plain = torch.arange(width)
        most = self.model.longest - width
        kinds = {"positions given": plain, "positions backwards": plain.flip(0)}
        if most > 0:
            kinds[f"positions from {min(most, 3)}"] = plain + min(most, 3)
        kinds["positions that repeat"] = plain // 2
        kinds["all positions 0"] = torch.zeros_like(plain)  # a condition may take them for positions not given
        kinds[f"all positions {self.model.longest - 1}"] = torch.full_like(plain, self.model.longest - 1)
        kinds["positions that differ from row to row"] = torch.stack([plain, plain.flip(0)])
        ids = self._ids(2, width)
        yield self._trial(Kind.POSITIONS, "positions of one row", self._given(ids) | {POSITIONS: plain.flip(0)[None]})
        for what, kind in kinds.items():
            given = self._given(ids) | {POSITIONS: kind.expand(2, -1).clone()}
            yield self._trial(Kind.POSITIONS, what, given)
        if self._masked and width > 2:
            mask = dict(masks(width, self._generator))["left padding"]
            counted = (mask.cumsum(1) - 1).clamp_min(0)
            yield self._trial(
                Kind.POSITIONS,
                "left padding and positions from the first token",
                self._hidden(mask) | {POSITIONS: counted},
            )

    def _tokens(self, width: int) -> Iterator[Trial]:
        """Repeated tokens, pairs, and rows that go through the vocabulary."""
        pair = self._pool[torch.randint(0, len(self._pool), (2,), generator=self._generator)]
        constant = self._pool[torch.tensor([0, -1, len(self._pool) // 2])][:, None].expand(-1, width).clone()
        yield self._trial(Kind.TOKENS, "rows of one token", self._given(self._ended(constant)))
        pairs = pair.repeat(width)[None, :width].clone()
        yield self._trial(Kind.TOKENS, "a pair of tokens again and again", self._given(self._ended(pairs)))
        counting = (torch.arange(3)[:, None] + torch.arange(width)) % len(self._pool)
        yield self._trial(Kind.TOKENS, f"rows of {COUNTING}", self._given(self._ended(self._pool[counting])))
        runs = self._ids(3, -(-width // 3)).repeat_interleave(3, 1)[:, :width]
        runs[1] = runs[1].roll(1)
        yield self._trial(Kind.TOKENS, RUNS, self._given(self._ended(runs)))
        half = self._ids(1, -(-width // 2))
        yield self._trial(Kind.TOKENS, "a row twice over", self._given(self._ended(torch.cat([half, half], 1))))
        every = self._every()
        across = min(WIDTH, self.model.longest)
        rows = -(-len(every) // across)
        filled = torch.cat([every, every[: rows * across - len(every)]])
        if len(filled) == rows * across:
            for block in torch.split(filled.view(rows, across), 8):
                yield self._trial(Kind.TOKENS, "rows through the vocabulary", self._given(self._ended(block.clone())))

    def _values(self, width: int) -> Iterator[Trial]:
        """Other values that each token has, such as a box: zero or the largest at some tokens, and at all."""
        for name in self._of_each_token():
            inputs = self._given(self._ids(3, width))
            value, most = inputs[name], self.model.base[name].amax()
            some = torch.zeros(value.shape[:2], dtype=torch.bool)
            some[0], some[1, :: self._drawn(2, 3)], some[2, -1] = True, True, True
            for what, filled in (("zero", 0), ("the largest", int(most))):
                changed = torch.where(some[..., None], filled, value)
                yield self._trial(Kind.VALUES, f"{name} of {what} at some tokens", {**inputs, name: changed})

    def _of_each_token(self) -> list[str]:
        """The arguments of the first batch that have one value for each token, [b s ...], besides the tokens."""
        base = self.model.base
        shape = base[IDS].shape
        known = {SEGMENTS, POSITIONS}
        return [
            name
            for name, one in base.items()
            if name not in known and not name.startswith(DECODER) and one.ndim > 2 and one.shape[:2] == shape
        ]

    def _ends(self, width: int) -> Iterator[Trial]:
        """Rows that end twice, early, and not at all, where each row of the first batch ends once."""
        if self._end is None or width < 4:
            return
        ids = self._ids(4, width)
        ids[0, width // 2] = ids[1, 0] = ids[2, width // 2 :] = self._end
        yield self._trial(Kind.TOKENS, "rows with several ends", self._given(ids))
        early = self._ids(2, width)
        early[:, -1] = self._pool[0]
        early[:, width // 2] = self._end
        yield self._trial(Kind.TOKENS, "rows that go on behind their end", self._given(early))
        none = self._ids(2, width)
        none[:, -1] = self._pool[torch.tensor([0, -1])]
        yield self._trial(Kind.TOKENS, "rows without an end", self._given(none))

    def _named(self) -> Iterator[Trial]:
        """The token ids that the port's code names, each behind each other one, at the start and at the end of rows."""
        named = self._ordinary(self.model.numbers)
        if not named:
            return
        order = max(order for order in (1, 2, 3) if order == 1 or len(named) ** order <= MOST_WORDS)
        width = min(WIDTH, self.model.longest) - (self._end is not None)
        for first in named[:MOST_NAMED]:  # a row begins with it, and the next one ends with it
            ids = torch.tensor(de_bruijn([first, *(one for one in named if one != first)], order))
            if first == named[0]:
                starts = range(0, max(len(ids) - order + 1, 1), max(width - order + 1, 1))
                rows = torch.stack([ids[torch.arange(start, start + width) % len(ids)] for start in starts])
            else:
                rows = torch.stack([ids[:width], ids[:width].flip(0)])
            if self._end is not None:
                rows = torch.cat([rows, torch.full((len(rows), 1), self._end)], 1)
            yield self._trial(Kind.TOKENS, "token ids that your code names", self._given(rows))

    def _special(self, width: int) -> Iterator[Trial]:
        """Tokens that have a meaning, at the start, in the middle and at the end of rows that have no mask."""
        if self.model.internal or (self._masked and MASK not in self.model.optional):
            return
        places = torch.tensor([0, width // 2, width - 1])
        special = [one for one in self.model.special if 0 <= one < self._vocabulary and one != self._padding]
        if special and self._end is None:
            ids = self._ids(3, width)
            ids[torch.arange(3), places] = torch.tensor(special).repeat(3)[:3]
            yield self._trial(Kind.TOKENS, "special tokens at any place, without a mask", self._bare(ids))
        ids = self._ids(4, width)
        ids[torch.arange(3), places] = self._padding
        ids[3, width // 2 :] = self._padding
        yield self._trial(Kind.TOKENS, "the padding token in rows without a mask", self._bare(ids))

    def _combined(self, longest: int) -> Iterator[Trial]:
        """Batches in which each value of a property meets each value of each other property at least once."""
        optional = [name for name in self.model.base if name in self.model.optional and name not in (IDS, MASK)]
        own = (SEGMENTS, POSITIONS, DECODER_MASK, DECODER_IDS)
        widths = (*COMBINED, WIDEST, *(one + 1 for one in self._own_sizes(WIDEST)))
        properties: dict[str, list[str]] = {
            "width": [str(one) for one in dict.fromkeys(min(one, longest) for one in widths)],
            "rows": ["1", "2", "3", "5"],
            MASK: self._mask_names(longest),
            SEGMENTS: [GIVEN, RANDOM] if SEGMENTS in self.model.base and self._types else [],
            POSITIONS: [GIVEN, RANDOM] if self.model.positions else [],
            IDS: [GIVEN, *([LIKELY] if self._likely else []), COUNTING, RUNS, EQUAL_ROWS],
            DECODER_IDS: [GIVEN, SOURCE, LONGER] if DECODER_IDS in self.model.base else [],
            DECODER_MASK: [name for name, _ in masks(longest, self._generator) if DECODER_MASK in self.model.base],
            **{name: [GIVEN] for name in optional if name not in own},
        }
        for name in optional:
            properties[name] = [*properties[name], LEFT_OUT]
        for chosen in covering({name: one for name, one in properties.items() if one}, self._generator):
            yield self._trial(Kind.COMBINED, *self._chosen(chosen))

    def _mask_names(self, width: int) -> list[str]:
        if not self._masked:
            return []
        names = [name for name, _ in masks(width, self._generator)]
        if not self.model.internal:
            names += [KEPT, *([LEFT_OUT] if MASK in self.model.optional else [])]
        return names

    def _chosen(self, chosen: Mapping[str, str]) -> tuple[str, dict[str, Tensor]]:
        """A batch with these values of its properties, and what it is called."""
        rows, width = int(chosen["rows"]), int(chosen["width"])
        kind = chosen.get(MASK, "")
        kinds = dict(masks(width, self._generator))
        if kind and kind not in (*kinds, KEPT, LEFT_OUT):
            kind = NO_PADDING  # rows of two tokens are too short for the others
        if kind in kinds:
            mask = kinds[kind]
            inputs = self._hidden(mask[(torch.arange(rows) + 1) % len(mask)])
        else:
            inputs = self._given(self._ids(rows, width))
            for row in range(rows if kind in (KEPT, LEFT_OUT) else 0):  # in every other row near its end
                inputs[IDS][row, self._drawn(0 if row % 2 else max(width - 4, 0), width - 1)] = self._padding
        said = [kind] if kind and kind != LEFT_OUT else []
        longer = chosen.get(DECODER_IDS) == LONGER
        length = min(width + width // 2 + 1, self.model.longest) if longer else width
        if longer and DECODER_IDS in inputs:
            inputs |= self._decoded(rows, length)
            said.append(f"{LONGER} in the decoder")
        if (decoded := chosen.get(DECODER_MASK)) in kinds:
            mask = dict(masks(length, self._generator)).get(decoded, kinds[decoded])
            inputs |= self._decoded(rows, mask.shape[1], mask[(torch.arange(rows) + 1) % len(mask)])
            said.append(f"{decoded} in the decoder")
        if chosen.get(DECODER_IDS) == SOURCE and inputs.get(DECODER_IDS, inputs[IDS]).shape[0] == rows:
            inputs |= self._source_decoded(inputs)
            said.append(f"{SOURCE} in the decoder")
        said += self._other_ids(chosen.get(IDS, GIVEN), inputs)
        for name, most in ((SEGMENTS, self._types), (POSITIONS, self.model.longest)):
            if chosen.get(name) == RANDOM:
                inputs[name] = torch.randint(0, most, inputs[IDS].shape, generator=self._generator)
                said.append(f"random {name}")
        left = [name for name, one in chosen.items() if one == LEFT_OUT]
        said += [f"without {' and '.join(left)}"] if left else []
        return ", ".join(said) or "other rows of another length", without(left, inputs)

    def _source_decoded(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The encoder's tokens for the decoder; a port that hides padding by itself hides it there too."""
        same = inputs[IDS].clone()
        if DECODER_MASK not in inputs:
            return {
                DECODER_IDS: torch.where(same == self._padding, self._pool[0], same) if self.model.internal else same
            }
        if self.model.internal:
            return {DECODER_IDS: same, DECODER_MASK: (same != self._padding).long()}
        given = inputs[DECODER_MASK]
        return {DECODER_IDS: same, DECODER_MASK: given if given.shape == same.shape else torch.ones_like(same)}

    def _other_ids(self, kind: str, inputs: Mapping[str, Tensor]) -> list[str]:
        """Exchange the token ids that are not padding for those of another kind; what it is called."""
        ids = inputs[IDS]
        free = (inputs.get(MASK, torch.ones_like(ids)) != 0) & (ids != self._padding)
        if self._end is not None:
            free &= ids != self._end
        if kind == LIKELY:
            self._scatter(inputs)
        elif kind == COUNTING:
            counting = torch.arange(ids.shape[1]) + torch.arange(len(ids))[:, None]
            ids[free] = self._pool[counting % len(self._pool)][free]
        elif kind == RUNS:
            width = ids.shape[1]
            ids[free] = self._ids(len(ids), -(-width // 3)).repeat_interleave(3, 1)[:, :width][free]
        elif kind == EQUAL_ROWS:
            free |= torch.full_like(free, not self.model.internal)  # also where the mask hides them
            ids[free] = self._ids(1, ids.shape[1]).expand_as(ids)[free]
        return [] if kind == GIVEN else [kind]

    def _scatter(self, inputs: Mapping[str, Tensor]) -> None:
        """Put the likely token ids at a third of the places that hold ordinary ones, each as often as the others."""
        ids = inputs[IDS]
        free = (inputs.get(MASK, torch.ones_like(ids)) != 0) & (ids != self._padding)
        if self._end is not None:
            free &= ids != self._end
        free &= torch.rand(ids.shape, generator=self._generator) < 1 / 3
        count = int(free.sum())
        places = torch.arange(self._next, self._next + count) % len(self._likely)
        ids[free] = torch.tensor(self._likely)[places]
        self._next += count

    def _drawn(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def _every(self) -> Tensor:
        """The token ids that are tried: all, or those where a mistake is likeliest and random ones."""
        if self._vocabulary <= POOL:
            return self._pool
        powers = [2**power + shift for power in range(1, 40) for shift in (-1, 0, 1) if 2**power < self._vocabulary]
        edges = [*range(128), *range(self._vocabulary - 128, self._vocabulary), *powers, *self.model.special]
        drawn = torch.randperm(self._vocabulary, generator=self._generator)[: POOL // 8].tolist()
        return torch.tensor(self._ordinary([*edges, *drawn]))

    def _arguments(self, width: int) -> Iterator[Trial]:
        """Without each optional argument; those of a decoder."""
        yield from self._embedded(width)
        given = [name for name in self.model.base if name in self.model.optional and name != IDS]
        whole = self._padded([width, max(width - 2, 1), max(width // 2, 1)])
        turned = {name: one.t().contiguous().t() if one.ndim == 2 else one for name, one in whole.items()}  # [b s]
        yield self._trial(Kind.ARGUMENTS, "tensors that lie column by column in memory", turned)
        plain = self._given(self._ids(2, width))
        for name in given:
            left = without([name], plain if name == MASK else whole)
            yield self._trial(Kind.ARGUMENTS, f"without {name}", left)
        if DECODER_MASK in self.model.base:
            short = [(EVERY_MASK, every_mask(count)) for count in FEW_TOKENS if count < width]
            same_count = [(SAME_COUNT, alike(width))] if width > max(FEW_TOKENS) else []
            for what, mask in (*masks(width, self._generator), *short, *same_count):
                inputs = self._given(self._ids(len(mask), width)) | self._decoded(len(mask), mask.shape[1], mask)
                yield self._trial(Kind.MASK, f"{what}{IN_DECODER}", inputs)
        if DECODER_IDS in self.model.base:
            for length in (1, 2, min(self.model.longest, WIDTH)):
                inputs = self._given(self._ids(2, width)) | self._decoded(2, length)
                yield self._trial(Kind.LENGTH, f"{length} tokens for the decoder", inputs)
            if self._masked:  # a mask of either side fits the other then
                front = _kept_places([width, max(width - 2, 1), max(width // 2, 1)]).flip(1)
                inputs = self._hidden(front) | self._decoded(len(front), width)
                yield self._trial(Kind.MASK, "a decoder's row as long as the encoder's, padded in front", inputs)
                if DECODER_MASK in given:
                    left = without([DECODER_MASK], inputs)
                    yield self._trial(Kind.ARGUMENTS, f"the same without {DECODER_MASK}", left)
            yield from self._longer(width, optional=MASK in given)

    def _embedded(self, width: int) -> Iterator[Trial]:
        """Embeddings in place of token ids."""
        if not self.model.embedded:
            return
        lengths = [width, max(width - 2, 1), max(width // 2, 1)]
        sources = {"": self._given(self._ids(2, width)), ", padded at their ends": self._padded(lengths)}
        if self._masked:
            sources[", padded in front"] = self._hidden(_kept_places(lengths).flip(1))
        for how, inputs in sources.items():
            given = {EMBEDDED if name == IDS else name: one for name, one in inputs.items()}
            given[EMBEDDED] = embedded(inputs[IDS], self.model.embedded)
            yield self._trial(Kind.ARGUMENTS, f"embeddings in place of token ids{how}", given)

    def _longer(self, width: int, *, optional: bool) -> Iterator[Trial]:
        """More tokens in the decoder than in the encoder, with each side's masks: the two lengths are easily mixed up.

        Args:
            optional: the encoder's mask may be left out.
        """
        length = min(width + width // 2, self.model.longest)
        if length <= width:
            return
        lengths = [width, max(width - 2, 1), max(width // 2, 1)]
        sources = [self._hidden(kept) for kept in (_kept_places(lengths), _kept_places(lengths).flip(1))]
        for inputs in sources if self._masked else ():
            yield self._trial(Kind.LENGTH, f"{LONGER} in the decoder", inputs | self._decoded(len(lengths), length))
        for what, mask in masks(length, self._generator) if DECODER_MASK in self.model.base else ():
            inputs = self._given(self._ids(len(mask), width)) | self._decoded(len(mask), length, mask)
            given = without([MASK], inputs) if optional else inputs
            yield self._trial(Kind.MASK, f"{what}, {LONGER}{IN_DECODER}", given)

    def _lengths(self) -> Iterator[Trial]:
        """One row of each length, around the numbers of the config and of the port's code, and one past the limit."""
        longest = self.model.longest
        own = [count * number for number in self.model.likely if number > 1 for count in (1, 2)]
        numbers = [near for number in (*integers(self.model.config), *own) for near in (number - 1, number, number + 1)]
        wanted = dict.fromkeys([*LENGTHS, *sorted(numbers), longest - 1, longest, *range(1, EACH)])
        for length in wanted:
            if 1 <= length <= longest:
                inputs = self._given(self._ids(1, length))
                yield self._trial(Kind.LENGTH, f"length {length}", inputs)
        for length in range(3, min(longest + 1, EACH_PADDED)) if self._masked else ():
            two = self._hidden(_kept_places([length, length - 2]).flip(1))
            yield self._trial(Kind.LENGTH, f"length {length}, padded in front", two)
        limit = self.model.limit
        if limit is not None and limit == longest:
            inputs = self._given(self._ids(1, limit + 1))
            yield self._trial(Kind.LENGTH, f"length {limit + 1}, one past the limit", inputs, past=True)


def _kept_places(lengths: Sequence[int]) -> Tensor:
    """A mask ``[b s]`` of rows of these lengths, 1 = attend, that are padded behind."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def without(names: Collection[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arguments without some; without a decoder's tokens there is no mask of them either."""
    left = {*names, DECODER_MASK} if DECODER_IDS in names else {*names}
    return {name: value for name, value in inputs.items() if name not in left}
