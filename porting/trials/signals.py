"""Trials of pictures, sounds and series: other rows, values, sizes and lengths than those of the first batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from porting.trials.inputs import Case
from porting.trials.modalities import (
    DECODER,
    DECODER_IDS,
    FEATURES,
    IDS,
    PIXELS,
    POSITIONS,
    SAMPLES,
    SEGMENTS,
    SERIES,
    SIGNALS,
    VISION,
    find,
    special_places,
)
from porting.trials.optional_arguments import PICTURE_AXES, patch_size
from porting.trials.padding import DECODER_MASK, MASK
from porting.trials.scope import Kind
from porting.trials.token_rows import TokenRows
from porting.trials.trial import Model, Trial

MOST_TOKENS = 256
"""The longest row of tokens beside a signal."""

MANY_ROWS, SMALL = 18, 1 << 16
"""Rows of a large batch, which is tried if a row is small: a buffer may hold sixteen."""

ENLARGED = 3
"""How many times higher and wider a picture is tried, if it is still small then."""

PLACES = {SAMPLES: 1, FEATURES: -1, SERIES: 1}
"""The axis along which a sound or a series goes on."""

SINGLE = 0.1
"""The share of a signal's values that is hidden or zero where single values are."""


@dataclass
class SignalRows:
    """Batches of pictures or sounds, with or without tokens beside them."""

    model: Model
    seed: int

    def trials(self) -> Iterator[Trial]:
        """Other batch sizes, and values at the range, beyond it and at zero."""
        yield from self.rows()
        generator = torch.Generator().manual_seed(self.seed)
        base = self.model.base
        signals = [name for name, one in base.items() if one.is_floating_point()]
        most = max((len(one) for one in base.values() if one.ndim), default=1)
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "new values": lambda one: torch.randn(one.shape, dtype=one.dtype, generator=generator),
            "zeros": torch.zeros_like,
            "ones": torch.ones_like,
            "values of the other sign": torch.neg,
            "values that are not negative": torch.abs,
            "values around -2": lambda one: one - 2,
            "values from 0 to 1": lambda one: torch.rand(one.shape, dtype=one.dtype, generator=generator),
            "values from 0 to 255": lambda one: 255 * torch.rand(one.shape, dtype=one.dtype, generator=generator),
            "values ten times as large": lambda one: 10 * one,
            "values a hundred times as small": lambda one: one / 100,
            "zeros in the first half": _half_zero,
            "zeros at single places": lambda one: one * (torch.rand(one.shape, generator=generator) > SINGLE),
            "values around 300": lambda one: one + 300,
        }
        for what, change in changes.items() if signals else ():
            two = rows_of(base, torch.arange(2) % most)
            yield self._trial(Kind.VALUES, what, two | {name: change(two[name]) for name in signals})
        for dim, what in (-1, "last"), (-2, "last but one"):  # as pictures have a black border, and sounds begin alike
            if signals and all(base[name].ndim > -dim for name in signals):
                two = rows_of(base, torch.arange(2) % most)
                halves = {name: _half_the_same(two[name], dim, generator) for name in signals}
                yield self._trial(Kind.VALUES, f"rows that are the same in half of their {what} axis", two | halves)
        yield from self._pictures(most)
        for name in base:
            if name in self.model.optional:
                left = {other: one for other, one in base.items() if other != name}
                yield self._trial(Kind.ARGUMENTS, f"without {name}", left)
        yield from self._lengths(most)
        yield from self._masks(most, generator)
        if DECODER_IDS in base and base[DECODER_IDS].shape[-1] > 1:
            for length in dict.fromkeys((1, 2, base[DECODER_IDS].shape[-1] - 1)):
                cut = {name: one[..., :length] for name, one in base.items() if name.startswith(DECODER)}
                yield self._trial(Kind.LENGTH, f"{length} tokens for the decoder", {**base, **cut})

    def _pictures(self, most: int) -> Iterator[Trial]:
        """Pictures of other sizes, smaller and larger, each also with the flags that a reference may need for them."""
        base, config, further = self.model.base, self.model.config, self.model.further
        pictures = {name: one for name, one in base.items() if name == PIXELS and one.ndim == PICTURE_AXES}
        if not pictures:
            return
        patch = patch_size(config, max(min(pictures[PIXELS].shape[-2:]) // 4, 1))
        sizes: dict[str, Callable[[Tensor], Tensor]] = {
            f"pictures of {_more(high)} in height and {_more(wide)} in width": partial(
                _of_patches, patch=patch, high=high, wide=wide
            )
            for high, wide in PATCHES_MORE
        }
        sizes |= {
            "pictures of half the height": lambda one: one[..., : max(one.shape[-2] // 2, 1), :],
            "pictures of twice the width": lambda one: torch.cat([one, one.flip(-1)], -1),
            "pictures of half the height and twice the width": _flat,
            "pictures of twice the height and half the width": lambda one: _flat(one.mT).mT,
            "pictures one row higher and three columns wider": lambda one: _wider(_wider(one, 3, -1), 1, -2),
            "pictures four rows higher and twelve columns wider": lambda one: _wider(_wider(one, 12, -1), 4, -2),
        }
        if all(one[0].numel() * ENLARGED**2 <= SMALL for one in pictures.values()):
            sizes[f"pictures of {ENLARGED} times the height and width"] = _enlarged
        if find(config, ("patch_size",), VISION) is not None:
            sizes["pictures of one patch"] = lambda one: one[..., :patch, :patch]
        turned = {name: one.contiguous(memory_format=torch.channels_last) for name, one in pictures.items()}
        yield self._trial(Kind.ARGUMENTS, "pictures with their channels last in memory", {**base, **turned})
        others = {name: one for name, one in base.items() if name != "pixel_mask"}
        for what, change in sizes.items():
            changed = {name: change(one) for name, one in pictures.items()}
            given = rows_of(others | changed, torch.arange(2) % most)
            yield self._trial(Kind.SIZES, what, given)
            for flag in further.flags:
                on = next(iter(further.values[flag].values()))
                yield self._trial(Kind.SIZES, f"{what}, with {flag}", {**given, flag: on})

    def _lengths(self, most: int) -> Iterator[Trial]:
        """Sounds and series of other lengths, with the masks that go with them."""
        base = self.model.base
        for name, axis in PLACES.items():
            if name not in base or base[name].ndim < 2:
                continue
            size = base[name].shape[axis]
            lengths = dict.fromkeys((size - 1, size - 3, size // 2 + 1, size - size // 3, size // 4))
            for length in (one for one in lengths if 0 < one < size):
                cut = {
                    other: one.narrow(axis if one.ndim == base[name].ndim else -1, 0, length)
                    for other, one in base.items()
                    if other == name or ("mask" in other and one.ndim > 1 and size in one.shape[1:])
                }
                yield self._trial(
                    Kind.LENGTH, f"{length} of {size} places", rows_of({**base, **cut}, torch.arange(2) % most)
                )

    def _masks(self, most: int, generator: torch.Generator) -> Iterator[Trial]:
        """Masks of sounds and series that hide their ends, their starts, and single values."""
        for name, one in self.model.base.items():
            tokens = name == MASK and IDS in self.model.base  # whose masks are tried with other tokens behind them
            if "mask" not in name or tokens or name.startswith(DECODER) or one.ndim < 2 or one.shape[1] < 4:
                continue
            size = one.shape[1]
            inputs = rows_of(self.model.base, torch.arange(2) % most)
            whole = torch.ones_like(inputs[name])
            places = torch.arange(size).view(1, size, *[1] * (one.ndim - 2))
            shorter = places < size - size // 3
            row = torch.arange(2).view(2, *[1] * (one.ndim - 1))
            kept = {
                "the end hidden": shorter,
                "the start hidden": places >= size // 4,
                "single places hidden": torch.rand(whole.shape, generator=generator) > SINGLE,
                "the end of the second row hidden": shorter | (row == 0),  # as sounds are that were sorted by length
                "the end of the first row hidden": shorter | (row == 1),
            }
            for what, some in kept.items():
                mask = (whole * some).to(one.dtype)
                yield self._trial(Kind.MASK, f"{name}: {what}", {**inputs, name: mask})

    def beside_tokens(self) -> Iterator[Trial]:
        """The trials of tokens, each row with a signal; and of two towers also more or fewer texts than signals.

        Where tokens of a row stand for the signal, each row begins with these.
        """
        base = self.model.base
        names = {IDS: IDS, MASK: MASK, SEGMENTS: SEGMENTS, POSITIONS: POSITIONS}
        if IDS not in base:  # a decoder's tokens, beside what the encoder hears or sees
            names = {IDS: DECODER_IDS, MASK: DECODER_MASK}
        text = {ours: base[theirs] for ours, theirs in names.items() if theirs in base}
        if IDS not in text or text[IDS].is_floating_point():
            return
        if bool(torch.isin(text[IDS], self._places()).any()):
            yield from self._behind_places()
            return
        rest = {name: one for name, one in base.items() if name not in set(names.values())}
        optional = [ours for ours, theirs in names.items() if theirs in self.model.optional]
        model = replace(
            self.model,
            base=text,
            optional=optional,
            internal=self.model.internal and IDS in base,
            longest=self._longest(text[IDS].shape[-1]),
            limit=None,
        )
        most = max((len(one) for one in rest.values() if one.ndim), default=1)
        for trial in TokenRows(model, self.seed).trials():
            rows = len(trial.case.inputs[IDS])
            given = {names[ours]: one for ours, one in trial.case.inputs.items()}
            beside = rows_of(rest, torch.arange(rows) % most)
            yield replace(trial, case=Case(trial.case.name, {**given, **beside}))
        several = rows_of(text, torch.arange(3) % len(text[IDS]))
        for signals in (1, 5) if IDS in base else ():  # a decoder has one sound for each row
            given = {names[ours]: one for ours, one in several.items()} | rows_of(rest, torch.arange(signals) % most)
            yield self._trial(Kind.BATCH, f"3 rows of tokens and {signals} beside them", given)

    def _behind_places(self) -> Iterator[Trial]:
        """The trials of tokens behind those that stand for the signal, with which each row begins.

        What else there is for each token, as which kind it is of, is what the first batch has behind these.
        """
        base = self.model.base
        ids = base[IDS]
        found = torch.isin(ids, self._places())
        front = int(found.any(0).nonzero().max()) + 1
        if not bool((ids[:, :front] == ids[:1, :front]).all()) or front >= ids.shape[1] or POSITIONS in base:
            return
        kinds = {name: one for name, one in base.items() if one.shape == ids.shape and name not in {IDS, MASK}}
        rest = {name: one for name, one in base.items() if name not in {IDS, MASK, *kinds}}
        most = max((len(one) for one in rest.values() if one.ndim), default=1)
        model = replace(
            self.model,
            base={name: base[name][:, front:] for name in (IDS, MASK) if name in base},
            longest=max(self._longest(ids.shape[1]) - front, ids.shape[1] - front),
            limit=None,
        )
        for trial in TokenRows(model, self.seed).trials():
            rows, length = trial.case.inputs[IDS].shape
            first = torch.zeros(rows, dtype=torch.long)
            given = {name: torch.cat([base[name][first, :front], one], 1) for name, one in trial.case.inputs.items()}
            if MASK in given:
                given[MASK][:, :front] = 1
            given |= {name: one[first][:, [*range(front), *[-1] * length]] for name, one in kinds.items()}
            yield replace(trial, case=Case(trial.case.name, {**given, **rows_of(rest, torch.arange(rows) % most)}))

    def _longest(self, width: int) -> int:
        """The longest row of tokens: as many as there are positions, which a decoder counts apart from its sounds'."""
        numbers = [(name, one) for name, one in _numbers(self.model.config) if _POSITIONS.search(name)]
        target = [one for name, one in numbers if "target" in name or name.startswith("text")]
        most = [one for one in target or [one for name, one in numbers if "source" not in name] if one > width]
        return min([*most, MOST_TOKENS]) if most else width

    def _places(self) -> Tensor:
        """The tokens that stand for a signal."""
        return torch.tensor(sorted(special_places(self.model.config)), dtype=torch.long)

    def rows(self) -> Iterator[Trial]:
        """Trials of some rows of the batch, alone and in another order, if all its tensors have the same rows."""
        base = self.model.base
        counts = {len(one) if one.ndim else 0 for one in base.values()}
        if len(counts) != 1 or counts == {0}:
            return
        most = counts.pop()
        sizes = (1, 2, 3, 5, 9, *((MANY_ROWS,) if sum(one[0].numel() for one in base.values()) < SMALL else ()))
        for rows in sizes:
            given = rows_of(base, torch.arange(rows) % most)
            if rows > most:  # no two are equal: a buffer that is too small shows
                given = {name: _apart(one) if name in SIGNALS else one for name, one in given.items()}
            yield self._trial(Kind.BATCH, f"{rows} row{'s' if rows > 1 else ''}", given)
        yield self._trial(Kind.BATCH, "the same row twice", rows_of(base, torch.zeros(2, dtype=torch.long)))
        yield self._trial(Kind.BATCH, "rows in another order", rows_of(base, torch.arange(most).flip(0)))

    def _trial(self, kind: Kind, what: str, inputs: Mapping[str, Tensor]) -> Trial:
        return Trial(case=Case(what, dict(inputs)), kind=kind, what=what)


def _apart(value: Tensor) -> Tensor:
    """A signal whose rows have different scales, from the whole to the half."""
    scales = torch.linspace(1, 0.5, len(value), dtype=value.dtype)
    return value * scales.view(-1, *[1] * (value.ndim - 1))


def _numbers(config: Mapping[str, object], within: str = "") -> Iterator[tuple[str, int]]:
    """The numbers of a config by their names, and of the configs inside it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{within}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{within}{name}", value


_POSITIONS = re.compile(r"(positions|position_embeddings|context_length)$")


def _flat(pictures: Tensor) -> Tensor:
    """Pictures of half the height and twice the width: the lower halves beside the upper ones."""
    height = pictures.shape[-2] // 2 * 2
    return torch.cat(pictures[..., :height, :].chunk(2, -2), -1) if height else pictures


def _wider(pictures: Tensor, more: int, dim: int) -> Tensor:
    """Pictures with as many rows or columns more, which no longer fill whole patches."""
    return torch.cat([pictures, pictures.narrow(dim, 0, min(more, pictures.shape[dim]))], dim)


def _more(patches: int) -> str:
    return f"{abs(patches)} patch{'es' if abs(patches) > 1 else ''} {'more' if patches > 0 else 'less'}"


def _of_patches(pictures: Tensor, patch: int, high: int, wide: int) -> Tensor:
    """Pictures with so many patches more than they have, or less where they have as many."""
    for dim, more in ((-2, high), (-1, wide)):
        size = pictures.shape[dim]
        if more > 0:
            pictures = _wider(pictures, more * patch, dim)
        elif size + more * patch > 0:
            pictures = pictures.narrow(dim, 0, size + more * patch)
    return pictures


PATCHES_MORE = ((-1, -1), (-1, -2), (-2, -1), (1, 2), (2, 1), (1, -1), (-1, 1))
"""Patches in height and in width that pictures are tried with more, or less: smaller, larger, of each orientation."""


def _enlarged(pictures: Tensor) -> Tensor:
    """Pictures several times as high and wide, of which no two columns of tiles are equal."""
    tiles = pictures.repeat(1, 1, ENLARGED, ENLARGED)
    return tiles * torch.linspace(1, 0.5, tiles.shape[-1], dtype=tiles.dtype)


def _half_zero(value: Tensor) -> Tensor:
    """A signal whose first half is zero, as of a picture that is blank on one side or a sound that begins late."""
    half = (value.shape[-1] + 1) // 2
    return torch.cat([torch.zeros_like(value[..., :half]), value[..., half:]], -1)


def _half_the_same(value: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Rows that begin with the first one's numbers along an axis, and go on with others."""
    half = value.shape[dim] // 2
    first = value[:1].narrow(dim, 0, half).expand(len(value), *[-1] * (value.ndim - 1))
    rest = value.narrow(dim, half, value.shape[dim] - half)
    return torch.cat([first, torch.randn(rest.shape, dtype=rest.dtype, generator=generator)], dim)


def sizes_of_pictures(batches: Iterable[Mapping[str, Tensor]]) -> set[tuple[int, int]]:
    """Return the heights and widths of the pictures in some batches."""
    pictures = (one[PIXELS] for one in batches if PIXELS in one)
    return {(one.shape[-2], one.shape[-1]) for one in pictures if one.ndim > 2}


def rows_of(inputs: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    """Select rows of a batch; tensors with other rows are kept as they are."""
    most = max((len(one) for one in inputs.values() if one.ndim), default=1)
    return {name: one[places] if one.ndim and len(one) == most else one for name, one in inputs.items()}


def first_rows(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first two rows of a batch."""
    most = max((len(one) for one in inputs.values() if one.ndim), default=1)
    return rows_of(inputs, torch.arange(min(most, 2)))


def places_of(inputs: Mapping[str, Tensor], config: Mapping[str, object], *, signals: bool) -> int:
    """How many places a model computes for a batch: tokens, and if ``signals`` patches and frames too."""
    whole = [
        one.numel() for name, one in inputs.items() if not one.is_floating_point() and not name.startswith("pixel")
    ]
    if signals:
        patch = patch_size(config)
        pictures = (one for name, one in inputs.items() if name == PIXELS and one.ndim >= PICTURE_AXES)
        whole += [one.shape[:-3].numel() * (one.shape[-2] // patch) * (one.shape[-1] // patch) for one in pictures]
        whole += [
            len(one) * one.shape[axis] // FRAME.get(name, 1)
            for name, axis in PLACES.items()
            if name in inputs and (one := inputs[name]).ndim > 1
        ]
    return max(whole, default=0)


FRAME = {SAMPLES: 320, FEATURES: 2}
"""So many places of a sound are one of an encoder, as in wav2vec 2.0 and Whisper."""
