"""Batches on which a module and the reference are tried: token ids, masks, pictures, sounds, and what else is taken."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, Message, Option, VerifyError
from porting.suggesting.subjects.argument_names import SOUNDS, VISUAL
from porting.suggesting.subjects.config_fields import Role, config_number, fields_of
from porting.trials.inputs import Maker
from porting.trials.modalities import (
    BOXES,
    DECODER,
    DECODER_IDS,
    EMBEDDED,
    FEATURES,
    IDS,
    PIXELS,
    POSITIONS,
    SAMPLES,
    SEGMENTS,
    VIDEOS,
    Signal,
    completed,
    embedding_width,
    features_of,
    special_places,
    text_fields,
)
from porting.trials.padding import DECODER_MASK, MASK
from porting.verification.accepted_inputs import ask as ask_reference
from porting.verification.references import LiveReference

BATCH, LENGTH, OTHERS = 3, 7, 5
"""Rows of the batch, their usual length, and the length of a decoder's."""

_row_length: ContextVar[int] = ContextVar("row_length", default=LENGTH)


def row_length() -> int:
    """The length of the batch's rows: the usual one, or the only one that a module takes."""
    return _row_length.get()


@contextmanager
def rows_of(length: int) -> Iterator[None]:
    """Within it the batch's rows have this length; :func:`use_rows_of` may change it until the end."""
    before = _row_length.set(length)
    try:
        yield
    finally:
        _row_length.reset(before)


def use_rows_of(length: int) -> None:
    """Give the batch's rows another length, for the rest of a :func:`rows_of`."""
    _row_length.set(length)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Makes batches for one reference.

    Attributes:
        available: the reference's inputs, as far as batches are made of them.
        vocabulary: how many token ids there are.
        padding: the padding token.
        end: the token that ends a row, where a model may look for it.
        shapes: what a row has of pictures, sounds and other numbers: input -> shape without the batch.
        reference, config: of inputs that depend on others, such as the boxes of tokens; None where there are none.
        asked: the shapes were found by asking the reference what it runs with.
        between: a picture or a sound in whose place each row begins with tokens of its own; None where there is none.
        never: tokens that no row of ordinary ones holds, since they stand for something else.
    """

    available: tuple[str, ...] = (IDS, MASK)
    vocabulary: int = 97
    padding: int = 0
    end: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {PIXELS: (3, 12, 12)})
    reference: nn.Module | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    asked: bool = False
    between: Signal | None = None
    never: frozenset[int] = frozenset()

    @property
    def front(self) -> int:
        """How many tokens at the start of a row stand for a picture or a sound."""
        return 0 if self.between is None else len(self.between.block)

    @property
    def length(self) -> int:
        """The length of a row, with the tokens that stand for something else."""
        return self.front + row_length()

    @property
    def width(self) -> int:
        """How many numbers stand for a token where the reference takes embeddings instead; 0 where it takes none."""
        takes = self.reference is not None and EMBEDDED in inspect.signature(self.reference.forward).parameters
        return embedding_width(self.config) if takes and IDS in self.available else 0

    @property
    def offered(self) -> tuple[str, ...]:
        """The reference's inputs, and embeddings where it takes these in the place of token ids."""
        return (*self.available, EMBEDDED) if self.width else self.available

    @classmethod
    def of(cls, reference: nn.Module, config: Mapping[str, object]) -> Sampler:
        """The sampler of batches for a reference, by its signature and its config.

        Raises:
            VerifyError: it takes nothing of which batches are made.
        """
        others = features_of(reference, config)
        usual = _usual(reference, config)
        boxes = (BOXES,) if BOXES in inspect.signature(reference.forward).parameters else ()
        if {*usual} <= {MASK, SEGMENTS, POSITIONS, DECODER_MASK} and not others:
            taken, title = inspect.signature(reference.forward).parameters, f"transformers.{type(reference).__name__}"
            message = f"{title} takes {', '.join(list(taken)[:3])} ..., and no batches are made of these"
            hint = Message("write the table, and verify it with ", Option("inputs"), " of your own")
            raise VerifyError(Fault(code=Code.NO_INPUTS, where=title, message=message, hint=hint))
        text = text_fields(config)
        return cls(
            available=(*usual, *boxes, *others),
            vocabulary=config_number(text, Role.VOCABULARY, 97),
            padding=config_number(text, Role.PADDING),
            end=end_token(config),
            never=special_places(text),
            shapes={**_shapes(config), **others},
            reference=reference,
            config=config,
        )

    def for_config(self, config: Mapping[str, object]) -> Sampler:
        """The same for a reference of other sizes."""
        others = features_of(self.reference, config) if self.reference is not None else {}
        return replace(self, shapes={**_shapes(config), **others}, config=config)

    def of_asked(self) -> Sampler | None:
        """The same with the first picture or sound that the reference runs with; None where it runs with none."""
        if self.reference is None:
            return None
        maker = Maker(text_fields(self.config), seed=0, never=self.never) if IDS in self.available else None
        found = ask_reference(LiveReference(self.reference, "the reference"), self.config, maker).signals
        made = found[0].arguments(BATCH, torch.Generator().manual_seed(0)) if found else {}
        if not made or any(len(one) != BATCH or not one.is_floating_point() for one in made.values()):
            return None
        shapes = {name: tuple(one.shape[1:]) for name, one in made.items()}
        if maker is not None:
            between = found[0] if found[0].token is not None else None
            available = tuple(dict.fromkeys((*self.available, *made)))
            return replace(self, available=available, shapes=shapes, asked=True, between=between)
        decoder = tuple(name for name in self.available if name.startswith(DECODER))
        return replace(self, available=(*made, *decoder), shapes=shapes, asked=True)

    def others(self, ids: Tensor) -> Tensor:
        """Token ids with another ordinary one in the place of each ordinary one."""
        low, high = ordinary_tokens(self.vocabulary)
        count = max(high - low, 1)
        changed = (ids - low + max(count // 2, 1)) % count + low
        for token in self.never:
            changed = torch.where(changed == token, ids, changed)
        front = torch.arange(ids.shape[1]) < self.front
        return torch.where(front, ids, changed)

    def batch(
        self, names: Sequence[str] | None = None, *, seed: int = 0, rows: int = BATCH, ended: bool = False
    ) -> dict[str, Tensor]:
        """A batch without padding: token ids that are not the padding's, in two segments.

        Args:
            names: the inputs that are wanted; by default all but positions.
            rows: how many rows.
            ended: each row ends with the token that ends one, if there is such a token.
        """
        wanted = [one for one in self.available if one != POSITIONS] if names is None else names
        generator = torch.Generator().manual_seed(seed)
        length = row_length()

        def tokens(count: int) -> Tensor:
            drawn = torch.randint(*ordinary_tokens(self.vocabulary), (rows, count), generator=generator)
            for token in sorted({self.padding, *self.never}):
                drawn = torch.where(drawn == token, (drawn + 1) % max(self.vocabulary, 1), drawn)
            if ended and self.end is not None:
                drawn[:, -1] = self.end
            return drawn

        segments = torch.zeros(rows, length, dtype=torch.long)
        segments[:, length // 2 :] = 1
        made = {
            IDS: tokens(length),
            MASK: torch.ones(rows, length, dtype=torch.long),
            SEGMENTS: segments,
            POSITIONS: torch.arange(length).expand(rows, length).clone(),
            DECODER_IDS: tokens(OTHERS),
            DECODER_MASK: torch.ones(rows, OTHERS, dtype=torch.long),
        }
        if self.between is not None:
            made = self.between.placed(made)
            made[POSITIONS] = torch.arange(self.length).expand(rows, -1).clone()
            wanted = [*wanted, *self.between.extra, *self.between.zeros]
        made |= {
            name: torch.randn(rows, *shape, dtype=torch.float64, generator=generator)
            for name, shape in self.shapes.items()
            if name in wanted
        }
        if self.reference is not None and BOXES in wanted:
            made |= completed({IDS: made[IDS]}, self.reference, self.config)
        return {name: value for name, value in made.items() if name in wanted}


def ordinary_tokens(vocabulary: int) -> tuple[int, int]:
    """The token ids from which rows are drawn, ``[low, high)``: not the first three, which are special in many models.

    A vocabulary of fewer is that of a model that takes no words, as the one of 1 in Decision Transformer's config.
    """
    return (3, vocabulary - 2) if vocabulary > FEWEST else (0, max(vocabulary, 1))


FEWEST = 5
"""The size of a vocabulary up to which all of its tokens are drawn."""

FRAMES = 2
"""Frames for each position of the encoder: one of its convolutions takes every second."""

SAMPLED = 3200
"""Samples of a sound; the convolutions of speech models make a frame of 320 at most."""


def _shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The shape of one image, [channels, height, width], and of one sound, [bands, frames] or [samples].

    Of a model of videos it is that of one of these, [frames, channels, height, width].
    """
    inner = config.get("vision_config")
    fields = {**config, **(inner if isinstance(inner, dict) else {})}
    size = next((fields[name] for name in fields_of(Role.IMAGE, fields)), 12)
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    channels = next((fields[name] for name in fields_of(Role.CHANNELS, fields)), 3)
    bands, places = config.get("num_mel_bins"), config.get("max_source_positions")
    frames = config_number(config, Role.FRAMES)
    picture = (*((frames,) if frames > 1 else ()), int(str(channels)), int(str(high)), int(str(wide)))
    return {
        PIXELS: picture,
        VIDEOS: picture,
        SAMPLES: (SAMPLED,),
        FEATURES: (bands if isinstance(bands, int) else 80, FRAMES * (places if isinstance(places, int) else 10)),
    }


def _usual(reference: nn.Module, config: Mapping[str, object]) -> tuple[str, ...]:
    """The inputs of a reference that have usual names."""
    taken = inspect.signature(reference.forward).parameters
    names = [name for name in (IDS, MASK, SEGMENTS, POSITIONS, DECODER_IDS, DECODER_MASK, *VISUAL) if name in taken]
    if config_number(config, Role.SEGMENTS, 0) < 2:
        names = [name for name in names if name != SEGMENTS]
    if IDS not in names and (visual := [one for one in VISUAL if one in names]):
        return (visual[0],)
    names = [name for name in names if name != VIDEOS]
    sound = next((one for one in SOUNDS if one in taken), None)
    if sound is not None and IDS not in names:
        return (sound, DECODER_IDS) if DECODER_IDS in names else (sound,)
    if not config.get("is_encoder_decoder"):
        names = [name for name in names if not name.startswith(DECODER)]
    return tuple(names)


def end_token(config: Mapping[str, object]) -> int | None:
    """The token that ends a row, where a model may look for it; None if there is none of its own."""
    config = text_fields(config)
    end, padding = config.get("eos_token_id"), config.get("pad_token_id")
    return end if isinstance(end, int) and end != padding and end < config_number(config, Role.VOCABULARY, 0) else None
