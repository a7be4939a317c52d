"""What a model is given that is no words: images, and sound as the energies of bands over time or as it was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from porting.suggesting.subjects.argument_names import ArgumentMapping, argument_mappings, roles
from porting.suggesting.subjects.config_fields import Role, fields_of
from porting.suggesting.subjects.forward_arguments import outputs_of, refusal, sample_batch
from porting.suggesting.subjects.questions import Asker
from porting.trials.modalities import FEATURES, PIXELS, SAMPLES

LENGTH = 3200
"""Samples of a sound; the convolutions of speech models make a frame of 320 at most."""

FRAMES = 2
"""Frames for each position of the encoder: one of its convolutions takes every second."""


def shapes_of(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The shape of one image, [channels, height, width], and of one sound, [bands, frames] or [samples]."""
    inner = config.get("vision_config")
    fields = {**config, **(inner if isinstance(inner, dict) else {})}
    size = fields.get("image_size") or 12
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    channels = next((fields[name] for name in fields_of(Role.CHANNELS, fields)), 3)
    bands, places = config.get("num_mel_bins"), config.get("max_source_positions")
    return {
        PIXELS: (int(str(channels)), int(str(high)), int(str(wide))),
        SAMPLES: (LENGTH,),
        FEATURES: (bands if isinstance(bands, int) else 80, FRAMES * (places if isinstance(places, int) else 10)),
    }


def _turned(theirs: str, ours: str) -> tuple[str, str]:
    """The other layout in which a forward may be given sounds."""
    other = {FEATURES: ("[b m f]", "[b f m]"), SAMPLES: ("[b t]", "[b 1 t]")}.get(theirs)
    return (theirs, ours) if other is None else (f"{theirs} {other[0]}", f"{ours} {other[1]}")


def audio_argument_mapping(
    module: nn.Module,
    available: Sequence[str],
    config: Mapping[str, object],
    vocabulary: int,
    padding: int,
    ask: Asker,
) -> ArgumentMapping:
    """How a forward is to be given sounds, [b bands frames] or [b frames bands] or [b samples], and words.

    Raises:
        VerifyError: no way works; carries what the forward said to the most usual one.
    """
    found, loose = roles(module, available, ask)
    first: Exception | None = None
    usual = next(argument_mappings(found))
    for rules in argument_mappings(found):
        for turned in (False, True):
            laid = tuple(_turned(*rule) if turned else rule for rule in rules)
            way = ArgumentMapping(rules=laid, loose=loose)
            try:
                outputs_of(module, way, sample_batch(way.named, vocabulary, padding, shapes=shapes_of(config)))
            except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
                first = first or error
                continue
            return way
    raise refusal(module, usual, (), first) from first
